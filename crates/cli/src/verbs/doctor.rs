//! `thaw doctor`: what this host has and lacks.

use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use thaw_abi::filter::{Check, HostCall, List};
use thaw_home::home::Home;
use thaw_sandbox::host::{Probe, Status, probe, state_directory};

/// Say what this host has and lacks, and what to do about it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw doctor\n  thaw doctor --filter\n  \
    thaw doctor --kernel-elf thaw-kernel.elf\n\n\
    Exit code 1 means that Thaw does not work here until something is mended.")]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Print the host calls that a sandbox may make, each with its reason.
    #[arg(long, conflicts_with = "kernel_elf")]
    filter: bool,
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
    if arguments.filter {
        match arguments.json {
            true => {
                let all = calls().map(|(call, lists)| call_as_json(call, &lists));
                output::print_json(&all.collect::<Vec<_>>())?;
            }
            false => output::print(&filter_table())?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut probes = probe();
    probes.extend(Home::from_environment().ok().map(|home| state_directory(home.root())));
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

/// All calls, each with the lists that it is on; one whose arguments a list checks
/// differently comes twice.
fn calls() -> impl Iterator<Item = (&'static HostCall, Vec<List>)> {
    let is_on = |call: &HostCall, list: List| list.calls().any(|other| std::ptr::eq(other, call));
    let lists_of =
        move |call| List::ALL.into_iter().filter(|list| is_on(call, *list)).collect::<Vec<_>>();
    let general = List::General.calls();
    let more = List::Templates.calls().filter(move |call| !is_on(call, List::General));
    general.chain(more).map(move |call| (call, lists_of(call)))
}

fn call_as_json(call: &HostCall, lists: &[List]) -> serde_json::Value {
    let checks: Vec<_> = call.checks.iter().map(describe).collect();
    json!({
        "number": call.number,
        "name": call.name,
        "checks": checks,
        "reason": call.reason,
        "lists": lists.iter().map(|list| list.name()).collect::<Vec<_>>(),
    })
}

fn filter_table() -> String {
    let mut table = Table::new(&["CALL", "LISTS", "ARGUMENTS", "REASON"]);
    for (call, lists) in calls() {
        let checks: Vec<_> = call.checks.iter().map(describe).collect();
        let checks = if checks.is_empty() { "any".to_owned() } else { checks.join(", ") };
        let lists: Vec<_> = lists.iter().map(|list| list.name()).collect();
        table.row(vec![call.name.to_owned(), lists.join(" "), checks, call.reason.to_owned()]);
    }
    table.text()
}

/// A check in the notation of C; arguments count from 0.
fn describe(check: &Check) -> String {
    match check {
        Check::Zero(argument) => format!("a{argument} == 0"),
        Check::Mask(argument, mask) => format!("!(a{argument} & ~{mask:#x})"),
        Check::OneOf(argument, values) => {
            let values: Vec<_> = values.iter().map(u32::to_string).collect();
            format!("a{argument} in {{{}}}", values.join(" "))
        }
        Check::Bits(argument, mask, value) => format!("(a{argument} & {mask:#x}) == {value:#x}"),
    }
}
