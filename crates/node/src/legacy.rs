//! What an earlier daemon has left: instances that live, and the connections that they have.
//! It was killed, or it has crashed; the monitor has kept them ([`thaw_sandbox::take_over`]).

use crate::clock::monotonic_ns;
use crate::instance::{Client, ConnectionNote, InstanceNote, Way};
use crate::node::Shared;
use std::collections::HashMap;
use std::sync::Arc;
use thaw_sandbox::{KeptForSuccessor, Legacy, Orphan, OrphanConnection};

/// Connections, by the number of their instance.
type Connections = HashMap<u64, Vec<(Arc<Client>, KeptForSuccessor)>>;

/// Makes instances of an earlier daemon those of the functions that are served now. An
/// instance whose function has another image by now, or is not served any more, ends. To be
/// called when the functions are known, and before clients are served.
pub fn take_over(shared: &Arc<Shared>, legacy: Legacy) {
    let Legacy { sandboxes, connections, problems } = legacy;
    for problem in problems {
        tracing::debug!(
            "something of the daemon before this one could not be taken over: {problem}"
        );
    }
    if sandboxes.is_empty() {
        return;
    }
    let mut connections = by_instance(shared, connections);
    let all = sandboxes.len();
    let taken = sandboxes
        .into_iter()
        .filter_map(|orphan| take_over_one(shared, &mut connections, orphan))
        .count();
    tracing::info!("took over {taken} of {all} instances of the daemon before this one");
}

fn by_instance(shared: &Shared, connections: Vec<OrphanConnection>) -> Connections {
    let mut all = Connections::new();
    for OrphanConnection { socket, note, kept } in connections {
        let Ok(note) = serde_json::from_str::<ConnectionNote>(&note) else { continue };
        shared.number_from(note.id + 1);
        let client = Client {
            id: note.id,
            socket,
            peer: note.peer,
            local: note.local,
            accepted_ns: monotonic_ns(),
            wants_head_only: note.wants_head_only,
            way: Way::HandedOver,
            admitted: None,
        };
        all.entry(note.instance).or_default().push((Arc::new(client), kept));
    }
    all
}

/// `None`: it has ended.
fn take_over_one(
    shared: &Arc<Shared>,
    connections: &mut Connections,
    orphan: Orphan,
) -> Option<()> {
    let note: InstanceNote = serde_json::from_str(orphan.note()).ok()?;
    shared.number_from(note.id + 1);
    let (function, instance) = (&note.function, note.id);
    let service = shared.route(function.as_str())?;
    if service.image() != note.image {
        tracing::info!(%function, instance, "ended an instance of an older image");
        return None;
    }
    let connections = connections.remove(&note.id).unwrap_or_default();
    match service.take_over(&note, orphan, connections) {
        Ok(()) => Some(()),
        Err(error) => {
            tracing::info!(%function, instance, "an instance was not taken over: {error}");
            None
        }
    }
}
