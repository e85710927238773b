//! `thaw bench boot`.

use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use crate::verbs::serve::WorkingSetArguments;
use clap::{Args, ValueEnum};
use std::io::{IsTerminal, Write, stderr};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use thaw_node::bench::{self, BenchOptions, BenchReport, Percentiles};
use thaw_node::boots::BootKind;
use thaw_node::home::Home;

/// Measure boots of a function, with native starts of the same program in between.
///
/// Times count from the moment the gateway has accepted the connection; native
/// ones from before the fork until the client has the first response byte.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw bench boot hello-python --boot warm -n 1000 --json")]
pub struct Arguments {
    /// The function.
    name: String,
    /// What the boots begin from.
    #[arg(long, value_enum, default_value = "warm")]
    boot: Boot,
    /// Boots that are counted.
    #[arg(short, long = "count", value_name = "N", default_value = "100")]
    n: NonZeroUsize,
    /// Path of the requests.
    #[arg(long, default_value = "/")]
    path: String,
    #[command(flatten)]
    working_set: WorkingSetArguments,
    /// Do not start the program natively.
    #[arg(long)]
    no_native: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Boot {
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
    if arguments.path.contains([' ', '\r', '\n']) || !arguments.path.starts_with('/') {
        return Err(Failure::misused("--path must begin with a slash and hold no blanks"));
    }
    let options = BenchOptions {
        boot: arguments.boot.into(),
        count: arguments.n.get(),
        path: arguments.path.clone(),
        working_set: arguments.working_set.chosen(),
        native: !arguments.no_native,
    };
    let live = stderr().is_terminal();
    let mut progress = |done: usize| {
        if live && (done.is_multiple_of(10) || done == options.count) {
            let end = if done == options.count { "\r\x1b[K" } else { "" };
            eprint!("\r{done} of {}{end}", options.count);
            let _ = stderr().flush();
        }
    };
    let report = bench::boot(&Home::from_environment()?, &arguments.name, &options, &mut progress)?;
    if arguments.json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(report: &BenchReport) -> String {
    let mut table = Table::new(&["µs since the connection was accepted", "p50", "p90", "p99"]);
    let mut row = |name: &str, of: &Percentiles| {
        let cell = |value: f64| format!("{value:.1}");
        table.row(vec![name.to_owned(), cell(of.p50), cell(of.p90), cell(of.p99)]);
    };
    let from = match report.boot {
        BootKind::Cold | BootKind::Warm => "zygote taken",
        BootKind::Fork => "template found",
        BootKind::Ready => "instance taken",
    };
    row(from, &report.phases_us.zygote);
    row("boot command received", &report.phases_us.received);
    row("memory mapped", &report.phases_us.mapped);
    row("first instruction", &report.phases_us.first_instruction);
    row("first response byte", &report.phases_us.first_byte);
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
        },
        table.text(),
        report.pss_kib
    )
}
