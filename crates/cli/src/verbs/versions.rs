//! `thaw versions`: the versions of a function, and which of them get its requests.

use super::deployment::Telling;
use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use clap::Args;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_daemon::deploy::{self, Deployment, VersionInfo};
use thaw_home::home::Home;
use thaw_sandbox::escape;
use thaw_store::Store;

/// List the versions of a function, and say which of them get its requests.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw versions hello-python\n  \
    thaw versions hello-python --json | jq .active")]
pub struct Arguments {
    /// The function.
    name: String,
    #[command(flatten)]
    telling: Telling,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let Arguments { name, telling } = arguments;
    let deployment = match telling.daemon()? {
        Some(daemon) => daemon.get(&format!("/functions/{}/versions", output::escape(name)))?,
        None => {
            let store = Store::open(&Home::existing()?.store())?;
            deploy::versions(&store, name).map_err(Failure::failed)?
        }
    };
    telling.tell(&deployment, |deployment| text(deployment).trim_end().to_owned())
}

fn text(deployment: &Deployment) -> String {
    let titles = ["VERSION", "LABEL", "BUILT", "REQUESTS", "INSTANCES", "SERVED", "FAILED", "NOTE"];
    let mut table = Table::new(&titles);
    for version in &deployment.versions {
        let count = |count: Option<u64>| count.map_or("-".to_owned(), |count| count.to_string());
        table.row(vec![
            version.number.to_string(),
            version.label.clone().unwrap_or_else(|| "-".to_owned()),
            ago(version.created_ms),
            share(version),
            count(version.instances.map(|instances| instances as u64)),
            count(version.requests.map(|requests| requests.all)),
            count(version.requests.map(|requests| requests.failed)),
            note(deployment, version),
        ]);
    }
    // Reasons may quote what a program did.
    table.text().lines().map(|line| escape(line.as_bytes()) + "\n").collect()
}

/// Which requests a version gets.
fn share(version: &VersionInfo) -> String {
    let header = version.header.as_ref().map(|header| format!("{}={}", header.name, header.value));
    let percent = (version.percent > 0).then(|| format!("{}%", version.percent));
    let parts: Vec<String> = percent.into_iter().chain(header).collect();
    if parts.is_empty() { "-".to_owned() } else { parts.join(", ") }
}

fn note(deployment: &Deployment, version: &VersionInfo) -> String {
    if let Some(problem) = &version.problem {
        return problem.clone();
    }
    if version.number == deployment.active {
        return "active".to_owned();
    }
    if Some(version.number) == deployment.before { "active before" } else { "" }.to_owned()
}

/// How long ago a time was, in its largest unit.
pub(super) fn ago(ms: u64) -> String {
    let then = UNIX_EPOCH + Duration::from_millis(ms);
    let seconds = SystemTime::now().duration_since(then).unwrap_or_default().as_secs();
    match seconds {
        0..60 => format!("{seconds} s ago"),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_see_where_requests_go() {
        let json = r#"{"function": "f", "active": 2, "before": 1, "versions": [
            {"number": 1, "label": "old", "image": null, "created_ms": 0, "percent": 10,
             "header": {"name": "x-canary", "value": "yes"}},
            {"number": 2, "label": null, "image": null, "created_ms": 0, "percent": 90,
             "instances": 3, "requests": {"all": 40, "failed": 2}},
            {"number": 3, "label": null, "image": null, "created_ms": 0, "percent": 0,
             "problem": "it failed\u001b"}]}"#;
        let shown = text(&serde_json::from_str(json).unwrap());
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines[1].starts_with("1        old") && lines[1].contains("10%, x-canary=yes"));
        assert!(lines[1].ends_with("active before"), "{shown}");
        assert!(lines[2].contains("90%") && lines[2].ends_with("active"), "{shown}");
        assert!(lines[3].ends_with("it failed\\x1b"), "{shown}");
    }
}
