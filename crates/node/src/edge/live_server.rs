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
pub(crate) struct LiveServer {
    directory: PathBuf,
    read: Mutex<Read>,
}

struct Read {
    tables: Vec<CertificateTable>,
    stamps: Vec<Stamp>,
    looked: Instant,
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
        if read.tables != tables || !read.stamps.iter().all(same) {
            match Read::load(&self.directory, tables) {
                Ok(new) => *read = new,
                Err(reason) => {
                    tracing::error!("{reason}; the certificates of before stay in use");
                    read.tables = tables.to_vec();
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
        let mut server = (*certificates.server()).clone();
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            tables: tables.to_vec(),
            stamps: reader.stamps,
            looked: Instant::now(),
            server: Arc::new(server),
        })
    }
}
