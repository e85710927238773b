//! What E2B's API knows of its sandboxes beside what the node knows: whose they are, their
//! environment, and how they come back. It lies in a file of mode 0600, so that the next daemon
//! knows it, too; with it a secret, from which the access tokens of sandboxes are made.

use super::network::AskedNetwork;
use super::problem::{Kind, Problem};
use super::settings::Hash;
use ring::hmac;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use thaw_home::state_file::table::Table;
use thaw_home::state_file::{Lines, State, StateFile, lines};
use thaw_node::remote::LimitsChange;

/// Name of the file in the node's home.
const FILE: &str = "e2b-sandboxes.json";
/// Letters and digits of a sandbox's id.
const ID_LEN: usize = 20;
/// What ids of snapshots begin with. They are names of checkpoints in the store.
const SNAPSHOT: &str = "e2b-snapshot-";
/// Random bytes of the secret.
const SECRET_LEN: usize = 32;
/// Most bytes of the names and values of one sandbox's environment.
pub const ENVS_MAX: usize = 64 << 10;

/// What is known of one sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The name of the key that made it.
    pub owner: String,
    /// The template that was asked for.
    pub template: String,
    /// Environment of all processes that are started in it.
    pub envs: BTreeMap<String, String>,
    /// Whether a request for it resumes it if it is paused.
    pub auto_resume: bool,
    /// Seconds that it was given at first.
    pub timeout_s: u64,
    /// Whether everybody reaches its ports.
    #[serde(default)]
    pub is_open: bool,
    /// What its client has asked of its network.
    #[serde(default)]
    pub network: AskedNetwork,
    /// What its template says of commands.
    #[serde(default)]
    pub defaults: Defaults,
    /// What it may use, where its template says so.
    #[serde(default)]
    pub limits: LimitsChange,
    /// It is not there yet. The next daemon finds that it never came.
    #[serde(skip)]
    pub is_being_made: bool,
}

impl Record {
    /// The environment of commands and code in the sandbox of this id, added to that of its
    /// function.
    pub fn environment(&self, id: &str) -> BTreeMap<String, String> {
        let mut envs = self.defaults.envs.clone();
        envs.extend(self.envs.clone());
        envs.extend(Self::identity(id));
        envs
    }

    /// What of that tells the sandbox from others.
    pub fn identity(id: &str) -> BTreeMap<String, String> {
        let identity = [("E2B_SANDBOX", "true"), ("E2B_SANDBOX_ID", id)];
        identity.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }
}

/// What commands and files of a sandbox begin with, where its template says so.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Defaults {
    /// The user; none: that of the function.
    pub user: Option<String>,
    /// The working directory, where relative paths begin; none: that of the function.
    pub directory: Option<String>,
    /// Environment, added to that of the function.
    pub envs: BTreeMap<String, String>,
}

/// Who shows a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A key of the name that has made the sandbox.
    Owner,
    /// Another one, by its hash: what it shows counts for as long as the key does.
    Key(Hash),
}

#[derive(Clone, Default, Serialize, Deserialize)]
struct Contents {
    secret: String,
    sandboxes: Table<Record>,
    #[serde(default)]
    snapshots: Table<Snapshot>,
    #[serde(default)]
    volumes: Table<VolumeRecord>,
}

/// What lines of the file call the tables.
const SANDBOXES: &str = "sandboxes";
const SNAPSHOTS: &str = "snapshots";
const VOLUMES: &str = "volumes";

impl Contents {
    /// Does what a line of the file says.
    fn apply(&mut self, line: &[u8]) -> serde_json::Result<()> {
        #[derive(Deserialize)]
        struct OfTable {
            table: String,
        }
        match serde_json::from_slice::<OfTable>(line)?.table.as_str() {
            SANDBOXES => self.sandboxes.apply(serde_json::from_slice(line)?),
            SNAPSHOTS => self.snapshots.apply(serde_json::from_slice(line)?),
            VOLUMES => self.volumes.apply(serde_json::from_slice(line)?),
            other => {
                let why = format!("there is no table {other:?}");
                return Err(serde::de::Error::custom(why));
            }
        }
        Ok(())
    }
}

/// What is known of one volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// The name of the key that made it.
    pub owner: String,
    /// What its owner calls it.
    pub name: String,
    /// It is not on the node yet. The next daemon looks whether it ever came.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_being_made: bool,
}

