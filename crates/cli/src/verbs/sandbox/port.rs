//! `thaw sandbox port`.

use crate::client::{Daemon, DaemonArguments};
use crate::exec_client::Stream;
use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use crate::verbs::numbers::port;
use clap::Args;
use std::io::{self, Read, Write, stderr, stdin, stdout};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU16;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};
use thaw_home::config::parse_address;
use thaw_node::remote::Listener;
use thaw_node::remote::ports::PORT_PROTOCOL;
use thaw_node::sandboxes::SandboxInfo;

/// Bytes passed on at a time.
const CHUNK: usize = 16 << 10;
/// How often it is looked whether the sandbox is still there.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a daemon may take to be followed by another one.
const DAEMON_PATIENCE: Duration = Duration::from_secs(15);

/// Reach a port on which a program in a sandbox listens, or list those ports.
///
/// Without a port, the ports are listed on which something listens, with the address in the sandbox.
/// With one, connections to an address of this machine are passed on to the port, until this program is
/// interrupted or the sandbox has ended. The program in the sandbox may listen on any of its addresses, 127.0.0.1 included.
/// A sandbox that is paused wakes up.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sandbox port box\n  \
    thaw sandbox port box 8080\n  \
    thaw sandbox port box 5432 --listen 127.0.0.1:5432\n  \
    ssh -o ProxyCommand='thaw sandbox port box 22 --stdio' root@box")]
pub struct Arguments {
    /// The sandbox, by its name or the number of its instance.
    name: String,
    /// The port in the sandbox; all are listed without.
    #[arg(value_parser = port)]
    port: Option<NonZeroU16>,
    /// Where to listen; a port alone is one of 127.0.0.1. The address is printed.
    #[arg(long, value_name = "[IP:]PORT", default_value = "127.0.0.1:0", value_parser = parse_address)]
    #[arg(requires = "port")]
    listen: SocketAddr,
    /// Pass standard input and output on, for one connection, and listen nowhere.
    #[arg(long, conflicts_with = "listen", requires = "port")]
    stdio: bool,
    /// Print the list as JSON.
    #[arg(long, conflicts_with = "port")]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Arc::new(Daemon::find(&arguments.daemon)?);
    let sandbox = super::path(&arguments.name);
    let Some(port) = arguments.port else {
        return list(&daemon.get::<Vec<Listener>>(&format!("{sandbox}/ports"))?, arguments.json);
    };
    let path = format!("{sandbox}/ports/{port}");
    if arguments.stdio {
        return pass_stdio(&daemon, &path);
    }
    // A sandbox that is not there is said now, and not to the first client.
    let _: SandboxInfo = daemon.get(&sandbox)?;
    let listener = TcpListener::bind(arguments.listen).map_err(|error| {
        Failure::failed(format!(
            "cannot listen on {} ({error}); name another address with --listen",
            arguments.listen
        ))
    })?;
    output::print(&format!("{}\n", listener.local_addr()?))?;
    let (say, ended) = mpsc::channel();
    let passing = daemon.clone();
    thread::spawn(move || say.send(pass_all(&listener, &passing, &path)));
    Err(wait_for_the_end(&daemon, (&arguments.name, &sandbox), &ended))
}

/// Waits until a sandbox, whose path in the admin API is `path`, has ended, nobody answers for it any more, or its
/// port is `ended` to be passed on; which of these it was.
fn wait_for_the_end(
    daemon: &Daemon,
    (name, path): (&str, &str),
    ended: &Receiver<io::Error>,
) -> Failure {
    let mut seen = Instant::now();
    loop {
        match ended.recv_timeout(LOOK_EVERY) {
            Ok(error) => return error.into(),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Failure::failed("whoever accepts clients has ended; run this again");
            }
        }
        match daemon.has(path) {
            Some(true) => seen = Instant::now(),
            Some(false) => {
                return Failure::failed(format!(
                    "sandbox `{name}` has ended, so its port is passed on no longer"
                ));
            }
            None if seen.elapsed() > DAEMON_PATIENCE => {
                return Failure::failed(format!(
                    "the daemon of sandbox `{name}` has not answered for {} s; start it with \
                     `thaw serve`, and run this again if the sandbox is still there",
                    DAEMON_PATIENCE.as_secs()
                ));
            }
            // It may be followed by another one.
            None => {}
        }
    }
}

/// Shows the ports on which something listens.
fn list(listeners: &[Listener], json: bool) -> Outcome {
    if json {
        output::print_json(&listeners)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(&["PORT", "ADDRESS"]);
    listeners.iter().for_each(|one| table.row(vec![one.port.to_string(), one.address.to_string()]));
    output::print(&table.text())?;
    Ok(ExitCode::SUCCESS)
}

/// Passes all clients of a listener on to a port, whose path in the admin API is `path`; why it ends.
pub fn pass_all(listener: &TcpListener, daemon: &Arc<Daemon>, path: &str) -> io::Error {
    loop {
        let client = match listener.accept() {
            Ok((client, _)) => client,
            Err(error) => return error,
        };
        let (daemon, path) = (daemon.clone(), path.to_owned());
        // The daemon has a bound for connections to a sandbox, and refuses those beyond.
        thread::spawn(move || {
            if let Err(failure) = pass(client, &daemon, &path) {
                // Nobody else would hear of it.
                let _ = writeln!(stderr(), "{}", failure.message().unwrap_or_default());
            }
        });
    }
}

fn pass(client: TcpStream, daemon: &Daemon, path: &str) -> Result<(), Failure> {
    client.set_nodelay(true)?;
    let inside = daemon.upgraded(path, PORT_PROTOCOL, b"")?;
    let (mut from, to) = (client.try_clone()?, inside.again()?);
    let upward = thread::spawn(move || carry(&mut from, to));
    carry_down(inside, Box::new(client));
    // It ends when the client does, which has just been told the end.
    drop(upward.join());
    Ok(())
}

/// Carries bytes to the sandbox until there are no more.
fn carry(from: &mut dyn Read, mut to: Box<dyn Stream>) {
    // A side that breaks off needs no more.
    let _ = copy(from, &mut *to);
    let _ = to.end_writing();
}

fn carry_down(mut from: Box<dyn Stream>, mut to: Box<dyn Stream>) {
    let _ = copy(&mut *from, &mut *to);
    let _ = to.end_writing();
}

fn copy(from: &mut dyn Read, to: &mut dyn Write) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                to.write_all(&buffer[..count])?;
                to.flush()?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn pass_stdio(daemon: &Daemon, path: &str) -> Outcome {
    let mut inside = daemon.upgraded(path, PORT_PROTOCOL, b"")?;
    let to = inside.again()?;
    // It ends with this process: nobody could interrupt its read.
    thread::spawn(move || carry(&mut stdin(), to));
    copy(&mut *inside, &mut stdout())?;
    Ok(ExitCode::SUCCESS)
}
