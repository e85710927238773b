//! The files that tell a C library where to look names up.

use alloc::format;
use alloc::vec::Vec;

use thaw_abi::network;

use crate::errno::{Errno, Result};
use crate::fs::Context;
use crate::fs::file::OpenFlags;
use crate::fs::inode::{Attributes, FileType, NewKind};
use crate::fs::namespace::{self, Removal};
use crate::fs::open::{How, open};
use crate::fs::walk::Resolve;
use crate::io::{Sink, Source};

/// Where names are looked up first (hosts(5)).
const HOSTS: &[u8] = b"/etc/hosts";
/// The address of the own name in a sandbox without a way out.
const LOOPBACK: &[u8] = b"127.0.1.1";

fn dotted([a, b, c, d]: [u8; 4]) -> alloc::string::String {
    format!("{a}.{b}.{c}.{d}")
}

/// Puts `/etc/resolv.conf` and `/etc/hosts` into a sandbox that has a way out,
/// whatever its root file system has there: that speaks of another network.
pub fn provide(context: &Context, hostname: &[u8]) -> Result<()> {
    // As the superuser: the program may be anybody.
    let mut context = context.clone();
    context.identity.uid = 0;
    context.umask = 0o022;
    match namespace::create(&context, &context.root, b"/etc", NewKind::Directory, 0o755) {
        Ok(_) | Err(Errno::EEXIST) => {}
        Err(error) => return Err(error),
    }
    let resolver = dotted(network::RESOLVER_ADDRESS);
    // One name is asked for as it is: there is no search list.
    write(&context, b"/etc/resolv.conf", format!("nameserver {resolver}\n").as_bytes())?;
    let mut hosts: Vec<u8> = b"127.0.0.1 localhost\n::1 localhost ip6-localhost\n".to_vec();
    let name = network::HOST_NAME;
    hosts.extend_from_slice(
        format!("{} {name}\n{} ", dotted(network::HOST_ADDRESS), dotted(network::OWN_ADDRESS))
            .as_bytes(),
    );
    hosts.extend_from_slice(hostname);
    hosts.push(b'\n');
    write(&context, HOSTS, &hosts)
}

/// Adds the sandbox' own name to `/etc/hosts`, unless it is there: a program that
/// looks its host's name up is not to wait for a resolver that is not there.
pub fn provide_own_name(context: &Context, hostname: &[u8]) -> Result<()> {
    change_hosts(context, |hosts| {
        (!words(hosts).any(|word| word == hostname)).then(|| with_line(hosts.to_vec(), hostname))
    })
}

/// Has `/etc/hosts` name the sandbox by another name than before.
pub fn replace_own_name(context: &Context, before: &[u8], hostname: &[u8]) -> Result<()> {
    change_hosts(context, |hosts| Some(renamed(hosts, before, hostname)))
}

/// Reads `/etc/hosts` and writes what becomes of it, if anything does. As the superuser: the program
/// may be anybody.
fn change_hosts(context: &Context, change: impl FnOnce(&[u8]) -> Option<Vec<u8>>) -> Result<()> {
    let mut context = context.clone();
    context.identity.uid = 0;
    context.umask = 0o022;
    let hosts = match read(&context, HOSTS) {
        Ok(hosts) => hosts,
        // A root file system without C library has no use for one.
        Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(()),
        Err(error) => return Err(error),
    };
    change(&hosts).map_or(Ok(()), |hosts| write(&context, HOSTS, &hosts))
}

/// Words of hosts(5).
fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty())
}

/// With a line for a name that has none.
fn with_line(mut hosts: Vec<u8>, hostname: &[u8]) -> Vec<u8> {
    if hosts.last().is_some_and(|&last| last != b'\n') {
        hosts.push(b'\n');
    }
    hosts.extend_from_slice(LOOPBACK);
    hosts.push(b' ');
    hosts.extend_from_slice(hostname);
    hosts.push(b'\n');
    hosts
}

