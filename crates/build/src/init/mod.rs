//! `thaw init`: what a directory holds, and the `thaw.toml` that builds and serves it.
//!
//! A language is known by its own files (`go.mod`, `package.json` …). What is found becomes a
//! [`Project`], and that the commented text of a `thaw.toml` ([`Project::to_toml`]), which says
//! everything visibly: nothing is derived later that the file does not say.

mod deno;
mod elixir;
mod go;
mod gradle;
mod java;
mod look;
mod made;
mod native;
mod nginx;
mod node;
mod node_packages;
mod perl;
mod php;
mod python;
mod python_app;
mod ruby;
mod starter;
mod toml_text;

pub use starter::{Starter, make_starter};

use look::Look;
use serde::Serialize;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use thaw_home::config::{CONFIG_FILE, ConfigError, FunctionConfig, FunctionName, NameError};

/// The port of a function whose program does not say another one.
const PORT_DEFAULT: u16 = 8080;

/// A language that `thaw init` knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Language {
    /// `requirements.txt`, `pyproject.toml`, or programs in Python.
    Python,
    /// `package.json`, or a server in JavaScript.
    Node,
    /// `go.mod`.
    Go,
    /// `pom.xml`, files of Gradle, or classes with a `main` beside each other.
    Java,
    /// `Gemfile`, `config.ru`, or a program in Ruby.
    Ruby,
    /// `composer.json`, or `index.php`.
    Php,
    /// `deno.json` or `deno.jsonc`.
    Deno,
    /// `mix.exs`.
    Elixir,
    /// `app.psgi`, or a program in Perl.
    Perl,
    /// `Cargo.toml`.
    Rust,
    /// A `CMakeLists.txt` or a `Makefile` with sources in C, or one file in C.
    C,
    /// The same in C++.
    Cpp,
    /// `nginx.conf`.
    Nginx,
    /// An executable file.
    Binary,
}

impl Language {
    /// All of them: those with a file of their own that names what they depend on come first,
    /// and Node.js behind the others, whose projects often have a `package.json` for a browser. An `nginx.conf`
    /// often lies beside a program that is behind it, so nginx is the last one.
    pub const ALL: [Self; 14] = [
        Self::Go,
        Self::Rust,
        Self::Elixir,
        Self::Java,
        Self::Ruby,
        Self::Php,
        Self::Python,
        Self::Deno,
        Self::Node,
        Self::Perl,
        Self::C,
        Self::Cpp,
        Self::Binary,
        Self::Nginx,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "node",
            Self::Go => "go",
            Self::Java => "java",
            Self::Ruby => "ruby",
            Self::Php => "php",
            Self::Deno => "deno",
            Self::Elixir => "elixir",
            Self::Perl => "perl",
            Self::Rust => "rust",
            Self::C => "c",
            Self::Cpp => "cpp",
            Self::Nginx => "nginx",
            Self::Binary => "binary",
        }
    }

    /// Its name for people.
    fn title(self) -> &'static str {
        match self {
            Self::Python => "Python",
            Self::Node => "Node.js",
            Self::Go => "Go",
            Self::Java => "Java",
            Self::Ruby => "Ruby",
            Self::Php => "PHP",
            Self::Deno => "Deno",
            Self::Elixir => "Elixir",
            Self::Perl => "Perl",
            Self::Rust => "Rust",
            Self::C => "C",
            Self::Cpp => "C++",
            Self::Nginx => "nginx",
            Self::Binary => "a program",
        }
    }

    /// The file that names what a program of it depends on, if the directory has one.
    fn manifest(self, look: &Look) -> Option<&'static str> {
        let candidates: &[&'static str] = match self {
            Self::Python => &["requirements.txt", "pyproject.toml", "manage.py"],
            Self::Node => &["package.json"],
            Self::Go => &["go.mod"],
            Self::Java => &[
                "pom.xml",
                gradle::BUILD_FILES[0],
                gradle::BUILD_FILES[1],
                gradle::SETTINGS_FILES[0],
                gradle::SETTINGS_FILES[1],
            ],
            Self::Ruby => &["Gemfile", "config.ru"],
            Self::Php => &["composer.json"],
            Self::Rust => &["Cargo.toml"],
            Self::Deno => &deno::MANIFESTS,
            Self::Elixir => &["mix.exs"],
            Self::Perl => &[perl::PSGI],
            Self::C | Self::Cpp | Self::Nginx | Self::Binary => &[],
        };
        candidates.iter().copied().find(|name| look.has(name))
    }

    fn read(self, look: &Look, project: &mut Project) -> Result<(), InitError> {
        match self {
            Self::Python => python::read(look, project),
            Self::Node => node::read(look, project),
            Self::Go => go::read(look, project),
            Self::Java => java::read(look, project),
            Self::Ruby => ruby::read(look, project),
            Self::Php => php::read(look, project),
            Self::Deno => deno::read(look, project),
            Self::Elixir => elixir::read(look, project),
            Self::Perl => perl::read(look, project),
            Self::Rust => native::read_rust(look, project),
            Self::C | Self::Cpp => made::read(look, project, self),
            Self::Nginx => nginx::read(look, project),
            Self::Binary => native::read_binary(look, project),
        }
    }
}

