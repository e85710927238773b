//! `thaw inspect`: everything about one function.

use super::{ps, schedule};
use crate::client::Daemon;
use crate::failure::{Failure, Outcome};
use crate::output::{self, Table, ago, size};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use thaw_abi::cpu::Baseline;
use thaw_abi::image::{Mapping, SOURCE_BLOB, SOURCE_IMAGE, SOURCE_ZERO, ancestor_depth};
use thaw_build::build::open_ancestor;
use thaw_daemon::admin::FunctionDetail;
use thaw_home::config::{FunctionConfig, FunctionName};
use thaw_home::function::Finding;
use thaw_home::function::{BuiltFunction, Origin};
use thaw_home::home::Home;
use thaw_node::boots::BootRecord;
use thaw_node::instance::{RewindInfo, RewindVerdict, StandbyInfo};
use thaw_node::pulls::PullState;
use thaw_node::service::InstanceInfo;
use thaw_node::triggers::ScheduleInfo;
use thaw_sandbox::{Fit, Image, ImageError, Kernel, cpu_features, escape, level_of};
use thaw_store::{ImageId, KernelId, Store};

/// Boots that people are shown; the JSON has all that the daemon remembers.
const BOOTS_SHOWN: usize = 10;

/// Show everything about a function: its configuration, files and image, and,
/// if a daemon is running, its instances and recent boots.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw inspect hello-python\n  \
    thaw inspect hello-python --json | jq -r .image.path")]
