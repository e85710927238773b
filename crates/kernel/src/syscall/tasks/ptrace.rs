//! ptrace(2), process_vm_readv(2), process_vm_writev(2): looking into other processes.

use alloc::vec::Vec;

use super::{ARCH_GET_FS, ARCH_GET_GS, ARCH_SET_FS, ARCH_SET_GS};
use crate::args::{PidNumber, UserPtr, Word};
use crate::errno::{Errno, Result};
use crate::io::{Sink, Source};
use crate::mm::force::Access;
use crate::platform::machine::ThreadState as _;
use crate::platform::user::UserAddress;
use crate::task::ptrace::registers::{self, UserRegisters};
use crate::task::ptrace::requests::{Own, Stopped};
use crate::task::ptrace::{self, Attachment, Mode, Options, access};
use crate::task::signal::{Signal, SignalRecord};
use crate::task::thread::Thread;
use crate::task::visit::{self, Program};

/// `struct iovec`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Vector {
    base: u64,
    len: u64,
}

/// ptrace(2).
pub fn ptrace(
    Word(request): Word,
    pid: PidNumber,
    address: UserAddress,
    data: UserAddress,
) -> Result<u64> {
    const TRACEME: u64 = 0;
    const KILL: u64 = 8;
    const ATTACH: u64 = 16;
    const SEIZE: u64 = 0x4206;
    const INTERRUPT: u64 = 0x4207;
    let done = match request {
        TRACEME => ptrace::trace_me(),
        ATTACH => attach(pid, Attachment::Classic, Options::empty()),
        SEIZE if !address.is_null() => Err(Errno::EIO),
        SEIZE => attach(pid, Attachment::Seized, options(data.0).or(Err(Errno::EIO))?),
        KILL => own(pid).map(|tracee| tracee.kill()),
        INTERRUPT => own(pid)?.interrupt(),
        _ => return of_stopped(request, own(pid)?.stopped()?, address, data),
    };
    done.map(|()| 0)
}

fn attach(pid: PidNumber, attachment: Attachment, options: Options) -> Result<()> {
    let tid = pid.tid().or(Err(Errno::ESRCH))?;
    let tracee = crate::state::kernel().tasks.thread(tid).ok_or(Errno::ESRCH)?;
    ptrace::attach(&tracee, attachment, options)
}

fn own(pid: PidNumber) -> Result<Own> {
    Own::find(pid.tid().or(Err(Errno::ESRCH))?)
}

fn options(bits: u64) -> Result<Options> {
    let known = u32::try_from(bits).ok().and_then(Options::from_bits);
    known.ok_or(Errno::EINVAL)
}

/// The signal with which a tracee goes on; `EIO` if there is none with this number.
fn signal(number: u64) -> Result<Option<Signal>> {
    match u32::try_from(number) {
        Ok(0) => Ok(None),
        Ok(number) => Signal::from_number(number).map(Some).ok_or(Errno::EIO),
        Err(_) => Err(Errno::EIO),
    }
}

