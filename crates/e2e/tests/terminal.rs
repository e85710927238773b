//! `thaw run` on a terminal: modes, window size and keys are the program's.

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};
use thaw_e2e::{python, thaw_binary};

/// How long something may take to appear on the screen.
const PATIENCE: Duration = Duration::from_secs(60);

/// A terminal, with `thaw run` on the other end.
struct Terminal {
    master: File,
    slave: OwnedFd,
    screen: Receiver<Vec<u8>>,
    shown: String,
    thaw: Child,
}

impl Terminal {
    /// Runs a command with the terminal as its controlling one.
    fn run(command: &[&str]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&master).expect("granted");
        unlockpt(&master).expect("unlocked");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let slave = open(&*name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("a slave");
        tcsetwinsize(&slave, size(24, 80)).expect("a size");
        let stdio = || Stdio::from(slave.try_clone().expect("a descriptor"));
        // setsid(1) makes the terminal the controlling one.
        let mut run = Command::new("setsid");
        run.args(["--ctty", "--wait"]).arg(thaw_binary()).args([
            "run",
            "--as-root",
            "--rootfs",
            "/",
            "--",
        ]);
        run.args(command).stdin(stdio()).stdout(stdio()).stderr(stdio());
        let thaw = run.spawn().expect("setsid");
        let master = File::from(master);
        let mut reader = master.try_clone().expect("a descriptor");
        let (send, screen) = channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            // An error is the end: nobody has the slave open any more.
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                if send.send(bytes[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { master, slave, screen, shown: String::new(), thaw }
    }

    /// Waits until the screen shows a text, and forgets what was there so far.
    #[track_caller]
    fn expect(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.shown.contains(text) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.screen.recv_timeout(left) {
                Ok(bytes) => self.shown += &String::from_utf8_lossy(&bytes),
                Err(_) => panic!("{text:?} never appeared in {:?}", self.shown),
            }
        }
        let end = self.shown.find(text).expect("just found") + text.len();
        self.shown.drain(..end);
    }

    fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    fn local_modes(&self) -> LocalModes {
        tcgetattr(&self.slave).expect("modes").local_modes
    }

    #[track_caller]
    fn finish(mut self, code: i32) {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            match self.thaw.try_wait().expect("our child") {
                Some(status) => break status,
                None if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
                None => {
                    let _ = self.thaw.kill();
                    panic!("it does not end; the screen shows {:?}", self.shown);
                }
            }
        };
        assert_eq!(status.code(), Some(code), "{:?}", self.shown);
        let modes = self.local_modes();
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG));
    }
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

#[test]
fn modes_take_effect_and_are_put_back() {
    let python = python();
    let script = "import os, sys, tty\n\
                  print(os.ttyname(0), os.get_terminal_size())\n\
                  tty.setraw(0)\n\
                  os.write(1, b'raw\\r\\n')\n\
                  os.write(1, repr(os.read(0, 1)).encode())\n\
                  os._exit(7)";
    let mut terminal = Terminal::run(&[python.to_str().expect("a path"), "-c", script]);
    terminal.expect("/dev/pts/0 os.terminal_size(columns=80, lines=24)");
    terminal.expect("raw");
    assert!(!terminal.local_modes().intersects(LocalModes::ICANON | LocalModes::ISIG));
    terminal.press("\x03");
    terminal.expect("b'\\x03'");
    terminal.finish(7);
}

#[test]
fn a_program_that_is_killed_leaves_the_terminal_as_it_was() {
    let python = python();
    let script = "import os, tty\n\
                  tty.setraw(0)\n\
                  os.write(1, b'raw')\n\
                  os.read(0, 1)\n\
                  os.kill(os.getpid(), 9)";
    let mut terminal = Terminal::run(&[python.to_str().expect("a path"), "-c", script]);
    terminal.expect("raw");
    terminal.press("x");
    terminal.finish(128 + 9);
}

/// A job that says when it has the terminal. A shell that starts processes would not do: one that is
/// stopped while it waits for its vfork(2) hangs, natively, too.
const JOB: &str = "import os, signal, time\n\
                   signal.signal(signal.SIGINT, signal.SIG_DFL)\n\
                   signal.signal(signal.SIGCONT, lambda *_: os.write(1, b'resumed\\n'))\n\
                   os.write(1, b'started\\n')\n\
                   while True: time.sleep(0.1)";

#[test]
fn a_shell_has_job_control() {
    let job = format!("JOB={JOB}");
    let mut terminal =
        Terminal::run(&["env", &job, "PS1=ready> ", "bash", "--norc", "--noediting"]);
    let run_job = format!("{} -c \"$JOB\"\n", python().display());
    terminal.expect("ready> ");
    terminal.press(&run_job);
    terminal.expect("started\r\n");
    terminal.press("\x03");
    terminal.expect("ready> ");
    terminal.press("echo status $?\n");
    terminal.expect("status 130");
    terminal.press(&run_job);
    terminal.expect("started\r\n");
    terminal.press("\x1a");
    terminal.expect("Stopped");
    terminal.press("jobs\n");
    terminal.expect("Stopped");
    terminal.press("fg\n");
    terminal.expect("resumed\r\n");
    terminal.press("\x03");
    terminal.expect("ready> ");
    terminal.press("exit 5\n");
    terminal.finish(5);
}

#[test]
fn a_new_size_of_the_window_is_told() {
    let python = python();
    // The signal may come before a call that would wait for it.
    let script = "import os, signal, time\n\
                  told = []\n\
                  signal.signal(signal.SIGWINCH, lambda *_: told.append(os.get_terminal_size()))\n\
                  print('waiting', flush=True)\n\
                  while not told: time.sleep(0.05)\n\
                  print(told[0], flush=True)";
    let mut terminal = Terminal::run(&[python.to_str().expect("a path"), "-c", script]);
    terminal.expect("waiting");
    tcsetwinsize(&terminal.slave, size(50, 132)).expect("a size");
    terminal.expect("columns=132, lines=50");
    terminal.finish(0);
}
