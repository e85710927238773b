//! What the node has done lately: rates, times and states over the last hour, and events.
//!
//! The metrics ([`crate::metrics`]) count since the start, for a collector that keeps the past.
//! This keeps a little of the past itself, for the dashboard and `thaw top`: a sample every five
//! seconds for an hour, of the node and of at most [`FUNCTIONS_MAX`] functions. A function costs
//! about 70 KB from its first request on.

mod events;
mod sampler;
mod series;
mod stats;
mod tally;

pub use events::{Event, EventKind, Events};
pub use sampler::{History, INTERVAL};
pub use series::{COLUMNS, Column, Series, SeriesView};
pub use stats::{FunctionStats, NodeStats, Stats};
pub(crate) use tally::Tallies;

/// Most functions that have a history of their own. All others share one, under the name `*`.
pub const FUNCTIONS_MAX: usize = 256;
/// Stands for all functions beyond; no function has this name.
pub const OTHERS: &str = "*";
