//! Volumes: directories that functions write to, and that outlive their copies.
//!
//! ```text
//! $THAW_HOME/volumes/NAME/files         what functions see, or a link of root's to it
//! $THAW_HOME/volumes/NAME/volume.json   its size, and the functions that may use it
//! $THAW_HOME/volumes/NAME/usage         the bytes that it holds, a u64
//! $THAW_HOME/volumes/NAME/users         locked, shared, by every process that uses it
//! $THAW_HOME/volumes/NAME/lengths/      in which sandboxes say how long files are that they write
//! $THAW_HOME/volumes/NAME/copying       locked while a snapshot is made or put back
//! $THAW_HOME/volumes/NAME/snapshots/    copies of its files, by label
//! $THAW_HOME/volumes/NAME/numbers/      inode numbers of files in snapshots of checkpoints, by label
//! $THAW_HOME/volumes/NAME/inodes-INODE  those that files are shown under which were put back
//! $THAW_HOME/volumes/.put-back          volumes whose files are being put back
//! $THAW_HOME/volumes/.gone-NAME         what is left of one that is being removed
//! ```
//!
//! The operator says which functions may use a volume: the author of a function can only name it.

mod at_rest;
mod error;
mod host;
mod put_back;
mod quota;
mod snapshots;
mod using;

pub use at_rest::VolumeSnapshot;
pub use at_rest::{Purpose, SnapshotsAtRest};
pub use error::VolumeError;
use error::failed;
pub(crate) use host::host_directories;
pub use put_back::PutBack;
use snapshots::clear;
pub use snapshots::{SNAPSHOTS_MAX, Snapshot};
pub use using::{MayUse, OpenedVolume, expect_left, go_on_with_left};

use host::Linkable;

use crate::config::{ByteSize, DomainName, FunctionName};
use crate::home::Home;
use rustix::fs::{FlockOperation, flock};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use thaw_sandbox::cut_to_lengths;
use thaw_store::Name;

/// Most volumes of a state directory.
pub const VOLUMES_OF_HOME_MAX: usize = 4096;
/// What names of volumes begin with that clients of E2B's API have made; they are no tenant's own.
pub const CLIENTS_PREFIX: &str = "e2b-";
/// What names of directories begin with whose volumes are being removed; no volume's name begins so.
const GONE: &str = ".gone-";
/// Most functions that may use one volume.
const FUNCTIONS_MAX: usize = 256;
/// Files of a volume that hold no data of anybody's.
const OWN_FILES: [&str; 4] = ["usage", "users", "copying", NEW_NOTE];
/// The note while it is written.
const NEW_NOTE: &str = ".volume.json.new";
/// Bytes of its note.
const NOTE_MAX: u64 = 1 << 16;

/// The volumes of a state directory.
#[derive(Clone, Debug)]
pub struct VolumeStore {
    home: Home,
}

/// What is noted of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    /// Bytes that it may hold.
    size: ByteSize,
    /// The functions that may use it.
    functions: Vec<FunctionName>,
    /// The domain of the tenant for which it counts; none: functions without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    domain: Option<DomainName>,
    /// Tells it from an earlier volume of its name; older ones have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    identity: Option<String>,
}

impl Note {
    /// That of a new volume.
    fn new(
        size: ByteSize,
        functions: &[FunctionName],
        domain: Option<&DomainName>,
    ) -> Result<Self, VolumeError> {
        let identity = new_identity().map_err(failed("read", Path::new("/dev/random")))?;
        let (functions, domain) = (functions.to_vec(), domain.cloned());
        Ok(Self { size, functions, domain, identity: Some(identity) })
    }
}

/// A volume, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VolumeInfo {
    /// Its name.
    pub name: String,
    /// Bytes that it may hold.
    pub size: u64,
    /// Bytes that it holds, as they count.
    pub used: u64,
    /// The functions that may use it.
    pub functions: Vec<FunctionName>,
    /// The domain of the tenant for which it counts.
    pub domain: Option<DomainName>,
    /// Whether a process uses it now.
    pub in_use: bool,
    /// Where its files lie.
    pub path: PathBuf,
    /// Whether that is a directory of the host, which stays when the volume is removed.
    pub is_host: bool,
    /// Why no function can use it, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Its snapshots, by label.
    pub snapshots: Vec<Snapshot>,
}

impl VolumeStore {
    /// That of a state directory.
    pub fn of(home: Home) -> Self {
        Self { home }
    }

    /// The state directory.
    pub fn home(&self) -> &Home {
        &self.home
    }

