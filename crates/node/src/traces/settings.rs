//! The collector, and the standard variables: "OpenTelemetry Protocol Exporter" and "SDK
//! Environment Variables" of the OpenTelemetry specification. A variable that is empty is not set.

use super::sampler::Sampler;
use hyper::Uri;
use hyper::header::{HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// The port of OTLP over HTTP.
const PORT: u16 = 4318;
/// Largest queue, in records.
const QUEUE_MAX: usize = 65_536;
/// Most fields, and attributes of the resource.
const PAIRS_MAX: usize = 64;

/// Where traces go, and which.
#[derive(Clone)]
pub struct TraceSettings {
    pub(super) address: SocketAddr,
    /// `Host` of its requests.
    pub(super) authority: String,
    pub(super) path: String,
    /// Secrets may be among them.
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    pub(super) timeout: Duration,
    /// Attributes of what sends.
    pub(super) resource: Vec<(String, String)>,
    pub(super) sampler: Sampler,
    /// Most records that wait.
    pub(super) queue_max: usize,
    /// Most records that are sent at once.
    pub(super) batch_max: usize,
    /// How long a batch may wait to be full.
    pub(super) delay: Duration,
}

impl std::fmt::Debug for TraceSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { address, path, sampler, .. } = self;
        write!(f, "TraceSettings {{ {address}{path}, {sampler:?} }}")
    }
}

/// Looks a name up.
pub type Resolve<'a> = &'a dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>>;

impl TraceSettings {
    /// From `thaw serve --otlp` and the environment; `None`: nobody wants traces.
    ///
    /// Names are looked up here and not again: a daemon sees no `/etc/resolv.conf`.
    ///
    /// # Errors
    /// One sentence that says what is wrong with which of them.
    pub fn from_environment(url: Option<&str>) -> Result<Option<Self>, String> {
        let variable = |name: &str| std::env::var(name).ok();
        Self::read(url, &variable, &|host, port| Ok((host, port).to_socket_addrs()?.collect()))
    }

    pub(super) fn read(
        url: Option<&str>,
        variable: &dyn Fn(&str) -> Option<String>,
        resolve: Resolve<'_>,
    ) -> Result<Option<Self>, String> {
        let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        // Those of traces go before those of all signals.
        let signal = |name: &str| {
            let of_traces = variable(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}"));
            of_traces.or_else(|| variable(&format!("OTEL_EXPORTER_OTLP_{name}")))
        };
        let Some((text, is_base)) = endpoint(url, &variable) else { return Ok(None) };
        check_exporter(&variable, &signal)?;
        if variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
            || variable("OTEL_TRACES_EXPORTER").as_deref() == Some("none")
        {
            return Ok(None);
        }
        let target = Target::parse(&text, is_base)?;
        let sampler = match variable("OTEL_TRACES_SAMPLER") {
            Some(name) => Sampler::named(&name, variable("OTEL_TRACES_SAMPLER_ARG").as_deref())?,
            None => Sampler::default(),
        };
        let number = |name: &str, usual: usize, most: usize| match variable(name) {
            Some(text) => within(name, &text, most),
            None => Ok(usual),
        };
        let timeout = match signal("TIMEOUT") {
            Some(text) => within("OTEL_EXPORTER_OTLP_TIMEOUT", &text, 60_000)?,
            None => 10_000,
        };
        let queue_max = number("OTEL_BSP_MAX_QUEUE_SIZE", 2048, QUEUE_MAX)?;
        let batch_max = number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512, QUEUE_MAX)?.min(queue_max);
        let delay = number("OTEL_BSP_SCHEDULE_DELAY", 5000, 60_000)?;
        let headers = headers(signal("HEADERS").as_deref().unwrap_or_default())?;
        let attributes = variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
        let resource = resource(variable("OTEL_SERVICE_NAME"), &attributes)?;
        Ok(Some(Self {
            address: target.resolve(resolve)?,
            authority: target.authority,
            path: target.path,
            headers,
            timeout: Duration::from_millis(timeout as u64),
            resource,
            sampler,
            queue_max,
            batch_max,
            delay: Duration::from_millis(delay as u64),
        }))
    }
}

