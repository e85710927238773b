//! Which repositories of a registry have which blobs, as far as this machine has seen: what lies in
//! another repository of the same registry is mounted from there instead of being sent again.

use crate::error::OciError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Repositories that are remembered.
const REPOSITORIES_MAX: usize = 16;
/// Bytes of the file.
const FILE_MAX: u64 = 64 << 20;

/// What was seen. It is a hint: whoever believes it asks the registry.
#[derive(Debug)]
pub(crate) struct Mounts {
    path: PathBuf,
    known: Known,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Known {
    /// The latest one first.
    repositories: Vec<Repository>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Repository {
    registry: String,
    name: String,
    digests: BTreeSet<String>,
}

impl Mounts {
    /// Reads what was noted; a file that makes no sense counts as none.
    pub fn read(path: &Path) -> Self {
        let is_short = || fs::metadata(path).is_ok_and(|found| found.len() <= FILE_MAX);
        let read = || fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let known = is_short().then(read).flatten().unwrap_or_default();
        Self { path: path.to_owned(), known }
    }

    /// Another repository of the same registry that has this blob.
    pub fn repository_with(&self, registry: &str, but: &str, digest: &str) -> Option<&str> {
        let has = |one: &&Repository| {
            one.registry == registry && one.name != but && one.digests.contains(digest)
        };
        self.known.repositories.iter().find(has).map(|one| one.name.as_str())
    }

    /// Notes what a repository has, besides what it had, and writes that down.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn note(
        &mut self,
        registry: &str,
        name: &str,
        digests: impl IntoIterator<Item = String>,
    ) -> Result<(), OciError> {
        let all = &mut self.known.repositories;
        all.retain(|one| one.registry != registry || one.name != name);
        let (registry, name) = (registry.to_owned(), name.to_owned());
        let digests = digests.into_iter().collect();
        all.insert(0, Repository { registry, name, digests });
        all.truncate(REPOSITORIES_MAX);
        let json = serde_json::to_vec(&self.known).expect("it has text keys only");
        self.write(&json).map_err(|error| OciError::file("write", &self.path, error))
    }

    fn write(&self, json: &[u8]) -> io::Result<()> {
        let mut new = self.path.as_os_str().to_owned();
        new.push(format!(".{}", std::process::id()));
        fs::write(&new, json)?;
        fs::rename(&new, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_repository_has_is_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mounts.json");
        let mut mounts = Mounts::read(&path);
        mounts.note("a", "one", ["x".to_owned(), "y".to_owned()]).unwrap();
        mounts.note("b", "one", ["z".to_owned()]).unwrap();
        let mounts = Mounts::read(&path);
        assert_eq!(mounts.repository_with("a", "two", "x"), Some("one"));
        assert_eq!(mounts.repository_with("a", "one", "x"), None);
        assert_eq!(mounts.repository_with("a", "two", "z"), None);
        fs::write(&path, "nonsense").unwrap();
        assert_eq!(Mounts::read(&path).repository_with("a", "two", "x"), None);
    }

    #[test]
    fn no_more_than_some_are_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mounts.json");
        for number in 0..REPOSITORIES_MAX + 5 {
            Mounts::read(&path).note("a", &number.to_string(), ["x".to_owned()]).unwrap();
        }
        let mounts = Mounts::read(&path);
        assert_eq!(mounts.known.repositories.len(), REPOSITORIES_MAX);
        assert_eq!(mounts.known.repositories[0].name, (REPOSITORIES_MAX + 4).to_string());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
