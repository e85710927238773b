//! System calls on capabilities (capabilities(7)).

use alloc::sync::Arc;

use super::credentials::Changing;
use crate::args::{PidNumber, UserPtr};
use crate::errno::{Errno, Result};
use crate::task::credentials::SecureBits;
use crate::task::{Capabilities, Credentials, Process, current, current_process};

/// `_LINUX_CAPABILITY_VERSION_1`, whose sets have 32 bits, and the two with 64.
const VERSION_1: u32 = 0x1998_0330;
const VERSIONS_WIDE: [u32; 2] = [0x2007_1026, 0x2008_0522];

/// `struct __user_cap_header_struct`, read and understood.
struct Header {
    /// 32-bit words that each set takes.
    words: usize,
    thread: PidNumber,
}

impl Header {
    /// None if the version is unknown; the guest then reads which one is.
    fn read(at: UserPtr<[u32; 2]>) -> Result<Option<Self>> {
        let [version, tid] = at.read()?;
        let words = match version {
            VERSION_1 => 1,
            version if VERSIONS_WIDE.contains(&version) => 2,
            _ => {
                at.0.write(&VERSIONS_WIDE[1])?;
                return Ok(None);
            }
        };
        Ok(Some(Self { words, thread: PidNumber(tid as i32) }))
    }

    fn process(&self) -> Result<Arc<Process>> {
        match self.thread {
            PidNumber(..0) => Err(Errno::EINVAL),
            thread => Ok(thread.thread()?.process.clone()),
        }
    }
}

/// capget(2): effective, permitted and inheritable words, then the high ones.
pub fn capget(header: UserPtr<[u32; 2]>, data: UserPtr<[u32; 3]>) -> Result<()> {
    let Some(header) = Header::read(header)? else {
        return if data.is_null() { Ok(()) } else { Err(Errno::EINVAL) };
    };
    let process = header.process()?;
    if data.is_null() {
        return Ok(());
    }
    let c = process.credentials.borrow_mut().clone();
    let sets = [c.effective, c.permitted, c.inheritable].map(|set| set.bits());
    for word in 0..header.words {
        let words = sets.map(|set| (set >> (32 * word)) as u32);
        data.at(word).write(&words)?;
    }
    Ok(())
}

/// capset(2).
pub fn capset(header: UserPtr<[u32; 2]>, data: UserPtr<[u32; 3]>) -> Result<()> {
    let header = Header::read(header)?.ok_or(Errno::EINVAL)?;
    let is_other = |tid| tid != current().tid();
    if header.thread != PidNumber(0) && header.thread.tid().map_or(true, is_other) {
        return Err(Errno::EPERM);
    }
    let mut sets = [0u64; 3];
    for word in 0..header.words {
        let words = data.at(word).read()?;
        for (set, half) in sets.iter_mut().zip(words) {
            *set |= (half as u64) << (32 * word);
        }
    }
    let [effective, permitted, inheritable] = sets.map(Capabilities::from_bits_truncate);
    let process = current_process();
    let mut c = Changing::of(&process);
    c.set_capabilities(effective, permitted, inheritable)
}

/// The part of prctl(2) that is about capabilities; none for other options.
pub fn prctl(option: u32, arguments: [u64; 4]) -> Option<Result<u64>> {
    const PR_GET_KEEPCAPS: u32 = 7;
    const PR_SET_KEEPCAPS: u32 = 8;
    const PR_CAPBSET_READ: u32 = 23;
    const PR_CAPBSET_DROP: u32 = 24;
    const PR_GET_SECUREBITS: u32 = 27;
    const PR_SET_SECUREBITS: u32 = 28;
    const PR_SET_NO_NEW_PRIVS: u32 = 38;
    const PR_GET_NO_NEW_PRIVS: u32 = 39;
    const PR_CAP_AMBIENT: u32 = 47;
    let rest_is_zero = |from: usize| arguments[from..].iter().all(|&argument| argument == 0);
    let process = current_process();
    let mut c = process.credentials.borrow_mut();
    let keeps = c.secure_bits.contains(SecureBits::KEEP_CAPS);
    let one = || Capabilities::from_number(arguments[0]);
    let changed = match option {
        PR_GET_KEEPCAPS => return Some(Ok(keeps as u64)),
        PR_GET_SECUREBITS => return Some(Ok(c.secure_bits.bits() as u64)),
        PR_CAPBSET_READ => return Some(one().map(|one| c.bounding.contains(one) as u64)),
        PR_GET_NO_NEW_PRIVS if !rest_is_zero(0) => Err(Errno::EINVAL),
        PR_GET_NO_NEW_PRIVS => return Some(Ok(c.no_new_privileges as u64)),
        PR_CAP_AMBIENT => return Some(ambient(&mut c, arguments)),
        PR_SET_KEEPCAPS if arguments[0] > 1 => Err(Errno::EINVAL),
        PR_SET_KEEPCAPS => c.set_keeps_capabilities(arguments[0] == 1),
        // The right is asked for first.
        PR_CAPBSET_DROP => c
            .require_in_own(Capabilities::SETPCAP)
            .and_then(|()| one())
            .and_then(|one| c.drop_from_bounding(one)),
        PR_SET_SECUREBITS => c.set_secure_bits(arguments[0] as u32),
        PR_SET_NO_NEW_PRIVS if arguments[0] != 1 || !rest_is_zero(1) => Err(Errno::EINVAL),
        PR_SET_NO_NEW_PRIVS => {
            c.no_new_privileges = true;
            Ok(())
        }
        _ => return None,
    };
    Some(changed.map(|()| 0))
}

/// `PR_CAP_AMBIENT`.
fn ambient(c: &mut Credentials, [action, number, rest @ ..]: [u64; 4]) -> Result<u64> {
    const IS_SET: u64 = 1;
    const RAISE: u64 = 2;
    const LOWER: u64 = 3;
    const CLEAR_ALL: u64 = 4;
    if rest != [0; 2] {
        return Err(Errno::EINVAL);
    }
    let one = Capabilities::from_number(number);
    match action {
        CLEAR_ALL if number != 0 => return Err(Errno::EINVAL),
        CLEAR_ALL => c.ambient = Capabilities::empty(),
        IS_SET => return Ok(c.ambient.contains(one?) as u64),
        RAISE => c.raise_ambient(one?)?,
        LOWER => c.ambient -= one?,
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}
