//! Whether the packages that an earlier build has installed are still what `pip`, or `npm ci`, would install.
//!
//! A stamp beside them holds a hash of all that decides the result and one of what was
//! installed. It is removed before an installation begins and written when it is complete, so
//! it vouches for whole ones only. It lies where no sandbox of a build can write.

use rustix::fs::{Mode, OFlags};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use thaw_home::beneath;
use thaw_home::home::{Home, HomeError};

/// How Thaw has packages installed: a stamp of another way vouches for nothing.
const WAY: &str = "1";
/// Most bytes of a file that is read.
const FILE_MAX: u64 = 4 << 20;
/// Most bytes of a stamp.
const STAMP_MAX: u64 = 1024;
/// Most files of requirements that include each other.
const FILES_MAX: usize = 64;
/// Options of a requirements file that have a value, which says all there is to know.
const WITH_VALUE: [&str; 4] = ["--no-binary", "--only-binary", "--trusted-host", "--use-feature"];
/// The same without one.
const WITHOUT_VALUE: [&str; 4] = ["--no-index", "--pre", "--prefer-binary", "--require-hashes"];
/// Options that say where packages are.
const PLACES: [&str; 6] =
    ["-i", "--index-url", "--pypi-url", "--extra-index-url", "-f", "--find-links"];
