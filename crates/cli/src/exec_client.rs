//! The streams of a process in an instance: a connection to the daemon that carries them.

use crate::client::Daemon;
use crate::failure::{Failure, Outcome};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, ErrorKind, Read, Write, stderr, stdin, stdout};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use thaw_daemon::admin::{EXEC_PROTOCOL, Frame, Problem};
use thaw_node::instance::InstanceState;
use thaw_node::remote::{ExecInfo, ExecRequest};
use thaw_node::service::InstanceInfo;
use tokio::signal::unix::{SignalKind, signal};

/// Most bytes of the head of an answer.
const HEAD_MAX: usize = 16 << 10;
/// Most bytes of a frame of the daemon.
const FRAME_MAX: usize = 1 << 20;

/// A connection that can be used by two threads.
pub trait Stream: Read + Write + Send {
    /// The same connection again.
    ///
    /// # Errors
    /// This process has no descriptors left.
    fn again(&self) -> io::Result<Box<dyn Stream>>;
    /// Nothing more is written.
    ///
    /// # Errors
    /// The connection is gone.
    fn end_writing(&self) -> io::Result<()>;
}

impl Stream for std::os::unix::net::UnixStream {
    fn again(&self) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(self.try_clone()?))
    }

    fn end_writing(&self) -> io::Result<()> {
        self.shutdown(std::net::Shutdown::Write)
    }
}

impl Stream for std::net::TcpStream {
    fn again(&self) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(self.try_clone()?))
    }

    fn end_writing(&self) -> io::Result<()> {
        self.shutdown(std::net::Shutdown::Write)
    }
}

/// Whose standard input and output a process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// This program's.
    Passed,
    /// None.
    None,
}

/// Starts a process in an instance and stays with it; its exit code is this program's.
///
/// # Errors
/// The daemon refuses, or the connection breaks.
pub fn run(daemon: &Daemon, instance: u64, request: &ExecRequest) -> Outcome {
    request.check().map_err(Failure::failed)?;
    let body = serde_json::to_vec(request).expect("plain data");
    let path = format!("/instances/{instance}/exec");
    let has_terminal = request.terminal.is_some();
    let input = if request.stdin || has_terminal { Input::Passed } else { Input::None };
    let left = match request.ends_sandbox {
        true => "the sandbox ends",
        false => "the process goes on; `thaw sandbox attach` finds it",
    };
    let begun = Arc::new(OnceLock::new());
    if !has_terminal {
        // The terminal in the sandbox makes signals of keys.
        pass_signals(daemon, instance, begun.clone(), left)?;
    }
    let started = |exec| {
        let _ = begun.set(exec);
        Ok(())
    };
    let killed = || match request.ends_sandbox {
        true => {}
        false => say_if_ended(daemon, instance),
    };
    converse(daemon, &path, &body, (input, has_terminal), (started, killed))
}

/// Says so if a process was killed since its sandbox has ended.
fn say_if_ended(daemon: &Daemon, instance: u64) {
    let Ok(all) = daemon.get::<Vec<InstanceInfo>>("/instances") else { return };
    let lives = |one: &InstanceInfo| one.id == instance && one.state != InstanceState::Ending;
    if !all.iter().any(lives) {
        eprintln!(
            "thaw: the sandbox has ended, with all of its processes; the log of its function \
             (`thaw logs`) says why"
        );
    }
}

/// Starts a process in an instance that nobody stays with.
///
/// # Errors
/// The daemon refuses.
pub fn begin(daemon: &Daemon, instance: u64, request: &ExecRequest) -> Result<ExecInfo, Failure> {
    daemon.send_json("POST", &format!("/instances/{instance}/exec"), request)
}

/// Stays with a process that runs.
///
/// # Errors
/// There is none, or the connection breaks.
pub fn attach(daemon: &Daemon, instance: u64, exec: u64, has_terminal: bool) -> Outcome {
    let path = format!("/instances/{instance}/execs/{exec}/attach");
    // Who attached goes away again, and the process goes on.
    let killed = || say_if_ended(daemon, instance);
    converse(daemon, &path, b"", (Input::Passed, has_terminal), (|_| Ok(()), killed))
}

