//! `thaw bench`: measurements that a user can repeat.

mod ablation;
mod afar;
mod boot;
mod check;
mod density;
mod handoff;
mod hibernate;
mod mix;
mod paging;
mod report;
mod sandbox;
mod scale;
mod syscalls;
mod throughput;
mod volume;
mod worker;

use crate::failure::Outcome;
use clap::{Args, Subcommand};

/// Measure boots, memory, density, throughput and system calls.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw bench boot hello-python --boot warm -n 1000 --json\n  \
    thaw bench boot --all --output results")]
pub struct Arguments {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, Subcommand)]
enum Subject {
    Boot(boot::Arguments),
    Sandbox(sandbox::Arguments),
    Scale(scale::Arguments),
    Throughput(throughput::Arguments),
    Handoff(handoff::Arguments),
    Hibernate(hibernate::Arguments),
    Ablation(ablation::Arguments),
    Afar(afar::Arguments),
    Paging(paging::Arguments),
    Density(density::Arguments),
    Mix(mix::Arguments),
    Syscalls(syscalls::Arguments),
    Volume(volume::Arguments),
    Check(check::Arguments),
    Worker(worker::Arguments),
}

pub fn run(arguments: &Arguments) -> Outcome {
    match &arguments.subject {
        Subject::Boot(arguments) => boot::run(arguments),
        Subject::Sandbox(arguments) => sandbox::run(arguments),
        Subject::Scale(arguments) => scale::run(arguments),
        Subject::Throughput(arguments) => throughput::run(arguments),
        Subject::Handoff(arguments) => handoff::run(arguments),
        Subject::Hibernate(arguments) => hibernate::run(arguments),
        Subject::Afar(arguments) => afar::run(arguments),
        Subject::Ablation(arguments) => ablation::run(arguments),
        Subject::Paging(arguments) => paging::run(arguments),
        Subject::Density(arguments) => density::run(arguments),
        Subject::Mix(arguments) => mix::run(arguments),
        Subject::Syscalls(arguments) => syscalls::run(arguments),
        Subject::Volume(arguments) => volume::run(arguments),
        Subject::Check(arguments) => check::run(arguments),
        Subject::Worker(arguments) => Ok(worker::run(arguments)),
    }
}
