//! Pushing a function: pieces first, then its document, then the manifest that names them. What the
//! registry has is not sent, so a push that was interrupted goes on where it ended.

use super::bucket::{Bucket, BucketError};
use super::mounts::Mounts;
use super::settings::Registries;
use super::source::{Source, blob_key, manifest_key, on_another_thread};
use crate::artifact::{FunctionDocument, Section, Sent, new_manifest, packed};
use crate::error::OciError;
use crate::layer::digest;
use crate::reference::Reference;
use crate::signature::SigningKey;
use oci_client::RegistryOperation;
use oci_client::errors::OciDistributionError;
use oci_client::manifest::OCI_IMAGE_MEDIA_TYPE;
use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

/// Pieces that are sent at the same time.
const AT_ONCE: usize = 4;
/// How often a blob is tried to be sent, and the first pause.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// Where a function is to be pushed.
#[derive(Debug)]
pub struct Push<'a> {
    /// Its name there: a tag.
    pub reference: &'a Reference,
    /// How registries are reached.
    pub registries: &'a Registries,
    /// The file that notes what repositories have.
    pub mounts: &'a Path,
}

/// How far a push has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PushProgress {
    /// Pieces that are there.
    pub pieces: usize,
    /// Bytes of all pieces so far, compressed.
    pub bytes: u64,
    /// Bytes that were sent.
    pub sent: u64,
}

/// What was pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushReport {
    /// Digest of the manifest.
    pub digest: String,
    /// Pieces and their bytes.
    pub total: PushProgress,
    /// Bytes that lay in another repository of the registry.
    pub mounted: u64,
}

/// How a blob came to be in a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// It was there.
    Present,
    /// It lay in another repository of the registry.
    Mounted,
    /// It was sent.
    Sent,
}

/// A push that has begun.
pub struct Upload {
    runtime: Runtime,
    source: Source,
    mounts: Mounts,
    tasks: JoinSet<Result<(How, u64), OciError>>,
    pieces: Vec<(Section, Sent)>,
    seen: HashSet<String>,
    total: PushProgress,
    mounted: u64,
}

impl Push<'_> {
    /// Begins a push.
    ///
    /// # Errors
    /// The reference is none that can be pushed to, or the registry cannot be reached.
    pub fn begin(&self) -> Result<Upload, OciError> {
        let host = self.reference.registry().to_owned();
        let source = Source::new(self.registries, self.reference, &host, "push")?;
        if source.reference.digest().is_some() {
            return Err(
                source.refused("a digest is no place for something new; give a tag".to_owned())
            );
        }
        let runtime = on_another_thread().map_err(|error| source.refused(error.to_string()))?;
        if source.bucket.is_none() {
            runtime.block_on(async {
                let operation = RegistryOperation::Push;
                let client = source.client.get().map_err(|error| source.failed(&error))?;
                let asked = client.auth(&source.reference, &source.auth, operation).await;
                asked.map_err(|error| source.failed(&error))
            })?;
        }
        Ok(Upload {
            runtime,
            source,
            mounts: Mounts::read(self.mounts),
            tasks: JoinSet::new(),
            pieces: Vec::new(),
            seen: HashSet::new(),
            total: PushProgress::default(),
            mounted: 0,
        })
    }
}

impl Upload {
    /// Sends a piece, if the registry has it not.
    ///
    /// # Errors
    /// The registry refuses, or cannot be reached any more.
    pub fn piece(&mut self, section: Section, piece: &[u8]) -> Result<PushProgress, OciError> {
        let packed = packed(piece).map_err(|error| self.source.refused(error.to_string()))?;
        let sent = Sent { digest: digest(&packed), size: packed.len() as u64 };
        self.total.pieces += 1;
        self.total.bytes += sent.size;
        self.pieces.push((section, sent.clone()));
        if self.seen.insert(sent.digest.clone()) {
            self.wait_for_place(AT_ONCE)?;
            let source = self.source.clone();
            let (registry, own) = (source.reference.registry(), source.reference.repository());
            let from = self.mounts.repository_with(registry, own, &sent.digest).map(str::to_owned);
            let task = async move {
                let how = source.send(&sent.digest, packed, from.as_deref()).await?;
                Ok((how, sent.size))
            };
            self.tasks.spawn_on(task, self.runtime.handle());
        }
        Ok(self.total)
    }

    /// Waits until fewer than `most` blobs are on their way.
    fn wait_for_place(&mut self, most: usize) -> Result<(), OciError> {
        while self.tasks.len() >= most {
            let done = self.runtime.block_on(self.tasks.join_next());
            let Some(done) = done else { return Ok(()) };
            match done.expect("no task panics or is aborted")? {
                (How::Sent, bytes) => self.total.sent += bytes,
                (How::Mounted, bytes) => self.mounted += bytes,
                (How::Present, _) => {}
            }
        }
        Ok(())
    }

