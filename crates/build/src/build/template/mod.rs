//! Runtime templates: frozen interpreters from which functions are built that store only how
//! they differ.
//!
//! ```text
//! python3-…     the interpreter and the usual modules, over the files of the language alone
//!   └─ python3-…     the same with the modules of `[template] modules`, over those and packages
//!        └─ the function: its program, run in a copy of that, over all its files
//! ```
//!
//! A template is known by what it was made of, so that functions which want the same one share
//! it. It is not to be mistaken for the live template that copies are forked from
//! (`thaw_sandbox::Template`).
//!
//! What is a language's own is in [`language`] and a module for each.

mod fit;
mod java;
mod language;
mod node;
mod php;
mod placeholders;
mod python;
mod ruby;
mod settings;
mod sharing;

use super::freeze::{ImageOrder, open_ancestor, write_image};
use super::program::Program;
use super::{BuildError, BuildEvent, BuildOptions, FreezeFailure, OnEvent, Way};
use fit::{Unfit, interpreter_environment};
pub(super) use language::{BOOTSTRAP_NAME, file_name};
use language::{Language, directory_of_bootstrap};
use placeholders::Memory;
pub(super) use sharing::share;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thaw_home::config::{ByteSize, EntryKind, FreezeAt, FunctionConfig, Limits, TemplateConfig};
use thaw_home::function::StoredFunction;
use thaw_home::rootfs::StoredRootfs;
use thaw_sandbox::{BootPlan, Fit, FreezeBase, Image, MemoryWrites, PlanError, cpu_features};
use thaw_store::index::{Attributes, Content, Node, TreeError};
use thaw_store::{
    Domain, ImageId, IndexId, Name, OpenIndex, Session, StoreError, TemplateRecord, Tree,
};

/// Memory that an interpreter may take until it is a template.
const MEMORY: ByteSize = ByteSize::mebibytes(2048);

/// The files of a function, as far as templates have them.
#[derive(Clone, Copy)]
pub(super) struct Files<'a> {
    /// All.
    pub tree: &'a Tree,
    /// Those of the language alone; `None`: it is not known which these are.
    pub runtime: Option<&'a Tree>,
    /// Those, and what packages need besides themselves.
    pub libraries: Option<&'a Tree>,
}

/// A runtime template that can be thawed here.
pub(super) struct Template {
    image: Arc<Image>,
    id: ImageId,
    index: OpenIndex,
    /// What a copy has in its memory in the place of placeholders.
    writes: MemoryWrites,
}

impl Template {
    /// The image that what is made of a copy of it is compared with.
    pub fn base(&self) -> FreezeBase {
        FreezeBase { image: self.image.clone(), name: *self.id.as_bytes() }
    }

    /// How to boot a copy of it over a root file system that extends its own.
    pub fn plan_over(&self, rootfs: &StoredRootfs) -> Result<BootPlan, PlanError> {
        self.image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs())
    }

    /// What is written to the memory of a copy.
    pub fn writes(&self) -> &MemoryWrites {
        &self.writes
    }

    /// Opens a template that was made before; `None`: there is none that can be used.
    fn find(session: &Session, name: &Name) -> Option<Self> {
        let record = session.get_template(name).ok()?;
        Self::open(session, &record).ok()
    }

    fn open(session: &Session, record: &TemplateRecord) -> Result<Self, FreezeFailure> {
        let index = session.open_index(record.index)?;
        let file = session.open_image(record.image)?;
        let image = Image::open_with(file, &mut |ancestor| open_ancestor(session, ancestor))?;
        image.check_fit(&Fit {
            kernel_build: thaw_home::debug::kernel()?.build_id(),
            // That of the bootstrap, besides.
            index_hash: image.header().index,
            cpu_features: cpu_features(),
        })?;
        let writes = MemoryWrites::default();
        Ok(Self { image: Arc::new(image), id: record.image, index, writes })
    }
}

