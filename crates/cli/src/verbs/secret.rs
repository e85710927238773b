//! `thaw secret`: the values of functions' secrets.

use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use clap::{Args, Subcommand};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{Read, stdin};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use thaw_home::config::{FunctionConfig, FunctionName, Inject};
use thaw_home::function::{BuiltFunction, FunctionError};
use thaw_home::home::Home;
use thaw_home::secrets::{SecretInfo, SecretStore};
use thaw_store::{Name, Store};

/// Set, list and remove the values of a function's secrets.
///
/// A program finds those that [secrets] of its thaw.toml names as files in /run/secrets. They
/// are in no image, log or answer of the admin API: each copy gets the values of the moment when
/// it is thawed, and `thaw build` runs the program without them. What a program has read is in
/// its memory, and so in each image that is made of it then (`thaw freeze`, `checkpoint`,
/// `sleep`).
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    pass show shop/database | thaw secret set shop database\n  \
    thaw secret set shop api-key --env API_KEY\n  \
    thaw secret set shop tls-key --file /etc/ssl/private/shop.pem\n  \
    thaw secret set shop token -- vault read -field=token secret/shop\n  \
    thaw secret list shop")]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Set a secret; copies that are thawed from now on have it, and live ones keep the old one.
    Set(SetArguments),
    /// List the names of a function's secrets.
    List {
        /// The function.
        function: FunctionName,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove a secret: a function that names it cannot be thawed until it is set again.
    Remove {
        /// The function.
        function: FunctionName,
        /// The secret.
        name: Name,
    },
}

/// A secret, and where its value is: in standard input, unless another place is named.
#[derive(Debug, Args)]
struct SetArguments {
    /// The function.
    function: FunctionName,
    /// The secret.
    name: Name,
    /// The value is that of an environment variable.
    #[arg(long, value_name = "VARIABLE", conflicts_with_all = ["file", "command"])]
    env: Option<OsString>,
    /// The value is all of a file.
    #[arg(long, value_name = "FILE", conflicts_with = "command")]
    file: Option<PathBuf>,
    /// The value is what this command prints, without the last line end. Neither is that of
    /// standard input.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let secrets = SecretStore::of(Home::from_environment()?);
    match &arguments.action {
        Action::Set(arguments) => {
            let value = value(arguments)?;
            secrets.set(&arguments.function, &arguments.name, &value).map_err(Failure::failed)?;
            note_slips(&arguments.function, &arguments.name, &value)?;
        }
        Action::List { function, json } => {
            let found = secrets.list(function).map_err(Failure::failed)?;
            match json {
                true => output::print_json(&found)?,
                false => output::print(&table(&found))?,
            }
        }
        Action::Remove { function, name } => {
            secrets.remove(function, name).map_err(Failure::failed)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Says what looks like a slip: the secret is set all the same, perhaps before the first build.
fn note_slips(function: &FunctionName, name: &Name, value: &[u8]) -> Result<(), Failure> {
    if value.is_empty() {
        eprintln!("thaw: note: the value of {name} is empty");
    }
    let Some(config) = config_of(function)? else {
        eprintln!("thaw: note: there is no function {function} yet");
        return Ok(());
    };
    let mut named =
        config.secrets.names.iter().chain(config.egress.inject.iter().flat_map(Inject::secrets));
    if !named.any(|known| known == name) {
        eprintln!(
            "thaw: note: the active version of {function} names no secret {name}; [secrets] and \
             [[egress.inject]] of its thaw.toml do"
        );
    }
    Ok(())
}

/// The settings of a function's active version, if there is the function.
///
/// # Errors
/// The store cannot be read.
pub(super) fn config_of(function: &FunctionName) -> Result<Option<FunctionConfig>, Failure> {
    let home = Home::from_environment()?;
    if !home.store().exists() {
        return Ok(None);
    }
    match BuiltFunction::read(&Store::open(&home.store())?, function.as_str()) {
        Ok(function) => Ok(Some(function.function.config)),
        Err(FunctionError::Store(error)) if error.is_not_found() => Ok(None),
        Err(error) => Err(Failure::failed(error)),
    }
}

fn value(arguments: &SetArguments) -> Result<Vec<u8>, Failure> {
    if let Some(variable) = &arguments.env {
        let value = env::var_os(variable).ok_or_else(|| {
            let variable = variable.display();
            Failure::failed(format!("the environment variable {variable} is not set; export it"))
        })?;
        return Ok(value.as_bytes().to_vec());
    }
    if let Some(file) = &arguments.file {
        let failed = |error| Failure::failed(format!("cannot read {}: {error}", file.display()));
        return fs::read(file).map_err(failed);
    }
    if let Some((program, rest)) = arguments.command.split_first() {
        return printed_by(Command::new(program).args(rest));
    }
    let mut value = Vec::new();
    let read = stdin().read_to_end(&mut value);
    read.map_err(|error| Failure::failed(format!("cannot read standard input: {error}")))?;
    Ok(without_line_end(value))
}

fn printed_by(command: &mut Command) -> Result<Vec<u8>, Failure> {
    let name = command.get_program().display().to_string();
    let run = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = run.map_err(|error| Failure::failed(format!("cannot run {name}: {error}")))?;
    match output.status.success() {
        true => Ok(without_line_end(output.stdout)),
        false => Err(Failure::failed(format!(
            "{name} ended with {}; the secret stays what it was",
            output.status
        ))),
    }
}

fn without_line_end(mut value: Vec<u8>) -> Vec<u8> {
    if value.last() == Some(&b'\n') {
        value.pop();
    }
    value
}

fn table(secrets: &[SecretInfo]) -> String {
    let mut table = Table::new(&["NAME", "BYTES", "SET"]);
    for SecretInfo { name, bytes, set_ms } in secrets {
        table.row(vec![name.clone(), bytes.to_string(), super::versions::ago(*set_ms)]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_end_is_not_part_of_a_value() {
        assert_eq!(without_line_end(b"a\n".to_vec()), b"a");
        assert_eq!(without_line_end(b"a\n\n".to_vec()), b"a\n");
        assert_eq!(without_line_end(b"a".to_vec()), b"a");
    }

    #[test]
    fn commands_print_values() {
        assert_eq!(printed_by(Command::new("echo").arg("x")).unwrap(), b"x");
        assert!(printed_by(&mut Command::new("false")).is_err());
    }
}
