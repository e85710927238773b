//! Becoming a copy of a frozen sandbox.
//!
//! Nothing is deserialized: the image's memory is mapped where it was, and the
//! kernel's state is in it. What must differ between copies is renewed before
//! the guest runs.
#![allow(unsafe_code)]

use alloc::sync::Arc;

use thaw_abi::control::{
    CONNECTION_GOES_ON, Connection, FLAG_EXECS_GO_ON, FLAG_TRACE_SYSCALLS, Identity, MSG_GO,
    MSG_READY, PopulateRange, THAW_AND_HOLD, THAW_AND_RUN, THAW_AND_START, THAW_AS_TEMPLATE,
    THAW_POST_COPY, Thaw,
};
use thaw_abi::image::{MAPPING_KERNEL, Mapping};

use super::{post_copy, runtime, template};
use crate::errno::{Errno, Result};
use crate::host::control::{self, Message};
use crate::host::gate::Gate;
use crate::host::{blobs, phases, stdio};
use crate::mm::image::{Mappings, Memory};
use crate::mm::{AddressSpace, arena, heap, lazy, populate, shm};
use crate::platform::machine::{HostFd, Machine, Processes};
use crate::platform::user::UserAddress;
use crate::state::{kernel, restore};
use crate::task::process::FIRST_PID;
use crate::task::{Space, host_process};

/// Carries out a thaw command: afterwards the frozen threads go on. If the copy
/// is to be held or forked off a template, it waits here until it is wanted.
pub fn thaw(message: &Message) -> Result<()> {
    let (command, tail) = message.split::<Thaw>()?;
    let (carried, tail) = Mappings::carried(tail, command)?;
    let (ranges, tail) = control::array::<PopulateRange>(tail, command.populate_count)?;
    let (connections, hostname, tail) = tail_of(&command.identity, tail)?;
    let (blob_numbers, secrets) = control::array::<u32>(tail, command.blob_count)?;
    crate::secrets::set(secrets)?;
    let [image, index, rest @ ..] = message.fds() else { return Err(Errno::EINVAL) };
    let (prefetch, rest) = match (command.prefetch_count, rest) {
        (0, rest) => (None, rest),
        (1, [prefetch, rest @ ..]) => (Some(HostFd::new(*prefetch)), rest),
        _ => return Err(Errno::EINVAL),
    };
    let (gate, rest) = match (command.mode, rest) {
        (THAW_POST_COPY, [gate, rest @ ..]) => (Some(Gate::new(HostFd::new(*gate))), rest),
        (THAW_POST_COPY, []) => return Err(Errno::EINVAL),
        (_, rest) => (None, rest),
    };
    let (blob_fds, rest) = rest.split_at_checked(blob_numbers.len()).ok_or(Errno::EINVAL)?;
    let connection_fds = take_streams(&command.identity, rest)?;
    if connection_fds.len() != connections.len() {
        return Err(Errno::EINVAL);
    }

    blobs::initialize(command.index_blobs)?;
    for (&blob, &fd) in blob_numbers.iter().zip(blob_fds) {
        blobs::remember(blob, HostFd::new(fd))?;
    }
    lazy::set_files(HostFd::new(*image), prefetch);
    let mappings = carried.map_or_else(|| Mappings::in_image(HostFd::new(*image), command), Ok)?;
    let index = Some(lazy::index(HostFd::new(*index), command.index_len)?);
    let mut memory = Memory { mappings, index, ranges, flags: command.identity.flags };
    match command.mode {
        THAW_AND_RUN | THAW_POST_COPY => {
            memory.map()?;
            memory.read_front()?;
            adopt(&mut memory, gate)?;
            go_on(&command.identity, hostname, connections.iter().zip(connection_fds));
            share_ahead();
        }
        THAW_AND_HOLD => {
            memory.map()?;
            memory.read_front()?;
            adopt(&mut memory, None)?;
            populate::finish();
            share_ahead();
            control::prepare_for_second_command();
            control::send(MSG_READY, 0, &[], &[]);
            let message = control::receive_second_command();
            phases::received();
            go_on_as_told(&message)?;
        }
        THAW_AND_START => {
            memory.map()?;
            memory.read_front()?;
            adopt(&mut memory, None)?;
            runtime::take_program(&control::receive_second_command())?;
            go_on(&command.identity, hostname, connections.iter().zip(connection_fds));
        }
        THAW_AS_TEMPLATE => {
            memory.map()?;
            memory.map_front()?;
            template::serve()?;
            adopt(&mut memory, None)?;
            control::prepare_for_second_command();
            let message = control::expect_second_command(populate::some);
            phases::received();
            go_on_as_told(&message)?;
        }
        _ => return Err(Errno::EINVAL),
    }
    debug_assert!(crate::task::thread::running().is_none());
    Ok(())
}

type Tail<'a> = (&'a [Connection], &'a [u8], &'a [u8]);

/// The connections and the host name of an identity, and what follows them.
fn tail_of<'a>(identity: &Identity, tail: &'a [u8]) -> Result<Tail<'a>> {
    let (connections, tail) = control::array::<Connection>(tail, identity.connection_count)?;
    let len = identity.hostname_len as usize;
    let hostname = tail.get(..len).ok_or(Errno::EINVAL)?;
    let tail = tail.get(len.next_multiple_of(8)..).ok_or(Errno::EINVAL)?;
    Ok((connections, hostname, tail))
}

