//! The first stage of a build: a root file system of the function's files and
//! what they need.

use super::command::{CommandFailure, Commands, Task};
use super::ignore::{IgnoreError, Ignored};
use super::image::Base;
use super::npm::NpmCi;
use super::{BuildEvent, BuildOptions, OnEvent, Trust, linked, packages};
use crate::DEFAULT_PATH;
use crate::trust::{TrustError, put_trust};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::process::Output;
use std::sync::Arc;
use thaw_home::beneath;
use thaw_home::config::{FileEntry, FunctionConfig, RuntimeConfig, RuntimeKind};
use thaw_home::home::{Home, HomeError};
use thaw_home::rootfs::{self, RootfsError, StoredRootfs};
use thaw_sandbox::BoundAccess;
use thaw_store::collect::{CollectRequest, Collected, Question, RuntimeRequest, ask_on_host};
use thaw_store::import::{Exclude, ImportOptions, LeaveOut, Ownership, Progress, Readers};
use thaw_store::index::{Attributes, Content, Node, Timestamp, TreeError};
use thaw_store::{Domain, Name, Session, StoreError, Tree};

/// Where Python packages lie in the sandbox. Some look for the name that such a directory usually has.
pub const PACKAGES: &str = "/opt/site-packages";

/// The variable by which a program finds them.
const PYTHONPATH: &str = "PYTHONPATH";

/// What Python says of a package that is not there.
const NO_MODULE: &str = "ModuleNotFoundError";

/// Why the files of a function could not be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportFailure {
    /// The build command did not do its work.
    #[error("the build command `{command}` failed: {failure}{}", after_command(*.trust, *.lacks_packages))]
    BuildCommand {
        /// The command.
        command: String,
        /// How it ended.
        failure: CommandFailure,
        /// Where it ran.
        trust: Trust,
        /// Whether it looked for a Python module, and the function has packages that come later.
        lacks_packages: bool,
    },
    /// A path of the configuration leads out of the function's directory.
    #[error(
        "`{key}` of thaw.toml names {}, which a link leads out of the function's directory; put a \
         copy of it there", path.display()
    )]
    LeadsOut {
        /// The key that names it.
        key: &'static str,
        /// The file or directory.
        path: PathBuf,
    },
    /// The program lies in the function's directory, and leads to what the sandbox does not have.
    #[error("`{key}` of thaw.toml cannot be used: {why}")]
    Linked {
        /// The key that names it.
        key: &'static str,
        /// Why, and the way out.
        why: String,
    },
    /// Something outside of the function's directory that not everybody may read.
    #[error(
        "`{key}` of thaw.toml names {}, which not every user of this host may read; copy it into \
         the function's directory, `thaw import` it, or build with --trust-build", path.display()
    )]
    Private {
        /// The key that names it.
        key: &'static str,
        /// The file or directory.
        path: PathBuf,
    },
    /// The root directory of this host, with all that it holds.
    #[error(
        "`rootfs` of thaw.toml is `/`, and a build would copy this whole host with its secrets into the \
         function; have [runtime] collect what the program needs (`include`, `programs`), or name a \
         directory, a stored root file system or a container image"
    )]
    WholeHost,
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
    #[error("pip could not install the packages of {}: {failure}{}", requirements.display(), after(*.trust))]
    Pip {
        /// The requirements file.
        requirements: PathBuf,
        /// How pip ended.
        failure: CommandFailure,
        /// Where it ran.
        trust: Trust,
    },
    /// A project's description does not say what it depends on.
    #[error("cannot use {}: {reason}", path.display())]
    Pyproject {
        /// The file.
        path: PathBuf,
        /// What is wrong, and the way out.
        reason: String,
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
    /// The program cannot be made to trust the node's proxy.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The rules of what is left out cannot be used.
    #[error(transparent)]
    Ignore(#[from] IgnoreError),
}

/// What an error of a command says besides.
fn after(trust: Trust) -> &'static str {
    match trust {
        Trust::Trusted => "; its output is above",
        Trust::Untrusted => {
            "; its output is above. It ran in a sandbox, which sees the tools of this host, the \
             function's directory and the destinations of `egress` in [build]; if it needs more, \
             name tools with --tools, or let it run on this host with --trust-build"
        }
    }
}

