//! Secrets of functions: values that their copies get when they are thawed, and that are in no
//! image, log or answer.
//!
//! ```text
//! $THAW_HOME/secrets/FUNCTION/NAME   the value, 0600
//! ```
//!
//! The operator sets them; the author of a function can only name those of that function. The
//! daemon reads them at each boot, so that a new value is that of the next copy.

use crate::config::FunctionName;
use crate::home::{Home, HomeError};
use crate::volumes::VolumeStore;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};
use thaw_abi::control::SECRETS_MAX;
use thaw_sandbox::{Secrets, TooManySecrets};
use thaw_store::Name;

/// Begins the name of a value that is being written, which no secret has.
const UNFINISHED: &str = ".new-";

/// The secrets of all functions of a state directory.
#[derive(Clone, Debug)]
pub struct SecretStore {
    home: Home,
}

/// A secret without its value.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct SecretInfo {
    /// Its name.
    pub name: String,
    /// Bytes of the value.
    pub bytes: u64,
    /// When it was set, milliseconds since the epoch.
    pub set_ms: u64,
}

/// What cannot be done with a secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It has no value.
    #[error(
        "secret `{name}` of `{function}` is not set; `thaw secret set {function} {name}` sets it"
    )]
    NotSet {
        /// The function.
        function: FunctionName,
        /// The secret.
        name: Name,
    },
    /// It is too large.
    #[error("secret `{name}` has {bytes} bytes; a secret may have {SECRETS_MAX} at most")]
    TooLarge {
        /// The secret.
        name: Name,
        /// Its size.
        bytes: u64,
    },
    /// All secrets of a function together are.
    #[error("the secrets of `{function}` do not fit: {reason}")]
    TooMany {
        /// The function.
        function: FunctionName,
        /// The bound.
        reason: TooManySecrets,
    },
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

/// Where a function's secrets are, once that is known and as long as it may have them.
#[derive(Debug, Default)]
pub struct SecretSource {
    store: OnceLock<Arc<SecretStore>>,
    is_withdrawn: AtomicBool,
}

impl SecretSource {
    /// They are there. The first one stays.
    pub fn set(&self, store: &Arc<SecretStore>) {
        let _ = self.store.set(store.clone());
    }

    /// Where they are; `None`: nobody knows, or the function may not have them any more.
    pub fn get(&self) -> Option<&Arc<SecretStore>> {
        self.store.get().filter(|_| !self.is_withdrawn.load(Relaxed))
    }

    /// The function was removed: another one of its name may have secrets from now on.
    pub fn withdraw(&self) {
        self.is_withdrawn.store(true, Relaxed);
    }
}

impl SecretStore {
    /// That of a state directory.
    pub fn of(home: Home) -> Self {
        Self { home }
    }

    /// The volumes of the same state directory.
    pub fn volumes(&self) -> VolumeStore {
        VolumeStore::of(self.home.clone())
    }

    fn directory(&self, function: &FunctionName) -> PathBuf {
        self.home.root().join("secrets").join(function.as_str())
    }

