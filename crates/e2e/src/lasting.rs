//! The program `lasting` of `tests/guest/functions`, which remembers: who counts on is who was there before.

use crate::{Function, get};
use std::net::SocketAddr;

/// `thaw.toml` of an instance that stays.
pub const LASTING_KEYS: &str =
    "isolation = \"instance\"\n[limits]\nconcurrency = 32\ntimeout = \"60s\"\nkeep_alive = \"10m\"";

/// A function of it.
pub fn lasting(name: &'static str, keys: &'static str) -> Function {
    Function::PythonVariant { program: "lasting", name, keys }
}

/// One of it at an address of its own, that speaks no HTTP ([`crate::Lines`]).
pub fn lasting_lines(address: SocketAddr) -> Function {
    let keys = format!(
        "isolation = \"instance\"\nlisten = \"{address}\"\n[entry]\nkind = \"tcp\"\n\
         [limits]\ninstances = 1\nconcurrency = 32\nkeep_alive = \"10m\""
    );
    lasting("lines", keys.leak())
}

/// How many requests an instance has had, with this one.
///
/// # Panics
/// There is no answer, or another one.
#[track_caller]
pub fn count(gateway: SocketAddr, function: &str) -> u32 {
    let response = get(gateway, function, "/count");
    assert_eq!(response.status, 200, "{}", response.text());
    response.text().trim().parse().expect("a number")
}
