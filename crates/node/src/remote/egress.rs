//! Where sandboxes connect to: rules of their own, which may change while they run.
//!
//! Each sandbox has a policy of its own ([`EgressPolicy::of_sandbox`]), which begins with the rules
//! of its function. The policy outlives the process of an instance that sleeps, and a file keeps
//! the rules for the next daemon: an instance is never served under other rules meanwhile.

use super::own_file::{OwnFile, Subject};
use crate::inject::OwnHeaders;
use crate::to_its_end::to_its_end;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::UNIX_EPOCH;
use thaw_home::config::{EgressRule, Inject};
use thaw_sandbox::{EgressBytes, EgressOutcome, EgressPolicy, EgressRules};
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::spawn_blocking;

/// Most rules of a sandbox.
pub const RULES_MAX: usize = 256;
/// The file.
const ABOUT: Subject = Subject {
    file: "sandbox-egress.json",
    of_all: "where sandboxes may connect to",
    of_one: "where the sandbox may connect to",
};

/// Where a sandbox may connect to, as the API takes it: rules as in `[egress]` of thaw.toml.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxEgress {
    /// Destinations that it may connect to, where `deny` does not say otherwise.
    #[schemars(with = "Vec<String>")]
    pub allow: Vec<EgressRule>,
    /// The same; copies of the sandbox make connections there again.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<String>")]
    pub reconnect: Vec<EgressRule>,
    /// Addresses, networks and `*` that it may not connect to.
    #[schemars(with = "Vec<String>")]
    pub deny: Vec<EgressRule>,
    /// Destinations that it may connect to, whatever `deny` says.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<String>")]
    pub exempt: Vec<EgressRule>,
}

impl SandboxEgress {
    /// The rules that this means.
    ///
    /// # Errors
    /// One sentence: there are too many, or one cannot deny.
    pub fn rules(&self) -> Result<EgressRules, String> {
        let rules = self.all_rules()?;
        match rules.len() {
            0..=RULES_MAX => Ok(rules),
            len => Err(format!(
                "a sandbox has at most {RULES_MAX} rules, and these are {len}; write networks or \
                 *.domain in place of several"
            )),
        }
    }

    /// The same however many there are: those of a function are the operator's.
    fn all_rules(&self) -> Result<EgressRules, String> {
        let plain = |rules: &[EgressRule]| rules.iter().map(EgressRule::rule).cloned().collect();
        let deny =
            self.deny.iter().map(|rule| thaw_sandbox::EgressRule::denying(&rule.to_string()));
        Ok(EgressRules {
            allow: plain(&self.allow),
            reconnect: plain(&self.reconnect),
            deny: deny.collect::<Result<_, _>>().map_err(|error| error.to_string())?,
            exempt: plain(&self.exempt),
        })
    }
}

impl From<&EgressRules> for SandboxEgress {
    fn from(rules: &EgressRules) -> Self {
        let all = |rules: &[thaw_sandbox::EgressRule]| {
            rules.iter().cloned().map(EgressRule::from).collect()
        };
        Self {
            allow: all(&rules.allow),
            reconnect: all(&rules.reconnect),
            deny: all(&rules.deny),
            exempt: all(&rules.exempt),
        }
    }
}

/// What is wanted of the connections of a new sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EgressWish {
    /// The rules of its function.
    #[default]
    Function,
    /// These rules.
    Rules(EgressRules),
    /// Of a client who may not have more than others allow.
    Within {
        /// What it may have at most; none: what the function may.
        most: Option<EgressRules>,
        /// What it asks for.
        asked: ClientEgress,
    },
}

/// What a client asks for that may not have more than others allow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientEgress {
    /// Allowed, whatever is denied.
    pub exempt: Vec<thaw_sandbox::EgressRule>,
    /// Denied.
    pub deny: Vec<thaw_sandbox::EgressRule>,
    /// Whether all is allowed that the client may have and that is not denied.
    pub rest: bool,
    /// Headers that are added to its requests.
    pub headers: OwnHeaders,
}

impl ClientEgress {
    /// All that the client may have.
    pub fn all() -> Self {
        Self { rest: true, ..Self::default() }
    }

    /// The rules within `most`.
    fn rules(self, most: &EgressRules) -> (EgressRules, OwnHeaders) {
        let base = if self.rest { most.clone() } else { EgressRules::default() };
        let deny = base.deny.into_iter().chain(self.deny).collect();
        (EgressRules { deny, exempt: self.exempt, ..base }, self.headers)
    }
}

