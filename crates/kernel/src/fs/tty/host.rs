//! The host's terminal behind the standard streams of `thaw run`.
//!
//! The host's own line discipline edits, echoes and sends signals, which arrive
//! as messages. What is kept here is a copy of the modes, and job control,
//! which the host knows nothing of.

use alloc::vec::Vec;

use thaw_abi::control::{
    FLAG_STDERR_TTY, FLAG_STDIN_TTY, FLAG_STDOUT_TTY, MSG_TERMINAL_GET, MSG_TERMINAL_SET,
    TerminalMode, WindowSize,
};

use super::job::{self, Force, JobControl};
use super::termios::*;
use crate::errno::{Errno, Result};
use crate::fs::dev::makedev;
use crate::host::broker;
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::ids::Sid;
use crate::task::process::FIRST_PID;
use crate::task::signal::{SIGHUP, SIGINT, SIGQUIT, SIGTSTP, SIGWINCH, Signal};

/// Session of the first process.
const FIRST_SESSION: Sid = FIRST_PID.led_session();

/// What the kernel knows of the host's terminal.
pub struct HostTerminal {
    /// Session and foreground group.
    pub job: KernelCell<JobControl>,
    /// The modes, once they have been asked for.
    modes: KernelCell<Option<Termios>>,
}

impl Default for HostTerminal {
    fn default() -> Self {
        Self {
            job: KernelCell::new(JobControl::of_session(FIRST_SESSION)),
            modes: KernelCell::new(None),
        }
    }
}

/// Whether a standard stream is a terminal.
pub fn is_there() -> bool {
    let flags = FLAG_STDIN_TTY | FLAG_STDOUT_TTY | FLAG_STDERR_TTY;
    kernel().config.borrow_mut().flags & flags != 0
}

/// A signal from the host that a terminal sends, not a person by kill(1): it is
/// for the foreground. `false` if it is none, or there is no terminal.
pub fn signal(signal: Signal) -> bool {
    if !is_there() {
        return false;
    }
    let job = &kernel().fs.terminals.host.job;
    match signal {
        SIGINT | SIGQUIT | SIGTSTP | SIGWINCH => job::signal_foreground(job, signal),
        SIGHUP => job::hang_up(job),
        _ => return false,
    }
    true
}

impl HostTerminal {
    fn modes(&self) -> Result<Termios> {
        if let Some(known) = self.modes.get() {
            return Ok(known);
        }
        let mut reply = Vec::new();
        broker::request(MSG_TERMINAL_GET, &[], &[], &mut reply)?;
        let mode = reply.get(..size_of::<TerminalMode>()).ok_or(Errno::EIO)?;
        let mode: TerminalMode = bytemuck::pod_read_unaligned(mode);
        let TerminalMode { input, output, control, local, line, characters, .. } = mode;
        let modes = Termios { input, output, control, local, line, characters };
        self.modes.set(Some(modes));
        Ok(modes)
    }

    /// Changes the modes of the host's terminal; `when` is `TCSETS`, `TCSETSW`
    /// or `TCSETSF`.
    fn set_modes(&self, modes: Termios, when: u32) -> Result<()> {
        let Termios { input, output, control, local, line, characters } = modes;
        let mode =
            TerminalMode { input, output, control, local, line, characters, when: when - TCSETS };
        broker::request(MSG_TERMINAL_SET, bytemuck::bytes_of(&mode), &[], &mut Vec::new())?;
        self.modes.set(Some(modes));
        Ok(())
    }

    /// ioctl_tty(2).
    pub fn ioctl(&self, request: u32, argument: UserAddress) -> Result<u64> {
        let job = &self.job;
        match request {
            TCGETS => argument.write(&self.modes()?)?,
            TCGETS2 => {
                let termios = self.modes()?;
                argument.write(&Termios2 { termios, input_speed: 38400, output_speed: 38400 })?;
            }
            TCSETS | TCSETSW | TCSETSF => {
                job::check_change(job)?;
                self.set_modes(argument.read()?, request)?;
            }
            TCSETS2 | TCSETSW2 | TCSETSF2 => {
                job::check_change(job)?;
                let termios = argument.read::<Termios2>()?.termios;
                self.set_modes(termios, request - TCSETS2 + TCSETS)?;
            }
            TIOCGWINSZ => argument.write(&window())?,
            TIOCSWINSZ => set_window(argument.read()?),
            TIOCGPGRP => argument.write(&job::foreground(job)?)?,
            TIOCSPGRP => job::set_foreground(job, argument.read()?)?,
            TIOCGSID => argument.write(&job::session(job)?.for_caller())?,
            TIOCSCTTY => {
                job::acquire(job, if argument.0 == 1 { Force::Steal } else { Force::No })?;
            }
            TIOCNOTTY => job::give_up(job)?,
            TIOCOUTQ => argument.write(&0u32)?,
            TIOCGETD => argument.write(&0u32)?,
            TIOCGDEV => argument.write(&(makedev(136, 0) as u32))?,
            // Input that is to be dropped is dropped by setting the modes anew.
            TCFLSH if argument.0 == 1 => {}
            TCFLSH if argument.0 <= 2 => self.set_modes(self.modes()?, TCSETSF)?,
            TCFLSH => return Err(Errno::EINVAL),
            // The host sends what is written at once.
            TCSBRK | TCSBRKP => {}
            _ => return Err(Errno::ENOTTY),
        }
        Ok(0)
    }
}

fn window() -> WinSize {
    let window = kernel().window.get();
    WinSize { rows: window.rows, columns: window.columns, ..WinSize::default() }
}

fn set_window(size: WinSize) {
    kernel().window.set(WindowSize { rows: size.rows, columns: size.columns, reserved: 0 });
}
