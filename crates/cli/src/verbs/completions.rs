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
    generate(shell, &mut shown(&Command::command()), "thaw", &mut script);
    String::from_utf8(script).expect("the grammar is text")
}

/// The grammar without what its help hides, which clap's generators would complete.
fn shown(command: &clap::Command) -> clap::Command {
    let arguments = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    // What an option requires may be a group.
    let is_shown = |id: &clap::Id| {
        command.get_arguments().any(|argument| argument.get_id() == id && !argument.is_hide_set())
    };
    let groups = command.get_groups().filter(|group| group.get_args().all(is_shown));
    let shown = clap::Command::new(command.get_name().to_owned())
        .args(arguments)
        .groups(groups.cloned())
        .subcommands(verbs.map(shown));
    let shown = match command.get_version() {
        Some(version) => shown.version(version.to_owned()),
        None => shown,
    };
    match command.get_about() {
        Some(about) => shown.about(about.clone()),
        None => shown,
    }
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

    #[test]
    fn no_shell_completes_what_the_help_hides() {
        for shell in Shell::value_variants() {
            let script = script(*shell);
            for hidden in ["worker", "--monitored", "--taking-over", "--can-take-over"] {
                assert!(!script.contains(hidden), "{shell}: {hidden}");
            }
        }
    }

    #[test]
    fn every_option_and_its_text_is_kept() {
        let zsh = script(Shell::Zsh);
        for text in ["--zygotes", "--version", "--verbose", "Say more about what goes on"] {
            assert!(zsh.contains(text), "{text}");
        }
    }
}
