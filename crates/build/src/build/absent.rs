//! Files that a program misses since `files` of its thaw.toml does not name them.

use regex::Regex;
use std::path::{Component, Path, PathBuf};
use thaw_home::beneath;
use thaw_home::function::StoredFunction;

/// What a function has of its directory.
pub(super) struct Absent {
    directory: PathBuf,
    workdir: PathBuf,
    /// Where what is imported lies in the sandbox.
    present: Vec<PathBuf>,
}

impl Absent {
    /// `None`: the function has everything, or its directory is not here.
    pub fn of(function: &StoredFunction) -> Option<Self> {
        let config = &function.config;
        if config.takes_all_files() || function.origin.is_some() {
            return None;
        }
        let present = config.files.iter().map(|entry| entry.destination().into()).collect();
        let directory = function.source.clone();
        Some(Self { directory, workdir: config.workdir.clone().into(), present })
    }

    /// A sentence about the last line of output that names a file which is there and not imported.
    pub fn note(&self, output: &[String]) -> Option<String> {
        let name = output.iter().rev().find_map(|line| self.named(line))?;
        Some(format!(
            "its output names {name}, which lies in the function's directory but is not in `files` of \
             thaw.toml; add it there if the program reads it"
        ))
    }

    fn named(&self, line: &str) -> Option<String> {
        let word = Regex::new(r#"[\w./@+-]+"#).expect("it is one");
        let is_module = line.contains("odule");
        word.find_iter(line).find_map(|found| {
            let word = found.as_str().trim_end_matches('.');
            let is_quoted = line[..found.start()].ends_with(['\'', '"', '`']);
            let mut names = Vec::new();
            if word.contains(['.', '/']) || is_quoted {
                names.push(word.to_owned());
            }
            if is_module && is_quoted {
                names.push(format!("{}.py", word.replace('.', "/")));
                names.push(format!("{word}.js"));
            }
            names.into_iter().find_map(|name| self.absent(&name, is_module))
        })
    }

    /// The path in the function's directory of something that is there, and not in the sandbox.
    fn absent(&self, name: &str, may_be_directory: bool) -> Option<String> {
        let at = self.workdir.join(name);
        let inside: PathBuf = at.strip_prefix(&self.workdir).ok()?.components().collect();
        if !inside.components().all(|part| matches!(part, Component::Normal(_))) {
            return None;
        }
        let at = self.workdir.join(&inside);
        // Nothing is said of what a link leads to outside of it.
        let directory = beneath::open_directory(&self.directory).ok()?;
        let found = beneath::open(&directory, &inside).ok()?.metadata().ok()?;
        let is_meant = found.is_file() || may_be_directory && found.is_dir();
        let is_present = self.present.iter().any(|present| at.starts_with(present));
        // Nor what the directory has for the build itself.
        let is_own = inside == Path::new(thaw_home::config::CONFIG_FILE) || inside == Path::new("");
        (is_meant && !is_present && !is_own).then(|| inside.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn files_that_are_not_imported_are_named() {
        let all = tempfile::tempdir().unwrap();
        for name in ["app.py", "conf.json", "data/a.txt", "helpers.py", "lib/b.js", "LICENSE"] {
            let path = all.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let absent = Absent {
            directory: all.path().to_owned(),
            workdir: "/app".into(),
            present: vec!["/app/app.py".into()],
        };
        let found = |line: &str| absent.named(line);
        let python = "FileNotFoundError: [Errno 2] No such file or directory: 'conf.json'";
        for (line, name) in [
            (python, "conf.json"),
            ("open /app/conf.json: no such file or directory", "conf.json"),
            ("cannot read ./data/a.txt.", "data/a.txt"),
            ("ModuleNotFoundError: No module named 'helpers'", "helpers.py"),
            ("Error: Cannot find module './lib/b'", "lib/b.js"),
            ("Error: Cannot find module '/app/lib'", "lib"),
            ("no 'LICENSE'", "LICENSE"),
        ] {
            assert_eq!(found(line).as_deref(), Some(name), "{line}");
        }
        for line in [
            "  File \"/app/app.py\", line 1, in <module>",
            "see the LICENSE",
            "/etc/conf.json is missing",
            "../conf.json is missing",
            "no module named 'flask'",
            "'data' is no file",
            ". / ./ 'x' é.é",
        ] {
            assert_eq!(found(line), None, "{line}");
        }
        let lines = ["conf.json".to_owned(), "end".to_owned()];
        assert!(absent.note(&lines).unwrap().starts_with("its output names conf.json, which"));
    }
}
