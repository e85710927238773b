//! Who may use a volume, and volumes that are open.

use super::error::failed;
use super::{CLIENTS_PREFIX, Note, VolumeError, VolumeStore, open_own};
use crate::config::{ByteSize, DomainName, FunctionConfig, FunctionName, VolumeConfig};
use rustix::fs::{FlockOperation, flock};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use thaw_sandbox::{BoundAccess, OwnFiles, Volume, VolumeMount, VolumeShare};
use thaw_store::Name;

/// How large a volume is proposed to be whose size its function does not say.
const USUAL_SIZE: ByteSize = ByteSize::mebibytes(1024);

/// Which volumes a sandbox may use.
#[derive(Clone, Copy, Debug)]
pub enum MayUse<'a> {
    /// Those that it had before. One of an older Thaw, without an identity, must also be one that it
    /// may use now.
    Same {
        /// The function.
        function: &'a FunctionName,
        /// The domain of its tenant.
        domain: Option<&'a DomainName>,
        /// The identities of the volumes, in their order.
        identities: &'a [Option<String>],
    },
    /// Those of its function, those of the function's tenant that are neither directories of the host nor
    /// a client's of E2B's API, and those that were granted to whoever makes it.
    Those {
        /// The function.
        function: &'a FunctionName,
        /// The domain of its tenant.
        domain: Option<&'a DomainName>,
        /// The names of the others.
        granted: &'a BTreeSet<Name>,
    },
}

/// Volumes that this process has open, by their directories: what is counted in one place is
/// counted once. The lock is held for moments.
static OPEN: Mutex<Option<HashMap<PathBuf, Arc<Opening>>>> = Mutex::new(None);

/// Whether volumes that are opened now may be in use by sandboxes that the daemon before this one has left.
static ARE_SOME_LEFT: AtomicBool = AtomicBool::new(false);

/// The daemon before this one has left sandboxes that have volumes. To be called before a volume is
/// opened.
pub fn expect_left() {
    ARE_SOME_LEFT.store(true, SeqCst);
}

/// All of these that live on are known to their volumes now. To be called before clients are served.
pub fn go_on_with_left() {
    if !ARE_SOME_LEFT.swap(false, SeqCst) {
        return;
    }
    let all = {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = open.iter().flat_map(HashMap::values).filter_map(|opening| opening.opened());
        opened.collect()
    };
    go_on(all);
}

fn go_on(volumes: Vec<Arc<Volume>>) {
    if let Err(error) = Volume::go_on_with_left(volumes, cannot_begin) {
        tracing::error!("requests about volumes wait until the daemon is restarted: {error}");
    }
}

fn cannot_begin(volume: &Arc<Volume>, error: &io::Error) {
    let directory = directory_of(volume).unwrap_or_default();
    let name = directory.file_name().unwrap_or_default().display();
    tracing::warn!(
        "requests about volume `{name}` wait, since its files cannot be cut to their lengths and \
         counted: {error}; mend what lies in {}, it is tried again every second",
        directory.display()
    );
}

/// The directory of a volume that is open.
fn directory_of(volume: &Arc<Volume>) -> Option<PathBuf> {
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all = open.iter().flatten();
    all.find(|(_, opening)| opening.is(volume)).map(|(directory, _)| directory.clone())
}

/// A volume that is open, or is being opened.
#[derive(Debug, Default)]
struct Opening {
    /// Held while it is opened, for which all its files are counted.
    turn: Mutex<()>,
    /// Held for moments.
    volume: Mutex<Weak<Volume>>,
}

