//! What volumes and their snapshots take on disk.

use super::directory::DirectoryUse;
use serde::{Deserialize, Serialize};
use std::io;
use thaw_home::config::DomainName;
use thaw_home::home::Home;
use thaw_home::volumes::{VolumeError, VolumeInfo, VolumeStore};

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VolumeUsage {
    /// Its name.
    pub name: String,
    /// The domain of the tenant for which it counts.
    pub domain: Option<DomainName>,
    /// Bytes that it may hold.
    pub size: u64,
    /// Bytes on disk of its files and directories; those of a directory of the host, too.
    pub bytes: u64,
    /// Snapshots.
    pub snapshots: usize,
    /// Bytes on disk of these. Blocks that they share with the files count in both.
    pub snapshots_bytes: u64,
    /// Whether its files are a directory of the host, which is not below the state directory.
    pub is_host: bool,
    /// There is more than was looked at.
    pub is_partial: bool,
}

/// Counts all volumes; `damaged` gets a sentence for each that cannot be counted.
pub(super) fn measure(home: &Home, damaged: &mut Vec<String>) -> Vec<VolumeUsage> {
    let store = VolumeStore::of(home.clone());
    let names = store.names().unwrap_or_else(|error| {
        damaged.push(error.to_string());
        Vec::new()
    });
    let mut counted = Vec::new();
    for name in names {
        let shown = store.show(&name);
        if matches!(shown, Err(VolumeError::Missing(_))) {
            // It is half made, or half removed.
            continue;
        }
        let found = shown.map_err(io::Error::other);
        match found.and_then(|volume| measure_one(home, &store, volume)) {
            Ok(found) => counted.push(found),
            Err(error) => damaged.push(format!("volume `{name}` cannot be counted ({error})")),
        }
    }
    counted
}

fn measure_one(home: &Home, store: &VolumeStore, volume: VolumeInfo) -> io::Result<VolumeUsage> {
    let _acting = home.act().map_err(io::Error::other)?;
    let files = match &volume.problem {
        Some(problem) => return Err(io::Error::other(problem.clone())),
        None => DirectoryUse::of(&volume.path)?,
    };
    let snapshots = DirectoryUse::of(&store.snapshots_directory(&volume.name))?;
    Ok(VolumeUsage {
        name: volume.name,
        domain: volume.domain,
        size: volume.size,
        bytes: files.bytes,
        snapshots: volume.snapshots.len(),
        snapshots_bytes: snapshots.bytes,
        is_host: volume.is_host,
        is_partial: files.is_partial || snapshots.is_partial,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, chown};
    use thaw_store::Name;

    #[test]
    fn files_directories_and_snapshots_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::at(directory.path().join("home")).unwrap();
        let volumes = VolumeStore::of(home.clone());
        let name = Name::new("data").unwrap();
        let domain: DomainName = "x".parse().unwrap();
        volumes.create(&name, "4MiB".parse().unwrap(), &[], Some(&domain)).unwrap();
        let files = volumes.show(&name).unwrap().path;
        fs::write(files.join("file"), vec![1; 1 << 20]).unwrap();
        // So many names that the directory itself takes more than a block.
        fs::create_dir(files.join("d")).unwrap();
        (0..300).for_each(|n| fs::write(files.join(format!("d/{n:0>200}")), "").unwrap());
        // They are the volume's owner's.
        let owner = fs::metadata(&files).unwrap();
        let below = fs::read_dir(files.join("d")).unwrap().map(|entry| entry.unwrap().path());
        for path in below.chain([files.join("d"), files.join("file")]) {
            chown(path, Some(owner.uid()), Some(owner.gid())).unwrap();
        }
        volumes.snapshot(&name, &Name::new("one").unwrap()).unwrap();
        let mut damaged = Vec::new();
        let found = measure(&home, &mut damaged).remove(0);
        assert_eq!((found.name.as_str(), found.snapshots, found.domain), ("data", 1, Some(domain)));
        assert!((1 << 20..4 << 20).contains(&found.bytes), "{}", found.bytes);
        assert!(found.snapshots_bytes >= 1 << 20, "{}", found.snapshots_bytes);
        assert!(damaged.is_empty() && !found.is_partial && !found.is_host, "{damaged:?}");
        // One that is damaged hides no other.
        fs::write(home.root().join("volumes/data/volume.json"), "{").unwrap();
        volumes.create(&Name::new("other").unwrap(), "1MiB".parse().unwrap(), &[], None).unwrap();
        let names: Vec<_> = measure(&home, &mut damaged).into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["other"]);
        assert_eq!(damaged.len(), 1, "{damaged:?}");
    }
}
