//! A function's program in a sandbox that is made without an image (`thaw run`), as others start
//! their containers: it shares no page with another one.

use super::client::PATIENCE;
use super::memory::SandboxMemory;
use super::native::{NativeError, specify_below};
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use thaw_home::function::BuiltFunction;

/// Pause between attempts to reach the program.
const PAUSE: Duration = Duration::from_millis(2);

/// `thaw run`, which goes with this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory for the function's own files, not below the home, which no sandbox sees.
struct Files(PathBuf);

impl Files {
    fn new() -> io::Result<Self> {
        let directory = std::env::temp_dir().join(format!("thaw-bench-{}", std::process::id()));
        fs::create_dir(&directory)?;
        Ok(Self(directory))
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Own memory of the program once it has answered so many requests, in KiB.
///
/// # Errors
/// Its files are not this host's, or it does not answer.
pub(crate) fn memory_without_image(
    function: &BuiltFunction,
    request: &[u8],
    requests: usize,
) -> Result<u64, NativeError> {
    let files = Files::new()?;
    let specification = specify_below(files.0.join("root"), &function.function, request)?;
    // Free until now; should somebody else take it, the program cannot be reached.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let root = specification.root.to_string_lossy();
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["run", "--as-root", "--weak-limits", "--memory", "4GiB", "--rootfs", "/"]);
    command.arg("--bind").arg(format!("{root}:{root}"));
    command.arg("--publish").arg(format!("127.0.0.1:{port}:{}", specification.port));
    command.arg("--workdir").arg(&specification.directory);
    for (name, value) in &specification.environment {
        command.arg("--env").arg(format!("{name}={value}"));
    }
    command.arg("--").args(&specification.command);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut running = Running(command.spawn()?);
    for _ in 0..requests.max(1) {
        until_answered(port, request, &mut running.0)?;
    }
    Ok(SandboxMemory::below(running.0.id())?.own_kib())
}

/// Asks until there is an answer: the port takes connections before the program does.
fn until_answered(port: u16, request: &[u8], child: &mut Child) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while answer(port, request).is_err() {
        if let Some(status) = child.try_wait()? {
            return Err(io::Error::other(format!("`thaw run` has ended, {status}")));
        }
        if Instant::now() >= deadline {
            return Err(ErrorKind::TimedOut.into());
        }
        sleep(PAUSE);
    }
    Ok(())
}

fn answer(port: u16, request: &[u8]) -> io::Result<()> {
    let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    client.set_read_timeout(Some(PATIENCE))?;
    client.write_all(request)?;
    let mut all = Vec::new();
    client.read_to_end(&mut all)?;
    if all.is_empty() { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}
