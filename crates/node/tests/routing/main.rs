//! Connections on which the gateway routes every request, over instances that are
//! threads of the test.

#[path = "../common/mod.rs"]
mod common;

mod answers;
mod bodies;
mod datagrams;
mod patience;
mod places;
mod room;
mod smuggling;
mod stdin;
mod upgrades;

use common::{Guest, field};
use std::sync::{Mutex, MutexGuard, PoisonError};

const SHARED: &str = "isolation = \"instance\"";

/// For tests that have hundreds of descriptors, or count those of the process: one at a time.
fn has_many_descriptors() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers every request of a connection with the instance and the path.
fn echo_path(guest: &mut Guest) {
    while let Some(request) = guest.request() {
        let path = request.head.split(' ').nth(1).unwrap().to_owned();
        guest.answer(format!("{} {path}", guest.instance));
        if field(&request.head, "connection").is_some_and(|options| options.contains("close")) {
            return;
        }
    }
}

/// Answers requests with their bodies.
fn echo_body(guest: &mut Guest) {
    while let Some(request) = guest.request() {
        guest.answer(&request.body);
    }
}
