//! `tenants.toml`: what the functions of a sharing domain may use together, as the
//! operator of the node writes it.

use super::quantity::FromText;
use super::{ByteSize, ConfigError, DomainName, EgressRule, TimeSpan};
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use thaw_sandbox::EgressRules;
use thaw_store::Closed;

/// Name of the file in `$THAW_HOME`.
pub const QUOTAS_FILE: &str = "tenants.toml";
/// Bytes of that file.
const QUOTAS_MAX: u64 = 1 << 20;
/// Shortest period in which CPU time is counted: usage is looked at twice a second.
const PERIOD_MIN: Duration = Duration::from_secs(1);

/// Why the quotas cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum QuotasError {
    /// They are another user's.
    #[error(
        "permission denied on {}, which belongs to user {}; run this as that user or as \
         root, or set THAW_HOME to a directory of your own",
        .0.path.display(), .0.owner
    )]
    OfAnotherUser(Closed),
    /// The file is there and cannot be read.
    #[error("cannot read the quotas in {} ({error}); correct the file, or remove it if no tenant has a quota", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Its text is not valid.
    #[error(transparent)]
    Invalid(#[from] ConfigError),
}

/// The quotas of all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Quotas {
    /// What every tenant has whose own table does not say otherwise.
    default: QuotaTable,
    /// Functions without a domain.
    shared: QuotaTable,
    /// Functions of a domain.
    domain: BTreeMap<DomainName, QuotaTable>,
}

/// The keys of one table; one that is left out is as in `[default]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct QuotaTable {
    instances: Option<Bound<u32>>,
    memory: Option<Bound<ByteSize>>,
    cpu_time: Option<Bound<CpuQuota>>,
    store: Option<Bound<ByteSize>>,
    swap: Option<Bound<ByteSize>>,
    queue: Option<Bound<ByteSize>>,
    volumes: Option<Bound<ByteSize>>,
    egress: EgressTable,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct EgressTable {
    connections: Option<Bound<u32>>,
    per_second: Option<Bound<u32>>,
    /// What rules may allow at most.
    allow: Option<Allowed>,
}

/// Destinations, or the word that all of them may be allowed.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "a list of destinations, or \"unlimited\"")]
enum Allowed {
    Rules(Vec<EgressRule>),
    Word(Unlimited),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Unlimited {
    Unlimited,
}

/// What one tenant may use. `None`: no bound.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct Quota {
    /// Instances at a time, those that are kept ready and templates included.
    pub instances: Option<u32>,
    /// Sum of the memory limits of these, in bytes.
    pub memory: Option<ByteSize>,
    /// CPU time of all instances in each period.
    pub cpu_time: Option<CpuQuota>,
    /// Bytes of images, indexes and files in the store.
    pub store: Option<ByteSize>,
    /// Bytes of swap files, the memory of hibernated instances.
    #[serde(default)]
    pub swap: Option<ByteSize>,
    /// Bytes of invocations in the queues of triggers, without dead letters.
    #[serde(default)]
    pub queue: Option<ByteSize>,
    /// Bytes of the sizes of volumes, and again for each of their snapshots.
    #[serde(default)]
    pub volumes: Option<ByteSize>,
    /// Outgoing connections at a time.
    pub egress_connections: Option<u32>,
    /// Outgoing connections that may be asked for in a second.
    pub egress_per_second: Option<u32>,
}

/// CPU time that may be used in each period of some length: `"10m per 1h"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuQuota {
    /// The CPU time.
    pub time: TimeSpan,
    /// Length of a period.
    pub period: TimeSpan,
}

impl Quotas {
    /// Reads the quotas of a node; a file that is missing sets none.
    ///
    /// # Errors
    /// The file cannot be read, or is not valid.
    pub fn load(path: &Path) -> Result<Self, QuotasError> {
        match read(path) {
            Ok(text) => Ok(Self::parse(path, &text)?),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(match thaw_store::closed(path, &error) {
                Some(closed) => QuotasError::OfAnotherUser(closed),
                None => QuotasError::Read { path: path.to_owned(), error },
            }),
        }
    }

    /// Parses the text of the file; `path` is for error messages.
    ///
    /// # Errors
    /// Unknown keys and wrong values, each with its line and column.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        super::from_toml(path, text)
    }

    /// The quota of a domain, or of the functions without one.
    pub fn of(&self, domain: Option<&DomainName>) -> Quota {
        self.table(domain).quota()
    }

    /// What egress rules of a domain's functions and sandboxes, or of those without one, may
    /// allow at most; `None`: anything.
    pub fn egress_of(&self, domain: Option<&DomainName>) -> Option<EgressRules> {
        match self.table(domain).egress.allow? {
            Allowed::Rules(rules) => {
                let rules = rules.iter().map(EgressRule::rule).cloned().collect();
                Some(EgressRules::allowing(rules))
            }
            Allowed::Word(Unlimited::Unlimited) => None,
        }
    }

    fn table(&self, domain: Option<&DomainName>) -> QuotaTable {
        let own = match domain {
            None => Some(&self.shared),
            Some(domain) => self.domain.get(domain),
        };
        own.map_or_else(|| self.default.clone(), |own| own.over(&self.default))
    }

    /// The domains that have a table of their own.
    pub fn domains(&self) -> impl Iterator<Item = &DomainName> {
        self.domain.keys()
    }

    /// Whether the CPU time of anybody is bounded.
    pub fn bound_cpu_time(&self) -> bool {
        let all = [&self.default, &self.shared].into_iter().chain(self.domain.values());
        all.filter_map(|table| table.cpu_time).any(|bound| bound.get().is_some())
    }
}

