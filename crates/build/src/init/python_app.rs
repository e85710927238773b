//! The application of a program in Python that a server is to serve: what makes it, and where.

use super::look::Look;
use super::python::PROGRAMS;
use regex::Regex;

/// Files of a package that may hold its application.
const IN_PACKAGES: [&str; 7] =
    ["__init__.py", "main.py", "app.py", "server.py", "wsgi.py", "asgi.py", "api.py"];
/// Directories beside a program that hold no application.
const NO_PACKAGES: [&str; 8] =
    ["docs", "examples", "migrations", "node_modules", "scripts", "test", "tests", "venv"];
/// Most directories that are looked at.
const PACKAGES_MAX: usize = 32;
/// Names of functions that make an application; Flask looks for the first two.
const FACTORIES: &str = "create_app|make_app|create_application|get_app|build_app";

/// What an application is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framework {
    Flask,
    FastApi,
    Starlette,
    /// A `Procfile` has gunicorn serve it.
    Other,
}

impl Framework {
    const ALL: [Self; 3] = [Self::Flask, Self::FastApi, Self::Starlette];

    /// Its name for people, which is that of its class, too.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flask => "Flask",
            Self::FastApi => "FastAPI",
            Self::Starlette => "Starlette",
            Self::Other => "",
        }
    }

    /// That which a source makes an application with, or else the one that is installed.
    fn of(text: &str, packages: &[String]) -> Option<Self> {
        let is_made = |framework: &Self| text.contains(&format!("{}(", framework.name()));
        Self::ALL.into_iter().find(is_made).or_else(|| Self::installed(packages))
    }

    fn installed(packages: &[String]) -> Option<Self> {
        let has = |framework: &Self| {
            let name = framework.name().to_lowercase();
            packages.iter().any(|package| package.split('[').next() == Some(&name))
        };
        Self::ALL.into_iter().find(has)
    }
}

/// An application.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Application {
    pub framework: Framework,
    /// Its module, `shop.main`.
    module: String,
    /// The variable that is it, or the function that makes it.
    variable: String,
    pub is_factory: bool,
    /// Whether its module lies below `src`.
    pub is_in_src: bool,
    /// What says how it is served, for people, besides the sources.
    pub from: &'static str,
    /// The class of workers that it wants of gunicorn; empty: the usual one.
    pub worker: String,
}

impl Application {
    fn new(framework: Framework, source: &Source, variable: &str) -> Self {
        Self {
            framework,
            module: source.module.clone(),
            variable: variable.to_owned(),
            is_factory: false,
            is_in_src: source.is_in_src,
            from: "",
            worker: String::new(),
        }
    }

    /// Module and variable, as uvicorn wants them.
    pub fn name(&self) -> String {
        format!("{}:{}", self.module, self.variable)
    }

    pub fn for_gunicorn(&self) -> String {
        self.name() + if self.is_factory { "()" } else { "" }
    }

    pub fn for_flask(&self) -> String {
        match self.is_factory {
            true if ["create_app", "make_app"].contains(&self.variable.as_str()) => {
                self.module.clone()
            }
            _ => self.for_gunicorn(),
        }
    }
}

/// A file, and the module that it is.
struct Source {
    module: String,
    text: String,
    is_in_src: bool,
}

/// The application of a directory. Files beside `thaw.toml` come before packages, and of each what
/// is an application before what makes one. Without the package of a framework or its class,
/// nothing is one.
pub(super) fn find(look: &Look, packages: &[String]) -> Option<Application> {
    if let Some(application) = of_procfile(look, packages) {
        return Some(application);
    }
    let beside = beside(look);
    if let Some(application) = of_sources(&beside, packages) {
        return Some(application);
    }
    // It starts a server itself.
    if beside.iter().any(|source| source.text.contains("uvicorn.run(")) {
        return None;
    }
    of_sources(&in_packages(look), packages)
}

fn beside(look: &Look) -> Vec<Source> {
    let rank = |name: &str| PROGRAMS.iter().position(|usual| *usual == name).unwrap_or(usize::MAX);
    let mut sources = look.sources(".py");
    sources.sort_by_key(|(name, _)| rank(name));
    let source = |(name, text): (String, String)| {
        Some(Source { module: name.strip_suffix(".py")?.to_owned(), text, is_in_src: false })
    };
    sources.into_iter().filter_map(source).collect()
}

/// Sources in directories beside the program, and in those of `src`.
fn in_packages(look: &Look) -> Vec<Source> {
    let mut sources = Vec::new();
    for (parent, is_in_src) in [("", false), ("src/", true)] {
        let names = look.directories(parent).into_iter().take(PACKAGES_MAX);
        let is_one = |name: &String| {
            let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            is_name && !NO_PACKAGES.contains(&name.as_str()) && (is_in_src || name != "src")
        };
        for name in names.filter(is_one) {
            for file in IN_PACKAGES {
                let Some(text) = look.source(&format!("{parent}{name}/{file}")) else { continue };
                let module = match file.strip_suffix(".py") {
                    Some(module) if module != "__init__" => format!("{name}.{module}"),
                    _ => name.clone(),
                };
                sources.push(Source { module, text, is_in_src });
            }
        }
    }
    sources
}

