//! The table of system calls: number → handler → support note.
//!
//! `docs/syscalls.md` is generated from this table. A number without a row
//! returns `ENOSYS`, is counted, and is named in the trace.

use super::Arg::{Fd, Hex, Int, Octal, Str};
use super::Support::{Full, Missing, Partial};
use super::{Arg, Entry, Handler, Support};

/// Rows of the whole table, in any order; one block per subsystem.
pub const ENTRIES: &[Entry] = &[
    // fs

    // ipc and net

    // mm

    // task, signals, time
];

const fn row(number: u32, name: &'static str, args: &'static [Arg], handler: Handler, support: Support) -> Entry {
    Entry { number, name, args, handler, support }
}

/// Numbers beyond this have never been assigned on x86-64.
pub const NUMBER_LIMIT: usize = 512;

/// [`ENTRIES`] by number.
pub static BY_NUMBER: [Option<&'static Entry>; NUMBER_LIMIT] = {
    let mut table: [Option<&'static Entry>; NUMBER_LIMIT] = [None; NUMBER_LIMIT];
    let mut i = 0;
    while i < ENTRIES.len() {
        let number = ENTRIES[i].number as usize;
        assert!(table[number].is_none(), "two rows for one system call");
        table[number] = Some(&ENTRIES[i]);
        i += 1;
    }
    table
};
