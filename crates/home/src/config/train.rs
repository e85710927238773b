//! `[train]`: requests to send before the program is frozen.

use super::files::is_inside;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;

/// `[train]`: what the program answers after it first waits for a client and
/// before it is frozen, so that its copies begin with warm caches and code.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Train {
    /// The requests, in order.
    #[serde(deserialize_with = "some_requests")]
    pub requests: Vec<TrainingRequest>,
}

impl Train {
    /// Number of requests with all their repetitions.
    pub fn total(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.repeat.get())).sum()
    }
}

/// A request, sent over a connection of its own each time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingRequest {
    /// Method; default: `POST` with a body, `GET` without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<Method>,
    /// Path and query.
    #[serde(default)]
    pub path: RequestPath,
    /// Headers besides `Host`, `Content-Length` and `Connection`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<HeaderName, HeaderText>,
    /// The body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// A file of the function's directory that is the body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// How often it is sent.
    #[serde(default = "once", deserialize_with = "super::quantity::positive")]
    pub repeat: NonZeroU32,
    /// The status that must come back; default: any from 200 to 299.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<Status>,
}

impl TrainingRequest {
    /// The method that is sent.
    pub fn method(&self) -> &str {
        match &self.method {
            Some(Method(method)) => method,
            None if self.body.is_some() || self.file.is_some() => "POST",
            None => "GET",
        }
    }

    /// Whether `status` is what must come back.
    pub fn accepts(&self, status: u16) -> bool {
        match self.expect {
            Some(Status(expected)) => status == expected,
            None => (200..300).contains(&status),
        }
    }

    /// What is wrong with the body, if something is.
    pub(super) fn contradiction(&self) -> Option<String> {
        if self.body.is_some() && self.file.is_some() {
            return Some("`body` and `file` exclude each other; keep one of them".to_owned());
        }
        let file = self.file.as_ref().filter(|file| !is_inside(file))?;
        Some(format!(
            "`{}` does not lie in the function's directory; give a relative path without ..",
            file.display()
        ))
    }
}

fn once() -> NonZeroU32 {
    NonZeroU32::MIN
}

fn some_requests<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<TrainingRequest>, D::Error> {
    let requests = Vec::deserialize(deserializer)?;
    if requests.is_empty() {
        return Err(serde::de::Error::custom(
            "training needs a request; write requests = [{ path = \"/\" }], or remove [train]",
        ));
    }
    Ok(requests)
}

/// Makes a type of text that was checked.
macro_rules! checked_text {
    ($(#[$documentation:meta])* $name:ident, $check:expr, $error:literal) => {
        $(#[$documentation])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        pub struct $name(pub String);

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                let check: fn(&str) -> bool = $check;
                if check(&text) {
                    return Ok(Self(text));
                }
                Err(serde::de::Error::custom(format!($error, text = text)))
            }
        }
    };
}

checked_text!(
    /// A method of HTTP.
    Method,
    |text| text.parse::<hyper::http::Method>().is_ok() && !text.is_empty(),
    "`{text}` is not an HTTP method; write GET, POST, …"
);
checked_text!(
    /// Path and query of a request.
    RequestPath,
    |text| text.starts_with('/') && text.parse::<hyper::http::Uri>().is_ok(),
    "`{text}` is not a path of a request; begin it with a slash, and write %20 for a space"
);
checked_text!(
    /// Name of a header.
    HeaderName,
    |text| text.parse::<hyper::http::HeaderName>().is_ok(),
    "`{text}` cannot name a header; use letters, digits and -"
);

checked_text!(
    /// Value of a header.
    HeaderText,
    |text| text.parse::<hyper::http::HeaderValue>().is_ok(),
    "`{text}` cannot be the value of a header; use printable characters"
);

impl Default for RequestPath {
    fn default() -> Self {
        Self("/".to_owned())
    }
}

/// A status code of HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Status(pub u16);

impl<'de> Deserialize<'de> for Status {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let code = i64::deserialize(deserializer)?;
        match u16::try_from(code) {
            Ok(code @ 200..600) => Ok(Self(code)),
            _ => Err(serde::de::Error::custom(format!(
                "`{code}` is not a status that a response can have; write one from 200 to 599"
            ))),
        }
    }
}