/// Reads a regular file: a pipe could make the daemon wait for good.
fn read(path: &Path) -> io::Result<String> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut text = String::new();
    File::open(path)?.take(QUOTAS_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > QUOTAS_MAX {
        return Err(io::Error::other(format!("it has more than {QUOTAS_MAX} bytes")));
    }
    Ok(text)
}

impl QuotaTable {
    /// This table, with what it leaves out from another one.
    fn over(&self, default: &Self) -> Self {
        Self {
            instances: self.instances.or(default.instances),
            memory: self.memory.or(default.memory),
            cpu_time: self.cpu_time.or(default.cpu_time),
            store: self.store.or(default.store),
            swap: self.swap.or(default.swap),
            queue: self.queue.or(default.queue),
            volumes: self.volumes.or(default.volumes),
            egress: EgressTable {
                connections: self.egress.connections.or(default.egress.connections),
                per_second: self.egress.per_second.or(default.egress.per_second),
                allow: self.egress.allow.clone().or_else(|| default.egress.allow.clone()),
            },
        }
    }

    fn quota(&self) -> Quota {
        Quota {
            instances: self.instances.and_then(Bound::get),
            memory: self.memory.and_then(Bound::get),
            cpu_time: self.cpu_time.and_then(Bound::get),
            store: self.store.and_then(Bound::get),
            swap: self.swap.and_then(Bound::get),
            queue: self.queue.and_then(Bound::get),
            volumes: self.volumes.and_then(Bound::get),
            egress_connections: self.egress.connections.and_then(Bound::get),
            egress_per_second: self.egress.per_second.and_then(Bound::get),
        }
    }
}

/// A bound, or the word that there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bound<T> {
    Unlimited,
    At(T),
}

/// The word for [`Bound::Unlimited`].
const UNLIMITED: &str = "unlimited";

impl<T> Bound<T> {
    fn get(self) -> Option<T> {
        match self {
            Self::Unlimited => None,
            Self::At(bound) => Some(bound),
        }
    }
}

impl<T: FromStr> FromStr for Bound<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        if text == UNLIMITED { Ok(Self::Unlimited) } else { text.parse().map(Self::At) }
    }
}

/// A type that is written as text, and what a text of it looks like.
trait Written: FromStr<Err: fmt::Display> {
    const FORM: &'static str;
}

impl Written for ByteSize {
    const FORM: &'static str = "a size such as \"4GiB\", or \"unlimited\"";
}

impl Written for CpuQuota {
    const FORM: &'static str = "CPU time in a period such as \"10m per 1h\", or \"unlimited\"";
}

impl<'de, T: Written> Deserialize<'de> for Bound<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(FromText(T::FORM, PhantomData))
    }
}

impl<'de> Deserialize<'de> for Bound<u32> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Count)
    }
}

/// A number without a unit.
struct Count;

impl Visitor<'_> for Count {
    type Value = Bound<u32>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a number from 0 to {}, or \"{UNLIMITED}\"", u32::MAX)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
        match u32::try_from(number) {
            Ok(number) => Ok(Bound::At(number)),
            Err(_) => Err(E::invalid_value(de::Unexpected::Signed(number), &self)),
        }
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        match text {
            UNLIMITED => Ok(Bound::Unlimited),
            _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
        }
    }
}

impl FromStr for CpuQuota {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((time, period)) = text.split_once(" per ") else {
            return Err(format!(
                "`{text}` is not CPU time in a period; write both, such as \"10m per 1h\""
            ));
        };
        let span = |text: &str| text.parse::<TimeSpan>().map_err(|error| error.to_string());
        let quota = Self { time: span(time)?, period: span(period)? };
        if quota.period.0 < PERIOD_MIN {
            let (found, least) = (quota.period, TimeSpan(PERIOD_MIN));
            return Err(format!("a period of {found} is too short; {least} is the shortest"));
        }
        Ok(quota)
    }
}

impl fmt::Display for CpuQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} per {}", self.time, self.period)
    }
}

