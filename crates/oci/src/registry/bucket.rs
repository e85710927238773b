//! Functions in an object store that speaks the API of S3, in place of a registry.
//!
//! ```text
//! s3://BUCKET/PREFIX:TAG      PREFIX/manifests/TAG, PREFIX/manifests/sha256/HEX
//!                             PREFIX/blobs/sha256/HEX
//! ```
//!
//! Requests are signed by Signature Version 4 ("Signature Calculations for the Authorization
//! Header", Amazon S3 API Reference), or not at all where there are no keys. Nothing is ever
//! listed or removed.

use super::settings::Registries;
use super::source::passes;
use crate::error::escaped;
use bytes::Bytes;
use reqwest::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, HeaderValue, RANGE};
use reqwest::{Method, Response, StatusCode, Url};
use ring::hmac::{HMAC_SHA256, Key, sign};
use std::env;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a bucket's name ends with as the host of a reference. There is no such top-level domain.
const SUFFIX: &str = ".s3";
/// How a bucket is named by people.
pub(crate) const SCHEME: &str = "s3://";
/// Where buckets are of which nobody has said anything.
const REGION: &str = "us-east-1";
/// SHA-256 of nothing.
const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// The host of a reference that stands for a bucket.
pub(crate) fn host_of(bucket: &str) -> String {
    format!("{bucket}{SUFFIX}")
}

/// The bucket that a reference's host stands for, if it does.
pub(crate) fn bucket_of(host: &str) -> Option<&str> {
    host.strip_suffix(SUFFIX)
}

/// A bucket.
#[derive(Clone)]
pub(crate) struct Bucket {
    http: reqwest::Client,
    /// With the bucket and the prefix.
    base: Url,
    region: String,
    keys: Option<Keys>,
}

/// Who asks.
#[derive(Clone)]
struct Keys {
    id: String,
    secret: String,
    token: Option<String>,
}

impl Keys {
    /// Those of the environment, as all clients of S3 take them.
    fn from_environment() -> Option<Self> {
        let id = env::var("AWS_ACCESS_KEY_ID").ok()?;
        let secret = env::var("AWS_SECRET_ACCESS_KEY").ok()?;
        Some(Self { id, secret, token: env::var("AWS_SESSION_TOKEN").ok() })
    }
}

/// Why something cannot be had from a bucket.
#[derive(Debug)]
pub(crate) enum BucketError {
    /// It may help to try again.
    Passing(String),
    /// It will not.
    Final(String),
}

impl BucketError {
    pub fn reason(self) -> String {
        match self {
            Self::Passing(reason) | Self::Final(reason) => reason,
        }
    }
}

impl From<reqwest::Error> for BucketError {
    fn from(error: reqwest::Error) -> Self {
        Self::Passing(format!("it cannot be reached ({error})"))
    }
}

impl Bucket {
    /// The bucket of a name, as registries.toml and the environment say. Nothing is asked yet.
    ///
    /// # Errors
    /// Its endpoint is no address.
    pub fn new(
        registries: &Registries,
        (bucket, prefix): (&str, &str),
        http: reqwest::Client,
    ) -> Result<Self, String> {
        let rule = registries.rule(&host_of(bucket));
        let variable = |names: &[&str]| names.iter().find_map(|name| env::var(name).ok());
        let region = rule.and_then(|rule| rule.region.clone());
        let region = region.or_else(|| variable(&["AWS_REGION", "AWS_DEFAULT_REGION"]));
        let region = region.unwrap_or_else(|| REGION.to_owned());
        let endpoint = rule.and_then(|rule| rule.endpoint.clone());
        let endpoint = endpoint.or_else(|| variable(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]));
        let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let base = format!("{}/{bucket}/{prefix}/", endpoint.trim_end_matches('/'));
        let base = Url::parse(&base).ok().filter(|url| url.has_host());
        let base = base.ok_or_else(|| {
            let endpoint = escaped(endpoint.as_bytes());
            format!("the endpoint {endpoint} is no address; give one such as https://s3.example")
        })?;
        Ok(Self { http, base, region, keys: Keys::from_environment() })
    }

    /// Asks for an object from byte `from` on; `None`: there is none. With `Some(false)` the answer
    /// begins at its beginning all the same.
    ///
    /// # Errors
    /// The bucket cannot be reached, or refuses.
    pub async fn get(&self, key: &str, from: u64) -> Result<Option<(Response, u64)>, BucketError> {
        let range = (from > 0).then(|| format!("bytes={from}-"));
        let response = self.ask(Method::GET, key, EMPTY, range, None).await?;
        match response.status() {
            StatusCode::OK => Ok(Some((response, 0))),
            StatusCode::PARTIAL_CONTENT => Ok(Some((response, from))),
            StatusCode::NOT_FOUND => Ok(None),
            status => Err(refused(status)),
        }
    }

    /// Whether there is an object.
    ///
    /// # Errors
    /// As above.
    pub async fn has(&self, key: &str) -> Result<bool, BucketError> {
        let response = self.ask(Method::HEAD, key, EMPTY, None, None).await?;
        match response.status() {
            StatusCode::OK => Ok(true),
            StatusCode::NOT_FOUND => Ok(false),
            status => Err(refused(status)),
        }
    }

    /// Stores an object.
    ///
    /// # Errors
    /// As above.
    pub async fn put(&self, key: &str, bytes: Bytes) -> Result<(), BucketError> {
        let digest = crate::layer::digest(&bytes);
        let hash = digest.trim_start_matches("sha256:");
        let response = self.ask(Method::PUT, key, hash, None, Some(bytes)).await?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(refused(status)),
        }
    }

    async fn ask(
        &self,
        method: Method,
        key: &str,
        hash: &str,
        range: Option<String>,
        body: Option<Bytes>,
    ) -> Result<Response, BucketError> {
        let url = self.base.join(key).map_err(|error| BucketError::Final(error.to_string()))?;
        let mut headers = HeaderMap::new();
        if let Some(range) = range {
            headers.insert(RANGE, value(&range)?);
        }
        if let Some(keys) = &self.keys {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |at| at.as_secs());
            let signing = Signing { keys, region: &self.region, date: &date(now) };
            signing.sign(&method, &url, hash, &mut headers)?;
        }
        let request = self.http.request(method, url).headers(headers);
        let request = match body {
            Some(body) => request.body(body),
            None => request,
        };
        Ok(request.send().await?)
    }
}

