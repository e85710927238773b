//! Where reads put bytes and writes take them from.
//!
//! A [`Sink`] or [`Source`] is a list of memory segments with a position: the
//! buffers of a `readv`, one buffer of a `read`, or kernel memory. Guest
//! segments may fault; then the operation moves what it can.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::marker::PhantomData;

use crate::errno::{Errno, Result};
use crate::machine::{Machine, Memory};
use crate::user::UserAddress;

/// Most segments in one call (`IOV_MAX`, readv(2)).
pub const IOV_MAX: usize = 1024;
/// Most bytes that one call moves (read(2), NOTES).
pub const MAX_RW_COUNT: usize = 0x7fff_f000;

/// A buffer of `readv` and `writev`: `struct iovec`.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct IoVec {
    /// First byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

/// Memory that one host call fills: guest memory, which may fault, or a buffer of the
/// kernel.
#[derive(Debug)]
pub struct IoSliceMut<'a> {
    address: u64,
    len: usize,
    lifetime: PhantomData<&'a mut [u8]>,
}

impl IoSliceMut<'_> {
    /// Guest memory; `EFAULT` if it is not in the guest's part of the address space.
    pub fn user(at: UserAddress, len: usize) -> Result<IoSliceMut<'static>> {
        at.check(len)?;
        Ok(IoSliceMut { address: at.0, len, lifetime: PhantomData })
    }

    /// Memory of the kernel to which there is no reference.
    ///
    /// # Safety
    /// Nobody may use `len` bytes from `address` on for as long as this is used, and any
    /// bytes must make sense there.
    pub unsafe fn of_kernel(address: u64, len: usize) -> IoSliceMut<'static> {
        IoSliceMut { address, len, lifetime: PhantomData }
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Leaves out the next `bytes`, which were filled.
    pub fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.len, "more bytes than there are");
        self.address += bytes as u64;
        self.len -= bytes;
    }

    /// The first `len` bytes, or all of them if they are fewer.
    pub fn first(&mut self, len: usize) -> IoSliceMut<'_> {
        IoSliceMut { address: self.address, len: self.len.min(len), lifetime: PhantomData }
    }
}

impl<'a> From<&'a mut [u8]> for IoSliceMut<'a> {
    fn from(buffer: &'a mut [u8]) -> Self {
        Self { address: buffer.as_mut_ptr() as u64, len: buffer.len(), lifetime: PhantomData }
    }
}

/// Memory that one host call takes bytes from: guest memory, which may fault, or a buffer
/// of the kernel.
#[derive(Clone, Copy, Debug)]
pub struct IoSlice<'a> {
    address: u64,
    len: usize,
    lifetime: PhantomData<&'a [u8]>,
}

impl IoSlice<'_> {
    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `len` bytes, or all of them if they are fewer.
    pub fn first(self, len: usize) -> Self {
        Self { len: self.len.min(len), ..self }
    }
}

impl<'a> From<&'a [u8]> for IoSlice<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { address: bytes.as_ptr() as u64, len: bytes.len(), lifetime: PhantomData }
    }
}

struct Segments {
    first: IoVec,
    rest: Vec<IoVec>,
    index: usize,
    offset: usize,
    left: usize,
}

impl Segments {
    fn single(base: u64, len: usize) -> Self {
        let len = len.min(MAX_RW_COUNT);
        Self {
            first: IoVec { base, len: len as u64 },
            rest: Vec::new(),
            index: 0,
            offset: 0,
            left: len,
        }
    }

    /// Reads and checks a guest's array of `struct iovec`.
    fn from_user(vectors: UserAddress, count: usize) -> Result<Self> {
        if count > IOV_MAX {
            return Err(Errno::EINVAL);
        }
        let mut rest: Vec<IoVec> = vectors.read_array(count)?;
        let mut total = 0usize;
        for vector in &mut rest {
            if vector.len > i64::MAX as u64 {
                return Err(Errno::EINVAL);
            }
            UserAddress(vector.base).check(vector.len as usize)?;
            vector.len = vector.len.min((MAX_RW_COUNT - total) as u64);
            total += vector.len as usize;
        }
        Ok(Self { first: IoVec { base: 0, len: 0 }, rest, index: 0, offset: 0, left: total })
    }

