//! Programs of the function's directory that the sandbox cannot start, since they lead out of it: a Python of a
//! virtual environment is a link, and the programs beside it name it by its path on this host.

use crate::script;
use std::fs;
use std::path::{Component, Path, PathBuf};
use thaw_home::beneath;

/// Links that are followed on the way to a file (path_resolution(7)).
const LINKS_MAX: usize = 40;
/// The file that makes a directory a virtual environment of Python.
const VENV: &str = "pyvenv.cfg";

/// Says why a program of the function's directory cannot be started, and the way out. `has`: whether the sandbox
/// has something at a path; `name`: of the program, below the directory.
pub(super) fn explain(
    directory: &Path,
    name: &Path,
    has: &dyn Fn(&Path) -> bool,
) -> Option<String> {
    let is_below = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
    if !name.components().all(is_below) {
        return None;
    }
    if leads_out(directory, name).is_some() {
        return explain_link(directory, name, has);
    }
    let interpreter = interpreter(directory, name)?;
    let of_directory = interpreter.strip_prefix(directory).ok()?.to_owned();
    if has(&interpreter) {
        return None;
    }
    let way_out = explain_link(directory, &of_directory, has).unwrap_or_else(|| {
        let (name, of_directory) = (name.display(), of_directory.display());
        format!("begin the command with the interpreter, as in `command = [\"{of_directory}\", \"{name}\", …]`")
    });
    Some(format!(
        "{} wants its interpreter at {}, where it lies on this host and not in the sandbox; {way_out}",
        name.display(),
        interpreter.display()
    ))
}

/// Where a link leads that leaves the directory.
fn leads_out(directory: &Path, name: &Path) -> Option<PathBuf> {
    leads_to(&directory.join(name)).filter(|target| !target.starts_with(directory))
}

/// The same as [`explain`] for a link that leaves the directory.
fn explain_link(directory: &Path, name: &Path, has: &dyn Fn(&Path) -> bool) -> Option<String> {
    let target = leads_out(directory, name).filter(|target| !has(target))?;
    let way_out = venv(directory, name).map_or_else(
        || {
            "put a copy of it in its place, or add it by `include` in [runtime] of thaw.toml"
                .to_owned()
        },
        |venv| venv.way_out(),
    );
    Some(format!(
        "{} is a link to {}, outside of the function's directory, which the sandbox does not have; {way_out}",
        name.display(),
        target.display()
    ))
}

/// A virtual environment of Python.
struct Venv {
    /// Its packages, below the function's directory.
    packages: Option<PathBuf>,
}

impl Venv {
    fn way_out(&self) -> String {
        let packages = match &self.packages {
            Some(packages) => format!("`packages = \"{}\"`", packages.display()),
            None => "`requirements` or `packages`".to_owned(),
        };
        format!(
            "have `python3` start the program, with {packages} in [runtime] of thaw.toml, or make the environment of a \
             Python that every user may read, as in `uv venv --python /usr/bin/python3`"
        )
    }
}

/// The virtual environment that has a program in its `bin`.
fn venv(directory: &Path, name: &Path) -> Option<Venv> {
    let itself = name.parent()?.parent()?;
    if !directory.join(itself).join(VENV).is_file() {
        return None;
    }
    let libraries = fs::read_dir(directory.join(itself).join("lib")).ok();
    let packages = libraries.into_iter().flatten().flatten().find_map(|entry| {
        let packages = itself.join("lib").join(entry.file_name()).join("site-packages");
        directory.join(&packages).is_dir().then_some(packages)
    });
    Some(Venv { packages })
}

/// Where the last of the links leads that begin at a path, whether something is there or not; `None`: it is no link.
fn leads_to(path: &Path) -> Option<PathBuf> {
    let mut here = path.to_owned();
    for _ in 0..LINKS_MAX {
        match fs::read_link(&here) {
            Ok(target) => here = here.parent().unwrap_or(Path::new("/")).join(target),
            Err(_) => break,
        }
    }
    if here == path {
        return None;
    }
    // Without `..`, if what leads there is there.
    let parent = here.parent().and_then(|parent| parent.canonicalize().ok());
    Some(match (parent, here.file_name()) {
        (Some(parent), Some(name)) => parent.join(name),
        _ => here,
    })
}

