//! Pulling an image from a registry into an OCI layout on disk (OCI distribution specification).
//!
//! What was downloaded before an interruption is not downloaded again: complete blobs are kept by
//! digest, and others go on where they ended.

use crate::credentials;
use crate::error::{OciError, escaped};
use crate::layer::digest;
use crate::reference::Reference;
use crate::unpack::Limits;
use oci_client::client::{BlobResponse, Client, ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::manifest::{
    IMAGE_MANIFEST_LIST_MEDIA_TYPE, IMAGE_MANIFEST_MEDIA_TYPE, OCI_IMAGE_INDEX_MEDIA_TYPE,
    OCI_IMAGE_MEDIA_TYPE,
};
use oci_client::secrets::RegistryAuth;
use oci_spec::image::{Arch, Descriptor, ImageIndex, ImageManifest, Os};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_stream::StreamExt;

/// Documents that a registry may answer with.
const ACCEPTED: [&str; 4] = [
    OCI_IMAGE_INDEX_MEDIA_TYPE,
    OCI_IMAGE_MEDIA_TYPE,
    IMAGE_MANIFEST_LIST_MEDIA_TYPE,
    IMAGE_MANIFEST_MEDIA_TYPE,
];
/// Longest manifest, as in the specification.
const MANIFEST_MAX: usize = 4 << 20;
/// Blobs that are downloaded at the same time.
const AT_ONCE: usize = 3;
/// How often a download is tried again without a byte of progress, and the first pause.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);
/// How long a registry may be silent.
const SILENCE: Duration = Duration::from_secs(30);
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// What is known of registries: `registries.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registries {
    /// One entry for each registry that needs one.
    #[serde(default)]
    pub registry: Vec<RegistryRule>,
}

/// How a registry is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegistryRule {
    /// Its host, with the port if there is one.
    pub host: String,
    /// Registries that have the same images, asked first, in this order.
    #[serde(default)]
    pub mirrors: Vec<String>,
    /// Whether it speaks plain HTTP, as those on this machine do.
    #[serde(default)]
    pub http: bool,
    /// File with further certificates (PEM) that are trusted.
    #[serde(default)]
    pub ca: Option<PathBuf>,
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

    fn rule(&self, host: &str) -> Option<&RegistryRule> {
        self.registry.iter().find(|rule| rule.host == host)
    }

    fn speaks_http(&self, host: &str) -> bool {
        self.rule(host).map_or(is_local(host), |rule| rule.http)
    }
}

/// Registries on this machine speak plain HTTP, as docker(1) supposes.
fn is_local(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name == "localhost"
        || name == "[::1]"
        || name.parse::<std::net::Ipv4Addr>().is_ok_and(|address| address.is_loopback())
}

/// How far a pull has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PullProgress {
    /// Bytes that are here.
    pub bytes: u64,
    /// Bytes of all blobs.
    pub of: u64,
}

/// An image that is to be pulled.
#[derive(Debug)]
pub struct Pull<'a> {
    /// Its name.
    pub reference: &'a Reference,
    /// How registries are reached.
    pub registries: &'a Registries,
    /// The directory that becomes an OCI layout; what is there of an earlier try is used.
    pub directory: &'a Path,
    /// What it may take.
    pub limits: Limits,
}