impl Opening {
    fn opened(&self) -> Option<Arc<Volume>> {
        self.volume.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    fn is(&self, volume: &Arc<Volume>) -> bool {
        let opened = self.volume.lock().unwrap_or_else(PoisonError::into_inner);
        std::ptr::eq(opened.as_ptr(), Arc::as_ptr(volume))
    }

    /// Whether it is open, without keeping it from being closed.
    fn is_open(&self) -> bool {
        self.volume.lock().unwrap_or_else(PoisonError::into_inner).strong_count() > 0
    }
}

/// A volume of a sandbox.
#[derive(Debug)]
pub struct OpenedVolume {
    /// What the sandbox mounts.
    pub mount: VolumeMount,
    /// What tells it from a later volume of its name.
    pub identity: Option<String>,
}

impl VolumeStore {
    /// The volumes that a function names, in its order, to be mounted within the share of its
    /// tenant.
    ///
    /// # Errors
    /// One is missing, or not for this function.
    pub fn of_function(
        &self,
        function: &FunctionName,
        volumes: &[VolumeConfig],
        share: &VolumeShare,
    ) -> Result<Vec<VolumeMount>, VolumeError> {
        volumes.iter().map(|volume| self.open(volume, function, share)).collect()
    }

    /// As [`VolumeStore::of_function`], and makes those that have a size and are missing.
    ///
    /// # Errors
    /// As there, and those of [`VolumeStore::create`].
    pub fn of_new_function(
        &self,
        config: &FunctionConfig,
    ) -> Result<Vec<VolumeMount>, VolumeError> {
        for volume in &config.volumes {
            let is_missing = matches!(self.show(&volume.name), Err(VolumeError::Missing(_)));
            if let Some(size) = volume.size.filter(|_| is_missing) {
                let domain = config.sharing.domain.as_ref();
                self.create(&volume.name, size, std::slice::from_ref(&config.name), domain)?;
            }
        }
        self.of_function(&config.name, &config.volumes, &VolumeShare::default())
    }

    fn open(
        &self,
        wanted: &VolumeConfig,
        function: &FunctionName,
        share: &VolumeShare,
    ) -> Result<VolumeMount, VolumeError> {
        let _acting = self.home.act()?;
        let note = self.note_for(wanted, function)?;
        let access = if wanted.read_only { BoundAccess::Read } else { BoundAccess::Write };
        self.mount(&wanted.name, &note, access, share)
    }

    /// Why a function cannot have the volumes that it names, as far as their notes say. Opens none.
    pub fn lacking(
        &self,
        function: &FunctionName,
        volumes: &[VolumeConfig],
    ) -> Option<VolumeError> {
        let _acting = self.home.act().ok()?;
        volumes.iter().find_map(|volume| self.note_for(volume, function).err())
    }

    /// The note of a volume that a function names, if that is what it means and may use.
    fn note_for(
        &self,
        wanted: &VolumeConfig,
        function: &FunctionName,
    ) -> Result<Note, VolumeError> {
        let name = &wanted.name;
        let note = self.read_note(name);
        if let Some(path) = &wanted.host {
            let host = note.is_ok().then(|| self.host(name)).transpose()?.flatten();
            if host.as_ref() != Some(path) {
                let (name, function, path) = (name.clone(), function.clone(), path.clone());
                return Err(VolumeError::NotHost { name, function, path });
            }
        }
        let note = note.map_err(|error| match error {
            VolumeError::Missing(name) => {
                let (function, size) = (function.clone(), wanted.size.unwrap_or(USUAL_SIZE));
                VolumeError::MissingFor { name, function, size }
            }
            error => error,
        })?;
        match note.functions.contains(function) {
            true => Ok(note),
            false => Err(VolumeError::NotFor { name: name.clone(), function: function.clone() }),
        }
    }

