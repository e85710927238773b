//! The table of host processes: what a boot has of them and of their vCPUs. It lies in the
//! per-boot area, so that no image holds any of it. Saved objects have numbers of host processes.
#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::cell::Cell;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};

use bytemuck::Zeroable;

use super::residence::{Asked, Held};
use super::{Activity, Vcpu, is_own};
use crate::errno::{Errno, Result};
use crate::platform::boot_area;
use crate::platform::machine::{Clocks, Machine, Vcpus};
use crate::platform::memory::Table;
use crate::platform::saved::OfHost;
use crate::state::kernel;
use crate::task::{Space, scheduler};

const VCPUS: usize = Machine::MAX_VCPUS as usize;
/// Most host processes of a sandbox.
const CAPACITY: usize = boot_area::HOST_PROCESSES.1 as usize / size_of::<HostProcess>();
// The first one is mapped by itself, in a page.
const _: () = assert!(size_of::<HostProcess>() == 4096);

// SAFETY: the kernel's alone, and all of `HostProcess` is cells. `map_first` maps the first one,
// and `crate::mm::arena::share` the others before there are others.
static TABLE: Table<HostProcess> = unsafe { Table::new(boot_area::HOST_PROCESSES.0, CAPACITY) };

/// How many host processes of the table have been in use.
static USED: AtomicU32 = AtomicU32::new(0);
/// One that is free again; 0, which never is, if there is none.
static FREE: AtomicU32 = AtomicU32::new(0);

/// In [`HostProcess::number_in_report`]: it was not in that.
const NO_NUMBER: u32 = u32::MAX;

/// Notes which numbers address spaces have in a report.
pub fn number(spaces: &[Arc<Space>]) {
    HostProcess::all().for_each(|all| all.number_in_report.store(NO_NUMBER, Relaxed));
    for (number, space) in spaces.iter().enumerate() {
        if let Some(host_process) = space.host_process() {
            host_process.number_in_report.store(number as u32, Relaxed);
        }
    }
}

/// The host process of a space. It is of this boot:
///
/// ```compile_fail
/// thaw_platform::saved::assert_saved::<thaw_kernel::task::host_process::HostProcess>();
/// ```
#[derive(Zeroable)]
#[repr(C, align(4096))]
pub struct HostProcess {
    /// Number of the space that it serves ([`Space::id`]); 0 if it is free.
    space: AtomicU64,
    /// Address of that space, which `Tasks::hosted` keeps.
    served: AtomicPtr<Space>,
    /// Host process id in the sandbox' pid namespace; 0 if there is none.
    pub(super) host_pid: AtomicU32,
    /// Of one that is free: the next one that is, or 0.
    next_free: AtomicU32,
    /// Bit n: its vCPU n is there.
    there: AtomicU64,
    /// When its vCPUs were last judged ([`HostProcess::judge`]), on the host's monotonic
    /// clock in nanoseconds.
    pub(super) judged_at: AtomicU64,
    /// When the host was last looked at beside a running thread, on the host's
    /// monotonic clock in nanoseconds.
    pub(super) looked_at: AtomicU64,
    /// What its vCPUs have seen of the CPU time that the host has counted of them, in nanoseconds
    /// ([`super::cpu_time`]).
    pub(super) seen_cpu_ns: AtomicU64,
    /// What it has of its memory.
    pub(super) held: Cell<Held>,
    /// What it is asked to do with that.
    pub(super) asked: Cell<Asked>,
    /// The number of its address space in the last report, and so in the file that was written
    /// then; or [`NO_NUMBER`].
    number_in_report: AtomicU32,
    /// Its number in the swap file that the sandbox was hibernated over last, or [`NO_NUMBER`].
    number_in_swap: AtomicU32,
    /// Number of its twin in the sandbox' pid namespace ([`super::twins`]); 0 if it has none.
    pub(super) twin: AtomicU32,
    vcpus: [Vcpu; VCPUS],
    _of_host: OfHost,
}

/// Maps what the first host process needs, for a zygote.
pub fn map_first() -> Result<()> {
    TABLE.map(1)
}

/// Where that lies: start and bytes.
pub fn first_range() -> (u64, u64) {
    TABLE.range(1)
}

/// The vCPU that has a number ([`Vcpus::number`]), if it is one.
#[inline]
pub(super) fn vcpu(number: usize) -> Option<&'static Vcpu> {
    let at = number.checked_sub(1)?;
    TABLE.cells(CAPACITY).get(at / VCPUS).map(|host_process| &host_process.vcpus[at % VCPUS])
}

