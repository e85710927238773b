//! What is measured: system calls as a C program makes them, through the C
//! library.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{self, Error};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

/// A kind of call.
pub struct Measure {
    /// Name, as in the report and in orders to workers. Without blanks.
    pub name: &'static str,
    /// What it does, for people.
    pub what: &'static str,
    /// Calls of one sample: enough for the clock not to matter.
    calls: usize,
    /// Whether the host has no part in it, so that the goal is the native time.
    pub inside: bool,
    /// Whether it makes processes.
    pub forks: bool,
    /// Makes so many calls.
    run: Run,
}

/// Everything that is measured.
pub const MEASURES: &[Measure] = &[
    inside("getppid", "getppid", 2000, getppid),
    inside("syscall", "getppid through syscall(2)", 2000, generic),
    inside("clock_gettime", "clock_gettime(CLOCK_MONOTONIC)", 2000, clock_gettime),
    inside("read-zero", "read 1 byte of /dev/zero", 2000, read_zero),
    inside("open-close", "open + close", 200, open_close),
    inside("stat", "stat", 200, stat),
    inside("pipe", "pipe ping-pong of two threads", 200, pipe_ping_pong),
    inside("futex", "futex ping-pong of two threads", 200, futex_ping_pong),
    inside("read-4k-written", "read 4 KiB of a written file", 200, |place, calls| {
        read_file(&place.written, 4 << 10, calls)
    }),
    inside("read-1m-written", "read 1 MiB of a written file", 2, |place, calls| {
        read_file(&place.written, 1 << 20, calls)
    }),
    with_host("read-4k", "read 4 KiB of a file of the root", 200, |place, calls| {
        read_file(&place.lower, 4 << 10, calls)
    }),
    with_host("read-1m", "read 1 MiB of a file of the root", 2, |place, calls| {
        read_file(&place.lower, 1 << 20, calls)
    }),
    Measure { forks: true, ..with_host("fork-exec-wait", "fork + exec + wait", 1, fork_exec_wait) },
];

type Run = fn(&Workplace, usize) -> io::Result<()>;

const fn inside(name: &'static str, what: &'static str, calls: usize, run: Run) -> Measure {
    Measure { name, what, calls, inside: true, forks: false, run }
}

const fn with_host(name: &'static str, what: &'static str, calls: usize, run: Run) -> Measure {
    Measure { name, what, calls, inside: false, forks: false, run }
}

impl Measure {
    /// Takes samples: nanoseconds for one call each.
    pub fn take(&self, place: &Workplace, samples: usize) -> io::Result<Vec<f64>> {
        // The first calls find the sites not patched and the files not opened.
        (self.run)(place, self.calls.min(10))?;
        (0..samples)
            .map(|_| {
                let begin = Instant::now();
                (self.run)(place, self.calls)?;
                Ok(begin.elapsed().as_nanos() as f64 / self.calls as f64)
            })
            .collect()
    }
}

/// Bytes of the files that are read, at least.
const FILE_SIZE: usize = 1 << 20;

/// What the measures need.
pub struct Workplace {
    zero: File,
    /// A file that was there before: the executable itself.
    lower: File,
    written: File,
    /// A program that does nothing.
    idle: CString,
}

impl Workplace {
    pub fn prepare() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("thaw-bench-{}", std::process::id()));
        fs::write(&path, vec![1; FILE_SIZE])?;
        let written = File::open(&path)?;
        fs::remove_file(&path)?;
        Ok(Self {
            zero: File::open("/dev/zero")?,
            lower: File::open(std::env::current_exe()?)?,
            written,
            idle: CString::new("/bin/true")?,
        })
    }
}

fn getppid(_: &Workplace, calls: usize) -> io::Result<()> {
    for _ in 0..calls {
        // SAFETY: touches no memory.
        black_box(unsafe { libc::getppid() });
    }
    Ok(())
}

fn generic(_: &Workplace, calls: usize) -> io::Result<()> {
    for _ in 0..calls {
        // SAFETY: touches no memory.
        black_box(unsafe { libc::syscall(libc::SYS_getppid) });
    }
    Ok(())
}

fn clock_gettime(_: &Workplace, calls: usize) -> io::Result<()> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    for _ in 0..calls {
        // SAFETY: `time` is valid for the call.
        black_box(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) });
    }
    Ok(())
}

fn read_zero(place: &Workplace, calls: usize) -> io::Result<()> {
    let mut byte = 1u8;
    for _ in 0..calls {
        // SAFETY: one byte is written to `byte`.
        if unsafe { libc::read(place.zero.as_raw_fd(), (&raw mut byte).cast(), 1) } != 1 {
            return Err(Error::last_os_error());
        }
    }
    Ok(())
}

