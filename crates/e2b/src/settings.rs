//! `e2b.toml`: who may use the API, and what the templates of E2B are here.
//!
//! ```toml
//! domain = "box.example.org"     # names of hosts are PORT-ID.box.example.org
//! egress = ["*"]                 # what sandboxes may connect to at most
//!
//! [templates]
//! base = "python-sandbox"        # a function of this node
//!
//! [images]
//! "python:3.12" = "python-312"   # the function with the files of an image
//!
//! [[keys]]
//! name = "team-a"
//! sha256 = "…"                   # of the key, in hexadecimal digits
//! sandboxes = 100                # most at a time, paused ones included
//! snapshots = 20                 # most at a time
//! templates = 20                 # most at a time
//! volumes = 4                    # most at a time
//! volume_size = "1GiB"           # of each
//! role = "user"                  # or "admin", "read-only"
//! rate = "100 per 1m"            # requests of the control API
//!
//! [[certificates]]               # TLS, and nothing else
//! chain = "tls/box.pem"          # for *.box.example.org, below THAW_HOME
//! key = "tls/box.key"
//! ```
//!
//! Only hashes of keys are kept. A key is a long random text, so a plain hash is enough: there is
//! nothing to guess.

use super::keys::{self, KEYS_FILE, Key, Role};
use super::records::Holder;
use super::templates::plain_image;
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::iter;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;
use thaw_home::config::EgressRule;
use thaw_node::edge::CertificateTable;
use thaw_sandbox::EgressRules;

/// Name of the file in the node's home.
pub const FILE: &str = "e2b.toml";
/// Most bytes of it.
const FILE_MAX: u64 = 1 << 20;
/// The image that E2B's SDKs begin with where a client names none.
const BASE_IMAGE: &str = "e2bdev/base";
/// A SHA-256 hash.
pub(super) type Hash = [u8; 32];

/// The contents of the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Names of templates, and the functions that they mean.
    #[serde(default)]
    pub templates: BTreeMap<String, String>,
    /// Names of container images, and the functions that have their files.
    #[serde(default)]
    pub images: BTreeMap<String, String>,
    /// Those who may use the API.
    #[serde(default)]
    pub keys: Vec<Key>,
    /// What names of hosts end with: `api.DOMAIN`, and `PORT-ID.DOMAIN` for ports of sandboxes.
    #[serde(default)]
    pub domain: Option<String>,
    /// What sandboxes may connect to at most; none: what their functions may.
    #[serde(default)]
    pub egress: Option<Vec<EgressRule>>,
    /// With some, TLS is spoken.
    #[serde(default)]
    pub(crate) certificates: Vec<CertificateTable>,
}

pub(super) fn hexadecimal<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Hash, D::Error> {
    let text = String::deserialize(from)?;
    from_hex(&text).ok_or_else(|| {
        serde::de::Error::custom(
            "`sha256` takes the 64 hexadecimal digits that `printf %s KEY | sha256sum` prints",
        )
    })
}

pub(super) fn to_hexadecimal<S: serde::Serializer>(hash: &Hash, to: S) -> Result<S::Ok, S::Error> {
    let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    to.serialize_str(&digits)
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
        "cannot read {} ({error}); `thaw key create NAME` makes a key for E2B's API, and docs/e2b.md says \
         what else the file may hold",
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
        let text = text_of(path, FILE_MAX).map_err(failed)?;
        Self::parse(&text).map_err(|reason| SettingsError::Wrong { path: path.to_owned(), reason })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let settings: Self = toml::from_str(text).map_err(|error| error.to_string())?;
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

    /// What sandboxes may connect to at most; none: what their functions may.
    pub fn most_egress(&self) -> Option<EgressRules> {
        let rules = self.egress.as_ref()?.iter().map(EgressRule::rule).cloned();
        Some(EgressRules::allowing(rules.collect()))
    }

    /// Whose key this is. Only hashes are compared, so how long that takes says nothing of keys.
    pub fn key(&self, secret: &[u8]) -> Option<&Key> {
        let hash = digest(&SHA256, secret);
        self.keys.iter().find(|key| key.sha256 == *hash.as_ref())
    }

    /// Whether a key of this name is there still that may do more than look.
    pub fn has_owner(&self, name: &str) -> bool {
        self.keys.iter().any(|key| key.name == name && key.role != Role::ReadOnly)
    }

    /// Those whose tokens count for a sandbox: its owner's, and those that the keys which may use
    /// the sandboxes of every name have read.
    pub fn holders(&self) -> impl Iterator<Item = Holder> {
        let all = self.keys.iter().filter(|key| key.role == Role::Admin);
        iter::once(Holder::Owner).chain(all.map(|key| Holder::Key(key.sha256)))
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

    /// The function that has the files of a container image. The image that E2B's SDKs begin with
    /// is what the template `base` is here, unless it is named.
    pub fn image<'a>(&'a self, image: &str) -> Option<&'a str> {
        let wanted = plain_image(image);
        let named = self.images.iter().find(|(name, _)| plain_image(name) == wanted);
        let base = || self.templates.get("base").filter(|_| wanted == BASE_IMAGE);
        named.map(|(_, function)| function).or_else(base).map(String::as_str)
    }
}

