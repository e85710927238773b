//! Copies paths of the host into a tree so that they resolve identically.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::process::Output;

use rustix::fs::FileType;

use super::libraries::{below, system_directories};
use super::runtime::RuntimeRequest;
use super::{Ask, CollectError, CollectRequest, Collected, Question};
use crate::blob::Domain;
use crate::error::{Context, Result, StoreError};
use crate::import::{Exclude, Import, ImportOptions, Ownership, Progress, Readers, Unreadable};
use crate::index::Tree;
use crate::session::Session;

/// Symbolic links that one path may lead through (path_resolution(7)).
const MAX_LINKS: usize = 40;
/// Where the system has its programs.
const SYSTEM_PROGRAMS: [&str; 2] = ["/usr/bin", "/usr/local/bin"];
/// Directories that a symbolic link does not bring along.
const NEVER_FOLLOWED: [&str; 6] = ["/proc", "/sys", "/dev", "/run", "/tmp", "/var"];

/// A collection in progress. Paths are absolute, as seen below `root`.
pub(super) struct Collector<'a> {
    root: PathBuf,
    import: Import<'a>,
    options: ImportOptions,
    /// Paths that may be reached through directories which not everybody may enter.
    granted: Vec<PathBuf>,
    ask: &'a mut Ask<'a>,
    pub(super) search_path: OsString,
    pub(super) collected: Collected,
    /// Resolved paths of files that are in the tree.
    placed: HashSet<PathBuf>,
    /// Resolved paths of directories that are in the tree with all below them.
    trees: Vec<PathBuf>,
    /// Resolved paths whose files come into the tree by other ways.
    elsewhere: Vec<PathBuf>,
    /// Names of the libraries among those files.
    libraries_elsewhere: HashSet<OsString>,
    /// Objects whose libraries have been collected.
    pub(super) examined: HashSet<PathBuf>,
    /// Directories of the system's libraries.
    pub(super) library_directories: Vec<PathBuf>,
    /// What was seen at paths: most are asked for again and again, since the directories above each
    /// file are looked at. As many as the collection has names, and some.
    seen: RefCell<HashMap<PathBuf, Option<Seen>>>,
    /// Whether files at resolved paths are libraries for this machine, as far as that was asked: each
    /// is asked for once for every object that needs it.
    pub(super) libraries: RefCell<HashMap<PathBuf, bool>>,
    /// Where the system has libraries of these names, in all their variants; none: nowhere.
    pub(super) systems_libraries: HashMap<OsString, Vec<PathBuf>>,
}

/// What lies at a path.
#[derive(Clone, Copy)]
struct Seen {
    /// `st_mode` of lstat(2).
    mode: u32,
}

impl Seen {
    fn is(self, file_type: FileType) -> bool {
        FileType::from_raw_mode(self.mode) == file_type
    }
}

/// A path with all symbolic links resolved, and what is there.
pub(super) struct Resolved {
    pub(super) path: PathBuf,
    seen: Seen,
}

