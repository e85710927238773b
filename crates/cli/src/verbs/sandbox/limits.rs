//! `thaw sandbox limits`.

use super::path;
use super::table::swapped;
use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output;
use crate::verbs::numbers::count;
use clap::Args;
use std::num::NonZeroU32;
use std::process::ExitCode;
use thaw_home::config::ByteSize;
use thaw_node::remote::{LimitsChange, LimitsInfo};

/// Show or change how much a sandbox may use, while it runs.
///
/// It gets no more than `memory_max` and `cpu_max` in `[limits]` of its function's thaw.toml, and
/// than the quota of its tenant leaves. Memory that it uses is not taken from it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sandbox limits box\n  \
    thaw sandbox limits box --memory 1GiB --cpus 2")]
pub struct Arguments {
    /// The sandbox, by its name or the number of its instance.
    name: String,
    /// Memory that it may have, files in it included.
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Processors' worth of CPU time that it may use.
    #[arg(long, value_name = "COUNT", value_parser = count::<NonZeroU32>)]
    cpus: Option<NonZeroU32>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    let path = format!("{}/limits", path(&arguments.name));
    let change = LimitsChange {
        memory_bytes: arguments.memory.map(ByteSize::bytes),
        cpus: arguments.cpus.map(NonZeroU32::get),
    };
    let info: LimitsInfo = match change.is_empty() {
        true => daemon.get(&path)?,
        false => daemon.send_json("PUT", &path, &change)?,
    };
    if arguments.json {
        output::print_json(&info)?;
    } else {
        output::print(&summary(&info))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(info: &LimitsInfo) -> String {
    let memory = ByteSize(info.memory_bytes);
    let most = ByteSize(info.memory_most_bytes);
    let has = |bytes| format!("; it has {}{}", output::size(bytes), swapped(info.swapped_bytes));
    let used = info.memory_used_bytes.map(has).unwrap_or_default();
    format!("memory {memory}, up to {most}{used}\ncpus {}, up to {}\n", info.cpus, info.cpus_most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_has_and_what_it_may_be_given_are_shown() {
        let info = LimitsInfo {
            memory_bytes: 512 << 20,
            cpus: 1,
            memory_most_bytes: 64 << 30,
            cpus_most: 8,
            memory_used_bytes: None,
            swapped_bytes: 0,
        };
        assert_eq!(summary(&info), "memory 512MiB, up to 64GiB\ncpus 1, up to 8\n");
        let info = LimitsInfo { memory_used_bytes: Some(3 << 19), ..info };
        let first = "memory 512MiB, up to 64GiB; it has 1.5MiB";
        assert_eq!(summary(&info), format!("{first}\ncpus 1, up to 8\n"));
        let hibernated = LimitsInfo { swapped_bytes: 2 << 20, ..info };
        assert!(summary(&hibernated).contains("it has 1.5MiB, and 2.0MiB in a swap file\n"));
    }
}