/// Makes a complete copy go on as the message says.
fn go_on_as_told(message: &Message) -> Result<()> {
    let (identity, tail) = message.split::<Identity>()?;
    let (connections, hostname, secrets) = tail_of(identity, tail)?;
    crate::secrets::set(secrets)?;
    if message.kind != MSG_GO {
        return Err(Errno::EINVAL);
    }
    let connection_fds = take_streams(identity, message.fds())?;
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
    connections: impl Iterator<Item = (&'a Connection, &'a i32)> + Clone,
) {
    phases::mapped();
    if identity.connection_count == 0 {
        phases::report_start();
    }
    crate::syscall::trace::enable(identity.flags & FLAG_TRACE_SYSCALLS != 0);
    kernel().tasks.tracees.watch_calls();
    kernel().tasks.restricted.watch_calls();
    renew(identity, hostname);
    crate::time::timer::look_again();
    crate::task::freeze_request::happened().wake_all(crate::task::wait::Events::OUT);
    for (connection, &fd) in connections.clone().filter(|(connection, _)| goes_on(connection)) {
        let number = connection.id & !CONNECTION_GOES_ON;
        kernel().net.clients.go_on(number, HostFd::new(fd));
    }
    crate::net::reset_connections();
    for (connection, &fd) in connections.filter(|(connection, _)| !goes_on(connection)) {
        crate::net::deliver_connection(connection, HostFd::new(fd));
    }
}

fn goes_on(connection: &Connection) -> bool {
    connection.id & CONNECTION_GOES_ON != 0
}

/// Finds the kernel's state in the memory of an image and takes it over.
///
/// # Errors
/// There is none, or a gate for an image of one address space, whose memory comes at once.
fn adopt(memory: &mut Memory<'_>, gate: Option<Gate>) -> Result<()> {
    if memory.is_of_several() {
        return adopt_several(memory, gate);
    }
    if gate.is_some() {
        return Err(Errno::EINVAL);
    }
    memory.mappings.forget()?;
    populate::begin(memory.ranges);
    let space = find_state(memory.flags)?;
    if core::mem::take(&mut *kernel().has_shared_arena.borrow_mut()) {
        // It has had more processes, or may have: what they shared is its own now.
        space.forget_shown();
    }
    host_process::begin(space);
    Ok(())
}

/// Bytes of an arena that is shared ahead at most: some hundred microseconds, and memory that a
/// copy which runs nothing would not take.
const SHARED_AHEAD_MAX: u64 = 2 << 20;

/// Shares the arena of a sandbox without a program, for which nobody waits yet: whatever it is
/// wanted for takes a second host process.
fn share_ahead() {
    let first = kernel().tasks.process(FIRST_PID);
    if !first.is_some_and(|first| first.is_init.get())
        || !Machine::may_fork()
        || arena::bytes_in_use() > SHARED_AHEAD_MAX
    {
        return;
    }
    phases::report_if_due();
    // Its first process says what is wrong if this cannot be.
    let _ = arena::prepare().and_then(|()| arena::share(None));
}

/// Takes over several address spaces, and makes a host process for each. All but the first wait for
/// their memory at the gate, if there is one.
fn adopt_several(memory: &mut Memory<'_>, gate: Option<Gate>) -> Result<()> {
    let space = find_state(memory.flags)?;
    let mappings = &mut memory.mappings;
    host_process::begin(space.clone());
    for space in kernel().tasks.spaces() {
        space.forget_shown();
    }
    arena::prepare()?;
    arena::share(Some(mappings))?;
    let others = kernel().tasks.spaces().len() - 1;
    let mut rest = gate.map(|gate| post_copy::Rest::awaited_by(others, gate));
    host_process::begin_others(|number, space| {
        rest.as_mut().into_iter().for_each(post_copy::Rest::wait);
        fill(space, number, mappings)
    })?;
    fill(&space, 0, mappings)
}

/// Finds the kernel's state in the heap; the space of the first process.
fn find_state(flags: u32) -> Result<Arc<Space>> {
    if !heap::magic_is_right() {
        return Err(Errno::EINVAL);
    }
    heap::restored();
    // SAFETY: the heap is the one that `install` filled in the frozen sandbox.
    unsafe { restore(heap::root()) };
    *kernel().generation.borrow_mut() += 1;
    if flags & FLAG_EXECS_GO_ON != 0 {
        kernel().remote.streams.wait_for_host();
    }
    Ok(kernel().tasks.process(FIRST_PID).ok_or(Errno::EINVAL)?.mm())
}

/// Maps the memory of one of several address spaces.
fn fill(space: &AddressSpace, number: u32, mappings: &mut Mappings<'_>) -> Result<()> {
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
    kernel.clocks.thaw();
    let mut config = kernel.config.borrow_mut();
    config.memory_limit = identity.memory_limit;
    config.flags = identity.flags;
    drop(config);
    if !hostname.is_empty() {
        *kernel.namespaces.uts.hostname.borrow_mut() = hostname.to_vec();
    }
    let mut random = kernel.random.borrow_mut();
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
    let auxv = process.auxiliary_vector.borrow_mut();
    let address = auxv.chunks_exact(2).find(|pair| pair[0] == AT_RANDOM).map(|pair| pair[1]);
    if let Some(address) = address {
        // The program may have unmapped its first stack; then nobody reads them.
        let _ = UserAddress(address).write_bytes(&bytes);
    }
}
