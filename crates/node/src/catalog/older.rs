//! Versions of functions that are served no longer, and of which an earlier daemon has left
//! sandboxes.

use super::Catalog;
use super::launchers::LoadError;
use crate::asleep::AsleepNote;
use crate::instance::InstanceNote;
use crate::service::Service;
use std::sync::Arc;
use thaw_home::config::FunctionName;
use thaw_home::function::BuiltFunction;
use thaw_store::{ImageId, IndexId, Name, StoreError, Version};

/// A version of a function, and the image of it that its sandboxes are of, if that is another one by
/// now.
type Found = (Version, Option<ImageId>);

/// Why a version of which there is a sandbox cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoVersion {
    /// No later attempt finds it: the store does not have it, or the sandbox is none of it.
    #[error("{0}")]
    Gone(String),
    /// It cannot be opened now.
    #[error("{0}")]
    NotNow(String),
}

impl<E: Into<LoadError>> From<E> for NoVersion {
    fn from(error: E) -> Self {
        let error = error.into();
        let why = error.to_string();
        if error.is_not_found() { Self::Gone(why) } else { Self::NotNow(why) }
    }
}

impl Catalog {
    /// Takes in the sandboxes of a function that an earlier daemon has put to sleep, and that are
    /// of versions which are served no longer.
    pub(super) fn take_in_older(self: &Arc<Self>, function: &FunctionName) {
        let served = self.services.route(function.as_str());
        if served.is_none_or(|service| service.launcher().index().is_none()) {
            // It may be served when it was frozen anew.
            return;
        }
        for note in self.node().left_sandboxes_of(function) {
            let instance = note.id;
            match self.older_with_asleep(&note) {
                Ok(service) => self.services.take_in_left(&service, instance),
                Err(NoVersion::Gone(why)) => {
                    tracing::warn!(%function, instance, "ended a sandbox that was asleep: {why}");
                    self.node().end_left(instance);
                }
                Err(NoVersion::NotNow(why)) => {
                    tracing::warn!(%function, instance, "a sandbox sleeps on, and cannot be woken yet: {why}");
                }
            }
        }
    }

    /// The version of a function that an instance is of which an earlier daemon has left, and which
    /// is a sandbox.
    ///
    /// # Errors
    /// One sentence for the log.
    pub(crate) fn older_with(
        self: &Arc<Self>,
        note: &InstanceNote,
    ) -> Result<Arc<Service>, NoVersion> {
        let number = self.node().version_of_left(&note.function, note.id);
        self.older(&note.function, |versions| version_of_awake(versions, note, number))
    }

    fn older_with_asleep(self: &Arc<Self>, note: &AsleepNote) -> Result<Arc<Service>, NoVersion> {
        let function = &note.function;
        let number = self.node().version_of_left(function, note.id);
        let find = |base: Option<ImageId>| {
            move |versions: Vec<Version>| {
                let of_files = |version: &Version| version.index == note.index;
                Some((choose(versions, number, of_files)?, base))
            }
        };
        match self.older(function, find(None)) {
            Ok(service) if service.check_asleep(note).is_ok() => return Ok(service),
            Err(error @ NoVersion::NotNow(_)) => return Err(error),
            Ok(_) | Err(NoVersion::Gone(_)) => {}
        }
        // It was frozen anew since, under another kernel.
        let service = self.older(function, find(note.base))?;
        service.check_asleep(note).map_err(NoVersion::Gone)?;
        Ok(service)
    }

    /// The newest version of a function with these files.
    ///
    /// # Errors
    /// One sentence for the log.
    pub(super) fn version_with_files(
        self: &Arc<Self>,
        function: &FunctionName,
        index: IndexId,
    ) -> Result<Arc<Service>, NoVersion> {
        self.older(function, |mut versions| {
            versions.retain(|version| version.index == index);
            Some((versions.pop()?, None))
        })
    }

