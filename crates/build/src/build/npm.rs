//! `npm ci` as the command of a build: it removes `node_modules` and installs all of it anew, also
//! where the same is there. It does not run where it would do again what it did before.
//!
//! That is known only where a lock file pins each package by a hash of its archive, and nobody's
//! scripts decide what lies in `node_modules`. Anything else is a doubt, and then it runs.

use super::command::Commands;
use super::installed::{Inputs, Stamp};
use super::locked::LOCK_MAX;
use super::{BuildEvent, OnEvent, Packages, Trust};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use thaw_home::beneath;
use thaw_home::home::HomeError;

/// Where npm installs.
const NODE_MODULES: &str = "node_modules";
/// The lock files that it goes by, the one that counts first.
const LOCKS: [&str; 2] = ["npm-shrinkwrap.json", "package-lock.json"];
/// Scripts of a project that `npm ci` runs (npm-ci(1), scripts(7)).
const SCRIPTS: [&str; 9] = [
    "preinstall",
    "install",
    "postinstall",
    "prepublish",
    "preprepare",
    "prepare",
    "postprepare",
    "dependencies",
    "postdependencies",
];
/// A project with this file has native code, which npm compiles.
const NATIVE: &str = "binding.gyp";
/// Options that say what is installed and how much is said, and nothing else.
const OPTIONS: [&str; 7] = [
    "--no-audit",
    "--no-fund",
    "--ignore-scripts",
    "--prefer-offline",
    "--production",
    "--silent",
    "--no-progress",
];
/// Options with a value, of which the same holds.
const OPTIONS_WITH_VALUE: [&str; 3] = ["--omit=", "--include=", "--loglevel="];
/// Directories with settings for all users: of npm itself, and of distributions.
const GLOBAL: [&str; 3] = ["/etc", "/usr/etc", "/usr/local/etc"];
/// Words in settings that have npm read others.
const ELSEWHERE: [&str; 3] = ["prefix", "globalconfig", "userconfig"];

/// An `npm ci` that may be left out.
pub(super) struct NpmCi<'a> {
    commands: &'a Commands<'a>,
    inputs: Inputs,
    stamp: Stamp,
    /// Packages that npm may do without, as paths in the function's directory.
    optional: Vec<PathBuf>,
}

impl<'a> NpmCi<'a> {
    /// The build command, if it is an `npm ci` in a sandbox: on the host, variables and settings decide
    /// of which Thaw knows nothing.
    pub fn of(commands: &'a Commands<'a>, command: &[String]) -> Result<Option<Self>, HomeError> {
        if !is_npm_ci(command) || commands.options.trust == Trust::Trusted {
            return Ok(None);
        }
        let stamp = Stamp::of(commands.home, commands.config.name.as_str(), "npm")?;
        let home = commands.kept("home");
        let mut inputs = Inputs::new();
        inputs.add("command", command.join("\0"));
        inputs.add("directory", commands.directory.as_os_str().as_bytes());
        for rule in &commands.settings().egress {
            inputs.add("egress", rule.to_string());
        }
        let optional = add_project(&mut inputs, commands.directory);
        add_programs(&mut inputs, &commands.search_path());
        match home {
            Ok(home) => add_settings(&mut inputs, &home, ".npmrc"),
            Err(_) => inputs.doubt("$HOME"),
        }
        Ok(Some(Self { commands, inputs, stamp, optional }))
    }

    /// Whether `node_modules` is what it would be.
    pub fn is_done(&self) -> bool {
        let may_keep = self.commands.options.packages == Packages::Kept;
        may_keep && self.node_modules().is_ok_and(|(_opened, place)| self.vouches(&place))
    }

    fn vouches(&self, place: &Path) -> bool {
        self.stamp.vouches(self.commands.home, &self.inputs, place)
    }

    /// What may change without a trace, so that it always runs.
    pub fn unknown(&self) -> Option<&str> {
        self.inputs.unknown()
    }

