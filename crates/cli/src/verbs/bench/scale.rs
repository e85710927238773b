//! `thaw bench scale`.

use super::boot::Boot;
use super::report::{Progress, ReportArguments, cell, check_path};
use crate::failure::{Failure, Outcome};
use crate::output::Table;
use crate::verbs::numbers::count;
use clap::Args;
use std::num::NonZeroUsize;
use thaw_bench::{self as bench, Growth, ScaleOptions, ScaleReport};
use thaw_home::home::Home;

/// Measure boots while more and more instances live, and the memory they take.
///
/// Starts that many instances through the gateway, one after the other. Each
/// serves one request and then stays, idle. Boots are shown by tenths, as medians,
/// with their growth from the first to the last; memory as Pss without pages of
/// files, and as what has changed on the host.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw bench scale hello-python -n 1000 --boot fork\n  \
    thaw bench scale hello-python --output results")]
pub struct Arguments {
    /// The function.
    name: String,
    /// Instances that live in the end.
    #[arg(short, long = "count", value_name = "N", default_value = "1000", value_parser = count::<NonZeroUsize>)]
    n: NonZeroUsize,
    /// What the boots begin from; may be given several times [default: warm, fork and ready].
    #[arg(long, value_enum)]
    boot: Vec<Boot>,
    /// Path of the requests.
    #[arg(long, default_value = "/")]
    path: String,
    #[command(flatten)]
    report: ReportArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    check_path(&arguments.path)?;
    let kinds = match &arguments.boot[..] {
        [] => &[Boot::Warm, Boot::Fork, Boot::Ready],
        // Live instances keep the image in memory.
        kinds if kinds.contains(&Boot::Cold) => {
            return Err(Failure::misused(
                "beside live instances of an image no boot of it is cold",
            ));
        }
        kinds => kinds,
    };
    let options = ScaleOptions {
        boots: kinds.iter().map(|kind| (*kind).into()).collect(),
        count: arguments.n.get(),
        path: arguments.path.clone(),
    };
    let mut progress = Progress::new();
    let home = Home::from_environment()?;
    let report = bench::scale(&home, &arguments.name, &options, &mut |what| progress.show(what))?;
    drop(progress);
    let shown = arguments.report.show("scale", &report, &text(&report), || report.svg())?;
    match report.boots.iter().find_map(|growth| Some((growth, growth.failure.as_ref()?))) {
        Some((growth, failure)) => Err(Failure::failed(format!(
            "{} boots: only {} instances: {failure}",
            growth.boot.name(),
            growth.n
        ))),
        None => Ok(shown),
    }
}

fn text(report: &ScaleReport) -> String {
    let mut text = String::new();
    for growth in &report.boots {
        text += &format!("{}, {} boots, {} live\n", report.function, growth.boot.name(), growth.n);
        let mut table = Table::new(&[
            "instances up to",
            "first instruction, µs shortest",
            "p50",
            "p99",
            "first response byte, µs p50",
            "p99",
        ]);
        for group in &growth.groups {
            let (instruction, byte) = (&group.first_instruction_us, &group.first_byte_us);
            let figures = [group.shortest_us, instruction.p50, instruction.p99, byte.p50, byte.p99];
            table.row([group.instances.to_string()].into_iter().chain(figures.map(cell)).collect());
        }
        text += &table.text();
        text += &memory(growth);
    }
    text
}

fn memory(growth: &Growth) -> String {
    let memory = &growth.memory;
    let count = growth.n.max(1) as f64;
    let each = |kib: i64| cell(kib as f64 / count);
    let host = &memory.host;
    format!(
        "the last group's first instruction takes {:.2} times as long as the first group's \
         (the shortest {:.2} times)\n\
         KiB of an idle instance: Pss without files {} (at most {}), page tables {}\n\
         KiB of the host for each: {} (anonymous {}, page tables {}, kernel objects {}, \
         kernel stacks {}, per-processor {})\n\n",
        growth.growth,
        growth.growth_of_shortest,
        cell(memory.pss_kib),
        memory.pss_max_kib,
        cell(memory.page_tables_kib),
        each(host.used_kib),
        each(host.anonymous_kib),
        each(host.page_tables_kib),
        each(host.slab_kib),
        each(host.kernel_stacks_kib),
        each(host.per_cpu_kib),
    )
}
