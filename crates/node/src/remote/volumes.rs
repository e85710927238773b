//! Volumes of sandboxes that are their own, beside those of their functions.
//!
//! A sandbox gets them when it is made, and keeps them: its memory says where each is mounted, by its
//! place in the list. So copies have the same list, and so has the sandbox when it wakes. The list is
//! in a table by the number of the instance, and in a file for the next daemon.

use super::own_file::{OwnFile, Subject};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use thaw_home::config::{VolumeConfig, check_mount_point, wrong_volumes};
use thaw_home::volumes::OpenedVolume;
use thaw_sandbox::VolumeMount;
use thaw_store::Name;

/// The file.
const ABOUT: Subject = Subject {
    file: "sandbox-volumes.json",
    of_all: "which volumes sandboxes have",
    of_one: "which volumes the sandbox has",
};

/// A volume of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxVolume {
    /// Its name on this node.
    pub name: String,
    /// Where the programs see it: an absolute path. Directories that are missing are made.
    pub path: String,
    /// Whether they can only read it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

impl SandboxVolume {
    /// As thaw.toml says it.
    ///
    /// # Errors
    /// One sentence: its name is none, or nothing can be mounted at its path.
    fn config(&self) -> Result<VolumeConfig, String> {
        check_mount_point(&self.path)?;
        Ok(VolumeConfig {
            name: Name::new(&self.name).map_err(|error| error.to_string())?,
            path: self.path.clone(),
            read_only: self.read_only,
            size: None,
            host: None,
        })
    }
}

/// The volumes that a new sandbox is to have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WantedVolumes {
    /// Those that its memory has mounted already: it is made of a checkpoint.
    pub mounted: Vec<SandboxVolume>,
    /// Those that are mounted in it.
    pub new: Vec<SandboxVolume>,
    /// Volumes that whoever asks may use, whatever the tenant of the function may.
    pub granted: BTreeSet<Name>,
}

impl WantedVolumes {
    /// All of them, in the order of their mounts.
    pub fn all(&self) -> Vec<SandboxVolume> {
        self.mounted.iter().chain(&self.new).cloned().collect()
    }
}

/// The same as thaw.toml says it, of a sandbox of a function with volumes.
///
/// # Errors
/// One sentence: there are too many, or they are in each other's way.
pub(crate) fn configs(
    own: &[SandboxVolume],
    function: &[VolumeConfig],
) -> Result<Vec<VolumeConfig>, String> {
    let own: Vec<_> = own.iter().map(SandboxVolume::config).collect::<Result<_, _>>()?;
    let all: Vec<_> = function.iter().chain(&own).cloned().collect();
    wrong_volumes(&all).map_or(Ok(own), Err)
}

/// Volumes of one instance.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnVolumes {
    /// In the order of their mounts.
    pub volumes: Vec<SandboxVolume>,
    /// What tells each from a later volume of its name, in the same order.
    pub identities: Vec<Option<String>>,
    /// The same, open: nobody removes a volume of a sandbox that is asleep.
    pub kept: Vec<VolumeMount>,
    /// The instance is ending, and wants them no more.
    is_released: bool,
}

impl OwnVolumes {
    /// Those that are open.
    pub fn opened(volumes: Vec<SandboxVolume>, opened: Vec<OpenedVolume>) -> Self {
        let opened = opened.into_iter().map(|opened| (opened.identity, opened.mount));
        let (identities, kept) = opened.unzip();
        Self { volumes, identities, kept, is_released: false }
    }
}

/// A volume as the file says it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Noted {
    name: String,
    path: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    read_only: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    identity: Option<String>,
}

impl Noted {
    fn of(own: &OwnVolumes) -> Vec<Self> {
        let identities = own.identities.iter().cloned().chain(std::iter::repeat(None));
        let noted = |(volume, identity): (&SandboxVolume, _)| {
            let SandboxVolume { name, path, read_only } = volume.clone();
            Self { name, path, read_only, identity }
        };
        own.volumes.iter().zip(identities).map(noted).collect()
    }

    fn own(noted: Vec<Self>) -> OwnVolumes {
        let one = |noted: Self| {
            let Self { name, path, read_only, identity } = noted;
            (SandboxVolume { name, path, read_only }, identity)
        };
        let (volumes, identities) = noted.into_iter().map(one).unzip();
        OwnVolumes { volumes, identities, ..OwnVolumes::default() }
    }
}

/// The volumes of the instances that have some of their own.
pub struct VolumesTable {
    known: Mutex<BTreeMap<u64, OwnVolumes>>,
    file: OwnFile,
}

impl Default for VolumesTable {
    fn default() -> Self {
        Self { known: Mutex::default(), file: OwnFile::about(&ABOUT) }
    }
}

impl VolumesTable {
    /// Reads what an earlier daemon has written in a directory, and writes there from now on. To
    /// be called before instances that are asleep can be woken.
    ///
    /// # Errors
    /// The file is there and cannot be read: some instances would wake without their volumes.
    pub fn keep_in(&self, directory: &Path) -> io::Result<()> {
        let known = self.file.read(directory)?;
        *self.known() = known.into_iter().map(|(id, noted)| (id, Noted::own(noted))).collect();
        Ok(())
    }

    /// Those of an instance, in the order of their mounts.
    pub(crate) fn of(&self, instance: u64) -> Vec<SandboxVolume> {
        self.known().get(&instance).map(|own| own.volumes.clone()).unwrap_or_default()
    }

    /// The same, with what is known of them.
    pub(crate) fn all_of(&self, instance: u64) -> OwnVolumes {
        self.known().get(&instance).cloned().unwrap_or_default()
    }

