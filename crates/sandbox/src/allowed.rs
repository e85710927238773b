//! Lists of the host calls that a process of the host side may make.
//!
//! A list is made into a filter by `seccompiler`, the crate of Firecracker: the kernel of
//! the sandboxes has a generator of its own only because it has no allocator at that time
//! and answers calls with `TRAP`, which is not needed here.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp,
    SeccompCondition, SeccompFilter, SeccompRule, TargetArch, apply_filter,
};

/// A check of an argument's lower half: `(argument & mask) == value`.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Number of the argument, from 0 on.
    pub argument: u8,
    /// The bits that are looked at.
    pub mask: u64,
    /// What they must be.
    pub value: u64,
}

/// The argument must be this.
pub const fn is(argument: u8, value: u64) -> Check {
    Check { argument, mask: 0xffff_ffff, value }
}

/// The request of ioctl(2) must be this.
#[allow(clippy::unnecessary_cast, reason = "other C libraries have another type of requests")]
pub const fn is_request(request: libc::Ioctl) -> Check {
    is(1, request as u64)
}

/// The argument must have none but these bits.
pub const fn has_no_bits_but(argument: u8, bits: u64) -> Check {
    Check { argument, mask: !bits & 0xffff_ffff, value: 0 }
}

/// The argument must have all of these bits.
pub const fn has_bits(argument: u8, bits: u64) -> Check {
    Check { argument, mask: bits, value: bits }
}

/// An allowed call.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Its number.
    pub number: libc::c_long,
    /// Sets of checks, one of which must hold whole; none: no argument matters.
    pub rules: &'static [&'static [Check]],
    /// Why the process needs it, and why it is harmless.
    pub reason: &'static str,
}

/// An entry of a list.
pub const fn call(
    number: libc::c_long,
    rules: &'static [&'static [Check]],
    reason: &'static str,
) -> Call {
    Call { number, rules, reason }
}

/// Which some libraries set to open files, and which means nothing on this architecture.
pub(crate) const O_LARGEFILE: u64 = 0o100_000;

/// Memory that can be read and written; never executed.
pub(crate) const READ_WRITE: Check =
    has_no_bits_but(2, (libc::PROT_READ | libc::PROT_WRITE) as u64);
/// Memory of no file, that nobody shares.
const ANONYMOUS: Check =
    has_no_bits_but(3, (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64);
/// A process that maps nothing but its own memory.
pub(crate) const MAPS_ITS_OWN: Call = call(
    libc::SYS_mmap,
    &[&[READ_WRITE, ANONYMOUS]],
    "memory for the allocator, of no file and not to be executed",
);
/// What every allocator needs, besides mmap(2).
pub(crate) static ALLOCATOR: &[Call] = &[
    call(libc::SYS_munmap, &[], "gives memory back"),
    call(libc::SYS_mremap, &[], "grows memory of the allocator"),
    call(
        libc::SYS_mprotect,
        &[&[READ_WRITE]],
        "grows a heap of the allocator; never makes memory executable",
    ),
    call(libc::SYS_madvise, &[], "gives memory back"),
    call(libc::SYS_brk, &[], "grows the heap"),
];

/// What becomes of a process that makes another call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// It is killed.
    Kill,
    /// The call fails with this error number.
    Fail(u32),
}

/// The filter of a list.
pub(crate) fn program(
    calls: impl Iterator<Item = Call>,
    otherwise: Otherwise,
) -> Result<BpfProgram, BackendError> {
    let mut rules = BTreeMap::new();
    for call in calls {
        let made: Result<Vec<SeccompRule>, _> = call
            .rules
            .iter()
            .map(|checks| {
                let conditions: Result<Vec<_>, _> = checks.iter().map(condition).collect();
                SeccompRule::new(conditions?)
            })
            .collect();
        rules.insert(call.number, made?);
    }
    let otherwise = match otherwise {
        Otherwise::Kill => SeccompAction::KillProcess,
        Otherwise::Fail(errno) => SeccompAction::Errno(errno),
    };
    SeccompFilter::new(rules, otherwise, SeccompAction::Allow, TargetArch::x86_64)?.try_into()
}

fn condition(check: &Check) -> Result<SeccompCondition, BackendError> {
    let operation = SeccompCmpOp::MaskedEq(check.mask);
    SeccompCondition::new(check.argument, Len::Dword, operation, check.value)
}

/// Forbids the calling thread, and those that it will start, new privileges and every call
/// that is not on the list, for good.
///
/// # Errors
/// The host has no filters (seccomp(2)).
pub fn install_list(calls: impl Iterator<Item = Call>, otherwise: Otherwise) -> io::Result<()> {
    let program = program(calls, otherwise).map_err(io::Error::other)?;
    apply_filter(&program).map_err(io::Error::other)
}

/// Lets one call fail with an error number, whatever else is allowed.
///
/// # Errors
/// The host has no filters (seccomp(2)).
pub fn refuse_call(number: libc::c_long, errno: u32) -> io::Result<()> {
    let (refuse, allow) = (SeccompAction::Errno(errno), SeccompAction::Allow);
    let rules = BTreeMap::from([(number, Vec::new())]);
    let filter = SeccompFilter::new(rules, allow, refuse, TargetArch::x86_64);
    let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(io::Error::other)?;
    apply_filter(&program).map_err(io::Error::other)
}
