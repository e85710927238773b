//! What a build has found that copies of the program will not like: each in a sentence with the
//! cause and the way out.

use super::template::{BOOTSTRAP_NAME, file_name};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use thaw_abi::control::{Address, Losses, Written};
use thaw_home::function::{Finding, FindingKind};
use thaw_sandbox::WrittenFiles;

/// Where the sources have a helper for each language.
const HELPERS: &str = "sdk/entrypoint";

/// Of connections that copies will find reset, and of sockets of datagrams that will have
/// another port. It is what the sandbox says.
pub(super) fn of_losses(losses: &Losses) -> Vec<Finding> {
    let found = [of_streams(losses), of_datagrams(losses)];
    let finding = |text| Finding { kind: FindingKind::Connection, text };
    found.into_iter().flatten().map(finding).collect()
}

/// Of files that live and die with a copy, if there are any. It is what the sandbox says.
pub(super) fn of_written(written: &WrittenFiles) -> Option<Finding> {
    let written = &without_bootstrap(written)?;
    let Written { files, directories, is_partial, .. } = written.numbers;
    let count = |count, one: &str, many: &str| match count {
        0 => None,
        1 => Some(format!("a {one}")),
        _ => Some(format!("{count} {many}")),
    };
    let files = count(files, "file", "files");
    let directories = count(directories, "new empty directory", "new empty directories");
    let what = [files, directories].into_iter().flatten().collect::<Vec<_>>().join(" and ");
    let paths = written.paths.join(", ");
    let all = u64::from(written.numbers.files) + u64::from(written.numbers.directories);
    let more = match (all > written.paths.len() as u64, is_partial) {
        (false, 0) => "",
        _ => " and more",
    };
    let text = format!(
        "before it was frozen, the program wrote {what} outside of volumes ({paths}{more}): each copy begins with \
         that, and what it writes there ends with it; files to be kept belong into one of \
         `[[volumes]]` (docs/volumes.md)"
    );
    Some(Finding { kind: FindingKind::File, text })
}

/// Of generators that drew the same in two copies.
pub(super) fn of_generators(names: &[String], way_out: &str) -> Finding {
    let names = names.join(", ");
    let text = format!(
        "two copies drew the same numbers from {names}, seeded before the freeze: {} \
         (docs/uniqueness.md)",
        helpers_here(way_out)
    );
    Finding { kind: FindingKind::Generator, text }
}

/// Of generators that code in Go draws from, with the functions that do.
pub(super) fn of_go(functions: &[String]) -> Finding {
    let draw = if functions.len() == 1 { "draws" } else { "draw" };
    let functions = functions.join(", ");
    let text = format!(
        "{functions} {draw} from math/rand, which Go seeds when the program starts, so that all \
         copies draw the same numbers: draw from crypto/rand, or from Source of \
         sdk/entrypoint/thaw.go (docs/uniqueness.md)"
    );
    let text = helpers_here(&text);
    Finding { kind: FindingKind::Generator, text }
}

/// Of variables that have the same time in two copies.
pub(super) fn of_times(names: &[String]) -> Finding {
    let (keep, they) = match names.len() {
        1 => ("keeps a time that was", "it"),
        _ => ("keep times that were", "them"),
    };
    let names = names.join(", ");
    let text = format!(
        "{names} {keep} read before the freeze, and every copy finds {they} there: read the \
         clock where a request begins (docs/uniqueness.md)"
    );
    Finding { kind: FindingKind::Time, text }
}

/// Of a server that keeps the `Date` of its answers from before the freeze.
pub(super) fn of_dates(server: &str, way_out: &str) -> Finding {
    let text = format!(
        "{server} keeps the `Date` of its answers until a timer renews it, so that the first answer of each \
         copy may have that of the freeze; {way_out}, or leave it to the gateway, which renews it in requests \
         that it routes (docs/frozen.md)"
    );
    Finding { kind: FindingKind::Time, text }
}

/// Of Erlang's machine, whose time of the day is behind in copies.
pub(super) fn of_erlang() -> Finding {
    let text = "Erlang counts its time of the day (erlang:system_time/0) by the monotonic clock, which stands still \
                while a program is frozen, so that this time is behind in every copy: start it with `+c false`, as by \
                ERL_FLAGS = \"+c false\" in [env] of thaw.toml (docs/troubleshooting.md)";
    Finding { kind: FindingKind::Time, text: text.to_owned() }
}

/// What the program itself has written: what is left of the bootstrap of a runtime template is
/// Thaw's. `None`: nothing.
fn without_bootstrap(written: &WrittenFiles) -> Option<WrittenFiles> {
    let mut own = written.clone();
    own.paths.retain(|path| !file_name(path).starts_with(BOOTSTRAP_NAME));
    let of_thaw = (written.paths.len() - own.paths.len()) as u32;
    own.numbers.files = own.numbers.files.saturating_sub(of_thaw);
    (own.numbers.files > 0 || own.numbers.directories > 0).then_some(own)
}

/// The same text with paths of this machine for helpers of `sdk/entrypoint`, where they are.
fn helpers_here(text: &str) -> String {
    match std::env::current_exe().ok().and_then(|program| helpers_beside(&program)) {
        Some(directory) => text.replace(HELPERS, &directory.display().to_string()),
        None => text.to_owned(),
    }
}

