//! `thaw list`: the functions.

use super::schedule;
use crate::client::Daemon;
use crate::failure::{Failure, Outcome};
use crate::output::{self, Table, ago};
use clap::Args;
use serde::Serialize;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::process::ExitCode;
use thaw_daemon::admin::FunctionInfo;
use thaw_home::config::EntryKind;
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_node::pulls::Fetching;
use thaw_node::triggers::ScheduleInfo;
use thaw_sandbox::escape;
use thaw_store::{FunctionRecord, Share, Store};

/// List the functions: how clients reach them, and what the daemon makes of them.
///
/// The names, versions, kinds, addresses and times of the builds are of the store, so that they are shown
/// without a daemon, too. `HOST at ADDRESS`: requests with this `Host` at the gateway's address, or another one
/// that `gateway.toml` leads there.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw list\n  thaw ls --json | jq -r '.[].name'")]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Listed {
    name: String,
    kind: Option<EntryKind>,
    /// The number of its active version.
    version: u32,
    /// Other versions that get a share of its requests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    split: Vec<Share>,
    /// Its own address; without one, requests find it by its host name, at the gateway's.
    listen: Option<SocketAddr>,
    /// The gateway's address, if requests find it there by its host name, and a daemon serves it.
    #[serde(skip_serializing_if = "Option::is_none")]
    gateway: Option<SocketAddr>,
    state: State,
    /// Live instances.
    instances: usize,
    /// Instances that were booted ahead.
    ready: usize,
    /// When it was built, in milliseconds since 1970.
    built_ms: u64,
    /// When the first of its schedules fires next, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_ms: Option<u64>,
    /// How the rest of it comes, if only a part is here.
    #[serde(skip_serializing_if = "Option::is_none")]
    fetching: Option<Fetching>,
    /// Why it is not served as it should be, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum State {
    /// The daemon has it.
    Served,
    /// The daemon has it, and the rest of it is being pulled.
    Partial,
    /// It gets no requests for a while, since its instances have crashed again and again.
    BacksOff,
    /// The daemon cannot serve it, or its newest build.
    Problem,
    /// No daemon serves it.
    NotServed,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Partial => "partial",
            Self::BacksOff => "backs off",
            Self::Problem => "problem",
            Self::NotServed => "not served",
        }
    }
}

pub fn run(arguments: &Arguments) -> Outcome {
    let home = Home::existing()?;
    let found = Store::open(&home.store())?.list_functions()?;
    let mut next: HashMap<String, u64> = HashMap::new();
    let mut served: HashMap<String, FunctionInfo> = match Daemon::running(&home) {
        Some(daemon) => {
            // A queue that cannot be used is no reason to list nothing.
            let schedules: Vec<ScheduleInfo> = daemon.get("/schedules").unwrap_or_default();
            for schedule in schedules {
                if let Some(time) = schedule.next_ms {
                    let first = next.entry(schedule.function).or_insert(time);
                    *first = time.min(*first);
                }
            }
            let all: Vec<FunctionInfo> = daemon.get("/functions")?;
            all.into_iter().map(|info| (info.name.to_string(), info)).collect()
        }
        None => HashMap::new(),
    };
    let listed = found.records.into_iter().map(|record| {
        let info = served.remove(record.name.as_str());
        let next_ms = next.get(record.name.as_str()).copied();
        Listed { next_ms, ..Listed::new(record, info) }
    });
    let mut listed: Vec<Listed> = listed.collect();
    // Those are not in the store before all of them is here.
    let partial = served.into_values().filter(|info| info.fetching.is_some());
    listed.extend(partial.map(Listed::partial));
    let gateway = home.daemon().map(|daemon| daemon.gateway);
    for one in &mut listed {
        one.gateway = gateway.filter(|_| one.is_found_by_name());
    }
    listed.sort_by(|one, other| one.name.cmp(&other.name));
    print(arguments, &listed)?;
    for (name, error) in found.damaged {
        eprintln!("thaw: `{name}` cannot be read ({error}); build it again, or remove it");
    }
    Ok(ExitCode::SUCCESS)
}

