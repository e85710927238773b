//! `$THAW_HOME`: where a node keeps its state, and who may use it.
//!
//! ```text
//! $THAW_HOME/
//!   store/…          blobs, rootfs indexes, images: owned by thaw-store
//!   logs/NAME.log    what a function printed
//!   work/NAME/       host-side build results, such as installed packages
//!   swap/            memory of hibernated instances; its files have no names
//!   pulls/           container images that are being pulled, and what registries have
//!   pieces/          pieces of functions that were pulled, a directory for each sharing domain
//!   volumes/         directories that functions write to: see crate::volumes
//!   asleep/          instances that are asleep: an image and a note each
//!   tenants.toml     what tenants may use, written by the operator
//!   daemon.lock      locked by the one daemon that serves this directory
//!   daemon.json      how to reach that daemon
//!   admin.sock       its admin API
//!   admin.token      the secret for its admin API over TCP, if it has one
//! ```

use crate::admin::AdminAddress;
use crate::user::{DaemonUser, give_home};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use thaw_store::{Acting, Closed, Owner, Reserve};

/// Environment variable that names the directory.
pub const HOME_VARIABLE: &str = "THAW_HOME";

/// The directory that root uses without it.
const ROOTS_HOME: &str = "/var/lib/thaw";

/// The directory with a node's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    root: PathBuf,
}

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// Neither `THAW_HOME` nor a user data directory is known.
    #[error("no place for Thaw's state is known; set THAW_HOME to a directory")]
    Unknown,
    /// A directory or file could not be made.
    #[error("cannot use {} ({error}); {}", path.display(), way_out(error))]
    Unusable {
        /// The directory or file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// It is not there, and nothing makes it now.
    #[error(
        "there is no Thaw home in {}; set THAW_HOME to another directory, or begin one with \
         `thaw build` or `thaw serve`",
        path.display()
    )]
    Missing {
        /// The directory.
        path: PathBuf,
    },
    /// It is another user's.
    #[error(
        "permission denied on {}, which belongs to user {owner}; run this as that user or as \
         root, or set THAW_HOME to a directory of your own",
        path.display()
    )]
    OfAnotherUser {
        /// The directory or file.
        path: PathBuf,
        /// User id of its owner.
        owner: u32,
    },
    /// It holds what no Thaw has put there, and would be given to the daemon's user.
    #[error(
        "{} holds `{}`, which is not Thaw's; set THAW_HOME to a directory of its own, or move that away",
        path.display(), thaw_sandbox::escape(name.as_encoded_bytes())
    )]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// What is in it.
        name: std::ffi::OsString,
    },
    /// A part of it is a link to a directory that the daemon may not use.
    #[error(
        "{} leads to {}, which the daemon's user does not own; run `chown -R {uid}:{gid} {}`",
        link.display(), target.display(), target.display()
    )]
    LinkedToOthers {
        /// The link.
        link: PathBuf,
        /// Where it leads.
        target: PathBuf,
        /// User id of the daemon.
        uid: u32,
        /// Its group id.
        gid: u32,
    },
    /// Some of a build's directory is a link.
    #[error("{} leads to {}; remove the link", path.display(), real.display())]
    Elsewhere {
        /// The directory.
        path: PathBuf,
        /// Where it is.
        real: PathBuf,
    },
    /// A part of it is a link that a daemon, too, could have made.
    #[error(
        "{} is a link, which is followed only if root has made it; set THAW_HOME to a directory \
         that holds the files themselves",
        link.display()
    )]
    LinkedByDaemon {
        /// The link.
        link: PathBuf,
    },
    /// Another daemon serves the directory.
    #[error("another daemon already serves {}; stop it, or set THAW_HOME to another directory", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
}