    /// It runs now.
    pub fn begin(&self) -> io::Result<()> {
        self.stamp.remove(self.commands.home)
    }

    /// It has run, and all is there.
    pub fn end(&self, on_event: &mut OnEvent<'_>) {
        let written = match self.node_modules() {
            // It goes on without what it may do without, also if only the network was at fault.
            Ok(_) if !self.is_whole() => Ok(()),
            Ok((_opened, place)) => self.stamp.write(self.commands.home, &self.inputs, &place),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            on_event(BuildEvent::Note(&format!(
                "{NODE_MODULES} is installed, but cannot be looked at ({error}): the next build \
                 installs it again"
            )));
        }
    }

    /// `node_modules`, with a path that leads there as long as it is open. It is no link.
    fn node_modules(&self) -> io::Result<(File, PathBuf)> {
        let path = self.commands.directory.join(NODE_MODULES);
        let opened = self.commands.open(&path)?;
        let place = beneath::place_of(&opened);
        Ok((opened, place))
    }

    fn is_whole(&self) -> bool {
        let Ok(directory) = beneath::open_directory(self.commands.directory) else { return false };
        self.optional.iter().all(|path| beneath::open(&directory, path).is_ok())
    }
}

/// Whether a command installs what a lock file says, and does nothing else.
fn is_npm_ci(command: &[String]) -> bool {
    let is_plain = |option: &String| {
        OPTIONS.contains(&option.as_str())
            || OPTIONS_WITH_VALUE.iter().any(|known| option.starts_with(known))
    };
    match command {
        [npm, ci, options @ ..] => npm == "npm" && ci == "ci" && options.iter().all(is_plain),
        _ => false,
    }
}

/// As much of a `package.json` as matters here.
#[derive(Deserialize)]
struct Project {
    #[serde(default)]
    scripts: BTreeMap<String, serde_json::Value>,
    workspaces: Option<serde_json::Value>,
}

/// As much of a lock file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Lock {
    lockfile_version: u32,
    #[serde(default)]
    packages: BTreeMap<String, Package>,
}

/// One package of it, by the place where it is installed.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Package {
    resolved: Option<serde_json::Value>,
    integrity: Option<String>,
    link: bool,
    in_bundle: bool,
    has_install_script: bool,
    optional: bool,
    dev_optional: bool,
    os: Option<Vec<String>>,
    cpu: Option<Vec<String>>,
    libc: Option<Vec<String>>,
}

impl Package {
    /// Whether its archive is one, whenever it is fetched, and its files are those of the archive.
    fn is_pinned(&self) -> bool {
        let is_fetched = match &self.resolved {
            None => true,
            Some(place) => place
                .as_str()
                .is_some_and(|place| place.starts_with("https://") || place.starts_with("http://")),
        };
        let has_hash = self.integrity.as_ref().is_some_and(|hash| hash.starts_with("sha"));
        !self.link && !self.has_install_script && (self.in_bundle || is_fetched && has_hash)
    }

    /// Whether npm goes on if it cannot fetch this one, although it is for this machine.
    fn may_be_missed(&self) -> bool {
        let fits = |all: &Option<Vec<String>>, own: &str| {
            all.as_ref().is_none_or(|all| {
                all.iter().any(|one| one == own || one == "any" || one.starts_with('!'))
            })
        };
        let fits = fits(&self.os, "linux") && fits(&self.cpu, "x64") && fits(&self.libc, "glibc");
        (self.optional || self.dev_optional) && !self.in_bundle && fits
    }
}

