//! Making zygotes: children of the parent that give up everything.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, setsid};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
    set_capabilities_secure_bits, set_no_new_privs, set_thread_groups,
};
use thaw_abi::control::{HOST_MEMORY_VARIABLE, MSG_FAILED, TEMPLATE_NAME};
use thaw_abi::layout::{CONSOLE_FD, CONTROL_FD};

use super::ids::{self, IdMap};
use super::priority::Priority;
use crate::confine::{hold_capabilities, shrink_bounding_set};
use crate::limits;
use crate::message;
use crate::sys::{self, ChildStack, CloseOnExec, PipeSignal};
use crate::zygote::protocol::{During, Failure, Step, UserIds};

/// Name of the kernel process, its only argument.
pub(super) const PROGRAM_NAME: &CStr = c"thaw-kernel";
/// Where the kernel ELF lies until it is executed.
const KERNEL_FD: RawFd = 5;

/// The namespaces that each sandbox has for itself. The others it shares with all of
/// them: one of the network would take 350 µs of a zygote, one of mounts 150, one of ipc 50 (it is a
/// file system for the host), and none has anything in it that the filter lets a sandbox reach.
const OWN_NAMESPACES: i32 = libc::CLONE_NEWPID | libc::CLONE_NEWUTS;

/// What a template keeps: a user and group id and a pid namespace for each copy.
const TEMPLATE_CAPABILITIES: CapabilitySet =
    CapabilitySet::SETUID.union(CapabilitySet::SETGID).union(CapabilitySet::SYS_ADMIN);

/// What the parent keeps, and so all that a zygote can have: see
/// [`keep_capabilities_for_zygotes`].
const BOUNDING_SET: CapabilitySet = TEMPLATE_CAPABILITIES.union(CapabilitySet::SETPCAP);

/// What a zygote is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To become a sandbox.
    Sandbox {
        /// Its user and group id.
        id: u32,
        /// Its name, by which the kernel knows which filter it gets and what it is for.
        name: &'static CStr,
    },
    /// To fork sandboxes.
    Template,
}

/// What zygotes are told of the memory of the host.
pub struct HostMemory(Option<CString>);

impl HostMemory {
    /// As this process sees it now, which must see `/proc`.
    pub fn now() -> Self {
        let variable = |bytes: u64| CString::new(format!("{HOST_MEMORY_VARIABLE}={bytes}"));
        Self(limits::host_memory().and_then(|bytes| variable(bytes).ok()))
    }

    /// The variable of the environment that says so.
    fn variable(&self) -> Option<&CStr> {
        self.0.as_deref()
    }
}

/// Drops all capabilities from the parent but those that [`Maker`] needs. Their
/// last use is in the child, which drops them, too.
pub fn keep_capabilities_for_zygotes() -> io::Result<()> {
    shrink_bounding_set(BOUNDING_SET)?;
    clear_ambient_capability_set()?;
    Ok(hold_capabilities(BOUNDING_SET)?)
}

/// Makes zygotes: children that run in the memory of the zygote parent until they execute the
/// kernel ([`sys::vfork_with`]).
pub struct Maker {
    kernel: OwnedFd,
    ids: IdMap,
    priority: Priority,
    host: HostMemory,
    stack: ChildStack,
}

impl Maker {
    /// Prepares what all zygotes inherit: no signal has an action but `SIGPIPE`.
    pub fn new(
        kernel: OwnedFd,
        ids: IdMap,
        priority: Priority,
        host: HostMemory,
    ) -> io::Result<Self> {
        sys::reset_signal_actions();
        // The parent wants to know of such errors.
        sys::set_pipe_signal(PipeSignal::Ignored);
        Ok(Self { kernel, ids, priority, host, stack: ChildStack::new()? })
    }

    /// The user ids that zygotes get.
    pub fn ids(&self) -> &IdMap {
        &self.ids
    }

