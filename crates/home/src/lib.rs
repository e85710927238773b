#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod admin;
pub mod beneath;
pub mod clock;
pub mod config;
pub mod cron;
pub mod debug;
pub mod function;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod home;
pub mod partial;
pub mod replace;
pub mod rootfs;
mod schema;
pub mod seal;
pub mod secrets;
pub mod state_file;
pub mod tenants;
pub mod user;
pub mod volumes;
pub mod waiting;
pub mod working_set;
