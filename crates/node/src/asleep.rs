//! What is left of instances that are asleep: for each an image in a file, and a note beside it.
//!
//! ```text
//! $THAW_HOME/asleep/17.image   how its memory differs from the image of its function
//! $THAW_HOME/asleep/17.json    the note; an image without one does not count
//! ```
//!
//! The image is written and on disk before the note gets its name, and the note goes first when
//! the instance wakes. So a daemon that is killed between two host calls leaves an instance that
//! is asleep as a whole, or not at all; the next daemon takes the former over, and removes the rest.

use crate::remote::ExecNote;
use crate::tenants::{AsleepBytes, Tenant};
use rustix::fs::statvfs;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use thaw_home::config::{DomainName, FunctionName};
use thaw_home::seal::owner::KeyId;
use thaw_home::seal::{SealKey, memory_file, seal, sealed_len};
use thaw_sandbox::FreezeBase;
use thaw_store::{ImageId, IndexId, KernelId};

/// The format of notes.
const NOTE_VERSION: u32 = 1;
/// Most bytes of a note.
const NOTE_MAX: u64 = 256 << 10;
/// Most instances of a node that are asleep: each costs some hundred bytes of the daemon, and
/// two names on disk.
const ASLEEP_MAX: usize = 65_536;
/// Bytes in which files take room on disk.
const PAGE: u64 = 4096;
/// Bytes of the file system that sleeping instances leave to others: where there are no more,
/// no further instance falls asleep.
const LEFT_TO_OTHERS: u64 = 64 << 20;

/// A directory for instances that are asleep.
#[derive(Debug)]
pub struct AsleepSpace {
    directory: PathBuf,
    /// Files of instances that exist, or are being written.
    count: AtomicUsize,
}

/// What has to be known of an instance that is asleep, by this daemon or the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsleepNote {
    version: u32,
    /// Number of the instance.
    pub id: u64,
    /// Its function.
    pub function: FunctionName,
    /// The function's tenant.
    pub domain: Option<DomainName>,
    /// The function's root file system: an image fits no other.
    pub index: IndexId,
    /// Checksum of the image.
    pub image: ImageId,
    /// The image of the store that it differs from, which must stay there.
    #[serde(default)]
    pub base: Option<ImageId>,
    /// The kernel build that it needs.
    #[serde(default)]
    pub kernel: Option<KernelId>,
    /// When it was booted, in milliseconds since 1970.
    pub booted_ms: u64,
    /// Since when it has been idle, in milliseconds since 1970.
    pub idle_since_ms: u64,
    /// Requests that it has served.
    pub served: u64,
    /// Processes in it that were started from outside.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub execs: Vec<ExecNote>,
}

/// An instance that is about to sleep, as the one says who puts it there.
#[derive(Clone, Debug)]
pub(crate) struct Going {
    pub id: u64,
    pub function: FunctionName,
    pub tenant: Arc<Tenant>,
    pub booted_ms: u64,
    pub idle_since: Instant,
    pub served: u64,
}

/// What was written of its memory.
#[derive(Debug)]
pub struct AsleepImage {
    /// Bytes of its file, which count for its tenant.
    pub(crate) bytes: AsleepBytes,
    /// Bytes of memory in the image.
    pub stored: u64,
    /// Checksum of the image.
    pub checksum: ImageId,
    /// The root file system.
    pub index: IndexId,
    /// The kernel build.
    pub kernel: KernelId,
    /// What the image differs from.
    pub base: FreezeBase,
}

/// An instance that is asleep. Its files go with this value, unless they are kept for the next
/// daemon.
#[derive(Debug)]
pub(crate) struct Asleep {
    files: Files,
    /// What the image differs from, open; `None`: an earlier daemon has written it, and the store
    /// has what it differs from.
    base: Option<FreezeBase>,
    checksum: ImageId,
    /// Its image is encrypted with this key, and no other daemon can wake it.
    key: Option<SealKey>,
    /// The key of the encrypted checkpoint that it comes from.
    owner_key: Option<KeyId>,
    /// They count in what the tenant has stored.
    bytes: AsleepBytes,
    /// When it was booted, in milliseconds since 1970.
    pub booted_ms: u64,
    /// Since when it has been idle.
    pub idle_since: Instant,
    /// Requests that it has served.
    pub served: u64,
}

