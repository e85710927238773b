//! Headers for requests of one sandbox, which change while it runs: those that a client of E2B's
//! API gives with their values, and those of `thaw sandbox inject`, whose values are secrets of the
//! function.

use hyper::header::{HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use thaw_home::config::{FunctionConfig, Inject, check_header};
use thaw_sandbox::EgressRule;

/// The port of a host that names none.
const PORT: u16 = 443;
/// Most hosts that a client gives.
pub const HOSTS_MAX: usize = 64;
/// Most headers for one host.
pub const HEADERS_MAX: usize = 16;
/// Most bytes of one value.
pub const VALUE_MAX: usize = 8 << 10;
/// Most bytes of all hosts, names and values together.
pub const TEXT_MAX: usize = 64 << 10;

/// The headers of one sandbox that are its own. They are in the daemon and in a file for the next
/// one, and in no answer.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OwnHeaders {
    /// Those whose values are secrets of the function.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rules: Vec<Inject>,
    /// Names and values by host, as a client has given them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    given: BTreeMap<String, BTreeMap<String, String>>,
}

impl fmt::Debug for OwnHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnHeaders").field(&self.hosts()).finish()
    }
}

/// Why headers are not added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongHeaders {
    /// They make no sense.
    #[error("{0}")]
    Wrong(String),
    /// What is asked for is not there.
    #[error("{0}")]
    Missing(String),
}

impl OwnHeaders {
    /// Those whose values are secrets of a function.
    ///
    /// # Errors
    /// One sentence: there are too many, or the program could read such a secret.
    pub fn of_secrets(rules: Vec<Inject>, function: &FunctionConfig) -> Result<Self, WrongHeaders> {
        let checked = thaw_home::config::check_inject(&rules, &function.secrets.names);
        checked.map_err(WrongHeaders::Wrong)?;
        let own = Self { rules, ..Self::default() };
        own.check_trust(function).map(|()| own)
    }

    /// Those that a client gives with their values, by host: a name, or `*.` and a name, and a port
    /// if it is not 443.
    ///
    /// # Errors
    /// One is none, or there are too many.
    pub fn given(
        hosts: impl IntoIterator<Item = (String, BTreeMap<String, String>)>,
    ) -> Result<Self, WrongHeaders> {
        let mut given = BTreeMap::new();
        let mut bytes = 0;
        for (host, headers) in hosts {
            let host = host.to_ascii_lowercase();
            destination(&host)?;
            bytes += host.len() + check_headers(&host, &headers)?;
            given.insert(host, headers);
        }
        if given.len() > HOSTS_MAX || bytes > TEXT_MAX {
            return Err(WrongHeaders::Wrong(format!(
                "there are headers for {} hosts, of {bytes} bytes, and a sandbox has them for \
                 {HOSTS_MAX} hosts and {TEXT_MAX} bytes at most; give fewer",
                given.len()
            )));
        }
        Ok(Self { given, ..Self::default() })
    }

    /// Refuses hosts whose certificates the programs of a function do not trust.
    ///
    /// # Errors
    /// One sentence that says what the function's thaw.toml lacks.
    pub fn check_trust(&self, function: &FunctionConfig) -> Result<(), WrongHeaders> {
        let trusted: BTreeSet<&str> = function.egress.inject.iter().map(Inject::name).collect();
        let is_trusted = |host: &String| trusted.contains(host.split(':').next().unwrap_or(host));
        if function.egress.authority || self.hosts().iter().all(is_trusted) {
            return Ok(());
        }
        Err(WrongHeaders::Missing(format!(
            "programs of `{}` do not trust the node's authority, by which headers are added; put \
             `authority = true` below [egress] of its thaw.toml and build it again",
            function.name
        )))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.given.is_empty()
    }

    /// The rules whose values are secrets, which no value stands in.
    pub fn rules(&self) -> &[Inject] {
        &self.rules
    }

    /// The hosts, as they were written.
    pub fn hosts(&self) -> BTreeSet<String> {
        self.rules.iter().map(host_of).chain(self.given.keys().cloned()).collect()
    }

    /// The names of the headers, by host.
    pub fn names(&self) -> BTreeMap<String, Vec<String>> {
        let names = |headers: &BTreeMap<String, String>| headers.keys().cloned().collect();
        let given = self.given.iter().map(|(host, headers)| (host.clone(), names(headers)));
        let mut all: BTreeMap<String, Vec<String>> = given.collect();
        for rule in &self.rules {
            all.entry(host_of(rule)).or_default().push(rule.header().as_str().to_owned());
        }
        all
    }

