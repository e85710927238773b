//! Fuzzes the headers and tables of packed images.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_store::fuzzing::packed_image(bytes));