    /// Volumes for a sandbox, in their order, to be mounted within the share of its tenant.
    ///
    /// # Errors
    /// One is missing, or not for this sandbox.
    pub fn of_sandbox(
        &self,
        volumes: &[VolumeConfig],
        may_use: &MayUse<'_>,
        share: &VolumeShare,
    ) -> Result<Vec<OpenedVolume>, VolumeError> {
        let _acting = self.home.act()?;
        let open = |(at, wanted): (usize, &VolumeConfig)| {
            let name = &wanted.name;
            let note = self.read_note(name)?;
            let (MayUse::Those { function, domain, .. } | MayUse::Same { function, domain, .. }) =
                may_use;
            let is_of_client = name.as_str().starts_with(CLIENTS_PREFIX);
            // Root says who may use a directory of the host, function by function.
            let is_own = || {
                note.functions.contains(function)
                    || note.domain.as_ref() == *domain
                        && !is_of_client
                        && matches!(self.host(name), Ok(None))
            };
            match may_use {
                MayUse::Those { granted, .. } if granted.contains(name) || is_own() => {}
                MayUse::Those { .. } => {
                    let function = (*function).clone();
                    return Err(VolumeError::NotFor { name: name.clone(), function });
                }
                MayUse::Same { identities, .. } => {
                    let is_same = identities.get(at) == Some(&note.identity);
                    // No name of a client's volume is used again.
                    if !is_same || note.identity.is_none() && !is_of_client && !is_own() {
                        return Err(VolumeError::Another(name.clone()));
                    }
                }
            }
            let access = if wanted.read_only { BoundAccess::Read } else { BoundAccess::Write };
            let mount = self.mount(name, &note, access, share)?;
            // From now on nobody removes it.
            if self.read_note(name)?.identity != note.identity {
                return Err(VolumeError::Another(name.clone()));
            }
            Ok(OpenedVolume { mount, identity: note.identity })
        };
        volumes.iter().enumerate().map(open).collect()
    }

    /// A volume whichever functions may use it, for the operator's own program or whoever has asked for
    /// leave before, within a share.
    ///
    /// # Errors
    /// There is none, or the host refuses.
    pub fn of_operator(
        &self,
        name: &Name,
        access: BoundAccess,
        share: &VolumeShare,
    ) -> Result<VolumeMount, VolumeError> {
        let _acting = self.home.act()?;
        self.mount(name, &self.read_note(name)?, access, share)
    }

    /// Whether there is no volume of this name.
    pub fn is_missing(&self, name: &Name) -> bool {
        let Ok(_acting) = self.home.act() else { return false };
        matches!(self.read_note(name), Err(VolumeError::Missing(_)))
    }

    /// Whether this process uses a volume. Waits for nobody.
    pub fn is_open(&self, name: &Name) -> bool {
        self.opened(name).is_some()
    }

    /// A volume that this process uses; none while it is being opened.
    pub(super) fn opened(&self, name: &Name) -> Option<Arc<Volume>> {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref()?.get(&self.directory(name))?.opened()
    }

    /// Where a volume is, or will be, that is open.
    fn opening(&self, name: &Name) -> Arc<Opening> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        // Nobody uses them, nor opens them.
        open.retain(|_, one| Arc::strong_count(one) > 1 || one.is_open());
        open.entry(self.directory(name)).or_default().clone()
    }

    fn mount(
        &self,
        name: &Name,
        note: &Note,
        access: BoundAccess,
        share: &VolumeShare,
    ) -> Result<VolumeMount, VolumeError> {
        let opening = self.opening(name);
        let volume = match opening.opened() {
            Some(volume) => volume,
            None => {
                let _turn = opening.turn.lock().unwrap_or_else(PoisonError::into_inner);
                match opening.opened() {
                    Some(volume) => volume,
                    None => {
                        let volume = Arc::new(self.open_files(name, note)?);
                        let weak = Arc::downgrade(&volume);
                        *opening.volume.lock().unwrap_or_else(PoisonError::into_inner) = weak;
                        if !ARE_SOME_LEFT.load(SeqCst) {
                            // They were known before this could be found.
                            go_on(vec![volume.clone()]);
                        }
                        volume
                    }
                }
            }
        };
        Ok(VolumeMount { volume, access, of_tenant: share.clone() })
    }