impl State for Contents {
    const LOST: &'static str = "the next daemon does not know all sandboxes of E2B's API";

    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain data")
    }

    fn take_changes(&mut self) -> Option<Vec<u8>> {
        let mut lines = self.sandboxes.take_changes(SANDBOXES);
        lines.extend(self.snapshots.take_changes(SNAPSHOTS));
        lines.extend(self.volumes.take_changes(VOLUMES));
        Some(lines)
    }
}

/// What is known of one snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The name of the key that made it.
    pub owner: String,
    /// The sandbox that it was made of.
    pub sandbox: String,
    /// What its owner calls it.
    pub name: Option<String>,
    /// What commands begin with in sandboxes of it.
    #[serde(default)]
    pub defaults: Defaults,
    /// What sandboxes of it may use, where the template of its own sandbox says so.
    #[serde(default)]
    pub limits: LimitsChange,
    /// It is not in the store yet. If the daemon ends meanwhile, it may be there or not.
    #[serde(skip)]
    pub is_being_made: bool,
    /// Nobody waits for it any more, and it is removed when it comes: it counts, and is not shown.
    #[serde(skip)]
    pub is_late: bool,
}

/// What is known of all of them.
pub struct Records {
    contents: StateFile<Contents>,
    key: hmac::Key,
}

impl Records {
    /// Those in a directory.
    ///
    /// # Errors
    /// The file is there and of no use, or cannot be written.
    pub fn load(directory: &Path) -> io::Result<Self> {
        let file = directory.join(FILE);
        let contents = match lines(&file)? {
            Some(Lines { whole, changes }) => {
                let mut contents: Contents = serde_json::from_slice(&whole)?;
                if let Err(error) = changes.iter().try_for_each(|line| contents.apply(line)) {
                    let file = file.display();
                    tracing::error!("{file}: {error}; what has changed after that is lost");
                }
                contents
            }
            None => Contents { secret: random_text(2 * SECRET_LEN)?, ..Contents::default() },
        };
        let key = hmac::Key::new(hmac::HMAC_SHA256, contents.secret.as_bytes());
        let contents = StateFile::new(file, contents);
        contents.write_first()?;
        Ok(Self { contents, key })
    }

    /// Notes a new sandbox of an owner who may have `most`; its id. [`Records::made`] or
    /// [`Records::remove`] follows.
    ///
    /// # Errors
    /// The owner has as many already.
    pub fn insert(&self, record: Record, most: u32) -> Result<String, Problem> {
        let internal = |error: io::Error| Problem::new(Kind::Busy, error);
        let id = random_text(ID_LEN).map_err(internal)?;
        let mut contents = self.contents.lock();
        let of_owner = |other: &&Record| other.owner == record.owner;
        if contents.sandboxes.values().filter(of_owner).count() >= most as usize {
            return Err(Problem::new(
                Kind::Exhausted,
                format!(
                    "`{}` has {most} sandboxes already, paused ones included; kill some, or raise \
                     `sandboxes` of the key in {}",
                    record.owner,
                    super::settings::FILE
                ),
            ));
        }
        contents.sandboxes.insert(id.clone(), Record { is_being_made: true, ..record });
        drop(contents);
        self.contents.write_soon();
        Ok(id)
    }

    /// One is there now.
    pub fn made(&self, id: &str) {
        if let Some(record) = self.contents.lock().sandboxes.get_mut_unsaved(id) {
            record.is_being_made = false;
        }
    }

    /// Notes what the network of one is to be.
    pub fn set_network(&self, id: &str, network: AskedNetwork) {
        if let Some(record) = self.contents.lock().sandboxes.get_mut(id) {
            record.network = network;
        }
        self.contents.write_soon();
    }

    /// What is known of one.
    pub fn get(&self, id: &str) -> Option<Record> {
        self.contents.lock().sandboxes.get(id).cloned()
    }

    /// The ids of those of an owner that are made.
    pub fn of(&self, owner: &str) -> Vec<String> {
        self.made_that(|record| record.owner == owner)
    }

    /// The ids of all that are made.
    pub fn all(&self) -> Vec<String> {
        self.made_that(|_| true)
    }

