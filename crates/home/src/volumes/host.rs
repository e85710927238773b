//! Directories of the host as volumes. Only root makes them: what a function names must be there
//! already.
//!
//! `files` of such a volume is a link. It must be root's: one that a daemon has made, which may
//! be a guest's by now, would show any directory to it when it starts anew, and to builds of
//! root. Its target must be the daemon's user's, as with other parts of `$THAW_HOME`
//! ([`crate::user::linked_directories`]).

use super::{Note, VolumeError, VolumeStore, failed};
use crate::config::{ByteSize, DomainName, FunctionName};
use crate::home::Home;
use crate::user::DaemonUser;
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat, readlinkat, symlinkat};
use rustix::process::geteuid;
use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use thaw_sandbox::{BoundAccess, BoundDirectory};
use thaw_store::Name;

/// Most of them: each is a mount in the daemon's own tree of files.
const HOST_VOLUMES_MAX: usize = 16;

impl VolumeStore {
    /// Makes a volume whose files are those of a directory of the host. It may hold `size` bytes,
    /// those that are there included.
    ///
    /// # Errors
    /// As [`VolumeStore::create`], and if the directory cannot be one.
    pub fn create_of_host(
        &self,
        name: &Name,
        size: ByteSize,
        functions: &[FunctionName],
        domain: Option<&DomainName>,
        host: &Path,
    ) -> Result<(), VolumeError> {
        let host = host.canonicalize().map_err(failed("find", host))?;
        if !geteuid().is_root() {
            let reason = "only root can make it one, with `sudo thaw volume create`".to_owned();
            return Err(VolumeError::Host { path: host, reason });
        }
        let refused = |reason: String| Err(VolumeError::Host { path: host.clone(), reason });
        if let Err(reason) = self.check_place(&host) {
            return refused(reason);
        }
        if let Err(error) = BoundDirectory::open(&host, BoundAccess::Write) {
            return refused(error.to_string());
        }
        let (owner, wanted) =
            (fs::metadata(&host).map_err(failed("read", &host))?.uid(), self.user());
        if owner != wanted {
            return refused(format!(
                "it belongs to user {owner}, and Thaw opens its files as user {wanted}; \
                 `chown -R {wanted} {}` gives it to that user",
                host.display()
            ));
        }
        self.make(name, &Note::new(size, functions, domain)?, Some(&host))
    }

    /// The directory of the host that has the files of a volume, if it is one.
    pub(super) fn host(&self, name: &Name) -> Result<Option<PathBuf>, VolumeError> {
        let link = self.directory(name).join("files");
        let unusable = |path: &Path, error: io::Error| VolumeError::Host {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let Some(target) = link_of_root(&link).map_err(|error| unusable(&link, error))? else {
            return Ok(None);
        };
        let owner = fs::metadata(&target).map_err(|error| unusable(&target, error))?.uid();
        let user = self.user();
        if owner != user {
            let reason = format!(
                "it belongs to user {owner}, and Thaw opens its files as user {user}; \
                 `chown -R {user} {}` gives it to that user",
                target.display()
            );
            return Err(VolumeError::Host { path: target, reason });
        }
        Ok(Some(target))
    }

    /// The user that serves volumes.
    fn user(&self) -> u32 {
        let own = rustix::process::geteuid().as_raw();
        DaemonUser::for_home(&self.home).map_or(own, |user| user.ids.uid)
    }

    fn check_place(&self, host: &Path) -> Result<(), String> {
        let home = self.home.root().canonicalize().map_err(|error| error.to_string())?;
        if overlap(host, &home) {
            return Err("it holds Thaw's own state, or lies in it".to_owned());
        }
        let volumes = self.list().map_err(|error| error.to_string())?;
        if volumes.iter().filter(|volume| volume.is_host).count() >= HOST_VOLUMES_MAX {
            return Err(format!("{HOST_VOLUMES_MAX} directories of the host are volumes already"));
        }
        let other: Option<(String, PathBuf)> = volumes
            .into_iter()
            .filter(|volume| volume.is_host)
            .map(|volume| (volume.name, volume.path))
            .find(|(_, path)| overlap(host, path));
        match other {
            // Its files would count twice, and its locks would not meet.
            Some((name, path)) => Err(format!(
                "volume `{name}` is {} already; let functions use that one",
                path.display()
            )),
            None => Ok(()),
        }
    }
}

/// Directories of the host that are volumes, for the daemon's tree of files; those that are not
/// the user's are left out, and their volumes cannot be used.
pub(crate) fn host_directories(home: &Home, user: u32) -> Vec<PathBuf> {
    let volumes = fs::read_dir(home.root().join("volumes")).into_iter().flatten();
    let target = |entry: io::Result<fs::DirEntry>| {
        let entry = entry.ok()?;
        // One that is being removed is none any more.
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            return None;
        }
        let target = link_of_root(&entry.path().join("files")).ok()??;
        let target = target.canonicalize().ok()?;
        (fs::metadata(&target).ok()?.uid() == user).then_some(target)
    };
    volumes.filter_map(target).take(HOST_VOLUMES_MAX).collect()
}

/// A directory of a volume, to which root can link without following anything of its owner's.
pub(super) struct Linkable(OwnedFd);

