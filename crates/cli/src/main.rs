//! The `thaw` command.

fn main() {}
