//! Settings of PHP, which it reads when it starts: those that lead on to what a template does not have.

use super::fit::Unfit;
use super::php::tidy;
use std::path::{Path, PathBuf};
use thaw_store::index::{Content, NodeId};
use thaw_store::{Blob, Session, StoreError, Tree};

/// Settings by which PHP loads files, or runs a program, when it starts; those that end with a dot are
/// all with this beginning.
const STARTS_WITH_FILES: [&str; 13] = [
    "apc.",
    "browscap",
    "datadog.",
    "ddtrace.",
    "error_log",
    "extension",
    "extension_dir",
    "ffi.preload",
    "opcache.",
    "phar.cache_list",
    "sp.",
    "yaconf.",
    "zend_extension",
];
/// The same in files of settings: what extensions these load is in the template.
const RUNS_PROGRAMS: [&str; 4] = ["browscap", "ffi.preload", "opcache.preload", "phar.cache_list"];
/// Bytes of a file of settings that is looked at, and how many files are.
const BYTES_MAX: u64 = 1 << 20;
const FILES_MAX: usize = 1024;
/// What PHP puts a variable of the environment in the place of.
const VARIABLE: &str = "${";

/// Checks a setting of the command line, of the form `name=value`.
pub(super) fn check(setting: &str) -> Result<(), Unfit> {
    let name = setting.split('=').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_known = |known: &str| match known.ends_with('.') {
        true => name.starts_with(known),
        false => name == known,
    };
    if STARTS_WITH_FILES.into_iter().any(is_known) {
        return Err(Unfit(format!("its interpreter gets the setting {name}")));
    }
    if setting.contains(VARIABLE) || setting.contains(char::is_control) {
        return Err(Unfit(format!("its interpreter gets the setting {name} with a variable")));
    }
    Ok(())
}

/// Checks the settings among the files of a function, whose language has `runtime`.
///
/// # Errors
/// The store cannot be read. Within: why there is no template.
pub(super) fn check_files(
    session: &Session,
    all: &Tree,
    runtime: &Tree,
    workdir: &str,
) -> Result<Result<(), Unfit>, StoreError> {
    if let Some(path) = own_settings(all, runtime, workdir) {
        return Ok(Err(Unfit(format!("it has settings of its own, {}", path.display()))));
    }
    let files = settings_below(runtime, Path::new(&tidy(workdir)));
    if files.len() > FILES_MAX {
        return Ok(Err(Unfit(format!("it has more than {FILES_MAX} files of settings"))));
    }
    for (path, blob) in files {
        let text = match blob.size <= BYTES_MAX {
            true => session.read_blob(blob.hash)?,
            false => return Ok(Err(Unfit(format!("its settings {} are large", path.display())))),
        };
        if let Some(what) = reads_more(&String::from_utf8_lossy(&text)) {
            let path = path.display();
            return Ok(Err(Unfit(format!("its settings {path} have {what}"))));
        }
    }
    Ok(Ok(()))
}

/// What in a file of settings depends on more than the files of the language.
fn reads_more(text: &str) -> Option<String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with([';', '#', '[']));
    lines.into_iter().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        let name = name.trim().to_ascii_lowercase();
        let value = value.trim().trim_matches('"');
        let runs = RUNS_PROGRAMS.contains(&name.as_str()) && !value.is_empty();
        match (runs, line.contains(VARIABLE)) {
            (true, _) => Some(name),
            (_, true) => Some("variables of the environment".to_owned()),
            _ => None,
        }
    })
}

/// All files of settings of a language, but for those below the directory of the program.
fn settings_below(runtime: &Tree, workdir: &Path) -> Vec<(PathBuf, Blob)> {
    let mut found = Vec::new();
    let mut ahead = vec![(PathBuf::from("/"), Tree::ROOT)];
    while let Some((path, directory)) = ahead.pop() {
        let Content::Directory(entries) = &runtime.node(directory).content else { continue };
        for (name, &node) in entries {
            let path = path.join(&*String::from_utf8_lossy(name));
            if matches!(runtime.node(node).content, Content::Directory(_)) {
                if path != workdir {
                    ahead.push((path, node));
                }
            } else if is_settings(&path)
                && let Some(blob) = blob_of(runtime, &path)
            {
                found.push((path, blob));
            }
        }
    }
    found
}

fn blob_of(tree: &Tree, path: &Path) -> Option<Blob> {
    match tree.node(tree.find_followed(path)?).content {
        Content::Regular(blob) => blob,
        _ => None,
    }
}

fn is_settings(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "ini")
}

/// A file of settings that the language does not have, where PHP may look for some when it starts: below
/// a directory at the top that the language has, too, but not below the working directory.
fn own_settings(all: &Tree, runtime: &Tree, workdir: &str) -> Option<PathBuf> {
    let own = PathBuf::from(tidy(workdir));
    let mut ahead = vec![(PathBuf::from("/"), Tree::ROOT)];
    while let Some((path, directory)) = ahead.pop() {
        let Content::Directory(entries) = &all.node(directory).content else { continue };
        for (name, &node) in entries {
            let path = path.join(&*String::from_utf8_lossy(name));
            let is_missing = || runtime.find(&path).is_none();
            let is_directory = matches!(all.node(node).content, Content::Directory(_));
            if !is_directory && is_missing() && (is_settings(&path) || leads_to_some(all, &path)) {
                return Some(path);
            }
            let is_foreign = (directory == Tree::ROOT || path == own) && is_missing();
            if is_directory && !is_foreign {
                ahead.push((path, node));
            }
        }
    }
    None
}

