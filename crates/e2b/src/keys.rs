//! Keys of the API: who somebody is, what they may do, and how often they may ask.
//!
//! The operator writes them into `e2b.toml`, or has `thaw key` write them into a file of their own.
//! Only hashes are kept.

use super::problem::{Kind, Problem};
use super::settings::{Hash, SettingsError, hexadecimal, to_hexadecimal};
use axum::http::Method;
use ring::digest::{SHA256, digest};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU32;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use thaw_home::config::{ByteSize, TimeSpan};
use thaw_home::home::{Home, HomeError};
use thaw_home::replace::{replace, settle};
use thaw_node::edge::take_allowance;

/// Name of the file of `thaw key` in the node's home.
pub const KEYS_FILE: &str = "e2b-keys.toml";
/// Most keys in that file.
const KEYS_MAX: usize = 1000;
/// Most bytes of it.
pub(super) const KEYS_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of a key's name.
const NAME_MAX: usize = 64;
/// Sandboxes of one key, unless the file says otherwise.
pub(super) const SANDBOXES: u32 = 100;
/// Snapshots of one key, unless the file says otherwise.
const SNAPSHOTS: u32 = 20;
/// Templates of one key, unless the file says otherwise.
const TEMPLATES: u32 = 20;
/// Volumes of one key, unless the file says otherwise. They are few: also keys that were made before there
/// were volumes have as many, and each may fill its size.
const VOLUMES: u32 = 4;
/// Bytes of each of them.
const VOLUME_SIZE: ByteSize = ByteSize::mebibytes(1 << 10);
/// Random bytes of a key.
const KEY_BYTES: usize = 20;
/// Longest time over which requests are counted.
const PER_MAX: Duration = Duration::from_secs(24 * 3600);
/// So many counts are kept before those are forgotten that say nothing.
const COUNTS: usize = 1024;

/// What somebody may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// All that a user may, and with the sandboxes of every name.
    Admin,
    /// Makes, uses and ends the sandboxes of its name.
    #[default]
    User,
    /// Lists the sandboxes of its name, and sees what they are and use. Gets no token of theirs.
    ReadOnly,
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "admin" => Ok(Self::Admin),
            "user" => Ok(Self::User),
            "read-only" => Ok(Self::ReadOnly),
            _ => Err("a role is `admin`, `user` or `read-only`".to_owned()),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Admin => "admin",
            Self::User => "user",
            Self::ReadOnly => "read-only",
        })
    }
}

/// So many requests in each time, all at once or one by one: `"100 per 1m"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RequestRate {
    requests: NonZeroU32,
    per: TimeSpan,
}

impl FromStr for RequestRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(" per ").and_then(|(requests, per)| {
            Some(Self { requests: requests.parse().ok()?, per: per.parse().ok()? })
        });
        let is_time = |rate: &Self| !rate.per.0.is_zero() && rate.per.0 <= PER_MAX;
        parts.filter(is_time).ok_or_else(|| {
            format!("{text:?} is no rate; write requests and a time up to 24h: \"100 per 1m\"")
        })
    }
}

impl TryFrom<String> for RequestRate {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<RequestRate> for String {
    fn from(rate: RequestRate) -> Self {
        rate.to_string()
    }
}

impl fmt::Display for RequestRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} per {}", self.requests, self.per)
    }
}

/// Somebody who may use the API.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Whose it is. Keys of one name share their sandboxes.
    pub name: String,
    /// The hash of the key, in hexadecimal digits.
    #[serde(deserialize_with = "hexadecimal", serialize_with = "to_hexadecimal")]
    pub sha256: Hash,
    /// Most sandboxes at a time, paused ones included.
    #[serde(default = "default_sandboxes")]
    pub sandboxes: u32,
    /// Most snapshots at a time.
    #[serde(default = "default_snapshots")]
    pub snapshots: u32,
    /// Most templates at a time.
    #[serde(default = "default_templates")]
    pub templates: u32,
    /// Most volumes at a time.
    #[serde(default = "default_volumes")]
    pub volumes: u32,
    /// Bytes that each volume may hold.
    #[serde(default = "default_volume_size")]
    pub volume_size: ByteSize,
    /// What it may do.
    #[serde(default)]
    pub role: Role,
    /// How often it may ask; without, as often as it likes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<RequestRate>,
}

fn default_snapshots() -> u32 {
    SNAPSHOTS
}

fn default_templates() -> u32 {
    TEMPLATES
}

fn default_volumes() -> u32 {
    VOLUMES
}

