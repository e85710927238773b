//! Fuzzes the configuration of a function, `thaw.toml`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| thaw_home::fuzzing::function_config(bytes));