/// The host process of the vCPU that has a number.
#[inline]
pub(super) fn of_vcpu(number: usize) -> Option<&'static HostProcess> {
    TABLE.cells(CAPACITY).get(number.checked_sub(1)? / VCPUS)
}

/// The one that ends the sandbox with itself.
pub(super) fn first() -> &'static HostProcess {
    &TABLE.cells(1)[0]
}

/// The space that the calling vCPU serves. `Tasks::hosted` keeps it until the last process that
/// has it has ended, and with it all threads on whose stacks this can be: it cannot be sent or
/// saved.
pub struct Served {
    space: NonNull<Space>,
    _of_host: OfHost,
}

impl Deref for Served {
    type Target = Space;

    #[inline]
    fn deref(&self) -> &Space {
        // SAFETY: it is there, as `Served` says.
        unsafe { self.space.as_ref() }
    }
}

impl HostProcess {
    /// The one with a number, if it serves the space with this id.
    pub fn of_space(number: u32, space: u64) -> Option<&'static HostProcess> {
        let found = TABLE.cells(USED.load(Relaxed) as usize).get(number as usize)?;
        (found.space.load(Relaxed) == space).then_some(found)
    }

    /// All that serve an address space.
    pub(super) fn all() -> impl Iterator<Item = &'static HostProcess> {
        let used = TABLE.cells(USED.load(Relaxed) as usize).iter();
        used.filter(|host_process| host_process.space.load(Relaxed) != 0)
    }

    /// All, and those that were in use: their twins may outlive them.
    pub(super) fn all_that_were() -> impl Iterator<Item = &'static HostProcess> {
        TABLE.cells(USED.load(Relaxed) as usize).iter()
    }

    /// The number of its address space in the last report, if it was in that.
    pub(super) fn number_in_report(&self) -> Option<u32> {
        Some(self.number_in_report.load(Relaxed)).filter(|&number| number != NO_NUMBER)
    }

    /// The number of its address space in the swap file, if it was in that.
    pub fn number_in_swap(&self) -> Option<u32> {
        Some(self.number_in_swap.load(Relaxed)).filter(|&number| number != NO_NUMBER)
    }

    /// The last report was that of the swap file.
    pub(super) fn note_swap(&self) {
        self.number_in_swap.store(self.number_in_report.load(Relaxed), Relaxed);
    }

    /// The first one of this boot, which serves `space`.
    pub(super) fn begin_first(space: &Arc<Space>) -> &'static HostProcess {
        USED.store(1, Relaxed);
        FREE.store(0, Relaxed);
        {
            let mut hosted = kernel().tasks.hosted.borrow_mut();
            hosted.truncate(1);
            // In a copy, it is nearly always there, and its page need not be written to.
            if !hosted
                .first()
                .is_some_and(|known| known.as_ref().is_some_and(|known| Arc::ptr_eq(known, space)))
            {
                hosted.clear();
                hosted.push(Some(space.clone()));
            }
        }
        TABLE.cells(1)[0].reset(0, space)
    }

    /// A new one for `space`, which has no id and no vCPU yet.
    ///
    /// # Errors
    /// `EAGAIN` if the table is full.
    pub(super) fn begin(space: &Arc<Space>) -> Result<&'static HostProcess> {
        let number = match FREE.load(Relaxed) {
            0 if USED.load(Relaxed) as usize == CAPACITY => return Err(Errno::EAGAIN),
            0 => USED.fetch_add(1, Relaxed),
            free => free,
        };
        let host_process = &TABLE.cells(CAPACITY)[number as usize];
        if number == FREE.load(Relaxed) {
            FREE.store(host_process.next_free.load(Relaxed), Relaxed);
        }
        let mut hosted = kernel().tasks.hosted.borrow_mut();
        let len = hosted.len().max(number as usize + 1);
        hosted.resize(len, None);
        hosted[number as usize] = Some(space.clone());
        Ok(host_process.reset(number, space))
    }

    fn reset(&'static self, number: u32, space: &Arc<Space>) -> &'static HostProcess {
        self.served.store(Arc::as_ptr(space).cast_mut(), Relaxed);
        self.space.store(space.id(), Relaxed);
        self.host_pid.store(0, Relaxed);
        self.there.store(0, Relaxed);
        self.judged_at.store(0, Relaxed);
        self.looked_at.store(0, Relaxed);
        self.seen_cpu_ns.store(0, Relaxed);
        self.number_in_report.store(NO_NUMBER, Relaxed);
        self.number_in_swap.store(NO_NUMBER, Relaxed);
        self.held.set(Held::All);
        self.asked.set(Asked::Nothing);
        space.host_process.store(number, Relaxed);
        self
    }

    /// Lets another space have it: it has ended, or was not made.
    pub(super) fn end(&self) {
        let number = self.number();
        self.space.store(0, Relaxed);
        self.served.store(core::ptr::null_mut(), Relaxed);
        self.next_free.store(FREE.swap(number, Relaxed), Relaxed);
        let space = kernel().tasks.hosted.borrow_mut()[number as usize].take();
        drop(space);
    }

    /// Its place in the table.
    fn number(&self) -> u32 {
        let offset = core::ptr::from_ref(self) as u64 - boot_area::HOST_PROCESSES.0;
        (offset / size_of::<Self>() as u64) as u32
    }

    /// Whether it is the one that ends the sandbox with itself.
    pub(super) fn is_first(&self) -> bool {
        self.number() == 0
    }

    /// The address space that it serves, for as long as the running thread or the idle loop of
    /// one of its vCPUs goes on.
    #[inline]
    pub(super) fn served(&self) -> Served {
        match NonNull::new(self.served.load(Relaxed)) {
            Some(space) => Served { space, _of_host: OfHost::new() },
            None => panic!("this host process serves no address space"),
        }
    }

    /// The address space that it serves, shared.
    pub(super) fn space(&self) -> Arc<Space> {
        match &kernel().tasks.hosted.borrow_mut()[self.number() as usize] {
            Some(space) => space.clone(),
            None => panic!("this host process serves no address space"),
        }
    }

    /// Adds vCPU `index`, and returns the number for it.
    pub(super) fn add_vcpu(&self, index: u32, host_tid: u32) -> usize {
        self.vcpus[index as usize].begin(host_tid);
        self.there.fetch_or(1 << index, Relaxed);
        self.number() as usize * VCPUS + index as usize + 1
    }

    /// Removes vCPU `index`; whether it was the last one.
    pub(super) fn remove_vcpu(&self, index: u32) -> bool {
        let bit = 1 << index;
        self.there.fetch_and(!bit, Relaxed) == bit
    }

    /// An index, not 0, that no vCPU has: that area holds the tables of the process, too.
    pub(super) fn free_index(&self) -> u32 {
        (self.there.load(Relaxed) | 1).trailing_ones()
    }

    /// Vcpu `index`.
    pub(super) fn vcpu(&self, index: u32) -> &Vcpu {
        &self.vcpus[index as usize]
    }

    /// Its virtual CPUs.
    pub(super) fn vcpus(&self) -> impl Iterator<Item = &Vcpu> {
        let mut left = self.there.load(Relaxed);
        core::iter::from_fn(move || {
            let vcpu = self.vcpus.get(left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(vcpu)
        })
    }

    /// Host process id in the sandbox' pid namespace; 0 if there is none.
    pub fn host_pid(&self) -> u32 {
        self.host_pid.load(Relaxed)
    }

    /// Number of virtual CPUs.
    pub fn vcpu_count(&self) -> usize {
        self.there.load(Relaxed).count_ones() as usize
    }

    /// A vCPU that does something, if there is one.
    pub(super) fn with_activity(&self, activity: Activity) -> Option<&Vcpu> {
        self.vcpus().find(|vcpu| vcpu.activity.get() == activity)
    }

    /// Whether the host was looked at for one of its threads a short while ago.
    pub fn has_looked(&self) -> bool {
        Machine::monotonic_ns() - self.looked_at.load(Relaxed) < scheduler::SLICE_NS
    }

    /// Whether a vCPU runs nothing.
    pub fn has_idle(&self) -> bool {
        self.vcpus().any(|vcpu| vcpu.activity.get() != Activity::Active)
    }

    /// Whether all of its vCPUs wait but the calling one. One without a vCPU is about to begin:
    /// what it will do is on the way, also if no process has its space yet, as in execve(2) after
    /// vfork(2).
    pub(super) fn rests(&self) -> bool {
        self.vcpu_count() > 0 && self.is_alone()
    }

    /// Whether no other vCPU than the calling one runs or is about to.
    pub fn is_alone(&self) -> bool {
        self.vcpus().all(|vcpu| is_own(vcpu) || vcpu.activity.get() != Activity::Active)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::kernel_lock;
    use crate::task::host_process::{others_rest, own_host_process, own_vcpu};
    use crate::testing::Sandbox;
    use thaw_abi::layout::{BOOT_BASE, BOOT_MAX};

    /// Lets the table have more than the first host process, as `share` does.
    fn map(count: usize) {
        TABLE.map(count).unwrap();
    }

    #[test]
    fn an_image_has_nothing_of_host_processes() {
        let _sandbox = Sandbox::new();
        let host_process = core::ptr::from_ref(own_host_process()) as u64;
        let vcpu = core::ptr::from_ref(own_vcpu()) as u64;
        for address in [host_process, vcpu] {
            assert!((BOOT_BASE..BOOT_BASE + BOOT_MAX).contains(&address));
        }
        let (start, len) = boot_area::HOST_PROCESSES;
        assert!(start + len <= BOOT_BASE + BOOT_MAX);
    }

    #[test]
    fn a_thawed_copy_makes_its_own() {
        let _sandbox = Sandbox::new();
        let space = own_host_process().space();
        // As in an image that was frozen with two host processes, whose vCPUs had other numbers.
        map(2);
        let second = Arc::new(Space::new());
        assert_eq!(HostProcess::begin(&second).unwrap().number(), 1);
        let users = Arc::strong_count(&second);
        map(1);
        Machine::set_number(0);
        assert!(space.host_process().is_none(), "nothing is found before it is made anew");
        super::super::begin(space.clone());
        assert!(second.host_process().is_none());
        assert_eq!(
            Arc::strong_count(&second),
            users - 1,
            "the copy keeps nothing of the frozen one"
        );
        assert!(core::ptr::eq(space.host_process().unwrap(), own_host_process()));
        assert_eq!((own_host_process().vcpu_count(), own_host_process().host_pid()), (1, 1));
    }

    #[test]
    fn a_host_process_that_has_ended_is_found_no_more_and_makes_room() {
        let _sandbox = Sandbox::new();
        map(4);
        super::super::begin(own_host_process().space());
        let spaces = [(); 3].map(|()| Arc::new(Space::new()));
        let numbers = spaces.each_ref().map(|space| HostProcess::begin(space).unwrap().number());
        assert_eq!(numbers, [1, 2, 3]);
        for space in &spaces[..2] {
            space.host_process().unwrap().end();
            assert!(space.host_process().is_none());
            assert_eq!(Arc::strong_count(space), 1);
        }
        let next = Arc::new(Space::new());
        assert_eq!(HostProcess::begin(&next).unwrap().number(), 2, "the last one to end");
        assert!(spaces[1].host_process().is_none(), "another space has it now");
        assert_eq!(HostProcess::begin(&spaces[0]).unwrap().number(), 1);
        assert_eq!(FREE.load(Relaxed), 0);
    }

    #[test]
    fn one_that_is_about_to_begin_does_not_rest_whoever_has_its_space() {
        let _sandbox = Sandbox::new();
        map(2);
        kernel_lock::enable().unwrap();
        assert!(others_rest());
        // As in execve(2) after vfork(2): no process has it before its host process runs.
        let space = Arc::new(Space::new());
        let new = HostProcess::begin(&space).unwrap();
        assert!(!others_rest());
        new.add_vcpu(0, 77);
        assert!(!others_rest(), "it looks for something to run");
        new.vcpu(0).activity.set(Activity::Sleeping);
        assert!(others_rest());
        new.vcpu(0).activity.set(Activity::Active);
        // As when its process has ended, and it has not.
        assert!(!others_rest());
        new.end();
        assert!(others_rest());
    }

    #[test]
    fn a_full_table_is_an_error() {
        let _sandbox = Sandbox::new();
        USED.store(CAPACITY as u32, Relaxed);
        let refused = HostProcess::begin(&Arc::new(Space::new())).map(HostProcess::number);
        assert_eq!(refused, Err(Errno::EAGAIN));
    }

    #[test]
    fn a_number_finds_a_vcpu_or_nothing() {
        let _sandbox = Sandbox::new();
        let number = own_host_process().add_vcpu(5, 77);
        assert!(core::ptr::eq(vcpu(number).unwrap(), own_host_process().vcpu(5)));
        assert!(core::ptr::eq(of_vcpu(number).unwrap(), own_host_process()));
        assert_eq!((own_host_process().vcpu_count(), own_host_process().free_index()), (2, 1));
        assert!(!own_host_process().remove_vcpu(5) && own_host_process().remove_vcpu(0));
        assert!(vcpu(0).is_none() && vcpu(CAPACITY * VCPUS + 1).is_none());
        assert!(vcpu(usize::MAX).is_none() && vcpu(CAPACITY * VCPUS).is_some());
    }
}