impl Linkable {
    /// Opens it, with the rights of its owner.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(CWD, directory, flags, Mode::empty())?;
        match fstat(&directory)?.st_uid == geteuid().as_raw() {
            true => Ok(Self(directory)),
            false => Err(ErrorKind::PermissionDenied.into()),
        }
    }

    /// Links its files to `host`, with the rights of root.
    pub fn link(&self, host: &Path) -> io::Result<()> {
        Ok(symlinkat(host, &self.0, c"files")?)
    }
}

/// Where a link of root's leads; `None` if there is none.
fn link_of_root(link: &Path) -> io::Result<Option<PathBuf>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let link = match openat(CWD, link, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        link => link?,
    };
    let found = fstat(&link)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
        return Ok(None);
    }
    if found.st_uid != 0 {
        return Err(io::Error::other("it is a link that root has not made"));
    }
    let target = readlinkat(&link, c"", Vec::new())?;
    Ok(Some(OsString::from_vec(target.into_bytes()).into()))
}

fn overlap(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

#[cfg(test)]
mod tests {
    use super::super::MayUse;
    use super::super::tests::{config, store};
    use super::*;
    use std::collections::BTreeSet;
    use std::os::unix::fs::{chown, lchown};
    use thaw_sandbox::VolumeShare;

    #[test]
    fn a_directory_of_the_host_is_the_operators_to_give() {
        if !geteuid().is_root() {
            return;
        }
        let (_directory, volumes) = store();
        let host = tempfile::tempdir().unwrap();
        let (name, size) = (Name::new("data").unwrap(), "1MiB".parse().unwrap());
        let mut one = config("one", "data");
        (one.volumes[0].host, one.volumes[0].size) = (Some(host.path().to_owned()), None);
        // An author's wish makes nothing.
        let refused = volumes.of_new_function(&one).unwrap_err();
        assert!(matches!(refused, VolumeError::NotHost { .. }), "{refused}");
        chown(host.path(), Some(volumes.user()), None).unwrap();
        let functions = [one.name.clone()];
        volumes.create_of_host(&name, size, &functions, None, host.path()).unwrap();
        fs::write(host.path().join("kept"), "kept").unwrap();
        let mounts = volumes.of_new_function(&one).unwrap();
        assert_eq!(mounts[0].volume.usage().unwrap().0, 8192);
        assert_eq!(host_directories(&volumes.home, volumes.user()), [host.path()]);
        // Nor does it find another directory than the one that it names.
        one.volumes[0].host = Some("/srv".into());
        assert!(matches!(volumes.of_new_function(&one), Err(VolumeError::NotHost { .. })));
        // Of the same tenant, only the functions that root names may have it in their sandboxes.
        let may_have = |function: &FunctionName| {
            let wanted = &config("any", "data").volumes;
            let granted = &BTreeSet::new();
            let may_use = MayUse::Those { function, domain: None, granted };
            volumes.of_sandbox(wanted, &may_use, &VolumeShare::default()).map(drop)
        };
        may_have(&one.name).unwrap();
        let other = may_have(&"other".parse().unwrap());
        assert!(matches!(other, Err(VolumeError::NotFor { .. })));
        drop(mounts);
        volumes.remove(&name).unwrap();
        assert_eq!(fs::read(host.path().join("kept")).unwrap(), b"kept");
    }

    #[test]
    fn links_of_others_are_not_followed() {
        if !geteuid().is_root() {
            return;
        }
        let (_directory, volumes) = store();
        let name = Name::new("data").unwrap();
        volumes.create(&name, "1MiB".parse().unwrap(), &[], None).unwrap();
        let files = volumes.show(&name).unwrap().path;
        fs::remove_dir(&files).unwrap();
        std::os::unix::fs::symlink("/etc", &files).unwrap();
        lchown(&files, Some(7), None).unwrap();
        let refused = volumes
            .of_operator(&name, BoundAccess::Read, &VolumeShare::default())
            .unwrap_err()
            .to_string();
        assert!(refused.contains("root has not made"), "{refused}");
        // Nor is one of root's to what is another's.
        lchown(&files, Some(0), None).unwrap();
        if volumes.user() != 0 {
            let refused = volumes
                .of_operator(&name, BoundAccess::Read, &VolumeShare::default())
                .unwrap_err()
                .to_string();
            assert!(refused.contains("belongs to user 0"), "{refused}");
        }
        assert!(host_directories(&volumes.home, volumes.user() + 1).is_empty());
    }

    #[test]
    fn directories_that_are_no_volumes_are_refused() {
        if !geteuid().is_root() {
            return;
        }
        let (directory, volumes) = store();
        let size: ByteSize = "1MiB".parse().unwrap();
        let refusal = |name: &str, host: &Path| {
            let name = Name::new(name).unwrap();
            match volumes.create_of_host(&name, size, &[], None, host) {
                Err(VolumeError::Host { reason, .. }) => reason,
                other => panic!("{}: {other:?}", host.display()),
            }
        };
        assert!(refusal("a", directory.path()).contains("Thaw's own state"));
        assert!(refusal("a", Path::new("/")).contains("Thaw's own state"));
        assert!(refusal("a", Path::new("/proc")).contains("the host's own state"));
        let host = tempfile::tempdir().unwrap();
        chown(host.path(), Some(volumes.user() + 1), None).unwrap();
        assert!(refusal("a", host.path()).contains("`chown -R"));
        chown(host.path(), Some(volumes.user()), None).unwrap();
        volumes.create_of_host(&Name::new("a").unwrap(), size, &[], None, host.path()).unwrap();
        assert!(refusal("b", host.path()).contains("volume `a` is"));
    }
}
