//! The first stage of a build: a root file system of the function's files and
//! what they need.

use super::{BuildEvent, OnEvent};
use crate::DEFAULT_PATH;
use crate::config::{FileEntry, FunctionConfig, RuntimeConfig, RuntimeKind};
use crate::home::{Home, HomeError};
use crate::logs::LineSplitter;
use crate::rootfs::{self, RootfsError, StoredRootfs};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use thaw_store::collect::{CollectRequest, Collected, RuntimeRequest};
use thaw_store::import::{Exclude, ImportOptions, Ownership, Progress};
use thaw_store::index::{Attributes, Content, Node, Timestamp, TreeError};
use thaw_store::{Domain, IndexId, Name, Session, StoreError, Tree};

/// Where Python packages lie in the sandbox.
pub(crate) const PACKAGES: &str = "/opt/packages";

/// Why the files of a function could not be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportFailure {
    /// The build command cannot be run.
    #[error("cannot run the build command `{command}` ({error}); correct [build] in thaw.toml")]
    NoBuildCommand {
        /// The command.
        command: String,
        /// What the system said.
        error: io::Error,
    },
    /// The build command failed.
    #[error("the build command `{command}` failed ({status}); its output is above")]
    BuildCommand {
        /// The command.
        command: String,
        /// How it ended.
        status: ExitStatus,
    },
    /// Something that the configuration names is not there.
    #[error("{} is not there ({error}); correct `{key}` in thaw.toml", path.display())]
    Missing {
        /// The key that names it.
        key: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A file of the function is neither a file nor a directory.
    #[error("{} is neither a file nor a directory; take it out of `files` in thaw.toml", path.display())]
    Special {
        /// The file.
        path: PathBuf,
    },
    /// Python packages could not be installed.
    #[error("pip could not install the packages of {} ({status}); its output is above", requirements.display())]
    Pip {
        /// The requirements file.
        requirements: PathBuf,
        /// How pip ended.
        status: ExitStatus,
    },
    /// The root file system is not usable.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// The store refused something.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The files do not fit together.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] HomeError),
}

/// What is to be imported.
pub(super) struct Import<'a> {
    pub home: &'a Home,
    pub directory: &'a Path,
    pub config: &'a FunctionConfig,
}

/// What was imported.
pub(super) struct Imported {
    pub index: IndexId,
    pub environment: BTreeMap<String, String>,
}

