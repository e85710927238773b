//! `thaw import`: a directory or a container image becomes a stored root file system.

use super::download::{self, ProgressLine, SizeArguments};
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use thaw_build::container;
use thaw_home::home::Home;
use thaw_home::rootfs;
use thaw_oci::Layout;
use thaw_store::{Name, Store};

/// Import a directory or a container image as a root file system with a name.
///
/// Container images come as OCI layouts (directories, or archives of them) and as archives of
/// `docker save` or `podman save`. Functions and `thaw run` then use them by their name, and share
/// their files.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw import ./alpine alpine && thaw run alpine -- /bin/sh\n  \
    docker save -o app.tar app:1 && thaw import app.tar app:1 && thaw run app:1")]
pub struct Arguments {
    /// The directory or archive.
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// The name. An image may have one as in a registry (debian:12), by which all commands find it
    /// then as if it had been pulled.
    name: String,
    /// Which image, if there are several: its tag.
    #[arg(long)]
    tag: Option<String>,
    #[command(flatten)]
    size: SizeArguments,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let store = Store::open(&Home::from_environment()?.store())?;
    match arguments.path.is_dir() && !Layout::is_layout(&arguments.path) {
        true => directory(arguments, &store),
        false => image(arguments, &store),
    }
}

fn image(arguments: &Arguments, store: &Store) -> Outcome {
    let Arguments { path, name, tag, size, json } = arguments;
    let mut line = ProgressLine::new();
    let show = &mut |progress| line.show(&progress);
    let imported = container::import(store, path, tag.as_deref(), name, size.limits(), show);
    line.finish();
    let (image, report) = imported?;
    download::report(&image, &report, *json)?;
    Ok(ExitCode::SUCCESS)
}

fn directory(arguments: &Arguments, store: &Store) -> Outcome {
    if let (Err(_), Some((name, tag))) =
        (Name::new(&arguments.name), arguments.name.rsplit_once(':'))
    {
        return Err(Failure::failed(format!(
            "a directory is stored under a name without a tag, which only container images have; \
             name it `{name}-{tag}`"
        )));
    }
    let (index, report) = rootfs::import(store, &arguments.path, &arguments.name, &mut |_| {})?;
    if arguments.json {
        output::print_json(&json!({
            "name": arguments.name,
            "rootfs": index.to_string(),
            "files": report.files,
            "bytes": report.bytes,
        }))?;
    } else {
        let mib = report.bytes as f64 / f64::from(1 << 20);
        output::print(&format!(
            "imported {} files, {mib:.1} MiB, as {}\n",
            report.files, arguments.name
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
