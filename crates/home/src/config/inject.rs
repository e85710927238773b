//! `[[egress.inject]]`: headers with secrets that the node adds to requests, and that the sandbox
//! never sees.

use hyper::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use thaw_store::Name;

/// Most rules of a function.
pub const INJECT_MAX: usize = 32;
/// Most methods, and most paths, of a rule.
const CONDITIONS_MAX: usize = 32;
/// Most bytes of a path, and of the text of a value.
const TEXT_MAX: usize = 1024;
/// The port of a host that names none.
const PORT: u16 = 443;

/// Fields that say how a message is framed or where it goes.
const NOT_INJECTED: [HeaderName; 9] = [
    HOST,
    CONNECTION,
    CONTENT_LENGTH,
    TRANSFER_ENCODING,
    UPGRADE,
    TE,
    TRAILER,
    EXPECT,
    HeaderName::from_static("keep-alive"),
];

/// One `[[egress.inject]]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "InjectTable", into = "InjectTable")]
pub struct Inject {
    /// As it was written.
    written: InjectTable,
    /// Where the requests go: one name and one port.
    rule: thaw_sandbox::EgressRule,
    name: String,
    port: u16,
    header: HeaderName,
    value: Template,
}

/// The same as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "InjectRule")]
#[serde(deny_unknown_fields)]
struct InjectTable {
    host: String,
    header: String,
    value: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    methods: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    paths: Vec<String>,
}

/// A text with the names of secrets in it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Secret(Name),
}

impl Inject {
    /// The rule by which the node connects.
    pub fn rule(&self) -> &thaw_sandbox::EgressRule {
        &self.rule
    }

    /// The host's name, in lower case.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The port of the host, on which it speaks TLS.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The header that is replaced.
    pub fn header(&self) -> &HeaderName {
        &self.header
    }

    /// The secrets in its value.
    pub fn secrets(&self) -> impl Iterator<Item = &Name> {
        self.value.0.iter().filter_map(|part| match part {
            Part::Secret(name) => Some(name),
            Part::Text(_) => None,
        })
    }

    /// The header's value; `read` gives a secret's.
    ///
    /// # Errors
    /// Those of `read`, or that a secret has bytes which no header may have.
    pub fn value<E: From<String>>(
        &self,
        mut read: impl FnMut(&Name) -> Result<Vec<u8>, E>,
    ) -> Result<HeaderValue, E> {
        let mut bytes = Vec::new();
        for part in &self.value.0 {
            match part {
                Part::Text(text) => bytes.extend_from_slice(text.as_bytes()),
                Part::Secret(name) => {
                    let value = read(name)?;
                    if HeaderValue::from_bytes(&value).is_err() {
                        return Err(E::from(format!(
                            "secret `{name}` has a line end or another byte that no header may have"
                        )));
                    }
                    bytes.extend(value);
                }
            }
        }
        let value = HeaderValue::from_bytes(&bytes);
        let mut value = value.map_err(|_| E::from("its value is no header's".to_owned()))?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// Whether a request has the method and the path of the rule. A path that a server may read
    /// as another one is none of them.
    pub fn fits(&self, method: &str, path: &str) -> bool {
        let Self { written: InjectTable { methods, paths, .. }, .. } = self;
        let is_path = |pattern: &String| match pattern.strip_suffix('*') {
            Some(start) => path.starts_with(start),
            None => path == pattern,
        };
        (methods.is_empty() || methods.iter().any(|own| own == method))
            && (paths.is_empty() || is_plain(path) && paths.iter().any(is_path))
    }
}

/// Whether all servers read a path the same way.
fn is_plain(path: &str) -> bool {
    let is_odd = |part: &str| matches!(part, "." | "..");
    path.is_ascii()
        && !path.contains("//")
        && !path.contains(['%', '\\', ';'])
        && !path.split('/').any(is_odd)
}

/// Checks all rules of a function together.
///
/// # Errors
/// One sentence.
pub fn check(rules: &[Inject], in_sandbox: &[Name]) -> Result<(), String> {
    if rules.len() > INJECT_MAX {
        return Err(format!("a function can have {INJECT_MAX} [[egress.inject]] at most"));
    }
    let seen = rules.iter().flat_map(Inject::secrets).find(|name| in_sandbox.contains(name));
    match seen {
        Some(name) => Err(format!(
            "secret `{name}` is in `names` of [secrets] and in [[egress.inject]]; remove it from \
             `names`, by which the program could read it"
        )),
        None => Ok(()),
    }
}

impl TryFrom<InjectTable> for Inject {
    type Error = String;

