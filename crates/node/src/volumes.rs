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
mod host;
mod put_back;
mod quota;
mod snapshots;

pub use at_rest::VolumeSnapshot;
pub(crate) use at_rest::{Purpose, SnapshotsAtRest};
pub(crate) use host::host_directories;
pub(crate) use put_back::PutBack;
use snapshots::clear;
pub use snapshots::{SNAPSHOTS_MAX, Snapshot};

use host::Linkable;

use crate::config::{
    ByteSize, DomainName, FunctionConfig, FunctionName, QuotasError, VolumeConfig,
};
use crate::home::{Home, HomeError};
use crate::tenants::TenantName;
use rustix::fs::{FlockOperation, flock};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use thaw_sandbox::{BoundAccess, OwnFiles, Volume, VolumeMount, VolumeShare, cut_to_lengths};
use thaw_store::{Name, StoreError};

/// Most volumes of a state directory.
pub const VOLUMES_OF_HOME_MAX: usize = 4096;
/// What names of volumes begin with that clients of E2B's API have made; they are no tenant's own.
pub(crate) const CLIENTS_PREFIX: &str = "e2b-";
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

/// Which volumes a sandbox may use.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MayUse<'a> {
    /// Those that it had before. One of an older Thaw, without an identity, must also be one that it
    /// may use now.
    Same {
        /// The function.
        function: &'a FunctionName,
        /// The domain of its tenant.
        domain: Option<&'a DomainName>,
        /// The identities of the volumes, in their order.
        identities: &'a [Option<String>],
    },
    /// Those of its function, those of the function's tenant that are neither directories of the host nor
    /// a client's of E2B's API, and those that were granted to whoever makes it.
    Those {
        /// The function.
        function: &'a FunctionName,
        /// The domain of its tenant.
        domain: Option<&'a DomainName>,
        /// The names of the others.
        granted: &'a BTreeSet<Name>,
    },
}

/// What cannot be done with a volume.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// There is none of that name.
    #[error(
        "there is no volume `{0}`; `thaw volume create {0} --size 1GiB --function NAME` makes one"
    )]
    Missing(Name),
    /// There is one of that name.
    #[error("there is a volume `{0}` already; choose another name, or remove it")]
    Exists(Name),
    /// A function may not use it.
    #[error(
        "volume `{name}` is not for function `{function}`; `thaw volume allow {name} {function}` \
         changes that"
    )]
    NotFor {
        /// The volume.
        name: Name,
        /// The function.
        function: FunctionName,
    },
    /// It is another one than a sandbox had.
    #[error(
        "volume `{0}` was removed, and is another one by now than the sandbox had; `thaw sandbox kill` \
         ends the sandbox"
    )]
    Another(Name),
    /// Somebody uses it.
    #[error(
        "volume `{0}` is in use; remove the functions that name it, or stop the daemon, and try \
         again"
    )]
    InUse(Name),
    /// A snapshot of it is being made, or put back.
    #[error("a snapshot of volume `{0}` is being made or put back; try again when that is done")]
    Busy(Name),
    /// Another process has it.
    #[error(
        "volume `{0}` is in use by another process of this host, `thaw build` or `thaw run -v`; try \
         again when that has ended"
    )]
    UsedElsewhere(Name),
    /// Sandboxes have files of it open that are not at rest.
    #[error(
        "files of volume `{0}` are open in sandboxes that are booted ahead, or are just ending; try \
         again, or have their functions keep none ready"
    )]
    OthersOpen(Name),
    /// It is a directory of the host, whose files are not put back.
    #[error(
        "volume `{0}` is a directory of the host, which is not put back and can be copied only while \
         nobody uses it"
    )]
    HostFiles(Name),
    /// A checkpoint has a snapshot.
    #[error(
        "checkpoint `{checkpoint}` needs snapshot `{label}` of volume `{name}`; `thaw checkpoints \
         --remove {checkpoint}` removes both"
    )]
    Needed {
        /// The volume.
        name: Name,
        /// The snapshot.
        label: Name,
        /// The checkpoint.
        checkpoint: Name,
    },
    /// The store cannot be read.
    #[error(transparent)]
    Store(StoreError),
    /// A directory of the host cannot be a volume.
    #[error("{} cannot be a volume: {reason}", path.display())]
    Host {
        /// The directory.
        path: PathBuf,
        /// Why not, and the way out.
        reason: String,
    },
    /// A function wants a directory of the host that the volume is not.
    #[error(
        "volume `{name}` is not the directory {} of this host; the operator makes it so with \
         `thaw volume create {name} --host {} --size SIZE --function {function}`",
        path.display(), path.display()
    )]
    NotHost {
        /// The volume.
        name: Name,
        /// The function.
        function: FunctionName,
        /// The directory that it names.
        path: PathBuf,
    },
    /// The tenant would have too much.
    #[error(
        "the quota of {tenant} is {quota} for volumes, and with this one it would have {needed} \
         bytes; give it a smaller size, remove volumes or snapshots with `thaw volume remove`, or \
         have the operator raise `volumes` in tenants.toml"
    )]
    Quota {
        /// The tenant.
        tenant: TenantName,
        /// What it may have.
        quota: ByteSize,
        /// Bytes that it would have.
        needed: u64,
    },
    /// The quotas cannot be read.
    #[error(transparent)]
    Quotas(#[from] QuotasError),
    /// A snapshot is missing.
    #[error("volume `{name}` has no snapshot `{label}`; `thaw volume show {name}` lists them")]
    NoSnapshot {
        /// The volume.
        name: Name,
        /// The snapshot.
        label: Name,
    },
    /// A snapshot of that label is there.
    #[error("volume `{name}` has a snapshot `{label}` already; choose another label")]
    SnapshotExists {
        /// The volume.
        name: Name,
        /// The snapshot.
        label: Name,
    },
    /// There are too many.
    #[error("there can be {0} at most; remove some")]
    TooMany(String),
    /// The host refuses.
    #[error("cannot {action} {}: {error}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// What the host says.
        error: io::Error,
    },
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] HomeError),
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VolumeError {
    let path = path.to_owned();
    move |error| VolumeError::Io { action, path, error }
}