fn open_close(place: &Workplace, calls: usize) -> io::Result<()> {
    for _ in 0..calls {
        // SAFETY: the name is a string with a NUL.
        let fd = unsafe { libc::open(place.idle.as_ptr(), libc::O_RDONLY) };
        if fd < 0 {
            return Err(Error::last_os_error());
        }
        // SAFETY: just opened, and used by nobody else.
        unsafe { libc::close(fd) };
    }
    Ok(())
}

fn stat(place: &Workplace, calls: usize) -> io::Result<()> {
    // SAFETY: plain data, for which zeros are valid.
    let mut attributes: libc::stat = unsafe { std::mem::zeroed() };
    for _ in 0..calls {
        // SAFETY: the name is a string with a NUL, `attributes` is valid.
        if unsafe { libc::stat(place.idle.as_ptr(), &raw mut attributes) } != 0 {
            return Err(Error::last_os_error());
        }
    }
    Ok(())
}

/// A call is a byte to the other thread and one back.
fn pipe_ping_pong(_: &Workplace, calls: usize) -> io::Result<()> {
    let (there, back) = (pipe()?, pipe()?);
    let echo = (there.0, back.1);
    let other = thread::spawn(move || {
        while let Ok(true) = get_byte(&echo.0) {
            if put_byte(&echo.1).is_err() {
                break;
            }
        }
    });
    for _ in 0..calls {
        put_byte(&there.1)?;
        get_byte(&back.0)?;
    }
    drop(there.1);
    other.join().map_err(|_| Error::other("the other thread has panicked"))
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors.
    if unsafe { libc::pipe(ends.as_mut_ptr()) } != 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: just made, and owned by nobody else.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

fn put_byte(to: &OwnedFd) -> io::Result<()> {
    let byte = 1u8;
    // SAFETY: one byte is read from `byte`.
    match unsafe { libc::write(to.as_raw_fd(), (&raw const byte).cast(), 1) } {
        1 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Whether there was a byte before the end.
fn get_byte(from: &OwnedFd) -> io::Result<bool> {
    let mut byte = 0u8;
    // SAFETY: one byte is written to `byte`.
    match unsafe { libc::read(from.as_raw_fd(), (&raw mut byte).cast(), 1) } {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Error::last_os_error()),
    }
}

/// A call is a wake-up of the other thread and one back.
fn futex_ping_pong(_: &Workplace, calls: usize) -> io::Result<()> {
    let turn = Arc::new(AtomicU32::new(0));
    let others = turn.clone();
    let other = thread::spawn(move || {
        for call in 0..calls as u32 {
            await_turn(&others, 2 * call + 1);
            give_turn(&others, 2 * call + 2);
        }
    });
    for call in 0..calls as u32 {
        give_turn(&turn, 2 * call + 1);
        await_turn(&turn, 2 * call + 2);
    }
    other.join().map_err(|_| Error::other("the other thread has panicked"))
}

fn await_turn(turn: &AtomicU32, wanted: u32) {
    loop {
        let now = turn.load(Ordering::Acquire);
        if now == wanted {
            return;
        }
        let (wait, forever) =
            (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, std::ptr::null::<libc::timespec>());
        // SAFETY: the word is valid; spurious ends of the wait are looked into.
        unsafe { libc::syscall(libc::SYS_futex, turn.as_ptr(), wait, now, forever) };
    }
}

fn give_turn(turn: &AtomicU32, next: u32) {
    turn.store(next, Ordering::Release);
    // SAFETY: the word is valid.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            turn.as_ptr(),
            libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
            1,
        )
    };
}

fn fork_exec_wait(place: &Workplace, calls: usize) -> io::Result<()> {
    let arguments = [place.idle.as_ptr(), std::ptr::null()];
    for _ in 0..calls {
        // SAFETY: the child only executes a program or ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: strings with a NUL, a list that ends with null.
            unsafe {
                libc::execv(place.idle.as_ptr(), arguments.as_ptr());
                libc::_exit(127);
            }
        }
        let mut status = 0;
        // SAFETY: `status` is valid for the call.
        if child < 0 || unsafe { libc::waitpid(child, &raw mut status, 0) } != child {
            return Err(Error::last_os_error());
        }
        if status != 0 {
            return Err(Error::other(format!("{:?} ended with {status}", place.idle)));
        }
    }
    Ok(())
}

fn read_file(file: &File, len: usize, calls: usize) -> io::Result<()> {
    let mut buffer = vec![0u8; len];
    for _ in 0..calls {
        let to = buffer.as_mut_ptr().cast();
        // SAFETY: at most `len` bytes are written to `buffer`.
        if unsafe { libc::pread(file.as_raw_fd(), to, len, 0) } != len as isize {
            return Err(Error::last_os_error());
        }
    }
    Ok(())
}
