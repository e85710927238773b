//! Those who fetch what the daemon has pulled ([`thaw_node::pulls`]): the daemon's side (`driver`), and the
//! process of each pull (`process`).

mod driver;
mod process;

pub use process::fetcher_main;

pub(crate) use driver::{OnReload, keep_fetching};
pub(crate) use process::command;
