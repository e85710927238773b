//! Archives that clients upload for the steps `COPY` of their builds.
//!
//! They lie below THAW_HOME, each owner's in a directory of its own, by the hash that the SDK gives
//! the files; nothing in them is looked at on the host. The oldest make room for new ones. What has
//! not come whole has another name, and goes.

use crate::problem::{Kind, Problem};
use ring::digest::{SHA256, digest};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

/// Name of their directory in the node's home.
const DIRECTORY: &str = "e2b-uploads";
/// What the name of an archive ends with that has not come whole.
const PARTIAL: &str = "part";
/// So long after its last use an archive makes no room: its build is to find it.
const IN_USE: Duration = Duration::from_secs(3600);

/// What clients may upload.
#[derive(Clone, Copy, Debug)]
pub struct UploadBounds {
    /// Bytes of one archive.
    pub one: u64,
    /// Bytes of all of an owner.
    pub all: u64,
    /// Archives of an owner.
    pub count: usize,
}

impl Default for UploadBounds {
    fn default() -> Self {
        Self { one: 1 << 30, all: 4 << 30, count: 200 }
    }
}

/// One archive that is there.
#[derive(Clone, Copy, Debug)]
struct Kept {
    bytes: u64,
    used: SystemTime,
}

/// What an owner has.
#[derive(Default)]
struct Shelf {
    /// By hash.
    whole: BTreeMap<String, Kept>,
    /// Bytes of those that are coming, by number.
    coming: BTreeMap<u64, u64>,
}

impl Shelf {
    /// Archives and bytes without the one that a new one replaces.
    fn taken_beside(&self, hash: &str) -> (usize, u64) {
        let others = || self.whole.iter().filter(|(other, _)| *other != hash).map(|(_, one)| one);
        let bytes: u64 = others().map(|kept| kept.bytes).chain(self.coming.values().copied()).sum();
        (others().count() + self.coming.len(), bytes)
    }
}

/// All archives.
pub struct Uploads {
    place: PathBuf,
    bounds: UploadBounds,
    /// By the name of the owner's directory.
    shelves: Mutex<BTreeMap<String, Shelf>>,
    /// The number of the next one that comes.
    next: AtomicU64,
}

/// An archive that is coming. It goes unless it comes whole; until then one that is there already
/// stays of use, so that two builds may upload the same files at once.
pub struct Upload {
    uploads: Arc<Uploads>,
    shelf: String,
    hash: String,
    number: u64,
    bytes: u64,
    file: Option<File>,
}

