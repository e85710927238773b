//! Which function a request is for, by its host and its path.

use serde::Deserialize;
use std::collections::HashMap;
use thaw_home::config::FunctionName;
use toml::Spanned;

/// Most routes of a node.
pub(super) const ROUTES_MAX: usize = 10_000;

/// What a route goes by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    /// Without a port, in lower case; `None`: the request says none, or an IP address.
    pub host: Option<&'a str>,
    /// With the query.
    pub target: &'a str,
    pub is_tls: bool,
}

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// To a function, perhaps without the first bytes of its path; `all_paths` if each path of
    /// that host leads there by the same route.
    Function { name: FunctionName, strip: usize, all_paths: bool },
    /// The client is told to go there.
    Redirect { location: String, status: u16 },
    /// No route matches.
    None,
}

impl Target {
    /// To a function that gets all paths as they are.
    pub fn all_of(name: FunctionName) -> Self {
        Self::Function { name, strip: 0, all_paths: true }
    }
}

/// One `[[route]]` of the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RouteTable {
    host: Option<String>,
    #[serde(default = "root")]
    path: String,
    scheme: Option<Scheme>,
    function: Option<Spanned<FunctionName>>,
    #[serde(default)]
    strip: bool,
    redirect: Option<String>,
    #[serde(default = "permanent")]
    status: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Scheme {
    Http,
    Https,
}

fn root() -> String {
    "/".to_owned()
}

fn permanent() -> u16 {
    308
}

/// The routes of a node. Those of one host are sorted: longer paths first.
#[derive(Clone, Debug, Default)]
pub(super) struct Routes {
    exact: HashMap<String, Vec<Route>>,
    /// By what follows `*.`.
    wildcard: HashMap<String, Vec<Route>>,
    any: Vec<Route>,
}

#[derive(Clone, Debug)]
struct Route {
    /// Begins with `/` and does not end with it, but for the root, which is empty.
    prefix: String,
    scheme: Option<Scheme>,
    action: Action,
}

#[derive(Clone, Debug)]
enum Action {
    Function { name: FunctionName, strip: bool },
    Redirect { to: String, status: u16 },
}

impl Routes {
    /// Checks the routes of the file.
    ///
    /// # Errors
    /// One sentence.
    pub fn new(tables: Vec<RouteTable>) -> Result<Self, String> {
        if tables.len() > ROUTES_MAX {
            return Err(format!("there are more than {ROUTES_MAX} routes; write fewer"));
        }
        let mut routes = Self::default();
        for table in tables {
            let host = table.host.as_deref().map(str::to_ascii_lowercase);
            let line = match host.as_deref() {
                None => &mut routes.any,
                Some(host) => {
                    check_host(host)?;
                    match host.strip_prefix("*.") {
                        Some(rest) => routes.wildcard.entry(rest.to_owned()).or_default(),
                        None => routes.exact.entry(host.to_owned()).or_default(),
                    }
                }
            };
            let of =
                format!("the route of {}{}", host.as_deref().unwrap_or("any host"), table.path);
            let route = table.route().map_err(|why| format!("{of}: {why}"))?;
            let is_same = |one: &Route| one.prefix == route.prefix && one.scheme == route.scheme;
            if line.iter().any(is_same) {
                return Err(format!("{of} is there twice; remove one"));
            }
            line.push(route);
        }
        let lines = routes.exact.values_mut().chain(routes.wildcard.values_mut());
        for line in lines.chain([&mut routes.any]) {
            // Of equal paths the one that asks for a scheme goes first.
            line.sort_by_key(|route| {
                (std::cmp::Reverse(route.prefix.len()), route.scheme.is_none())
            });
        }
        Ok(routes)
    }

    pub fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.wildcard.is_empty() && self.any.is_empty()
    }

    /// The way of a request: by its host, by the longest wildcard that fits, or by a route for
    /// any host; of each, by the longest path.
    pub fn find(&self, asked: Asked<'_>) -> Target {
        let path = asked.target.split(['?', '#']).next().unwrap_or_default();
        let fits = |route: &&Route| route.fits(path, asked.is_tls);
        let exact = asked.host.and_then(|host| self.exact.get(host));
        let found = exact
            .into_iter()
            .chain(asked.host.into_iter().flat_map(|host| self.wildcards(host)))
            .chain([&self.any])
            .find_map(|line| line.iter().find(fits));
        found.map_or(Target::None, |route| route.target(asked))
    }

    /// The wildcards for a host, longest first.
    fn wildcards<'a>(&'a self, host: &'a str) -> impl Iterator<Item = &'a Vec<Route>> {
        let ends = host.match_indices('.').map(|(at, _)| &host[at + 1..]);
        ends.filter_map(|end| self.wildcard.get(end))
    }
}

impl Route {
    fn fits(&self, path: &str, is_tls: bool) -> bool {
        let is_scheme = self.scheme.is_none_or(|scheme| (scheme == Scheme::Https) == is_tls);
        let rest = path.strip_prefix(self.prefix.as_str());
        is_scheme && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    fn target(&self, asked: Asked<'_>) -> Target {
        match &self.action {
            Action::Function { name, strip } => {
                let strip = if *strip { self.prefix.len() } else { 0 };
                Target::Function { name: name.clone(), strip, all_paths: self.prefix.is_empty() }
            }
            Action::Redirect { to, status } => Target::Redirect {
                location: to
                    .replace("{host}", asked.host.unwrap_or_default())
                    .replace("{path}", asked.target),
                status: *status,
            },
        }
    }
}

impl RouteTable {
    /// The function that it leads to, with the place of the name in the file.
    pub fn leads_to(&self) -> Option<&Spanned<FunctionName>> {
        self.function.as_ref()
    }

