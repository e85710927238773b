//! What a monitor has, as text and numbers of descriptors, for the program that it executes in its
//! own place ([`super::super::handover`]).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use serde::{Deserialize, Serialize};

use super::super::handover::{Leaving, Left, Number};
use super::super::namespace::UserNamespace;
use super::super::protocol::{OLDEST_VERSION, VERSION};
use super::super::store::{DescriptorStore, StoreState};
use super::{
    BOUND_MAX, CHILDREN_MAX, DaemonIds, FETCHERS_MAX, GROUPS_MAX, KEPT_MAX, Monitor, Namespaces,
    kept_descriptors_max,
};
use crate::limits::{Group, GroupName, Hierarchy, Missing, Newcomers, Place};
use crate::zygote::IdRange;

/// What a [`Monitor`] has. Its version is that of whoever writes this down.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MonitorState {
    ids: DaemonIds,
    range: Option<RangeState>,
    slots: u32,
    namespace: Number,
    places: Vec<Place>,
    missing: Vec<Missing>,
    newcomers: Option<Newcomers>,
    groups: Vec<GroupName>,
    store: StoreState,
    bound: u32,
    has_asked: bool,
    has_left: bool,
    life: u32,
    fetchers: Vec<u32>,
    /// See [`Monitor::versions`].
    versions: BTreeMap<u32, u32>,
    /// What the daemon's helpers are started from, if that is not the program which reads this.
    helpers: Option<Number>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RangeState {
    first: u32,
    slots: u32,
    locks: Vec<Number>,
}

impl MonitorState {
    /// Whether this program can go on with it, as far as that is known without the descriptors.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn check(&self) -> Result<(), String> {
        let known = OLDEST_VERSION..=VERSION;
        if let Some(other) = self.versions.values().find(|version| !known.contains(version)) {
            return Err(format!(
                "a daemon of it speaks version {other} with it, and this Thaw {OLDEST_VERSION} to {VERSION}"
            ));
        }
        if !self.store.is_sound() {
            return Err("what it keeps for the next daemon is damaged".to_owned());
        }
        let names: HashSet<u64> = self.groups.iter().map(|name| name.number).collect();
        if names.len() < self.groups.len() {
            return Err("what it says of its control groups is damaged".to_owned());
        }
        let has_too_many_fetchers = self.fetchers.len() > FETCHERS_MAX;
        if self.store.len() > KEPT_MAX
            || self.groups.len() > GROUPS_MAX
            || self.bound > BOUND_MAX
            || has_too_many_fetchers
        {
            return Err("it has more of something than this Thaw allows".to_owned());
        }
        Ok(())
    }
}

impl Monitor {
    /// Writes down what this monitor has. `helpers` is the program from which those of the present
    /// daemon are to be started from then on, if that is another than the one which goes on; one that
    /// this monitor was given so itself goes before. `None` if the daemon has the caller's ids: that
    /// one's namespaces are not handed over.
    pub fn state<'a>(
        &'a self,
        helpers: Option<BorrowedFd<'a>>,
        leaving: &mut Leaving<'a>,
    ) -> Option<MonitorState> {
        let Namespaces::OfRoot(namespace) = &self.namespaces else { return None };
        let range = self.range.as_ref().map(|range| RangeState {
            first: range.first,
            slots: range.slots,
            locks: range.locks().iter().map(|lock| leaving.add(lock.as_fd())).collect(),
        });
        Some(MonitorState {
            ids: self.ids,
            range,
            slots: self.slots,
            namespace: leaving.add(namespace.as_fd()),
            places: self.groups.places().to_vec(),
            missing: self.groups.missing().to_vec(),
            newcomers: self.newcomers.clone(),
            groups: self.made.values().map(Group::name).collect(),
            store: self.store.state(leaving),
            bound: self.bound,
            has_asked: self.has_asked,
            has_left: self.has_left,
            life: self.life,
            fetchers: self.fetchers.clone(),
            versions: self.versions.clone(),
            helpers: self
                .helpers
                .as_ref()
                .map(AsFd::as_fd)
                .or(helpers)
                .map(|helpers| leaving.add(helpers)),
        })
    }

    /// Goes on with what the program before this one had in this process. Fetchers are to be set
    /// anew ([`Monitor::fetch_with`]).
    ///
    /// # Errors
    /// A descriptor is missing.
    pub fn resume(state: MonitorState, left: &mut Left) -> io::Result<Self> {
        let range = state.range.map(|range| range.resume(left)).transpose()?;
        let groups = Hierarchy::restored(state.places, state.missing);
        let restored = |name: GroupName| (name.number, groups.restore(name));
        let made: HashMap<u64, Group> = state.groups.into_iter().map(restored).collect();
        groups.remove_others(made.values());
        Ok(Self {
            ids: state.ids,
            range,
            slots: state.slots,
            namespaces: Namespaces::OfRoot(UserNamespace::from(left.take(state.namespace)?)),
            newcomers: state.newcomers,
            made,
            store: DescriptorStore::resume(state.store, left, KEPT_MAX, kept_descriptors_max())?,
            bound: state.bound,
            has_asked: state.has_asked,
            is_serving: false,
            has_left: state.has_left,
            life: state.life,
            groups_max: GROUPS_MAX,
            children_max: CHILDREN_MAX,
            fetcher: None,
            fetchers: state.fetchers,
            versions: state.versions,
            helpers: state.helpers.map(|helpers| left.take(helpers)).transpose()?,
            groups,
        })
    }
}

impl RangeState {
    fn resume(self, left: &mut Left) -> io::Result<IdRange> {
        let locks = self.locks.into_iter().map(|lock| left.take(lock).map(File::from));
        Ok(IdRange::restore(self.first, self.slots, locks.collect::<io::Result<_>>()?))
    }
}
