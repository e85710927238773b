//! Has the programs of a function trust the node's authority: its certificate is in the function's
//! files before the program is started, since a frozen program may have read its roots already.

use crate::authority::{Authority, AuthorityError};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use thaw_home::config::{FunctionConfig, Inject};
use thaw_home::home::Home;
use thaw_store::index::{Attributes, Content, Node, TreeError};
use thaw_store::{Domain, Session, StoreError, Tree};

/// The authority's certificate alone.
const CERTIFICATE: &str = "/etc/ssl/certs/thaw-inject.pem";
/// Where systems have all authorities in one file; the first is made if there is none. The list is
/// that of Go's `crypto/x509` (`root_linux.go`).
const BUNDLES: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// Most bytes of one.
const BUNDLE_MAX: u64 = 8 << 20;
/// Variables that name the file with all authorities: OpenSSL, Python's `requests`, curl, Git,
/// AWS' SDKs, pip, Deno (whose is added to its own).
const OF_BUNDLE: [&str; 6] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "AWS_CA_BUNDLE",
    "PIP_CERT",
];
/// Variables that name a file with authorities besides those of the program.
const OF_CERTIFICATE: [&str; 2] = ["NODE_EXTRA_CA_CERTS", "DENO_CERT"];

/// Why a function's programs cannot be made to trust the authority.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The authority cannot be used.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The store refuses.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The function's files leave no place for it.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A file of the function is too large to be added to.
    #[error("{path} has more than 8 MiB; [[egress.inject]] adds a certificate to it")]
    Large {
        /// The file, in the sandbox.
        path: String,
    },
}

/// Puts the certificate into the files of a function that is to trust it, and its place into
/// the environment, which the author's own variables may replace.
///
/// # Errors
/// The authority or the store cannot be used, or the files leave no place.
pub(crate) fn put_trust(
    home: &Home,
    config: &FunctionConfig,
    session: &mut Session,
    tree: &mut Tree,
    environment: &mut BTreeMap<String, String>,
) -> Result<(), TrustError> {
    if !config.egress.adds_authority() {
        return Ok(());
    }
    let authority = Authority::of(home)?;
    let hosts: BTreeSet<&str> = config.egress.inject.iter().map(Inject::name).collect();
    let certificate = match config.egress.authority {
        true => authority.certificate_for_all()?,
        false => authority.certificate(&hosts)?,
    };
    let domain = config.domain();
    let mut bundle = None;
    for path in BUNDLES {
        if let Some(content) = read(session, tree, path)? {
            put(session, tree, path, &joined(content, &certificate), &domain)?;
            bundle.get_or_insert(path);
        }
    }
    let bundle = match bundle {
        Some(path) => path,
        None => {
            put(session, tree, BUNDLES[0], certificate.as_bytes(), &domain)?;
            BUNDLES[0]
        }
    };
    put(session, tree, CERTIFICATE, certificate.as_bytes(), &domain)?;
    let of_bundle = OF_BUNDLE.map(|name| (name, bundle));
    let of_certificate = OF_CERTIFICATE.map(|name| (name, CERTIFICATE));
    for (name, path) in of_bundle.into_iter().chain(of_certificate) {
        environment.insert(name.to_owned(), path.to_owned());
    }
    Ok(())
}

/// The content of a regular file, or of one that a link leads to.
fn read(session: &Session, tree: &Tree, path: &str) -> Result<Option<Vec<u8>>, TrustError> {
    let Some(id) = tree.find_followed(Path::new(path)) else { return Ok(None) };
    match &tree.node(id).content {
        Content::Regular(None) => Ok(Some(Vec::new())),
        Content::Regular(Some(blob)) if blob.size > BUNDLE_MAX => {
            Err(TrustError::Large { path: path.to_owned() })
        }
        Content::Regular(Some(blob)) => Ok(Some(session.read_blob(blob.hash)?)),
        _ => Ok(None),
    }
}

fn joined(mut content: Vec<u8>, certificate: &str) -> Vec<u8> {
    if content.last().is_some_and(|&last| last != b'\n') {
        content.push(b'\n');
    }
    content.extend_from_slice(certificate.as_bytes());
    content
}

fn put(
    session: &mut Session,
    tree: &mut Tree,
    path: &str,
    content: &[u8],
    domain: &Domain,
) -> Result<(), TrustError> {
    let blob = session.put_blob(content, domain)?;
    let node = Node { content: Content::Regular(blob), attributes: Attributes::root(0o644) };
    tree.add_at(Path::new(path), node)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::tests::home;
    use thaw_store::Store;

    const FUNCTION: &str = "name = \"f\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 81\n";
    const RULE: &str = "[[egress.inject]]\nhost = \"a.example\"\nheader = \"X-Key\"\n\
                        value = \"${key}\"\n";

    /// The files, and the environment, of a function with files.
    fn trusting(
        rules: &str,
        files: &[(&str, &[u8])],
        link: Option<(&str, &str)>,
    ) -> (BTreeMap<&'static str, String>, BTreeMap<String, String>) {
        let (_directory, home) = home();
        let store = Store::open(&home.store()).unwrap();
        let mut session = store.session().unwrap();
        let (mut tree, mut environment) = (Tree::new(), BTreeMap::new());
        let config =
            FunctionConfig::parse("thaw.toml".as_ref(), &format!("{FUNCTION}{rules}")).unwrap();
        for (path, content) in files {
            put(&mut session, &mut tree, path, content, &config.domain()).unwrap();
        }
        if let Some((path, target)) = link {
            let content = Content::Symlink(target.into());
            let node = Node { content, attributes: Attributes::root(0o777) };
            tree.add_at(Path::new(path), node).unwrap();
        }
        put_trust(&home, &config, &mut session, &mut tree, &mut environment).unwrap();
        let text = |path| {
            let bytes = read(&session, &tree, path).unwrap()?;
            Some((path, String::from_utf8(bytes).unwrap()))
        };
        let found = BUNDLES.into_iter().chain([CERTIFICATE]).filter_map(text).collect();
        (found, environment)
    }

    #[test]
    fn the_certificate_is_added_to_what_the_function_has() {
        let (bundle, other) = (BUNDLES[0], BUNDLES[1]);
        let files: [(&str, &[u8]); 1] = [(bundle, b"others")];
        let (found, environment) =
            trusting(RULE, &files, Some((other, "../../../ssl/certs/ca-certificates.crt")));
        let own = &found[CERTIFICATE];
        assert!(own.starts_with("-----BEGIN CERTIFICATE-----"), "{own}");
        assert_eq!(found[bundle], format!("others\n{own}"));
        // A link is replaced by what it leads to.
        assert!(found[other].starts_with("others\n") && found[other].ends_with(own.as_str()));
        assert_eq!(environment["SSL_CERT_FILE"], bundle);
        assert_eq!(environment["NODE_EXTRA_CA_CERTS"], CERTIFICATE);
    }

    #[test]
    fn a_function_without_authorities_gets_one_and_one_without_rules_none() {
        let (found, environment) = trusting(RULE, &[], None);
        assert_eq!(found[BUNDLES[0]], found[CERTIFICATE]);
        assert_eq!(environment["CURL_CA_BUNDLE"], BUNDLES[0]);
        let (found, _) = trusting("[egress]\nauthority = true\n", &[], None);
        assert_eq!(found[BUNDLES[0]], found[CERTIFICATE]);
        let (found, environment) = trusting("", &[(BUNDLES[0], b"others")], None);
        assert_eq!(found, BTreeMap::from([(BUNDLES[0], "others".to_owned())]));
        assert!(environment.is_empty());
    }
}