fn default_volume_size() -> ByteSize {
    VOLUME_SIZE
}

fn default_sandboxes() -> u32 {
    SANDBOXES
}

impl Key {
    /// The beginning of its hash, by which people name it.
    pub fn id(&self) -> String {
        self.sha256[..4].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Refuses what its role does not allow.
    pub(super) fn check(&self, method: &Method) -> Result<(), Problem> {
        match self.role == Role::ReadOnly && method != Method::GET {
            true => Err(Problem::new(
                Kind::Forbidden,
                "this key may only look (its role is `read-only`); use one whose role is `user`",
            )),
            false => Ok(()),
        }
    }
}

/// When each key will have its whole allowance of requests again.
#[derive(Default)]
pub(super) struct Rates(Mutex<HashMap<Hash, Instant>>);

impl Rates {
    /// Counts a request; how long its client has to wait if it has used up its allowance.
    pub fn count(&self, key: &Key, now: Instant) -> Result<(), Duration> {
        let Some(rate) = key.rate else { return Ok(()) };
        let interval = (rate.per.0 / rate.requests.get()).max(Duration::from_nanos(1));
        let tolerance = interval.saturating_mul(rate.requests.get() - 1);
        let mut counts = self.0.lock().expect("no holder panics");
        if counts.len() >= COUNTS {
            counts.retain(|_, full_at| *full_at > now);
        }
        take_allowance(counts.entry(key.sha256).or_insert(now), now, interval, tolerance)
    }
}

/// The contents of the file of `thaw key`.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    #[serde(default)]
    keys: Vec<Key>,
}

/// Reads that file; there are no keys where it is not there.
pub(super) fn load(path: &Path) -> Result<Vec<Key>, SettingsError> {
    let read = |error| SettingsError::Read { path: path.to_owned(), error };
    let text = match super::settings::text_of(path, KEYS_BYTES_MAX) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(read)?,
    };
    let file: KeyFile = toml::from_str(&text).map_err(|error| SettingsError::Wrong {
        path: path.to_owned(),
        reason: error.to_string(),
    })?;
    Ok(file.keys)
}

/// Why something was not done with a key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// It cannot be as it is wanted.
    #[error("{0}")]
    Wrong(String),
    /// The file is of no use.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The host refuses.
    #[error("cannot write {} ({error})", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the host says.
        error: io::Error,
    },
}

/// A key that is wanted.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// Whose it is to be.
    pub name: String,
    /// What it may do.
    pub role: Role,
    /// How often it may ask.
    pub rate: Option<RequestRate>,
    /// Most sandboxes at a time.
    pub sandboxes: Option<u32>,
    /// Most snapshots at a time.
    pub snapshots: Option<u32>,
    /// Most templates at a time.
    pub templates: Option<u32>,
    /// Most volumes at a time.
    pub volumes: Option<u32>,
    /// Bytes that each may hold.
    pub volume_size: Option<ByteSize>,
}

/// The keys that `thaw key` makes in a state directory. A daemon that serves it sees each change
/// at its next request.
pub struct KeyStore {
    home: Home,
}

impl KeyStore {
    /// That of a state directory.
    pub fn of(home: Home) -> Self {
        Self { home }
    }

    fn path(&self) -> PathBuf {
        self.home.root().join(KEYS_FILE)
    }

    /// Makes a key; what it is, and the key itself, which is kept nowhere.
    ///
    /// # Errors
    /// Its name is of no use, there are too many keys, or the host refuses.
    pub fn create(&self, wanted: NewKey) -> Result<(Key, String), KeyError> {
        let is_fine = |c: char| !c.is_control() && !c.is_whitespace();
        if !(1..=NAME_MAX).contains(&wanted.name.len()) || !wanted.name.chars().all(is_fine) {
            return Err(KeyError::Wrong(format!(
                "a key's name has up to {NAME_MAX} characters without blanks"
            )));
        }
        let secret = random_key().map_err(|error| self.failed(error))?;
        let hash = digest(&SHA256, secret.as_bytes());
        let key = Key {
            name: wanted.name,
            sha256: hash.as_ref().try_into().expect("SHA-256 has 32 bytes"),
            sandboxes: wanted.sandboxes.unwrap_or(SANDBOXES),
            snapshots: wanted.snapshots.unwrap_or(SNAPSHOTS),
            templates: wanted.templates.unwrap_or(TEMPLATES),
            volumes: wanted.volumes.unwrap_or(VOLUMES),
            volume_size: wanted.volume_size.unwrap_or(VOLUME_SIZE),
            role: wanted.role,
            rate: wanted.rate,
        };
        self.change(|keys| {
            if keys.len() >= KEYS_MAX {
                let reason = format!("there are {KEYS_MAX} keys already; revoke some");
                return Err(KeyError::Wrong(reason));
            }
            keys.push(key.clone());
            Ok(())
        })?;
        Ok((key, secret))
    }

