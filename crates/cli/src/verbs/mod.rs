//! One verb a file: arguments, and a thin `run` that delegates.

pub mod bench;
pub mod build;
pub mod checkpoint;
pub mod checkpoints;
pub mod completions;
pub mod df;
pub mod doctor;
mod download;
pub mod fork;
pub mod freeze;
pub mod gc;
pub mod hibernate;
pub mod images;
pub mod import;
pub mod inspect;
pub mod invoke;
pub mod logs;
pub mod man;
pub mod monitor;
pub mod pack;
pub mod ps;
pub mod pull;
pub mod push;
pub mod remove;
pub mod restore;
pub mod run;
pub mod serve;
pub mod sleep;
pub mod tenants;
pub mod wake;

mod instance;
mod limits;
mod listen;
mod mounts;
mod publish;
mod terminal;
