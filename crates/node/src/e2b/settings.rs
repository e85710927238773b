//! `e2b.toml`: who may use the API, and what the templates of E2B are here.
//!
//! ```toml
//! domain = "box.example.org"     # names of hosts are PORT-ID.box.example.org
//!
//! [templates]
//! base = "python-sandbox"        # a function of this node
//!
//! [[keys]]
//! name = "team-a"
//! sha256 = "…"                   # of the key, in hexadecimal digits
//! sandboxes = 100                # most at a time, paused ones included
//! snapshots = 20                 # most at a time
//!
//! [[certificates]]               # TLS, and nothing else
//! chain = "tls/box.pem"          # for *.box.example.org, below THAW_HOME
//! key = "tls/box.key"
//! ```
//!
//! Only hashes of keys are kept. A key is a long random text, so a plain hash is enough: there is
//! nothing to guess.

use crate::edge::CertificateTable;
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

/// Name of the file in the node's home.
pub const FILE: &str = "e2b.toml";
/// Most bytes of it.
const FILE_MAX: u64 = 1 << 20;
/// Sandboxes of one key, unless the file says otherwise.
const SANDBOXES: u32 = 100;

/// Snapshots of one key, unless the file says otherwise.
const SNAPSHOTS: u32 = 20;

/// A SHA-256 hash.
pub(super) type Hash = [u8; 32];

/// The contents of the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Names of templates, and the functions that they mean.
    #[serde(default)]
    pub templates: BTreeMap<String, String>,
    /// Those who may use the API.
    #[serde(default)]
    pub keys: Vec<Key>,
    /// What names of hosts end with: `api.DOMAIN`, and `PORT-ID.DOMAIN` for ports of sandboxes.
    #[serde(default)]
    pub domain: Option<String>,
    /// With some, TLS is spoken.
    #[serde(default)]
    pub(crate) certificates: Vec<CertificateTable>,
}

/// Somebody who may use the API.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Whose it is. Keys of one name share their sandboxes.
    pub name: String,
    /// The hash of the key, in hexadecimal digits.
    #[serde(deserialize_with = "hexadecimal")]
    pub sha256: Hash,
    /// Most sandboxes at a time, paused ones included.
    #[serde(default = "default_sandboxes")]
    pub sandboxes: u32,
    /// Most snapshots at a time.
    #[serde(default = "default_snapshots")]
    pub snapshots: u32,
}

fn default_snapshots() -> u32 {
    SNAPSHOTS
}

fn default_sandboxes() -> u32 {
    SANDBOXES
}

fn hexadecimal<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Hash, D::Error> {
    let text = String::deserialize(from)?;
    from_hex(&text).ok_or_else(|| {
        serde::de::Error::custom(
            "`sha256` takes the 64 hexadecimal digits that `printf %s KEY | sha256sum` prints",
        )
    })
}

fn from_hex(text: &str) -> Option<Hash> {
    let mut hash = [0; 32];
    let digits = text.as_bytes();
    if digits.len() != 2 * hash.len() || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    for (byte, pair) in hash.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(hash)
}

/// Why there are no settings.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error(
        "cannot read {} ({error}); it says who may use E2B's API, and docs/e2b.md says how",
        path.display()
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// It makes no sense.
    #[error("{}: {reason}", path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl Settings {
    /// Reads a file.
    ///
    /// # Errors
    /// See [`SettingsError`].
    pub fn load(path: &Path) -> Result<Self, SettingsError> {
        let failed = |error| SettingsError::Read { path: path.to_owned(), error };
        let len = std::fs::metadata(path).map_err(failed)?.len();
        if len > FILE_MAX {
            return Err(failed(std::io::ErrorKind::FileTooLarge.into()));
        }
        let text = std::fs::read_to_string(path).map_err(failed)?;
        Self::parse(&text).map_err(|reason| SettingsError::Wrong { path: path.to_owned(), reason })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let settings: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        if settings.keys.is_empty() {
            return Err("it names no `[[keys]]`, so nobody may use the API; add one".to_owned());
        }
        let is_name = |domain: &String| {
            let is_fine = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
            let ends = |text: &str| text.bytes().next().is_some_and(is_fine);
            ends(domain)
                && domain.bytes().all(|byte| is_fine(byte) || matches!(byte, b'-' | b'.'))
                && domain.split('.').all(ends)
        };
        if settings.domain.as_ref().is_some_and(|domain| !is_name(domain)) {
            return Err("`domain` is no name of a host in small letters, such as \
                        \"box.example.org\""
                .to_owned());
        }
        let mut hashes = BTreeSet::new();
        for key in &settings.keys {
            if key.name.is_empty() {
                return Err("a key has an empty `name`; say whose it is".to_owned());
            }
            if !hashes.insert(key.sha256) {
                return Err(format!("the `sha256` of `{}` is there twice; remove one", key.name));
            }
        }
        Ok(settings)
    }

    /// Whose key this is. Only hashes are compared, so how long that takes says nothing of keys.
    pub fn key(&self, secret: &[u8]) -> Option<&Key> {
        let hash = digest(&SHA256, secret);
        self.keys.iter().find(|key| key.sha256 == *hash.as_ref())
    }

    /// Whether a key of this name is there still.
    pub fn has_owner(&self, name: &str) -> bool {
        self.keys.iter().any(|key| key.name == name)
    }

    /// The function that a template's name means. E2B's names may end with a tag, which is of no
    /// use here but for `latest` and `default`.
    pub fn function<'a>(&'a self, template: &'a str) -> &'a str {
        if let Some(function) = self.templates.get(template) {
            return function;
        }
        let tags = [":latest", ":default"];
        let bare = tags.iter().find_map(|tag| template.strip_suffix(tag)).unwrap_or(template);
        self.templates.get(bare).map_or(bare, String::as_str)
    }
}

