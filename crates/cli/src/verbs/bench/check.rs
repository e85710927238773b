//! `thaw bench check`.

use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use thaw_bench::bounds::{Bound, Bounds, Comparison, Measured, Verdict};

/// Compare reports of `boot`, `syscalls` and `sandbox` with bounds.
///
/// Bounds are relative to native runs on the same machine; bench/bounds.toml in the source
/// has those of a release, and `make bench-check` measures for them. Each bound that is not
/// kept, or was not measured, is said in one sentence, and the exit code is 1.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw bench check --bounds bench/bounds.toml results/boot.json results/syscalls.json"
)]
pub struct Arguments {
    /// The JSON that other measurements have written.
    #[arg(required = true, value_name = "REPORT")]
    reports: Vec<PathBuf>,
    /// The file of bounds.
    #[arg(long, value_name = "FILE")]
    bounds: PathBuf,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let bounds = Bounds::parse(&arguments.bounds, &read(&arguments.bounds)?)?;
    let mut measured = Measured::default();
    for report in &arguments.reports {
        measured.add(report, &read(report)?)?;
    }
    let verdicts = bounds.verdicts(&measured);
    output::print(&text(&verdicts))?;
    let complaints: Vec<String> = verdicts.iter().filter_map(Verdict::complaint).collect();
    if complaints.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    for complaint in &complaints {
        eprintln!("{complaint}.");
    }
    let (missed, all) = (complaints.len(), verdicts.len());
    Err(Failure::failed(format!("{missed} of {all} bounds are missed")))
}

fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path)
        .map_err(|error| Failure::failed(format!("cannot read {} ({error})", path.display())))
}

fn text(verdicts: &[Verdict]) -> String {
    let mut table = Table::new(&["bound", "measured", "allowed", ""]);
    for verdict in verdicts {
        let (figure, allowed) = match &verdict.outcome {
            Ok(Comparison { figure, bound: Bound::AtMost(most) }) => {
                (Some(figure), format!("≤ {most}"))
            }
            Ok(Comparison { figure, bound: Bound::AtLeast(least) }) => {
                (Some(figure), format!("≥ {least}"))
            }
            Err(_) => (None, "-".to_owned()),
        };
        table.row(vec![
            verdict.what.trim_end_matches(',').to_owned(),
            figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.3}")),
            allowed,
            if verdict.complaint().is_none() { "met" } else { "missed" }.to_owned(),
        ]);
    }
    table.text()
}
