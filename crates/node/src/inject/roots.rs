//! Which servers the proxy trusts: those that the host trusts.

use rustls::client::Resumption;
use rustls::{ClientConfig, RootCertStore};
use std::sync::{Arc, OnceLock};

/// How TLS is spoken with servers, or why it cannot be.
static CLIENT: OnceLock<Result<Arc<ClientConfig>, String>> = OnceLock::new();

/// Reads the certificates that this host trusts, or those that `SSL_CERT_FILE` and `SSL_CERT_DIR`
/// name. To be called while the process still sees them; a daemon does not later.
pub fn read_roots() {
    let _ = client();
}

/// How TLS is spoken with servers.
///
/// # Errors
/// One sentence: this host trusts nobody.
pub(super) fn client() -> Result<Arc<ClientConfig>, String> {
    CLIENT.get_or_init(|| config(rustls_native_certs::load_native_certs().certs)).clone()
}

/// With the roots that are of use among `certificates`.
pub(super) fn config(
    certificates: Vec<rustls_pki_types::CertificateDer<'static>>,
) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates);
    if added == 0 {
        let why = "this host has no certificates of authorities; install ca-certificates, or set \
                   SSL_CERT_FILE for `thaw serve`";
        return Err(why.to_owned());
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // A session would be shared by functions that have nothing else in common.
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_an_authority_no_server_is_trusted() {
        let why = config(Vec::new()).unwrap_err();
        assert!(why.contains("install ca-certificates"), "{why}");
        assert!(config(vec![b"nonsense".to_vec().into()]).is_err());
        let made = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap();
        config(vec![made.cert.der().clone()]).unwrap();
    }
}
