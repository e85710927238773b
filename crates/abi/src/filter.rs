//! The host calls that a sandbox may make: the boundary of the sandbox.
//!
//! The guest shares an address space with its kernel, so assume that it can
//! make every call in this list with any arguments that pass the checks. Each
//! must be harmless then: there is no call that takes a path, none that makes
//! a descriptor other than by receiving one from the host on the control
//! socket, none that changes credentials, and processes can be made only inside
//! the sandbox' own pid namespace, under its limits.
//!
//! There are three lists ([`List`]): a sandbox whose function says that one process
//! with one virtual CPU is enough gets the shortest.

/// A check of one argument; a call that fails it returns `EPERM`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Argument `.0` is zero.
    Zero(u32),
    /// Argument `.0` has no bits beyond `.1`.
    Mask(u32, u32),
    /// Argument `.0` is one of `.1`.
    OneOf(u32, &'static [u32]),
    /// Of the lower 32 bits of argument `.0`, those in `.1` are `.2`, and the upper 32 are zero.
    Bits(u32, u32, u32),
}

/// An allowed host call.
#[derive(Clone, Copy, Debug)]
pub struct HostCall {
    /// Number in the x86-64 ABI.
    pub number: u32,
    /// Name.
    pub name: &'static str,
    /// Checks of its arguments.
    pub checks: &'static [Check],
    /// What the kernel needs it for, and why it is harmless.
    pub reason: &'static str,
}

/// `MSG_DONTWAIT | MSG_NOSIGNAL | MSG_MORE`. Not `MSG_FASTOPEN`, which connects.
const SEND_FLAGS: u32 = 0x40 | 0x4000 | 0x8000;
/// `MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT | MSG_WAITALL | MSG_NOSIGNAL`.
const RECEIVE_FLAGS: u32 = 0x2 | 0x20 | 0x40 | 0x100 | 0x4000;
/// Numbers of the standard streams.
const STANDARD_STREAMS: &[u32] = &[0, 1, 2];
/// `MSG_DONTWAIT | MSG_CMSG_CLOEXEC`.
const RECEIVE_MESSAGE_FLAGS: u32 = 0x40 | 0x4000_0000;
/// `MAP_SHARED | MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE |
/// MAP_POPULATE | MAP_FIXED_NOREPLACE`. Not `MAP_LOCKED`, `MAP_HUGETLB`.
const MAP_FLAGS: u32 = 0x1 | 0x2 | 0x10 | 0x20 | 0x4000 | 0x8000 | 0x10_0000;
/// Advice about the sandbox's own memory. `MADV_REMOVE` frees memory of the file
/// that its processes share; of other files it needs one that may be written.
/// Not `MADV_MERGEABLE`, a side channel, not `MADV_HWPOISON`.
const ADVICE: &[u32] = &[
    0,  // MADV_NORMAL
    1,  // MADV_RANDOM
    2,  // MADV_SEQUENTIAL
    3,  // MADV_WILLNEED
    4,  // MADV_DONTNEED
    8,  // MADV_FREE
    9,  // MADV_REMOVE
    14, // MADV_HUGEPAGE
    15, // MADV_NOHUGEPAGE
    20, // MADV_COLD
    21, // MADV_PAGEOUT
    22, // MADV_POPULATE_READ
    23, // MADV_POPULATE_WRITE
];

/// A process that shares nothing but descriptors, `CLONE_FILES | SIGCHLD`, and
/// the same as a sibling (`CLONE_PARENT`).
pub const CLONE_PROCESS: u32 = 0x400 | 17;
/// See [`CLONE_PROCESS`].
pub const CLONE_SIBLING: u32 = CLONE_PROCESS | 0x8000;
/// A thread of the process: `CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND |
/// CLONE_THREAD | CLONE_SYSVSEM`.
pub const CLONE_VCPU: u32 = 0x100 | 0x200 | 0x400 | 0x800 | 0x1_0000 | 0x4_0000;
const CLONE_FLAGS: &[u32] = &[CLONE_PROCESS, CLONE_SIBLING, CLONE_VCPU];