/// Volumes that this process has open, by their directories: what is counted in one place is
/// counted once. The lock is held for moments.
static OPEN: Mutex<Option<HashMap<PathBuf, Arc<Opening>>>> = Mutex::new(None);

/// A volume that is open, or is being opened.
#[derive(Debug, Default)]
struct Opening {
    /// Held while it is opened, for which all its files are counted.
    turn: Mutex<()>,
    /// Held for moments.
    volume: Mutex<Weak<Volume>>,
}

impl Opening {
    fn opened(&self) -> Option<Arc<Volume>> {
        self.volume.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// The same without keeping it from being closed.
    fn is_open(&self) -> bool {
        self.volume.lock().unwrap_or_else(PoisonError::into_inner).strong_count() > 0
    }
}

/// A volume of a sandbox.
#[derive(Debug)]
pub(crate) struct OpenedVolume {
    pub mount: VolumeMount,
    /// What tells it from a later volume of its name.
    pub identity: Option<String>,
}

impl VolumeStore {
    /// That of a state directory.
    pub fn of(home: Home) -> Self {
        Self { home }
    }

    /// The state directory.
    pub(crate) fn home(&self) -> &Home {
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

    /// The volumes that a function names, in its order, to be mounted within the share of its
    /// tenant.
    ///
    /// # Errors
    /// One is missing, or not for this function.
    pub fn of_function(
        &self,
        function: &FunctionName,
        volumes: &[VolumeConfig],
        share: &VolumeShare,
    ) -> Result<Vec<VolumeMount>, VolumeError> {
        volumes.iter().map(|volume| self.open(volume, function, share)).collect()
    }

    /// As [`VolumeStore::of_function`], and makes those that have a size and are missing.
    ///
    /// # Errors
    /// As there, and those of [`VolumeStore::create`].
    pub fn of_new_function(
        &self,
        config: &FunctionConfig,
    ) -> Result<Vec<VolumeMount>, VolumeError> {
        for volume in &config.volumes {
            let is_missing = matches!(self.show(&volume.name), Err(VolumeError::Missing(_)));
            if let Some(size) = volume.size.filter(|_| is_missing) {
                let domain = config.sharing.domain.as_ref();
                self.create(&volume.name, size, std::slice::from_ref(&config.name), domain)?;
            }
        }
        self.of_function(&config.name, &config.volumes, &VolumeShare::default())
    }

    fn open(
        &self,
        wanted: &VolumeConfig,
        function: &FunctionName,
        share: &VolumeShare,
    ) -> Result<VolumeMount, VolumeError> {
        let name = &wanted.name;
        let _acting = self.home.act()?;
        let note = self.read_note(name);
        if let Some(path) = &wanted.host {
            let host = note.is_ok().then(|| self.host(name)).transpose()?.flatten();
            if host.as_ref() != Some(path) {
                let (name, function, path) = (name.clone(), function.clone(), path.clone());
                return Err(VolumeError::NotHost { name, function, path });
            }
        }
        let note = note?;
        if !note.functions.contains(function) {
            return Err(VolumeError::NotFor { name: name.clone(), function: function.clone() });
        }
        let access = if wanted.read_only { BoundAccess::Read } else { BoundAccess::Write };
        self.mount(name, &note, access, share)
    }

    /// Volumes for a sandbox, in their order, to be mounted within the share of its tenant.
    ///
    /// # Errors
    /// One is missing, or not for this sandbox.
    pub(crate) fn of_sandbox(
        &self,
        volumes: &[VolumeConfig],
        may_use: &MayUse<'_>,
        share: &VolumeShare,
    ) -> Result<Vec<OpenedVolume>, VolumeError> {
        let _acting = self.home.act()?;
        let open = |(at, wanted): (usize, &VolumeConfig)| {
            let name = &wanted.name;
            let note = self.read_note(name)?;
            let (MayUse::Those { function, domain, .. } | MayUse::Same { function, domain, .. }) =
                may_use;
            let is_of_client = name.as_str().starts_with(CLIENTS_PREFIX);
            // Root says who may use a directory of the host, function by function.
            let is_own = || {
                note.functions.contains(function)
                    || note.domain.as_ref() == *domain
                        && !is_of_client
                        && matches!(self.host(name), Ok(None))
            };
            match may_use {
                MayUse::Those { granted, .. } if granted.contains(name) || is_own() => {}
                MayUse::Those { .. } => {
                    let function = (*function).clone();
                    return Err(VolumeError::NotFor { name: name.clone(), function });
                }
                MayUse::Same { identities, .. } => {
                    let is_same = identities.get(at) == Some(&note.identity);
                    // No name of a client's volume is used again.
                    if !is_same || note.identity.is_none() && !is_of_client && !is_own() {
                        return Err(VolumeError::Another(name.clone()));
                    }
                }
            }
            let access = if wanted.read_only { BoundAccess::Read } else { BoundAccess::Write };
            let mount = self.mount(name, &note, access, share)?;
            // From now on nobody removes it.
            if self.read_note(name)?.identity != note.identity {
                return Err(VolumeError::Another(name.clone()));
            }
            Ok(OpenedVolume { mount, identity: note.identity })
        };
        volumes.iter().enumerate().map(open).collect()
    }

    /// A volume whichever functions may use it, for the operator's own program or whoever has asked for
    /// leave before, within a share.
    ///
    /// # Errors
    /// There is none, or the host refuses.
    pub fn of_operator(
        &self,
        name: &Name,
        access: BoundAccess,
        share: &VolumeShare,
    ) -> Result<VolumeMount, VolumeError> {
        let _acting = self.home.act()?;
        self.mount(name, &self.read_note(name)?, access, share)
    }

    /// Whether there is no volume of this name.
    pub(crate) fn is_missing(&self, name: &Name) -> bool {
        let Ok(_acting) = self.home.act() else { return false };
        matches!(self.read_note(name), Err(VolumeError::Missing(_)))
    }

    /// Whether this process uses a volume. Waits for nobody.
    pub(crate) fn is_open(&self, name: &Name) -> bool {
        self.opened(name).is_some()
    }

    /// A volume that this process uses; none while it is being opened.
    fn opened(&self, name: &Name) -> Option<Arc<Volume>> {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref()?.get(&self.directory(name))?.opened()
    }

    /// Where a volume is, or will be, that is open.
    fn opening(&self, name: &Name) -> Arc<Opening> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        // Nobody uses them, nor opens them.
        open.retain(|_, one| Arc::strong_count(one) > 1 || one.is_open());
        open.entry(self.directory(name)).or_default().clone()
    }

