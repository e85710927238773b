//! Host calls that something forbids: a container's filter, or `SystemCallFilter=` of a
//! systemd unit. A filter may kill who makes a call, so each is made by a process of its
//! own, with arguments that no call accepts.
#![allow(unsafe_code)]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use super::{Probe, Status};

/// Hidden first argument that makes an executable make one call.
const CALL_ARGUMENT: &str = "--thaw-call-probe";

/// A call that Thaw makes outside its sandboxes.
struct Call {
    name: &'static str,
    number: libc::c_long,
    /// Whether Linux itself answers `EPERM` to some, before it looks at the arguments.
    may_be_denied: bool,
}

const fn call(name: &'static str, number: libc::c_long) -> Call {
    Call { name, number, may_be_denied: false }
}

/// A call that takes a right which the caller need not have here.
const fn privileged(name: &'static str, number: libc::c_long) -> Call {
    Call { name, number, may_be_denied: true }
}

/// Those that filters are known to forbid.
const CALLS: [Call; 16] = [
    call("clone3", libc::SYS_clone3),
    call("execveat", libc::SYS_execveat),
    call("memfd_create", libc::SYS_memfd_create),
    call("openat2", libc::SYS_openat2),
    call("pidfd_open", libc::SYS_pidfd_open),
    call("pidfd_send_signal", libc::SYS_pidfd_send_signal),
    call("prlimit64", libc::SYS_prlimit64),
    call("sched_setaffinity", libc::SYS_sched_setaffinity),
    call("seccomp", libc::SYS_seccomp),
    call("setresuid", libc::SYS_setresuid),
    call("capset", libc::SYS_capset),
    privileged("setgroups", libc::SYS_setgroups),
    privileged("setns", libc::SYS_setns),
    privileged("mount", libc::SYS_mount),
    privileged("umount2", libc::SYS_umount2),
    privileged("pivot_root", libc::SYS_pivot_root),
];

/// What came of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Linux looked at it.
    Made,
    /// It was refused.
    Refused,
    /// It killed the process.
    Killed,
}

/// The finding about all calls, and whether some would kill this process, too.
pub(super) fn calls() -> (Probe, bool) {
    let fates = CALLS.iter().map(|call| (call.name, try_call(call)));
    judge(&fates.collect::<Vec<_>>())
}

fn judge(fates: &[(&str, Fate)]) -> (Probe, bool) {
    const NAME: &str = "host calls";
    let with = |wanted| {
        let names = fates.iter().filter(|(_, fate)| *fate == wanted).map(|(name, _)| *name);
        names.collect::<Vec<_>>().join(", ")
    };
    let (killed, refused) = (with(Fate::Killed), with(Fate::Refused));
    let found = match (killed.is_empty(), refused.is_empty()) {
        (true, true) => return (Probe::good(NAME, "none that Thaw makes is blocked"), false),
        (false, true) => format!("a filter kills who makes {killed}"),
        (true, false) => format!("a filter refuses {refused}"),
        (false, false) => format!("a filter refuses {refused}, and kills who makes {killed}"),
    };
    // Only the files of functions that are built are resolved with it.
    let is_vital = !killed.is_empty() || refused != "openat2";
    let status = if is_vital { Status::Missing } else { Status::Limited };
    let way_out = match is_vital {
        true => {
            "allow them: in a systemd unit SystemCallFilter= must admit @mount, @privileged and \
             @sandbox besides @system-service; in a container use a profile that does"
        }
        false => {
            "`thaw build` needs it: drop RestrictSUIDSGID= and DynamicUser= from the systemd unit; \
             what is built already is served"
        }
    };
    (Probe::with(NAME, status, found, way_out), !killed.is_empty())
}

fn try_call(call: &Call) -> Fate {
    let outcome = Command::new("/proc/self/exe")
        .args([CALL_ARGUMENT, &call.number.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    // A process that cannot be made says nothing about the call.
    let Ok(status) = outcome else { return Fate::Made };
    match (status.signal(), status.code()) {
        (Some(libc::SIGSYS), _) => Fate::Killed,
        (_, Some(libc::ENOSYS)) => Fate::Refused,
        (_, Some(libc::EPERM)) if !call.may_be_denied => Fate::Refused,
        _ => Fate::Made,
    }
}

/// Makes the one call, if this process was spawned for that; the exit code is its errno.
pub(crate) fn call_main() -> Option<i32> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != CALL_ARGUMENT {
        return None;
    }
    let number: libc::c_long = arguments.next()?.into_string().ok()?.parse().ok()?;
    if CALLS.iter().all(|call| call.number != number) {
        return Some(0);
    }
    // SAFETY: the call is one of the list, and no argument is a valid address, descriptor,
    // size or id for any of them (-1 leaves an id as it is): nothing is read or changed.
    let result = unsafe { libc::syscall(number, -1_i64, -1_i64, -1_i64, -1_i64, -1_i64, -1_i64) };
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    Some(if result < 0 { errno } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocked_calls_are_named_with_a_way_out() {
        let made = [("mount", Fate::Made), ("clone3", Fate::Made)];
        assert_eq!(judge(&made).0.status, Status::Good);
        let (probe, kills) = judge(&[("mount", Fate::Killed), ("clone3", Fate::Refused)]);
        assert!(kills && probe.status == Status::Missing);
        assert!(probe.found.contains("refuses clone3, and kills who makes mount"), "{probe:?}");
        assert!(probe.way_out.unwrap().contains("SystemCallFilter="));
        let (probe, kills) = judge(&[("openat2", Fate::Refused)]);
        assert!(!kills && probe.status == Status::Limited);
        assert!(probe.way_out.unwrap().contains("RestrictSUIDSGID="));
    }
}
