//! `thaw bench boot`.

use super::report::{Progress, ReportArguments, cell, check_path};
use crate::failure::{Failure, Outcome};
use crate::output::Table;
use crate::verbs::numbers::count;
use crate::verbs::serve::WorkingSetArguments;
use clap::{Args, ValueEnum};
use std::num::NonZeroUsize;
use thaw_bench::{self as bench, BenchOptions, BenchReport, BootsReport, Percentiles};
use thaw_home::home::Home;
use thaw_node::boots::BootKind;

/// Boots of one function that are counted, by default.
const COUNT_OF_ONE: NonZeroUsize = NonZeroUsize::new(100).unwrap();
/// The same when there are several.
const COUNT_OF_MANY: NonZeroUsize = NonZeroUsize::new(30).unwrap();

/// Measure boots of functions, with native starts of the same programs in between.
///
/// Times count from the moment the gateway has accepted the connection; native
/// ones from before the fork until the client has the first response byte. Of one
/// function and one kind of boot, every phase is shown; of several (--all, or more
/// names), the way to the first instruction and to the first response byte, and the
/// time that the program itself took in between. What cannot be measured is named
/// with the reason and stops nothing else.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw bench boot hello-python --boot warm -n 1000 --json\n  \
    thaw bench boot --all --output results\n  thaw bench boot hello-c hello-go --boot fork --boot ready")]
pub struct Arguments {
    /// The functions.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    names: Vec<String>,
    /// Every function of the store.
    #[arg(long)]
    all: bool,
    /// What the boots begin from; may be given several times [default: warm for one function, all for several].
    #[arg(long, value_enum)]
    boot: Vec<Boot>,
    /// Boots of each kind that are counted [default: 100, of several functions 30].
    #[arg(short, long = "count", value_name = "N", value_parser = count::<NonZeroUsize>)]
    n: Option<NonZeroUsize>,
    /// Path of the requests.
    #[arg(long, default_value = "/")]
    path: String,
    #[command(flatten)]
    working_set: WorkingSetArguments,
    /// Do not start the programs natively.
    #[arg(long)]
    no_native: bool,
    #[command(flatten)]
    report: ReportArguments,
}

/// A kind of boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Boot {
    /// The image; nothing of it and of the files is in the page cache.
    Cold,
    /// The image, which is in the page cache with the files.
    Warm,
    /// A live template, which forks.
    Fork,
    /// An instance that was booted ahead.
    Ready,
}

impl From<Boot> for BootKind {
    fn from(boot: Boot) -> Self {
        match boot {
            Boot::Cold => Self::Cold,
            Boot::Warm => Self::Warm,
            Boot::Fork => Self::Fork,
            Boot::Ready => Self::Ready,
        }
    }
}

pub fn run(arguments: &Arguments) -> Outcome {
    check_path(&arguments.path)?;
    let kinds: Vec<BootKind> = arguments.boot.iter().map(|boot| (*boot).into()).collect();
    let one = match (&arguments.names[..], &kinds[..]) {
        ([name], []) => Some((name, BootKind::Warm)),
        ([name], [kind]) => Some((name, *kind)),
        _ => None,
    };
    let one = one.filter(|_| arguments.report.output.is_none());
    let count = if one.is_some() { COUNT_OF_ONE } else { COUNT_OF_MANY };
    let options = BenchOptions {
        boots: if kinds.is_empty() { BootKind::OF_FUNCTIONS.to_vec() } else { kinds },
        count: arguments.n.unwrap_or(count).get(),
        path: arguments.path.clone(),
        working_set: arguments.working_set.chosen(),
        native: !arguments.no_native,
    };
    let home = Home::from_environment()?;
    let mut progress = Progress::new();
    if let Some((name, kind)) = one {
        let report = bench::boot(&home, name, kind, &options, &mut |what| progress.show(what))?;
        drop(progress);
        // No figure is asked for, see above.
        return arguments.report.show("boot", &report, &text_of_one(&report), || Ok(String::new()));
    }
    let report = bench::boots(&home, &arguments.names, &options, &mut |what| progress.show(what))?;
    drop(progress);
    let shown = arguments.report.show("boot", &report, &text(&report), || report.svg())?;
    match (report.boots.is_empty(), report.failures.first()) {
        (true, Some(failure)) => {
            Err(Failure::failed(format!("nothing could be measured: {}", failure.reason)))
        }
        _ => Ok(shown),
    }
}

fn text_of_one(report: &BenchReport) -> String {
    let mut table = Table::new(&["µs since the connection was accepted", "p50", "p90", "p99"]);
    let mut row = |name: &str, of: &Percentiles| {
        let cell = |value: f64| format!("{value:.1}");
        table.row(vec![name.to_owned(), cell(of.p50), cell(of.p90), cell(of.p99)]);
    };
    let from = match report.boot {
        BootKind::Cold | BootKind::Warm => "zygote taken",
        BootKind::Fork => "template found",
        BootKind::Ready => "instance taken",
        BootKind::Asleep => "file verified",
    };
    row(from, &report.phases_us.zygote);
    row("boot command received", &report.phases_us.received);
    row("memory mapped", &report.phases_us.mapped);
    row("first instruction", &report.phases_us.first_instruction);
    row("first response byte", &report.phases_us.first_byte);
    row("execution (from the first instruction to the byte)", &report.execution_us);
    if let Some(prefetch) = &report.prefetch {
        let of = format!("one sequential read of its {} KiB", prefetch.bytes >> 10);
        row(&of, &prefetch.read_us);
    }
    if let Some(native) = &report.native_us {
        row("native start, first response byte", &native.first_byte);
    }
    format!(
        "{}, {} boots of {}\n{}memory of an idle instance beyond shared files: {} KiB\n",
        report.function,
        report.n,
        match report.boot {
            BootKind::Cold => "an image that is not resident",
            BootKind::Warm => "a resident image",
            BootKind::Fork => "a live template",
            BootKind::Ready => "instances that were booted ahead",
            BootKind::Asleep => "instances that were asleep",
        },
        table.text(),
        report.pss_kib
    )
}

fn text(report: &BootsReport) -> String {
    let mut table = Table::new(&[
        "µs, p50 / p99",
        "boot",
        "first instruction",
        "execution",
        "first response byte",
        "sequential read",
        "native start",
        "KiB",
    ]);
    let both = |of: &Percentiles| format!("{} / {}", cell(of.p50), cell(of.p99));
    for boot in &report.boots {
        table.row(vec![
            boot.function.clone(),
            boot.boot.name().to_owned(),
            both(&boot.phases_us.first_instruction),
            both(&boot.execution_us),
            both(&boot.phases_us.first_byte),
            boot.prefetch.map_or("-".to_owned(), |prefetch| both(&prefetch.read_us)),
            boot.native_us.as_ref().map_or("-".to_owned(), |native| both(&native.first_byte)),
            boot.pss_kib.to_string(),
        ]);
    }
    let mut text = table.text();
    for failure in &report.failures {
        let kind = failure.boot.map(|kind| format!(", {} boot", kind.name()));
        let (function, kind) = (&failure.function, kind.unwrap_or_default());
        text += &format!("not measured: {function}{kind}: {}\n", failure.reason);
    }
    text
}
