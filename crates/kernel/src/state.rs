//! The root of all saved state.
//!
//! One [`Kernel`] object in the kernel's heap holds, directly or through
//! pointers, everything that outlives a system call: it is what a freeze saves
//! and a thaw finds again. Host descriptors, host thread ids and vCPU blocks
//! are not here; they are rebuilt at every boot.
#![allow(unsafe_code)]

pub mod namespaces;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::num::NonZeroU64;
use core::panic::RefUnwindSafe;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use thaw_abi::control::{
    FLAG_ENTRY_STDIN, FLAG_FREEZE_AT_ENTRY, FLAG_SAY_LACKS, LACK_FILE_ROOM, LACK_MEMORY, Limits,
};

use crate::errno::{Errno, Result};
pub use crate::fs::process::ProcessFiles;
use crate::host::control;
use crate::mm::pages::PageAllocator;
use crate::platform::saved::assert_saved;
use crate::sync::{KernelCell, Late};
use crate::time::random::Generator;
pub use namespaces::{Namespace, Namespaces};

/// The Linux release whose behaviour Thaw follows.
pub const RELEASE: &str = "6.1.0-thaw";
/// Version string of uname(2).
pub const VERSION: &str = "#1 SMP Thaw";

/// Everything that is saved.
pub struct Kernel {
    /// Processes and threads.
    pub tasks: crate::task::Tasks,
    /// Mounted file systems.
    pub fs: Late<crate::fs::FileSystems>,
    /// Readiness of host descriptors.
    pub host_poll: crate::task::host_poll::HostPoll,
    /// Sockets that others can find: bound addresses.
    pub net: crate::net::Network,
    /// The namespaces of the first process.
    pub namespaces: Arc<Namespaces>,
    /// How many namespaces there are.
    pub namespace_counts: crate::task::namespace::Counts,
    /// Clock offsets.
    pub clocks: crate::time::clock::Clocks,
    /// Random numbers for the guest.
    pub random: KernelCell<crate::time::random::Generator>,
    /// Pages of files, pipes and sockets.
    pub pages: KernelCell<crate::mm::pages::PageAllocator>,
    /// Shared anonymous memory of the guest.
    pub shared_memory: crate::mm::shm::SharedMemory,
    /// Whether several host processes share the arena, or did when it was frozen.
    pub has_shared_arena: KernelCell<bool>,
    /// System call sites at which programs have trapped.
    pub known_sites: crate::mm::code::KnownSites,
    /// IPC namespaces besides the first one.
    pub ipc_namespaces: crate::ipc::namespace::Others,
    /// POSIX message queues.
    pub message_queues: crate::ipc::mqueue::MessageQueues,
    /// Contexts of asynchronous input and output.
    pub aio: crate::ipc::aio::Contexts,
    /// Volumes that are mounted.
    pub volumes: crate::fs::bind::Volumes,
    /// Futexes that somebody waits on.
    pub futexes: crate::task::futex::Futexes,
    /// Processes that the host has asked for.
    pub remote: crate::remote::Remote,
    /// Descriptors of files of a host directory.
    pub host_files: crate::host::files::Descriptors,
    /// Programs that do not exist, as the host has heard.
    pub missing_programs: crate::exec::missing::Told,
    /// System calls that were counted.
    pub calls: crate::syscall::Counts,
    /// Timers by deadline.
    pub timers: crate::time::timer::Timers,
    /// How often this state has been thawed on the way to this copy.
    pub generation: KernelCell<u64>,
    /// The generation in which the program was started: not the first, if the interpreter
    /// comes from a runtime template.
    pub started_in: KernelCell<u64>,
    /// Those who wait for a freeze that they have asked for.
    pub frozen: crate::task::wait::WaitQueue,
    /// Size of the terminal.
    pub window: KernelCell<thaw_abi::control::WindowSize>,
    /// How the sandbox was started.
    pub config: KernelCell<Config>,
}

/// What the start command fixed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    /// Port on which the function serves; 0 if none.
    pub port: u16,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// Bytes of memory that the sandbox may use; 0 means no limit.
    pub memory_limit: u64,
    /// `FLAG_*` of the control protocol.
    pub flags: u32,
    /// The signal that freezes the program; 0: none.
    pub entry_signal: u32,
}

