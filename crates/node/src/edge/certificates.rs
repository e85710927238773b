//! Certificates, and which of them a client gets: by the name that it asks for (SNI,
//! RFC 6066 §3).

use super::file::Reader;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Most certificates of a node.
const CERTIFICATES_MAX: usize = 1000;
/// Sessions that can be resumed, of all clients.
const SESSIONS_MAX: usize = 4096;

/// One `[[tls.certificate]]` of the file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CertificateTable {
    chain: PathBuf,
    key: PathBuf,
}

/// The certificates of a node, with their keys.
#[derive(Debug, Default)]
pub(crate) struct Certificates {
    exact: HashMap<String, Arc<CertifiedKey>>,
    /// By what follows `*.`.
    wildcard: HashMap<String, Arc<CertifiedKey>>,
    /// For clients that name no host.
    first: Option<Arc<CertifiedKey>>,
}

impl Certificates {
    /// Reads them.
    ///
    /// # Errors
    /// One sentence.
    pub(super) fn load(tables: &[CertificateTable], reader: &mut Reader) -> Result<Self, String> {
        if tables.is_empty() {
            return Err("[tls] has no [[tls.certificate]]; name one".to_owned());
        }
        if tables.len() > CERTIFICATES_MAX {
            return Err(format!("there are more than {CERTIFICATES_MAX} certificates"));
        }
        let mut certificates = Self::default();
        for table in tables {
            let chain = reader.read(&table.chain)?;
            let key = reader.read_secret(&table.key)?;
            let (key, names) = certified(&chain, &key)
                .map_err(|why| format!("{}: {why}", table.chain.display()))?;
            certificates.add(key, names);
        }
        Ok(certificates)
    }

    fn add(&mut self, key: Arc<CertifiedKey>, names: Vec<String>) {
        self.first.get_or_insert_with(|| key.clone());
        for name in names {
            // Of two certificates for a name the first one counts.
            match name.strip_prefix("*.") {
                Some(rest) => self.wildcard.entry(rest.to_owned()).or_insert_with(|| key.clone()),
                None => self.exact.entry(name).or_insert_with(|| key.clone()),
            };
        }
    }

    /// The certificate for a host; `None` is a client that names none.
    fn find(&self, host: Option<&str>) -> Option<&Arc<CertifiedKey>> {
        let Some(host) = host else { return self.first.as_ref() };
        // A wildcard stands for one label (RFC 9525 §6.3).
        let rest = || host.split_once('.').and_then(|(_, rest)| self.wildcard.get(rest));
        self.exact.get(host).or_else(rest)
    }

    /// Whether a request for `host` may come on a connection whose client has asked for
    /// `name` (RFC 9110 §7.4): the certificate that it has seen must be the host's.
    pub fn cover(&self, name: Option<&str>, host: Option<&str>) -> bool {
        match (self.find(name), self.find(host)) {
            (Some(shown), Some(wanted)) => Arc::ptr_eq(shown, wanted),
            _ => false,
        }
    }

    /// How TLS is spoken with them.
    pub fn server(self: &Arc<Self>) -> ServerConfig {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("ring has what the versions want");
        let mut config = builder.with_no_client_auth().with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config.session_storage = rustls::server::ServerSessionMemoryCache::new(SESSIONS_MAX);
        config
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name = hello.server_name().map(str::to_ascii_lowercase);
        self.find(name.as_deref()).cloned()
    }
}

/// A certificate with its key, and the names that it is for.
fn certified(chain: &[u8], key: &[u8]) -> Result<(Arc<CertifiedKey>, Vec<String>), String> {
    let chain = CertificateDer::pem_slice_iter(chain).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| format!("it is not PEM ({error})"))?;
    let Some(first) = chain.first() else {
        return Err("it has no certificate in it; it begins with the server's own".to_owned());
    };
    let names: Vec<_> = webpki::EndEntityCert::try_from(first)
        .map_err(|error| format!("its first certificate is not usable ({error})"))?
        .valid_dns_names()
        .map(str::to_ascii_lowercase)
        .collect();
    let key = PrivateKeyDer::from_pem_slice(key)
        .map_err(|error| format!("its key is not a private key in PEM ({error})"))?;
    let provider = rustls::crypto::ring::default_provider();
    let certified = CertifiedKey::from_der(chain, key, &provider)
        .map_err(|error| format!("its key does not fit ({error})"))?;
    Ok((Arc::new(certified), names))
}