    fn made_that(&self, is_meant: impl Fn(&Record) -> bool) -> Vec<String> {
        let contents = self.contents.lock();
        let is_own = |record: &Record| is_meant(record) && !record.is_being_made;
        let own = contents.sandboxes.iter().filter(|(_, record)| is_own(record));
        own.map(|(id, _)| id.clone()).collect()
    }

    /// Notes a snapshot that is going to be made, of an owner who may have `most`; its id.
    ///
    /// # Errors
    /// The owner has as many already, or one of that name.
    pub fn insert_snapshot(&self, snapshot: Snapshot, most: u32) -> Result<String, Problem> {
        let random = random_text(ID_LEN).map_err(|error| Problem::new(Kind::Busy, error))?;
        let id = format!("{SNAPSHOT}{random}");
        let mut contents = self.contents.lock();
        let own = contents.snapshots.values().filter(|one| one.owner == snapshot.owner);
        let (mut count, mut is_taken) = (0, false);
        for one in own {
            count += 1;
            is_taken |= one.name.is_some() && one.name == snapshot.name;
        }
        if is_taken {
            let name = snapshot.name.unwrap_or_default();
            return Err(Problem::new(
                Kind::Exists,
                format!("there is a snapshot {name:?} already"),
            ));
        }
        if count >= most as usize {
            return Err(Problem::new(
                Kind::Exhausted,
                format!(
                    "`{}` has {most} snapshots already; delete some, or raise `snapshots` of the \
                     key in {}",
                    snapshot.owner,
                    super::settings::FILE
                ),
            ));
        }
        contents.snapshots.insert(id.clone(), Snapshot { is_being_made: true, ..snapshot });
        drop(contents);
        self.contents.write_soon();
        Ok(id)
    }

    /// A snapshot is in the store now.
    pub fn made_snapshot(&self, id: &str) {
        if let Some(snapshot) = self.contents.lock().snapshots.get_mut_unsaved(id) {
            snapshot.is_being_made = false;
        }
    }

    /// A snapshot may come when nobody waits for it any more. Its name is free.
    pub fn snapshot_is_late(&self, id: &str) {
        if let Some(snapshot) = self.contents.lock().snapshots.get_mut(id) {
            (snapshot.name, snapshot.is_late) = (None, true);
        }
        self.contents.write_soon();
    }

    /// The snapshots of an owner, by id.
    pub fn snapshots_of(&self, owner: &str) -> Vec<(String, Snapshot)> {
        let contents = self.contents.lock();
        let own = contents.snapshots.iter().filter(|(_, one)| one.owner == owner && !one.is_late);
        own.map(|(id, one)| (id.clone(), one.clone())).collect()
    }

    #[cfg(test)]
    pub fn snapshots_counted(&self, owner: &str) -> usize {
        self.contents.lock().snapshots.values().filter(|one| one.owner == owner).count()
    }

    /// Forgets a snapshot.
    pub fn remove_snapshot(&self, id: &str) {
        let mut contents = self.contents.lock();
        if contents.snapshots.remove(id).is_some() {
            drop(contents);
            self.contents.write_soon();
        }
    }

    /// Notes a volume that is going to be made, of an owner who may have `most`; its id.
    /// [`Records::made_volume`] or [`Records::remove_volume`] follows.
    ///
    /// # Errors
    /// The owner has as many already, or one of that name.
    pub fn insert_volume(&self, volume: VolumeRecord, most: u32) -> Result<String, Problem> {
        let id = random_text(ID_LEN).map_err(|error| Problem::new(Kind::Busy, error))?;
        let mut contents = self.contents.lock();
        let own = || contents.volumes.values().filter(|one| one.owner == volume.owner);
        if own().any(|one| one.name == volume.name) {
            let message = format!("there is a volume {:?} already", volume.name);
            return Err(Problem::new(Kind::Exists, message));
        }
        if own().count() >= most as usize {
            return Err(Problem::new(
                Kind::Exhausted,
                format!(
                    "`{}` has {most} volumes already; destroy some, or raise `volumes` of the key \
                     in {}",
                    volume.owner,
                    super::settings::FILE
                ),
            ));
        }
        contents.volumes.insert(id.clone(), VolumeRecord { is_being_made: true, ..volume });
        drop(contents);
        self.contents.write_soon();
        Ok(id)
    }

    /// A volume is on the node now.
    pub fn made_volume(&self, id: &str) {
        if let Some(volume) = self.contents.lock().volumes.get_mut(id) {
            volume.is_being_made = false;
        }
        self.contents.write_soon();
    }

