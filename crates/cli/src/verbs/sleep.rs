//! `thaw sleep`: the process of a live instance ends, and a file is left of it.

use super::instance::{InstanceOf, mib};
use crate::failure::Outcome;
use clap::Args;
use thaw_daemon::admin::FellAsleep;

/// Put an idle instance to sleep: its process ends, and a file is left.
///
/// The daemon writes to a file how the memory of the instance differs from the image of its
/// function, and ends its process. Clients stay connected to the gateway. The next request, `thaw
/// wake`, or anything else that asks for the instance by its number boots it from the file: with
/// all that it had in memory, under the same number. `limits.sleep_after` in thaw.toml does the
/// same after a time.
///
/// Without a number, it is the one that has been idle longest.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw sleep hello-python\n  \
    thaw sleep hello-python --instance 17")]
pub struct Arguments {
    #[command(flatten)]
    instance: InstanceOf,
}

pub fn run(arguments: &Arguments) -> Outcome {
    arguments.instance.post("sleep", |done: &FellAsleep| {
        let (instance, function) = (done.instance, &done.function);
        let (stored, time) = (mib(done.asleep.stored), done.asleep.write_ms);
        format!(
            "instance {instance} of {function} is asleep: {stored:.1} MiB written in {time:.0} ms"
        )
    })
}