/// How names of archives end.
const ARCHIVES: [&str; 12] =
    [".whl", ".zip", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz", ".lz", ".tlz", ".lzma", ".tar"];
/// What ends a line for Python, besides "\n" (str.splitlines).
const ENDS_OF_LINES: [char; 9] =
    ['\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];

/// What decides which packages are installed.
pub(super) struct Inputs {
    hasher: blake3::Hasher,
    is_pinned: bool,
    unknown: Option<String>,
    read: BTreeSet<PathBuf>,
}

impl Inputs {
    pub fn new() -> Self {
        let mut inputs = Self {
            hasher: blake3::Hasher::new(),
            is_pinned: true,
            unknown: None,
            read: BTreeSet::new(),
        };
        inputs.add("way", WAY);
        inputs
    }

    /// Adds something that decides, and what it is.
    pub fn add(&mut self, what: &str, value: impl AsRef<[u8]>) {
        for bytes in [what.as_bytes(), value.as_ref()] {
            self.hasher.update(&(bytes.len() as u64).to_le_bytes());
            self.hasher.update(bytes);
        }
    }

    /// Adds which file a path leads to: a new version of a program is another file.
    pub fn add_program(&mut self, path: &Path) {
        // A script may start one interpreter today and another one tomorrow.
        if self.add_file_identity(path) != Some(*b"\x7fELF") {
            self.doubt(&path.display().to_string());
        }
    }

    /// Adds which file a path leads to, whatever is in it; how it begins.
    pub fn add_file_identity(&mut self, path: &Path) -> Option<[u8; 4]> {
        let found = path.canonicalize().and_then(|real| {
            let (file, is) = open_file(&real)?;
            let mut magic = [0; 4];
            let _ = (&file).read(&mut magic)?;
            let (size, place) = (is.len(), (is.dev(), is.ino()));
            let text = format!("{real:?} {place:?} {size} {} {}", is.mtime(), is.mtime_nsec());
            Ok((text, magic))
        });
        let Ok((text, magic)) = found else {
            self.doubt(&path.display().to_string());
            return None;
        };
        self.add("interpreter", text);
        Some(magic)
    }

    /// Adds a file below a directory, if it is there; what is in it.
    pub fn add_if_there(&mut self, directory: &Path, name: &str, max: u64) -> Option<Vec<u8>> {
        let path = directory.join(name).display().to_string();
        let read = beneath::open_directory(directory)
            .and_then(|directory| beneath::read(&directory, Path::new(name), max));
        match read {
            Ok(bytes) => {
                self.add(&path, &bytes);
                return Some(bytes);
            }
            Err(error)
                if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {}
            Err(_) => self.doubt(&path),
        }
        None
    }

    /// Adds a file of settings of `pip`, if it is there.
    pub fn add_settings(&mut self, directory: &Path, name: &str) {
        let Some(bytes) = self.add_if_there(directory, name, FILE_MAX) else { return };
        let text = String::from_utf8_lossy(&bytes).to_lowercase().replace('_', "-");
        let names_files = ["find-links", "constraint", "requirement", "editable", "file:"]
            .iter()
            .any(|word| text.contains(word));
        if names_files || has_index_elsewhere(&text) {
            self.doubt(&directory.join(name).display().to_string());
        }
    }

    /// Adds a requirements file below a directory, and those that it includes.
    pub fn add_file(&mut self, directory: &Path, path: &Path) {
        match beneath::open_directory(directory) {
            Ok(opened) => self.add_included(&opened, directory, path, Role::Requirements),
            Err(_) => self.doubt(&path.display().to_string()),
        }
    }

    fn add_included(&mut self, opened: &File, directory: &Path, path: &Path, role: Role) {
        let name = path.display().to_string();
        match beneath::open(opened, path).and_then(|file| beneath::path_of(&file)) {
            Ok(real) if self.read.contains(&real) => return,
            Ok(real) => self.read.extend([real]),
            Err(_) => return self.doubt(&name),
        }
        let bytes = beneath::read(opened, path, FILE_MAX);
        let text = bytes.and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other));
        let text = match text {
            Ok(text) if self.read.len() <= FILES_MAX => text,
            _ => return self.doubt(&name),
        };
        self.add(&name, &text);
        if text.replace("\r\n", "\n").contains(ENDS_OF_LINES) {
            self.doubt(&name);
        }
        for line in logical_lines(&text) {
            if !line.starts_with('-') {
                self.take_line(&line, role);
                continue;
            }
            for (role, included) in self.options(&line) {
                // That of a directory is meant from the file that includes.
                let path = path.parent().unwrap_or(Path::new("")).join(&included);
                let below = path.strip_prefix(directory).unwrap_or(&path).to_owned();
                match below.is_absolute() || included.contains("://") {
                    true => self.doubt(&included),
                    false => self.add_included(opened, directory, &below, role),
                }
            }
        }
    }

    /// Looks at options of a requirements file; the files that they include.
    fn options(&mut self, line: &str) -> Vec<(Role, String)> {
        let mut included = Vec::new();
        // Quotes would have to be read as a shell reads them, and variables are of another place.
        if line.contains(['"', '\'', '\\', '$']) {
            self.doubt(line);
            return included;
        }
        let mut words = line.split_whitespace();
        while let Some(word) = words.next() {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) if word.starts_with("--") => (name, Some(value)),
                _ if word.len() > 2 && !word.starts_with("--") && word.is_char_boundary(2) => {
                    (&word[..2], Some(&word[2..]))
                }
                _ => (word, None),
            };
            if WITHOUT_VALUE.contains(&name) {
                continue;
            }
            let value = value.or_else(|| words.next()).unwrap_or_default();
            match name {
                "-r" | "--requirement" => included.push((Role::Requirements, value.to_owned())),
                "-c" | "--constraint" => included.push((Role::Constraints, value.to_owned())),
                _ if WITH_VALUE.contains(&name) => {}
                _ if PLACES.contains(&name) && is_address(value) => {}
                _ => self.doubt(line),
            }
        }
        included
    }

    /// Adds one requirement, as a line of a requirements file has it.
    pub fn add_line(&mut self, line: &str) {
        self.add("requirement", line);
        self.take_line(line, Role::Requirements);
    }

    fn take_line(&mut self, line: &str, role: Role) {
        match kind_of(line) {
            Kind::Elsewhere => self.doubt(line),
            Kind::Pinned => {}
            Kind::Loose => self.is_pinned &= role == Role::Constraints,
        }
    }

    /// What `what` stands for may have changed, and nothing here says whether it has.
    pub fn doubt(&mut self, what: &str) {
        self.unknown.get_or_insert_with(|| what.to_owned());
    }

    /// What may have changed without a trace, if there is something.
    pub fn unknown(&self) -> Option<&str> {
        self.unknown.as_deref()
    }

    /// Whether each requirement names one version.
    pub fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    /// Of all that decides.
    pub fn hash(&self) -> String {
        self.hasher.finalize().to_hex().to_string()
    }
}

/// What the lines of a file of requirements are for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Requirements,
    Constraints,
}

/// What a requirement says.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// One version.
    Pinned,
    /// Several, of which an index has the newest.
    Loose,
    /// A directory, a file or an address.
    Elsewhere,
}

fn kind_of(line: &str) -> Kind {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let wanted = line.split(';').next().unwrap_or_default();
    let wanted = wanted.split(" --").next().unwrap_or_default().trim();
    let name = wanted.split(|c| !is_name(c)).next().unwrap_or_default();
    let rest = wanted[name.len()..].trim_start();
    let rest = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((_, rest)) => rest.trim_start(),
        None => rest,
    };
    let file = wanted.split('[').next().unwrap_or_default().trim_end().to_lowercase();
    let is_archive =
        ARCHIVES.iter().any(|end| file.ends_with(end) || wanted.to_lowercase().ends_with(end));
    let is_plain = rest.is_empty() || rest.starts_with(['<', '>', '=', '!', '~', '(']);
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric())
        || !is_plain
        || is_archive
        || line.contains(['/', '\\', '$'])
    {
        return Kind::Elsewhere;
    }
    match rest.trim_matches(['(', ')', ' ']).strip_prefix("==") {
        Some(version) if !version.contains([',', '*']) => Kind::Pinned,
        _ => Kind::Loose,
    }
}