/// How to reach the daemon that serves a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonAddress {
    /// Process id of the daemon.
    pub pid: u32,
    /// Admin API: the Unix socket.
    pub admin: AdminAddress,
    /// Admin API over TCP, if it listens there, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin_tcp: Option<SocketAddr>,
    /// Shared gateway.
    pub gateway: SocketAddr,
    /// E2B's API, if it is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub e2b: Option<SocketAddr>,
    /// The dashboard, if it is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dashboard: Option<SocketAddr>,
}

/// Proof that this process is the directory's one daemon; ends with it.
#[derive(Debug)]
pub struct DaemonLock {
    home: Home,
    file: File,
}

/// How a directory or file becomes usable.
fn way_out(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room on its disk",
        _ => "check its owner and permissions, or set THAW_HOME to another directory",
    }
}

impl Home {
    /// The directory at `root`, made if missing.
    ///
    /// # Errors
    /// [`HomeError::Unusable`] if it cannot be made.
    pub fn at(root: impl Into<PathBuf>) -> Result<Self, HomeError> {
        let home = Self { root: root.into() };
        let is_new = !home.root.exists();
        make_private(&home.root).map_err(|error| home.unusable(error))?;
        if is_new && let Some(user) = DaemonUser::for_home(&home) {
            give_home(&home, user.ids)?;
        }
        // Functions refer to files by absolute paths, and daemons change directories.
        match fs::canonicalize(&home.root) {
            Ok(root) => Ok(Self { root }),
            Err(error) => Err(home.unusable(error)),
        }
    }

    pub(crate) fn unusable(&self, error: io::Error) -> HomeError {
        HomeError::refused(&self.root, error)
    }

    /// `$THAW_HOME`; without it `/var/lib/thaw` for root and the user's data
    /// directory for everyone else.
    ///
    /// # Errors
    /// No such directory is known, or it cannot be made.
    pub fn from_environment() -> Result<Self, HomeError> {
        match Self::chosen().or_else(Self::usual) {
            Some(root) => Self::at(root),
            None => Err(HomeError::Unknown),
        }
    }

    /// As [`Home::from_environment`], but makes nothing.
    ///
    /// # Errors
    /// No such directory is known, or it is not there.
    pub fn existing() -> Result<Self, HomeError> {
        let path = Self::chosen().or_else(Self::usual).ok_or(HomeError::Unknown)?;
        match path.try_exists() {
            Ok(false) => Err(HomeError::Missing { path }),
            // One that may not be seen says so when it is used.
            Ok(true) | Err(_) => Self::at(path),
        }
    }

    /// All directories where this user's state may lie, whether they exist or not:
    /// `$THAW_HOME`, the one that is used without it, and root's.
    pub fn candidates() -> Vec<PathBuf> {
        let all = [Self::chosen(), Self::usual(), Some(PathBuf::from(ROOTS_HOME))];
        all.into_iter().flatten().collect()
    }

    /// What `$THAW_HOME` names.
    fn chosen() -> Option<PathBuf> {
        variable(HOME_VARIABLE).map(PathBuf::from)
    }

    /// What is used without it.
    fn usual() -> Option<PathBuf> {
        if rustix::process::geteuid().is_root() {
            return Some(PathBuf::from(ROOTS_HOME));
        }
        let data = match (variable("XDG_DATA_HOME"), variable("HOME")) {
            (Some(data), _) => PathBuf::from(data),
            (None, Some(home)) => Path::new(&home).join(".local/share"),
            (None, None) => return None,
        };
        Some(data.join("thaw"))
    }

    /// The directory itself, absolute.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directories in it, which may be links to others.
    pub(crate) fn parts(&self) -> [PathBuf; 2] {
        [self.store(), self.root.join("logs")]
    }

    /// The store's directory.
    pub fn store(&self) -> PathBuf {
        self.root.join("store")
    }