    fn all(&self) -> PathBuf {
        self.home.root().join("volumes")
    }

    fn directory(&self, name: &Name) -> PathBuf {
        self.all().join(name.as_str())
    }

    /// Makes a volume of `size` bytes for some functions, which counts for the tenant of `domain`.
    ///
    /// # Errors
    /// There is one of that name, there are too many, the tenant would have too much, or the host
    /// refuses.
    pub fn create(
        &self,
        name: &Name,
        size: ByteSize,
        functions: &[FunctionName],
        domain: Option<&DomainName>,
    ) -> Result<(), VolumeError> {
        self.make(name, &Note::new(size, functions, domain)?, None)
    }

    fn make(&self, name: &Name, note: &Note, host: Option<&Path>) -> Result<(), VolumeError> {
        if note.functions.len() > FUNCTIONS_MAX {
            return Err(VolumeError::TooMany(format!("{FUNCTIONS_MAX} functions of a volume")));
        }
        let acting = self.home.act()?;
        let all = self.all();
        let mut private = DirBuilder::new();
        private.mode(0o700).recursive(true);
        private.create(&all).map_err(failed("make", &all))?;
        let counting = self.counting()?;
        let others = fs::read_dir(&all).map_err(failed("read", &all))?.count();
        if others >= VOLUMES_OF_HOME_MAX {
            return Err(VolumeError::TooMany(format!("{VOLUMES_OF_HOME_MAX} volumes")));
        }
        let directory = self.directory(name);
        self.clear_half_made(name);
        if directory.exists() {
            return Err(VolumeError::Exists(name.clone()));
        }
        self.check_quota(note.domain.as_ref(), note.size)?;
        match DirBuilder::new().mode(0o700).create(&directory) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(VolumeError::Exists(name.clone()));
            }
            made => made.map_err(failed("make", &directory))?,
        }
        drop(acting);
        let filled = self.fill(name, note, host);
        if filled.is_err() {
            let _acting = self.home.act()?;
            self.clear_half_made(name);
        }
        drop(counting);
        filled
    }

    /// Makes what lies in the directory of a new volume.
    fn fill(&self, name: &Name, note: &Note, host: Option<&Path>) -> Result<(), VolumeError> {
        let directory = self.directory(name);
        let acting = self.home.act()?;
        match host {
            None => {
                let made = DirBuilder::new().mode(0o700).create(directory.join("files"));
                made.map_err(failed("make", &directory))?;
            }
            Some(host) => {
                let linkable = Linkable::open(&directory).map_err(failed("open", &directory))?;
                // The link is root's own.
                drop(acting);
                linkable.link(host).map_err(failed("link", &directory))?;
            }
        }
        let _acting = self.home.act()?;
        for file in ["usage", "users"] {
            open_own(&directory.join(file)).map_err(failed("make", &directory))?;
        }
        // Last: a volume without a note is none.
        self.note(name, note)
    }

    /// Removes what a volume consists of that was never made to the end: it has no note and no files.
    /// Everything else stays, and so does a volume that somebody is removing.
    fn clear_half_made(&self, name: &Name) {
        let directory = self.directory(name);
        let is_half_made = || -> io::Result<bool> {
            for entry in fs::read_dir(&directory)? {
                let entry = entry?;
                let known = match entry.file_name().to_str() {
                    Some("files") if entry.file_type()?.is_dir() => {
                        fs::read_dir(entry.path())?.next().is_none()
                    }
                    Some("files") => entry.file_type()?.is_symlink(),
                    Some(file) => OWN_FILES.contains(&file),
                    None => false,
                };
                if !known {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        if !is_half_made().unwrap_or(false) {
            return;
        }
        let Ok(_alone) = self.alone(name) else { return };
        let files = directory.join("files");
        // `create` finds what cannot be removed.
        let _ = fs::remove_dir(&files).or_else(|_| fs::remove_file(&files));
        for file in OWN_FILES {
            let _ = fs::remove_file(directory.join(file));
        }
        let _ = fs::remove_dir(&directory);
    }

    fn note(&self, name: &Name, note: &Note) -> Result<(), VolumeError> {
        let directory = self.directory(name);
        let (path, new) = (directory.join("volume.json"), directory.join(NEW_NOTE));
        let text = serde_json::to_vec_pretty(note).map_err(io::Error::from);
        let written = text.and_then(|text| {
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&new)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        });
        written.map_err(failed("write", &path))
    }

    fn read_note(&self, name: &Name) -> Result<Note, VolumeError> {
        let path = self.directory(name).join("volume.json");
        let read = || -> io::Result<Note> {
            let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&path)?;
            Ok(serde_json::from_reader(io::Read::take(file, NOTE_MAX))?)
        };
        match read() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(VolumeError::Missing(name.clone()))
            }
            note => note.map_err(failed("read", &path)),
        }
    }

    /// Lets a function use a volume.
    ///
    /// # Errors
    /// There is none, too many functions may use it, or the host refuses.
    pub fn allow(&self, name: &Name, function: &FunctionName) -> Result<(), VolumeError> {
        let _acting = self.home.act()?;
        let mut note = self.read_note(name)?;
        if note.functions.contains(function) {
            return Ok(());
        }
        if note.functions.len() >= FUNCTIONS_MAX {
            return Err(VolumeError::TooMany(format!("{FUNCTIONS_MAX} functions of a volume")));
        }
        note.functions.push(function.clone());
        self.note(name, &note)
    }

    /// A volume.
    ///
    /// # Errors
    /// There is none, or the host refuses.
    pub fn show(&self, name: &Name) -> Result<VolumeInfo, VolumeError> {
        let _acting = self.home.act()?;
        let note = self.read_note(name)?;
        let directory = self.directory(name);
        let look = || -> io::Result<(u64, bool)> {
            let used = fs::read(directory.join("usage"))?;
            let used = used.try_into().map(u64::from_ne_bytes).unwrap_or_default();
            let users = open_own(&directory.join("users"))?;
            let alone = flock(&users, FlockOperation::NonBlockingLockExclusive);
            Ok((used, alone.is_err()))
        };
        let (used, in_use) = look().map_err(failed("read", &directory))?;
        let (path, is_host, problem) = match self.host(name) {
            Ok(Some(host)) => (host, true, None),
            Ok(None) => (directory.join("files"), false, None),
            Err(VolumeError::Host { path, reason }) => (path, true, Some(reason)),
            Err(error) => return Err(error),
        };
        let mut snapshots = self.snapshots(name)?;
        for snapshot in &mut snapshots {
            let label = Name::new(&snapshot.label).ok();
            let needed_by = label.and_then(|label| self.needed_by(name, &label));
            snapshot.checkpoint = needed_by.map(|checkpoint| checkpoint.to_string());
        }
        Ok(VolumeInfo {
            name: name.to_string(),
            size: note.size.bytes(),
            used,
            functions: note.functions,
            domain: note.domain,
            in_use,
            path,
            is_host,
            problem,
            snapshots,
        })
    }

    /// Where the files of a volume lie.
    fn files(&self, name: &Name) -> Result<PathBuf, VolumeError> {
        Ok(self.host(name)?.unwrap_or_else(|| self.directory(name).join("files")))
    }

    /// Keeps everybody else from a volume until the result is dropped.
    fn alone(&self, name: &Name) -> Result<File, VolumeError> {
        let directory = self.directory(name);
        let users = open_own(&directory.join("users")).map_err(failed("open", &directory))?;
        flock(&users, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| VolumeError::InUse(name.clone()))?;
        Ok(users)
    }

    /// Has the files of a volume, which nobody else has, be as long as sandboxes have said whose
    /// process was killed.
    fn cut_files(&self, name: &Name) -> Result<(), VolumeError> {
        let (files, directory) = (self.directory(name).join("files"), self.directory(name));
        let cut = cut_to_lengths(&files, &directory.join("lengths"));
        cut.map_err(failed("cut files of", &directory))
    }

    /// All volumes, by name.
    ///
    /// # Errors
    /// The host refuses.
    pub fn list(&self) -> Result<Vec<VolumeInfo>, VolumeError> {
        let names = self.names()?;
        let shown = names.iter().map(|name| self.show(name));
        // One that is half made is none.
        shown.filter(|shown| !matches!(shown, Err(VolumeError::Missing(_)))).collect()
    }

    /// Removes a volume with all its files and snapshots. A directory of the host stays as it is.
    ///
    /// # Errors
    /// There is none, somebody uses it, or the host refuses.
    pub fn remove(&self, name: &Name) -> Result<(), VolumeError> {
        let _acting = self.home.act()?;
        let directory = self.directory(name);
        self.read_note(name)?;
        let _alone = self.alone(name)?;
        // Nobody looks for its files again when it is gone.
        if let Err(error) = self.undo_unfinished() {
            tracing::warn!("not all volumes are as they were before a restore: {error}");
        }
        // What is removed in part is no volume.
        let gone = self.all().join(format!("{GONE}{name}"));
        clear(&gone)?;
        fs::rename(&directory, &gone).map_err(failed("remove", &directory))?;
        clear(&gone)
    }

    /// Removes what is left of volumes whose removal was cut short.
    fn sweep_gone(&self) -> Result<(), VolumeError> {
        let _acting = self.home.act()?;
        let all = self.all();
        let entries = match fs::read_dir(&all) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(failed("read", &all))?,
        };
        let mut swept = Ok(());
        for entry in entries.flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(GONE.as_bytes()) {
                swept = swept.and(clear(&entry.path()));
            }
        }
        swept
    }
}