impl fmt::Display for Language {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Language {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = Self::ALL.map(Self::name);
        Self::ALL.into_iter().find(|language| language.name() == text).ok_or_else(|| {
            format!("`{text}` is not a language that it knows; give one of {}", all.join(", "))
        })
    }
}

/// A command that makes files of a function, and where it gets them from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BuildStep {
    /// What it does, for people.
    pub why: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Destinations that it connects to.
    pub egress: Vec<String>,
}

/// A file of the function and its place in the sandbox, if that is not below `/app`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProjectFile {
    /// Relative to the directory.
    pub from: String,
    /// Absolute.
    pub to: String,
}

/// What was found in a directory: all that its `thaw.toml` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Project {
    /// The function's name.
    pub name: String,
    /// The language.
    pub language: Language,
    /// What was found, for people: `requirements.txt`, `Flask`.
    pub found: Vec<String>,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Where it listens.
    pub port: u16,
    /// Where the port is from, for people.
    pub port_from: String,
    /// The files that the function has; empty: all of the directory.
    pub files: Vec<ProjectFile>,
    /// `kind` of `[runtime]`.
    pub kind: &'static str,
    /// Further keys of `[runtime]`, as TOML.
    pub runtime: Vec<(&'static str, String)>,
    /// Variables.
    pub env: Vec<(String, String)>,
    /// Keys of `[limits]`, as TOML.
    pub limits: Vec<(&'static str, String)>,
    /// `[build]`.
    pub build: Option<BuildStep>,
    /// What somebody should look at, a sentence each.
    pub notes: Vec<String>,
}

/// Why nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The directory does not exist.
    #[error("{} is not a directory; name the directory that has your program", .0.display())]
    NoDirectory(PathBuf),
    /// There is a file already.
    #[error("{} is there already; --force replaces it", .0.display())]
    Exists(PathBuf),
    /// A directory for something new is in use.
    #[error("{} is not empty; give a new NAME", .0.display())]
    NotEmpty(PathBuf),
    /// Nothing is known about what the directory holds.
    #[error(
        "found no program in {} that it knows: no requirements.txt, pyproject.toml, package.json, deno.json, \
         go.mod, pom.xml, build.gradle, Gemfile, config.ru, composer.json, Cargo.toml, mix.exs, app.psgi, nginx.conf, \
         no CMakeLists.txt or Makefile with sources in C or C++, no server in Python, JavaScript, Ruby, PHP, Java, Perl, C or C++, and no \
         executable file; go to the program's own directory, begin with \
         `thaw init --template LANGUAGE NAME`, or write {CONFIG_FILE} by hand (docs/thaw-toml.md)", .0.display()
    )]
    Unknown(PathBuf),
    /// The same, but for the recipe of a container image.
    #[error(
        "found no program in {} that it knows, but a {file}: build its image with your tool and import it, as in \
         `docker build -t {name} . && docker save -o {name}.tar {name} && thaw import {name}.tar {name}`, and write \
         {CONFIG_FILE} with the three lines `name = \"{name}\"`, `[runtime]` and `image = \"{name}\"`, since the image \
         says the rest (docs/containers.md)", directory.display()
    )]
    ImageOnly {
        /// The directory.
        directory: PathBuf,
        /// The recipe.
        file: &'static str,
        /// The function's name.
        name: String,
    },
    /// A file cannot be used.
    #[error("cannot use {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and the way out.
        reason: String,
    },
    /// The directory's name is none for a function.
    #[error("`{name}` cannot name a function ({reason}); give one with --name")]
    Name {
        /// The name.
        name: String,
        /// Why.
        reason: NameError,
    },
    /// What was found makes no sense together.
    #[error(
        "what was found makes no usable {CONFIG_FILE}: {0}; write it by hand (docs/thaw-toml.md)"
    )]
    Contradiction(#[from] ConfigError),
    /// The system refused something.
    #[error("cannot write {} ({error})", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// Finds out what a directory holds. `language`: one that the caller knows better; `name`: of the
/// function, otherwise that of the directory.
///
/// # Errors
/// Nothing is known about it, or one of its files cannot be used.
pub fn detect(
    directory: &Path,
    language: Option<Language>,
    name: Option<&FunctionName>,
) -> Result<Project, InitError> {
    let look = Look::at(directory)?;
    let name = match name {
        Some(name) => name.to_string(),
        None => name_of(look.directory())?,
    };
    let chosen = language.or_else(|| language_of(&look));
    let language = chosen.ok_or_else(|| unknown(&look, &name))?;
    let mut project = Project::new(name, language);
    language.read(&look, &mut project)?;
    project.adds_data(&look);
    let others = Language::ALL.into_iter().filter(|other| *other != language);
    for (other, manifest) in others.filter_map(|other| Some((other, other.manifest(&look)?))) {
        project.notes.push(format!(
            "there is {manifest}, too; if the server is in {}, run `thaw init --language {other} --force`",
            other.title()
        ));
    }
    if let Some(recipe) = look.first_of(&RECIPES) {
        project.notes.push(format!(
            "there is a {recipe}, too; a container image can be a function as it is (docs/containers.md)"
        ));
    }
    project.check(look.directory())?;
    Ok(project)
}

/// Files that say how a container image is built.
const RECIPES: [&str; 2] = ["Dockerfile", "Containerfile"];

/// Nothing is known of a directory, but perhaps the way on.
fn unknown(look: &Look, name: &str) -> InitError {
    let directory = look.directory().to_owned();
    match look.first_of(&RECIPES) {
        Some(file) => InitError::ImageOnly { directory, file, name: name.to_owned() },
        None => InitError::Unknown(directory),
    }
}

/// Writes the `thaw.toml` of a project into its directory; its path.
///
/// # Errors
/// There is one already and `replace` is not set, or it cannot be written.
pub fn write(directory: &Path, project: &Project, replace: Replace) -> Result<PathBuf, InitError> {
    let path = directory.join(CONFIG_FILE);
    let failed = |error| InitError::Write { path: path.clone(), error };
    if replace == Replace::Yes {
        // The one that is there stays until all of the new one is. A link is replaced, not followed.
        let beside = directory.join(format!(".{CONFIG_FILE}.{}", std::process::id()));
        let written =
            File::options().write(true).create_new(true).open(&beside).and_then(|mut file| {
                file.write_all(project.to_toml().as_bytes())?;
                std::fs::rename(&beside, &path)
            });
        if let Err(error) = written {
            // It may not have come into being.
            let _ = std::fs::remove_file(&beside);
            return Err(failed(error));
        }
        return Ok(path);
    }
    let mut options = File::options();
    let mut file = match options.write(true).create_new(true).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(InitError::Exists(path));
        }
        Err(error) => return Err(failed(error)),
    };
    file.write_all(project.to_toml().as_bytes()).map_err(failed)?;
    Ok(path)
}