    /// Where the proxy takes connections for these, and may connect if the sandbox may.
    pub fn destinations(&self) -> Vec<EgressRule> {
        let given = self.given.keys().filter_map(|host| destination(host).ok());
        // Whether an address in a private network may be reached, the sandbox' rules say.
        let of_rules = self.rules.iter().filter_map(|rule| {
            format!("{}{}:{}", private(rule.name()), rule.name(), rule.port()).parse().ok()
        });
        given.chain(of_rules).collect()
    }

    /// Whether some are for a host, whatever the request.
    pub fn has(&self, host: &str, port: u16) -> bool {
        self.rules.iter().any(|rule| rule.name() == host && rule.port() == port)
            || self.of_host(host, port).is_some()
    }

    /// Those that a client has given for a host. One name goes before `*.`, and a longer name
    /// before a shorter one; no two are added together.
    fn of_host(&self, host: &str, port: u16) -> Option<&BTreeMap<String, String>> {
        let with_port = |name: &str| match port {
            PORT => self.given.get(name).or_else(|| self.given.get(&format!("{name}:{port}"))),
            _ => self.given.get(&format!("{name}:{port}")),
        };
        let dots = host.match_indices('.').map(|(at, _)| format!("*{}", &host[at..]));
        with_port(host).or_else(|| dots.into_iter().find_map(|pattern| with_port(&pattern)))
    }

    /// Headers that a client has given for a host.
    pub fn values(&self, host: &str, port: u16) -> Vec<(HeaderName, HeaderValue)> {
        let headers = self.of_host(host, port).into_iter().flatten();
        let parsed = headers.filter_map(|(name, value)| {
            let mut value = HeaderValue::from_str(value).ok()?;
            value.set_sensitive(true);
            Some((name.parse().ok()?, value))
        });
        parsed.collect()
    }
}

/// The host of a rule, as it is written.
fn host_of(rule: &Inject) -> String {
    match rule.port() {
        PORT => rule.name().to_owned(),
        port => format!("{}:{port}", rule.name()),
    }
}

/// The prefix of a name that may be in a private network.
fn private(name: &str) -> &'static str {
    if name == thaw_abi::network::HOST_NAME { "" } else { "private:" }
}

fn destination(host: &str) -> Result<EgressRule, WrongHeaders> {
    let wrong = || {
        WrongHeaders::Wrong(format!(
            "`{}` is not a host for headers; write a name such as api.example.com or \
             *.example.com, and a port behind it if it is not {PORT}",
            host.escape_default()
        ))
    };
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) => (name, port.parse::<u16>().map_err(|_| wrong())?),
        None => (host, PORT),
    };
    let below = name.strip_prefix("*.").unwrap_or(name);
    let is_name = !below.is_empty()
        && below.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'))
        && below.parse::<std::net::IpAddr>().is_err();
    if !is_name || matches!(port, 0 | 80) {
        return Err(wrong());
    }
    format!("{}{name}:{port}", private(name)).parse().map_err(|_| wrong())
}