    /// Drops everything beyond the next `bytes`.
    fn limit(&mut self, bytes: usize) {
        self.left = self.left.min(bytes);
    }

    fn current(&mut self) -> Option<(u64, usize)> {
        if self.left == 0 {
            return None;
        }
        loop {
            let vector =
                if self.index == 0 { &self.first } else { self.rest.get(self.index - 1)? };
            let left = vector.len as usize - self.offset;
            if left > 0 {
                return Some((vector.base + self.offset as u64, left.min(self.left)));
            }
            self.index += 1;
            self.offset = 0;
        }
    }

    fn advance(&mut self, mut bytes: usize) {
        while bytes > 0 {
            let Some((_, len)) = self.current() else { return };
            let step = len.min(bytes);
            self.offset += step;
            self.left -= step;
            bytes -= step;
        }
    }
}

/// Memory that a read fills.
pub struct Sink<'a> {
    segments: Segments,
    lifetime: PhantomData<&'a mut [u8]>,
}

impl<'a> Sink<'a> {
    /// Guest memory; `EFAULT` if it is not in the guest's part of the address space.
    pub fn user(at: UserAddress, len: usize) -> Result<Sink<'static>> {
        at.check(len.min(MAX_RW_COUNT))?;
        Ok(Sink { segments: Segments::single(at.0, len), lifetime: PhantomData })
    }

    /// Guest memory described by an array of `struct iovec`.
    pub fn user_vectors(vectors: UserAddress, count: usize) -> Result<Sink<'static>> {
        Ok(Sink { segments: Segments::from_user(vectors, count)?, lifetime: PhantomData })
    }

    /// Kernel memory.
    pub fn kernel(buffer: &'a mut [u8]) -> Sink<'a> {
        Sink {
            segments: Segments::single(buffer.as_mut_ptr() as u64, buffer.len()),
            lifetime: PhantomData,
        }
    }

    /// Bytes that still fit.
    pub fn remaining(&self) -> usize {
        self.segments.left
    }

    /// Appends as much of `bytes` as fits and returns how much that was.
    /// `EFAULT` only if nothing could be written.
    pub fn put(&mut self, mut bytes: &[u8]) -> Result<usize> {
        let mut done = 0;
        while !bytes.is_empty() {
            let Some((base, len)) = self.segments.current() else { break };
            let step = len.min(bytes.len());
            // SAFETY: `base` is checked guest memory or a live kernel buffer;
            // `bytes` is valid; faults are caught.
            let left = unsafe { Machine::copy(base as *mut u8, bytes.as_ptr(), step) };
            let copied = step - left;
            self.segments.advance(copied);
            done += copied;
            if left > 0 {
                return if done > 0 { Ok(done) } else { Err(Errno::EFAULT) };
            }
            bytes = &bytes[step..];
        }
        Ok(done)
    }

    /// As [`Sink::put`], as far as no page of a file has to be mapped for it: 0 if
    /// the first byte needs that.
    pub fn put_where_present(&mut self, bytes: &[u8]) -> usize {
        let mut done = 0;
        while let Some((base, len)) = self.segments.current().filter(|_| done < bytes.len()) {
            let step = len.min(bytes.len() - done);
            // SAFETY: as in `put`.
            let left =
                unsafe { Machine::copy_present(base as *mut u8, bytes[done..].as_ptr(), step) };
            self.segments.advance(step - left);
            done += step - left;
            if left > 0 {
                break;
            }
        }
        done
    }

    /// Copies at most `len` bytes from `from` and returns how many. Fewer: a fault on either side, or
    /// a page of a file would have to be mapped.
    ///
    /// # Safety
    /// Nobody writes to these `len` bytes by a reference. They need not be there.
    pub unsafe fn copy_present_from(&mut self, from: *const u8, len: usize) -> usize {
        let mut done = 0;
        while let Some((base, piece)) = self.segments.current().filter(|_| done < len) {
            let step = piece.min(len - done);
            // SAFETY: `base` is checked guest memory or a live kernel buffer, the other side is
            // the caller's promise; faults are caught.
            let left =
                unsafe { Machine::copy_present(base as *mut u8, from.wrapping_add(done), step) };
            self.segments.advance(step - left);
            done += step - left;
            if left > 0 {
                break;
            }
        }
        done
    }

    /// Appends up to `count` zero bytes.
    pub fn put_zeros(&mut self, count: usize) -> Result<usize> {
        const ZEROS: [u8; 512] = [0; 512];
        let mut done = 0;
        while done < count && self.remaining() > 0 {
            let step = (count - done).min(ZEROS.len());
            match self.put(&ZEROS[..step]) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// The next contiguous piece, for a host call that fills it; follow with
    /// [`Sink::advance`].
    pub fn next_piece(&mut self) -> Option<IoSliceMut<'_>> {
        let (address, len) = self.segments.current()?;
        Some(IoSliceMut { address, len, lifetime: PhantomData })
    }

    /// Notes that `bytes` were filled.
    pub fn advance(&mut self, bytes: usize) {
        self.segments.advance(bytes);
    }
}

/// Memory that a write takes bytes from.
pub struct Source<'a> {
    segments: Segments,
    lifetime: PhantomData<&'a [u8]>,
}

