//! `thaw sandbox inject`.

use super::{egress, path};
use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;
use thaw_home::config::Inject;
use thaw_node::remote::{EgressInfo, SandboxInject};

/// Change the headers that the node adds to the requests of a sandbox, while it runs.
///
/// The given rules replace those that the sandbox had of its own; those of `[[egress.inject]]` in
/// its function's thaw.toml stay, and go before them. `${NAME}` in a value is a secret of the
/// function (`thaw secret set`), which the sandbox never sees. The sandbox has to be allowed to
/// connect to the host, and its function needs `authority = true` below [egress].
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sandbox inject box 'api.openai.com: Authorization: Bearer ${openai-key}'\n  \
    thaw sandbox inject box --none")]
pub struct Arguments {
    /// The sandbox, by its name or the number of its instance.
    name: String,
    /// A host, with a port if it is not 443, a header and its value: `HOST: HEADER: VALUE`.
    #[arg(value_name = "RULE", required_unless_present = "none")]
    rules: Vec<String>,
    /// It gets none but those of its function.
    #[arg(long, conflicts_with = "rules")]
    none: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: DaemonArguments,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let rules = arguments.rules.iter().map(|text| rule(text)).collect::<Result<_, _>>()?;
    let daemon = Daemon::find(&arguments.daemon)?;
    let path = format!("{}/inject", path(&arguments.name));
    let info: EgressInfo = daemon.send_json("PUT", &path, &SandboxInject { rules })?;
    if arguments.json {
        output::print_json(&info)?;
    } else {
        output::print(&egress::summary(&info))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn rule(text: &str) -> Result<Inject, Failure> {
    let parts = text.split_once(": ").and_then(|(host, rest)| Some((host, rest.split_once(": ")?)));
    // It may be a secret that was written here by mistake: no error repeats it.
    let (host, (header, value)) = parts.ok_or_else(|| {
        Failure::misused("a rule is no `HOST: HEADER: VALUE`; write a space behind each colon")
    })?;
    let rule = json!({ "host": host, "header": header, "value": value });
    serde_json::from_value(rule).map_err(Failure::misused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_have_three_parts() {
        let rule = rule("api.openai.com:8443: Authorization: Bearer: ${key}").unwrap();
        assert_eq!((rule.name(), rule.port()), ("api.openai.com", 8443));
        assert_eq!(rule.header().as_str(), "authorization");
        let error = super::rule("api.openai.com: sk-hidden").unwrap_err();
        assert!(!format!("{error:?}").contains("hidden"), "{error:?}");
    }
}
