//! Which pages of other origins may use a function (Fetch Standard, "CORS protocol"). The
//! gateway answers what browsers ask beforehand, and says in each answer whether the page may
//! read it.

use hyper::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderMap, HeaderName, HeaderValue, ORIGIN, VARY,
};
use hyper::http::Method;
use serde::Deserialize;

/// What a function's `cors` says.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cors {
    /// Such as `https://example.com`; `*`: every page.
    origins: Vec<String>,
    #[serde(default = "simple_methods")]
    methods: Vec<String>,
    /// Request headers that a page may set.
    #[serde(default)]
    headers: Vec<String>,
    /// Response headers that a page may read.
    #[serde(default)]
    expose: Vec<String>,
    /// Cookies and credentials go along.
    #[serde(default)]
    credentials: bool,
    /// Seconds for which a browser may remember the answer.
    #[serde(default = "ten_minutes")]
    max_age: u32,
}

fn simple_methods() -> Vec<String> {
    ["GET", "HEAD", "POST"].map(str::to_owned).to_vec()
}

fn ten_minutes() -> u32 {
    600
}

impl Cors {
    /// # Errors
    /// One sentence.
    pub fn check(&self) -> Result<(), String> {
        if self.credentials && self.origins.iter().any(|origin| origin == "*") {
            return Err("`cors` with `credentials` names its `origins`; `*` is every page's".into());
        }
        let is_origin = |text: &str| {
            text == "*" || text.split_once("://").is_some_and(|(_, host)| !host.contains('/'))
        };
        if let Some(wrong) = self.origins.iter().find(|origin| !is_origin(origin)) {
            return Err(format!("`{wrong}` is no origin; write \"https://example.com\" or \"*\""));
        }
        let names = self.headers.iter().chain(&self.expose);
        if let Some(wrong) = names.into_iter().find(|name| name.parse::<HeaderName>().is_err()) {
            return Err(format!("`{wrong}` is no header"));
        }
        match self.methods.iter().find(|name| Method::from_bytes(name.as_bytes()).is_err()) {
            Some(wrong) => Err(format!("`{wrong}` is no method")),
            None => Ok(()),
        }
    }

    /// The answer to what a browser asks beforehand; `None`: the request is none of these.
    pub fn preflight(&self, method: &Method, headers: &HeaderMap) -> Option<HeaderMap> {
        let asks = headers.contains_key(ORIGIN)
            && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
            && *method == Method::OPTIONS;
        if !asks {
            return None;
        }
        let mut answer = HeaderMap::new();
        if self.allow(headers.get(ORIGIN), &mut answer) {
            let mut say = |name: HeaderName, value: String| {
                if let (false, Ok(value)) = (value.is_empty(), HeaderValue::try_from(value)) {
                    answer.insert(name, value);
                }
            };
            say(ACCESS_CONTROL_ALLOW_METHODS, self.methods.join(", "));
            say(ACCESS_CONTROL_ALLOW_HEADERS, self.headers.join(", "));
            say(ACCESS_CONTROL_MAX_AGE, self.max_age.to_string());
        }
        Some(answer)
    }

    /// Says in the answer to a page of `origin` whether it may read it.
    pub fn mark(&self, origin: Option<&HeaderValue>, answer: &mut HeaderMap) {
        for name in [
            ACCESS_CONTROL_ALLOW_ORIGIN,
            ACCESS_CONTROL_ALLOW_CREDENTIALS,
            ACCESS_CONTROL_EXPOSE_HEADERS,
        ] {
            // The gateway's word counts, not the function's.
            answer.remove(name);
        }
        if self.allow(origin, answer)
            && !self.expose.is_empty()
            && let Ok(value) = HeaderValue::try_from(self.expose.join(", "))
        {
            answer.insert(ACCESS_CONTROL_EXPOSE_HEADERS, value);
        }
    }

    fn allow(&self, origin: Option<&HeaderValue>, answer: &mut HeaderMap) -> bool {
        let is_any = self.origins.iter().any(|known| known == "*");
        if !is_any {
            // Caches keep the answers to different pages apart.
            answer.append(VARY, HeaderValue::from_static("Origin"));
        }
        let Some(origin) = origin else { return false };
        let is_known = self.origins.iter().any(|known| known.as_bytes() == origin.as_bytes());
        if !is_any && !is_known {
            return false;
        }
        let value = if is_any { HeaderValue::from_static("*") } else { origin.clone() };
        answer.insert(ACCESS_CONTROL_ALLOW_ORIGIN, value);
        if self.credentials {
            answer.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cors(text: &str) -> Cors {
        toml::from_str(text).unwrap()
    }

    fn asked(origin: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(ORIGIN, origin.parse().unwrap());
        headers.insert(ACCESS_CONTROL_REQUEST_METHOD, "PUT".parse().unwrap());
        headers
    }

    #[test]
    fn browsers_are_told_what_a_page_may_do() {
        let cors = cors(
            "origins = [\"https://a.example\"]\nmethods = [\"PUT\"]\nheaders = [\"X-A\"]\n\
             credentials = true",
        );
        cors.check().unwrap();
        let answer = cors.preflight(&Method::OPTIONS, &asked("https://a.example")).unwrap();
        assert_eq!(answer[ACCESS_CONTROL_ALLOW_ORIGIN], "https://a.example");
        assert_eq!(answer[ACCESS_CONTROL_ALLOW_METHODS], "PUT");
        assert_eq!(answer[ACCESS_CONTROL_ALLOW_HEADERS], "X-A");
        assert_eq!(answer[ACCESS_CONTROL_ALLOW_CREDENTIALS], "true");
        assert_eq!(answer[VARY], "Origin");
        let other = cors.preflight(&Method::OPTIONS, &asked("https://b.example")).unwrap();
        assert!(!other.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN), "{other:?}");
        assert!(cors.preflight(&Method::GET, &asked("https://a.example")).is_none());
        assert!(cors.preflight(&Method::OPTIONS, &HeaderMap::new()).is_none());
    }

    #[test]
    fn the_gateways_word_counts() {
        let cors = cors("origins = [\"*\"]\nexpose = [\"X-B\"]");
        let mut answer = HeaderMap::new();
        answer.insert(ACCESS_CONTROL_ALLOW_ORIGIN, "https://evil".parse().unwrap());
        answer.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, "true".parse().unwrap());
        cors.mark(Some(&"https://a".parse().unwrap()), &mut answer);
        assert_eq!(answer[ACCESS_CONTROL_ALLOW_ORIGIN], "*");
        assert_eq!(answer[ACCESS_CONTROL_EXPOSE_HEADERS], "X-B");
        assert!(!answer.contains_key(ACCESS_CONTROL_ALLOW_CREDENTIALS));
        cors.mark(None, &mut answer);
        assert!(!answer.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN));
    }

    #[test]
    fn wrong_words_are_named() {
        for (text, why) in [
            ("origins = [\"*\"]\ncredentials = true", "credentials"),
            ("origins = [\"example.com\"]", "no origin"),
            ("origins = [\"https://a/b\"]", "no origin"),
            ("origins = []\nheaders = [\"a b\"]", "no header"),
            ("origins = []\nmethods = [\"a b\"]", "no method"),
        ] {
            assert!(cors(text).check().unwrap_err().contains(why), "{text}");
        }
    }
}