impl Uploads {
    /// Those below a directory. What has not come whole is removed.
    ///
    /// # Errors
    /// The directory cannot be read or made.
    pub fn load(home: &Path, bounds: UploadBounds) -> io::Result<Arc<Self>> {
        let place = home.join(DIRECTORY);
        make_directory(&place)?;
        let mut shelves = BTreeMap::new();
        for entry in fs::read_dir(&place)? {
            let path = entry?.path();
            if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
                shelves.insert(name.to_owned(), load_shelf(&path)?);
            }
        }
        let (shelves, next) = (Mutex::new(shelves), AtomicU64::default());
        Ok(Arc::new(Self { place, bounds, shelves, next }))
    }

    /// Whether an owner has an archive, which is going to be used if so.
    pub fn has(&self, owner: &str, hash: &str) -> bool {
        let mut shelves = self.shelves();
        let shelf = shelves.get_mut(&shelf_of(owner));
        match shelf.and_then(|shelf| shelf.whole.get_mut(hash)) {
            Some(kept) => {
                kept.used = SystemTime::now();
                true
            }
            None => false,
        }
    }

    /// Opens an archive of an owner.
    ///
    /// # Errors
    /// There is none.
    pub fn open(&self, owner: &str, hash: &str) -> Result<File, Problem> {
        let opened = self.has(owner, hash).then(|| File::open(self.path(&shelf_of(owner), hash)));
        opened.and_then(Result::ok).ok_or_else(|| {
            Problem::new(
                Kind::NotFound,
                "its files are not here; build it again, which uploads them",
            )
        })
    }

    /// What tells one upload of an archive from another one under the same hash, which nobody
    /// compares with what it has: none if there is none.
    pub fn stamp(&self, owner: &str, hash: &str) -> Option<String> {
        let found = fs::metadata(self.path(&shelf_of(owner), hash)).ok()?;
        let (inode, seconds, nanoseconds) = (found.ino(), found.mtime(), found.mtime_nsec());
        Some(format!("{inode} {} {seconds} {nanoseconds}", found.len()))
    }

    /// Makes room for an archive of so many bytes.
    ///
    /// # Errors
    /// It is too large, or all of the owner's room is in use.
    pub fn begin(self: &Arc<Self>, owner: &str, hash: &str, bytes: u64) -> Result<Upload, Problem> {
        if bytes > self.bounds.one {
            return Err(Problem::new(
                Kind::TooLarge,
                format!(
                    "the files of one COPY take {bytes} bytes packed, and at most {} are taken; \
                     copy less, or in parts",
                    self.bounds.one
                ),
            ));
        }
        let name = shelf_of(owner);
        let mut shelves = self.shelves();
        let shelf = shelves.entry(name.clone()).or_default();
        self.make_room(&name, shelf, hash, bytes)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let file =
            self.create(&name, number).map_err(|error| Problem::new(Kind::NoSpace, error))?;
        shelf.coming.insert(number, bytes);
        drop(shelves);
        let (uploads, hash, file) = (self.clone(), hash.to_owned(), Some(file));
        Ok(Upload { uploads, shelf: name, hash, number, bytes, file })
    }

    /// Removes the oldest archives until there is room for one more, which replaces its like.
    fn make_room(
        &self,
        name: &str,
        shelf: &mut Shelf,
        hash: &str,
        bytes: u64,
    ) -> Result<(), Problem> {
        let now = SystemTime::now();
        // After a clock that was ahead they would be in use for as long as it was.
        shelf.whole.values_mut().for_each(|kept| kept.used = kept.used.min(now));
        let fits = |shelf: &Shelf| {
            let (count, sum) = shelf.taken_beside(hash);
            count < self.bounds.count && sum.saturating_add(bytes) <= self.bounds.all
        };
        while !fits(shelf) {
            let is_free = |kept: &Kept| now.duration_since(kept.used).is_ok_and(|age| age > IN_USE);
            let free = shelf.whole.iter().filter(|(other, kept)| *other != hash && is_free(kept));
            let oldest = free.min_by_key(|(_, kept)| kept.used).map(|(hash, _)| hash.clone());
            let oldest = oldest.ok_or_else(|| {
                let UploadBounds { all, count, .. } = self.bounds;
                Problem::new(
                    Kind::Exhausted,
                    format!(
                        "the files that were uploaded within the last hour take as much as is kept \
                         ({all} bytes, {count} archives); copy less, or try again later"
                    ),
                )
            })?;
            // One that is gone already takes no room.
            let _ = fs::remove_file(self.path(name, &oldest));
            shelf.whole.remove(&oldest);
        }
        Ok(())
    }

    fn create(&self, shelf: &str, number: u64) -> io::Result<File> {
        make_directory(&self.place.join(shelf))?;
        let path = self.partial(shelf, number);
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
    }

    fn partial(&self, shelf: &str, number: u64) -> PathBuf {
        self.place.join(shelf).join(number.to_string()).with_extension(PARTIAL)
    }

    fn path(&self, shelf: &str, hash: &str) -> PathBuf {
        self.place.join(shelf).join(hash)
    }

    fn shelves(&self) -> MutexGuard<'_, BTreeMap<String, Shelf>> {
        self.shelves.lock().expect("no holder panics")
    }
}

impl Upload {
    /// Where its bytes go; to be taken once.
    pub fn file(&mut self) -> File {
        self.file.take().expect("it is taken once")
    }

    /// It has come whole.
    ///
    /// # Errors
    /// The host's.
    pub fn keep(self) -> io::Result<()> {
        let mut shelves = self.uploads.shelves();
        let path = self.uploads.path(&self.shelf, &self.hash);
        fs::rename(self.uploads.partial(&self.shelf, self.number), path)?;
        if let Some(shelf) = shelves.get_mut(&self.shelf) {
            shelf.coming.remove(&self.number);
            let kept = Kept { bytes: self.bytes, used: SystemTime::now() };
            shelf.whole.insert(self.hash.clone(), kept);
        }
        drop(shelves);
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let mut shelves = self.uploads.shelves();
        let Some(shelf) = shelves.get_mut(&self.shelf) else { return };
        if shelf.coming.remove(&self.number).is_some() {
            // What cannot be removed the next daemon removes.
            let _ = fs::remove_file(self.uploads.partial(&self.shelf, self.number));
        }
    }
}

