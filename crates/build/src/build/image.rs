//! Functions whose files are those of a container image, which says how its program is run, too.

use crate::container::{self, ContainerError, StoredImage};
use std::num::NonZeroU16;
use thaw_home::config::{EntryKind, FunctionConfig, UnknownSignal};
use thaw_home::rootfs::StoredRootfs;
use thaw_oci::{Limits, OciError, Reference};
use thaw_store::{IndexId, Store, StoreError};

use super::{BuildEvent, OnEvent, Trust};
use thaw_home::home::Home;

/// Why a function cannot be made of an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageFailure {
    /// It is not in the store.
    #[error(
        "image `{0}` is not in the store; `thaw pull` or `thaw import` it first, or build with --trust-build"
    )]
    Missing(String),
    /// Neither the image nor thaw.toml says something that is needed.
    #[error("image `{image}` names no {what}; set `{key}` in thaw.toml")]
    Gap {
        /// The image.
        image: String,
        /// What is missing.
        what: &'static str,
        /// The key that would say it.
        key: &'static str,
    },
    /// The image says that its program is ended by something that cannot end it.
    #[error(
        "image `{image}` has a stop signal that is none ({why}); set `limits.stop_signal` in thaw.toml"
    )]
    StopSignal {
        /// The image.
        image: String,
        /// What is wrong.
        why: UnknownSignal,
    },
    /// The image cannot be used.
    #[error(transparent)]
    Container(#[from] ContainerError),
}

impl From<OciError> for ImageFailure {
    fn from(error: OciError) -> Self {
        Self::Container(error.into())
    }
}

impl From<StoreError> for ImageFailure {
    fn from(error: StoreError) -> Self {
        Self::Container(error.into())
    }
}

/// The files of an image and its environment, as `NAME=VALUE`.
pub(super) struct Base {
    pub index: IndexId,
    pub environment: Vec<String>,
}

/// Finds the image that a function wants, if it does, and takes from it what thaw.toml leaves out.
/// An author who is not trusted gets images of the store only: a pull reaches hosts, with
/// credentials.
pub(super) fn resolve(
    home: &Home,
    store: &Store,
    config: &mut FunctionConfig,
    trust: Trust,
    on_event: &mut OnEvent<'_>,
) -> Result<Option<Base>, ImageFailure> {
    let Some(image) = config.image().map(str::to_owned) else { return Ok(None) };
    let found = match container::find(store, &image)? {
        Some(found) => found,
        None if trust == Trust::Untrusted => return Err(ImageFailure::Missing(image)),
        None => pull(home, store, &image, on_event)?,
    };
    let StoredImage { index, settings, .. } = found;
    let gap = |what, key| ImageFailure::Gap { image: image.clone(), what, key };
    let is_sandbox = config.entry.kind == EntryKind::Sandbox;
    if config.command.is_empty() && !is_sandbox {
        config.command = settings.command_with(&[]);
    }
    if config.command.is_empty() && !is_sandbox {
        return Err(gap("program", "command"));
    }
    if config.workdir.is_empty() {
        let named = settings.workdir.starts_with('/').then(|| settings.workdir.clone());
        config.workdir = named.unwrap_or_else(|| "/".to_owned());
    }
    if config.port.is_none() && config.entry.kind != EntryKind::Stdin && !is_sandbox {
        let exposed = settings.ports.iter().find_map(|&port| NonZeroU16::new(port));
        config.port = Some(exposed.ok_or_else(|| gap("TCP port", "port"))?);
    }
    if config.limits.stop_signal.is_none() {
        let named = settings.stop_signal.as_deref().map(str::parse).transpose();
        config.limits.stop_signal =
            named.map_err(|why| ImageFailure::StopSignal { image: image.clone(), why })?;
    }
    if config.user.is_none() && !settings.user.is_empty() {
        config.user = Some(settings.user.clone());
    }
    Ok(Some(Base { index, environment: settings.env }))
}

fn pull(
    home: &Home,
    store: &Store,
    image: &str,
    on_event: &mut OnEvent<'_>,
) -> Result<StoredImage, ImageFailure> {
    let reference: Reference = image.parse()?;
    on_event(BuildEvent::Stage(&format!("pulling {reference}")));
    let name = reference.store_name();
    let limits = Limits::default();
    let (stored, _) = container::pull(home, store, &reference, &name, limits, &mut |_| {})?;
    Ok(stored)
}

/// Replaces the names of the user and group by their numbers in the function's files.
pub(super) fn number_user(
    store: &Store,
    index: IndexId,
    config: &mut FunctionConfig,
) -> Result<(), ImageFailure> {
    let Some(user) = &config.user else { return Ok(()) };
    let rootfs = StoredRootfs::open(store, index)?;
    let account = container::account(&rootfs, user)?;
    config.user = Some(format!("{}:{}", account.uid, account.gid));
    Ok(())
}
