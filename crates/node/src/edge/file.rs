//! The file of the gateway, and the files that it names.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use thaw_home::config::ConfigError;

/// Name of the file in `$THAW_HOME`.
pub const GATEWAY_FILE: &str = "gateway.toml";
/// Bytes of that file, and of each that it names.
const FILE_MAX: u64 = 4 << 20;
/// Everybody may read or write, or the group may write.
const OPEN_TO_OTHERS: u32 = 0o027;

/// Why the gateway's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GatewayFileError {
    /// The file is there and cannot be read.
    #[error("cannot read {} ({error}); correct the file, or remove it", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Its text is not valid.
    #[error(transparent)]
    Invalid(#[from] ConfigError),
    /// What it says cannot be done.
    #[error("{}: {reason}", path.display())]
    Rule {
        /// The file.
        path: PathBuf,
        /// One sentence.
        reason: String,
    },
}

/// What a file was when it was read: it is read again when this changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub path: PathBuf,
    seen: Option<(u64, u64, i64, i64)>,
}

impl Stamp {
    pub fn of(path: PathBuf) -> Self {
        // `rename` over the file and writing into it change one of these.
        let seen = fs::metadata(&path).ok().map(|m| (m.ino(), m.len(), m.mtime(), m.mtime_nsec()));
        Self { path, seen }
    }
}

/// Reads the files that the gateway's file names, below its own directory.
#[derive(Debug)]
pub(super) struct Reader {
    directory: PathBuf,
    pub stamps: Vec<Stamp>,
}

impl Reader {
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), stamps: Vec::new() }
    }

    /// A file's bytes.
    ///
    /// # Errors
    /// One sentence.
    pub fn read(&mut self, path: &Path) -> Result<Vec<u8>, String> {
        let file = self.open(path)?;
        bounded(&file).map_err(|error| unreadable(path, &error))
    }

    /// The same of a file that nobody else may read.
    ///
    /// # Errors
    /// One sentence.
    pub fn read_secret(&mut self, path: &Path) -> Result<Vec<u8>, String> {
        let file = self.open(path)?;
        let mode = file.metadata().map_err(|error| unreadable(path, &error))?.mode() & 0o777;
        if mode & OPEN_TO_OTHERS != 0 {
            return Err(format!(
                "{} has mode {mode:03o}, so that others can read or change a private key; \
                 `chmod 600` it",
                path.display()
            ));
        }
        bounded(&file).map_err(|error| unreadable(path, &error))
    }

    fn open(&mut self, path: &Path) -> Result<File, String> {
        let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
        if !is_below {
            return Err(format!(
                "{} is not below $THAW_HOME, and the daemon sees no other files; copy it there \
                 and name it as in \"tls/key.pem\"",
                path.display()
            ));
        }
        let whole = self.directory.join(path);
        self.stamps.push(Stamp::of(whole.clone()));
        File::open(&whole).map_err(|error| unreadable(path, &error))
    }
}

fn unreadable(path: &Path, error: &io::Error) -> String {
    let hint = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; it has to belong to the daemon's user: `chown --reference=$THAW_HOME` it"
        }
        _ => "",
    };
    format!("cannot read {} ({error}){hint}", path.display())
}

/// The bytes of a file that is not too large.
pub(super) fn bounded(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > FILE_MAX {
        true => Err(io::Error::other(format!("it is larger than {} MiB", FILE_MAX >> 20))),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn keys_that_others_can_read_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        fs::write(&path, "k").unwrap();
        for (mode, is_taken) in [(0o600, true), (0o640, true), (0o644, false), (0o660, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let read = Reader::new(directory.path()).read_secret("key".as_ref());
            assert_eq!(read.is_ok(), is_taken, "{mode:o} {read:?}");
        }
    }

    #[test]
    fn files_lie_below_the_directory_and_have_a_bound() {
        let directory = tempfile::tempdir().unwrap();
        let mut reader = Reader::new(directory.path());
        for path in ["/etc/passwd", "../x", "a/../../x", "./x/.."] {
            assert!(reader.read(path.as_ref()).unwrap_err().contains("is not below"), "{path}");
        }
        let large = File::create(directory.path().join("large")).unwrap();
        large.set_len(FILE_MAX + 1).unwrap();
        assert!(reader.read("large".as_ref()).unwrap_err().contains("larger"));
        assert!(reader.read("none".as_ref()).unwrap_err().contains("none"));
        assert_eq!(reader.stamps.len(), 2);
    }
}