    fn open_files(&self, name: &Name, note: &Note) -> Result<Volume, VolumeError> {
        let directory = self.directory(name);
        // Whoever copies its files may take long, and is not waited for.
        if self.is_unfinished(name)? {
            let _copying = self.copying(name)?;
            self.undo_unfinished_of(name)?;
        }
        let files = self.files(name)?;
        let copying = open_own(&directory.join("copying"));
        let copying = copying.map_err(failed("open", &directory))?;
        flock(&copying, FlockOperation::NonBlockingLockShared)
            .map_err(|_| VolumeError::Busy(name.clone()))?;
        let opened = open_own(&directory.join("usage")).and_then(|usage| {
            let users = open_own(&directory.join("users"))?;
            // Programs of the host change a directory of the host when they like.
            let is_own = files.starts_with(&directory);
            let lengths = is_own.then(|| directory.join("lengths"));
            let numbers = self.numbers(name, &files)?;
            let are_some_left = ARE_SOME_LEFT.load(SeqCst);
            let own = OwnFiles { usage, users, lengths, are_some_left };
            Volume::open(&files, own, note.size.bytes(), numbers)
        });
        opened.map_err(|error| VolumeError::Unusable { name: name.clone(), files, error })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ByteSize;
    use crate::volumes::tests::{config, store};
    use std::fs;

    #[test]
    fn a_volume_is_made_for_a_function_and_is_nobody_elses() {
        let (_directory, volumes) = store();
        let name = Name::new("data").unwrap();
        let (one, other) = (config("one", "data"), config("other", "data"));
        let missing = volumes.lacking(&one.name, &one.volumes).expect("it is missing").to_string();
        assert!(
            missing.contains("`thaw volume create data --size 1MiB --function one`"),
            "{missing}"
        );
        let opened = volumes.of_function(&one.name, &one.volumes, &VolumeShare::default());
        assert_eq!(opened.unwrap_err().to_string(), missing);
        let mounts = volumes.of_new_function(&one).unwrap();
        assert_eq!(mounts.len(), 1);
        assert!(matches!(volumes.of_new_function(&other), Err(VolumeError::NotFor { .. })));
        volumes.allow(&name, &other.name).unwrap();
        let again =
            volumes.of_function(&other.name, &other.volumes, &VolumeShare::default()).unwrap();
        assert!(Arc::ptr_eq(&mounts[0].volume, &again[0].volume));
        let shown = volumes.show(&name).unwrap();
        assert_eq!((shown.size, shown.used, shown.in_use), (1 << 20, 0, true));
        assert!(matches!(volumes.remove(&name), Err(VolumeError::InUse(_))));
        drop((mounts, again));
        volumes.remove(&name).unwrap();
        assert!(volumes.list().unwrap().is_empty());
    }

    #[test]
    fn a_sandbox_may_use_what_its_function_its_tenant_or_whoever_asks_may() {
        let (_directory, volumes) = store();
        let domain = |name: &str| name.parse::<DomainName>().unwrap();
        let (ours, theirs) = (domain("ours"), domain("theirs"));
        let function: FunctionName = "box".parse().unwrap();
        let named = |name: &str| Name::new(name).unwrap();
        let size = ByteSize(1 << 20);
        volumes.create(&named("shared"), size, &[], None).unwrap();
        volumes.create(&named("ours"), size, &[], Some(&ours)).unwrap();
        volumes.create(&named("theirs"), size, &[], Some(&theirs)).unwrap();
        let allowed = std::slice::from_ref(&function);
        volumes.create(&named("allowed"), size, allowed, Some(&theirs)).unwrap();
        let granted = BTreeSet::from([named("shared")]);
        let opens = |name: &str, may_use: MayUse<'_>| {
            let (name, path) = (named(name), "/data".to_owned());
            let wanted = VolumeConfig { name, path, read_only: true, size: None, host: None };
            volumes.of_sandbox(&[wanted], &may_use, &VolumeShare::default()).map(drop)
        };
        let none = BTreeSet::new();
        let domain = Some(&ours);
        let may_use = |granted| MayUse::Those { function: &function, domain, granted };
        let unknown = [None];
        for (name, without, with) in [
            ("ours", true, true),
            ("allowed", true, true),
            ("shared", false, true),
            ("theirs", false, false),
        ] {
            for (granted, may) in [(&none, without), (&granted, with)] {
                match opens(name, may_use(granted)) {
                    Ok(()) => assert!(may, "{name}"),
                    Err(error) => {
                        assert!(!may && matches!(error, VolumeError::NotFor { .. }), "{name}");
                    }
                }
            }
            let identity = [volumes.read_note(&named(name)).unwrap().identity];
            assert!(identity[0].is_some());
            opens(name, MayUse::Same { function: &function, domain, identities: &identity })
                .unwrap();
        }
        let same = MayUse::Same { function: &function, domain, identities: &unknown };
        assert!(matches!(opens("none", same), Err(VolumeError::Missing(_))));
        // Those of E2B's API are for whoever they are granted to.
        volumes.create(&named("e2b-x"), size, &[], Some(&ours)).unwrap();
        assert!(matches!(opens("e2b-x", may_use(&none)), Err(VolumeError::NotFor { .. })));
        opens("e2b-x", may_use(&BTreeSet::from([named("e2b-x")]))).unwrap();
    }

