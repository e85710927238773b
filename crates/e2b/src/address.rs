//! Which part of the API a request is for: the control API, envd in a sandbox, or a port on which
//! a program in a sandbox listens.
//!
//! With `domain` in e2b.toml the name of the host says so: `api.DOMAIN` and `PORT-ID.DOMAIN`.
//! Otherwise the headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port` do, which the SDKs send when
//! `E2B_SANDBOX_URL` is set.

use super::problem::Problem;
use super::serve::header;
use axum::http::header::HOST;
use axum::http::request::Parts;

/// The header that names the sandbox a request is for.
pub(super) const SANDBOX_HEADER: &str = "e2b-sandbox-id";
/// The header that names the port in it.
pub(super) const PORT_HEADER: &str = "e2b-sandbox-port";
/// The port of envd.
const ENVD_PORT: u16 = 49983;

/// What a request is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// The control API.
    Control,
    /// envd of the sandbox of this id.
    Envd(String),
    /// A port of a program in the sandbox of this id.
    Port(String, u16),
}

impl Address {
    /// That of a request.
    ///
    /// # Errors
    /// It names a port that is none.
    pub fn of(request: &Parts, domain: Option<&str>) -> Result<Self, Problem> {
        let named = domain.and_then(|domain| label(request, domain));
        if let Some((port, id)) = named.as_deref().and_then(|label| label.split_once('-')) {
            return Self::in_sandbox(id, port);
        }
        if named.as_deref() == Some("api") {
            return Ok(Self::Control);
        }
        let Some(id) = header(&request.headers, SANDBOX_HEADER) else { return Ok(Self::Control) };
        match header(&request.headers, PORT_HEADER) {
            Some(port) => Self::in_sandbox(id, port),
            None => Ok(Self::Envd(id.to_owned())),
        }
    }

    fn in_sandbox(id: &str, port: &str) -> Result<Self, Problem> {
        match port.parse() {
            Ok(ENVD_PORT) => Ok(Self::Envd(id.to_owned())),
            Ok(port @ 1..) => Ok(Self::Port(id.to_owned(), port)),
            _ => Err(Problem::invalid(format!("{port:?} is no port; name one of 1 to 65535"))),
        }
    }
}

/// What stands before the domain in the name of the host that a request is for, in small letters.
fn label(request: &Parts, domain: &str) -> Option<String> {
    let host = match request.uri.authority() {
        Some(authority) => authority.host().to_owned(),
        None => {
            let host = header(&request.headers, HOST.as_str())?;
            host.split_once(':').map_or(host, |(name, _)| name).to_owned()
        }
    };
    let host = host.to_ascii_lowercase();
    let label = host.strip_suffix(domain)?.strip_suffix('.')?;
    (!label.contains('.')).then(|| label.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    fn of(host: &str, headers: &[(&str, &str)]) -> Result<Address, Problem> {
        let mut request = Request::builder().uri("/x").header(HOST, host);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        Address::of(&parts, Some("box.example.org"))
    }

    #[test]
    fn names_of_hosts_say_which_port_of_which_sandbox_is_meant() {
        let port = |port| Ok(Address::Port("abc".to_owned(), port));
        let envd = || Ok(Address::Envd("abc".to_owned()));
        assert_eq!(of("3000-abc.box.example.org", &[]), port(3000));
        assert_eq!(of("3000-ABC.box.Example.org:8443", &[]), port(3000));
        assert_eq!(of("49983-abc.box.example.org", &[]), envd());
        assert_eq!(of("api.box.example.org", &[(SANDBOX_HEADER, "abc")]), Ok(Address::Control));
        for host in
            ["127.0.0.1:8082", "box.example.org", "3000-abc.evil.org", "1-a.b.box.example.org"]
        {
            assert_eq!(of(host, &[]), Ok(Address::Control), "{host}");
            assert_eq!(of(host, &[(SANDBOX_HEADER, "abc")]), envd(), "{host}");
            let both = [(SANDBOX_HEADER, "abc"), (PORT_HEADER, "80")];
            assert_eq!(of(host, &both), port(80), "{host}");
        }
        for host in ["0-abc.box.example.org", "65536-abc.box.example.org", "x-abc.box.example.org"]
        {
            assert!(of(host, &[]).unwrap_err().message.contains("1 to 65535"), "{host}");
        }
    }
}
