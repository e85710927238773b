//! `thaw bench ablation`.

use super::boot::Boot;
use super::report::{Progress, ReportArguments, cell, check_path};
use crate::failure::{Failure, Outcome};
use crate::output::Table;
use crate::verbs::numbers::count;
use clap::Args;
use std::num::NonZeroUsize;
use thaw_bench::{self as bench, AblationOptions, AblationReport, Percentiles, Technique};
use thaw_home::home::Home;

/// Measure what each technique is worth: boots without it, turn by turn with all.
///
/// Left out one at a time: mapping lazily, the recorded working set, the I/O cache
/// (descriptors that come with the boot command), the pool of zygotes (each boot
/// makes one), and the merging of neighbouring mappings (the function is frozen once
/// more, aside; `thaw gc` removes that image).
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw bench ablation hello-python -n 200\n  \
    thaw bench ablation hello-python --boot cold --output results")]
pub struct Arguments {
    /// The function.
    name: String,
    /// What the boots begin from: cold or warm.
    #[arg(long, value_enum, default_value = "warm")]
    boot: Boot,
    /// Boots of each variant that are counted.
    #[arg(short, long = "count", value_name = "N", default_value = "100", value_parser = count::<NonZeroUsize>)]
    n: NonZeroUsize,
    /// Path of the requests.
    #[arg(long, default_value = "/")]
    path: String,
    #[command(flatten)]
    report: ReportArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    check_path(&arguments.path)?;
    if !matches!(arguments.boot, Boot::Cold | Boot::Warm) {
        return Err(Failure::misused("only cold and warm boots begin from an image"));
    }
    let options = AblationOptions {
        boot: arguments.boot.into(),
        count: arguments.n.get(),
        path: arguments.path.clone(),
    };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report =
        bench::ablation(&home, &arguments.name, &options, &mut |what| progress.show(what))?;
    drop(progress);
    arguments.report.show("ablation", &report, &text(&report), || report.svg())
}

fn text(report: &AblationReport) -> String {
    let mut table = Table::new(&[
        "without",
        "mappings",
        "first instruction, µs p50 / p99",
        "ratio",
        "first response byte",
        "ratio",
    ]);
    let both = |of: &Percentiles| format!("{} / {}", cell(of.p50), cell(of.p99));
    for variant in &report.variants {
        table.row(vec![
            variant.without.map_or("nothing", Technique::name).to_owned(),
            variant.mappings.to_string(),
            both(&variant.first_instruction_us),
            format!("{:.2}", variant.ratio_first_instruction),
            both(&variant.first_byte_us),
            format!("{:.2}", variant.ratio_first_byte),
        ]);
    }
    format!(
        "{}, {} {} boots of each\n{}",
        report.function,
        report.n,
        report.boot.name(),
        table.text()
    )
}