// Nothing of the host hangs off it but within an [`OfBoot`].
const _: () = assert_saved::<Kernel>();

impl Config {
    /// Whether requests come over standard input.
    pub fn reads_requests(&self) -> bool {
        self.flags & FLAG_ENTRY_STDIN != 0
    }
}

impl Kernel {
    /// The state of a fresh sandbox, still without file systems: those take pages for
    /// what they create, so the root must be installed before they are put together.
    pub fn new(config: Config, random: Generator, pages: PageAllocator) -> Self {
        let net = crate::net::Network::new();
        Self {
            tasks: Default::default(),
            fs: Late::empty(),
            namespaces: Arc::new(Namespaces::first(&net)),
            net,
            namespace_counts: Default::default(),
            clocks: Default::default(),
            random: KernelCell::new(random),
            pages: KernelCell::new(pages),
            shared_memory: Default::default(),
            has_shared_arena: KernelCell::new(false),
            known_sites: Default::default(),
            ipc_namespaces: Default::default(),
            message_queues: Default::default(),
            aio: Default::default(),
            volumes: Default::default(),
            futexes: Default::default(),
            remote: Default::default(),
            host_files: Default::default(),
            missing_programs: Default::default(),
            calls: Default::default(),
            timers: Default::default(),
            host_poll: Default::default(),
            generation: KernelCell::new(0),
            started_in: KernelCell::new(0),
            frozen: Default::default(),
            window: KernelCell::new(bytemuck::Zeroable::zeroed()),
            config: KernelCell::new(config),
        }
    }

    /// The host has changed what the sandbox may use.
    pub fn change_limits(&self, limits: &Limits) {
        let mut config = self.config.borrow_mut();
        config.memory_limit = limits.memory;
        config.cpus = limits.cpus.max(1);
    }

    /// Refuses a single allocation of more bytes than the sandbox may have at all, or than any
    /// machine has, as with vm.overcommit_memory=0. `ENOMEM`.
    pub fn check_commit(&self, len: u64) -> Result<()> {
        let limit = match self.config.get().memory_limit {
            0 => 1 << 40,
            limit => limit,
        };
        if len <= limit {
            return Ok(());
        }
        if self.is_first_refusal() {
            control::say_lack(self.config.get().flags, LACK_MEMORY, len, b"");
            crate::console!(
                "thaw: an allocation of {} was refused: it is more than `limits.memory` in \
                 thaw.toml, which is {}; raise that",
                Size(len),
                Size(limit)
            );
        }
        Err(Errno::ENOMEM)
    }

    /// There is no room for more files beside the `used` bytes of those that are there.
    pub fn files_are_full(&self, used: u64) {
        if self.is_first_refusal() {
            control::say_lack(self.config.get().flags, LACK_FILE_ROOM, used, b"");
            let (of_what, way_out) = match self.config.get().memory_limit {
                0 => ("the machine's memory", "give the machine more"),
                _ => ("`limits.memory` in thaw.toml", "raise that"),
            };
            crate::console!(
                "thaw: there is no room for what the program writes to files, which take {} of \
                 memory: they may take three quarters of {of_what}, which is {}; {way_out}",
                Size(used),
                Size(self.memory_total())
            );
        }
    }

    /// Whether somebody reads what the kernel says, and has not heard of refused memory yet: who builds
    /// the function, and then the logs of each copy. On a terminal of `thaw run` it would be between the
    /// program's own lines.
    fn is_first_refusal(&self) -> bool {
        /// One more than the generation in which it was said.
        static SAID_IN: AtomicU64 = AtomicU64::new(0);
        let generation = self.generation.get();
        let readers = FLAG_FREEZE_AT_ENTRY | FLAG_SAY_LACKS;
        let is_read = self.config.get().flags & readers != 0 || generation > 0;
        is_read && SAID_IN.swap(generation + 1, Ordering::Relaxed) <= generation
    }

    /// Bytes of memory that the guest is told the machine has: the sandbox's limit, or all that the host
    /// has if it has none.
    pub fn memory_total(&self) -> u64 {
        self.known_memory().unwrap_or(UNKNOWN_MEMORY)
    }

