//! Who may use the admin API over TCP.

use axum::http::{HeaderMap, Request, StatusCode, Uri, header, uri::Authority};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use thaw_home::admin::AdminToken;

/// What a request over TCP has to show. A monitor gives it to its daemon as text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RemoteAccess {
    /// The secret.
    pub token: AdminToken,
    /// Names under which clients know the API, beside addresses and `localhost`.
    pub names: Vec<String>,
}

/// Why a request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    Browser,
    Host,
    Token,
}

impl Denied {
    pub fn status(self) -> StatusCode {
        match self {
            Self::Browser | Self::Host => StatusCode::FORBIDDEN,
            Self::Token => StatusCode::UNAUTHORIZED,
        }
    }

    pub fn reason(self) -> &'static str {
        match self {
            Self::Browser => "the admin API does not serve pages in browsers; use a program",
            Self::Host => {
                "the admin API is not known by this host name; use its address, or start the daemon with --admin-name"
            }
            Self::Token => {
                "the admin API wants the token of the daemon's token file, as `Authorization: Bearer TOKEN`"
            }
        }
    }
}

/// Pages in a browser could reach any port of the local machine; browsers say in
/// `Origin` that it is a page.
pub(super) fn check_origin(headers: &HeaderMap) -> Result<(), Denied> {
    if headers.contains_key(header::ORIGIN) { Err(Denied::Browser) } else { Ok(()) }
}

impl RemoteAccess {
    /// Checks what a request shows.
    pub(super) fn check<B>(&self, request: &Request<B>) -> Result<(), Denied> {
        check_origin(request.headers())?;
        self.check_host(request.uri(), request.headers())?;
        self.check_token(request.headers())
    }

    /// Whether the request names this machine by a name of ours.
    pub(crate) fn knows_host<B>(&self, request: &Request<B>) -> bool {
        self.check_host(request.uri(), request.headers()).is_ok()
    }

    /// A name that somebody else has pointed at this machine (DNS rebinding) is not one
    /// of ours.
    fn check_host(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Denied> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(Denied::Host) };
        let host = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
        let is_ours = host.is_some_and(|host| self.is_own(host.host()))
            && uri.host().is_none_or(|host| self.is_own(host));
        if is_ours { Ok(()) } else { Err(Denied::Host) }
    }

    fn is_own(&self, host: &str) -> bool {
        let literal = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        literal.unwrap_or(host).parse::<IpAddr>().is_ok()
            || host.eq_ignore_ascii_case("localhost")
            || self.names.iter().any(|name| name.eq_ignore_ascii_case(host))
    }

    fn check_token(&self, headers: &HeaderMap) -> Result<(), Denied> {
        let given = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let token = given.and_then(|given| {
            let (scheme, token) = given.split_at_checked("Bearer ".len())?;
            scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
        });
        match token {
            Some(token) if self.token.is(token) => Ok(()),
            _ => Err(Denied::Token),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_must_show_token_and_host_and_no_origin() {
        let token = serde_json::from_str("\"0123456789abcdef\"").unwrap();
        let access = RemoteAccess { token, names: vec!["thaw.example".to_owned()] };
        let check = |uri: &str, headers: &[(&str, &str)]| {
            let mut request = Request::builder().uri(uri);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            access.check(&request.body(()).unwrap())
        };
        let right = ("authorization", "Bearer 0123456789abcdef");
        for host in ["127.0.0.1:8081", "[::1]:8081", "localhost", "LOCALHOST:1", "Thaw.example:80"]
        {
            assert_eq!(check("/", &[("host", host), right]), Ok(()), "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example:8081", "", "a@b@c", "localhost.evil"] {
            assert_eq!(check("/", &[("host", host), right]), Err(Denied::Host), "{host}");
        }
        let local = ("host", "127.0.0.1");
        assert_eq!(check("/", &[right]), Err(Denied::Host));
        assert_eq!(check("/", &[local, local, right]), Err(Denied::Host));
        assert_eq!(check("http://evil.example/", &[local, right]), Err(Denied::Host));
        assert_eq!(check("/", &[local, right, ("origin", "null")]), Err(Denied::Browser));
        assert_eq!(check("/", &[local]), Err(Denied::Token));
        for wrong in ["", "Bearer", "Bearer ", "Basic 0123456789abcdef", "0123456789abcdef"] {
            assert_eq!(check("/", &[local, ("authorization", wrong)]), Err(Denied::Token));
        }
        for wrong in ["0123456789abcdeg", "0123456789abcde", "0123456789abcdef0"] {
            let wrong = format!("Bearer {wrong}");
            assert_eq!(check("/", &[local, ("authorization", &wrong)]), Err(Denied::Token));
        }
    }
}
