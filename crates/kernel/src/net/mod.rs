//! Sockets.

pub struct Network {}
