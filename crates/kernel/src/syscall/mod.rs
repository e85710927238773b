//! System calls: the table and the trace.

pub mod activity;
pub mod files;
pub mod ipc;
pub mod memory;
pub mod sockets;
pub mod table;
pub mod tasks;
pub mod trace;

use crate::args::{Args, Handler, Kind};
use crate::errno::{Errno, Result};
use crate::platform::registers::Frame;
use crate::task::ptrace::calls::{self, Entered};
use crate::task::{host_process, seccomp, watched};

/// How well a system call is supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// As on Linux.
    Full,
    /// As on Linux except for what the note says.
    Partial(&'static str),
    /// Returns the error that the note explains.
    Missing(&'static str),
}

/// A row of the table.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Number in the x86-64 ABI.
    pub number: u32,
    /// Name.
    pub name: &'static str,
    /// How to show the arguments.
    pub args: &'static [Kind],
    /// The handler.
    pub handler: Handler,
    /// What works.
    pub support: Support,
}

/// System calls that were counted: while somebody waits for the program's entry point, and those that
/// Thaw does not have.
#[derive(Default)]
pub struct Counts {
    /// Those of threads.
    pub recent: activity::Recent,
    /// Unknown ones.
    pub unknown: trace::Unknown,
}

/// Performs the system call of a frame.
pub fn perform(frame: &Frame) {
    host_process::count_call();
    if !watched::watchers().is_empty() {
        return perform_watched(frame);
    }
    let result = call(entry_of(frame), frame);
    frame.set_rax(to_register(result));
}

/// The row of the table for the call of a frame.
#[inline]
fn entry_of(frame: &Frame) -> Option<&'static Entry> {
    let number = usize::try_from(frame.orig_rax()).ok()?;
    table::BY_NUMBER.get(number).copied().flatten()
}

#[inline]
fn call(entry: Option<&Entry>, frame: &Frame) -> Result<u64> {
    match entry {
        Some(entry) => (entry.handler)(&Args(frame.arguments())),
        None => {
            trace::count_unknown(frame.orig_rax());
            Err(Errno::ENOSYS)
        }
    }
}

#[inline]
fn to_register(result: Result<u64>) -> u64 {
    match result {
        Ok(value) => value,
        Err(error) => error.to_return(),
    }
}

/// The same while somebody watches: the trace, a tracer (ptrace(2)), who may change the call, or
/// filters (seccomp(2)), which come behind the tracer.
fn perform_watched(frame: &Frame) {
    // What tracers see before the call is done.
    frame.set_rax(Errno::ENOSYS.to_return());
    if calls::enter(frame) == Entered::Perform {
        match calls::is_left_out(frame) {
            // The filters are asked all the same (`syscall_trace_enter` in Linux' kernel/entry/common.c).
            true => drop(seccomp::enter(frame)),
            false => perform_traced(frame),
        }
    }
    calls::leave(frame);
}

fn perform_traced(frame: &Frame) {
    let entry = entry_of(frame);
    trace::enter(entry, frame);
    if seccomp::enter(frame) == Entered::Perform {
        let result = call(entry_of(frame), frame);
        frame.set_rax(to_register(result));
    }
    trace::leave(entry, frame);
}
