//! Hibernating in place (Hibernate Container, §3.2): the sandbox keeps its process, its virtual
//! CPUs and its descriptors, and gives up all memory that a file of the host holds.
//!
//! ```text
//! MSG_REST ──▶ at rest: the host writes the memory to a file ──MSG_HIBERNATE──▶ hibernated
//!    ▲              │                                                            │
//!    └── running ◀──┴────────── a message, a client, a due timer ◀───────────────┘
//! ```
//!
//! The memory comes back byte for byte at the same addresses, so nothing is made anew: host
//! processes, descriptors and clocks are those from before. In between there is no heap. This
//! code runs on the idle stack, in the per-boot area, and keeps the kernel lock all the time: a
//! vCPU that a signal wakes waits for the lock, outside of all that is gone.
#![allow(unsafe_code)]

use alloc::vec::Vec;

use thaw_abi::control::{
    AWAKE_DESCRIPTOR, AWAKE_MESSAGE, AWAKE_TIMER, AWAKE_UNANSWERED, Awake, Hibernate, MSG_FAILED,
    MSG_HIBERNATE, MSG_HIBERNATE_SEALED, MSG_HIBERNATED, MSG_RESTING, MSG_TRIM, MSG_UNSEAL,
    MSG_WAKE, NO_DEPTH, PopulateRange, REST_TIMERS, REST_TO_TRIM, Rest, Resting, Trim, TrimRange,
};
use thaw_abi::image::Mapping;

use super::report::Use;
use crate::errno::{Errno, Result};
use crate::host::control::Message;
use crate::host::gate::Gate;
use crate::host::{control, phases};
use crate::mm::image::{Mappings, Memory};
use crate::mm::{arena, heap, lazy, populate, swap};
use crate::platform::boot_area::AWAITED;
use crate::platform::machine::{
    Clocks, HostFd, HostFiles, Machine, Memory as _, PollFd, Processes,
};
use crate::platform::memory::GuestRange;

use crate::platform::{kernel_lock, panic};
use crate::state::kernel;
use crate::task::{host_poll, host_process};
use crate::time::timer;

/// Whether the sandbox has been hibernated in this boot, so that pages that are not present may
/// have content.
pub fn has_been_hibernated() -> bool {
    swap::epoch() > 0
}

/// What ends a rest or a hibernation. It is outside of all saved memory.
struct Awaited {
    /// The first so many of [`AWAITED`].
    descriptors: usize,
    /// When the next timer of the guest is due, if that matters, on the host's monotonic clock
    /// in nanoseconds.
    timer_ns: Option<u64>,
}

/// How a rest has ended.
struct Woken {
    /// `AWAKE_*`.
    cause: u32,
    /// When, on the host's monotonic clock in nanoseconds.
    at_ns: u64,
    was_hibernated: bool,
}

impl Woken {
    fn by(cause: u32) -> Self {
        Self { cause, at_ns: Machine::monotonic_ns(), was_hibernated: false }
    }
}

/// Tells the host that the sandbox is at rest, and hibernates if it says so. Returns when the
/// sandbox goes on, whatever the reason.
pub(super) fn rest(rest: &Rest) {
    phases::say_awake();
    let woken = rest_until_woken(rest);
    phases::awake(Awake {
        number: rest.number,
        woken_ns: woken.at_ns,
        ready_ns: Machine::monotonic_ns(),
        // It is told when it has.
        answered_ns: 0,
        cause: woken.cause,
        was_hibernated: woken.was_hibernated.into(),
    });
}

fn rest_until_woken(&Rest { number, flags, .. }: &Rest) -> Woken {
    let Some(awaited) = Awaited::now(flags) else { return Woken::by(AWAKE_DESCRIPTOR) };
    if flags & REST_TO_TRIM != 0 && arena::is_shared() {
        // Who knows the memory of the first of several processes may be another one than this.
        return Woken::by(AWAKE_UNANSWERED);
    }
    let report = match flags & REST_TO_TRIM {
        0 => super::come_to_rest(Use::Itself),
        _ => Vec::new(),
    };
    let resting =
        Resting { number, report_address: report.as_ptr() as u64, report_len: report.len() as u64 };
    control::send(MSG_RESTING, 0, bytemuck::bytes_of(&resting), &[]);
    loop {
        let cause = awaited.wait();
        if cause != AWAKE_MESSAGE {
            return Woken::by(cause);
        }
        match Answer::read(number) {
            Answer::None => {}
            Answer::GoOn => return Woken::by(AWAKE_MESSAGE),
            Answer::Hibernate(command, file, gate) => match image_depth(&command) {
                // What the file refers to could not be mapped again.
                Some(depth) if !lazy::has_image_of(depth) => {
                    Machine::close(file);
                    return Woken::by(AWAKE_MESSAGE);
                }
                _ => return hibernate(&command, file, gate.as_ref(), &awaited),
            },
        }
    }
}

