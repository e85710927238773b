//! What `thaw run` mounts: `--bind`, `--volume` and `--tmpfs`.

use crate::failure::Failure;
use std::path::Path;
use thaw_home::home::Home;
use thaw_home::volumes::{VolumeError, VolumeStore};
use thaw_node::remote::SandboxVolume;
use thaw_sandbox::{BoundAccess, BoundDirectory, HostPolicy, Mount, MountKind, VolumeShare};
use thaw_store::Name;

/// Opens what the options name. Binds come first, in order, so that a file
/// system in memory may hide a part of one.
pub fn open(
    binds: &[String],
    tmpfs: &[String],
    policy: &HostPolicy,
) -> Result<Vec<Mount>, Failure> {
    let mut mounts = Vec::new();
    for option in binds {
        let Bind { host, guest, access } = parse(option)?;
        let directory = BoundDirectory::open_with(Path::new(host), access, policy)
            .map_err(|error| Failure::failed(format!("cannot mount {host}: {error}")))?;
        mounts.push(Mount { at: guest.into(), kind: MountKind::Bind(directory) });
    }
    for guest in tmpfs {
        check_guest(guest, guest)?;
        mounts.push(Mount { at: guest.into(), kind: MountKind::Tmpfs });
    }
    Ok(mounts)
}

/// Most volumes of a program.
const VOLUMES_MAX: usize = 16;

/// Whether `--volume` names a volume, rather than a directory of this host: as with docker(1), one
/// that is no path.
pub fn names_volume(option: &str) -> bool {
    let source = option.split(':').next().unwrap_or_default();
    !source.is_empty() && !source.contains('/') && !matches!(source, "." | "..")
}

/// A mount of `--volume`, which may be written unless it says otherwise.
pub fn writable(option: &str) -> String {
    match option.ends_with(":ro") || option.ends_with(":rw") {
        true => option.to_owned(),
        false => format!("{option}:rw"),
    }
}

/// The volumes that `--volume` names, for a sandbox of the daemon.
///
/// # Errors
/// One is a directory of this host, or makes no sense.
pub fn of_sandbox(options: &[String]) -> Result<Vec<SandboxVolume>, Failure> {
    let one = |option: &String| {
        if !names_volume(option) {
            return Err(Failure::misused(format!(
                "--volume {option}: a sandbox of the daemon can have volumes, and no directories of \
                 this host; `thaw sandbox cp` copies files, and root makes a directory a volume with \
                 `thaw volume create NAME --host DIRECTORY`"
            )));
        }
        let option = writable(option);
        let Bind { host: name, guest, access } = parse(&option)?;
        let name = Name::new(name)
            .map_err(|error| Failure::misused(format!("--volume {option}: {error}")))?;
        let read_only = access == BoundAccess::Read;
        Ok(SandboxVolume { name: name.to_string(), path: guest.to_owned(), read_only })
    };
    options.iter().map(one).collect()
}

/// Opens the volumes that `--volume` names.
pub fn open_volumes<E>(
    options: &[String],
    home: impl FnOnce() -> Result<Home, E>,
) -> Result<Vec<Mount>, Failure>
where
    Failure: From<E>,
{
    if options.is_empty() {
        return Ok(Vec::new());
    }
    if options.len() > VOLUMES_MAX {
        return Err(Failure::misused(format!("a program can have {VOLUMES_MAX} volumes at most")));
    }
    let volumes = VolumeStore::of(home()?);
    let open = |option: &String| {
        let Bind { host: name, guest, access } = parse(option)?;
        let hint = "for a directory of this host, write a path, as in ./data:/data";
        let name = Name::new(name)
            .map_err(|error| Failure::misused(format!("--volume {option}: {error}; {hint}")))?;
        let opened = volumes.of_operator(&name, access, &VolumeShare::whole());
        let volume = opened.map_err(|error| {
            let hint = format!("; {hint}");
            let hint = if matches!(error, VolumeError::Missing(_)) { &*hint } else { "" };
            Failure::failed(format!("--volume {option}: {error}{hint}"))
        })?;
        Ok(Mount { at: guest.into(), kind: MountKind::Volume(volume) })
    };
    options.iter().map(open).collect()
}

