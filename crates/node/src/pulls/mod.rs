//! Pulls that the daemon has begun: of functions of which only a part is here and that nobody fetches
//! (docs/decisions/0061), and those that clients of the admin API ask for.
//!
//! The daemon talks to no registry and parses nothing of one. Each pull has a process of its own, the
//! *fetcher*: this executable, started by the monitor, with the rights of the daemon and less
//! (`thaw_daemon::fetching`). The daemon says what is to be pulled ([`Order`]), and the fetcher says how far it is
//! ([`News`]), in lines of JSON over one socket. With the socket the fetcher ends.
//!
//! ```text
//! daemon ── REQUEST_FETCHER ──▶ monitor ── starts ──▶ fetcher ── HTTPS ──▶ registry
//!   │ Order, News ◀────────────── socket ────────────────▶ │
//!   │ "which part?" ◀── $THAW_HOME/partial/NAME/socket ──▶ │ partial/NAME, pieces, store
//! ```

mod book;
mod options;
mod order;

pub use book::{Counted, Fetching, NewPull, PullInfo, PullState, Pulls, PullsError};
pub use options::options_of;
pub use order::{News, Order, hear, say};
