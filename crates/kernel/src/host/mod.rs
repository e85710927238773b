//! What the sandbox has of its host while it runs: the control socket, requests to the
//! broker, descriptors of blobs, files and the
//! standard streams. All of it is of this boot.

pub mod blobs;
pub mod broker;
pub mod control;
pub mod files;
pub mod files_socket;
pub mod gate;
mod own_socket;
pub mod phases;
pub mod stdio;
pub mod volume_socket;
pub mod waiting;
