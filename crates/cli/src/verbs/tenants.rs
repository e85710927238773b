//! `thaw tenants`: what the functions of each sharing domain use together.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output::{self, Table, size};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use thaw_home::config::{ByteSize, Quotas};
use thaw_node::tenants::TenantReport;

/// Show what tenants use and what they may use.
///
/// A tenant is all functions of a sharing domain (`thaw build --domain`, or [sharing] of
/// thaw.toml); all functions without a domain are one, too. The operator sets quotas in
/// $THAW_HOME/tenants.toml:
///
///   [default]               # every tenant that has no table of its own
///   instances = 20          # at a time, those kept ready and templates included
///   memory = "4GiB"         # sum of their memory limits
///
///   [domain.customer-7]     # what is left out is as in [default]
///   memory = "unlimited"
///   cpu_time = "10m per 1h" # of all instances in each period
///   store = "10GiB"         # files and images, counted by `thaw build`
///   egress = { connections = 200, per_second = 50 }
///
///   [shared]                # functions without a domain
///   instances = 50
///
/// The daemon reads the file when it starts, at SIGHUP, and after each `thaw build`.
/// docs/tenants.md has all of it.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "Examples:\n  \
    thaw tenants\n  \
    thaw tenants --json\n  \
    thaw tenants --check /etc/thaw/tenants.toml.new"
)]
pub struct Arguments {
    /// Only say whether this file of quotas is valid.
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    check: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    if let Some(file) = &arguments.check {
        return check(file);
    }
    let tenants: Vec<TenantReport> = Daemon::find(&arguments.daemon)?.get("/tenants")?;
    if arguments.json {
        output::print_json(&tenants)?;
    } else {
        output::print(&table(&tenants))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn check(file: &Path) -> Outcome {
    // A file that is missing is no error to the daemon.
    if !file.exists() {
        return Err(Failure::failed(format!("{} is not there", file.display())));
    }
    let quotas = Quotas::load(file).map_err(Failure::failed)?;
    let count = quotas.domains().count();
    output::print(&format!("{} is valid, with tables for {count} domains\n", file.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn table(tenants: &[TenantReport]) -> String {
    let mut table = Table::new(&[
        "DOMAIN",
        "FUNCTIONS",
        "INSTANCES",
        "MEMORY",
        "USED",
        "CPU TIME",
        "STORE",
        "SWAP",
        "QUEUE",
        "VOLUMES",
        "EGRESS",
        "REFUSED",
    ]);
    for tenant in tenants {
        let quota = &tenant.quota;
        table.row(vec![
            tenant
                .domain
                .as_ref()
                .map_or_else(|| "-".to_owned(), |domain| domain.name().to_string()),
            tenant.functions.to_string(),
            of(&tenant.instances.to_string(), quota.instances),
            of(&size(tenant.memory_reserved), quota.memory.map(ByteSize::bytes).map(size)),
            size(tenant.memory_used),
            cpu_time(tenant),
            of(&size(tenant.store), quota.store.map(ByteSize::bytes).map(size)),
            of(&size(tenant.swap), quota.swap.map(ByteSize::bytes).map(size)),
            of(&size(tenant.queue), quota.queue.map(ByteSize::bytes).map(size)),
            of(&size(tenant.volumes), quota.volumes.map(ByteSize::bytes).map(size)),
            of(&tenant.egress_connections.to_string(), quota.egress_connections),
            tenant.refused.values().sum::<u64>().to_string(),
        ]);
    }
    table.text()
}

/// What is used, and what may be used if that is bounded.
fn of(used: &str, quota: Option<impl ToString>) -> String {
    match quota {
        Some(quota) => format!("{used}/{}", quota.to_string()),
        None => used.to_owned(),
    }
}

/// In the present period, or since the daemon started.
fn cpu_time(tenant: &TenantReport) -> String {
    let seconds = |ms: u64| format!("{:.1}s", Duration::from_millis(ms).as_secs_f64());
    match (tenant.cpu_period, tenant.quota.cpu_time) {
        (Some(period), Some(quota)) => of(&seconds(period.used_ms), Some(quota)),
        _ => seconds(tenant.cpu_ms),
    }
}
