//! Room for the bodies that the gateway reads as a whole: so many bytes for the node, of which no
//! tenant, and no function without one, has more than a share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Bytes of bodies of a node at a time.
const INTAKE_MAX: u64 = 64 << 20;
/// The part of these that one holder may have.
const SHARE: u64 = 8;

/// Too many bodies are being read: one sentence.
#[derive(Debug)]
pub(crate) struct NoRoom(pub String);

/// The room of a node.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rooms(Arc<Mutex<Taken>>);

#[derive(Debug, Default)]
struct Taken {
    bytes: u64,
    /// Those that have some of it.
    holders: HashMap<Holder, u64>,
}

/// Whose bodies are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    /// A tenant, by its domain.
    Tenant(String),
    /// A function without a domain.
    Function(String),
}

/// Room for a body. It is given back when this is dropped: keep it beside the bytes.
#[derive(Debug)]
pub(crate) struct Room {
    rooms: Rooms,
    holder: Holder,
    bytes: u64,
}

impl Rooms {
    /// Room for nothing yet.
    pub fn room(&self, holder: Holder) -> Room {
        Room { rooms: self.clone(), holder, bytes: 0 }
    }
}

impl Room {
    /// For how many bytes it is.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes it room for so many bytes, if it is for less.
    ///
    /// # Errors
    /// Too many bytes are being read; nothing changes.
    pub fn grow_to(&mut self, bytes: u64) -> Result<(), NoRoom> {
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            return Ok(());
        }
        let mut taken = self.rooms.0.lock().expect("no holder panics");
        let of_holder = taken.holders.get(&self.holder).copied().unwrap_or(0) + more;
        if of_holder > INTAKE_MAX / SHARE {
            let who = match &self.holder {
                Holder::Tenant(domain) => format!("for the functions of the tenant `{domain}`"),
                Holder::Function(name) => format!("for `{name}`"),
            };
            return Err(NoRoom(format!("too many bodies are being read {who}")));
        }
        if taken.bytes + more > INTAKE_MAX {
            return Err(NoRoom("too many bodies are being read on this node".to_owned()));
        }
        taken.bytes += more;
        taken.holders.insert(self.holder.clone(), of_holder);
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut taken = self.rooms.0.lock().expect("no holder panics");
        taken.bytes -= self.bytes;
        if let Some(of_holder) = taken.holders.get_mut(&self.holder) {
            *of_holder -= self.bytes;
            if *of_holder == 0 {
                taken.holders.remove(&self.holder);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_takes_an_eighth_and_eight_take_all() {
        let rooms = Rooms::default();
        let share = INTAKE_MAX / SHARE;
        let room = |name: &str| rooms.room(Holder::Tenant(name.to_owned()));
        let is_full = |room: &mut Room, bytes, word: &str| match room.grow_to(bytes) {
            Err(NoRoom(why)) => assert!(why.contains(word), "{why}"),
            other => panic!("{other:?}"),
        };
        // Clients that have sent nothing yet take nothing.
        let idle: Vec<Room> = (0..1000).map(|_| room("a")).collect();
        let mut first = room("a");
        first.grow_to(share - 1).unwrap();
        let mut second = room("a");
        is_full(&mut second, 2, "tenant `a`");
        second.grow_to(1).unwrap();
        // Others have theirs.
        let mut others: Vec<Room> = (0..7).map(|n| room(&n.to_string())).collect();
        others.iter_mut().for_each(|room| room.grow_to(share).unwrap());
        let mut last = rooms.room(Holder::Function("f".to_owned()));
        is_full(&mut last, 1, "node");
        drop((first, second, idle));
        last.grow_to(share).unwrap();
        drop((last, others));
        let taken = rooms.0.lock().unwrap();
        assert_eq!((taken.bytes, taken.holders.len()), (0, 0));
    }
}
