//! `thaw pull`: an image of a registry becomes a stored root file system.

use super::download::{self, ProgressLine, SizeArguments};
use crate::failure::Outcome;
use clap::Args;
use std::process::ExitCode;
use thaw_node::container;
use thaw_node::home::Home;
use thaw_oci::Reference;
use thaw_store::{Name, Store};

/// Pull a container image from a registry.
///
/// `thaw run` and functions then use it by the name that it was pulled by. Credentials are those of
/// `docker login` ($DOCKER_CONFIG or ~/.docker/config.json). $THAW_HOME/registries.toml names mirrors
/// and registries that speak plain HTTP or have certificates of their own; docs/containers.md has all
/// of it. An interrupted pull goes on where it ended.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw pull docker.io/library/python:3.12-slim\n  \
    thaw pull localhost:5000/app:1 --name app")]
pub struct Arguments {
    /// The image, as registry/repository:tag or @digest.
    #[arg(value_name = "IMAGE")]
    image: Reference,
    /// A name of your own for it.
    #[arg(long)]
    name: Option<Name>,
    #[command(flatten)]
    size: SizeArguments,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let Arguments { image, name, size, json } = arguments;
    let home = Home::from_environment()?;
    let store = Store::open(&home.store())?;
    let name = name.clone().unwrap_or_else(|| image.store_name());
    let mut line = ProgressLine::new();
    let show = &mut |progress| line.show(&progress);
    let pulled = container::pull(&home, &store, image, &name, size.limits(), show);
    line.finish();
    let (stored, report) = pulled?;
    download::report(&stored, &report, *json)?;
    Ok(ExitCode::SUCCESS)
}