/// The requests that a tracee must have stopped for.
fn of_stopped(
    request: u64,
    tracee: Stopped,
    address: UserAddress,
    data: UserAddress,
) -> Result<u64> {
    const PEEKTEXT: u64 = 1;
    const PEEKDATA: u64 = 2;
    const PEEKUSER: u64 = 3;
    const POKETEXT: u64 = 4;
    const POKEDATA: u64 = 5;
    const POKEUSER: u64 = 6;
    const CONT: u64 = 7;
    const SINGLESTEP: u64 = 9;
    const GETREGS: u64 = 12;
    const SETREGS: u64 = 13;
    const GETFPREGS: u64 = 14;
    const SETFPREGS: u64 = 15;
    const DETACH: u64 = 17;
    const SYSCALL: u64 = 24;
    const ARCH_PRCTL: u64 = 30;
    const SETOPTIONS: u64 = 0x4200;
    const GETEVENTMSG: u64 = 0x4201;
    const GETSIGINFO: u64 = 0x4202;
    const SETSIGINFO: u64 = 0x4203;
    const GETREGSET: u64 = 0x4204;
    const SETREGSET: u64 = 0x4205;
    const LISTEN: u64 = 0x4208;
    const GETSIGMASK: u64 = 0x420a;
    const SETSIGMASK: u64 = 0x420b;
    const GET_SYSCALL_INFO: u64 = 0x420e;
    match request {
        PEEKTEXT | PEEKDATA => {
            let mut word = [0; 8];
            tracee.read(address, &mut word)?;
            data.write(&word)?;
        }
        POKETEXT | POKEDATA => tracee.write(address, &data.0.to_ne_bytes())?,
        PEEKUSER => data.write(&registers::user_word(tracee.thread(), address.0)?)?,
        POKEUSER => registers::set_user_word(tracee.thread(), address.0, data.0)?,
        CONT => tracee.resume(Mode::Free, signal(data.0)?),
        SYSCALL => tracee.resume(Mode::ToCall, signal(data.0)?),
        SINGLESTEP => tracee.resume(Mode::Step, signal(data.0)?),
        DETACH => tracee.detach(signal(data.0)?),
        LISTEN => tracee.listen()?,
        ARCH_PRCTL => arch_prctl(tracee.thread(), data.0, address)?,
        GETREGS => data.write(&registers::general(tracee.thread()))?,
        SETREGS => registers::set_general(tracee.thread(), &data.read()?)?,
        GETFPREGS => data.write_bytes(&registers::legacy_vector(tracee.thread()))?,
        SETFPREGS => registers::set_vector(tracee.thread(), &data.read_array::<u8>(512)?)?,
        SETOPTIONS => tracee.set_options(options(data.0)?),
        GETEVENTMSG => data.write(&tracee.message())?,
        GETSIGINFO => data.write(&SignalRecord::from(tracee.signal_info()?))?,
        SETSIGINFO => {
            let record: SignalRecord = data.read()?;
            let signal = Signal::from_number(record.number()).ok_or(Errno::EINVAL)?;
            tracee.set_signal_info(record.with_signal(signal))?;
        }
        GETREGSET => get_set(&tracee, address.0, UserPtr::new(data))?,
        SETREGSET => set_set(&tracee, address.0, UserPtr::new(data))?,
        GETSIGMASK | SETSIGMASK if address.0 != 8 => return Err(Errno::EINVAL),
        GETSIGMASK => data.write(&tracee.mask())?,
        SETSIGMASK => tracee.set_mask(data.read()?),
        GET_SYSCALL_INFO => {
            let (info, len) = tracee.call_info();
            let room = usize::try_from(address.0).unwrap_or(usize::MAX).min(len);
            data.write_bytes(&bytemuck::bytes_of(&info)[..room])?;
            return Ok(len as u64);
        }
        _ => return Err(Errno::EIO),
    }
    Ok(0)
}

/// `PTRACE_ARCH_PRCTL`: arch_prctl(2) of a tracee, as debuggers ask for its thread's own data.
fn arch_prctl(thread: &Thread, code: u64, argument: UserAddress) -> Result<()> {
    match code as u32 {
        ARCH_GET_FS => argument.write(&thread.context.fs_base()),
        ARCH_GET_GS => argument.write(&thread.context.gs_base()),
        ARCH_SET_FS | ARCH_SET_GS if argument.0 >= thaw_abi::layout::GUEST_MAX => Err(Errno::EPERM),
        ARCH_SET_FS => {
            thread.context.set_fs_base(argument.0);
            Ok(())
        }
        // The entries into the kernel would have to know of another base of `%gs`.
        ARCH_SET_GS if argument.0 != thread.context.gs_base() => Err(Errno::EIO),
        ARCH_SET_GS => Ok(()),
        _ => Err(Errno::EINVAL),
    }
}

const NT_PRSTATUS: u64 = 1;
const NT_PRFPREG: u64 = 2;
const NT_X86_XSTATE: u64 = 0x202;

/// `PTRACE_GETREGSET`.
fn get_set(tracee: &Stopped, kind: u64, to: UserPtr<Vector>) -> Result<()> {
    let thread = tracee.thread();
    let bytes = match kind {
        NT_PRSTATUS => bytemuck::bytes_of(&registers::general(thread)).to_vec(),
        NT_PRFPREG => registers::legacy_vector(thread),
        NT_X86_XSTATE => registers::vector(thread),
        _ => return Err(Errno::EINVAL),
    };
    let vector = to.read()?;
    if vector.len % 8 != 0 && vector.len < bytes.len() as u64 {
        return Err(Errno::EINVAL);
    }
    let len = vector.len.min(bytes.len() as u64);
    UserAddress(vector.base).write_bytes(&bytes[..len as usize])?;
    to.write(&Vector { len, ..vector })
}

