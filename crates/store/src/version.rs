//! Versions of a function: which there are, which gets its requests, and how that changes.
//!
//! Everything here is a change of a [`FunctionRecord`] in memory. [`Session::change_function`]
//! makes it durable.
//!
//! [`Session::change_function`]: crate::Session::change_function

use serde::{Deserialize, Serialize};

use crate::function::{FunctionRecord, now_ms};
use crate::id::{ImageId, IndexId, Name};

/// Versions that a garbage collection leaves, the newest first, unless it is told otherwise.
pub const VERSIONS_KEPT: usize = 3;
/// Most versions in a record. The oldest that nothing refers to makes room for a new one.
pub const VERSIONS_MAX: usize = 32;
/// Most versions that get a share of the requests beside the active one.
pub const SHARES_MAX: usize = 3;
/// How many activations are remembered, to go back to.
const HISTORY_MAX: usize = 8;
/// Most bytes of a header's name or value by which requests are chosen.
const HEADER_MAX: usize = 256;

/// A version of a function that is not the active one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Version {
    /// Its number, which no other version of the function ever has.
    #[serde(default)]
    pub number: u32,
    /// A name for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<Name>,
    /// Its configuration, of which the store understands nothing.
    pub config: serde_json::Value,
    /// Its root file system.
    pub index: IndexId,
    /// Its snapshot; `None` before the first freeze.
    pub image: Option<ImageId>,
    /// When it was stored, milliseconds since the epoch.
    pub created_ms: u64,
    /// Why it gets no requests any more, if that was not somebody's wish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A share of a function's requests that goes to a version which is not the active one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The version.
    pub version: u32,
    /// Of a hundred requests so many.
    pub percent: u8,
    /// Requests with this header go there in any case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<HeaderRule>,
}

/// A header by which requests are chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderRule {
    /// Its name in lower case.
    pub name: String,
    /// Its whole value.
    pub value: String,
}

/// A version that was taken out of service because too many of its requests failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolledBack {
    /// The version.
    pub version: u32,
    /// The version that gets its requests.
    pub to: u32,
    /// Why.
    pub reason: String,
    /// When, milliseconds since the epoch.
    pub at_ms: u64,
}

/// Why a record cannot be changed so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VersionError {
    /// There is none.
    #[error(
        "`{function}` has no version {wanted}; `thaw versions {function}` lists those there are"
    )]
    Unknown {
        /// The function.
        function: Name,
        /// What was asked for.
        wanted: String,
    },
    /// It has no image to boot from.
    #[error("version {version} of `{function}` was never frozen; build the function again")]
    NoImage {
        /// The function.
        function: Name,
        /// The version.
        version: u32,
    },
    /// No version was active before this one, or it is gone.
    #[error(
        "`{function}` has no version to go back to; `thaw versions {function}` lists those there \
         are, and `thaw activate` chooses one"
    )]
    NothingBefore {
        /// The function.
        function: Name,
    },
    /// The active version gets what the others leave.
    #[error(
        "version {version} of `{function}` is the active one and gets what the others leave; give \
         a share to another version"
    )]
    ShareOfActive {
        /// The function.
        function: Name,
        /// The version.
        version: u32,
    },
    /// More than all requests.
    #[error(
        "all shares of `{function}` together would be {percent} percent; they may be 100 at most"
    )]
    TooMuch {
        /// The function.
        function: Name,
        /// The sum.
        percent: u32,
    },
    /// Too many versions would be served at a time.
    #[error(
        "{SHARES_MAX} versions of `{function}` have a share already; end one of them with \
         `thaw split {function} VERSION --percent 0`"
    )]
    TooMany {
        /// The function.
        function: Name,
    },
    /// No header that a request can have.
    #[error("`{0}` is not a header; write NAME=VALUE, such as x-canary=yes")]
    Header(String),
    /// A label that would be taken for a number, or is no name.
    #[error(
        "`{0}` is not a label; use 1 to 64 of a-z, A-Z, 0-9, '.', '_' and '-', beginning with a \
         letter or a digit, and not digits only"
    )]
    Label(String),
}

impl HeaderRule {
    /// Reads `NAME=VALUE`. The name is a token (RFC 9110 §5.6.2), the value visible ASCII.
    ///
    /// # Errors
    /// It is no header.
    pub fn parse(text: &str) -> Result<Self, VersionError> {
        let wrong = || VersionError::Header(text.to_owned());
        let (name, value) = text.split_once('=').ok_or_else(wrong)?;
        let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        let visible = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
        let is_good = (1..=HEADER_MAX).contains(&name.len())
            && (1..=HEADER_MAX).contains(&value.len())
            && name.bytes().all(token)
            && value.bytes().all(visible)
            && value.trim() == value;
        match is_good {
            true => Ok(Self { name: name.to_ascii_lowercase(), value: value.to_owned() }),
            false => Err(wrong()),
        }
    }
}

