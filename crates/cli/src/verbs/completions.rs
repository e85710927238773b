//! `thaw completions`: what makes a shell complete the command line.

use crate::failure::Outcome;
use crate::grammar::Command;
use crate::output;
use clap::{Args, CommandFactory};
use clap_complete::{Shell, generate};
use std::process::ExitCode;

/// Print a script that completes verbs and options in a shell.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw completions bash > ~/.local/share/bash-completion/completions/thaw"
)]
pub struct Arguments {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run(arguments: &Arguments) -> Outcome {
    output::print(&script(arguments.shell))?;
    Ok(ExitCode::SUCCESS)
}

fn script(shell: Shell) -> String {
    let mut script = Vec::new();
    generate(shell, &mut Command::command(), "thaw", &mut script);
    String::from_utf8(script).expect("the grammar is text")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_shell_knows_every_verb() {
        for shell in Shell::value_variants() {
            let script = script(*shell);
            for verb in Command::command().get_subcommands() {
                assert!(script.contains(verb.get_name()), "{shell}: {}", verb.get_name());
            }
        }
    }
}
