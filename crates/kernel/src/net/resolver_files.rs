//! The files that tell a C library where to look names up.

use alloc::format;
use alloc::vec::Vec;

use thaw_abi::network;

use crate::errno::{Errno, Result};
use crate::fs::Context;
use crate::fs::file::OpenFlags;
use crate::fs::inode::NewKind;
use crate::fs::namespace::{self, Removal};
use crate::fs::open::{How, open};
use crate::fs::walk::Resolve;
use crate::io::{Sink, Source};

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
    write(&context, b"/etc/hosts", &hosts)
}

/// Adds the sandbox' own name to `/etc/hosts`, unless it is there: a program that
/// looks its host's name up is not to wait for a resolver that is not there.
pub fn provide_own_name(context: &Context, hostname: &[u8]) -> Result<()> {
    let mut context = context.clone();
    context.identity.uid = 0;
    context.umask = 0o022;
    let mut hosts = match read(&context, b"/etc/hosts") {
        Ok(hosts) => hosts,
        // A root file system without C library has no use for one.
        Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut words = hosts.split(|byte| byte.is_ascii_whitespace());
    if words.any(|word| word == hostname) {
        return Ok(());
    }
    if hosts.last().is_some_and(|&last| last != b'\n') {
        hosts.push(b'\n');
    }
    hosts.extend_from_slice(b"127.0.1.1 ");
    hosts.extend_from_slice(hostname);
    hosts.push(b'\n');
    write(&context, b"/etc/hosts", &hosts)
}

/// The content of a file.
fn read(context: &Context, path: &[u8]) -> Result<Vec<u8>> {
    let how = How { flags: OpenFlags::empty(), permissions: 0, resolve: Resolve::empty() };
    let file = open(context, &context.root, path, how)?;
    let mut content = Vec::new();
    let mut chunk = [0; 1024];
    loop {
        let mut sink = Sink::kernel(&mut chunk);
        match file.read(&mut sink)? {
            0 => return Ok(content),
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
