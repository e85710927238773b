//! Settings of PHP, which it reads when it starts: those that lead on to what a template does not have.

use super::fit::Unfit;
use super::php::tidy;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use thaw_store::index::Content;
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
/// Those that count in files of settings whatever they lead to.
const RUNS_PROGRAMS: [&str; 4] = ["browscap", "ffi.preload", "opcache.preload", "phar.cache_list"];
/// Bytes of the files of settings that are looked at, and how many there may be.
const BYTES_MAX: u64 = 4 << 20;
const FILES_MAX: usize = 1024;
/// What PHP puts a variable of the environment in the place of.
const VARIABLE: &str = "${";

/// Checks a setting of the command line, of the form `name=value`.
pub(super) fn check(setting: &str) -> Result<(), Unfit> {
    let name = setting.split('=').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ['_', '.', '-'].contains(&c);
    if is_listed(&name) || !name.chars().all(is_plain) {
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
    if files.iter().map(|(_, blob)| blob.size).sum::<u64>() > BYTES_MAX {
        return Ok(Err(Unfit("its files of settings are large".to_owned())));
    }
    let is_own = |path: &str| {
        let found = |tree: &Tree| tree.find_followed(Path::new(path)).is_some();
        !path.starts_with('/') || found(all) && !found(runtime)
    };
    for (path, blob) in files {
        let text = session.read_blob(blob.hash)?;
        if let Some(what) = reads_more(&String::from_utf8_lossy(&text), is_own) {
            let path = path.display();
            return Ok(Err(Unfit(format!("its settings {path} have {what}"))));
        }
    }
    Ok(Ok(()))
}

/// What in a file of settings depends on more than the files of the language. What PHP's scanner may
/// understand otherwise than by lines counts as such.
fn reads_more(text: &str, is_own: impl Fn(&str) -> bool) -> Option<String> {
    let blank = [' ', '\t'];
    let lines = text.split(['\r', '\n']).map(|line| line.trim_matches(blank));
    lines.filter(|line| !line.starts_with(';')).find_map(|line| {
        let behind = line.strip_prefix('[').map(|section| match section.split_once(']') {
            Some((_, behind)) => behind.trim_start_matches(blank),
            None => "no end",
        });
        if behind.is_some_and(|behind| !behind.is_empty() && !behind.starts_with(';')) {
            return Some("a section with more in its line".to_owned());
        }
        if ['"', '\''].iter().any(|&quote| line.matches(quote).count() % 2 == 1) {
            return Some("a value of several lines".to_owned());
        }
        if line.contains(VARIABLE) {
            return Some("variables of the environment".to_owned());
        }
        let (name, value) = line.split_once('=')?;
        let name = name.trim_matches(blank).to_ascii_lowercase();
        let value = value.trim_matches([' ', '\t', '"', '\'']);
        let is_empty = value.is_empty() || value.starts_with(';');
        let leads_away = is_listed(&name) && value.contains('/') && is_own(value);
        let runs = RUNS_PROGRAMS.contains(&name.as_str());
        (!is_empty && (runs || leads_away)).then_some(name)
    })
}

/// Whether a setting is one of those by which PHP starts with files.
fn is_listed(name: &str) -> bool {
    STARTS_WITH_FILES.into_iter().any(|known| match known.ends_with('.') {
        true => name.starts_with(known),
        false => name == known,
    })
}

/// All files of settings of a language, but for those below the directory of the program, unless PHP may
/// have its own there.
fn settings_below(runtime: &Tree, workdir: &Path) -> Vec<(PathBuf, Blob)> {
    let is_of_program = |path: &Path| {
        path == workdir && !["/etc", "/usr"].iter().any(|system| path.starts_with(system))
    };
    let mut found = Vec::new();
    let mut ahead = vec![(PathBuf::from("/"), Tree::ROOT)];
    while let Some((path, directory)) = ahead.pop() {
        let Content::Directory(entries) = &runtime.node(directory).content else { continue };
        for (name, &node) in entries {
            let path = path.join(OsStr::from_bytes(name));
            match &runtime.node(node).content {
                Content::Directory(_) if !is_of_program(&path) => ahead.push((path, node)),
                Content::Directory(_) => {}
                Content::Symlink(_) if !is_settings(&path) => {
                    let linked = inside(runtime, &path).into_iter().flatten();
                    let linked = linked.map(|name| path.join(OsStr::from_bytes(name)));
                    let settings = linked.filter(|path| is_settings(path));
                    found
                        .extend(settings.filter_map(|path| Some((blob_of(runtime, &path)?, path))));
                }
                _ if is_settings(&path) => {
                    found.extend(blob_of(runtime, &path).map(|blob| (blob, path)));
                }
                _ => {}
            }
        }
    }
    found.into_iter().map(|(blob, path)| (path, blob)).collect()
}

/// The names in the directory that a symbolic link leads to.
fn inside<'a>(tree: &'a Tree, link: &Path) -> Option<impl Iterator<Item = &'a [u8]>> {
    match &tree.node(tree.find_followed(link)?).content {
        Content::Directory(entries) => Some(entries.keys().map(|name| &name[..])),
        _ => None,
    }
}