/// The files of one instance, removed when this is dropped.
#[derive(Debug)]
struct Files {
    space: Arc<AsleepSpace>,
    id: u64,
    /// They are the next daemon's, or gone: the names may be those of the instance's next sleep.
    is_settled: AtomicBool,
}

/// The image of an instance that is being written.
#[derive(Debug)]
pub struct NewAsleep {
    files: Files,
    file: File,
    /// The image in memory, if it is to be encrypted on disk.
    plain: Option<File>,
    /// What it was encrypted with.
    key: Option<SealKey>,
    /// The key of the encrypted checkpoint that it comes from.
    owner_key: Option<KeyId>,
}

/// An instance that an earlier daemon has put to sleep.
#[derive(Debug)]
pub struct Left {
    pub(crate) note: AsleepNote,
    files: Files,
    bytes: u64,
}

/// The images of the store that instances which are asleep in a directory differ from: nothing
/// else may refer to them.
///
/// # Errors
/// The directory or a note cannot be read; notes that make no sense are left out, as the next
/// daemon leaves them out.
pub fn images_of_sleepers(directory: &Path) -> io::Result<Vec<ImageId>> {
    let mut images = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let note = match fs::read(&path) {
            // It has just been woken.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            read => serde_json::from_slice::<AsleepNote>(&read?),
        };
        images.extend(note.ok().and_then(|note| note.base));
    }
    Ok(images)
}

/// An instance that is asleep, as its files say it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sleeper {
    /// Its function.
    pub function: FunctionName,
    /// The function's tenant.
    pub domain: Option<DomainName>,
    /// Its root file system.
    pub index: IndexId,
    /// The image of the store that its own differs from.
    pub base: Option<ImageId>,
    /// Bytes of its files on disk.
    pub bytes: u64,
}

/// The instances that are asleep in a directory, most of them at a time.
///
/// # Errors
/// The directory cannot be read; notes that make no sense are left out, as the next daemon leaves
/// them out.
pub fn sleepers_in(directory: &Path) -> io::Result<Vec<Sleeper>> {
    let mut sleepers = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let is_note = path.extension().is_some_and(|extension| extension == "json");
        // It may just have been woken.
        let size = |path: &Path| fs::symlink_metadata(path).map_or(0, |found| found.blocks() * 512);
        let is_short = || fs::symlink_metadata(&path).is_ok_and(|found| found.len() <= NOTE_MAX);
        if !is_note || !is_short() || sleepers.len() == ASLEEP_MAX {
            continue;
        }
        let Ok(text) = fs::read(&path) else { continue };
        let Ok(note) = serde_json::from_slice::<AsleepNote>(&text) else { continue };
        let bytes = size(&path) + size(&path.with_extension("image"));
        let AsleepNote { function, domain, index, base, .. } = note;
        sleepers.push(Sleeper { function, domain, index, base, bytes });
    }
    Ok(sleepers)
}

impl AsleepSpace {
    /// The instances of a daemon, in a directory that no other daemon uses.
    pub fn at(directory: PathBuf) -> Arc<Self> {
        Arc::new(Self { directory, count: AtomicUsize::new(0) })
    }

