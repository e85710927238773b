//! Showing sandboxes.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output::{self, Table};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_node::remote::{NetworkUsage, SandboxVolume};
use thaw_node::sandboxes::{OnTimeout, SandboxInfo, SandboxUsage};

/// `thaw sandbox list`.
pub fn list(daemon: &DaemonArguments, json: bool) -> Outcome {
    let all: Vec<SandboxInfo> = Daemon::find(daemon)?.get("/sandboxes")?;
    if json {
        output::print_json(&all)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(&["NAME", "INSTANCE", "OF", "STATE", "AGE", "TIMEOUT"]);
    all.iter().for_each(|info| table.row(row(info).into()));
    output::print(&table.text())?;
    Ok(ExitCode::SUCCESS)
}

fn row(info: &SandboxInfo) -> [String; 6] {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let age = now.saturating_sub(Duration::from_millis(info.created_ms)).as_secs();
    [
        info.name.clone(),
        info.instance.to_string(),
        info.function.to_string(),
        info.state.clone().unwrap_or_default(),
        format!("{age} s"),
        info.timeout_s.map_or_else(|| "never".to_owned(), |seconds| format!("{seconds} s")),
    ]
}

/// Bytes of its memory that are in a swap file, if there are any.
pub fn swapped(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        _ => format!(", and {} in a swap file", output::size(bytes)),
    }
}

/// What a sandbox uses, as a line.
fn usage(usage: &SandboxUsage) -> String {
    let memory = usage.memory_bytes.map_or_else(|| "none".to_owned(), output::size);
    let swapped = swapped(usage.swapped_bytes);
    let cpu = usage.cpu_ms.map_or_else(
        || "CPU time is not counted".to_owned(),
        |ms| format!("{}.{:03} s of CPU time", ms / 1000, ms % 1000),
    );
    let most = output::size(usage.memory_max_bytes);
    let cpus = match usage.cpus {
        1 => "1 processor".to_owned(),
        cpus => format!("up to {cpus} processors"),
    };
    format!("\nuses: {memory} of {most} memory{swapped}, {cpu} on {cpus}")
}

/// What its connections have carried, as a line.
fn network(network: &NetworkUsage) -> String {
    let NetworkUsage { sent_bytes, received_bytes } = *network;
    format!("\nTCP: {} sent, {} received", output::size(sent_bytes), output::size(received_bytes))
}

/// A volume that it has, as a line.
fn volume(volume: &SandboxVolume) -> String {
    let access = if volume.read_only { ", read-only" } else { "" };
    format!("\nvolume {} at {}{access}", volume.name, volume.path)
}

/// `thaw sandbox show`.
pub fn show(info: &SandboxInfo, json: bool) -> Outcome {
    output::print_done(json, info, |info| {
        let [name, instance, of, state, age, timeout] = row(info);
        let metadata: String =
            info.metadata.iter().map(|(name, value)| format!("\n  {name} = {value}")).collect();
        let egress = info.egress.as_ref().map(|egress| {
            let rules = match egress.rules.allow.len() + egress.rules.exempt.len() {
                0 => "no rule allows any".to_owned(),
                1 => "1 rule allows some".to_owned(),
                rules => format!("{rules} rules allow some"),
            };
            format!("\nconnections: {rules}; allowed {}, denied {}", egress.reached, egress.denied)
        });
        let egress = egress.unwrap_or_default();
        let network = info.network.as_ref().map(network).unwrap_or_default();
        let usage = info.usage.as_ref().map(usage).unwrap_or_default();
        let kept = info.memory_kept.as_ref().map(|why| {
            format!("\nit is paused and keeps its memory, which could not be written: {why}")
        });
        let kept = kept.unwrap_or_default();
        let version = match info.version {
            0 => String::new(),
            version => format!(" version {version}"),
        };
        let volumes: String = info.volumes.iter().map(volume).collect();
        let then = match (info.timeout_s, info.on_timeout) {
            (None, _) => "",
            (Some(_), OnTimeout::Pause) => ", then it is paused",
            (Some(_), OnTimeout::Kill) => ", then it ends",
        };
        let text = format!(
            "{name}: instance {instance} of {of}{version}, {state}, made {age} ago\n\
             timeout: {timeout}{then}{kept}{usage}{egress}{network}{volumes}{metadata}"
        );
        text.lines()
            .map(|line| thaw_sandbox::escape(line.as_bytes()))
            .collect::<Vec<_>>()
            .join("\n")
    })
}
