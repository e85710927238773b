//! Moving bytes between a pipe and another file inside the kernel (splice(2),
//! tee(2), vmsplice(2)). Bytes are copied, not pages: a copy within the kernel
//! costs less than what it would take to share pages with the guest.

use alloc::vec::Vec;

use crate::args::{Fd, Flags};
use crate::errno::{Errno, Result};
use crate::fs::file::{OpenFile, OpenFlags};
use crate::fs::pipe::PipeEnd;
use crate::io::{IOV_MAX, MAX_RW_COUNT, Sink, Source};
use crate::platform::user::UserAddress;
use crate::task::scheduler;
use crate::task::wait::Wake;

/// `SPLICE_F_NONBLOCK`.
const NONBLOCK: u32 = 2;
/// `SPLICE_F_MOVE | SPLICE_F_NONBLOCK | SPLICE_F_MORE | SPLICE_F_GIFT`.
const FLAGS: u32 = 0xf;
/// Bytes moved in one step.
const CHUNK: usize = 64 << 10;

/// Why a step has moved nothing.
enum Stuck {
    /// The input has nothing.
    Input,
    /// The output has no room.
    Output,
    /// It cannot be done.
    Failed(Errno),
}

impl From<Errno> for Stuck {
    fn from(error: Errno) -> Self {
        Self::Failed(error)
    }
}

type Step = core::result::Result<usize, Stuck>;

/// The two files of a call, and whether it may wait.
struct Transfer<'a> {
    input: &'a OpenFile,
    output: &'a OpenFile,
    waits: bool,
}

impl Transfer<'_> {
    /// Repeats `step`, which never waits itself, until it has moved something or
    /// has come to the end.
    fn run(&self, mut step: impl FnMut() -> Step) -> Result<usize> {
        loop {
            match step() {
                Ok(count) => return Ok(count),
                Err(Stuck::Input) => self.wait(self.input)?,
                Err(Stuck::Output) => self.wait(self.output)?,
                Err(Stuck::Failed(error)) => return Err(error),
            }
        }
    }

    fn wait(&self, open: &OpenFile) -> Result<()> {
        let nonblocking = open.flags().contains(OpenFlags::NONBLOCK);
        let queue = open.file.wait_queue().filter(|_| self.waits && !nonblocking);
        let queue = queue.ok_or(Errno::EAGAIN)?;
        match scheduler::block_on(&[queue], None) {
            Wake::Interrupted => Err(Errno::ERESTARTSYS),
            Wake::Woken | Wake::TimedOut => Ok(()),
        }
    }
}

/// Where in a seekable file a transfer goes on.
struct Position {
    pointer: UserAddress,
    offset: u64,
}

impl Position {
    /// At `*pointer`, or at the file's own position.
    fn of(open: &OpenFile, pointer: UserAddress) -> Result<Self> {
        if pointer.is_null() {
            return Ok(Self { pointer, offset: open.position() });
        }
        // Only what pread(2) takes has a place to name.
        if !open.file.seekable() {
            return Err(Errno::EINVAL);
        }
        let offset = u64::try_from(pointer.read::<i64>()?).map_err(|_| Errno::EINVAL)?;
        Ok(Self { pointer, offset })
    }

    fn advance(self, open: &OpenFile, count: usize) -> Result<()> {
        let end = self.offset.checked_add(count as u64).ok_or(Errno::EOVERFLOW)?;
        if self.pointer.is_null() {
            if open.file.seekable() {
                open.set_position(end);
            }
            return Ok(());
        }
        self.pointer.write(&end)
    }
}

fn stuck_on(side: Stuck) -> impl FnOnce(Errno) -> Stuck {
    move |error| if error == Errno::EAGAIN { side } else { Stuck::Failed(error) }
}

/// Moves bytes out of a pipe, leaving those that the output does not take.
fn from_pipe(pipe: &PipeEnd, output: &OpenFile, offset: u64, len: usize) -> Step {
    let bytes = pipe.look(len.min(CHUNK)).map_err(stuck_on(Stuck::Input))?;
    if bytes.is_empty() {
        return Ok(0);
    }
    let mut source = Source::kernel(&bytes);
    let count = output.try_write(&mut source, offset).map_err(stuck_on(Stuck::Output))?;
    pipe.discard(count);
    Ok(count)
}

/// Moves as many bytes into a pipe as it has room for.
fn into_pipe(input: &OpenFile, offset: u64, pipe: &PipeEnd, len: usize) -> Step {
    let room = pipe.room().map_err(stuck_on(Stuck::Output))?;
    let mut bytes: Vec<u8> = alloc::vec![0; len.min(room).min(CHUNK)];
    let count =
        input.try_read(&mut Sink::kernel(&mut bytes), offset).map_err(stuck_on(Stuck::Input))?;
    pipe.put(&bytes[..count])?;
    Ok(count)
}

