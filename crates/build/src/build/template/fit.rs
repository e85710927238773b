//! Whether a program runs in a copy of a runtime template as it would from its start.

use super::Files;
use super::language::{EVERYBODYS_DIRECTORY, Language, file_name};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use thaw_home::function::StoredFunction;
use thaw_store::Tree;
use thaw_store::index::Content;

/// Why a function is built the ordinary way, for people.
#[derive(Debug)]
pub(super) struct Unfit(pub String);

impl Unfit {
    /// The interpreter gets an option that it has looked at in the template already.
    pub fn option(option: &str) -> Self {
        Self(format!("its interpreter gets the option {option}"))
    }

    /// The interpreter gets nothing to run.
    pub fn no_program() -> Self {
        Self("its interpreter gets no program".to_owned())
    }
}

/// Checks that a program can be given to a running interpreter.
pub(super) fn check(
    language: &dyn Language,
    function: &StoredFunction,
    files: &Files<'_>,
) -> Result<(), Unfit> {
    let unfit = |why: String| Err(Unfit(why));
    let Some(runtime) = files.runtime else {
        return unfit("its files are not those of a language".to_owned());
    };
    if function.cpu_baseline.level().is_some() {
        return unfit("it is held to a level of the instruction set".to_owned());
    }
    // The template would have read other ones, without the node's.
    if function.config.egress.adds_authority() {
        return unfit(
            "[[egress.inject]] or `egress.authority` adds to its certificates".to_owned(),
        );
    }
    if !language.bootstrap().is_empty() && !may_remove_bootstrap(function, runtime) {
        return unfit(format!("its user may not remove files in {EVERYBODYS_DIRECTORY}"));
    }
    let Some((program, arguments)) = function.config.command.split_first() else {
        return unfit("it has no program".to_owned());
    };
    if !is_interpreter(language, program, function, files.tree, runtime) {
        return unfit(format!("`{program}` is not the interpreter {}", language.name()));
    }
    language.check(arguments, &function.environment)?;
    check_files_read_at_start(&function.environment, files.tree, runtime)
}

/// Checks that the loader, the C library and OpenSSL find the same files when they start in the
/// template, which has those of the language only.
fn check_files_read_at_start(
    environment: &BTreeMap<String, String>,
    all: &Tree,
    runtime: &Tree,
) -> Result<(), Unfit> {
    const FILES: [&str; 7] = [
        "/etc/ld.so.cache",
        "/etc/ld.so.preload",
        "/etc/localtime",
        "/etc/ssl/openssl.cnf",
        "/usr/lib/locale/locale-archive",
        "/usr/lib/ssl/openssl.cnf",
        "/usr/share/locale/locale.alias",
    ];
    /// Variables with paths in them.
    const PATHS: [&str; 8] = [
        "GCONV_PATH",
        "LD_AUDIT",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "LOCPATH",
        "OPENSSL_CONF",
        "TZ",
        "TZDIR",
    ];
    let is_own = |path: &str| {
        let is_in = |tree: &Tree| tree.find_followed(Path::new(path)).is_some();
        is_in(all) && !is_in(runtime)
    };
    if let Some(path) = FILES.iter().find(|path| is_own(path)) {
        return Err(Unfit(format!("it has {path}, which its language does not have")));
    }
    let leads_away = |name: &str, path: &str| match (name, path.starts_with('/')) {
        (_, true) => is_own(path),
        ("TZ", false) => is_own(&format!("/usr/share/zoneinfo/{path}")),
        // The working directory of a template is another one.
        ("LD_LIBRARY_PATH" | "OPENSSL_CONF", false) => true,
        (_, false) => path.contains('/'),
    };
    for name in PATHS {
        let value = environment.get(name).map(String::as_str).unwrap_or_default();
        // ld.so(8) has all three.
        let mut paths = value.strip_prefix(':').unwrap_or(value).split([':', ';', ' ']);
        if !value.is_empty() && paths.any(|path| leads_away(name, path)) {
            return Err(Unfit(format!("its variable {name} leads to files of its own")));
        }
    }
    Ok(())
}

/// Whether a command is the interpreter among the files of the language.
fn is_interpreter(
    language: &dyn Language,
    command: &str,
    function: &StoredFunction,
    all: &Tree,
    runtime: &Tree,
) -> bool {
    if !language.is_interpreter(file_name(command)) {
        return false;
    }
    executable(command, function, all).is_some_and(|path| runtime.find(&path).is_some())
}

/// The path that a sandbox executes for a command.
pub(super) fn executable(command: &str, function: &StoredFunction, all: &Tree) -> Option<PathBuf> {
    match command.contains('/') {
        true => command.starts_with('/').then(|| PathBuf::from(command)),
        false => {
            let search = function.environment.get("PATH").map(String::as_str).unwrap_or_default();
            first_program(all, search, &function.config.workdir, command)
        }
    }
}

/// The program that a sandbox starts under this name: the first one of `search`, as the kernel
/// looks for it (`find_program`). An empty directory is the root.
fn first_program(all: &Tree, search: &str, workdir: &str, command: &str) -> Option<PathBuf> {
    let candidates = search
        .split(':')
        .map(|directory| Path::new(workdir).join(format!("{directory}/{command}")));
    candidates.into_iter().find(|path| {
        all.find_followed(path).is_some_and(|found| {
            let node = all.node(found);
            matches!(node.content, Content::Regular(_)) && node.attributes.permissions & 0o111 != 0
        })
    })
}