fn print(arguments: &Arguments, listed: &[Listed]) -> Result<(), Failure> {
    if arguments.json {
        return output::print_json(&listed);
    }
    output::print(&table(listed))?;
    for one in listed {
        if let Some(problem) = &one.problem {
            output::print(&format!("\n{}: {}\n", one.name, escape(problem.as_bytes())))?;
        }
    }
    Ok(())
}

impl Listed {
    fn new(record: FunctionRecord, info: Option<FunctionInfo>) -> Self {
        let (name, built_ms) = (record.name.to_string(), record.created_ms);
        let (version, split) = (record.number, record.split.clone());
        let built = BuiltFunction::from_record(record);
        let (config, damage) = match built {
            Ok(built) => (Some(built.function.config), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let fetching = info.as_ref().and_then(|info| info.fetching.clone());
        let problem = damage.or_else(|| info.as_ref().and_then(|info| info.problem.clone()));
        let problem = problem.or_else(|| fetching.as_ref()?.problem.clone());
        let state = match &info {
            _ if problem.is_some() => State::Problem,
            Some(info) if info.backs_off_ms.is_some() => State::BacksOff,
            Some(info) if info.fetching.is_some() => State::Partial,
            Some(_) => State::Served,
            None => State::NotServed,
        };
        Self {
            name,
            kind: config.as_ref().map(|config| config.entry.kind),
            version,
            split,
            listen: config.and_then(|config| config.listen),
            gateway: None,
            state,
            instances: info.as_ref().map_or(0, |info| info.instances),
            ready: info.map_or(0, |info| info.ready.len()),
            built_ms,
            next_ms: None,
            fetching,
            problem,
        }
    }

    /// One that is not in the store yet.
    fn partial(info: FunctionInfo) -> Self {
        let problem = info.problem.or_else(|| info.fetching.as_ref()?.problem.clone());
        Self {
            name: info.name.to_string(),
            kind: Some(info.kind),
            version: info.version,
            split: Vec::new(),
            listen: info.listen,
            gateway: None,
            state: if problem.is_some() { State::Problem } else { State::Partial },
            instances: info.instances,
            ready: info.ready.len(),
            built_ms: 0,
            next_ms: None,
            fetching: info.fetching,
            problem,
        }
    }
}

impl Listed {
    /// Whether requests find it by its host name.
    fn is_found_by_name(&self) -> bool {
        let is_http = matches!(self.kind, Some(EntryKind::Http | EntryKind::Stdin));
        is_http && self.listen.is_none() && self.state != State::NotServed
    }

    /// How clients reach it, for people.
    fn address(&self) -> String {
        match (self.listen, self.gateway) {
            (Some(address), _) => address.to_string(),
            (None, Some(gateway)) => format!("{} at {gateway}", self.name),
            (None, None) => "-".to_owned(),
        }
    }
}

fn table(listed: &[Listed]) -> String {
    let titles =
        ["NAME", "VERSION", "KIND", "ADDRESS", "STATE", "INSTANCES", "READY", "BUILT", "NEXT"];
    let mut table = Table::new(&titles);
    for one in listed {
        table.row(vec![
            one.name.clone(),
            version(one.version, &one.split),
            one.kind.map_or("-", EntryKind::name).to_owned(),
            one.address(),
            match (&one.fetching, one.state) {
                (Some(fetching), State::Partial) if fetching.of > 0 => {
                    format!("partial, {} %", fetching.bytes.saturating_mul(100) / fetching.of)
                }
                (_, state) => state.name().to_owned(),
            },
            one.instances.to_string(),
            one.ready.to_string(),
            match one.built_ms {
                0 => "-".to_owned(),
                built_ms => format!("{} ago", ago(built_ms)),
            },
            schedule::time(one.next_ms),
        ]);
    }
    table.text()
}

/// The number of the active version, and which others get requests.
fn version(active: u32, split: &[Share]) -> String {
    let others = split.iter().map(|share| match share.percent {
        0 => format!(", {} by header", share.version),
        percent => format!(", {} at {percent}%", share.version),
    });
    std::iter::once(active.to_string()).chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_versions_that_get_requests_are_shown() {
        let share = |version, percent| Share { version, percent, header: None };
        assert_eq!(version(3, &[]), "3");
        assert_eq!(version(3, &[share(4, 10), share(5, 0)]), "3, 4 at 10%, 5 by header");
    }
}
