//! `thaw build`: a function's directory becomes a frozen image.

use super::limits::WeakLimitsArgument;
use crate::client::Daemon;
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::{Args, ValueEnum};
use serde_json::json;
use std::collections::VecDeque;
use std::io::{IsTerminal, Write, stderr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use thaw_build::build::{
    BuildEvent, BuildOptions, Built, Comparison, Packages, Templates, Training, Trust, build,
};
use thaw_home::config::{CpuBaseline, DomainName, TimeSpan};
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_home::secrets::SecretStore;
use thaw_node::catalog::Reload;
use thaw_store::{Activation, Name, Store, parse_label};

/// Build a function: import its files, run it to its entry point, freeze it.
///
/// The program is frozen when it first waits for a request, or when [entry] of its
/// thaw.toml says so: when it asks through /dev/thaw, or at a signal that it sends
/// itself or that you send to this command. Before that it answers the requests of
/// [train], if there are any. docs/functions.md has all of it.
///
/// The build command of [build], pip, and interpreters that thaw.toml names run in a
/// sandbox: it sees the tools of this host, the function's directory, which it may
/// change, and the destinations of `egress` in [build]. Links cannot lead out of
/// the function's directory. Of this host's other files the function gets those that
/// every user may read. docs/building.md has all of it.
///
/// Every build is a version with a number; a running daemon serves the new one at once.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw build examples/hello-python\n  \
    thaw build --tools ~/.cargo --tools ~/.rustup ./my-function\n  \
    thaw build --domain customer-7 ./my-function\n  \
    thaw build --timings examples/hello-python\n  \
    thaw build --templates shared ./my-function\n  \
    thaw build --no-activate --label next ./my-function && thaw split my-function next --percent 10")]
pub struct Arguments {
    /// The directory with the function's thaw.toml.
    #[arg(value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    /// How long the program may take until it waits for clients [default: 60s, less if it is seen
    /// to wait on another port]
    #[arg(long, value_name = "DURATION")]
    timeout: Option<TimeSpan>,
    /// How long it may take to answer the requests of [train].
    #[arg(long, value_name = "DURATION", default_value = "15m")]
    training_timeout: TimeSpan,
    /// Show a directory of this host to the build command and to pip, read-only; by
    /// default they see /usr, /etc, /opt and the like.
    #[arg(long, value_name = "DIR")]
    tools: Vec<PathBuf>,
    /// Run the build command, pip and interpreters that thaw.toml names on this host,
    /// with all your rights, and let the function take any file that you may read.
    #[arg(long)]
    trust_build: bool,
    /// Share equal files with functions of this domain only, whatever [sharing] of
    /// thaw.toml says.
    #[arg(long, value_name = "NAME")]
    domain: Option<DomainName>,
    /// Show the program no more of the processor than this level has, until it is frozen:
    /// x86-64-v2, x86-64-v3, x86-64-v4, or host for all. The image runs on every machine of
    /// that level. The host must be able to intercept CPUID (`cpuid_fault` in /proc/cpuinfo).
    #[arg(long, value_name = "LEVEL", default_value = "host")]
    cpu_baseline: CpuBaseline,
    /// A name for the version, by which `thaw activate` and `thaw split` know it, too.
    #[arg(long, value_name = "LABEL", value_parser = parse_label)]
    label: Option<Name>,
    /// Leave the requests with the version that has them; see `thaw activate` and `thaw split`.
    #[arg(long)]
    no_activate: bool,
    /// Do not start the program a second time to compare what two copies of it draw at random
    /// (docs/uniqueness.md).
    #[arg(long)]
    no_compare: bool,
    /// Which functions are built from a runtime template of their language (docs/functions.md): those whose
    /// thaw.toml names one in [template], or also those that share their runtime with another function.
    #[arg(long, value_name = "WHICH", value_enum, default_value = "named")]
    templates: WhichTemplates,
    /// Install the packages of Python and npm anew, also if the same are wanted as in the build before:
    /// of Python the newest versions that the requirements allow.
    #[arg(long)]
    fresh_packages: bool,
    /// Say how long each stage took.
    #[arg(long)]
    timings: bool,
    /// Print JSON about the result.
    #[arg(long)]
    json: bool,
    /// Do not show progress, nor output unless the build fails: then its last lines.
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    weak_limits: WeakLimitsArgument,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum WhichTemplates {
    Named,
    Shared,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let started = Instant::now();
    let home = Home::from_environment()?;
    let options = options(arguments)?;
    let mut display = Display::new(arguments.quiet);
    let mut timings = Timings::new();
    let result = build(&home, &arguments.directory, &options, &mut |event| {
        timings.note(&event);
        display.show(&event);
    });
    display.finish();
    let built = result.inspect_err(|_| display.show_hidden())?;
    let stages = timings.end();
    let config = &built.function.function.config;
    for finding in &built.frozen.findings {
        display.show(&BuildEvent::Warning(&finding.text));
    }
    let secrets = SecretStore::of(home.clone());
    if let Some(missing) = secrets.missing(&config.name, &config.secrets.names) {
        display.show(&BuildEvent::Note(&missing.to_string()));
    }
    if arguments.json {
        output::print_json(&as_json(&built, started.elapsed(), &stages))?;
    } else {
        output::print(&summary(&built, started.elapsed()))?;
    }
    if arguments.timings && !arguments.json {
        output::print(&table(&stages))?;
    }
    if built.is_active {
        serve_new_version(&home, config.name.as_str(), !arguments.quiet)?;
    }
    if arguments.no_activate && !arguments.quiet {
        say_activation(&home, &built.function, built.is_active);
    }
    Ok(ExitCode::SUCCESS)
}

/// Says where requests go after a version was stored that was to get none.
pub(super) fn say_activation(home: &Home, stored: &BuiltFunction, is_active: bool) {
    let (name, number) = (&stored.function.config.name, stored.number);
    if !is_active {
        eprintln!("`thaw activate {name} {number}` has requests go to it");
    } else if is_only_version(home, name.as_str()) {
        eprintln!("it is the first version of {name}, so it is active");
    } else {
        eprintln!("version {number} of {name} is active already");
    }
}

fn is_only_version(home: &Home, name: &str) -> bool {
    let record = Store::open(&home.store()).and_then(|store| store.get_function(&Name::new(name)?));
    record.is_ok_and(|record| record.versions().len() == 1)
}

/// Has a running daemon serve the version of a function that is in the store now.
pub(super) fn serve_new_version(home: &Home, name: &str, is_told: bool) -> Result<(), Failure> {
    let Some(daemon) = Daemon::running(home) else { return Ok(()) };
    let reload: Reload = daemon.post("/reload")?;
    if let Some(reason) = reload.broken.get(name) {
        return Err(Failure::failed(format!("the daemon cannot serve the new image: {reason}")));
    }
    if let Some(reason) = reload.unreachable.get(name) {
        return Err(Failure::failed(format!(
            "the new version of {name} is not reached at its own address: {reason}"
        )));
    }
    if is_told {
        eprintln!("the daemon serves the new version of {name}");
    }
    Ok(())
}

fn options(arguments: &Arguments) -> Result<BuildOptions, Failure> {
    // A link is shown with what it leads to.
    let paths = |tools: &PathBuf| match (std::path::absolute(tools), tools.canonicalize()) {
        (Ok(named), Ok(real)) => Ok([named, real]),
        (Err(error), _) | (_, Err(error)) => {
            Err(Failure::failed(format!("--tools {}: {error}", tools.display())))
        }
    };
    let tools = arguments.tools.iter().map(paths).collect::<Result<Vec<_>, _>>()?;
    Ok(BuildOptions {
        entry_timeout: arguments.timeout.map(|timeout| timeout.0),
        training_timeout: arguments.training_timeout.0,
        trust: if arguments.trust_build { Trust::Trusted } else { Trust::Untrusted },
        tools: tools.into_iter().flatten().collect(),
        domain: arguments.domain.clone(),
        weak_limits: arguments.weak_limits.chosen(),
        cpu_baseline: arguments.cpu_baseline,
        label: arguments.label.clone(),
        packages: if arguments.fresh_packages { Packages::Fresh } else { Packages::Kept },
        comparison: if arguments.no_compare { Comparison::LeftOut } else { Comparison::Made },
        templates: match arguments.templates {
            WhichTemplates::Named => Templates::Named,
            WhichTemplates::Shared => Templates::Shared,
        },
        activation: if arguments.no_activate { Activation::Later } else { Activation::Now },
        ..BuildOptions::default()
    })
}

fn as_json(built: &Built, took: Duration, stages: &[Stage]) -> serde_json::Value {
    let stages: Vec<_> = stages
        .iter()
        .map(|stage| json!({ "stage": stage.name, "ms": stage.took.as_secs_f64() * 1e3 }))
        .collect();
    let report = &built.frozen.report;
    json!({
        "function": built.function.function.config.name,
        "version": built.function.number,
        "active": built.is_active,
        "image": built.function.image.to_string(),
        "rootfs": built.function.index.to_string(),
        "file_len": report.file_len,
        "stored": report.stored,
        "from_blobs": report.from_blobs,
        "zero": report.zero,
        "mappings": report.mappings,
        "start_ms": built.frozen.start.as_secs_f64() * 1e3,
        "training_requests": built.frozen.training.as_ref().map_or(0, |training| training.requests),
        "training_ms": built.frozen.training.as_ref().map(|training| training.duration.as_secs_f64() * 1e3),
        "freeze_ms": report.duration.as_secs_f64() * 1e3,
        "warnings": built.frozen.findings,
        "stages": stages,
        "total_ms": took.as_secs_f64() * 1e3,
    })
}

fn summary(built: &Built, took: Duration) -> String {
    let report = &built.frozen.report;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let trained = match &built.frozen.training {
        None => String::new(),
        Some(Training { requests, duration, .. }) => {
            format!("trained with {requests} requests in {:.1} s, ", duration.as_secs_f64())
        }
    };
    format!(
        "built version {} of {} in {:.1} s: at its entry point after {:.0} ms, {trained}frozen in {:.0} ms, image of \
         {:.1} MiB in {} mappings, besides {:.1} MiB of shared files\n",
        built.function.number,
        built.function.function.config.name,
        took.as_secs_f64(),
        built.frozen.start.as_secs_f64() * 1e3,
        report.duration.as_secs_f64() * 1e3,
        mib(report.stored),
        report.mappings,
        mib(report.from_blobs),
    )
}

/// A stage that is over.
struct Stage {
    name: String,
    took: Duration,
}

/// How long the stages of a build take.
struct Timings {
    /// Those that are over.
    stages: Vec<Stage>,
    /// The present one, and when it began.
    present: (String, Instant),
}

impl Timings {
    fn new() -> Self {
        Self { stages: Vec::new(), present: ("reading thaw.toml".to_owned(), Instant::now()) }
    }

    fn note(&mut self, event: &BuildEvent<'_>) {
        if let BuildEvent::Stage(stage) = event {
            let (name, began) =
                std::mem::replace(&mut self.present, ((*stage).to_owned(), Instant::now()));
            self.stages.push(Stage { name, took: began.elapsed() });
        }
    }

    fn end(mut self) -> Vec<Stage> {
        let (name, began) = self.present;
        self.stages.push(Stage { name, took: began.elapsed() });
        self.stages
    }
}

/// The stages, one a line.
fn table(stages: &[Stage]) -> String {
    let line =
        |stage: &Stage| format!("{:>9.1} ms  {}\n", stage.took.as_secs_f64() * 1e3, stage.name);
    stages.iter().map(line).collect()
}

/// Lines of output that `--quiet` shows when a build fails.
const HIDDEN_MAX: usize = 10;

/// Shows what a build does on standard error.
pub(super) struct Display {
    quiet: bool,
    /// Whether lines can be drawn over.
    live: bool,
    drawn: Instant,
    /// A line that is being drawn over.
    counting: Option<String>,
    /// The last lines of output that were not shown.
    hidden: VecDeque<String>,
}

impl Display {
    pub(super) fn new(quiet: bool) -> Self {
        Self {
            quiet,
            live: stderr().is_terminal(),
            drawn: Instant::now(),
            counting: None,
            hidden: VecDeque::new(),
        }
    }

    pub(super) fn show(&mut self, event: &BuildEvent<'_>) {
        if self.quiet {
            return self.hide(event);
        }
        match event {
            BuildEvent::Stage(stage) => {
                self.finish();
                eprintln!("thaw: {stage}");
            }
            BuildEvent::Imported { files, bytes } => self.count(counted(*files, *bytes)),
            BuildEvent::Trained { done, total } => {
                self.count(format!("trained with {done} of {total} requests"));
            }
            BuildEvent::Warning(warning) => {
                self.finish();
                eprintln!("thaw: warning: {warning}");
            }
            BuildEvent::Note(note) => {
                self.finish();
                eprintln!("thaw: note: {note}");
            }
            BuildEvent::Output { from, line } => {
                self.finish();
                eprintln!("{from} | {line}");
            }
        }
    }

    /// Keeps the end of the output of commands for the case that one fails. What the program has
    /// printed last is part of its error.
    fn hide(&mut self, event: &BuildEvent<'_>) {
        if let BuildEvent::Output { from, line } = event
            && *from != "program"
        {
            self.hidden.truncate(HIDDEN_MAX - 1);
            self.hidden.push_front(format!("{from} | {line}"));
        }
    }

    /// Shows the end of the output that was hidden, to which an error refers.
    fn show_hidden(&mut self) {
        while let Some(line) = self.hidden.pop_back() {
            eprintln!("{line}");
        }
    }

    /// Shows how far something has come, over what was shown before.
    fn count(&mut self, text: String) {
        if self.live && self.drawn.elapsed() > Duration::from_millis(100) {
            self.drawn = Instant::now();
            eprint!("\r\x1b[Kthaw: {text}");
            let _ = stderr().flush();
        }
        self.counting = Some(text);
    }

    /// Ends a line that is being drawn over.
    pub(super) fn finish(&mut self) {
        if let Some(text) = self.counting.take()
            && !self.quiet
        {
            let start = if self.live { "\r\x1b[K" } else { "" };
            eprintln!("{start}thaw: {text}");
        }
    }
}

fn counted(files: u64, bytes: u64) -> String {
    format!("imported {files} files, {:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_ends_where_the_next_one_begins() {
        let mut timings = Timings::new();
        timings.note(&BuildEvent::Stage("importing files"));
        timings.note(&BuildEvent::Imported { files: 1, bytes: 1 });
        timings.note(&BuildEvent::Stage("freezing"));
        let stages = timings.end();
        let names: Vec<_> = stages.iter().map(|stage| stage.name.as_str()).collect();
        assert_eq!(names, ["reading thaw.toml", "importing files", "freezing"]);
        assert_eq!(table(&stages).lines().count(), 3);
    }
}
