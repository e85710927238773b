//! Programs that instances of a function have looked for in vain.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// Most of them that are told apart, as long as the function is served.
const MISSING_MAX: usize = 32;

/// Those that its log names.
#[derive(Debug, Default)]
pub(super) struct MissingPrograms(Mutex<HashSet<String>>);

impl MissingPrograms {
    /// Whether this one was not looked for before, and few others were; it is known from now on.
    pub fn is_news(&self, program: &str) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.len() < MISSING_MAX && known.insert(program.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_news_once_and_they_are_few() {
        let missing = MissingPrograms::default();
        assert!(missing.is_news("git"));
        assert!(!missing.is_news("git"));
        let more = (0..1000).filter(|number| missing.is_news(&number.to_string())).count();
        assert_eq!(more, MISSING_MAX - 1);
    }
}
