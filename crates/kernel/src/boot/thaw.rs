//! Becoming a copy of a frozen sandbox.
//!
//! Nothing is deserialized: the image's memory is mapped where it was, and the
//! kernel's state is in it. What must differ between copies is renewed before
//! the guest runs.
#![allow(unsafe_code)]

use alloc::sync::Arc;

use thaw_abi::control::{
    Connection, FLAG_NO_LAZY, FLAG_TRACE_SYSCALLS, Identity, MSG_GO, MSG_READY, PopulateRange,
    THAW_AND_HOLD, THAW_AND_RUN, THAW_AS_TEMPLATE, Thaw,
};
use thaw_abi::image::{MAPPING_EAGER, MAPPING_KERNEL, Mapping};
use thaw_abi::layout::{
    HEAP_BASE, HEAP_FRONT, MAPPINGS_BASE, MAPPINGS_MAX, PAGES_BASE, PAGES_MAX, SHM_BASE, SHM_MAX,
};
use thaw_abi::page_align_up;

use super::control::{self, Message};
use super::{arena, blobs, lazy, phases, populate, stdio, template};
use crate::errno::{Errno, Result};
use crate::mm::{AddressSpace, heap, pages, shm};
use crate::platform::host::{self, HostFd, Sharing};
use crate::platform::user::UserAddress;
use crate::state::{kernel, restore};
use crate::task::carrier;
use crate::task::process::FIRST_PID;

/// Carries out a thaw command: afterwards the frozen threads go on. If the copy
/// is to be held or forked off a template, it waits here until it is wanted.
pub fn thaw(message: &Message) -> Result<()> {
    let (command, tail) = message.split::<Thaw>()?;
    let (carried, tail) = Mappings::carried(tail, command)?;
    let (ranges, tail) = array::<PopulateRange>(tail, command.populate_count)?;
    let (connections, hostname, tail) = tail_of(&command.identity, tail)?;
    let (blob_numbers, _) = array::<u32>(tail, command.blob_count)?;
    let [image, index, rest @ ..] = message.fds else { return Err(Errno::EINVAL) };
    let (blob_fds, rest) = rest.split_at_checked(blob_numbers.len()).ok_or(Errno::EINVAL)?;
    let connection_fds = take_streams(&command.identity, rest)?;
    if connection_fds.len() != connections.len() {
        return Err(Errno::EINVAL);
    }

    blobs::initialize(command.index_blobs)?;
    for (&blob, &fd) in blob_numbers.iter().zip(blob_fds) {
        blobs::remember(blob, HostFd(fd))?;
    }
    lazy::set_image(HostFd(*image));
    let mappings = carried.map_or_else(|| Mappings::in_image(HostFd(*image), command), Ok)?;
    let index = lazy::index(HostFd(*index), command.index_len)?;
    let memory = Memory { mappings, index, ranges, flags: command.identity.flags };
    match command.mode {
        THAW_AND_RUN => {
            memory.map()?;
            memory.read_front()?;
            memory.adopt()?;
            go_on(&command.identity, hostname, connections.iter().zip(connection_fds));
        }
        THAW_AND_HOLD => {
            memory.map()?;
            memory.read_front()?;
            memory.adopt()?;
            populate::finish();
            control::prepare_for_second_command();
            control::send(MSG_READY, 0, &[], &[]);
            let message = control::receive_second_command();
            phases::received();
            go_on_as_told(&message)?;
        }
        THAW_AS_TEMPLATE => {
            memory.map()?;
            memory.map_front()?;
            template::serve()?;
            memory.adopt()?;
            control::prepare_for_second_command();
            go_on_as_told(&control::expect_second_command(populate::some))?;
        }
        _ => return Err(Errno::EINVAL),
    }
    debug_assert!(crate::task::thread::running().is_none());
    Ok(())
}

type Tail<'a> = (&'a [Connection], &'a [u8], &'a [u8]);

/// The connections and the host name of an identity, and what follows them.
fn tail_of<'a>(identity: &Identity, tail: &'a [u8]) -> Result<Tail<'a>> {
    let (connections, tail) = array::<Connection>(tail, identity.connection_count)?;
    let len = identity.hostname_len as usize;
    let hostname = tail.get(..len).ok_or(Errno::EINVAL)?;
    let tail = tail.get(len.next_multiple_of(8)..).ok_or(Errno::EINVAL)?;
    Ok((connections, hostname, tail))
}

/// Makes a complete copy go on as the message says.
fn go_on_as_told(message: &Message) -> Result<()> {
    let (identity, tail) = message.split::<Identity>()?;
    let (connections, hostname, _) = tail_of(identity, tail)?;
    if message.kind != MSG_GO {
        return Err(Errno::EINVAL);
    }
    let connection_fds = take_streams(identity, message.fds)?;
    if connection_fds.len() != connections.len() {
        return Err(Errno::EINVAL);
    }
    go_on(identity, hostname, connections.iter().zip(connection_fds));
    Ok(())
}

