//! The program that the host asks for: finding it, its directory and its environment.

use alloc::string::String;
use alloc::vec::Vec;

use thaw_abi::remote::Exec;

use super::refusal::Refusal;
use crate::errno::Errno;
use crate::exec::{Program, script};
use crate::fs::Context;
use crate::fs::path::Path;
use crate::fs::permission::Access;
use crate::fs::walk::{Follow, walk};

/// Where names without a slash are looked for if the environment does not say.
const PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What the message says in strings.
pub struct Strings {
    /// Empty for that of the first process.
    pub user: Vec<u8>,
    /// Empty for that of the first process.
    pub workdir: Vec<u8>,
    /// At least one.
    pub argv: Vec<Vec<u8>>,
    /// Added to those of the first process.
    pub envp: Vec<Vec<u8>>,
}

impl Strings {
    /// Those of a message; `None` if they are not as it says.
    pub fn parse(exec: &Exec, tail: &[u8]) -> Option<Self> {
        let mut parts = tail.split(|&byte| byte == 0).map(<[u8]>::to_vec);
        let (user, workdir) = (parts.next()?, parts.next()?);
        let argv: Vec<_> = parts.by_ref().take(exec.argv_count as usize).collect();
        let envp: Vec<_> = parts.take(exec.env_count as usize).collect();
        let is_complete = !argv.is_empty()
            && argv.len() == exec.argv_count as usize
            && envp.len() == exec.env_count as usize;
        is_complete.then_some(Self { user, workdir, argv, envp })
    }
}

/// An environment in which later variables replace earlier ones of the same name.
pub fn merged(parts: &[&[Vec<u8>]]) -> Vec<Vec<u8>> {
    let name = |variable: &[u8]| -> Vec<u8> {
        variable.split(|&byte| byte == b'=').next().unwrap_or_default().to_vec()
    };
    let mut all: Vec<Vec<u8>> = Vec::new();
    for variable in parts.iter().copied().flatten().filter(|variable| variable.contains(&b'=')) {
        match all.iter_mut().find(|known| name(known) == name(variable)) {
            Some(known) => known.clone_from(variable),
            None => all.push(variable.clone()),
        }
    }
    all
}

/// The directory that the process begins in.
///
/// # Errors
/// One sentence: it is none, or may not be entered.
pub fn directory(context: &Context, workdir: &[u8]) -> Result<Path, String> {
    if workdir.is_empty() {
        return Ok(context.cwd.clone());
    }
    let found = walk(context, &context.root, workdir, Follow::Yes);
    let entered = found.and_then(|path| match path.is_directory() {
        true => context.identity.check(&**path.inode(), Access::EXECUTE).map(|()| path),
        false => Err(Errno::ENOTDIR),
    });
    entered.map_err(|error| {
        let why = match error {
            Errno::ENOENT => "does not exist in the sandbox; name one that does",
            Errno::ENOTDIR => "is not a directory in the sandbox; name one that is",
            Errno::EACCES => "may not be entered by the user; name another one",
            _ => "cannot be entered",
        };
        alloc::format!("the working directory {} {why}", workdir.escape_ascii())
    })
}

/// Finds the program as a shell does: names without a slash along `PATH`.
///
/// # Errors
/// There is none, or it cannot be executed.
pub fn find(context: &Context, argv: Vec<Vec<u8>>, envp: Vec<Vec<u8>>) -> Result<Program, Refusal> {
    let name = argv.first().cloned().unwrap_or_default();
    let search = envp.iter().find_map(|variable| variable.strip_prefix(b"PATH=")).unwrap_or(PATH);
    let candidates: Vec<Vec<u8>> = match name.contains(&b'/') {
        true => alloc::vec![name.clone()],
        false => search.split(|&byte| byte == b':').map(|at| [at, b"/", &name].concat()).collect(),
    };
    let mut problem = Errno::ENOENT;
    for candidate in &candidates {
        let (argv, envp) = (argv.clone(), envp.clone());
        match Program::open(context, &context.cwd, candidate, Follow::Yes, argv, envp) {
            Ok(program) => return Ok(program),
            Err(Errno::ENOENT | Errno::ENOTDIR) => {
                if let Some(missing) = script::missing_interpreter(context, candidate) {
                    return Err(Refusal::of_interpreter(candidate, &missing.interpreter));
                }
            }
            Err(error) => problem = error,
        }
    }
    Err(Refusal::of_program(&name, problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(all: &[&str]) -> Vec<Vec<u8>> {
        all.iter().map(|one| one.as_bytes().to_vec()).collect()
    }

    #[test]
    fn later_variables_replace_earlier_ones() {
        let first = strings(&["A=1", "PATH=/bin", "no variable"]);
        let second = strings(&["PATH=/opt", "B="]);
        assert_eq!(merged(&[&first, &second]), strings(&["A=1", "PATH=/opt", "B="]));
    }

    #[test]
    fn strings_are_counted() {
        let exec =
            |argv_count, env_count| Exec { argv_count, env_count, ..bytemuck::Zeroable::zeroed() };
        let tail = b"me\0/tmp\0ls\0-l\0A=1\0";
        let parsed = Strings::parse(&exec(2, 1), tail).expect("it is complete");
        assert_eq!((&parsed.user[..], &parsed.workdir[..]), (&b"me"[..], &b"/tmp"[..]));
        assert_eq!((parsed.argv, parsed.envp), (strings(&["ls", "-l"]), strings(&["A=1"])));
        assert!(Strings::parse(&exec(0, 1), tail).is_none());
        assert!(Strings::parse(&exec(2, 9), tail).is_none());
        assert!(Strings::parse(&exec(u32::MAX, 0), tail).is_none());
    }
}
