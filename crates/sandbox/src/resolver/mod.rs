//! The resolver process: asks the host's resolver for the addresses of names.
//!
//! Answers of name servers are made by whoever has the name, which may be a guest's
//! accomplice, and the C library parses them. So whoever does that has the network, copies
//! of the few files that it takes, and no rights.
//!
//! ```text
//! caller (daemon, thaw run, thaw build)   judges names and addresses, keeps the limits
//!    │ asks for a worker                      │ question, answer: on a socket of their own
//!  socket                                     │
//!    ▼                                        │
//! resolver process   without rights, in a     │
//!    │ forks         root directory of its    │
//!    ▼               own; reads no question   │
//! worker  ◀───────────────────────────────────┘
//!         one for each question; it ends with the answer
//! ```
//!
//! A worker sees one question. So whoever takes it over, by an answer, has the question that
//! the answer is for, and no other of any tenant; the process that workers are forked from
//! has never seen one.
//!
//! It is this same executable ([`launch`]), which gives up everything ([`confine`]) and then
//! forks workers ([`serve`]). The caller starts it when a name is looked up first, and again
//! when it has ended or is old ([`handle`]): the files are copied anew then.

mod confine;
mod files;
mod filter;
mod handle;
mod launch;
mod protocol;
mod serve;

pub(crate) use handle::{LookUpError, look_up};
pub(crate) use launch::{Namespaces, launcher, main};
pub(crate) use protocol::Found;

/// Loads the modules that answer for names, for a process that can load no libraries afterwards.
pub fn load_name_modules() {
    if let Ok(files) = files::Files::read() {
        files.load_modules();
    }
}

#[cfg(test)]
mod tests;