fn of_sources(sources: &[Source], packages: &[String]) -> Option<Application> {
    let made = Framework::ALL.into_iter().find_map(|framework| {
        // `app = Flask(__name__)`
        let pattern =
            format!(r"(?m)^(\w+)\s*(?::\s*[\w.]+\s*)?=\s*(?:\w+\.)?{}\(", framework.name());
        first(sources, &pattern, |source, variable| {
            Some(Application::new(framework, source, variable))
        })
    });
    let by_factory = || {
        let pattern = format!(r"(?m)^(\w+)\s*(?::\s*[\w.]+\s*)?=\s*(?:\w+\.)*(?:{FACTORIES})\(");
        first(sources, &pattern, |source, variable| {
            Some(Application::new(Framework::of(&source.text, packages)?, source, variable))
        })
    };
    let imported = || {
        let pattern =
            r"(?m)^from\s+[\w.]+\s+import\s+(?:\w+\s*,\s*)*(?:\w+\s+as\s+)?(app|application)\b";
        let servers = |source: &&Source| {
            let name = source.module.rsplit('.').next().unwrap_or_default();
            ["wsgi", "asgi"].contains(&name)
        };
        sources.iter().filter(servers).find_map(|source| {
            first(std::slice::from_ref(source), pattern, |source, variable| {
                Some(Application::new(Framework::installed(packages)?, source, variable))
            })
        })
    };
    let factory = || {
        // All of its parameters have defaults.
        let pattern = format!(
            r"(?m)^def ({FACTORIES})\(\s*(?:\**\w+\s*(?::[^=,()]+)?=[^,()]+,?\s*)*\)\s*(?:->[^:]+)?:"
        );
        first(sources, &pattern, |source, variable| {
            let framework = Framework::of(&source.text, packages)?;
            let made = Application::new(framework, source, variable);
            Some(Application { is_factory: true, ..made })
        })
    };
    made.or_else(by_factory).or_else(imported).or_else(factory)
}

/// What is made of the first source with this pattern.
fn first(
    sources: &[Source],
    pattern: &str,
    make: impl Fn(&Source, &str) -> Option<Application>,
) -> Option<Application> {
    let pattern = Regex::new(pattern).expect("it is one");
    sources.iter().find_map(|source| make(source, &pattern.captures(&source.text)?[1]))
}

/// What the line `web: gunicorn shop:app` of a `Procfile` serves; uvicorn's, too.
fn of_procfile(look: &Look, packages: &[String]) -> Option<Application> {
    let text = look.source("Procfile")?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("web:"))?;
    // What else a shell would do is not known.
    if line.contains(['&', '|', ';', '`', '<', '>', '(', '\'', '"']) {
        return None;
    }
    let mut words = line.split_whitespace().skip_while(|word| word.contains('='));
    let server = words.next()?;
    let words: Vec<&str> = words.collect();
    let is_installed = packages.iter().any(|package| package == server);
    if !is_installed || words.iter().any(|word| word.starts_with("--chdir")) {
        return None;
    }
    // A word without a colon may be the value of an option.
    let (named, plain): (Vec<&str>, Vec<&str>) = words.iter().partition(|word| word.contains(':'));
    let (module, variable) =
        named.into_iter().chain(plain.into_iter().rev()).find_map(|word| served(look, word))?;
    let source = Source { module, text: String::new(), is_in_src: false };
    let installed = Framework::installed(packages);
    let framework = match server {
        "gunicorn" => installed.filter(|found| *found == Framework::Flask),
        "uvicorn" => Some(installed.unwrap_or(Framework::Starlette)),
        _ => return None,
    };
    let application = Application::new(framework.unwrap_or(Framework::Other), &source, &variable);
    Some(Application {
        is_factory: words.contains(&"--factory"),
        from: "Procfile",
        worker: worker(&words),
        ..application
    })
}

/// The class of workers that words for gunicorn ask for.
fn worker(words: &[&str]) -> String {
    let at = words.iter().position(|word| ["-k", "--worker-class"].contains(word));
    let behind = at.and_then(|at| words.get(at + 1).copied());
    let joined = || words.iter().find_map(|word| word.strip_prefix("--worker-class="));
    let is_class = |class: &&str| class.chars().all(|c| c.is_alphanumeric() || "_.".contains(c));
    let class = behind.or_else(joined).filter(is_class);
    class.filter(|class| *class != "sync").unwrap_or_default().to_owned()
}

/// Module and variable that a word names, if such a module is there.
fn served(look: &Look, word: &str) -> Option<(String, String)> {
    let (module, variable) = word.split_once(':').unwrap_or((word, "application"));
    let is_name = |text: &str| {
        let mut parts = text.split('.');
        parts.all(|part| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_'))
    };
    let path = module.replace('.', "/");
    let is_there = look.has(&format!("{path}.py")) || look.has(&format!("{path}/__init__.py"));
    (is_name(module) && is_name(variable) && is_there)
        .then(|| (module.to_owned(), variable.to_owned()))
}
