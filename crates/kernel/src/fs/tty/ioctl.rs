//! ioctl_tty(2) on the two ends of a pseudo terminal.

use alloc::sync::Arc;
use core::sync::atomic::Ordering::Relaxed;

use super::job::{self, Force};
use super::pty::{PACKET_FLUSH_READ, PACKET_FLUSH_WRITE, PACKET_START, PACKET_STOP, Pty};
use super::termios::*;
use crate::args::SignalNumber;
use crate::errno::{Errno, Result};
use crate::fs::dev::makedev;
use crate::fs::fd_table::NewDescriptor;
use crate::fs::fd_table::OnExec;
use crate::fs::file::{OpenFile, OpenFlags};
use crate::platform::user::UserAddress;

/// ioctl(2) on a master.
pub fn master(pty: &Arc<Pty>, request: u32, argument: UserAddress) -> Result<u64> {
    match request {
        TIOCGPTN => argument.write(&pty.number)?,
        TIOCSPTLCK => pty.locked.store(argument.read::<i32>()? != 0, Relaxed),
        TIOCGPTLCK => argument.write(&u32::from(pty.locked.load(Relaxed)))?,
        TIOCPKT => {
            let on = argument.read::<i32>()? != 0;
            let mut packet = pty.packet.borrow_mut();
            *packet = if on { Some(packet.unwrap_or(0)) } else { None };
        }
        TIOCGPKT => argument.write(&u32::from(pty.packet.borrow_mut().is_some()))?,
        TIOCGPTPEER => return open_peer(pty, OpenFlags::from_bits_retain(argument.0 as u32)),
        TIOCSIG => {
            // The argument is the number itself.
            let signal = SignalNumber(argument.0 as u32).signal()?;
            job::signal_foreground(&pty.job, signal);
        }
        FIONREAD => argument.write(&(pty.discipline.borrow_mut().output.len() as i32))?,
        TIOCOUTQ => argument.write(&0i32)?,
        // Of the slave, whichever process asks.
        TIOCGPGRP => argument.write(&job::foreground_for_caller(&pty.job))?,
        TIOCGSID => {
            argument.write(&pty.job.borrow_mut().session.ok_or(Errno::ENOTTY)?.for_caller())?
        }
        TIOCSCTTY | TIOCNOTTY | TIOCSPGRP => return Err(Errno::ENOTTY),
        _ => return both(pty, request, argument),
    }
    Ok(0)
}

/// `TIOCGPTPEER`: opens the slave without a look at any path.
fn open_peer(pty: &Arc<Pty>, flags: OpenFlags) -> Result<u64> {
    // A slave that is opened and closed again hangs up the master.
    let descriptor = NewDescriptor::reserve()?;
    let file = super::pty::Slave::open(pty, flags)?;
    let path = super::devpts::path_of(pty);
    let kept = flags & (OpenFlags::RDWR | OpenFlags::WRONLY | OpenFlags::NONBLOCK);
    let open = OpenFile::new(file, kept | OpenFlags::LARGEFILE, Some(path));
    Ok(descriptor.install(open, OnExec::of(flags)) as u64)
}

/// ioctl(2) on a slave.
pub fn slave(pty: &Arc<Pty>, request: u32, argument: UserAddress) -> Result<u64> {
    match request {
        TIOCGPGRP => argument.write(&job::foreground(&pty.job)?)?,
        TIOCSPGRP => job::set_foreground(&pty.job, argument.read()?)?,
        TIOCGSID => argument.write(&job::session(&pty.job)?.for_caller())?,
        TIOCSCTTY => {
            job::acquire(&pty.job, if argument.0 == 1 { Force::Steal } else { Force::No })?;
        }
        TIOCNOTTY => job::give_up(&pty.job)?,
        FIONREAD => argument.write(&(pty.discipline.borrow_mut().available() as i32))?,
        TIOCOUTQ => argument.write(&(pty.discipline.borrow_mut().output.len() as i32))?,
        TIOCEXCL => pty.exclusive.store(true, Relaxed),
        TIOCNXCL => pty.exclusive.store(false, Relaxed),
        TCSETS | TCSETSW | TCSETSF | TCSETS2 | TCSETSW2 | TCSETSF2 | TCSETA | TCSETAW | TCSETAF
        | TCFLSH | TCXONC | TCSBRK | TCSBRKP | TIOCSETD => {
            job::check_change(&pty.job)?;
            return both(pty, request, argument);
        }
        _ => return both(pty, request, argument),
    }
    Ok(0)
}

