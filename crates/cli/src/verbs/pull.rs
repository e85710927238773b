//! `thaw pull`: an image of a registry becomes a stored root file system, a function a stored
//! function.

use super::build::{Display, say_activation, serve_new_version};
use super::download::{self, ProgressLine, SizeArguments};
use super::limits::WeakLimitsArgument;
use crate::client::Daemon;
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;
use thaw_build::artifact::{self, Installed, Part, PullEvent, PullOptions, Pulled, Refreeze};
use thaw_home::config::DomainName;
use thaw_home::function::StoredFunction;
use thaw_home::home::Home;
use thaw_home::volumes::VolumeStore;
use thaw_node::catalog::Reload;
use thaw_oci::Reference;
use thaw_store::{Activation, Name};

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
    thaw pull registry.example/functions/shop:3 --domain customer-7\n  \
    thaw pull registry.example/functions/shop:3 --lazy")]
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
    /// Functions: have a running daemon serve it as soon as what a boot needs is here. The rest comes
    /// when it is touched, and meanwhile. This command ends when all of it is here and stored; if it
    /// ends before, the daemon has the rest fetched.
    #[arg(long, conflicts_with = "refreeze")]
    lazy: bool,
    /// Functions: leave the requests with the version that has them; see `thaw activate` and `thaw split`.
    #[arg(long, conflicts_with = "lazy")]
    no_activate: bool,
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
        activation: if arguments.no_activate { Activation::Later } else { Activation::Now },
    };
    let mut line = ProgressLine::new();
    let mut display = Display::new(false);
    let on_event = &mut |event: PullEvent<'_>| match event {
        PullEvent::Progress(progress) => line.show(&progress),
        PullEvent::Build(event) => {
            line.finish();
            display.show(&event);
        }
        PullEvent::Note(note) => {
            line.finish();
            eprintln!("thaw: note: {note}");
        }
    };
    let image = &arguments.image;
    let pulled = match arguments.lazy {
        false => artifact::pull(&home, image, &options, on_event),
        true => {
            let on_served = &mut |function: &StoredFunction, part| {
                if part == Part::Run {
                    serve_part(&home, function.config.name.as_str(), arguments.json);
                } else if let Some(daemon) = Daemon::running(&home) {
                    // Once more below, where it is said if it fails.
                    let _: Result<Reload, Failure> = daemon.post("/reload");
                }
            };
            artifact::pull_lazily(&home, image, &options, on_event, (on_served, None))
        }
    };
    display.finish();
    line.finish();
    match pulled? {
        Pulled::Image(image, report) => download::report(&image, &report, arguments.json)?,
        Pulled::Function(installed) => {
            report(&installed, arguments.json)?;
            say_lacking_volume(&home, &installed.function.function);
            let name = installed.function.function.config.name.as_str();
            if installed.is_active {
                serve_new_version(&home, name, !arguments.json)?;
            }
            if arguments.no_activate && !arguments.json {
                say_activation(&home, &installed.function, installed.is_active);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Says which volume a function mounts that is not here: volumes do not come along.
fn say_lacking_volume(home: &Home, function: &StoredFunction) {
    let config = &function.config;
    if let Some(lacking) = VolumeStore::of(home.clone()).lacking(&config.name, &config.volumes) {
        eprintln!("thaw: note: {lacking}");
    }
}

/// Has a daemon serve a function of which only a part is here.
fn serve_part(home: &Home, name: &str, as_json: bool) {
    let served = Daemon::running(home).map(|daemon| daemon.post::<Reload>("/reload"));
    match served {
        Some(Ok(reload)) => match reload.broken.get(name) {
            Some(why) => eprintln!("thaw: note: it is not served before all of it is here: {why}"),
            None if as_json => {}
            None => eprintln!("the daemon serves {name}; the rest of it comes now"),
        },
        Some(Err(failure)) => {
            let why = failure.message().unwrap_or("the daemon does not answer");
            eprintln!("thaw: note: it is not served before all of it is here: {why}");
        }
        None => {
            eprintln!("thaw: note: no daemon runs that could serve it before all of it is here")
        }
    }
}

fn report(installed: &Installed, as_json: bool) -> Result<(), Failure> {
    let Installed { function, is_active, digest, is_signed, bytes, moved, refrozen } = installed;
    let config = &function.function.config;
    if as_json {
        return output::print_json(&json!({
            "function": config.name,
            "version": function.number,
            "active": is_active,
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
