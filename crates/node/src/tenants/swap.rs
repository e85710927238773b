//! How much a tenant has in swap files, the memory of its hibernated instances.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard};
use thaw_home::config::{ByteSize, QUOTAS_FILE};

/// Room for the swap files of a tenant. Each file takes a [`SwapLease`] of it.
#[derive(Debug, Default)]
pub struct SwapRoom {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    most: Option<u64>,
    taken: u64,
}

/// The room that one swap file takes, given back when it is dropped.
#[derive(Debug)]
pub struct SwapLease {
    room: Arc<SwapRoom>,
    bytes: u64,
}

impl SwapRoom {
    /// Takes room for a file of `bytes`, which takes the place of another one.
    ///
    /// # Errors
    /// The tenant would have more than it may ([`ErrorKind::QuotaExceeded`]).
    pub fn take(self: &Arc<Self>, bytes: u64, old: Option<&SwapLease>) -> io::Result<SwapLease> {
        let mut state = self.state();
        let needed = state.taken.saturating_add(bytes) - old.map_or(0, |old| old.bytes);
        match state.most.filter(|most| needed > *most) {
            Some(most) => Err(exceeded(most, needed)),
            None => {
                state.taken = state.taken.saturating_add(bytes);
                Ok(SwapLease { room: self.clone(), bytes })
            }
        }
    }

    /// Most bytes that a file may have which takes the place of another one.
    pub fn left(&self, old: Option<&SwapLease>) -> u64 {
        let state = self.state();
        let others = state.taken - old.map_or(0, |old| old.bytes);
        state.most.map_or(u64::MAX, |most| most.saturating_sub(others))
    }

    /// Bytes that are taken.
    pub fn taken(&self) -> u64 {
        self.state().taken
    }

    /// Sets the bound. What is taken stays so.
    pub(crate) fn set(&self, most: Option<ByteSize>) {
        self.state().most = most.map(ByteSize::bytes);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

impl Drop for SwapLease {
    fn drop(&mut self) {
        self.room.state().taken -= self.bytes;
    }
}

fn exceeded(most: u64, needed: u64) -> io::Error {
    let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let text = format!(
        "the quota of its tenant is {:.1} MiB of swap files, and with this one it would have \
         {:.1} MiB at least; have the operator raise `swap` in {QUOTAS_FILE}",
        mebibytes(most),
        mebibytes(needed)
    );
    io::Error::new(ErrorKind::QuotaExceeded, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_files_are_counted_until_they_are_gone() {
        let room: Arc<SwapRoom> = Arc::default();
        let unbounded = room.take(1 << 40, None).unwrap();
        assert_eq!((room.taken(), room.left(None)), (1 << 40, u64::MAX));
        drop(unbounded);
        room.set(Some(ByteSize(100)));
        let first = room.take(60, None).unwrap();
        assert_eq!(room.left(None), 40);
        let refused = room.take(41, None).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::QuotaExceeded);
        assert!(refused.to_string().contains("raise `swap` in tenants.toml"), "{refused}");
        let second = room.take(40, None).unwrap();
        assert_eq!((room.taken(), room.left(None)), (100, 0));
        drop((first, second));
        assert_eq!(room.taken(), 0);
    }

    #[test]
    fn a_file_takes_the_place_of_the_one_before() {
        let room: Arc<SwapRoom> = Arc::default();
        room.set(Some(ByteSize(100)));
        let old = room.take(80, None).unwrap();
        assert_eq!(room.left(Some(&old)), 100);
        room.take(101, Some(&old)).unwrap_err();
        let new = room.take(90, Some(&old)).unwrap();
        drop(old);
        assert_eq!((room.taken(), room.left(None)), (90, 10));
        // A lowered bound takes nothing away, and lets nothing new in.
        room.set(Some(ByteSize(50)));
        assert_eq!((room.taken(), room.left(None)), (90, 0));
        room.take(51, Some(&new)).unwrap_err();
    }
}