    /// A version of a function that `find` chooses: the one that is there, or one that gets no
    /// requests.
    fn older(
        self: &Arc<Self>,
        function: &FunctionName,
        find: impl FnOnce(Vec<Version>) -> Option<Found>,
    ) -> Result<Arc<Service>, NoVersion> {
        let gone = || NoVersion::Gone("the store does not have its version any more".to_owned());
        let name = Name::new(function.as_str()).map_err(StoreError::from)?;
        let record = self.store.get_function(&name)?;
        let (version, image) = find(record.versions()).ok_or_else(gone)?;
        let built = BuiltFunction::from_version(&name, version)?;
        let built = BuiltFunction { image: image.unwrap_or(built.image), ..built };
        let is_it = |service: &Arc<Service>| {
            // One that could not be opened may be by now.
            let can_be_used = service.launcher().index() == Some(built.index);
            let is_same =
                service.version() == built.number && service.image() == built.image.to_string();
            is_same && can_be_used
        };
        if let Some(known) = self.services.versions_of(function.as_str()).into_iter().find(is_it) {
            return Ok(known);
        }
        let (launcher, _) = self.resting(&built)?;
        let (image, config) = (built.image.to_string(), built.function.config.clone());
        let launcher = Arc::new(launcher);
        let service =
            Service::of_version(config, built.number, image, launcher, self.services.clone());
        self.services.keep_for_sandboxes(&service);
        Ok(service)
    }
}

/// The version that an instance is of which runs, and which is a sandbox of the version with this
/// number.
fn version_of_awake(
    versions: Vec<Version>,
    note: &InstanceNote,
    number: Option<u32>,
) -> Option<Found> {
    if let Some(index) = note.origin.index {
        return Some((choose(versions, number, |version| version.index == index)?, None));
    }
    let of_image = |version: &Version| version.image.is_some_and(|id| id.to_string() == note.image);
    if let Some(found) = choose(versions.clone(), number, of_image) {
        return Some((found, None));
    }
    // It was frozen anew since.
    let found = versions.into_iter().find(|version| Some(version.number) == number)?;
    Some((found, Some(note.image.parse().ok()?)))
}

/// Of the versions for which `may_be` holds that with this number, or the first one if none has it.
fn choose(
    mut versions: Vec<Version>,
    number: Option<u32>,
    may_be: impl Fn(&Version) -> bool,
) -> Option<Version> {
    versions.retain(may_be);
    let of_number = versions.iter().find(|version| Some(version.number) == number);
    of_number.or(versions.first()).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A version with these files and this image.
    fn version(number: u32, files: u8, image: u8) -> Version {
        Version {
            number,
            label: None,
            config: serde_json::Value::Null,
            index: IndexId([files; 32]),
            image: Some(ImageId([image; 32])),
            created_ms: 0,
            problem: None,
        }
    }

    /// An instance of an image, with files if they are known.
    fn note(image: u8, files: Option<u8>) -> InstanceNote {
        let mut note = InstanceNote {
            id: 1,
            function: "f".parse().unwrap(),
            image: ImageId([image; 32]).to_string(),
            booted_ms: 0,
            domain: None,
            memory: 0,
            origin: Default::default(),
            has_volumes: false,
            renews_volumes: false,
        };
        note.origin.index = files.map(|files| IndexId([files; 32]));
        note
    }

    #[test]
    fn of_versions_with_the_same_files_a_sandbox_is_of_its_own() {
        let versions = vec![version(1, 1, 1), version(2, 1, 2), version(3, 3, 3)];
        let found = |files: u8, number: Option<u32>| {
            let found = version_of_awake(versions.clone(), &note(9, Some(files)), number);
            found.map(|(version, image)| (version.number, image))
        };
        assert_eq!(found(1, Some(2)), Some((2, None)));
        assert_eq!(found(1, Some(1)), Some((1, None)));
        assert_eq!(found(3, Some(3)), Some((3, None)));
        // Its own is gone, or nobody knows it.
        assert_eq!(found(1, Some(7)), Some((1, None)));
        assert_eq!(found(1, Some(0)), Some((1, None)));
        // Its number alone makes it none of other files.
        assert_eq!(found(1, Some(3)), Some((1, None)));
        assert_eq!(found(4, Some(3)), None);
    }

    #[test]
    fn one_whose_files_nobody_knows_is_found_by_its_image() {
        let versions = vec![version(1, 1, 1), version(2, 1, 1), version(3, 3, 3)];
        let found = |image: u8, number: u32| {
            let found = version_of_awake(versions.clone(), &note(image, None), Some(number));
            found.map(|(version, image)| (version.number, image))
        };
        assert_eq!(found(1, 2), Some((2, None)));
        assert_eq!(found(3, 2), Some((3, None)));
        // Frozen anew.
        assert_eq!(found(9, 2), Some((2, Some(ImageId([9; 32])))));
        assert_eq!(found(9, 7), None);
    }
}