/// The address, and whether `v1/traces` belongs behind it.
fn endpoint(
    url: Option<&str>,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Option<(String, bool)> {
    if let Some(url) = url {
        return Some((url.to_owned(), true));
    }
    let of_traces = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").map(|text| (text, false));
    of_traces.or_else(|| variable("OTEL_EXPORTER_OTLP_ENDPOINT").map(|text| (text, true)))
}

/// Refuses what this exporter does not do.
fn check_exporter(
    variable: &dyn Fn(&str) -> Option<String>,
    signal: &dyn Fn(&str) -> Option<String>,
) -> Result<(), String> {
    let known = [
        ("OTEL_TRACES_EXPORTER", variable("OTEL_TRACES_EXPORTER"), &["otlp", "none"][..]),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", signal("PROTOCOL"), &["http/protobuf"][..]),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", signal("COMPRESSION"), &["none"][..]),
    ];
    for (name, value, allowed) in known {
        if let Some(value) = value.filter(|value| !allowed.contains(&value.as_str())) {
            return Err(format!(
                "{name} is `{value}`, which Thaw does not know; give {} or unset it",
                allowed.join(" or ")
            ));
        }
    }
    Ok(())
}

/// A number from 1 to `most`.
fn within(name: &str, text: &str, most: usize) -> Result<usize, String> {
    let number = text.trim().parse().ok().filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| format!("{name} is `{text}`; give a whole number from 1 to {most}"))
}

/// What a URL names.
struct Target {
    host: String,
    port: u16,
    authority: String,
    path: String,
}

impl Target {
    fn parse(text: &str, is_base: bool) -> Result<Self, String> {
        let wrong = |why: &str| {
            format!(
                "the collector of traces, `{text}`, {why}; give a URL such as http://127.0.0.1:{PORT}"
            )
        };
        let url: Uri = text.trim().parse().map_err(|_| wrong("is no URL"))?;
        match url.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(wrong(
                    "is to be reached over TLS, for which the daemon has no certificates; run a \
                     collector on this machine that passes spans on",
                ));
            }
            _ => return Err(wrong("does not begin with http://")),
        }
        let (Some(host), Some(authority)) = (url.host(), url.authority()) else {
            return Err(wrong("names no host"));
        };
        if authority.as_str().contains('@') || url.query().is_some() {
            return Err(wrong("has a user or a query"));
        }
        let path = match is_base {
            true => format!("{}/v1/traces", url.path().trim_end_matches('/')),
            false => url.path().to_owned(),
        };
        Ok(Self {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: url.port_u16().unwrap_or(PORT),
            authority: authority.as_str().to_owned(),
            path,
        })
    }

    fn resolve(&self, resolve: Resolve<'_>) -> Result<SocketAddr, String> {
        if let Ok(address) = self.host.parse::<IpAddr>() {
            return Ok((address, self.port).into());
        }
        let found = resolve(&self.host, self.port);
        let found = found.map(|all| all.into_iter().next());
        found.ok().flatten().ok_or_else(|| {
            format!(
                "the collector of traces, `{}`, has no address; give its IP address in the URL",
                self.host
            )
        })
    }
}

/// Pairs `key=value` with commas between them, values in percent-encoding (W3C Baggage).
fn pairs(text: &str, name: &str) -> Result<Vec<(String, String)>, String> {
    let wrong =
        || format!("{name} is not of the form key=value,key=value with {PAIRS_MAX} at most");
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let (key, value) = part.split_once('=').ok_or_else(wrong)?;
        let value = percent_decode_str(value.trim()).decode_utf8().map_err(|_| wrong())?;
        Ok((key.trim().to_owned(), value.into_owned()))
    };
    let pairs: Vec<_> = parts.map(pair).collect::<Result<_, String>>()?;
    if pairs.len() > PAIRS_MAX { Err(wrong()) } else { Ok(pairs) }
}

fn headers(text: &str) -> Result<Vec<(HeaderName, HeaderValue)>, String> {
    let name = "OTEL_EXPORTER_OTLP_HEADERS";
    let field = |(key, value): (String, String)| {
        let parsed = (HeaderName::try_from(&key).ok(), HeaderValue::try_from(value).ok());
        match parsed {
            (Some(name), Some(mut value)) => {
                value.set_sensitive(true);
                Ok((name, value))
            }
            // The value may be a secret.
            _ => Err(format!("{name}: `{key}` is no header field; remove it")),
        }
    };
    pairs(text, name)?.into_iter().map(field).collect()
}

/// What sends: `OTEL_SERVICE_NAME` goes before an attribute.
fn resource(service: Option<String>, attributes: &str) -> Result<Vec<(String, String)>, String> {
    let mut resource = pairs(attributes, "OTEL_RESOURCE_ATTRIBUTES")?;
    let key = "service.name";
    if let Some(service) = service {
        resource.retain(|(name, _)| name != key);
        resource.insert(0, (key.to_owned(), service));
    } else if !resource.iter().any(|(name, _)| name == key) {
        resource.insert(0, (key.to_owned(), "thaw".to_owned()));
    }
    let own = [("service.version", env!("CARGO_PKG_VERSION").to_owned())];
    for (name, value) in own {
        if !resource.iter().any(|(known, _)| known == name) {
            resource.push((name.to_owned(), value));
        }
    }
    Ok(resource)
}
