//! Programs: the files that must be there so that one can be executed.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::collector::Collector;
use super::elf::{FileHead, file_head, read_elf};
use super::libraries::{HWCAPS, expand_rpath};
use super::{CollectError, MissingLibrary};
use crate::error::Result;

/// `#!` lines that one program may lead through (`BINPRM` limit, execve(2)).
const MAX_INTERPRETERS: usize = 5;
/// Libraries that glibc opens by itself when it needs them: for
/// `pthread_cancel` and `backtrace`, and before version 2.34 for `getpwnam` and
/// `getaddrinfo`.
const OPENED_BY_GLIBC: [&str; 3] = ["libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2"];

/// What to do about a library that is nowhere.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    /// The program cannot run without it.
    Fail,
    /// Perhaps nobody loads the file that wants it.
    Report,
}

/// An object whose libraries are to be collected.
struct Wanting {
    path: PathBuf,
    /// `DT_RPATH`s of the objects that led here, nearest first.
    inherited_rpath: Vec<PathBuf>,
}

impl Collector<'_> {
    /// The path of a program given by path or by name.
    pub(super) fn find_program(&mut self, program: &OsStr) -> Result<PathBuf> {
        if program.as_bytes().contains(&b'/') {
            let path = Path::new("/").join(program);
            // A relative path is relative to this process.
            return match std::path::absolute(program) {
                Ok(absolute) if Path::new(program).is_relative() => Ok(absolute),
                _ => Ok(path),
            };
        }
        for directory in std::env::split_paths(&self.search_path.clone()) {
            let candidate = directory.join(program);
            if candidate.is_absolute() && self.is_program(&candidate) {
                // The search path is that of whoever builds.
                self.grant(&candidate);
                return Ok(candidate);
            }
        }
        Err(CollectError::NoProgram(program.to_string_lossy().into_owned()).into())
    }

    /// Collects a program with its interpreter and libraries. Returns where it
    /// really lies.
    pub(super) fn program(&mut self, path: &Path) -> Result<PathBuf> {
        let mut first = None;
        let mut path = path.to_owned();
        for _ in 0..MAX_INTERPRETERS {
            let real = self.place(&path)?;
            first.get_or_insert(real.clone());
            match file_head(&self.on_host(&real))? {
                FileHead::Elf => {
                    self.libraries(&real, Missing::Fail)?;
                    return Ok(first.unwrap_or(real));
                }
                FileHead::ForeignElf => return Err(CollectError::ForeignProgram(path).into()),
                FileHead::Other => return Err(CollectError::NotAProgram(path).into()),
                FileHead::Script(line) => {
                    let Some((interpreter, by_name)) = parse_script_line(&line) else {
                        return Err(CollectError::NotAProgram(path).into());
                    };
                    if let Some(name) = by_name {
                        let program = self.find_program(OsStr::from_bytes(&name))?;
                        // The script needs both `env` and what it executes.
                        self.program(&program)?;
                    }
                    path = PathBuf::from(OsStr::from_bytes(&interpreter));
                }
            }
        }
        Err(CollectError::TooManyLinks(path).into())
    }

    /// Collects the libraries of a file of a collected directory, if it is ELF.
    pub(super) fn library_user(&mut self, path: &Path) -> Result<()> {
        match file_head(&self.on_host(path)) {
            Ok(FileHead::Elf) => self.libraries(path, Missing::Report),
            // Unreadable files are listed by the import already.
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Collects all libraries that an object needs, directly or not, and its
    /// interpreter. `path` is resolved.
    fn libraries(&mut self, path: &Path, missing: Missing) -> Result<()> {
        let mut ahead =
            VecDeque::from([Wanting { path: path.to_owned(), inherited_rpath: Vec::new() }]);
        while let Some(object) = ahead.pop_front() {
            if !self.examined.insert(object.path.clone()) {
                continue;
            }
            let info = match read_elf(&self.on_host(&object.path)) {
                Ok(info) => info,
                // Perhaps a test file of a package; nobody can load it.
                Err(CollectError::BadElf { .. }) if missing == Missing::Report => continue,
                Err(error) => return Err(error.into()),
            };
            if let Some(interpreter) = &info.interpreter {
                let interpreter = PathBuf::from(OsStr::from_bytes(interpreter));
                // Whoever made the object may name any file of the host.
                let placed = match self.is_library(&interpreter) {
                    true => self.place(&interpreter),
                    false => Err(CollectError::NoFile(interpreter.clone()).into()),
                };
                match placed {
                    Ok(_) => {}
                    Err(error) if missing == Missing::Fail => return Err(error),
                    Err(_) => self.report_missing(&object.path, &interpreter.to_string_lossy()),
                }
            }
            let origin = object.path.parent().unwrap_or(Path::new("/")).to_owned();
            let expand = |text: &Option<Vec<u8>>| {
                text.as_deref().map_or(Vec::new(), |text| expand_rpath(text, &origin))
            };
            // A runpath switches the object's own rpath off and is not inherited.
            let runpath = expand(&info.runpath);
            let mut rpath = if info.runpath.is_some() { Vec::new() } else { expand(&info.rpath) };
            rpath.extend(object.inherited_rpath);
            let searched: Vec<PathBuf> =
                if info.runpath.is_some() { runpath } else { rpath.clone() };
            let mut needed = info.needed;
            if needed.iter().any(|name| name == b"libc.so.6") {
                needed.extend(OPENED_BY_GLIBC.map(|name| name.as_bytes().to_vec()));
            }
            for name in needed {
                let found = self.find_library(&name, &searched)?;
                if found.is_empty() {
                    let name = String::from_utf8_lossy(&name).into_owned();
                    if OPENED_BY_GLIBC.contains(&name.as_str()) {
                        continue;
                    }
                    if missing == Missing::Fail {
                        let program = object.path;
                        return Err(CollectError::NoLibrary { program, library: name }.into());
                    }
                    self.report_missing(&object.path, &name);
                }
                for path in found {
                    ahead.push_back(Wanting { path, inherited_rpath: rpath.clone() });
                }
            }
        }
        Ok(())
    }

    /// Finds a library as ld.so(8) does and puts it into the tree; more than one
    /// file if there are variants for newer processors. Empty if it is nowhere.
    fn find_library(&mut self, name: &[u8], searched: &[PathBuf]) -> Result<Vec<PathBuf>> {
        let name = Path::new(OsStr::from_bytes(name));
        if name.components().count() > 1 {
            return Ok(if self.is_library(name) { vec![self.place(name)?] } else { Vec::new() });
        }
        for directory in searched {
            let found = self.library_in(directory, name)?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        self.systems_library(name)
    }

    /// The same in the system's directories, where most are asked for again and again.
    fn systems_library(&mut self, name: &Path) -> Result<Vec<PathBuf>> {
        if let Some(found) = self.systems_libraries.get(name.as_os_str()) {
            return Ok(found.clone());
        }
        let mut found = Vec::new();
        for directory in self.library_directories.clone() {
            found = self.library_in(&directory, name)?;
            if !found.is_empty() {
                break;
            }
        }
        self.systems_libraries.insert(name.as_os_str().to_owned(), found.clone());
        Ok(found)
    }

    /// Puts the library of this name in one directory into the tree, with its variants.
    fn library_in(&mut self, directory: &Path, name: &Path) -> Result<Vec<PathBuf>> {
        let variants = HWCAPS.iter().map(|hwcaps| directory.join(hwcaps));
        let mut found = Vec::new();
        for path in variants.chain([directory.to_owned()]).map(|variant| variant.join(name)) {
            if self.is_library(&path) {
                found.push(self.place(&path)?);
            }
        }
        Ok(found)
    }

    /// Libraries for other machines are passed over, as the loader does.
    fn is_library(&self, path: &Path) -> bool {
        let Ok(resolved) = self.resolve(path, |_, _| Ok(())) else { return false };
        if let Some(&is_library) = self.libraries.borrow().get(&resolved.path) {
            return is_library;
        }
        let head = file_head(&self.on_host(&resolved.path));
        let is_library = head.is_ok_and(|head| head == FileHead::Elf);
        self.libraries.borrow_mut().insert(resolved.path, is_library);
        is_library
    }

    /// Notes a library that is nowhere; [`Collector::finish`] sorts out which
    /// of them matter.
    fn report_missing(&mut self, wanted_by: &Path, library: &str) {
        self.collected
            .missing_libraries
            .push(MissingLibrary { wanted_by: wanted_by.to_owned(), library: library.to_owned() });
    }
}

/// Splits the rest of a `#!` line into the interpreter and, if that is `env`, the
/// program that `env` is asked to find.
fn parse_script_line(line: &[u8]) -> Option<(Vec<u8>, Option<Vec<u8>>)> {
    let mut words = line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let interpreter = words.next()?.to_vec();
    let is_env = Path::new(OsStr::from_bytes(&interpreter)).file_name() == Some(OsStr::new("env"));
    // Options such as -S and settings such as A=B come before the program.
    let program = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='));
    Some((interpreter, program.filter(|_| is_env).map(<[u8]>::to_vec)))
}

#[cfg(test)]
mod tests {
    use super::super::ask_on_host;
    use super::*;

    #[test]
    fn script_lines_are_understood() {
        let parse = |line: &str| {
            parse_script_line(line.as_bytes()).map(|(interpreter, program)| {
                let text = |bytes| String::from_utf8(bytes).unwrap();
                (text(interpreter), program.map(text))
            })
        };
        let expect = |a: &str, b: Option<&str>| Some((a.to_owned(), b.map(str::to_owned)));
        assert_eq!(parse("/bin/sh"), expect("/bin/sh", None));
        assert_eq!(parse(" /bin/sh -e"), expect("/bin/sh", None));
        assert_eq!(parse("/usr/bin/env python3"), expect("/usr/bin/env", Some("python3")));
        assert_eq!(parse("/usr/bin/env -S A=B node -x"), expect("/usr/bin/env", Some("node")));
        assert_eq!(parse("  "), None);
    }

    /// Compiles an object that needs nothing of the host, so that all it needs
    /// lies below the test's own root.
    fn compile(output: &Path, arguments: &[&str]) {
        std::fs::create_dir_all(output.parent().unwrap()).unwrap();
        let source = output.with_extension("c");
        std::fs::write(&source, "int nothing(void) { return 0; }").unwrap();
        let mut compiler = std::process::Command::new("cc");
        let command = compiler.arg(&source).arg("-o").arg(output);
        assert!(command.args(["-shared", "-nostdlib"]).args(arguments).status().unwrap().success());
        std::fs::remove_file(source).unwrap();
    }

    #[test]
    fn libraries_are_searched_as_the_loader_does() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        compile(&at("usr/lib/libfoo.so.1"), &["-Wl,-soname,libfoo.so.1"]);
        let link = at("usr/lib/libfoo.so.1").display().to_string();
        compile(&at("bin/program"), &["-Wl,--no-as-needed", &link]);
        // A variant for newer processors, found through a link to the directory.
        std::fs::create_dir_all(at("usr/lib/glibc-hwcaps/x86-64-v3")).unwrap();
        std::fs::copy(&link, at("usr/lib/glibc-hwcaps/x86-64-v3/libfoo.so.1")).unwrap();
        std::os::unix::fs::symlink("usr/lib", at("lib")).unwrap();
        // A library for another machine comes first and is passed over.
        std::fs::create_dir_all(at("etc")).unwrap();
        std::fs::write(at("etc/ld.so.conf"), "/foreign\n").unwrap();
        std::fs::create_dir(at("foreign")).unwrap();
        std::fs::write(at("foreign/libfoo.so.1"), b"\x7fELF\x01\x01\x01").unwrap();
        // So are a directory and a file that cannot be executed.
        std::fs::create_dir_all(at("other/program")).unwrap();
        std::fs::create_dir(at("plain")).unwrap();
        std::fs::write(at("plain/program"), "text").unwrap();

        let home = tempfile::tempdir().unwrap();
        let store = crate::Store::open(home.path()).unwrap();
        let mut session = store.session().unwrap();
        let mut tree = crate::Tree::new();
        let programs = vec!["program".into()];
        let search_path = Some("/nowhere:/other:/plain:/bin".into());
        let request = super::super::CollectRequest { programs, search_path, ..Default::default() };
        let collected =
            session.collect_from(root.path(), &mut tree, &request, &mut ask_on_host, &mut |_| {});
        let collected = collected.unwrap();
        assert_eq!(collected.programs, [PathBuf::from("/bin/program")]);
        let find = |path: &str| tree.find(Path::new(path));
        assert!(find("/usr/lib/libfoo.so.1").is_some());
        assert!(find("/usr/lib/glibc-hwcaps/x86-64-v3/libfoo.so.1").is_some());
        assert_eq!(find("/lib/libfoo.so.1"), find("/usr/lib/libfoo.so.1"));
        assert!(find("/foreign").is_none());
    }

    #[test]
    fn what_one_program_finds_by_its_run_path_is_not_taken_for_the_systems() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        let soname = "-Wl,-soname,libfoo.so.1";
        compile(&at("usr/lib/libfoo.so.1"), &[soname]);
        compile(&at("own/libfoo.so.1"), &[soname]);
        let needs = ["-Wl,--no-as-needed", "-Wl,--enable-new-dtags"];
        let link = at("own/libfoo.so.1").display().to_string();
        for plain in ["bin/first", "bin/last"] {
            compile(&at(plain), &[needs[0], needs[1], &link]);
        }
        compile(&at("bin/own"), &[needs[0], needs[1], "-Wl,-rpath,/own", &link]);

        let collect = |programs: &[&str]| {
            let home = tempfile::tempdir().unwrap();
            let store = crate::Store::open(home.path()).unwrap();
            let mut session = store.session().unwrap();
            let mut tree = crate::Tree::new();
            let programs = programs.iter().map(|&program| program.into()).collect();
            let search_path = Some("/bin".into());
            let request =
                super::super::CollectRequest { programs, search_path, ..Default::default() };
            session
                .collect_from(root.path(), &mut tree, &request, &mut ask_on_host, &mut |_| {})
                .unwrap();
            ["/usr/lib/libfoo.so.1", "/own/libfoo.so.1"]
                .map(|path| tree.find(Path::new(path)).is_some())
        };
        assert_eq!(collect(&["first", "last"]), [true, false]);
        assert_eq!(collect(&["own"]), [false, true]);
        // Whoever comes first, both find their own.
        assert_eq!(collect(&["own", "first"]), [true, true]);
        assert_eq!(collect(&["first", "own", "last"]), [true, true]);
    }
}
