//! `thaw checkpoint`: a live instance, written to the store.

use super::instance::{Telling, mib};
use crate::failure::Outcome;
use crate::key_file::KeyFile;
use crate::output;
use clap::Args;
use thaw_node::service::CheckpointTaken;

/// Write a live instance to the store, by a name.
///
/// The daemon stops the instance for a moment, whatever it is doing, writes its memory, and lets
/// it go on. Only what differs from its image is stored, or, from the second time on, from its last
/// checkpoint. `thaw restore` makes instances of it, which go on from there, as often as
/// you like. A checkpoint holds all that the program has in memory, secrets too: with --key-file it is
/// encrypted. Pages that are equal to those of the image or of an unencrypted checkpoint that the
/// instance was made of stay there as they are. A name that is in use stands for the new checkpoint
/// from then on.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw checkpoint 17 before-upgrade\n  \
    thaw restore before-upgrade\n  \
    head -c 32 /dev/urandom > key && thaw checkpoint 17 secret --key-file key\n  \
    thaw checkpoints --remove before-upgrade && thaw gc")]
pub struct Arguments {
    /// The instance, by its number in `thaw ps`.
    instance: u64,
    /// Name of the checkpoint.
    name: String,
    #[command(flatten)]
    key: KeyFile,
    #[command(flatten)]
    telling: Telling,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let (instance, name) = (arguments.instance, output::escape(&arguments.name));
    let path = format!("/instances/{instance}/checkpoint?name={name}");
    arguments.telling.post_with(&path, &arguments.key, |done: &CheckpointTaken| {
        let key = done.checkpoint.key.map(|key| format!(", encrypted with key {key}"));
        format!(
            "wrote instance {} of {} as {}: {:.1} MiB that differ from {} image(s); it rested for \
             {:.1} ms{}",
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
