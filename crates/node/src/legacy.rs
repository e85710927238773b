//! What an earlier daemon has left: instances that live, and the connections that they have.
//! It was killed, has crashed or was restarted; the monitor has kept them ([`thaw_sandbox::take_over`]).

use crate::catalog::Catalog;
use crate::edge::Addresses;
use crate::gateway::{attend_inherited, join_inherited};
use crate::instance::{Client, ConnectionNote, Inherited, InstanceNote, JoinedOrphan, Way};
use crate::node::NodeState;
use crate::service::{Served, Service};
use crate::tenants::{Lease, Tenant};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use thaw_home::tenants::TenantName;
use thaw_home::volumes;
use thaw_sandbox::{KeptForSuccessor, Legacy, Orphan, OrphanConnection};

/// Why an instance with volumes ends.
const VOLUMES_END: &str = "it has volumes, and the kernel of an earlier Thaw, which does not know how to take \
                           back what it has open there";

/// Connections, by the number of their instance.
type Connections = HashMap<u64, Vec<Inherited>>;

/// What the next daemon has to know of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerNote {
    /// Where it listens.
    pub listener: SocketAddr,
    /// Whether it takes datagrams.
    pub is_udp: bool,
}

/// A listener that an earlier daemon has left.
#[derive(Debug)]
pub struct LeftListener {
    /// What its daemon has noted.
    pub note: ListenerNote,
    /// The listener.
    pub socket: OwnedFd,
    /// Keeps it for the daemon after this one, too.
    pub kept: KeptForSuccessor,
}

/// Takes the listeners out of what an earlier daemon has left.
pub fn take_listeners(legacy: &mut Legacy) -> Vec<LeftListener> {
    let mut listeners = Vec::new();
    for orphan in mem::take(&mut legacy.connections) {
        match serde_json::from_str::<ListenerNote>(&orphan.note) {
            Ok(note) => {
                let OrphanConnection { socket, kept, .. } = orphan;
                listeners.push(LeftListener { note, socket, kept });
            }
            Err(_) => legacy.connections.push(orphan),
        }
    }
    listeners
}

/// Instances of an earlier daemon that have their tenants' room, but no function yet.
pub struct Waiting {
    instances: Vec<WaitingInstance>,
    connections: Connections,
}

struct WaitingInstance {
    orphan: Orphan,
    note: InstanceNote,
    lease: Lease,
    /// Held since tenants that nobody refers to are forgotten.
    tenant: Arc<Tenant>,
}

/// Gives each instance its share of what its tenant may have, before others ask for it: what
/// is kept ready comes after what lives. An instance for which there is none ends. To be called
/// when the quotas are known, and before functions are loaded.
pub fn reserve(shared: &NodeState, legacy: Legacy) -> Waiting {
    let Legacy { sandboxes, connections, problems } = legacy;
    for problem in problems {
        tracing::info!("something of the daemon before this one ends: {problem}");
    }
    let reserve = |orphan| reserve_one(shared, orphan);
    Waiting {
        instances: sandboxes.into_iter().filter_map(reserve).collect(),
        connections: by_instance(connections),
    }
}

fn reserve_one(shared: &NodeState, orphan: Orphan) -> Option<WaitingInstance> {
    let note: InstanceNote = serde_json::from_str(orphan.note()).ok()?;
    shared.note_instance(note.id);
    if note.has_volumes && !note.renews_volumes {
        // Before volumes are opened: that waits for who may still write there.
        log_end(shared, &note, VOLUMES_END);
        return None;
    }
    if note.has_volumes {
        volumes::expect_left();
    }
    let tenant = shared.tenants().of(TenantName::of(note.domain.as_ref()));
    let own = shared.limits().of(note.id);
    let Some(lease) = tenant.room().try_enter(own.map_or(note.memory, |own| own.memory())) else {
        log_end(shared, &note, &format!("the quota of {} is used up", tenant.name()));
        return None;
    };
    Some(WaitingInstance { orphan, note, lease, tenant })
}

