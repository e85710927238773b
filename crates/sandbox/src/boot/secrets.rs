//! Secrets of one copy, as a boot command says them.

use std::fmt;

use bytemuck::bytes_of;
use thaw_abi::control::{SECRETS_MAX, Secret};

/// Files in `/run/secrets` of one copy.
#[derive(Clone, Default)]
pub struct Secrets {
    said: Vec<u8>,
}

/// There are too many secrets, or they are too large.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all secrets of a function together may have 32 KiB, 8 bytes for each counted in")]
pub struct TooManySecrets;

impl Secrets {
    /// Adds one.
    ///
    /// # Errors
    /// All together are more than [`SECRETS_MAX`] bytes.
    pub fn add(&mut self, name: &str, value: &[u8]) -> Result<(), TooManySecrets> {
        let len = |bytes: &[u8]| u32::try_from(bytes.len()).map_err(|_| TooManySecrets);
        let head = Secret { name_len: len(name.as_bytes())?, value_len: len(value)? };
        let more = size_of::<Secret>() + name.len() + value.len();
        if self.said.len() + more > SECRETS_MAX {
            return Err(TooManySecrets);
        }
        self.said.extend_from_slice(bytes_of(&head));
        self.said.extend_from_slice(name.as_bytes());
        self.said.extend_from_slice(value);
        Ok(())
    }

    /// The end of the tail of a boot command.
    pub(super) fn said(&self) -> &[u8] {
        &self.said
    }
}

/// Values are shown nowhere.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secrets").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_bounded_and_not_shown() {
        let mut secrets = Secrets::default();
        secrets.add("key", b"hunter2").unwrap();
        assert!(!format!("{secrets:?}").contains("hunter2"));
        assert_eq!(secrets.said()[8..], *b"keyhunter2");
        let left = SECRETS_MAX - secrets.said().len() - 8 - 1;
        assert_eq!(secrets.add("b", &vec![0; left + 1]), Err(TooManySecrets));
        secrets.add("b", &vec![0; left]).unwrap();
        assert_eq!(secrets.add("c", b""), Err(TooManySecrets));
    }
}