/// A copy of a template: a sibling in namespaces of its own
/// (`CLONE_NEWPID | CLONE_NEWUTS | CLONE_PARENT`).
pub const CLONE_COPY: u32 = 0x2000_0000 | 0x400_0000 | 0x8000;

/// In the number of a clock of CPU time (linux/posix-timers.h, `CPUCLOCK_*`): that it is negative, and
/// what it counts, since a clock of type 3 is a descriptor's.
const CPU_CLOCK_BITS: u32 = 0x8000_0003;
/// A clock that counts the time of processors (`CPUCLOCK_SCHED`). Bits 3 to 30 are the inverted number of a
/// process, or with [`CPU_CLOCK_OF_THREAD`] of a thread.
pub const CPU_CLOCK: u32 = 0x8000_0002;
/// `CPUCLOCK_PERTHREAD_MASK`: the clock is that of a thread of the calling process.
pub const CPU_CLOCK_OF_THREAD: u32 = 4;

/// `PIDFD_SELF_THREAD` (linux/pidfd.h), -10000 as an `int`.
pub const PIDFD_SELF: u32 = 0xffff_d8f0;

/// Which calls a host process may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// Those of a sandbox with one host process that has one virtual CPU.
    SingleProcess,
    /// Those of a sandbox with any number of both.
    General,
    /// Those of a template and of the copies that it forks.
    Templates,
}

impl List {
    /// All lists, the shortest first.
    pub const ALL: [Self; 3] = [Self::SingleProcess, Self::General, Self::Templates];

    /// Its name, as `thaw doctor --filter` prints it.
    pub fn name(self) -> &'static str {
        match self {
            Self::SingleProcess => "single_process",
            Self::General => "general",
            Self::Templates => "templates",
        }
    }

    /// The calls on it.
    pub fn calls(self) -> impl Iterator<Item = &'static HostCall> {
        let (processes, templates): (&[_], &[_]) = match self {
            Self::SingleProcess => (&[], &[]),
            Self::General => (PROCESS_CALLS, &[]),
            Self::Templates => (PROCESS_CALLS, TEMPLATE_CALLS),
        };
        let is_replaced =
            move |call: &&HostCall| templates.iter().any(|other| other.number == call.number);
        let usual = HOST_CALLS.iter().chain(processes).filter(move |call| !is_replaced(call));
        usual.chain(templates)
    }
}