    /// Forgets volumes that an earlier daemon has begun to make, and that never came. All others stay:
    /// where they lie may only be away.
    pub fn forget_volumes(&self, is_missing: impl Fn(&str) -> bool) {
        let mut contents = self.contents.lock();
        let begun = |one: &VolumeRecord| one.is_being_made;
        if !contents.volumes.values().any(begun) {
            return;
        }
        contents.volumes.retain(|id, one| !begun(one) || !is_missing(id));
        let came = contents.volumes.iter().filter(|(_, one)| begun(one));
        for id in came.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            if let Some(volume) = contents.volumes.get_mut(&id) {
                volume.is_being_made = false;
            }
        }
        drop(contents);
        self.contents.write_soon();
    }

    /// What is known of a volume.
    pub fn volume(&self, id: &str) -> Option<VolumeRecord> {
        self.contents.lock().volumes.get(id).cloned()
    }

    /// The volumes of an owner that are made, by id.
    pub fn volumes_of(&self, owner: &str) -> Vec<(String, VolumeRecord)> {
        let contents = self.contents.lock();
        let is_own = |one: &VolumeRecord| one.owner == owner && !one.is_being_made;
        let own = contents.volumes.iter().filter(|(_, one)| is_own(one));
        own.map(|(id, one)| (id.clone(), one.clone())).collect()
    }

    /// Forgets a volume.
    pub fn remove_volume(&self, id: &str) {
        let mut contents = self.contents.lock();
        if contents.volumes.remove(id).is_some() {
            drop(contents);
            self.contents.write_soon();
        }
    }

    /// What a client shows with each request for files of a volume.
    pub fn volume_token(&self, id: &str) -> String {
        self.tag(&format!("volume/{id}"), Holder::Owner)
    }

    /// Forgets one.
    pub fn remove(&self, id: &str) {
        let mut contents = self.contents.lock();
        if contents.sandboxes.remove(id).is_some() {
            drop(contents);
            self.contents.write_soon();
        }
    }

    /// What a client shows with each request for a sandbox.
    pub fn token(&self, id: &str, holder: Holder) -> String {
        self.tag(id, holder)
    }

    /// What a client shows with each request for a port of a sandbox. No id has a slash in it.
    pub fn traffic_token(&self, id: &str, holder: Holder) -> String {
        self.tag(&format!("{id}/traffic"), holder)
    }

    /// What a client shows that uploads files for a template, until a time.
    pub fn upload_token(&self, template: &str, hash: &str, until_s: u64) -> String {
        self.tag(&format!("upload/{template}/{hash}/{until_s}"), Holder::Owner)
    }

    fn tag(&self, text: &str, holder: Holder) -> String {
        let of_holder = match holder {
            Holder::Owner => String::new(),
            Holder::Key(hash) => format!("/key/{}", hexadecimal(&hash)),
        };
        let tag = hmac::sign(&self.key, format!("{text}{of_holder}").as_bytes());
        hexadecimal(tag.as_ref())
    }

    /// Waits until what has changed so far is in the file.
    ///
    /// # Errors
    /// The host does not keep it.
    pub async fn written(&self) -> Result<(), Problem> {
        self.contents.written().await.map_err(|error| {
            Problem::new(Kind::NoSpace, format!("the node cannot note it: {error}"))
        })
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// So many random letters and digits, of 32 that are all usable in names of hosts.
pub fn random_text(len: usize) -> io::Result<String> {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut bytes = vec![0; len];
    if getrandom(&mut bytes, GetRandomFlags::empty())? < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes.iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)])).collect())
}

