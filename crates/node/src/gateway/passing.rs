//! What a request has to pass before it comes to a function: the route, the certificate that
//! its client was shown, and what the operator says of the function's clients.

use super::client::RoutedClient;
use super::refusal::Refusal;
use super::report;
use super::routed::choose;
use crate::edge::{Asked, Granted, Policy, Rules, Target, Unauthorized};
use crate::node::NodeState;
use crate::service::Service;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::PathAndQuery;
use hyper::http::{StatusCode, Uri};
use std::net::SocketAddr;
use std::sync::Arc;
use thaw_http::head::{HeadError, first_label};
use thaw_http::message::{self, FORWARDED_PROTO};

/// Where a request goes.
pub(super) enum Way {
    /// To a function.
    Service(Passed),
    /// The client is told to go there.
    Redirect { location: HeaderValue, status: StatusCode },
}

/// A request that comes to a function.
pub(super) struct Passed {
    pub service: Arc<Service>,
    pub policy: Option<Arc<Policy>>,
    /// Bytes of its path that the function does not see.
    strip: usize,
}

/// What the gateway does with a request to a function with a policy.
pub(super) enum Admittance {
    /// The function gets it; what the client has shown, if it had to.
    Granted(Option<Granted>),
    /// A browser asks beforehand, and gets these headers.
    Preflight(HeaderMap),
}

/// The host of a request, without what makes it an error.
pub(super) fn host_of(head: &Parts) -> Result<Option<String>, Refusal> {
    message::host_of(head).map_err(Refusal::BadHead)
}

/// Finds out where a request goes.
///
/// # Errors
/// Nowhere.
pub(super) fn way(client: &RoutedClient, head: &Parts, host: Option<&str>) -> Result<Way, Refusal> {
    let shared = client.gateway.shared();
    if let Some(secured) = &client.secured
        && !secured.certificates.cover(secured.name.as_deref(), host)
    {
        return Err(Refusal::OtherCertificate);
    }
    let rules = report::rules_for(shared, client.addresses());
    let named = host.map(first_label);
    let (name, strip) = match (&client.function, &rules) {
        (Some(own), _) => (Some(own.to_string()), 0),
        (None, None) => (named.map(str::to_owned), 0),
        (None, Some(rules)) => match target(rules, client, head, host) {
            Target::Function { name, strip, .. } => (Some(name.to_string()), strip),
            Target::Redirect { location, status } => return redirect(&location, status),
            Target::None => (None, 0),
        },
    };
    let found = name.as_deref().and_then(|name| choose(client, name, head));
    let Some(service) = found else {
        let asked = name.or_else(|| named.map(str::to_owned));
        return Err(Refusal::UnknownFunction(asked));
    };
    let policy = rules.and_then(|rules| rules.policy(service.name()));
    Ok(Way::Service(Passed { service, policy, strip }))
}

fn target(rules: &Rules, client: &RoutedClient, head: &Parts, host: Option<&str>) -> Target {
    let target = head.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let asked = Asked { host, target, is_tls: client.secured.is_some() };
    rules.target(asked, host.map(first_label))
}

fn redirect(location: &str, status: u16) -> Result<Way, Refusal> {
    let broken = HeadError::Malformed("its path is not text");
    let location = HeaderValue::from_str(location).map_err(|_| Refusal::BadHead(broken))?;
    let status = StatusCode::from_u16(status).expect("it was checked");
    Ok(Way::Redirect { location, status })
}

impl Passed {
    /// Holds a request against what is said of the function's clients.
    ///
    /// # Errors
    /// It does not come to the function.
    pub fn admit(&self, client: &RoutedClient, head: &Parts) -> Result<Admittance, Refusal> {
        let Some(policy) = &self.policy else { return Ok(Admittance::Granted(None)) };
        let shared = client.gateway.shared();
        let function = || self.service.name().to_string();
        if let Err(retry_after) = shared.edge().count(self.service.name(), policy, client.peer) {
            return Err(Refusal::TooManyRequests { function: function(), retry_after });
        }
        let preflight =
            policy.cors.as_ref().and_then(|cors| cors.preflight(&head.method, &head.headers));
        if let Some(headers) = preflight {
            return Ok(Admittance::Preflight(headers));
        }
        match policy.authenticate(&head.headers) {
            None => Ok(Admittance::Granted(None)),
            Some(Ok(granted)) => Ok(Admittance::Granted(Some(granted))),
            Some(Err(Unauthorized { challenge, why })) => {
                Err(Refusal::Unauthorized { function: function(), challenge, why })
            }
        }
    }

    /// Bytes that the body of a request may have.
    pub fn body_max(&self) -> Option<u64> {
        self.policy.as_ref()?.body_max
    }

    /// Takes out of a request what is not for the function, and says how it came.
    pub fn prepare(&self, client: &RoutedClient, head: &mut Parts, granted: Option<&Granted>) {
        if granted.is_some_and(|granted| granted.is_secret) {
            head.headers.remove(AUTHORIZATION);
        }
        if client.secured.is_some() {
            head.headers.insert(FORWARDED_PROTO, HeaderValue::from_static("https"));
        }
        if self.strip > 0 {
            strip(&mut head.uri, self.strip);
        }
    }
}

/// Holds a client that speaks a protocol of its own against what is said of the function's
/// clients: its connection, or its first datagram, counts as a request.
///
/// # Errors
/// It does not come to the function: it is over its rate, or there is a rule that cannot be
/// kept without HTTP.
pub(super) fn admit_raw(
    shared: &NodeState,
    service: &Service,
    client: SocketAddr,
) -> Result<(), Refusal> {
    let Some(policy) = shared.edge().rules().and_then(|rules| rules.policy(service.name())) else {
        return Ok(());
    };
    let function = service.name().to_string();
    if policy.is_about_http() {
        let why = format!(
            "[function.{function}] of gateway.toml says `auth`, `cors` or `body_max`, which are \
             for HTTP, and the function does not speak it; leave `rate` only, or remove the table"
        );
        return Err(Refusal::Unauthorized { function, challenge: "", why });
    }
    let counted = shared.edge().count(service.name(), &policy, client);
    counted.map_err(|retry_after| Refusal::TooManyRequests { function, retry_after })
}

/// Takes the first bytes of a path away; what is left begins with `/` again.
fn strip(uri: &mut Uri, count: usize) {
    let Some(all) = uri.path_and_query().map(PathAndQuery::as_str) else { return };
    let Some(rest) = all.get(count..) else { return };
    let rest = if rest.starts_with('/') { rest.to_owned() } else { format!("/{rest}") };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(rest).ok();
    if let Ok(stripped) = Uri::from_parts(parts) {
        *uri = stripped;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_a_path_is_a_path() {
        for (uri, count, expected) in [
            ("/api/x?y", 4, "/x?y"),
            ("/api", 4, "/"),
            ("/api?y", 4, "/?y"),
            ("https://h/api/", 4, "https://h/"),
            ("/", 4, "/"),
        ] {
            let mut uri: Uri = uri.parse().unwrap();
            strip(&mut uri, count);
            assert_eq!(uri, expected);
        }
    }
}
