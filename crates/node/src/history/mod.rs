//! What the node has done lately: rates, times and states over the last hour.
//!
//! The metrics ([`crate::metrics`]) count since the start, for a collector that keeps the past.
//! This keeps a little of the past itself, for the dashboard and `thaw top`: a sample every five
//! seconds for an hour, of the node and of at most [`FUNCTIONS_MAX`](crate::metrics::FUNCTIONS_MAX) functions. A function costs
//! about 70 KB from its first request on.

mod sampler;
mod series;
mod stats;

pub use sampler::{History, INTERVAL};
pub use series::{COLUMNS, Column, Series, SeriesView};
pub use stats::{FunctionStats, NodeStats, Stats};
