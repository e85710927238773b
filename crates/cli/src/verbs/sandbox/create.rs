//! `thaw sandbox create`.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output;
use crate::verbs::build::{Display, serve_new_version};
use crate::verbs::{mounts, near};
use clap::{Args, ValueEnum};
use std::collections::BTreeMap;
use thaw_build::build::{BuildOptions, Trust, build};
use thaw_build::container;
use thaw_daemon::admin::FunctionInfo;
use thaw_home::config::{ByteSize, CONFIG_FILE, EgressRule, FunctionName, Isolation, TimeSpan};
use thaw_home::home::Home;
use thaw_node::remote::SandboxEgress;
use thaw_node::sandboxes::{NewSandbox, OnTimeout, SandboxInfo};
use thaw_oci::Reference;
use thaw_store::Store;

/// Make a sandbox of a function's image, of a container image, or of a checkpoint.
///
/// A function is one that the daemon serves; its sandbox begins where the function was frozen. Of
/// a container image nothing is run: its sandbox has no program until one is started in it. The
/// first sandbox of an image builds a function `sandbox-IMAGE` for that, which takes as long as
/// the image takes to be pulled; all others take milliseconds. With `--checkpoint` it begins where
/// the checkpoint was taken, with all files and processes of then.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sandbox create debian:12\n  \
    thaw sandbox create my-function --name box --timeout 10m --on-timeout kill\n  \
    thaw sandbox create debian:12 --allow-egress '*:443'\n  \
    thaw sandbox create debian:12 -v data:/data\n  \
    thaw sandbox create --checkpoint before --name box\n  \
    thaw sandbox create debian:12 --metadata owner=me --json")]