/// Adds what the project says; the packages that npm may do without.
fn add_project(inputs: &mut Inputs, directory: &Path) -> Vec<PathBuf> {
    add_settings(inputs, directory, ".npmrc");
    if std::fs::symlink_metadata(directory.join(NATIVE)).is_ok() {
        inputs.doubt(NATIVE);
    }
    match inputs.add_if_there(directory, "package.json", LOCK_MAX) {
        Some(text) => add_package(inputs, &text),
        None => inputs.doubt("package.json"),
    }
    let lock = LOCKS.into_iter().find_map(|name| {
        let text = inputs.add_if_there(directory, name, LOCK_MAX)?;
        Some((name, text))
    });
    match lock {
        Some((name, text)) => add_lock(inputs, name, &text),
        None => {
            inputs.doubt(LOCKS[1]);
            Vec::new()
        }
    }
}

fn add_package(inputs: &mut Inputs, text: &[u8]) {
    let Ok(project) = serde_json::from_slice::<Project>(text) else {
        return inputs.doubt("package.json");
    };
    if let Some(script) = SCRIPTS.into_iter().find(|name| project.scripts.contains_key(*name)) {
        inputs.doubt(&format!("the script {script}"));
    }
    if project.workspaces.is_some() {
        inputs.doubt("workspaces");
    }
}

fn add_lock(inputs: &mut Inputs, name: &str, text: &[u8]) -> Vec<PathBuf> {
    let lock = match serde_json::from_slice::<Lock>(text) {
        // Those of version 1 do not say which packages have scripts.
        Ok(lock) if [2, 3].contains(&lock.lockfile_version) => lock,
        _ => {
            inputs.doubt(name);
            return Vec::new();
        }
    };
    // The project itself has no name.
    let packages = || lock.packages.iter().filter(|(place, _)| !place.is_empty());
    if let Some((place, _)) = packages().find(|(_, package)| !package.is_pinned()) {
        inputs.doubt(place);
    }
    packages()
        .filter(|(_, package)| package.may_be_missed())
        .map(|(place, _)| PathBuf::from(place))
        .collect()
}

/// Adds settings in a directory, if they are there.
fn add_settings(inputs: &mut Inputs, directory: &Path, name: &str) {
    let Some(text) = inputs.add_if_there(directory, name, LOCK_MAX) else { return };
    let text = String::from_utf8_lossy(&text);
    if ELSEWHERE.iter().any(|word| text.contains(word)) {
        inputs.doubt(&directory.join(name).display().to_string());
    }
}

/// Adds each `node` and `npm` that the sandbox may find.
fn add_programs(inputs: &mut Inputs, search_path: &OsStr) {
    let found = |name: &str| {
        let all: Vec<PathBuf> = std::env::split_paths(search_path)
            .filter_map(|directory| directory.join(name).canonicalize().ok())
            .collect();
        all
    };
    let is_named = |path: &Path, names: &[&str]| {
        path.file_name().is_some_and(|own| names.iter().any(|name| own == *name))
    };
    let (nodes, npms) = (found("node"), found("npm"));
    if nodes.is_empty() || npms.is_empty() {
        inputs.doubt("npm");
    }
    for node in &nodes {
        inputs.add_program(node);
        // Another name is that of a program that chooses one.
        if !is_named(node, &["node", "nodejs"]) {
            inputs.doubt(&node.display().to_string());
        }
        let prefix = node.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
        add_settings(inputs, &prefix.join("etc"), "npmrc");
    }
    for npm in &npms {
        inputs.add_file_identity(npm);
        let itself = npm.parent().and_then(Path::parent);
        match itself.filter(|_| is_named(npm, &["npm-cli.js"])) {
            Some(itself) => {
                inputs.add_if_there(itself, "package.json", LOCK_MAX);
                add_settings(inputs, itself, "npmrc");
            }
            None => inputs.doubt(&npm.display().to_string()),
        }
    }
    for directory in GLOBAL {
        add_settings(inputs, Path::new(directory), "npmrc");
    }
}

#[cfg(test)]
mod tests {
    use super::super::BuildOptions;
    use super::*;
    use std::fs;
    use thaw_home::config::FunctionConfig;
    use thaw_home::home::Home;