/// The name of an owner's directory: names of keys may have slashes.
fn shelf_of(owner: &str) -> String {
    let hash = digest(&SHA256, owner.as_bytes());
    hash.as_ref()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn make_directory(path: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

fn load_shelf(path: &Path) -> io::Result<Shelf> {
    let mut shelf = Shelf::default();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let (name, found) = (entry.file_name(), entry.metadata()?);
        match name.to_str().filter(|name| super::steps::is_hash(name)) {
            Some(hash) => {
                let used = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                shelf.whole.insert(hash.to_owned(), Kept { bytes: found.len(), used });
            }
            None => fs::remove_file(entry.path())?,
        }
    }
    Ok(shelf)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const BOUNDS: UploadBounds = UploadBounds { one: 10, all: 15, count: 2 };

    fn hash(n: u8) -> String {
        format!("{n:02x}").repeat(32)
    }

    fn upload(uploads: &Arc<Uploads>, n: u8, bytes: &[u8]) -> Result<(), Problem> {
        let mut upload = uploads.begin("a", &hash(n), bytes.len() as u64)?;
        upload.file().write_all(bytes).unwrap();
        upload.keep().unwrap();
        Ok(())
    }

    #[test]
    fn archives_are_their_owners_and_outlive_the_daemon() {
        let home = tempfile::tempdir().unwrap();
        let uploads = Uploads::load(home.path(), BOUNDS).unwrap();
        upload(&uploads, 1, b"12345").unwrap();
        assert!(uploads.has("a", &hash(1)) && !uploads.has("b", &hash(1)));
        let path = uploads.path(&shelf_of("a"), &hash(1));
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        // One that does not come whole leaves nothing, also if the daemon ends meanwhile.
        let partial = uploads.begin("a", &hash(2), 5).unwrap();
        assert!(!uploads.has("a", &hash(2)));
        std::mem::forget(partial);
        let uploads = Uploads::load(home.path(), BOUNDS).unwrap();
        assert!(uploads.has("a", &hash(1)) && !uploads.has("a", &hash(2)));
        drop(uploads.begin("a", &hash(2), 5).unwrap());
        let left = fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!((left, uploads.open("a", &hash(1)).is_ok()), (1, true));
        assert_eq!(uploads.open("b", &hash(1)).unwrap_err().kind, Kind::NotFound);
    }

    #[test]
    fn the_room_of_an_owner_has_bounds_and_the_oldest_go() {
        let home = tempfile::tempdir().unwrap();
        let uploads = Uploads::load(home.path(), BOUNDS).unwrap();
        assert_eq!(upload(&uploads, 1, &[0; 11]).unwrap_err().kind, Kind::TooLarge);
        upload(&uploads, 1, &[0; 10]).unwrap();
        // The like replaces it, and needs no room besides.
        upload(&uploads, 1, &[0; 9]).unwrap();
        assert_eq!(upload(&uploads, 2, &[0; 7]).unwrap_err().kind, Kind::Exhausted);
        upload(&uploads, 2, &[0; 6]).unwrap();
        assert_eq!(upload(&uploads, 3, b"").unwrap_err().kind, Kind::Exhausted);
        uploads.begin("b", &hash(3), 10).unwrap();
        let shelf = shelf_of("a");
        age(&uploads, &shelf, 1, |used| used - 2 * IN_USE);
        upload(&uploads, 3, b"123").unwrap();
        assert!(!uploads.has("a", &hash(1)) && uploads.has("a", &hash(2)));
        assert!(!uploads.path(&shelf, &hash(1)).exists());
    }

    fn age(uploads: &Uploads, shelf: &str, n: u8, of: impl FnOnce(SystemTime) -> SystemTime) {
        let mut shelves = uploads.shelves();
        let kept = shelves.get_mut(shelf).unwrap().whole.get_mut(&hash(n)).unwrap();
        kept.used = of(kept.used);
    }

    #[test]
    fn the_same_files_may_come_twice_at_once_and_one_that_does_not_come_takes_nothing_away() {
        let home = tempfile::tempdir().unwrap();
        let uploads = Uploads::load(home.path(), BOUNDS).unwrap();
        let both = [b"one", b"two"].map(|bytes| {
            let mut upload = uploads.begin("a", &hash(1), 3).unwrap();
            upload.file().write_all(bytes).unwrap();
            upload
        });
        // Both count until they are there.
        assert_eq!(uploads.begin("a", &hash(2), 1).err().unwrap().kind, Kind::Exhausted);
        let contents = || io::read_to_string(uploads.open("a", &hash(1)).unwrap()).unwrap();
        let [first, second] = both;
        first.keep().unwrap();
        assert_eq!(contents(), "one");
        second.keep().unwrap();
        assert_eq!(contents(), "two");
        let third = uploads.begin("a", &hash(1), 3).unwrap();
        assert_eq!(contents(), "two", "it is of use while it is replaced");
        drop(third);
        assert_eq!(contents(), "two");
        let shelf = uploads.place.join(shelf_of("a"));
        assert_eq!(fs::read_dir(shelf).unwrap().count(), 1);
    }

    #[test]
    fn a_clock_that_was_ahead_keeps_no_room_taken() {
        let home = tempfile::tempdir().unwrap();
        let uploads = Uploads::load(home.path(), BOUNDS).unwrap();
        upload(&uploads, 1, &[0; 10]).unwrap();
        let shelf = shelf_of("a");
        age(&uploads, &shelf, 1, |used| used + 1000 * IN_USE);
        assert_eq!(upload(&uploads, 2, &[0; 6]).unwrap_err().kind, Kind::Exhausted);
        age(&uploads, &shelf, 1, |used| used - 2 * IN_USE);
        upload(&uploads, 2, &[0; 6]).unwrap();
    }
}
