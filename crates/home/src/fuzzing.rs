//! The parser of what function owners write, for the fuzzers of `fuzz/` and for the test below.
//! It exists in tests and with the feature `fuzzing` only.

use std::path::Path;

use crate::config::FunctionConfig;

/// The text of a `thaw.toml`.
pub fn function_config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match FunctionConfig::parse(Path::new("thaw.toml"), text) {
        Ok(config) => {
            // It is kept as JSON in the record of the function.
            let json = serde_json::to_value(&config).expect("a configuration can be written");
            let again: FunctionConfig = serde_json::from_value(json).expect("and read again");
            assert_eq!(again, config);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_mutate::survive;

    #[test]
    fn configurations_are_survived() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");
        let mut seeds = Vec::new();
        for entry in std::fs::read_dir(directory).unwrap() {
            seeds.extend(std::fs::read(entry.unwrap().path().join("thaw.toml")));
        }
        assert!(seeds.len() > 5);
        let seeds: Vec<&[u8]> = seeds.iter().map(Vec::as_slice).collect();
        survive("function_config", &seeds, 20_000, function_config);
    }
}