fn refused(status: StatusCode) -> BucketError {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => BucketError::Final(
            "it does not let you; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to keys that may"
                .to_owned(),
        ),
        StatusCode::NOT_FOUND => {
            BucketError::Final("there is no such bucket; check its name and endpoint".to_owned())
        }
        status if passes(status) => BucketError::Passing(format!("it says: {status}")),
        status => BucketError::Final(format!("it says: {status}")),
    }
}

fn value(text: &str) -> Result<HeaderValue, BucketError> {
    let wrong = |_| {
        BucketError::Final("a key of the environment has characters that no header has".to_owned())
    };
    text.parse().map_err(wrong)
}

/// How a request is signed.
struct Signing<'a> {
    keys: &'a Keys,
    region: &'a str,
    /// As in `20130524T000000Z`.
    date: &'a str,
}

impl Signing<'_> {
    /// Adds the headers of a signed request whose body has this hash. All headers that are there
    /// are signed.
    fn sign(
        &self,
        method: &Method,
        url: &Url,
        hash: &str,
        headers: &mut HeaderMap,
    ) -> Result<(), BucketError> {
        let host = url.host_str().unwrap_or_default();
        let host = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        headers.insert(HOST, value(&host)?);
        headers.insert(HeaderName::from_static("x-amz-content-sha256"), value(hash)?);
        headers.insert(HeaderName::from_static("x-amz-date"), value(self.date)?);
        if let Some(token) = &self.keys.token {
            headers.insert(HeaderName::from_static("x-amz-security-token"), value(token)?);
        }
        let mut all: Vec<(&str, &str)> = headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().unwrap_or_default().trim()))
            .collect();
        all.sort_unstable();
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        let names = names.join(";");
        let lines: String = all.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
        let canonical = format!("{method}\n{}\n\n{lines}\n{names}\n{hash}", url.path());
        let day = self.date.split('T').next().unwrap_or_default();
        let scope = format!("{day}/{}/s3/aws4_request", self.region);
        let digest = crate::layer::digest(canonical.as_bytes());
        let digest = digest.trim_start_matches("sha256:");
        let text = format!("AWS4-HMAC-SHA256\n{}\n{scope}\n{digest}", self.date);
        let secret = format!("AWS4{}", self.keys.secret);
        let key = [day, self.region, "s3", "aws4_request"]
            .into_iter()
            .fold(secret.into_bytes(), |key, part| hmac(&key, part.as_bytes()));
        let signature: String =
            hmac(&key, text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        let id = &self.keys.id;
        let authorization = format!(
            "AWS4-HMAC-SHA256 Credential={id}/{scope},SignedHeaders={names},Signature={signature}"
        );
        headers.insert(AUTHORIZATION, value(&authorization)?);
        Ok(())
    }
}

fn hmac(key: &[u8], text: &[u8]) -> Vec<u8> {
    sign(&Key::new(HMAC_SHA256, key), text).as_ref().to_vec()
}

/// Seconds since the epoch as in `20130524T000000Z` (Howard Hinnant, "chrono-Compatible Low-Level
/// Date Algorithms", `civil_from_days`).
fn date(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "19700101T000000Z");
        assert_eq!(date(951_782_400), "20000229T000000Z");
        assert_eq!(date(1_369_353_600), "20130524T000000Z");
        assert_eq!(date(1_798_761_599), "20261231T235959Z");
    }

    /// The example "GET Object" of the API reference.
    #[test]
    fn requests_are_signed_as_in_the_reference() {
        let keys = Keys {
            id: "AKIAIOSFODNN7EXAMPLE".to_owned(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".to_owned(),
            token: None,
        };
        let signing = Signing { keys: &keys, region: "us-east-1", date: "20130524T000000Z" };
        let url = Url::parse("https://examplebucket.s3.amazonaws.com/test.txt").unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(RANGE, HeaderValue::from_static("bytes=0-9"));
        signing.sign(&Method::GET, &url, EMPTY, &mut headers).unwrap();
        let authorization = headers[AUTHORIZATION].to_str().unwrap();
        assert!(
            authorization.ends_with(
                "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,\
                 Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
            ),
            "{authorization}"
        );
    }

    #[test]
    fn buckets_are_hosts_of_their_own() {
        assert_eq!(bucket_of(&host_of("shop.images")), Some("shop.images"));
        assert_eq!(bucket_of("registry.example"), None);
    }
}
