//! Programs that a process has tried to execute and that do not exist: the host hears of them.
//!
//! A program is looked for by trying one directory of `PATH` after the other (exec(3)), so what fails
//! says nothing yet. A process that ends without having executed anything after that has not found it.

use alloc::vec::Vec;

use thaw_abi::control::{FLAG_SAY_LACKS, LACK_PROGRAM, LACKS_TOLD_MAX};

use super::{elf, script};
use crate::errno::{Errno, Result};
use crate::fs::Context;
use crate::fs::open::open_program;
use crate::fs::path::Path;
use crate::fs::walk::Follow;
use crate::host::control;
use crate::state::{OfBoot, kernel};
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::thread::current;

/// What the host has heard of, of each boot its own.
#[derive(Default)]
pub struct Told {
    names: KernelCell<Option<OfBoot<Vec<Vec<u8>>>>>,
}

impl Told {
    /// Copies have a host that has heard of nothing yet: forgets what this one has heard of.
    pub fn prepare_freeze(&self) {
        *self.names.borrow_mut() = None;
    }
}

/// execve(2) of the running process has failed.
pub fn not_executed(context: &Context, start: &Path, path: &[u8], error: Errno) {
    if kernel().config.get().flags & FLAG_SAY_LACKS == 0 {
        return;
    }
    let missing = match error {
        Errno::ENOENT | Errno::ENOTDIR => missing_file(context, start, path),
        // It exists.
        _ => Ok(Vec::new()),
    };
    let thread = current();
    let process = &thread.process;
    let before = core::mem::take(&mut *process.missing_program.borrow_mut());
    let now = sought(&before, missing.unwrap_or_else(|_| path.to_vec()));
    *process.missing_program.borrow_mut() = now;
}

/// A process ends, or the sandbox with its first one.
pub fn process_ended(process: &Process) {
    let missing = core::mem::take(&mut *process.missing_program.borrow_mut());
    if !missing.is_empty() && is_news(&missing) {
        control::say_lack(kernel().config.get().flags, LACK_PROGRAM, 0, &missing);
    }
}

/// Whether the host has not heard of this one, and of few others; it has then.
fn is_news(name: &[u8]) -> bool {
    let mut told = kernel().missing_programs.names.borrow_mut();
    let names = OfBoot::of_this(&mut told);
    let is_news = names.len() < LACKS_TOLD_MAX && !names.iter().any(|known| known == name);
    if is_news {
        names.push(name.to_vec());
    }
    is_news
}

/// The file that is missing: the program, or the interpreter of one that is there.
fn missing_file(context: &Context, start: &Path, path: &[u8]) -> Result<Vec<u8>> {
    if let Some(missing) = script::missing_interpreter(context, path) {
        return Ok(missing.interpreter);
    }
    let file = open_program(context, start, path, Follow::Yes)?;
    Ok(elf::Object::read(&file)?.interpreter.unwrap_or_else(|| path.to_vec()))
}

/// What a process looks for that looked for `before` and has not found `path` now: a path, or a name
/// if it looks in several directories.
fn sought(before: &[u8], path: Vec<u8>) -> Vec<u8> {
    let name = base_name(&path);
    match before != path && base_name(before) == name && path.contains(&b'/') {
        true => name.to_vec(),
        false => path,
    }
}

fn base_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_hears_of_a_name_once_and_the_next_one_again() {
        let _sandbox = crate::testing::Sandbox::new();
        assert_eq!([b"git", b"git", b"cvs"].map(|name| is_news(name)), [true, false, true]);
        kernel().generation.set(1);
        assert_eq!([b"git", b"git"].map(|name| is_news(name)), [true, false]);
        kernel().missing_programs.prepare_freeze();
        assert!(is_news(b"git"));
    }

    #[test]
    fn what_is_looked_for_in_several_directories_is_a_name() {
        let after = |tried: &[&str]| {
            let all = tried.iter().map(|path| path.as_bytes().to_vec());
            all.reduce(|before, path| sought(&before, path)).unwrap()
        };
        assert_eq!(after(&["/usr/bin/git"]), b"/usr/bin/git");
        assert_eq!(after(&["/usr/bin/git", "/usr/bin/git"]), b"/usr/bin/git");
        assert_eq!(after(&["/usr/local/bin/git", "/usr/bin/git", "/bin/git"]), b"git");
        assert_eq!(after(&["/usr/bin/git", "/bin/git", "/bin/hg"]), b"/bin/hg");
        assert_eq!(after(&["/bin/git", "git"]), b"git");
        assert_eq!(after(&["/bin/git", ""]), b"");
    }
}