    fn mount(
        &self,
        name: &Name,
        note: &Note,
        access: BoundAccess,
        share: &VolumeShare,
    ) -> Result<VolumeMount, VolumeError> {
        let opening = self.opening(name);
        let volume = match opening.opened() {
            Some(volume) => volume,
            None => {
                let _turn = opening.turn.lock().unwrap_or_else(PoisonError::into_inner);
                match opening.opened() {
                    Some(volume) => volume,
                    None => {
                        let volume = Arc::new(self.open_files(name, note)?);
                        let weak = Arc::downgrade(&volume);
                        *opening.volume.lock().unwrap_or_else(PoisonError::into_inner) = weak;
                        volume
                    }
                }
            }
        };
        Ok(VolumeMount { volume, access, of_tenant: share.clone() })
    }

    fn open_files(&self, name: &Name, note: &Note) -> Result<Volume, VolumeError> {
        let directory = self.directory(name);
        // Whoever copies its files may take long, and is not waited for.
        if self.is_unfinished(name)? {
            let _copying = self.copying(name)?;
            self.undo_unfinished_of(name)?;
        }
        let files = self.files(name)?;
        let copying = open_own(&directory.join("copying"));
        let copying = copying.map_err(failed("open", &directory))?;
        flock(&copying, FlockOperation::NonBlockingLockShared)
            .map_err(|_| VolumeError::Busy(name.clone()))?;
        let opened = open_own(&directory.join("usage")).and_then(|usage| {
            let users = open_own(&directory.join("users"))?;
            // Programs of the host change a directory of the host when they like.
            let is_own = files.starts_with(&directory);
            let lengths = is_own.then(|| directory.join("lengths"));
            let numbers = self.numbers(name, &files)?;
            let own = OwnFiles { usage, users, lengths };
            Volume::open(&files, own, note.size.bytes(), numbers)
        });
        opened.map_err(failed("open", &files))
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
    fn a_volume_is_made_for_a_function_and_is_nobody_elses() {
        let (_directory, volumes) = store();
        let name = Name::new("data").unwrap();
        let (one, other) = (config("one", "data"), config("other", "data"));
        assert!(matches!(
            volumes.of_function(&one.name, &one.volumes, &VolumeShare::default()),
            Err(VolumeError::Missing(_))
        ));
        let mounts = volumes.of_new_function(&one).unwrap();
        assert_eq!(mounts.len(), 1);
        assert!(matches!(volumes.of_new_function(&other), Err(VolumeError::NotFor { .. })));
        volumes.allow(&name, &other.name).unwrap();
        let again =
            volumes.of_function(&other.name, &other.volumes, &VolumeShare::default()).unwrap();
        assert!(Arc::ptr_eq(&mounts[0].volume, &again[0].volume));
        let shown = volumes.show(&name).unwrap();
        assert_eq!((shown.size, shown.used, shown.in_use), (1 << 20, 0, true));
        assert!(matches!(volumes.remove(&name), Err(VolumeError::InUse(_))));
        drop((mounts, again));
        volumes.remove(&name).unwrap();
        assert!(volumes.list().unwrap().is_empty());
    }

    #[test]
    fn a_sandbox_may_use_what_its_function_its_tenant_or_whoever_asks_may() {
        let (_directory, volumes) = store();
        let domain = |name: &str| name.parse::<DomainName>().unwrap();
        let (ours, theirs) = (domain("ours"), domain("theirs"));
        let function: FunctionName = "box".parse().unwrap();
        let named = |name: &str| Name::new(name).unwrap();
        let size = ByteSize(1 << 20);
        volumes.create(&named("shared"), size, &[], None).unwrap();
        volumes.create(&named("ours"), size, &[], Some(&ours)).unwrap();
        volumes.create(&named("theirs"), size, &[], Some(&theirs)).unwrap();
        let allowed = std::slice::from_ref(&function);
        volumes.create(&named("allowed"), size, allowed, Some(&theirs)).unwrap();
        let granted = BTreeSet::from([named("shared")]);
        let opens = |name: &str, may_use: MayUse<'_>| {
            let (name, path) = (named(name), "/data".to_owned());
            let wanted = VolumeConfig { name, path, read_only: true, size: None, host: None };
            volumes.of_sandbox(&[wanted], &may_use, &VolumeShare::default()).map(drop)
        };
        let none = BTreeSet::new();
        let domain = Some(&ours);
        let may_use = |granted| MayUse::Those { function: &function, domain, granted };
        let unknown = [None];
        for (name, without, with) in [
            ("ours", true, true),
            ("allowed", true, true),
            ("shared", false, true),
            ("theirs", false, false),
        ] {
            for (granted, may) in [(&none, without), (&granted, with)] {
                match opens(name, may_use(granted)) {
                    Ok(()) => assert!(may, "{name}"),
                    Err(error) => {
                        assert!(!may && matches!(error, VolumeError::NotFor { .. }), "{name}");
                    }
                }
            }
            let identity = [volumes.read_note(&named(name)).unwrap().identity];
            assert!(identity[0].is_some());
            opens(name, MayUse::Same { function: &function, domain, identities: &identity })
                .unwrap();
        }
        let same = MayUse::Same { function: &function, domain, identities: &unknown };
        assert!(matches!(opens("none", same), Err(VolumeError::Missing(_))));
        // Those of E2B's API are for whoever they are granted to.
        volumes.create(&named("e2b-x"), size, &[], Some(&ours)).unwrap();
        assert!(matches!(opens("e2b-x", may_use(&none)), Err(VolumeError::NotFor { .. })));
        opens("e2b-x", may_use(&BTreeSet::from([named("e2b-x")]))).unwrap();
    }

