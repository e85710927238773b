#![doc = include_str!("../README.md")]

pub mod admin;
pub mod admission;
mod allowance;
pub mod artifact;
pub mod asleep;
mod beneath;
pub mod boots;
pub mod build;
pub mod catalog;
pub mod clock;
pub mod config;
pub mod container;
pub mod crashes;
pub mod debug;
pub mod edge;
pub mod function;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod gateway;
pub mod health;
pub mod history;
pub mod home;
pub mod init;
pub mod inject;
pub mod instance;
mod joined;
pub mod legacy;
pub mod logs;
pub mod metrics;
pub mod monitor;
pub mod node;
pub mod packing;
mod partial;
pub mod pressure;
pub mod pulls;
pub mod reactor;
pub mod replace;
pub mod rollout;
pub mod rootfs;
pub mod sandboxes;
mod schema;
pub mod seal;
pub mod secrets;
pub mod service;
pub mod socket;
pub mod state_file;
pub mod swap;
pub mod tenants;
pub mod to_its_end;
pub mod traces;
pub mod triggers;
pub mod upstream;
pub mod usage;
pub mod volumes;
pub mod watch;
pub mod work;

pub use partial::kernels_of_partial;

/// `PATH` of programs in sandboxes, unless their author sets another.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
