//! Checks from outside that a zygote is isolated. The kernel installs its own
//! seccomp filter, so the host must not take its word for it.

use std::io::Read;

use super::ZygoteError;
use super::process::Process;
use super::protocol::UserIds;

/// Fields of `/proc/PID/status` (proc_pid_status(5)) and what they must be.
const REQUIRED: [(&str, &str); 6] = [
    ("Seccomp", "2"),
    ("NoNewPrivs", "1"),
    ("CapInh", NO_CAPABILITIES),
    ("CapBnd", NO_CAPABILITIES),
    ("CapAmb", NO_CAPABILITIES),
    ("Threads", "1"),
];
const NO_CAPABILITIES: &str = "0000000000000000";
/// `CAP_SETGID`, `CAP_SETUID`, `CAP_SYS_ADMIN`.
const TEMPLATE_CAPABILITIES: &str = "00000000002000c0";

/// Checks a sandbox by its `/proc/PID/status`. Returns the number of the process
/// in the zygote parent's pid namespace.
pub(crate) fn verify(process: &Process) -> Result<u32, ZygoteError> {
    check(&status(process)?, process.parent.user_ids())
}

/// The same for a template, which has a few capabilities and its maker's user id.
pub(crate) fn verify_template(process: &Process) -> Result<(), ZygoteError> {
    check_process(&status(process)?, TEMPLATE_CAPABILITIES)
}

fn status(process: &Process) -> Result<String, ZygoteError> {
    // Room for all of it, so that it is read in one piece.
    let mut status = String::with_capacity(4096);
    process.proc_file("status").and_then(|mut file| file.read_to_string(&mut status)).map_err(
        |source| match source.raw_os_error() {
            // It has ended meanwhile.
            Some(libc::ENOENT | libc::ESRCH) => ZygoteError::Killed,
            _ => ZygoteError::Create { step: "read its status", source },
        },
    )?;
    Ok(status)
}

/// The value of a field, which is not the first.
fn value<'a>(status: &'a str, field: &str) -> &'a str {
    let after_name = |(at, _)| status[at + 1 + field.len()..].strip_prefix(':');
    let begins = |(at, _): &(usize, &str)| status[at + 1..].starts_with(field);
    status
        .match_indices('\n')
        .filter(begins)
        .find_map(after_name)
        .map_or("missing", |rest| rest.lines().next().unwrap_or_default().trim())
}

fn refuse<T>(status: &str, field: &'static str, required: &'static str) -> Result<T, ZygoteError> {
    Err(ZygoteError::NotIsolated { field, found: value(status, field).to_owned(), required })
}

/// What holds for sandboxes and templates.
fn check_process(status: &str, capabilities: &'static str) -> Result<(), ZygoteError> {
    let capabilities = [("CapPrm", capabilities), ("CapEff", capabilities)];
    for (field, required) in REQUIRED.into_iter().chain(capabilities) {
        if value(status, field) != required {
            return refuse(status, field, required);
        }
    }
    Ok(())
}

fn check(status: &str, user_ids: UserIds) -> Result<u32, ZygoteError> {
    check_process(status, NO_CAPABILITIES)?;
    // In the last of its pid namespaces it is the first process.
    let mut numbers = value(status, "NSpid").split_whitespace().rev();
    let (Some("1"), Some(number)) = (numbers.next(), numbers.next().and_then(|n| n.parse().ok()))
    else {
        return refuse(status, "NSpid", "a pid namespace of its own");
    };
    if user_ids == UserIds::OnePerSandbox {
        for field in ["Uid", "Gid"] {
            let is_privileged = |id: &str| id.parse().is_ok_and(|id: u32| id < 1000);
            let mut ids = value(status, field).split_whitespace();
            if value(status, field) == "missing" || ids.any(is_privileged) {
                return refuse(status, field, "an id of its own");
            }
        }
        if !value(status, "Groups").is_empty() {
            return refuse(status, "Groups", "empty");
        }
    }
    Ok(number)
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
        assert_eq!(check(ISOLATED, UserIds::OnePerSandbox).unwrap(), 7);
    }

    #[test]
    fn a_template_has_three_capabilities() {
        check_process(ISOLATED, TEMPLATE_CAPABILITIES).unwrap_err();
        let mut template = ISOLATED.to_owned();
        for field in ["CapPrm", "CapEff"] {
            let none = format!("{field}:\t{NO_CAPABILITIES}");
            template = template.replace(&none, &format!("{field}:\t{TEMPLATE_CAPABILITIES}"));
        }
        check_process(&template, TEMPLATE_CAPABILITIES).unwrap();
        check(&template, UserIds::OnePerSandbox).unwrap_err();
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