impl<'a> Collector<'a> {
    pub(super) fn new(
        root: &Path,
        session: &'a mut Session,
        tree: &'a mut Tree,
        request: &CollectRequest,
        ask: &'a mut Ask<'a>,
        progress: &'a mut dyn FnMut(Progress<'_>),
    ) -> Self {
        let options = ImportOptions {
            readers: request.readers,
            ownership: Ownership::All { uid: 0, gid: 0 },
            unreadable: Unreadable::Skip,
            domain: request.domain.clone(),
            ..ImportOptions::default()
        };
        let search_path = match &request.search_path {
            Some(path) => path.clone(),
            None => std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into()),
        };
        Self {
            root: root.to_owned(),
            import: Import::new(session, tree, progress),
            options,
            granted: request.granted.clone(),
            ask,
            search_path,
            collected: Collected::default(),
            placed: HashSet::new(),
            trees: Vec::new(),
            elsewhere: Vec::new(),
            libraries_elsewhere: HashSet::new(),
            examined: HashSet::new(),
            library_directories: system_directories(root),
            seen: RefCell::default(),
            libraries: RefCell::default(),
            systems_libraries: HashMap::new(),
        }
    }

    /// Ends the collection. A library that lies elsewhere in it is in memory
    /// already when the file that wants it is loaded, as `libpython` is for its
    /// extension modules; such a one is not missing.
    pub(super) fn finish(mut self) -> Result<Collected> {
        let names: HashSet<&OsStr> = self.placed.iter().filter_map(|p| p.file_name()).collect();
        let elsewhere = &self.libraries_elsewhere;
        self.collected.missing_libraries.retain(|missing| {
            let name = OsStr::new(&missing.library);
            !names.contains(name) && !elsewhere.contains(name)
        });
        self.collected.files = self.import.report.files;
        self.collected.bytes = self.import.report.bytes;
        self.collected.unreadable = std::mem::take(&mut self.import.report.unreadable);
        Ok(self.collected)
    }

    /// The tree that is being filled.
    pub(super) fn tree(&mut self) -> &mut Tree {
        self.import.tree
    }

    /// The session that stores contents.
    pub(super) fn session(&mut self) -> &mut Session {
        self.import.session
    }

    /// With whom the contents are shared.
    pub(super) fn domain(&self) -> Domain {
        self.options.domain.clone()
    }

    /// The host's own name of a path.
    pub(super) fn on_host(&self, path: &Path) -> PathBuf {
        below(&self.root, path)
    }

    /// Lets what lies at or below `path`, or where its links lead, be collected
    /// whoever may enter the directories above it.
    pub(super) fn grant(&mut self, path: &Path) {
        let resolved = fs::canonicalize(self.on_host(path)).map(|path| self.below_root(&path));
        self.granted.extend(resolved);
        self.granted.push(path.to_owned());
    }

    /// Asks an interpreter where its files are.
    pub(super) fn ask(&mut self, question: &Question<'_>) -> std::io::Result<Output> {
        let answer = (self.ask)(question);
        // It may have made files.
        self.seen.get_mut().clear();
        self.libraries.get_mut().clear();
        self.systems_libraries.clear();
        answer
    }

    /// Whether the function's author has chosen a program by naming this interpreter. The language's
    /// usual one, under its own name in a directory where nobody but root can put programs, is no
    /// choice: it is what would have been asked without a name.
    pub(super) fn is_authors_choice(
        &self,
        asked: &Path,
        request: &RuntimeRequest,
        usual: &str,
    ) -> bool {
        if request.interpreter.is_none() {
            return false;
        }
        // The name itself may be a link: that of a virtual environment matters, and is elsewhere.
        let directory = asked.parent().and_then(|path| fs::canonicalize(self.on_host(path)).ok());
        let is_systems = directory.is_some_and(|directory| {
            SYSTEM_PROGRAMS.iter().any(|path| self.on_host(Path::new(path)) == directory)
                && fs::metadata(&directory)
                    .is_ok_and(|found| found.uid() == 0 && found.mode() & 0o022 == 0)
        });
        !(is_systems && asked.file_name() == Some(OsStr::new(usual)))
    }

    /// Whether a file that can be executed is at the path, whoever may look at it: shells pass over
    /// directories and other files of the name (exec(3)).
    pub(super) fn is_program(&self, path: &Path) -> bool {
        fs::metadata(self.on_host(path))
            .is_ok_and(|found| found.is_file() && found.mode() & 0o111 != 0)
    }

    /// Whether the path leads to something on the host.
    pub(super) fn exists(&self, path: &Path) -> bool {
        self.resolve(path, |_, _| Ok(())).is_ok()
    }

    /// Puts the file or directory (alone) at `path` into the tree, with every
    /// symbolic link on the way to it. Returns where it really lies.
    pub(super) fn place(&mut self, path: &Path) -> Result<PathBuf> {
        let mut links = Vec::new();
        let resolved = self.resolve(path, |link, _| {
            links.push(link.to_owned());
            Ok(())
        })?;
        if self.elsewhere.iter().any(|path| resolved.path.starts_with(path)) {
            return Ok(resolved.path);
        }
        for link in links {
            if self.placed.insert(link.clone()) {
                self.import_file(&link)?;
            }
        }
        if resolved.seen.is(FileType::Directory) {
            self.tree().make_directories(&resolved.path)?;
        } else if self.placed.insert(resolved.path.clone()) {
            self.import_file(&resolved.path)?;
        }
        Ok(resolved.path)
    }

    fn import_file(&mut self, path: &Path) -> Result<()> {
        let from = self.on_host(path);
        self.import.file(&from, path, &self.options)
    }

    /// Puts a directory with everything below it into the tree, what its
    /// symbolic links point to, and the libraries that its files need. What a link
    /// points to and may not be read is left out, as what lies in the directory is.
    pub(super) fn place_tree(&mut self, path: &Path, exclude: Vec<Exclude>) -> Result<()> {
        let mut ahead = VecDeque::from(self.place_one_tree(path, exclude)?);
        while let Some(link) = ahead.pop_front() {
            // No empty directory stands for one that may not be read.
            let opened = self.resolve(&link, |_, _| Ok(())).and_then(|resolved| {
                Import::open(&self.on_host(&resolved.path), &self.options).map(drop)
            });
            match opened {
                Ok(()) => ahead.extend(self.place_one_tree(&link, Vec::new())?),
                Err(error) => self.leave_out(error)?,
            }
        }
        Ok(())
    }

    /// The same without the directories that its links point to; returns those links.
    fn place_one_tree(&mut self, path: &Path, exclude: Vec<Exclude>) -> Result<Vec<PathBuf>> {
        let options = ImportOptions { exclude, ..self.options.clone() };
        let real = self.place(path)?;
        let from = self.on_host(&real);
        if self.trees.iter().any(|tree| real.starts_with(tree)) {
            return Ok(Vec::new());
        }
        self.trees.push(real.clone());
        // What was placed one by one before is not part of this tree.
        self.import.regular_files.clear();
        self.import.symlinks.clear();
        self.import.directory(&from, &real, &options)?;
        let files = std::mem::take(&mut self.import.regular_files);
        let links = std::mem::take(&mut self.import.symlinks);
        for file in files {
            let file = self.below_root(&file);
            self.placed.insert(file.clone());
            if may_be_elf(&self.on_host(&file)) {
                self.library_user(&file)?;
            }
        }
        let mut directories = Vec::new();
        for link in links {
            let link = self.below_root(&link);
            self.placed.insert(link.clone());
            directories.extend(self.follow(&link)?);
        }
        Ok(directories)
    }

    /// Notes what may not be read; passes other failures on.
    fn leave_out(&mut self, error: StoreError) -> Result<()> {
        match error {
            StoreError::Io { source, path, .. }
                if source.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                self.import.report.unreadable.push(path);
                Ok(())
            }
            error => Err(error),
        }
    }

    /// Collects the libraries that the file or the files of the directory at
    /// `path` need, but nothing at or below `path` itself.
    pub(super) fn libraries_of(&mut self, path: &Path) -> Result<()> {
        let resolved = self.resolve(path, |_, _| Ok(()))?.path;
        self.elsewhere.push(resolved.clone());
        let mut ahead = vec![resolved];
        while let Some(path) = ahead.pop() {
            let on_host = self.on_host(&path);
            let metadata = fs::symlink_metadata(&on_host).context("inspect", &on_host)?;
            if metadata.is_dir() {
                for name in fs::read_dir(&on_host).context("read", &on_host)? {
                    ahead.push(path.join(name.context("read", &on_host)?.file_name()));
                }
            } else if metadata.is_file() && may_be_elf(&on_host) {
                self.libraries_elsewhere.extend(path.file_name().map(OsStr::to_owned));
                self.library_user(&path)?;
            }
        }
        Ok(())
    }

    /// Collects what a symbolic link in a tree leads to; returns a directory that
    /// must be collected with everything below it.
    fn follow(&mut self, link: &Path) -> Result<Option<PathBuf>> {
        let Ok(target) = self.resolve(link, |_, _| Ok(())) else {
            self.collected.dangling_links.push(link.to_owned());
            return Ok(None);
        };
        if self.trees.iter().any(|tree| target.path.starts_with(tree)) {
            return Ok(None);
        }
        let too_much = NEVER_FOLLOWED.iter().any(|never| target.path.starts_with(never));
        if !target.seen.is(FileType::Directory) {
            if too_much || !target.seen.is(FileType::RegularFile) {
                self.collected.dangling_links.push(link.to_owned());
                return Ok(None);
            }
            if let Err(error) = self.place(link) {
                // Whoever needs it for another reason hears why it is not there.
                self.placed.remove(&target.path);
                self.leave_out(error)?;
                return Ok(None);
            }
            if may_be_elf(&self.on_host(&target.path)) {
                self.library_user(&target.path)?;
            }
            return Ok(None);
        }
        // `/`, `/usr` and the like, and whatever contains the link itself.
        if too_much || target.path.components().count() <= 2 || link.starts_with(&target.path) {
            self.collected.dangling_links.push(link.to_owned());
            return Ok(None);
        }
        Ok(Some(link.to_owned()))
    }

    /// A file alone, a program with its libraries, or a directory with all below it.
    pub(super) fn anything(&mut self, path: &Path) -> Result<()> {
        let resolved = self.resolve(path, |_, _| Ok(()))?;
        if resolved.seen.is(FileType::Directory) {
            return self.place_tree(path, Vec::new());
        }
        let real = self.place(path)?;
        if may_be_elf(&self.on_host(&real)) {
            self.library_user(&real)?;
        }
        Ok(())
    }

    fn below_root(&self, path: &Path) -> PathBuf {
        Path::new("/").join(path.strip_prefix(&self.root).unwrap_or(path))
    }

    /// Resolves all symbolic links of an absolute path and tells of each.
    pub(super) fn resolve(
        &self,
        path: &Path,
        mut on_link: impl FnMut(&Path, &Path) -> Result<()>,
    ) -> Result<Resolved> {
        let no_file = || CollectError::NoFile(path.to_owned());
        let mut links = 0;
        let mut here = PathBuf::from("/");
        let mut seen = self.lstat(&here)?.ok_or_else(no_file)?;
        let mut ahead = reversed_components(path);
        let mut closed = None;
        while let Some(name) = ahead.pop() {
            closed = closed.or_else(|| self.closed_to_some(&here, seen));
            if name == ".." {
                here.pop();
                seen = self.lstat(&here)?.ok_or_else(no_file)?;
                continue;
            }
            let next = here.join(&name);
            let found = self.lstat(&next)?.ok_or_else(no_file)?;
            if !found.is(FileType::Symlink) {
                here = next;
                seen = found;
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return Err(CollectError::TooManyLinks(path.to_owned()).into());
            }
            let target = fs::read_link(self.on_host(&next))
                .map_err(|source| CollectError::Io { path: next.clone(), source })?;
            on_link(&next, &target)?;
            if target.is_absolute() {
                here = PathBuf::from("/");
            }
            ahead.extend(reversed_components(&target));
        }
        let is_granted = |granted: &PathBuf| here.starts_with(granted) || path.starts_with(granted);
        if let Some(closed) = closed
            && !self.granted.iter().any(is_granted)
        {
            return Err(CollectError::Private(closed).into());
        }
        Ok(Resolved { path: here, seen })
    }

    /// The directory, if it matters that not everybody may pass through it.
    fn closed_to_some(&self, directory: &Path, seen: Seen) -> Option<PathBuf> {
        let is_open = self.options.readers == Readers::ThisProcess || seen.mode & 0o001 != 0;
        (!is_open).then(|| directory.to_owned())
    }

    fn lstat(&self, path: &Path) -> Result<Option<Seen>> {
        if let Some(&seen) = self.seen.borrow().get(path) {
            return Ok(seen);
        }
        let seen = match fs::symlink_metadata(self.on_host(path)) {
            Ok(metadata) => Some(Seen { mode: metadata.mode() }),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                None
            }
            Err(source) => return Err(CollectError::Io { path: path.to_owned(), source }.into()),
        };
        self.seen.borrow_mut().insert(path.to_owned(), seen);
        Ok(seen)
    }
}

