//! The environment that a container of Google's Cloud Run has, so that what runs there runs
//! here ("Container runtime contract", "Environment variables for services").

use std::collections::BTreeMap;
use thaw_home::config::FunctionConfig;
use thaw_store::IndexId;

/// Hexadecimal digits of what tells revisions apart.
const REVISION_DIGITS: usize = 8;

/// Adds what the author and the container image do not set themselves: where to listen, and
/// what the service and its revision are called. A revision is a function's files and
/// configuration; the same ones have the same name.
pub(super) fn complete(
    environment: &mut BTreeMap<String, String>,
    config: &FunctionConfig,
    files: IndexId,
) {
    let name = config.name.as_str();
    let mut add = |variable: &str, value: String| {
        environment.entry(variable.to_owned()).or_insert(value);
    };
    if config.port_number() != 0 {
        add("PORT", config.port_number().to_string());
    }
    add("K_SERVICE", name.to_owned());
    add("K_CONFIGURATION", name.to_owned());
    add("K_REVISION", format!("{name}-{}", revision(config, files)));
}

fn revision(config: &FunctionConfig, files: IndexId) -> String {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(files.to_string());
    hash.update(serde_json::to_vec(config).expect("plain data"));
    let digits: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    digits[..REVISION_DIGITS].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(more: &str) -> FunctionConfig {
        let text = format!("name = \"f\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 81\n{more}");
        FunctionConfig::parse("thaw.toml".as_ref(), &text).unwrap()
    }

    fn of(config: &FunctionConfig, files: u8) -> BTreeMap<String, String> {
        let mut environment = BTreeMap::from([("K_SERVICE".to_owned(), "own".to_owned())]);
        complete(&mut environment, config, IndexId::from([files; 32]));
        environment
    }

    #[test]
    fn the_authors_word_counts_and_the_rest_is_added() {
        let environment = of(&config(""), 1);
        assert_eq!(environment["PORT"], "81");
        assert_eq!(environment["K_SERVICE"], "own");
        assert_eq!(environment["K_CONFIGURATION"], "f");
    }

    #[test]
    fn a_revision_is_files_and_configuration() {
        let revision = |more: &str, files| of(&config(more), files)["K_REVISION"].clone();
        assert_eq!(revision("", 1), revision("", 1));
        assert_ne!(revision("", 1), revision("", 2));
        assert_ne!(revision("", 1), revision("[env]\nA = \"1\"", 1));
        assert_eq!(revision("", 1).len(), "f-".len() + REVISION_DIGITS);
    }
}
