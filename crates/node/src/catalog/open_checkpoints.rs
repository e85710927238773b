//! Checkpoints that are open, so that the next sandbox of one need not read its image again.

use crate::instance::Launcher;
use crate::service::Service;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use thaw_home::config::FunctionConfig;
use thaw_store::{ImageId, Name};

/// Most of them. Each has some descriptors, and the page tables of its image.
const OPEN_MAX: usize = 32;

/// What a checkpoint is open for.
#[derive(Clone, PartialEq)]
pub(super) struct OpenFor {
    /// Its name.
    pub name: Name,
    /// Its image: another checkpoint may get its name.
    pub image: ImageId,
    /// What its sandboxes may use and reach. The active version of its function says that, which
    /// may be another one than theirs.
    pub config: FunctionConfig,
}

struct Open {
    for_what: OpenFor,
    /// The version of its function that its sandboxes belong to. It may go meanwhile.
    service: Weak<Service>,
    launcher: Arc<dyn Launcher>,
}

/// Those of which sandboxes were made last, the latest in front.
#[derive(Default)]
pub(super) struct OpenCheckpoints(Mutex<VecDeque<Open>>);

impl OpenCheckpoints {
    /// What boots sandboxes of one, if it is open for this version of its function.
    pub fn get(&self, for_what: &OpenFor, service: &Arc<Service>) -> Option<Arc<dyn Launcher>> {
        let mut all = self.all();
        let is_it = |open: &Open| {
            let is_same = open.service.upgrade().is_some_and(|one| Arc::ptr_eq(&one, service));
            is_same && open.for_what == *for_what
        };
        let at = all.iter().position(is_it)?;
        let open = all.remove(at)?;
        let launcher = open.launcher.clone();
        all.push_front(open);
        Some(launcher)
    }

    /// Keeps one open, in place of what was open by its name.
    pub fn keep(&self, for_what: OpenFor, service: &Arc<Service>, launcher: &Arc<dyn Launcher>) {
        let mut all = self.all();
        all.retain(|open| open.for_what.name != for_what.name);
        let service = Arc::downgrade(service);
        all.push_front(Open { for_what, service, launcher: launcher.clone() });
        all.truncate(OPEN_MAX);
    }

    /// Closes one.
    pub fn close(&self, name: &Name) {
        self.all().retain(|open| open.for_what.name != *name);
    }

    /// Closes those that no sandbox is made of any more: their checkpoint was removed or replaced,
    /// or the version of their function is gone. Open ones are not erased by `thaw gc`.
    pub fn close_unless(&self, is_there: impl Fn(&Name, ImageId) -> bool) {
        let of = |open: &Open| (open.for_what.name.clone(), open.for_what.image);
        let known: Vec<_> = self.all().iter().map(of).collect();
        let gone: Vec<_> =
            known.into_iter().filter(|(name, image)| !is_there(name, *image)).collect();
        let is_gone = |open: &Open| gone.contains(&of(open)) || open.service.strong_count() == 0;
        self.all().retain(|open| !is_gone(open));
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Open>> {
        self.0.lock().expect("no holder panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instance::{Client, LaunchError, Launched};
    use crate::node::NodeState;
    use crate::service::Services;

    struct Nothing;

    impl Launcher for Nothing {
        fn launch(&self, _client: Option<&Client>) -> Result<Launched, LaunchError> {
            Err(LaunchError::Failed("nothing is launched here".to_owned()))
        }

        fn is_ready(&self) -> bool {
            true
        }
    }

    fn config(more: &str) -> FunctionConfig {
        let text = format!(
            "name = \"box\"\nisolation = \"instance\"\nrootfs = \"tree\"\n\
             [entry]\nkind = \"sandbox\"\n{more}"
        );
        FunctionConfig::parse("thaw.toml".as_ref(), &text).unwrap()
    }

    fn service() -> Arc<Service> {
        Service::new(config(""), String::new(), Arc::new(Nothing), Services::new(NodeState::new(1)))
    }

    fn open_for(name: &str, image: u8, more: &str) -> OpenFor {
        let (name, image) = (Name::new(name).unwrap(), ImageId([image; 32]));
        OpenFor { name, image, config: config(more) }
    }

    #[test]
    fn one_is_open_for_its_image_and_for_what_its_function_may_now() {
        let (all, service, launcher) = (OpenCheckpoints::default(), service(), Arc::new(Nothing));
        let launcher: Arc<dyn Launcher> = launcher;
        let before = open_for("a", 1, "[egress]\nallow = [\"private:*\"]");
        all.keep(before.clone(), &service, &launcher);
        assert!(all.get(&before, &service).is_some());
        // The function reaches less by now, though this version of it is the same.
        assert!(all.get(&open_for("a", 1, ""), &service).is_none());
        assert!(
            all.get(&OpenFor { image: open_for("a", 2, "").image, ..before.clone() }, &service)
                .is_none()
        );
        assert!(all.get(&before, &self::service()).is_none());
        all.close(&before.name);
        assert!(all.get(&before, &service).is_none());
    }

    #[test]
    fn those_that_are_gone_are_closed_and_so_many_stay() {
        let (all, service, launcher) = (OpenCheckpoints::default(), service(), Arc::new(Nothing));
        let launcher: Arc<dyn Launcher> = launcher;
        for n in 0..=OPEN_MAX {
            all.keep(open_for(&format!("c{n}"), 1, ""), &service, &launcher);
        }
        assert_eq!(all.all().len(), OPEN_MAX);
        assert!(all.get(&open_for("c0", 1, ""), &service).is_none());
        all.keep(open_for("replaced", 1, ""), &service, &launcher);
        let left = open_for("c7", 1, "");
        let now = open_for("replaced", 2, "");
        let there = [(left.name.clone(), left.image), (now.name, now.image)];
        all.close_unless(|name, image| there.contains(&(name.clone(), image)));
        assert_eq!(all.all().len(), 1);
        assert!(all.get(&left, &service).is_some());
        drop(service);
        all.close_unless(|_, _| true);
        assert!(all.all().is_empty());
    }
}