/// The interpreter that the first line of a script names. Somebody else may have filled the directory: no
/// link is followed out of it, and what is no regular file is not read.
fn interpreter(directory: &Path, name: &Path) -> Option<PathBuf> {
    let file = beneath::open(beneath::open_directory(directory).ok()?, name).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    script::interpreter(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_python_that_lies_elsewhere_is_named_with_the_way_out() {
        let all = tempfile::tempdir().unwrap();
        let at = |path: &str| all.path().canonicalize().unwrap().join(path);
        for directory in
            ["app/.venv/bin", "app/.venv/lib/python3.12/site-packages", "uv/bin", "app/tools"]
        {
            fs::create_dir_all(at(directory)).unwrap();
        }
        fs::write(at("uv/bin/python3.12"), "").unwrap();
        fs::write(at("app/.venv/pyvenv.cfg"), "home = x\n").unwrap();
        symlink(at("uv/bin/python3.12"), at("app/.venv/bin/python")).unwrap();
        symlink("python", at("app/.venv/bin/python3")).unwrap();
        symlink("../../none", at("app/tools/gone")).unwrap();
        symlink("python3", at("app/tools/python")).unwrap();
        fs::write(at("app/tools/python3"), "").unwrap();
        let python = at("app/.venv/bin/python");
        fs::write(at("app/.venv/bin/flask"), format!("#!{}\n", python.display())).unwrap();
        fs::write(at("app/run"), "#!/bin/sh\n").unwrap();
        let said = |name: &str| explain(&at("app"), Path::new(name), &|_| false);
        for name in [".venv/bin/python", ".venv/bin/python3"] {
            let said = said(name).unwrap();
            let target = at("uv/bin/python3.12");
            assert!(
                said.starts_with(&format!("{name} is a link to {}, outside", target.display())),
                "{said}"
            );
            assert!(said.contains("`packages = \".venv/lib/python3.12/site-packages\"`"), "{said}");
        }
        assert!(said("tools/gone").unwrap().contains("by `include`"));
        let flask = said(".venv/bin/flask").unwrap();
        // That interpreter would be refused as well.
        assert!(flask.contains("sandbox; .venv/bin/python is a link to"), "{flask}");
        assert!(!flask.contains("begin the command"), "{flask}");
        let tool = format!("#!{}\n", at("app/tools/python3").display());
        fs::write(at("app/tools/flask"), tool).unwrap();
        let flask = said("tools/flask").unwrap();
        assert!(flask.contains("[\"tools/python3\", \"tools/flask\", …]"), "{flask}");
        for name in ["run", "tools/python", "tools/python3", "none"] {
            assert_eq!(said(name), None, "{name}");
        }
        assert_eq!(explain(&at("app"), Path::new(".venv/bin/python"), &|_| true), None);
    }

    #[test]
    fn nothing_but_files_of_the_directory_is_read() {
        let all = tempfile::tempdir().unwrap();
        let at = |path: &str| all.path().canonicalize().unwrap().join(path);
        fs::create_dir_all(at("app")).unwrap();
        let script = format!("#!{}\n", at("app/python").display());
        fs::write(at("outside"), &script).unwrap();
        fs::write(at("app/inside"), &script).unwrap();
        symlink(at(""), at("app/up")).unwrap();
        symlink("/dev", at("app/dev")).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, at("app/fifo"), fifo, mode, 0).unwrap();
        let said = |name: &str| explain(&at("app"), Path::new(name), &|_| false);
        assert!(said("inside").is_some());
        for name in ["fifo", "../outside", "./../outside", "up/outside", "dev/zero"] {
            assert_eq!(said(name), None, "{name}");
        }
    }
}