    /// All of them, in the order in which they were made.
    ///
    /// # Errors
    /// The file is of no use.
    pub fn list(&self) -> Result<Vec<Key>, KeyError> {
        let _acting = self.home.act()?;
        Ok(load(&self.path())?)
    }

    /// Takes the key away whose id this is.
    ///
    /// # Errors
    /// There is none, or the host refuses.
    pub fn revoke(&self, id: &str) -> Result<Key, KeyError> {
        let mut revoked = None;
        self.change(|keys| {
            let at = keys.iter().position(|key| key.id() == id).ok_or_else(|| {
                KeyError::Wrong(format!(
                    "no key of `thaw key list` has the id {id:?}; keys in e2b.toml are taken out \
                     there"
                ))
            })?;
            revoked = Some(keys.remove(at));
            Ok(())
        })?;
        Ok(revoked.expect("it was found"))
    }

    /// Changes the file as a whole, one at a time.
    fn change(
        &self,
        work: impl FnOnce(&mut Vec<Key>) -> Result<(), KeyError>,
    ) -> Result<(), KeyError> {
        let _acting = self.home.act()?;
        let path = self.path();
        let private = |name: &Path| {
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(name)
        };
        let lock: File =
            private(&path.with_extension("lock")).map_err(|error| self.failed(error))?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|errno| self.failed(errno.into()))?;
        let mut file = KeyFile { keys: load(&path)? };
        work(&mut file.keys)?;
        let text = toml::to_string(&file).map_err(|error| KeyError::Wrong(error.to_string()))?;
        // A key that was revoked stays so after a loss of power.
        let written = replace(&path, text.as_bytes()).and_then(|()| settle(&path));
        written.map_err(|error| self.failed(error))
    }

    fn failed(&self, error: io::Error) -> KeyError {
        KeyError::Write { path: self.path(), error }
    }
}

/// A key as E2B's SDKs want it: `e2b_` and hexadecimal digits.
fn random_key() -> io::Result<String> {
    use rustix::rand::{GetRandomFlags, getrandom};
    let mut bytes = [0_u8; KEY_BYTES];
    if getrandom(&mut bytes, GetRandomFlags::empty())? < bytes.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("e2b_{digits}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(rate: &str) -> Key {
        let text = format!("name = \"a\"\nsha256 = \"{}\"\nrate = \"{rate}\"\n", "0".repeat(64));
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn a_key_has_its_allowance_and_then_a_rate() {
        let (rates, key, now) = (Rates::default(), key("3 per 3s"), Instant::now());
        assert_eq!((0..9).filter(|_| rates.count(&key, now).is_ok()).count(), 3);
        assert_eq!(rates.count(&key, now), Err(Duration::from_secs(1)));
        assert_eq!(rates.count(&key, now + Duration::from_secs(1)), Ok(()));
        let other = Key { sha256: [1; 32], ..key };
        assert_eq!(rates.count(&other, now), Ok(()), "another has its own");
    }

    #[test]
    fn what_is_no_rate_or_role_is_refused() {
        for wrong in
            ["", "100", "100 per", "0 per 1s", "1 per 0s", "1 per 25h", "x per 1s", "-1 per 1s"]
        {
            assert!(wrong.parse::<RequestRate>().is_err(), "{wrong}");
        }
        assert_eq!("100 per 1m".parse::<RequestRate>().unwrap().to_string(), "100 per 1m");
        assert!("root".parse::<Role>().is_err());
        for role in [Role::Admin, Role::User, Role::ReadOnly] {
            assert_eq!(role.to_string().parse(), Ok(role));
        }
    }

    #[test]
    fn counts_of_keys_that_have_all_again_are_forgotten() {
        let (rates, one, now) = (Rates::default(), key("1 per 1s"), Instant::now());
        for n in 0..2 * COUNTS {
            let mut sha256 = [0; 32];
            sha256[..8].copy_from_slice(&n.to_le_bytes());
            let at = now + Duration::from_secs(2 * n as u64);
            rates.count(&Key { sha256, ..one.clone() }, at).unwrap();
        }
        assert!(rates.0.lock().unwrap().len() <= COUNTS);
    }
}