/// `PTRACE_SETREGSET`.
fn set_set(tracee: &Stopped, kind: u64, from: UserPtr<Vector>) -> Result<()> {
    let (thread, vector) = (tracee.thread(), from.read()?);
    let most = match kind {
        NT_PRSTATUS => size_of::<UserRegisters>(),
        NT_PRFPREG => 512,
        NT_X86_XSTATE => registers::vector(thread).len(),
        _ => return Err(Errno::EINVAL),
    };
    let len = usize::try_from(vector.len).unwrap_or(usize::MAX).min(most);
    let bytes = UserAddress(vector.base).read_array::<u8>(len)?;
    match kind {
        NT_PRSTATUS => {
            let mut new = registers::general(thread);
            bytemuck::bytes_of_mut(&mut new)[..len].copy_from_slice(&bytes);
            registers::set_general(thread, &new)?;
        }
        NT_PRFPREG if len < most => return Err(Errno::EINVAL),
        _ => registers::set_vector(thread, &bytes)?,
    }
    from.write(&Vector { len: len as u64, ..vector })
}

/// The program that a call wants to look into; `ESRCH`, `EPERM`. Threads of the kernel's own have none.
fn target(pid: PidNumber) -> Result<Program> {
    let tasks = &crate::state::kernel().tasks;
    let tid = pid.tid().or(Err(Errno::ESRCH))?;
    let process = tasks.thread(tid).ok_or(Errno::ESRCH)?.process.clone();
    tasks.process(process.pid).ok_or(Errno::ESRCH)?;
    access::check(&process)?;
    Ok(Program::of(process))
}

/// Most vectors of a call (`UIO_MAXIOV`).
const VECTORS_MAX: u64 = 1024;

fn remote_vectors(at: UserAddress, count: u64) -> Result<Vec<Vector>> {
    if count > VECTORS_MAX {
        return Err(Errno::EINVAL);
    }
    at.read_array::<u64>(2 * count as usize)
        .map(|words| words.chunks(2).map(|pair| Vector { base: pair[0], len: pair[1] }).collect())
}

/// Most bytes that are copied at a time.
const PIECE: usize = 64 << 10;

/// Copies what `vectors` name, `room` bytes at most, piece by piece: `copy` gets where a piece is and its length, and
/// says how much of it was copied. Once something was, what fails only ends the call.
fn copy_pieces(
    vectors: Vec<Vector>,
    room: usize,
    mut copy: impl FnMut(UserAddress, usize) -> Result<usize>,
) -> Result<usize> {
    let mut done = 0;
    for Vector { mut base, mut len } in vectors {
        while len > 0 && done < room {
            let piece = PIECE.min(room - done).min(usize::try_from(len).unwrap_or(PIECE));
            let count = match copy(UserAddress(base), piece) {
                Ok(count) => count,
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            };
            done += count;
            if count < piece {
                return if done > 0 { Ok(done) } else { Err(Errno::EFAULT) };
            }
            (base, len) = (base.wrapping_add(piece as u64), len - piece as u64);
        }
    }
    Ok(done)
}

/// process_vm_readv(2).
pub fn process_vm_readv(
    pid: PidNumber,
    local: UserAddress,
    local_count: u64,
    remote: UserAddress,
    remote_count: u64,
    Word(flags): Word,
) -> Result<usize> {
    if flags != 0 || local_count > VECTORS_MAX {
        return Err(Errno::EINVAL);
    }
    let mut sink = Sink::user_vectors(local, local_count as usize)?;
    let vectors = remote_vectors(remote, remote_count)?;
    let program = target(pid)?;
    copy_pieces(vectors, sink.remaining(), |from, len| {
        let mut bytes = alloc::vec![0; len];
        let read = visit::read(&program, from, &mut bytes)?;
        sink.put(&bytes[..read])
    })
}

/// process_vm_writev(2).
pub fn process_vm_writev(
    pid: PidNumber,
    local: UserAddress,
    local_count: u64,
    remote: UserAddress,
    remote_count: u64,
    Word(flags): Word,
) -> Result<usize> {
    if flags != 0 || local_count > VECTORS_MAX {
        return Err(Errno::EINVAL);
    }
    let mut source = Source::user_vectors(local, local_count as usize)?;
    let vectors = remote_vectors(remote, remote_count)?;
    let program = target(pid)?;
    copy_pieces(vectors, source.remaining(), |to, len| {
        let mut bytes = alloc::vec![0; len];
        let taken = source.take(&mut bytes)?;
        visit::write(&program, to, &bytes[..taken], Access::AsGuest)
    })
}