fn by_instance(connections: Vec<OrphanConnection>) -> Connections {
    let mut all = Connections::new();
    for OrphanConnection { socket, others, note, kept } in connections {
        let Ok(note) = serde_json::from_str::<ConnectionNote>(&note) else { continue };
        let mut others = others.into_iter();
        if let Some(far) = others.next() {
            let addresses = Addresses { client: note.peer, gateway: note.local };
            let (instance, connection) = (note.instance, note.id);
            let (client, left) = (socket, others.next());
            let orphan = JoinedOrphan { instance, connection, addresses, client, far, left };
            // As soon as bytes are read, no other daemon can go on with it as it is.
            drop(kept);
            all.entry(note.instance).or_default().push(Inherited::Joined(orphan));
            continue;
        }
        let client = Client {
            id: note.id,
            socket,
            peer: note.peer,
            local: note.local,
            accepted_ns: note.accepted_ns,
            wants_head_only: note.wants_head_only,
            way: Way::HandedOver,
            admitted: None,
            shared: Weak::<()>::new(),
        };
        all.entry(note.instance).or_default().push(Inherited::HandedOver(Arc::new(client), kept));
    }
    all
}

/// Makes instances of an earlier daemon those of the functions that are served now. An
/// instance whose function has another image by now ends, unless it is a sandbox: that stays one of
/// its version. One whose function is not served any more ends. To be called when the functions are
/// known, and before clients are served.
pub fn take_over(catalog: &Arc<Catalog>, waiting: Waiting) {
    let Waiting { instances, mut connections } = waiting;
    if !instances.is_empty() {
        let all = instances.len();
        let taken = instances
            .into_iter()
            .filter_map(|instance| take_over_one(catalog, &mut connections, instance))
            .count();
        tracing::info!("took over {taken} of {all} instances of the daemon before this one");
    }
    volumes::go_on_with_left();
}

/// `None`: it has ended.
fn take_over_one(
    catalog: &Arc<Catalog>,
    connections: &mut Connections,
    instance: WaitingInstance,
) -> Option<()> {
    let WaitingInstance { orphan, note, lease, tenant } = instance;
    let ended = |why: &str| log_end(catalog.node(), &note, why);
    let service = version_with(catalog, &note).inspect_err(|why| ended(why)).ok()?;
    if !Arc::ptr_eq(service.tenant(), &tenant) {
        ended("its function is in another sharing domain by now");
        return None;
    }
    let connections = connections.remove(&note.id).unwrap_or_default();
    let attend = |client| attend_inherited(&service, client);
    let join = |orphan| join_inherited(&service, orphan);
    let taken = service.take_over(&note, lease, orphan, connections, (attend, join));
    taken.inspect_err(|error| ended(&error.to_string())).ok()
}

/// Says that an instance has ended. A sandbox has state that nobody else has.
fn log_end(node: &NodeState, note: &InstanceNote, why: &str) {
    let (function, instance) = (&note.function, note.id);
    match node.version_of_left(function, instance) {
        Some(version) => tracing::warn!(%function, version, instance, "ended a sandbox: {why}"),
        None => tracing::info!(%function, instance, "ended an instance: {why}"),
    }
}

/// The version of its function that an instance is of: one that is served, or for a sandbox one that
/// is not any more. Why there is none.
fn version_with(catalog: &Arc<Catalog>, note: &InstanceNote) -> Result<Arc<Service>, String> {
    let served = catalog.services().served(note.function.as_str());
    let served: Vec<Arc<Service>> = served.iter().flat_map(Served::services).cloned().collect();
    let of_image = |service: &&Arc<Service>| service.image() == note.image;
    let Some(number) = catalog.node().version_of_left(&note.function, note.id) else {
        return served.iter().find(of_image).cloned().ok_or_else(|| match served.is_empty() {
            true => "its function is served no longer".to_owned(),
            false => "it is of an older image".to_owned(),
        });
    };
    let has_its_files = |service: &&Arc<Service>| {
        note.origin.index.is_none_or(|index| service.launcher().index() == Some(index))
    };
    let its: Vec<_> = served.iter().filter(of_image).filter(has_its_files).collect();
    let of_number = |service: &&&Arc<Service>| [0, service.version()].contains(&number);
    let service = match its.iter().find(of_number) {
        Some(service) => Arc::clone(service),
        // One that has the same image will do, if its own cannot be had.
        None => match (catalog.older_with(note), its.first()) {
            (Ok(service), _) => service,
            (Err(_), Some(service)) => Arc::clone(service),
            (Err(why), None) => return Err(why.to_string()),
        },
    };
    service.hold(note.id);
    Ok(service)
}
