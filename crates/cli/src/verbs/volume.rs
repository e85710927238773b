//! `thaw volume`: directories that functions write to.

use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use clap::{Args, Subcommand};
use std::process::ExitCode;
use thaw_node::config::{ByteSize, FunctionName};
use thaw_node::home::Home;
use thaw_node::volumes::{VolumeInfo, VolumeStore};
use thaw_store::Name;

/// Make, list and remove volumes: directories whose files outlive the copies of functions.
///
/// A function finds those that [[volumes]] of its thaw.toml names at the paths that it gives
/// them. All its copies share them, and so do other functions that may use them. `thaw build`
/// makes a volume that is missing if thaw.toml gives its size.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw volume create uploads --size 10GiB --function shop\n  \
    thaw volume allow uploads shop-admin\n  \
    thaw volume list\n  \
    thaw volume remove uploads")]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Make a volume.
    Create {
        /// Its name.
        name: Name,
        /// Bytes that it may hold, as in 10GiB.
        #[arg(long, value_name = "BYTES")]
        size: ByteSize,
        /// A function that may use it; can be repeated.
        #[arg(long = "function", value_name = "NAME")]
        functions: Vec<FunctionName>,
    },
    /// Let a function use a volume, from its next deployment or start of the daemon on.
    Allow {
        /// The volume.
        name: Name,
        /// The function.
        function: FunctionName,
    },
    /// List all volumes.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show a volume as JSON.
    Show {
        /// The volume.
        name: Name,
    },
    /// Remove a volume with all its files.
    Remove {
        /// The volume.
        name: Name,
    },
}

pub fn run(arguments: &Arguments) -> Outcome {
    let volumes = VolumeStore::of(Home::from_environment()?);
    match &arguments.action {
        Action::Create { name, size, functions } => {
            volumes.create(name, *size, functions).map_err(Failure::failed)?;
        }
        Action::Allow { name, function } => {
            volumes.allow(name, function).map_err(Failure::failed)?;
        }
        Action::List { json } => {
            let found = volumes.list().map_err(Failure::failed)?;
            match json {
                true => output::print_json(&found)?,
                false => output::print(&table(&found))?,
            }
        }
        Action::Show { name } => {
            output::print_json(&volumes.show(name).map_err(Failure::failed)?)?;
        }
        Action::Remove { name } => volumes.remove(name).map_err(Failure::failed)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn table(volumes: &[VolumeInfo]) -> String {
    let mut table = Table::new(&["NAME", "USED", "SIZE", "IN USE", "FUNCTIONS"]);
    for volume in volumes {
        let functions: Vec<&str> = volume.functions.iter().map(FunctionName::as_str).collect();
        table.row(vec![
            volume.name.clone(),
            volume.used.to_string(),
            volume.size.to_string(),
            if volume.in_use { "yes" } else { "no" }.to_owned(),
            functions.join(" "),
        ]);
    }
    table.text()
}
