//! `thaw logs`: what a function printed.

use crate::client::Daemon;
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::ExitCode;
use thaw_node::config::FunctionName;
use thaw_node::home::Home;
use thaw_node::logs::{Line, Stream, log_path, rotated_path};

/// Print what a function wrote to its standard output and error.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw logs -f hello-python")]
pub struct Arguments {
    /// The function.
    name: FunctionName,
    /// Go on with what it prints from now on; needs a running daemon.
    #[arg(long, short)]
    follow: bool,
    /// Only the last N lines of the past.
    #[arg(long, short = 'n', value_name = "N")]
    lines: Option<usize>,
    /// Print a JSON object for each line, with its time and stream.
    #[arg(long)]
    json: bool,
    /// Address of the daemon's admin API; default: the one that serves $THAW_HOME.
    #[arg(long, value_name = "ADDR", requires = "follow")]
    admin: Option<SocketAddr>,
}

pub fn run(arguments: &Arguments) -> Outcome {
    if arguments.follow {
        let path = format!("/functions/{}/logs?follow=true", arguments.name);
        let mut response = Daemon::find(arguments.admin)?.stream(&path)?;
        let reader = BufReader::new(response.body_mut().as_reader());
        for line in reader.lines() {
            print_line(&line?, arguments.json)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let path = log_path(&Home::from_environment()?.logs()?, arguments.name.as_str());
    let most = arguments.lines.unwrap_or(usize::MAX);
    let mut kept = VecDeque::new();
    let mut found = false;
    for path in [rotated_path(&path), path] {
        let Ok(file) = File::open(&path) else { continue };
        found = true;
        for line in BufReader::new(file).lines() {
            kept.push_back(line?);
            if kept.len() > most {
                kept.pop_front();
            }
        }
    }
    if !found {
        return Err(Failure::failed(format!(
            "`{}` has no log yet; it gets one when a daemon serves it",
            arguments.name
        )));
    }
    for line in kept {
        print_line(&line, arguments.json)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints one line of a log file.
fn print_line(text: &str, json: bool) -> Result<(), Failure> {
    if json {
        return output::print(&format!("{text}\n"));
    }
    match serde_json::from_str::<Line>(text) {
        Ok(Line { stream: Stream::Thaw, text, .. }) => output::print(&format!("[thaw] {text}\n")),
        Ok(Line { text, .. }) => output::print(&format!("{text}\n")),
        // A line that a crash cut off.
        Err(_) => Ok(()),
    }
}
