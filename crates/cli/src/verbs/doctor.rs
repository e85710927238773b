//! `thaw doctor`: what this host has and lacks.

use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use thaw_sandbox::host::{Probe, Status, probe};

/// Say what this host has and lacks, and what to do about it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw doctor\n  thaw doctor --kernel-elf thaw-kernel.elf\n\n\
    Exit code 1 means that Thaw does not work here until something is mended.")]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Write the Thaw kernel's ELF file to FILE, for debuggers.
    #[arg(long, value_name = "FILE")]
    kernel_elf: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Outcome {
    if let Some(path) = &arguments.kernel_elf {
        std::fs::write(path, thaw_sandbox::KERNEL_ELF).map_err(|error| {
            Failure::failed(format!("cannot write {} ({error}); name another file", path.display()))
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let probes = probe();
    if arguments.json {
        output::print_json(&probes.iter().map(as_json).collect::<Vec<_>>())?;
    } else {
        output::print(&report(&probes))?;
    }
    match probes.iter().find(|probe| probe.status == Status::Missing) {
        Some(missing) => Err(Failure::failed(format!(
            "Thaw does not work on this host: {}: {}",
            missing.name,
            missing.way_out.as_deref().unwrap_or(&missing.found)
        ))),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Good => "good",
        Status::Limited => "limited",
        Status::Missing => "missing",
    }
}

fn as_json(probe: &Probe) -> serde_json::Value {
    json!({
        "name": probe.name,
        "status": word(probe.status),
        "found": probe.found,
        "way_out": probe.way_out,
    })
}

fn report(probes: &[Probe]) -> String {
    let mut table = Table::new(&["NEED", "STATUS", "FOUND"]);
    for probe in probes {
        let found = match &probe.way_out {
            Some(way_out) => format!("{}; {way_out}", probe.found),
            None => probe.found.clone(),
        };
        table.row(vec![probe.name.to_owned(), word(probe.status).to_owned(), found]);
    }
    table.text()
}
