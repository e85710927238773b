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
use crate::io::Source;

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