    fn try_from(written: InjectTable) -> Result<Self, String> {
        let (rule, name, port) = destination(&written.host)?;
        let header = check_header(&written.header)?;
        let value = Template::parse(&written.value)?;
        check_conditions(&written)?;
        Ok(Self { rule, name, port, header, value, written })
    }
}

/// The name of a header that may be added.
///
/// # Errors
/// One sentence: it is none.
pub fn check_header(name: &str) -> Result<HeaderName, String> {
    let header: HeaderName = name
        .parse()
        .map_err(|_| format!("`{}` is not the name of a header", name.escape_default()))?;
    if NOT_INJECTED.contains(&header) || header.as_str().starts_with("proxy-") {
        return Err(format!("`{header}` is not for rules: it says how a request is sent"));
    }
    Ok(header)
}

impl From<Inject> for InjectTable {
    fn from(inject: Inject) -> Self {
        inject.written
    }
}

/// `name`, `name:port`, or either with `private:` before it.
fn destination(host: &str) -> Result<(thaw_sandbox::EgressRule, String, u16), String> {
    let wrong = || {
        format!(
            "`{}` is not one host; write its name, such as api.example.com, and a port behind it \
             if it is not {PORT}",
            host.escape_default()
        )
    };
    let bare = host.strip_prefix("private:").unwrap_or(host);
    let text = if bare.contains(':') { host.to_owned() } else { format!("{host}:{PORT}") };
    let rule: thaw_sandbox::EgressRule = text.parse().map_err(|_| wrong())?;
    let (name, port) = rule.name_and_port().ok_or_else(wrong)?;
    let (name, port) = (name.to_owned(), port);
    if port == 80 {
        return Err(format!(
            "`{}` names port 80, where no TLS is spoken; secrets are sent over TLS only",
            host.escape_default()
        ));
    }
    Ok((rule, name, port))
}

fn check_conditions(InjectTable { methods, paths, .. }: &InjectTable) -> Result<(), String> {
    if methods.len().max(paths.len()) > CONDITIONS_MAX {
        return Err(format!("a rule can have {CONDITIONS_MAX} methods and paths at most"));
    }
    let is_method = |text: &&String| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-')
    };
    if let Some(wrong) = methods.iter().find(|text| !is_method(text)) {
        return Err(format!("`{}` is not a method, such as \"POST\"", wrong.escape_default()));
    }
    let is_path = |text: &&String| {
        let path = text.strip_suffix('*').unwrap_or(text);
        path.starts_with('/')
            && !path.contains(['*', '?', '#'])
            && is_plain(path)
            && text.len() <= TEXT_MAX
    };
    match paths.iter().find(|text| !is_path(text)) {
        None => Ok(()),
        Some(wrong) => Err(format!(
            "`{}` is not a path; write one without `..`, `//`, `%`, `;` and a query, such as \
             \"/v1/models\", or \"/v1/*\" for all that begin with \"/v1/\"",
            wrong.escape_default()
        )),
    }
}

impl Template {
    fn parse(text: &str) -> Result<Self, String> {
        // It may be a secret that was written here by mistake: no error repeats it.
        let wrong =
            |why: &str| Err(format!("`value` {why}; write a text such as \"Bearer ${{api-key}}\""));
        if text.len() > TEXT_MAX || HeaderValue::from_str(text).is_err() {
            return wrong("is not a header's, or too long");
        }
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some((before, behind)) = rest.split_once("${") {
            let Some((name, after)) = behind.split_once('}') else {
                return wrong("has a `${` without `}`");
            };
            let Ok(name) = Name::new(name) else {
                return wrong("has something between `${` and `}` that names no secret");
            };
            parts.extend((!before.is_empty()).then(|| Part::Text(before.to_owned())));
            parts.push(Part::Secret(name));
            rest = after;
        }
        if parts.is_empty() {
            return wrong("names no secret, and a text that is written out is none");
        }
        parts.extend((!rest.is_empty()).then(|| Part::Text(rest.to_owned())));
        Ok(Self(parts))
    }
}

