//! What helps where a program is missing in a sandbox. The kernel, which says that it is, knows of functions only that
//! `programs` brings one in.

use std::path::{Path, PathBuf};
use thaw_home::config::FunctionConfig;

/// A piece of the kernel's advice: where it begins, how the names of programs in it end, and what stands before
/// what is said instead.
const ADVICE: [(&str, &str, &str); 3] = [
    (
        ", or add it to the root file system, for a function with `programs = [\"",
        ADVICE_END,
        ", or ",
    ),
    ("; add it to the root file system, for a function with `programs = [\"", ADVICE_END, "; "),
    // The loader that an ELF header names.
    (
        "; add it to the root file system, for a function ",
        "by `programs` in [runtime] of thaw.toml",
        "; ",
    ),
];
const ADVICE_END: &str = "\"]` in [runtime] of thaw.toml";

/// What the kernel has people look at, where nothing else helps.
const REMINDERS: [&str; 3] =
    ["; check the path", "; check its permissions", "; name one that does"];

/// What lacks a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lacking {
    /// A command of the build, which sees what this host has.
    Command,
    /// A function whose files are those of a container image.
    Image(String),
    /// A function with a root file system that somebody else has made: a directory, or one of the store.
    Rootfs(String),
    /// A sandbox, without a function, over the files of this host.
    Host,
    /// A sandbox, without a function, over a directory or a stored root file system.
    Directory(String),
    /// A function of this host's files, perhaps with an interpreter that its thaw.toml names.
    Files(Option<PathBuf>),
}

impl Lacking {
    /// The program of a function.
    pub fn program_of(config: &FunctionConfig) -> Self {
        match (config.image(), &config.rootfs) {
            (Some(image), _) => Self::Image(image.to_owned()),
            (None, Some(rootfs)) => Self::Rootfs(rootfs.clone()),
            (None, None) => {
                Self::Files(config.runtime.as_ref().and_then(|it| it.interpreter.clone()))
            }
        }
    }

    /// A sentence of the kernel's with what helps here, if that is something else than it says.
    pub fn explain(&self, line: &str) -> Option<String> {
        let (said, programs, joined) = split(line)?;
        Some(format!("{said}{joined}{}", self.way_out(programs)?))
    }

    /// A sentence of the kernel's without what it advises.
    pub fn said(line: &str) -> &str {
        let said = split(line).map_or(line, |(said, ..)| said);
        let plain = REMINDERS.iter().find_map(|reminder| said.strip_suffix(reminder));
        plain.unwrap_or(said)
    }

    /// How programs, whose names are between `", "`, come into the sandbox; `None`: as the kernel says.
    fn way_out(&self, programs: &str) -> Option<String> {
        match self {
            Self::Command => Some(
                "install it on this host, or have the command see its directory with \
                 `thaw build --tools DIRECTORY`"
                    .to_owned(),
            ),
            Self::Image(image) => Some(format!(
                "take an image that has it instead of {image}, or install it in the image's Dockerfile"
            )),
            Self::Host => Some("install it on this host".to_owned()),
            Self::Directory(name) => Some(format!(
                "add it to {}, the root file system of the sandbox",
                thaw_sandbox::escape(name.as_bytes())
            )),
            Self::Rootfs(rootfs) => Some(format!(
                "add it to {}, the function's root file system",
                thaw_sandbox::escape(rootfs.as_bytes())
            )),
            Self::Files(interpreter) => {
                let interpreter = interpreter.as_deref()?;
                let names_it = |name: &str| Path::new(name).file_name() == interpreter.file_name();
                programs.split("\", \"").any(names_it).then(|| {
                    format!(
                        "call it by its path, which is {} by `interpreter` in [runtime] of thaw.toml",
                        thaw_sandbox::escape(interpreter.as_os_str().as_encoded_bytes())
                    )
                })
            }
        }
    }
}

/// What the kernel says, the programs that it names in its advice, and what stands before other advice.
fn split(line: &str) -> Option<(&str, &str, &'static str)> {
    ADVICE.iter().find_map(|(begin, end, joined)| {
        let (said, programs) = line.strip_suffix(end)?.split_once(begin)?;
        Some((said, programs, *joined))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: &str = "node does not exist in the sandbox; check the path, or add it to the root file \
        system, for a function with `programs = [\"node\"]` in [runtime] of thaw.toml";
    const SCRIPT: &str = "./run needs the interpreter /usr/bin/env, which the sandbox does not have; add it to \
        the root file system, for a function with `programs = [\"env\", \"node\"]` in [runtime] of thaw.toml";

    #[test]
    fn what_helps_is_said_where_programs_would_not() {
        let explained = |lacking: &Lacking| [PROGRAM, SCRIPT].map(|line| lacking.explain(line));
        let begins = [
            "node does not exist in the sandbox; check the path, or ",
            "./run needs the \
            interpreter /usr/bin/env, which the sandbox does not have; ",
        ];
        for (lacking, way_out) in [
            (Lacking::Command, "install it on this host, or have the command see"),
            (Lacking::Host, "install it on this host"),
            (
                Lacking::Directory("./root".to_owned()),
                "add it to ./root, the root file system of the sandbox",
            ),
            (
                Lacking::Image("debian:12".to_owned()),
                "take an image that has it instead of debian:12",
            ),
            (
                Lacking::Rootfs("./root".to_owned()),
                "add it to ./root, the function's root file system",
            ),
            (
                Lacking::Files(Some("/opt/node/bin/node".into())),
                "call it by its path, which is /opt/node/bin/node",
            ),
        ] {
            for (said, begin) in explained(&lacking).into_iter().zip(begins) {
                let said = said.expect("it has another way out");
                assert!(said.starts_with(&format!("{begin}{way_out}")), "{said}");
                assert!(!said.contains("programs"), "{said}");
            }
        }
    }

    #[test]
    fn a_loader_that_is_missing_has_the_same_ways_out() {
        let loader = "x needs the interpreter that its ELF header names, which the sandbox does not have; add \
            it to the root file system, for a function by `programs` in [runtime] of thaw.toml";
        let said = Lacking::Image("debian:12".to_owned()).explain(loader).unwrap();
        assert!(said.ends_with("which the sandbox does not have; take an image that has it instead of debian:12, or \
            install it in the image's Dockerfile"), "{said}");
        assert_eq!(Lacking::Files(None).explain(loader), None);
    }

    #[test]
    fn what_the_kernel_says_stands_without_its_advice() {
        assert_eq!(Lacking::said(PROGRAM), "node does not exist in the sandbox");
        let script = "./run needs the interpreter /usr/bin/env, which the sandbox does not have";
        assert_eq!(Lacking::said(SCRIPT), script);
        assert_eq!(
            Lacking::said("./run may not be executed; check its permissions"),
            "./run may not be executed"
        );
    }

    #[test]
    fn other_lines_stay() {
        for lacking in [Lacking::Files(None), Lacking::Files(Some("/usr/bin/python3".into()))] {
            assert_eq!([PROGRAM, SCRIPT].map(|line| lacking.explain(line)), [None, None]);
        }
        for line in [
            "",
            "it is there",
            ADVICE_END,
            "; check `programs = [\"x\"]` in [runtime] of thaw.toml",
        ] {
            assert_eq!(Lacking::Command.explain(line), None, "{line}");
        }
    }
}
