//! The trace of system calls (`THAW_TRACE=syscalls`), and the count of those
//! that Thaw does not have.

use alloc::collections::BTreeMap;
use core::fmt::Write;

use super::{Args, Entry, Kind, Support, activity};
use crate::errno::Errno;
use crate::platform::panic::Console;
use crate::platform::registers::Frame;
use crate::platform::user::UserAddress;
use crate::state::{OfBoot, kernel};
use crate::sync::KernelCell;
use crate::task::current;
use crate::task::signal::Signal;
use crate::task::watched::{self, Watchers};

/// Numbers of unknown calls and how often they were made, of each boot its own.
#[derive(Default)]
pub struct Unknown {
    counts: KernelCell<Option<OfBoot<BTreeMap<u64, u64>>>>,
}

/// Most numbers of unknown calls that are counted: a program may try all that there could be.
const UNKNOWN_MAX: usize = 1024;

impl Unknown {
    /// No copy needs what was counted before it.
    pub fn prepare_freeze(&self) {
        *self.counts.borrow_mut() = None;
    }
}

/// Switches the trace on or off for this boot, in which nothing is counted yet.
pub fn enable(on: bool) {
    watched::set(if on { Watchers::PRINTED } else { Watchers::empty() });
}

/// Whether calls are traced.
pub fn enabled() -> bool {
    watched::watchers().contains(Watchers::PRINTED)
}

/// Has calls counted from now on; whether they were before.
pub fn begin_to_count() -> bool {
    watched::add(Watchers::COUNTED).contains(Watchers::COUNTED)
}

/// Counts a call that is not in the table, and names it when it is first seen.
pub fn count_unknown(number: u64) {
    let mut unknown = kernel().calls.unknown.counts.borrow_mut();
    let counts = OfBoot::of_this(&mut unknown);
    if counts.len() >= UNKNOWN_MAX && !counts.contains_key(&number) {
        return;
    }
    let count = counts.entry(number).or_insert(0);
    *count += 1;
    if *count == 1 && enabled() {
        crate::console!("thaw: system call {number} is not implemented; it returned ENOSYS");
    }
}

/// How often each unknown call was made.
pub fn unknown_calls() -> BTreeMap<u64, u64> {
    OfBoot::of_this(&mut kernel().calls.unknown.counts.borrow_mut()).clone()
}

/// Prints the unknown calls at the end of a traced program.
pub fn summary() {
    if enabled() {
        for (number, count) in unknown_calls() {
            crate::console!(
                "thaw: system call {number} was made {count} times and is not implemented"
            );
        }
    }
}

/// Before the call: printed at once if it may not come back to tell its result.
pub fn enter(entry: Option<&Entry>, frame: &Frame) {
    if watched::watchers().contains(Watchers::COUNTED) {
        activity::count(entry);
    }
    if !enabled() {
        return;
    }
    // exit, exit_group, execve, rt_sigreturn and calls that may block for ever
    // are worth seeing even if nothing follows.
    if entry.is_some_and(|entry| matches!(entry.number, 59 | 60 | 231 | 322)) {
        let mut line = Console::new();
        write_call(&mut line, entry, frame);
        let _ = writeln!(line, " ...");
        line.flush();
    }
}

/// After the call.
pub fn leave(entry: Option<&Entry>, frame: &Frame) {
    if !enabled() {
        return;
    }
    let mut line = Console::new();
    write_call(&mut line, entry, frame);
    let _ = match Errno::from_return(frame.rax()) {
        Ok(value) if value > 0xffff_ffff => writeln!(line, " = {value:#x}"),
        Ok(value) => writeln!(line, " = {value}"),
        Err(error) => match entry.map(|entry| entry.support) {
            Some(Support::Missing(note)) => writeln!(line, " = -1 {} ({note})", error.name()),
            Some(_) => writeln!(line, " = -1 {}", error.name()),
            None => writeln!(line, " = -1 {} (not implemented)", error.name()),
        },
    };
    line.flush();
}

fn write_call(line: &mut Console, entry: Option<&Entry>, frame: &Frame) {
    let args = Args(frame.arguments());
    let _ = write!(line, "[{}] ", current().tid());
    let Some(entry) = entry else {
        let _ = write!(
            line,
            "syscall_{}({:#x}, {:#x}, {:#x}, {:#x}, {:#x}, {:#x})",
            frame.orig_rax(),
            args.0[0],
            args.0[1],
            args.0[2],
            args.0[3],
            args.0[4],
            args.0[5]
        );
        return;
    };
    let _ = write!(line, "{}(", entry.name);
    for (i, kind) in entry.args.iter().enumerate() {
        if i > 0 {
            let _ = write!(line, ", ");
        }
        write_argument(line, *kind, args.0[i]);
    }
    let _ = write!(line, ")");
}

fn write_argument(line: &mut Console, kind: Kind, value: u64) {
    let _ = match kind {
        Kind::Fd if value as i32 == -100 => write!(line, "AT_FDCWD"),
        Kind::Fd => write!(line, "{}", value as i32),
        Kind::Int => write!(line, "{}", value as i64),
        Kind::Hex if value == 0 => write!(line, "0"),
        Kind::Hex => write!(line, "{value:#x}"),
        Kind::Octal => write!(line, "{value:#o}"),
        Kind::Str => match UserAddress(value).read_string(200) {
            Ok(text) => write!(line, "\"{}\"", text.escape_ascii()),
            Err(_) => write!(line, "{value:#x}"),
        },
    };
}

/// A fault that ends the process, with the registers.
pub fn fatal_fault(frame: &Frame, signal: Signal, code: i32, address: u64) {
    if enabled() {
        crate::console!(
            "[{}] --- signal {} code {code} address {address:#x} at rip {:#x}, rsp {:#x}, rax {:#x} ---",
            current().tid(),
            signal.number(),
            frame.rip(),
            frame.rsp(),
            frame.rax()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    #[test]
    fn numbers_of_unknown_calls_have_a_bound_and_are_in_no_image() {
        let _sandbox = Sandbox::new();
        for number in 0..3 * UNKNOWN_MAX as u64 {
            count_unknown(1 << 20 | number);
        }
        count_unknown(1 << 20);
        let counts = unknown_calls();
        assert_eq!((counts.len(), counts[&(1 << 20)]), (UNKNOWN_MAX, 2));
        kernel().calls.unknown.prepare_freeze();
        assert!(unknown_calls().is_empty());
    }
}