/// What tells a volume from all others.
fn new_identity() -> io::Result<String> {
    let mut bytes = [0; 16];
    if getrandom(&mut bytes, GetRandomFlags::empty())? < bytes.len() {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

/// Opens a file of the volume's own, or makes it.
fn open_own(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FunctionConfig;
    use std::os::unix::fs::{MetadataExt, chown};

    pub(super) fn store() -> (tempfile::TempDir, VolumeStore) {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::at(directory.path().join("home")).unwrap();
        (directory, VolumeStore::of(home))
    }

    /// Writes a file of the volume's owner.
    pub(super) fn write(path: PathBuf, content: &str) -> io::Result<()> {
        fs::write(&path, content)?;
        let owner = fs::metadata(path.parent().expect("a directory"))?;
        chown(path, Some(owner.uid()), Some(owner.gid()))
    }

    pub(super) fn config(name: &str, volume: &str) -> FunctionConfig {
        let text = format!(
            "name = \"{name}\"\ncommand = [\"/app\"]\nport = 80\n[runtime]\nkind = \"binary\"\n\
             [[volumes]]\nname = \"{volume}\"\npath = \"/data\"\nsize = \"1MiB\"\n"
        );
        FunctionConfig::parse("thaw.toml".as_ref(), &text).unwrap()
    }

    #[test]
    fn what_is_left_of_a_removed_volume_is_swept() {
        let (_directory, volumes) = store();
        let name = Name::new("data").unwrap();
        volumes.create(&name, ByteSize(1 << 20), &[], None).unwrap();
        let files = volumes.show(&name).unwrap().path;
        write(files.join("file"), "content").unwrap();
        let gone = volumes.all().join(".gone-data");
        // A daemon was killed while it removed it.
        fs::rename(volumes.directory(&name), &gone).unwrap();
        assert!(volumes.is_missing(&name) && volumes.list().unwrap().is_empty());
        volumes.create(&name, ByteSize(1 << 20), &[], None).unwrap();
        volumes.remove(&name).unwrap();
        assert!(!gone.exists() && volumes.is_missing(&name));
        let acting = volumes.home.act().unwrap();
        fs::create_dir_all(gone.join("files/d")).unwrap();
        drop(acting);
        volumes.sweep_gone().unwrap();
        assert!(!gone.exists());
    }

    #[test]
    fn a_volume_that_cannot_be_made_leaves_nothing() {
        let (_directory, volumes) = store();
        let one = config("one", "data");
        let name = &one.volumes[0].name;
        let note = Note::new(ByteSize(1), &[], None).unwrap();
        // Its host refuses a link to a place with a zero in it.
        let nowhere = Path::new("/no\0where");
        assert!(volumes.make(name, &note, Some(nowhere)).is_err());
        assert!(!volumes.directory(name).exists());
        volumes.of_new_function(&one).unwrap();
    }

    #[test]
    fn a_half_made_volume_counts_as_none_and_one_with_files_does_not() {
        let (_directory, volumes) = store();
        let one = config("one", "data");
        let name = &one.volumes[0].name;
        drop(volumes.of_new_function(&one).unwrap());
        let directory = volumes.directory(name);
        // A full disk ended an older Thaw here.
        fs::rename(directory.join("volume.json"), directory.join(NEW_NOTE)).unwrap();
        drop(volumes.of_new_function(&one).unwrap());
        fs::write(directory.join("files/data"), "data").unwrap();
        assert!(matches!(volumes.of_new_function(&one).map(drop), Ok(())));
        fs::remove_file(directory.join("volume.json")).unwrap();
        assert!(matches!(volumes.of_new_function(&one), Err(VolumeError::Exists(_))));
        assert_eq!(fs::read(directory.join("files/data")).unwrap(), b"data");
    }
}