/// Headers that are wanted for the requests of a sandbox, as the API takes them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxInject {
    /// As in `[[egress.inject]]` of thaw.toml: the values are secrets of the function.
    pub rules: Vec<Inject>,
}

/// Has a sandbox get these headers of its own, in place of others.
fn tell(policy: &EgressPolicy, headers: &OwnHeaders) {
    policy.intercept_own(headers.destinations(), Arc::new(headers.clone()));
}

/// The headers of its own that a sandbox gets.
fn headers_of(policy: &EgressPolicy) -> OwnHeaders {
    let told = policy.told().and_then(|told| told.downcast::<OwnHeaders>().ok());
    told.map(|headers| (*headers).clone()).unwrap_or_default()
}

impl EgressWish {
    /// The policy of a sandbox of the function whose policy is given.
    pub(crate) fn policy(self, function: &EgressPolicy) -> Arc<EgressPolicy> {
        Arc::new(match self {
            Self::Function => function.of_sandbox(function.first_rules(), None),
            Self::Rules(rules) => function.of_sandbox(rules, None),
            Self::Within { most, asked } => {
                let most = most.unwrap_or_else(|| function.first_rules());
                let (rules, headers) = asked.rules(&most);
                let policy = function.of_sandbox(rules, Some(most));
                tell(&policy, &headers);
                policy
            }
        })
    }
}

/// Where a sandbox may connect to, what it has reached and what it was denied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EgressInfo {
    /// Its rules.
    #[serde(flatten)]
    pub rules: SandboxEgress,
    /// What its rules may allow at most, where whoever made it may not have more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<SandboxEgress>,
    /// Names of the headers that the node adds to its requests besides those of its function, by
    /// host. Nobody is told the values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub inject: BTreeMap<String, Vec<String>>,
    /// Connections, and sockets for datagrams, that were made since this daemon knows it.
    pub reached: u64,
    /// Destinations and names that it was denied.
    pub denied: u64,
    /// The latest of both, the oldest first.
    pub log: Vec<EgressEvent>,
}

/// Something that a sandbox wanted to reach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EgressEvent {
    /// When it last did, in milliseconds since 1970.
    pub last_ms: u64,
    /// Whether it was denied.
    pub denied: bool,
    /// The destination, or a name that it wanted to look up.
    pub to: String,
    /// The name that the destination was looked up by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// How often.
    pub count: u64,
}

fn info(policy: &EgressPolicy) -> EgressInfo {
    let report = policy.report();
    let event = |entry: thaw_sandbox::EgressEntry| EgressEvent {
        last_ms: entry
            .last
            .duration_since(UNIX_EPOCH)
            .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        denied: entry.outcome == EgressOutcome::Denied,
        to: entry.to,
        name: entry.name,
        count: entry.count,
    };
    EgressInfo {
        rules: SandboxEgress::from(&*policy.rules()),
        within: policy.most().map(SandboxEgress::from),
        inject: headers_of(policy).names(),
        reached: report.reached,
        denied: report.denied,
        log: report.entries.into_iter().map(event).collect(),
    }
}

/// The rules of an instance, as the file has them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Saved {
    rules: SandboxEgress,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    within: Option<SandboxEgress>,
    /// Values included: nobody else reads the file.
    #[serde(default, skip_serializing_if = "OwnHeaders::is_empty")]
    headers: OwnHeaders,
}

impl Saved {
    fn of(policy: &EgressPolicy) -> Self {
        let within = policy.most().map(SandboxEgress::from);
        let headers = headers_of(policy);
        Self { rules: SandboxEgress::from(&*policy.rules()), within, headers }
    }

    /// Of an instance that sleeps since before this daemon.
    fn info(&self) -> EgressInfo {
        EgressInfo {
            rules: self.rules.clone(),
            within: self.within.clone(),
            inject: self.headers.names(),
            reached: 0,
            denied: 0,
            log: Vec::new(),
        }
    }

    fn policy(&self, function: &EgressPolicy) -> Result<EgressPolicy, String> {
        let within = self.within.as_ref().map(SandboxEgress::all_rules).transpose()?;
        let policy = function.of_sandbox(self.rules.all_rules()?, within);
        tell(&policy, &self.headers);
        Ok(policy)
    }
}

/// What is to change of an instance; what is missing stays.
struct Change {
    rules: Option<EgressRules>,
    headers: Option<OwnHeaders>,
}

/// The policies of the instances that have one of their own.
pub struct EgressTable {
    all: Mutex<Known>,
    file: OwnFile,
    /// Held from a change until the file has it, or it was taken back: one change cannot undo
    /// another one that somebody was told of, and waits without a thread.
    changing: AsyncMutex<()>,
}

