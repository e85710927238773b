//! `thaw sandbox egress`.

use super::path;
use crate::client::{Daemon, DaemonArguments};
use crate::failure::Outcome;
use crate::output::{self, Table};
use clap::Args;
use std::process::ExitCode;
use thaw_home::config::EgressRule;
use thaw_node::remote::{EgressInfo, SandboxEgress};

/// Show or change where a sandbox may connect to, while it runs.
///
/// With `--allow`, `--deny` or `--none` the given rules replace those that the sandbox had, and
/// hold for what it asks for from now on. Connections that it has stay. Rules are those of
/// `[egress]` in thaw.toml: TARGET:PORTS.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sandbox egress box\n  \
    thaw sandbox egress box --allow 'api.example.com:443' --allow '*.pypi.org:443'\n  \
    thaw sandbox egress box --allow '*' --deny '203.0.113.0/24:*'\n  \
    thaw sandbox egress box --none\n  \
    thaw sandbox egress box --log")]
pub struct Arguments {
    /// The sandbox, by its name or the number of its instance.
    name: String,
    /// A destination that it may connect to.
    #[arg(long, value_name = "RULE")]
    allow: Vec<EgressRule>,
    /// An address or a network that it may not connect to, whatever is allowed.
    #[arg(long, value_name = "RULE", requires = "allow")]
    deny: Vec<EgressRule>,
    /// It may connect to nothing.
    #[arg(long, conflicts_with_all = ["allow", "deny"])]
    none: bool,
    /// Print which connections were allowed and which were denied. One that was allowed may still have
    /// found nobody who listens.
    #[arg(long)]
    log: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = Daemon::find(&arguments.daemon)?;
    let path = format!("{}/egress", path(&arguments.name));
    let info: EgressInfo = match arguments.none || !arguments.allow.is_empty() {
        true => {
            let (allow, deny) = (arguments.allow.clone(), arguments.deny.clone());
            let rules = SandboxEgress { allow, deny, ..SandboxEgress::default() };
            daemon.send_json("PUT", &path, &rules)?
        }
        false => daemon.get(&path)?,
    };
    if arguments.json {
        output::print_json(&info)?;
    } else {
        let text = if arguments.log { log(&info) } else { summary(&info) };
        output::print(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The rules, one a line, and the counts.
pub(super) fn summary(info: &EgressInfo) -> String {
    let mut text = rules(&info.rules);
    if let Some(within) = &info.within {
        let within = rules(within);
        text += &format!("and of that what these allow:\n{within}");
    }
    for (host, headers) in &info.inject {
        text += &format!("adds {} to requests to {host}\n", headers.join(", "));
    }
    text + &format!("allowed {}, denied {}\n", info.reached, info.denied)
}

fn rules(rules: &SandboxEgress) -> String {
    let lists = [
        ("allow", &rules.allow),
        ("reconnect", &rules.reconnect),
        ("deny", &rules.deny),
        ("exempt", &rules.exempt),
    ];
    let lines = lists
        .iter()
        .flat_map(|(word, rules)| rules.iter().map(move |rule| format!("{word} {rule}\n")));
    let text: String = lines.collect();
    if text.is_empty() { "nothing is allowed\n".to_owned() } else { text }
}

fn log(info: &EgressInfo) -> String {
    let mut table = Table::new(&["LAST", "WHAT", "TO", "NAME", "TIMES"]);
    for event in &info.log {
        let what = if event.denied { "denied" } else { "allowed" };
        let row = [
            output::ago(event.last_ms),
            what.to_owned(),
            event.to.clone(),
            event.name.clone().unwrap_or_default(),
            event.count.to_string(),
        ];
        table.row(row.into());
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_shown_as_they_are_written() {
        let rule = |text: &str| -> EgressRule { text.parse().unwrap() };
        let allow = vec![rule("*:443")];
        let info = EgressInfo {
            rules: SandboxEgress {
                allow: allow.clone(),
                deny: vec![rule("10.0.0.0/8:*")],
                ..SandboxEgress::default()
            },
            within: Some(SandboxEgress::default()),
            inject: [("a.example".to_owned(), vec!["x-key".to_owned()])].into(),
            reached: 3,
            denied: 1,
            log: Vec::new(),
        };
        assert_eq!(
            summary(&info),
            "allow *:443\ndeny 10.0.0.0/8:*\nand of that what these allow:\nnothing is allowed\n\
             adds x-key to requests to a.example\nallowed 3, denied 1\n"
        );
    }
}
