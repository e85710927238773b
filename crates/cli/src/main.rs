#![doc = include_str!("../README.md")]

mod client;
mod exec_client;
mod failure;
mod grammar;
mod input;
mod key_file;
mod output;
mod unix_transport;
mod verbs;

use clap::Parser;
use failure::harmless;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// How long the end of this process waits for its last sandboxes to be gone, so that no
/// control groups of them stay.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    // This same executable also serves as the zygote parent, which must be
    // single-threaded and know nothing of what follows.
    thaw_sandbox::zygote_parent_main();
    if let Some(code) = thaw_daemon::fetching::fetcher_main() {
        return code;
    }
    let command = grammar::Command::parse();
    start_logging(command.verbosity());
    let outcome = command.verb.run();
    thaw_sandbox::limits::finish_removal(REMOVAL_PATIENCE);
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            if let Some(message) = failure.message() {
                eprintln!("thaw: {}", harmless(message));
            }
            failure.exit_code()
        }
    }
}

/// The crates of the host side that say something.
const SPEAKERS: [&str; 6] =
    ["thaw_build", "thaw_daemon", "thaw_e2b", "thaw_home", "thaw_http", "thaw_node"];

/// Diagnostics go to standard error; `THAW_LOG` selects them as in
/// `THAW_LOG=thaw_node=debug`, and `THAW_LOG_FORMAT=json` makes each a line of JSON.
fn start_logging(verbose: u8) {
    let of_ours = |level: &str| SPEAKERS.map(|name| format!(",{name}={level}")).concat();
    let default = match verbose {
        // What guests send that is no HTTP/2 is none of the operator's.
        0 => format!("warn,h2=error{}", of_ours("info")),
        1 => format!("info{}", of_ours("debug")),
        _ => "debug".to_owned(),
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("THAW_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    let logging = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match std::env::var("THAW_LOG_FORMAT").as_deref() {
        Ok("json") => logging.json().flatten_event(true).init(),
        format => {
            logging.with_ansi(std::io::stderr().is_terminal()).init();
            if let Ok(wrong) = format
                && !["", "text"].contains(&wrong)
            {
                tracing::warn!(
                    "THAW_LOG_FORMAT is neither `text` nor `json`; it is taken for `text`"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_names_all_that_say_something() {
        let readme = include_str!("../README.md");
        let missing: Vec<_> =
            SPEAKERS.iter().filter(|name| !readme.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
