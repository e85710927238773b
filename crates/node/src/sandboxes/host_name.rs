//! The host name of a sandbox: its own, where instances of a function have the function's.
//!
//! It is written through a session over files after the boot, as volumes are mounted, so that it is the
//! same for new sandboxes, copies and those of checkpoints, however they were booted.

use super::files::{FileProblem, FileSession};
use thaw_abi::network::OWN_ADDRESS;

/// The host name (proc_sys_kernel(5)).
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// Where it is looked up (hosts(5)).
const HOSTS: &str = "/etc/hosts";
/// Most bytes of that file that are read; a larger one stays as it is.
const HOSTS_MAX: u64 = 64 << 10;
/// The address of the name in a sandbox without a way out.
const LOOPBACK: &str = "127.0.1.1";

/// Gives a sandbox a host name, and has `/etc/hosts` resolve it. The session is the superuser's.
///
/// # Errors
/// The sandbox refuses, or does not answer.
pub(crate) async fn set(session: &mut FileSession, name: &str) -> Result<(), FileProblem> {
    let [before, hosts] = session.contents([HOST_NAME, HOSTS], HOSTS_MAX + 1).await?;
    let before = before?;
    let before = before.trim_ascii_end();
    if before == name.as_bytes() {
        return Ok(());
    }
    let hosts = match hosts {
        Ok(hosts) if hosts.len() as u64 <= HOSTS_MAX => Some(renamed(&hosts, before, name)),
        // A root file system without C library has no use for one.
        Ok(_) | Err(FileProblem::Refused(libc::ENOENT | libc::ENOTDIR, _)) => None,
        Err(problem) => return Err(problem),
    };
    let hosts = hosts.as_ref().map(|hosts| (HOSTS, &hosts[..]));
    let files: Vec<_> = hosts.into_iter().chain([(HOST_NAME, name.as_bytes())]).collect();
    session.write_all(&files).await
}

/// `/etc/hosts` with the new name in the place of the one before, in the lines of the sandbox' own
/// address; with a line for it if there is none.
fn renamed(hosts: &[u8], before: &[u8], name: &str) -> Vec<u8> {
    let mut new = Vec::with_capacity(hosts.len() + name.len());
    for line in hosts.split_inclusive(|&byte| byte == b'\n') {
        match is_own(line) {
            false => new.extend_from_slice(line),
            true => words(line).for_each(|word| {
                let text = word.trim_ascii_end();
                let is_it = !text.is_empty() && text == before;
                let shown = if is_it { name.as_bytes() } else { text };
                new.extend_from_slice(shown);
                new.extend_from_slice(&word[text.len()..]);
            }),
        }
    }
    if !words(&new).any(|word| word.trim_ascii_end() == name.as_bytes()) {
        if new.last().is_some_and(|&last| last != b'\n') {
            new.push(b'\n');
        }
        new.extend_from_slice(format!("{LOOPBACK} {name}\n").as_bytes());
    }
    new
}

/// Words, each with the one byte of white space behind it.
fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split_inclusive(u8::is_ascii_whitespace)
}

/// Whether a line begins with an address of the sandbox itself.
fn is_own(line: &[u8]) -> bool {
    let [a, b, c, d] = OWN_ADDRESS;
    let first = words(line).next().unwrap_or_default().trim_ascii_end();
    first == LOOPBACK.as_bytes() || first == format!("{a}.{b}.{c}.{d}").as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(hosts: &str) -> String {
        String::from_utf8(renamed(hosts.as_bytes(), b"web", "box")).unwrap()
    }

    #[test]
    fn the_name_is_replaced_in_its_own_lines_only() {
        let start = "127.0.0.1 localhost\n10.0.2.2 host.thaw.internal\n";
        assert_eq!(after(&format!("{start}10.0.2.15 web\n")), format!("{start}10.0.2.15 box\n"));
        assert_eq!(after("127.0.1.1\tweb.example web"), "127.0.1.1\tweb.example box");
        // Somebody else's.
        let other = "192.0.2.7 web\n10.0.2.15 web\n";
        assert_eq!(after(other), "192.0.2.7 web\n10.0.2.15 box\n");
    }

    #[test]
    fn a_name_that_is_nowhere_gets_a_line() {
        assert_eq!(after(""), "127.0.1.1 box\n");
        assert_eq!(after("127.0.0.1 localhost"), "127.0.0.1 localhost\n127.0.1.1 box\n");
        assert_eq!(after("192.0.2.7 box\n"), "192.0.2.7 box\n");
        assert_eq!(after("192.0.2.7 web\n"), "192.0.2.7 web\n127.0.1.1 box\n");
    }
}
