//! `gateway.toml`: what the operator of the node says of its clients.

use super::access::Format;
use super::auth::{Auth, AuthTable};
use super::certificates::{CertificateTable, Certificates};
use super::cors::Cors;
use super::file::{GatewayFileError, Reader, Stamp, bounded};
use super::rate::Rate;
use super::routes::{Asked, RouteTable, Routes, Target};
use super::{Granted, Unauthorized};
use hyper::header::HeaderMap;
use rustls::ServerConfig;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use thaw_home::config::{ByteSize, FunctionName, from_toml};
use toml::Spanned;

/// Most addresses for TLS.
const LISTENERS_MAX: usize = 16;

/// The file, as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct GatewayFile {
    by_name: bool,
    access_log: Option<AccessLogTable>,
    tls: Option<TlsTable>,
    route: Vec<RouteTable>,
    function: BTreeMap<Spanned<FunctionName>, PolicyTable>,
}

impl Default for GatewayFile {
    fn default() -> Self {
        Self {
            by_name: true,
            access_log: None,
            tls: None,
            route: Vec::new(),
            function: BTreeMap::new(),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AccessLogTable {
    format: Format,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsTable {
    listen: Vec<SocketAddr>,
    #[serde(default)]
    certificate: Vec<CertificateTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyTable {
    auth: Option<AuthTable>,
    cors: Option<Cors>,
    rate: Option<Rate>,
    body_max: Option<ByteSize>,
}

/// What the gateway goes by.
#[derive(Debug)]
pub struct Rules {
    by_name: bool,
    pub(super) access_log: Option<Format>,
    tls: Option<Tls>,
    routes: Routes,
    policies: HashMap<FunctionName, Arc<Policy>>,
    /// The files that were read, but for the first.
    files: Vec<Stamp>,
    /// All functions that are named, each where that is first.
    mentions: Vec<Mention>,
}

/// A function that the file names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mention {
    /// Its name.
    pub function: FunctionName,
    /// The line of the file.
    pub line: usize,
    by: MentionedBy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MentionedBy {
    Route,
    Policy,
}

impl Mention {
    /// One sentence for the operator: there is no such function.
    pub fn of_nobody(&self) -> String {
        let Self { function, line, by } = self;
        let said = match by {
            MentionedBy::Route => format!("the route leads to `{function}`"),
            MentionedBy::Policy => format!("[function.{function}] is about `{function}`"),
        };
        format!(
            "line {line}: {said}, and there is no function of that name yet; `thaw list` shows those there are"
        )
    }
}

/// Where and as whom TLS is spoken.
#[derive(Clone, Debug)]
pub(crate) struct Tls {
    pub listen: Vec<SocketAddr>,
    pub certificates: Arc<Certificates>,
    pub server: Arc<ServerConfig>,
}

/// What is said of the clients of one function. Each of its requests is looked at, so that
/// none of its connections is handed over.
pub(crate) struct Policy {
    auth: Option<Auth>,
    pub cors: Option<Cors>,
    pub rate: Option<Rate>,
    /// Bytes of the body of a request.
    pub body_max: Option<u64>,
}

impl std::fmt::Debug for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Policy").finish_non_exhaustive()
    }
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            by_name: true,
            access_log: None,
            tls: None,
            routes: Routes::default(),
            policies: HashMap::new(),
            files: Vec::new(),
            mentions: Vec::new(),
        }
    }
}

impl Rules {
    /// Reads the rules of a node; a file that is missing says nothing.
    ///
    /// # Errors
    /// The file, or one that it names, is there and not usable.
    pub fn load(path: &Path) -> Result<Self, GatewayFileError> {
        let failed = |error| GatewayFileError::Read { path: path.to_owned(), error };
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(failed(error)),
        };
        let bytes = bounded(&file).map_err(failed)?;
        let text = String::from_utf8(bytes)
            .map_err(|error| failed(std::io::Error::new(ErrorKind::InvalidData, error)))?;
        Self::parse(path, &text)
    }

