//! `#!` scripts (execve(2), "Interpreter scripts").

use alloc::vec::Vec;

use super::Program;
use crate::errno::{Errno, Result};
use crate::fs::Context;
use crate::fs::open::open_program;
use crate::fs::walk::Follow;
use crate::io::Sink;

/// Longest first line that is looked at.
const LINE_MAX: usize = 255;
/// Interpreters may be scripts themselves, so many times.
const DEPTH_MAX: usize = 4;

/// Replaces scripts by their interpreters.
pub fn resolve(context: &Context, mut program: Program) -> Result<Program> {
    for _ in 0..=DEPTH_MAX {
        let mut head = [0u8; LINE_MAX];
        let mut sink = Sink::kernel(&mut head);
        let len = program.file.file.read(&mut sink, 0)?;
        let Some(line) = head[..len].strip_prefix(b"#!") else { return Ok(program) };
        let (interpreter, argument) = parse(line).ok_or(Errno::ENOEXEC)?;
        let mut argv: Vec<Vec<u8>> = Vec::new();
        argv.push(interpreter.to_vec());
        argv.extend(argument.map(<[u8]>::to_vec));
        argv.push(program.name.clone());
        argv.extend(program.argv.into_iter().skip(1));
        let file = open_program(context, &context.cwd, interpreter, Follow::Yes)?;
        program = Program { file, name: interpreter.to_vec(), argv, envp: program.envp };
    }
    Err(Errno::ELOOP)
}

/// An interpreter that does not exist.
pub struct Missing {
    /// Its path.
    pub interpreter: Vec<u8>,
    /// What the script says behind it.
    argument: Vec<u8>,
}

impl Missing {
    /// The program that it would have looked up, if it is env(1).
    pub fn looked_up(&self) -> Option<&[u8]> {
        let is_plain = |&byte: &u8| byte.is_ascii_alphanumeric() || b"._-+/".contains(&byte);
        let mut words = self.argument.split(|byte| byte.is_ascii_whitespace());
        let word = words.find(|word| !word.is_empty() && !word.starts_with(b"-"))?;
        (self.interpreter.ends_with(b"/env") && word.iter().all(is_plain)).then_some(word)
    }
}

/// The interpreter of a script, or of a script that is its interpreter, that does not exist.
pub fn missing_interpreter(context: &Context, program: &[u8]) -> Option<Missing> {
    let mut file = open_program(context, &context.cwd, program, Follow::Yes).ok()?;
    for _ in 0..=DEPTH_MAX {
        let mut head = [0u8; LINE_MAX];
        let len = file.file.read(&mut Sink::kernel(&mut head), 0).ok()?;
        let (interpreter, argument) = parse(head[..len].strip_prefix(b"#!")?)?;
        file = match open_program(context, &context.cwd, interpreter, Follow::Yes) {
            Err(Errno::ENOENT) => {
                let argument = argument.unwrap_or_default().to_vec();
                return Some(Missing { interpreter: interpreter.to_vec(), argument });
            }
            opened => opened.ok()?,
        };
    }
    None
}

/// Interpreter and optional argument of a first line without its `#!`.
fn parse(line: &[u8]) -> Option<(&[u8], Option<&[u8]>)> {
    let end = line.iter().position(|&b| b == b'\n').unwrap_or(line.len());
    let line = line[..end].trim_ascii();
    let space = line.iter().position(|b| matches!(b, b' ' | b'\t')).unwrap_or(line.len());
    let (interpreter, rest) = line.split_at(space);
    let argument = rest.trim_ascii();
    (!interpreter.is_empty()).then_some((interpreter, (!argument.is_empty()).then_some(argument)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_lines() {
        assert_eq!(parse(b"/bin/sh\nexit"), Some((&b"/bin/sh"[..], None)));
        assert_eq!(
            parse(b" /usr/bin/env  python3 -u \n"),
            Some((&b"/usr/bin/env"[..], Some(&b"python3 -u"[..])))
        );
        assert_eq!(parse(b"  \n"), None);
    }

    #[test]
    fn what_env_looks_up() {
        let looked_up = |interpreter: &[u8], argument: &[u8]| {
            let (interpreter, argument) = (interpreter.to_vec(), argument.to_vec());
            Missing { interpreter, argument }.looked_up().map(<[u8]>::to_vec)
        };
        assert_eq!(looked_up(b"/usr/bin/env", b"python3").as_deref(), Some(&b"python3"[..]));
        assert_eq!(looked_up(b"/usr/bin/env", b"-S node --x").as_deref(), Some(&b"node"[..]));
        assert_eq!(looked_up(b"/usr/bin/env", b"A=1"), None);
        assert_eq!(looked_up(b"/bin/sh", b"-e"), None);
    }
}
