//! Giving a program to a copy of a runtime template.
//!
//! A runtime template is an interpreter that was frozen before it has seen a program. The
//! copy gets what a start command fixes: arguments, environment, working directory, port,
//! and a root file system with more files. Its interpreter finds the arguments in
//! `/proc/self/cmdline` and the environment in `/proc/self/environ`, as everybody does. One that
//! cannot look there is frozen when it looks for its program ([`thaw_abi::control::START_PATH`]), and
//! has both written to its memory.

use alloc::sync::Arc;

use thaw_abi::control::{FLAG_SECRETS, MSG_START, MemoryWrite, ROOTFS_INDEX, Start};

use super::program::{Strings, parse_strings, surroundings};
use crate::errno::{Errno, Result};
use crate::exec::stack::joined;
use crate::host::control::Message;
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::task::Process;
use crate::task::process::FIRST_PID;

/// Carries out the start command that follows [`thaw_abi::control::THAW_AND_START`]. `EINVAL`
/// if it is none, or asks for what a copy cannot have.
pub fn take_program(message: &Message) -> Result<()> {
    if message.kind != MSG_START {
        return Err(Errno::EINVAL);
    }
    let (command, tail) = message.split::<Start>()?;
    let (strings, writes) = parse_strings(tail, command).ok_or(Errno::EINVAL)?;
    if command.rootfs != ROOTFS_INDEX || !strings.mounts.is_empty() {
        return Err(Errno::EINVAL);
    }
    let process = kernel().tasks.process(FIRST_PID).ok_or(Errno::EINVAL)?;
    kernel().fs.rebase(command.index_len)?;
    configure(command, &strings);
    if command.flags & FLAG_SECRETS != 0 {
        crate::secrets::mount()?;
    }
    become_program(&process, &strings)?;
    write_memory(writes)
}

/// Writes to the memory of the program what the host says, each [`MemoryWrite`] with its bytes.
fn write_memory(mut said: &[u8]) -> Result<()> {
    while let Some((write, after)) = said.split_at_checked(size_of::<MemoryWrite>()) {
        let write: MemoryWrite = bytemuck::pod_read_unaligned(write);
        let len = usize::try_from(write.len).map_err(|_| Errno::EINVAL)?;
        let (bytes, rest) = after.split_at_checked(len).ok_or(Errno::EINVAL)?;
        if UserAddress(write.address).write_bytes(bytes).is_err() {
            super::fail(
                b"the program does not fit the memory of its runtime template, which is damaged",
            );
        }
        said = rest;
    }
    if said.is_empty() { Ok(()) } else { Err(Errno::EINVAL) }
}

/// Notes what the start command says of the sandbox as a whole.
fn configure(command: &Start, strings: &Strings) {
    let kernel = kernel();
    let mut config = kernel.config.borrow_mut();
    config.port = command.port as u16;
    config.cpus = command.cpus.max(1);
    config.entry_signal = command.entry_signal;
    // Limits and flags of the identity are the same; files that are made now need them.
    config.memory_limit = command.memory_limit;
    config.flags = command.flags;
    drop(config);
    *kernel.namespaces.uts.hostname.borrow_mut() = strings.hostname.clone();
    // To the program, this is the start.
    kernel.started_in.set(kernel.generation.get());
}

/// Gives the first process the arguments, the environment and the directory of the program.
fn become_program(process: &Arc<Process>, strings: &Strings) -> Result<()> {
    *process.command_line.borrow_mut() = joined(&strings.argv);
    *process.environment.borrow_mut() = joined(&strings.envp);
    let thread = process.threads.borrow_mut().first().cloned().ok_or(Errno::EINVAL)?;
    // File systems ask who is calling.
    thread.with_identity(|| drop(surroundings(process, &strings.workdir)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn said(address: u64, len: u64, bytes: &[u8]) -> Vec<u8> {
        [bytemuck::bytes_of(&MemoryWrite { address, len }), bytes].concat()
    }

    #[test]
    fn writes_that_are_cut_off_or_have_more_behind_them_are_refused() {
        let _sandbox = crate::testing::Sandbox::new();
        assert_eq!(write_memory(&[]), Ok(()));
        assert_eq!(write_memory(&said(0x1000, 2, b"a")), Err(Errno::EINVAL));
        assert_eq!(write_memory(&said(0x1000, u64::MAX, b"a")), Err(Errno::EINVAL));
        assert_eq!(write_memory(&said(0x1000, 0, b"")[..15]), Err(Errno::EINVAL));
        assert_eq!(write_memory(b"a"), Err(Errno::EINVAL));
    }
}
