//! Guest memory as seen from the kernel.
//!
//! The guest shares the kernel's address space, but its addresses are never
//! dereferenced directly: a guest may pass anything. Copies go through one
//! routine of the platform whose faults are caught ([`Memory::copy`]) and come back as
//! `EFAULT`.
#![allow(unsafe_code)]

use alloc::vec;
use alloc::vec::Vec;
use bytemuck::{AnyBitPattern, NoUninit, Zeroable};
use thaw_abi::layout::GUEST_MAX;

use crate::errno::{Errno, Result};
use crate::machine::{Machine, Memory};

/// An address in guest memory, unchecked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
#[repr(transparent)]
pub struct UserAddress(pub u64);

impl UserAddress {
    /// The null pointer.
    pub const NULL: UserAddress = UserAddress(0);

    /// Whether this is the null pointer.
    pub fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further on; wraps, since every use is checked anyway.
    pub fn offset(self, bytes: u64) -> UserAddress {
        UserAddress(self.0.wrapping_add(bytes))
    }

    /// `EFAULT` unless `len` bytes from here lie in the guest's part of the
    /// address space. Says nothing about whether they are mapped.
    pub fn check(self, len: usize) -> Result<()> {
        match self.0.checked_add(len as u64) {
            Some(end) if end <= GUEST_MAX => Ok(()),
            _ => Err(Errno::EFAULT),
        }
    }

    /// Fills `to` from guest memory.
    pub fn read_bytes(self, to: &mut [u8]) -> Result<()> {
        self.check(to.len())?;
        // SAFETY: `to` is valid for writing; reads that fault are caught.
        match unsafe { Machine::copy(to.as_mut_ptr(), self.0 as *const u8, to.len()) } {
            0 => Ok(()),
            _ => Err(Errno::EFAULT),
        }
    }

    /// Writes `from` to guest memory.
    pub fn write_bytes(self, from: &[u8]) -> Result<()> {
        match self.write_some(from) {
            Ok(n) if n == from.len() => Ok(()),
            _ => Err(Errno::EFAULT),
        }
    }

    /// Writes as much of `from` as is mapped and returns how much that was.
    pub fn write_some(self, from: &[u8]) -> Result<usize> {
        self.check(from.len())?;
        // SAFETY: `from` is valid for reading; writes that fault are caught.
        let left = unsafe { Machine::copy(self.0 as *mut u8, from.as_ptr(), from.len()) };
        Ok(from.len() - left)
    }

    /// Writes `len` zero bytes.
    pub fn write_zeros(self, len: usize) -> Result<()> {
        const ZEROS: [u8; 256] = [0; 256];
        self.check(len)?;
        let mut done = 0;
        while done < len {
            let step = (len - done).min(ZEROS.len());
            self.offset(done as u64).write_bytes(&ZEROS[..step])?;
            done += step;
        }
        Ok(())
    }

    /// Reads a value.
    pub fn read<T: AnyBitPattern>(self) -> Result<T> {
        let mut value = <T as Zeroable>::zeroed();
        self.check(size_of::<T>())?;
        // SAFETY: `value` is valid for writing and any bit pattern is a `T`;
        // reads that fault are caught.
        let left =
            unsafe { Machine::copy((&raw mut value).cast(), self.0 as *const u8, size_of::<T>()) };
        if left == 0 { Ok(value) } else { Err(Errno::EFAULT) }
    }

    /// Writes a value.
    pub fn write<T: NoUninit>(self, value: &T) -> Result<()> {
        self.write_bytes(bytemuck::bytes_of(value))
    }

    /// Writes a value unless this is the null pointer.
    pub fn write_if_some<T: NoUninit>(self, value: &T) -> Result<()> {
        if self.is_null() { Ok(()) } else { self.write(value) }
    }

    /// Reads `count` values that lie one after the other.
    pub fn read_array<T: AnyBitPattern + NoUninit>(self, count: usize) -> Result<Vec<T>> {
        let len = count.checked_mul(size_of::<T>()).ok_or(Errno::EFAULT)?;
        self.check(len)?;
        let mut values = vec![<T as Zeroable>::zeroed(); count];
        self.read_bytes(bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Reads a NUL-terminated string of at most `max` bytes, terminator
    /// excluded; `ENAMETOOLONG` if it is longer.
    pub fn read_string(self, max: usize) -> Result<Vec<u8>> {
        let mut string = Vec::new();
        let mut chunk = [0u8; 256];
        loop {
            let at = self.offset(string.len() as u64);
            // Stop at page ends: the page after the terminator may be unmapped.
            let to_page_end = 4096 - (at.0 as usize & 4095);
            let step = to_page_end.min(chunk.len());
            at.read_bytes(&mut chunk[..step])?;
            if let Some(end) = chunk[..step].iter().position(|&b| b == 0) {
                string.extend_from_slice(&chunk[..end]);
                return if string.len() > max { Err(Errno::ENAMETOOLONG) } else { Ok(string) };
            }
            string.extend_from_slice(&chunk[..step]);
            if string.len() > max {
                return Err(Errno::ENAMETOOLONG);
            }
        }
    }

    /// Reads a path: a string of at most `PATH_MAX - 1` bytes.
    pub fn read_path(self) -> Result<Vec<u8>> {
        self.read_string(4095)
    }

    /// Atomically replaces a 32-bit word by what `change` makes of it: the old
    /// value, as `Err` if `change` wants none. `EINVAL` if misaligned.
    pub fn update_u32(
        self,
        mut change: impl FnMut(u32) -> Option<u32>,
    ) -> Result<core::result::Result<u32, u32>> {
        let mut old = self.load_u32()?;
        loop {
            let Some(new) = change(old) else { return Ok(Err(old)) };
            // SAFETY: the address is below GUEST_MAX, since it was loaded from;
            // a fault is caught.
            let found = unsafe { Machine::compare_exchange(self.0 as *mut u32, old, new) };
            match found.ok_or(Errno::EFAULT)? {
                found if found == old => return Ok(Ok(old)),
                found => old = found,
            }
        }
    }

    /// Atomically loads a 32-bit word, `EINVAL` if misaligned (futex(2)).
    pub fn load_u32(self) -> Result<u32> {
        if self.0 & 3 != 0 {
            return Err(Errno::EINVAL);
        }
        self.read::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address<T>(value: &T) -> UserAddress {
        UserAddress(value as *const T as u64)
    }

    #[test]
    fn copies_every_length() {
        // Test memory lies above GUEST_MAX on the host, so use the routine itself.
        let from: Vec<u8> = (0..200).collect();
        for len in 0..=200 {
            let mut to = vec![0xffu8; 201];
            // SAFETY: both are valid for `len` bytes.
            let left = unsafe { Machine::copy(to.as_mut_ptr(), from.as_ptr(), len) };
            assert_eq!(left, 0);
            assert_eq!(&to[..len], &from[..len]);
            assert_eq!(to[len], 0xff);
        }
    }

    #[test]
    fn kernel_addresses_are_refused() {
        assert_eq!(UserAddress(GUEST_MAX).read::<u64>(), Err(Errno::EFAULT));
        assert_eq!(UserAddress(u64::MAX - 3).read::<u64>(), Err(Errno::EFAULT));
        assert_eq!(address(&0u64).check(0).is_ok(), address(&0u64).0 <= GUEST_MAX);
    }
}
