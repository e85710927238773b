//! The file of the queue: tables of a redb database.

use super::record::{InvocationId, QueuedRequest, Record, ResultRow, ScheduleRow};
use redb::backends::FileBackend;
use redb::{Database, Durability, ReadableDatabase, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// [`Record`]s as JSON.
const RECORDS: TableDefinition<u128, &[u8]> = TableDefinition::new("records");
/// Requests, see [`QueuedRequest::to_bytes`].
const REQUESTS: TableDefinition<u128, &[u8]> = TableDefinition::new("requests");
/// Idempotency keys: [`KeyRow`]s as JSON.
const KEYS: TableDefinition<&[u8; 32], &[u8]> = TableDefinition::new("keys");
/// Function and schedule, with a slash between them: [`ScheduleRow`]s as JSON.
const SCHEDULES: TableDefinition<&str, &[u8]> = TableDefinition::new("schedules");
/// What became of invocations: [`ResultRow`]s as JSON.
const RESULTS: TableDefinition<u128, &[u8]> = TableDefinition::new("results");
/// The version of all of them, at `format`.
const FORMAT: TableDefinition<&str, u64> = TableDefinition::new("format");
const VERSION: u64 = 1;
/// Bytes of the file that are kept in memory.
const CACHE: usize = 16 << 20;
/// Bytes of redb's header, and of its magic number, with which it begins.
const HEADER: u64 = 320;
const MAGIC: usize = 9;

/// Hash of a function's name, of who has sent a request to it, and of an idempotency key.
pub(super) type Key = [u8; 32];

/// What is known of an idempotency key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub(super) struct KeyRow {
    pub function: String,
    /// The domain of its tenant.
    #[serde(default)]
    pub domain: Option<String>,
    pub id: InvocationId,
    /// When it is forgotten, in milliseconds since 1970.
    pub expires_ms: u64,
    /// [`QueuedRequest::digest`] of its request.
    #[serde(default)]
    pub request: u128,
}

/// What changes in the file.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// An invocation comes.
    Add(InvocationId, Box<Record>, Vec<u8>),
    /// What is known of it changes.
    Update(InvocationId, Box<Record>),
    Remove(InvocationId),
    AddKey(Key, KeyRow),
    RemoveKey(Key),
    AddResult(InvocationId, ResultRow),
    RemoveResult(InvocationId),
    SetSchedule(String, ScheduleRow),
    RemoveSchedule(String),
}

/// All that lies in the file, without the requests.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub records: Vec<(InvocationId, Record)>,
    pub keys: Vec<(Key, KeyRow)>,
    pub schedules: Vec<(String, ScheduleRow)>,
    pub results: Vec<(InvocationId, ResultRow)>,
}

/// Why the file cannot be used: one sentence.
pub(super) type FileError = String;

/// Why there is no request of an invocation: one sentence.
#[derive(Debug)]
pub(super) enum NoRequest {
    /// It is not what was written, and never will be.
    Damaged(FileError),
    /// The host has not read it. The file has to be opened anew.
    Unread(FileError),
}

/// The file, open.
pub(super) struct QueueFile {
    path: PathBuf,
    database: Database,
    /// So many requests are not read.
    #[cfg(test)]
    pub unreadable: std::cell::Cell<u32>,
}

impl QueueFile {
    /// Opens or makes the file, and reads it.
    pub fn open(path: &Path) -> Result<(Self, Content), FileError> {
        let damaged = |error: redb::Error| {
            format!(
                "{} cannot be used ({error}); make room on its disk, or move it away and run `thaw serve` anew",
                path.display()
            )
        };
        let file = match was_begun(path) {
            Ok(false) => Self::make(path),
            // An error comes again, with its reason.
            Ok(true) | Err(_) => Self::at(path),
        };
        let file = file.map_err(damaged)?;
        let content = file.read_all()?;
        Ok((file, content))
    }