    /// Sends the document and the manifest, and signs that.
    ///
    /// # Errors
    /// The registry refuses, or there are more pieces than it takes.
    pub fn finish(
        mut self,
        document: &FunctionDocument,
        key: Option<&SigningKey>,
    ) -> Result<PushReport, OciError> {
        self.wait_for_place(1)?;
        let json = document.to_json();
        let json_digest = digest(&json);
        let manifest = new_manifest(document.name.as_str(), &json, &self.pieces)?;
        let manifest_digest = digest(&manifest);
        self.runtime.block_on(async {
            self.source.send(&json_digest, json, None).await?;
            self.source.put_manifest(&self.source.reference, manifest).await?;
            match key {
                Some(key) => self.source.sign(&manifest_digest, key).await,
                None => Ok(()),
            }
        })?;
        let (registry, repository) =
            (self.source.reference.registry(), self.source.reference.repository());
        let digests = self.seen;
        self.mounts.note(registry, repository, digests)?;
        let (total, mounted) = (self.total, self.mounted);
        Ok(PushReport { digest: manifest_digest, total, mounted })
    }
}

impl Source {
    /// Makes sure that a blob is in the repository; `from` is another one that may have it.
    ///
    /// # Errors
    /// The registry refuses, or cannot be reached.
    pub(super) async fn send(
        &self,
        digest: &str,
        bytes: Vec<u8>,
        from: Option<&str>,
    ) -> Result<How, OciError> {
        if let Some(bucket) = &self.bucket {
            return self.send_to(bucket, &blob_key(digest), bytes.into()).await;
        }
        let registry = self.reference.resolve_registry();
        let client = self.client.get().map_err(|error| self.failed(&error))?;
        client.store_auth_if_needed(registry, &self.auth).await;
        let bytes = bytes::Bytes::from(bytes);
        let mut attempts = 0;
        loop {
            match self.try_to_send(digest, &bytes, from).await {
                Err(error) if is_passing(&error) && attempts < ATTEMPTS => attempts += 1,
                result => return result.map_err(|error| self.failed(&error)),
            }
            tokio::time::sleep(PAUSE * 2_u32.pow(attempts)).await;
        }
    }

    async fn send_to(
        &self,
        bucket: &Bucket,
        key: &str,
        bytes: bytes::Bytes,
    ) -> Result<How, OciError> {
        let mut attempts = 0;
        loop {
            let sent = match bucket.has(key).await {
                Ok(true) => Ok(How::Present),
                Ok(false) => bucket.put(key, bytes.clone()).await.map(|()| How::Sent),
                Err(error) => Err(error),
            };
            match sent {
                Err(BucketError::Passing(_)) if attempts < ATTEMPTS => attempts += 1,
                sent => return sent.map_err(|error| self.refused(error.reason())),
            }
            tokio::time::sleep(PAUSE * 2_u32.pow(attempts)).await;
        }
    }

    async fn try_to_send(
        &self,
        digest: &str,
        bytes: &bytes::Bytes,
        from: Option<&str>,
    ) -> Result<How, OciDistributionError> {
        let client = self.client.get()?;
        if client.blob_exists(&self.reference, digest).await? {
            return Ok(How::Present);
        }
        if let Some(from) = from {
            let registry = self.reference.registry().to_owned();
            let from =
                oci_client::Reference::with_tag(registry, from.to_owned(), "latest".to_owned());
            // What is not there any more, or may not be seen, is sent.
            if client.mount_blob(&self.reference, &from, digest).await.is_ok() {
                return Ok(How::Mounted);
            }
        }
        client.push_blob(&self.reference, bytes.clone(), digest).await?;
        Ok(How::Sent)
    }

    /// Gives a manifest a name.
    ///
    /// # Errors
    /// The registry refuses, or cannot be reached.
    pub(super) async fn put_manifest(
        &self,
        named: &oci_client::Reference,
        manifest: Vec<u8>,
    ) -> Result<(), OciError> {
        if let Some(bucket) = &self.bucket {
            // By its digest first: who finds the tag can find what it stands for.
            let by_digest = named.clone_with_digest(digest(&manifest));
            for key in [manifest_key(&by_digest), manifest_key(named)] {
                let put = bucket.put(&key, manifest.clone().into()).await;
                put.map_err(|error| self.refused(error.reason()))?;
            }
            return Ok(());
        }
        let kind = OCI_IMAGE_MEDIA_TYPE.parse().expect("a media type is plain text");
        let client = self.client.get().map_err(|error| self.failed(&error))?;
        let put = client.push_manifest_raw(named, manifest, kind).await;
        put.map(|_| ()).map_err(|error| self.failed(&error))
    }
}

/// Whether it is worth trying again.
fn is_passing(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::RequestError(error) => {
            error.status().is_none_or(|status| status.is_server_error())
        }
        OciDistributionError::ServerError { code, .. } => *code >= 500,
        _ => false,
    }
}
