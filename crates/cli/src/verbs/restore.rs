//! `thaw restore`: instances of a checkpoint.

use super::instance::Telling;
use crate::failure::Outcome;
use crate::key_file::KeyFile;
use crate::output;
use crate::verbs::numbers::count;
use clap::Args;
use std::num::NonZeroU32;
use thaw_node::service::Restored;

/// Make instances of a checkpoint, which go on where the checkpointed one was.
///
/// One that is encrypted needs its key: it is decrypted into memory and verified before anything of
/// it runs, and what its instances have in memory does not get to disk unencrypted. Each has random
/// numbers, limits and logs of its own, and its connections are reset. They serve
/// requests of their function like its other instances.
///
/// With --volumes the files of its volumes are put back that the checkpoint has: nobody may use these
/// volumes then. Other instances find these files from then on.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw checkpoints\n  \
    thaw restore before-upgrade\n  \
    thaw restore before-upgrade -n 10 --json\n  \
    thaw restart shop && thaw restore with-files --volumes\n  \
    thaw restore secret --key-file key")]
pub struct Arguments {
    /// Name of the checkpoint.
    name: String,
    /// How many instances.
    #[arg(short = 'n', long = "copies", value_name = "N", default_value = "1", value_parser = count::<NonZeroU32>)]
    copies: NonZeroU32,
    /// Put the files of its volumes back, too.
    #[arg(long)]
    volumes: bool,
    #[command(flatten)]
    key: KeyFile,
    #[command(flatten)]
    telling: Telling,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let (name, copies) = (output::escape(&arguments.name), arguments.copies);
    let mut path = format!("/checkpoints/{name}/restore?copies={copies}");
    if arguments.volumes {
        path += "&volumes=true";
    }
    arguments.telling.post_with(&path, &arguments.key, |done: &Restored| {
        format!(
            "restored {} as instance {} of {} within {:.1} ms",
            arguments.name,
            output::list(&done.ids),
            done.function,
            done.running_us as f64 / 1e3,
        )
    })
}