    /// Makes the file under another name first: a full disk leaves none that cannot be opened later.
    fn make(path: &Path) -> Result<Self, redb::Error> {
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        let new = PathBuf::from(new);
        let made = remove_if_there(&new).and_then(|()| create_private(&new));
        let made = made.map_err(redb::Error::Io).and_then(|file| Self::of(file, path));
        let renamed = made.and_then(|file| {
            fs::rename(&new, path)?;
            File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
            Ok(file)
        });
        if renamed.is_err() {
            // The next attempt removes it otherwise.
            let _ = fs::remove_file(&new);
        }
        renamed
    }

    /// Opens the file that is there.
    fn at(path: &Path) -> Result<Self, redb::Error> {
        Self::of(OpenOptions::new().read(true).write(true).open(path)?, path)
    }

    fn of(file: File, path: &Path) -> Result<Self, redb::Error> {
        let mut builder = redb::Builder::new();
        builder.set_cache_size(CACHE);
        let database = builder.create_with_backend(FileBackend::new(file)?)?;
        let file = Self {
            path: path.to_owned(),
            database,
            #[cfg(test)]
            unreadable: Default::default(),
        };
        file.begin()?;
        Ok(file)
    }

    /// Makes the tables that are missing.
    fn begin(&self) -> Result<(), redb::Error> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        {
            transaction.open_table(RECORDS)?;
            transaction.open_table(REQUESTS)?;
            transaction.open_table(KEYS)?;
            transaction.open_table(SCHEDULES)?;
            transaction.open_table(RESULTS)?;
            let mut format = transaction.open_table(FORMAT)?;
            let version = format.get("format")?.map(|version| version.value());
            match version {
                None => drop(format.insert("format", VERSION)?),
                Some(VERSION) => {}
                Some(other) => {
                    let why = format!("it has format {other}, which this Thaw does not know");
                    return Err(redb::Error::Corrupted(why));
                }
            }
        }
        Ok(transaction.commit()?)
    }

    fn read_all(&self) -> Result<Content, FileError> {
        let read = || -> Result<Content, redb::Error> {
            let transaction = self.database.begin_read()?;
            let mut content = Content::default();
            for row in transaction.open_table(RECORDS)?.iter()? {
                let (id, record) = row?;
                content.records.push((InvocationId(id.value()), parse(record.value())?));
            }
            for row in transaction.open_table(KEYS)?.iter()? {
                let (key, row) = row?;
                content.keys.push((*key.value(), parse(row.value())?));
            }
            for row in transaction.open_table(SCHEDULES)?.iter()? {
                let (name, row) = row?;
                content.schedules.push((name.value().to_owned(), parse(row.value())?));
            }
            for row in transaction.open_table(RESULTS)?.iter()? {
                let (id, row) = row?;
                content.results.push((InvocationId(id.value()), parse(row.value())?));
            }
            Ok(content)
        };
        read().map_err(|error| {
            format!(
                "{} is damaged ({error}); move it away and run `thaw serve` anew",
                self.path.display()
            )
        })
    }

    /// The request of an invocation.
    pub fn request(&self, id: InvocationId) -> Result<QueuedRequest, NoRequest> {
        let read = || -> Result<Option<QueuedRequest>, redb::Error> {
            #[cfg(test)]
            if let Some(left) = self.unreadable.get().checked_sub(1) {
                self.unreadable.set(left);
                return Err(redb::Error::Io(io::Error::from_raw_os_error(libc::EIO)));
            }
            let table = self.database.begin_read()?.open_table(REQUESTS)?;
            let bytes = table.get(id.0)?;
            Ok(bytes.and_then(|bytes| QueuedRequest::from_bytes(bytes.value())))
        };
        match read() {
            Ok(Some(request)) => Ok(request),
            Ok(None) => {
                let path = self.path.display();
                Err(NoRequest::Damaged(format!("{path}: the request of {id} is damaged")))
            }
            Err(error) => {
                let why = format!("{}: {error}", self.path.display());
                Err(match error {
                    redb::Error::Corrupted(_) => NoRequest::Damaged(why),
                    _ => NoRequest::Unread(why),
                })
            }
        }
    }

    /// Makes all changes or none; they are on the disk when this returns.
    pub fn apply(&self, changes: &[Change]) -> Result<(), FileError> {
        let apply = || -> Result<(), redb::Error> {
            let mut transaction = self.database.begin_write()?;
            transaction.set_durability(Durability::Immediate)?;
            {
                let mut records = transaction.open_table(RECORDS)?;
                let mut requests = transaction.open_table(REQUESTS)?;
                let mut keys = transaction.open_table(KEYS)?;
                let mut schedules = transaction.open_table(SCHEDULES)?;
                let mut results = transaction.open_table(RESULTS)?;
                for change in changes {
                    match change {
                        Change::Add(id, record, request) => {
                            records.insert(id.0, &*json(record))?;
                            requests.insert(id.0, &**request)?;
                        }
                        Change::Update(id, record) => drop(records.insert(id.0, &*json(record))?),
                        Change::Remove(id) => {
                            records.remove(id.0)?;
                            requests.remove(id.0)?;
                        }
                        Change::AddKey(key, row) => drop(keys.insert(key, &*json(row))?),
                        Change::RemoveKey(key) => drop(keys.remove(key)?),
                        Change::AddResult(id, row) => drop(results.insert(id.0, &*json(row))?),
                        Change::RemoveResult(id) => drop(results.remove(id.0)?),
                        Change::SetSchedule(name, row) => {
                            schedules.insert(&**name, &*json(row))?;
                        }
                        Change::RemoveSchedule(name) => drop(schedules.remove(&**name)?),
                    }
                }
            }
            Ok(transaction.commit()?)
        };
        apply().map_err(|error| {
            format!("{} cannot be written ({error}); make room on its disk", self.path.display())
        })
    }
}

