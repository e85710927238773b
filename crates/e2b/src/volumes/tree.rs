//! Files of a volume as E2B's content API wants them, by paths from the volume's root on. No symbolic
//! link is followed: a path with one in it leads nowhere.

use crate::problem::{Kind, Problem};
use serde_json::{Value, json};
use std::io;
use std::time::{Duration, Instant, UNIX_EPOCH};
use thaw_abi::control::FileAttributes;
use thaw_sandbox::VolumeClient;

/// Most bytes of a path, and of a part of it.
const PATH_MAX: usize = 4095;
const NAME_MAX: usize = 255;
/// Deepest that a list goes, and directories are made: as deep as a volume is.
pub const DEPTH_MAX: u32 = 64;
/// Most entries of a list.
const ENTRIES_MAX: usize = 10_000;
/// Most bytes of a list: JSON writes a control character as six bytes, so names may be long there.
const LIST_BYTES_MAX: usize = 8 << 20;
/// How long a list, or the removal of a directory, may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Permissions of new files and directories.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

/// A path in a volume: its parts, joined by slashes, without one at the beginning; empty: the root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place(String);

impl Place {
    /// What a client names.
    ///
    /// # Errors
    /// It is too long or deep, or leads up.
    pub fn parse(path: &str) -> Result<Self, Problem> {
        let wrong = |why: &str| Err(Problem::invalid(format!("{path:?} is no path here: {why}")));
        if path.len() > PATH_MAX {
            return Err(Problem::invalid(format!("a path has up to {PATH_MAX} bytes")));
        }
        let is_part = |part: &&str| !matches!(*part, "" | ".");
        let parts: Vec<&str> = path.split('/').filter(is_part).collect();
        if parts.contains(&"..") || path.contains('\0') {
            return wrong("`..` and NUL bytes are not taken");
        }
        if parts.iter().any(|part| part.len() > NAME_MAX) {
            return wrong("a name has up to 255 bytes");
        }
        if parts.len() > DEPTH_MAX as usize {
            return wrong("a volume is 64 directories deep");
        }
        Ok(Self(parts.join("/")))
    }

    /// As the host takes it.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// Refuses the root.
    fn inside(&self) -> Result<(), Problem> {
        match self.0.is_empty() {
            true => {
                Err(Problem::invalid("the root of the volume cannot be meant; name what is in it"))
            }
            false => Ok(()),
        }
    }

    /// The directories above it, the highest first.
    fn above(&self) -> impl Iterator<Item = &str> {
        self.0.match_indices('/').map(|(at, _)| &self.0[..at])
    }
}

/// What the host says of a place.
pub fn failed(place: &Place, error: &io::Error) -> Problem {
    let kind = match error.raw_os_error() {
        Some(libc::ENOENT) => Kind::NotFound,
        Some(libc::EEXIST) => Kind::Exists,
        Some(libc::EDQUOT | libc::ENOSPC) => Kind::NoSpace,
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM) => Kind::Exhausted,
        Some(libc::EACCES | libc::EPERM) => Kind::Forbidden,
        Some(
            libc::ENOTDIR
            | libc::EISDIR
            | libc::EINVAL
            | libc::ELOOP
            | libc::ENAMETOOLONG
            | libc::ENOTEMPTY
            | libc::EOVERFLOW
            | libc::ENXIO,
        ) => Kind::Invalid,
        _ => Kind::Busy,
    };
    let why = match kind {
        Kind::NoSpace => "the volume is full".to_owned(),
        Kind::Invalid => format!("{error}; links are not followed, and only regular files opened"),
        _ => error.to_string(),
    };
    Problem::new(kind, format!("/{}: {why}", place.0))
}

fn shown(client: &VolumeClient, place: &Place, found: &FileAttributes) -> Result<Value, Problem> {
    let kind = found.mode & libc::S_IFMT;
    let since_epoch = Duration::new(
        u64::try_from(found.mtime_sec).unwrap_or(0),
        found.mtime_nsec.min(999_999_999),
    );
    let time = UNIX_EPOCH.checked_add(since_epoch).unwrap_or(UNIX_EPOCH);
    let time = humantime::format_rfc3339_nanos(time).to_string();
    let mut shown = json!({
        "name": place.name(),
        "type": match kind {
            libc::S_IFREG => "file",
            libc::S_IFDIR => "directory",
            libc::S_IFLNK => "symlink",
            _ => "unknown",
        },
        "path": format!("/{}", place.0),
        "size": found.size,
        "mode": found.mode & 0o7777,
        // All files are the program's own user's.
        "uid": 0,
        "gid": 0,
        "atime": time,
        "mtime": time,
        "ctime": time,
    });
    if kind == libc::S_IFLNK {
        let target = client.read_link(place.bytes()).map_err(|error| failed(place, &error))?;
        shown["target"] = json!(String::from_utf8_lossy(&target));
    }
    Ok(shown)
}