    /// The instances that an earlier daemon has put to sleep here. What else is there is removed.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn left(self: &Arc<Self>) -> io::Result<Vec<Left>> {
        let mut left = Vec::new();
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            names.push(entry?.path());
        }
        for path in names.iter().filter(|path| path.extension().is_some_and(|e| e == "json")) {
            match self.left_at(path) {
                Ok(found) => left.push(found),
                Err(error) => {
                    tracing::warn!("{}: not an instance that is asleep: {error}", path.display());
                }
            }
        }
        let of_one: HashSet<PathBuf> = left.iter().flat_map(|one| one.files.paths()).collect();
        for path in names.iter().filter(|path| !of_one.contains(*path)) {
            // It may have gone with the file beside it.
            remove_if_there(path)?;
        }
        Ok(left)
    }

    fn left_at(self: &Arc<Self>, path: &Path) -> io::Result<Left> {
        let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        if fs::symlink_metadata(path)?.len() > NOTE_MAX {
            return Err(bad("its note is too long"));
        }
        let note: AsleepNote = serde_json::from_slice(&fs::read(path)?)?;
        if note.version != NOTE_VERSION {
            return Err(bad("another version of Thaw wrote its note"));
        }
        let files = self.files(note.id).ok_or_else(|| bad("there are too many"))?;
        let [own, image] = files.paths();
        if own != path {
            files.keep();
            return Err(bad("its note has another number"));
        }
        let bytes = fs::symlink_metadata(image)?.blocks() * 512;
        Ok(Left { note, files, bytes })
    }

    /// The files of one more instance.
    fn files(self: &Arc<Self>, id: u64) -> Option<Files> {
        let more = |count| (count < ASLEEP_MAX).then_some(count + 1);
        self.count.fetch_update(Relaxed, Relaxed, more).ok()?;
        Some(Files { space: self.clone(), id, is_settled: AtomicBool::new(false) })
    }

    /// A file for the memory of an instance, which may have so many bytes of it.
    ///
    /// # Errors
    /// The disk is full, or is about to be; as many are asleep as may be.
    pub(crate) fn new_file(self: &Arc<Self>, id: u64, most: u64) -> io::Result<NewAsleep> {
        self.require_room(most)?;
        let too_many = || {
            io::Error::other(format!(
                "{ASLEEP_MAX} instances of this node are asleep, as many as may be"
            ))
        };
        let files = self.files(id).ok_or_else(too_many)?;
        let [_, image] = files.paths();
        // A file that was left behind may be mapped still: it is replaced, never cut.
        remove_if_there(&image)?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(image)?;
        Ok(NewAsleep { files, file, plain: None, key: None, owner_key: None })
    }

    fn require_room(&self, bytes: u64) -> io::Result<()> {
        let file_system = statvfs(&self.directory)?;
        let left = file_system.f_bavail.saturating_mul(file_system.f_frsize);
        match left.checked_sub(bytes) {
            Some(left) if left >= LEFT_TO_OTHERS => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    fn path(&self, id: u64, extension: &str) -> PathBuf {
        self.directory.join(format!("{id}.{extension}"))
    }
}

impl Files {
    /// The note, and the image.
    fn paths(&self) -> [PathBuf; 2] {
        ["json", "image"].map(|extension| self.space.path(self.id, extension))
    }

    fn keep(&self) {
        self.is_settled.store(true, Relaxed);
    }

    /// Removes them now, whoever still has this value.
    fn remove(&self) {
        if self.is_settled.swap(true, Relaxed) {
            return;
        }
        for path in self.paths() {
            if let Err(error) = remove_if_there(&path) {
                tracing::warn!("cannot remove {}: {error}", path.display());
            }
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.space.count.fetch_sub(1, Relaxed);
        self.remove();
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl NewAsleep {
    /// The same, to be encrypted: no other daemon finds it. `owner_key` is that of the encrypted
    /// checkpoint that it comes from.
    ///
    /// # Errors
    /// The host's.
    pub fn encrypted(self, owner_key: Option<KeyId>) -> io::Result<Self> {
        let (plain, _) = memory_file()?;
        Ok(Self { plain: Some(plain), owner_key, ..self })
    }

    /// Where the image is to be written.
    pub fn file(&self) -> &File {
        self.plain.as_ref().unwrap_or(&self.file)
    }

    /// Bytes of the image on disk: those that it has, or will have when it is encrypted.
    ///
    /// # Errors
    /// The host's.
    pub fn bytes(&self) -> io::Result<u64> {
        match self.plain_len()? {
            // Holes are encrypted, too.
            Some(plain) => Ok(sealed_len(plain).next_multiple_of(PAGE)),
            None => Ok(self.file.metadata()?.blocks() * 512),
        }
    }

    /// Bytes of memory that the image takes when it is decrypted; `None`: it is not to be encrypted.
    ///
    /// # Errors
    /// The host's.
    pub fn plain_len(&self) -> io::Result<Option<u64>> {
        let plain = self.plain.as_ref().map(File::metadata).transpose()?;
        Ok(plain.map(|plain| plain.len()))
    }

    /// Encrypts what was written, if it is to be.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub fn seal(mut self) -> io::Result<Self> {
        let plain = self.plain.take();
        self.key = plain.map(|plain| seal(&plain, &self.file, &|| true)).transpose()?;
        Ok(self)
    }

    /// Makes it an instance that is asleep: from now on the next daemon finds it, too.
    ///
    /// # Errors
    /// The disk is full or fails; nothing is left then.
    pub(crate) fn commit(
        self,
        going: &Going,
        image: AsleepImage,
        execs: Vec<ExecNote>,
    ) -> io::Result<Asleep> {
        // A full disk may be noticed only now.
        self.file.sync_data()?;
        let note = AsleepNote {
            version: NOTE_VERSION,
            id: going.id,
            function: going.function.clone(),
            domain: going.tenant.name().domain().cloned(),
            index: image.index,
            image: image.checksum,
            base: Some(ImageId(image.base.name)),
            kernel: Some(image.kernel),
            booted_ms: going.booted_ms,
            idle_since_ms: ms_of(going.idle_since),
            served: going.served,
            execs: execs.into_iter().map(ExecNote::for_disk).collect(),
        };
        if self.key.is_none() {
            self.files.write_note(&note)?;
        }
        let Self { files, key, owner_key, .. } = self;
        Ok(Asleep {
            files,
            base: Some(image.base),
            checksum: image.checksum,
            key,
            owner_key,
            bytes: image.bytes,
            booted_ms: going.booted_ms,
            idle_since: going.idle_since,
            served: going.served,
        })
    }
}

impl Files {
    /// The name comes last, and with it the whole note.
    fn write_note(&self, note: &AsleepNote) -> io::Result<()> {
        let new = self.space.path(self.id, "new");
        let text = serde_json::to_vec(note).expect("plain data");
        if text.len() as u64 > NOTE_MAX {
            // The next daemon would not take it.
            return Err(io::Error::other("too much is to be noted of it"));
        }
        let written = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)
            .and_then(|mut file| io::Write::write_all(&mut file, &text))
            .and_then(|()| fs::rename(&new, self.space.path(self.id, "json")));
        if written.is_err() {
            // It has been removed, or the next daemon removes it.
            let _ = fs::remove_file(&new);
        }
        written
    }
}

impl Left {
    /// Leaves it to the next daemon.
    pub fn keep(&self) {
        self.files.keep();
    }

    /// Takes it over for a tenant.
    pub(crate) fn take_over(self, tenant: &Arc<Tenant>) -> Asleep {
        let Self { note, files, bytes } = self;
        Asleep {
            files,
            base: None,
            checksum: note.image,
            key: None,
            owner_key: None,
            bytes: tenant.count_asleep(bytes),
            booted_ms: note.booted_ms,
            idle_since: instant_of(note.idle_since_ms),
            served: note.served,
        }
    }
}

impl Asleep {
    /// Number of the instance.
    pub fn id(&self) -> u64 {
        self.files.id
    }

    /// Bytes of its files on disk.
    pub fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Bytes of memory that its image takes when it is open; `None`: it lies on disk as it is.
    pub fn decrypted_len(&self) -> Option<u64> {
        self.key.as_ref().map(SealKey::plain_len)
    }

    /// The key of the encrypted checkpoint that it comes from.
    pub fn owner_key(&self) -> Option<KeyId> {
        self.owner_key
    }

    /// Its image, for reading only; decrypted into memory if it is encrypted, which takes as long
    /// as there is of it.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`]: it was encrypted and is damaged; others are the host's.
    pub fn open(&self) -> io::Result<File> {
        let [_, image] = self.files.paths();
        let file = File::open(image)?;
        let Some(key) = &self.key else { return Ok(file) };
        let (write, read) = memory_file()?;
        key.unseal(&file, &write)?;
        Ok(read)
    }

    /// It runs again: its files go now, whoever still has this value, since it may sleep again
    /// under the same names.
    pub fn runs_again(&self) {
        self.files.remove();
        self.bytes.give_back();
    }

    /// What its image must have for a checksum.
    pub fn checksum(&self) -> ImageId {
        self.checksum
    }

    /// What its image differs from, if this daemon has it open.
    pub fn base(&self) -> Option<&FreezeBase> {
        self.base.as_ref()
    }

    /// Leaves its files to the next daemon, durably, unless they are encrypted.
    ///
    /// # Errors
    /// They may not outlive a loss of power.
    pub fn keep(&self) -> io::Result<()> {
        if self.key.is_some() {
            // The key ends with this daemon.
            return Ok(());
        }
        self.files.keep();
        let [note, _] = self.files.paths();
        File::open(note)?.sync_all()?;
        File::open(&self.files.space.directory)?.sync_all()
    }
}

/// A moment of this process in milliseconds since 1970.
fn ms_of(moment: Instant) -> u64 {
    let then = SystemTime::now().checked_sub(moment.elapsed());
    let since_epoch = then.and_then(|then| then.duration_since(UNIX_EPOCH).ok());
    since_epoch.and_then(|since| u64::try_from(since.as_millis()).ok()).unwrap_or_default()
}

/// The reverse. What lies in the future, or before this machine was started, is taken for now.
fn instant_of(ms: u64) -> Instant {
    let now = Instant::now();
    let then = UNIX_EPOCH.checked_add(Duration::from_millis(ms));
    let age = then.and_then(|then| then.elapsed().ok()).unwrap_or_default();
    now.checked_sub(age).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_home::config::Quota;
    use thaw_home::tenants::TenantName;

    fn note(id: u64) -> AsleepNote {
        AsleepNote {
            version: NOTE_VERSION,
            id,
            function: "f".parse().unwrap(),
            domain: None,
            index: IndexId([1; 32]),
            image: ImageId([2; 32]),
            base: None,
            kernel: None,
            booted_ms: 1,
            idle_since_ms: 2,
            served: 3,
            execs: Vec::new(),
        }
    }

    impl AsleepSpace {
        /// An instance that an earlier daemon has left asleep, with nothing in its file.
        pub(crate) fn leave_one(self: &Arc<Self>, id: u64, function: &FunctionName) -> Left {
            let new = self.new_file(id, 0).unwrap();
            let note = AsleepNote { function: function.clone(), ..note(id) };
            new.files.write_note(&note).unwrap();
            new.files.keep();
            self.left().unwrap().remove(0)
        }
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_whole_is_found_by_the_next_daemon_and_the_rest_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let space = AsleepSpace::at(directory.path().to_owned());
        let whole = space.new_file(7, 0).unwrap();
        whole.files.write_note(&note(7)).unwrap();
        whole.files.keep();
        // Killed before the note, in the middle of it, and with another's number in it.
        space.new_file(8, 0).unwrap().files.keep();
        fs::write(path("9.image"), "").unwrap();
        fs::write(path("9.json"), "{").unwrap();
        fs::write(path("10.image"), "").unwrap();
        fs::write(path("10.json"), serde_json::to_vec(&note(7)).unwrap()).unwrap();
        let old = AsleepNote { version: NOTE_VERSION + 1, ..note(11) };
        fs::write(path("11.json"), serde_json::to_vec(&old).unwrap()).unwrap();
        fs::write(path("12.json"), vec![b' '; NOTE_MAX as usize + 1]).unwrap();
        fs::write(path("13.new"), "{").unwrap();

        let next = AsleepSpace::at(directory.path().to_owned());
        let left = next.left().unwrap();
        assert_eq!(left.iter().map(|one| one.note.clone()).collect::<Vec<_>>(), [note(7)]);
        assert_eq!(names(directory.path()), ["7.image", "7.json"]);
        let mode = fs::metadata(path("7.json")).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(left);
        assert!(names(directory.path()).is_empty());
    }

    #[test]
    fn an_instance_that_sleeps_again_has_a_file_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let space = AsleepSpace::at(directory.path().to_owned());
        let function = "f".parse().unwrap();
        space.leave_one(7, &function).keep();
        fs::write(space.path(7, "image"), "first").unwrap();
        let left = space.left().unwrap().remove(0);
        let tenant = Tenant::new(TenantName::default(), Quota::default());
        let waker = Arc::new(left.take_over(&tenant));
        assert!(tenant.asleep_bytes() > 0);
        let supervisor = waker.clone();
        // The sandbox maps it for as long as it lives.
        let mapped = waker.open().unwrap();

        supervisor.runs_again();
        drop(supervisor);
        assert_eq!(tenant.asleep_bytes(), 0);
        let again = space.new_file(7, 0).unwrap();
        io::Write::write_all(&mut again.file(), b"second").unwrap();
        again.files.write_note(&note(7)).unwrap();
        // Whoever has woken it is done only now.
        drop(waker);
        assert_eq!(tenant.asleep_bytes(), 0);
        assert_eq!(io::read_to_string(&mapped).unwrap(), "first");
        assert_eq!(names(directory.path()), ["7.image", "7.json"]);
        assert_eq!(fs::read_to_string(space.path(7, "image")).unwrap(), "second");

        // Nor is a file cut that somebody has left.
        again.files.keep();
        let mapped = File::open(space.path(7, "image")).unwrap();
        let third = space.new_file(7, 0).unwrap();
        assert_eq!(io::read_to_string(&mapped).unwrap(), "second");
        drop(third);
        assert_eq!(names(directory.path()), ["7.json"; 0]);
    }

    #[test]
    fn as_many_processes_as_there_may_be_can_be_noted() {
        let directory = tempfile::tempdir().unwrap();
        let space = AsleepSpace::at(directory.path().to_owned());
        let worst = |id| ExecNote {
            id: u64::MAX - id,
            argv: vec!["\u{1}\"".repeat(4000), "secret".to_owned()],
            terminal: true,
            stdin: true,
            ends_sandbox: true,
            pid: Some(u32::MAX),
        };
        let execs: Vec<_> = (0..256).map(|id| worst(id).for_disk()).collect();
        let new = space.new_file(7, 0).unwrap();
        new.files.write_note(&AsleepNote { execs, ..note(7) }).unwrap();
        let written = fs::read_to_string(space.path(7, "json")).unwrap();
        assert!(!written.contains("secret") && !written.contains("u0001"));
        let longer = "x".repeat(NOTE_MAX as usize);
        let execs = vec![ExecNote { argv: vec![longer], ..worst(1) }];
        let new = space.new_file(8, 0).unwrap();
        assert!(new.files.write_note(&AsleepNote { execs, ..note(8) }).is_err());
    }

    #[test]
    fn no_file_is_begun_for_which_there_is_no_room_or_no_place() {
        let directory = tempfile::tempdir().unwrap();
        let space = AsleepSpace::at(directory.path().to_owned());
        let error = space.new_file(1, u64::MAX).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        space.count.store(ASLEEP_MAX, Relaxed);
        let error = space.new_file(1, 0).unwrap_err();
        assert!(error.to_string().contains("as many as may be"), "{error}");
        assert!(names(directory.path()).is_empty());
        space.count.store(ASLEEP_MAX - 1, Relaxed);
        drop(space.new_file(1, 0).unwrap());
        assert!(names(directory.path()).is_empty());
    }

    #[test]
    fn an_encrypted_file_counts_with_the_holes_of_its_image() {
        let directory = tempfile::tempdir().unwrap();
        let space = AsleepSpace::at(directory.path().to_owned());
        let new = space.new_file(1, 0).unwrap();
        assert_eq!((new.bytes().unwrap(), new.plain_len().unwrap()), (0, None));
        let new = new.encrypted(None).unwrap();
        new.file().set_len(1 << 20).unwrap();
        assert_eq!(new.plain_len().unwrap(), Some(1 << 20));
        let before = new.bytes().unwrap();
        assert!(before > 1 << 20, "{before}");
        let sealed = new.seal().unwrap();
        let len = sealed.file.metadata().unwrap().len();
        assert_eq!(before, len.next_multiple_of(PAGE));
    }

    #[test]
    fn sleepers_are_found_by_their_notes() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let note = AsleepNote { base: Some(ImageId([9; 32])), ..note(7) };
        fs::write(path("7.json"), serde_json::to_vec(&note).unwrap()).unwrap();
        fs::write(path("7.image"), vec![1; 65_536]).unwrap();
        fs::write(path("8.image"), vec![1; 65_536]).unwrap();
        fs::write(path("9.json"), "{").unwrap();
        fs::write(path("10.json"), vec![b' '; NOTE_MAX as usize + 1]).unwrap();
        let found = sleepers_in(directory.path()).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].function.as_str(), found[0].base), ("f", Some(ImageId([9; 32]))));
        assert!((65_536..131_072).contains(&found[0].bytes), "{found:?}");
    }

    #[test]
    fn moments_outlast_the_process_that_noted_them() {
        let then = Instant::now().checked_sub(Duration::from_secs(5)).unwrap();
        let again = instant_of(ms_of(then));
        let apart = again.max(then) - again.min(then);
        assert!(apart < Duration::from_secs(1), "{apart:?}");
        assert!(instant_of(u64::MAX) <= Instant::now());
    }
}
