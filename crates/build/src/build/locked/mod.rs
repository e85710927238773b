//! Lock files of uv and Poetry as requirements of `pip`: exactly the locked versions, each with the
//! hashes of its archives.
//!
//! `pip` installs them, so that a build needs neither uv nor Poetry and runs what it has run before.
//! It gets a requirements file with `--require-hashes`, which refuses an archive that the lock file
//! does not know, and `--no-deps`, since a lock file is complete: a package that it does not name is
//! not installed. Conditions of the lock file stay markers (PEP 508), which `pip` judges for the
//! interpreter that it runs in (docs/decisions/0081-pip-installs-what-a-lock-file-names.md).

mod fresh;
mod poetry;
mod uv;
mod ways;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

/// Most bytes of a lock file. Those of a thousand packages have some three million.
pub(crate) const LOCK_MAX: u64 = 16 << 20;
/// Most packages of a lock file.
const PACKAGES_MAX: usize = 10_000;
/// Most bytes of a condition.
const MARKER_MAX: usize = 4096;
/// The index that `pip` asks without being told.
const PYPI: &str = "https://pypi.org/simple";
/// Destinations that `pip` connects to for it.
pub(crate) const PYPI_DESTINATIONS: [&str; 2] = ["pypi.org:443", "files.pythonhosted.org:443"];
/// Hashes that `pip` checks. Weaker ones do not count.
const HASHES: [&str; 3] = ["sha256:", "sha384:", "sha512:"];

/// Who has written a lock file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockFile {
    /// `uv.lock`, <https://docs.astral.sh/uv/concepts/projects/layout/#the-lockfile>.
    Uv,
    /// `poetry.lock`, <https://python-poetry.org/docs/basic-usage/#committing-your-poetrylock-file-to-version-control>.
    Poetry,
}

impl LockFile {
    /// All of them, the likelier one of a project with both first.
    pub(crate) const ALL: [Self; 2] = [Self::Uv, Self::Poetry];

    /// Its name in a project.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Uv => "uv.lock",
            Self::Poetry => "poetry.lock",
        }
    }

    /// The one that a path names.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?;
        Self::ALL.into_iter().find(|lock| name == lock.name())
    }

    /// The command that makes it anew.
    fn renew(self) -> &'static str {
        match self {
            Self::Uv => "uv lock",
            Self::Poetry => "poetry lock",
        }
    }
}

/// What a lock file has `pip` install.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Locked {
    /// Names of the packages, as PEP 503 normalizes them.
    pub names: BTreeSet<String>,
    /// Lines of the requirements file.
    pub lines: Vec<String>,
    /// Destinations that `pip` connects to, `HOST:PORT`.
    pub destinations: BTreeSet<String>,
}

impl Locked {
    /// What the text of a lock file says for the project of a pyproject.toml.
    ///
    /// # Errors
    /// Why `pip` cannot install so, and the way out.
    pub(crate) fn read(file: LockFile, text: &str, project: &str) -> Result<Self, String> {
        let project = project.parse().map_err(|error| format!("its pyproject.toml: {error}"))?;
        let pins = match file {
            LockFile::Uv => uv::pins(text, &project),
            LockFile::Poetry => poetry::pins(text, &project),
        };
        let mut locked = Self::default();
        let mut indexes = BTreeSet::new();
        for pin in pins? {
            let (own, is_index) = match &pin.origin {
                Origin::Index(url) => (url, url.trim_end_matches('/') != PYPI),
                Origin::Archive(url) => (url, false),
            };
            if is_index {
                indexes.insert(own.clone());
            }
            for url in [own].into_iter().chain(&pin.archives) {
                let named = destination(url).map_err(|why| format!("{}: {why}", pin.name))?;
                if named == PYPI_DESTINATIONS[0] {
                    locked.destinations.extend(PYPI_DESTINATIONS.map(str::to_owned));
                }
                locked.destinations.insert(named);
            }
            locked.lines.push(pin.line(file)?);
            locked.names.insert(pin.name);
        }
        locked.lines.sort();
        // Whichever index answers: the hashes decide. `pip` asks its own one unless there is another.
        let asks_own = locked.destinations.contains(PYPI_DESTINATIONS[0]);
        let options = indexes.iter().enumerate().map(|(number, url)| match number {
            0 if !asks_own => format!("--index-url {url}"),
            _ => format!("--extra-index-url {url}"),
        });
        locked.lines.splice(0..0, options.collect::<Vec<_>>());
        Ok(locked)
    }

    /// The text of the requirements file.
    pub(crate) fn text(&self) -> String {
        self.lines.iter().fold(String::new(), |mut text, line| {
            let _ = writeln!(text, "{line}");
            text
        })
    }
}

/// Where a locked package is from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Origin {
    /// An index (PEP 503).
    Index(String),
    /// An archive at an address.
    Archive(String),
}

/// A package that a lock file fixes.
#[derive(Clone, Debug)]
struct Pin {
    /// As PEP 503 normalizes it.
    name: String,
    version: String,
    origin: Origin,
    /// Addresses of its archives, for an index that keeps them elsewhere.
    archives: Vec<String>,
    hashes: Vec<String>,
    /// When it is wanted; empty: always.
    marker: String,
}

