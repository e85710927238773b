//! `thaw monitor`: root's side of a daemon that somebody else starts.

use super::limits::WeakLimitsArgument;
use super::listen::ListenArguments;
use crate::failure::Outcome;
use crate::output;
use clap::Args;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use thaw_daemon::activation;
use thaw_daemon::daemon::ServeError;
use thaw_daemon::monitor::{self, RendezvousError};
use thaw_home::config::TimeSpan;
use thaw_home::home::Home;
use thaw_home::user::DaemonUser;

/// Keep root's rights for a daemon that is started without them.
///
/// `thaw serve` as root starts both. This command starts root's side alone, as two units of
/// systemd do. It listens, makes the processes and control groups of sandboxes, and reads
/// nothing that clients or sandboxes have sent. The daemon runs as the user that owns
/// $THAW_HOME, or as `thaw` if root owns it. One daemon is served at a time.
/// Clients wait while there is none. SIGUSR2 has it execute its program anew in its own place, as
/// after an upgrade: neither the daemon nor live instances notice.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw monitor --socket /run/thaw/monitor.sock --listen 0.0.0.0:80\n  \
    setpriv --reuid thaw --regid thaw --clear-groups thaw serve --monitor /run/thaw/monitor.sock"
)]
pub struct Arguments {
    /// The Unix socket on which to wait for the daemon; only its user can connect. The
    /// directory must be root's.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// How long live instances wait for the next daemon after one has ended (1s to 1d). Those that
    /// none has taken over by then end.
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = parse_keep_for)]
    keep_for: TimeSpan,
    #[command(flatten)]
    listening: ListenArguments,
    #[command(flatten)]
    weak_limits: WeakLimitsArgument,
    /// Say whether this program can go on with what a monitor has, which is standard input.
    #[arg(long, hide = true)]
    can_take_over: bool,
    /// A monitor has executed this program in its own place, with what it had in this descriptor.
    #[arg(long, hide = true, value_name = "DESCRIPTOR")]
    taking_over: Option<RawFd>,
}

pub fn run(arguments: &Arguments) -> Outcome {
    if arguments.can_take_over {
        output::print(monitor::can_take_over().map_err(ServeError::from)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(state) = arguments.taking_over {
        monitor::resume_at(state, arguments.keep_for.0)?;
        return Ok(ExitCode::SUCCESS);
    }
    if !rustix::process::geteuid().is_root() {
        return Err(ServeError::from(RendezvousError::NotRoot).into());
    }
    activation::take_from_environment().map_err(ServeError::from)?;
    let home = Home::from_environment()?;
    let Some(user) = DaemonUser::for_home(&home) else {
        return Err(ServeError::from(RendezvousError::NoNamespaces).into());
    };
    let listening = arguments.listening.chosen(&home);
    let weak_limits = arguments.weak_limits.chosen();
    monitor::run_at(&arguments.socket, &home, &listening, weak_limits, user, arguments.keep_for.0)?;
    Ok(ExitCode::SUCCESS)
}

/// Shorter, and a daemon that is restarted would find nothing; for longer nobody waits.
fn parse_keep_for(text: &str) -> Result<TimeSpan, String> {
    let time = text.parse::<TimeSpan>().map_err(|error| error.to_string())?;
    match (Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&time.0) {
        true => Ok(time),
        false => Err("it must be 1s to 1d".to_owned()),
    }
}
