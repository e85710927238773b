//! Container images as root file systems of the store.

use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;
use thaw_home::home::{Home, HomeError};
use thaw_home::rootfs::StoredRootfs;
use thaw_oci::{
    FunctionPull, Image, Layout, Limits, OciError, Pull, PullProgress, Pulled, PulledFunction,
    Reference, Registries, Settings, UnpackReport,
};
use thaw_store::index::{Content, TreeError};
use thaw_store::{Domain, IndexId, InvalidName, Name, RootfsRecord, Store, StoreError};

/// Longest file of users and groups that is read.
const ACCOUNTS_MAX: u64 = 1 << 20;

/// How long the files of an interrupted pull are kept.
const PULLS_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Why a container image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// The image cannot be read, pulled or unpacked.
    #[error(transparent)]
    Oci(#[from] OciError),
    /// The store refused something.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The state directory cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The stored index makes no sense.
    #[error("the stored root file system is damaged ({0}); import or pull it again")]
    Tree(#[from] TreeError),
    /// There is no such name.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// What the store knows of the image makes no sense.
    #[error("what is stored of image {name} is damaged ({reason}); import or pull it again")]
    Record {
        /// The name.
        name: Name,
        /// Why not.
        reason: String,
    },
    /// The image's user is not in its files.
    #[error("the image has no user or group `{name}` in {file}; give numbers, as in 1000:1000")]
    NoAccount {
        /// The name.
        name: String,
        /// The file that should have it.
        file: &'static str,
    },
}

/// What the store keeps of an image beside its files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Known {
    /// How its program is run.
    settings: Settings,
    /// Under which name it was pulled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reference: Option<String>,
}

/// An image in the store.
#[derive(Clone, Debug)]
pub struct StoredImage {
    /// The name of its root file system.
    pub name: Name,
    /// Its files.
    pub index: IndexId,
    /// How its program is run.
    pub settings: Settings,
}

/// What another process is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// It pulls the same image.
    SamePull,
    /// It pulls a function whose pieces lie in the same place.
    SamePieces,
}

impl Awaited {
    /// One sentence.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::SamePull => {
                "another `thaw pull`, or the daemon, pulls the same thing now; this one goes on when that has ended"
            }
            Self::SamePieces => {
                "another `thaw pull`, or the daemon, pulls a function of the same sharing domain now; this one goes \
                 on when that has ended"
            }
        }
    }
}

