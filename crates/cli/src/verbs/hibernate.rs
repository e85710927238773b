//! `thaw hibernate`: a live instance gives up its memory.

use super::instance::{InstanceOf, mib};
use crate::failure::Outcome;
use clap::Args;
use thaw_daemon::admin::Hibernated;

/// Have an idle instance give up its memory.
///
/// The daemon waits until nothing in the instance can run, writes its memory to a swap
/// file of its own, and has it drop that memory, page tables included. Its process and its
/// connections stay. A request, a byte on an open connection, or `thaw wake` brings the
/// memory back. `limits.hibernate_after` in thaw.toml does the same after a time.
///
/// Without a number, it is the one that has been idle longest.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    thaw hibernate hello-python\n  \
    thaw hibernate hello-python --instance 17")]
pub struct Arguments {
    #[command(flatten)]
    instance: InstanceOf,
}

pub fn run(arguments: &Arguments) -> Outcome {
    arguments.instance.post("hibernate", |done: &Hibernated| {
        let (instance, function) = (done.instance, &done.function);
        let (stored, time) = (mib(done.hibernated.stored), done.hibernated.write_ms);
        format!(
            "hibernated instance {instance} of {function}: {stored:.1} MiB written in {time:.0} ms"
        )
    })
}