    /// Makes a zygote that executes the kernel. `descriptors`: control socket, console, and,
    /// if it gets control groups, the files that move a process there.
    pub fn make(
        &mut self,
        descriptors: &[OwnedFd],
        purpose: Purpose,
    ) -> Result<(i32, OwnedFd), Failure> {
        let [control, console, groups @ ..] = descriptors else {
            return Err(io::Error::from(io::ErrorKind::InvalidInput)).during(Step::Receive);
        };
        let flags = match purpose {
            // Process 1 of a pid namespace of its own: its processes can signal each
            // other and nobody else, and all of them end with it.
            Purpose::Sandbox { .. } => OWN_NAMESPACES,
            // Process 1 could not make siblings, which the parent reaps.
            Purpose::Template => 0,
        };
        let (kernel, ids, priority) = (self.kernel.as_fd(), &self.ids, self.priority);
        let host = &self.host;
        let mut child = || {
            let prepared = prepare_kernel(kernel, control, console, groups, purpose, ids, priority);
            report(prepared.map_or_else(
                |failure| (control.as_fd(), failure),
                |()| execute_kernel(purpose, host),
            ));
            1
        };
        // SAFETY: the parent has one thread. The child borrows what it is given, and keeps
        // nothing that it allocates; the flags make namespaces only.
        unsafe { sys::vfork_with(flags, &mut self.stack, &mut child) }.during(Step::ForkZygote)
    }
}

/// Says on the control socket, which lies at its final place or is lost, why
/// the kernel does not run.
fn report((control, failure): (BorrowedFd<'_>, Failure)) {
    let text = format!("cannot {}: {}", failure.step.text(), failure.source);
    let header = message::header(MSG_FAILED, text.len(), 0);
    let parts = [io::IoSlice::new(bytemuck::bytes_of(&header)), io::IoSlice::new(text.as_bytes())];
    // If nobody listens, the exit status still says that it failed.
    let _ = message::send(control, &parts, &[]);
}

/// Gives up everything, and puts the kernel and its descriptors where it is executed with them.
fn prepare_kernel(
    kernel: BorrowedFd<'_>,
    control: &OwnedFd,
    console: &OwnedFd,
    groups: &[OwnedFd],
    purpose: Purpose,
    ids: &IdMap,
    priority: Priority,
) -> Result<(), Failure> {
    give_up_privileges(groups, purpose, ids)?;
    priority.give_up().during(Step::SetLimits)?;
    arrange_descriptors(kernel, control, console).during(Step::PlaceDescriptors)
}

/// Executes the kernel, after [`prepare_kernel`]. Returns only on failure, with the control socket to
/// report it on.
fn execute_kernel(purpose: Purpose, host: &HostMemory) -> (BorrowedFd<'static>, Failure) {
    // SAFETY: `arrange_descriptors` has put both there, where they stay. The values that own
    // the numbers that the parent gave them are the parent's.
    let (control, kernel) =
        unsafe { (BorrowedFd::borrow_raw(CONTROL_FD), BorrowedFd::borrow_raw(KERNEL_FD)) };
    let name = match purpose {
        Purpose::Sandbox { name, .. } => name,
        Purpose::Template => TEMPLATE_NAME,
    };
    let source = sys::execute(kernel, name, host.variable());
    (control, Failure { step: Step::Execute, source })
}

fn give_up_privileges(groups: &[OwnedFd], purpose: Purpose, ids: &IdMap) -> Result<(), Failure> {
    sys::set_pipe_signal(PipeSignal::Ends);
    sys::unblock_signals();
    setsid().during(Step::NewSession)?;
    for group in groups {
        // "0" stands for the writing process (cgroups(7)). The host kernel asks whether the
        // user may move it who has opened the file, which can be the one that it is until now.
        rustix::io::write(group, b"0").during(Step::EnterCgroup)?;
    }
    set_limits(ids.user_ids()).during(Step::SetLimits)?;

    clear_ambient_capability_set().during(Step::DropCapabilities)?;
    if purpose == Purpose::Template {
        raise_ambient(TEMPLATE_CAPABILITIES).during(Step::DropCapabilities)?;
    }
    // Its bounding set has no others left.
    for capability in BOUNDING_SET.iter() {
        remove_capability_from_bounding_set(capability).during(Step::DropCapabilities)?;
    }
    set_capabilities_secure_bits(
        CapabilitiesSecureBits::NO_ROOT
            | CapabilitiesSecureBits::NO_ROOT_LOCKED
            | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED,
    )
    .during(Step::DropCapabilities)?;
    let mut kept = TEMPLATE_CAPABILITIES;
    if let Purpose::Sandbox { id, .. } = purpose {
        kept = CapabilitySet::empty();
        if ids.user_ids() == UserIds::OnePerSandbox {
            set_thread_groups(&[]).during(Step::TakeIds)?;
            ids::set_ids(id).during(Step::TakeIds)?;
        }
    }
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: kept })
        .during(Step::DropCapabilities)?;
    set_no_new_privs(true).during(Step::NoNewPrivileges)
}

