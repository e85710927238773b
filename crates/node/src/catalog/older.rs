//! Versions of functions that are served no longer, and of which an earlier daemon has left
//! sandboxes.

use super::Catalog;
use super::launchers::LoadError;
use crate::asleep::Left;
use crate::config::FunctionName;
use crate::function::BuiltFunction;
use crate::instance::InstanceNote;
use crate::service::Service;
use std::sync::Arc;
use thaw_store::{ImageId, Name, Version};

/// A version of a function, and the image of it that its sandboxes are of, if that is another one by
/// now.
type Found = (Version, Option<ImageId>);

impl Catalog {
    /// Takes in the sandboxes of a function that an earlier daemon has put to sleep, and that are
    /// of versions which are served no longer.
    pub(super) fn take_in_older(self: &Arc<Self>, function: &FunctionName) {
        let served = self.shared.route(function.as_str());
        if served.is_none_or(|service| service.launcher().index().is_none()) {
            // It may be served when it was frozen anew.
            return;
        }
        for left in self.shared.take_left_sandboxes(function) {
            match self.older_with_asleep(function, &left) {
                Ok(service) => self.shared.take_in(&service, left),
                Err(why) => {
                    let instance = left.note.id;
                    tracing::warn!(%function, instance, "ended a sandbox that was asleep: {why}");
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
    ) -> Result<Arc<Service>, String> {
        let number = self.shared.version_of_left(note.id);
        let of_files = |version: &Version| note.origin.index == Some(version.index);
        let of_image =
            |version: &Version| version.image.is_some_and(|id| id.to_string() == note.image);
        let find = |versions: Vec<Version>| {
            if note.origin.index.is_some() {
                return Some((versions.into_iter().find(of_files)?, None));
            }
            if let Some(found) = versions.iter().find(|version| of_image(version)) {
                return Some((found.clone(), None));
            }
            // It was frozen anew since.
            let found = versions.into_iter().find(|version| Some(version.number) == number)?;
            Some((found, Some(note.image.parse().ok()?)))
        };
        self.older(&note.function, find)
    }

    fn older_with_asleep(
        self: &Arc<Self>,
        function: &FunctionName,
        left: &Left,
    ) -> Result<Arc<Service>, String> {
        let note = &left.note;
        let number = self.shared.version_of_left(note.id);
        let find = |base: Option<ImageId>| {
            move |mut versions: Vec<Version>| {
                versions.retain(|version| version.index == note.index);
                let found = versions.iter().find(|version| Some(version.number) == number);
                Some((found.or(versions.first())?.clone(), base))
            }
        };
        let fits = |service: &Arc<Service>| service.check_asleep(note);
        let service = self.older(function, find(None))?;
        if fits(&service).is_ok() {
            return Ok(service);
        }
        // It was frozen anew since, under another kernel.
        let service = self.older(function, find(note.base))?;
        fits(&service).map(|()| service)
    }

    /// A version of a function that `find` chooses: the one that is there, or one that gets no
    /// requests.
    fn older(
        self: &Arc<Self>,
        function: &FunctionName,
        find: impl FnOnce(Vec<Version>) -> Option<Found>,
    ) -> Result<Arc<Service>, String> {
        let text = |error: LoadError| error.to_string();
        let name = Name::new(function.as_str()).map_err(|error| error.to_string())?;
        let record = self.store.get_function(&name).map_err(|error| text(error.into()))?;
        let (version, image) =
            find(record.versions()).ok_or("the store does not have its version any more")?;
        let built = BuiltFunction::from_version(&name, version);
        let built = built.map_err(|error| text(error.into()))?;
        let built = BuiltFunction { image: image.unwrap_or(built.image), ..built };
        let is_it = |service: &Arc<Service>| {
            service.version() == built.number && service.image() == built.image.to_string()
        };
        if let Some(known) = self.shared.versions_of(function.as_str()).into_iter().find(is_it) {
            return Ok(known);
        }
        let (launcher, _) = self.resting(&built).map_err(text)?;
        let (image, config) = (built.image.to_string(), built.function.config.clone());
        let launcher = Arc::new(launcher);
        let service =
            Service::of_version(config, built.number, image, launcher, self.shared.clone());
        self.shared.keep_for_sandboxes(&service);
        Ok(service)
    }
}