/// Whether the user of a function may remove the bootstrap from where it lies.
fn may_remove_bootstrap(function: &StoredFunction, runtime: &Tree) -> bool {
    let mode = |path: &str| {
        let found = runtime.find_followed(Path::new(path));
        found.map(|found| runtime.node(found).attributes.permissions & 0o7777)
    };
    // With another mode, others could change what is in it.
    function.config.ids().0 == 0 || mode(EVERYBODYS_DIRECTORY) == Some(0o1777)
}

/// The part of a function's environment that an interpreter looks at when it starts: a template
/// is one for functions that agree in that. Where packages lie is looked at again in the copy,
/// so only a template that loads some must know.
pub(super) fn interpreter_environment(
    language: &dyn Language,
    function: &StoredFunction,
    loads_packages: bool,
) -> BTreeMap<String, String> {
    /// Names, and beginnings of names, that the loader, the C library and OpenSSL know.
    const NAMES: [&str; 8] =
        ["PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TZDIR", "LOCPATH", "OPENSSL_CONF"];
    const BEGINNINGS: [&str; 6] = ["LD_", "LC_", "MALLOC_", "GLIBC_", "GCONV_", "SSL_"];
    let matters = |name: &str| {
        NAMES.contains(&name)
            || BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
            || language.reads_variable(name, loads_packages)
    };
    let all = function.environment.iter().filter(|(name, _)| matters(name));
    all.map(|(name, value)| (name.clone(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_store::index::{Attributes, Node};

    fn add(tree: &mut Tree, path: &str, content: Content, permissions: u32) {
        let attributes = Attributes::root(permissions);
        tree.add_at(Path::new(path), Node { content, attributes }).unwrap();
    }

    #[test]
    fn the_first_program_in_the_path_is_the_one_that_is_started() {
        let mut tree = Tree::new();
        let found = |tree: &Tree, search| first_program(tree, search, "/app", "ruby");
        let all = "none:/opt/bin:bin:/usr/bin";
        assert_eq!(found(&tree, all), None);
        add(&mut tree, "/usr/bin/ruby3.1", Content::Regular(None), 0o755);
        add(&mut tree, "/usr/bin/ruby", Content::Symlink(b"ruby3.1".to_vec()), 0o777);
        assert_eq!(found(&tree, all), Some("/usr/bin/ruby".into()));
        // The kernel passes these over, too.
        add(&mut tree, "/opt/bin/ruby", Content::Symlink(b"nowhere".to_vec()), 0o777);
        add(&mut tree, "/app/none/ruby/file", Content::Regular(None), 0o755);
        assert_eq!(found(&tree, all), Some("/usr/bin/ruby".into()));
        add(&mut tree, "/app/bin/ruby", Content::Regular(None), 0o755);
        assert_eq!(found(&tree, all), Some("/app/bin/ruby".into()));
        add(&mut tree, "/ruby", Content::Regular(None), 0o644);
        assert_eq!(found(&tree, ":/usr/bin"), Some("/usr/bin/ruby".into()));
        tree.remove(Tree::ROOT, b"ruby");
        add(&mut tree, "/ruby", Content::Regular(None), 0o755);
        assert_eq!(found(&tree, ":/usr/bin"), Some("/ruby".into()));
    }

    #[test]
    fn files_that_are_read_at_the_start_are_those_of_the_language() {
        let mut runtime = Tree::new();
        add(&mut runtime, "/usr/lib/libc.so.6", Content::Regular(None), 0o644);
        let with = |more: &[&str]| {
            let mut all = Tree::new();
            for path in ["/usr/lib/libc.so.6"].iter().chain(more) {
                add(&mut all, path, Content::Regular(None), 0o644);
            }
            all
        };
        let own = with(&["/app/openssl.cnf", "/app/lib/a.so", "/usr/share/zoneinfo/Mars/Base"]);
        let check = |name: &str, value: &str, all: &Tree| {
            let environment = BTreeMap::from([(name.to_owned(), value.to_owned())]);
            check_files_read_at_start(&environment, all, &runtime).map_err(|Unfit(why)| why)
        };
        for (name, value) in [
            ("PATH", "/app/lib:bin"),
            ("LANG", "C.UTF-8"),
            ("RUBYLIB", "/app/lib"),
            ("GEM_HOME", "/app"),
            ("SSL_CERT_FILE", "/app/openssl.cnf"),
            ("TZ", "UTC"),
            ("TZ", ":Europe/Berlin"),
            ("LD_PRELOAD", "libc.so.6"),
            ("LD_LIBRARY_PATH", "/usr/lib:/none"),
            ("LD_LIBRARY_PATH", ""),
            ("OPENSSL_CONF", "/none/openssl.cnf"),
        ] {
            assert_eq!(check(name, value, &own), Ok(()), "{name}={value}");
        }
        for (name, value) in [
            ("OPENSSL_CONF", "/app/openssl.cnf"),
            ("OPENSSL_CONF", "openssl.cnf"),
            ("LD_LIBRARY_PATH", "/usr/lib:/app/lib"),
            ("LD_LIBRARY_PATH", "/usr/lib:"),
            ("LD_LIBRARY_PATH", "/usr/lib;/app/lib"),
            ("LD_PRELOAD", "lib/a.so"),
            ("TZ", "Mars/Base"),
            ("TZ", ":/app/lib/a.so"),
            ("LD_PRELOAD", "/usr/lib/libc.so.6 /app/lib/a.so"),
        ] {
            assert!(check(name, value, &own).unwrap_err().contains(name), "{name}={value}");
        }
        for path in ["/etc/ssl/openssl.cnf", "/etc/localtime", "/etc/ld.so.preload"] {
            assert!(check("LANG", "C", &with(&[path])).unwrap_err().contains(path));
        }
    }
}
