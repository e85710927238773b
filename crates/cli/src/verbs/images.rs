//! `thaw images`: what is in the store.

use crate::failure::Outcome;
use crate::output::{self, Table};
use clap::Args;
use std::process::ExitCode;
use thaw_daemon::admin::{ImageSummary, summarize_images};
use thaw_home::home::Home;
use thaw_store::{ImageForm, Store};

/// List the stored images, the functions and checkpoints that they belong to, and the images
/// that they differ from.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  thaw images")]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let store = Store::open(&Home::existing()?.store())?;
    let images = summarize_images(&store)?;
    if arguments.json {
        output::print_json(&images)?;
    } else {
        output::print(&table(&images))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(images: &[ImageSummary]) -> String {
    let mut table = Table::new(&["USED BY", "IMAGE", "DIFFERS FROM", "ON DISK", "WORKING SET"]);
    for image in images {
        let or_nothing = |names: Vec<String>| match names.is_empty() {
            true => "-".to_owned(),
            false => names.join(","),
        };
        let users = [&image.versions[..], &image.checkpoints].concat();
        // The parent stands for all others, which it has itself.
        let short = |name: &String| name.chars().take(16).collect::<String>();
        let parent = image.ancestors.last().map(short);
        table.row(vec![
            or_nothing(users),
            short(&image.image),
            or_nothing(parent.into_iter().collect()),
            format!("{:.1} MiB{}", image.allocated as f64 / f64::from(1 << 20), form(image.form)),
            if image.has_working_set { "recorded" } else { "-" }.to_owned(),
        ]);
    }
    table.text()
}

/// How an image lies on disk, unless as it is booted only.
fn form(form: ImageForm) -> &'static str {
    match form {
        ImageForm::Whole => "",
        ImageForm::Packed => " (packed)",
        ImageForm::Both => " (with packed form)",
    }
}
