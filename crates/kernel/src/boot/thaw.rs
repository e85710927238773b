//! Becoming a copy of a frozen sandbox.
//!
//! Nothing is deserialized: the image's memory is mapped where it was, and the
//! kernel's state is in it. What must differ between copies is renewed before
//! the guest runs.
#![allow(unsafe_code)]

use thaw_abi::control::{Connection, FLAG_NO_LAZY, FLAG_TRACE_SYSCALLS, PopulateRange, Thaw};
use thaw_abi::image::{MAPPING_EAGER, MAPPING_KERNEL, Mapping};

use super::control::Message;
use super::{blobs, lazy, phases, populate, program, stdio};
use crate::errno::{Errno, Result};
use crate::mm::heap;
use crate::platform::host::HostFd;
use crate::platform::user::UserAddress;
use crate::platform::vcpu;
use crate::state::{kernel, restore};
use crate::task::carrier;
use crate::task::process::FIRST_PID;

/// Carries out a thaw command: afterwards the frozen threads go on.
pub fn thaw(message: &Message) -> Result<()> {
    let (command, tail) = message.split::<Thaw>()?;
    let (mappings, tail) = array::<Mapping>(tail, command.mapping_count)?;
    let (ranges, tail) = array::<PopulateRange>(tail, command.populate_count)?;
    let (connections, tail) = array::<Connection>(tail, command.connection_count)?;
    let (blob_numbers, tail) = array::<u32>(tail, command.blob_count)?;
    let hostname = tail.get(..command.hostname_len as usize).ok_or(Errno::EINVAL)?;
    let [image, index, stdout, stderr, rest @ ..] = message.fds else { return Err(Errno::EINVAL) };
    if rest.len() != blob_numbers.len() + connections.len() {
        return Err(Errno::EINVAL);
    }
    let (blob_fds, connection_fds) = rest.split_at(blob_numbers.len());

    program::map_index(HostFd(*index), command.index_len)?;
    for (&blob, &fd) in blob_numbers.iter().zip(blob_fds) {
        blobs::remember(blob, HostFd(fd))?;
    }
    lazy::set_image(HostFd(*image));
    let eager = |mapping: &Mapping| {
        mapping.flags & (MAPPING_EAGER | MAPPING_KERNEL) != 0 || command.flags & FLAG_NO_LAZY != 0
    };
    for mapping in mappings.iter().filter(|mapping| eager(mapping)) {
        lazy::map(mapping)?;
    }
    lazy::initialize(HostFd(*image), mappings.iter().filter(|mapping| !eager(mapping)).copied())?;
    populate::begin(ranges);

    if !heap::magic_is_right() {
        return Err(Errno::EINVAL);
    }
    heap::restored();
    // SAFETY: the heap is the one that `install` filled in the frozen sandbox.
    unsafe { restore(heap::root()) };
    let first = kernel().tasks.process(FIRST_PID).ok_or(Errno::EINVAL)?;
    carrier::begin(first.mm());
    stdio::set(1, *stdout);
    stdio::set(2, *stderr);
    crate::syscall::trace::enable(command.flags & FLAG_TRACE_SYSCALLS != 0);
    renew(command, hostname);
    crate::freeze::happened().wake_all(crate::fs::file::Events::OUT);
    phases::mapped();
    crate::net::reset_connections();
    for (connection, &fd) in connections.iter().zip(connection_fds) {
        crate::net::deliver_connection(connection, HostFd(fd));
    }
    debug_assert!(vcpu::block().thread.is_null());
    Ok(())
}

/// Renews everything that must not be equal in two copies.
fn renew(command: &Thaw, hostname: &[u8]) {
    let kernel = kernel();
    *kernel.generation.lock() += 1;
    kernel.clocks.thaw();
    let mut config = kernel.config.lock();
    config.memory_limit = command.memory_limit;
    config.flags = command.flags;
    drop(config);
    if !hostname.is_empty() {
        *kernel.hostname.lock() = hostname.to_vec();
    }
    let mut random = kernel.random.lock();
    random.reseed(command.seed);
    let (mut boot_id, mut at_random) = ([0u8; 16], [0u8; 16]);
    random.fill(&mut boot_id);
    random.fill(&mut at_random);
    drop(random);
    kernel.fs.set_boot_id(boot_id);
    renew_at_random(at_random);
}

/// Renews the 16 random bytes that `AT_RANDOM` points to. The C library has
/// taken its stack canary from the old ones; later readers get new ones.
fn renew_at_random(bytes: [u8; 16]) {
    const AT_RANDOM: u64 = 25;
    let Some(process) = kernel().tasks.process(FIRST_PID) else { return };
    let auxv = process.auxiliary_vector.lock();
    let address = auxv.chunks_exact(2).find(|pair| pair[0] == AT_RANDOM).map(|pair| pair[1]);
    if let Some(address) = address {
        // The program may have unmapped its first stack; then nobody reads them.
        let _ = UserAddress(address).write_bytes(&bytes);
    }
}

fn array<T: bytemuck::Pod>(bytes: &[u8], count: u32) -> Result<(&[T], &[u8])> {
    let len = (count as usize)
        .checked_mul(size_of::<T>())
        .filter(|&len| len <= bytes.len())
        .ok_or(Errno::EINVAL)?;
    let (head, tail) = bytes.split_at(len);
    Ok((bytemuck::try_cast_slice(head).map_err(|_| Errno::EINVAL)?, tail))
}
