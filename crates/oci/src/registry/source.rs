//! One registry, or a mirror of it, and what is asked of it.

use super::bucket::{Bucket, BucketError, SCHEME, bucket_of};
use super::pace::{Broke, Pace};
use super::settings::Registries;
use crate::credentials;
use crate::error::{OciError, escaped};
use crate::layer::digest;
use crate::reference::Reference;
use bytes::Bytes;
use oci_client::RegistryOperation;
use oci_client::client::{Client, ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::secrets::RegistryAuth;
use reqwest::StatusCode;
use reqwest::header::{ACCEPT, CONTENT_RANGE, HeaderMap, LINK, RANGE};
use std::fs;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Longest manifest, as in the specification.
pub(crate) const MANIFEST_MAX: usize = 4 << 20;
/// How long a registry may be silent.
const SILENCE: Duration = Duration::from_secs(30);
/// How registries that have no list of what refers to a manifest answer.
const NO_LIST: [StatusCode; 5] = [
    StatusCode::BAD_REQUEST,
    StatusCode::NOT_FOUND,
    StatusCode::METHOD_NOT_ALLOWED,
    StatusCode::NOT_ACCEPTABLE,
    StatusCode::NOT_IMPLEMENTED,
];
/// Who we say we are.
const USER_AGENT: &str = concat!("thaw/", env!("CARGO_PKG_VERSION"));

/// A manifest, or another document that is found by a tag.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    pub bytes: Vec<u8>,
    /// Digest of the bytes.
    pub digest: String,
}

/// A page of a list.
#[derive(Debug)]
pub(crate) struct Page {
    pub bytes: Vec<u8>,
    /// The address of the next one, or why it is not asked for.
    pub next: Result<Option<String>, OciError>,
}

/// Whether a registry wants a token.
#[derive(Clone, Debug, Default)]
enum Token {
    /// It was not asked.
    #[default]
    Unasked,
    /// It has given this one, or wants none.
    Known(Option<String>),
}

/// A registry, or a mirror of it.
#[derive(Clone)]
pub(crate) struct Source {
    pub client: LazyClient,
    /// The bucket that takes the registry's place, if one does.
    pub bucket: Option<Bucket>,
    /// For all that is read: of documents `oci-client` bounds no length, and its connections would be
    /// others than those of documents, which costs a handshake.
    http: reqwest::Client,
    /// What a registry has given for the name and password, or for nothing.
    token: Arc<Mutex<Token>>,
    scheme: &'static str,
    pub auth: RegistryAuth,
    pub reference: oci_client::Reference,
    pub host: String,
    /// What is tried, for errors: `pull` or `push`.
    action: &'static str,
}

impl Source {
    /// Prepares to talk to `host` about `reference`. Nothing is asked yet.
    ///
    /// # Errors
    /// The certificates or credentials for it cannot be read.
    pub fn new(
        registries: &Registries,
        reference: &Reference,
        host: &str,
        action: &'static str,
    ) -> Result<Self, OciError> {
        choose_cryptography();
        let failed = |reason| {
            let image = reference.to_string();
            OciError::Registry { action, image, reason }
        };
        let mut named = reference.inner().clone();
        if host != reference.registry() {
            named.set_mirror_registry(host.to_owned());
        }
        let is_http = registries.speaks_http(host);
        let ca = registries.rule(host).and_then(|rule| rule.ca.as_ref());
        let ca = ca.map(|path| fs::read(path).map_err(|error| OciError::file("read", path, error)));
        let ca = ca.transpose()?;
        let http = http_client(ca.as_deref()).map_err(|error| failed(error.to_string()))?;
        let bucket = bucket_of(host).map(|bucket| {
            Bucket::new(registries, (bucket, named.repository()), http.clone()).map_err(failed)
        });
        let bucket = bucket.transpose()?;
        Ok(Self {
            auth: match &bucket {
                Some(_) => RegistryAuth::Anonymous,
                None => credentials::find(host).map_err(failed)?,
            },
            bucket,
            client: LazyClient { is_http, ca, made: Arc::default() },
            http,
            token: Arc::default(),
            scheme: if is_http { "http" } else { "https" },
            reference: named,
            host: host.to_owned(),
            action,
        })
    }

