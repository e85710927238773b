//! What helps where a program is missing in a sandbox. The kernel, which says that it is, knows of functions only that
//! `programs` brings one in.

use std::path::{Path, PathBuf};
use thaw_home::config::FunctionConfig;

/// Where the kernel's advice begins in what it says of a program, and of the interpreter of a script.
const ADVICE: [(&str, &str); 2] = [
    (", or add it to the root file system, for a function with `programs = [\"", ", or "),
    ("; add it to the root file system, for a function with `programs = [\"", "; "),
];
/// What it ends with.
const ADVICE_END: &str = "\"]` in [runtime] of thaw.toml";

/// What lacks a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lacking {
    /// A command of the build, which sees what this host has.
    Command,
    /// A function whose files are those of a container image.
    Image(String),
    /// A function with a root file system that somebody else has made: a directory, or one of the store.
    Rootfs(String),
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
        let without_end = line.strip_suffix(ADVICE_END)?;
        ADVICE.iter().find_map(|(advice, joined)| {
            let (said, programs) = without_end.split_once(advice)?;
            Some(format!("{said}{joined}{}", self.way_out(programs)?))
        })
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
