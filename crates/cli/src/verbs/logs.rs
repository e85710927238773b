//! `thaw logs`: what a function printed.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use humantime::format_rfc3339_millis;
use regex::Regex;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::iter;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};
use thaw_home::config::FunctionName;
use thaw_home::home::{Home, HomeError};
use thaw_node::logs::{Line, Stream, log_path, rotated_paths};
use thaw_sandbox::escape;
use thaw_store::{Name, Store};
use ureq::Body;
use ureq::http::Response;

/// Print what a function wrote to its standard output and error.
///
/// Each line begins with the number of the instance that printed it, in brackets, unless
/// --instance names one. Lines that begin with [thaw] are remarks of Thaw's own: that an
/// instance crashed, reached a limit or took too long to answer, or that lines are missing.
/// Control characters are written as escapes; --json has every character, in JSON's own
/// escapes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw logs -f hello-python\n  \
    thaw logs hello-python --instance 17\n  \
    thaw logs hello-python --since 10m --grep 'error|panic' -t")]
pub struct Arguments {
    /// The function.
    name: FunctionName,
    /// Print further lines as they come; needs a running daemon.
    #[arg(long, short)]
    follow: bool,
    /// Only the last N lines of the past.
    #[arg(long, short = 'n', value_name = "N", conflicts_with = "follow")]
    lines: Option<usize>,
    /// Only what this instance printed, by its number in `thaw ps`.
    #[arg(long, value_name = "ID")]
    instance: Option<u64>,
    /// Only what was printed since then: a time ago, as in 90s, 10m or "2h 30m", or a time of day
    /// in UTC, as in 2026-01-31T12:00:00Z.
    #[arg(long, value_name = "WHEN", value_parser = parse_since)]
    since: Option<SystemTime>,
    /// Only lines in which this regular expression is found: in the text alone, or in the line as
    /// it is shown without --json, with the instance before it.
    #[arg(long, short, value_name = "REGEX")]
    grep: Option<Regex>,
    /// Print the time of each line, in UTC.
    #[arg(long, short, conflicts_with = "json")]
    timestamps: bool,
    /// Print a JSON object for each line, with its time, stream, instance and process id.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

impl Arguments {
    fn wants(&self, line: &Line) -> bool {
        line.is_of(self.instance)
            && self.since.is_none_or(|since| line.time() >= since)
            && self.grep.as_ref().is_none_or(|regex| {
                regex.is_match(&line.text) || regex.is_match(self.shown(line).trim_end())
            })
    }