/// Moves or copies bytes from one pipe to another.
fn between(input: &PipeEnd, output: &PipeEnd, len: usize, keep: Keep) -> Step {
    let room = output.room().map_err(stuck_on(Stuck::Output))?;
    let bytes = input.look(len.min(room).min(CHUNK)).map_err(stuck_on(Stuck::Input))?;
    output.put(&bytes)?;
    if keep == Keep::No {
        input.discard(bytes.len());
    }
    Ok(bytes.len())
}

/// Whether the bytes stay in the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keep {
    /// tee(2).
    Yes,
    /// splice(2).
    No,
}

/// The files of a call; `EBADF` unless one can be read and the other written.
fn check(input: &OpenFile, output: &OpenFile) -> Result<()> {
    let path = input.flags().contains(OpenFlags::PATH) || output.flags().contains(OpenFlags::PATH);
    if path || !input.flags().can_read() || !output.flags().can_write() {
        return Err(Errno::EBADF);
    }
    Ok(())
}

/// splice(2).
pub fn splice(
    input: Fd,
    from: UserAddress,
    output: Fd,
    to: UserAddress,
    count: usize,
    Flags(flags): Flags,
) -> Result<usize> {
    let len = count.min(MAX_RW_COUNT);
    if len == 0 {
        return Ok(0);
    }
    if flags & !FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    let (input, output) = (input.file()?, output.file()?);
    check(&input, &output)?;
    let waits = flags & NONBLOCK == 0;
    let transfer = Transfer { input: &input, output: &output, waits };
    let count = match (input.downcast::<PipeEnd>(), output.downcast::<PipeEnd>()) {
        (Some(first), Some(second)) => {
            if !from.is_null() || !to.is_null() {
                return Err(Errno::ESPIPE);
            }
            if first.is_same_pipe(second) {
                return Err(Errno::EINVAL);
            }
            transfer.run(|| between(first, second, len, Keep::No))?
        }
        (Some(pipe), None) => {
            if !from.is_null() {
                return Err(Errno::ESPIPE);
            }
            if output.flags().contains(OpenFlags::APPEND) {
                return Err(Errno::EINVAL);
            }
            let position = Position::of(&output, to)?;
            let count = drain(&transfer, pipe, position.offset, len)?;
            position.advance(&output, count)?;
            count
        }
        (None, Some(pipe)) => {
            if !to.is_null() {
                return Err(Errno::ESPIPE);
            }
            let position = Position::of(&input, from)?;
            let count = transfer.run(|| into_pipe(&input, position.offset, pipe, len))?;
            position.advance(&input, count)?;
            count
        }
        (None, None) => return Err(Errno::EINVAL),
    };
    Ok(count)
}

/// Moves what a pipe has, up to `len` bytes; waits for the first of them only.
fn drain(transfer: &Transfer<'_>, pipe: &PipeEnd, start: u64, len: usize) -> Result<usize> {
    let mut done = 0;
    while done < len {
        let at = start.checked_add(done as u64).ok_or(Errno::EOVERFLOW)?;
        let step = || from_pipe(pipe, transfer.output, at, len - done);
        let outcome = if done == 0 || !pipe.is_empty() { transfer.run(step) } else { Ok(0) };
        match outcome {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// tee(2).
pub fn tee(input: Fd, output: Fd, count: usize, Flags(flags): Flags) -> Result<usize> {
    let len = count.min(MAX_RW_COUNT);
    if flags & !FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    if len == 0 {
        return Ok(0);
    }
    let (input, output) = (input.file()?, output.file()?);
    check(&input, &output)?;
    let first = input.downcast::<PipeEnd>().ok_or(Errno::EINVAL)?;
    let second = output.downcast::<PipeEnd>().ok_or(Errno::EINVAL)?;
    if first.is_same_pipe(second) {
        return Err(Errno::EINVAL);
    }
    let transfer = Transfer { input: &input, output: &output, waits: flags & NONBLOCK == 0 };
    transfer.run(|| between(first, second, len, Keep::Yes))
}

/// vmsplice(2): as writev(2) or readv(2) of a pipe that moves what it can at once.
pub fn vmsplice(fd: Fd, vectors: UserAddress, count: usize, Flags(flags): Flags) -> Result<usize> {
    if flags & !FLAGS != 0 || count > IOV_MAX {
        return Err(Errno::EINVAL);
    }
    let open = fd.file()?;
    if open.flags().contains(OpenFlags::PATH) || open.downcast::<PipeEnd>().is_none() {
        return Err(Errno::EBADF);
    }
    let transfer = Transfer { input: &open, output: &open, waits: flags & NONBLOCK == 0 };

    if open.flags().can_write() {
        let mut source = Source::user_vectors(vectors, count)?;
        transfer.run(|| open.file.write(&mut source, 0).map_err(stuck_on(Stuck::Output)))
    } else {
        let mut sink = Sink::user_vectors(vectors, count)?;
        transfer.run(|| open.file.read(&mut sink, 0).map_err(stuck_on(Stuck::Input)))
    }
}
