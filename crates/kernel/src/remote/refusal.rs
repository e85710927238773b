//! Why there is no process of those that the host has asked for.

use alloc::string::String;

use thaw_abi::remote::{MSG_EXEC_FAILED, MSG_EXEC_NOT_EXECUTABLE, MSG_EXEC_NOT_FOUND};

use crate::errno::Errno;

/// What the host is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind of the message: [`MSG_EXEC_FAILED`], or one that says more.
    pub kind: u32,
    /// One sentence.
    pub reason: String,
}

impl From<String> for Refusal {
    fn from(reason: String) -> Self {
        Self { kind: MSG_EXEC_FAILED, reason }
    }
}

impl From<&str> for Refusal {
    fn from(reason: &str) -> Self {
        String::from(reason).into()
    }
}

impl Refusal {
    /// That of a program that is not run.
    pub fn of_program(name: &[u8], error: Errno) -> Self {
        let (kind, why) = match error {
            Errno::ENOENT | Errno::ENOTDIR => {
                let name = name.escape_ascii();
                let reason = alloc::format!(
                    "{name} does not exist in the sandbox; check the path, or add it to the root \
                     file system, for a function with `programs = [\"{name}\"]` in [runtime] of \
                     thaw.toml"
                );
                return Self { kind: MSG_EXEC_NOT_FOUND, reason };
            }
            Errno::EACCES | Errno::EPERM => {
                (MSG_EXEC_NOT_EXECUTABLE, "may not be executed; check its permissions")
            }
            Errno::ENOEXEC => (
                MSG_EXEC_NOT_EXECUTABLE,
                "is not a program that this machine can run; give a 64-bit x86 ELF file or a script",
            ),
            Errno::E2BIG => (MSG_EXEC_FAILED, "has too many arguments; pass them in a file"),
            Errno::EISDIR => (MSG_EXEC_NOT_EXECUTABLE, "is a directory; name a program"),
            error => {
                let (name, error) = (name.escape_ascii(), error.name());
                return alloc::format!("{name} cannot be started: {error}").into();
            }
        };
        Self { kind, reason: alloc::format!("{} {why}", name.escape_ascii()) }
    }

    /// That of a script whose interpreter is not there.
    pub fn of_interpreter(script: &[u8], missing: &[u8]) -> Self {
        let (script, missing) = (script.escape_ascii(), missing.escape_ascii());
        let reason = alloc::format!(
            "{script} needs the interpreter {missing}, which the sandbox lacks; add it to the root \
             file system, for a function with `programs = [\"{missing}\"]` in [runtime] of thaw.toml"
        );
        Self { kind: MSG_EXEC_NOT_FOUND, reason }
    }
}
