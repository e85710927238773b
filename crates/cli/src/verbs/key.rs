//! `thaw key`: who may use E2B's API.

use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use clap::{Args, Subcommand};
use serde::Serialize;
use std::process::ExitCode;
use thaw_e2b::{Key, KeyStore, NewKey, RequestRate, Role};
use thaw_home::config::ByteSize;
use thaw_home::home::Home;

/// Make, list and revoke the keys of E2B's API (`thaw serve --e2b`).
///
/// Keys of one name share their sandboxes. A key is printed once, when it is made; only its hash is
/// kept, in $THAW_HOME/e2b-keys.toml. A daemon sees each change at its next request.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    export E2B_API_KEY=$(thaw key create team-a)\n  \
    thaw key create dashboard --role read-only --rate '100 per 1m'\n  \
    thaw key list\n  \
    thaw key revoke 2bb80d53")]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Make a key and print it.
    Create(CreateArguments),
    /// List keys, by the beginnings of their hashes.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take a key away. If it is the last one of its name, the tokens of that name's sandboxes
    /// count no more.
    Revoke {
        /// Its id in `thaw key list`.
        id: String,
    },
}

#[derive(Debug, Args)]
struct CreateArguments {
    /// Whose it is.
    name: String,
    /// What it may do: `user` makes and uses sandboxes of its name, `read-only` lists them,
    /// `admin` does all with those of every name.
    #[arg(long, default_value_t = Role::User)]
    role: Role,
    /// Most requests of the control API in a time, such as "100 per 1m".
    #[arg(long, value_name = "RATE")]
    rate: Option<RequestRate>,
    /// Most sandboxes of its name at a time, paused ones included; 100 without.
    #[arg(long, value_name = "COUNT")]
    sandboxes: Option<u32>,
    /// Most snapshots of its name at a time; 20 without.
    #[arg(long, value_name = "COUNT")]
    snapshots: Option<u32>,
    /// Most templates of its name at a time; 20 without.
    #[arg(long, value_name = "COUNT")]
    templates: Option<u32>,
    /// Most volumes of its name at a time; 4 without.
    #[arg(long, value_name = "COUNT")]
    volumes: Option<u32>,
    /// Bytes that each volume may hold; 1GiB without.
    #[arg(long, value_name = "SIZE")]
    volume_size: Option<ByteSize>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A key, as it is shown.
#[derive(Serialize)]
struct KeyView {
    id: String,
    name: String,
    role: Role,
    rate: Option<RequestRate>,
    sandboxes: u32,
    snapshots: u32,
    templates: u32,
    volumes: u32,
    volume_size: ByteSize,
    /// The key itself, when it is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

impl KeyView {
    fn of(key: &Key, secret: Option<String>) -> Self {
        Self {
            id: key.id(),
            name: key.name.clone(),
            role: key.role,
            rate: key.rate,
            sandboxes: key.sandboxes,
            snapshots: key.snapshots,
            templates: key.templates,
            volumes: key.volumes,
            volume_size: key.volume_size,
            key: secret,
        }
    }
}

pub fn run(arguments: &Arguments) -> Outcome {
    let keys = KeyStore::of(Home::from_environment()?);
    match &arguments.action {
        Action::Create(arguments) => create(&keys, arguments)?,
        Action::List { json } => {
            let found = keys.list().map_err(Failure::failed)?;
            match json {
                true => {
                    let views: Vec<_> = found.iter().map(|key| KeyView::of(key, None)).collect();
                    output::print_json(&views)?;
                }
                false => output::print(&table(&found))?,
            }
        }
        Action::Revoke { id } => {
            let key = keys.revoke(id).map_err(Failure::failed)?;
            output::print(&format!("revoked {id} of {}\n", key.name))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn create(keys: &KeyStore, arguments: &CreateArguments) -> Result<(), Failure> {
    let wanted = NewKey {
        name: arguments.name.clone(),
        role: arguments.role,
        rate: arguments.rate,
        sandboxes: arguments.sandboxes,
        snapshots: arguments.snapshots,
        templates: arguments.templates,
        volumes: arguments.volumes,
        volume_size: arguments.volume_size,
    };
    let (key, secret) = keys.create(wanted).map_err(Failure::failed)?;
    match arguments.json {
        true => output::print_json(&KeyView::of(&key, Some(secret))),
        false => output::print(&format!("{secret}\n")),
    }
}

fn table(keys: &[Key]) -> String {
    let headings = ["ID", "NAME", "ROLE", "RATE", "SANDBOXES", "SNAPSHOTS", "TEMPLATES", "VOLUMES"];
    let mut table = Table::new(&headings);
    for key in keys {
        table.row(vec![
            key.id(),
            key.name.clone(),
            key.role.to_string(),
            key.rate.map_or_else(|| "-".to_owned(), |rate| rate.to_string()),
            key.sandboxes.to_string(),
            key.snapshots.to_string(),
            key.templates.to_string(),
            key.volumes.to_string(),
        ]);
    }
    table.text()
}
