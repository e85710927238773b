//! `[secrets]`: values that are in no image.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

/// Most secrets of a function.
pub const SECRETS_MAX: usize = 64;

/// `[secrets]`: which secrets a program reads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SecretsConfig {
    /// Their names: each copy has a file of that name in `/run/secrets`. The operator sets the
    /// values (`thaw secret set`).
    #[serde(deserialize_with = "secret_names")]
    pub names: Vec<thaw_store::Name>,
}

impl SecretsConfig {
    /// Whether there are none.
    pub fn is_default(&self) -> bool {
        self.names.is_empty()
    }
}

fn secret_names<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<thaw_store::Name>, D::Error> {
    let mut names = Vec::<thaw_store::Name>::deserialize(deserializer)?;
    names.sort();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(D::Error::custom(format!("secret `{}` is named twice", twice[0])));
    }
    if names.len() > SECRETS_MAX {
        return Err(D::Error::custom(format!("a function can have {SECRETS_MAX} secrets at most")));
    }
    Ok(names)
}
