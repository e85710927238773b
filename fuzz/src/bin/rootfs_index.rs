//! Fuzzes indexes of root file systems.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_store::fuzzing::rootfs_index(bytes));