pub struct Arguments {
    /// The function.
    name: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// All that is known of a function.
#[derive(Debug, Serialize)]
struct Report {
    name: FunctionName,
    built_from: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    pulled_as: Option<Origin>,
    built_ms: u64,
    config: FunctionConfig,
    environment: BTreeMap<String, String>,
    rootfs: RootfsReport,
    image: ImageReport,
    /// What the build has found that copies will not like.
    warnings: Vec<Finding>,
    /// The rest is the daemon's; none if no daemon serves the function.
    instances: Option<Vec<InstanceInfo>>,
    standby: Option<StandbyInfo>,
    boots_ns: Option<Vec<BootRecord>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    schedules: Vec<ScheduleInfo>,
}

/// The function's files.
#[derive(Debug, Serialize)]
struct RootfsReport {
    index: String,
    #[serde(flatten)]
    facts: Option<RootfsFacts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct RootfsFacts {
    files: usize,
    blobs: usize,
    bytes: u64,
}

/// The function's image.
#[derive(Debug, Serialize)]
struct ImageReport {
    id: String,
    #[serde(flatten)]
    facts: Option<ImageFacts>,
    /// Why instances cannot be booted from it.
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct ImageFacts {
    path: PathBuf,
    version: u32,
    file_len: u64,
    mappings: usize,
    bytes_of_image: u64,
    bytes_of_blobs: u64,
    bytes_of_zeros: u64,
    bytes_of_ancestors: u64,
    /// Names of the images that it differs from, the root first.
    ancestors: Vec<String>,
    blobs: usize,
    working_set_bytes: Option<usize>,
    /// The build of the Thaw kernel that it needs.
    kernel: String,
    /// Whether that is another one than this program's.
    kernel_is_older: bool,
    /// The level of the x86-64 instruction set that it needs, if one says it all.
    cpu_level: Option<&'static str>,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let home = Home::existing()?;
    let store = Store::open(&home.store())?;
    let daemon = Daemon::running(&home);
    let detail: Option<FunctionDetail> = daemon
        .as_ref()
        .and_then(|daemon| daemon.get(&format!("/functions/{}", arguments.name)).ok());
    if let Some(detail) = detail.as_ref().filter(|detail| detail.info.fetching.is_some()) {
        return show_partial(detail, arguments.json);
    }
    let function = BuiltFunction::read(&store, &arguments.name)?;
    let mut report = Report::new(&store, &function, detail);
    if let Some(daemon) = daemon.filter(|_| !report.config.schedules.is_empty()) {
        let url = format!("/functions/{}/schedules", arguments.name);
        report.schedules = daemon.get(&url).unwrap_or_default();
    }
    match arguments.json {
        // By way of a value, whose keys are in alphabetical order.
        true => output::print_json(&serde_json::to_value(&report)?)?,
        false => output::print(&text(&report)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows a function of which only a part is here: the store does not have it yet.
fn show_partial(detail: &FunctionDetail, as_json: bool) -> Outcome {
    if as_json {
        output::print_json(&serde_json::to_value(detail)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(fetching) = &detail.info.fetching else { return Ok(ExitCode::SUCCESS) };
    let who = match fetching.state {
        PullState::Fetching => "the daemon fetches the rest",
        PullState::Waiting => "the daemon fetches the rest soon",
        PullState::Command => "`thaw pull --lazy` fetches the rest",
        PullState::Done => "all of it is here and being stored",
        PullState::Failed => "nobody fetches the rest; pull it again, or remove it",
        PullState::Cancelled => "nobody fetches the rest, as somebody has said",
    };
    let mut lines = vec![
        ("NAME", detail.info.name.to_string()),
        ("IMAGE", detail.info.image.clone()),
        ("PARTIAL", who.to_owned()),
        ("INSTANCES", detail.live.len().to_string()),
    ];
    if fetching.of > 0 {
        lines.push(("HERE", format!("{} of {}", size(fetching.bytes), size(fetching.of))));
    }
    if fetching.failed_fetches > 0 {
        lines.push(("FAILED", format!("{} fetches of pieces", fetching.failed_fetches)));
    }
    let problem = detail.info.problem.as_ref().or(fetching.problem.as_ref());
    lines.extend(problem.map(|problem| ("PROBLEM", escape(problem.as_bytes()))));
    let text: String =
        lines.into_iter().map(|(title, value)| format!("{title:<10} {value}\n")).collect();
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

impl Report {
    fn new(store: &Store, function: &BuiltFunction, detail: Option<FunctionDetail>) -> Self {
        let stored = &function.function;
        let (instances, standby, boots_ns) = match detail {
            Some(detail) => (Some(detail.live), Some(detail.standby), Some(detail.boots)),
            None => (None, None, None),
        };
        Self {
            name: stored.config.name.clone(),
            built_from: stored.source.clone(),
            pulled_as: stored.origin.clone(),
            built_ms: function.created_ms,
            config: stored.config.without_secrets(),
            environment: stored.environment_without_secrets(),
            rootfs: RootfsReport::new(store, function),
            image: ImageReport::new(store, function),
            warnings: stored.findings.clone(),
            instances,
            standby,
            boots_ns,
            schedules: Vec::new(),
        }
    }
}

impl RootfsReport {
    fn new(store: &Store, function: &BuiltFunction) -> Self {
        let (facts, problem) = match store.open_index(function.index) {
            Ok(index) => {
                let view = index.index();
                let (files, blobs) = (view.inodes().len(), view.blobs().len());
                let bytes = view.blobs().iter().map(|blob| blob.size).sum();
                (Some(RootfsFacts { files, blobs, bytes }), None)
            }
            Err(error) => (None, Some(error.to_string())),
        };
        Self { index: function.index.to_string(), facts, problem }
    }
}

impl ImageReport {
    fn new(store: &Store, function: &BuiltFunction) -> Self {
        let (facts, problem) = match Self::look(store, function) {
            Ok((facts, problem)) => (Some(facts), problem),
            Err(problem) => (None, Some(problem)),
        };
        Self { id: function.image.to_string(), facts, problem }
    }

    /// The facts, and why the image does not fit here if so; the error says why it cannot
    /// be read.
    fn look(
        store: &Store,
        function: &BuiltFunction,
    ) -> Result<(ImageFacts, Option<String>), String> {
        let file = store.open_image(function.image).map_err(|error| error.to_string())?;
        let image = Image::open_with(file, &mut |ancestor| open_ancestor(store, ancestor))
            .map_err(|error| error.to_string())?;
        let kernel = thaw_home::debug::kernel().map_err(|error| error.to_string())?;
        let own_build = image.header().kernel_build;
        let is_older = own_build != kernel.build_id();
        let fit = Fit {
            kernel_build: own_build,
            index_hash: *function.index.as_bytes(),
            cpu_features: cpu_features(),
        };
        let bytes = |source: u32| -> u64 {
            image.mappings().iter().filter(|m| m.source == source).map(|m| m.len).sum()
        };
        let is_of_ancestor =
            |m: &&Mapping| m.source == SOURCE_BLOB && ancestor_depth(m.blob).is_some();
        let of_ancestors = image.mappings().iter().filter(is_of_ancestor).map(|m| m.len).sum();
        let ancestors = image.ancestors().iter();
        let working_set = store.working_set(function.image).ok().flatten();
        let facts = ImageFacts {
            path: store.root().join("images").join(function.image.to_string()),
            version: image.header().version,
            file_len: image.header().file_len,
            mappings: image.mappings().len(),
            bytes_of_image: bytes(SOURCE_IMAGE),
            bytes_of_blobs: bytes(SOURCE_BLOB) - of_ancestors,
            bytes_of_ancestors: of_ancestors,
            ancestors: ancestors.map(|ancestor| ImageId(ancestor.name).to_string()).collect(),
            bytes_of_zeros: bytes(SOURCE_ZERO),
            blobs: image.blobs().len(),
            working_set_bytes: working_set.map(|set| set.len()),
            kernel: KernelId(own_build).to_string(),
            kernel_is_older: is_older,
            cpu_level: level_of(&image.header().cpu_features).map(Baseline::name),
        };
        let misfit = image.check_fit(&fit).err().map(|error| error.to_string());
        let unusable = || is_older.then(|| check_kernel(store, own_build).err()).flatten();
        Ok((facts, misfit.or_else(unusable)))
    }
}

/// Checks that an older kernel build can be used here.
fn check_kernel(store: &Store, build: [u8; 32]) -> Result<(), String> {
    let elf = store.kernel(KernelId(build)).map_err(|error| match error.is_not_found() {
        // Of a version that did not store its kernel.
        true => ImageError::OtherKernel.to_string(),
        false => error.to_string(),
    })?;
    Kernel::of_build(elf, build).map(drop).map_err(|error| error.to_string())
}

fn text(report: &Report) -> Result<String, Failure> {
    let mut sections = vec![summary(report), section("CONFIGURATION", &configuration(report)?)];
    // A value with line ends must not look like lines of ours.
    let variable = |(name, value)| escape(format!("{name}={value}").as_bytes()) + "\n";
    let environment: String = report.environment.iter().map(variable).collect();
    sections.push(section("ENVIRONMENT", &environment));
    match (&report.instances, &report.boots_ns) {
        (Some(instances), Some(boots)) => {
            sections.push(section("INSTANCES", &ps::table(instances, &[])));
            let shown = boots.len().min(BOOTS_SHOWN);
            let title = format!("BOOTS, the last {shown}, µs since the connection was accepted");
            sections.push(section(&title, &boot_table(&boots[..shown])));
        }
        _ => sections.push("no daemon serves it, so it has no instances\n".to_owned()),
    }
    if !report.schedules.is_empty() {
        sections.push(section("SCHEDULES", &schedule::table(&report.schedules)));
    }
    let text = sections.join("\n");
    // Names, paths and variables are an author's.
    let lines = text.lines().map(|line| escape(line.as_bytes()) + "\n");
    Ok(lines.collect())
}

fn section(title: &str, text: &str) -> String {
    let lines = text.lines().map(|line| format!("  {line}").trim_end().to_owned() + "\n");
    format!("{title}\n{}", lines.collect::<String>())
}

fn summary(report: &Report) -> String {
    let mut table = Table::default();
    let mut row = |name: &str, value: String| table.row(vec![name.to_owned(), value]);
    row("FUNCTION", report.name.to_string());
    row("BUILT", built(report));
    let rootfs = &report.rootfs;
    if let Some(RootfsFacts { files, blobs, bytes }) = &rootfs.facts {
        let index = short(&rootfs.index);
        row("FILES", format!("{files}, {} in {blobs} blobs, index {index}", size(*bytes)));
    }
    if let Some(problem) = &rootfs.problem {
        row("FILES", format!("cannot be used: {problem}"));
    }
    let image = &report.image;
    if let Some(facts) = &image.facts {
        let (own, blobs, zeros) =
            (facts.bytes_of_image, facts.bytes_of_blobs, facts.bytes_of_zeros);
        row("IMAGE", facts.path.display().to_string());
        row(
            "",
            format!(
                "{} in {} mappings, of them {} from {} shared files, {} zero",
                size(own + blobs + zeros),
                facts.mappings,
                size(blobs),
                facts.blobs,
                size(zeros)
            ),
        );
        let level = facts.cpu_level.unwrap_or("this machine's, and more than x86-64-v4");
        row("PROCESSOR", format!("needs {level}"));
        if facts.kernel_is_older {
            let kernel = short(&facts.kernel);
            row("KERNEL", format!("{kernel}, an older build, which runs it"));
        }
        if !facts.ancestors.is_empty() {
            let names: Vec<String> =
                facts.ancestors.iter().map(|name| short(name).to_owned()).collect();
            let bytes = size(facts.bytes_of_ancestors);
            row("DIFFERS FROM", format!("{}, which hold {bytes} more", names.join(", ")));
        }
        let recorded = if facts.working_set_bytes.is_some() { "recorded" } else { "not recorded" };
        row("WORKING SET", recorded.to_owned());
    }
    if let Some(problem) = &image.problem {
        row("IMAGE", format!("{} cannot be used: {problem}", short(&image.id)));
    }
    for warning in &report.warnings {
        row("WARNING", escape(warning.text.as_bytes()));
    }
    if let Some(StandbyInfo { ready, template, forked, rewinds }) = &report.standby {
        let ahead = forked.len();
        let template = template.map_or("no template".to_owned(), |pid| {
            format!("template {pid}, {ahead} of its copies forked ahead")
        });
        row("STANDBY", format!("{} ready instances, {template}", ready.len()));
        if let Some(RewindInfo { done, lent, refused, last_refusal, measured, .. }) = rewinds {
            let why = last_refusal.as_ref().map_or(String::new(), |why| format!("; last: {why}"));
            let text = format!("{done} times, {lent} are lent, refused {refused} times{why}");
            row("REWOUND", text);
            if let Some(RewindVerdict { new_us, rewound_us, wins }) = measured {
                let so = if *wins { "so they are put back" } else { "so they are ended" };
                let new = format!("{new_us} us of processor time with a new instance");
                row("", format!("a request takes {new}, {rewound_us} with one put back, {so}"));
            }
        }
    }
    table.text()
}

/// The configuration as in `thaw.toml`, with all defaults.
/// When it was made, and from what.
fn built(report: &Report) -> String {
    let ago = ago(report.built_ms);
    match &report.pulled_as {
        None => format!("{ago} ago from {}", report.built_from.display()),
        Some(Origin { reference, digest, is_signed }) => {
            let signed = if *is_signed { "signed" } else { "not signed" };
            format!("{ago} ago, pulled as {reference}, {signed}, {digest}")
        }
    }
}

fn configuration(report: &Report) -> Result<String, Failure> {
    toml::to_string(&report.config).map_err(Failure::failed)
}

fn boot_table(boots: &[BootRecord]) -> String {
    let mut table = Table::new(&[
        "INSTANCE",
        "BOOT",
        "ZYGOTE",
        "MAPPED",
        "FIRST INSTRUCTION",
        "FIRST BYTE",
        "CLIENT",
    ]);
    let micros = |ns: Option<u64>| ns.map_or("-".to_owned(), |ns| (ns / 1000).to_string());
    for boot in boots {
        let phases = &boot.phases;
        table.row(vec![
            boot.instance.to_string(),
            boot.kind.name().to_owned(),
            micros(Some(phases.zygote)),
            micros(phases.mapped),
            micros(phases.first_instruction),
            micros(phases.first_byte),
            boot.peer.to_string(),
        ]);
    }
    table.text()
}

/// The first digits of a hash, as `thaw images` shows them.
fn short(hash: &str) -> &str {
    hash.get(..16).unwrap_or(hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use thaw_home::function::FindingKind;

    fn report() -> Report {
        let text = "name = \"f\"\ncommand = [\"/app/f\", \"a\\u001bb\"]\nport = 1\n\
                    [runtime]\nkind = \"binary\"\n[env]\nKEY = \"***\"\n";
        Report {
            name: "f".parse().unwrap(),
            built_from: "/home/\u{1b}[31m/f".into(),
            pulled_as: None,
            built_ms: 0,
            config: FunctionConfig::parse(Path::new("thaw.toml"), text).unwrap(),
            environment: BTreeMap::from([("TERM".to_owned(), "a\u{1b}\nb".to_owned())]),
            rootfs: RootfsReport {
                index: "00".repeat(32),
                facts: Some(RootfsFacts { files: 3, blobs: 2, bytes: 1 << 20 }),
                problem: None,
            },
            image: ImageReport {
                id: "ff".repeat(32),
                facts: None,
                problem: Some("it is damaged".to_owned()),
            },
            warnings: vec![Finding {
                kind: FindingKind::Generator,
                text: "two copies drew\u{1b} the same".to_owned(),
            }],
            instances: None,
            standby: None,
            boots_ns: None,
            schedules: Vec::new(),
        }
    }

    #[test]
    fn people_read_lines_and_no_control_characters() {
        let text = text(&report()).unwrap();
        assert!(text.starts_with("FUNCTION  f\n"), "{text}");
        for part in [
            "3, 1.0MiB in 2 blobs",
            "ffffffffffffffff cannot be used: it is damaged",
            "WARNING   two copies drew\\x1b the same",
            "no daemon serves it",
            "KEY = \"***\"",
            "memory = ",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        assert!(text.contains("\n  TERM=a\\x1b\\x0ab\n"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }

    #[test]
    fn a_function_that_was_pulled_says_from_where() {
        let (reference, digest) = ("registry.example/f:1".to_owned(), "sha256:ab".to_owned());
        let origin = Origin { reference, digest, is_signed: false };
        let report = Report { pulled_as: Some(origin), ..report() };
        let text = text(&report).unwrap();
        assert!(text.contains("pulled as registry.example/f:1, not signed, sha256:ab"), "{text}");
    }

    #[test]
    fn programs_read_what_is_known_and_why_the_rest_is_not() {
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["rootfs"]["files"], 3);
        assert!(json["rootfs"].get("problem").is_none());
        assert_eq!(json["image"]["problem"], "it is damaged");
        assert!(json["image"].get("path").is_none());
        assert!(json["instances"].is_null() && json["boots_ns"].is_null());
        assert_eq!(json["config"]["env"]["KEY"], "***");
    }
}