/// Locks a file; `on_wait` is called if somebody else has to unlock it first.
///
/// # Errors
/// The file system has no such locks.
pub(crate) fn lock(file: &File, on_wait: impl FnOnce()) -> io::Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            on_wait();
            file.lock()
        }
        Ok(()) => Ok(()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// How far an import or a pull has come.
#[derive(Clone, Copy, Debug)]
pub enum ImageProgress {
    /// Another process has what this one needs, and is waited for.
    Waiting(Awaited),
    /// Layers are downloaded.
    Pulling(PullProgress),
    /// Layers are unpacked.
    Unpacking(UnpackReport),
}

/// Is told how far it is.
pub type OnProgress<'a> = dyn FnMut(ImageProgress) + 'a;

/// Imports the image of an OCI layout or an archive, under a name of the store or one of a registry
/// (`debian:12`), by which it is found as if it had been pulled.
///
/// # Errors
/// There is no such image in it, it is damaged or too large, or the store cannot be written.
pub fn import(
    store: &Store,
    path: &Path,
    tag: Option<&str>,
    name: &str,
    limits: Limits,
    progress: &mut OnProgress<'_>,
) -> Result<(StoredImage, UnpackReport), ContainerError> {
    let (name, reference) = import_name(name)?;
    let image = Layout::open(path)?.image(tag)?;
    unpack(store, &image, &name, reference.as_ref(), limits, progress)
}

/// The name in the store of an image that is imported, and the one of a registry if it has that.
fn import_name(text: &str) -> Result<(Name, Option<Reference>), ContainerError> {
    let wrong = match Name::new(text) {
        Ok(name) => return Ok((name, None)),
        Err(wrong) => wrong,
    };
    let reference = text.parse::<Reference>().ok();
    // What has a digest is that content and no other; buckets have functions.
    let reference = reference.filter(|found| !found.has_digest() && !text.contains("://"));
    match reference {
        Some(reference) => Ok((reference.store_name(), Some(reference))),
        None => Err(wrong.into()),
    }
}

/// Pulls an image from its registry, as `registries.toml` of the home says.
///
/// # Errors
/// The registry has no such image or cannot be reached, and as for [`import`].
pub fn pull(
    home: &Home,
    store: &Store,
    reference: &Reference,
    name: &Name,
    limits: Limits,
    progress: &mut OnProgress<'_>,
) -> Result<(StoredImage, UnpackReport), ContainerError> {
    match fetch(home, reference, limits, None, progress)? {
        Fetched::Image(image) => image.unpack(store, name, limits, progress),
        Fetched::Function(_) => Err(OciError::Function { name: reference.to_string() }.into()),
    }
}

/// What was downloaded.
#[derive(Debug)]
pub(crate) enum Fetched {
    /// An image, which has to be unpacked.
    Image(FetchedImage),
    /// The pieces of a function.
    Function(Box<PulledFunction>),
}

/// An image that was downloaded.
#[derive(Debug)]
pub(crate) struct FetchedImage {
    reference: Reference,
    directory: PathBuf,
    /// Two pulls of one image must not write to the same files.
    _alone: File,
    home: Home,
}

/// Downloads what a reference names.
///
/// # Errors
/// The registry has no such thing or cannot be reached.
pub(crate) fn fetch(
    home: &Home,
    reference: &Reference,
    limits: Limits,
    function: Option<FunctionPull<'_>>,
    progress: &mut OnProgress<'_>,
) -> Result<Fetched, ContainerError> {
    let registries = Registries::read(&home.registries())?;
    let directory = home.pull(reference.store_name().as_str())?;
    let alone = {
        let _acting = home.act()?;
        forget_old_pulls(&directory);
        alone_in(&directory, || progress(ImageProgress::Waiting(Awaited::SamePull)))?
    };
    let (owner, registries) = (home.owner()?, &registries);
    let pull = Pull { reference, registries, directory: &directory, owner, limits };
    let pulled = pull.run(function, &mut |done| progress(ImageProgress::Pulling(done)))?;
    let (reference, home) = (reference.clone(), home.clone());
    let image = FetchedImage { reference, directory, _alone: alone, home };
    match pulled {
        Pulled::Image => Ok(Fetched::Image(image)),
        Pulled::Function(function) => {
            // Nothing is in it.
            image.forget();
            Ok(Fetched::Function(function))
        }
    }
}

impl FetchedImage {
    /// Unpacks the image into the store.
    ///
    /// # Errors
    /// As for [`import`].
    pub fn unpack(
        self,
        store: &Store,
        name: &Name,
        limits: Limits,
        progress: &mut OnProgress<'_>,
    ) -> Result<(StoredImage, UnpackReport), ContainerError> {
        let image = Layout::open(&self.directory)?.image(None)?;
        let unpacked = unpack(store, &image, name, Some(&self.reference), limits, progress)?;
        // Its content is in the store.
        self.forget();
        Ok(unpacked)
    }

    /// Removes its files. What cannot be removed now is, after the next pull.
    fn forget(&self) {
        if let Ok(_acting) = self.home.act() {
            let _ = fs::remove_dir_all(&self.directory);
        }
    }
}

/// Waits until nobody else pulls into a directory; it is free again when the file is closed.
fn alone_in(directory: &Path, on_wait: impl FnOnce()) -> Result<File, StoreError> {
    let path = lock_of(directory);
    let opened = OpenOptions::new().create(true).append(true).open(&path);
    let locked = opened.and_then(|file| lock(&file, on_wait).map(|()| file));
    locked.map_err(|source| StoreError::Io { action: "lock", path, source })
}

/// The lock of a directory lies beside it and stays: one in it would go with it.
fn lock_of(directory: &Path) -> PathBuf {
    let mut path = directory.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

/// Removes what pulls left behind that were interrupted and not repeated, beside `directory`.
fn forget_old_pulls(directory: &Path) {
    let Some(entries) = directory.parent().and_then(|parent| fs::read_dir(parent).ok()) else {
        return;
    };
    let is_old = |path: &Path| {
        let modified = path.metadata().and_then(|found| found.modified());
        modified.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > PULLS_KEPT))
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        // Blobs are written below it, so its own time is that of the pull's beginning.
        let is_free = || {
            let lock = OpenOptions::new().create(true).append(true).open(lock_of(&path)).ok()?;
            lock.try_lock().ok().map(|()| lock)
        };
        if path != directory && path.is_dir() && is_old(&path) && is_free().is_some() {
            // Whoever else removes it has done the same.
            let _ = fs::remove_dir_all(&path);
        }
    }
}

