//! The file of the queue: tables of a redb database.

use super::record::{InvocationId, QueuedRequest, Record, ResultRow, ScheduleRow};
use redb::backends::FileBackend;
use redb::{Database, Durability, ReadableDatabase, ReadableTable, TableDefinition};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{File, OpenOptions};
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

/// The file, open.
pub(super) struct QueueFile {
    path: PathBuf,
    database: Database,
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
        let file = open_private(path).map_err(|error| damaged(redb::Error::Io(error)))?;
        let mut builder = redb::Builder::new();
        builder.set_cache_size(CACHE);
        let backend = FileBackend::new(file).map_err(|error| damaged(error.into()))?;
        let database = builder.create_with_backend(backend);
        let database = database.map_err(|error| damaged(error.into()))?;
        let file = Self { path: path.to_owned(), database };
        file.begin().map_err(damaged)?;
        let content = file.read_all()?;
        Ok((file, content))
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
    pub fn request(&self, id: InvocationId) -> Result<QueuedRequest, FileError> {
        let read = || -> Result<Option<QueuedRequest>, redb::Error> {
            let table = self.database.begin_read()?.open_table(REQUESTS)?;
            let bytes = table.get(id.0)?;
            Ok(bytes.and_then(|bytes| QueuedRequest::from_bytes(bytes.value())))
        };
        match read() {
            Ok(Some(request)) => Ok(request),
            Ok(None) => Err(format!("{}: the request of {id} is damaged", self.path.display())),
            Err(error) => Err(format!("{}: {error}", self.path.display())),
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

/// Requests may hold what clients keep secret: nobody else reads the file.
fn open_private(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("records are JSON")
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, redb::Error> {
    serde_json::from_slice(bytes).map_err(|error| redb::Error::Corrupted(error.to_string()))
}