#[derive(Debug, PartialEq, Eq)]
struct Bind<'a> {
    host: &'a str,
    guest: &'a str,
    access: BoundAccess,
}

fn parse(option: &str) -> Result<Bind<'_>, Failure> {
    let (rest, access) = match option.strip_suffix(":rw") {
        Some(rest) => (rest, BoundAccess::Write),
        None => (option.strip_suffix(":ro").unwrap_or(option), BoundAccess::Read),
    };
    let Some((host, guest)) = rest.split_once(':').filter(|(host, _)| !host.is_empty()) else {
        let wanted = "give a directory of this host and where it goes, as in ./data:/data";
        return Err(Failure::misused(format!("cannot mount {rest}: {wanted}")));
    };
    if let Some((_, mode)) = guest.rsplit_once(':') {
        return Err(Failure::misused(format!(
            "cannot mount {rest}: `{mode}` is no mode; write ro or rw"
        )));
    }
    check_guest(rest, guest)?;
    Ok(Bind { host, guest, access })
}

/// A mount point is an absolute path without `.` and `..`, and not the root.
fn check_guest(option: &str, guest: &str) -> Result<(), Failure> {
    let plain = |part: &str| !matches!(part, "." | "..");
    let good = guest.starts_with('/')
        && guest.split('/').all(plain)
        && !guest.trim_matches('/').is_empty()
        && !guest.contains(':');
    if good {
        return Ok(());
    }
    let wanted = "the place in the sandbox must be an absolute path, such as /data";
    Err(Failure::misused(format!("cannot mount {option}: {wanted}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binds_are_read() {
        let bind = |host, guest, access| Bind { host, guest, access };
        let read = parse("./data:/data").unwrap();
        assert_eq!(read, bind("./data", "/data", BoundAccess::Read));
        assert_eq!(parse("/a:/b:ro").unwrap(), bind("/a", "/b", BoundAccess::Read));
        assert_eq!(parse("/a:/b/c:rw").unwrap(), bind("/a", "/b/c", BoundAccess::Write));
    }

    #[test]
    fn what_is_no_bind_is_refused() {
        for option in ["", "/a", "/a:", ":/b", "/a:b", "/a:/", "/a:/b/../c", "/a:/b:rx", "/a:rw"] {
            assert!(parse(option).is_err(), "{option}");
        }
    }

    #[test]
    fn a_wrong_mode_is_named() {
        // `-v` is writable without a mode.
        let why = parse("../src:/x:zz:rw").unwrap_err();
        assert_eq!(
            why.message(),
            Some("cannot mount ../src:/x:zz: `zz` is no mode; write ro or rw")
        );
    }

    #[test]
    fn volumes_are_no_paths() {
        for volume in ["data:/data", "data:/data:ro", "my-data:/d:rw"] {
            assert!(names_volume(volume), "{volume}");
        }
        for path in [".:/work", "..:/work", "./data:/data", "/srv/data:/data:ro", ":/data"] {
            assert!(!names_volume(path), "{path}");
        }
    }

    #[test]
    fn a_sandbox_has_volumes_and_no_directories_of_the_host() {
        let read = of_sandbox(&["data:/data".into(), "other:/o:ro".into()]).unwrap();
        let volume = |name: &str, path: &str, read_only| SandboxVolume {
            name: name.to_owned(),
            path: path.to_owned(),
            read_only,
        };
        assert_eq!(read, [volume("data", "/data", false), volume("other", "/o", true)]);
        for wrong in ["./data:/data", "/srv:/data", "data", "data:data", "a b:/data", ":/data"] {
            assert!(of_sandbox(&[wrong.into()]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_missing_directory_is_named() {
        let failure =
            open(&["/none/at/all:/data".into()], &[], &HostPolicy::default()).unwrap_err();
        assert!(failure.message().unwrap().contains("/none/at/all"));
    }
}