/// With a name in the place of another one, in the lines of the sandbox' own addresses, and in a line of
/// its own if there is none of these.
fn renamed(hosts: &[u8], before: &[u8], hostname: &[u8]) -> Vec<u8> {
    let own = dotted(network::OWN_ADDRESS);
    let mut new = Vec::with_capacity(hosts.len() + hostname.len());
    for line in hosts.split_inclusive(|&byte| byte == b'\n') {
        let address = words(line).next().unwrap_or_default();
        let is_own = address == LOOPBACK || address == own.as_bytes();
        for piece in line.split_inclusive(u8::is_ascii_whitespace) {
            let word = piece.trim_ascii_end();
            let is_it = is_own && !word.is_empty() && word == before;
            new.extend_from_slice(if is_it { hostname } else { word });
            new.extend_from_slice(&piece[word.len()..]);
        }
    }
    if words(&new).any(|word| word == hostname) { new } else { with_line(new, hostname) }
}

/// Most bytes of a file of these that are read: whoever has the sandbox may have put anything there.
const CONTENT_MAX: usize = 256 << 10;

/// The content of a regular file.
fn read(context: &Context, path: &[u8]) -> Result<Vec<u8>> {
    // Opening a FIFO would wait for somebody who writes.
    let flags = OpenFlags::NONBLOCK;
    let how = How { flags, permissions: 0, resolve: Resolve::empty() };
    let file = open(context, &context.root, path, how)?;
    if Attributes::from_stat(&file.file.stat()?).file_type() != FileType::Regular {
        return Err(Errno::EINVAL);
    }
    let mut content = Vec::new();
    let mut chunk = [0; 1024];
    loop {
        let mut sink = Sink::kernel(&mut chunk);
        match file.read(&mut sink)? {
            0 => return Ok(content),
            count if content.len() + count > CONTENT_MAX => return Err(Errno::EFBIG),
            count => content.extend_from_slice(&chunk[..count]),
        }
    }
}

fn write(context: &Context, path: &[u8], content: &[u8]) -> Result<()> {
    // It may be a symbolic link that leads nowhere in the sandbox.
    match namespace::remove(context, &context.root, path, Removal::File) {
        Ok(()) | Err(Errno::ENOENT) => {}
        Err(error) => return Err(error),
    }
    let flags = OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::WRONLY;
    let how = How { flags, permissions: 0o644, resolve: Resolve::empty() };
    let file = open(context, &context.root, path, how)?;
    file.write(&mut Source::kernel(content)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;
    use alloc::string::String;

    fn after(hosts: &str) -> String {
        String::from_utf8(renamed(hosts.as_bytes(), b"web", b"box")).unwrap()
    }

    #[test]
    fn the_name_is_replaced_in_lines_of_own_addresses_only() {
        let start = "127.0.0.1 localhost\n10.0.2.2 host.thaw.internal\n";
        assert_eq!(after(&format!("{start}10.0.2.15 web\n")), format!("{start}10.0.2.15 box\n"));
        assert_eq!(after("127.0.1.1\tweb.example  web"), "127.0.1.1\tweb.example  box");
        // Somebody else's.
        let other = "192.0.2.7 web\n10.0.2.15 web\n";
        assert_eq!(after(other), "192.0.2.7 web\n10.0.2.15 box\n");
    }

    #[test]
    fn what_a_program_put_in_the_place_of_the_file_is_not_waited_for_nor_kept() {
        let _sandbox = Sandbox::new();
        let mut context = Context::current();
        context.identity.uid = 0;
        provide(&context, b"web").unwrap();
        assert_eq!(replace_own_name(&context, b"web", b"box"), Ok(()));
        assert!(read(&context, HOSTS).unwrap().ends_with(b"10.0.2.15 box\n"));
        write(&context, HOSTS, &alloc::vec![b'a'; CONTENT_MAX + 1]).unwrap();
        assert_eq!(replace_own_name(&context, b"box", b"other"), Err(Errno::EFBIG));
        namespace::remove(&context, &context.root, HOSTS, Removal::File).unwrap();
        namespace::create(&context, &context.root, HOSTS, NewKind::Fifo, 0o644).unwrap();
        assert_eq!(replace_own_name(&context, b"box", b"other"), Err(Errno::EINVAL));
    }

    #[test]
    fn a_name_that_is_nowhere_gets_a_line() {
        assert_eq!(after(""), "127.0.1.1 box\n");
        assert_eq!(after("127.0.0.1 localhost"), "127.0.0.1 localhost\n127.0.1.1 box\n");
        assert_eq!(after("192.0.2.7 box\n"), "192.0.2.7 box\n");
        assert_eq!(after("192.0.2.7 web\n"), "192.0.2.7 web\n127.0.1.1 box\n");
    }
}