    /// Parses the text of the file at `path`, and reads the files that it names.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(path: &Path, text: &str) -> Result<Self, GatewayFileError> {
        let file: GatewayFile = from_toml(path, text)?;
        let mut reader = Reader::new(path.parent().unwrap_or_else(|| Path::new(".")));
        let mentions = file.mentions(text);
        let rules = file.check(&mut reader);
        let mut rules =
            rules.map_err(|reason| GatewayFileError::Rule { path: path.to_owned(), reason })?;
        rules.files = reader.stamps;
        rules.mentions = mentions;
        Ok(rules)
    }

    /// Whether they say nothing of any request.
    pub(super) fn is_usual(&self) -> bool {
        self.by_name
            && self.access_log.is_none()
            && self.tls.is_none()
            && self.routes.is_empty()
            && self.policies.is_empty()
    }

    /// All functions that they name, each where that is first.
    pub fn mentions(&self) -> &[Mention] {
        &self.mentions
    }

    /// The files that they name.
    pub(super) fn files(&self) -> &[Stamp] {
        &self.files
    }

    /// Where and as whom TLS is spoken.
    pub(crate) fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// The addresses at which it is spoken.
    pub fn tls_addresses(&self) -> &[SocketAddr] {
        self.tls.as_ref().map_or(&[], |tls| &tls.listen)
    }

    pub(crate) fn policy(&self, function: &FunctionName) -> Option<Arc<Policy>> {
        self.policies.get(function).cloned()
    }

    /// Where a request goes. The function that its host names is `named`.
    pub(crate) fn target(&self, asked: Asked<'_>, named: Option<&str>) -> Target {
        match self.routes.find(asked) {
            Target::None if self.by_name => {
                let name = named.and_then(|name| name.parse().ok());
                name.map_or(Target::None, Target::all_of)
            }
            target => target,
        }
    }
}

impl GatewayFile {
    /// All functions that the file, whose text this is, names, each where that is first.
    fn mentions(&self, text: &str) -> Vec<Mention> {
        let routes = self.route.iter().filter_map(RouteTable::leads_to);
        let routes = routes.map(|name| (MentionedBy::Route, name));
        let policies = self.function.keys().map(|name| (MentionedBy::Policy, name));
        let mut all: Vec<_> = routes.chain(policies).collect();
        all.sort_by_key(|(_, name)| name.span().start);
        let (mut line, mut from) = (1, 0);
        let mut known = HashSet::new();
        let mut mentions = Vec::new();
        for (by, name) in all {
            let start = name.span().start;
            line += text[from..start].matches('\n').count();
            from = start;
            let function = name.get_ref().clone();
            if known.insert(function.clone()) {
                mentions.push(Mention { function, line, by });
            }
        }
        mentions
    }

    fn check(self, reader: &mut Reader) -> Result<Rules, String> {
        let tls = self.tls.map(|table| table.load(reader)).transpose()?;
        let mut policies = HashMap::new();
        for (name, table) in self.function {
            let name = name.into_inner();
            let policy = table.load(reader).map_err(|why| format!("[function.{name}]: {why}"))?;
            policies.insert(name, Arc::new(policy));
        }
        Ok(Rules {
            by_name: self.by_name,
            access_log: self.access_log.map(|table| table.format),
            tls,
            routes: Routes::new(self.route)?,
            policies,
            files: Vec::new(),
            mentions: Vec::new(),
        })
    }
}

impl TlsTable {
    fn load(self, reader: &mut Reader) -> Result<Tls, String> {
        if self.listen.is_empty() || self.listen.len() > LISTENERS_MAX {
            return Err(format!("`listen` of [tls] is 1 to {LISTENERS_MAX} addresses"));
        }
        let certificates = Arc::new(Certificates::load(&self.certificate, reader)?);
        let mut server = certificates.server();
        // A connection of another protocol is left to the next daemon with its keys.
        server.enable_secret_extraction = true;
        Ok(Tls { listen: self.listen, certificates, server: Arc::new(server) })
    }
}