impl Pull<'_> {
    /// Pulls it.
    ///
    /// # Errors
    /// The registry cannot be reached or refuses, or what it sends is not what its digest says.
    pub fn run(&self, progress: &mut dyn FnMut(PullProgress)) -> Result<(), OciError> {
        // Whoever came first has set the same one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| self.failed(error.to_string()))?;
        runtime.block_on(async {
            let mut last = None;
            for host in self.hosts() {
                match self.from(&host, progress).await {
                    // Another one may have it, or send what it should. The registry itself comes
                    // last, and is the one to be believed.
                    Err(
                        error @ (OciError::Registry { .. }
                        | OciError::Document { .. }
                        | OciError::Digest { .. }),
                    ) => last = Some(error),
                    result => return result,
                }
            }
            Err(last.unwrap_or_else(|| self.failed("no registry has it".to_owned())))
        })
    }

    /// Mirrors, and then the registry itself.
    fn hosts(&self) -> Vec<String> {
        let host = self.reference.registry();
        let mirrors = self.registries.rule(host).map(|rule| rule.mirrors.clone());
        mirrors.into_iter().flatten().chain([host.to_owned()]).collect()
    }

    fn failed(&self, reason: String) -> OciError {
        OciError::Registry { image: self.reference.to_string(), reason }
    }

    async fn from(
        &self,
        host: &str,
        progress: &mut dyn FnMut(PullProgress),
    ) -> Result<(), OciError> {
        let mut reference = self.reference.inner().clone();
        if host != self.reference.registry() {
            reference.set_mirror_registry(host.to_owned());
        }
        let source = Source {
            client: self.client(host)?,
            auth: credentials::find(host).map_err(|reason| self.failed(reason))?,
            reference,
            host: host.to_owned(),
            blobs: self.directory.join("blobs/sha256"),
        };
        let blobs = &source.blobs;
        fs::create_dir_all(blobs).map_err(|error| OciError::file("make", blobs, error))?;
        let manifest = source.manifest().await?;
        let wanted = self.wanted(&manifest)?;
        source.fetch(wanted, progress).await?;
        self.finish(&manifest)
    }

    fn client(&self, host: &str) -> Result<Client, OciError> {
        let mut config = ClientConfig {
            protocol: match self.registries.speaks_http(host) {
                true => ClientProtocol::Http,
                false => ClientProtocol::Https,
            },
            read_timeout: Some(SILENCE),
            connect_timeout: Some(SILENCE),
            user_agent: concat!("thaw/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        if let Some(path) = self.registries.rule(host).and_then(|rule| rule.ca.as_ref()) {
            let data = fs::read(path).map_err(|error| OciError::file("read", path, error))?;
            let encoding = oci_client::client::CertificateEncoding::Pem;
            config.extra_root_certificates.push(oci_client::client::Certificate { encoding, data });
        }
        Client::try_from(config).map_err(|error| self.failed(error.to_string()))
    }

    /// The blobs of a manifest, whose sizes are as it says.
    fn wanted(&self, manifest: &Manifest) -> Result<Vec<Descriptor>, OciError> {
        let all = [manifest.parsed.config()].into_iter().chain(manifest.parsed.layers());
        let mut wanted: Vec<Descriptor> = Vec::new();
        for blob in all {
            // Some tools list an empty layer several times.
            if !wanted.iter().any(|known| known.digest() == blob.digest()) {
                wanted.push(blob.clone());
            }
        }
        let bytes = wanted.iter().fold(0_u64, |sum, blob| sum.saturating_add(blob.size()));
        if bytes > self.limits.bytes {
            return Err(OciError::TooLarge { limit: self.limits.bytes, what: "bytes of layers" });
        }
        if let Some(blob) = wanted.iter().find(|blob| blob.as_digest_sha256().is_none()) {
            let what = escaped(blob.digest().to_string().as_bytes());
            return Err(self.failed(format!("the digest {what} is not of kind sha256")));
        }
        Ok(wanted)
    }

    /// Makes what was downloaded an OCI layout of this one image.
    fn finish(&self, manifest: &Manifest) -> Result<(), OciError> {
        let write = |name: &str, bytes: &[u8]| {
            let path = self.directory.join(name);
            fs::write(&path, bytes).map_err(|error| OciError::file("write", &path, error))
        };
        let hex = manifest.digest.trim_start_matches("sha256:");
        write(&format!("blobs/sha256/{hex}"), &manifest.bytes)?;
        write("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        let index = serde_json::json!({
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": OCI_IMAGE_MEDIA_TYPE,
                "digest": manifest.digest,
                "size": manifest.bytes.len(),
                "annotations": { "org.opencontainers.image.ref.name": self.reference.to_string() },
            }],
        });
        write("index.json", index.to_string().as_bytes())
    }
}

/// A manifest for this machine.
struct Manifest {
    bytes: Vec<u8>,
    digest: String,
    parsed: ImageManifest,
}

/// A registry, or a mirror of it.
#[derive(Clone)]
struct Source {
    client: Client,
    auth: RegistryAuth,
    reference: oci_client::Reference,
    host: String,
    /// Where blobs lie, by digest.
    blobs: PathBuf,
}

impl Source {
    fn failed(&self, error: &OciDistributionError) -> OciError {
        let Self { host, .. } = self;
        let reason = match error {
            OciDistributionError::UnauthorizedError { .. }
            | OciDistributionError::AuthenticationFailure(_) => format!(
                "{host} does not let you; check the name, or log in with `docker login {host}`"
            ),
            OciDistributionError::RegistryError { envelope, .. }
                if envelope.errors.iter().any(|error| is_unknown(&error.code)) =>
            {
                format!("{host} has no such image; check its name and tag")
            }
            OciDistributionError::ImageManifestNotFoundError(_)
            | OciDistributionError::ServerError { code: 404, .. } => {
                format!("{host} has no such image; check its name and tag")
            }
            OciDistributionError::RequestError(error) => format!(
                "{host} cannot be reached ({}); check the name and the network, or set `http = true` \
                 in registries.toml if it speaks plain HTTP",
                innermost(error)
            ),
            error => format!("{host} says: {}", escaped(error.to_string().as_bytes())),
        };
        OciError::Registry { image: self.reference.whole(), reason }
    }

