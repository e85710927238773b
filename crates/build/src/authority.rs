//! The node's certificate authority.
//!
//! ```text
//! $THAW_HOME/inject/authority.key    the private key, 0600
//! $THAW_HOME/inject/HASH.pem         its certificate for the functions with one set of hosts
//! ```
//!
//! A certificate of the authority is good for the hosts of one function and for nothing else (name
//! constraints, RFC 5280 §4.2.1.10): a program that trusts it trusts the node with no other host. A
//! function with `egress.authority` has one that is good for all.

use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    NameConstraints, PublicKeyData, SerialNumber,
};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
use thaw_home::home::{Home, HomeError};

const DAY: Duration = Duration::from_secs(24 * 3600);
/// How long the authority's certificate is good for, which is in images.
const LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// How old one may be that is put into a new image.
const RENEWED_AFTER: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long the certificate of a host is good for.
pub const LEAF_LIFE: Duration = DAY;
/// How long before a certificate is made its life begins: clocks differ.
const SKEW: Duration = DAY;

/// Why the authority cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The host refuses.
    #[error("cannot {action} {}: {error}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// What the host says.
        error: io::Error,
    },
    /// Its key is of no use.
    #[error(
        "{} is not a private key ({reason}); remove it, and build the functions with \
         [[egress.inject]] again", path.display()
    )]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// No certificate can be made.
    #[error("cannot make a certificate ({0})")]
    Certificate(String),
}

/// The authority of a node.
pub struct Authority {
    directory: PathBuf,
    home: Home,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Authority({})", self.directory.display())
    }
}

impl Authority {
    /// That of a state directory; its key is made if it has none. May wait for the disk.
    ///
    /// # Errors
    /// The key cannot be read or made.
    pub fn of(home: &Home) -> Result<Self, AuthorityError> {
        let directory = home.inject()?;
        let path = directory.join("authority.key");
        let text = {
            let _acting = home.act()?;
            read_or_make(&path, || {
                let key = KeyPair::generate().map_err(io::Error::other)?;
                Ok(key.serialize_pem())
            })
        };
        let text =
            text.map_err(|error| AuthorityError::Io { action: "use", path: path.clone(), error })?;
        let key = KeyPair::from_pem(&text)
            .map_err(|error| AuthorityError::Key { path, reason: error.to_string() })?;
        let issuer = Issuer::new(of_authority(&key), key);
        Ok(Self { directory, home: home.clone(), issuer })
    }

    /// The authority's certificate, in PEM, for functions that inject into requests to `hosts`.
    /// The same hosts have the same one for a year.
    ///
    /// # Errors
    /// It cannot be made, or not be kept.
    pub fn certificate(&self, hosts: &BTreeSet<&str>) -> Result<String, AuthorityError> {
        let mut params = of_authority(self.issuer.key());
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: hosts.iter().map(|&host| dns(host)).collect(),
            excluded_subtrees: vec![
                GeneralSubtree::IpAddress(CidrSubnet::from_v4_prefix([0; 4], 0)),
                GeneralSubtree::IpAddress(CidrSubnet::from_v6_prefix([0; 16], 0)),
            ],
        });
        let lines: Vec<String> = hosts.iter().map(|host| format!("{host}\n")).collect();
        self.kept(params, &lines.concat())
    }

    /// The same that is good for all hosts: whoever has the key passes for any of them to programs
    /// that trust it.
    ///
    /// # Errors
    /// It cannot be made, or not be kept.
    pub fn certificate_for_all(&self) -> Result<String, AuthorityError> {
        // No host has such a name.
        self.kept(of_authority(self.issuer.key()), "*\n")
    }

    /// The certificate that is kept for these hosts, or a new one.
    fn kept(&self, mut params: CertificateParams, hosts: &str) -> Result<String, AuthorityError> {
        let key = self.issuer.key();
        let mut hash = blake3::Hasher::new();
        hash.update(key.der_bytes()).update(hosts.as_bytes());
        let path = self.directory.join(format!("{}.pem", hash.finalize().to_hex()));
        let _acting = self.home.act()?;
        let mut used = || {
            let made = fs::metadata(&path).and_then(|found| found.modified());
            if made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > RENEWED_AFTER)) {
                fs::remove_file(&path)?;
            }
            read_or_make(&path, || {
                live(&mut params, LIFE)?;
                params.self_signed(key).map(|made| made.pem()).map_err(io::Error::other)
            })
        };
        used().map_err(|error| AuthorityError::Io { action: "use", path: path.clone(), error })
    }

    /// A new certificate for a host, with its key.
    ///
    /// # Errors
    /// The host has no name that can be in one.
    pub fn leaf(&self, host: &str) -> Result<CertifiedKey, AuthorityError> {
        let wrong = |error: &dyn std::fmt::Display| AuthorityError::Certificate(error.to_string());
        let key = KeyPair::generate().map_err(|error| wrong(&error))?;
        let mut params =
            CertificateParams::new([host.to_owned()]).map_err(|error| wrong(&error))?;
        params.distinguished_name = name("Thaw");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        live(&mut params, LEAF_LIFE).map_err(|error| wrong(&error))?;
        let made = params.signed_by(&key, &self.issuer).map_err(|error| wrong(&error))?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = rustls::crypto::ring::default_provider();
        CertifiedKey::from_der(vec![made.der().clone()], key, &provider)
            .map_err(|error| wrong(&error))
    }
}

