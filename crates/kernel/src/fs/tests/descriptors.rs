//! The descriptor table.

use super::*;
use crate::fs::fd_table::{FdTable, OnExec};

fn file(world: &World) -> Arc<OpenFile> {
    world.open("/dev/null", OpenFlags::RDWR).unwrap()
}

#[test]
fn the_lowest_free_number_is_taken() {
    let world = World::new();
    let mut table = FdTable::new();
    for expected in 0..5 {
        assert_eq!(table.insert(file(&world), OnExec::Keep, 100), Ok(expected));
    }
    table.remove(1).unwrap();
    table.remove(3).unwrap();
    assert_eq!(table.remove(3).err(), Some(Errno::EBADF));
    assert_eq!(table.insert(file(&world), OnExec::Keep, 100), Ok(1));
    assert_eq!(table.insert_from(10, file(&world), OnExec::Keep, 100), Ok(10));
    assert_eq!(table.insert(file(&world), OnExec::Keep, 100), Ok(3));
    assert_eq!(table.insert(file(&world), OnExec::Keep, 100), Ok(5));
    assert_eq!(table.insert_from(10, file(&world), OnExec::Keep, 100), Ok(11));
    assert_eq!(table.get(-1).err(), Some(Errno::EBADF));
    assert_eq!(table.get(99).err(), Some(Errno::EBADF));
}

#[test]
fn limits_are_kept() {
    let world = World::new();
    let mut table = FdTable::new();
    for _ in 0..3 {
        table.insert(file(&world), OnExec::Keep, 3).unwrap();
    }
    assert_eq!(table.insert(file(&world), OnExec::Keep, 3), Err(Errno::EMFILE));
    assert_eq!(table.replace(3, file(&world), OnExec::Keep, 3).err(), Some(Errno::EBADF));
    assert_eq!(table.replace(-1, file(&world), OnExec::Keep, 3).err(), Some(Errno::EBADF));
    assert!(table.replace(2, file(&world), OnExec::Keep, 3).unwrap().is_some());
}

#[test]
fn a_replaced_number_is_not_given_out() {
    let world = World::new();
    let mut table = FdTable::new();
    table.replace(0, file(&world), OnExec::Keep, 100).unwrap();
    table.replace(2, file(&world), OnExec::Keep, 100).unwrap();
    assert_eq!(table.insert(file(&world), OnExec::Keep, 100), Ok(1));
    assert_eq!(table.insert(file(&world), OnExec::Keep, 100), Ok(3));
}

#[test]
fn execve_closes_what_it_should() {
    let world = World::new();
    let mut table = FdTable::new();
    table.insert(file(&world), OnExec::Keep, 100).unwrap();
    table.insert(file(&world), OnExec::Close, 100).unwrap();
    table.insert(file(&world), OnExec::Keep, 100).unwrap();
    table.insert(file(&world), OnExec::Keep, 100).unwrap();
    table.close_range_on_exec(3, u32::MAX);
    let forked = table.clone();
    assert_eq!(table.close_on_exec().len(), 2);
    assert_eq!(table.numbers().collect::<Vec<_>>(), [0, 2]);
    assert_eq!(forked.numbers().count(), 4);
    assert!(Arc::ptr_eq(&forked.get(2).unwrap(), &table.get(2).unwrap()));
    assert_eq!(table.remove_range(1, u32::MAX).len(), 1);
    assert_eq!(table.numbers().collect::<Vec<_>>(), [0]);
}

#[test]
fn a_reserved_number_is_neither_free_nor_open() {
    let world = World::new();
    let mut table = FdTable::new();
    assert_eq!(table.reserve(2), Ok(0));
    assert_eq!(table.insert(file(&world), OnExec::Keep, 2), Ok(1));
    assert_eq!(table.reserve(2), Err(Errno::EMFILE));
    assert_eq!(table.get(0).err(), Some(Errno::EBADF));
    assert_eq!(table.remove(0).err(), Some(Errno::EBADF));
    assert_eq!(table.on_exec(0).err(), Some(Errno::EBADF));
    assert_eq!(table.set_on_exec(0, OnExec::Close).err(), Some(Errno::EBADF));
    assert_eq!(table.replace(0, file(&world), OnExec::Keep, 2).err(), Some(Errno::EBUSY));
    assert_eq!(table.numbers().collect::<Vec<_>>(), [1]);
    assert_eq!(table.files().count(), 1);
    assert!(table.close_on_exec().is_empty());
    assert_eq!(table.remove_range(0, u32::MAX).len(), 1);
    // A copy does not have what another table's call reserves.
    let mut copy = table.copy();
    assert_eq!(copy.insert(file(&world), OnExec::Keep, 2), Ok(0));
    table.fill(0, file(&world), OnExec::Close);
    assert_eq!(table.on_exec(0), Ok(OnExec::Close));
    table.cancel(0);
    assert!(table.get(0).is_ok(), "an open descriptor is not given back");
}

#[test]
fn a_reserved_number_that_is_given_back_is_free() {
    let world = World::new();
    let mut table = FdTable::new();
    table.insert(file(&world), OnExec::Keep, 100).unwrap();
    let reserved = table.reserve(100).unwrap();
    table.insert(file(&world), OnExec::Keep, 100).unwrap();
    table.cancel(reserved);
    assert_eq!(table.insert(file(&world), OnExec::Keep, 100), Ok(reserved));
}
