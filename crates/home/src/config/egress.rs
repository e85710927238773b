//! `[egress]`: destinations of outgoing connections.

use super::inject::Inject;
use super::name::FunctionName;
use super::quantity::FromText;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use thaw_sandbox::{EgressPolicy, EgressQuota, Interceptor};

pub use thaw_sandbox::EgressRuleError;

/// Destinations that a function may connect to, such as `api.example.com:443`,
/// `*.example.com:443`, `private:db.internal:5432`, `10.0.0.0/8:5432`, `192.0.2.1:53/udp`,
/// `host.thaw.internal:6379` or `*`; see [`thaw_sandbox::EgressRule`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EgressRule(thaw_sandbox::EgressRule);

impl EgressRule {
    /// The rule itself.
    pub fn rule(&self) -> &thaw_sandbox::EgressRule {
        &self.0
    }
}

impl From<thaw_sandbox::EgressRule> for EgressRule {
    fn from(rule: thaw_sandbox::EgressRule) -> Self {
        Self(rule)
    }
}

impl FromStr for EgressRule {
    type Err = EgressRuleError;

    fn from_str(text: &str) -> Result<Self, EgressRuleError> {
        text.parse().map(Self)
    }
}

impl fmt::Display for EgressRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<'de> Deserialize<'de> for EgressRule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(FromText("a destination", std::marker::PhantomData))
    }
}

impl Serialize for EgressRule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// `[egress]`: destinations that the function may connect to; everything else is
/// denied.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Egress {
    /// Connections there that the function has when it is frozen are reset in its
    /// copies.
    pub allow: Vec<EgressRule>,
    /// Connections there are made again when a copy first uses them.
    pub reconnect: Vec<EgressRule>,
    /// Whether its programs trust the node's authority for all hosts, so that a sandbox of it can
    /// have headers of its own added.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub authority: bool,
    /// Headers that the node adds to requests to these hosts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub inject: Vec<Inject>,
}

impl Egress {
    /// Whether no outgoing connection is allowed.
    pub fn is_closed(&self) -> bool {
        self.allow.is_empty() && self.reconnect.is_empty() && self.inject.is_empty()
    }

    /// Whether the node's authority is among the certificates of its files.
    pub fn adds_authority(&self) -> bool {
        self.authority || !self.inject.is_empty()
    }

    /// The policy that says so. Nothing is injected: connections to those hosts are refused.
    pub fn policy(&self) -> Arc<EgressPolicy> {
        Arc::new(self.rules(None))
    }

    /// The same for the function of this name, of several that share bounds; `proxy` takes
    /// connections to the hosts of `inject`.
    pub fn policy_within(
        &self,
        function: &FunctionName,
        quota: &Arc<EgressQuota>,
        proxy: Option<Arc<dyn Interceptor>>,
    ) -> Arc<EgressPolicy> {
        Arc::new(self.rules(proxy).within(quota.clone()).counted_as(function.as_str()))
    }

    fn rules(&self, proxy: Option<Arc<dyn Interceptor>>) -> EgressPolicy {
        let rules = |rules: &[EgressRule]| rules.iter().map(|rule| rule.0.clone()).collect();
        let injected = self.inject.iter().map(|inject| inject.rule().clone()).collect();
        EgressPolicy::new(rules(&self.allow))
            .reconnecting(rules(&self.reconnect))
            .intercepting(injected, proxy)
    }
}
