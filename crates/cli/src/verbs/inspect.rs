//! `thaw inspect`: everything about one function.

use crate::client::Daemon;
use crate::failure::Outcome;
use crate::output;
use clap::Args;
use serde_json::{Value, json};
use std::process::ExitCode;
use thaw_abi::image::{SOURCE_BLOB, SOURCE_IMAGE, SOURCE_ZERO};
use thaw_node::admin::FunctionDetail;
use thaw_node::function::BuiltFunction;
use thaw_node::home::Home;
use thaw_sandbox::{Fit, Image, cpu_features};
use thaw_store::Store;

/// Show everything about a function: its configuration, files and image, and,
/// if a daemon is running, its instances and recent boots.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw inspect hello-python")]
pub struct Arguments {
    /// The function.
    name: String,
    /// Print JSON, as without this option.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    // What is shown is a tree, and JSON is how people read trees, too.
    let _ = arguments.json;
    let home = Home::from_environment()?;
    let store = Store::open(&home.store())?;
    let function = BuiltFunction::read(&store, &arguments.name)?;
    let detail: Option<FunctionDetail> = match Daemon::running(&home) {
        Some(daemon) => daemon.get(&format!("/functions/{}", arguments.name)).ok(),
        None => None,
    };
    output::print_json(&json!({
        "name": function.function.config.name,
        "built_from": function.function.source,
        "built_ms": function.created_ms,
        "config": function.function.config.without_secrets(),
        "environment": function.function.environment_without_secrets(),
        "rootfs": rootfs(&store, &function),
        "image": image(&store, &function),
        "instances": detail.as_ref().map(|detail| &detail.live),
        "standby": detail.as_ref().map(|detail| &detail.standby),
        "boots_ns": detail.as_ref().map(|detail| &detail.boots),
    }))?;
    Ok(ExitCode::SUCCESS)
}

fn rootfs(store: &Store, function: &BuiltFunction) -> Value {
    match store.open_index(function.index) {
        Ok(index) => {
            let view = index.index();
            json!({
                "index": function.index.to_string(),
                "files": view.inodes().len(),
                "blobs": view.blobs().len(),
                "bytes": view.blobs().iter().map(|blob| blob.size).sum::<u64>(),
            })
        }
        Err(error) => json!({"index": function.index.to_string(), "problem": error.to_string()}),
    }
}

fn image(store: &Store, function: &BuiltFunction) -> Value {
    let id = function.image.to_string();
    let path = store.root().join("images").join(&id);
    let opened = store.open_image(function.image).map_err(|error| error.to_string());
    let image = match opened.and_then(|file| Image::open(file).map_err(|error| error.to_string())) {
        Ok(image) => image,
        Err(problem) => return json!({"id": id, "problem": problem}),
    };
    let bytes = |source: u32| -> u64 {
        image.mappings().iter().filter(|m| m.source == source).map(|m| m.len).sum()
    };
    let kernel_build = match thaw_node::debug::kernel() {
        Ok(kernel) => kernel.build_id(),
        Err(error) => return json!({"id": id, "problem": error.to_string()}),
    };
    let fit =
        Fit { kernel_build, index_hash: *function.index.as_bytes(), cpu_features: cpu_features() };
    json!({
        "id": id,
        "path": path,
        "version": image.header().version,
        "file_len": image.header().file_len,
        "mappings": image.mappings().len(),
        "bytes_of_image": bytes(SOURCE_IMAGE),
        "bytes_of_blobs": bytes(SOURCE_BLOB),
        "bytes_of_zeros": bytes(SOURCE_ZERO),
        "blobs": image.blobs().len(),
        "working_set_bytes": store.working_set(function.image).ok().flatten().map(|set| set.len()),
        "problem": image.check_fit(&fit).err().map(|error| error.to_string()),
    })
}
