//! Whether root's rights would show a sandbox what it lacks.

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use thaw_build::script;

/// Scripts that one program may lead through.
const SCRIPTS_MAX: usize = 5;

/// What a program is started with, over files of this host.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// Directories of this host and their places in the sandbox; the last one counts.
    pub mounts: Vec<(PathBuf, PathBuf)>,
    /// Directories of this host that look empty, whatever the rights.
    pub hidden: Vec<PathBuf>,
    /// The program, by name or by path.
    pub program: OsString,
    /// The working directory.
    pub cwd: PathBuf,
    /// `PATH`.
    pub search: OsString,
}

/// What root sees of a path, and `nobody` does or does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    No,
    Root,
    All,
}

impl Start {
    /// Whether the program, its interpreter or its working directory is there for root alone.
    pub fn is_roots_alone(&self) -> bool {
        self.find(&self.cwd).0 == Seen::Root || self.program_is_roots(&self.program, 0)
    }

    fn program_is_roots(&self, name: &OsStr, depth: usize) -> bool {
        for candidate in self.candidates(name) {
            match self.find(&candidate) {
                (Seen::No, _) => {}
                (Seen::Root, _) => return true,
                (Seen::All, file) => {
                    let interpreter =
                        file.filter(|_| depth < SCRIPTS_MAX).and_then(script::interpreter);
                    return interpreter
                        .is_some_and(|name| self.program_is_roots(name.as_os_str(), depth + 1));
                }
            }
        }
        false
    }

    /// Where a program of this name may lie, as a shell finds it.
    fn candidates(&self, name: &OsStr) -> Vec<PathBuf> {
        if name.as_bytes().contains(&b'/') {
            return vec![self.cwd.join(name)];
        }
        std::env::split_paths(&self.search).map(|directory| directory.join(name)).collect()
    }

    /// Who sees a path of the sandbox, and what lies there.
    fn find(&self, path: &Path) -> (Seen, Option<File>) {
        let of_mount = |(host, guest): &(PathBuf, PathBuf)| {
            Some((host.canonicalize().ok()?, path.strip_prefix(guest).ok()?.to_owned()))
        };
        let deepest = |mount: &&(PathBuf, PathBuf)| mount.1.components().count();
        let covering = self.mounts.iter().filter(|(_, guest)| path.starts_with(guest));
        let Some((root, below)) = covering.max_by_key(deepest).and_then(of_mount) else {
            return (Seen::No, None);
        };
        let Some(real) = place_in(&root, &below) else { return (Seen::No, None) };
        if self.hidden.iter().any(|hidden| real.starts_with(hidden)) {
            return (Seen::No, None);
        }
        let has = |path: &Path, bits: u32| {
            path.symlink_metadata().is_ok_and(|found| found.permissions().mode() & bits == bits)
        };
        // A directory is entered by whoever reaches it: the sandbox asks for no more.
        let itself = if real.is_dir() { 0 } else { 0o005 };
        let mut ways = real.ancestors().skip(1).take_while(|up| up.starts_with(&root));
        if has(&real, itself) && ways.all(|up| has(up, 0o001)) {
            let file = real.is_file().then(|| File::open(&real).ok()).flatten();
            return (Seen::All, file);
        }
        // Root may not execute either what nobody may.
        let is_of_use = real.metadata().is_ok_and(|found| found.permissions().mode() & 0o111 != 0);
        (if is_of_use { Seen::Root } else { Seen::No }, None)
    }
}

/// Whether root may make files in a directory, and `nobody` may not.
pub fn is_roots_alone_to_write(directory: &Path) -> bool {
    /// The user and the group of `nobody`.
    const NOBODY: u32 = 65_534;
    directory.metadata().is_ok_and(|found| {
        let mode = found.permissions().mode();
        let bits = match (found.uid() == NOBODY, found.gid() == NOBODY) {
            (true, _) => 0o300,
            (false, true) => 0o030,
            (false, false) => 0o003,
        };
        mode & bits != bits
    })
}

/// Where that really is which lies below a directory, as the sandbox follows links.
fn place_in(root: &Path, below: &Path) -> Option<PathBuf> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let directory = openat2(CWD, root, flags, Mode::empty(), ResolveFlags::empty()).ok()?;
    let below = if below == Path::new("") { Path::new(".") } else { below };
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let opened = openat2(&directory, below, flags, Mode::empty(), inside).ok()?;
    std::fs::read_link(format!("/proc/self/fd/{}", opened.as_raw_fd())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn put(path: &Path, text: &str, mode: u32) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn roots_rights_help_only_with_what_root_alone_sees() {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let at = |path: &str| root.path().join(path);
        put(&at("bin/all"), "", 0o755);
        put(&at("bin/own"), "", 0o700);
        put(&at("bin/data"), "", 0o600);
        put(&at("private/tool"), "", 0o755);
        fs::set_permissions(at("private"), fs::Permissions::from_mode(0o700)).unwrap();
        fs::create_dir(at("private/inside")).unwrap();
        put(&at("bin/script"), "#!/private/tool -x\n", 0o755);
        put(&at("bin/broken"), "#!/none\n", 0o755);
        put(&at("state/tool"), "", 0o700);
        let helps = |program: &str, cwd: &str| {
            let start = Start {
                mounts: vec![(root.path().to_owned(), "/".into())],
                hidden: vec![at("state").canonicalize().unwrap()],
                program: program.into(),
                cwd: cwd.into(),
                search: "/none:/bin".into(),
            };
            start.is_roots_alone()
        };
        for program in ["own", "/bin/own", "/private/tool", "script"] {
            assert!(helps(program, "/"), "{program}");
        }
        for program in ["all", "none", "/none/at/all", "data", "broken", "/state/tool"] {
            assert!(!helps(program, "/"), "{program}");
        }
        assert!(helps("./tool", "/private") && helps("all", "/private/inside"));
        assert!(!helps("all", "/private"));
        assert!(!helps("all", "/none"));
    }

    #[test]
    fn a_directory_is_for_root_if_nobody_may_not_write_there() {
        let directory = tempfile::tempdir().unwrap();
        let may_not = |mode: u32| {
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).unwrap();
            is_roots_alone_to_write(directory.path())
        };
        assert!(may_not(0o755) && !may_not(0o777) && may_not(0o700));
        assert!(!is_roots_alone_to_write(Path::new("/no/such")));
    }

    #[test]
    fn what_is_bound_lies_where_it_is_bound() {
        let root = tempfile::tempdir().unwrap();
        put(&root.path().join("run"), "", 0o700);
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let start = Start {
            mounts: vec![(root.path().to_owned(), "/work".into())],
            program: "./run".into(),
            cwd: "/work".into(),
            ..Start::default()
        };
        assert!(start.is_roots_alone());
        let elsewhere = Start { program: "/run".into(), cwd: "/".into(), ..start };
        assert!(!elsewhere.is_roots_alone());
    }
}