/// The host calls that every sandbox may make; the most frequent first.
static HOST_CALLS: &[HostCall] = &[
    HostCall {
        number: 45,
        name: "recvfrom",
        checks: &[Check::Mask(3, RECEIVE_FLAGS), Check::Zero(4), Check::Zero(5)],
        reason: "reads from client sockets; reaches only sockets that the host handed in",
    },
    HostCall {
        number: 44,
        name: "sendto",
        checks: &[Check::Mask(3, SEND_FLAGS), Check::Zero(4), Check::Zero(5)],
        reason: "writes to client sockets and to the control socket; without an address and without MSG_FASTOPEN it reaches only the connected peer",
    },
    HostCall {
        number: 271,
        name: "ppoll",
        checks: &[],
        reason: "waits for descriptors and timers when no guest thread can run; changes nothing but the sandbox's own memory; the files that sandboxes share are always ready",
    },
    HostCall {
        number: 47,
        name: "recvmsg",
        checks: &[Check::Mask(2, RECEIVE_MESSAGE_FLAGS)],
        reason: "takes messages and descriptors from the control socket; only the host can send any",
    },
    HostCall {
        number: 9,
        name: "mmap",
        checks: &[Check::Mask(2, 0x7), Check::Mask(3, MAP_FLAGS)],
        reason: "makes guest memory; file mappings need a descriptor, and those that the host gives are read-only, so that sandboxes which map the same file share nothing that one of them can write; but for files of volumes, which are there to be shared, and which no mapping makes longer",
    },
    HostCall {
        number: 11,
        name: "munmap",
        checks: &[],
        reason: "frees guest memory; changes the sandbox's own address space only",
    },
    HostCall {
        number: 10,
        name: "mprotect",
        checks: &[Check::Mask(2, 0x7)],
        reason: "protects guest memory; changes the sandbox's own address space only",
    },
    HostCall {
        number: 28,
        name: "madvise",
        checks: &[Check::OneOf(2, ADVICE)],
        reason: "gives pages back and populates ranges; the advice is limited to what concerns the sandbox's own memory",
    },
    HostCall {
        number: 440,
        name: "process_madvise",
        checks: &[Check::OneOf(0, &[PIDFD_SELF]), Check::OneOf(3, ADVICE), Check::Zero(4)],
        reason: "as madvise, for many ranges at once; the only process it may name is the caller",
    },
    HostCall {
        number: 25,
        name: "mremap",
        checks: &[Check::Mask(3, 0x3)],
        reason: "moves guest memory without copying; changes the sandbox's own address space only",
    },
    HostCall {
        number: 17,
        name: "pread64",
        checks: &[],
        reason: "reads files of the rootfs; reaches only descriptors that the host gave, and moves no offset: sandboxes that have the same description cannot tell",
    },
    HostCall {
        number: 0,
        name: "read",
        checks: &[Check::OneOf(0, STANDARD_STREAMS)],
        reason: "reads standard input or a terminal: it moves the offset of a description, so it is allowed for the numbers 0 to 2 only; a program that was started has its own standard streams there, a copy of an image /dev/null, and no call gives a descriptor another number",
    },
    HostCall {
        number: 1,
        name: "write",
        checks: &[],
        reason: "writes standard output, standard error and the console; files that the host gives for reading refuse it, and so do those of volumes, since sandboxes with volumes have RLIMIT_FSIZE 0; a pipe that instances of one function share shows them how full it is, and instances of different functions share none",
    },
    HostCall {
        number: 48,
        name: "shutdown",
        checks: &[],
        reason: "ends client connections; affects only sockets that the host handed in, each to one sandbox",
    },
    HostCall {
        number: 38,
        name: "setitimer",
        checks: &[Check::Zero(0)],
        reason: "interrupts a guest that computes while a timer of its own is due; the signal goes to the sandbox itself",
    },
    HostCall {
        number: 3,
        name: "close",
        checks: &[],
        reason: "drops descriptors of the sandbox, not of those that have the same description; a sandbox that drops its control socket is ended by the host",
    },
    HostCall {
        number: 228,
        name: "clock_gettime",
        checks: &[Check::Bits(0, CPU_CLOCK_BITS, CPU_CLOCK)],
        reason: "reads how long the sandbox's own processes and threads had a processor; changes nothing, and its pid namespace holds no other process; a sandbox learns for how long others had the processor, as any program does that looks at a clock again and again",
    },
    HostCall { number: 231, name: "exit_group", checks: &[], reason: "ends the sandbox" },
];

/// The host calls that a sandbox may make besides if it may have several host processes
/// or virtual CPUs.
static PROCESS_CALLS: &[HostCall] = &[
    HostCall {
        number: 56,
        name: "clone",
        checks: &[Check::OneOf(0, CLONE_FLAGS)],
        reason: "gives a guest process a host process, or a virtual CPU a thread; each inherits this filter and every limit, is counted by RLIMIT_NPROC, and dies with the sandbox, whose pid namespace it cannot leave",
    },
    HostCall {
        number: 234,
        name: "tgkill",
        // SIGUSR1.
        checks: &[Check::OneOf(2, &[10])],
        reason: "interrupts a virtual CPU of the sandbox; its pid namespace holds no other process",
    },
    HostCall {
        number: 14,
        name: "rt_sigprocmask",
        // SIG_BLOCK and SIG_UNBLOCK.
        checks: &[Check::OneOf(0, &[0, 1])],
        reason: "keeps interrupts from a new process until it has memory for its signal stack; changes the calling thread only, and the host ends sandboxes by SIGKILL, which nobody blocks",
    },
    HostCall {
        number: 131,
        name: "sigaltstack",
        checks: &[],
        reason: "gives a new virtual CPU its signal stack; changes the calling thread only",
    },
    HostCall {
        number: 60,
        name: "exit",
        checks: &[],
        reason: "ends a virtual CPU that is not needed any more",
    },
    HostCall {
        number: 202,
        name: "futex",
        // FUTEX_WAIT and FUTEX_WAKE.
        checks: &[Check::OneOf(1, &[0, 1])],
        reason: "lets virtual CPUs wait for each other; reaches only memory that the sandbox has mapped; two sandboxes that conspire can wake each other at a page of a file that both have mapped, a covert channel like the page cache; sharing domains close it but for the kernel, which all map",
    },
];