/// Components of a path, last first, without `.` and the root.
fn reversed_components(path: &Path) -> Vec<OsString> {
    let name = |component| match component {
        Component::Normal(name) => Some(name),
        Component::ParentDir => Some(OsStr::new("..")),
        _ => None,
    };
    path.components().rev().filter_map(name).map(OsStr::to_owned).collect()
}

/// Whether a file of a collected directory is worth a look inside: it can be
/// executed or is named as a library. Saves opening every source file.
fn may_be_elf(on_host: &Path) -> bool {
    let named_so = on_host
        .file_name()
        .is_some_and(|name| name.as_bytes().windows(3).any(|part| part == b".so"));
    named_so || fs::metadata(on_host).is_ok_and(|m| m.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_systems_own_interpreter_is_no_choice_of_an_author() {
        let directory = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(directory.path()).unwrap();
        for path in ["usr/bin", "opt/venv/bin", "usr/local/bin"] {
            fs::create_dir_all(root.join(path)).unwrap();
        }
        symlink("usr/bin", root.join("bin")).unwrap();
        fs::write(root.join("usr/bin/python3"), "").unwrap();
        symlink("/usr/bin/python3", root.join("opt/venv/bin/python3")).unwrap();
        let open = fs::Permissions::from_mode(0o777);
        fs::set_permissions(root.join("usr/local/bin"), open).unwrap();
        let store = Store::open(&root.join("home/store")).unwrap();
        let (mut session, mut tree) = (store.session().unwrap(), Tree::new());
        let request = CollectRequest::default();
        let mut ask = |_: &Question<'_>| unreachable!("nobody is asked");
        let mut progress = |_: Progress<'_>| {};
        let collector =
            Collector::new(&root, &mut session, &mut tree, &request, &mut ask, &mut progress);
        let is_choice = |interpreter: Option<&str>| {
            let mut wanted = RuntimeRequest::new("python3");
            wanted.interpreter = interpreter.map(PathBuf::from);
            let asked = interpreter.unwrap_or("/usr/bin/python3");
            collector.is_authors_choice(Path::new(asked), &wanted, "python3")
        };
        assert!(!is_choice(None));
        // Elsewhere than in root's own tests, all of the directories are somebody else's.
        let is_root = rustix::process::geteuid().is_root();
        for usual in ["/usr/bin/python3", "/bin/python3"] {
            assert_eq!(is_choice(Some(usual)), !is_root, "{usual}");
        }
        // A virtual environment has other packages, whatever its link leads to.
        for choice in [
            "/opt/venv/bin/python3",
            "/usr/bin/python3.11",
            "/usr/bin/rm",
            "/usr/local/bin/python3",
        ] {
            assert!(is_choice(Some(choice)), "{choice}");
        }
    }
}
