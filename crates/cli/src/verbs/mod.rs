//! One verb a file: arguments, and a thin `run` that delegates.

pub mod doctor;
pub mod run;
