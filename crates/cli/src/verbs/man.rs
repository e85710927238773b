//! `thaw man`: manual pages, made from the grammar of the command line.

use crate::failure::{Failure, Outcome};
use crate::grammar::Command;
use crate::output;
use clap::{Args, CommandFactory};
use clap_mangen::Man;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Print a manual page, or write all of them into a directory.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw man | man -l -\n  thaw man bench boot | man -l -\n  \
    thaw man --output /usr/local/share/man/man1")]
pub struct Arguments {
    /// The verb whose page is printed [default: the page of thaw itself].
    verb: Vec<String>,
    /// Write the pages of thaw and of all verbs into this directory.
    #[arg(long, value_name = "DIR", conflicts_with = "verb")]
    output: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let command = grammar();
    match &arguments.output {
        Some(directory) => write_all(&command, directory).map_err(|error| {
            Failure::failed(format!("cannot write pages to {} ({error})", directory.display()))
        })?,
        None => output::print(&page(find(&command, &arguments.verb)?))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The grammar with the full name of every verb: `thaw-bench-boot`.
fn grammar() -> clap::Command {
    let mut command = Command::command().disable_help_subcommand(true);
    command.build();
    command
}

fn find<'a>(command: &'a clap::Command, verb: &[String]) -> Result<&'a clap::Command, Failure> {
    // The program's own name stands for itself, with or without a verb behind it.
    let verb = verb.strip_prefix(&[command.get_name().to_owned()]).unwrap_or(verb);
    verb.iter().try_fold(command, |command, name| {
        command.find_subcommand(name).ok_or_else(|| {
            Failure::misused(format!("thaw has no verb `{}`; see thaw --help", verb.join(" ")))
        })
    })
}

fn page(command: &clap::Command) -> String {
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page).expect("a vector takes every byte");
    String::from_utf8(page).expect("the grammar is text")
}

/// Writes `thaw.1`, `thaw-run.1` and so on.
fn write_all(command: &clap::Command, directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    fs::write(directory.join(format!("{name}.1")), page(command))?;
    let shown = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    shown.into_iter().try_for_each(|verb| write_all(verb, directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_its_name_options_and_examples() {
        let grammar = grammar();
        let verb = ["bench".to_owned(), "boot".to_owned()];
        let page = page(find(&grammar, &verb).unwrap());
        for part in [".TH thaw-bench-boot 1", "\\-\\-count", ".SH EXTRA", "hello\\-python"] {
            assert!(page.contains(part), "{part} is missing in\n{page}");
        }
        assert!(find(&grammar, &["fly".to_owned()]).is_err());
    }

    #[test]
    fn the_page_of_thaw_has_its_own_name() {
        let grammar = grammar();
        let name = |verb: &[&str]| {
            let verb: Vec<_> = verb.iter().map(|name| (*name).to_owned()).collect();
            find(&grammar, &verb).map(|found| found.get_name().to_owned())
        };
        assert_eq!(name(&["thaw"]), name(&[]));
        assert_eq!(name(&["thaw", "run"]), name(&["run"]));
        assert!(name(&["thaw", "thaw"]).is_err());
    }

    #[test]
    fn every_verb_that_is_shown_gets_a_page() {
        let directory = tempfile::tempdir().unwrap();
        write_all(&grammar(), directory.path()).unwrap();
        let has = |page: &str| directory.path().join(page).exists();
        assert!(has("thaw.1") && has("thaw-run.1") && has("thaw-bench-boot.1"));
        assert!(!has("thaw-bench-worker.1"));
    }
}