    /// The directory with the functions' output, made if missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn logs(&self) -> Result<PathBuf, HomeError> {
        let path = self.root.join("logs");
        self.make_directory(&path)?;
        Ok(path)
    }

    /// Where an image is downloaded to: a directory of its own for each name, made if it is missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn pull(&self, name: &str) -> Result<PathBuf, HomeError> {
        let path = self.root.join("pulls").join(name);
        self.make_directory(&path)?;
        Ok(path)
    }

    /// The directory that keeps pieces of functions under a name, made if it is missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn pieces(&self, name: &str) -> Result<PathBuf, HomeError> {
        let path = self.root.join("pieces").join(name);
        self.make_directory(&path)?;
        Ok(path)
    }

    /// The directory with functions of which only a part is here.
    pub fn partial(&self) -> PathBuf {
        self.root.join("partial")
    }

    /// The directory of one of them, made if it is missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn partial_of(&self, function: &str) -> Result<PathBuf, HomeError> {
        let path = self.partial().join(function);
        self.make_directory(&path)?;
        Ok(path)
    }

    /// The file that notes which repositories have what, in a directory that is made if missing.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn mounts(&self) -> Result<PathBuf, HomeError> {
        let path = self.root.join("pulls");
        self.make_directory(&path)?;
        Ok(path.join("mounts.json"))
    }

    /// With whose rights files in it are written.
    ///
    /// # Errors
    /// It cannot be looked at.
    pub fn owner(&self) -> Result<Owner, HomeError> {
        Owner::of(&self.root).map_err(|error| self.unusable(error))
    }

    /// What is known of registries.
    pub fn registries(&self) -> PathBuf {
        self.root.join("registries.toml")
    }

    /// The directory for the memory of hibernated instances, made if missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn swap(&self) -> Result<PathBuf, HomeError> {
        let path = self.root.join("swap");
        self.make_directory(&path)?;
        Ok(path)
    }

    /// The directory for instances that are asleep, made if missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn asleep(&self) -> Result<PathBuf, HomeError> {
        let path = self.root.join("asleep");
        self.make_directory(&path)?;
        Ok(path)
    }

    /// The directory of the authority that programs with `[[egress.inject]]` trust, made if
    /// missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn inject(&self) -> Result<PathBuf, HomeError> {
        let path = self.root.join("inject");
        self.make_directory(&path)?;
        Ok(path)
    }

    /// The directory for the queue of triggers, made if missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn triggers(&self) -> Result<PathBuf, HomeError> {
        let path = self.root.join("triggers");
        self.make_directory(&path)?;
        Ok(path)
    }

    /// A directory for host-side build results of one function, made if missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn work(&self, function: &str) -> Result<PathBuf, HomeError> {
        let path = self.root.join("work").join(function);
        self.make_directory(&path)?;
        Ok(path)
    }

    /// One that is bound into the sandboxes of builds, made if missing.
    ///
    /// # Errors
    /// It cannot be made, or lies elsewhere: a build writes there with the rights of whoever
    /// builds.
    pub fn kept(&self, function: &str, name: &str) -> Result<PathBuf, HomeError> {
        let path = self.work(function)?.join(name);
        self.make_directory(&path)?;
        match fs::canonicalize(&path) {
            Ok(real) if real == path => Ok(path),
            Ok(real) => Err(HomeError::Elsewhere { path, real }),
            Err(error) => Err(HomeError::Unusable { path, error }),
        }
    }

    /// Makes a directory in it, for its owner.
    fn make_directory(&self, path: &Path) -> Result<(), HomeError> {
        let _acting = self.act()?;
        make_private(path).map_err(|error| HomeError::refused(path, error))
    }

    /// Acts with the rights of the owner of the directory, if this process is root and they
    /// are not, until the result is dropped: the owner may have put links in it.
    pub fn act(&self) -> Result<Acting, HomeError> {
        self.owner()?.act().map_err(|error| self.unusable(error))
    }

    /// Room for what is small and needed although the disk is full: that of the store, which lies on
    /// the same disk as a rule.
    pub fn reserve(&self) -> Reserve {
        Reserve::of(&self.store())
    }

    /// The Unix socket of the daemon's admin API.
    pub fn admin_socket(&self) -> PathBuf {
        self.root.join("admin.sock")
    }

    /// The file with the secret for the admin API over TCP.
    pub fn admin_token(&self) -> PathBuf {
        self.root.join("admin.token")
    }

    /// Becomes the directory's one daemon.
    ///
    /// # Errors
    /// [`HomeError::Locked`] while another process is.
    pub fn lock(&self) -> Result<DaemonLock, HomeError> {
        // Whoever asks for the daemon's address holds the lock for an instant.
        for _ in 0..4 {
            match self.try_lock() {
                Err(HomeError::Locked { .. }) => thread::sleep(Duration::from_millis(25)),
                other => return other,
            }
        }
        self.try_lock()
    }

    fn try_lock(&self) -> Result<DaemonLock, HomeError> {
        let path = self.root.join("daemon.lock");
        let _acting = self.act()?;
        let open =
            || OpenOptions::new().create(true).write(true).truncate(false).mode(0o600).open(&path);
        let file = self
            .reserve()
            .spend(open)
            .map_err(|error| HomeError::Unusable { path: path.clone(), error })?;
        // The host drops the lock with the process, so a killed daemon leaves
        // nothing to clean up.
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(DaemonLock { home: self.clone(), file }),
            Err(Errno::WOULDBLOCK) => Err(HomeError::Locked { path: self.root.clone() }),
            Err(error) => Err(HomeError::Unusable { path, error: error.into() }),
        }
    }

    /// Where the running daemon is reached; `None` if none is running.
    pub fn daemon(&self) -> Option<DaemonAddress> {
        let _acting = self.act().ok()?;
        let text = fs::read(self.root.join("daemon.json")).ok()?;
        let address: DaemonAddress = serde_json::from_slice(&text).ok()?;
        // A killed daemon leaves the file but not the lock.
        matches!(self.try_lock(), Err(HomeError::Locked { .. })).then_some(address)
    }
}

