//! The command line as a whole; each verb's own arguments are in its file.

use crate::failure::Outcome;
use crate::verbs;
use clap::{ArgAction, Parser, Subcommand};

/// Runs unmodified Linux programs in strongly isolated sandboxes, freezes them
/// at their entry point, and thaws copies for requests.
#[derive(Debug, Parser)]
#[command(
    name = "thaw",
    version,
    arg_required_else_help = true,
    after_help = "Functions, images and logs are in $THAW_HOME; without it in /var/lib/thaw for root, and in\n\
        ~/.local/share/thaw (or $XDG_DATA_HOME/thaw) for other users."
)]
pub struct Command {
    /// Say more about what goes on; twice for everything.
    #[arg(long, global = true, action = ArgAction::Count)]
    verbose: u8,

    /// The same, before the verb: behind `run` it is that of docker(1).
    #[arg(short, action = ArgAction::Count)]
    v: u8,

    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

impl Command {
    /// How much more is to be said.
    pub fn verbosity(&self) -> u8 {
        self.verbose.saturating_add(self.v)
    }
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    Run(verbs::run::Arguments),
    Init(verbs::init::Arguments),
    Dev(verbs::dev::Arguments),
    Build(verbs::build::Arguments),
    Serve(verbs::serve::Arguments),
    Monitor(verbs::monitor::Arguments),
    Invoke(verbs::invoke::Arguments),
    Exec(verbs::exec::Arguments),
    Sandbox(verbs::sandbox::Arguments),
    Fork(verbs::fork::Arguments),
    Checkpoint(verbs::checkpoint::Arguments),
    Checkpoints(verbs::checkpoints::Arguments),
    Restore(verbs::restore::Arguments),
    Freeze(verbs::freeze::Arguments),
    Hibernate(verbs::hibernate::Arguments),
    Sleep(verbs::sleep::Arguments),
    Wake(verbs::wake::Arguments),
    #[command(visible_alias = "ls")]
    List(verbs::list::Arguments),
    Ps(verbs::ps::Arguments),
    Top(verbs::top::Arguments),
    Df(verbs::df::Arguments),
    Tenants(verbs::tenants::Arguments),
    Images(verbs::images::Arguments),
    Inspect(verbs::inspect::Arguments),
    Logs(verbs::logs::Arguments),
    Import(verbs::import::Arguments),
    Pull(verbs::pull::Arguments),
    Push(verbs::push::Arguments),
    Versions(verbs::versions::Arguments),
    Activate(verbs::activate::Arguments),
    Restart(verbs::restart::Arguments),
    Rollback(verbs::rollback::Arguments),
    Split(verbs::split::Arguments),
    Queue(verbs::queue::Arguments),
    Schedule(verbs::schedule::Arguments),
    Secret(verbs::secret::Arguments),
    Key(verbs::key::Arguments),
    Volume(verbs::volume::Arguments),
    #[command(visible_alias = "rm")]
    Remove(verbs::remove::Arguments),
    Gc(verbs::gc::Arguments),
    Pack(verbs::pack::Arguments),
    Bench(verbs::bench::Arguments),
    Doctor(verbs::doctor::Arguments),
    Completions(verbs::completions::Arguments),
    Man(verbs::man::Arguments),
}

impl Verb {
    /// Does what was asked.
    pub fn run(self) -> Outcome {
        match self {
            Self::Run(arguments) => verbs::run::run(arguments),
            Self::Init(arguments) => verbs::init::run(&arguments),
            Self::Dev(arguments) => verbs::dev::run(&arguments),
            Self::Build(arguments) => verbs::build::run(&arguments),
            Self::Serve(arguments) => verbs::serve::run(&arguments),
            Self::Monitor(arguments) => verbs::monitor::run(&arguments),
            Self::Invoke(arguments) => verbs::invoke::run(&arguments),
            Self::Exec(arguments) => verbs::exec::run(&arguments),
            Self::Sandbox(arguments) => verbs::sandbox::run(&arguments),
            Self::Fork(arguments) => verbs::fork::run(&arguments),
            Self::Checkpoint(arguments) => verbs::checkpoint::run(&arguments),
            Self::Checkpoints(arguments) => verbs::checkpoints::run(&arguments),
            Self::Restore(arguments) => verbs::restore::run(&arguments),
            Self::Freeze(arguments) => verbs::freeze::run(&arguments),
            Self::Hibernate(arguments) => verbs::hibernate::run(&arguments),
            Self::Sleep(arguments) => verbs::sleep::run(&arguments),
            Self::Wake(arguments) => verbs::wake::run(&arguments),
            Self::List(arguments) => verbs::list::run(&arguments),
            Self::Ps(arguments) => verbs::ps::run(&arguments),
            Self::Top(arguments) => verbs::top::run(&arguments),
            Self::Df(arguments) => verbs::df::run(&arguments),
            Self::Tenants(arguments) => verbs::tenants::run(&arguments),
            Self::Images(arguments) => verbs::images::run(&arguments),
            Self::Inspect(arguments) => verbs::inspect::run(&arguments),
            Self::Logs(arguments) => verbs::logs::run(&arguments),
            Self::Import(arguments) => verbs::import::run(&arguments),
            Self::Pull(arguments) => verbs::pull::run(&arguments),
            Self::Push(arguments) => verbs::push::run(&arguments),
            Self::Versions(arguments) => verbs::versions::run(&arguments),
            Self::Activate(arguments) => verbs::activate::run(&arguments),
            Self::Restart(arguments) => verbs::restart::run(&arguments),
            Self::Rollback(arguments) => verbs::rollback::run(&arguments),
            Self::Split(arguments) => verbs::split::run(&arguments),
            Self::Queue(arguments) => verbs::queue::run(&arguments),
            Self::Schedule(arguments) => verbs::schedule::run(&arguments),
            Self::Secret(arguments) => verbs::secret::run(&arguments),
            Self::Key(arguments) => verbs::key::run(&arguments),
            Self::Volume(arguments) => verbs::volume::run(&arguments),
            Self::Remove(arguments) => verbs::remove::run(&arguments),
            Self::Gc(arguments) => verbs::gc::run(&arguments),
            Self::Pack(arguments) => verbs::pack::run(&arguments),
            Self::Bench(arguments) => verbs::bench::run(&arguments),
            Self::Doctor(arguments) => verbs::doctor::run(&arguments),
            Self::Completions(arguments) => verbs::completions::run(&arguments),
            Self::Man(arguments) => verbs::man::run(&arguments),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_grammar_is_consistent() {
        Command::command().debug_assert();
    }

    #[test]
    fn every_verb_has_an_example() {
        for verb in Command::command().get_subcommands() {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Example"), "thaw {} --help has no example", verb.get_name());
        }
    }
}
