//! Fuzzes the records of functions.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_store::fuzzing::function_record(bytes));
