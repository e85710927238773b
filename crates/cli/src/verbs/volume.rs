//! `thaw volume`: directories that functions write to.

use crate::client::{Daemon, DaemonArguments};
use crate::failure::{Failure, Outcome};
use crate::output::{self, Table};
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};
use thaw_daemon::admin::SnapshotMade;
use thaw_home::config::{ByteSize, DomainName, FunctionName};
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_home::volumes::{VolumeError, VolumeInfo, VolumeStore};
use thaw_node::sandboxes::SandboxInfo;
use thaw_sandbox::Copied;
use thaw_store::{Name, Store};

/// Make, list and remove volumes: directories whose files outlive the copies of functions.
///
/// A function finds those that [[volumes]] of its thaw.toml names at the paths that it gives
/// them. All its copies share them, and so do other functions that may use them. `thaw build`
/// makes a volume that is missing if thaw.toml gives its size.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw volume create uploads --size 10GiB --function shop\n  \
    thaw volume allow uploads shop-admin\n  \
    thaw volume create photos --size 50GiB --host /srv/photos --function shop\n  \
    thaw volume list\n  \
    thaw volume snapshot uploads before-upgrade\n  \
    thaw volume restore uploads before-upgrade\n  \
    thaw volume remove uploads")]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Make a volume.
    Create {
        /// Its name.
        name: Name,
        /// Bytes that it may hold, as in 10GiB.
        #[arg(long, value_name = "BYTES")]
        size: ByteSize,
        /// A function that may use it; can be repeated.
        #[arg(long = "function", value_name = "NAME")]
        functions: Vec<FunctionName>,
        /// The sharing domain of the tenant in whose quota it counts [default: functions without one].
        #[arg(long, value_name = "NAME")]
        domain: Option<DomainName>,
        /// A directory of this host that has its files: it must belong to the user that serves
        /// volumes, and stays when the volume is removed.
        #[arg(long, value_name = "DIR")]
        host: Option<PathBuf>,
    },
    /// Let a function use a volume, from its next deployment or start of the daemon on.
    Allow {
        /// The volume.
        name: Name,
        /// The function.
        function: FunctionName,
    },
    /// List all volumes.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show a volume.
    Show {
        /// The volume.
        name: Name,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Make a snapshot of a volume: all instances that use it rest meanwhile.
    Snapshot {
        /// The volume.
        name: Name,
        /// The snapshot's label [default: the time]
        label: Option<Name>,
        /// Remove the snapshot of this label instead.
        #[arg(long, requires = "label")]
        remove: bool,
        #[command(flatten)]
        daemon: DaemonArguments,
    },
    /// Put a snapshot in the place of all files of a volume that nobody uses.
    Restore {
        /// The volume.
        name: Name,
        /// The snapshot's label.
        label: Name,
    },
    /// Remove a volume with all its files and snapshots.
    Remove {
        /// The volume.
        name: Name,
    },
}

