//! Ids and keys of System V objects.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::IPC_PRIVATE;
use super::permissions::{Caller, Permissions};
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;

/// Makes the object if there is none with the key (semget(2)).
const IPC_CREAT: u32 = 0o1000;
/// Fails if there is one.
const IPC_EXCL: u32 = 0o2000;

/// An id is a place in the table and a sequence number (`IPCMNI` of Linux), so
/// that ids of objects that are gone mean nothing for long.
const PLACES: u32 = 32768;

/// The sequence number in an id.
pub fn sequence_of(id: i32) -> u16 {
    (id as u32 / PLACES) as u16
}

/// The place in an id: what `SEM_STAT` and its relatives take for one.
pub fn place_of(id: i32) -> u32 {
    id as u32 % PLACES
}

/// What has an owner.
pub trait Object {
    /// Owner and mode.
    fn permissions(&self) -> &KernelCell<Permissions>;
}

/// All objects of a kind.
pub struct Registry<T> {
    table: KernelCell<Table<T>>,
}

struct Table<T> {
    /// Id and object, by place.
    objects: BTreeMap<u32, (i32, Arc<T>)>,
    /// Ids by key.
    keys: BTreeMap<i32, i32>,
    sequence: u16,
}

impl<T> Default for Registry<T> {
    fn default() -> Self {
        let table = Table { objects: BTreeMap::new(), keys: BTreeMap::new(), sequence: 0 };
        Self { table: KernelCell::new(table) }
    }
}

impl<T: Object> Registry<T> {
    /// The id of the object with a key, which is made if `flags` say so (semget(2),
    /// msgget(2), shmget(2)). `fits` checks one that is there before its mode does;
    /// there may be `most` objects.
    pub fn get(
        &self,
        (key, flags): (i32, u32),
        caller: &Caller,
        most: usize,
        fits: impl FnOnce(&T) -> Result<()>,
        make: impl FnOnce(Permissions) -> Result<T>,
    ) -> Result<i32> {
        let known = match key {
            IPC_PRIVATE => None,
            key => self.table.borrow_mut().keys.get(&key).copied(),
        };
        match known {
            Some(_) if flags & (IPC_CREAT | IPC_EXCL) == IPC_CREAT | IPC_EXCL => Err(Errno::EEXIST),
            Some(id) => {
                let object = self.find(id)?;
                fits(&object)?;
                object.permissions().get().check(flags, caller)?;
                Ok(id)
            }
            None if key != IPC_PRIVATE && flags & IPC_CREAT == 0 => Err(Errno::ENOENT),
            None => {
                let object = make(Permissions::new(key, flags, caller))?;
                self.add(key, object, most)
            }
        }
    }

    fn add(&self, key: i32, object: T, most: usize) -> Result<i32> {
        let mut table = self.table.borrow_mut();
        if table.objects.len() >= most {
            return Err(Errno::ENOSPC);
        }
        let taken = table.objects.keys().zip(0u32..).take_while(|(place, at)| *place == at);
        let place = taken.count() as u32;
        let id = (u32::from(table.sequence) * PLACES + place) as i32;
        table.sequence = table.sequence.wrapping_add(1);
        table.objects.insert(place, (id, Arc::new(object)));
        if key != IPC_PRIVATE {
            table.keys.insert(key, id);
        }
        Ok(id)
    }

    /// The object with an id; `EINVAL`.
    pub fn find(&self, id: i32) -> Result<Arc<T>> {
        match self.at_place(place_of(id)) {
            Ok((known, object)) if known == id => Ok(object),
            _ => Err(Errno::EINVAL),
        }
    }

    /// The object at a place, with its id; `EINVAL`.
    pub fn at_place(&self, place: u32) -> Result<(i32, Arc<T>)> {
        self.table.borrow_mut().objects.get(&place).cloned().ok_or(Errno::EINVAL)
    }

    /// Removes an object.
    pub fn remove(&self, id: i32) {
        let removed = self.table.borrow_mut().objects.remove(&place_of(id));
        if let Some((_, object)) = removed {
            self.forget_key(object.permissions().get().key);
        }
    }

    /// Lets a key be used for another object.
    pub fn forget_key(&self, key: i32) {
        self.table.borrow_mut().keys.remove(&key);
    }

    /// All objects with their ids.
    pub fn all(&self) -> Vec<(i32, Arc<T>)> {
        self.table.borrow_mut().objects.values().cloned().collect()
    }

    /// Number of objects.
    pub fn count(&self) -> usize {
        self.table.borrow_mut().objects.len()
    }

    /// The last place in use, 0 if none is: what `IPC_INFO` returns.
    pub fn last_place(&self) -> u32 {
        self.table.borrow_mut().objects.last_key_value().map_or(0, |(&place, _)| place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Credentials;

    struct Thing(KernelCell<Permissions>);

    impl Object for Thing {
        fn permissions(&self) -> &KernelCell<Permissions> {
            &self.0
        }
    }

    fn get(things: &Registry<Thing>, key: i32, flags: u32) -> Result<i32> {
        let credentials = Credentials { euid: 5, egid: 5, ..Credentials::default() };
        let caller = Caller { credentials, owner: Default::default() };
        let make = |permissions| Ok(Thing(KernelCell::new(permissions)));
        things.get((key, flags), &caller, 3, |_| Ok(()), make)
    }

    #[test]
    fn keys_find_objects() {
        let things = Registry::default();
        assert_eq!(get(&things, 7, 0), Err(Errno::ENOENT));
        let id = get(&things, 7, IPC_CREAT | 0o400).unwrap();
        assert_eq!(get(&things, 7, 0), Ok(id));
        assert_eq!(get(&things, 7, IPC_CREAT | IPC_EXCL), Err(Errno::EEXIST));
        assert_eq!(get(&things, 7, 0o200), Err(Errno::EACCES));
        let private = get(&things, IPC_PRIVATE, 0).unwrap();
        assert_ne!(get(&things, IPC_PRIVATE, 0).unwrap(), private);
        assert_eq!(get(&things, IPC_PRIVATE, 0), Err(Errno::ENOSPC));
        assert_eq!((things.count(), things.last_place()), (3, 2));
    }

    #[test]
    fn ids_of_what_is_gone_mean_nothing() {
        let things = Registry::default();
        let first = get(&things, 7, IPC_CREAT).unwrap();
        get(&things, 8, IPC_CREAT).unwrap();
        things.remove(first);
        assert_eq!(get(&things, 7, 0), Err(Errno::ENOENT));
        let second = get(&things, 7, IPC_CREAT).unwrap();
        assert_eq!((place_of(second), place_of(first)), (0, 0));
        assert!(things.find(first).is_err() && things.find(second).is_ok());
        assert!(things.find(-1).is_err() && sequence_of(second) > sequence_of(first));
    }
}