impl fmt::Display for Inject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.rule, self.header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConfigError, FunctionConfig};

    fn parse(keys: &str) -> Result<Vec<Inject>, ConfigError> {
        let text = format!(
            "name = \"f\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 81\n\
             [secrets]\nnames = [\"seen\"]\n[[egress.inject]]\n{keys}"
        );
        FunctionConfig::parse("thaw.toml".as_ref(), &text).map(|config| config.egress.inject)
    }

    fn one(keys: &str) -> Inject {
        parse(keys).unwrap().remove(0)
    }

    const PLAIN: &str = "header = \"Authorization\"\nvalue = \"Bearer ${key}\"\n";

    #[test]
    fn rules_say_where_and_what() {
        let rule = one(&format!("host = \"API.example.com\"\n{PLAIN}"));
        assert_eq!((rule.name(), rule.port()), ("api.example.com", 443));
        assert_eq!(rule.secrets().map(Name::as_str).collect::<Vec<_>>(), ["key"]);
        let value: Result<_, String> = rule.value(|name| {
            assert_eq!(name.as_str(), "key");
            Ok(b"abc".to_vec())
        });
        let value = value.unwrap();
        assert!(value == "Bearer abc" && value.is_sensitive());
        let other = one(&format!("host = \"private:api.internal:8443\"\n{PLAIN}"));
        assert_eq!((other.name(), other.port()), ("api.internal", 8443));
        let again: Inject = serde_json::from_value(serde_json::to_value(&other).unwrap()).unwrap();
        assert_eq!(again, other);
    }

    #[test]
    fn secrets_that_are_no_header_are_refused_without_being_told() {
        let rule = one(&format!("host = \"a.example\"\n{PLAIN}"));
        let error = rule.value::<String>(|_| Ok(b"hidden\r\nX: y".to_vec())).unwrap_err();
        assert!(error.contains("`key`") && !error.contains("hidden"), "{error}");
    }

    #[test]
    fn methods_and_paths_are_looked_at() {
        let rule = one(&format!(
            "host = \"a.example\"\n{PLAIN}methods = [\"POST\"]\npaths = [\"/v1/*\", \"/me\"]\n"
        ));
        for (method, path, fits) in [
            ("POST", "/v1/chat", true),
            ("POST", "/me", true),
            ("GET", "/me", false),
            ("POST", "/me/other", false),
            ("POST", "/v2", false),
            ("POST", "/v1/../admin", false),
            ("POST", "/v1/%2e%2e/admin", false),
            ("POST", "/v1//admin", false),
            ("POST", "/v1/..;/admin", false),
            ("POST", "/v1/\\admin", false),
        ] {
            assert_eq!(rule.fits(method, path), fits, "{method} {path}");
        }
        assert!(one(&format!("host = \"a.example\"\n{PLAIN}")).fits("PUT", "/x/../y"));
    }

    #[test]
    fn wrong_rules_are_refused_and_say_what_to_write() {
        let refused = |keys: &str| parse(keys).unwrap_err().to_string();
        for host in
            ["*", "*.example.com", "10.0.0.1", "a.example:*", "a.example:1-2", "", "a:443/udp"]
        {
            let error = refused(&format!("host = \"{host}\"\n{PLAIN}"));
            assert!(error.contains("is not one host"), "{host}: {error}");
        }
        assert!(refused(&format!("host = \"a.example:80\"\n{PLAIN}")).contains("TLS only"));
        for (header, value, says) in [
            ("Host", "${key}", "how a request is sent"),
            ("Proxy-Authorization", "${key}", "how a request is sent"),
            ("a b", "${key}", "not the name of a header"),
            ("X-Key", "abcdef", "names no secret"),
            ("X-Key", "${key", "without `}`"),
            ("X-Key", "${a b}", "names no secret"),
            ("X-Key", "${key}\\n", "is not a header's"),
            ("X-Key", "${seen}", "remove it from `names`"),
        ] {
            let keys = format!("host = \"a.example\"\nheader = \"{header}\"\nvalue = \"{value}\"");
            let error = refused(&keys);
            assert!(error.contains(says) && !error.contains("abcdef\""), "{keys}: {error}");
        }
        for more in [
            "methods = [\"post\"]",
            "paths = [\"v1\"]",
            "paths = [\"/a/../b\"]",
            "paths = [\"/*/b\"]",
        ] {
            refused(&format!("host = \"a.example\"\n{PLAIN}{more}\n"));
        }
        let many = format!("host = \"a.example\"\n{PLAIN}[[egress.inject]]\n").repeat(INJECT_MAX);
        let error = refused(&format!("{many}host = \"a.example\"\n{PLAIN}"));
        assert!(error.contains("32 [[egress.inject]] at most"), "{error}");
    }
}