fn unpack(
    store: &Store,
    image: &Image,
    name: &Name,
    reference: Option<&Reference>,
    limits: Limits,
    progress: &mut OnProgress<'_>,
) -> Result<(StoredImage, UnpackReport), ContainerError> {
    let mut session = store.session()?;
    let report = &mut |report: &UnpackReport| progress(ImageProgress::Unpacking(*report));
    let unpacked = image.unpack(&mut session, &Domain::shared(), limits, report)?;
    let index = session.put_index(&unpacked.tree)?;
    let settings = unpacked.settings;
    let reference = reference.map(ToString::to_string);
    let known = Known { settings: settings.clone(), reference };
    let known = serde_json::to_value(known).expect("it has text keys only");
    session.put_rootfs_of(name, index, Some(known))?;
    Ok((StoredImage { name: name.clone(), index, settings }, unpacked.report))
}

/// The image that somebody names: by its name in the store, or by the one that it was pulled by.
///
/// # Errors
/// It is in the store, but damaged.
pub fn find(store: &Store, text: &str) -> Result<Option<StoredImage>, ContainerError> {
    if let Ok(name) = Name::new(text) {
        match store.get_rootfs(&name) {
            Err(error) if error.is_not_found() => {}
            found => return stored(found?).map(Some),
        }
    }
    let Ok(reference) = text.parse::<Reference>() else { return Ok(None) };
    match store.get_rootfs(&reference.store_name()) {
        Err(error) if error.is_not_found() => Ok(None),
        found => {
            let record = found?;
            // Names of the store have a short hash only.
            let of = record.image.as_ref().and_then(|known| known["reference"].as_str());
            let is_meant = of == Some(reference.to_string().as_str());
            if is_meant { stored(record).map(Some) } else { Ok(None) }
        }
    }
}

fn stored(record: RootfsRecord) -> Result<StoredImage, ContainerError> {
    let RootfsRecord { name, index, image, .. } = record;
    let settings = match image {
        None => Settings::default(),
        Some(known) => {
            serde_json::from_value::<Known>(known)
                .map_err(|error| ContainerError::Record {
                    name: name.clone(),
                    reason: error.to_string(),
                })?
                .settings
        }
    };
    Ok(StoredImage { name, index, settings })
}

/// A user and its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Its home directory, if the image says.
    pub home: Option<String>,
}

/// The user that a text such as `app`, `1000` or `app:staff` means in an image; empty: root.
///
/// # Errors
/// A name is not in `/etc/passwd` or `/etc/group` of the image.
pub fn account(rootfs: &StoredRootfs, text: &str) -> Result<Account, ContainerError> {
    let (user, group) = text.split_once(':').unwrap_or((text, ""));
    let user = if user.is_empty() { "0" } else { user };
    let passwd = read(rootfs, "etc/passwd")?;
    let found = line(&passwd, user);
    let field = |index: usize| found.as_ref().and_then(|fields| fields.get(index));
    let number = |index: usize| field(index).and_then(|text| text.parse::<u32>().ok());
    let missing = |name: &str, file| ContainerError::NoAccount { name: name.to_owned(), file };
    let uid = match (number(2), user.parse()) {
        (Some(uid), _) | (None, Ok(uid)) => uid,
        (None, Err(_)) => return Err(missing(user, "/etc/passwd")),
    };
    let gid = match group {
        "" => number(3).unwrap_or(0),
        group => {
            let groups = read(rootfs, "etc/group")?;
            let named = line(&groups, group).and_then(|fields| fields.get(2)?.parse().ok());
            let number = named.or_else(|| group.parse().ok());
            number.ok_or_else(|| missing(group, "/etc/group"))?
        }
    };
    let home = field(5).filter(|home| home.starts_with('/')).cloned();
    Ok(Account { uid, gid, home })
}