fn blob_of(tree: &Tree, path: &Path) -> Option<Blob> {
    match tree.node(tree.find_followed(path)?).content {
        Content::Regular(blob) => blob,
        _ => None,
    }
}

fn is_settings(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(b".ini")
}

/// A file of settings that the language does not have, where PHP may look for some when it starts: below
/// a directory at the top that the language has, too, but not below the working directory.
fn own_settings(all: &Tree, runtime: &Tree, workdir: &str) -> Option<PathBuf> {
    let own = PathBuf::from(tidy(workdir));
    let mut ahead = vec![(PathBuf::from("/"), Tree::ROOT)];
    while let Some((path, directory)) = ahead.pop() {
        let Content::Directory(entries) = &all.node(directory).content else { continue };
        for (name, &node) in entries {
            let path = path.join(OsStr::from_bytes(name));
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
    inside(all, link).is_some_and(|mut names| names.any(|name| name.ends_with(b".ini")))
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
            ("[x]extension=c", "[x]extension"),
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
        let plain = "[PHP]\n; memory_limit = ${LIMIT}\n[curl] ; and more\nextension=curl\n\
            opcache.preload=\nffi.preload = \"\"\nbrowscap = ; none\n\
            zend_extension=/usr/lib/opcache.so\nsession.save_path=/app/sessions\n";
        let reads = |text: &str| reads_more(text, |path| path != "/usr/lib/opcache.so");
        assert_eq!(reads(plain), None);
        let found = |line: &str| reads(&format!("{plain}{line}\n")).unwrap_or_default();
        for line in ["memory_limit = ${LIMIT}", "# a=${X}", ";c\ra=${X}", "${X}"] {
            assert_eq!(found(line), "variables of the environment", "{line:?}");
        }
        assert_eq!(found("  Opcache.Preload=/app/a.php"), "opcache.preload");
        assert_eq!(found("browscap = \"/app/b.ini\""), "browscap");
        assert_eq!(found("extension=/app/x.so"), "extension");
        assert_eq!(found("extension_dir=./lib"), "extension_dir");
        assert_eq!(found("[x]browscap=/x"), "a section with more in its line");
        assert_eq!(found("a=\"l1\n;${X}\""), "a value of several lines");
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
        add(&mut tree, "/etc/php/conf.d/.ini", Content::Symlink(b"../mods/a.ini".to_vec()));
        add(&mut tree, "/usr/php", Content::Symlink(b"/app".to_vec()));
        let mut found: Vec<_> = settings_below(&tree, Path::new("/app"))
            .into_iter()
            .map(|(path, _)| path.display().to_string())
            .collect();
        found.sort();
        let expected = ["/etc/php/conf.d/.ini", "/etc/php/conf.d/a.ini", "/etc/php/mods/a.ini"];
        assert_eq!(found, [&expected[..], &["/usr/php/b.ini"]].concat());
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
