//! Collecting from the host what a program needs, so that a root file system
//! can be made without a container registry: executables with their
//! interpreters and shared libraries, language runtimes, and the small files
//! that every program expects.
//!
//! Every file keeps its path, and every symbolic link on the way to it is
//! copied, so that a path means the same in the sandbox as on the host.

mod collector;
mod elf;
mod language;
mod libraries;
mod program;
mod python;
mod question;
mod runtime;
mod standard;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

pub use question::{Ask, Question, ask_on_host};
pub use runtime::{Packages, RUNTIMES, Runtime, RuntimeRequest};

use crate::blob::Domain;
use crate::error::Result;
use crate::import::{Progress, Readers};
use crate::index::Tree;
use crate::session::Session;
use collector::Collector;

/// Why files could not be collected from the host.
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    /// A program is neither a path nor found in the search path.
    #[error("there is no program {0:?} in PATH: install it or give its path")]
    NoProgram(String),
    /// A file does not exist on the host.
    #[error("{} does not exist on this host", .0.display())]
    NoFile(PathBuf),
    /// A program is for another machine.
    #[error("{} is not a program for x86-64 Linux", .0.display())]
    ForeignProgram(PathBuf),
    /// A program is neither ELF nor begins with `#!`.
    #[error("{} is neither an ELF executable nor a script with a #! line", .0.display())]
    NotAProgram(PathBuf),
    /// An ELF file is damaged.
    #[error("{} is a damaged ELF file: {why}", path.display())]
    BadElf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A program needs a library that the host does not have.
    #[error(
        "{} needs the library {library}, which is nowhere on this host: install the package that \
         has it", program.display()
    )]
    NoLibrary {
        /// The program or a library that it needs.
        program: PathBuf,
        /// Name of the missing library.
        library: String,
    },
    /// A path leads through too many symbolic links or `#!` lines.
    #[error("{} leads through too many links", .0.display())]
    TooManyLinks(PathBuf),
    /// No runtime has this name.
    #[error("there is no runtime {name:?}: choose one of {}", runtime::names())]
    NoRuntime {
        /// The name asked for.
        name: String,
    },
    /// A language's interpreter did not say where its files are.
    #[error("{} does not work as {runtime}: {why}", interpreter.display())]
    BadInterpreter {
        /// The runtime asked for.
        runtime: &'static str,
        /// The interpreter that was run.
        interpreter: PathBuf,
        /// What went wrong.
        why: String,
    },
    /// Not everybody may read a file that only those may be collected of.
    #[error(
        "not every user of this host may read what lies in {}: only such files become part of a \
         function whose build is not trusted", .0.display()
    )]
    Private(PathBuf),
    /// The host refused to let a file be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The host's reason.
        source: io::Error,
    },
}

/// What to collect.
#[derive(Clone, Debug, Default)]
pub struct CollectRequest {
    /// Programs: paths, or names to be looked up in the search path.
    pub programs: Vec<OsString>,
    /// Further files and directories (with everything below them), absolute paths.
    pub files: Vec<PathBuf>,
    /// Files and directories (with everything below them) that come into the
    /// tree by other ways, such as the function's own: only the libraries that
    /// they need and do not have themselves are collected.
    pub libraries_of: Vec<PathBuf>,
    /// Language runtimes.
    pub runtimes: Vec<RuntimeRequest>,
    /// Things that only some programs need.
    pub extras: Vec<Extra>,
    /// Where to look for programs, as in `PATH`; `None` for this process's own.
    pub search_path: Option<OsString>,
    /// With whom the contents are shared.
    pub domain: Domain,
    /// Whose files may be collected.
    pub readers: Readers,
    /// Files and directories that may be collected though they lie in directories
    /// which not everybody may enter. What was found in the search path may, too.
    pub granted: Vec<PathBuf>,
}

/// Things that only some programs need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extra {
    /// `/etc/localtime` and `/usr/share/zoneinfo`.
    TimeZones,
    /// The host's certificate authorities, for outgoing TLS.
    Certificates,
}

/// What was collected.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    /// Where the requested programs lie in the sandbox, in the order asked for.
    pub programs: Vec<PathBuf>,
    /// Directories to be put in front of `PATH` for the runtimes' commands.
    pub search_path: Vec<PathBuf>,
    /// Files of all kinds.
    pub files: u64,
    /// Bytes of the regular files.
    pub bytes: u64,
    /// Libraries wanted by files of collected directories that this host does
    /// not have either. Harmless unless the program loads those files.
    pub missing_libraries: Vec<MissingLibrary>,
    /// Symbolic links in collected directories whose targets were not collected,
    /// because they do not exist or would bring large parts of the host along.
    pub dangling_links: Vec<PathBuf>,
    /// Files of collected directories that may not be read and were left out.
    pub unreadable: Vec<PathBuf>,
}

/// A library that could not be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingLibrary {
    /// The file that wants it.
    pub wanted_by: PathBuf,
    /// Its name.
    pub library: String,
}

impl Session {
    /// Collects what `request` says from the host into the tree. The files that
    /// every program expects (`/etc/passwd`, `/tmp`, …) come along; where the
    /// tree has them already, they stay.
    pub fn collect(
        &mut self,
        tree: &mut Tree,
        request: &CollectRequest,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Collected> {
        self.collect_from(Path::new("/"), tree, request, &mut ask_on_host, progress)
    }

    /// The same, with somebody who asks interpreters where their files are.
    pub fn collect_asking<'a>(
        &'a mut self,
        tree: &'a mut Tree,
        request: &CollectRequest,
        ask: &'a mut Ask<'a>,
        progress: &'a mut dyn FnMut(Progress<'_>),
    ) -> Result<Collected> {
        self.collect_from(Path::new("/"), tree, request, ask, progress)
    }

    /// The same for a host whose root directory is `root`.
    pub(crate) fn collect_from<'a>(
        &'a mut self,
        root: &Path,
        tree: &'a mut Tree,
        request: &CollectRequest,
        ask: &'a mut Ask<'a>,
        progress: &'a mut dyn FnMut(Progress<'_>),
    ) -> Result<Collected> {
        let mut collector = Collector::new(root, self, tree, request, ask, progress);
        for program in &request.programs {
            let path = collector.find_program(program)?;
            collector.program(&path)?;
            collector.collected.programs.push(path);
        }
        for runtime in &request.runtimes {
            runtime.collect(&mut collector)?;
        }
        for path in &request.files {
            collector.anything(path)?;
        }
        for path in &request.libraries_of {
            collector.libraries_of(path)?;
        }
        for extra in &request.extras {
            standard::collect_extra(&mut collector, *extra)?;
        }
        standard::collect_standard_files(&mut collector)?;
        collector.finish()
    }
}