/// The same for the build command.
fn after_command(trust: Trust, lacks_packages: bool) -> &'static str {
    match lacks_packages {
        true => {
            "; its output is above. It runs before `pip` installs the `requirements` of [runtime]; have it \
             install the packages that it needs into a directory, which `packages` of [runtime] may name in \
             the place of `requirements` (docs/building.md)"
        }
        false => after(trust),
    }
}

/// What is to be imported.
pub(super) struct Import<'a> {
    commands: Commands<'a>,
    directory: &'a Path,
    /// The same, open: what is imported lies below it, whoever moves what meanwhile.
    opened: File,
    config: &'a FunctionConfig,
    trust: Trust,
    domain: Domain,
    /// The files of the function's container image.
    base: Option<Base>,
    /// What of the function's own files is left out.
    ignored: Arc<Ignored>,
}

/// What was imported.
pub(super) struct Imported {
    pub tree: Tree,
    pub environment: BTreeMap<String, String>,
    /// The files of the language alone, without the function's own: those of a runtime
    /// template.
    pub runtime: Option<Tree>,
    /// These, and what the function's own need besides: shared libraries, packages.
    pub libraries: Option<Tree>,
}

/// A directory or file that the configuration names, open.
struct Named {
    file: File,
    path: PathBuf,
    /// Where it lies below the function's directory, unless it lies elsewhere.
    inside: Option<PathBuf>,
}

impl<'a> Import<'a> {
    pub(super) fn new(
        home: &'a Home,
        directory: &'a Path,
        config: &'a FunctionConfig,
        options: &'a BuildOptions,
        base: Option<Base>,
    ) -> Result<Self, ImportFailure> {
        let commands = Commands { home, directory, config, options };
        let opened = commands.open(directory).map_err(|error| ImportFailure::Missing {
            key: "files",
            path: directory.to_owned(),
            error,
        })?;
        let (trust, domain) = (options.trust, config.domain());
        let ignored = Arc::new(Ignored::of(directory, config.takes_all_files())?);
        Ok(Self { commands, directory, opened, config, trust, domain, base, ignored })
    }

    pub(super) fn run(
        &self,
        session: &mut Session,
        on_event: &mut OnEvent<'_>,
    ) -> Result<Imported, ImportFailure> {
        if let Some(build) = &self.config.build
            && !build.command.is_empty()
        {
            self.build_command(&build.command, on_event)?;
        }
        on_event(BuildEvent::Stage("importing files"));
        let mut tree = self.base(session, on_event)?;
        let mut runtime_files = None;
        let mut environment = BTreeMap::from([
            ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
            ("HOME".to_owned(), "/root".to_owned()),
            ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ]);
        let of_image = self.base.iter().flat_map(|base| &base.environment);
        let variable = |text: &String| {
            let (name, value) = text.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        };
        environment.extend(of_image.filter_map(variable));
        if let Some(runtime) = &self.config.runtime
            && runtime.kind != RuntimeKind::Image
        {
            runtime.interpreter.as_deref().map_or(Ok(()), |path| self.check_interpreter(path))?;
            let mut language = None;
            if self.config.template.from.is_some() {
                language = Some(self.language(runtime, session, &mut tree, on_event)?);
                runtime_files = Some(tree.clone());
            }
            self.runtime(runtime, language, session, &mut tree, &mut environment, on_event)?;
        } else if self.config.template.from.is_some() {
            runtime_files = Some(tree.clone());
        }
        let libraries = runtime_files.is_some().then(|| tree.clone());
        for entry in &self.config.files {
            self.entry(entry, session, &mut tree, on_event)?;
        }
        if let Some(note) = self.ignored.note() {
            on_event(BuildEvent::Note(&escaped(&note)));
        }
        self.check_links(&tree)?;
        tree.make_directories(Path::new(&self.config.workdir))?;
        put_trust(self.commands.home, self.config, session, &mut tree, &mut environment)?;
        add_own(&mut environment, &self.config.env);
        Ok(Imported { tree, environment, runtime: runtime_files, libraries })
    }

