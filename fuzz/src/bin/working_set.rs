//! Fuzzes recorded working sets.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_sandbox::fuzzing::working_set(bytes));