    /// An error that says why this was not possible.
    pub fn refused(&self, reason: String) -> OciError {
        let whole = self.reference.whole();
        let image = match bucket_of(self.reference.registry()) {
            Some(bucket) => {
                format!("{SCHEME}{bucket}{}", &whole[self.reference.registry().len()..])
            }
            None => whole,
        };
        OciError::Registry { action: self.action, image, reason }
    }

    /// The host, or the bucket, as people name it.
    pub fn place(&self) -> String {
        bucket_of(&self.host)
            .map_or_else(|| self.host.clone(), |bucket| format!("{SCHEME}{bucket}"))
    }

    /// An error that repeats what went wrong.
    pub fn failed(&self, error: &OciDistributionError) -> OciError {
        let reason = match error {
            OciDistributionError::UnauthorizedError { .. }
            | OciDistributionError::AuthenticationFailure(_)
            | OciDistributionError::ServerError { code: 401 | 403, .. } => self.not_allowed(),
            OciDistributionError::RegistryError { envelope, .. }
                if envelope.errors.iter().any(|error| is_unknown(&error.code)) =>
            {
                self.unknown()
            }
            OciDistributionError::ImageManifestNotFoundError(_)
            | OciDistributionError::ServerError { code: 404, .. } => self.unknown(),
            OciDistributionError::RequestError(error) => match error.status() {
                Some(StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => self.not_allowed(),
                Some(StatusCode::NOT_FOUND) => self.unknown(),
                _ => self.unreachable(error),
            },
            error => format!("{} says: {}", self.host, excerpt(&error.to_string())),
        };
        self.refused(reason)
    }

    fn not_allowed(&self) -> String {
        let host = &self.host;
        format!("{host} does not let you; check the name, or log in with `docker login {host}`")
    }

    fn unknown(&self) -> String {
        format!("{} has no such image; check its name and tag", self.place())
    }

    fn unreachable(&self, error: &reqwest::Error) -> String {
        format!(
            "{} cannot be reached ({}); check the name and the network, or set `http = true` in \
             registries.toml if it speaks plain HTTP",
            self.host,
            innermost(error)
        )
    }

    /// A manifest or index.
    ///
    /// # Errors
    /// There is none, it is not what its digest says, or it is longer than [`MANIFEST_MAX`].
    pub async fn document(
        &self,
        reference: &oci_client::Reference,
        accepted: &[&str],
    ) -> Result<Document, OciError> {
        let found = self.find_document(reference, accepted).await?;
        found.ok_or_else(|| self.refused(self.unknown()))
    }

    /// The same; `None` if there is none.
    ///
    /// # Errors
    /// As above.
    pub async fn find_document(
        &self,
        reference: &oci_client::Reference,
        accepted: &[&str],
    ) -> Result<Option<Document>, OciError> {
        if let Some(bucket) = &self.bucket {
            let found = bucket.get(&manifest_key(reference), 0).await;
            let found = found.map_err(|error| self.refused(error.reason()))?;
            return match found {
                Some((response, _)) => self.read_document(response, reference).await.map(Some),
                None => Ok(None),
            };
        }
        let version = reference.digest().or(reference.tag()).unwrap_or("latest");
        let url = self.url(reference, "manifests", version);
        self.find_document_at(&url, reference, accepted, &[StatusCode::NOT_FOUND]).await
    }

    /// The first page of the index of what has a manifest as its `subject`, by the registry's own list
    /// (distribution-spec, "Listing Referrers"), or of one that has none, by the tag that stands in for it;
    /// `None`: there is none.
    ///
    /// # Errors
    /// As above.
    pub async fn referrers(
        &self,
        manifest: &str,
        tag: &oci_client::Reference,
        accepted: &str,
    ) -> Result<Option<Page>, OciError> {
        if self.bucket.is_none() {
            let url = self.url(tag, "referrers", manifest);
            // Some answer with a page for people.
            if let Some(found) =
                self.page(url, tag, accepted).await?.filter(|found| is_json(&found.bytes))
            {
                return Ok(Some(found));
            }
        }
        let found = self.find_document(tag, &[accepted]).await?;
        Ok(found.map(|found| Page { bytes: found.bytes, next: Ok(None) }))
    }

    /// A page of that index; `None`: the registry has none.
    ///
    /// # Errors
    /// As above.
    pub async fn page(
        &self,
        url: String,
        tag: &oci_client::Reference,
        accepted: &str,
    ) -> Result<Option<Page>, OciError> {
        let Some(response) = self.answer_at(&url, tag, &[accepted], &NO_LIST).await? else {
            return Ok(None);
        };
        let next = next_page(&url, response.headers()).map_err(|()| {
            self.refused(format!(
                "{} says that its list of signatures goes on at another place, which is not asked",
                self.host
            ))
        });
        // It has no digest.
        let read = bounded(response, MANIFEST_MAX).await;
        let bytes = self.whole_document(read)?;
        Ok(Some(Page { bytes, next }))
    }

    /// What is at an address; `None`: the registry says one of `absent`.
    async fn find_document_at(
        &self,
        url: &str,
        reference: &oci_client::Reference,
        accepted: &[&str],
        absent: &[StatusCode],
    ) -> Result<Option<Document>, OciError> {
        match self.answer_at(url, reference, accepted, absent).await? {
            Some(response) => self.read_document(response, reference).await.map(Some),
            None => Ok(None),
        }
    }

    /// The answer of an address, whose body is still to be read; `None`: the registry says one of `absent`.
    async fn answer_at(
        &self,
        url: &str,
        reference: &oci_client::Reference,
        accepted: &[&str],
        absent: &[StatusCode],
    ) -> Result<Option<reqwest::Response>, OciError> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, accepted.join(", ").parse().expect("media types are plain text"));
        let response = self.get(reference, url, headers).await.map_err(|error| match error {
            Asking::Sending(error) => self.refused(self.unreachable(&error)),
            Asking::Token(error) => self.failed(&error),
        })?;
        match response.status() {
            StatusCode::OK => {}
            status if absent.contains(&status) => return Ok(None),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(self.refused(self.not_allowed()));
            }
            status => {
                // Some of what it says is enough for an error.
                let text = bounded(response, 1024).await;
                let text = match &text {
                    Ok((bytes, _)) => excerpt(&String::from_utf8_lossy(bytes)),
                    Err(_) => String::new(),
                };
                return Err(self.refused(format!("{} says: {status} {text}", self.host)));
            }
        }
        Ok(Some(response))
    }

    async fn read_document(
        &self,
        response: reqwest::Response,
        reference: &oci_client::Reference,
    ) -> Result<Document, OciError> {
        let read = bounded(response, MANIFEST_MAX).await;
        let bytes = self.whole_document(read)?;
        let found = digest(&bytes);
        if let Some(wanted) = reference.digest() {
            check_digest(&found, wanted)?;
        }
        Ok(Document { bytes, digest: found })
    }

    /// The bytes of a document that is no longer than it may be.
    fn whole_document(&self, read: Result<(Vec<u8>, bool), Broke>) -> Result<Vec<u8>, OciError> {
        let (bytes, is_whole) = read.map_err(|broke| match broke {
            Broke::Off(error) => self.refused(self.unreachable(&error)),
            Broke::Slow => self.refused(format!("{}: {broke}; try again", self.place())),
        })?;
        match is_whole {
            true => Ok(bytes),
            false => Err(OciError::document("the manifest", "it is longer than 4 MiB")),
        }
    }

    /// Opens a blob at byte `from`, or at its beginning.
    ///
    /// # Errors
    /// It is not there, or the registry cannot be reached.
    pub async fn open_blob(&self, digest: &str, from: u64) -> Result<OpenBlob, Broken> {
        if let Some(opened) = self.open_blob_at(digest, from).await? {
            return Ok(opened);
        }
        let opened = self.open_blob_at(digest, 0).await?;
        opened.ok_or_else(|| {
            let reason = format!("{} sends other bytes than it was asked for", self.place());
            Broken::Final(self.refused(reason))
        })
    }

    /// The same; `None`: the answer begins at another byte.
    async fn open_blob_at(&self, digest: &str, from: u64) -> Result<Option<OpenBlob>, Broken> {
        if let Some(bucket) = &self.bucket {
            return match bucket.get(&blob_key(digest), from).await {
                Ok(Some((response, from))) => Ok(OpenBlob::new(from, response)),
                Ok(None) => Err(Broken::Final(self.refused(self.unknown()))),
                Err(BucketError::Passing(reason)) => Err(Broken::Network(reason)),
                Err(BucketError::Final(reason)) => Err(Broken::Final(self.refused(reason))),
            };
        }
        let mut headers = HeaderMap::new();
        if from > 0 {
            headers.insert(RANGE, format!("bytes={from}-").parse().expect("plain text"));
        }
        let url = self.url(&self.reference, "blobs", digest);
        let response = match self.get(&self.reference, &url, headers).await {
            Ok(response) => response,
            Err(Asking::Sending(error)) => return Err(Broken::Network(innermost(&error))),
            Err(Asking::Token(OciDistributionError::RequestError(error))) => {
                return Err(Broken::Network(innermost(&error)));
            }
            Err(Asking::Token(error)) => return Err(Broken::Token(self.failed(&error))),
        };
        match response.status() {
            StatusCode::PARTIAL_CONTENT => Ok(OpenBlob::new(from, response)),
            StatusCode::OK => Ok(OpenBlob::new(0, response)),
            StatusCode::NOT_FOUND => Err(Broken::Final(self.refused(self.unknown()))),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(Broken::Final(self.refused(self.not_allowed())))
            }
            status if passes(status) => Err(Broken::Network(format!("it says: {status}"))),
            status => Err(Broken::Final(self.refused(format!("{} says: {status}", self.host)))),
        }
    }

    /// The address of a manifest or blob.
    fn url(&self, reference: &oci_client::Reference, kind: &str, name: &str) -> String {
        let (registry, repository) = (reference.resolve_registry(), reference.repository());
        let namespace = reference.namespace().map(|name| format!("?ns={name}")).unwrap_or_default();
        format!("{}://{registry}/v2/{repository}/{kind}/{name}{namespace}", self.scheme)
    }

    /// Asks for something. A registry that lets anybody read is asked for nothing before, which
    /// saves a round trip; where that is refused, or a token is too old, a token is asked for.
    async fn get(
        &self,
        reference: &oci_client::Reference,
        url: &str,
        headers: HeaderMap,
    ) -> Result<reqwest::Response, Asking> {
        let known = match self.token() {
            Token::Known(token) => token,
            Token::Unasked if matches!(self.auth, RegistryAuth::Anonymous) => None,
            Token::Unasked => self.ask_for_token(reference).await?,
        };
        let response = self.get_with(known, url, headers.clone()).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        let token = self.ask_for_token(reference).await?;
        self.get_with(token, url, headers).await
    }

    async fn get_with(
        &self,
        token: Option<String>,
        url: &str,
        headers: HeaderMap,
    ) -> Result<reqwest::Response, Asking> {
        let request = self.http.get(url).headers(headers);
        let request = match (token, &self.auth, self.token()) {
            (Some(token), ..) => request.bearer_auth(token),
            (None, RegistryAuth::Basic(name, password), Token::Known(None)) => {
                request.basic_auth(name, Some(password))
            }
            (None, ..) => request,
        };
        request.send().await.map_err(Asking::Sending)
    }

    fn token(&self) -> Token {
        self.token.lock().expect("no holder panics").clone()
    }

    async fn ask_for_token(
        &self,
        reference: &oci_client::Reference,
    ) -> Result<Option<String>, Asking> {
        let client = self.client.get().map_err(Asking::Token)?;
        let token = client.auth(reference, &self.auth, RegistryOperation::Pull).await;
        let token = token.map_err(Asking::Token)?;
        *self.token.lock().expect("no holder panics") = Token::Known(token.clone());
        Ok(token)
    }
}