impl Import<'_> {
    pub(super) fn run(
        &self,
        session: &mut Session,
        on_event: &mut OnEvent<'_>,
    ) -> Result<Imported, ImportFailure> {
        if let Some(build) = &self.config.build {
            self.build_command(&build.command, on_event)?;
        }
        on_event(BuildEvent::Stage("importing files"));
        let mut tree = self.base(session, on_event)?;
        let mut environment = BTreeMap::from([
            ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
            ("HOME".to_owned(), "/root".to_owned()),
            ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ]);
        if let Some(runtime) = &self.config.runtime {
            self.runtime(runtime, session, &mut tree, &mut environment, on_event)?;
        }
        for entry in &self.config.files {
            self.entry(entry, session, &mut tree, on_event)?;
        }
        tree.make_directories(Path::new(&self.config.workdir))?;
        environment.extend(self.config.env.clone());
        let index = session.put_index(&tree)?;
        Ok(Imported { index, environment })
    }

    fn build_command(
        &self,
        command: &[String],
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), ImportFailure> {
        let text = command.join(" ");
        on_event(BuildEvent::Stage(&format!("running {text}")));
        // A path with a slash is meant from the function's directory.
        let program = match command[0].contains('/') {
            true => self.directory.join(&command[0]),
            false => PathBuf::from(&command[0]),
        };
        let mut process = Command::new(program);
        process.args(&command[1..]).current_dir(self.directory);
        let status = run_shown(process, "build", on_event)
            .map_err(|error| ImportFailure::NoBuildCommand { command: text.clone(), error })?;
        match status.success() {
            true => Ok(()),
            false => Err(ImportFailure::BuildCommand { command: text, status }),
        }
    }

    /// The tree that the function's own files go on top of.
    fn base(
        &self,
        session: &mut Session,
        on_event: &mut OnEvent<'_>,
    ) -> Result<Tree, ImportFailure> {
        let Some(rootfs) = &self.config.rootfs else { return Ok(Tree::new()) };
        if !rootfs::is_directory_name(rootfs) {
            let name = Name::new(rootfs).map_err(RootfsError::from)?;
            let index = session.get_rootfs(&name)?.index;
            return Ok(StoredRootfs::open(session, index)?.tree()?);
        }
        let from = self.directory.join(rootfs);
        let from = canonical("rootfs", &from)?;
        let mut tree = Tree::new();
        let options = ImportOptions::default();
        let progress = &mut |progress: Progress<'_>| imported(progress, on_event);
        session.import_directory(&mut tree, &from, Path::new("/"), &options, progress)?;
        Ok(tree)
    }

    /// Collects a runtime from the host.
    fn runtime(
        &self,
        runtime: &RuntimeConfig,
        session: &mut Session,
        tree: &mut Tree,
        environment: &mut BTreeMap<String, String>,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), ImportFailure> {
        let mut request = CollectRequest::default();
        for path in &runtime.include {
            request.files.push(canonical("include", &self.directory.join(path))?);
        }
        // Native code among the function's files needs libraries of the host.
        for entry in &self.config.files {
            request.libraries_of.push(canonical("files", &self.directory.join(&entry.from))?);
        }
        request.programs.extend(runtime.programs.iter().map(|program| self.program_of(program)));
        match runtime.kind.language() {
            Some(language) => {
                let mut wanted = RuntimeRequest::new(language);
                wanted.interpreter =
                    runtime.interpreter.as_ref().map(|path| self.directory.join(path));
                request.runtimes.push(wanted);
            }
            // A program among the function's files only needs its libraries.
            None if self.is_own(&self.config.command[0]) => {}
            None => request.programs.push(self.config.command[0].clone().into()),
        }
        if runtime.kind == RuntimeKind::Python3 {
            let interpreter = request.runtimes.first().and_then(|r| r.interpreter.clone());
            if let Some(packages) = self.packages(runtime, interpreter.as_deref(), on_event)? {
                self.directory_at(&packages, Path::new(PACKAGES), session, tree, on_event)?;
                environment.insert("PYTHONPATH".to_owned(), PACKAGES.to_owned());
                request.libraries_of.push(packages);
            }
            // Byte code is written beside its source, into memory that is
            // frozen or thrown away: neither helps.
            environment.insert("PYTHONDONTWRITEBYTECODE".to_owned(), "1".to_owned());
        }
        let progress = &mut |progress: Progress<'_>| imported(progress, on_event);
        let collected = session.collect(tree, &request, progress)?;
        self.note_gaps(&collected, on_event);
        if !collected.search_path.is_empty() {
            let first = collected.search_path.iter().map(|path| path.to_string_lossy());
            let path = first.collect::<Vec<_>>().join(":");
            environment.insert("PATH".to_owned(), format!("{path}:{DEFAULT_PATH}"));
        }
        Ok(())
    }

    fn note_gaps(&self, collected: &Collected, on_event: &mut OnEvent<'_>) {
        for missing in &collected.missing_libraries {
            let (library, user) = (&missing.library, missing.wanted_by.display());
            on_event(BuildEvent::Note(&format!(
                "{user} wants {library}, which this host does not have"
            )));
        }
        for path in &collected.unreadable {
            on_event(BuildEvent::Note(&format!(
                "{} may not be read and is left out",
                path.display()
            )));
        }
    }

    /// A program of the host; a path with a slash is meant from the function's
    /// directory.
    fn program_of(&self, program: &str) -> OsString {
        match program.contains('/') {
            true => self.directory.join(program).into(),
            false => program.into(),
        }
    }

    /// Whether a program of the sandbox comes from the function's own files.
    fn is_own(&self, program: &str) -> bool {
        if !program.contains('/') {
            return false;
        }
        let program = Path::new(&self.config.workdir).join(program);
        self.config.files.iter().any(|entry| program.starts_with(entry.destination()))
    }

    /// The directory with the function's Python packages on the host.
    fn packages(
        &self,
        runtime: &RuntimeConfig,
        interpreter: Option<&Path>,
        on_event: &mut OnEvent<'_>,
    ) -> Result<Option<PathBuf>, ImportFailure> {
        if let Some(packages) = &runtime.packages {
            return canonical("packages", &self.directory.join(packages)).map(Some);
        }
        let Some(requirements) = &runtime.requirements else { return Ok(None) };
        let requirements = canonical("requirements", &self.directory.join(requirements))?;
        let target = self.home.work(self.config.name.as_str())?.join("packages");
        on_event(BuildEvent::Stage("installing Python packages"));
        let mut pip = Command::new(interpreter.unwrap_or(Path::new("python3")));
        pip.args([
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-input",
            "--upgrade",
        ])
        .arg("--target")
        .arg(&target)
        .arg("--requirement")
        .arg(&requirements);
        let status = run_shown(pip, "pip", on_event).map_err(|error| ImportFailure::Missing {
            key: "interpreter",
            path: interpreter.unwrap_or(Path::new("python3")).to_owned(),
            error,
        })?;
        match status.success() {
            true => Ok(Some(target)),
            false => Err(ImportFailure::Pip { requirements, status }),
        }
    }

    /// Imports one line of `files`.
    fn entry(
        &self,
        entry: &FileEntry,
        session: &mut Session,
        tree: &mut Tree,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), ImportFailure> {
        let from = canonical("files", &self.directory.join(&entry.from))?;
        let destination = entry.destination();
        let to = Path::new(&destination);
        let metadata = inspect("files", &from)?;
        if metadata.is_dir() {
            return self.directory_at(&from, to, session, tree, on_event);
        }
        if !metadata.is_file() {
            return Err(ImportFailure::Special { path: from });
        }
        let file = File::open(&from).map_err(|error| ImportFailure::Missing {
            key: "files",
            path: from.clone(),
            error,
        })?;
        let blob = session.put_file(&file, &from, &Domain::shared())?;
        let attributes = Attributes {
            permissions: metadata.permissions().mode() & 0o7777,
            uid: 0,
            gid: 0,
            modified: Timestamp {
                seconds: metadata.mtime(),
                nanoseconds: metadata.mtime_nsec() as u32,
            },
        };
        tree.add_at(to, Node { content: Content::Regular(blob), attributes })?;
        Ok(())
    }

    fn directory_at(
        &self,
        from: &Path,
        to: &Path,
        session: &mut Session,
        tree: &mut Tree,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), ImportFailure> {
        let names = [".git", "__pycache__"].map(|name| Exclude::Name(name.to_owned()));
        let options = ImportOptions {
            exclude: names.to_vec(),
            ownership: Ownership::All { uid: 0, gid: 0 },
            ..ImportOptions::default()
        };
        let progress = &mut |progress: Progress<'_>| imported(progress, on_event);
        session.import_directory(tree, from, to, &options, progress)?;
        Ok(())
    }
}

