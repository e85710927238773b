//! Looking at a directory: its names, and small files of it.

use super::InitError;
use regex::Regex;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use thaw_home::beneath;

/// Most bytes of a file that is read.
const FILE_MAX: u64 = 1 << 20;
/// Bytes at the beginning of a file that are looked at.
const HEAD: u64 = 4096;
/// Most names of a directory that are looked at.
const NAMES_MAX: usize = 4096;
/// Most sources that are searched.
const SOURCES_MAX: usize = 64;

/// A directory to find out about.
pub(super) struct Look {
    directory: PathBuf,
    opened: File,
    /// Names of its files, in order.
    files: Vec<String>,
}

impl Look {
    /// At a directory.
    pub fn at(directory: &Path) -> Result<Self, InitError> {
        let none = || InitError::NoDirectory(directory.to_owned());
        let real = directory.canonicalize().map_err(|_| none())?;
        let opened = beneath::open_directory(&real).map_err(|_| none())?;
        let entries = real.read_dir().map_err(|_| none())?;
        let mut files: Vec<String> = entries
            .take(NAMES_MAX)
            .flatten()
            .filter(|entry| entry.path().is_file())
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        files.sort();
        Ok(Self { directory: real, opened, files })
    }

    /// Its path, without links.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether it has a file of this name, or path below it.
    pub fn has(&self, name: &str) -> bool {
        match name.contains('/') {
            true => self.directory.join(name).is_file(),
            false => self.files.iter().any(|file| file == name),
        }
    }