    const LOCK: &str = r#"{"lockfileVersion": 3, "packages": {
        "": {"name": "x", "hasInstallScript": true},
        "node_modules/a": {"version": "1.0.0", "resolved": "https://registry.npmjs.org/a/-/a-1.0.0.tgz", "integrity": "sha512-AA=="},
        "node_modules/a/node_modules/b": {"version": "1.0.0", "inBundle": true},
        "node_modules/c": {"version": "1.0.0", "integrity": "sha512-AA==", "optional": true, "os": ["darwin"]}
    }}"#;

    /// A project whose packages were installed.
    struct Place {
        all: tempfile::TempDir,
        home: Home,
        config: FunctionConfig,
        options: BuildOptions,
        command: Vec<String>,
    }

    impl Place {
        fn new() -> Self {
            let all = tempfile::tempdir().unwrap();
            let path = all.path().canonicalize().unwrap();
            fs::create_dir_all(path.join("project/node_modules/a")).unwrap();
            fs::create_dir_all(path.join("home")).unwrap();
            let text = "name = \"f\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 81\n";
            let config = FunctionConfig::parse("thaw.toml".as_ref(), text).unwrap();
            let home = Home::at(path.join("home")).unwrap();
            let command = ["npm", "ci", "--omit=dev"].map(str::to_owned).into();
            let place = Self { all, home, config, options: BuildOptions::default(), command };
            place.put("package.json", "{\"scripts\": {\"start\": \"node a.js\"}}");
            place.put("package-lock.json", LOCK);
            place.put("node_modules/a/index.js", "1");
            place
        }

        fn project(&self) -> PathBuf {
            self.all.path().canonicalize().unwrap().join("project")
        }

        fn put(&self, name: &str, text: &str) {
            fs::write(self.project().join(name), text).unwrap();
        }

        /// Whether npm is left out, after it has run if it is `run`.
        fn is_done(&self, run: bool) -> bool {
            let directory = &self.project();
            let (home, config, options) = (&self.home, &self.config, &self.options);
            let commands = Commands { home, directory, config, options };
            let npm = NpmCi::of(&commands, &self.command).unwrap().unwrap();
            // Which programs this machine has is another matter.
            let mut inputs = Inputs::new();
            let optional = add_project(&mut inputs, directory);
            let npm = NpmCi { inputs, optional, ..npm };
            if run {
                npm.begin().unwrap();
                npm.end(&mut |_| {});
            }
            npm.is_done()
        }
    }

    #[test]
    fn npm_is_left_out_where_the_same_is_installed() {
        let mut place = Place::new();
        assert!(!place.is_done(false), "nobody has installed it");
        assert!(place.is_done(true) && place.is_done(false));
        place.options.packages = Packages::Fresh;
        assert!(!place.is_done(false));
        place.options.packages = Packages::Kept;
        for (name, text) in [
            ("package.json", "{}"),
            ("package-lock.json", &LOCK.replace("AA==", "AB==") as &str),
            (".npmrc", "omit=optional\n"),
            ("node_modules/a/index.js", "12"),
            ("node_modules/a/new.js", ""),
        ] {
            place.put(name, text);
            assert!(!place.is_done(false), "{name}");
            assert!(place.is_done(true), "{name}");
        }
        fs::remove_dir_all(place.project().join("node_modules/a")).unwrap();
        assert!(!place.is_done(false));
        fs::remove_dir_all(place.project().join("node_modules")).unwrap();
        assert!(!place.is_done(true));
        // A link to another one is not looked through.
        fs::create_dir(place.project().join("other")).unwrap();
        std::os::unix::fs::symlink("other", place.project().join("node_modules")).unwrap();
        assert!(!place.is_done(true));
    }

    #[test]
    fn an_installation_without_something_optional_is_not_whole() {
        let place = Place::new();
        place.put("package-lock.json", &LOCK.replace("darwin", "linux"));
        assert!(!place.is_done(true));
        fs::create_dir(place.project().join("node_modules/c")).unwrap();
        assert!(place.is_done(true));
    }

    #[test]
    fn what_may_change_without_a_trace_is_doubted() {
        let pinned = r#""resolved": "https://registry.npmjs.org/a/-/a-1.0.0.tgz", "integrity": "sha512-AA==""#;
        for (is_doubted, package) in [
            (false, pinned),
            (false, r#""integrity": "sha512-AA==""#),
            (true, r#""resolved": "git+ssh://git@example.org/a.git#0123""#),
            (true, r#""resolved": "file:a.tgz", "integrity": "sha512-AA==""#),
            (true, r#""resolved": "../a", "link": true"#),
            (true, r#""integrity": "sha512-AA==", "hasInstallScript": true"#),
            (true, r#""resolved": "https://example.org/a.tgz""#),
            (true, r#""version": "1.0.0""#),
        ] {
            let place = Place::new();
            assert!(LOCK.contains(pinned));
            place.put("package-lock.json", &LOCK.replace(pinned, package));
            assert_ne!(place.is_done(true), is_doubted, "{package}");
        }
        for (name, text) in [
            ("package.json", "{\"scripts\": {\"postinstall\": \"node b.js\"}}"),
            ("package.json", "{\"scripts\": {\"prepare\": \"husky\"}}"),
            ("package.json", "{\"workspaces\": [\"a\"]}"),
            ("package.json", "["),
            ("package-lock.json", "{\"lockfileVersion\": 1, \"dependencies\": {}}"),
            ("npm-shrinkwrap.json", "{}"),
            ("binding.gyp", "{}"),
        ] {
            let place = Place::new();
            place.put(name, text);
            assert!(!place.is_done(true), "{name} {text}");
        }
    }

    #[test]
    fn only_what_does_nothing_else_is_left_out() {
        let is = |line: &str| is_npm_ci(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(is("npm ci") && is("npm ci --omit=dev --no-audit --no-fund"));
        for line in
            ["npm", "npm install", "npm ci --prefix x", "npm ci --force", "./npm ci", "npm ci x"]
        {
            assert!(!is(line), "{line}");
        }
    }

    #[test]
    fn programs_that_choose_another_one_are_doubted() {
        let all = tempfile::tempdir().unwrap();
        let bin = all.path().join("bin");
        let modules = all.path().join("npm");
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(modules.join("bin")).unwrap();
        let put = |path: &Path, text: &str| fs::write(path, text).unwrap();
        put(&bin.join("node"), "\x7fELF1");
        put(&modules.join("bin/npm-cli.js"), "1");
        put(&modules.join("package.json"), "{\"version\": \"10.0.0\"}");
        std::os::unix::fs::symlink("../npm/bin/npm-cli.js", bin.join("npm")).unwrap();
        let known = || {
            let mut inputs = Inputs::new();
            add_programs(&mut inputs, bin.as_os_str());
            (inputs.hash(), inputs.unknown().map(str::to_owned))
        };
        let first = known();
        assert_eq!((first.1.as_ref(), &first), (None, &known()));
        put(&modules.join("package.json"), "{\"version\": \"11.0.0\"}");
        let second = known();
        assert!(second.1.is_none() && second != first);
        put(&modules.join("npmrc"), "prefix=/srv\n");
        assert!(known().1.is_some());
        fs::remove_file(modules.join("npmrc")).unwrap();
        fs::rename(bin.join("node"), bin.join("shim")).unwrap();
        assert!(known().1.is_some(), "there is no node");
        std::os::unix::fs::symlink("shim", bin.join("node")).unwrap();
        assert!(known().1.is_some(), "a shim");
        fs::remove_file(bin.join("node")).unwrap();
        put(&bin.join("node"), "\x7fELF1");
        fs::remove_file(bin.join("npm")).unwrap();
        put(&bin.join("npm"), "#!/bin/sh\n");
        assert!(known().1.is_some(), "a script");
    }
}
