//! Arguments of system calls.

use crate::errno::Result;
use crate::platform::user::UserAddress;

/// The six argument registers of a system call (syscall(2)).
#[derive(Clone, Copy, Debug)]
pub struct Args(pub [u64; 6]);

impl Args {
    /// An argument as the kernel's `long`.
    pub fn u64(&self, index: usize) -> u64 {
        self.0[index]
    }
    /// An argument as `off_t` or `ssize_t`.
    pub fn i64(&self, index: usize) -> i64 {
        self.0[index] as i64
    }
    /// An argument as `unsigned int`: the upper half is ignored, as Linux does.
    pub fn u32(&self, index: usize) -> u32 {
        self.0[index] as u32
    }
    /// An argument as `int`.
    pub fn i32(&self, index: usize) -> i32 {
        self.0[index] as i32
    }
    /// An argument as `size_t`.
    pub fn usize(&self, index: usize) -> usize {
        self.0[index] as usize
    }
    /// An argument as a guest pointer.
    pub fn address(&self, index: usize) -> UserAddress {
        UserAddress(self.0[index])
    }
    /// An argument as a file descriptor.
    pub fn fd(&self, index: usize) -> i32 {
        self.0[index] as i32
    }
}

/// A system call handler: check, fetch the object, call its method, return.
pub type Handler = fn(&Args) -> Result<u64>;
