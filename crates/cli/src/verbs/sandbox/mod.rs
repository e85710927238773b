//! `thaw sandbox`: instances that stay, and processes and files in them.

mod attach;
mod copy;
pub mod create;
mod download;
mod egress;
mod inject;
mod limits;
pub mod port;
mod table;
mod upload;

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome, harmless};
use crate::key_file::KeyFile;
use crate::output;
use crate::verbs::{checkpoint, exec};
use clap::{Args, Subcommand};
use std::process::ExitCode;
use thaw_node::sandboxes::SandboxInfo;
use thaw_node::service::VolumeFiles;

/// Make sandboxes that stay, and work in them from outside.
///
/// A sandbox is a copy of the image of a function or of a container image, which runs until it is
/// told to end. Programs are started in it (`thaw sandbox exec`), and files are copied to it and
/// from it, without any program inside that would serve that.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sandbox create debian:12 --name box\n  \
    thaw sandbox exec -it box -- bash\n  \
    thaw sandbox cp ./src box:/work\n  \
    thaw sandbox port box 8080\n  \
    thaw sandbox egress box --allow 'api.example.com:443'\n  \
    thaw sandbox limits box --memory 2GiB\n  \
    thaw sandbox checkpoint box before; thaw sandbox create --checkpoint before\n  \
    thaw sandbox pause box; thaw sandbox fork box; thaw sandbox kill box")]
pub struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Create(create::Arguments),
    /// List sandboxes.
    #[command(after_help = "Example:\n  thaw sandbox list --json", alias = "ls")]
    List(ListArguments),
    /// Show one sandbox.
    #[command(after_help = "Example:\n  thaw sandbox show box")]
    Show(OneArguments),
    Exec(exec::Arguments),
    Attach(attach::Arguments),
    Cp(copy::Arguments),
    Logs(attach::LogArguments),
    Port(port::Arguments),
    Egress(egress::Arguments),
    Inject(inject::Arguments),
    Limits(limits::Arguments),
    /// Have sandboxes give up their memory until they are used again.
    #[command(after_help = "Example:\n  thaw sandbox pause box")]
    Pause(SomeArguments),
    /// Have paused sandboxes take their memory back.
    #[command(after_help = "Example:\n  thaw sandbox resume box")]
    Resume(SomeArguments),
    /// Make another sandbox with all that this one has in memory.
    #[command(after_help = "Example:\n  thaw sandbox fork box --name copy")]
    Fork(ForkArguments),
    /// Write a sandbox to the store, for `thaw sandbox create --checkpoint`.
    #[command(after_help = "Example:\n  thaw sandbox checkpoint box before")]
    Checkpoint(CheckpointArguments),
    /// End sandboxes.
    #[command(
        after_help = "Examples:\n  thaw sandbox kill box\n  thaw sandbox kill one two",
        alias = "rm"
    )]
    Kill(SomeArguments),
}

#[derive(Debug, Args)]
struct ListArguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

#[derive(Debug, Args)]
struct OneArguments {
    /// The sandbox, by its name or the number of its instance.
    name: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

#[derive(Debug, Args)]
struct SomeArguments {
    /// The sandboxes, by their names or the numbers of their instances. One that fails does not keep the
    /// others from it.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Print JSON, a value for each.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

#[derive(Debug, Args)]
struct ForkArguments {
    #[command(flatten)]
    one: OneArguments,
    /// The name of the new one; one is made up without.
    #[arg(long = "name", id = "new_name", value_name = "NAME", default_value = "")]
    new_name: String,
}

#[derive(Debug, Args)]
struct CheckpointArguments {
    #[command(flatten)]
    one: OneArguments,
    /// The name of the checkpoint.
    checkpoint: String,
    #[command(flatten)]
    key: KeyFile,
}

pub fn run(arguments: &Arguments) -> Outcome {
    match &arguments.verb {
        Verb::Create(arguments) => create::run(arguments),
        Verb::List(arguments) => table::list(&arguments.daemon, arguments.json),
        Verb::Show(one) => {
            let daemon = Daemon::find(&one.daemon)?;
            table::show(&daemon.get(&path(&one.name))?, one.json)
        }
        Verb::Exec(arguments) => exec::run(arguments),
        Verb::Attach(arguments) => attach::run(arguments),
        Verb::Cp(arguments) => copy::run(arguments),
        Verb::Port(arguments) => port::run(arguments),
        Verb::Egress(arguments) => egress::run(arguments),
        Verb::Inject(arguments) => inject::run(arguments),
        Verb::Limits(arguments) => limits::run(arguments),
        Verb::Logs(arguments) => attach::logs(arguments),
        Verb::Pause(some) => {
            each(some, "paused", |daemon, path| daemon.post(&format!("{path}/pause")))
        }
        Verb::Resume(some) => {
            each(some, "resumed", |daemon, path| daemon.post(&format!("{path}/resume")))
        }
        Verb::Fork(fork) => {
            let action = format!("fork?name={}", output::escape(&fork.new_name));
            post(&fork.one, &action, "forked as")
        }
        Verb::Checkpoint(arguments) => write_checkpoint(arguments),
        Verb::Kill(some) => each(some, "ended", |daemon, path| daemon.send_empty("DELETE", path)),
    }
}

/// The path of a sandbox in the admin API.
fn path(name: &str) -> String {
    format!("/sandboxes/{}", output::escape(name))
}

/// Does something to each of several sandboxes, in a line each; it fails if that fails for one.
fn each(
    some: &SomeArguments,
    done: &str,
    act: impl Fn(&Daemon, &str) -> Result<SandboxInfo, Failure>,
) -> Outcome {
    let daemon = Daemon::find(&some.daemon)?;
    let one = |name: &String| {
        let info = act(&daemon, &path(name))?;
        output::print_done(some.json, &info, |info| format!("{done} {}", info.name))
    };
    let (last, others) = some.names.split_last().expect("clap wants one");
    let mut code = ExitCode::SUCCESS;
    for failure in others.iter().filter_map(|name| one(name).err()) {
        if let Some(message) = failure.message() {
            eprintln!("thaw: {}", harmless(message));
            code = failure.exit_code();
        }
    }
    // Whoever has asked for one alone hears of it as of every other verb.
    one(last).map(|_| code)
}

fn post(one: &OneArguments, action: &str, done: &str) -> Outcome {
    let daemon = Daemon::find(&one.daemon)?;
    let info: SandboxInfo = daemon.post(&format!("{}/{action}", path(&one.name)))?;
    output::print_done(one.json, &info, |info| format!("{done} {}", info.name))
}

fn write_checkpoint(arguments: &CheckpointArguments) -> Outcome {
    let one = &arguments.one;
    let daemon = Daemon::find(&one.daemon)?;
    let instance = exec::instance_of(&daemon, &one.name)?;
    let taken = checkpoint::take(
        &daemon,
        instance,
        &arguments.checkpoint,
        &arguments.key,
        VolumeFiles::Stay,
    )?;
    output::print_done(one.json, &taken, |_| format!("wrote checkpoint {}", arguments.checkpoint))?;
    Ok(ExitCode::SUCCESS)
}
