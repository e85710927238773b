//! `thaw checkpoint`: a live instance, written to the store.

use super::instance::{Telling, mib};
use crate::client::Daemon;
use crate::failure::{Failure, Outcome};
use crate::key_file::KeyFile;
use crate::output;
use crate::verbs::numbers::instance;
use clap::Args;
use thaw_home::seal::owner::KeyId;
use thaw_node::instance::Checkpointed;
use thaw_node::service::{CheckpointTaken, VolumeFiles};

/// Write a live instance to the store, by a name.
///
/// The daemon stops the instance for a moment, whatever it is doing, writes its memory, and lets
/// it go on. Only what differs from its image is stored, or, from the second time on, from its last
/// checkpoint. `thaw restore` makes instances of it, which go on from there, as often as
/// you like. A checkpoint holds all that the program has in memory, secrets too: with --key-file it is
/// encrypted. Pages that are equal to those of the image or of an unencrypted checkpoint that the
/// instance was made of stay there as they are. A name that is in use stands for the new checkpoint
/// from then on.
///
/// With --volumes the files of its volumes go with it, copied while it rests, and with it all other
/// instances that have one of these volumes. `thaw restore --volumes` puts them back.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw checkpoint 17 before-upgrade\n  \
    thaw restore before-upgrade\n  \
    thaw checkpoint 17 with-files --volumes && thaw restart shop && thaw restore with-files --volumes\n  \
    head -c 32 /dev/urandom > key && thaw checkpoint 17 secret --key-file key\n  \
    thaw checkpoints --remove before-upgrade && thaw gc")]
pub struct Arguments {
    /// The instance, by its number in `thaw ps`.
    #[arg(value_parser = instance)]
    instance: u64,
    /// Name of the checkpoint.
    name: String,
    /// Copy the files of its volumes, too.
    #[arg(long)]
    volumes: bool,
    #[command(flatten)]
    key: KeyFile,
    #[command(flatten)]
    telling: Telling,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let daemon = arguments.telling.daemon()?;
    let files = if arguments.volumes { VolumeFiles::Go } else { VolumeFiles::Stay };
    let done = take(&daemon, arguments.instance, &arguments.name, &arguments.key, files)?;
    arguments.telling.print(&done, |done| {
        let key = done.checkpoint.key.map(|key| format!(", encrypted with key {key}"));
        let volumes = done.checkpoint.volumes.iter().map(|snapshot| snapshot.volume.as_str());
        let volumes = match &volumes.collect::<Vec<_>>()[..] {
            [] => String::new(),
            volumes => format!(", with the files of {}", volumes.join(", ")),
        };
        format!(
            "wrote instance {} of {} as {}: {:.1} MiB that differ from {} image(s){volumes}; it rested \
             for {:.1} ms{}",
            done.instance,
            done.function,
            done.checkpoint.name,
            mib(done.checkpoint.stored),
            done.checkpoint.ancestors,
            done.pause_us as f64 / 1e3,
            key.unwrap_or_default(),
        )
    })
}

/// Has a daemon write an instance to the store.
///
/// # Errors
/// The daemon refuses, cannot be asked, or has not encrypted it with the key; or the key cannot be
/// read.
pub fn take(
    daemon: &Daemon,
    instance: u64,
    name: &str,
    key: &KeyFile,
    files: VolumeFiles,
) -> Result<CheckpointTaken, Failure> {
    let key = key.read()?;
    let wanted = KeyFile::id_of(&key)?;
    let mut path = format!("/instances/{instance}/checkpoint?name={}", output::escape(name));
    if files == VolumeFiles::Go {
        path += "&volumes=true";
    }
    let done: CheckpointTaken = daemon.post_bytes(&path, &key)?;
    require_volumes(&done.checkpoint, files)?;
    require_encrypted(&done.checkpoint.name, wanted, done.checkpoint.key)?;
    Ok(done)
}

/// Refuses a checkpoint that was to have the files of volumes and has none, as a daemon writes it that
/// is older than that.
fn require_volumes(written: &Checkpointed, files: VolumeFiles) -> Result<(), Failure> {
    let name = &written.name;
    match files {
        VolumeFiles::Go if written.volumes.is_empty() => Err(Failure::failed(format!(
            "checkpoint `{name}` was written without files of volumes, because the daemon is older \
             than --volumes; remove it with `thaw checkpoints --remove {name}`, and restart the \
             daemon"
        ))),
        _ => Ok(()),
    }
}

/// Refuses a checkpoint that was to be encrypted with a key and is not, as a daemon writes it that is
/// older than such keys.
fn require_encrypted(
    name: &str,
    wanted: Option<KeyId>,
    written: Option<KeyId>,
) -> Result<(), Failure> {
    match wanted {
        Some(key) if written != Some(key) => Err(Failure::failed(format!(
            "checkpoint `{name}` was written without encryption, because the daemon is older than \
             --key-file; remove it with `thaw checkpoints --remove {name}` and `thaw gc`, and \
             restart the daemon"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_daemon_that_takes_no_key_is_noticed() {
        let [own, other] = [1, 2].map(|byte| KeyFile::id_of(&[byte; 32]).unwrap());
        assert!(own.is_some() && own != other && KeyFile::id_of(&[]).unwrap().is_none());
        // As it answers.
        let text = r#"{"name":"a","image":"b","ancestors":1,"stored":2,"mappings":3}"#;
        let done: Checkpointed = serde_json::from_str(text).unwrap();
        for written in [done.key, other] {
            let refused = require_encrypted("a", own, written).unwrap_err();
            assert!(format!("{refused:?}").contains("without encryption"), "{refused:?}");
        }
        let refused = require_volumes(&done, VolumeFiles::Go).unwrap_err();
        assert!(format!("{refused:?}").contains("without files of volumes"), "{refused:?}");
        require_volumes(&done, VolumeFiles::Stay).unwrap();
        require_encrypted("a", own, own).unwrap();
        require_encrypted("a", None, None).unwrap();
    }
}