/// Checks the headers for a host; their bytes. No error repeats a value.
fn check_headers(host: &str, headers: &BTreeMap<String, String>) -> Result<usize, WrongHeaders> {
    let host = host.escape_default();
    if headers.len() > HEADERS_MAX {
        return Err(WrongHeaders::Wrong(format!(
            "`{host}` has {} headers, and at most {HEADERS_MAX} are added; give fewer",
            headers.len()
        )));
    }
    let mut bytes = 0;
    for (name, value) in headers {
        check_header(name).map_err(WrongHeaders::Wrong)?;
        let name_text = name.escape_default();
        if value.contains("${e2b.") {
            return Err(WrongHeaders::Missing(format!(
                "the value of `{name_text}` for `{host}` has a placeholder, and this node mints \
                 no tokens; give the value itself"
            )));
        }
        if value.len() > VALUE_MAX || HeaderValue::from_str(value).is_err() {
            return Err(WrongHeaders::Wrong(format!(
                "the value of `{name_text}` for `{host}` is no header's, or has more than \
                 {VALUE_MAX} bytes"
            )));
        }
        bytes += name.len() + value.len();
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(hosts: &[(&str, &[(&str, &str)])]) -> Result<OwnHeaders, WrongHeaders> {
        let text = |text: &str| text.to_owned();
        OwnHeaders::given(hosts.iter().map(|(host, headers)| {
            let headers = headers.iter().map(|(name, value)| (text(name), text(value)));
            (text(host), headers.collect())
        }))
    }

    fn function(egress: &str) -> FunctionConfig {
        let text = format!(
            "name = \"f\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 81\n\
             [secrets]\nnames = [\"seen\"]\n{egress}"
        );
        FunctionConfig::parse("thaw.toml".as_ref(), &text).unwrap()
    }

    fn value(own: &OwnHeaders, host: &str, port: u16) -> Option<String> {
        let values = own.values(host, port);
        values.first().map(|(_, value)| value.to_str().unwrap().to_owned())
    }

    #[test]
    fn one_name_goes_before_a_star_and_a_longer_one_before_a_shorter_one() {
        let own = given(&[
            ("API.example.com", &[("X-Key", "exact")]),
            ("*.example.com", &[("X-Key", "below")]),
            ("*.deep.example.com", &[("X-Key", "deep")]),
            ("a.example:8443", &[("X-Key", "port")]),
        ])
        .unwrap();
        for (host, port, expected) in [
            ("api.example.com", 443, Some("exact")),
            ("b.example.com", 443, Some("below")),
            ("a.b.deep.example.com", 443, Some("deep")),
            ("example.com", 443, None),
            ("api.example.com", 8443, None),
            ("a.example", 8443, Some("port")),
            ("a.example", 443, None),
            ("badexample.com", 443, None),
        ] {
            assert_eq!(value(&own, host, port).as_deref(), expected, "{host}:{port}");
            assert_eq!(own.has(host, port), expected.is_some(), "{host}:{port}");
        }
        let rules: Vec<String> = own.destinations().iter().map(ToString::to_string).collect();
        assert!(rules.contains(&"private:*.example.com:443".to_owned()), "{rules:?}");
        assert!(own.values("api.example.com", 443)[0].1.is_sensitive());
        let again: OwnHeaders =
            serde_json::from_value(serde_json::to_value(&own).unwrap()).unwrap();
        assert_eq!(again, own);
        assert!(!format!("{own:?}").contains("exact"));
    }

    #[test]
    fn what_is_no_host_or_header_is_refused_and_no_value_is_told() {
        for host in ["*", "", "*.", "1.2.3.4", "10.0.0.0/8", "a b", "a.example:80", "a:b", "a*.b"] {
            let error = given(&[(host, &[])]).unwrap_err();
            assert!(matches!(&error, WrongHeaders::Wrong(why) if why.contains("not a host")));
        }
        let header = |name: &str, value: &str| given(&[("a.example", &[(name, value)])]);
        for (name, value) in [("Host", "hidden"), ("a b", "hidden"), ("X", "hidden\r\nY: z")] {
            let error = header(name, value).unwrap_err().to_string();
            assert!(!error.contains("hidden"), "{error}");
        }
        assert!(matches!(
            header("X", "Bearer ${e2b.identity.tokens.a}"),
            Err(WrongHeaders::Missing(_))
        ));
        assert!(header("X", &"x".repeat(VALUE_MAX)).is_ok());
        assert!(header("X", &"x".repeat(VALUE_MAX + 1)).is_err());
        let hosts = |count: usize| {
            OwnHeaders::given((0..count).map(|n| (format!("h{n}.example"), BTreeMap::new())))
        };
        assert!(hosts(HOSTS_MAX).is_ok() && hosts(HOSTS_MAX + 1).is_err());
        let names: Vec<String> = (0..=HEADERS_MAX).map(|n| format!("X-{n}")).collect();
        let many: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "v")).collect();
        assert!(given(&[("a.example", &many)]).is_err());
    }

    #[test]
    fn a_function_has_to_trust_the_authority() {
        let own = given(&[("a.example", &[("X", "v")])]).unwrap();
        let why = own.check_trust(&function("")).unwrap_err().to_string();
        assert!(why.contains("`authority = true`") && why.contains("build it again"), "{why}");
        own.check_trust(&function("[egress]\nauthority = true\n")).unwrap();
        let constrained = "[[egress.inject]]\nhost = \"a.example\"\nheader = \"X-Key\"\n\
                           value = \"${key}\"\n";
        own.check_trust(&function(constrained)).unwrap();
        let below = given(&[("*.a.example", &[("X", "v")])]).unwrap();
        assert!(below.check_trust(&function(constrained)).is_err());
    }

    #[test]
    fn secrets_that_the_program_reads_are_none() {
        let rule = |secret: &str| -> Inject {
            serde_json::from_value(serde_json::json!({
                "host": "a.example", "header": "X-Key", "value": format!("${{{secret}}}")
            }))
            .unwrap()
        };
        let function = function("[egress]\nauthority = true\n");
        let own = OwnHeaders::of_secrets(vec![rule("hidden")], &function).unwrap();
        assert!(own.has("a.example", 443) && !own.has("b.example", 443));
        assert_eq!(own.destinations()[0].to_string(), "private:a.example:443");
        let error = OwnHeaders::of_secrets(vec![rule("seen")], &function).unwrap_err();
        assert!(error.to_string().contains("`seen`"));
        let many = vec![rule("hidden"); thaw_home::config::INJECT_MAX + 1];
        assert!(OwnHeaders::of_secrets(many, &function).is_err());
    }
}