/// The settings in a file, read again when it has changed.
#[derive(Debug)]
pub struct LiveSettings {
    path: PathBuf,
    read: Mutex<(Option<SystemTime>, Arc<Settings>)>,
}

impl LiveSettings {
    /// Those in a file.
    ///
    /// # Errors
    /// See [`SettingsError`].
    pub fn load(path: PathBuf) -> Result<Self, SettingsError> {
        let changed = changed(&path);
        let settings = Settings::load(&path)?;
        Ok(Self { path, read: Mutex::new((changed, Arc::new(settings))) })
    }

    /// The present ones. Where the file has become unusable the former ones stay.
    pub fn now(&self) -> Arc<Settings> {
        let changed = changed(&self.path);
        let mut read = self.read.lock().expect("no holder panics");
        if read.0 != changed {
            read.0 = changed;
            match Settings::load(&self.path) {
                Ok(settings) => read.1 = Arc::new(settings),
                Err(error) => tracing::error!("{error}; what it said before holds on"),
            }
        }
        read.1.clone()
    }
}

fn changed(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|attributes| attributes.modified()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    fn parse(text: &str) -> Result<Settings, String> {
        Settings::parse(text)
    }

    #[test]
    fn keys_are_known_by_their_hashes_only() {
        let settings = parse(&format!("[[keys]]\nname = \"a\"\nsha256 = \"{HASH}\"\n")).unwrap();
        assert_eq!(settings.key(b"secret").unwrap().name, "a");
        assert_eq!(settings.key(b"secret").unwrap().sandboxes, SANDBOXES);
        for wrong in ["", "Secret", "secret ", HASH] {
            assert!(settings.key(wrong.as_bytes()).is_none(), "{wrong}");
        }
    }

    #[test]
    fn templates_are_names_of_functions_or_aliases() {
        let text = format!(
            "[templates]\nbase = \"python\"\n[[keys]]\nname = \"a\"\nsha256 = \"{HASH}\"\n"
        );
        let settings = parse(&text).unwrap();
        for (template, function) in
            [("base", "python"), ("base:latest", "python"), ("other", "other"), ("a:b", "a:b")]
        {
            assert_eq!(settings.function(template), function);
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let key = format!("[[keys]]\nname = \"a\"\nsha256 = \"{HASH}\"\n");
        for (text, word) in [
            (String::new(), "no `[[keys]]`"),
            ("[[keys]]\nname = \"a\"\nsha256 = \"secret\"\n".to_owned(), "64 hexadecimal"),
            (key.clone() + &key, "twice"),
            (key.replace("\"a\"", "\"\""), "empty `name`"),
            (format!("domain = \"Box.org\"\n{key}"), "name of a host"),
            (format!("domain = \"*.box.org\"\n{key}"), "name of a host"),
            (key + "key = \"secret\"\n", "unknown field"),
        ] {
            let reason = parse(&text).unwrap_err();
            assert!(reason.contains(word), "{reason}");
        }
    }

    #[test]
    fn a_changed_file_is_read_again_and_a_broken_one_is_not() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join(FILE);
        let key = |name: &str| format!("[[keys]]\nname = \"{name}\"\nsha256 = \"{HASH}\"\n");
        let write = |text: &str, second| {
            std::fs::write(&path, text).unwrap();
            let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(second);
            std::fs::File::open(&path).unwrap().set_modified(time).unwrap();
        };
        write(&key("a"), 1);
        let settings = LiveSettings::load(path.clone()).unwrap();
        write(&key("b"), 2);
        assert_eq!(settings.now().keys[0].name, "b");
        write("nonsense", 3);
        assert_eq!(settings.now().keys[0].name, "b");
    }
}