/// Whether settings of `pip`, in small letters, name an index that is no address: `index-url` may be a
/// directory. Values go on in lines that begin with a space, also behind empty ones, where keys may
/// stand, too (configparser).
fn has_index_elsewhere(text: &str) -> bool {
    let mut is_index = false;
    text.lines().any(|line| {
        let mut value = line.trim();
        if value.is_empty() || value.starts_with(['#', ';']) {
            return false;
        }
        let (key, rest) = value.split_once(['=', ':']).unwrap_or((value, ""));
        if key.contains("index-url") || key.contains("pypi-url") {
            (is_index, value) = (true, rest);
        } else if !line.starts_with(char::is_whitespace) {
            is_index = false;
        }
        is_index && !value.split_whitespace().all(is_address)
    })
}

fn is_address(place: &str) -> bool {
    place.starts_with("https://") || place.starts_with("http://")
}

/// The lines of a requirements file without comments; a line that ends in `\` goes on.
fn logical_lines(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for line in text.lines() {
        let comment = if line.trim_start().starts_with('#') { Some(0) } else { line.find(" #") };
        let comment = comment.or_else(|| line.find("\t#"));
        let (part, goes_on) = match (comment, line.strip_suffix('\\')) {
            (Some(at), _) => (&line[..at], false),
            (None, Some(part)) => (part, true),
            (None, None) => (line, false),
        };
        let last = lines.last_mut().expect("there is one");
        last.push_str(part);
        if !goes_on {
            lines.push(String::new());
        }
    }
    let trimmed = lines.iter().map(|line| line.trim()).filter(|line| !line.is_empty());
    trimmed.map(str::to_owned).collect()
}

/// What vouches for installed packages.
pub(super) struct Stamp {
    path: PathBuf,
}

impl Stamp {
    /// That of a function for packages of one kind.
    pub fn of(home: &Home, function: &str, kind: &str) -> Result<Self, HomeError> {
        Ok(Self { path: home.work(function)?.join(format!("{kind}.stamp")) })
    }

    /// Whether what lies in `target` is whole, and what `inputs` would install again.
    pub fn vouches(&self, home: &Home, inputs: &Inputs, target: &Path) -> bool {
        if inputs.unknown.is_some() {
            return false;
        }
        match (self.read(home), text(inputs, target)) {
            (Ok(old), Ok(new)) => old == new.as_bytes(),
            _ => false,
        }
    }

    /// The owner of the home may have put anything in its place.
    fn read(&self, home: &Home) -> io::Result<Vec<u8>> {
        let _acting = home.act().map_err(io::Error::other)?;
        let (Some(directory), Some(name)) = (self.path.parent(), self.path.file_name()) else {
            return Err(ErrorKind::NotFound.into());
        };
        beneath::read(beneath::open_directory(directory)?, Path::new(name), STAMP_MAX)
    }