    /// Gives a secret a value. Copies that are thawed from now on get it.
    ///
    /// # Errors
    /// It is too large, or the host refuses; the old value stays then.
    pub fn set(
        &self,
        function: &FunctionName,
        name: &Name,
        value: &[u8],
    ) -> Result<(), SecretError> {
        if value.len() > SECRETS_MAX {
            let bytes = value.len() as u64;
            return Err(SecretError::TooLarge { name: name.clone(), bytes });
        }
        let _acting = self.home.act()?;
        let directory = self.directory(function);
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |error| SecretError::Io { action, path, error }
        };
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        made.map_err(failed("make", &directory))?;
        let unfinished = directory.join(format!("{UNFINISHED}{name}"));
        let _ = fs::remove_file(&unfinished);
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&unfinished)
            .and_then(|mut file| file.write_all(value).and_then(|()| file.sync_all()));
        written.map_err(failed("write", &unfinished))?;
        let path = directory.join(name.as_str());
        fs::rename(&unfinished, &path).map_err(failed("write", &path))
    }

    /// Takes away a secret.
    ///
    /// # Errors
    /// There is none of that name, or the host refuses.
    pub fn remove(&self, function: &FunctionName, name: &Name) -> Result<(), SecretError> {
        let _acting = self.home.act()?;
        let path = self.directory(function).join(name.as_str());
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(SecretError::NotSet { function: function.clone(), name: name.clone() })
            }
            result => result.map_err(|error| SecretError::Io { action: "remove", path, error }),
        }
    }

    /// Takes away all secrets of a function: another one of its name must not get them.
    ///
    /// # Errors
    /// The host refuses.
    pub fn remove_all(&self, function: &FunctionName) -> Result<(), SecretError> {
        let _acting = self.home.act()?;
        let path = self.directory(function);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            result => result.map_err(|error| SecretError::Io { action: "remove", path, error }),
        }
    }

    /// The secrets of a function, by name.
    ///
    /// # Errors
    /// The host refuses.
    pub fn list(&self, function: &FunctionName) -> Result<Vec<SecretInfo>, SecretError> {
        let _acting = self.home.act()?;
        let path = self.directory(function);
        let entries = match fs::read_dir(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries,
        };
        let list = |entries: fs::ReadDir| -> io::Result<Vec<SecretInfo>> {
            let mut found = Vec::new();
            for entry in entries {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                if Name::new(&name).is_err() {
                    continue;
                }
                let metadata = entry.metadata()?;
                let set = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let set_ms = set.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
                found.push(SecretInfo { name, bytes: metadata.len(), set_ms });
            }
            found.sort_by(|a, b| a.name.cmp(&b.name));
            Ok(found)
        };
        let found = entries.and_then(list);
        found.map_err(|error| SecretError::Io { action: "read", path, error })
    }

    /// The values of a function's secrets as they are now.
    ///
    /// # Errors
    /// One is not set, or they are too large.
    pub fn read(&self, function: &FunctionName, names: &[Name]) -> Result<Secrets, SecretError> {
        let mut secrets = Secrets::default();
        for name in names {
            let value = self.value(function, name)?;
            secrets
                .add(name.as_str(), &value)
                .map_err(|reason| SecretError::TooMany { function: function.clone(), reason })?;
        }
        Ok(secrets)
    }

    /// The first of these secrets that has no value.
    pub fn missing(&self, function: &FunctionName, names: &[Name]) -> Option<SecretError> {
        let _acting = self.home.act().ok()?;
        let directory = self.directory(function);
        let name = names.iter().find(|name| !directory.join(name.as_str()).is_file())?.clone();
        Some(SecretError::NotSet { function: function.clone(), name })
    }

    /// The state directory that they are of.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// The value of one secret as it is now.
    ///
    /// # Errors
    /// It is not set, or too large.
    pub fn value(&self, function: &FunctionName, name: &Name) -> Result<Vec<u8>, SecretError> {
        let _acting = self.home.act()?;
        let path = self.directory(function).join(name.as_str());
        let mut value = Vec::new();
        let most = SECRETS_MAX as u64 + 1;
        match File::open(&path).and_then(|file| file.take(most).read_to_end(&mut value)) {
            Ok(count) if count as u64 == most => {
                Err(SecretError::TooLarge { name: name.clone(), bytes: most })
            }
            Ok(_) => Ok(value),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(SecretError::NotSet { function: function.clone(), name: name.clone() })
            }
            Err(error) => Err(SecretError::Io { action: "read", path, error }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::unix::fs::MetadataExt;

    fn store() -> (tempfile::TempDir, SecretStore, FunctionName) {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::at(directory.path().join("home")).unwrap();
        (directory, SecretStore::of(home), "f".parse().unwrap())
    }

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    #[test]
    fn a_function_that_was_removed_has_no_secrets_whatever_is_set_later() {
        let (_directory, store, _) = store();
        let (source, store) = (SecretSource::default(), Arc::new(store));
        assert!(source.get().is_none());
        source.set(&store);
        assert!(source.get().is_some_and(|found| Arc::ptr_eq(found, &store)));
        source.withdraw();
        assert!(source.get().is_none());
        source.set(&store);
        assert!(source.get().is_none());
    }

    #[test]
    fn secrets_come_and_go() {
        let (_directory, store, function) = store();
        let names = [name("a"), name("b")];
        let error = store.read(&function, &names).unwrap_err().to_string();
        assert!(error.contains("`a` of `f` is not set; `thaw secret set f a`"), "{error}");
        store.set(&function, &names[0], b"one").unwrap();
        store.set(&function, &names[0], b"two").unwrap();
        let error = store.missing(&function, &names).unwrap().to_string();
        assert!(error.contains("`b` of `f` is not set"), "{error}");
        store.set(&function, &names[1], b"").unwrap();
        assert!(store.missing(&function, &names).is_none());
        store.read(&function, &names).unwrap();
        assert_eq!(store.value(&function, &names[0]).unwrap(), b"two");
        let path = store.directory(&function).join("a");
        assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, 0o600);
        let listed = store.list(&function).unwrap();
        let listed: Vec<_> = listed.iter().map(|info| (info.name.as_str(), info.bytes)).collect();
        assert_eq!(listed, [("a", 3), ("b", 0)]);
        store.remove(&function, &names[0]).unwrap();
        assert!(store.remove(&function, &names[0]).is_err());
        store.remove_all(&function).unwrap();
        store.remove_all(&function).unwrap();
        assert!(store.list(&function).unwrap().is_empty());
    }

    #[test]
    fn secrets_are_bounded() {
        let (_directory, store, function) = store();
        let (a, b) = (name("a"), name("b"));
        let large = vec![b'x'; SECRETS_MAX];
        assert!(store.set(&function, &a, &[&large[..], b"y"].concat()).is_err());
        store.set(&function, &a, &large[..SECRETS_MAX / 2]).unwrap();
        store.set(&function, &b, &large[..SECRETS_MAX / 2]).unwrap();
        let error = store.read(&function, &[a, b]).unwrap_err().to_string();
        assert!(error.contains("32 KiB"), "{error}");
    }
}