impl Pin {
    /// Its line of a requirements file.
    fn line(&self, file: LockFile) -> Result<String, String> {
        let Self { name, version, .. } = self;
        check_name(name)?;
        let mut line = match &self.origin {
            Origin::Index(_) => {
                check_version(name, version)?;
                format!("{name}=={version}")
            }
            Origin::Archive(url) => format!("{name} @ {url}"),
        };
        if !self.marker.is_empty() {
            let _ = write!(line, " ; {}", self.marker);
        }
        let mut hashes: Vec<_> = self.hashes.iter().filter(|hash| is_strong(hash)).collect();
        hashes.sort();
        hashes.dedup();
        if hashes.is_empty() {
            return Err(format!(
                "{name} has no hash in it that pip checks (sha256, sha384 or sha512); run `{}`, or name a \
                 requirements.txt as `requirements`",
                file.renew()
            ));
        }
        for hash in hashes {
            let _ = write!(line, " --hash={hash}");
        }
        Ok(line)
    }
}

/// What to do about a package that is neither of an index nor an archive with a hash.
fn elsewhere(name: &str, from: &str) -> String {
    format!(
        "{name} is from {from}, of which pip checks no hash; install it with the command of [build] and name \
         its site-packages as `packages` in [runtime] in place of `requirements`"
    )
}

/// A name as PEP 503 normalizes it.
fn normal(name: &str) -> String {
    let mut normal = String::new();
    for c in name.chars().map(|c| c.to_ascii_lowercase()) {
        match c {
            '-' | '_' | '.' if normal.ends_with('-') => {}
            '-' | '_' | '.' => normal.push('-'),
            c => normal.push(c),
        }
    }
    normal
}

/// Refuses a name that is none.
fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    match name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(is_plain) {
        true => Ok(()),
        false => Err(format!("{name:?} is no name of a package")),
    }
}

/// Refuses a version that is none.
fn check_version(name: &str, version: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ".+!-_".contains(c);
    match version.starts_with(|c: char| c.is_ascii_alphanumeric()) && version.chars().all(is_plain)
    {
        true => Ok(()),
        false => Err(format!("{version:?} is no version of {name}")),
    }
}

/// A condition, which cannot leave its place in a requirements file.
fn check_marker(text: &str) -> Result<&str, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || " ._'\"<>=!~(),*+-".contains(c);
    match text.len() <= MARKER_MAX && text.chars().all(is_plain) && !text.contains(" -") {
        true => Ok(text.trim()),
        false => Err(format!("{:?} is no marker", text.chars().take(80).collect::<String>())),
    }
}

fn is_strong(hash: &str) -> bool {
    let digits = HASHES.into_iter().find_map(|kind| hash.strip_prefix(kind));
    digits.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// `HOST:PORT` of an address, which cannot leave its place in a requirements file.
fn destination(url: &str) -> Result<String, String> {
    let refused = |why: &str| {
        // No message shows a password.
        let shown = if url.contains('@') { "…@…" } else { url };
        Err(format!("its address {:?} {why}", shown.chars().take(200).collect::<String>()))
    };
    let is_plain = |c: char| c.is_ascii_graphic() && !"\"'$\\<>`".contains(c);
    if !url.chars().all(is_plain) {
        return refused("is none");
    }
    let (rest, port) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
        (Some(rest), _) => (rest, 443),
        (_, Some(rest)) => (rest, 80),
        _ => {
            return refused(
                "is neither of https nor of http; publish the package, or copy its files",
            );
        }
    };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if authority.contains('@') {
        return refused("has a password in it; take it out, and lock again");
    }
    match authority.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
            Ok(authority.to_owned())
        }
        None if !authority.is_empty() => Ok(format!("{authority}:{port}")),
        _ => refused("names no host"),
    }
}

/// The parts of a line that asks for a package (PEP 508), as far as they say which.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Asked {
    /// As PEP 503 normalizes it.
    name: String,
    extras: BTreeSet<String>,
    /// What follows the name: `>=1,<2`, or `@ https://…`.
    versions: String,
    marker: String,
}

impl Asked {
    /// What a line asks for; `None`: it is none.
    fn parse(line: &str) -> Option<Self> {
        let (line, marker) = line.split_once(';').unwrap_or((line, ""));
        let is_name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let end = line.trim_start().find(|c| !is_name(c)).unwrap_or(line.trim_start().len());
        let (name, rest) = line.trim_start().split_at(end);
        let rest = rest.trim();
        let (extras, versions) = match rest.strip_prefix('[') {
            Some(rest) => rest.split_once(']')?,
            None => ("", rest),
        };
        let versions = versions.trim().trim_start_matches('(').trim_end_matches(')');
        let extras = extras.split(',').map(|extra| normal(extra.trim()));
        (!name.is_empty()).then(|| Self {
            name: normal(name),
            extras: extras.filter(|extra| !extra.is_empty()).collect(),
            versions: versions.trim().to_owned(),
            marker: marker.trim().to_owned(),
        })
    }
}

#[cfg(test)]
mod tests;
