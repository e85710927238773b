//! Fuzzes the headers of prefetch files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_store::fuzzing::prefetch_header(bytes));