/// Reads a label: a name that is no number.
///
/// # Errors
/// It is no label.
pub fn parse_label(text: &str) -> Result<Name, VersionError> {
    match Name::new(text) {
        Ok(name) if !text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(name),
        _ => Err(VersionError::Label(text.to_owned())),
    }
}

impl FunctionRecord {
    /// All versions, the oldest first.
    pub fn versions(&self) -> Vec<Version> {
        let mut all = self.others.clone();
        all.push(self.active());
        all.sort_by_key(|version| version.number);
        all
    }

    /// The active version.
    pub fn active(&self) -> Version {
        Version {
            number: self.number,
            label: self.label.clone(),
            config: self.config.clone(),
            index: self.index,
            image: self.image,
            created_ms: self.created_ms,
            problem: None,
        }
    }

    /// The number of the version that `text` names: by its number, or by its label.
    ///
    /// # Errors
    /// There is no such version.
    pub fn find(&self, text: &str) -> Result<u32, VersionError> {
        let is_meant = |version: &Version| {
            let label = version.label.as_ref().map(Name::as_str);
            label == Some(text) || text.parse() == Ok(version.number)
        };
        let found =
            self.versions().iter().rev().find(|version| is_meant(version)).map(|v| v.number);
        found.ok_or_else(|| self.unknown(text))
    }

    /// Whether a version gets a share of the requests.
    pub fn shares(&self, number: u32) -> bool {
        self.split.iter().any(|share| share.version == number)
    }

    fn unknown(&self, wanted: impl ToString) -> VersionError {
        VersionError::Unknown { function: self.name.clone(), wanted: wanted.to_string() }
    }

    /// Sends all requests to a version. Shares of others end.
    ///
    /// # Errors
    /// There is no such version, or it has no image.
    pub fn activate(&mut self, number: u32) -> Result<(), VersionError> {
        let before = self.number;
        self.check_bootable(number)?;
        self.make_active(number);
        self.split.clear();
        self.rolled_back = None;
        if before != number {
            self.history.retain(|earlier| *earlier != number);
            self.remember(before);
        }
        Ok(())
    }

    fn check_bootable(&self, number: u32) -> Result<(), VersionError> {
        let versions = self.versions();
        let version = versions.iter().find(|version| version.number == number);
        match version.ok_or_else(|| self.unknown(number))?.image {
            Some(_) => Ok(()),
            None => Err(VersionError::NoImage { function: self.name.clone(), version: number }),
        }
    }

    /// Exchanges the active version for another one that is there.
    fn make_active(&mut self, number: u32) {
        let Some(at) = self.others.iter().position(|other| other.number == number) else { return };
        let old = self.active();
        let new = std::mem::replace(&mut self.others[at], old);
        self.others.sort_by_key(|version| version.number);
        let Version { number, label, config, index, image, created_ms, problem: _ } = new;
        (self.number, self.label, self.config) = (number, label, config);
        (self.index, self.image, self.created_ms) = (index, image, created_ms);
        self.activated_ms = now_ms();
    }

    fn remember(&mut self, number: u32) {
        self.history.push(number);
        let surplus = self.history.len().saturating_sub(HISTORY_MAX);
        self.history.drain(..surplus);
    }

    /// Takes back the last change: ends the shares of others if there are any, and otherwise
    /// sends all requests to the version that was active before.
    ///
    /// # Errors
    /// There is none.
    pub fn roll_back(&mut self) -> Result<(), VersionError> {
        self.rolled_back = None;
        if !self.split.is_empty() {
            self.split.clear();
            return Ok(());
        }
        while let Some(number) = self.history.pop() {
            if number != self.number && self.check_bootable(number).is_ok() {
                self.make_active(number);
                return Ok(());
            }
        }
        Err(VersionError::NothingBefore { function: self.name.clone() })
    }

    /// The version to which [`FunctionRecord::roll_back`] would go, if no other has a share.
    pub fn before(&self) -> Option<u32> {
        let is_there =
            |number: &&u32| **number != self.number && self.check_bootable(**number).is_ok();
        self.history.iter().rev().find(is_there).copied()
    }

    /// Takes a version out of service of which too many requests have failed; says which
    /// version gets its requests. `None`: it gets none, or there is no other.
    pub fn take_out(&mut self, number: u32, reason: &str) -> Option<u32> {
        if self.split.iter().any(|share| share.version == number) {
            self.split.retain(|share| share.version != number);
        } else if self.number == number {
            self.before()?;
            self.split.clear();
            self.roll_back().ok()?;
        } else {
            return None;
        }
        let (to, at_ms) = (self.number, now_ms());
        let reason = reason.to_owned();
        if let Some(version) = self.others.iter_mut().find(|other| other.number == number) {
            version.problem = Some(reason.clone());
        }
        self.rolled_back = Some(RolledBack { version: number, to, reason, at_ms });
        Some(to)
    }