/// The address of the page after the one at `url`, by the headers of that one (RFC 8288); `None`: it is the last.
///
/// # Errors
/// It is not of the same registry, to which alone the name and password may be sent.
fn next_page(url: &str, headers: &HeaderMap) -> Result<Option<String>, ()> {
    let links = headers.get_all(LINK).iter().filter_map(|value| value.to_str().ok());
    // No address has a `<` in it, so each begins behind one.
    let next = links.flat_map(|value| value.split('<').skip(1)).find_map(|link| {
        let (address, parameters) = link.split_once('>')?;
        let is_next = |one: &str| {
            let (name, value) = one.split_once('=').unwrap_or((one, ""));
            let value = value.trim().trim_end_matches(',').trim_matches('"');
            name.trim().eq_ignore_ascii_case("rel")
                && value.split(' ').any(|kind| kind.eq_ignore_ascii_case("next"))
        };
        parameters.split(';').any(is_next).then_some(address)
    });
    let Some(next) = next else { return Ok(None) };
    let here = reqwest::Url::parse(url).map_err(|_| ())?;
    let there = here.join(next).map_err(|_| ())?;
    match here.origin() == there.origin() {
        true => Ok(Some(there.into())),
        false => Err(()),
    }
}

fn is_json(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok()
}

/// Why something could not be asked for.
enum Asking {
    /// There is no token to be had.
    Token(OciDistributionError),
    /// The request did not arrive.
    Sending(reqwest::Error),
}