impl Home {
    /// The file that keeps this user from seeing whether a daemon is running, and the user id of
    /// its owner; `None`: nothing does.
    pub fn hidden_daemon(&self) -> Option<(PathBuf, u32)> {
        let path = self.root.join("daemon.lock");
        let denied = |path: &Path| {
            fs::File::open(path).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
        };
        let hidden = [self.root.clone(), path].into_iter().find(|path| denied(path))?;
        let owner = fs::metadata(&hidden).map_or(0, |metadata| metadata.uid());
        Some((hidden, owner))
    }
}

impl AsFd for DaemonLock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl DaemonLock {
    /// The lock that another process holds through the same open file, and holds on to.
    pub fn inherited(home: &Home, file: OwnedFd) -> Self {
        Self { home: home.clone(), file: file.into() }
    }

    /// Publishes how to reach this daemon.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn announce(&self, address: &DaemonAddress) -> Result<(), HomeError> {
        let path = self.home.root.join("daemon.json");
        let temporary = self.home.root.join(format!("daemon.json.{}", std::process::id()));
        let text = serde_json::to_vec_pretty(address).expect("an address is plain data");
        let write = || {
            let written = fs::write(&temporary, &text).and_then(|()| fs::rename(&temporary, &path));
            written.inspect_err(|_| drop(fs::remove_file(&temporary)))
        };
        self.home.reserve().spend(write).map_err(|error| HomeError::Unusable { path, error })
    }
}

impl Drop for DaemonLock {
    fn drop(&mut self) {
        // Harmless if it fails: without the lock, the file is ignored.
        let _ = fs::remove_file(self.home.root.join("daemon.json"));
    }
}

