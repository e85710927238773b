//! Checks from outside that a zygote is isolated. The kernel installs its own
//! seccomp filter, so the host must not take its word for it.

use std::io::Read;

use super::ZygoteError;
use super::process::Process;
use super::protocol::UserIds;

/// Fields of `/proc/PID/status` (proc_pid_status(5)) and what they must be.
const REQUIRED: [(&str, &str); 8] = [
    ("Seccomp", "2"),
    ("NoNewPrivs", "1"),
    ("CapInh", "0000000000000000"),
    ("CapPrm", "0000000000000000"),
    ("CapEff", "0000000000000000"),
    ("CapBnd", "0000000000000000"),
    ("CapAmb", "0000000000000000"),
    ("Threads", "1"),
];

/// Checks the process by its `/proc/PID/status`.
pub(crate) fn verify(process: &Process) -> Result<(), ZygoteError> {
    let mut status = String::new();
    process
        .proc_file("status")
        .and_then(|mut file| file.read_to_string(&mut status))
        .map_err(|source| ZygoteError::Create { step: "read its status", source })?;
    check(&status, process.parent.user_ids())
}

fn check(status: &str, user_ids: UserIds) -> Result<(), ZygoteError> {
    let value = |field: &str| {
        status
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| *name == field)
            .map_or("missing", |(_, value)| value.trim())
    };
    let refuse = |field, required| {
        let found = value(field).to_owned();
        Err(ZygoteError::NotIsolated { field, found, required })
    };
    for (field, required) in REQUIRED {
        if value(field) != required {
            return refuse(field, required);
        }
    }
    // In the last of its pid namespaces it is the first process.
    if value("NSpid").split_whitespace().next_back() != Some("1") {
        return refuse("NSpid", "a pid namespace of its own");
    }
    if user_ids == UserIds::OnePerSandbox {
        for field in ["Uid", "Gid"] {
            let is_privileged = |id: &str| id.parse().is_ok_and(|id: u32| id < 1000);
            let mut ids = value(field).split_whitespace();
            if value(field) == "missing" || ids.any(is_privileged) {
                return refuse(field, "an id of its own");
            }
        }
        if !value("Groups").is_empty() {
            return refuse("Groups", "empty");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ISOLATED: &str = "Name:\tthaw-kernel\nUid:\t2000001\t2000001\t2000001\t2000001\n\
        Gid:\t2000001\t2000001\t2000001\t2000001\nGroups:\t \nThreads:\t1\n\
        CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n\
        CapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n\
        Seccomp_filters:\t1\nNSpid:\t4711\t7\t1\n";

    #[test]
    fn an_isolated_process_passes() {
        check(ISOLATED, UserIds::OnePerSandbox).unwrap();
    }

    #[test]
    fn each_missing_isolation_is_refused() {
        for (good, bad) in [
            ("Seccomp:\t2", "Seccomp:\t0"),
            ("Seccomp:\t2", ""),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0"),
            ("CapBnd:\t0000000000000000", "CapBnd:\t000001ffffffffff"),
            ("CapEff:\t0000000000000000", "CapEff:\t0000000000000001"),
            ("Uid:\t2000001", "Uid:\t0"),
            ("Groups:\t ", "Groups:\t0 27"),
            ("Threads:\t1", "Threads:\t2"),
        ] {
            let status = ISOLATED.replace(good, bad);
            check(&status, UserIds::OnePerSandbox).expect_err(bad);
        }
    }
}