/// Whether two texts are equal, in a time that does not depend on where they differ.
pub fn are_equal(a: &str, b: &str) -> bool {
    let differences = a.bytes().zip(b.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    std::hint::black_box(differences) == 0 && a.len() == b.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn record(owner: &str) -> Record {
        Record { owner: owner.to_owned(), ..Record::default() }
    }

    #[test]
    fn the_next_daemon_knows_them_and_their_tokens() {
        let place = tempfile::tempdir().unwrap();
        let records = Records::load(place.path()).unwrap();
        let id = records.insert(record("a"), 2).unwrap();
        // Whoever looks now for sandboxes that are gone does not take this one for one.
        assert!(records.of("a").is_empty());
        records.made(&id);
        let token = records.token(&id, Holder::Owner);
        assert_eq!((id.len(), token.len()), (ID_LEN, 64));
        drop(records);
        let records = Records::load(place.path()).unwrap();
        assert_eq!(records.get(&id), Some(record("a")));
        assert!(are_equal(&records.token(&id, Holder::Owner), &token));
        let mode = place.path().join(FILE).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        records.remove(&id);
        assert_eq!(Records::load(place.path()).unwrap().get(&id), None);
    }

    #[test]
    fn changes_count_up_to_one_that_cannot_be_read() {
        let place = tempfile::tempdir().unwrap();
        let records = Records::load(place.path()).unwrap();
        let first = records.insert(record("a"), 2).unwrap();
        let token = records.token(&first, Holder::Owner);
        let file = place.path().join(FILE);
        let mut text = std::fs::read_to_string(&file).unwrap();
        let line = text.lines().last().unwrap().replace(&first, "later");
        text += &format!("{}\n{line}\n", "\0".repeat(20));
        std::fs::write(&file, text).unwrap();
        let records = Records::load(place.path()).unwrap();
        assert_eq!(records.get(&first), Some(record("a")));
        assert_eq!(records.get("later"), None);
        assert!(are_equal(&records.token(&first, Holder::Owner), &token));
    }

    #[test]
    fn an_owner_has_no_more_than_the_key_says() {
        let place = tempfile::tempdir().unwrap();
        let records = Records::load(place.path()).unwrap();
        let first = records.insert(record("a"), 1).unwrap();
        assert_eq!(records.insert(record("a"), 1).unwrap_err().kind, Kind::Exhausted);
        records.insert(record("b"), 1).unwrap();
        records.made(&first);
        assert_eq!(records.of("a"), std::slice::from_ref(&first));
        records.remove(&first);
        records.insert(record("a"), 1).unwrap();
    }

    #[test]
    fn volumes_have_names_owners_and_a_bound() {
        let place = tempfile::tempdir().unwrap();
        let records = Records::load(place.path()).unwrap();
        let volume = |owner: &str, name: &str| {
            let (owner, name) = (owner.into(), name.into());
            VolumeRecord { owner, name, is_being_made: false }
        };
        let id = records.insert_volume(volume("a", "data"), 2).unwrap();
        // It counts, and nobody sees it yet.
        assert!(records.volume(&id).unwrap().is_being_made && records.volumes_of("a").is_empty());
        records.made_volume(&id);
        assert_eq!(records.volumes_of("a").len(), 1);
        let taken = records.insert_volume(volume("a", "data"), 2).unwrap_err();
        assert_eq!(taken.kind, Kind::Exists);
        records.insert_volume(volume("b", "data"), 2).unwrap();
        let other = records.insert_volume(volume("a", "other"), 2).unwrap();
        let many = records.insert_volume(volume("a", "third"), 2).unwrap_err();
        assert_eq!(many.kind, Kind::Exhausted);
        assert_ne!(records.volume_token(&id), records.volume_token(&other));
        assert_ne!(records.volume_token(&id), records.token(&id, Holder::Owner));
        drop(records);
        let records = Records::load(place.path()).unwrap();
        assert_eq!(records.volume(&id), Some(volume("a", "data")));
        records.remove_volume(&id);
        assert!(records.volumes_of("a").is_empty(), "the other one was not made yet");
        records.forget_volumes(|id| id == other);
        assert_eq!((records.volume(&other), records.volumes_of("b").len()), (None, 1));
        records.forget_volumes(|_| true);
        assert_eq!(records.volumes_of("b").len(), 1, "it was made");
    }

    #[test]
    fn tokens_of_two_sandboxes_and_of_two_nodes_differ() {
        let places = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [a, b] = places.each_ref().map(|place| Records::load(place.path()).unwrap());
        let of = |records: &Records, id| records.token(id, Holder::Owner);
        assert_ne!(of(&a, "x"), of(&a, "y"));
        assert_ne!(of(&a, "x"), of(&b, "x"));
        let [one, other] = [1, 2].map(|byte| a.token("x", Holder::Key([byte; 32])));
        assert!(one != other && one != of(&a, "x"));
        assert!(!are_equal("abc", "abcd") && !are_equal("abc", "abd") && !are_equal("", "a"));
    }
}
