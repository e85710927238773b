//! Control socket messages on the host side.
