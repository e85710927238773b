//! `thaw images`: what is in the store.

use crate::failure::Outcome;
use crate::output::{self, Table};
use clap::Args;
use std::process::ExitCode;
use thaw_node::admin::{ImageSummary, summarize_images};
use thaw_node::home::Home;
use thaw_store::Store;

/// List the stored images and the functions that they belong to.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw images")]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let store = Store::open(&Home::from_environment()?.store())?;
    let images = summarize_images(&store)?;
    if arguments.json {
        output::print_json(&images)?;
    } else {
        output::print(&table(&images))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(images: &[ImageSummary]) -> String {
    let mut table = Table::new(&["FUNCTION", "IMAGE", "ON DISK", "WORKING SET"]);
    for image in images {
        let functions = match image.functions.is_empty() {
            true => "-".to_owned(),
            false => image.functions.join(","),
        };
        table.row(vec![
            functions,
            image.image.chars().take(16).collect(),
            format!("{:.1} MiB", image.allocated as f64 / f64::from(1 << 20)),
            if image.has_working_set { "recorded" } else { "-" }.to_owned(),
        ]);
    }
    table.text()
}
