//! `[[volumes]]`: directories whose files outlive the copies of a function.

use super::ByteSize;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use thaw_store::Name;

/// Most volumes of a function.
pub const VOLUMES_MAX: usize = 16;

/// One of `[[volumes]]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeConfig {
    /// Its name on this host.
    pub name: Name,
    /// Where the program sees it: an absolute path.
    #[serde(deserialize_with = "mount_point")]
    pub path: String,
    /// Whether the program can only read it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Bytes that it may hold; `thaw build` makes it with this size if there is none. None: the
    /// operator makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<ByteSize>,
    /// The directory of the host that the operator has made it of. None: it may be any volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<PathBuf>,
}

fn mount_point<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let path = String::deserialize(deserializer)?;
    check_mount_point(&path).map_err(serde::de::Error::custom)?;
    Ok(path)
}

/// Whether a volume can be mounted there.
///
/// # Errors
/// Why not.
pub fn check_mount_point(path: &str) -> Result<(), String> {
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    let is_plain = |part: &&str| !matches!(*part, "" | "." | "..") && !part.contains('\0');
    if !path.starts_with('/') || !parts.iter().all(is_plain) {
        return Err(format!(
            "`{path}` is no place for a volume; give an absolute path without . and .., such as \
             /data"
        ));
    }
    if matches!(parts[0], "proc" | "sys" | "dev") || path == "/run/secrets" {
        return Err(format!("`{path}` is the kernel's own; give another path, such as /data"));
    }
    Ok(())
}

/// What is wrong with a function's volumes as a whole.
pub fn wrong_volumes(volumes: &[VolumeConfig]) -> Option<String> {
    if volumes.len() > VOLUMES_MAX {
        return Some(format!("a function or sandbox can have {VOLUMES_MAX} volumes at most"));
    }
    for (number, volume) in volumes.iter().enumerate() {
        if volume.host.is_some() && volume.size.is_some() {
            return Some(format!(
                "volume `{}` has `host` and `size`; the operator says the size of a directory of \
                 the host, so remove `size`",
                volume.name
            ));
        }
        for other in &volumes[..number] {
            if other.name == volume.name {
                return Some(format!("volume `{}` is named twice", volume.name));
            }
            let inside = |a: &str, b: &str| {
                a.strip_prefix(b).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            };
            if inside(&other.path, &volume.path) || inside(&volume.path, &other.path) {
                return Some(format!(
                    "{} and {} lie in each other; give volumes paths of their own",
                    other.path, volume.path
                ));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_plain_and_not_the_kernels() {
        for good in ["/data", "/var/lib/app"] {
            check_mount_point(good).unwrap();
        }
        for bad in ["", "/", "data", "/a/", "/a//b", "/a/../b", "/./a", "/proc", "/dev/shm", "/sys"]
        {
            assert!(check_mount_point(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn volumes_do_not_overlap() {
        let volume = |name: &str, path: &str| VolumeConfig {
            name: Name::new(name).unwrap(),
            path: path.to_owned(),
            read_only: false,
            size: None,
            host: None,
        };
        assert_eq!(wrong_volumes(&[volume("a", "/data"), volume("b", "/data2")]), None);
        assert!(wrong_volumes(&[volume("a", "/data"), volume("a", "/b")]).is_some());
        assert!(wrong_volumes(&[volume("a", "/data"), volume("b", "/data/b")]).is_some());
        assert!(wrong_volumes(&[volume("a", "/d/a"), volume("b", "/d")]).is_some());
        let host = VolumeConfig { host: Some("/srv/a".into()), ..volume("a", "/a") };
        assert_eq!(wrong_volumes(std::slice::from_ref(&host)), None);
        let size = VolumeConfig { size: Some("1MiB".parse().unwrap()), ..host };
        assert!(wrong_volumes(&[size]).unwrap().contains("remove `size`"));
        let many: Vec<_> =
            (0..=VOLUMES_MAX).map(|n| volume(&format!("v{n}"), &format!("/v{n}"))).collect();
        assert!(wrong_volumes(&many).is_some());
    }
}