    fn route(self) -> Result<Route, String> {
        let Self { path, scheme, function, strip, redirect, status, .. } = self;
        if !path.starts_with('/') || path.contains(['?', '#', ' ', '%']) {
            return Err(
                "`path` is a prefix such as \"/v1\", without `?`, `#`, `%` and blanks".to_owned()
            );
        }
        let action = match (function, redirect) {
            (Some(name), None) => Action::Function { name: name.into_inner(), strip },
            (None, Some(to)) => Action::Redirect { to: check_location(to)?, status },
            _ => return Err("it has either `function` or `redirect`".to_owned()),
        };
        if !matches!(status, 301 | 302 | 303 | 307 | 308) {
            return Err(format!("{status} is no redirect; use 301, 302, 303, 307 or 308"));
        }
        let prefix = path.strip_suffix('/').unwrap_or(&path).to_owned();
        Ok(Route { prefix, scheme, action })
    }
}

fn check_location(to: String) -> Result<String, String> {
    let is_plain = to.bytes().all(|byte| byte.is_ascii_graphic());
    match is_plain && (to.starts_with("http://") || to.starts_with("https://")) {
        true => Ok(to),
        false => Err("`redirect` is an address such as \"https://{host}{path}\"".to_owned()),
    }
}

/// A name of the DNS, perhaps with `*` as its first label.
pub(super) fn check_host(host: &str) -> Result<(), String> {
    let name = host.strip_prefix("*.").unwrap_or(host);
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    match name.len() <= 253 && name.split('.').all(is_label) {
        true => Ok(()),
        false => Err(format!(
            "`{host}` is no host; write a name such as \"api.example.com\" or \"*.example.com\""
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct File {
        route: Vec<RouteTable>,
    }

    fn routes(text: &str) -> Result<Routes, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        Routes::new(file.route)
    }

    fn find(routes: &Routes, host: &str, target: &str, is_tls: bool) -> String {
        let host = Some(host).filter(|host| !host.is_empty());
        match routes.find(Asked { host, target, is_tls }) {
            Target::Function { name, strip, .. } => format!("{name} {}", &target[strip..]),
            Target::Redirect { location, status } => format!("{status} {location}"),
            Target::None => "none".to_owned(),
        }
    }

    #[test]
    fn the_closest_route_is_taken() {
        let routes = routes(
            "[[route]]\nhost = \"Shop.example\"\nfunction = \"shop\"
             [[route]]\nhost = \"shop.example\"\npath = \"/api/\"\nfunction = \"api\"\nstrip = true
             [[route]]\nhost = \"*.example\"\nfunction = \"rest\"
             [[route]]\nhost = \"*.b.example\"\nfunction = \"b\"
             [[route]]\npath = \"/health\"\nfunction = \"health\"",
        )
        .unwrap();
        for (host, target, expected) in [
            ("shop.example", "/x?y", "shop /x?y"),
            ("shop.example", "/api", "api "),
            ("shop.example", "/api/v1?q=/api", "api /v1?q=/api"),
            ("shop.example", "/apis", "shop /apis"),
            ("shop.example", "/api?x", "api ?x"),
            ("a.example", "/", "rest /"),
            ("b.example", "/", "rest /"),
            ("a.b.example", "/", "b /"),
            ("c.a.b.example", "/", "b /"),
            ("example", "/", "none"),
            ("other", "/health/x", "health /health/x"),
            ("", "/health", "health /health"),
            ("", "/", "none"),
        ] {
            assert_eq!(find(&routes, host, target, false), expected, "{host}{target}");
        }
    }

    #[test]
    fn redirects_keep_what_they_are_told_to() {
        let routes = routes(
            "[[route]]\nscheme = \"http\"\nredirect = \"https://{host}{path}\"
             [[route]]\nfunction = \"f\"
             [[route]]\nhost = \"old\"\nredirect = \"https://new/\"\nstatus = 302",
        )
        .unwrap();
        assert_eq!(find(&routes, "a.b", "/x?y", false), "308 https://a.b/x?y");
        assert_eq!(find(&routes, "a.b", "/x?y", true), "f /x?y");
        assert_eq!(find(&routes, "old", "/x", true), "302 https://new/");
    }

    #[test]
    fn wrong_routes_are_named() {
        for (text, why) in [
            ("path = \"v1\"\nfunction = \"f\"", "is a prefix"),
            ("function = \"f\"\nredirect = \"https://x\"", "either"),
            ("path = \"/\"", "either"),
            ("redirect = \"javascript:x\"", "is an address"),
            ("redirect = \"https://x\"\nstatus = 200", "no redirect"),
            ("host = \"a b\"\nfunction = \"f\"", "no host"),
            ("host = \"a.*.b\"\nfunction = \"f\"", "no host"),
            ("function = \"f\"\n[[route]]\nfunction = \"g\"", "twice"),
            ("functions = \"f\"", "unknown field"),
        ] {
            let error = routes(&format!("[[route]]\n{text}")).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        let many = "[[route]]\nfunction = \"f\"\n".repeat(ROUTES_MAX + 1);
        assert!(routes(&many).unwrap_err().contains("more than"));
    }
}
