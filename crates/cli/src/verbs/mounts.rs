//! What `thaw run` mounts: `--bind` and `--tmpfs`.

use crate::failure::Failure;
use std::path::Path;
use thaw_sandbox::{BoundAccess, BoundDirectory, HostPolicy, Mount, MountKind};

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
            .map_err(|error| Failure::failed(format!("--bind {option}: {host}: {error}")))?;
        mounts.push(Mount { at: guest.into(), kind: MountKind::Bind(directory) });
    }
    for guest in tmpfs {
        check_guest(&format!("--tmpfs {guest}"), guest)?;
        mounts.push(Mount { at: guest.into(), kind: MountKind::Tmpfs });
    }
    Ok(mounts)
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
        return Err(Failure::misused(format!("--bind {option}: {wanted}")));
    };
    check_guest(&format!("--bind {option}"), guest)?;
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
    Err(Failure::misused(format!("{option}: {wanted}")))
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
    fn a_missing_directory_is_named() {
        let failure =
            open(&["/none/at/all:/data".into()], &[], &HostPolicy::default()).unwrap_err();
        assert!(failure.message().unwrap().contains("/none/at/all"));
    }
}
