//! Where the admin API listens (`address`), and the secret of its clients over TCP (`token`).

mod address;
mod token;

pub use address::{AdminAddress, connect_unix, with_short_path};
pub use token::{AdminToken, TokenError};
