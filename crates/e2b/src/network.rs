//! `network` of E2B's API: where a sandbox may connect to, as rules of the node.
//!
//! `allowOut` goes before `denyOut`, and what neither names is allowed as far as the node allows
//! it: by `egress` of e2b.toml, or else by `[egress]` of the function.

use super::E2b;
use super::control::{Client, Posted, answer, parse, running};
use super::problem::{Kind, Problem};
use axum::Extension;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv6Addr;
use thaw_abi::network::HOST_NAME;
use thaw_node::inject::{OwnHeaders, WrongHeaders};
use thaw_node::remote::egress::{ClientEgress, RULES_MAX};
use thaw_sandbox::EgressRule;

/// All addresses, as the SDKs write them.
const ALL_TRAFFIC: [&str; 2] = ["0.0.0.0/0", "::/0"];

/// What a request says of the network of a sandbox.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NetworkRequest {
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    pub allow_public_traffic: Option<bool>,
    dns_servers: Option<Vec<String>>,
    egress_proxy: Option<Value>,
    rules: Option<BTreeMap<String, Vec<Rule>>>,
    mask_request_host: Option<String>,
    https_ports: Option<Vec<u16>>,
    #[serde(rename = "allow_internet_access")]
    allow_internet_access: Option<bool>,
}

/// What is done to requests to a host.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Rule {
    transform: Option<Transform>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Transform {
    headers: Option<BTreeMap<String, String>>,
}

impl fmt::Debug for Transform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The values are nobody's business.
        f.write_str("Transform")
    }
}

/// What a client has asked of a sandbox's network, as it is shown to it again. Of headers it has the
/// names: their values are told to nobody.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AskedNetwork {
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    /// Names of headers by host.
    headers: BTreeMap<String, Vec<String>>,
    allow_internet_access: Option<bool>,
}

/// What stands in the place of a header's value.
const HIDDEN: &str = "***";

impl AskedNetwork {
    /// Adds it to what is shown of a sandbox, as E2B's `network` and `allowInternetAccess`.
    pub fn show_in(&self, shown: &mut Value, is_open: bool) {
        let rule = |names: &Vec<String>| {
            let headers: BTreeMap<_, _> = names.iter().map(|name| (name, HIDDEN)).collect();
            json!([{"transform": {"headers": headers}}])
        };
        let mut network = json!({"allowPublicTraffic": is_open});
        if let Some(allowed) = &self.allow_out {
            network["allowOut"] = json!(allowed);
        }
        if let Some(denied) = &self.deny_out {
            network["denyOut"] = json!(denied);
        }
        if !self.headers.is_empty() {
            let rules: BTreeMap<_, _> =
                self.headers.iter().map(|(host, names)| (host, rule(names))).collect();
            network["rules"] = json!(rules);
        }
        shown["network"] = network;
        shown["allowInternetAccess"] = json!(self.allow_internet_access);
    }
}

impl NetworkRequest {
    /// What of it is shown to the client again; `headers` as [`NetworkRequest::egress`] has them.
    pub fn asked(&self, headers: &OwnHeaders, has_internet: Option<bool>) -> AskedNetwork {
        AskedNetwork {
            allow_out: self.allow_out.clone(),
            deny_out: self.deny_out.clone(),
            headers: headers.names(),
            allow_internet_access: has_internet.or(self.allow_internet_access),
        }
    }

    /// The rules that are asked for. `has_internet` is `allow_internet_access` of a request that
    /// makes a sandbox.
    ///
    /// # Errors
    /// Something of it is not there, or is no rule.
    pub fn egress(&self, has_internet: Option<bool>) -> Result<ClientEgress, Problem> {
        self.check()?;
        let (allowed, denied) = (list(&self.allow_out), list(&self.deny_out));
        let mut exempt = Vec::new();
        for text in allowed {
            exempt.extend(allowing(text)?);
        }
        let mut deny = Vec::new();
        for text in denied {
            deny.extend(denying(text)?);
        }
        if exempt.len() + deny.len() > RULES_MAX {
            return Err(Problem::invalid(format!(
                "`allowOut` and `denyOut` have {} entries, and at most {} count; write networks or \
                 *.domain in place of several",
                allowed.len() + denied.len(),
                RULES_MAX / 2
            )));
        }
        let is_shut = has_internet == Some(false)
            || self.allow_internet_access == Some(false)
            || denied.iter().any(|text| ALL_TRAFFIC[0] == text);
        Ok(ClientEgress { exempt, deny, rest: !is_shut, headers: self.headers()? })
    }

