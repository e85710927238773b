//! The small files and empty directories that programs expect everywhere.

use std::path::Path;

use super::Extra;
use super::collector::Collector;
use crate::error::Result;
use crate::index::{Attributes, Content, Node};

/// Files with fixed contents: nothing of the host's users and names gets in.
const FILES: [(&str, &str); 6] = [
    (
        "/etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    ),
    ("/etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    ("/etc/hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"),
    ("/etc/resolv.conf", ""),
    ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
    ("/etc/host.conf", "multi on\n"),
];
/// Directories and their permissions. The kernel mounts its own file systems on
/// some of them.
const DIRECTORIES: [(&str, u32); 11] = [
    ("/tmp", 0o1777),
    ("/var/tmp", 0o1777),
    ("/proc", 0o555),
    ("/sys", 0o555),
    ("/dev", 0o755),
    ("/run", 0o755),
    ("/root", 0o755),
    ("/home", 0o755),
    ("/bin", 0o755),
    ("/usr/bin", 0o755),
    ("/etc", 0o755),
];
/// Files of the host that the dynamic loader and the C library read.
const FROM_HOST: [&str; 1] = ["/etc/ld.so.cache"];
/// The locale that programs choose when none is set (`C.UTF-8`), for C libraries
/// that have it as files.
const LOCALE: &str = "/usr/lib/locale/C.utf8";

pub(super) fn collect_standard_files(collector: &mut Collector<'_>) -> Result<()> {
    // The layout of the host's root: `/bin`, `/lib` and the like may be links.
    for link in ["/bin", "/sbin", "/lib", "/lib64"] {
        if collector.exists(Path::new(link)) {
            collector.place(Path::new(link))?;
        }
    }
    for path in FROM_HOST {
        let path = Path::new(path);
        if collector.exists(path) && collector.tree().find(path).is_none() {
            collector.place(path)?;
        }
    }
    if collector.exists(Path::new(LOCALE)) {
        collector.place_tree(Path::new(LOCALE), Vec::new())?;
    }
    for (path, text) in FILES {
        add_file(collector, path, text.as_bytes())?;
    }
    for (path, permissions) in DIRECTORIES {
        let directory = collector.tree().make_directories(Path::new(path))?;
        let attributes = collector.tree().attributes_mut(directory);
        // Not one that was imported, but one made on the way to something else.
        if *attributes == Attributes::root(0o755) {
            attributes.permissions = permissions;
        }
    }
    Ok(())
}

pub(super) fn collect_extra(collector: &mut Collector<'_>, extra: Extra) -> Result<()> {
    let paths: &[&str] = match extra {
        Extra::TimeZones => &["/etc/localtime", "/usr/share/zoneinfo"],
        Extra::Certificates => {
            &["/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted", "/usr/lib/ssl"]
        }
    };
    for path in paths.iter().map(Path::new) {
        if collector.exists(path) {
            collector.anything(path)?;
        }
    }
    Ok(())
}

fn add_file(collector: &mut Collector<'_>, path: &str, content: &[u8]) -> Result<()> {
    let path = Path::new(path);
    if collector.tree().find(path).is_some() {
        return Ok(());
    }
    let domain = collector.domain();
    let blob = collector.session().put_blob(content, &domain)?;
    let node = Node { content: Content::Regular(blob), attributes: Attributes::root(0o644) };
    collector.tree().add_at(path, node)?;
    Ok(())
}