    /// The first of these that it has.
    pub fn first_of<'a>(&self, names: &[&'a str]) -> Option<&'a str> {
        names.iter().copied().find(|name| self.has(name))
    }

    /// Files whose names end so.
    pub fn ending(&self, suffix: &str) -> impl Iterator<Item = &str> {
        let names = self.files.iter().map(String::as_str);
        names.filter(move |name| name.ends_with(suffix) && !name.starts_with('.'))
    }

    /// The text of a file; `None`: there is none.
    ///
    /// # Errors
    /// It cannot be read, or is too large.
    pub fn text(&self, name: &str) -> Result<Option<String>, InitError> {
        self.text_within(name, FILE_MAX)
    }

    /// The same for a file of at most `max` bytes.
    ///
    /// # Errors
    /// It cannot be read, or is too large.
    pub fn text_within(&self, name: &str, max: u64) -> Result<Option<String>, InitError> {
        match beneath::read(&self.opened, Path::new(name), max) {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.unusable(name, &error.to_string())),
        }
    }

    /// The beginning of a file, which may be large; `None`: there is none that can be read.
    pub fn head(&self, name: &str) -> Option<String> {
        let file = self.has(name).then(|| beneath::open(&self.opened, Path::new(name)))?.ok()?;
        let mut bytes = Vec::new();
        file.take(HEAD).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The same for sources, of which one that cannot be read says nothing.
    pub fn source(&self, name: &str) -> Option<String> {
        self.text(name).ok().flatten()
    }

    /// Names and texts of the sources in it that end so.
    pub fn sources(&self, suffix: &str) -> Vec<(String, String)> {
        let names = self.ending(suffix).take(SOURCES_MAX);
        names.filter_map(|name| Some((name.to_owned(), self.source(name)?))).collect()
    }

    /// Names of directories in one of its directories, in order.
    pub fn directories(&self, below: &str) -> Vec<String> {
        let Ok(entries) = self.directory.join(below).read_dir() else { return Vec::new() };
        let mut names: Vec<String> = entries
            .take(NAMES_MAX)
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// Names in one of its directories, in order; of a link that leads elsewhere, none.
    pub fn names(&self, below: &str) -> Vec<String> {
        let Ok(opened) = beneath::open(&self.opened, Path::new(below)) else { return Vec::new() };
        let Ok(entries) = beneath::place_of(&opened).read_dir() else { return Vec::new() };
        let names = entries.take(NAMES_MAX).flatten();
        let mut names: Vec<String> =
            names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Files that everybody with a right to it may execute, and their first bytes.
    pub fn executables(&self) -> impl Iterator<Item = (&str, [u8; 4])> {
        self.files.iter().filter_map(|name| {
            let path = self.directory.join(name);
            let mode = path.metadata().ok()?.permissions().mode();
            let mut magic = [0; 4];
            let is_read = File::open(&path).and_then(|mut file| file.read_exact(&mut magic));
            (mode & 0o111 != 0 && is_read.is_ok()).then_some((name.as_str(), magic))
        })
    }

    /// A file that is of no use.
    pub fn unusable(&self, name: &str, reason: &str) -> InitError {
        InitError::File { path: self.directory.join(name), reason: reason.to_owned() }
    }
}

/// What sources say about the port that their program listens on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ports {
    /// Nothing, or `PORT` says it.
    None,
    /// One, and the file that says so.
    One(u16, String),
    /// Several.
    Many(Vec<u16>),
}

/// The port on which sources listen. Narrow forms decide; others are asked only without them.
pub(super) fn port(sources: &[(String, String)]) -> Ports {
    // `process.env.PORT`, `os.environ["PORT"]`, `os.Getenv("PORT")`, `ENV.fetch('PORT')` …
    let variable = Regex::new(r#"(?:env|Env|ENV)[^\n]{0,24}\bPORT\b"#).expect("it is one");
    let own = || sources.iter().filter(|(name, _)| !name.ends_with("_test.go"));
    if own().any(|(_, text)| variable.is_match(text)) {
        return Ports::None;
    }
    // Addresses behind `=`, `(` and `,` that are the program's own: `:80`, `0.0.0.0:80`, `[::]:80`.
    const OWN: &str = r#"["'](?:tcp://)?(?:0\.0\.0\.0|\[::\])?:(\d{2,5})["']"#;
    // Those of this host, which are the program's own only where it listens. Programs that listen elsewhere,
    // too, have them for diagnosis.
    const LOOPBACK: &str = r#"["'](?:127\.0\.0\.1|localhost|\[::1\]):(\d{2,5})["']"#;
    let patterns = [
        // `listen(3000`, `ListenAndServe(":8082"`, `bind("0.0.0.0:8083"`.
        format!(r#"(?i)\b(?:listen\w*|bind)\(\s*(?:["']tcp[46]?["'],\s*)?(?:{OWN}|(\d{{2,5}})\b)"#),
        // `TCPServer.new("127.0.0.1", 8089)`, `TCPServer.open 8090`.
        r#"\bTCPServer\.(?:new|open)\b[ \t(]*(?:(?:nil|["'][^"'\n]*["'])\s*,\s*)?(\d{2,5})\b"#
            .to_owned(),
        // `Server(("", 8001)`.
        // `.sin_port = htons(8000)`.
        r"\bhtons\(\s*(\d{2,5})\b".to_owned(),
        r#"Server\(\s*\(\s*["'][\w.]*["'],\s*(\d{2,5})\b"#.to_owned(),
        // `port=5000`, `:port, 4567`, `Port: 8000`, `PORT = 9000`, `server.port=8085`.
        r#"(?i)\bport\b['"]?\s*(?:[:=,]|:=)\s*(\d{2,5})\b"#.to_owned(),
        // `LocalPort => 8000`.
        r"\bLocalPort\b\s*=>\s*(\d{2,5})\b".to_owned(),
        // `server(8000`, `address = 8000`.
        r#"(?i)(?:server|address)\s*[=(]\s*(?:\(?["'][\w.]*["'],\s*)?(\d{2,5})\b"#.to_owned(),
        OWN.to_owned(),
        // `Listen("tcp", "localhost:8088"`.
        format!(r#"(?i)\b(?:listen\w*|bind)\(\s*(?:["']tcp[46]?["'],\s*)?{LOOPBACK}"#),
    ];
    for pattern in patterns.map(|pattern| Regex::new(&pattern).expect("it is one")) {
        let of_file = |(name, text): &(String, String)| {
            let all = pattern.captures_iter(text);
            let number = |captures: regex::Captures<'_>| {
                captures.iter().skip(1).flatten().next()?.as_str().parse::<u16>().ok()
            };
            let ports = all.filter_map(number).filter(|port| *port != 0);
            ports.map(|port| (port, name.clone())).collect::<Vec<_>>()
        };
        let found: BTreeMap<u16, String> = own().flat_map(of_file).collect();
        match found.len() {
            0 => {}
            1 => {
                let one = found.into_iter().next();
                return one.map_or(Ports::None, |(port, name)| Ports::One(port, name));
            }
            _ => return Ports::Many(found.into_keys().collect()),
        }
    }
    Ports::None
}

/// A text without what follows `#` in its lines.
pub(super) fn without_comments(text: &str) -> String {
    let line = |line: &str| line.split('#').next().unwrap_or_default().to_owned();
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// The program of this name in `PATH`.
pub(super) fn in_path(program: &str) -> Option<PathBuf> {
    let search = std::env::var_os("PATH")?;
    std::env::split_paths(&search).map(|path| path.join(program)).find(|path| path.is_file())
}

/// The path of an interpreter that every user may run, if the one in `PATH` is not.
pub(super) fn interpreter(program: &str) -> Option<String> {
    let is_for_all = |path: &Path| {
        let Ok(real) = path.canonicalize() else { return false };
        let mode = |path: &Path| path.metadata().map_or(0, |found| found.permissions().mode());
        mode(&real) & 0o005 == 0o005 && real.ancestors().skip(1).all(|up| mode(up) & 0o001 != 0)
    };
    match in_path(program) {
        Some(found) if is_for_all(&found) => None,
        _ => {
            let usual = Path::new("/usr/bin").join(program);
            is_for_all(&usual).then(|| usual.display().to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<u16> {
        match port(&[("app".to_owned(), text.to_owned())]) {
            Ports::One(port, _) => Some(port),
            Ports::None | Ports::Many(_) => None,
        }
    }

    #[test]
    fn ports_are_found_where_programs_name_them() {
        let cases = [
            ("app.listen(3000, () => {})", Some(3000)),
            ("app.run(host=\"0.0.0.0\", port=5000)", Some(5000)),
            ("set :port, 4567", Some(4567)),
            ("WEBrick::HTTPServer.new(Port: 8000)", Some(8000)),
            ("const PORT = 9000;", Some(9000)),
            ("HTTPServer(('', 8001), Handler)", Some(8001)),
            ("http.ListenAndServe(\":8082\", nil)", Some(8082)),
            ("s.bind(\"0.0.0.0:8083\")", Some(8083)),
            ("http.ListenAndServe(\"127.0.0.1:3008\", nil)", Some(3008)),
            ("net.Listen(\"tcp4\", \"localhost:8088\")", Some(8088)),
            (
                "http.ListenAndServe(\"localhost:6060\", nil)\nhttp.ListenAndServe(\":8082\", mux)",
                Some(8082),
            ),
            (
                "go http.ListenAndServe(\"localhost:6060\", nil)\ns := http.Server{Addr: \":8082\"}",
                Some(8082),
            ),
            ("TCPServer.new(8089)", Some(8089)),
            ("server = TCPServer.new('127.0.0.1', 8090)", Some(8090)),
            ("server = TCPServer.open 8091", Some(8091)),
            ("TCPServer.new(nil, 8092)", Some(8092)),
            ("server.port=8085", Some(8085)),
            ("address.sin_port = htons(8000);\nlisten(fd, 64);", Some(8000)),
            ("htons(port ? atoi(port) : 8080)", None),
            ("IO::Socket::INET->new(LocalPort => 8087, Listen => 5)", Some(8087)),
            ("LocalPort => $ENV{PORT} // 8080", None),
            ("app.listen(process.env.PORT || 3000)", None),
            ("port = int(os.environ.get('PORT', '8000'))", None),
            ("port := os.Getenv(\"PORT\")", None),
            // Servers of others.
            ("db = connect(\"db.local:5432\")\napp.listen(3000)", Some(3000)),
            ("db_port = 5432\napp.listen(3001)", Some(3001)),
            ("db_port = 5432", None),
            ("redis := \"redis:6379\"\nhttp.ListenAndServe(\":8084\", nil)", Some(8084)),
            ("fetch(\"localhost:9200\")", None),
            ("&redis.Options{Addr: \"localhost:6379\"}", None),
            ("TCPSocket.new('127.0.0.1', 6379)", None),
            ("port = 5432\nsock.listen(8086)", Some(8086)),
            ("a.listen(3000); b.listen(4000)", None),
            ("print(1234)", None),
            ("port = 99999", None),
            ("export(12)", None),
        ];
        for (text, expected) in cases {
            assert_eq!(found(text), expected, "{text}");
        }
    }
}
