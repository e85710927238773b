//! File systems.

pub mod fd_table;
pub mod file;
pub mod path;

pub struct FileSystems {}
pub struct FsContext {}
