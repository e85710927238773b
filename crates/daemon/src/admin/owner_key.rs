//! Keys of checkpoints, which come in the body of a request and stay in memory.

use axum::body::{Body, to_bytes};
use thaw_home::seal::owner::{KEY_MAX, KeyError, OwnerKey};
use zeroize::Zeroizing;

/// The key in a body; `None`: the body is empty. The server's own buffer of the body is not
/// overwritten.
///
/// # Errors
/// One sentence for the client.
pub(super) async fn owner_key(body: Body) -> Result<Option<OwnerKey>, String> {
    // One byte more shows that it is too long.
    let bytes = to_bytes(body, KEY_MAX + 1).await.map_err(|_| KeyError::Long.to_string())?;
    match bytes.is_empty() {
        true => Ok(None),
        false => {
            let secret = Zeroizing::new(bytes.to_vec());
            OwnerKey::new(secret).map(Some).map_err(|error| error.to_string())
        }
    }
}
