//! Directories of the host as volumes. Only the operator makes them: what a function names must be
//! there already.

use super::{Note, VolumeError, VolumeStore, failed};
use crate::config::{ByteSize, FunctionName};
use crate::monitor::DaemonUser;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use thaw_sandbox::{BoundAccess, BoundDirectory};
use thaw_store::Name;

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
        host: &Path,
    ) -> Result<(), VolumeError> {
        let host = host.canonicalize().map_err(failed("find", host))?;
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
        self.make(name, &Note { size, functions: functions.to_vec(), host: Some(host) })
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

fn overlap(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, store};
    use super::*;
    use std::os::unix::fs::chown;

    #[test]
    fn a_directory_of_the_host_is_the_operators_to_give() {
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
        volumes.create_of_host(&name, size, &functions, host.path()).unwrap();
        fs::write(host.path().join("kept"), "kept").unwrap();
        let mounts = volumes.of_new_function(&one).unwrap();
        assert_eq!(mounts[0].volume.usage().unwrap().0, 8192);
        // Nor does it find another directory than the one that it names.
        one.volumes[0].host = Some("/srv".into());
        assert!(matches!(volumes.of_new_function(&one), Err(VolumeError::NotHost { .. })));
        drop(mounts);
        volumes.remove(&name).unwrap();
        assert_eq!(fs::read(host.path().join("kept")).unwrap(), b"kept");
    }

    #[test]
    fn directories_that_are_no_volumes_are_refused() {
        let (directory, volumes) = store();
        let size: ByteSize = "1MiB".parse().unwrap();
        let refusal = |name: &str, host: &Path| {
            let name = Name::new(name).unwrap();
            match volumes.create_of_host(&name, size, &[], host) {
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
        volumes.create_of_host(&Name::new("a").unwrap(), size, &[], host.path()).unwrap();
        assert!(refusal("b", host.path()).contains("volume `a` is"));
    }
}
