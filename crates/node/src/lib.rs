#![doc = include_str!("../README.md")]

pub mod clock;
pub mod config;
pub mod gateway;
pub mod home;
