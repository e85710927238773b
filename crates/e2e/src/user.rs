//! Running `thaw` as another user, which takes root.

use crate::binary::thaw_binary;
use crate::outcome::run;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A user of this machine, with a copy of `thaw` and a home of its own.
#[derive(Debug)]
pub struct User {
    directory: TempDir,
    uid: u32,
    gid: u32,
}

impl User {
    /// `nobody`, who has no range in `/etc/subuid`.
    pub fn nobody() -> Self {
        Self::with_ids(65534, 65534)
    }

    /// The first user with a range in both `/etc/subuid` and `/etc/subgid`, if there is
    /// one and the helpers that map it are installed.
    pub fn with_subordinate_ids() -> Option<Self> {
        let helpers = ["newuidmap", "newgidmap"];
        if !helpers.iter().all(|helper| Path::new("/usr/bin").join(helper).exists()) {
            return None;
        }
        let (uids, gids) =
            (fs::read_to_string("/etc/subuid").ok()?, fs::read_to_string("/etc/subgid").ok()?);
        let owners = |text: &str| -> Vec<String> {
            text.lines().filter_map(|line| Some(line.split_once(':')?.0.to_owned())).collect()
        };
        let groups = owners(&gids);
        let passwd = fs::read_to_string("/etc/passwd").ok()?;
        owners(&uids).into_iter().filter(|name| groups.contains(name)).find_map(|name| {
            let line = passwd.lines().find(|line| line.starts_with(&format!("{name}:")))?;
            let mut ids = line.split(':').skip(2).map(str::parse::<u32>);
            match (ids.next()?, ids.next()?) {
                (Ok(uid), Ok(gid)) if uid > 0 => Some(Self::with_ids(uid, gid)),
                _ => None,
            }
        })
    }

    fn with_ids(uid: u32, gid: u32) -> Self {
        let directory = tempfile::Builder::new().prefix("thaw-user-").tempdir().expect("/tmp");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(directory.path(), mode.clone()).expect("its mode");
        let thaw = directory.path().join("thaw");
        // By another process: a file that any process has open to write cannot be executed, and
        // what other tests fork just now would have it open (execve(2), ETXTBSY).
        run(Command::new("cp").arg(thaw_binary()).arg(&thaw)).success();
        fs::set_permissions(&thaw, mode).expect("its mode");
        let home = directory.path().join("home");
        fs::create_dir(&home).expect("a home");
        chown(&home, Some(uid), Some(gid)).expect("root may give it away");
        Self { directory, uid, gid }
    }

    /// A directory that belongs to the user.
    pub fn home(&self) -> PathBuf {
        self.directory.path().join("home")
    }

    /// The user's id.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// The id of the user's group.
    pub fn gid(&self) -> u32 {
        self.gid
    }

    /// The user's copy of `thaw`.
    pub fn binary(&self) -> PathBuf {
        self.directory.path().join("thaw")
    }

    /// Makes everything below the user's home theirs.
    pub fn own(&self, path: &Path) {
        chown(path, Some(self.uid), Some(self.gid)).expect("root may give it away");
        if path.is_dir() {
            for entry in fs::read_dir(path).expect("a directory") {
                self.own(&entry.expect("an entry").path());
            }
        }
    }

    /// A `thaw` command of the user.
    pub fn thaw(&self) -> Command {
        let mut command = Command::new(self.directory.path().join("thaw"));
        let state = self.home().join("state");
        command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", self.home());
        command.env("THAW_HOME", state).current_dir(self.home()).uid(self.uid).gid(self.gid);
        command
    }
}