impl<'a> Source<'a> {
    /// Guest memory; `EFAULT` if it is not in the guest's part of the address space.
    pub fn user(at: UserAddress, len: usize) -> Result<Source<'static>> {
        at.check(len.min(MAX_RW_COUNT))?;
        Ok(Source { segments: Segments::single(at.0, len), lifetime: PhantomData })
    }

    /// Guest memory described by an array of `struct iovec`.
    pub fn user_vectors(vectors: UserAddress, count: usize) -> Result<Source<'static>> {
        Ok(Source { segments: Segments::from_user(vectors, count)?, lifetime: PhantomData })
    }

    /// Kernel memory.
    pub fn kernel(buffer: &'a [u8]) -> Source<'a> {
        Source {
            segments: Segments::single(buffer.as_ptr() as u64, buffer.len()),
            lifetime: PhantomData,
        }
    }

    /// Several pieces of kernel memory.
    pub fn kernel_pieces(pieces: &[&'a [u8]]) -> Source<'a> {
        let vector = |piece: &&[u8]| IoVec { base: piece.as_ptr() as u64, len: piece.len() as u64 };
        let rest: Vec<IoVec> = pieces.iter().map(vector).collect();
        let left = rest.iter().map(|vector| vector.len as usize).sum();
        let first = IoVec { base: 0, len: 0 };
        let segments = Segments { first, rest, index: 0, offset: 0, left };
        Source { segments, lifetime: PhantomData }
    }

    /// Bytes left to take.
    pub fn remaining(&self) -> usize {
        self.segments.left
    }

    /// Gives up all but the next `bytes`.
    pub fn limit(&mut self, bytes: usize) {
        self.segments.limit(bytes);
    }

    /// Copies at most `len` bytes to `to` and returns how many. Fewer: a fault on either side, or a
    /// page of a file would have to be mapped.
    ///
    /// # Safety
    /// Nobody has a reference to these `len` bytes. They need not be there.
    pub unsafe fn copy_present_to(&mut self, to: *mut u8, len: usize) -> usize {
        let mut done = 0;
        while let Some((base, piece)) = self.segments.current().filter(|_| done < len) {
            let step = piece.min(len - done);
            // SAFETY: `base` is checked guest memory or a live kernel buffer, the other side is
            // the caller's promise; faults are caught.
            let left =
                unsafe { Machine::copy_present(to.wrapping_add(done), base as *const u8, step) };
            self.segments.advance(step - left);
            done += step - left;
            if left > 0 {
                break;
            }
        }
        done
    }

    /// Fills as much of `buffer` as there is and returns how much that was.
    /// `EFAULT` only if nothing could be read.
    pub fn take(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let Some((base, len)) = self.segments.current() else { break };
            let step = len.min(buffer.len() - done);
            // SAFETY: `base` is checked guest memory or a live kernel buffer;
            // `buffer` is valid; faults are caught.
            let left =
                unsafe { Machine::copy(buffer[done..].as_mut_ptr(), base as *const u8, step) };
            let copied = step - left;
            self.segments.advance(copied);
            done += copied;
            if left > 0 {
                return if done > 0 { Ok(done) } else { Err(Errno::EFAULT) };
            }
        }
        Ok(done)
    }

    /// As [`Source::take`], as far as no page of a file has to be mapped for it: 0 if
    /// the first byte needs that.
    pub fn take_where_present(&mut self, buffer: &mut [u8]) -> usize {
        let mut done = 0;
        while let Some((base, len)) = self.segments.current().filter(|_| done < buffer.len()) {
            let step = len.min(buffer.len() - done);
            // SAFETY: as in `take`.
            let left = unsafe {
                Machine::copy_present(buffer[done..].as_mut_ptr(), base as *const u8, step)
            };
            self.segments.advance(step - left);
            done += step - left;
            if left > 0 {
                break;
            }
        }
        done
    }

    /// Has pages of files mapped that the bytes come from, as far as they are there: what is taken
    /// [where it is present](Source::take_where_present) then is all of it.
    pub fn touch(&mut self) {
        const PAGE: usize = 4096;
        let (index, offset, left) = (self.segments.index, self.segments.offset, self.segments.left);
        let mut byte = 0_u8;
        while let Some((base, len)) = self.segments.current() {
            // SAFETY: `base` is checked guest memory or a live kernel buffer; faults are caught.
            if unsafe { Machine::copy(&raw mut byte, base as *const u8, 1) } > 0 {
                break;
            }
            self.segments.advance(len.min(PAGE - base as usize % PAGE));
        }
        (self.segments.index, self.segments.offset, self.segments.left) = (index, offset, left);
    }

    /// Whether the next byte can be taken with no page of a file to be mapped for it.
    pub fn next_is_present(&mut self) -> bool {
        let (index, offset, left) = (self.segments.index, self.segments.offset, self.segments.left);
        let taken = self.take_where_present(&mut [0]);
        (self.segments.index, self.segments.offset, self.segments.left) = (index, offset, left);
        taken == 1
    }

    /// As [`Source::take`], but leaves the bytes in the source.
    pub fn peek(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let (index, offset, left) = (self.segments.index, self.segments.offset, self.segments.left);
        let outcome = self.take(buffer);
        (self.segments.index, self.segments.offset, self.segments.left) = (index, offset, left);
        outcome
    }

    /// Takes everything that is left, at most `max` bytes (`EMSGSIZE` beyond).
    pub fn take_all(&mut self, max: usize) -> Result<Vec<u8>> {
        let len = self.remaining();
        if len > max {
            return Err(Errno::EMSGSIZE);
        }
        let mut bytes = alloc::vec![0; len];
        if self.take(&mut bytes)? != len {
            return Err(Errno::EFAULT);
        }
        Ok(bytes)
    }

    /// The next contiguous piece, for a host call that takes it; follow with
    /// [`Source::advance`].
    pub fn next_piece(&mut self) -> Option<IoSlice<'a>> {
        let (address, len) = self.segments.current()?;
        Some(IoSlice { address, len, lifetime: PhantomData })
    }

    /// Notes that `bytes` were taken.
    pub fn advance(&mut self, bytes: usize) {
        self.segments.advance(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_bytes_between_kernel_buffers() {
        let mut to = [0u8; 5];
        let mut sink = Sink::kernel(&mut to);
        assert_eq!(sink.put(b"abc"), Ok(3));
        assert_eq!(sink.put(b"defg"), Ok(2));
        assert_eq!(sink.remaining(), 0);
        assert_eq!(&to, b"abcde");

        let mut source = Source::kernel(b"hello");
        let mut head = [0u8; 2];
        assert_eq!(source.peek(&mut head), Ok(2));
        assert_eq!((&head, source.remaining()), (b"he", 5));
        assert_eq!(source.take(&mut head), Ok(2));
        assert_eq!(source.take_all(10).unwrap(), b"llo");
    }
}