    /// The instances that have a volume and are not ending, whether it is open or not.
    pub fn users_of(&self, name: &Name) -> Vec<u64> {
        let has = |own: &OwnVolumes| {
            !own.is_released && own.volumes.iter().any(|volume| volume.name == name.as_str())
        };
        self.known().iter().filter(|(_, own)| has(own)).map(|(id, _)| *id).collect()
    }

    /// Whether an instance has some.
    pub(crate) fn has(&self, instance: u64) -> bool {
        self.known().contains_key(&instance)
    }

    /// Instances have these from now on, as this daemon and the next one know.
    ///
    /// # Errors
    /// One sentence: the next daemon would not know; they have none.
    pub(crate) async fn set(self: &Arc<Self>, ids: &[u64], own: &OwnVolumes) -> Result<(), String> {
        if own.volumes.is_empty() || ids.is_empty() {
            return Ok(());
        }
        for id in ids {
            self.known().insert(*id, OwnVolumes { is_released: false, ..own.clone() });
        }
        let written = self.file.written(self, Self::write).await;
        if written.is_err() {
            ids.iter().for_each(|id| self.forget(*id));
        }
        written
    }

    /// The volumes of an instance are open.
    pub(crate) fn keep(&self, instance: u64, kept: Vec<VolumeMount>) {
        // One that ends meanwhile keeps none.
        if let Some(own) = self.known().get_mut(&instance).filter(|own| !own.is_released) {
            own.kept = kept;
        }
    }

    /// An instance is ending: its volumes can be removed as soon as it has ended.
    pub(crate) fn release(&self, instance: u64) {
        if let Some(own) = self.known().get_mut(&instance) {
            (own.kept, own.is_released) = (Vec::new(), true);
        }
    }

    /// The instances that have some.
    pub fn ids(&self) -> Vec<u64> {
        self.known().keys().copied().collect()
    }

    /// Forgets those of an instance that is there no more. The file loses them with the next change.
    pub fn forget(&self, id: u64) {
        self.known().remove(&id);
    }

    fn write(&self) -> io::Result<()> {
        let noted = |(id, own): (&u64, &OwnVolumes)| (*id, Noted::of(own));
        self.file.write(|| self.known().iter().map(noted).collect())?;
        self.file.settle()
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<u64, OwnVolumes>> {
        self.known.lock().expect("no holder panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(name: &str, path: &str) -> SandboxVolume {
        SandboxVolume { name: name.into(), path: path.into(), read_only: false }
    }

    #[test]
    fn volumes_have_names_and_places_of_their_own() {
        let good = [volume("a", "/data"), volume("b", "/other/place")];
        let function = configs(&good, &[]).unwrap();
        assert_eq!(function.len(), 2);
        for (name, path) in [
            ("a", "data"),
            ("a", "/"),
            ("a", "/a/../b"),
            ("a", "/proc/x"),
            ("a", "/run/secrets"),
            ("../a", "/data"),
            ("", "/data"),
        ] {
            assert!(configs(&[volume(name, path)], &[]).is_err(), "{name} {path}");
        }
        let twice = configs(&[volume("c", "/c"), volume("c", "/d")], &[]).unwrap_err();
        assert!(twice.contains("named twice"), "{twice}");
        let inside = configs(&[volume("c", "/data/sub")], &function).unwrap_err();
        assert!(inside.contains("lie in each other"), "{inside}");
        let many: Vec<_> = (0..17).map(|n| volume(&format!("v{n}"), &format!("/{n}"))).collect();
        assert!(configs(&many, &[]).unwrap_err().contains("16"));
        assert!(configs(&many[..15], &function).is_err());
        assert!(configs(&many[..14], &function).is_ok());
    }

    #[tokio::test(flavor = "current_thread")]
    async fn the_next_daemon_knows_which_volumes_a_sandbox_has() {
        let directory = tempfile::tempdir().unwrap();
        let table = Arc::new(VolumesTable::default());
        table.keep_in(directory.path()).unwrap();
        let volumes = vec![volume("a", "/data")];
        let identities = vec![Some("one".to_owned())];
        let own = OwnVolumes { volumes, identities, ..OwnVolumes::default() };
        table.set(&[7, 8], &own).await.unwrap();
        table.forget(8);
        table.set(&[9], &own).await.unwrap();
        let next = VolumesTable::default();
        next.keep_in(directory.path()).unwrap();
        assert_eq!((next.ids(), next.of(7), next.of(8)), (vec![7, 9], own.volumes.clone(), vec![]));
        assert_eq!(next.all_of(7).identities, own.identities);
        // Open or not, it is theirs until they end.
        let a = Name::new("a").unwrap();
        assert_eq!(next.users_of(&a), [7, 9]);
        next.release(7);
        assert_eq!(next.users_of(&a), [9]);
        // An older Thaw knew no identities.
        let old = tempfile::tempdir().unwrap();
        std::fs::write(old.path().join(ABOUT.file), r#"{"7":[{"name":"a","path":"/data"}]}"#)
            .unwrap();
        let next = VolumesTable::default();
        next.keep_in(old.path()).unwrap();
        assert_eq!((next.of(7), next.all_of(7).identities), (own.volumes.clone(), vec![None]));
        // Where nothing can be written down there is no such sandbox.
        drop(directory);
        assert!(table.set(&[10], &own).await.unwrap_err().contains("make room"));
        assert!(!table.has(10));
        let damaged = tempfile::tempdir().unwrap();
        std::fs::write(damaged.path().join(ABOUT.file), "[").unwrap();
        let error = VolumesTable::default().keep_in(damaged.path()).unwrap_err().to_string();
        assert!(error.contains("restore it"), "{error}");
    }
}
