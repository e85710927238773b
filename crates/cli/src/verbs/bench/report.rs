//! How measurements are shown: a table, JSON, a figure.

use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use serde::Serialize;
use std::fs;
use std::io::{IsTerminal, Write, stderr};
use std::path::PathBuf;
use std::process::ExitCode;
use thaw_bench::FigureError;

/// Where the results go.
#[derive(Debug, Args)]
pub struct ReportArguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Write the JSON and a figure (SVG) into this directory, too.
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
}

impl ReportArguments {
    /// Prints the table or JSON, and writes the files `SUBJECT.json` and
    /// `SUBJECT.svg` if they are wanted.
    pub fn show(
        &self,
        subject: &str,
        report: &impl Serialize,
        table: &str,
        figure: impl FnOnce() -> Result<String, FigureError>,
    ) -> Outcome {
        match self.json {
            true => output::print_json(report)?,
            false => output::print(table)?,
        }
        if let Some(directory) = &self.output {
            let write = |extension: &str, text: &str| {
                let path = directory.join(format!("{subject}.{extension}"));
                fs::write(&path, text).map_err(|error| {
                    Failure::failed(format!("cannot write {} ({error})", path.display()))
                })
            };
            fs::create_dir_all(directory).map_err(|error| {
                Failure::failed(format!("cannot make {} ({error})", directory.display()))
            })?;
            write("json", &format!("{}\n", serde_json::to_string_pretty(report)?))?;
            write("svg", &figure()?)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// A line on a terminal that says what is being measured, gone when dropped.
pub struct Progress {
    live: bool,
}

impl Progress {
    pub fn new() -> Self {
        Self { live: stderr().is_terminal() }
    }

    pub fn show(&mut self, what: &str) {
        if self.live {
            eprint!("\r\x1b[K{what}");
            let _ = stderr().flush();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.show("");
    }
}

/// Checks `--path`.
pub fn check_path(path: &str) -> Result<(), Failure> {
    match path.contains([' ', '\r', '\n']) || !path.starts_with('/') {
        true => Err(Failure::misused("--path must begin with a slash and hold no blanks")),
        false => Ok(()),
    }
}

/// A figure in a table.
pub fn cell(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        _ => format!("{value:.1}"),
    }
}