impl PolicyTable {
    fn load(self, reader: &mut Reader) -> Result<Policy, String> {
        if let Some(cors) = &self.cors {
            cors.check()?;
        }
        if let Some(rate) = &self.rate {
            rate.check()?;
        }
        Ok(Policy {
            auth: self.auth.map(|table| table.load(reader)).transpose()?,
            cors: self.cors,
            rate: self.rate,
            body_max: self.body_max.map(ByteSize::bytes),
        })
    }
}

impl Policy {
    /// Whether it says something that only requests of HTTP can keep.
    pub fn is_about_http(&self) -> bool {
        self.auth.is_some() || self.cors.is_some() || self.body_max.is_some()
    }

    /// Judges what a client shows; `None`: it need not show anything.
    pub fn authenticate(&self, headers: &HeaderMap) -> Option<Result<Granted, Unauthorized>> {
        self.auth.as_ref().map(|auth| auth.check(headers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Rules, String> {
        Rules::parse("gateway.toml".as_ref(), text).map_err(|error| error.to_string())
    }

    #[test]
    fn without_a_file_functions_are_reached_by_name() {
        let rules = Rules::load("/nowhere/gateway.toml".as_ref()).unwrap();
        assert!(rules.is_usual());
        let asked = Asked { host: Some("f.example"), target: "/", is_tls: false };
        let f = Target::all_of("f".parse().unwrap());
        assert_eq!(rules.target(asked, Some("f")), f);
        assert_eq!(rules.target(asked, Some("not a name")), Target::None);
        let by_route = parse("by_name = false").unwrap();
        assert!(!by_route.is_usual());
        assert_eq!(by_route.target(asked, Some("f")), Target::None);
    }

    #[test]
    fn a_function_has_its_own_policy() {
        let rules = parse(
            "[function.f]\nbody_max = \"1MiB\"\nrate = { requests = 5, per = \"1s\" }\n\
             cors = { origins = [\"*\"] }",
        )
        .unwrap();
        let policy = rules.policy(&"f".parse().unwrap()).unwrap();
        assert_eq!(policy.body_max, Some(1 << 20));
        assert!(policy.rate.is_some() && policy.cors.is_some());
        assert!(policy.authenticate(&HeaderMap::new()).is_none());
        assert!(rules.policy(&"g".parse().unwrap()).is_none());
    }

    #[test]
    fn functions_are_known_with_the_line_that_names_them_first() {
        let rules = parse(
            "by_name = false\n[function.a]\nbody_max = \"1KiB\"\n[[route]]\nhost = \"x\"\n\
             function = \"b\"\n[[route]]\nfunction = \"a\"\n[[route]]\nhost = \"y\"\n\
             redirect = \"https://x\"\n\n[[route]]\nhost = \"z\"\nfunction = \"b\"",
        )
        .unwrap();
        let of_nobody: Vec<_> = rules.mentions().iter().map(Mention::of_nobody).collect();
        assert_eq!(of_nobody.len(), 2);
        assert!(of_nobody[0].starts_with("line 2: [function.a] is about `a`, and there is no"));
        assert!(of_nobody[1].starts_with("line 6: the route leads to `b`, and there is no"));
        assert!(parse("").unwrap().mentions().is_empty());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, why) in [
            ("rout = 1", "did you mean `route`"),
            ("[function.f]\nbodymax = 1", "unknown key `bodymax`"),
            ("[access_log]\nformat = \"xml\"", "xml"),
            ("[tls]\nlisten = []", "`listen` of [tls]"),
            ("[tls]\nlisten = [\"127.0.0.1:0\"]", "[[tls.certificate]]"),
            (
                "[tls]\nlisten = [\"127.0.0.1:0\"]\ncertificate = [{ chain = \"/a\", key = \"b\" }]",
                "is not below $THAW_HOME",
            ),
            ("[function.f]\nauth = {}", "[function.f]: `auth` names nobody"),
            ("[function.f]\ncors = { origins = [\"x\"] }", "no origin"),
            ("[function.f]\nrate = { requests = 1, per = \"0s\" }", "`per`"),
            ("[function.F]", "F"),
            ("[[route]]\npath = \"x\"\nfunction = \"f\"", "is a prefix"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
