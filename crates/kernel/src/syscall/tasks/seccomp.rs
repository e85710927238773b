//! seccomp(2), and its part of prctl(2).

use bitflags::bitflags;

use crate::args::{Flags, UserPtr};
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::task::seccomp::program::{INSTRUCTIONS_MAX, Program};
use crate::task::seccomp::{self, ACTIONS, Others};
use crate::task::{Capabilities, current};

const SET_MODE_STRICT: u32 = 0;
const SET_MODE_FILTER: u32 = 1;
const GET_ACTION_AVAIL: u32 = 2;

bitflags! {
    /// `SECCOMP_FILTER_FLAG_*`. Nobody can listen to notifications.
    #[derive(Clone, Copy, PartialEq, Eq)]
    struct FilterFlags: u32 {
        /// All threads get the filter.
        const TSYNC = 1;
        /// Nothing is logged.
        const LOG = 2;
        /// The host decides on speculation.
        const SPEC_ALLOW = 4;
        /// A thread that cannot get the filter is an error.
        const TSYNC_ESRCH = 16;
    }
}

/// `struct sock_fprog` (linux/filter.h).
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct FilterProgram {
    /// How many instructions, in the lowest 16 bits; the others are padding.
    len: u64,
    instructions: u64,
}

/// seccomp(2). Without notifications there is no `SECCOMP_GET_NOTIF_SIZES` either, as before Linux 5.0.
pub fn seccomp(operation: u32, Flags(flags): Flags, argument: UserAddress) -> Result<u64> {
    match operation {
        SET_MODE_STRICT if flags == 0 && argument.is_null() => seccomp::set_strict().map(|()| 0),
        SET_MODE_FILTER => {
            let flags = FilterFlags::from_bits(flags).ok_or(Errno::EINVAL)?;
            add_filter(flags, UserPtr::new(argument))
        }
        GET_ACTION_AVAIL if flags == 0 => match ACTIONS.contains(&argument.read()?) {
            true => Ok(0),
            false => Err(Errno::EOPNOTSUPP),
        },
        _ => Err(Errno::EINVAL),
    }
}

/// The part of prctl(2) that is about seccomp(2); none for other options.
pub fn prctl(option: u32, mode: u64, filter: UserPtr<FilterProgram>) -> Option<Result<u64>> {
    const PR_GET_SECCOMP: u32 = 21;
    const PR_SET_SECCOMP: u32 = 22;
    Some(match (option, mode) {
        (PR_GET_SECCOMP, _) => Ok(current().seccomp.borrow_mut().mode().into()),
        (PR_SET_SECCOMP, 1) => seccomp::set_strict().map(|()| 0),
        (PR_SET_SECCOMP, 2) => add_filter(FilterFlags::empty(), filter),
        (PR_SET_SECCOMP, _) => Err(Errno::EINVAL),
        _ => return None,
    })
}

/// `SECCOMP_SET_MODE_FILTER`: 0, or the thread that cannot get the filter (`seccomp_set_mode_filter`).
fn add_filter(flags: FilterFlags, program: UserPtr<FilterProgram>) -> Result<u64> {
    let FilterProgram { len, instructions } = program.read()?;
    let len = usize::from(len as u16);
    if len == 0 || len > INSTRUCTIONS_MAX {
        return Err(Errno::EINVAL);
    }
    let may_restrict = {
        let thread = current();
        let credentials = thread.process.credentials.borrow_mut();
        credentials.no_new_privileges || credentials.can_in_own(Capabilities::SYS_ADMIN)
    };
    if !may_restrict {
        return Err(Errno::EACCES);
    }
    if instructions == 0 {
        return Err(Errno::EINVAL);
    }
    let program = Program::check(UserAddress(instructions).read_array(len)?)?;
    let others = if flags.contains(FilterFlags::TSYNC) { Others::Follow } else { Others::Stay };
    match seccomp::add_filter(program, others)? {
        Some(_) if flags.contains(FilterFlags::TSYNC_ESRCH) => Err(Errno::ESRCH),
        Some(other) => Ok(other.number().into()),
        None => Ok(0),
    }
}