/// What the host says to a sandbox at rest.
enum Answer {
    /// Nothing that matters now.
    None,
    /// There is something to do.
    GoOn,
    /// To hibernate, over this file, whose content comes back through the gate if there is one.
    Hibernate(Hibernate, HostFd, Option<Gate>),
}

impl Answer {
    /// Reads what is there. As long as the sandbox is at rest the heap must not change, so
    /// that a message may be kept only if the rest ends.
    fn read(number: u64) -> Self {
        let Some(message) = control::look_for_message() else { return Self::None };
        match (message.kind, message.fds()) {
            (MSG_HIBERNATE, &[file]) => Self::to_hibernate(&message, number, file, None),
            (MSG_HIBERNATE_SEALED, &[file, gate]) => {
                Self::to_hibernate(&message, number, file, Some(Gate::new(HostFd::new(gate))))
            }
            (MSG_TRIM, _) => {
                trim(&message, number);
                Self::None
            }
            (MSG_WAKE, _) => Self::GoOn,
            _ => {
                control::handle_later(&message);
                Self::GoOn
            }
        }
    }

    fn to_hibernate(message: &Message, number: u64, file: i32, gate: Option<Gate>) -> Self {
        match message.split::<Hibernate>() {
            Ok((command, _)) if command.number == number => {
                Self::Hibernate(*command, HostFd::new(file), gate)
            }
            // It was meant for an earlier rest.
            _ => {
                Machine::close(HostFd::new(file));
                Self::None
            }
        }
    }
}

/// Gives back pages of the guest that have become equal again to those of the files that they are private
/// copies of: the next touch finds the same there. Does nothing if the message is of an earlier rest.
fn trim(message: &Message, number: u64) {
    let Ok((trim, ranges)) = message.split::<Trim>() else { return };
    if trim.number != number {
        return;
    }
    let Ok((ranges, _)) = control::array::<TrimRange>(ranges, trim.count) else { return };
    for range in ranges {
        // What cannot be given back stays as it is.
        let _ = GuestRange::new(range.start, range.len).and_then(Machine::discard);
    }
}

/// Has the host decrypt the file and verify it, and waits for that. Uses no saved memory.
fn unseal(gate: &Gate) -> Result<()> {
    /// How long the host may take: the daemon that has the key may be gone, and somebody else may keep
    /// the other end.
    const PATIENCE_NS: u64 = 300_000_000_000;
    control::send(MSG_UNSEAL, 0, &[], &[]);
    gate.wait(Some(PATIENCE_NS))
}

impl Awaited {
    /// What the sandbox waits for now; `None` if that are too many descriptors.
    fn now(flags: u32) -> Option<Self> {
        let offset = kernel().clocks.offset();
        let timer = timer::next_deadline().filter(|_| flags & REST_TIMERS != 0);
        let timer_ns = timer.map(|deadline| deadline.0.wrapping_sub(offset));
        Some(Self { descriptors: host_poll::note_awaited()?, timer_ns })
    }

    /// Waits for it; says why the wait has ended (`AWAKE_*`). Uses no saved memory.
    fn wait(&self) -> u32 {
        loop {
            let left = self.timer_ns.map(|at| at.saturating_sub(Machine::monotonic_ns()));
            if left == Some(0) {
                return AWAKE_TIMER;
            }
            let awaited = self.descriptors();
            match Machine::poll(awaited, left) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) if awaited.first().is_some_and(|control| control.revents != 0) => {
                    return AWAKE_MESSAGE;
                }
                // Whoever asks again finds out what is wrong.
                Ok(_) | Err(_) => return AWAKE_DESCRIPTOR,
            }
        }
    }

    fn descriptors(&self) -> &'static mut [PollFd] {
        let cells = AWAITED.cells(self.descriptors);
        // SAFETY: cells of the table, which this module alone uses after they were noted, one
        // wait after the other, under the kernel lock.
        unsafe { core::slice::from_raw_parts_mut(cells.as_ptr() as *mut PollFd, cells.len()) }
    }
}

/// The depth of the image among the ancestors of the file, if that has any.
fn image_depth(command: &Hibernate) -> Option<u32> {
    (command.image_depth != NO_DEPTH).then_some(command.image_depth)
}

