//! `thaw fork`: copies of a live instance.

use super::instance::Telling;
use crate::failure::Outcome;
use crate::output;
use crate::verbs::numbers::{count, instance};
use clap::Args;
use std::num::NonZeroU32;
use thaw_node::service::Forked;

/// Copy a live instance with all that it has in memory.
///
/// The daemon stops the instance for a moment, whatever it is doing, copies its memory, and lets
/// it go on. Each copy goes on from the same point with a name, random numbers, limits and logs of
/// its own; its connections are reset, but for those that `reconnect` in [egress] names. A program
/// that has /dev/thaw open hears of it there. Copies share memory with each other until they write
/// to it. Functions with isolation = "instance" have instances that can be copied.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw ps\n  \
    thaw fork 17\n  \
    thaw fork 17 -n 100 --json")]
pub struct Arguments {
    /// The instance, by its number in `thaw ps`.
    #[arg(value_parser = instance)]
    instance: u64,
    /// How many copies.
    #[arg(short = 'n', long = "copies", value_name = "N", default_value = "1", value_parser = count::<NonZeroU32>)]
    copies: NonZeroU32,
    #[command(flatten)]
    telling: Telling,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let (instance, copies) = (arguments.instance, arguments.copies);
    let path = format!("/instances/{instance}/fork?copies={copies}");
    arguments.telling.post(&path, |done: &Forked| {
        format!(
            "copied instance {} of {} as {}; it rested for {:.1} ms, and all ran after {:.1} ms",
            done.instance,
            done.function,
            output::list(&done.ids),
            done.pause_us as f64 / 1e3,
            done.running_us as f64 / 1e3,
        )
    })
}
