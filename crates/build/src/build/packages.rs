//! `requirements`: Python packages, installed by `pip`, which runs code of theirs.

use super::OnEvent;
use super::command::{Commands, Task};
use super::import::ImportFailure;
use super::installed::{Inputs, Stamp};
use super::locked::{LOCK_MAX, LockFile, Locked, PYPI_DESTINATIONS};
use super::{BuildEvent, Packages, Trust, poetry};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use thaw_home::beneath;
use thaw_home::config::{EgressRule, RuntimeConfig};
use thaw_home::home::Home;
use thaw_sandbox::BoundAccess;
use thaw_store::collect::{Question, ask_on_host};

/// What the stamp of these packages is called, and the directory where they lie.
const KIND: &str = "packages";
/// The file that describes a project.
const PYPROJECT: &str = "pyproject.toml";
/// Most bytes of one that are read.
const PYPROJECT_MAX: u64 = 1 << 20;

/// An interpreter that runs `pip`, and where its installation lies.
struct Interpreter {
    program: OsString,
    shown: Vec<PathBuf>,
}

/// Waits until no other build installs packages where this one's lie, or imports them from there, until
/// the result is dropped.
pub(super) fn alone(
    commands: &Commands<'_>,
    on_event: &mut OnEvent<'_>,
) -> Result<Option<File>, ImportFailure> {
    let work = commands.home.work(commands.config.name.as_str())?;
    let open = || commands.open(&work);
    Ok(super::alone_in(&work, open, on_event))
}

/// Installs what `requirements` names; the directory that has it then, which is kept
/// from build to build, with its path. Where `pip` would do again what it did before, it does not run.
pub(super) fn install(
    commands: &Commands<'_>,
    runtime: &RuntimeConfig,
    requirements: &Path,
    on_event: &mut OnEvent<'_>,
) -> Result<(File, PathBuf), ImportFailure> {
    let failed = |failure| ImportFailure::Pip {
        requirements: requirements.to_owned(),
        failure,
        trust: commands.options.trust,
    };
    let io_failed = |error: io::Error| failed(error.into());
    let target = commands.kept(KIND).map_err(io_failed)?;
    let opened = commands.open(&target).map_err(io_failed)?;
    let installed = beneath::place_of(&opened);
    let stamp = Stamp::of(commands.home, commands.config.name.as_str(), KIND)?;
    let mut interpreter = interpreter(commands, runtime).map_err(io_failed)?;
    if !requirements.starts_with(commands.directory) {
        interpreter.shown.push(requirements.to_owned());
    }
    let mut inputs = Inputs::new();
    let written = commands.kept("locked").map_err(io_failed)?;
    let wanted = match LockFile::of(requirements) {
        Some(file) => {
            let locked = locked(commands, file, requirements)?;
            inputs.add("locked", locked.text());
            wanted_exactly(commands, &locked, &written).map_err(io_failed)?
        }
        None => wanted(commands, requirements, &mut inputs, on_event)?,
    };
    add_surroundings(commands, &interpreter, &mut inputs).map_err(io_failed)?;
    if commands.options.packages == Packages::Kept
        && stamp.vouches(commands.home, &inputs, &installed)
    {
        on_event(BuildEvent::Stage("keeping the Python packages of the build before"));
        if !inputs.is_pinned() {
            on_event(BuildEvent::Note(
                "the Python packages are those of the build before; `thaw build --fresh-packages` \
                 installs the newest that the requirements allow",
            ));
        }
        return Ok((opened, target));
    }
    let stage = match inputs.unknown() {
        None => "installing Python packages".to_owned(),
        Some(what) => format!(
            "installing Python packages (at every build, since `{}` may change)",
            thaw_sandbox::escape(what.as_bytes())
        ),
    };
    on_event(BuildEvent::Stage(&stage));
    stamp.remove(commands.home).map_err(io_failed)?;
    empty(&installed).map_err(io_failed)?;
    if wanted.is_empty() {
        return Ok((opened, target));
    }
    let settings = commands.settings();
    let index: Vec<EgressRule> =
        PYPI_DESTINATIONS.iter().map(|rule| rule.parse().expect("it is a destination")).collect();
    let options =
        ["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--upgrade"];
    let paths: [OsString; 2] = ["--target".into(), target.clone().into()];
    let task = Task {
        from: "pip",
        arguments: [interpreter.program]
            .into_iter()
            .chain(options.map(OsString::from))
            .chain(paths)
            .chain(wanted)
            .collect(),
        cwd: commands.directory,
        egress: if settings.egress.is_empty() { &index } else { &settings.egress },
        shown: interpreter.shown,
        bound: vec![
            (commands.directory, BoundAccess::Read),
            (written.as_path(), BoundAccess::Read),
            (target.as_path(), BoundAccess::Write),
        ],
        timeout: settings.timeout.0,
    };
    commands.run(&task, on_event).map_err(failed)?;
    vouch(&stamp, commands.home, &inputs, &installed, on_event);
    Ok((opened, target))
}