    /// The headers that are added: of several rules for a host all, and of one header the last.
    fn headers(&self) -> Result<OwnHeaders, Problem> {
        let hosts = self.rules.iter().flatten().map(|(host, rules)| {
            let transforms = rules.iter().filter_map(|rule| rule.transform.as_ref());
            let headers = transforms.flat_map(|transform| transform.headers.iter().flatten());
            let lower = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.clone()));
            (host.clone(), lower.collect::<BTreeMap<_, _>>())
        });
        // Where nothing is added, requests need not go by the proxy.
        OwnHeaders::given(hosts.filter(|(_, headers)| !headers.is_empty())).map_err(|error| {
            let kind = match &error {
                WrongHeaders::Wrong(_) => Kind::Invalid,
                WrongHeaders::Missing(_) => Kind::Unsupported,
            };
            Problem::new(kind, format!("`rules`: {error}"))
        })
    }

    /// Refuses what would be left out silently otherwise.
    fn check(&self) -> Result<(), Problem> {
        let lacks = [
            (is_given(&self.egress_proxy), "`egressProxy`: there is no way by a proxy"),
            (
                !list(&self.dns_servers).is_empty(),
                "`dnsServers`: names are looked up by the node, for all names that may be reached",
            ),
            (
                self.mask_request_host.is_some(),
                "`maskRequestHost`: hosts are passed on as they are",
            ),
            (
                self.https_ports.as_ref().is_some_and(|ports| !ports.is_empty()),
                "`httpsPorts`: ports of sandboxes are spoken to without TLS",
            ),
        ];
        match lacks.iter().find(|(is_asked, _)| *is_asked) {
            Some((_, what)) => Err(Problem::unsupported(format!("{what}; leave it out"))),
            None => Ok(()),
        }
    }
}

fn list(texts: &Option<Vec<String>>) -> &[String] {
    texts.as_deref().unwrap_or_default()
}

fn is_given(value: &Option<Value>) -> bool {
    match value {
        None | Some(Value::Null) => false,
        Some(Value::Object(entries)) => !entries.is_empty(),
        Some(_) => true,
    }
}

/// The rules of one entry of `allowOut`: an address, a network or a name, with all ports.
fn allowing(text: &str) -> Result<Vec<EgressRule>, Problem> {
    if ALL_TRAFFIC.contains(&text) {
        // All that the node allows, names included.
        return rules("private:*", &[""], str::parse);
    }
    let target = target(text);
    // Addresses in private networks, if the node allows those.
    let may_be_private = is_name(text) && !text.eq_ignore_ascii_case(HOST_NAME);
    let target = if may_be_private { format!("private:{target}") } else { target };
    rules(&target, &[":*", ":*/udp"], str::parse)
        .map_err(|_| wrong("allowOut", text, "an address, a network, a name or *.domain"))
}

/// The rules of one entry of `denyOut`: an address or a network.
fn denying(text: &str) -> Result<Vec<EgressRule>, Problem> {
    if text == ALL_TRAFFIC[0] {
        return rules("*", &[""], str::parse);
    }
    rules(&target(text), &[":*", ":*/udp"], EgressRule::denying)
        .map_err(|_| wrong("denyOut", text, "an address or a network"))
}

fn wrong(field: &str, text: &str, form: &str) -> Problem {
    Problem::invalid(format!("`{}` of `{field}` is not {form}", text.escape_default()))
}

fn rules(
    target: &str,
    tails: &[&str],
    parse: impl Fn(&str) -> Result<EgressRule, thaw_sandbox::EgressRuleError>,
) -> Result<Vec<EgressRule>, Problem> {
    let parsed = tails.iter().map(|tail| parse(&format!("{target}{tail}")));
    parsed.collect::<Result<_, _>>().map_err(Problem::invalid)
}

/// The target of a rule: IPv6 has brackets there.
fn target(text: &str) -> String {
    let address = text.split('/').next().unwrap_or_default();
    if address.parse::<Ipv6Addr>().is_ok() { format!("[{text}]") } else { text.to_owned() }
}

fn is_name(text: &str) -> bool {
    let is_address = |c: char| c.is_ascii_digit() || matches!(c, '.' | '/' | ':');
    !text.contains(':') && !text.chars().all(is_address)
}

/// Replaces the rules of a sandbox that runs.
pub(super) async fn update((State(e2b), Extension(client), Path(id), body): Posted) -> Response {
    let changed = thaw_node::to_its_end::to_its_end(async move {
        let request: NetworkRequest = parse(&body)?;
        change(&e2b, &client, &id, &request).await
    });
    answer(StatusCode::NO_CONTENT, changed.await)
}