fn imported(progress: Progress<'_>, on_event: &mut OnEvent<'_>) {
    on_event(BuildEvent::Imported { files: progress.files, bytes: progress.bytes });
}

fn canonical(key: &'static str, path: &Path) -> Result<PathBuf, ImportFailure> {
    path.canonicalize().map_err(|error| ImportFailure::Missing {
        key,
        path: path.to_owned(),
        error,
    })
}

fn inspect(key: &'static str, path: &Path) -> Result<fs::Metadata, ImportFailure> {
    path.metadata().map_err(|error| ImportFailure::Missing { key, path: path.to_owned(), error })
}

/// Runs a command and passes what it prints on, line by line.
fn run_shown(
    mut command: Command,
    from: &'static str,
    on_event: &mut OnEvent<'_>,
) -> io::Result<ExitStatus> {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (sender, lines) = mpsc::channel();
    let mut readers = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        readers.push(read_lines(stdout, sender.clone()));
    }
    if let Some(stderr) = child.stderr.take() {
        readers.push(read_lines(stderr, sender));
    }
    for line in lines {
        on_event(BuildEvent::Output { from, line: &line });
    }
    for reader in readers {
        let _ = reader.join();
    }
    child.wait()
}

/// Reads lines in a thread of its own until the stream ends.
pub(super) fn read_lines(
    mut stream: impl Read + Send + 'static,
    lines: mpsc::Sender<String>,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut splitter = LineSplitter::default();
        let mut buffer = [0; 8192];
        let send = |line: &[u8]| {
            // The receiver may have heard enough.
            let _ = lines.send(String::from_utf8_lossy(line).into_owned());
        };
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => splitter.push(&buffer[..count], send),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        splitter.finish(send);
    })
}