fn is_directory(found: &FileAttributes) -> bool {
    found.mode & libc::S_IFMT == libc::S_IFDIR
}

fn look(client: &VolumeClient, place: &Place) -> Result<FileAttributes, Problem> {
    client.stat(place.bytes()).map_err(|error| failed(place, &error))
}

/// What is at a place.
pub fn stat(client: &VolumeClient, place: &Place) -> Result<Value, Problem> {
    shown(client, place, &look(client, place)?)
}

/// What has a name in a directory; names that are no text cannot be asked for.
fn below(place: &Place, name: &[u8]) -> Option<Place> {
    let name = std::str::from_utf8(name).ok()?;
    Some(Place(if place.0.is_empty() { name.to_owned() } else { format!("{}/{name}", place.0) }))
}

/// All that is in a directory, and so many levels below, as JSON. Other threads have better things to do
/// than to write so much text.
pub fn list(client: &VolumeClient, place: &Place, depth: u32) -> Result<Vec<u8>, Problem> {
    list_within(client, place, depth, LIST_BYTES_MAX)
}

fn list_within(
    client: &VolumeClient,
    place: &Place,
    depth: u32,
    bytes_max: usize,
) -> Result<Vec<u8>, Problem> {
    if !(1..=DEPTH_MAX).contains(&depth) {
        return Err(Problem::invalid(format!("`depth` is between 1 and {DEPTH_MAX}")));
    }
    let too_much = |why: String| {
        Err(Problem::invalid(format!("a list of /{} {why}; list less of it", place.0)))
    };
    let until = Instant::now() + PATIENCE;
    let (mut all, mut len, mut next) = (Vec::new(), 2, vec![(place.clone(), 1)]);
    while let Some((directory, level)) = next.pop() {
        let mut skip = 0;
        loop {
            let names = client.names(directory.bytes(), skip);
            let names = names.map_err(|error| failed(&directory, &error))?;
            if names.is_empty() {
                break;
            }
            skip += names.len();
            for found in names.iter().filter_map(|name| below(&directory, name)) {
                if all.len() >= ENTRIES_MAX || Instant::now() > until {
                    return too_much(format!(
                        "has more entries than the {ENTRIES_MAX} that are listed at once, or takes \
                         too long"
                    ));
                }
                // What has gone meanwhile is not listed.
                let Ok(attributes) = client.stat(found.bytes()) else { continue };
                let entry = shown(client, &found, &attributes)?.to_string();
                len += entry.len() + 1;
                if len > bytes_max {
                    return too_much(format!("has more than {bytes_max} bytes"));
                }
                all.push((found.clone(), entry));
                if is_directory(&attributes) && level < depth {
                    next.push((found, level + 1));
                }
            }
        }
    }
    all.sort_by(|(a, _), (b, _)| a.0.cmp(&b.0));
    let mut text = Vec::with_capacity(len);
    text.push(b'[');
    for (number, (_, entry)) in all.into_iter().enumerate() {
        if number > 0 {
            text.push(b',');
        }
        text.extend_from_slice(entry.as_bytes());
    }
    text.push(b']');
    Ok(text)
}