/// The fields of the line of a name or number in a file such as `/etc/passwd` (passwd(5), group(5)).
fn line(text: &str, account: &str) -> Option<Vec<String>> {
    let fields = |line: &str| line.split(':').map(str::to_owned).collect::<Vec<_>>();
    let all = || text.lines().map(fields);
    let by_number = || all().find(|fields| fields.get(2).is_some_and(|number| number == account));
    all().find(|fields| fields.first().is_some_and(|name| name == account)).or_else(by_number)
}

/// A text file of an image; empty if there is none.
fn read(rootfs: &StoredRootfs, path: &str) -> Result<String, ContainerError> {
    let tree = rootfs.tree()?;
    let Some(node) = tree.find_followed(Path::new(path)) else { return Ok(String::new()) };
    let Content::Regular(Some(blob)) = tree.node(node).content else { return Ok(String::new()) };
    let mut bytes = Vec::new();
    let read = rootfs.open_content(blob.hash)?.take(ACCOUNTS_MAX).read_to_end(&mut bytes);
    read.map_err(|source| StoreError::Io { action: "read", path: path.into(), source })?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pulls_that_nobody_repeats_are_forgotten() {
        let pulls = tempfile::tempdir().unwrap();
        let [own, old, new] = ["own", "old", "new"].map(|name| pulls.path().join(name));
        for directory in [&own, &old, &new] {
            fs::create_dir(directory).unwrap();
            fs::write(directory.join("part"), "x").unwrap();
        }
        let long_ago = std::time::SystemTime::now() - PULLS_KEPT * 2;
        for directory in [&own, &old] {
            File::open(directory).unwrap().set_modified(long_ago).unwrap();
        }
        forget_old_pulls(&own);
        assert!(own.exists() && new.exists() && !old.exists());
    }

    #[test]
    fn an_image_is_imported_under_a_name_of_the_store_or_of_a_registry() {
        let plain = import_name("app").unwrap();
        assert_eq!(plain, (Name::new("app").unwrap(), None));
        let (name, reference) = import_name("debian:12").unwrap();
        let reference = reference.expect("it has a tag");
        assert_eq!(reference.to_string(), "docker.io/library/debian:12");
        assert_eq!(name, reference.store_name());
        assert!(import_name("registry.example/team/app").unwrap().1.is_some());
        let digest = format!("debian@sha256:{}", "0".repeat(64));
        for wrong in ["", "-a", "a b:1", &digest, "s3://bucket/app:1"] {
            assert!(matches!(import_name(wrong), Err(ContainerError::Name(_))), "{wrong}");
        }
    }

    /// As in images whose `/etc` is elsewhere.
    #[test]
    fn accounts_are_found_behind_links() {
        use thaw_store::index::{Attributes, Node};
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("store")).unwrap();
        let mut session = store.session().unwrap();
        let text = b"app:x:1000:50::/srv:/bin/sh\n";
        let blob = session.put_blob(text, &Domain::shared()).unwrap();
        let mut tree = thaw_store::Tree::new();
        let node = |content| Node { content, attributes: Attributes::root(0o644) };
        tree.add_at(Path::new("/usr/share/passwd"), node(Content::Regular(blob))).unwrap();
        let link = Content::Symlink(b"../usr/share/passwd".to_vec());
        tree.add_at(Path::new("/etc/passwd"), node(link)).unwrap();
        let index = session.put_index(&tree).unwrap();
        let rootfs = StoredRootfs::open(&store, index).unwrap();
        let found = account(&rootfs, "app").unwrap();
        assert_eq!((found.uid, found.gid, found.home.as_deref()), (1000, 50, Some("/srv")));
        assert!(account(&rootfs, "stranger").is_err());
    }

    #[test]
    fn lines_are_found_by_name_and_by_number() {
        let text = "root:x:0:0::/root:/bin/sh\napp:x:1000:50::/home/app:/bin/sh\n\nbroken\n";
        assert_eq!(line(text, "app").unwrap()[2], "1000");
        assert_eq!(line(text, "1000").unwrap()[0], "app");
        assert!(line(text, "nobody").is_none() && line("", "0").is_none());
    }
}