impl HomeError {
    /// The host has refused `path`, which is in the directory.
    pub fn refused(path: &Path, error: io::Error) -> Self {
        match thaw_store::closed(path, &error) {
            Some(Closed { path, owner }) => Self::OfAnotherUser { path, owner },
            None => Self::Unusable { path: path.to_owned(), error },
        }
    }
}

/// Makes a directory that only its owner can enter: functions' files and
/// memory are nobody else's business.
fn make_private(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// The value of an environment variable, if it has one.
fn variable(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::AdminToken;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    /// As somebody who has taken over the daemon may do.
    #[test]
    fn root_makes_nothing_through_links_of_the_owners() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // The owner cannot go into this one, only into the home below it.
        let all = tempfile::tempdir().unwrap();
        let home = Home::at(all.path().join("home")).unwrap();
        let roots = all.path().join("roots");
        fs::create_dir(&roots).unwrap();
        let owner = fs::metadata(home.root()).unwrap();
        assert_ne!(owner.uid(), 0);
        for (name, target) in
            [("daemon.lock", "file"), ("work", ""), ("logs", "logs"), ("admin.token", "secret")]
        {
            let link = home.root().join(name);
            std::os::unix::fs::symlink(roots.join(target), &link).unwrap();
            std::os::unix::fs::lchown(&link, Some(owner.uid()), Some(owner.gid())).unwrap();
        }
        let secret = roots.join("secret");
        fs::write(&secret, "a secret of root's\n").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(matches!(home.lock(), Err(HomeError::Unusable { .. })));
        assert!(home.work("function").is_err());
        assert!(home.logs().is_err());
        fs::remove_file(home.root().join("work")).unwrap();
        let work = home.work("function").unwrap();
        assert_eq!(home.kept("function", "home").unwrap(), work.join("home"));
        // One to which the owner could write is not bound either.
        std::os::unix::fs::symlink(work.join("home"), work.join("packages")).unwrap();
        let error = home.kept("function", "packages").unwrap_err();
        assert!(matches!(error, HomeError::Elsewhere { .. }), "{error}");
        let token = AdminToken::read_or_create(&home.admin_token(), "--admin-token-file");
        assert!(token.is_err(), "the daemon would be told");
        assert_eq!(fs::read_dir(&roots).unwrap().count(), 1);
    }

    #[test]
    fn all_that_root_makes_is_the_owners() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let all = tempfile::tempdir().unwrap();
        let home = Home::at(all.path().join("home")).unwrap();
        let owner = fs::metadata(home.root()).unwrap().uid();
        let _lock = home.lock().unwrap();
        AdminToken::read_or_create(&home.admin_token(), "--admin-token-file").unwrap();
        let work = home.work("function").unwrap();
        let made = [&home.root().join("daemon.lock"), &home.admin_token(), &work];
        for path in made.into_iter().chain([&home.root().join("work"), &home.logs().unwrap()]) {
            assert_eq!(fs::metadata(path).unwrap().uid(), owner, "{}", path.display());
        }
    }

    #[test]
    fn one_daemon_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::at(directory.path().join("a/b")).unwrap();
        assert_eq!(home.daemon(), None);
        let lock = home.lock().unwrap();
        assert!(matches!(home.lock(), Err(HomeError::Locked { .. })));
        let address = DaemonAddress {
            pid: 1,
            admin: AdminAddress::Unix(home.admin_socket()),
            admin_tcp: Some("127.0.0.1:1".parse().unwrap()),
            gateway: "127.0.0.1:2".parse().unwrap(),
            e2b: None,
            dashboard: None,
        };
        lock.announce(&address).unwrap();
        assert_eq!(home.daemon(), Some(address.clone()));
        drop(lock);
        assert_eq!(home.daemon(), None);
        // What a killed daemon leaves behind is not mistaken for a live one.
        fs::write(home.root().join("daemon.json"), serde_json::to_vec(&address).unwrap()).unwrap();
        assert_eq!(home.daemon(), None);
        home.lock().unwrap();
    }
}