/// Takes the standard streams of an identity, if they come along; the descriptors
/// that follow them.
fn take_streams<'a>(identity: &Identity, fds: &'a [i32]) -> Result<&'a [i32]> {
    match (identity.stream_count, fds) {
        (0, rest) => Ok(rest),
        (2, [stdout, stderr, rest @ ..]) => {
            stdio::set(1, *stdout);
            stdio::set(2, *stderr);
            Ok(rest)
        }
        _ => Err(Errno::EINVAL),
    }
}

/// Makes a complete copy go on as itself.
fn go_on<'a>(
    identity: &Identity,
    hostname: &[u8],
    connections: impl Iterator<Item = (&'a Connection, &'a i32)>,
) {
    phases::mapped();
    crate::syscall::trace::enable(identity.flags & FLAG_TRACE_SYSCALLS != 0);
    renew(identity, hostname);
    crate::freeze::happened().wake_all(crate::fs::file::Events::OUT);
    crate::net::reset_connections();
    for (connection, &fd) in connections {
        crate::net::deliver_connection(connection, HostFd(fd));
    }
}

/// The mappings of an image, as bytes: in a file they need not be aligned.
pub struct Mappings<'a> {
    bytes: &'a [u8],
    /// Pages at [`MAPPINGS_BASE`] that hold them; 0 if they are in the boot command.
    len: u64,
}

impl<'a> Mappings<'a> {
    /// Those that came along with the command, if they did, and what follows them.
    fn carried(tail: &'a [u8], command: &Thaw) -> Result<(Option<Self>, &'a [u8])> {
        if command.mappings_at != 0 {
            return Ok((None, tail));
        }
        let (mappings, tail) = array::<Mapping>(tail, command.mapping_count)?;
        Ok((Some(Self { bytes: bytemuck::cast_slice(mappings), len: 0 }), tail))
    }

    /// Those that are too many to come along.
    fn in_image(image: HostFd, command: &Thaw) -> Result<Self> {
        let bytes = command.mapping_count as usize * size_of::<Mapping>();
        let inside = command.mappings_at & 4095;
        let len = page_align_up(inside + bytes as u64).filter(|&len| len <= MAPPINGS_MAX);
        let len = len.ok_or(Errno::EINVAL)?;
        let offset = command.mappings_at - inside;
        host::map_file(image, MAPPINGS_BASE, len, host::PROT_READ, Sharing::Private, offset)?;
        // SAFETY: just mapped, in an area of its own, and there until `forget`.
        let bytes =
            unsafe { core::slice::from_raw_parts((MAPPINGS_BASE + inside) as *const u8, bytes) };
        Ok(Self { bytes, len })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Mapping> {
        self.bytes.chunks_exact(size_of::<Mapping>()).map(bytemuck::pod_read_unaligned)
    }

    /// Unmaps them in this host process, which does not need them any more.
    fn forget(&self) -> Result<()> {
        if self.len > 0 { host::unmap(MAPPINGS_BASE, self.len) } else { Ok(()) }
    }
}

/// The memory of an image.
struct Memory<'a> {
    mappings: Mappings<'a>,
    /// The rootfs index.
    index: Mapping,
    ranges: &'a [PopulateRange],
    /// `FLAG_*`.
    flags: u32,
}