/// Rows and columns of this terminal, if it is one.
pub fn window() -> Option<(u16, u16)> {
    let size = tcgetwinsize(stdin()).or_else(|_| tcgetwinsize(stdout())).ok()?;
    Some((size.ws_row, size.ws_col))
}

fn converse(
    daemon: &Daemon,
    path: &str,
    body: &[u8],
    (input, has_terminal): (Input, bool),
    (started, killed): (impl FnOnce(u64) -> io::Result<()>, impl FnOnce()),
) -> Outcome {
    let mut stream = daemon.upgraded(path, EXEC_PROTOCOL, body)?;
    let sender = Arc::new(Mutex::new(stream.again()?));
    let _modes = if has_terminal && isatty(stdin()) { Some(Raw::begin()?) } else { None };
    if has_terminal {
        let sender = sender.clone();
        follow_window(move |size| send(&sender, Frame::Window, &size))?;
    }
    if input == Input::Passed {
        // It ends with this process: nobody could interrupt its read.
        thread::spawn(move || pass_input(&sender, has_terminal));
    }
    let (code, signal) = show(&mut *stream, started)?;
    if i32::from(signal) == libc::SIGKILL {
        killed();
    }
    Ok(ExitCode::from(match signal {
        0 => code,
        signal => 128_u8.saturating_add(signal),
    }))
}

fn send(to: &Mutex<Box<dyn Stream>>, frame: Frame, bytes: &[u8]) {
    // One that is gone says so to whoever reads.
    let _ = to.lock().expect("no holder panics").write_all(&frame.with(bytes));
}