/// What all certificates of the authority have in common. Its name tells its key.
fn of_authority(key: &KeyPair) -> CertificateParams {
    let id = blake3::hash(key.der_bytes()).to_hex();
    let mut params = CertificateParams::default();
    params.distinguished_name = name(&format!("Thaw inject authority {}", &id[..12]));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn name(text: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, text);
    name
}

fn dns(host: &str) -> GeneralSubtree {
    GeneralSubtree::DnsName(host.to_owned())
}

/// Has a certificate begin to live, with a number of its own.
fn live(params: &mut CertificateParams, life: Duration) -> io::Result<()> {
    let now = SystemTime::now();
    params.not_before = (now - SKEW).into();
    params.not_after = (now + life).into();
    let mut number = [0; 16];
    SystemRandom::new().fill(&mut number).map_err(|_| io::Error::other("no random numbers"))?;
    // A positive number (RFC 5280 §4.1.2.2).
    number[0] &= 0x7f;
    params.serial_number = Some(SerialNumber::from_slice(&number));
    Ok(())
}

/// What a file holds; if there is none, what `make` says, which is then in the file. Of several
/// that make it at the same time, all get what one of them has made.
fn read_or_make(path: &Path, make: impl FnOnce() -> io::Result<String>) -> io::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        result => return result,
    }
    static MADE: AtomicU64 = AtomicU64::new(0);
    let content = make()?;
    let number = MADE.fetch_add(1, Relaxed);
    let unfinished = path.with_extension(format!("{}-{number}.new", std::process::id()));
    // Of a process that had this number before.
    let _ = fs::remove_file(&unfinished);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
    let linked = file
        .write_all(content.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::hard_link(&unfinished, path));
    let _ = fs::remove_file(&unfinished);
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => fs::read_to_string(path),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rustls_pki_types::pem::PemObject;
    use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
    use std::os::unix::fs::MetadataExt;
    use webpki::{EndEntityCert, anchor_from_trusted_cert};

    pub fn home() -> (tempfile::TempDir, Home) {
        let directory = tempfile::tempdir().unwrap();
        let home = Home::at(directory.path().join("home")).unwrap();
        (directory, home)
    }

    /// Whether a program that trusts `authority` believes that `leaf` is `host`'s.
    fn is_believed(authority: &str, leaf: &CertifiedKey, host: &str) -> bool {
        let root = CertificateDer::from_pem_slice(authority.as_bytes()).unwrap();
        let anchors = [anchor_from_trusted_cert(&root).unwrap()];
        let leaf = EndEntityCert::try_from(&leaf.cert[0]).unwrap();
        let usage = webpki::KeyUsage::server_auth();
        let algorithms = rustls::crypto::ring::default_provider().signature_verification_algorithms;
        let chain = leaf.verify_for_usage(
            algorithms.all,
            &anchors,
            &[],
            UnixTime::now(),
            usage,
            None,
            None,
        );
        chain.is_ok()
            && leaf.verify_is_valid_for_subject_name(&ServerName::try_from(host).unwrap()).is_ok()
    }

    #[test]
    fn certificates_are_believed_for_the_hosts_of_a_function_only() {
        let (_directory, home) = home();
        let authority = Authority::of(&home).unwrap();
        let trusted = authority.certificate(&BTreeSet::from(["a.example", "b.example"])).unwrap();
        let leaf = authority.leaf("a.example").unwrap();
        assert!(is_believed(&trusted, &leaf, "a.example"));
        assert!(!is_believed(&trusted, &leaf, "b.example"));
        let other = authority.leaf("bank.example").unwrap();
        assert!(!is_believed(&trusted, &other, "bank.example"), "it is constrained");
        let all = authority.certificate_for_all().unwrap();
        assert!(is_believed(&all, &other, "bank.example") && is_believed(&all, &leaf, "a.example"));
        assert_ne!(all, trusted);
        let wide = authority.certificate(&BTreeSet::from(["bank.example"])).unwrap();
        assert!(is_believed(&wide, &other, "bank.example"));
    }

    #[test]
    fn the_key_is_made_once_and_nobody_else_reads_it() {
        let (_directory, home) = home();
        let hosts = BTreeSet::from(["a.example"]);
        let made: Vec<_> = std::thread::scope(|scope| {
            let make = || Authority::of(&home).unwrap().certificate(&hosts).unwrap();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(made.iter().all(|one| *one == made[0]));
        let path = home.root().join("inject/authority.key");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        fs::write(&path, "nonsense").unwrap();
        let error = Authority::of(&home).unwrap_err().to_string();
        assert!(error.contains("is not a private key"), "{error}");
    }
}