/// What works on either end and means the slave.
fn both(pty: &Arc<Pty>, request: u32, argument: UserAddress) -> Result<u64> {
    match request {
        TCGETS => argument.write(&pty.discipline.borrow_mut().termios)?,
        TCGETA => argument.write(&pty.discipline.borrow_mut().termios.to_termio())?,
        TCSETA | TCSETAW | TCSETAF => {
            let termio: Termio = argument.read()?;
            let termios = pty.discipline.borrow_mut().termios.with_termio(&termio);
            set(pty, termios, request == TCSETAF);
        }
        TCGETS2 => {
            let termios = pty.discipline.borrow_mut().termios;
            argument.write(&Termios2 { termios, input_speed: 38400, output_speed: 38400 })?;
        }
        TCSETS | TCSETSW | TCSETSF => set(pty, argument.read()?, request == TCSETSF),
        TCSETS2 | TCSETSW2 | TCSETSF2 => {
            set(pty, argument.read::<Termios2>()?.termios, request == TCSETSF2);
        }
        TIOCGWINSZ => argument.write(&pty.size.get())?,
        TIOCSWINSZ => pty.resize(argument.read()?),
        TIOCGETD => argument.write(&0i32)?,
        // There is one line discipline, N_TTY.
        TIOCSETD if argument.read::<i32>()? == 0 => {}
        TIOCSETD => return Err(Errno::EINVAL),
        TIOCGDEV => argument.write(&(makedev(136, pty.number.into()) as u32))?,
        TCSBRK | TCSBRKP => {}
        TCFLSH => flush(pty, argument.0)?,
        TCXONC => flow(pty, argument.0)?,
        _ => return Err(Errno::ENOTTY),
    }
    Ok(0)
}

fn set(pty: &Pty, termios: Termios, flush: bool) {
    {
        let mut discipline = pty.discipline.borrow_mut();
        if flush {
            discipline.flush_input();
        }
        discipline.set_termios(termios);
    }
    pty.wake();
}

/// `TCFLSH`: input, output or both are dropped.
fn flush(pty: &Pty, what: u64) -> Result<()> {
    if what > 2 {
        return Err(Errno::EINVAL);
    }
    if what != 1 {
        pty.discipline.borrow_mut().flush_input();
        pty.note_packet(PACKET_FLUSH_READ);
    }
    if what != 0 {
        pty.discipline.borrow_mut().output.clear();
        pty.note_packet(PACKET_FLUSH_WRITE);
    }
    pty.wake();
    Ok(())
}

/// `TCXONC`: output is stopped or started; the other two send the stop or start
/// character to whoever types.
fn flow(pty: &Pty, what: u64) -> Result<()> {
    {
        let mut discipline = pty.discipline.borrow_mut();
        let characters = discipline.termios.characters;
        match what {
            0 => discipline.stopped = true,
            1 => discipline.stopped = false,
            2 => discipline.output.push_back(characters[VSTOP]),
            3 => discipline.output.push_back(characters[VSTART]),
            _ => return Err(Errno::EINVAL),
        }
    }
    match what {
        0 => pty.note_packet(PACKET_STOP),
        1 => pty.note_packet(PACKET_START),
        _ => {}
    }
    pty.wake();
    Ok(())
}