impl Default for EgressTable {
    fn default() -> Self {
        let file = OwnFile::about(&ABOUT);
        Self { all: Mutex::default(), file, changing: AsyncMutex::default() }
    }
}

#[derive(Default)]
struct Known {
    policies: BTreeMap<u64, Arc<EgressPolicy>>,
    /// Those of instances that sleep since an earlier daemon, or were not taken over yet.
    left: BTreeMap<u64, Saved>,
}

impl Known {
    /// Changes something of an instance; what would undo that.
    fn replace(&mut self, instance: u64, change: Change) -> Result<Change, String> {
        let Change { rules, headers } = change;
        if let Some(policy) = self.policies.get(&instance) {
            let rules = rules.map(|rules| {
                let before = policy.rules();
                policy.change(rules);
                (*before).clone()
            });
            let headers = headers.map(|headers| {
                let before = headers_of(policy);
                tell(policy, &headers);
                before
            });
            return Ok(Change { rules, headers });
        }
        let saved = self.left.get_mut(&instance).ok_or_else(none_of_its_own)?;
        let before = saved.rules.all_rules()?;
        let rules = rules.map(|rules| {
            saved.rules = SandboxEgress::from(&rules);
            before
        });
        let headers = headers.map(|headers| std::mem::replace(&mut saved.headers, headers));
        Ok(Change { rules, headers })
    }

    /// What the rules of an instance may allow at most, if somebody has said that.
    fn most(&self, instance: u64) -> Result<Option<EgressRules>, String> {
        if let Some(policy) = self.policies.get(&instance) {
            return Ok(policy.most().cloned());
        }
        let saved = self.left.get(&instance).ok_or_else(none_of_its_own)?;
        saved.within.as_ref().map(SandboxEgress::all_rules).transpose()
    }
}

fn none_of_its_own() -> String {
    "the sandbox was made by an older Thaw, and connects as its function does; make it anew"
        .to_owned()
}

impl EgressTable {
    /// Reads what an earlier daemon has written in a directory, and writes there from now on. To
    /// be called before instances are taken over.
    ///
    /// # Errors
    /// The file is there and cannot be read: nobody knows where those sandboxes may connect to.
    pub fn keep_in(&self, directory: &Path) -> io::Result<()> {
        self.known().left = self.file.read(directory)?;
        Ok(())
    }

    /// That of an instance, of the function whose policy is given.
    ///
    /// # Errors
    /// What an earlier daemon has written cannot be used.
    pub fn of(
        &self,
        instance: u64,
        function: Option<&EgressPolicy>,
    ) -> Result<Option<Arc<EgressPolicy>>, String> {
        let mut known = self.known();
        if let Some(policy) = known.policies.get(&instance) {
            return Ok(Some(policy.clone()));
        }
        let Some(saved) = known.left.get(&instance) else { return Ok(None) };
        let function = function.ok_or("its function's image cannot be opened")?;
        let policy = Arc::new(saved.policy(function)?);
        known.left.remove(&instance);
        known.policies.insert(instance, policy.clone());
        Ok(Some(policy))
    }

    /// One for a copy of an instance, with the same rules, if that has one of its own.
    pub fn copy_of(&self, instance: u64) -> Option<Arc<EgressPolicy>> {
        let policy = self.known().policies.get(&instance).cloned()?;
        Some(Arc::new(policy.copy()))
    }

    /// Instances have these from now on.
    ///
    /// # Errors
    /// One sentence: the next daemon would not know; none of them has one.
    pub async fn insert(
        self: &Arc<Self>,
        new: Vec<(u64, Arc<EgressPolicy>)>,
    ) -> Result<(), String> {
        if new.is_empty() {
            return Ok(());
        }
        let this = self.clone();
        to_its_end(async move { this.insert_now(new).await }).await
    }

    async fn insert_now(
        self: &Arc<Self>,
        new: Vec<(u64, Arc<EgressPolicy>)>,
    ) -> Result<(), String> {
        let _changing = self.changing.lock().await;
        let ids: Vec<u64> = new.iter().map(|(id, _)| *id).collect();
        self.known().policies.extend(new);
        let written = self.file.written(self, Self::write_now).await;
        if written.is_err() {
            self.known().policies.retain(|id, _| !ids.contains(id));
        }
        written
    }

    /// What the connections of an instance have carried; none if nobody counts that.
    pub fn bytes(&self, instance: u64) -> Option<NetworkUsage> {
        let bytes = self.known().policies.get(&instance)?.bytes()?;
        Some(bytes.into())
    }