/// Gives up the memory that the file holds, waits, and takes it back. On the way there is no
/// heap, and no memory of the guest. If a host process does not give up its own, the sandbox goes
/// on.
fn hibernate(command: &Hibernate, file: HostFd, gate: Option<&Gate>, awaited: &Awaited) -> Woken {
    lazy::replace_files(file, image_depth(command));
    swap::note(command);
    let given_up = swap::is_whole().and_then(|()| give_up_memory());
    if !given_up.unwrap_or_else(|error| fail("its memory cannot be given up", error)) {
        return Woken::by(AWAKE_UNANSWERED);
    }
    control::send(MSG_HIBERNATED, 0, &[], &[]);
    let woken = Woken { was_hibernated: true, ..Woken::by(awaited.wait()) };
    if let Err(error) = gate.map_or(Ok(()), unseal) {
        fail("its encrypted swap file has no key any more", error);
    }
    let is_back = swap::is_whole().and_then(|()| match arena::is_shared() {
        true => host_process::take_back_first(),
        false => take_back_memory(command, file),
    });
    is_back.unwrap_or_else(|error| fail("its swap file cannot be read", error));
    woken
}

/// Gives up the memory of all host processes, and that which they share; whether they have.
fn give_up_memory() -> Result<bool> {
    if arena::is_shared() {
        if !host_process::others_give_up() {
            return Ok(false);
        }
        arena::discard(&arena::saved_in_use())?;
    }
    swap::give_up()?;
    Ok(true)
}

/// Maps everything as it was, or has it mapped when it is first touched. The table of mappings
/// stays until the next time: to unmap it now takes 40 to 60 µs, since the other processors have
/// to hear of it.
fn take_back_memory(command: &Hibernate, file: HostFd) -> Result<()> {
    heap::map_front()?;
    let behind = command.range_count as usize * size_of::<PopulateRange>();
    let (mappings, ranges) =
        Mappings::in_file(file, command.mappings_at, command.mapping_count, behind)?;
    let ranges: &[PopulateRange] = bytemuck::try_cast_slice(ranges).map_err(|_| Errno::EINVAL)?;
    let index: Option<Mapping> = lazy::known_index();
    let memory = Memory { mappings, index, ranges, flags: 0 };
    memory.map()?;
    // It is not read as in a thaw, since few of its pages are written soon.
    memory.map_front()?;
    heap::mapped_again();
    // From here on there is a heap.
    if kernel_lock::is_enabled() {
        // Two vCPUs that touch the same page would both take its fault.
        lazy::map_all();
    }
    for range in memory.ranges {
        lazy::map_range(range.start, range.start.saturating_add(range.len));
    }
    populate::begin(memory.ranges);
    populate::finish();
    Ok(())
}

/// Tells the host why the sandbox cannot go on, and ends it.
fn fail(what: &str, error: Errno) -> ! {
    let parts: [&[u8]; 5] =
        [b"the sandbox was hibernated and ", what.as_bytes(), b" (", error.name().as_bytes(), b")"];
    let mut text = [0u8; 128];
    let mut len = 0;
    for part in parts {
        let room = text[len..].len().min(part.len());
        text[len..len + room].copy_from_slice(&part[..room]);
        len += room;
    }
    // The host would hear of messages that nobody has read, instead of this one.
    while control::look_for_message().is_some() {}
    control::send(MSG_FAILED, 0, &text[..len], &[]);
    Machine::exit(panic::PANIC_EXIT_CODE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;
    use alloc::sync::Arc;

    #[test]
    fn a_due_timer_ends_the_wait_only_if_it_matters() {
        let _sandbox = Sandbox::new();
        assert_eq!(Awaited::now(REST_TIMERS).unwrap().timer_ns, None, "there is no timer");
        crate::time::timer::add(crate::time::Instant::after_ns(0), Arc::new(Nothing));
        assert_eq!(Awaited::now(0).unwrap().timer_ns, None);
        let awaited = Awaited::now(REST_TIMERS).unwrap();
        assert!(awaited.timer_ns.unwrap() <= Machine::monotonic_ns());
        assert_eq!(awaited.wait(), AWAKE_TIMER);
    }

    #[test]
    fn the_control_socket_is_awaited_first() {
        let _sandbox = Sandbox::new();
        let awaited = Awaited::now(0).unwrap();
        assert_eq!(awaited.descriptors, 1);
        assert_eq!(awaited.descriptors()[0].fd, control::CONTROL.0);
    }

    struct Nothing;

    impl crate::time::timer::TimerCallback for Nothing {
        fn fire(&self, _: crate::time::Instant) {}
    }
}
