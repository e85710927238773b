//! Vector and x87 state of guest threads.
//!
//! The kernel uses the low halves of xmm0–15 only, which the entry code saves.
//! Everything else stays in the registers and is saved when another thread is
//! about to run, or the sandbox freezes.
#![allow(unsafe_code)]

use alloc::alloc::{Layout, alloc_zeroed, dealloc};
use core::arch::x86_64::_xgetbv;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::cpu;

/// Bytes of the legacy area and the header of an `xsave` area.
pub const LEGACY_AND_HEADER: usize = 576;

/// Bytes of an `xsave` area on this machine; 0 before [`size`] was called.
static SIZE: AtomicU32 = AtomicU32::new(0);

/// Bytes of an `xsave` area (standard format) for the enabled components
/// (CPUID leaf 0xD.0, EBX).
pub fn size() -> usize {
    let known = SIZE.load(Ordering::Relaxed);
    if known != 0 {
        return known as usize;
    }
    let size = cpu::area_size();
    SIZE.store(size, Ordering::Relaxed);
    size as usize
}

/// Other components are saved from now on.
pub(crate) fn forget_size() {
    SIZE.store(0, Ordering::Relaxed);
}

/// The state components (`XCR0`) that are enabled and that guest threads may have.
pub fn components() -> u64 {
    // SAFETY: XSAVE is a requirement, checked by `thaw doctor`.
    unsafe { xcr0() & cpu::components() }
}

/// Halves of the mask of components to save and load, as the instructions take it.
fn mask() -> (u32, u32) {
    let mask = cpu::components();
    (mask as u32, (mask >> 32) as u32)
}

#[target_feature(enable = "xsave")]
unsafe fn xcr0() -> u64 {
    // SAFETY: register 0 always exists.
    unsafe { _xgetbv(0) }
}

/// An `xsave` area in the kernel's heap.
pub struct FpuState {
    area: *mut u8,
    len: usize,
}

// SAFETY: plain memory, owned.
unsafe impl Send for FpuState {}
// SAFETY: no interior mutability through `&`.
unsafe impl Sync for FpuState {}

impl FpuState {
    /// State as after program start (System V ABI, 3.4.1): x87 control word
    /// 0x37f, MXCSR 0x1f80, everything else initial.
    pub fn initial() -> Self {
        let len = size().max(LEGACY_AND_HEADER);
        // SAFETY: the size is not zero.
        let area = unsafe { alloc_zeroed(Self::layout(len)) };
        assert!(!area.is_null(), "out of kernel memory");
        let mut state = Self { area, len };
        state.bytes_mut()[0..2].copy_from_slice(&0x37fu16.to_le_bytes());
        state.bytes_mut()[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
        state
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, 64).unwrap_or(Layout::new::<u64>())
    }

    /// The area.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length.
        unsafe { core::slice::from_raw_parts(self.area, self.len) }
    }

    /// The area.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length, borrowed mutably.
        unsafe { core::slice::from_raw_parts_mut(self.area, self.len) }
    }

    /// Saves the registers here.
    pub fn save(&mut self) {
        self.grow(size());
        let (low, high) = mask();
        // SAFETY: the area is large enough and aligned.
        unsafe {
            core::arch::asm!("xsave64 [{}]", in(reg) self.area, in("eax") low, in("edx") high, options(nostack));
        }
    }

    /// Has at least `len` bytes from now on. The image of a processor that has fewer components
    /// has shorter areas. Those that it lacks are initial, as the zeros say that they get.
    fn grow(&mut self, len: usize) {
        if self.len < len {
            // SAFETY: the size is not zero.
            let area = unsafe { alloc_zeroed(Self::layout(len)) };
            assert!(!area.is_null(), "out of kernel memory");
            let mut grown = Self { area, len };
            grown.bytes_mut()[..self.len].copy_from_slice(self.bytes());
            *self = grown;
        }
    }

    /// Becomes a copy of `other`.
    pub fn copy_from(&mut self, other: &Self) {
        self.grow(other.len);
        // Where this one is longer, the other lacks those components.
        self.bytes_mut()[other.len..].fill(0);
        self.bytes_mut()[..other.len].copy_from_slice(other.bytes());
    }

    /// Loads the registers from here. The area must be valid, as `save` and
    /// [`FpuState::sanitize`] leave it.
    pub fn load(&self) {
        let (low, high) = mask();
        // SAFETY: valid by the above; kernel code keeps nothing in the registers
        // across this call, since it clobbers them.
        unsafe {
            core::arch::asm!("xrstor64 [{}]", in(reg) self.area, in("eax") low, in("edx") high,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                options(nostack));
        }
    }

    /// Makes bytes that came from the guest loadable: clears reserved bits,
    /// whose presence would fault (Intel SDM vol. 1, 13.8).
    pub fn sanitize(&mut self) {
        let components = components();
        let bytes = self.bytes_mut();
        let mut mxcsr = u32::from_le_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]);
        mxcsr &= 0xffff;
        bytes[24..28].copy_from_slice(&mxcsr.to_le_bytes());
        let mut header = [0u8; 8];
        header.copy_from_slice(&bytes[512..520]);
        let present = u64::from_le_bytes(header) & components;
        bytes[512..520].copy_from_slice(&present.to_le_bytes());
        bytes[520..576].fill(0);
    }
}

impl Drop for FpuState {
    fn drop(&mut self) {
        // SAFETY: allocated in `initial` with the same layout.
        unsafe { dealloc(self.area, Self::layout(self.len)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An area as the image of a lesser processor has it.
    fn short() -> FpuState {
        let mut short = FpuState::initial();
        let whole = core::mem::replace(&mut short.len, 0);
        // SAFETY: allocated with that length, and not used any more.
        unsafe { dealloc(short.area, FpuState::layout(whole)) };
        let len = LEGACY_AND_HEADER;
        // SAFETY: the size is not zero.
        (short.area, short.len) = (unsafe { alloc_zeroed(FpuState::layout(len)) }, len);
        short.bytes_mut()[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
        short
    }

    #[test]
    fn the_area_of_a_lesser_processor_grows_when_it_is_saved() {
        let mut state = short();
        state.save();
        assert_eq!(state.bytes().len(), size().max(LEGACY_AND_HEADER));
        let mut present = [0u8; 8];
        present.copy_from_slice(&state.bytes()[512..520]);
        assert_eq!(u64::from_le_bytes(present) & !components(), 0);
    }

    #[test]
    fn areas_of_different_lengths_are_copied() {
        let (mut long, mut other) = (FpuState::initial(), short());
        let last = long.bytes().len() - 1;
        long.bytes_mut()[last] = 7;
        other.bytes_mut()[24] = 0x81;
        long.copy_from(&other);
        assert_eq!((long.bytes()[24], long.bytes()[last]), (0x81, 0));
        long.bytes_mut()[last] = 7;
        other.copy_from(&long);
        assert_eq!(other.bytes(), long.bytes());
    }
}