/// Adds what decides besides the requirements: the interpreter, settings of `pip`, and where it
/// runs.
fn add_surroundings(
    commands: &Commands<'_>,
    interpreter: &Interpreter,
    inputs: &mut Inputs,
) -> io::Result<()> {
    inputs.add_program(Path::new(&interpreter.program));
    inputs.add("interpreter", interpreter.program.as_bytes());
    let settings = commands.settings();
    for rule in &settings.egress {
        inputs.add("egress", rule.to_string());
    }
    for tools in &commands.options.tools {
        inputs.add("tools", tools.as_os_str().as_bytes());
    }
    let mut homes = vec![commands.kept("home")?];
    let mut places = Vec::new();
    if commands.options.trust == Trust::Trusted {
        inputs.add("trust", "host");
        homes = std::env::home_dir().into_iter().collect();
        places = places_of_settings(commands.directory, |name| std::env::var_os(name));
        for (name, value) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            let is_place =
                name.ends_with("_INDEX_URL") && value.to_string_lossy().starts_with("http");
            match name.starts_with("PIP_") {
                true if is_place => inputs.add(&name, value.as_bytes()),
                true => inputs.doubt(&name),
                false => {}
            }
        }
    }
    for home in homes {
        inputs.add_settings(&home, ".config/pip/pip.conf");
        inputs.add_settings(&home, ".pip/pip.conf");
    }
    for place in places {
        inputs.add_settings(&place, "pip/pip.conf");
    }
    inputs.add_settings(Path::new("/etc"), "pip.conf");
    inputs.add_settings(Path::new("/etc"), "xdg/pip/pip.conf");
    for prefix in &interpreter.shown {
        inputs.add("prefix", prefix.as_os_str().as_bytes());
        if prefix.is_dir() {
            inputs.add_settings(prefix, "pip.conf");
        }
    }
    Ok(())
}