    /// The manifest for linux/amd64.
    async fn manifest(&self) -> Result<Manifest, OciError> {
        let (bytes, digest) = self.document(&self.reference).await?;
        if let Ok(parsed) = serde_json::from_slice(&bytes) {
            return Ok(Manifest { bytes, digest, parsed });
        }
        let unusable = |error| OciError::document("the manifest that the registry sent", error);
        let index: ImageIndex = serde_json::from_slice(&bytes).map_err(unusable)?;
        let platforms =
            index.manifests().iter().filter_map(|one| Some((one, one.platform().as_ref()?)));
        let mut has = Vec::new();
        for (descriptor, platform) in platforms {
            if *platform.os() == Os::Linux && *platform.architecture() == Arch::Amd64 {
                let wanted = descriptor.digest().to_string();
                let reference = self.reference.clone_with_digest(wanted.clone());
                let (bytes, digest) = self.document(&reference).await?;
                check(&digest, &wanted)?;
                let parsed = serde_json::from_slice(&bytes).map_err(unusable)?;
                return Ok(Manifest { bytes, digest, parsed });
            }
            has.push(format!("{}/{}", platform.os(), platform.architecture()));
        }
        Err(OciError::Platform { has: escaped(has.join(", ").as_bytes()) })
    }

    /// A manifest or index, and the digest of what was sent.
    async fn document(
        &self,
        reference: &oci_client::Reference,
    ) -> Result<(Vec<u8>, String), OciError> {
        let pulled = self.client.pull_manifest_raw(reference, &self.auth, &ACCEPTED).await;
        let (bytes, _) = pulled.map_err(|error| self.failed(&error))?;
        if bytes.len() > MANIFEST_MAX {
            return Err(OciError::document("the manifest", "it is longer than 4 MiB"));
        }
        let found = digest(&bytes);
        if let Some(wanted) = reference.digest() {
            check(&found, wanted)?;
        }
        Ok((bytes.to_vec(), found))
    }

    /// Downloads what is not here yet, some at a time.
    async fn fetch(
        &self,
        wanted: Vec<Descriptor>,
        progress: &mut dyn FnMut(PullProgress),
    ) -> Result<(), OciError> {
        let of = wanted.iter().map(Descriptor::size).sum();
        let here = Arc::new(AtomicU64::new(0));
        let places = Arc::new(Semaphore::new(AT_ONCE));
        let mut tasks = JoinSet::new();
        for blob in wanted {
            let (source, here, places) = (self.clone(), here.clone(), places.clone());
            tasks.spawn(async move {
                let _place = places.acquire().await.expect("it is never closed");
                source.blob(&blob, &here).await
            });
        }
        loop {
            let next = tokio::time::timeout(PROGRESS_INTERVAL, tasks.join_next()).await;
            progress(PullProgress { bytes: here.load(Ordering::Relaxed), of });
            match next {
                Ok(None) => return Ok(()),
                Ok(Some(done)) => done.expect("no task panics or is aborted")?,
                Err(_) => {}
            }
        }
    }

    /// Downloads a blob, going on after interruptions.
    async fn blob(&self, blob: &Descriptor, here: &AtomicU64) -> Result<(), OciError> {
        let hex = blob.as_digest_sha256().expect("others were refused").to_owned();
        let (done, part) = (self.blobs.join(&hex), self.blobs.join(format!("{hex}.part")));
        let is_here = done.metadata().is_ok_and(|found| found.len() == blob.size());
        // One that is damaged is removed, and downloaded again.
        if is_here && verify(&done, &format!("sha256:{hex}")).is_ok() {
            here.fetch_add(blob.size(), Ordering::Relaxed);
            return Ok(());
        }
        let unusable = |error| OciError::file("write", &part, error);
        let file = OpenOptions::new().read(true).append(true).create(true).open(&part);
        let mut file = file.map_err(unusable)?;
        let mut len = file.metadata().map_err(unusable)?.len();
        if len > blob.size() {
            file.set_len(0).map_err(unusable)?;
            len = 0;
        }
        here.fetch_add(len, Ordering::Relaxed);
        let mut attempts = 0;
        while len < blob.size() {
            let result = self.go_on(blob, &mut file, len, here).await;
            let now = file.metadata().map_err(unusable)?.len();
            attempts = if now > len { 0 } else { attempts + 1 };
            len = now;
            match result {
                Err(Broken::Network(reason)) if attempts == ATTEMPTS => {
                    let image = self.reference.whole();
                    let host = &self.host;
                    let reason = format!(
                        "the connection to {host} broke {ATTEMPTS} times ({reason}); try again, it goes on \
                         where it ended"
                    );
                    return Err(OciError::Registry { image, reason });
                }
                Err(Broken::Network(_)) => tokio::time::sleep(PAUSE * 2_u32.pow(attempts)).await,
                Err(Broken::Final(error)) => return Err(error),
                Ok(()) => {}
            }
        }
        verify(&part, &format!("sha256:{hex}"))?;
        fs::rename(&part, &done).map_err(unusable)
    }