/// Whether a file that is there may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace {
    /// It is kept, and that is an error.
    No,
    /// It may.
    Yes,
}

/// Directories beside a program that it is likely to read while it runs.
const DATA: [&str; 10] = [
    "assets",
    "config",
    "data",
    "locales",
    "migrations",
    "public",
    "static",
    "templates",
    "views",
    "web",
];

/// The language of a directory: that of a manifest, or else that of a program.
fn language_of(look: &Look) -> Option<Language> {
    let is_meant = |language: &Language| *language != Language::Deno || !deno::is_beside_node(look);
    let known = Language::ALL.into_iter().filter(|language| language.manifest(look).is_some());
    let by_manifest = known.clone().find(is_meant).or_else(|| known.clone().next());
    by_manifest.or_else(|| {
        let has_program = |language: &Language| match language {
            Language::Python => python::program(look).is_some(),
            Language::Node => node::program(look).is_some(),
            Language::Java => java::main_file(look).is_some(),
            Language::Ruby => ruby::program(look).is_some(),
            Language::Php => php::front(look).is_some(),
            Language::Perl => perl::program(look).is_some(),
            Language::C | Language::Cpp => made::is_there(look, *language),
            Language::Binary => native::executable(look).is_some(),
            Language::Nginx => look.has(nginx::CONF),
            Language::Go | Language::Rust | Language::Deno | Language::Elixir => false,
        };
        Language::ALL.into_iter().find(has_program)
    })
}