async fn change(
    e2b: &E2b,
    client: &Client,
    id: &str,
    request: &NetworkRequest,
) -> Result<Value, Problem> {
    let egress = request.egress(None)?;
    let shown = request.asked(&egress.headers, None);
    running(e2b, client, id)?;
    // What is shown is what was set last.
    let _turn = e2b.network_turn.lock().await;
    e2b.backend.set_egress(id, egress).await?;
    e2b.records.set_network(id, shown);
    Ok(Value::Null)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn egress(request: Value, has_internet: Option<bool>) -> Result<ClientEgress, String> {
        let request: NetworkRequest = serde_json::from_value(request).unwrap();
        request.egress(has_internet).map_err(|problem| problem.to_string())
    }

    fn texts(rules: &[EgressRule]) -> Vec<String> {
        rules.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn entries_are_rules_for_all_ports() {
        let asked = egress(
            json!({"allowOut": ["1.1.1.1", "10.0.0.0/8", "*.example.com", "2001:db8::1"],
                   "denyOut": ["8.8.8.0/24"]}),
            Some(true),
        )
        .unwrap();
        assert_eq!(
            texts(&asked.exempt),
            [
                "1.1.1.1:*",
                "1.1.1.1:*/udp",
                "10.0.0.0/8:*",
                "10.0.0.0/8:*/udp",
                "private:*.example.com:*",
                "private:*.example.com:*/udp",
                "[2001:db8::1]:*",
                "[2001:db8::1]:*/udp"
            ]
        );
        assert_eq!(texts(&asked.deny), ["8.8.8.0/24:*", "8.8.8.0/24:*/udp"]);
        assert!(asked.rest);
    }

    #[test]
    fn no_internet_and_all_traffic_denied_are_the_same() {
        for (request, has_internet) in [
            (json!({}), Some(false)),
            (json!({"denyOut": ["0.0.0.0/0"]}), None),
            (json!({"allow_internet_access": false}), None),
        ] {
            let asked = egress(request, has_internet).unwrap();
            assert!(!asked.rest && asked.exempt.is_empty());
        }
        assert!(egress(json!({}), None).unwrap().rest);
        let all = egress(json!({"allowOut": ["0.0.0.0/0"]}), Some(false)).unwrap();
        assert_eq!(texts(&all.exempt), ["private:*"]);
    }

    #[test]
    fn what_is_no_rule_or_is_missing_is_refused() {
        let refused = |request| egress(request, None).unwrap_err();
        assert!(refused(json!({"denyOut": ["example.com"]})).contains("`denyOut`"));
        for entry in ["", "a b", "1.2.3", "10.0.0.0/33", "a:1", "127.0.0.1", "localhost"] {
            let error = refused(json!({"allowOut": [entry]}));
            assert!(error.contains("`allowOut`"), "{entry}: {error}");
        }
        for (key, value) in [
            ("rules", json!({"a b": [{"transform": {"headers": {"X": "v"}}}]})),
            ("egressProxy", json!({"address": "a:1"})),
            ("dnsServers", json!(["1.1.1.1"])),
            ("httpsPorts", json!([443])),
        ] {
            assert!(refused(json!({key: value})).contains(key), "{key}");
        }
    }

    #[test]
    fn rules_are_headers_by_host() {
        let asked = egress(
            json!({"rules": {
                "api.example.com": [
                    {"transform": {"headers": {"X-Key": "first", "Authorization": "a"}}},
                    {},
                    {"transform": {"headers": {"x-key": "last"}}}
                ],
                "*.example.com": [{"transform": {"headers": {"X-Key": "below"}}}],
                "none.example": []
            }}),
            None,
        )
        .unwrap();
        let names = asked.headers.names();
        assert_eq!(names["api.example.com"], ["authorization", "x-key"]);
        assert_eq!(names.len(), 2);
        let values = asked.headers.values("api.example.com", 443);
        assert!(values.iter().any(|(name, value)| name == "x-key" && value == "last"));
        // They allow nothing.
        assert!(asked.exempt.is_empty() && asked.rest);
        let placeholder = json!({"rules": {"a.example": [
            {"transform": {"headers": {"X": "${e2b.identity.tokens.a}"}}}
        ]}});
        assert!(egress(placeholder, None).unwrap_err().contains("placeholder"));
        let other = json!({"rules": {"a.example": [{"transform": {"body": "x"}}]}});
        assert!(serde_json::from_value::<NetworkRequest>(other).is_err());
    }

    #[test]
    fn what_was_asked_is_shown_without_values_of_headers() {
        let request: NetworkRequest = serde_json::from_value(json!({
            "allowOut": ["1.1.1.1"],
            "rules": {"API.example.com": [{"transform": {"headers": {"X-Key": "secret"}}}]}
        }))
        .unwrap();
        let headers = request.egress(None).unwrap().headers;
        let mut shown = json!({});
        request.asked(&headers, Some(false)).show_in(&mut shown, true);
        assert_eq!(
            shown,
            json!({
                "allowInternetAccess": false,
                "network": {
                    "allowPublicTraffic": true,
                    "allowOut": ["1.1.1.1"],
                    "rules": {"api.example.com": [{"transform": {"headers": {"x-key": "***"}}}]}
                }
            })
        );
        let mut nothing = json!({});
        AskedNetwork::default().show_in(&mut nothing, false);
        assert_eq!(
            nothing,
            json!({"allowInternetAccess": null, "network": {"allowPublicTraffic": false}})
        );
    }

    #[test]
    fn entries_have_a_bound() {
        let entries = |count| json!({"allowOut": vec!["1.1.1.1"; count]});
        assert!(egress(entries(RULES_MAX / 2), None).is_ok());
        assert!(egress(entries(RULES_MAX / 2 + 1), None).unwrap_err().contains("at most 128"));
    }
}
