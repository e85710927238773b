//! Pointers into guest memory that know what lies there.

use alloc::vec::Vec;
use core::fmt;
use core::marker::PhantomData;

use bytemuck::{AnyBitPattern, NoUninit};

use super::{Argument, Kind};
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;

/// Largest structure of a call that says how large it is: a page (`copy_struct_from_user`).
const EXTENSIBLE_MAX: usize = 4096;

/// The address of a `T`, or of the first of several, in guest memory. Nothing is known of the
/// address: each access is checked, and fails with `EFAULT`.
#[repr(transparent)]
pub struct UserPtr<T>(pub UserAddress, PhantomData<fn(T) -> T>);

impl<T> Clone for UserPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for UserPtr<T> {}

impl<T> fmt::Debug for UserPtr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T> Argument for UserPtr<T> {
    const KIND: Kind = Kind::Hex;

    #[inline]
    fn from_register(register: u64) -> Self {
        Self::new(UserAddress(register))
    }
}

impl<T> UserPtr<T> {
    /// The null pointer.
    pub const NULL: Self = Self::new(UserAddress::NULL);

    /// A pointer to what lies at an address.
    pub const fn new(at: UserAddress) -> Self {
        Self(at, PhantomData)
    }

    /// Whether this is the null pointer.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The pointer, unless it is null.
    pub fn non_null(self) -> Option<Self> {
        (!self.is_null()).then_some(self)
    }

    /// The pointer to the element `index` places further on; wraps, since each access is
    /// checked anyway.
    pub fn at(self, index: usize) -> Self {
        Self::new(self.0.offset((index as u64).wrapping_mul(size_of::<T>() as u64)))
    }

    /// `EFAULT` unless `count` elements lie in the guest's part of the address space, mapped
    /// or not.
    pub fn check(self, count: usize) -> Result<()> {
        self.0.check(count.checked_mul(size_of::<T>()).ok_or(Errno::EFAULT)?)
    }
}

impl<T: AnyBitPattern> UserPtr<T> {
    /// Reads the value.
    pub fn read(self) -> Result<T> {
        self.0.read()
    }

    /// Reads the value, unless this is the null pointer.
    pub fn read_if_some(self) -> Result<Option<T>> {
        self.non_null().map(Self::read).transpose()
    }
}

impl<T: AnyBitPattern + NoUninit> UserPtr<T> {
    /// Reads `count` values.
    pub fn read_array(self, count: usize) -> Result<Vec<T>> {
        self.0.read_array(count)
    }

    /// Fills `values`.
    pub fn read_slice(self, values: &mut [T]) -> Result<()> {
        self.0.read_bytes(bytemuck::cast_slice_mut(values))
    }

    /// Reads a structure of which the guest has the first `size` bytes: the rest is zero, as in
    /// a call of an older program. `E2BIG` if a newer one has set fields that are not in `T`.
    pub fn read_extensible(self, size: usize) -> Result<T> {
        if size > EXTENSIBLE_MAX {
            return Err(Errno::E2BIG);
        }
        let known = size.min(size_of::<T>());
        let mut value = T::zeroed();
        self.0.read_bytes(&mut bytemuck::bytes_of_mut(&mut value)[..known])?;
        let rest = self.0.offset(known as u64).read_array::<u8>(size - known)?;
        if rest.iter().any(|&byte| byte != 0) { Err(Errno::E2BIG) } else { Ok(value) }
    }
}

impl<T: NoUninit> UserPtr<T> {
    /// Writes the value.
    pub fn write(self, value: &T) -> Result<()> {
        self.0.write(value)
    }

    /// Writes the value, unless this is the null pointer.
    pub fn write_if_some(self, value: &T) -> Result<()> {
        self.0.write_if_some(value)
    }

    /// Writes several values.
    pub fn write_slice(self, values: &[T]) -> Result<()> {
        self.0.write_bytes(bytemuck::cast_slice(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::space::{MapRequest, Placement};
    use crate::mm::vma::VmaFlags;
    use crate::task::current_process;
    use crate::testing::Sandbox;

    #[test]
    fn null_is_not_written_to() {
        assert!(UserPtr::<u32>::NULL.read_if_some().unwrap().is_none());
        assert_eq!(UserPtr::<u32>::NULL.write_if_some(&7), Ok(()));
        assert_eq!(UserPtr::<u32>::NULL.at(2).0, UserAddress(8));
        assert_eq!(UserPtr::<u64>::NULL.check(usize::MAX), Err(Errno::EFAULT));
    }

    /// A page of guest memory.
    fn page() -> UserPtr<u32> {
        let request = MapRequest {
            placement: Placement::Hint(0),
            len: 4096,
            prot: 3,
            flags: VmaFlags::empty(),
            file: None,
            offset: 0,
        };
        UserPtr::new(UserAddress(current_process().mm().map(request).unwrap()))
    }

    #[test]
    fn elements_lie_one_after_the_other() {
        let _sandbox = Sandbox::new();
        let page = page();
        page.write_slice(&[1, 2, 3]).unwrap();
        assert_eq!(page.at(2).read(), Ok(3));
        assert_eq!(page.read_array(4), Ok(alloc::vec![1, 2, 3, 0]));
        let mut two = [0; 2];
        page.at(1).read_slice(&mut two).unwrap();
        assert_eq!(two, [2, 3]);
    }

    #[test]
    fn a_structure_may_be_older_or_newer_than_the_kernel() {
        let _sandbox = Sandbox::new();
        let words = page();
        words.write_slice(&[1, 2, 3, 0, 5]).unwrap();
        let structure = UserPtr::<[u32; 3]>::new(words.0);
        assert_eq!(structure.read_extensible(8), Ok([1, 2, 0]));
        assert_eq!(structure.read_extensible(12), Ok([1, 2, 3]));
        assert_eq!(structure.read_extensible(16), Ok([1, 2, 3]));
        assert_eq!(structure.read_extensible(20), Err(Errno::E2BIG));
        assert_eq!(structure.read_extensible(4097), Err(Errno::E2BIG));
    }
}