pub struct Arguments {
    /// A function, or a container image, by its name in the store or in a registry.
    #[arg(required_unless_present = "checkpoint", conflicts_with = "checkpoint")]
    image: Option<String>,
    /// A checkpoint that it begins where it was taken (`thaw sandbox checkpoint`); one that is not
    /// encrypted.
    #[arg(long, value_name = "NAME")]
    checkpoint: Option<String>,
    /// The name of the sandbox; one is made up without.
    #[arg(long, default_value = "")]
    name: String,
    /// How long it may be unused; then `--on-timeout` happens [default: for ever].
    #[arg(long, value_name = "DURATION")]
    timeout: Option<TimeSpan>,
    /// What happens then: it gives up its memory, or it ends.
    #[arg(long, value_enum, default_value_t = When::Pause)]
    on_timeout: When,
    /// Something to be remembered of it, NAME=VALUE.
    #[arg(long, value_name = "NAME=VALUE")]
    metadata: Vec<String>,
    /// A destination that it may connect to, in place of those of its function, such as
    /// `api.example.com:443`; may be given several times. `thaw sandbox egress` changes that while it
    /// runs.
    #[arg(long, visible_alias = "egress", value_name = "TARGET:PORTS")]
    allow_egress: Vec<EgressRule>,
    /// It may connect to nothing, whatever its function may.
    #[arg(long, conflicts_with = "allow_egress")]
    no_egress: bool,
    /// Mount a volume (`thaw volume`) of the function's tenant, to be written; with :ro, read-only.
    #[arg(long, short, value_name = "NAME:GUEST[:ro]")]
    volume: Vec<String>,
    /// Memory of a sandbox of a container image, files in it included; of a function's, its
    /// thaw.toml says.
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    memory: ByteSize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

/// How far the limits of a sandbox of an image may be raised: the node, and the tenant's quota, allow
/// less.
const MEMORY_MAX: ByteSize = ByteSize::mebibytes(64 << 10);
const CPU_MAX: u32 = 64;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum When {
    Pause,
    Kill,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    let metadata = arguments.metadata.iter().map(|text| pair(text));
    let volumes = mounts::of_sandbox(&arguments.volume)?;
    let new = NewSandbox {
        name: arguments.name.clone(),
        function: match &arguments.image {
            Some(image) => function(&daemon, image, arguments)?,
            None => String::new(),
        },
        checkpoint: arguments.checkpoint.clone(),
        timeout_s: arguments.timeout.map(|timeout| timeout.0.as_secs()),
        on_timeout: match arguments.on_timeout {
            When::Pause => OnTimeout::Pause,
            When::Kill => OnTimeout::Kill,
        },
        metadata: metadata.collect::<Result<BTreeMap<_, _>, _>>()?,
        egress: (arguments.no_egress || !arguments.allow_egress.is_empty()).then(|| {
            SandboxEgress { allow: arguments.allow_egress.clone(), ..SandboxEgress::default() }
        }),
        volumes,
        ..NewSandbox::default()
    };
    let info: SandboxInfo = daemon.send_json("POST", "/sandboxes", &new)?;
    note_isolation(&daemon, &info);
    output::print_done(arguments.json, &info, |info| info.name.clone())
}

/// Says so where a sandbox ends with the daemon: instances that serve one request do not sleep.
fn note_isolation(daemon: &Daemon, info: &SandboxInfo) {
    // The sandbox is there, whether this can be told or not.
    let functions: Vec<FunctionInfo> = daemon.get("/functions").unwrap_or_default();
    let is_its = |known: &&FunctionInfo| known.name == info.function;
    if functions.iter().find(is_its).is_some_and(|known| known.isolation == Isolation::Request) {
        eprintln!(
            "thaw: note: sandboxes of {} do not sleep, and end when the daemon is stopped; set \
             isolation = \"instance\" and persist = true in its thaw.toml",
            info.function
        );
    }
}

fn pair(text: &str) -> Result<(String, String), Failure> {
    let (name, value) = text
        .split_once('=')
        .ok_or_else(|| Failure::misused(format!("--metadata {text}: write NAME=VALUE")))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// The function that is meant, which is built if it is a container image that none was built of.
fn function(daemon: &Daemon, image: &str, arguments: &Arguments) -> Result<String, Failure> {
    let functions: Vec<FunctionInfo> = daemon.get("/functions")?;
    let serves = |name: &str| functions.iter().any(|known| known.name.as_str() == name);
    if serves(image) {
        return Ok(image.to_owned());
    }
    let is_made = serves(&function_name(image, arguments.memory)?);
    let close = near::closest(image, functions.iter().map(|known| known.name.as_str()));
    if arguments.daemon.is_named() && !is_made {
        let meant = close.map_or(String::new(), |close| format!(" (is `{close}` meant?)"));
        return Err(Failure::failed(format!(
            "that daemon serves no function `{image}`{meant}, and images are made into functions beside the \
             daemon only; run this there, without --admin",
        )));
    }
    let home = Home::from_environment()?;
    let may_be_function = image.parse::<FunctionName>().is_ok();
    if may_be_function
        && !is_made
        && container::find(&Store::open(&home.store())?, image)?.is_none()
    {
        eprintln!("thaw: {}", no_function(image, close));
    }
    function_of_image(daemon, image, arguments.memory, Display::new(arguments.json))
}

/// Said before a registry is asked for a name, which may be a slip.
fn no_function(image: &str, close: Option<&str>) -> String {
    let meant = close.map_or(String::new(), |close| format!(" (is `{close}` meant?)"));
    format!(
        "there is no function `{image}` here{meant}, and no container image of that name; looking for one in a registry"
    )
}

/// The function whose sandboxes have the files of a container image and so much memory. It is built if
/// there is none.
///
/// # Errors
/// The image is not there, or the daemon does not serve what was built.
pub(in crate::verbs) fn function_of_image(
    daemon: &Daemon,
    image: &str,
    memory: ByteSize,
    display: Display,
) -> Result<String, Failure> {
    memory.check_memory().map_err(Failure::misused)?;
    let name = function_name(image, memory)?;
    if !serves(daemon, &name)? {
        build_function(&name, image, memory, display)?;
    }
    Ok(name)
}

/// Whether a daemon serves a function of that name.
///
/// # Errors
/// It does not answer.
pub fn serves(daemon: &Daemon, name: &str) -> Result<bool, Failure> {
    let functions: Vec<FunctionInfo> = daemon.get("/functions")?;
    Ok(functions.iter().any(|known| known.name.as_str() == name))
}

/// What a function of an image is called.
fn function_name(image: &str, memory: ByteSize) -> Result<String, Failure> {
    let reference: Reference = image.parse().map_err(Failure::failed)?;
    let mib = memory.bytes() >> 20;
    let name = format!("sandbox-{}-{mib}m", reference.store_name().as_str());
    // A function's name has letters, digits and dashes.
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let name: String = name.chars().map(plain).collect();
    let tail = name.len().saturating_sub(60);
    Ok(if tail > 0 { format!("sb{}", &name[tail..]) } else { name })
}

fn build_function(
    name: &str,
    image: &str,
    memory: ByteSize,
    mut display: Display,
) -> Result<(), Failure> {
    let home = Home::from_environment()?;
    let image = toml::Value::String(image.to_owned());
    let text = format!(
        "name = \"{name}\"\nisolation = \"instance\"\npersist = true\n[entry]\nkind = \"sandbox\"\n\
         [runtime]\nimage = {image}\n[limits]\nmemory = \"{memory}\"\nmemory_max = \"{}\"\ncpu_max = {CPU_MAX}\n\
         instances = 10000\n",
        ByteSize(memory.bytes().max(MEMORY_MAX.bytes())),
    );
    let directory = home.work(name)?;
    std::fs::write(directory.join(CONFIG_FILE), text)?;
    // Nothing of it is run on this host.
    let options = BuildOptions { trust: Trust::Trusted, ..BuildOptions::default() };
    let built = build(&home, &directory, &options, &mut |event| display.show(&event));
    display.finish();
    built?;
    serve_new_version(&home, name, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_told_from_an_image() {
        let said = no_function("my-fnction", Some("my-function"));
        assert!(
            said.starts_with("there is no function `my-fnction` here (is `my-function` meant?)"),
            "{said}"
        );
        assert!(said.ends_with("looking for one in a registry"), "{said}");
        assert!(!no_function("debian", None).contains("meant"));
    }
}