/// All of a text file.
pub(super) fn text_of(path: &Path, max: u64) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(max + 1).read_to_string(&mut text)?;
    match text.len() as u64 > max {
        true => Err(io::ErrorKind::FileTooLarge.into()),
        false => Ok(text),
    }
}

/// The settings in e2b.toml and the keys of `thaw key` beside it, read again when they have changed.
#[derive(Debug)]
pub struct LiveSettings {
    /// That of e2b.toml.
    path: PathBuf,
    read: Mutex<Present>,
}

/// What was read last.
#[derive(Debug)]
struct Present {
    /// Of both files.
    stamps: [Stamp; 2],
    /// What e2b.toml says.
    own: Settings,
    /// The keys of `thaw key`.
    made: Vec<Key>,
    /// Both together.
    all: Arc<Settings>,
}

impl Present {
    fn join(&mut self) {
        let mut all = self.own.clone();
        all.keys.extend(self.made.iter().cloned());
        self.all = Arc::new(all);
    }
}

impl LiveSettings {
    /// Those in a directory. Without keys nobody could use them, so that is refused at the start.
    ///
    /// # Errors
    /// See [`SettingsError`].
    pub fn load(path: PathBuf) -> Result<Self, SettingsError> {
        let made_path = path.with_file_name(KEYS_FILE);
        let stamps = [stamp(&path), stamp(&made_path)];
        let made = keys::load(&made_path)?;
        let own = match Settings::load(&path) {
            // All that it could say has a default.
            Err(SettingsError::Read { error, .. })
                if error.kind() == io::ErrorKind::NotFound && !made.is_empty() =>
            {
                Settings::default()
            }
            own => own?,
        };
        if own.keys.is_empty() && made.is_empty() {
            let reason = "it names no `[[keys]]`, so nobody may use the API; add one, or make one \
                          with `thaw key create`";
            return Err(SettingsError::Wrong { path, reason: reason.to_owned() });
        }
        let mut present = Present { stamps, own, made, all: Arc::default() };
        present.join();
        Ok(Self { path, read: Mutex::new(present) })
    }

    /// The present ones. Where a file has become unusable what it said before holds on.
    pub fn now(&self) -> Arc<Settings> {
        let made_path = self.path.with_file_name(KEYS_FILE);
        let stamps = [stamp(&self.path), stamp(&made_path)];
        let mut read = self.read.lock().expect("no holder panics");
        let before = std::mem::replace(&mut read.stamps, stamps);
        if before[0] != stamps[0] {
            match Settings::load(&self.path) {
                Ok(settings) => read.own = settings,
                Err(error) => tracing::error!("{error}; what it said before holds on"),
            }
        }
        if before[1] != stamps[1] {
            match keys::load(&made_path) {
                Ok(keys) => read.made = keys,
                Err(error) => tracing::error!("{error}; what it said before holds on"),
            }
        }
        if before != stamps {
            read.join();
        }
        read.all.clone()
    }
}

/// By which a file is known to be what it was: its last modification, inode and size.
type Stamp = Option<(SystemTime, u64, u64)>;

fn stamp(path: &Path) -> Stamp {
    let found = std::fs::metadata(path).ok()?;
    Some((found.modified().ok()?, found.ino(), found.len()))
}

#[cfg(test)]
mod tests {
    use super::super::keys::SANDBOXES;
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
    fn images_are_functions_that_the_operator_names() {
        let text = format!(
            "[templates]\nbase = \"box\"\n[images]\n\"python:3.12\" = \"python-312\"\n\
             \"docker.io/library/debian:latest\" = \"debian\"\n\
             [[keys]]\nname = \"a\"\nsha256 = \"{HASH}\"\n"
        );
        let settings = parse(&text).unwrap();
        assert_eq!(settings.image("docker.io/library/python:3.12"), Some("python-312"));
        assert_eq!(settings.image("debian"), Some("debian"));
        assert_eq!(settings.image("e2bdev/base:latest"), Some("box"));
        assert_eq!(settings.image("python:3.13"), None);
        let other = text.replace("\"python:3.12\"", "\"e2bdev/base\"");
        assert_eq!(parse(&other).unwrap().image("e2bdev/base"), Some("python-312"));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let key = format!("[[keys]]\nname = \"a\"\nsha256 = \"{HASH}\"\n");
        for (text, word) in [
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
        // Keys that were taken away count no more, the last one neither.
        std::fs::write(place.path().join(KEYS_FILE), key("c").replace("2b", "3b")).unwrap();
        assert_eq!(settings.now().keys.iter().map(|key| &key.name).collect::<Vec<_>>(), ["b", "c"]);
        write("", 4);
        std::fs::remove_file(place.path().join(KEYS_FILE)).unwrap();
        assert!(settings.now().keys.is_empty());
        let nobody = LiveSettings::load(path).unwrap_err().to_string();
        assert!(nobody.contains("no `[[keys]]`"), "{nobody}");
    }
}