    /// Collects the language alone: what all its functions have.
    fn language(
        &self,
        runtime: &RuntimeConfig,
        session: &mut Session,
        tree: &mut Tree,
        on_event: &mut OnEvent<'_>,
    ) -> Result<Collected, ImportFailure> {
        let request = CollectRequest {
            domain: self.domain.clone(),
            readers: self.readers(),
            granted: vec![self.directory.to_owned()],
            runtimes: self.request_of_language(runtime).into_iter().collect(),
            ..CollectRequest::default()
        };
        let progress = &mut |progress: Progress<'_>| imported(progress, on_event);
        let ask = &mut |question: &Question<'_>| self.ask(question);
        Ok(session.collect_asking(tree, &request, ask, progress)?)
    }

    /// How the interpreter of the language is collected with its library.
    fn request_of_language(&self, runtime: &RuntimeConfig) -> Option<RuntimeRequest> {
        let mut wanted = RuntimeRequest::new(runtime.kind.language()?);
        wanted.interpreter = runtime.interpreter.as_ref().map(|path| self.directory.join(path));
        Some(wanted)
    }

    fn build_command(
        &self,
        command: &[String],
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), ImportFailure> {
        let text = thaw_sandbox::escape(command.join(" ").as_bytes());
        let npm = NpmCi::of(&self.commands, command)?;
        if npm.as_ref().is_some_and(NpmCi::is_done) {
            on_event(BuildEvent::Stage("keeping the Node.js packages of the build before"));
            return Ok(());
        }
        let settings = self.commands.settings();
        let (program, shown) = self.build_program(&command[0]);
        let why = match npm.as_ref().and_then(NpmCi::unknown) {
            Some(unknown) => format!(" (at every build, since `{}` may change)", escaped(unknown)),
            None => String::new(),
        };
        on_event(BuildEvent::Stage(&format!("running {text}{why}")));
        let task = Task {
            from: "build",
            arguments: [program].into_iter().chain(command[1..].iter().map(Into::into)).collect(),
            cwd: self.directory,
            egress: &settings.egress,
            shown,
            bound: vec![(self.directory, BoundAccess::Write)],
            timeout: settings.timeout.0,
        };
        let begun = npm.as_ref().map_or(Ok(()), NpmCi::begin).map_err(CommandFailure::from);
        let mut lacks_module = false;
        let watching = &mut |event: BuildEvent<'_>| {
            lacks_module |=
                matches!(event, BuildEvent::Output { line, .. } if line.contains(NO_MODULE));
            on_event(event);
        };
        let ran = begun.and_then(|()| self.commands.run(&task, watching));
        ran.map_err(|failure| ImportFailure::BuildCommand {
            command: text,
            failure,
            trust: self.trust,
            lacks_packages: lacks_module && self.has_requirements(),
        })?;
        if let Some(npm) = npm {
            npm.end(on_event);
        }
        Ok(())
    }

    /// Whether `pip` installs packages for the function, after the build command.
    fn has_requirements(&self) -> bool {
        self.config.runtime.as_ref().is_some_and(|runtime| runtime.requirements.is_some())
    }

    /// The program of the build command, and what must be shown of the host besides.
    /// A path with a slash is meant from the function's directory. A program that lies
    /// elsewhere is seen by the sandbox if every user of this host may run it.
    fn build_program(&self, program: &str) -> (OsString, Vec<PathBuf>) {
        if !program.contains('/') {
            return (program.into(), Vec::new());
        }
        let path = self.directory.join(program);
        let Ok(real) = path.canonicalize() else { return (path.into(), Vec::new()) };
        let may_all_run = real
            .metadata()
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o005 == 0o005);
        match real.starts_with(self.directory) || !may_all_run {
            true => (path.into(), Vec::new()),
            false => (real.clone().into(), vec![real]),
        }
    }

    /// The tree that the function's own files go on top of.
    fn base(
        &self,
        session: &mut Session,
        on_event: &mut OnEvent<'_>,
    ) -> Result<Tree, ImportFailure> {
        if let Some(Base { index, .. }) = &self.base {
            self.note_sharing(self.config.image().unwrap_or_default(), on_event);
            return Ok(StoredRootfs::open(session, *index)?.tree()?);
        }
        let Some(rootfs) = &self.config.rootfs else { return Ok(Tree::new()) };
        if !rootfs::is_directory_name(rootfs) {
            let name = Name::new(rootfs).map_err(RootfsError::from)?;
            let index = session.get_rootfs(&name)?.index;
            self.note_sharing(rootfs, on_event);
            return Ok(StoredRootfs::open(session, index)?.tree()?);
        }
        let named = self.named("rootfs", Path::new(rootfs))?;
        if named.path == Path::new("/") {
            return Err(ImportFailure::WholeHost);
        }
        let mut tree = Tree::new();
        let options = self.import_options(&named);
        self.import(named, Path::new("/"), &options, session, &mut tree, on_event)?;
        Ok(tree)
    }

    fn note_sharing(&self, rootfs: &str, on_event: &mut OnEvent<'_>) {
        if !self.config.sharing.is_default() {
            on_event(BuildEvent::Note(&escaped(&format!(
                "the files of the stored root file system {rootfs} stay in the domain that they were \
                 imported in"
            ))));
        }
    }

    /// Collects a runtime from the host, or what it has besides the language that was
    /// collected before.
    fn runtime(
        &self,
        runtime: &RuntimeConfig,
        language: Option<Collected>,
        session: &mut Session,
        tree: &mut Tree,
        environment: &mut BTreeMap<String, String>,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), ImportFailure> {
        let mut request = CollectRequest {
            domain: self.domain.clone(),
            readers: self.readers(),
            granted: vec![self.directory.to_owned()],
            ..CollectRequest::default()
        };
        for path in &runtime.include {
            request.files.push(canonical("include", &self.directory.join(path))?);
        }
        // Native code among the function's files needs libraries of the host.
        for entry in &self.config.files {
            request.libraries_of.push(self.own("files", &entry.from)?.path);
        }
        request.programs.extend(runtime.programs.iter().map(|program| self.program_of(program)));
        match self.request_of_language(runtime) {
            Some(_) if language.is_some() => {}
            Some(wanted) => request.runtimes.push(wanted),
            // A program among the function's files only needs its libraries.
            None => match self.config.command.first() {
                Some(program) if !self.is_own(program) => request.programs.push(program.into()),
                _ => {}
            },
        }
        if runtime.kind == RuntimeKind::Python3 {
            // A function of another directory may have the same name, and so the same packages.
            let wanted = runtime.requirements.is_some();
            let _alone = wanted.then(|| packages::alone(&self.commands, on_event)).transpose()?;
            if let Some((packages, readers)) = self.packages(runtime, on_event)? {
                let path = packages.path.clone();
                let options = ImportOptions { readers, ..self.own_options(&packages) };
                self.import(packages, Path::new(PACKAGES), &options, session, tree, on_event)?;
                environment.insert(PYTHONPATH.to_owned(), PACKAGES.to_owned());
                request.granted.push(path.clone());
                request.libraries_of.push(path);
            }
            // Byte code is written beside its source, into memory that is
            // frozen or thrown away: neither helps.
            environment.insert("PYTHONDONTWRITEBYTECODE".to_owned(), "1".to_owned());
            // What a copy has in a buffer when it ends would be in no log.
            environment.insert("PYTHONUNBUFFERED".to_owned(), "1".to_owned());
        }
        let progress = &mut |progress: Progress<'_>| imported(progress, on_event);
        let ask = &mut |question: &Question<'_>| self.ask(question);
        let collected = session.collect_asking(tree, &request, ask, progress)?;
        let all = language.iter().chain([&collected]);
        all.clone().for_each(|collected| self.note_gaps(collected, on_event));
        let search_path: Vec<_> = all.flat_map(|collected| &collected.search_path).collect();
        if !search_path.is_empty() {
            let first = search_path.iter().map(|path| path.to_string_lossy());
            let path = first.collect::<Vec<_>>().join(":");
            environment.insert("PATH".to_owned(), format!("{path}:{DEFAULT_PATH}"));
        }
        if runtime.kind == RuntimeKind::Python3
            && let Some(path) = environment.get_mut("PATH")
        {
            // The programs that come with packages. Functions without any have the same, so that they share
            // a runtime template with others.
            *path = format!("{path}:{PACKAGES}/bin");
        }
        Ok(())
    }

    /// Refuses a program of the function's directory that leads to what the sandbox does not have.
    fn check_links(&self, tree: &Tree) -> Result<(), ImportFailure> {
        let Some(program) = self.config.command.first().filter(|program| self.is_own(program))
        else {
            return Ok(());
        };
        let place = Path::new(&self.config.workdir).join(program);
        // Where it comes from, if it is at the same place below the directory.
        let entry = self.config.files.iter().find_map(|entry| {
            let below = place.strip_prefix(entry.destination()).ok()?.to_owned();
            Some(if below == Path::new("") { entry.from.clone() } else { entry.from.join(below) })
        });
        let Some(name) = entry else { return Ok(()) };
        let name = name.strip_prefix(".").unwrap_or(&name);
        let has = |path: &Path| tree.find_followed(path).is_some();
        match linked::explain(self.directory, name, &has) {
            Some(why) => Err(ImportFailure::Linked { key: "command", why: escaped(&why) }),
            None => Ok(()),
        }
    }

    /// Refuses an interpreter in the function's directory that leads to what not every user may read.
    fn check_interpreter(&self, interpreter: &Path) -> Result<(), ImportFailure> {
        let path = self.directory.join(interpreter);
        if self.trust == Trust::Trusted && path.exists() {
            return Ok(());
        }
        let Ok(name) = path.strip_prefix(self.directory) else { return Ok(()) };
        let has = |path: &Path| path.canonicalize().is_ok_and(|real| may_all_reach(&real));
        match linked::explain(self.directory, name, &has) {
            Some(why) => Err(ImportFailure::Linked { key: "interpreter", why: escaped(&why) }),
            None => Ok(()),
        }
    }

    /// Asks an interpreter where its files are. One that the function's author has
    /// named may be any program, so it runs in a sandbox.
    fn ask(&self, question: &Question<'_>) -> io::Result<Output> {
        match question.named && self.trust == Trust::Untrusted {
            true => self.commands.ask_interpreter(question.interpreter, question.arguments),
            false => ask_on_host(question),
        }
    }

    fn note_gaps(&self, collected: &Collected, on_event: &mut OnEvent<'_>) {
        for missing in &collected.missing_libraries {
            let user = missing.wanted_by.display();
            on_event(BuildEvent::Note(&escaped(&format!(
                "{user} wants {}, which this host does not have",
                missing.library
            ))));
        }
        for path in &collected.unreadable {
            on_event(BuildEvent::Note(&escaped(&format!(
                "{} may not be read{} and is left out",
                path.display(),
                match self.trust {
                    Trust::Trusted => "",
                    Trust::Untrusted => " by every user",
                }
            ))));
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

    /// The directory with the function's Python packages on the host, and whose files of it the
    /// function gets. Those that `pip` has put into Thaw's own directory, which nobody else may
    /// enter, are the function's.
    fn packages(
        &self,
        runtime: &RuntimeConfig,
        on_event: &mut OnEvent<'_>,
    ) -> Result<Option<(Named, Readers)>, ImportFailure> {
        if let Some(packages) = &runtime.packages {
            let named = self.named("packages", packages)?;
            let readers = self.import_options(&named).readers;
            return Ok(Some((named, readers)));
        }
        let Some(requirements) = &runtime.requirements else { return Ok(None) };
        let requirements = self.named("requirements", requirements)?;
        let (file, path) =
            packages::install(&self.commands, runtime, &requirements.path, on_event)?;
        Ok(Some((Named { file, path, inside: None }, Readers::ThisProcess)))
    }

    /// Imports one line of `files`.
    fn entry(
        &self,
        entry: &FileEntry,
        session: &mut Session,
        tree: &mut Tree,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), ImportFailure> {
        let named = self.own("files", &entry.from)?;
        let destination = entry.destination();
        let to = Path::new(&destination);
        let metadata = named.metadata("files")?;
        if metadata.is_dir() {
            let leave_out: Arc<dyn LeaveOut> = self.ignored.clone();
            let mut options = self.own_options(&named);
            options.leave_out = Some(leave_out);
            if self.config.takes_all_files() {
                // Those rules name it, which is said.
                options.exclude.retain(|rule| *rule != Exclude::Name(".git".to_owned()));
            }
            return self.import(named, to, &options, session, tree, on_event);
        }
        if !metadata.is_file() {
            return Err(ImportFailure::Special { path: named.path });
        }
        let is_private =
            self.config.sharing.private.iter().any(|files| {
                named.inside.as_ref().is_some_and(|path| files.pattern().matches(path))
            });
        let private = self.config.private_domain();
        let domain = if is_private { &private } else { &self.domain };
        let blob = session.put_file(&named.file, &named.path, domain)?;
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

    fn import(
        &self,
        from: Named,
        to: &Path,
        options: &ImportOptions,
        session: &mut Session,
        tree: &mut Tree,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), ImportFailure> {
        let progress = &mut |progress: Progress<'_>| imported(progress, on_event);
        let Named { file, path, .. } = from;
        session.import_open_directory(tree, file.into(), &path, to, options, progress)?;
        Ok(())
    }

    /// How a directory is imported with everything that it holds.
    fn import_options(&self, from: &Named) -> ImportOptions {
        let private = &self.config.sharing.private;
        let domain = self.config.private_domain();
        let domains = private.iter().map(|files| (files.pattern().clone(), domain.clone()));
        let (readers, domains, place) = match &from.inside {
            Some(inside) => (Readers::ThisProcess, domains.collect(), inside.clone()),
            None => (self.readers(), Vec::new(), PathBuf::new()),
        };
        let domain = self.domain.clone();
        ImportOptions { domain, domains, place, readers, ..ImportOptions::default() }
    }

    /// The same for the function's own files.
    fn own_options(&self, from: &Named) -> ImportOptions {
        let names = [".git", "__pycache__"].map(|name| Exclude::Name(name.to_owned()));
        ImportOptions {
            exclude: names.to_vec(),
            ownership: Ownership::All { uid: 0, gid: 0 },
            ..self.import_options(from)
        }
    }

    /// Whose files of the host the function gets.
    fn readers(&self) -> Readers {
        match self.trust {
            Trust::Untrusted => Readers::Everybody,
            Trust::Trusted => Readers::ThisProcess,
        }
    }

    /// Opens something below the function's directory, wherever links lead.
    fn own(&self, key: &'static str, path: &Path) -> Result<Named, ImportFailure> {
        let named = self.directory.join(path);
        let missing =
            |error| ImportFailure::Missing { key, path: self.directory.join(path), error };
        match beneath::open(&self.opened, path) {
            Ok(file) => {
                let path = beneath::path_of(&file).map_err(missing)?;
                // Not below it only if somebody moves directories just now.
                let inside = path.strip_prefix(self.directory).unwrap_or(Path::new(""));
                Ok(Named { file, inside: Some(inside.to_owned()), path })
            }
            Err(error) if beneath::leads_out(&error) => {
                Err(ImportFailure::LeadsOut { key, path: named })
            }
            Err(error) => Err(missing(error)),
        }
    }

    /// Opens something that may lie elsewhere on this host: then it is something that
    /// every user may read, unless the author is trusted.
    fn named(&self, key: &'static str, path: &Path) -> Result<Named, ImportFailure> {
        let is_inside = |c: Component<'_>| matches!(c, Component::Normal(_) | Component::CurDir);
        if path.components().all(is_inside) {
            match self.own(key, path) {
                Err(ImportFailure::LeadsOut { .. }) if self.trust == Trust::Trusted => {}
                opened => return opened,
            }
        }
        let real = canonical(key, &self.directory.join(path))?;
        if let Ok(inside) = real.strip_prefix(self.directory) {
            let inside = if inside == Path::new("") { Path::new(".") } else { inside };
            return self.own(key, inside);
        }
        if self.trust == Trust::Untrusted && !may_all_reach(&real) {
            return Err(ImportFailure::Private { key, path: real });
        }
        let file = open_plainly(key, &real)?;
        Ok(Named { file, path: real, inside: None })
    }
}

impl Named {
    fn metadata(&self, key: &'static str) -> Result<Metadata, ImportFailure> {
        self.file.metadata().map_err(|error| ImportFailure::Missing {
            key,
            path: self.path.clone(),
            error,
        })
    }
}

/// Whether every user may read the file or directory at a path without links.
fn may_all_reach(path: &Path) -> bool {
    let has = |path: &Path, bits: u32| {
        path.symlink_metadata().is_ok_and(|found| found.permissions().mode() & bits == bits)
    };
    let itself = if path.is_dir() { 0o005 } else { 0o004 };
    has(path, itself) && path.ancestors().skip(1).all(|parent| has(parent, 0o001))
}

fn open_plainly(key: &'static str, path: &Path) -> Result<File, ImportFailure> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let missing = |error| ImportFailure::Missing {
        key,
        path: path.to_owned(),
        error: io::Error::from(error),
    };
    opened.map(File::from).map_err(missing)
}

/// Adds the author's variables, which replace those of the build. Installed packages are found
/// behind the directories that the author names.
fn add_own(environment: &mut BTreeMap<String, String>, own: &BTreeMap<String, String>) {
    let has_packages = environment.get(PYTHONPATH).is_some_and(|path| path == PACKAGES);
    environment.extend(own.clone());
    if has_packages && let Some(path) = environment.get_mut(PYTHONPATH) {
        if path.is_empty() {
            *path = PACKAGES.to_owned();
        } else if path.split(':').all(|directory| directory != PACKAGES) {
            *path = format!("{path}:{PACKAGES}");
        }
    }
}

/// Names of files come from the function's author.
fn escaped(text: &str) -> String {
    thaw_sandbox::escape(text.as_bytes())
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_link_in_the_place_of_the_functions_directory_is_not_followed() {
        let all = tempfile::tempdir().unwrap();
        let path = |name: &str| all.path().canonicalize().unwrap().join(name);
        for directory in ["home", "up/project", "victim/project"] {
            fs::create_dir_all(path(directory)).unwrap();
        }
        let text = "name = \"f\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 81\n";
        let config = FunctionConfig::parse("thaw.toml".as_ref(), text).unwrap();
        let (home, options) = (Home::at(path("home")).unwrap(), BuildOptions::default());
        let directory = path("up/project");
        let import = || Import::new(&home, &directory, &config, &options, None).map(drop);
        import().unwrap();
        fs::rename(path("up"), path("away")).unwrap();
        symlink(path("victim"), path("up")).unwrap();
        let refused = import().unwrap_err();
        let reason = std::error::Error::source(&refused).map(ToString::to_string);
        let reason = reason.unwrap_or_else(|| refused.to_string());
        assert!(reason.contains("a link has taken the place of a part of"), "{reason}");
    }

    #[test]
    fn packages_are_found_behind_directories_of_the_author() {
        let path = |before: Option<&str>, own: Option<&str>| {
            let variables = |value: Option<&str>| {
                value.into_iter().map(|value| (PYTHONPATH.to_owned(), value.to_owned())).collect()
            };
            let mut environment = variables(before);
            add_own(&mut environment, &variables(own));
            environment.remove(PYTHONPATH)
        };
        let packages = Some(PACKAGES);
        assert_eq!(path(packages, None).as_deref(), packages);
        assert_eq!(path(packages, Some("src")), Some(format!("src:{PACKAGES}")));
        assert_eq!(path(packages, Some("")).as_deref(), packages);
        for own in [format!("{PACKAGES}:src"), format!("src:{PACKAGES}")] {
            assert_eq!(path(packages, Some(&own)), Some(own));
        }
        assert_eq!(path(None, Some("src")).as_deref(), Some("src"));
        assert_eq!(path(Some("/image"), Some("src")).as_deref(), Some("src"));
    }
}