    /// Gives a version its share; one of nothing ends it.
    ///
    /// # Errors
    /// It cannot have that.
    pub fn share(
        &mut self,
        number: u32,
        percent: u8,
        header: Option<HeaderRule>,
    ) -> Result<(), VersionError> {
        let function = self.name.clone();
        self.check_bootable(number)?;
        if number == self.number {
            return Err(VersionError::ShareOfActive { function, version: number });
        }
        let mut split = self.split.clone();
        split.retain(|share| share.version != number);
        if percent > 0 || header.is_some() {
            split.push(Share { version: number, percent, header });
        }
        let sum: u32 = split.iter().map(|share| u32::from(share.percent)).sum();
        if sum > 100 {
            return Err(VersionError::TooMuch { function, percent: sum });
        }
        if split.len() > SHARES_MAX {
            return Err(VersionError::TooMany { function });
        }
        split.sort_by_key(|share| share.version);
        self.split = split;
        self.rolled_back = None;
        if let Some(version) = self.others.iter_mut().find(|other| other.number == number) {
            version.problem = None;
        }
        Ok(())
    }

    /// Takes in a new version and gives it a number. It is not active yet.
    pub(crate) fn add(&mut self, version: Version) -> u32 {
        let number = self.next;
        self.next += 1;
        if version.label.is_some() {
            // A label names one version: the newest.
            let same = |label: &Option<Name>| *label == version.label;
            if same(&self.label) {
                self.label = None;
            }
            self.others.iter_mut().filter(|other| same(&other.label)).for_each(|o| o.label = None);
        }
        self.others.push(Version { number, ..version });
        if self.others.len() >= VERSIONS_MAX {
            let pinned = self.pinned();
            let is_free =
                |other: &Version| other.number != number && !pinned.contains(&other.number);
            if let Some(at) = self.others.iter().position(is_free) {
                self.others.remove(at);
            }
        }
        number
    }

    /// Versions that stay, however old: those that get requests, and the one to go back to.
    fn pinned(&self) -> Vec<u32> {
        let shares = self.split.iter().map(|share| share.version);
        shares.chain([self.number]).chain(self.before()).collect()
    }

    /// The versions that a garbage collection takes away which leaves the `keep` newest and those
    /// that are in use.
    pub fn surplus(&self, keep: usize) -> Vec<u32> {
        let mut numbers: Vec<u32> = self.versions().iter().map(|version| version.number).collect();
        let newest = numbers.split_off(numbers.len().saturating_sub(keep.max(1)));
        let pinned = self.pinned();
        numbers.retain(|number| !newest.contains(number) && !pinned.contains(number));
        numbers
    }

    /// The versions that stay beside one more that all requests go to.
    pub fn beside_a_new_one(&self, keep: usize) -> Vec<Version> {
        let mut versions = self.versions();
        let surplus = versions.len().saturating_sub(keep.max(1) - 1);
        let newest: Vec<u32> =
            versions.iter().skip(surplus).map(|version| version.number).collect();
        // The active one becomes the one to go back to.
        versions.retain(|it| it.number == self.number || newest.contains(&it.number));
        versions
    }