    /// Downloads from byte `from` on, until the connection ends.
    async fn go_on(
        &self,
        blob: &Descriptor,
        file: &mut File,
        from: u64,
        here: &AtomicU64,
    ) -> Result<(), Broken> {
        let digest = blob.digest().to_string();
        let answer = self
            .client
            .pull_blob_stream_partial(&self.reference, digest.as_str(), from, None)
            .await;
        let unusable = |error| Broken::Final(OciError::file("write", &self.blobs, error));
        let (mut stream, mut left) = match answer {
            Ok(BlobResponse::Partial(sized)) => (sized.stream, blob.size() - from),
            Ok(BlobResponse::Full(sized)) => {
                file.set_len(0).map_err(unusable)?;
                here.fetch_sub(from, Ordering::Relaxed);
                (sized.stream, blob.size())
            }
            Err(error @ OciDistributionError::RequestError(_)) => {
                return Err(Broken::Network(error.to_string()));
            }
            Err(error) => return Err(Broken::Final(self.failed(&error))),
        };
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|error| Broken::Network(error.to_string()))?;
            if chunk.len() as u64 > left {
                let what = "a blob that the registry sent";
                let error = OciError::document(what, "it is longer than the manifest says");
                return Err(Broken::Final(error));
            }
            file.write_all(&chunk).map_err(unusable)?;
            left -= chunk.len() as u64;
            here.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
        match left {
            0 => Ok(()),
            _ => Err(Broken::Network("it ended too early".to_owned())),
        }
    }
}

/// Why a download ended.
enum Broken {
    /// It is worth going on.
    Network(String),
    Final(OciError),
}

fn check(found: &str, wanted: &str) -> Result<(), OciError> {
    if found == wanted {
        return Ok(());
    }
    Err(OciError::Digest {
        what: "the manifest".to_owned(),
        found: found.to_owned(),
        wanted: escaped(wanted.as_bytes()),
    })
}

/// Compares the digest of a file; one that is wrong is removed.
fn verify(path: &Path, wanted: &str) -> Result<(), OciError> {
    let unreadable = |error| OciError::file("read", path, error);
    let mut hasher = Sha256::new();
    io::copy(&mut File::open(path).map_err(unreadable)?, &mut HashWriter(&mut hasher))
        .map_err(unreadable)?;
    let hex: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let found = format!("sha256:{hex}");
    if found == wanted {
        return Ok(());
    }
    fs::remove_file(path).map_err(unreadable)?;
    let what = "a blob that the registry sent".to_owned();
    Err(OciError::Digest { what, found, wanted: wanted.to_owned() })
}

struct HashWriter<'a>(&'a mut Sha256);

impl Write for HashWriter<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0.update(buffer);
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a registry does not have what was asked for.
fn is_unknown(code: &OciErrorCode) -> bool {
    matches!(
        code,
        OciErrorCode::ManifestUnknown | OciErrorCode::NameUnknown | OciErrorCode::NotFound
    )
}

/// The cause that says most.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
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
        fs::write(&path, "[[registry]]\nhost = \"a.example\"\nhttp = true\nmirrors = [\"b\"]\n")
            .unwrap();
        let registries = Registries::read(&path).unwrap();
        assert!(registries.speaks_http("a.example"));
        let reference: Reference = "a.example/x".parse().unwrap();
        let pull = Pull {
            reference: &reference,
            registries: &registries,
            directory: directory.path(),
            limits: Limits::default(),
        };
        assert_eq!(pull.hosts(), ["b", "a.example"]);
        fs::write(&path, "[[registry]]\nhots = \"a\"\n").unwrap();
        let error = Registries::read(&path).unwrap_err().to_string();
        assert!(error.contains("hots") && error.contains("registries.toml"), "{error}");
    }
}
