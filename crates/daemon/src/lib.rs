#![doc = include_str!("../README.md")]

pub mod activation;
pub mod admin;
pub mod daemon;
pub mod dashboard;
pub mod deploy;
pub mod fetching;
pub mod monitor;
mod notification;
mod successor;
mod tls_listeners;