    /// Forgets versions that are not active.
    pub(crate) fn forget(&mut self, numbers: &[u32]) {
        self.others.retain(|other| !numbers.contains(&other.number));
        self.split.retain(|share| !numbers.contains(&share.version));
        self.history.retain(|number| !numbers.contains(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A function with so many versions, the last of which is active.
    fn record(count: u32) -> FunctionRecord {
        let id = "11".repeat(32);
        let old = json!({
            "version": 1, "name": "f", "config": {}, "index": id, "image": id, "created_ms": 5,
            "previous": null,
        });
        let mut record: FunctionRecord = serde_json::from_value(old).unwrap();
        record.upgrade();
        for number in 2..=count {
            let version = Version { label: None, created_ms: number.into(), ..record.active() };
            assert_eq!(record.add(version), number);
            record.activate(number).unwrap();
        }
        record
    }

    fn numbers(record: &FunctionRecord) -> Vec<u32> {
        record.versions().iter().map(|version| version.number).collect()
    }

    #[test]
    fn going_back_and_forth() {
        let mut record = record(3);
        assert_eq!((record.number, record.before()), (3, Some(2)));
        record.roll_back().unwrap();
        assert_eq!((record.number, record.created_ms), (2, 2));
        record.roll_back().unwrap();
        assert_eq!(record.number, 1);
        let error = record.roll_back().unwrap_err().to_string();
        assert!(error.contains("no version to go back to"), "{error}");
        record.activate(3).unwrap();
        assert_eq!((record.number, record.before()), (3, Some(1)));
        assert_eq!(numbers(&record), [1, 2, 3]);
        assert!(record.activate(9).unwrap_err().to_string().contains("no version 9"));
    }

    #[test]
    fn going_back_ends_shares_first() {
        let mut record = record(3);
        record.share(1, 10, None).unwrap();
        record.roll_back().unwrap();
        assert_eq!((record.number, record.split.len()), (3, 0));
    }

    #[test]
    fn shares_are_bounded() {
        let mut record = record(6);
        let canary = HeaderRule::parse("X-Canary=yes").unwrap();
        record.share(1, 60, Some(canary.clone())).unwrap();
        assert!(record.share(2, 41, None).unwrap_err().to_string().contains("101 percent"));
        record.share(2, 40, None).unwrap();
        record.share(1, 0, Some(canary)).unwrap();
        record.share(3, 1, None).unwrap();
        assert!(matches!(record.share(4, 1, None), Err(VersionError::TooMany { .. })));
        assert!(matches!(record.share(6, 1, None), Err(VersionError::ShareOfActive { .. })));
        record.share(1, 0, None).unwrap();
        let of: Vec<_> = record.split.iter().map(|share| (share.version, share.percent)).collect();
        assert_eq!(of, [(2, 40), (3, 1)]);
        record.activate(2).unwrap();
        assert!(record.split.is_empty());
    }

    #[test]
    fn headers_are_whole_ones() {
        let rule = HeaderRule::parse("X-Canary=a=b c").unwrap();
        assert_eq!((rule.name.as_str(), rule.value.as_str()), ("x-canary", "a=b c"));
        let long = format!("x={}", "y".repeat(HEADER_MAX + 1));
        for bad in ["", "x", "=y", "x=", "a b=c", "x= y", "x=y\r\nz", "x=ä", &long] {
            assert!(HeaderRule::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn labels_name_the_newest() {
        let mut record = record(2);
        let labelled = |record: &FunctionRecord| Version {
            label: Some(parse_label("stable").unwrap()),
            ..record.active()
        };
        let first = labelled(&record);
        let first = record.add(first);
        let second = labelled(&record);
        let second = record.add(second);
        assert_eq!((first, second, record.find("stable")), (3, 4, Ok(4)));
        assert_eq!(record.find("3"), Ok(3));
        assert!(record.find("gone").is_err());
        for bad in ["", "12", "a b", "-x"] {
            assert!(parse_label(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_version_that_fails_is_taken_out() {
        let mut failing = record(3);
        assert_eq!(failing.take_out(3, "it failed"), Some(2));
        assert_eq!(failing.rolled_back.as_ref().map(|back| (back.version, back.to)), Some((3, 2)));
        assert_eq!(failing.versions()[2].problem.as_deref(), Some("it failed"));
        assert_eq!(failing.take_out(3, "again"), None, "it gets no requests any more");
        let mut canary = record(3);
        canary.share(1, 10, None).unwrap();
        assert_eq!(canary.take_out(1, "it failed"), Some(3));
        assert!(canary.split.is_empty());
        assert_eq!(record(1).take_out(1, "it failed"), None, "there is no other");
        // Whoever activates it knows.
        failing.activate(3).unwrap();
        assert_eq!((failing.rolled_back, failing.others[1].problem.clone()), (None, None));
    }

    #[test]
    fn the_newest_and_those_in_use_stay() {
        let mut all = record(8);
        assert_eq!(all.surplus(3), [1, 2, 3, 4, 5]);
        assert_eq!(all.surplus(0), [1, 2, 3, 4, 5, 6], "the one before stays");
        all.share(2, 1, None).unwrap();
        all.forget(&all.surplus(3));
        assert_eq!(numbers(&all), [2, 6, 7, 8]);
        let beside: Vec<u32> = all.beside_a_new_one(3).iter().map(|it| it.number).collect();
        assert_eq!(beside, [7, 8]);
        all.share(2, 0, None).unwrap();
        all.activate(6).unwrap();
        assert_eq!(all.surplus(1), [2, 7], "the active one and the one before stay");
    }

    #[test]
    fn a_record_is_bounded() {
        let mut record = record(2);
        for _ in 0..3 * VERSIONS_MAX {
            let version = record.active();
            record.add(version);
        }
        assert_eq!(record.versions().len(), VERSIONS_MAX);
        assert_eq!(numbers(&record)[..2], [1, 2], "those in use are not the ones that go");
    }
}
