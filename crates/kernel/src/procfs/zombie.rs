//! `/proc/PID` of a process that has ended and that nobody has waited for yet. It has no memory and
//! no files any more, but a name, an owner, limits and CPU time.

use alloc::string::String;
use alloc::vec::Vec;

use super::status::{self, SignalSets, Subject};
use crate::errno::{Errno, Result};
use crate::task::Process;
use crate::task::pid_namespace::PidNamespace;

/// The content of a file, as Linux shows it.
pub(super) fn content(file: &[u8], process: &Process, namespace: &PidNamespace) -> Result<Vec<u8>> {
    check(file)?;
    let text: &[u8] = match file {
        b"stat" => return Ok(status::stat_of(&subject(process), namespace)),
        b"status" => return Ok(status::status_of(&subject(process), namespace)),
        b"io" => return status::io(process),
        b"limits" => return status::limits(process),
        b"statm" => b"0 0 0 0 0 0 0\n",
        _ => b"",
    };
    Ok(text.to_vec())
}

/// Refuses to open what Linux refuses to open: files about memory (`ESRCH`) and mounts (`EINVAL`).
pub(super) fn check(file: &[u8]) -> Result<()> {
    match file {
        b"auxv" | b"environ" | b"mem" | b"smaps_rollup" => Err(Errno::ESRCH),
        b"mountinfo" | b"mounts" | b"mountstats" => Err(Errno::EINVAL),
        _ => Ok(()),
    }
}

/// `comm`.
pub(super) fn name_line(process: &Process) -> Vec<u8> {
    (name(process) + "\n").into_bytes()
}

fn name(process: &Process) -> String {
    status::unpadded(process.remains.get().name)
}

fn subject(process: &Process) -> Subject<'_> {
    let remains = process.remains.get();
    Subject {
        process,
        tid: process.pid.main_thread(),
        name: name(process),
        state: ('Z', "zombie"),
        scheduling: remains.scheduling,
        cpu_ns: process.cpu_ns(),
        threads: 1,
        sets: SignalSets::of_process(process, remains.blocked),
        tracer: None,
        seccomp: remains.seccomp,
        memory: None,
    }
}
