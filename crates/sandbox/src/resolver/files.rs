//! The files of the host that looking up names takes.
#![allow(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};

use super::filter::LocalService;
use crate::confine::{During, Failure, copy_tree, enter_root, put_tree, separate_mounts};

/// What the C library reads (resolv.conf(5), hosts(5), nsswitch.conf(5), host.conf(5),
/// gai.conf(5)).
const NAMES: [&str; 5] =
    ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf"];
/// Most bytes of one of them. Lists of advertisers in `/etc/hosts` have some megabytes.
const FILE_MAX: u64 = 16 << 20;
/// Where systemd-resolved has its sockets (systemd-resolved.service(8)).
const LOCAL_SERVICE: &str = "/run/systemd/resolve";
/// Most modules that are loaded; a host has fewer than ten.
const MODULES_MAX: usize = 16;

/// Copies of these files, of those that the host has.
#[derive(Debug)]
pub struct Files(Vec<(&'static str, Vec<u8>)>);

impl Files {
    pub fn read() -> Result<Self, Failure> {
        let read = |path: &&'static str| {
            // Each with its name: whoever gets the error wants to know which it is.
            let step = match *path {
                "/etc/resolv.conf" => "read /etc/resolv.conf",
                "/etc/hosts" => "read /etc/hosts",
                _ => "read /etc/nsswitch.conf, /etc/host.conf or /etc/gai.conf",
            };
            let content = read_bounded(Path::new(path), FILE_MAX).during(step)?;
            Ok::<_, Failure>(content.map(|content| (*path, content)))
        };
        Ok(Self(NAMES.iter().filter_map(|path| read(path).transpose()).collect::<Result<_, _>>()?))
    }

    /// Loads the modules that answer for names, so that nobody needs to load libraries
    /// afterwards. Those that cannot be loaded are those that the C library goes on without.
    pub fn load_modules(&self) {
        let configuration = self.0.iter().find(|(path, _)| *path == "/etc/nsswitch.conf");
        let text = configuration.map(|(_, content)| String::from_utf8_lossy(content));
        for module in modules(&text.unwrap_or_default()) {
            load(&module);
        }
    }

    /// Makes a root directory with these files and the socket of a local service, and
    /// nothing else, read-only, and enters it. The caller has a mount namespace of its own.
    pub fn enter_root(&self) -> Result<LocalService, Failure> {
        separate_mounts().during("separate its mounts")?;
        let service = take_local_service().during("find the socket of systemd-resolved")?;
        enter_root(c"size=96m,nr_inodes=32,mode=0755", || {
            self.put().during("copy files into its root directory")?;
            let put = service.as_ref().map_or(Ok(()), put_local_service);
            put.during("show it the socket of systemd-resolved")
        })?;
        Ok(if service.is_some() { LocalService::Reachable } else { LocalService::None })
    }

    /// Puts the files at their paths below the working directory.
    fn put(&self) -> io::Result<()> {
        for (path, content) in &self.0 {
            let inside = inside(path);
            inside.parent().map_or(Ok(()), fs::create_dir_all)?;
            let mut options = OpenOptions::new();
            options.write(true).create_new(true).mode(0o444);
            options.open(inside)?.write_all(content)?;
        }
        Ok(())
    }
}

/// The path below the working directory.
fn inside(path: &str) -> PathBuf {
    Path::new(path).strip_prefix("/").unwrap_or(Path::new(path)).to_owned()
}

/// `None` if there is no such file, or one that not everybody may read. Links are followed: that of `/etc/resolv.conf` often
/// leads elsewhere.
fn read_bounded(path: &Path, max: u64) -> io::Result<Option<Vec<u8>>> {
    // Nobody may let the caller wait who puts a pipe there.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file: File = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let attributes = file.metadata()?;
    if !attributes.is_file() || attributes.mode() & 0o004 == 0 {
        return Ok(None);
    }
    let mut content = Vec::new();
    file.take(max + 1).read_to_end(&mut content)?;
    if content.len() as u64 > max {
        return Err(Errno::FBIG.into());
    }
    Ok(Some(content))
}

fn take_local_service() -> io::Result<Option<OwnedFd>> {
    match copy_tree(LOCAL_SERVICE) {
        Ok(tree) => Ok(Some(tree)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn put_local_service(tree: &OwnedFd) -> io::Result<()> {
    let inside = inside(LOCAL_SERVICE);
    fs::create_dir_all(&inside)?;
    put_tree(tree, &inside)?;
    // In a user namespace, flags that it had may not be taken from it.
    let flags = MountFlags::BIND
        | MountFlags::RDONLY
        | MountFlags::NOSUID
        | MountFlags::NODEV
        | MountFlags::NOEXEC;
    Ok(mount_remount(&inside, flags, c"")?)
}

/// The modules that a host asks for names (nsswitch.conf(5)): the words of the line
/// `hosts:` that are no actions in brackets. Before glibc 2.34 these two were modules, too.
fn modules(configuration: &str) -> Vec<String> {
    let line = configuration
        .lines()
        .filter_map(|line| line.split('#').next()?.trim_start().strip_prefix("hosts:"))
        .next_back();
    let mut modules = vec!["files".to_owned(), "dns".to_owned()];
    let mut depth = 0_u32;
    for part in line.unwrap_or_default().split_inclusive(['[', ']', ' ', '\t']) {
        let word = part.trim_end_matches(['[', ']', ' ', '\t']);
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        if depth == 0 && !word.is_empty() && word.bytes().all(is_name) && word.len() <= 32 {
            modules.push(word.to_owned());
        }
        match part.as_bytes().last() {
            Some(b'[') => depth += 1,
            Some(b']') => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    modules.truncate(MODULES_MAX);
    modules
}

#[cfg(target_env = "gnu")]
fn load(module: &str) {
    let Ok(name) = std::ffi::CString::new(format!("libnss_{module}.so.2")) else { return };
    // SAFETY: the name ends with a zero. The constructors that run are those of modules
    // that the host's administrator has every program load which looks up a name.
    unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
}

/// Other C libraries have no modules.
#[cfg(not(target_env = "gnu"))]
fn load(_module: &str) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_the_words_of_the_line() {
        let all = |text: &str| modules(text)[2..].join(" ");
        assert_eq!(all(""), "");
        assert_eq!(all("passwd: files\nhosts: files dns\n"), "files dns");
        assert_eq!(
            all(
                "hosts:\tmymachines resolve [!UNAVAIL=return] files[NOTFOUND=continue]myhostname # x"
            ),
            "mymachines resolve files myhostname"
        );
        assert_eq!(all("#hosts: files\nhosts: ../../evil dns; a/b wins"), "wins");
        assert_eq!(modules(&format!("hosts: {}", "a ".repeat(100))).len(), MODULES_MAX);
    }

    #[test]
    fn files_are_bounded_and_may_be_missing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hosts");
        assert_eq!(read_bounded(&path, 4).unwrap(), None);
        fs::write(&path, "1234").unwrap();
        assert_eq!(read_bounded(&path, 4).unwrap().unwrap(), b"1234");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read_bounded(&path, 4).unwrap_err().raw_os_error(), Some(libc::EFBIG));
        assert_eq!(read_bounded(directory.path(), 4).unwrap(), None);
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o640);
        fs::write(&path, "1234").unwrap();
        fs::set_permissions(&path, mode).unwrap();
        assert_eq!(read_bounded(&path, 4).unwrap(), None);
    }
}