    /// Where an instance may connect to, and what it has reached.
    pub fn info(&self, instance: u64) -> Option<EgressInfo> {
        let known = self.known();
        let asleep = || known.left.get(&instance).map(Saved::info);
        known.policies.get(&instance).map(|policy| info(policy)).or_else(asleep)
    }

    /// Changes the rules of an instance.
    ///
    /// # Errors
    /// One sentence: it has none of its own, or the next daemon would not know; nothing changes.
    pub async fn change(self: &Arc<Self>, instance: u64, rules: EgressRules) -> Result<(), String> {
        self.make(instance, Change { rules: Some(rules), headers: None }).await
    }

    /// Changes the headers that an instance gets besides those of its function.
    ///
    /// # Errors
    /// As [`EgressTable::change`].
    pub async fn change_headers(
        self: &Arc<Self>,
        instance: u64,
        headers: OwnHeaders,
    ) -> Result<(), String> {
        self.make(instance, Change { rules: None, headers: Some(headers) }).await
    }

    async fn make(self: &Arc<Self>, instance: u64, rules: Change) -> Result<(), String> {
        let this = self.clone();
        to_its_end(async move { this.make_now(instance, rules).await }).await
    }

    async fn make_now(self: &Arc<Self>, instance: u64, rules: Change) -> Result<(), String> {
        let _changing = self.changing.lock().await;
        let before = self.known().replace(instance, rules)?;
        let written = self.file.written(self, Self::write_lasting).await;
        if written.is_err() {
            self.known().replace(instance, before)?;
        }
        written
    }

    /// The same for a client that may not have more than others allow.
    ///
    /// # Errors
    /// As [`EgressTable::change`].
    pub async fn change_within(
        self: &Arc<Self>,
        instance: u64,
        asked: ClientEgress,
    ) -> Result<(), String> {
        // Exemptions go before what is denied, so there has to be a bound on them.
        let most = self.known().most(instance)?.ok_or_else(|| {
            "the rules of this sandbox are its operator's; use `thaw sandbox egress`".to_owned()
        })?;
        let (rules, headers) = asked.rules(&most);
        self.make(instance, Change { rules: Some(rules), headers: Some(headers) }).await
    }

    /// The instances that have one of their own.
    pub fn ids(&self) -> Vec<u64> {
        let known = self.known();
        known.policies.keys().chain(known.left.keys()).copied().collect()
    }

    /// Whether an instance has one of its own.
    pub fn knows(&self, id: u64) -> bool {
        let known = self.known();
        known.policies.contains_key(&id) || known.left.contains_key(&id)
    }

    /// Forgets that of an instance that is there no more. The file loses it with the next change.
    pub fn forget(&self, id: u64) {
        let mut known = self.known();
        known.policies.remove(&id);
        known.left.remove(&id);
    }

    fn write_now(&self) -> io::Result<()> {
        self.file.write(|| {
            let known = self.known();
            let mut all = known.left.clone();
            all.extend(known.policies.iter().map(|(id, policy)| (*id, Saved::of(policy))));
            all
        })
    }

    fn write_lasting(&self) -> io::Result<()> {
        self.write_now()?;
        self.file.settle()
    }

    /// Has the rules of an instance survive a loss of power, as only instances that sleep do. Waits
    /// for the disk.
    ///
    /// # Errors
    /// The host's.
    pub(crate) fn settle(&self, instance: u64) -> io::Result<()> {
        let has_own = self.known().policies.contains_key(&instance);
        if has_own { self.file.settle() } else { Ok(()) }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.all.lock().expect("no holder panics")
    }
}

/// What the TCP connections of a sandbox to the outside have carried, without headers of packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkUsage {
    /// Bytes that the other sides have confirmed.
    pub sent_bytes: u64,
    /// Bytes that have come.
    pub received_bytes: u64,
}

impl From<EgressBytes> for NetworkUsage {
    fn from(EgressBytes { sent, received }: EgressBytes) -> Self {
        Self { sent_bytes: sent, received_bytes: received }
    }
}