    /// The same; `None`: there is no limit, and the host has not said how much it has.
    pub fn known_memory(&self) -> Option<u64> {
        match self.config.get().memory_limit {
            0 => NonZeroU64::new(HOST_MEMORY.load(Ordering::Relaxed)).map(NonZeroU64::get),
            limit => Some(limit),
        }
    }
}

/// Bytes of memory that a sandbox without a limit shows if the host does not say how much it has.
const UNKNOWN_MEMORY: u64 = 1 << 30;

/// Bytes of memory that this boot's host has; 0: it has not said.
static HOST_MEMORY: AtomicU64 = AtomicU64::new(0);

/// Notes how much memory this boot's host has, which no image holds.
pub fn set_host_memory(bytes: Option<NonZeroU64>) {
    HOST_MEMORY.store(bytes.map_or(0, NonZeroU64::get), Ordering::Relaxed);
}

/// A number of bytes, for people: as `limits.memory` is written where it is a round one.
struct Size(u64);

impl core::fmt::Display for Size {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.iter().find(|(unit, _)| self.0 >= *unit && self.0.is_multiple_of(*unit)) {
            Some((unit, name)) => write!(f, "{}{name}", self.0 / unit),
            None if self.0 >= 10 << 20 => write!(f, "{}MiB", self.0.div_ceil(1 << 20)),
            None => write!(f, "{}KiB", self.0.div_ceil(1 << 10)),
        }
    }
}

/// Something that belongs to one boot, within what is saved: nobody gets at it in another boot.
/// To drop it must be safe in any, as it is for descriptors, which are only numbers, and for
/// objects in the heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfBoot<T> {
    value: T,
    boot: u64,
}

/// It may be saved, whatever is in it, since it opens in one boot only.
impl<T> RefUnwindSafe for OfBoot<T> {}

impl<T> OfBoot<T> {
    /// Something of this boot.
    pub fn new(value: T) -> Self {
        Self { value, boot: generation() }
    }

    /// The same, in the boot that has made it.
    pub fn get(&self) -> Option<&T> {
        (self.boot == generation()).then_some(&self.value)
    }
}

impl<T: Default> OfBoot<T> {
    /// The one of this boot, which is fresh if there is none or another boot has made it.
    pub fn of_this(slot: &mut Option<Self>) -> &mut T {
        if slot.as_ref().is_none_or(|known| known.boot != generation()) {
            *slot = None;
        }
        &mut slot.get_or_insert_with(|| Self::new(T::default())).value
    }
}

/// Points to the root object; set at every boot.
static ROOT: AtomicPtr<Kernel> = AtomicPtr::new(core::ptr::null_mut());

/// The root object. Panics before a program has been started or thawed.
pub fn kernel() -> &'static Kernel {
    let root = ROOT.load(Ordering::Relaxed);
    assert!(!root.is_null(), "no kernel state yet");
    // SAFETY: set by `install` or `restore` to an object that is never freed.
    unsafe { &*root }
}

/// Makes `kernel` the root object of a fresh sandbox; returns its address for
/// the heap's header.
pub fn install(kernel: Kernel) -> u64 {
    let root = Box::into_raw(Box::new(kernel));
    ROOT.store(root, Ordering::Relaxed);
    root as u64
}

/// Makes the object at `address` the root, after a thaw.
///
/// # Safety
/// `address` must come from `install` in the sandbox that the heap was frozen from.
pub unsafe fn restore(address: u64) {
    ROOT.store(address as *mut Kernel, Ordering::Relaxed);
}

/// How often the program has been thawed on the way to this copy.
pub fn thaws_of_program() -> u64 {
    generation() - kernel().started_in.get()
}

/// Number of this boot of the saved state: 0 for a fresh sandbox, and before there is any
/// state; one more at every thaw. What belongs to an earlier boot's host is void.
pub fn generation() -> u64 {
    // SAFETY: as in `kernel`.
    unsafe { ROOT.load(Ordering::Relaxed).as_ref() }.map_or(0, |kernel| kernel.generation.get())
}