/// Whether a database was ever begun in the file. redb writes the first bytes of its header last, so
/// that a file without them holds nothing but zeros behind the header. One with anything else there
/// may be a queue that is damaged, and counts as begun.
fn was_begun(path: &Path) -> io::Result<bool> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        file => io::BufReader::new(file?),
    };
    let mut header = Vec::new();
    file.by_ref().take(HEADER).read_to_end(&mut header)?;
    if header.iter().take(MAGIC).any(|byte| *byte != 0) {
        return Ok(true);
    }
    loop {
        let rest = file.fill_buf()?;
        if rest.is_empty() {
            return Ok(false);
        }
        if rest.iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
        let length = rest.len();
        file.consume(length);
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Requests may hold what clients keep secret: nobody else reads the file.
fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("records are JSON")
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, redb::Error> {
    serde_json::from_slice(bytes).map_err(|error| redb::Error::Corrupted(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("queue.redb");
        (directory, path)
    }

    #[test]
    fn a_file_that_was_never_begun_counts_as_none() {
        let (_directory, path) = queue();
        for length in [0, 4, 73728] {
            let file = File::create(&path).unwrap();
            file.set_len(length).unwrap();
            QueueFile::open(&path).map(drop).unwrap();
            assert!(was_begun(&path).unwrap());
            QueueFile::open(&path).map(drop).unwrap();
        }
        // redb stopped between the header and its magic number.
        let mut bytes = fs::read(&path).unwrap();
        bytes[..MAGIC].fill(0);
        bytes[HEADER as usize..].fill(0);
        fs::write(&path, &bytes).unwrap();
        QueueFile::open(&path).map(drop).unwrap();
    }

    #[test]
    fn a_damaged_queue_stays_as_it_is() {
        let (_directory, path) = queue();
        QueueFile::open(&path).map(drop).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[..MAGIC].fill(0);
        fs::write(&path, &bytes).unwrap();
        assert!(QueueFile::open(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }

    #[test]
    fn a_file_that_cannot_be_made_leaves_none() {
        let (directory, path) = queue();
        let new = directory.path().join("queue.redb.new");
        fs::create_dir(&new).unwrap();
        assert!(QueueFile::open(&path).is_err());
        assert!(!path.exists());
        fs::remove_dir(&new).unwrap();
        fs::write(&new, "half").unwrap();
        QueueFile::open(&path).map(drop).unwrap();
        assert!(!new.exists());
    }
}