/// The host calls that a template and the copies that it forks may make besides, or with
/// other arguments. A template never runs a guest. A copy has given up the capabilities without which none of
/// these changes anything but the copy itself.
static TEMPLATE_CALLS: &[HostCall] = &[
    HostCall {
        number: 56,
        name: "clone",
        checks: &[Check::OneOf(0, &[CLONE_PROCESS, CLONE_SIBLING, CLONE_VCPU, CLONE_COPY])],
        reason: "as above; a template forks copies, each in pid and host-name namespaces of its own, which takes a capability that copies do not have",
    },
    HostCall {
        number: 33,
        name: "dup2",
        checks: &[Check::OneOf(
            1,
            &[crate::layout::CONTROL_FD as u32, crate::layout::CONSOLE_FD as u32],
        )],
        reason: "puts a copy's own control socket and console in the place of the template's; a copy that replaces its control socket is ended by the host, and its console only carries text",
    },
    HostCall {
        number: 109,
        name: "setpgid",
        checks: &[Check::Zero(0), Check::Zero(1)],
        reason: "gives a copy its own process group; changes the caller only",
    },
    HostCall {
        number: 119,
        name: "setresgid",
        checks: &[],
        reason: "gives a copy its own group id; without capabilities there is no other id to take",
    },
    HostCall {
        number: 117,
        name: "setresuid",
        checks: &[],
        reason: "gives a copy its own user id and thereby takes its capabilities; without them there is no other id to take",
    },
    HostCall {
        number: 126,
        name: "capset",
        checks: &[],
        reason: "takes a copy's capabilities where all sandboxes share a user id; can only take, never give",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_unique_and_has_a_reason() {
        for list in List::ALL {
            for (i, call) in list.calls().enumerate() {
                assert!(call.reason.len() > 10, "{}", call.name);
                let is_other = |other: &HostCall| other.number != call.number;
                assert!(list.calls().take(i).all(is_other), "{}", call.name);
            }
        }
    }

    #[test]
    fn each_list_holds_the_shorter_ones() {
        assert_eq!(List::ALL.map(|list| list.calls().count()), [18, 24, 29]);
        for pair in List::ALL.windows(2) {
            for call in pair[0].calls() {
                assert!(pair[1].calls().any(|other| other.number == call.number), "{}", call.name);
            }
        }
    }

    #[test]
    fn one_process_cannot_make_another() {
        // clone, fork, vfork, clone3; tgkill, futex.
        for forbidden in [56, 57, 58, 435, 234, 202] {
            assert!(List::SingleProcess.calls().all(|call| call.number != forbidden));
        }
    }

    #[test]
    fn no_call_takes_a_path_or_makes_a_descriptor() {
        // open, openat, socket, connect, fork, vfork, execve, ioctl, ptrace, kill, clone3, …
        for forbidden in
            [2, 257, 41, 42, 49, 57, 58, 59, 16, 101, 62, 435, 322, 434, 438, 319, 323, 321, 425]
        {
            assert!(List::Templates.calls().all(|call| call.number != forbidden));
        }
    }
}