    #[test]
    fn a_sandbox_does_not_wake_with_another_volume_of_the_same_name() {
        let (_directory, volumes) = store();
        let name = Name::new("data").unwrap();
        let path = "/data".to_owned();
        let wanted =
            VolumeConfig { name: name.clone(), path, read_only: false, size: None, host: None };
        let made = || {
            volumes.create(&name, ByteSize(1 << 20), &[], None).unwrap();
            [volumes.read_note(&name).unwrap().identity]
        };
        let function: FunctionName = "box".parse().unwrap();
        let wakes = |identities: &[Option<String>]| {
            let wanted = std::slice::from_ref(&wanted);
            let may_use = MayUse::Same { function: &function, domain: None, identities };
            volumes.of_sandbox(wanted, &may_use, &VolumeShare::default()).map(drop)
        };
        let first = made();
        volumes.allow(&name, &"other".parse().unwrap()).unwrap();
        wakes(&first).unwrap();
        volumes.remove(&name).unwrap();
        let second = made();
        assert!(matches!(wakes(&first), Err(VolumeError::Another(_))));
        assert!(matches!(wakes(&[]), Err(VolumeError::Another(_))));
        wakes(&second).unwrap();
        // Those of an older Thaw have none, and are its own or another's.
        let with = |domain: Option<&str>| {
            let _acting = volumes.home.act().unwrap();
            let domain = domain.map(|name| name.parse().unwrap());
            let note =
                Note { size: ByteSize(1 << 20), functions: Vec::new(), domain, identity: None };
            volumes.note(&name, &note).unwrap();
        };
        with(None);
        wakes(&[None]).unwrap();
        assert!(matches!(wakes(&second), Err(VolumeError::Another(_))));
        with(Some("theirs"));
        assert!(matches!(wakes(&[None]), Err(VolumeError::Another(_))));
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
    fn nobody_waits_while_another_volume_is_opened() {
        let (_directory, volumes) = store();
        let (one, other) = (config("one", "data"), config("other", "else"));
        let slow = volumes.opening(&one.volumes[0].name);
        let _turn = slow.turn.lock().unwrap();
        let mounts = volumes.of_new_function(&other).unwrap();
        assert!(volumes.is_open(&other.volumes[0].name));
        assert!(!volumes.is_open(&one.volumes[0].name));
        drop(mounts);
        assert!(!volumes.is_open(&other.volumes[0].name));
    }

    #[test]
    fn use_is_counted_anew_by_the_first_who_opens_it() {
        let (_directory, volumes) = store();
        let one = config("one", "data");
        drop(volumes.of_new_function(&one).unwrap());
        let shown = volumes.show(&one.volumes[0].name).unwrap();
        fs::write(shown.path.join("file"), [1; 5000]).unwrap();
        fs::create_dir(shown.path.join("directory")).unwrap();
        let mounts = volumes.of_function(&one.name, &one.volumes, &VolumeShare::default()).unwrap();
        assert_eq!(mounts[0].volume.usage().unwrap(), (2 * 4096 + 8192, 1 << 20));
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
