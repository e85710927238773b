//! `thaw freeze`: a live instance becomes its function's image.

use super::instance::{InstanceOf, mib};
use crate::failure::Outcome;
use clap::Args;
use thaw_daemon::admin::Frozen;

/// Freeze a live instance as its function's new image.
///
/// The daemon takes an idle instance, with everything that it has loaded and
/// learnt since its boot, waits until nothing in it can run, and makes its memory
/// the image that copies are thawed from; the instance itself ends. Functions
/// with isolation = "instance" have such instances. Every copy has what the
/// instance has kept of its requests, so send it only data that all may see.
///
/// Without a number, it is of the idle ones the one that has served most.
///
/// To choose the moment while a function is built, see `freeze` in [entry] of
/// thaw.toml; to send requests before it is frozen, see [train].
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw freeze hello-python\n  \
    thaw freeze hello-python --instance 17")]
pub struct Arguments {
    #[command(flatten)]
    instance: InstanceOf,
}

pub fn run(arguments: &Arguments) -> Outcome {
    arguments.instance.post("freeze", |done: &Frozen| {
        let (instance, function, frozen) = (done.instance, &done.function, &done.frozen);
        let (stored, mappings, time) = (mib(frozen.stored), frozen.mappings, frozen.freeze_ms);
        format!(
            "froze instance {instance} of {function} in {time:.0} ms: image of {stored:.1} MiB in \
             {mappings} mappings"
        )
    })
}