/// Why a download ended.
pub(crate) enum Broken {
    /// It is worth going on.
    Network(String),
    /// Too little comes.
    Slow,
    /// No token was to be had: it says only that it was refused, perhaps for a moment.
    Token(OciError),
    Final(OciError),
}

/// Whether a later answer may be another one (RFC 9110 §15.5.9 and §15.6, RFC 6585 §4).
pub(super) fn passes(status: StatusCode) -> bool {
    let asks_to_wait = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS];
    status.is_server_error() || asks_to_wait.contains(&status)
}

impl From<Broke> for Broken {
    fn from(broke: Broke) -> Self {
        match broke {
            Broke::Off(error) => Self::Network(innermost(&error)),
            Broke::Slow => Self::Slow,
        }
    }
}

/// A blob that is being downloaded.
pub(crate) struct OpenBlob {
    /// The byte at which it begins: not every registry begins where it is told to.
    pub from: u64,
    body: reqwest::Response,
    pace: Pace,
}

impl OpenBlob {
    /// The body of an answer that was to begin at this byte; `None`: it begins at another one.
    fn new(from: u64, body: reqwest::Response) -> Option<Self> {
        let is_part = body.status() == StatusCode::PARTIAL_CONTENT;
        if is_part && first_byte(body.headers()) != Some(from) {
            return None;
        }
        Some(Self { from, body, pace: Pace::default() })
    }