impl Serialize for CpuQuota {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CpuQuota {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(FromText("CPU time in a period", PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Quotas, String> {
        Quotas::parse("tenants.toml".as_ref(), text).map_err(|error| error.to_string())
    }

    fn domain(name: &str) -> DomainName {
        name.parse().unwrap()
    }

    #[test]
    fn destinations_have_a_ceiling_by_tenant() {
        let quotas = parse(
            "[default.egress]\nallow = [\"*:443\"]\n[domain.a.egress]\nallow = \"unlimited\"\n\
             [domain.b.egress]\nallow = []\n[domain.c]\ninstances = 1",
        )
        .unwrap();
        let of = |name| {
            let domain: Option<DomainName> = Some(domain(name));
            quotas.egress_of(domain.as_ref()).map(|rules| rules.allow.len())
        };
        assert_eq!([of("a"), of("b"), of("c")], [None, Some(0), Some(1)]);
        assert_eq!(quotas.egress_of(None).unwrap().allow[0].to_string(), "*:443");
        for wrong in ["\"all\"", "[\"10.0.0.0/8\"]", "3"] {
            let error = parse(&format!("[default.egress]\nallow = {wrong}")).unwrap_err();
            assert!(error.contains("destinations"), "{error}");
        }
    }

    #[test]
    fn a_table_says_only_what_differs_from_the_default() {
        let quotas = parse(
            r#"
            [default]
            instances = 10
            memory = "2GiB"
            egress = { connections = 100, per_second = 20 }

            [shared]
            memory = "unlimited"

            [domain.customer-7]
            instances = 0
            cpu_time = "10m per 1h"
            store = "1.5GiB"
            swap = "512MiB"
            queue = "64MiB"
            egress.connections = "unlimited"
            "#,
        )
        .unwrap();
        let default = Quota {
            instances: Some(10),
            memory: Some(ByteSize::mebibytes(2048)),
            egress_connections: Some(100),
            egress_per_second: Some(20),
            ..Quota::default()
        };
        assert_eq!(quotas.of(Some(&domain("somebody"))), default);
        assert_eq!(quotas.of(None), Quota { memory: None, ..default });
        let customer = quotas.of(Some(&domain("customer-7")));
        let cpu_time = CpuQuota { time: TimeSpan::seconds(600), period: TimeSpan::seconds(3600) };
        let expected = Quota {
            instances: Some(0),
            cpu_time: Some(cpu_time),
            store: Some(ByteSize::mebibytes(1536)),
            swap: Some(ByteSize::mebibytes(512)),
            queue: Some(ByteSize::mebibytes(64)),
            egress_connections: None,
            ..default
        };
        assert_eq!(customer, expected);
        assert!(quotas.bound_cpu_time());
        assert_eq!(quotas.domains().count(), 1);
        assert_eq!(cpu_time.to_string(), "10m per 1h");
    }

    #[test]
    fn without_a_file_nobody_has_a_quota() {
        let directory = tempfile::tempdir().unwrap();
        let quotas = Quotas::load(&directory.path().join(QUOTAS_FILE)).unwrap();
        assert_eq!(quotas.of(None), Quota::default());
        assert!(!quotas.bound_cpu_time());
    }

    #[test]
    fn a_wrong_file_is_refused_with_its_place_and_the_way_out() {
        for (text, place, reason) in [
            ("[default]\ninstance = 1", "2:1", "did you mean `instances`?"),
            ("[defaults]\ninstances = 1", "1:2", "did you mean `default`?"),
            ("[domain.\"a/b\"]\ninstances = 1", "1:9", "not a usable name"),
            ("[domain.\"private.x\"]", "1:9", "choose another one"),
            ("[default]\ninstances = -1", "2:13", "a number from 0 to 4294967295"),
            ("[default]\ninstances = 4294967296", "2:13", "a number from 0 to 4294967295"),
            ("[default]\ninstances = \"many\"", "2:13", "or \"unlimited\""),
            ("[default]\nmemory = 5", "2:10", "a size such as"),
            ("[default]\nmemory = \"5\"", "2:10", "is not a size"),
            ("[default]\ncpu_time = \"10m\"", "2:12", "\"10m per 1h\""),
            ("[default]\ncpu_time = \"10m per hour\"", "2:12", "`hour` is not a duration"),
            ("[default]\ncpu_time = \"1s per 100ms\"", "2:12", "1s is the shortest"),
            ("[default.egress]\nconections = 1", "2:1", "did you mean `connections`?"),
            ("[default]\ninstances = 1\ninstances = 2", "3:1", "duplicate key"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(&format!("tenants.toml:{place}: ")), "{text}\n{error}");
            assert!(error.contains(reason), "{text}\n{error}");
        }
    }

    #[test]
    fn what_is_no_readable_file_is_an_error_and_not_the_end_of_all_quotas() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(QUOTAS_FILE);
        let refused = |expected: &str| {
            let error = Quotas::load(&path).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        };
        std::fs::create_dir(&path).unwrap();
        refused("not a regular file");
        std::fs::remove_dir(&path).unwrap();
        std::fs::write(&path, b"\xff\xfe").unwrap();
        refused("UTF-8");
        std::fs::write(&path, "#".repeat(QUOTAS_MAX as usize + 1)).unwrap();
        refused("more than");
        std::fs::write(&path, "#".repeat(QUOTAS_MAX as usize)).unwrap();
        assert_eq!(Quotas::load(&path).unwrap(), Quotas::default());
    }
}
