//! A TLS server whose certificates are read again when their files have changed.

use super::certificates::{CertificateTable, Certificates};
use super::file::{Reader, Stamp};
use rustls::ServerConfig;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How TLS is spoken, with certificates from files below a directory.
pub struct LiveServer {
    directory: PathBuf,
    read: Mutex<Read>,
}

struct Read {
    tables: Vec<CertificateTable>,
    stamps: Vec<Stamp>,
    looked: Instant,
    /// The files are of no use now: what is in use is of before.
    is_broken: bool,
    server: Arc<ServerConfig>,
}

impl LiveServer {
    /// Reads certificates, and says which protocols are spoken over them (ALPN).
    ///
    /// # Errors
    /// One sentence.
    pub fn load(directory: &Path, tables: &[CertificateTable]) -> Result<Self, String> {
        let read = Read::load(directory, tables)?;
        Ok(Self { directory: directory.to_owned(), read: Mutex::new(read) })
    }

    /// How TLS is spoken now. Where certificates have become unusable the former ones stay.
    pub fn now(&self, tables: &[CertificateTable]) -> Arc<ServerConfig> {
        let mut read = self.read.lock().expect("no holder panics");
        if read.tables == tables && read.looked.elapsed() < LOOK_EVERY {
            return read.server.clone();
        }
        read.looked = Instant::now();
        let same = |stamp: &Stamp| Stamp::of(stamp.path.clone()) == *stamp;
        if read.is_broken || read.tables != tables || !read.stamps.iter().all(same) {
            match Read::load(&self.directory, tables) {
                Ok(new) => *read = new,
                Err(reason) => {
                    tracing::error!("{reason}; the certificates of before stay in use");
                    read.tables = tables.to_vec();
                    read.is_broken = true;
                }
            }
        }
        read.server.clone()
    }
}

impl Read {
    fn load(directory: &Path, tables: &[CertificateTable]) -> Result<Self, String> {
        let mut reader = Reader::new(directory);
        let certificates = Arc::new(Certificates::load(tables, &mut reader)?);
        let mut server = certificates.server();
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            tables: tables.to_vec(),
            stamps: reader.stamps,
            looked: Instant::now(),
            is_broken: false,
            server: Arc::new(server),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// Writes a new certificate, and the file of the gateway's form that names it.
    fn write(directory: &Path, name: &str) -> CertificateTable {
        let made = rcgen::generate_simple_self_signed(["*.box.test".to_owned()]).unwrap();
        let (chain, key) = (format!("{name}.pem"), format!("{name}.key"));
        fs::write(directory.join(&chain), made.cert.pem()).unwrap();
        let path = directory.join(&key);
        fs::write(&path, made.signing_key.serialize_pem()).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        toml::from_str(&format!("chain = \"{chain}\"\nkey = \"{key}\"")).unwrap()
    }

    #[test]
    fn changed_certificates_are_used_and_broken_ones_are_not() {
        let place = tempfile::tempdir().unwrap();
        let tables = [write(place.path(), "a")];
        let live = LiveServer::load(place.path(), &tables).unwrap();
        let now = |tables: &[CertificateTable]| {
            live.read.lock().unwrap().looked -= LOOK_EVERY;
            live.now(tables)
        };
        let first = now(&tables);
        assert_eq!(first.alpn_protocols, [b"http/1.1"]);
        assert!(Arc::ptr_eq(&first, &now(&tables)));
        fs::write(place.path().join("b.pem"), "nonsense").unwrap();
        let other = [toml::from_str("chain = \"b.pem\"\nkey = \"a.key\"").unwrap()];
        assert!(Arc::ptr_eq(&first, &now(&other)), "broken ones are in use");
        write(place.path(), "b");
        fs::copy(place.path().join("b.key"), place.path().join("a.key")).unwrap();
        let second = now(&other);
        assert!(!Arc::ptr_eq(&first, &second), "mended ones are not in use");
        write(place.path(), "b");
        fs::copy(place.path().join("b.key"), place.path().join("a.key")).unwrap();
        assert!(!Arc::ptr_eq(&second, &now(&other)), "renewed ones are not in use");
        // Without any, TLS is spoken all the same.
        now(&[]);
    }
}