    /// Vouches for nothing from now on.
    pub fn remove(&self, home: &Home) -> io::Result<()> {
        let _acting = home.act().map_err(io::Error::other)?;
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Vouches for what lies in `target`, if that can be known later. If it fails, nothing is vouched for.
    pub fn write(&self, home: &Home, inputs: &Inputs, target: &Path) -> io::Result<()> {
        let written = self.try_write(home, inputs, target);
        if written.is_err() {
            let _ = self.remove(home);
        }
        written
    }

    fn try_write(&self, home: &Home, inputs: &Inputs, target: &Path) -> io::Result<()> {
        if inputs.unknown.is_some() {
            return Ok(());
        }
        let text = text(inputs, target)?;
        let _acting = home.act().map_err(io::Error::other)?;
        fs::write(&self.path, text)
    }
}

/// Opens a regular file, and nothing else: to open a device has effects, and a FIFO waits.
fn open_file(path: &Path) -> io::Result<(File, fs::Metadata)> {
    let found: File = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?.into();
    let is = found.metadata()?;
    match is.is_file() {
        true => Ok((File::open(beneath::place_of(&found))?, is)),
        false => Err(ErrorKind::InvalidInput.into()),
    }
}

fn text(inputs: &Inputs, target: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hash_tree(target, &mut hasher)?;
    Ok(format!("{}\n{}\n", inputs.hash(), hasher.finalize().to_hex()))
}

/// Names, sizes and times of all that lies in a directory.
fn hash_tree(directory: &Path, hasher: &mut blake3::Hasher) -> io::Result<()> {
    let mut entries = fs::read_dir(directory)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let is = entry.metadata()?;
        let name = entry.file_name();
        let size = if is.is_dir() { 0 } else { is.len() };
        let facts = (is.mode(), size, is.mtime(), is.mtime_nsec());
        hasher.update(format!("{name:?} {facts:?}\n").as_bytes());
        if is.is_dir() {
            hash_tree(&entry.path(), hasher)?;
            hasher.update(b"\n");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is known about files of which `requirements.txt` is the first.
    fn inputs(files: &[(&str, &str)]) -> Inputs {
        let all = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = all.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let mut inputs = Inputs::new();
        inputs.add_file(&all.path().canonicalize().unwrap(), Path::new(files[0].0));
        inputs
    }

    #[test]
    fn what_files_include_decides_too() {
        let text = "# all\n-r sub/base.txt\n--constraint=pins.txt\nflask[async] == 3.1.0 ; python_version > \"3\"\n";
        let all = |base: &str, pins: &str| {
            inputs(&[("requirements.txt", text), ("sub/base.txt", base), ("pins.txt", pins)])
        };
        let one = all("-r ../requirements.txt\nidna==3.1 \\\n  --hash=sha256:00\n", "x<2\n");
        assert_eq!((one.unknown(), one.is_pinned()), (None, true));
        let again = all("-r ../requirements.txt\nidna==3.1 \\\n  --hash=sha256:00\n", "x<2\n");
        assert_eq!(one.hash(), again.hash());
        assert_ne!(one.hash(), all("idna==3.1\n", "x<2\n").hash());
        assert_ne!(all("idna\n", "x<2\n").hash(), all("idna\n", "x<3\n").hash());
        assert!(!all("idna>=3\n", "").is_pinned());
        let without = inputs(&[("requirements.txt", "-r none.txt\n")]);
        assert_eq!(without.unknown(), Some("none.txt"));
    }

    #[test]
    fn what_may_change_without_a_trace_is_known() {
        for line in [
            "./pkg",
            "-e .",
            "--editable=.",
            "pkg @ file:///tmp/pkg",
            "pkg @ https://example.org/pkg.zip",
            "git+https://example.org/pkg.git@main",
            "https://example.org/pkg-1.whl",
            "pkg-1.0-py3-none-any.whl",
            "pkg-1.0.tar.gz",
            ".",
            "file:pkg",
            "-r https://example.org/all.txt",
            "-r ../all.txt",
            "-r /etc/all.txt",
            "--find-links wheels",
            "--index-url file:///srv/index",
            "--req all.txt",
            "-i https://$HOST/simple",
            "pkg==${VERSION}",
        ] {
            assert!(inputs(&[("r.txt", line)]).unknown().is_some(), "{line}");
        }
        for line in [
            "pkg",
            "pkg (>=1)",
            "pkg[a,b]>=1,<2 # and so on",
            "-i https://example.org/simple --pre",
            "--extra-index-url=https://example.org/simple",
            "--no-binary :all:",
            "zope.interface~=7.0; python_version >= '3.9'",
        ] {
            assert_eq!(inputs(&[("r.txt", line)]).unknown(), None, "{line}");
        }
    }

    #[test]
    fn archives_with_extras_are_archives() {
        for line in ["pkg-1.0-py3-none-any.whl[extra]", "pkg.tar.lzma", "pkg.TBZ [a,b]"] {
            assert_eq!(kind_of(line), Kind::Elsewhere, "{line}");
        }
    }

    #[test]
    fn ends_of_lines_that_only_python_sees_are_doubted() {
        let all = tempfile::tempdir().unwrap();
        for (text, is_doubted) in [
            ("foo==1\r\nbar==2\r\n", false),
            ("foo==1\r-r b.txt\n", true),
            ("foo==1\u{2028}-e .", true),
        ] {
            fs::write(all.path().join("a.txt"), text).unwrap();
            let mut inputs = Inputs::new();
            inputs.add_file(all.path(), Path::new("a.txt"));
            assert_eq!(inputs.unknown().is_some(), is_doubted, "{text:?}");
        }
    }

    #[test]
    fn no_device_and_no_fifo_is_opened_as_an_interpreter() {
        let all = tempfile::tempdir().unwrap();
        let fifo = all.path().join("python");
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for path in [fifo.as_path(), Path::new("/dev/null"), all.path()] {
            let mut inputs = Inputs::new();
            inputs.add_program(path);
            assert!(inputs.unknown().is_some(), "{path:?}");
        }
    }

    #[test]
    fn pinned_is_what_names_one_version() {
        for line in ["pkg==1.0", "pkg ==1.0; os_name == 'posix'", "pkg===1.0", "pkg (==1)"] {
            assert_eq!(kind_of(line), Kind::Pinned, "{line}");
        }
        for line in ["pkg", "pkg==1.*", "pkg>=1", "pkg==1,>0", "pkg~=1.0", "pkg!=2"] {
            assert_eq!(kind_of(line), Kind::Loose, "{line}");
        }
    }

    #[test]
    fn a_stamp_vouches_for_whole_installations_only() {
        let all = tempfile::tempdir().unwrap();
        let home = Home::at(all.path()).unwrap();
        let target = home.kept("f", "packages").unwrap();
        let stamp = Stamp::of(&home, "f", "packages").unwrap();
        fs::create_dir(target.join("pkg")).unwrap();
        fs::write(target.join("pkg/a.py"), "1").unwrap();
        let mut inputs = Inputs::new();
        inputs.add_line("pkg==1");
        assert!(!stamp.vouches(&home, &inputs, &target));
        stamp.write(&home, &inputs, &target).unwrap();
        assert!(stamp.vouches(&home, &inputs, &target));
        let mut others = Inputs::new();
        others.add_line("pkg==2");
        assert!(!stamp.vouches(&home, &others, &target));
        fs::write(target.join("pkg/a.py"), "12").unwrap();
        assert!(!stamp.vouches(&home, &inputs, &target));
        stamp.write(&home, &inputs, &target).unwrap();
        fs::remove_dir_all(target.join("pkg")).unwrap();
        assert!(!stamp.vouches(&home, &inputs, &target));
        stamp.write(&home, &inputs, &target).unwrap();
        stamp.remove(&home).unwrap();
        stamp.remove(&home).unwrap();
        assert!(!stamp.vouches(&home, &inputs, &target));
        // What cannot be known is never vouched for.
        inputs.doubt("./pkg");
        stamp.write(&home, &inputs, &target).unwrap();
        assert!(!stamp.vouches(&home, &inputs, &target));
    }

    #[test]
    fn another_interpreter_is_another_file() {
        let all = tempfile::tempdir().unwrap();
        let path = all.path().join("python3");
        let hash = || {
            let mut inputs = Inputs::new();
            inputs.add_program(&path);
            (inputs.hash(), inputs.unknown().is_some())
        };
        assert!(hash().1, "there is none");
        fs::write(&path, b"\x7fELF1").unwrap();
        let first = hash();
        assert!(!first.1);
        assert_eq!(first, hash());
        fs::write(&path, b"\x7fELF22").unwrap();
        assert_ne!(first, hash());
        fs::write(&path, "#!/bin/sh\n").unwrap();
        assert!(hash().1, "a script");
    }

    #[test]
    fn settings_of_pip_count() {
        let all = tempfile::tempdir().unwrap();
        let hash = |text: Option<&str>| {
            if let Some(text) = text {
                fs::write(all.path().join("pip.conf"), text).unwrap();
            }
            let mut inputs = Inputs::new();
            inputs.add_settings(all.path(), "pip.conf");
            (inputs.hash(), inputs.unknown().is_some())
        };
        let none = hash(None);
        assert!(!none.1);
        let mirror = hash(Some("[global]\nindex-url = https://example.org/simple\n"));
        assert!(!mirror.1 && mirror != none);
        assert!(hash(Some("[install]\nfind-links = /srv\n")).1);
        for (is_doubted, text) in [
            (false, "[global]\nindex-url: https://example.org/simple\n"),
            (
                false,
                "[global]\nextra-index-url =\n    http://a/simple\n    # mirror\n    https://b/\n",
            ),
            (false, "[global]\n# index-url = /srv/index\nindex-url = https://a/\ntimeout = 60\n"),
            (true, "[global]\nindex-url = /srv/index\n"),
            (true, "[global]\n  timeout = 60\n  index-url = /srv/index\n"),
            (true, "[global]\nIndex_URL: ../index\n"),
            (true, "[global]\n--index-url = file:///srv/index\n"),
            (true, "[install]\nextra-index-url = https://a/\n\t/srv/index\n"),
            (true, "[install]\nextra-index-url =\n    https://a/\n\n    ~/index\n"),
        ] {
            assert_eq!(hash(Some(text)).1, is_doubted, "{text}");
        }
    }
}
