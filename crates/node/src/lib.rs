#![doc = include_str!("../README.md")]

pub mod admission;
mod allowance;
pub mod artifact;
pub mod asleep;
pub mod boots;
pub mod build;
pub mod catalog;
pub mod container;
pub mod crashes;
pub mod edge;
mod far;
pub mod gateway;
pub mod health;
pub mod history;
pub mod init;
pub mod inject;
pub mod instance;
mod joined;
pub mod legacy;
pub mod logs;
pub mod metrics;
pub mod node;
pub mod packing;
pub mod pressure;
pub mod pulls;
pub mod reactor;
pub mod rollout;
pub mod sandboxes;
pub mod service;
pub mod socket;
pub mod swap;
pub mod tenants;
pub mod to_its_end;
pub mod traces;
pub mod triggers;
pub mod upstream;
pub mod usage;
pub mod watch;
pub mod work;

/// `PATH` of programs in sandboxes, unless their author sets another.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