    #[test]
    fn a_sandbox_does_not_wake_with_another_volume_of_the_same_name() {
        let (_directory, volumes) = store();
        let name = Name::new("data").unwrap();
        let path = "/data".to_owned();
        let wanted =
            VolumeConfig { name: name.clone(), path, read_only: false, size: None, host: None };
        let made = || {
            volumes.create(&name, ByteSize(1 << 20), &[], None).unwrap();
            [volumes.read_note(&name).unwrap().identity]
        };
        let function: FunctionName = "box".parse().unwrap();
        let wakes = |identities: &[Option<String>]| {
            let wanted = std::slice::from_ref(&wanted);
            let may_use = MayUse::Same { function: &function, domain: None, identities };
            volumes.of_sandbox(wanted, &may_use, &VolumeShare::default()).map(drop)
        };
        let first = made();
        volumes.allow(&name, &"other".parse().unwrap()).unwrap();
        wakes(&first).unwrap();
        volumes.remove(&name).unwrap();
        let second = made();
        assert!(matches!(wakes(&first), Err(VolumeError::Another(_))));
        assert!(matches!(wakes(&[]), Err(VolumeError::Another(_))));
        wakes(&second).unwrap();
        // Those of an older Thaw have none, and are its own or another's.
        let with = |domain: Option<&str>| {
            let _acting = volumes.home.act().unwrap();
            let domain = domain.map(|name| name.parse().unwrap());
            let note =
                Note { size: ByteSize(1 << 20), functions: Vec::new(), domain, identity: None };
            volumes.note(&name, &note).unwrap();
        };
        with(None);
        wakes(&[None]).unwrap();
        assert!(matches!(wakes(&second), Err(VolumeError::Another(_))));
        with(Some("theirs"));
        assert!(matches!(wakes(&[None]), Err(VolumeError::Another(_))));
    }

    #[test]
    fn nobody_waits_while_another_volume_is_opened() {
        let (_directory, volumes) = store();
        let (one, other) = (config("one", "data"), config("other", "else"));
        let slow = volumes.opening(&one.volumes[0].name);
        let _turn = slow.turn.lock().unwrap();
        let mounts = volumes.of_new_function(&other).unwrap();
        assert!(volumes.is_open(&other.volumes[0].name));
        assert!(!volumes.is_open(&one.volumes[0].name));
        drop(mounts);
        assert!(!volumes.is_open(&other.volumes[0].name));
    }

    #[test]
    fn use_is_counted_anew_by_the_first_who_opens_it() {
        let (_directory, volumes) = store();
        let one = config("one", "data");
        drop(volumes.of_new_function(&one).unwrap());
        let shown = volumes.show(&one.volumes[0].name).unwrap();
        fs::write(shown.path.join("file"), [1; 5000]).unwrap();
        fs::create_dir(shown.path.join("directory")).unwrap();
        let mounts = volumes.of_function(&one.name, &one.volumes, &VolumeShare::default()).unwrap();
        assert_eq!(mounts[0].volume.usage().unwrap(), (2 * 4096 + 8192, 1 << 20));
    }
}
