//! Forking one zygote off the parent and giving up everything in it.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, setsid};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    configure_capability_in_ambient_set, set_capabilities, set_capabilities_secure_bits,
    set_no_new_privs, set_thread_groups,
};
use thaw_abi::control::{MSG_FAILED, SINGLE_PROCESS_NAME, TEMPLATE_NAME};
use thaw_abi::layout::{CONSOLE_FD, CONTROL_FD};

use super::ids::{self, IdMap};
use crate::confine::{hold_capabilities, shrink_bounding_set};
use crate::limits;
use crate::message;
use crate::sys::{self, CloseOnExec, Forked};
use crate::zygote::Processes;
use crate::zygote::protocol::{CREATE_DESCRIPTORS, During, Failure, Step, UserIds};

/// Name of the kernel process, its only argument.
const PROGRAM_NAME: &CStr = c"thaw-kernel";
/// Where the kernel ELF lies until it is executed.
const KERNEL_FD: RawFd = 5;

/// The namespaces that each sandbox has for itself. The others it shares with all of
/// them: one of the network would take 350 µs of a zygote, one of mounts 150, and neither
/// has anything in it that the filter lets a sandbox reach.
const OWN_NAMESPACES: i32 = libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;

/// What a template keeps: a user and group id and a pid namespace for each copy.
const TEMPLATE_CAPABILITIES: CapabilitySet =
    CapabilitySet::SETUID.union(CapabilitySet::SETGID).union(CapabilitySet::SYS_ADMIN);

/// What a zygote is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To become a sandbox.
    Sandbox {
        /// Its user and group id.
        id: u32,
        /// Which filter it gets.
        processes: Processes,
    },
    /// To fork sandboxes.
    Template,
}

/// Drops all capabilities from the parent but those that [`fork`] needs. Their
/// last use is in the child, which drops them, too.
pub fn keep_capabilities_for_zygotes() -> io::Result<()> {
    let kept = TEMPLATE_CAPABILITIES | CapabilitySet::SETPCAP;
    shrink_bounding_set(kept)?;
    clear_ambient_capability_set()?;
    Ok(hold_capabilities(kept)?)
}

/// Forks a zygote that executes the kernel.
/// `descriptors`: control socket, console, and, if it gets a control group, the
/// file that moves a process there.
pub fn fork(
    kernel: &OwnedFd,
    descriptors: Vec<OwnedFd>,
    purpose: Purpose,
    ids: &IdMap,
) -> Result<(i32, OwnedFd), Failure> {
    if descriptors.len() < CREATE_DESCRIPTORS {
        return Err(io::Error::from(io::ErrorKind::InvalidInput)).during(Step::Receive);
    }
    let flags = match purpose {
        // Process 1 of a pid namespace of its own: its processes can signal each
        // other and nobody else, and all of them end with it.
        Purpose::Sandbox { .. } => OWN_NAMESPACES as u64,
        // Process 1 could not make siblings, which the parent reaps.
        Purpose::Template => 0,
    };
    // SAFETY: the parent has one thread; no flag shares anything.
    match unsafe { sys::fork_with(flags) }.during(Step::ForkZygote)? {
        Forked::Parent { pid, pidfd } => Ok((pid, pidfd)),
        Forked::Child => {
            let mut descriptors = descriptors.into_iter();
            let (control, console) = (descriptors.next(), descriptors.next());
            let failure = match (control, console) {
                (Some(control), Some(console)) => {
                    let groups: Vec<OwnedFd> = descriptors.collect();
                    become_kernel(kernel, control, console, groups, purpose, ids)
                }
                // The length was checked above.
                _ => std::process::exit(1),
            };
            report(failure.err());
            std::process::exit(1)
        }
    }
}

/// Says on the control socket, which lies at its final place or is lost, why
/// the kernel does not run.
fn report(failure: Option<(OwnedFd, Failure)>) {
    let Some((control, failure)) = failure else { return };
    let text = format!("cannot {}: {}", failure.step.text(), failure.source);
    let header = message::header(MSG_FAILED, text.len(), 0);
    let parts = [io::IoSlice::new(bytemuck::bytes_of(&header)), io::IoSlice::new(text.as_bytes())];
    // If nobody listens, the exit status still says that it failed.
    let _ = message::send(&control, &parts, &[]);
}

/// Gives up everything and executes the kernel. Returns only on failure, with
/// the control socket to report it on.
fn become_kernel(
    kernel: &OwnedFd,
    control: OwnedFd,
    console: OwnedFd,
    groups: Vec<OwnedFd>,
    purpose: Purpose,
    ids: &IdMap,
) -> Result<(), (OwnedFd, Failure)> {
    let prepared = give_up_privileges(groups, purpose, ids).and_then(|()| {
        arrange_descriptors(kernel, &control, &console).during(Step::PlaceDescriptors)
    });
    if let Err(failure) = prepared {
        return Err((control, failure));
    }
    // The descriptors that these values own are closed or replaced by now.
    let (_, _) = (control.into_raw_fd(), console.into_raw_fd());
    // SAFETY: both numbers were set up by `arrange_descriptors`; their former owners are gone.
    let (control, kernel) = unsafe {
        use std::os::fd::FromRawFd;
        (OwnedFd::from_raw_fd(CONTROL_FD), OwnedFd::from_raw_fd(KERNEL_FD))
    };
    let name = match purpose {
        Purpose::Sandbox { processes: Processes::Several, .. } => PROGRAM_NAME,
        Purpose::Sandbox { processes: Processes::One, .. } => SINGLE_PROCESS_NAME,
        Purpose::Template => TEMPLATE_NAME,
    };
    let source = sys::execute(kernel.as_fd(), &[name]);
    Err((control, Failure { step: Step::Execute, source }))
}

fn give_up_privileges(groups: Vec<OwnedFd>, purpose: Purpose, ids: &IdMap) -> Result<(), Failure> {
    sys::reset_signals();
    setsid().during(Step::NewSession)?;
    for group in groups {
        // "0" stands for the writing process (cgroups(7)). The right to do so was
        // checked when the library opened the file.
        rustix::io::write(group, b"0").during(Step::EnterCgroup)?;
    }
    set_limits(ids.user_ids()).during(Step::SetLimits)?;

    clear_ambient_capability_set().during(Step::DropCapabilities)?;
    if purpose == Purpose::Template {
        raise_ambient(TEMPLATE_CAPABILITIES).during(Step::DropCapabilities)?;
    }
    shrink_bounding_set(CapabilitySet::empty()).during(Step::DropCapabilities)?;
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
fn arrange_descriptors(kernel: &OwnedFd, control: &OwnedFd, console: &OwnedFd) -> io::Result<()> {
    // First out of the way of the final numbers.
    let kernel = sys::duplicate_above(kernel.as_fd(), 16)?.into_raw_fd();
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