pub fn run(arguments: &Arguments) -> Outcome {
    let home = Home::from_environment()?;
    let volumes = VolumeStore::of(home.clone());
    match &arguments.action {
        Action::Create { name, size, functions, domain, host } => {
            let domain = domain.as_ref();
            let made = match host {
                Some(host) => volumes.create_of_host(name, *size, functions, domain, host),
                None => volumes.create(name, *size, functions, domain),
            };
            made.map_err(Failure::failed)?;
            functions.iter().try_for_each(note_unknown_function)?;
        }
        Action::Allow { name, function } => {
            volumes.allow(name, function).map_err(Failure::failed)?;
            note_unknown_function(function)?;
        }
        Action::List { json } => {
            let found = volumes.list().map_err(Failure::failed)?;
            match json {
                true => output::print_json(&found)?,
                false => output::print(&table(&found))?,
            }
        }
        Action::Show { name, json } => {
            let found = volumes.show(name).map_err(Failure::failed)?;
            output::print_done(*json, &found, shown)?;
        }
        Action::Snapshot { name, label: Some(label), remove: true, .. } => {
            volumes.remove_snapshot(name, label).map_err(Failure::failed)?;
        }
        Action::Snapshot { name, label, daemon, .. } => {
            let label = label.clone().map_or_else(time_as_label, Ok)?;
            let copied = snapshot(&volumes, name, &label, daemon)?;
            output::print(&format!("{label}: {}\n", described(copied)))?;
        }
        Action::Restore { name, label } => {
            let restored = volumes.restore(name, label);
            let copied = restored.map_err(|error| naming_users(&home, name, error))?;
            output::print(&format!("{name} is as {label} was: {}\n", described(copied)))?;
        }
        Action::Remove { name } => {
            volumes.remove(name).map_err(|error| naming_users(&home, name, error))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Says that no function has this name, which may be a slip.
fn note_unknown_function(function: &FunctionName) -> Result<(), Failure> {
    if super::secret::config_of(function)?.is_none() {
        eprintln!("thaw: note: there is no function {function} yet");
    }
    Ok(())
}

/// Why nothing was done with a volume, with the names of those who use it if that is why.
fn naming_users(home: &Home, name: &Name, error: VolumeError) -> Failure {
    let users = match &error {
        VolumeError::InUse(_) => {
            in_use_by(name, &sandboxes_with(home, name), &functions_with(home, name))
        }
        _ => None,
    };
    users.map_or_else(|| Failure::failed(error), Failure::failed)
}

/// The sandboxes of the daemon of a home that have a volume; none where no daemon answers.
fn sandboxes_with(home: &Home, name: &Name) -> Vec<String> {
    let listed = Daemon::running(home).map(|daemon| daemon.get::<Vec<SandboxInfo>>("/sandboxes"));
    let has = |one: &SandboxInfo| one.volumes.iter().any(|volume| volume.name == name.as_str());
    let all = listed.and_then(Result::ok).unwrap_or_default();
    all.into_iter().filter(has).map(|one| one.name).collect()
}

/// The functions whose active version names a volume in its thaw.toml.
fn functions_with(home: &Home, name: &Name) -> Vec<String> {
    let Ok(store) = Store::open(&home.store()) else { return Vec::new() };
    let Ok(listed) = store.list_functions() else { return Vec::new() };
    let names = listed.records.into_iter().map(|record| record.name.to_string());
    let has = |function: &String| {
        let built = BuiltFunction::read(&store, function).ok();
        let mut volumes = built.into_iter().flat_map(|built| built.function.config.volumes);
        volumes.any(|volume| volume.name == *name)
    };
    names.filter(has).collect()
}

/// Who uses a volume, and how to have that end, as a sentence; none: nobody is known.
fn in_use_by(name: &Name, sandboxes: &[String], functions: &[String]) -> Option<String> {
    let in_use = format!("volume `{name}` is in use by");
    let (boxes, named) =
        (listed("sandbox", "sandboxes", sandboxes), listed("function", "functions", functions));
    Some(match (boxes, named) {
        (None, None) => return None,
        (Some(boxes), None) => {
            format!("{in_use} {boxes}; `thaw sandbox kill` ends it, after which you can try again")
        }
        (None, Some(named)) => format!(
            "{in_use} {named}; remove what names it in its thaw.toml, or stop the daemon, and try again"
        ),
        (Some(boxes), Some(named)) => format!(
            "{in_use} {boxes} and {named}; end the one with `thaw sandbox kill`, remove the other, \
             and try again"
        ),
    })
}

/// Names with the word for what they are; none if there are none.
fn listed(one: &str, several: &str, names: &[String]) -> Option<String> {
    let quoted: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.len() {
        0 => None,
        1 => Some(format!("{one} {}", quoted[0])),
        _ => Some(format!("{several} {}", quoted.join(", "))),
    }
}

/// Makes a snapshot; of a volume that the daemon uses, it does that itself.
fn snapshot(
    volumes: &VolumeStore,
    name: &Name,
    label: &Name,
    daemon: &DaemonArguments,
) -> Result<Copied, Failure> {
    let in_use = match volumes.snapshot(name, label) {
        Err(error @ VolumeError::InUse(_)) => error,
        made => return made.map_err(Failure::failed),
    };
    // Without a daemon, somebody else uses it.
    let Ok(daemon) = Daemon::find(daemon) else { return Err(Failure::failed(in_use)) };
    let (name, label) = (output::escape(name.as_str()), output::escape(label.as_str()));
    let made: SnapshotMade = daemon.post(&format!("/volumes/{name}/snapshots?label={label}"))?;
    let SnapshotMade { files, shared } = made;
    Ok(Copied { files, shared })
}

fn time_as_label() -> Result<Name, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Name::new(&format!("at-{}", now.as_secs())).map_err(Failure::failed)
}

fn described(copied: Copied) -> String {
    let Copied { files, shared } = copied;
    match shared {
        0 if files == 1 => "1 file copied".to_owned(),
        0 => format!("{files} files copied"),
        _ => format!("{files} files, {shared} of which share their blocks with the original"),
    }
}

fn table(volumes: &[VolumeInfo]) -> String {
    let mut table = Table::new(&["NAME", "USED", "SIZE", "IN USE", "SNAPSHOTS", "FUNCTIONS"]);
    for volume in volumes {
        let functions: Vec<&str> = volume.functions.iter().map(FunctionName::as_str).collect();
        table.row(vec![
            volume.name.clone(),
            output::size(volume.used),
            output::size(volume.size),
            match (&volume.problem, volume.in_use) {
                (Some(_), _) => "unusable",
                (None, true) => "yes",
                (None, false) => "no",
            }
            .to_owned(),
            volume.snapshots.len().to_string(),
            functions.join(" "),
        ]);
    }
    table.text()
}

/// All that is known of a volume, without the last line end.
fn shown(volume: &VolumeInfo) -> String {
    let VolumeInfo { name, used, size, .. } = volume;
    let (used, size) = (output::size(*used), output::size(*size));
    let use_of = if volume.in_use { "in use" } else { "not in use" };
    let mut lines = vec![format!("{name}: {used} of {size}, {use_of}")];
    lines.extend(volume.problem.as_ref().map(|problem| format!("unusable: {problem}")));
    let functions: Vec<&str> = volume.functions.iter().map(FunctionName::as_str).collect();
    lines.push(match functions.is_empty() {
        true => "no function may use it".to_owned(),
        false => format!("functions: {}", functions.join(" ")),
    });
    lines.extend(
        volume.domain.as_ref().map(|domain| format!("it counts for {}", domain.name().as_str())),
    );
    let host = if volume.is_host { ", which stays when it is removed" } else { "" };
    lines.push(format!("files: {}{host}", volume.path.display()));
    lines.extend(volume.snapshots.iter().map(|snapshot| {
        let of = snapshot.checkpoint.as_ref().map(|name| format!(", of checkpoint {name}"));
        let age = output::ago(snapshot.created_ms);
        format!("snapshot {}: made {age} ago{}", snapshot.label, of.unwrap_or_default())
    }));
    lines.iter().map(|line| thaw_sandbox::escape(line.as_bytes())).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_shown_in_lines() {
        let volume = VolumeInfo {
            name: "data".to_owned(),
            size: 1 << 30,
            used: 3 << 20,
            functions: vec!["shop".parse().unwrap(), "admin".parse().unwrap()],
            domain: None,
            in_use: true,
            path: "/srv/a\nb".into(),
            is_host: true,
            problem: None,
            snapshots: Vec::new(),
        };
        let expected = "data: 3.0MiB of 1.0GiB, in use\nfunctions: shop admin\n\
                        files: /srv/a\\x0ab, which stays when it is removed";
        assert_eq!(shown(&volume), expected);
        let unused = VolumeInfo {
            functions: Vec::new(),
            in_use: false,
            problem: Some("its size is unknown".to_owned()),
            ..volume
        };
        let shown = shown(&unused);
        let begin = "data: 3.0MiB of 1.0GiB, not in use\nunusable: its size is unknown\nno function may use it\n";
        assert!(shown.starts_with(begin), "{shown}");
    }

    #[test]
    fn those_who_use_a_volume_are_named() {
        let name = Name::new("data").unwrap();
        let names = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let said = |sandboxes, functions| in_use_by(&name, &names(sandboxes), &names(functions));
        assert_eq!(said("", ""), None);
        assert!(said("box", "").unwrap().starts_with("volume `data` is in use by sandbox `box`; "));
        assert!(said("a b", "").unwrap().contains("in use by sandboxes `a`, `b`; "));
        assert!(said("", "web").unwrap().contains("in use by function `web`; "));
        let both = said("box", "web shop").unwrap();
        assert!(both.contains("by sandbox `box` and functions `web`, `shop`; "), "{both}");
    }
}
