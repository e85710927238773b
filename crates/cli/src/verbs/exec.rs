//! `thaw exec`: a process in a live instance.

use crate::client::{Daemon, DaemonArguments};
use crate::exec_client;
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use thaw_node::remote::ExecRequest;
use thaw_node::sandboxes::SandboxInfo;

/// Run a program in a live instance or sandbox.
///
/// The program is a new process there, beside those that run; nothing in it has to expect that.
/// Its exit code is this command's, 128 and the number of the signal that has ended it otherwise; 127 if there
/// is no such program, 126 if it cannot be executed.
/// Without --tty it gets SIGINT, SIGTERM and SIGHUP of this command; a second SIGINT ends this command
/// alone, and `thaw sandbox attach` finds the process again.
/// It has the environment and working directory that the instance's first process was started
/// with. Functions with processes = 1 cannot have another process.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw exec 17 -- ps aux\n  \
    thaw exec -it my-sandbox -- bash\n  \
    thaw exec -i 17 --user app --env A=1 -- sh -c 'cat > /tmp/file' < file\n  \
    thaw exec -d my-sandbox -- ./server --port 8000")]
pub struct Arguments {
    #[command(flatten)]
    pub options: Options,
    /// The instance, by its number in `thaw ps`, or a sandbox, by its name.
    instance: String,
    /// Program and arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// How a process is started.
#[derive(Debug, Args)]
pub struct Options {
    /// Pass standard input on.
    #[arg(short, long)]
    interactive: bool,
    /// Give it a terminal.
    #[arg(short, long)]
    tty: bool,
    /// Do not stay with it: print its number, with which `thaw sandbox attach` finds it. With
    /// --interactive its standard input stays open for that.
    #[arg(short, long)]
    detach: bool,
    /// User, and perhaps `:` and a group, by name or number.
    #[arg(short, long, value_name = "USER", default_value = "")]
    user: String,
    /// Working directory.
    #[arg(short, long, value_name = "DIR", default_value = "")]
    workdir: String,
    /// An environment variable, NAME=VALUE.
    #[arg(short, long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// With --detach, print JSON.
    #[arg(long, requires = "detach")]
    json: bool,
    #[command(flatten)]
    pub daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.options.daemon)?;
    let instance = instance_of(&daemon, &arguments.instance)?;
    start(&daemon, instance, &arguments.options, &arguments.command)
}

/// Starts a process as the options say, and stays with it.
///
/// # Errors
/// The daemon refuses, or the connection breaks.
pub fn start(daemon: &Daemon, instance: u64, options: &Options, command: &[String]) -> Outcome {
    let request = ExecRequest {
        argv: command.to_vec(),
        env: environment(options),
        workdir: options.workdir.clone(),
        user: options.user.clone(),
        terminal: options.tty.then(|| exec_client::window().unwrap_or((24, 80))),
        stdin: options.interactive,
        ends_sandbox: false,
    };
    if !options.detach {
        return exec_client::run(daemon, instance, &request);
    }
    let info = exec_client::begin(daemon, instance, &request)?;
    output::print_done(options.json, &info, |info| info.id.to_string())
}

/// What is added to the environment: a program at a terminal is told which one that is.
fn environment(options: &Options) -> Vec<String> {
    let is_given = options.env.iter().any(|variable| variable.starts_with("TERM="));
    let term = || std::env::var("TERM").ok().filter(|term| !term.is_empty());
    let term = (options.tty && !is_given)
        .then(|| format!("TERM={}", term().unwrap_or_else(|| "xterm".to_owned())));
    options.env.iter().cloned().chain(term).collect()
}

/// The number of the instance that is meant.
///
/// # Errors
/// There is none, or the daemon does not answer.
pub fn instance_of(daemon: &Daemon, text: &str) -> Result<u64, Failure> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let info: SandboxInfo = daemon.get(&format!("/sandboxes/{}", output::escape(text)))?;
    Ok(info.instance)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn a_program_at_a_terminal_is_told_which_one_that_is() {
        let of = |line: &[&str]| environment(&Line::parse_from([&["thaw"], line].concat()).options);
        assert!(of(&[]).is_empty());
        assert_eq!(of(&["--env", "A=1"]), ["A=1"]);
        assert_eq!(of(&["-t", "--env", "TERM=vt100"]), ["TERM=vt100"]);
        let [term] = <[String; 1]>::try_from(of(&["-t"])).unwrap();
        assert!(term.starts_with("TERM=") && term.len() > "TERM=".len(), "{term}");
    }
}