/// Where `pip` finds settings on this host by variables of the XDG Base Directory Specification; relative
/// ones are meant from where it runs.
fn places_of_settings(
    directory: &Path,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Vec<PathBuf> {
    let own = variable("XDG_CONFIG_HOME").into_iter().map(PathBuf::from);
    let all = variable("XDG_CONFIG_DIRS").unwrap_or_default();
    own.chain(std::env::split_paths(&all))
        .filter(|place| !place.as_os_str().is_empty())
        .map(|place| directory.join(place))
        .collect()
}

/// Vouches for what was installed. Where that cannot be looked at, the build goes on all the same, and
/// the next one has it installed again.
fn vouch(
    stamp: &Stamp,
    home: &Home,
    inputs: &Inputs,
    installed: &Path,
    on_event: &mut OnEvent<'_>,
) {
    if let Err(error) = stamp.write(home, inputs, installed) {
        on_event(BuildEvent::Note(&format!(
            "the Python packages are installed, but cannot be looked at ({error}): the next build \
             installs them again"
        )));
    }
}

/// Arguments of `pip` that say what to install: a requirements file, or the dependencies of the
/// project that a pyproject.toml describes, and not the project itself, whose files the function
/// has anyhow.
fn wanted(
    commands: &Commands<'_>,
    requirements: &Path,
    inputs: &mut Inputs,
    on_event: &mut OnEvent<'_>,
) -> Result<Vec<OsString>, ImportFailure> {
    if requirements.file_name() != Some(PYPROJECT.as_ref()) {
        let (directory, path) = match requirements.strip_prefix(commands.directory) {
            Ok(path) => (commands.directory, path),
            // A path without links, of a file.
            Err(_) => (
                requirements.parent().unwrap_or(Path::new("/")),
                Path::new(requirements.file_name().unwrap_or_default()),
            ),
        };
        inputs.add_file(directory, path);
        return Ok(vec!["--requirement".into(), requirements.into()]);
    }
    let unusable =
        |reason: String| ImportFailure::Pyproject { path: requirements.to_owned(), reason };
    let read = File::open(requirements).and_then(|file| {
        let mut text = String::new();
        file.take(PYPROJECT_MAX).read_to_string(&mut text).map(|_| text)
    });
    let text = read.map_err(|error| unusable(error.to_string()))?;
    let dependencies = dependencies(&text).map_err(unusable)?;
    let has = |file: &LockFile| requirements.with_file_name(file.name()).is_file();
    if let Some(file) = LockFile::ALL.into_iter().find(has) {
        on_event(BuildEvent::Note(&format!(
            "the versions are those that pyproject.toml allows; set `requirements` in [runtime] to \"{}\" \
             to have those of that file",
            file.name()
        )));
    }
    dependencies.iter().for_each(|line| inputs.add_line(line));
    // What follows is no option, whatever the file says.
    let all = dependencies.into_iter().map(OsString::from);
    Ok(match all.len() {
        0 => Vec::new(),
        _ => [OsString::from("--")].into_iter().chain(all).collect(),
    })
}

/// What a lock file of the function's directory has `pip` install, if that may connect to where
/// it is.
fn locked(commands: &Commands<'_>, file: LockFile, path: &Path) -> Result<Locked, ImportFailure> {
    let unusable = |reason: String| ImportFailure::Pyproject { path: path.to_owned(), reason };
    // The pyproject.toml beside it is read, too, which may be somebody else's.
    let inside = path.strip_prefix(commands.directory).map_err(|_| {
        unusable(
            "it is not in the function's directory; put it there, with its pyproject.toml"
                .to_owned(),
        )
    })?;
    let directory =
        beneath::open_directory(commands.directory).map_err(|error| unusable(error.to_string()))?;
    let text = |path: &Path, max: u64| {
        let read = beneath::read(&directory, path, max);
        let read = read.and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other));
        read.map_err(|error| error.to_string())
    };
    let lock = text(inside, LOCK_MAX).map_err(unusable)?;
    let project = text(&inside.with_file_name(PYPROJECT), PYPROJECT_MAX);
    let project =
        project.map_err(|why| unusable(format!("its {PYPROJECT} is needed, too: {why}")))?;
    let locked = Locked::read(file, &lock, &project).map_err(unusable)?;
    // Of rules of the author's own, the sandbox says which one is missing.
    let has_rules = !commands.settings().egress.is_empty();
    let is_allowed = |destination: &str| has_rules || PYPI_DESTINATIONS.contains(&destination);
    let all: Vec<&str> = locked.destinations.iter().map(String::as_str).collect();
    if commands.options.trust == Trust::Untrusted
        && let Some(missing) = all.iter().find(|destination| !is_allowed(destination))
    {
        return Err(unusable(format!(
            "it has packages of {missing}, which `pip` may not connect to; write `egress = {all:?}` below \
             [build] in thaw.toml"
        )));
    }
    Ok(locked)
}