/// The template that a function is to be built from, and the index of its files that extends the
/// template's. `None`: it wants none, or it is to be built the ordinary way, and `on_event` is
/// told why.
///
/// # Errors
/// The store refuses something.
pub(super) fn of_function(
    session: &mut Session,
    function: &StoredFunction,
    files: Files<'_>,
    options: &BuildOptions,
    on_event: &mut OnEvent<'_>,
) -> Result<Option<(IndexId, Template)>, BuildError> {
    let Some(from) = function.config.template.from else { return Ok(None) };
    let Some(language) = language::of(from, &function.config.command) else {
        no_template("its command is of no language that has any", on_event);
        return Ok(None);
    };
    if let Err(Unfit(why)) = fit::check(language, function, &files) {
        no_template(&why, on_event);
        return Ok(None);
    }
    if let Err(Unfit(why)) = language.check_files(session, &function.config.workdir, &files)? {
        no_template(&why, on_event);
        return Ok(None);
    }
    on_event(BuildEvent::Stage("looking for its runtime template"));
    let mut template = match chain(session, language, function, files, options, on_event) {
        Ok(template) => template,
        Err(BuildError::Freeze(failure)) if failure.is_of_program() => {
            no_template(&format!("none could be made ({failure})"), on_event);
            return Ok(None);
        }
        Err(BuildError::Store(StoreError::Tree(
            error @ (TreeError::Extends(_) | TreeError::Occupied(_)),
        ))) => {
            no_template(&error.to_string(), on_event);
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    match program_writes(language, function, &template) {
        Ok(Ok(writes)) => template.writes = writes,
        Ok(Err(Unfit(why))) => {
            no_template(&why, on_event);
            return Ok(None);
        }
        Err(error) => return Err(FreezeFailure::Io(error).into()),
    }
    match session.put_index_over(files.tree, &template.index) {
        Ok(index) => Ok(Some((index, template))),
        Err(StoreError::Tree(TreeError::Extends(path))) => {
            no_template(&format!("it has another {}", path.display()), on_event);
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Tells why a function is built the ordinary way.
fn no_template(why: &str, on_event: &mut OnEvent<'_>) {
    let text = format!("it is not built from a runtime template: {why}");
    on_event(BuildEvent::Note(&thaw_sandbox::escape(text.as_bytes())));
}

/// What is written to the memory of a copy so that it has the program.
///
/// # Errors
/// The template's image cannot be read.
fn program_writes(
    language: &dyn Language,
    function: &StoredFunction,
    template: &Template,
) -> io::Result<Result<MemoryWrites, Unfit>> {
    let config = &function.config;
    let Some(words) = language.replacements(&config.command, &config.workdir) else {
        return Ok(Ok(MemoryWrites::default()));
    };
    let Some(memory) = Memory::of(&template.image)? else {
        return Ok(Err(Unfit("its template has too much memory to look through".to_owned())));
    };
    let started_with = Wanted::interpreter(language, function).program(function).environment;
    Ok(placeholders::writes(&memory, &words, &started_with, &function.environment))
}

/// The template at the end of the chain that a function asks for.
fn chain(
    session: &mut Session,
    language: &dyn Language,
    function: &StoredFunction,
    files: Files<'_>,
    options: &BuildOptions,
    on_event: &mut OnEvent<'_>,
) -> Result<Template, BuildError> {
    let runtime = files.runtime.expect("a fitting function has such files");
    let interpreter = Wanted::interpreter(language, function);
    let (name, template) = interpreter.make(session, function, runtime, options, on_event)?;
    let modules = &function.config.template.modules;
    if modules.is_empty() {
        return Ok(template);
    }
    let environment = interpreter_environment(language, function, true);
    let directories = language.package_directories(&function.config.workdir, &environment);
    let packages = with_packages(&files, &directories)?;
    let mut arguments = language.module_arguments(&directories);
    arguments.extend(modules.clone());
    let framework = Wanted { language, parent: Some((&name, &template)), arguments, environment };
    Ok(framework.make(session, function, &packages, options, on_event)?.1)
}

/// The files of the language, and those of packages in `directories`.
fn with_packages(files: &Files<'_>, directories: &[PathBuf]) -> Result<Tree, StoreError> {
    let base = files.libraries.or(files.runtime).expect("a fitting function has such files");
    let mut tree = base.clone();
    for directory in directories {
        tree.copy_below(files.tree, directory)?;
    }
    Ok(tree)
}

/// A template that is made unless it is there.
struct Wanted<'a> {
    language: &'a dyn Language,
    /// The template that it is made of a copy of; `None`: the interpreter is started.
    parent: Option<(&'a Name, &'a Template)>,
    /// The modules, and what the bootstrap needs to find them.
    arguments: Vec<String>,
    /// The environment, as far as the interpreter looks at it when it starts.
    environment: BTreeMap<String, String>,
}

impl<'a> Wanted<'a> {
    /// The interpreter, with the usual modules.
    fn interpreter(language: &'a dyn Language, function: &StoredFunction) -> Self {
        Self {
            language,
            parent: None,
            arguments: language.usual_modules().iter().map(|&name| name.to_owned()).collect(),
            environment: interpreter_environment(language, function, false),
        }
    }

    /// Finds or makes it over the files of `tree`.
    fn make(
        &self,
        session: &mut Session,
        function: &StoredFunction,
        tree: &Tree,
        options: &BuildOptions,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(Name, Template), BuildError> {
        let index = match self.parent {
            None => session.put_index(tree)?,
            Some((_, parent)) => session.put_index_over(tree, &parent.index)?,
        };
        let program = self.program(function);
        let config = self.made_of(&program, index);
        let name = name_of(self.language, &config);
        if let Some(template) = Template::find(session, &name) {
            return Ok((name, template));
        }
        self.check_mark(session, &program, tree)?;
        on_event(BuildEvent::Stage(&format!("making the runtime template {name}")));
        let image = self.freeze(session, &program, tree, index, options, on_event)?;
        let record = session.put_template(&name, config, index, image)?;
        Ok((name, Template::open(session, &record)?))
    }

    /// Checks that the interpreter is one that the language knows.
    fn check_mark(
        &self,
        session: &Session,
        program: &StoredFunction,
        tree: &Tree,
    ) -> Result<(), BuildError> {
        let Some(mark) = self.language.mark() else { return Ok(()) };
        let path = fit::executable(&program.config.command[0], program, tree);
        let found = path.and_then(|path| tree.find_followed(&path));
        let content = match found.map(|found| &tree.node(found).content) {
            Some(Content::Regular(Some(blob))) => session.read_blob(blob.hash)?,
            _ => Vec::new(),
        };
        match content.windows(mark.len()).any(|window| window == mark) {
            true => Ok(()),
            false => {
                let reason = "its interpreter is built otherwise than those that are known";
                let (reason, output) = (reason.to_owned(), Vec::new());
                Err(FreezeFailure::NotStarted { reason, output }.into())
            }
        }
    }

    /// The interpreter on its way to become the template, as a function.
    fn program(&self, function: &StoredFunction) -> StoredFunction {
        let directory = directory_of_bootstrap(function.config.ids().0);
        let command = self.language.command(&function.config.command, directory, &self.arguments);
        let mut environment = self.environment.clone();
        if self.parent.is_none() {
            self.language.load_bootstrap(directory, &mut environment);
        }
        let mut config = FunctionConfig {
            // Every root file system knows this host.
            name: "localhost".parse().expect("it is a name"),
            command,
            port: None,
            workdir: "/".to_owned(),
            env: BTreeMap::new(),
            limits: self.limits(function),
            template: TemplateConfig::default(),
            train: None,
            egress: Default::default(),
            // Whoever is built from it mounts his own.
            secrets: Default::default(),
            ..function.config.clone()
        };
        config.entry.kind = EntryKind::Http;
        config.entry.freeze = FreezeAt::Program;
        StoredFunction { config, environment, ..function.clone() }
    }

    /// The limits that the interpreter has until it is a template.
    fn limits(&self, function: &StoredFunction) -> Limits {
        let given = &function.config.limits;
        match self.language.starts_by_limits() {
            true => Limits { memory: given.memory, cpu: given.cpu, ..Limits::default() },
            false => Limits { memory: MEMORY, ..Limits::default() },
        }
    }

    /// All that makes a difference to what is in the template's memory.
    fn made_of(&self, program: &StoredFunction, index: IndexId) -> serde_json::Value {
        let mut all = serde_json::json!({
            "parent": self.parent.map(|(name, _)| name.to_string()),
            "command": program.config.command,
            "environment": program.environment,
            "user": program.config.ids(),
            // What is in memory is shared with nobody else, either.
            "domain": program.config.sharing.domain,
            "index": index.to_string(),
        });
        if self.language.starts_by_limits() {
            let limits = &program.config.limits;
            all["limits"] = serde_json::json!([limits.memory, limits.cpu]);
        }
        all
    }

    fn freeze(
        &self,
        session: &mut Session,
        program: &StoredFunction,
        tree: &Tree,
        index: IndexId,
        options: &BuildOptions,
        on_event: &mut OnEvent<'_>,
    ) -> Result<ImageId, BuildError> {
        let (index, way, base) = match self.parent {
            Some((_, parent)) => (index, Way::Template(parent), Some(parent.base())),
            None => {
                let ids = program.config.ids();
                (with_bootstrap(session, self.language, ids, tree, index)?, Way::Start, None)
            }
        };
        let rootfs = StoredRootfs::open(session, index)?;
        let mut running = match way {
            // Without a bootstrap, it is frozen when it looks for its program.
            Way::Start if self.language.bootstrap().is_empty() => {
                Program::start_interpreter(program, &rootfs, options)?
            }
            Way::Start => Program::start(program, &rootfs, options)?,
            Way::Template(parent) => Program::start_in(parent, program, &rootfs, options)?,
        };
        // What the interpreter prints is no output of the program; a failure has its last lines.
        let on_event: &mut OnEvent<'_> = &mut |event: BuildEvent<'_>| {
            if !matches!(event, BuildEvent::Output { .. }) {
                on_event(event);
            }
        };
        let entry = match running.run_to_entry(options.entry_timeout, on_event) {
            Ok(entry) => entry,
            Err(stop) => return Err(running.fail(stop, on_event).into()),
        };
        let (sandbox, _parent) = running.into_sandbox(on_event);
        let order =
            ImageOrder { entry, function: program, rootfs: &rootfs, merge: options.merge, base };
        Ok(write_image(session, &sandbox, &order)?.0)
    }
}

/// The index of a tree with the bootstrap, which goes away before anybody sees it. It is its
/// user's, with the directory that it may have for itself, since the user removes both.
fn with_bootstrap(
    session: &mut Session,
    language: &dyn Language,
    (uid, gid): (u32, u32),
    tree: &Tree,
    index: IndexId,
) -> Result<IndexId, StoreError> {
    if language.bootstrap().is_empty() {
        return Ok(index);
    }
    let mut tree = tree.clone();
    let directory = Path::new(directory_of_bootstrap(uid));
    for &(path, bytes) in language.bootstrap() {
        let path = directory.join(path);
        let blob = session.put_blob(bytes, &Domain::default())?;
        let attributes = Attributes { uid, gid, ..Attributes::root(0o644) };
        if let Some(own) = path.parent().filter(|&own| own != directory) {
            let own = tree.make_directories(own)?;
            *tree.attributes_mut(own) = Attributes { uid, gid, ..Attributes::root(0o755) };
        }
        tree.add_at(&path, Node { content: Content::Regular(blob), attributes })?;
    }
    let plain = session.open_index(index)?;
    session.put_index_over(&tree, &plain)
}

fn name_of(language: &dyn Language, config: &serde_json::Value) -> Name {
    let text = serde_json::to_vec(config).expect("it is plain data");
    let bootstrap = language.bootstrap().iter().map(|(_, bytes)| *bytes);
    let made_of: Vec<&[u8]> = [text.as_slice()].into_iter().chain(bootstrap).collect();
    TemplateRecord::name_of(language.name(), &made_of)
}