/// Has [`NetworkUsage`] say how it is now. Waits for the host.
pub async fn look_at_egress_bytes() {
    // Without it the numbers are some seconds old.
    let _ = spawn_blocking(thaw_sandbox::look_at_egress_bytes).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(allow: &[&str], deny: &[&str]) -> SandboxEgress {
        let rules = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        SandboxEgress { allow: rules(allow), deny: rules(deny), ..SandboxEgress::default() }
    }

    #[test]
    fn rules_have_a_bound_and_names_are_not_denied() {
        let rule: EgressRule = "10.0.0.1:1".parse().unwrap();
        let many = |count| SandboxEgress { allow: vec![rule.clone(); count], ..Default::default() };
        assert!(many(RULES_MAX).rules().is_ok());
        assert!(many(RULES_MAX + 1).rules().unwrap_err().contains("at most 256 rules"));
        let error = asked(&["*"], &["evil.example.com:443"]).rules().unwrap_err();
        assert!(error.contains("can be denied"), "{error}");
        let rules = asked(&["*"], &["10.0.0.0/8:*"]);
        assert_eq!(SandboxEgress::from(&rules.rules().unwrap()), rules);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn the_next_daemon_and_copies_have_the_rules_of_each_instance() {
        let directory = tempfile::tempdir().unwrap();
        let function = EgressPolicy::default();
        let before = Arc::new(EgressTable::default());
        before.keep_in(directory.path()).unwrap();
        let rules = asked(&["a.example.com:443"], &["192.0.2.0/24:*"]).rules().unwrap();
        let most = asked(&["*"], &[]).rules().unwrap();
        let wish = EgressWish::Within {
            most: Some(most.clone()),
            asked: ClientEgress { rest: true, ..ClientEgress::default() },
        };
        let policy = wish.policy(&function);
        assert_eq!(*policy.rules(), most);
        before.insert(vec![(7, policy)]).await.unwrap();
        before.change(7, rules.clone()).await.unwrap();
        let given =
            [("a.example.com".to_owned(), [("x-key".to_owned(), "hidden".to_owned())].into())];
        let headers = OwnHeaders::given(given).unwrap();
        before.change_headers(7, headers.clone()).await.unwrap();
        let copy = before.copy_of(7).unwrap();
        assert_eq!(headers_of(&copy), headers);
        before.insert(vec![(8, copy)]).await.unwrap();
        before.change(7, EgressRules::default()).await.unwrap();
        assert!(before.change(9, EgressRules::default()).await.is_err());

        let after = Arc::new(EgressTable::default());
        after.keep_in(directory.path()).unwrap();
        let of = |id| after.of(id, Some(&function)).unwrap();
        // One that sleeps can be asked for, and changed.
        assert_eq!(after.info(8).unwrap().rules.allow[0].to_string(), "a.example.com:443");
        let shown = serde_json::to_string(&after.info(8).unwrap()).unwrap();
        assert!(shown.contains("x-key") && !shown.contains("hidden"), "{shown}");
        after.change(8, EgressRules::default()).await.unwrap();
        assert!(after.info(8).unwrap().rules.allow.is_empty());
        after.change(8, rules.clone()).await.unwrap();
        assert!(of(7).unwrap().rules().is_closed());
        assert_eq!(
            (headers_of(&of(7).unwrap()), headers_of(&of(8).unwrap())),
            (headers.clone(), headers)
        );
        after.change_headers(7, OwnHeaders::default()).await.unwrap();
        assert!(of(7).unwrap().is_closed() && after.info(7).unwrap().inject.is_empty());
        assert_eq!((*of(8).unwrap().rules()).clone(), rules);
        assert_eq!(of(8).unwrap().most(), Some(&most));
        assert!(of(9).is_none());
        // Instances that are gone are forgotten, also by the file.
        after.ids().into_iter().filter(|id| *id != 8).for_each(|id| after.forget(id));
        after.change(8, EgressRules::default()).await.unwrap();
        let last = EgressTable::default();
        last.keep_in(directory.path()).unwrap();
        assert_eq!(last.known().left.keys().copied().collect::<Vec<_>>(), [8]);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn what_cannot_be_written_down_does_not_change() {
        let directory = tempfile::tempdir().unwrap();
        let table = Arc::new(EgressTable::default());
        table.keep_in(directory.path()).unwrap();
        let policy = EgressWish::Function.policy(&EgressPolicy::default());
        table.insert(vec![(1, policy)]).await.unwrap();
        drop(directory);
        let open = asked(&["*"], &[]).rules().unwrap();
        let error = table.change(1, open).await.unwrap_err();
        assert!(error.contains("make room"), "{error}");
        assert!(table.of(1, None).unwrap().unwrap().is_closed());
        let copy = table.copy_of(1).unwrap();
        assert!(table.insert(vec![(2, copy)]).await.is_err());
        assert!(table.of(2, None).unwrap().is_none());
    }

    #[test]
    fn a_damaged_file_is_said() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(ABOUT.file), "{").unwrap();
        let error = EgressTable::default().keep_in(directory.path()).unwrap_err().to_string();
        assert!(error.contains("restore it"), "{error}");
    }
}
