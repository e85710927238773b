//! `thaw pull`: an image of a registry becomes a stored root file system, a function a stored
//! function.

use super::build::{Display, serve_new_version};
use super::download::{self, ProgressLine, SizeArguments};
use super::limits::WeakLimitsArgument;
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;
use thaw_node::artifact::{self, Installed, PullEvent, PullOptions, Pulled, Refreeze};
use thaw_node::config::DomainName;
use thaw_node::home::Home;
use thaw_oci::Reference;
use thaw_store::Name;

/// Pull a container image or a frozen function from a registry.
///
/// `thaw run` and functions use an image by the name that it was pulled by. A function is stored
/// under its own name, or yours, and a running daemon serves it at once. Credentials are those of
/// `docker login` ($DOCKER_CONFIG or ~/.docker/config.json). $THAW_HOME/registries.toml names
/// mirrors, registries that speak plain HTTP or have certificates of their own, and keys that must
/// have signed what is pulled; docs/containers.md and docs/artifacts.md have all of it. An
/// interrupted pull goes on where it ended.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw pull docker.io/library/python:3.12-slim\n  \
    thaw pull localhost:5000/app:1 --name app\n  \
    thaw pull registry.example/functions/shop:3 --domain customer-7")]
pub struct Arguments {
    /// What to pull, as registry/repository:tag or @digest.
    #[arg(value_name = "REFERENCE")]
    image: Reference,
    /// A name of your own for it.
    #[arg(long)]
    name: Option<Name>,
    /// Functions: share equal files with functions of this domain only.
    #[arg(long, value_name = "NAME")]
    domain: Option<DomainName>,
    /// Functions: when to run the program to its entry point on this machine instead of taking the
    /// image: if the image cannot be used here (auto), never, or always.
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    refreeze: Refreeze,
    /// Functions: let it connect to the destinations of its [egress], although no key of
    /// registries.toml has signed it.
    #[arg(long)]
    allow_egress: bool,
    #[command(flatten)]
    size: SizeArguments,
    #[command(flatten)]
    weak_limits: WeakLimitsArgument,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let home = Home::from_environment()?;
    let options = PullOptions {
        name: arguments.name.clone(),
        domain: arguments.domain.clone(),
        refreeze: arguments.refreeze,
        allow_egress: arguments.allow_egress,
        weak_limits: arguments.weak_limits.chosen(),
        limits: arguments.size.limits(),
    };
    let mut line = ProgressLine::new();
    let mut display = Display::new(false);
    let pulled = artifact::pull(&home, &arguments.image, &options, &mut |event| match event {
        PullEvent::Progress(progress) => line.show(&progress),
        PullEvent::Build(event) => {
            line.finish();
            display.show(&event);
        }
        PullEvent::Note(note) => {
            line.finish();
            eprintln!("thaw: note: {note}");
        }
    });
    display.finish();
    line.finish();
    match pulled? {
        Pulled::Image(image, report) => download::report(&image, &report, arguments.json)?,
        Pulled::Function(installed) => {
            report(&installed, arguments.json)?;
            let name = installed.function.function.config.name.as_str();
            serve_new_version(&home, name, !arguments.json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn report(installed: &Installed, as_json: bool) -> Result<(), Failure> {
    let Installed { function, digest, is_signed, bytes, moved, refrozen } = installed;
    let config = &function.function.config;
    if as_json {
        return output::print_json(&json!({
            "function": config.name,
            "domain": config.sharing.domain,
            "digest": digest,
            "signed": is_signed,
            "image": function.image.to_string(),
            "rootfs": function.index.to_string(),
            "bytes": bytes,
            "moved": moved,
            "refrozen": refrozen,
        }));
    }
    let signed =
        if *is_signed { "signed by the key of its registry" } else { "not verified by a key" };
    output::print(&format!(
        "pulled function {}: {}, of which {} were moved, {signed}\n{digest}\n",
        config.name,
        output::size(*bytes),
        output::size(*moved),
    ))
}