    /// The next bytes; `None`: the end.
    ///
    /// # Errors
    /// The connection broke, or is too slow.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Broke> {
        self.pace.next(&mut self.body).await
    }
}

/// The byte at which a part of a blob begins (RFC 9110, section 14.4).
fn first_byte(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    range.split_once('-')?.0.parse().ok()
}

/// The name of a blob in a bucket.
pub(crate) fn blob_key(digest: &str) -> String {
    format!("blobs/{}", digest.replacen(':', "/", 1))
}

/// The name of a manifest in a bucket.
pub(crate) fn manifest_key(reference: &oci_client::Reference) -> String {
    let version = reference.digest().or(reference.tag()).unwrap_or("latest");
    format!("manifests/{}", version.replacen(':', "/", 1))
}

/// The beginning of a body, and whether it is all of it.
async fn bounded(mut response: reqwest::Response, most: usize) -> Result<(Vec<u8>, bool), Broke> {
    let (mut bytes, mut pace) = (Vec::new(), Pace::default());
    while let Some(chunk) = pace.next(&mut response).await? {
        if bytes.len() + chunk.len() > most {
            return Ok((bytes, false));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok((bytes, true))
}

/// A client for what is pushed and for tokens, made when it is needed: each reads all certificates that
/// this host trusts, which takes longer than a request.
#[derive(Clone)]
pub(crate) struct LazyClient {
    is_http: bool,
    ca: Option<Vec<u8>>,
    made: Arc<OnceLock<Client>>,
}

impl LazyClient {
    /// The client.
    ///
    /// # Errors
    /// The certificates for it cannot be used.
    pub fn get(&self) -> Result<&Client, OciDistributionError> {
        if self.made.get().is_none() {
            let made = client(self.is_http, self.ca.as_deref())?;
            // Another thread may have been faster.
            let _ = self.made.set(made);
        }
        Ok(self.made.get().expect("it was made above"))
    }
}

fn client(is_http: bool, ca: Option<&[u8]>) -> Result<Client, OciDistributionError> {
    let encoding = oci_client::client::CertificateEncoding::Pem;
    let certificate = |data: &[u8]| oci_client::client::Certificate {
        encoding: encoding.clone(),
        data: data.to_vec(),
    };
    Client::try_from(ClientConfig {
        protocol: if is_http { ClientProtocol::Http } else { ClientProtocol::Https },
        read_timeout: Some(SILENCE),
        connect_timeout: Some(SILENCE),
        user_agent: USER_AGENT,
        extra_root_certificates: ca.map(certificate).into_iter().collect(),
        // One request fewer for each blob, all of which are short.
        use_monolithic_push: true,
        ..ClientConfig::default()
    })
}

fn http_client(ca: Option<&[u8]>) -> Result<reqwest::Client, reqwest::Error> {
    let mut builder = reqwest::Client::builder()
        .read_timeout(SILENCE)
        .connect_timeout(SILENCE)
        .user_agent(USER_AGENT);
    if let Some(ca) = ca {
        builder = builder.tls_certs_merge([reqwest::Certificate::from_pem(ca)?]);
    }
    builder.build()
}

/// Compares the digest of a manifest with the one that was asked for.
pub(crate) fn check_digest(found: &str, wanted: &str) -> Result<(), OciError> {
    if found == wanted {
        return Ok(());
    }
    Err(OciError::Digest {
        what: "the manifest".to_owned(),
        found: found.to_owned(),
        wanted: escaped(wanted.as_bytes()),
    })
}

/// Whether a registry does not have what was asked for.
fn is_unknown(code: &OciErrorCode) -> bool {
    matches!(
        code,
        OciErrorCode::ManifestUnknown | OciErrorCode::NameUnknown | OciErrorCode::NotFound
    )
}

/// The beginning of what a registry said.
fn excerpt(text: &str) -> String {
    escaped(text.chars().take(300).collect::<String>().as_bytes())
}

/// The cause that says most.
pub(super) fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// A runtime for one pull. All of it runs on this thread, which may act as somebody else.
///
/// # Errors
/// The host has no more descriptors.
pub(crate) fn on_this_thread() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// A runtime for one push: another thread sends while this one compresses.
///
/// # Errors
/// The host has no more threads or descriptors.
pub(crate) fn on_another_thread() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
}

pub(super) fn choose_cryptography() {
    // Whoever came first has set the same one.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