/// Whether a symbolic link leads to a directory with files of settings.
fn leads_to_some(all: &Tree, link: &Path) -> bool {
    let entries = |at: NodeId| match &all.node(at).content {
        Content::Directory(entries) => Some(entries),
        _ => None,
    };
    let found = all.find_followed(link).and_then(entries);
    found.is_some_and(|entries| entries.keys().any(|name| name.ends_with(b".ini")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_store::index::{Attributes, Node};

    fn add(tree: &mut Tree, path: &str, content: Content) {
        let node = Node { content, attributes: Attributes::root(0o755) };
        tree.add_at(Path::new(path), node).unwrap();
    }

    fn files_of(paths: &[&str]) -> Tree {
        let mut tree = Tree::new();
        paths.iter().for_each(|path| add(&mut tree, path, Content::Regular(None)));
        tree
    }

    #[test]
    fn settings_of_the_command_line_lead_nowhere() {
        for (setting, word) in [
            ("extension=a.so", "extension"),
            ("EXTENSION=/a.so", "extension"),
            ("Zend_Extension = b", "zend_extension"),
            ("opcache.preload=a.php", "opcache.preload"),
            ("phar.cache_list=a.phar", "phar.cache_list"),
            ("apc.preload_path=/a", "apc.preload_path"),
            ("memory_limit=${LIMIT}", "variable"),
            ("a=b\nextension=c", "a with a variable"),
        ] {
            let Unfit(why) = check(setting).unwrap_err();
            assert!(why.contains(word), "{setting:?}: {why}");
        }
        for setting in ["precision=5", "display_errors", "memory_limit=64M", "", "mirror.given=1"] {
            assert!(check(setting).is_ok(), "{setting}");
        }
    }

    #[test]
    fn files_of_settings_lead_nowhere() {
        let plain = "[PHP]\n; memory_limit = ${LIMIT}\nextension=curl\nopcache.preload=\nffi.preload = \"\"\n";
        assert_eq!(reads_more(plain), None);
        let found = |line: &str| reads_more(&format!("{plain}{line}\n")).unwrap_or_default();
        assert_eq!(found("memory_limit = ${LIMIT}"), "variables of the environment");
        assert_eq!(found("  Opcache.Preload=/app/a.php"), "opcache.preload");
        assert_eq!(found("browscap = \"/app/b.ini\""), "browscap");
    }

    #[test]
    fn settings_of_a_language_are_found_by_links_but_not_below_the_program() {
        let mut tree = Tree::new();
        let directory = tempfile::tempdir().unwrap();
        let mut session = thaw_store::Store::open(directory.path()).unwrap().session().unwrap();
        let text = session.put_blob(b"a=${B}\n", &thaw_store::Domain::default()).unwrap();
        for path in ["/etc/php/mods/a.ini", "/app/b.ini"] {
            add(&mut tree, path, Content::Regular(text));
        }
        add(&mut tree, "/etc/php/conf.d/a.ini", Content::Symlink(b"../mods/a.ini".to_vec()));
        let mut found: Vec<_> = settings_below(&tree, Path::new("/app"))
            .into_iter()
            .map(|(path, _)| path.display().to_string())
            .collect();
        found.sort();
        assert_eq!(found, ["/etc/php/conf.d/a.ini", "/etc/php/mods/a.ini"]);
        let Err(Unfit(why)) = check_files(&session, &tree, &tree, "/app").unwrap() else {
            panic!("it fits");
        };
        assert!(why.contains("have variables of the environment"), "{why}");
    }

    #[test]
    fn settings_that_the_language_does_not_have_are_found() {
        let of_language = ["/etc/php/8.2/cli/php.ini", "/usr/bin/php8.2", "/var/tmp/x"];
        let runtime = files_of(&of_language);
        let found = |more: &[&str], workdir: &str| {
            let found =
                own_settings(&files_of(&[&of_language[..], more].concat()), &runtime, workdir);
            found.map(|path| path.display().to_string())
        };
        assert_eq!(found(&["/app/php.ini", "/app/index.php", "/etc/motd"], "/app"), None);
        assert_eq!(found(&["/opt/own/a.ini"], "/app"), None);
        assert_eq!(found(&["/var/www/a.ini"], "/var/www/"), None);
        for path in ["/etc/php/8.2/cli/conf.d/a.ini", "/usr/bin/php-cli.ini", "/var/www/a.ini"] {
            assert_eq!(found(&[path], "/app").as_deref(), Some(path));
        }
        assert_eq!(found(&["/etc/php/a.ini"], "/etc/php").as_deref(), Some("/etc/php/a.ini"));
        assert_eq!(found(&["/php.ini"], "/").as_deref(), Some("/php.ini"));
        let mut linked = files_of(&[&of_language[..], &["/app/conf/x.ini"]].concat());
        add(&mut linked, "/etc/php/8.2/cli/conf.d", Content::Symlink(b"/app/conf".to_vec()));
        let found = own_settings(&linked, &runtime, "/app");
        assert_eq!(found, Some("/etc/php/8.2/cli/conf.d".into()));
    }
}
