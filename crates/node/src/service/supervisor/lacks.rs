//! What a program has asked for and does not have: its author hears of it in the function's log.

use super::Supervisor;
use std::path::Path;
use thaw_home::config::{ByteSize, FunctionConfig};
use thaw_sandbox::Lack;

/// What one instance has been heard to lack; each kind is said once.
#[derive(Debug, Default)]
pub(super) struct Lacks {
    memory: bool,
    file_room: bool,
}

impl Supervisor {
    /// A program that is missing is said once for the function, refused memory once for the instance.
    pub(super) fn lacks(&mut self, lack: &Lack) {
        let is_news = match lack {
            Lack::Program(name) => self.service.is_first_lack_of(name),
            Lack::Memory(_) => !std::mem::replace(&mut self.lacks.memory, true),
            Lack::FileRoom(_) => !std::mem::replace(&mut self.lacks.file_room, true),
        };
        if !is_news {
            return;
        }
        let text = explained(lack, self.service.config());
        // Of memory, the sandbox' kernel has said so in the daemon's log.
        if let Lack::Program(_) = lack {
            tracing::warn!(function = %self.service.name(), instance = self.id, "{text}");
        }
        self.instance.remark(&text);
    }
}

/// What it lacks, and what to do about it.
fn explained(lack: &Lack, config: &FunctionConfig) -> String {
    let memory = config.limits.memory;
    match lack {
        Lack::Program(name) => {
            let way_out = provide(name, config);
            format!("it wanted to run {name}, which does not exist in the sandbox; {way_out}")
        }
        Lack::Memory(asked) => format!(
            "an allocation of {} was refused: it is more than `limits.memory` of {memory}; raise that in \
             thaw.toml",
            ByteSize(*asked).approximate()
        ),
        Lack::FileRoom(used) => format!(
            "there is no room for what it writes to files, which take {} of memory: they may take three \
             quarters of `limits.memory` of {memory}; raise that in thaw.toml",
            ByteSize(*used).approximate()
        ),
    }
}

/// How a program comes into the sandbox, if the function needs it.
fn provide(name: &str, config: &FunctionConfig) -> String {
    let is_own = name.contains('/')
        && (!name.starts_with('/') || Path::new(name).starts_with(own_directory(config)));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+/".contains(&byte);
    if is_own {
        return "if it needs that, check the path, and `files` in thaw.toml".to_owned();
    }
    if let Some(image) = config.image() {
        return format!("if it needs that, take an image that has it instead of {image}");
    }
    match config.runtime {
        Some(_) if name.bytes().all(is_plain) => {
            let program = looked_up(name);
            format!("if it needs that, add \"{program}\" to `programs` in [runtime] of thaw.toml")
        }
        Some(_) => "if it needs that, add it to `programs` in [runtime] of thaw.toml".to_owned(),
        None => {
            "if it needs that, add it to the files of the function's root file system".to_owned()
        }
    }
}

/// Where the function's own files are.
fn own_directory(config: &FunctionConfig) -> &Path {
    match config.workdir.as_str() {
        // Everything is below that one.
        "/" | "" => Path::new("/app"),
        workdir => Path::new(workdir),
    }
}

/// A program by its name, if that finds it along the usual `PATH`.
fn looked_up(program: &str) -> &str {
    match program.rsplit_once('/') {
        Some((directory, name))
            if !name.is_empty()
                && thaw_build::DEFAULT_PATH.split(':').any(|of| of == directory) =>
        {
            name
        }
        _ => program,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(keys: &str) -> FunctionConfig {
        let text = format!("name = \"f\"\ncommand = [\"python3\"]\nport = 80\n{keys}");
        FunctionConfig::parse(Path::new("thaw.toml"), &text).unwrap()
    }

    #[test]
    fn a_missing_program_comes_with_the_key_that_brings_it() {
        let host = config("[runtime]\nkind = \"python3\"\n");
        let image = config("[runtime]\nimage = \"python:3.12\"\n");
        let files = config("rootfs = \"./root\"\n");
        let programs = |name| format!("add \"{name}\" to `programs` in [runtime] of thaw.toml");
        for (config, name, expected) in [
            (&host, "git", programs("git")),
            (&host, "/usr/bin/git", programs("git")),
            (&host, "/opt/git/git", programs("/opt/git/git")),
            (&host, "a\\x1b\"", "add it to `programs` in".to_owned()),
            (&host, "./tool", "check the path, and `files` in thaw.toml".to_owned()),
            (&host, "/app/tool", "check the path, and `files` in thaw.toml".to_owned()),
            (&image, "git", "take an image that has it instead of python:3.12".to_owned()),
            (&files, "git", "add it to the files of the function's root file system".to_owned()),
        ] {
            let text = explained(&Lack::Program(name.to_owned()), config);
            let begin = format!("it wanted to run {name}, which does not exist in the sandbox; ");
            assert!(text.starts_with(&begin), "{text}");
            assert!(text.contains(&expected), "{text}");
        }
    }

    #[test]
    fn refused_memory_comes_with_the_limit() {
        let config = config("[limits]\nmemory = \"64MiB\"\n[runtime]\nkind = \"python3\"\n");
        let memory = explained(&Lack::Memory(400 << 20), &config);
        let expected = "an allocation of 400.0MiB was refused: it is more than `limits.memory` of 64MiB; \
                        raise that in thaw.toml";
        assert_eq!(memory, expected);
        let room = explained(&Lack::FileRoom(48 << 20), &config);
        assert!(room.contains("which take 48.0MiB of memory"), "{room}");
        assert!(room.ends_with("`limits.memory` of 64MiB; raise that in thaw.toml"), "{room}");
    }
}