fn pass_input(to: &Mutex<Box<dyn Stream>>, has_terminal: bool) {
    let mut buffer = vec![0; 16 << 10];
    let mut is_in_line = false;
    loop {
        match stdin().read(&mut buffer) {
            Ok(count) if count > 0 => {
                is_in_line = buffer[count - 1] != b'\n';
                send(to, Frame::Stdin, &buffer[..count]);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // A terminal has no end of its own. In a line the first character for it ends the line
            // (termios(3), VEOF).
            _ if has_terminal && is_in_line => return send(to, Frame::Stdin, b"\x04\x04"),
            _ if has_terminal => return send(to, Frame::Stdin, b"\x04"),
            _ => return send(to, Frame::Stdin, b""),
        }
    }
}

/// Passes signals that would end this program on to a process, past its input, which it may not read.
/// A second SIGINT ends this program, which says what becomes of the process then: it may not mind the
/// first one. Until `begun` says which process it is, any of them ends this program.
fn pass_signals(
    daemon: &Daemon,
    instance: u64,
    begun: Arc<OnceLock<u64>>,
    left: &'static str,
) -> io::Result<()> {
    let ignored = ignored_signals();
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let number = kind.as_raw_value();
        // nohup(1) means the process, too.
        if ignored & (1 << (number - 1)) != 0 {
            continue;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut signals = runtime.block_on(async { signal(kind) })?;
        let (daemon, begun) = (daemon.clone(), begun.clone());
        thread::spawn(move || {
            let mut is_again = false;
            while runtime.block_on(signals.recv()).is_some() {
                let Some(exec) = begun.get() else { std::process::exit(128 + number) };
                let path = format!("/instances/{instance}/execs/{exec}/signal?number={number}");
                if is_again && kind == SignalKind::interrupt() {
                    eprintln!("thaw: {left}");
                    std::process::exit(128 + number);
                }
                is_again = true;
                let daemon = daemon.clone();
                // A process that has just ended gets none.
                thread::spawn(move || drop(daemon.post::<ExecInfo>(&path)));
            }
        });
    }
    Ok(())
}

/// Signals that this program ignores, a bit each (`SigIgn` of proc(5)).
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Tells whenever the window has another size.
fn follow_window(told: impl Fn([u8; 4]) + Send + 'static) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut changes = runtime.block_on(async { signal(SignalKind::window_change()) })?;
    thread::spawn(move || {
        runtime.block_on(async {
            while changes.recv().await.is_some() {
                if let Some((rows, columns)) = window() {
                    let ([a, b], [c, d]) = (rows.to_be_bytes(), columns.to_be_bytes());
                    told([a, b, c, d]);
                }
            }
        });
    });
    Ok(())
}

/// Shows what the process prints until it ends; its exit code, and the signal that has ended it, 0 for
/// none. Its number comes first.
fn show(
    from: &mut dyn Stream,
    started: impl FnOnce(u64) -> io::Result<()>,
) -> Result<(u8, u8), Failure> {
    let broken = |error: io::Error| {
        Failure::failed(format!(
            "the connection to the daemon has ended ({error}); the process goes on"
        ))
    };
    let mut started = Some(started);
    loop {
        let mut head = [0; 8];
        from.read_exact(&mut head).map_err(broken)?;
        let [kind, _, _, _, len @ ..] = head;
        let len = u32::from_be_bytes(len) as usize;
        if len > FRAME_MAX {
            return Err(broken(ErrorKind::InvalidData.into()));
        }
        let mut bytes = vec![0; len];
        from.read_exact(&mut bytes).map_err(broken)?;
        match kind {
            kind if kind == Frame::Stdout as u8 => {
                stdout().write_all(&bytes).and_then(|()| stdout().flush())?;
            }
            kind if kind == Frame::Stderr as u8 => stderr().write_all(&bytes)?,
            kind if kind == Frame::Started as u8 => {
                let exec = bytes.try_into().map(u64::from_be_bytes);
                if let (Ok(exec), Some(started)) = (exec, started.take()) {
                    started(exec)?;
                }
            }
            kind if kind == Frame::Lost as u8 => {
                eprintln!("thaw: what it printed first was not kept");
            }
            kind if kind == Frame::Ended as u8 => {
                let (code, signal) = (bytes.first().copied(), bytes.get(1).copied());
                return Ok((code.unwrap_or(1), signal.unwrap_or(0)));
            }
            _ => {}
        }
    }
}

/// Passes every key on: the terminal in the sandbox knows what they mean. Undone when dropped.
struct Raw(Termios);

impl Raw {
    fn begin() -> io::Result<Self> {
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that is gone needs no modes.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.0);
    }
}

/// Asks a host over a fresh connection for one to a path that goes on with a protocol.
///
/// # Errors
/// The daemon refuses, with its reason, or does not answer.
pub fn upgrade(
    mut stream: Box<dyn Stream>,
    protocol: &str,
    (host, path): (&str, &str),
    authorization: Option<&str>,
    body: &[u8],
) -> Result<Box<dyn Stream>, Failure> {
    let authorization =
        authorization.map(|value| format!("Authorization: {value}\r\n")).unwrap_or_default();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: upgrade\r\nUpgrade: {protocol}\r\n\
         {authorization}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat())?;
    let head = read_head(&mut *stream)?;
    let status = head.split(' ').nth(1).unwrap_or_default();
    if status == "101" {
        return Ok(stream);
    }
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    let mut answer = vec![0; length.unwrap_or(0).min(HEAD_MAX)];
    stream.read_exact(&mut answer)?;
    Err(match serde_json::from_slice::<Problem>(&answer) {
        Ok(problem) => Failure::of(&problem),
        Err(_) => Failure::failed(format!("the daemon answered {status}; is it the same version?")),
    })
}

/// The head of an answer, byte by byte: what follows is not ours.
fn read_head(stream: &mut dyn Stream) -> Result<String, Failure> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
        if head.len() > HEAD_MAX {
            return Err(Failure::failed(
                "the daemon's answer cannot be read; is it the same version?",
            ));
        }
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}
