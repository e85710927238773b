//! What is known of registries: `registries.toml`.

use super::bucket::SCHEME;
use crate::error::OciError;
use serde::Deserialize;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What is known of registries: `registries.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registries {
    /// One entry for each registry that needs one.
    #[serde(default)]
    pub registry: Vec<RegistryRule>,
}

/// How a registry is reached, and what is believed of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegistryRule {
    /// Its host, with the port if there is one.
    pub host: String,
    /// Registries that have the same images, asked first, in this order.
    #[serde(default)]
    pub mirrors: Vec<String>,
    /// `s3://BUCKET`: where the bucket is, as in `https://s3.example`.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// `s3://BUCKET`: its region.
    #[serde(default)]
    pub region: Option<String>,
    /// Whether it speaks plain HTTP; if nothing is said, those on this machine do.
    #[serde(default)]
    pub http: Option<bool>,
    /// File with further certificates (PEM) that are trusted.
    #[serde(default)]
    pub ca: Option<PathBuf>,
    /// File with a public key (PEM). Nothing is pulled that this key has not signed.
    #[serde(default)]
    pub verify_key: Option<PathBuf>,
}

impl Registries {
    /// Reads the file; nothing is known if there is none.
    ///
    /// # Errors
    /// It cannot be read, or makes no sense.
    pub fn read(path: &Path) -> Result<Self, OciError> {
        match fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text).map_err(|error| OciError::Configuration {
                path: path.to_owned(),
                reason: error.to_string().trim().replace('\n', " "),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(OciError::file("read", path, error)),
        }
    }

    pub(super) fn rule(&self, host: &str) -> Option<&RegistryRule> {
        let bucket = super::bucket::bucket_of(host);
        let named = |rule: &&RegistryRule| match (bucket, rule.host.strip_prefix(SCHEME)) {
            (Some(bucket), Some(named)) => bucket == named,
            _ => rule.host == host,
        };
        self.registry.iter().find(named)
    }

    pub(super) fn speaks_http(&self, host: &str) -> bool {
        let said = self.rule(host).and_then(|rule| rule.http);
        said.unwrap_or_else(|| is_local(host))
    }
}

/// Registries on this machine speak plain HTTP, as docker(1) supposes.
fn is_local(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name == "localhost"
        || name == "[::1]"
        || name.parse::<std::net::Ipv4Addr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries_on_this_machine_speak_plain_http() {
        let registries = Registries::default();
        for local in ["localhost", "localhost:5000", "127.0.0.1:5000", "[::1]:5000"] {
            assert!(registries.speaks_http(local), "{local}");
        }
        assert!(!registries.speaks_http("docker.io") && !registries.speaks_http("127.example"));
    }

    #[test]
    fn a_file_says_how_registries_are_reached() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("registries.toml");
        assert_eq!(Registries::read(&path).unwrap(), Registries::default());
        let text = "[[registry]]\nhost = \"a.example\"\nhttp = true\nmirrors = [\"b\"]\n\
                    verify_key = \"/etc/key.pub\"\n";
        fs::write(&path, text).unwrap();
        let registries = Registries::read(&path).unwrap();
        assert!(registries.speaks_http("a.example"));
        let rule = registries.rule("a.example").unwrap();
        assert_eq!(rule.mirrors, ["b"]);
        assert_eq!(rule.verify_key.as_deref(), Some(Path::new("/etc/key.pub")));
        let local = "[[registry]]\nhost = \"127.0.0.1:5000\"\nverify_key = \"/etc/key.pub\"\n";
        let speaks_http = |text: &str| {
            fs::write(&path, text).unwrap();
            Registries::read(&path).unwrap().speaks_http("127.0.0.1:5000")
        };
        assert!(speaks_http(local), "nothing is said of it");
        assert!(!speaks_http(&format!("{local}http = false\n")));
        fs::write(&path, "[[registry]]\nhots = \"a\"\n").unwrap();
        let error = Registries::read(&path).unwrap_err().to_string();
        assert!(error.contains("hots") && error.contains("registries.toml"), "{error}");
    }
}
