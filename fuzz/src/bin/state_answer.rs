//! Fuzzes answers of the state helper.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_sandbox::fuzzing::state_answer(bytes));
