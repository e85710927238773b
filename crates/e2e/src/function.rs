//! Functions for the tests, and stores with them built in.

use crate::binary::{build_directory, repository, thaw};
use crate::outcome::{Outcome, run, run_within};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long a build may take, which may install packages first.
const PATIENCE: Duration = Duration::from_secs(600);

/// A function's directory.
#[derive(Clone, Debug)]
pub enum Function {
    /// One of `examples/`.
    Example(&'static str),
    /// A Python program of `tests/guest/functions`, named like its file.
    Python(&'static str),
    /// The same with its own settings.
    PythonVariant {
        /// The program.
        program: &'static str,
        /// The function's name.
        name: &'static str,
        /// Top-level keys of `thaw.toml`.
        keys: &'static str,
    },
    /// A program of `tests/guest/functions`, with a thaw.toml made from its keys.
    Program {
        /// The program, relative to `tests/guest/functions`; or the absolute path of a file or
        /// directory that a test has made.
        source: &'static str,
        /// The function's name.
        name: &'static str,
        /// What `thaw.toml` says besides name and port.
        keys: String,
    },
    /// A directory of `tests/guest/functions`, with a thaw.toml of its own.
    Directory(&'static str),
    /// The same at an address of its own: the port 0 of its `listen` becomes this one.
    Listening(&'static str, u16),
    /// A program of `tests/guest/functions/sdk` beside the helper of its language.
    Sdk(Language),
    /// The program of an example under another name, with its own settings.
    Variant {
        /// The example that it is made from.
        example: &'static str,
        /// The function's name.
        name: &'static str,
        /// Top-level keys of `thaw.toml`, such as `isolation = "instance"`.
        keys: String,
        /// Keys of `[limits]`.
        limits: &'static str,
    },
}

/// A language that has a helper in `sdk/entrypoint`.
#[derive(Clone, Copy, Debug)]
pub struct Language {
    /// Name of the function.
    pub name: &'static str,
    /// The program in `tests/guest/functions/sdk`.
    pub program: &'static str,
    /// The helper in `sdk/entrypoint`.
    pub helper: &'static str,
    /// Where the helper goes, relative to the function's directory.
    pub place: &'static str,
    /// Further keys of `thaw.toml`: how it is built and run, and its `[runtime]`.
    pub keys: &'static str,
}

impl Language {
    /// The function's directory, below `work`.
    fn directory(&self, work: &Path) -> PathBuf {
        let directory = work.join(self.name);
        let helper = directory.join(self.place);
        fs::create_dir_all(helper.parent().expect("a directory")).expect("a directory");
        let program = repository().join("tests/guest/functions/sdk").join(self.program);
        fs::copy(program, directory.join(self.program)).expect("a copy of the program");
        let source = repository().join("sdk/entrypoint").join(self.helper);
        fs::copy(source, helper).expect("a copy of the helper");
        let text = format!(
            "name = \"{}\"\nport = 8080\nentry = {{ freeze = \"program\" }}\n{}\n",
            self.name, self.keys
        );
        fs::write(directory.join("thaw.toml"), text).expect("thaw.toml");
        directory
    }
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Example(name)
            | Self::Python(name)
            | Self::PythonVariant { name, .. }
            | Self::Program { name, .. }
            | Self::Directory(name)
            | Self::Listening(name, _)
            | Self::Sdk(Language { name, .. })
            | Self::Variant { name, .. } => name,
        }
    }

    /// The directory to build, made below `work` if need be.
    pub fn directory(&self, work: &Path) -> PathBuf {
        const PYTHON: &str = "kind = \"python3\"\ninterpreter = \"/usr/bin/python3\"";
        let python = |program: &str, name: &str, keys: &str| {
            let directory = work.join(name);
            fs::create_dir_all(&directory).expect("a directory");
            let program = format!("tests/guest/functions/{program}.py");
            fs::copy(repository().join(program), directory.join("app.py")).expect("a copy");
            let text = format!(
                "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
                 files = [\"app.py\"]\n{keys}\n[runtime]\n{PYTHON}\n"
            );
            fs::write(directory.join("thaw.toml"), text).expect("thaw.toml");
            directory
        };
        let (example, name, keys, limits) = match self {
            Self::Example(name) => return repository().join("examples").join(name),
            Self::Python(name) => return python(name, name, ""),
            Self::PythonVariant { program, name, keys } => return python(program, name, keys),
            Self::Program { source, name, keys } => {
                let directory = work.join(name);
                fs::create_dir_all(&directory).expect("a directory");
                let program = repository().join("tests/guest/functions").join(source);
                run(Command::new("cp").arg("-rL").arg(&program).arg(&directory)).success();
                let text = format!("name = \"{name}\"\nport = 8080\n{keys}\n");
                fs::write(directory.join("thaw.toml"), text).expect("thaw.toml");
                return directory;
            }
            Self::Sdk(language) => return language.directory(work),
            Self::Directory(name) => return repository().join("tests/guest/functions").join(name),
            Self::Listening(name, port) => {
                let source = repository().join("tests/guest/functions").join(name);
                run(Command::new("cp").arg("-r").arg(&source).arg(work)).success();
                let directory = work.join(name);
                let text = fs::read_to_string(directory.join("thaw.toml")).expect("thaw.toml");
                let text = text.replace("127.0.0.1:0", &format!("127.0.0.1:{port}"));
                fs::write(directory.join("thaw.toml"), text).expect("thaw.toml");
                return directory;
            }
            Self::Variant { example, name, keys, limits } => (example, name, keys, limits),
        };
        let directory = work.join(name);
        fs::create_dir_all(&directory).expect("a directory");
        let from = repository().join("examples").join(example);
        let lock;
        let (file, place, command, runtime) = match *example {
            "hello-python" => (from.join("app.py"), "app.py", r#"["python3", "app.py"]"#, PYTHON),
            _ => {
                // Builds of the example in other tests wait for this lock, too.
                lock = File::open(&from).expect("the example's directory");
                lock.lock().expect("a lock");
                let made = run(Command::new("make").arg("-C").arg(&from));
                assert_eq!(made.code, Some(0), "{}", made.stderr);
                (from.join("build/hello"), "hello", r#"["/app/hello"]"#, "kind = \"binary\"")
            }
        };
        fs::copy(&file, directory.join(place)).expect("a copy of the program");
        let text = format!(
            "name = \"{name}\"\ncommand = {command}\nport = 8080\nfiles = [\"{place}\"]\n{keys}\n\
             [runtime]\n{runtime}\n[limits]\n{limits}\n"
        );
        fs::write(directory.join("thaw.toml"), text).expect("thaw.toml");
        directory
    }

    /// Builds it into a store.
    pub fn build(&self, home: &Path) -> Outcome {
        let work = tempfile::tempdir().expect("a temporary directory");
        let directory = self.directory(work.path());
        // Where the host enforces limits, that changes nothing.
        let mut build = thaw();
        build.env("THAW_HOME", home).args(["build", "--weak-limits", "--no-compare"]);
        build.arg(directory);
        run_within(PATIENCE, &mut build, b"")
    }
}

/// The homes of this test program: `scripts/run-tests` removes them when it has passed, since all of
/// them together take 20 GB.
fn homes() -> PathBuf {
    let program = std::env::current_exe().expect("a program");
    let name = program.file_stem().and_then(|name| name.to_str()).expect("a name");
    let name = name.rsplit_once('-').map_or(name, |(name, _hash)| name);
    build_directory().join("homes").join(name)
}

/// A fresh `THAW_HOME` below the build directory with these functions built; an
/// older one with the same label is removed.
pub fn built_home(label: &str, functions: &[Function]) -> PathBuf {
    let home = homes().join(label);
    if home.exists() {
        fs::remove_dir_all(&home).expect("the old home is removable");
    }
    fs::create_dir_all(&home).expect("a home");
    for function in functions {
        let outcome = function.build(&home);
        assert_eq!(
            outcome.code,
            Some(0),
            "thaw build {} failed\n{}\n{}",
            function.name(),
            outcome.stdout,
            outcome.stderr
        );
    }
    home
}

/// A copy of a home, for a test that damages it.
pub fn copy_home(home: &Path, label: &str) -> PathBuf {
    let copy = homes().join(label);
    if copy.exists() {
        fs::remove_dir_all(&copy).expect("the old copy is removable");
    }
    fs::create_dir_all(homes()).expect("a directory");
    run(Command::new("cp").args(["-a", "--reflink=auto"]).arg(home).arg(&copy)).success();
    copy
}

/// A home with the function `box`: a sandbox without a program of its own, with these programs of the
/// host, and lines for its `[limits]`.
pub fn home_with_box(
    label: &str,
    functions: &[Function],
    programs: &[&str],
    limits: &str,
) -> PathBuf {
    let home = built_home(label, functions);
    let directory = home.with_extension("box");
    fs::create_dir_all(&directory).expect("a directory");
    let configuration = format!(
        "name = \"box\"\nisolation = \"instance\"\npersist = true\n[entry]\nkind = \"sandbox\"\n\
         [runtime]\nkind = \"python3\"\nprograms = {programs:?}\n[limits]\ninstances = 50\n{limits}\n"
    );
    fs::write(directory.join("thaw.toml"), configuration).expect("a file");
    run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
    home
}

/// The prefetch file of some function, which is stored in the background after its first request.
pub fn prefetch_file(home: &Path) -> Option<PathBuf> {
    let files = fs::read_dir(home.join("store/images")).expect("images");
    let mut paths = files.map(|file| file.expect("an entry").path());
    paths.find(|path| path.extension().is_some_and(|extension| extension == "prefetch"))
}