/// The directory of the helpers of an installed program, `../share/thaw/sdk/entrypoint`, or of one
/// in the build directory of its sources.
fn helpers_beside(program: &Path) -> Option<PathBuf> {
    let installed = program.parent()?.parent()?.join("share/thaw");
    let sources = program.ancestors().skip(1).map(Path::to_owned);
    let mut found = [installed].into_iter().chain(sources).map(|at| at.join(HELPERS));
    found.find(|directory| directory.join("thaw.py").is_file())
}

fn of_streams(losses: &Losses) -> Option<String> {
    let peer = address(&losses.peer);
    let (what, they) = match losses.connections {
        0 => return None,
        1 => (format!("a connection to {peer} was"), "it"),
        count => (format!("{count} connections, the first of them to {peer}, were"), "them"),
    };
    Some(format!(
        "{what} open when the program was frozen, and every copy finds {they} reset: connect \
         after the freeze (docs/functions.md), or name the destination in `reconnect` of [egress]"
    ))
}

fn of_datagrams(losses: &Losses) -> Option<String> {
    // The address is that of a connection if there is one.
    let peer = (losses.connections == 0).then(|| address(&losses.peer));
    let what = match (losses.datagrams, peer) {
        (0, _) => return None,
        (1, Some(peer)) => format!("a UDP socket was connected to {peer}"),
        (1, None) => "a UDP socket was connected to the outside".to_owned(),
        (count, Some(peer)) => {
            format!("{count} UDP sockets were connected, the first of them to {peer},")
        }
        (count, None) => format!("{count} UDP sockets were connected to the outside"),
    };
    Some(format!(
        "{what} when the program was frozen: every copy sends from a new port, and answers to \
         earlier datagrams are lost; begin sessions over UDP after the freeze (docs/egress.md)"
    ))
}

fn address(address: &Address) -> SocketAddr {
    let [a, b, c, d, ..] = address.bytes;
    let ip = match address.family {
        10 => IpAddr::V6(Ipv6Addr::from(address.bytes)),
        _ => IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
    };
    SocketAddr::new(ip, address.port)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_named_with_the_way_out() {
        let mut peer = Address { bytes: [0; 16], family: 2, port: 5432, reserved: 0 };
        peer.bytes[..4].copy_from_slice(&[10, 0, 0, 7]);
        let text = |connections, datagrams, peer| {
            let found = of_losses(&Losses { connections, datagrams, peer });
            found.into_iter().map(|finding| finding.text).collect::<Vec<_>>()
        };
        let one = text(1, 0, peer);
        assert_eq!(one.len(), 1);
        assert!(one[0].starts_with("a connection to 10.0.0.7:5432 was open"), "{one:?}");
        let sockets = text(0, 1, peer);
        assert_eq!(sockets.len(), 1);
        assert!(sockets[0].starts_with("a UDP socket was connected to 10.0.0.7:5432 when"));
        let both = text(1, 2, peer);
        assert!(
            both[1].starts_with("2 UDP sockets were connected to the outside when"),
            "{both:?}"
        );
        let peer = Address { bytes: [0; 16], family: 10, port: 1, reserved: 0 };
        let two = text(2, 0, peer);
        assert!(two[0].starts_with("2 connections, the first of them to [::]:1"), "{two:?}");
        assert!(two[0].contains("`reconnect` of [egress]"));
    }

    #[test]
    fn written_files_are_named_with_the_way_out() {
        let text = |files, directories, paths: &[&str]| {
            let numbers = Written { files, directories, ..Written::default() };
            let paths = paths.iter().map(|&path| path.to_owned()).collect();
            of_written(&WrittenFiles { numbers, paths }).map(|found| found.text)
        };
        assert_eq!(text(1, 0, &["/tmp/.thaw-template.js"]), None);
        let besides = text(2, 0, &["/.thaw-template.js", "/app/a.db"]).unwrap();
        assert!(besides.contains(" wrote a file outside of volumes (/app/a.db): "), "{besides}");
        let one = text(1, 0, &["/app/a.db"]).unwrap();
        assert!(one.contains(" wrote a file outside of volumes (/app/a.db): "), "{one}");
        let more = text(9, 1, &["/a", "/b/"]).unwrap();
        assert!(more.contains("9 files and a new empty directory"), "{more}");
        assert!(more.contains("(/a, /b/ and more): ") && more.contains("`[[volumes]]`"), "{more}");
    }

    #[test]
    fn helpers_are_named_where_they_are() {
        let all = tempfile::tempdir().unwrap();
        let below = |path: &str| all.path().join(path);
        let [program, beside] = ["opt/bin/thaw", "opt/share/thaw/sdk/entrypoint"].map(below);
        assert_eq!(helpers_beside(&program), None);
        std::fs::create_dir_all(&beside).unwrap();
        std::fs::write(beside.join("thaw.py"), "").unwrap();
        assert_eq!(helpers_beside(&program), Some(beside));
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
        let found = helpers_beside(&sources.join("target/debug/thaw"));
        assert_eq!(found, Some(sources.join("sdk/entrypoint")));
        // As this test itself is there.
        let text = of_go(&["main.f".to_owned()]).text;
        assert!(text.contains(&format!("{}/thaw.go ", found.unwrap().display())), "{text}");
    }
}
