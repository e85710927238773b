//! Functions of which only a part is here (docs/decisions/0035).
//!
//! `$THAW_HOME/partial/NAME` holds what a boot needs, and a socket behind which a fetcher
//! (`thaw_build::artifact`; the process of `thaw pull --lazy`, or one that the daemon has started,
//! `thaw_node::pulls`) gets what is missing:
//!
//! ```text
//! record.json   the function, its document, and the hash of what a boot needs
//! index         the index of its files
//! image         its image: the part before the memory, and the ranges that were touched
//! working-set   what a request touches
//! prefetch      the pages of that, and all memory of the kernel
//! kernel        the kernel build, if it came along
//! contents/N    content N, whole; N.part: the ranges of it that were touched
//! socket        asked for contents and segments by number (`protocol`)
//! manifest      names the pieces; its digest is in the record
//! lock          held by the fetcher
//! ```
//!
//! Nothing in `image` and `contents` is used before the fetcher has said that it is there.

mod protocol;
mod record;
mod rows;

pub use protocol::{
    Question, RECORD_HASH, Reply, ask, read_question, receive, take_reply, write_reply,
};
pub use record::{
    PartialFunction, PartialLength, PartialRecord, PieceSource, RecordIdentity, directory_beside,
    hash_of_run, identity, is_being_fetched, is_partial, kernels_of_partial, length_of, lengths,
    names, parts,
};
pub use rows::Rows;
