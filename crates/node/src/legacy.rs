//! What an earlier daemon has left: instances that live, and the connections that they have.
//! It was killed, has crashed or was restarted; the monitor has kept them ([`thaw_sandbox::take_over`]).

use crate::catalog::Catalog;
use crate::edge::Addresses;
use crate::gateway::{attend_inherited, join_inherited};
use crate::instance::{Client, ConnectionNote, Inherited, InstanceNote, JoinedOrphan, Way};
use crate::node::NodeState;
use crate::service::Service;
use crate::tenants::{Lease, Tenant, TenantName};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thaw_sandbox::{KeptForSuccessor, Legacy, Orphan, OrphanConnection};

/// Connections, by the number of their instance.
type Connections = HashMap<u64, Vec<Inherited>>;

/// What the next daemon has to know of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ListenerNote {
    /// Where it listens.
    pub listener: SocketAddr,
    /// Whether it takes datagrams.
    pub is_udp: bool,
}

/// A listener that an earlier daemon has left.
#[derive(Debug)]
pub(crate) struct LeftListener {
    pub note: ListenerNote,
    pub socket: OwnedFd,
    /// Keeps it for the daemon after this one, too.
    pub kept: KeptForSuccessor,
}

/// Takes the listeners out of what an earlier daemon has left.
pub(crate) fn take_listeners(legacy: &mut Legacy) -> Vec<LeftListener> {
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
    let tenant = shared.tenants().of(TenantName::of(note.domain.as_ref()));
    let own = shared.limits().of(note.id);
    let Some(lease) = tenant.room().try_enter(own.map_or(note.memory, |own| own.memory())) else {
        let (function, instance) = (&note.function, note.id);
        tracing::info!(%function, instance, "ended an instance: the quota of {} is used up", tenant.name());
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
    if instances.is_empty() {
        return;
    }
    let all = instances.len();
    let taken = instances
        .into_iter()
        .filter_map(|instance| take_over_one(catalog, &mut connections, instance))
        .count();
    tracing::info!("took over {taken} of {all} instances of the daemon before this one");
}

/// `None`: it has ended.
fn take_over_one(
    catalog: &Arc<Catalog>,
    connections: &mut Connections,
    instance: WaitingInstance,
) -> Option<()> {
    let WaitingInstance { orphan, note, lease, tenant } = instance;
    let (function, instance) = (&note.function, note.id);
    let service = match version_with(catalog, &note) {
        Ok(service) => service,
        Err(why) => {
            tracing::info!(%function, instance, "ended an instance: {why}");
            return None;
        }
    };
    if !Arc::ptr_eq(service.tenant(), &tenant) {
        tracing::info!(%function, instance, "ended an instance of another tenant");
        return None;
    }
    let connections = connections.remove(&note.id).unwrap_or_default();
    let attend = |client| attend_inherited(&service, client);
    let join = |orphan| join_inherited(&service, orphan);
    match service.take_over(&note, lease, orphan, connections, (attend, join)) {
        Ok(()) => Some(()),
        Err(error) => {
            tracing::info!(%function, instance, "an instance was not taken over: {error}");
            None
        }
    }
}

/// The version of its function that an instance is of: one that is served, or for a sandbox one that
/// is not any more. Why there is none.
fn version_with(catalog: &Arc<Catalog>, note: &InstanceNote) -> Result<Arc<Service>, String> {
    let node = catalog.node();
    let served = node.served(note.function.as_str());
    let served = served.ok_or("its function is served no longer")?;
    let is_sandbox = node.version_of_left(note.id).is_some();
    let has_its_files = |service: &Service| {
        note.origin.index.is_none_or(|index| service.launcher().index() == Some(index))
    };
    let is_its = |service: &&Arc<Service>| {
        service.image() == note.image && (has_its_files(service) || !is_sandbox)
    };
    let service = match served.services().find(is_its) {
        Some(service) => service.clone(),
        None if is_sandbox => catalog.older_with(note)?,
        None => return Err("it is of an older image".to_owned()),
    };
    if is_sandbox {
        service.hold(note.id);
    }
    Ok(service)
}
