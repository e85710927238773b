//! Fuzzes image files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_sandbox::fuzzing::image(bytes));