fn make_parents(client: &VolumeClient, place: &Place) -> Result<(), Problem> {
    for directory in place.above() {
        match client.make_directory(directory.as_bytes(), DIRECTORY_MODE) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(place, &error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Makes a directory; with `force` those above it, too, and one that is there is as good.
pub fn make_directory(
    client: &VolumeClient,
    place: &Place,
    mode: Option<u32>,
    force: bool,
) -> Result<Value, Problem> {
    place.inside()?;
    if force {
        make_parents(client, place)?;
    }
    match client.make_directory(place.bytes(), mode.unwrap_or(DIRECTORY_MODE)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && force => {
            if !is_directory(&look(client, place)?) {
                return Err(failed(place, &error));
            }
        }
        made => made.map_err(|error| failed(place, &error))?,
    }
    stat(client, place)
}

/// Changes permissions.
pub fn change(client: &VolumeClient, place: &Place, mode: Option<u32>) -> Result<Value, Problem> {
    if let Some(mode) = mode {
        if look(client, place)?.mode & libc::S_IFMT == libc::S_IFLNK {
            return Err(Problem::invalid("a symbolic link has no permissions of its own"));
        }
        let changed = client.set_permissions(place.bytes(), mode);
        changed.map_err(|error| failed(place, &error))?;
    }
    stat(client, place)
}

/// Writes a file from its beginning on: `next` gives its bytes, and none at the end.
pub fn write<B: AsRef<[u8]>>(
    client: &VolumeClient,
    place: &Place,
    mode: Option<u32>,
    force: bool,
    mut next: impl FnMut() -> Result<Option<B>, Problem>,
) -> Result<Value, Problem> {
    place.inside()?;
    if force {
        make_parents(client, place)?;
    }
    let wrong = |error: io::Error| failed(place, &error);
    let file = client.open_to_write(place.bytes(), mode.unwrap_or(FILE_MODE)).map_err(wrong)?;
    client.set_len(&file, 0).map_err(wrong)?;
    while let Some(bytes) = next()? {
        client.append(&file, bytes.as_ref()).map_err(wrong)?;
    }
    change(client, place, mode)
}

/// Removes a file, or a directory with all in it. What is there when the time is over stays.
pub fn remove(client: &VolumeClient, place: &Place) -> Result<(), Problem> {
    place.inside()?;
    let until = Instant::now() + PATIENCE;
    if !is_directory(&look(client, place)?) {
        return client.unlink(place.bytes()).map_err(|error| failed(place, &error));
    }
    let mut ways = vec![place.clone()];
    'directories: while let Some(directory) = ways.last().cloned() {
        let wrong = |error: io::Error| failed(&directory, &error);
        loop {
            let names = client.names(directory.bytes(), 0).map_err(wrong)?;
            if names.is_empty() {
                break;
            }
            for name in names {
                if Instant::now() > until {
                    let message =
                        format!("/{} has more in it than can be removed at once", place.0);
                    return Err(Problem::new(Kind::Late, format!("{message}; remove it again")));
                }
                let Some(found) = below(&directory, &name) else {
                    return Err(Problem::invalid(format!(
                        "/{} has a file whose name is no text; remove it from a sandbox",
                        directory.0
                    )));
                };
                match client.stat(found.bytes()) {
                    Ok(attributes) if is_directory(&attributes) => {
                        ways.push(found);
                        continue 'directories;
                    }
                    Ok(_) => match client.unlink(found.bytes()) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => {
                            return Err(failed(&found, &error));
                        }
                        _ => {}
                    },
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(failed(&found, &error)),
                }
            }
        }
        match client.remove_directory(directory.bytes()) {
            // Somebody else has put something there meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ENOTEMPTY) => {
                if Instant::now() > until {
                    return Err(wrong(error));
                }
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(wrong(error)),
            _ => drop(ways.pop()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use thaw_home::config::ByteSize;
    use thaw_home::home::Home;
    use thaw_home::volumes::VolumeStore;
    use thaw_sandbox::{BoundAccess, VolumeShare};
    use thaw_store::Name;

    struct Of {
        directory: tempfile::TempDir,
        client: VolumeClient,
    }

    fn volume() -> Of {
        let directory = tempfile::tempdir().unwrap();
        let store = VolumeStore::of(Home::at(directory.path().join("home")).unwrap());
        let name = Name::new("v").unwrap();
        store.create(&name, ByteSize(1 << 20), &[], None).unwrap();
        let mount = store.of_operator(&name, BoundAccess::Write, &VolumeShare::default()).unwrap();
        Of { directory, client: VolumeClient::new(&mount) }
    }

    impl Of {
        fn files(&self) -> std::path::PathBuf {
            self.directory.path().join("home/volumes/v/files")
        }

        fn put(&self, path: &str, content: &[u8]) -> Result<Value, Problem> {
            let mut pieces = vec![content.to_vec()];
            write(&self.client, &at(path), None, true, || Ok(pieces.pop()))
        }
    }

    fn at(path: &str) -> Place {
        Place::parse(path).unwrap()
    }

    #[test]
    fn paths_stay_in_the_volume() {
        for (path, place) in [("/a/b", "a/b"), ("a//./b/", "a/b"), ("/", ""), ("", "")] {
            assert_eq!(at(path), Place(place.into()));
        }
        let long = "x".repeat(256);
        let deep = "/d".repeat(65);
        for path in ["..", "/a/../b", "a/..", "a\0b", &long, &deep, &"/x".repeat(3000)] {
            assert_eq!(Place::parse(path).unwrap_err().kind, Kind::Invalid, "{path}");
        }
    }

    #[test]
    fn files_are_written_listed_and_removed() {
        let of = volume();
        let client = &of.client;
        let missing = write(client, &at("a/b"), None, false, || Ok(None::<Vec<u8>>));
        assert_eq!(missing.unwrap_err().kind, Kind::NotFound);
        let written = of.put("/a/b/c.txt", &[7; 20_000]).unwrap();
        assert_eq!((&written["size"], &written["path"]), (&json!(20_000), &json!("/a/b/c.txt")));
        let file = client.open(b"a/b/c.txt").unwrap();
        let mut bytes = vec![0; 30_000];
        assert_eq!((file.read_at(&mut bytes, 0).unwrap(), file.size()), (20_000, 20_000));
        // What is written again is not longer than it says.
        assert_eq!(of.put("a/b/c.txt", b"short").unwrap()["size"], 5);
        let names = |depth| {
            let all: Value =
                serde_json::from_slice(&list(client, &at("/"), depth).unwrap()).unwrap();
            let names = all.as_array().unwrap().iter().map(|one| one["path"].clone());
            names.collect::<Vec<_>>()
        };
        assert_eq!((names(1), names(2)), (vec![json!("/a")], vec![json!("/a"), json!("/a/b")]));
        assert!(list(client, &at("/"), 0).is_err() && list(client, &at("/"), 65).is_err());
        assert_eq!(make_directory(client, &at("a"), None, false).unwrap_err().kind, Kind::Exists);
        make_directory(client, &at("a"), None, true).unwrap();
        assert_eq!(change(client, &at("a/b/c.txt"), Some(0o640)).unwrap()["mode"], 0o640);
        assert_eq!(remove(client, &at("/")).unwrap_err().kind, Kind::Invalid);
        remove(client, &at("a")).unwrap();
        assert_eq!(remove(client, &at("a")).unwrap_err().kind, Kind::NotFound);
        assert_eq!(names(64), Vec::<Value>::new());
    }

    #[test]
    fn a_list_has_a_bound_in_bytes_as_json_writes_them() {
        let of = volume();
        // What no name holds is in the target of a link.
        symlink("\u{1}".repeat(1000), of.files().join("link")).unwrap();
        let most = |bytes| list_within(&of.client, &at("/"), 1, bytes);
        let (whole, refused) = (most(7000).unwrap(), most(6000).unwrap_err());
        assert!((6000..7000).contains(&whole.len()), "{}", whole.len());
        assert_eq!(refused.kind, Kind::Invalid);
        let listed: Value = serde_json::from_slice(&whole).unwrap();
        assert_eq!(listed[0]["target"], "\u{1}".repeat(1000));
    }

    #[test]
    fn no_link_of_a_guest_leads_out() {
        let of = volume();
        let client = &of.client;
        std::fs::write(of.directory.path().join("secret"), "secret").unwrap();
        symlink(of.directory.path().join("secret"), of.files().join("link")).unwrap();
        symlink("/", of.files().join("root")).unwrap();
        assert_eq!(stat(client, &at("link")).unwrap()["type"], "symlink");
        assert_eq!(stat(client, &at("root")).unwrap()["target"], "/");
        for path in ["link", "root", "root/etc/passwd"] {
            let refused = client.open(path.as_bytes()).map_err(|error| failed(&at(path), &error));
            assert_eq!(refused.map(drop).unwrap_err().kind, Kind::Invalid, "{path}");
            assert!(list(client, &at(path), 1).is_err(), "{path}");
        }
        assert!(of.put("link", b"x").is_err() && of.put("root/tmp/x", b"x").is_err());
        assert!(change(client, &at("link"), Some(0o777)).is_err());
        // A link goes; what it leads to stays.
        remove(client, &at("link")).unwrap();
        remove(client, &at("root")).unwrap();
        assert_eq!(std::fs::read(of.directory.path().join("secret")).unwrap(), b"secret");
    }

    #[test]
    fn a_full_volume_takes_no_more() {
        let of = volume();
        assert_eq!(of.put("big", &vec![0; 2 << 20]).unwrap_err().kind, Kind::NoSpace);
        remove(&of.client, &at("big")).unwrap();
        of.put("small", b"fits").unwrap();
    }
}