/// Removes what builds before have installed: the requirements name all that is there. Files of
/// it may be root's, whoever owns the home; so they are removed with all rights, but only below the
/// open directory that `installed` stands for, wherever the home's owner has put links.
fn empty(installed: &Path) -> io::Result<()> {
    for entry in fs::read_dir(installed)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

/// Arguments of `pip` for what a lock file says, which is written into `directory`. `pip` refuses
/// what has another hash, and installs nothing that no line names.
fn wanted_exactly(
    commands: &Commands<'_>,
    locked: &Locked,
    directory: &Path,
) -> io::Result<Vec<OsString>> {
    if locked.names.is_empty() {
        return Ok(Vec::new());
    }
    let path = directory.join("requirements.txt");
    let _acting = commands.home.act().map_err(|error| io::Error::other(error.to_string()))?;
    fs::write(&path, locked.text())?;
    let options = ["--no-deps", "--require-hashes", "--requirement"].map(OsString::from);
    Ok(options.into_iter().chain([path.into()]).collect())
}

/// The dependencies of a project by the text of its pyproject.toml: those of `[project]` (PEP 621),
/// or of Poetry's own table.
///
/// # Errors
/// It is not TOML, or `pip` could not install one of them.
pub(crate) fn dependencies(text: &str) -> Result<Vec<String>, String> {
    let table: toml::Table = text.parse().map_err(|error| format!("{error}"))?;
    let list = table.get("project").and_then(|project| project.get("dependencies"));
    let poetry = table.get("tool").and_then(|tool| tool.get("poetry"));
    if let (None, Some(poetry)) = (list, poetry.and_then(toml::Value::as_table)) {
        return poetry::dependencies(poetry);
    }
    let list = list.and_then(toml::Value::as_array);
    Ok(list.into_iter().flatten().filter_map(|item| item.as_str().map(str::to_owned)).collect())
}

/// The interpreter that the function's author has named, or the one in this process's
/// search path, with the directories that it was installed in.
fn interpreter(commands: &Commands<'_>, runtime: &RuntimeConfig) -> io::Result<Interpreter> {
    if let Some(named) = &runtime.interpreter {
        let program = commands.directory.join(named).into();
        return Ok(Interpreter { program, shown: Vec::new() });
    }
    let script = "import sys; print(sys.executable, sys.prefix, sys.base_prefix, sep='\\n')";
    let arguments = ["-I", "-c", script];
    let question =
        Question { interpreter: Path::new("python3"), arguments: &arguments, named: false };
    let answer = ask_on_host(&question)?;
    let text = String::from_utf8_lossy(&answer.stdout).into_owned();
    let mut paths = text.lines().map(PathBuf::from).filter(|path| path.is_absolute());
    let Some(program) = paths.next().filter(|_| answer.status.success()) else {
        return Err(io::Error::other("python3 does not say where it lies"));
    };
    // The whole host is nobody's installation.
    let shown = paths.filter(|path| path.components().count() > 1).collect();
    Ok(Interpreter { program: program.into(), shown })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_that_cannot_be_listed_fail_no_build() {
        let all = tempfile::tempdir().unwrap();
        let home = Home::at(all.path()).unwrap();
        let target = home.kept("f", "packages").unwrap();
        let stamp = Stamp::of(&home, "f", KIND).unwrap();
        let inputs = Inputs::new();
        let vouched = |path: &Path| {
            let mut notes = Vec::new();
            vouch(&stamp, &home, &inputs, path, &mut |event| {
                if let BuildEvent::Note(note) = event {
                    notes.push(note.to_owned());
                }
            });
            (notes, stamp.vouches(&home, &inputs, &target))
        };
        assert_eq!(vouched(&target), (Vec::new(), true));
        // What was written before vouches for nothing any more.
        let (notes, is_vouched) = vouched(&target.join("none"));
        assert!(notes[0].contains("the next build installs them again"), "{notes:?}");
        assert_eq!((notes.len(), is_vouched), (1, false));
    }

    #[test]
    fn settings_are_looked_for_where_variables_say() {
        let places = |own: &str, all: &str| {
            places_of_settings(Path::new("/f"), |name| match name {
                "XDG_CONFIG_HOME" => Some(own.into()),
                "XDG_CONFIG_DIRS" => Some(all.into()),
                _ => None,
            })
        };
        assert_eq!(places("", ""), Vec::<PathBuf>::new());
        let all = ["/own", "/f/x", "/etc/xdg"].map(PathBuf::from);
        assert_eq!(places("/own", "x::/etc/xdg"), all);
    }
}