/// The name of a function for a directory: its own in lower case, with hyphens for what a name
/// cannot have.
///
/// # Errors
/// Nothing of it can be in a name.
pub fn name_of(directory: &Path) -> Result<String, InitError> {
    let own = directory.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let mut name = String::new();
    for c in own.chars() {
        match c {
            'a'..='z' | '0'..='9' => name.push(c),
            _ if !name.is_empty() && !name.ends_with('-') => name.push('-'),
            _ => {}
        }
    }
    name.truncate(63);
    let name = name.trim_end_matches('-').to_owned();
    match name.parse::<FunctionName>() {
        Ok(_) => Ok(name),
        Err(reason) => Err(InitError::Name { name: own, reason }),
    }
}

impl Project {
    fn new(name: String, language: Language) -> Self {
        Self {
            name,
            language,
            found: Vec::new(),
            command: Vec::new(),
            port: PORT_DEFAULT,
            port_from: "Thaw sets PORT to this number, too".to_owned(),
            files: Vec::new(),
            kind: "binary",
            runtime: Vec::new(),
            env: Vec::new(),
            limits: Vec::new(),
            build: None,
            notes: Vec::new(),
        }
    }

    fn command(&mut self, words: &[&str]) {
        self.command = words.iter().map(|word| (*word).to_owned()).collect();
    }

    fn builds(&mut self, why: &str, command: &[&str], egress: &[&str]) {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let (command, egress) = (owned(command), owned(egress));
        self.build = Some(BuildStep { why: why.to_owned(), command, egress });
    }

    /// A compiled program has the files that are listed only: those which it reads are added.
    fn adds_data(&mut self, look: &Look) {
        if self.files.is_empty() {
            return;
        }
        let all = look.directories("");
        let data: Vec<_> = all.into_iter().filter(|name| DATA.contains(&name.as_str())).collect();
        for name in &data {
            self.file(name, &format!("/app/{name}"));
        }
        let has = match data.is_empty() {
            true => String::new(),
            false => format!(" and {}", data.join(", ")),
        };
        self.notes.push(format!(
            "the function has the program{has}; add what else it reads while it runs to `files` in thaw.toml"
        ));
    }

    fn file(&mut self, from: &str, to: &str) {
        self.files.push(ProjectFile { from: from.to_owned(), to: to.to_owned() });
    }

    /// The port that sources of the program name, unless they read `PORT`.
    fn listens_as(&mut self, sources: &[(String, String)]) {
        match look::port(sources) {
            look::Ports::None => {}
            look::Ports::One(port, file) => {
                self.port = port;
                self.port_from = format!("found in {file}");
            }
            look::Ports::Many(ports) => {
                let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
                self.notes.push(format!(
                    "the sources name several ports ({}); set `port` in thaw.toml to that of the server",
                    ports.join(", ")
                ));
            }
        }
    }

    /// The interpreter of the language, if the one in `PATH` is not for everybody: a build takes
    /// only files of this host that every user may read.
    fn names_interpreter(&mut self, program: &str) {
        if let Some(path) = look::interpreter(program) {
            self.runtime.push(("interpreter", toml_text::string(&path)));
        }
    }

    /// Whether the text says what it should.
    fn check(&self, directory: &Path) -> Result<(), InitError> {
        FunctionConfig::parse(&directory.join(CONFIG_FILE), &self.to_toml())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