impl Memory<'_> {
    /// Whether it is that of several address spaces, or lies in a shared arena.
    fn is_of_several(&self) -> bool {
        self.mappings.iter().any(|mapping| mapping.space() > 0 || is_shm(&mapping))
    }

    /// Maps what can be mapped without reading any of it, but for the heap's front.
    fn map(&self) -> Result<()> {
        if self.is_of_several() {
            // Shared anonymous memory is read when there is a file for it.
            let of_all = |mapping: &Mapping| {
                mapping.space() == 0 && mapping.flags & MAPPING_KERNEL != 0 && !is_shm(mapping)
            };
            self.mappings.iter().filter(of_all).try_for_each(|mapping| lazy::map(&mapping))?;
            return lazy::map(&self.index);
        }
        let (front, rest) = self.heap()?;
        let eager = |mapping: &Mapping| {
            mapping.flags & (MAPPING_EAGER | MAPPING_KERNEL) != 0 || self.flags & FLAG_NO_LAZY != 0
        };
        map_page_blocks(&self.mappings)?;
        for mapping in self.mappings.iter().filter(|mapping| eager(mapping)) {
            if mapping.start != front.start {
                lazy::map(&mapping)?;
            }
        }
        rest.iter().try_for_each(lazy::map)?;
        // The index lies above all that an image holds.
        let pending = self.mappings.iter().filter(|mapping| !eager(mapping));
        lazy::initialize(pending.chain([self.index]))
    }

    /// The kernel's heap: its front, which is read, and the rest, if there is any,
    /// which is mapped.
    fn heap(&self) -> Result<(Mapping, Option<Mapping>)> {
        const FRONT_END: u64 = HEAP_BASE + HEAP_FRONT;
        let is_front = |mapping: &Mapping| (HEAP_BASE..FRONT_END).contains(&mapping.start);
        let whole = self.mappings.iter().find(is_front).ok_or(Errno::EINVAL)?;
        let len = whole.len.min(FRONT_END - whole.start);
        let front = Mapping { len, ..whole };
        let (start, offset) = (whole.start + len, whole.offset + len);
        let rest = Mapping { start, offset, len: whole.len - len, ..whole };
        Ok((front, (rest.len > 0).then_some(rest)))
    }

    /// Reads the front of the kernel's heap into the memory that is there.
    fn read_front(&self) -> Result<()> {
        if self.is_of_several() { Ok(()) } else { lazy::read(&self.heap()?.0) }
    }

    /// Maps the front, for a template, whose copies would have to touch it first.
    fn map_front(&self) -> Result<()> {
        if self.is_of_several() { Ok(()) } else { lazy::map(&self.heap()?.0) }
    }

    /// Finds the kernel's state in it and takes it over.
    fn adopt(&self) -> Result<()> {
        if self.is_of_several() {
            return adopt_several(&self.mappings);
        }
        self.mappings.forget()?;
        populate::begin(self.ranges);
        let space = find_state()?;
        if core::mem::take(&mut *kernel().has_shared_arena.lock()) {
            // It has had more processes, or may have: what they shared is its own now.
            space.forget_shown();
        }
        carrier::begin(space);
        Ok(())
    }
}

/// Whether a mapping is of the shared anonymous memory of guest processes.
pub(super) fn is_shm(mapping: &Mapping) -> bool {
    (SHM_BASE..SHM_BASE + SHM_MAX).contains(&mapping.start)
}

/// Maps the page allocator's blocks, under the pages in use, which are all that
/// an image holds of them. Every block has one of those, its control page.
fn map_page_blocks(mappings: &Mappings<'_>) -> Result<()> {
    let area = PAGES_BASE..PAGES_BASE + PAGES_MAX;
    let used = mappings.iter().filter(|mapping| area.contains(&mapping.start));
    let Some(end) = used.map(|mapping| mapping.start + mapping.len).max() else { return Ok(()) };
    let len = (end - PAGES_BASE).next_multiple_of(pages::BLOCK);
    host::map_anonymous(PAGES_BASE, len, host::PROT_READ | host::PROT_WRITE)
}

/// Takes over several address spaces, and makes a host process for each.
fn adopt_several(mappings: &Mappings<'_>) -> Result<()> {
    let space = find_state()?;
    carrier::begin(space.clone());
    for space in kernel().tasks.spaces() {
        space.forget_shown();
    }
    arena::prepare()?;
    arena::share(Some(mappings))?;
    carrier::begin_others(|number, space| fill(space, number, mappings))?;
    fill(&space, 0, mappings)
}

/// Finds the kernel's state in the heap; the memory of the first process.
fn find_state() -> Result<Arc<AddressSpace>> {
    if !heap::magic_is_right() {
        return Err(Errno::EINVAL);
    }
    heap::restored();
    // SAFETY: the heap is the one that `install` filled in the frozen sandbox.
    unsafe { restore(heap::root()) };
    Ok(kernel().tasks.process(FIRST_PID).ok_or(Errno::EINVAL)?.mm())
}

/// Maps the memory of one of several address spaces.
fn fill(space: &AddressSpace, number: u32, mappings: &Mappings<'_>) -> Result<()> {
    let is_own = |mapping: &Mapping| {
        let is_shared = number == 0 && mapping.flags & MAPPING_KERNEL != 0;
        mapping.space() == number && !is_shared
    };
    mappings.iter().filter(is_own).try_for_each(|mapping| lazy::map(&mapping))?;
    mappings.forget()?;
    space.shared_anonymous().iter().try_for_each(shm::map)
}

/// Renews everything that must not be equal in two copies.
fn renew(identity: &Identity, hostname: &[u8]) {
    let kernel = kernel();
    *kernel.generation.lock() += 1;
    kernel.clocks.thaw();
    let mut config = kernel.config.lock();
    config.memory_limit = identity.memory_limit;
    config.flags = identity.flags;
    drop(config);
    if !hostname.is_empty() {
        *kernel.hostname.lock() = hostname.to_vec();
    }
    let mut random = kernel.random.lock();
    random.reseed(identity.seed);
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