    /// The line as people see it.
    fn shown(&self, line: &Line) -> String {
        let time = self.timestamps.then(|| format_rfc3339_millis(line.time()).to_string() + " ");
        time.unwrap_or_default() + &for_people(line, self.instance.is_some())
    }
}

/// A time, or how long ago it was.
fn parse_since(text: &str) -> Result<SystemTime, String> {
    let ago = |ago: Duration| SystemTime::now().checked_sub(ago);
    let time = match humantime::parse_duration(text) {
        Ok(duration) => ago(duration),
        Err(_) => humantime::parse_rfc3339_weak(text).ok(),
    };
    time.ok_or_else(|| "write a time ago, as in 10m, or 2026-01-31T12:00:00Z".to_owned())
}

pub fn run(arguments: &Arguments) -> Outcome {
    match arguments.follow {
        true => follow(arguments)?,
        false if arguments.daemon.is_named() => {
            return Err(Failure::misused(
                "--admin goes with --follow: files are read without a daemon",
            ));
        }
        false => print_past(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints what the daemon sends, until it ends.
fn follow(arguments: &Arguments) -> Result<(), Failure> {
    let instance = arguments.instance.map(|id| format!("&instance={id}")).unwrap_or_default();
    let path = format!("/functions/{}/logs?follow=true{instance}", arguments.name);
    let mut response = Daemon::find(&arguments.daemon)?.stream(&path)?;
    let reader = BufReader::new(response.body_mut().as_reader());
    for line in reader.lines() {
        if let Some(line) = parse(&line?).filter(|line| arguments.wants(line)) {
            print_line(&line, arguments)?;
        }
    }
    Ok(())
}

/// Prints a log that the daemon sends, for people, until it ends.
pub(super) fn print_stream(mut response: Response<Body>) -> Result<(), Failure> {
    let reader = BufReader::new(response.body_mut().as_reader());
    for line in reader.lines() {
        if let Some(line) = parse(&line?) {
            output::print(&for_people(&line, false))?;
        }
    }
    Ok(())
}

/// Prints what is in the files.
fn print_past(arguments: &Arguments) -> Result<(), Failure> {
    let path = log_path(&Home::existing()?.logs()?, arguments.name.as_str());
    let most = arguments.lines.unwrap_or(usize::MAX);
    let mut kept = VecDeque::new();
    let mut found = false;
    let younger = iter::once(path.clone());
    for path in rotated_paths(&path).rev().chain(younger) {
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(HomeError::refused(&path, error).into()),
        };
        found = true;
        for line in BufReader::new(file).lines() {
            kept.extend(parse(&line?).filter(|line| arguments.wants(line)));
            if kept.len() > most {
                kept.pop_front();
            }
        }
    }
    if !found {
        return Err(no_log(arguments));
    }
    kept.iter().try_for_each(|line| print_line(line, arguments))
}

/// Why there is no log of that name.
fn no_log(arguments: &Arguments) -> Failure {
    let name = &arguments.name;
    let is_stored = || -> Result<bool, Failure> {
        let store = Store::open(&Home::existing()?.store())?;
        let found = store.get_function(&Name::new(name.as_str())?);
        Ok(!matches!(found, Err(error) if error.is_not_found()))
    };
    match is_stored() {
        Err(failure) => failure,
        Ok(true) => {
            Failure::failed(format!("`{name}` has no log yet; it gets one when a daemon serves it"))
        }
        Ok(false) if is_sandbox(arguments) => Failure::failed(format!(
            "`{name}` is a sandbox, and no function; `thaw sandbox logs {name}` shows what was printed in it"
        )),
        Ok(false) => Failure::failed(format!(
            "no function is named `{name}`; `thaw list` shows those there are"
        )),
    }
}

/// Whether a daemon, if there is one, has a sandbox of that name.
fn is_sandbox(arguments: &Arguments) -> bool {
    let daemon = Daemon::find(&arguments.daemon).ok();
    let path = format!("/sandboxes/{}", arguments.name);
    daemon.and_then(|daemon| daemon.has(&path)) == Some(true)
}

/// A line of a log file; `None` for one that a crash cut off.
fn parse(text: &str) -> Option<Line> {
    serde_json::from_str(text).ok()
}

fn print_line(line: &Line, arguments: &Arguments) -> Result<(), Failure> {
    if arguments.json {
        return output::print(&String::from_utf8_lossy(&line.to_json()));
    }
    output::print(&arguments.shown(line))
}

/// The line for a terminal: nothing in it moves the cursor, and no guest can make it look
/// like another's.
fn for_people(line: &Line, is_of_one: bool) -> String {
    let text = escape(line.text.as_bytes());
    match (line.stream, line.origin) {
        (Stream::Thaw, Some(origin)) => format!("[thaw] instance {}: {text}\n", origin.instance),
        (Stream::Thaw, None) => format!("[thaw] {text}\n"),
        (_, Some(origin)) if !is_of_one => format!("[{}] {text}\n", origin.instance),
        // Of a version that did not note the instance.
        (_, None) if !is_of_one => format!("[?] {text}\n"),
        _ => format!("{text}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_node::logs::Origin;

    #[test]
    fn guests_cannot_forge_lines_or_move_the_cursor() {
        let origin = Some(Origin { instance: 7, pid: 1 });
        let text = "[thaw] all is well\r\u{1b}[2J\u{202e}".to_owned();
        let line = Line { time_ms: 0, stream: Stream::Err, origin, text };
        let shown = "[thaw] all is well\\x0d\\x1b[2J\\u{202e}\n";
        assert_eq!(for_people(&line, false), format!("[7] {shown}"));
        assert_eq!(for_people(&line, true), shown);
        let remark = Line { stream: Stream::Thaw, origin: None, text: "gone".to_owned(), ..line };
        assert_eq!(for_people(&remark, false), "[thaw] gone\n");
        let remark = Line { origin, ..remark };
        assert_eq!(for_people(&remark, false), "[thaw] instance 7: gone\n");
    }

    #[test]
    fn a_time_is_one_or_how_long_ago_it_was() {
        let tenth = SystemTime::UNIX_EPOCH + Duration::from_secs(10);
        assert_eq!(parse_since("1970-01-01T00:00:10Z"), Ok(tenth));
        let then = parse_since("2h 5m").unwrap();
        let ago = SystemTime::now().duration_since(then).unwrap();
        assert!(ago >= Duration::from_secs(7500), "{ago:?}");
        for wrong in ["", "yesterday", "10", "9999999999999999999y"] {
            assert!(parse_since(wrong).is_err(), "{wrong}");
        }
    }
}
