//! `thaw wake`: a hibernated instance takes its memory back; one that is asleep runs again.

use super::instance::InstanceOf;
use crate::failure::Outcome;
use clap::Args;
use thaw_daemon::admin::Woken;

/// Have a hibernated instance take its memory back, or one that is asleep run, before a request
/// does.
///
/// Without a number, it is the hibernated one that has been idle longest; if there is none, of
/// those that are asleep the one that was used last. Pages that it has needed after an earlier wake
/// come back at once, all others when they are touched.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw wake hello-python\n  \
    thaw wake hello-python --instance 17")]
pub struct Arguments {
    #[command(flatten)]
    instance: InstanceOf,
}

pub fn run(arguments: &Arguments) -> Outcome {
    arguments.instance.post("wake", |done: &Woken| {
        let (instance, function) = (done.instance, &done.function);
        match done.wake_us {
            Some(wake_us) => format!("woke instance {instance} of {function} in {wake_us} us"),
            None => format!("instance {instance} of {function} is awake"),
        }
    })
}