/// Makes capabilities outlast the execution of the kernel, which the bounding
/// set and `NO_ROOT` would prevent otherwise. They must be in the bounding set
/// still.
fn raise_ambient(kept: CapabilitySet) -> io::Result<()> {
    let all = kept | CapabilitySet::SETPCAP;
    set_capabilities(None, CapabilitySets { effective: all, permitted: all, inheritable: kept })?;
    for capability in kept.iter() {
        configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}

/// Resource limits that make what the kernel's filter allows harmless. Where a
/// limit of the daemon is lower, that one stays.
fn set_limits(user_ids: UserIds) -> io::Result<()> {
    // Counted per user id, so with a shared one it must hold all of them.
    let processes = match user_ids {
        UserIds::OnePerSandbox => limits::PROCESSES_MAX.into(),
        UserIds::Shared => 16_384,
    };
    let limits = [
        (Resource::Nofile, 4096),
        (Resource::Nproc, processes),
        // A core dump would write guest memory wherever the host is configured to.
        (Resource::Core, 0),
        // Locked memory cannot be reclaimed.
        (Resource::Memlock, 0),
        // Nothing of a sandbox may run before the host's own work.
        (Resource::Nice, 0),
        (Resource::Rtprio, 0),
        (Resource::Msgqueue, 0),
        (Resource::Sigpending, 1024),
        // Of the host's stack only; guest stacks are ordinary memory. The value also
        // decides where the host kernel puts mappings without a fixed address.
        (Resource::Stack, 8 << 20),
    ];
    for (resource, wanted) in limits {
        let allowed = getrlimit(resource).maximum.map_or(wanted, |maximum| maximum.min(wanted));
        setrlimit(resource, Rlimit { current: Some(allowed), maximum: Some(allowed) })?;
    }
    Ok(())
}

/// Closes everything but the control socket, the console and the kernel ELF. The
/// numbers of the standard streams, the only ones on which the filter allows
/// read(2), get `/dev/null`, which the parent has as its standard input: what other
/// sandboxes have as well, such as an image, must never come to lie there.
fn arrange_descriptors(
    kernel: BorrowedFd<'_>,
    control: &OwnedFd,
    console: &OwnedFd,
) -> io::Result<()> {
    // First out of the way of the final numbers.
    let kernel = sys::duplicate_above(kernel, 16)?.into_raw_fd();
    let control = sys::duplicate_above(control.as_fd(), 16)?.into_raw_fd();
    let console = sys::duplicate_above(console.as_fd(), 16)?.into_raw_fd();
    sys::place_descriptor(control.as_raw_fd(), CONTROL_FD, CloseOnExec::No)?;
    sys::place_descriptor(console.as_raw_fd(), CONSOLE_FD, CloseOnExec::No)?;
    sys::place_descriptor(kernel.as_raw_fd(), KERNEL_FD, CloseOnExec::Yes)?;
    for standard in [1, 2] {
        sys::place_descriptor(0, standard, CloseOnExec::No)?;
    }
    sys::close_descriptors(KERNEL_FD as u32 + 1, u32::MAX)
}
