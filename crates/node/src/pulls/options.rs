//! What a client of the daemon may say of a pull.

use super::{NewPull, PullsError};
use thaw_build::artifact::{PullOptions, Refreeze};
use thaw_oci::Limits;

/// How a pull is made that a client of the daemon has asked for. Nothing is frozen anew: that takes
/// sandboxes, which a fetcher has none of.
pub fn options_of(new: &NewPull) -> Result<(thaw_oci::Reference, PullOptions), PullsError> {
    let wrong = |reason: String| PullsError::Wrong(reason);
    let reference = new.reference.parse().map_err(|error| wrong(format!("{error}")))?;
    let name = new.name.as_deref().map(thaw_store::Name::new).transpose();
    let domain = new.domain.as_deref().map(str::parse).transpose();
    let options = PullOptions {
        name: name.map_err(|error| wrong(error.to_string()))?,
        domain: domain.map_err(
            |error: <thaw_home::config::DomainName as std::str::FromStr>::Err| {
                wrong(error.to_string())
            },
        )?,
        refreeze: Refreeze::Never,
        allow_egress: new.allow_egress,
        limits: Limits::default(),
        ..PullOptions::default()
    };
    Ok((reference, options))
}
