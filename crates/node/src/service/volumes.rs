//! Volumes of instances: who uses them, and who rests while they are copied.

use super::{Service, Services};
use crate::instance::{Command, GiveUp, Held, Hold, InstanceState, VolumesAtRest};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_home::config::FunctionName;
use thaw_home::volumes::{Purpose, PutBack, VolumeError, VolumeSnapshot};
use thaw_sandbox::{Copied, Volume};
use thaw_store::Name;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// How long an instance may take to come to rest so that volumes are copied; others stay at rest for
/// as long.
pub(super) const HOLD_PATIENCE: Duration = Duration::from_secs(10);

/// Whether the files of volumes go with the memory of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VolumeFiles {
    /// They stay where they are, shared by all.
    #[default]
    Stay,
    /// They are copied with it, and put back.
    Go,
}

/// An instance that has volumes.
struct User {
    id: u64,
    function: FunctionName,
    state: InstanceState,
    /// Those of the volumes that were asked for.
    volumes: Vec<Name>,
}

impl Services {
    /// The instances that have some of these volumes, those included that are asleep.
    fn users_of(&self, volumes: &[Name]) -> Vec<User> {
        let user = |info: super::InstanceInfo| {
            let service = self.service_of(info.id)?;
            let of_it = service.volumes_of(info.id).into_iter().map(|(name, _)| name);
            let shared: Vec<_> = of_it.filter(|name| volumes.contains(name)).collect();
            let (id, function, state) = (info.id, info.function, info.state);
            (!shared.is_empty()).then_some(User { id, function, state, volumes: shared })
        };
        self.instances().into_iter().filter_map(user).collect()
    }

    /// Opens the volumes of sandboxes that are asleep since before this daemon, so that nobody removes
    /// them. Blocks.
    pub fn keep_own_volumes(&self) {
        for id in self.shared().own_volumes().ids() {
            if let Some(service) = self.service_of(id) {
                service.keep_own_volumes(id);
            }
        }
    }

    /// Refuses to go on if some instance has one of these volumes.
    pub(super) fn check_unused(&self, volumes: &[Name]) -> Result<(), String> {
        let mut by_function: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for user in self.users_of(volumes) {
            by_function.entry((user.function, user.volumes)).or_default().push(user.id);
        }
        let Some(((function, volumes), ids)) = by_function.into_iter().next() else {
            return Ok(());
        };
        let ids: Vec<_> = ids.iter().map(u64::to_string).collect();
        Err(format!(
            "volume `{}` is in use by instance {} of `{function}`; end that first: `thaw restart \
             {function}` ends the instances of a function, and `thaw sandbox kill` a sandbox",
            volumes[0],
            ids.join(", "),
        ))
    }

    /// Brings all instances to rest that have some of these volumes, but for one.
    async fn hold_users(
        &self,
        names: &[Name],
        volumes: &[Arc<Volume>],
        but: Option<u64>,
    ) -> Result<Vec<Held>, String> {
        let mut asked = Vec::new();
        for user in self.users_of(names) {
            // One that is asleep, or has ended, opens files only when it boots.
            let is_there = !matches!(user.state, InstanceState::Asleep | InstanceState::Ending);
            let table = self.service_of(user.id).and_then(|of| of.table_of_live(user.id).ok());
            if let Some(table) = table.filter(|_| is_there && Some(user.id) != but) {
                let (reply, held) = oneshot::channel();
                table.tell(Command::Hold(Hold { volumes: volumes.to_vec(), reply }));
                asked.push((user, held));
            }
        }
        let until = tokio::time::Instant::now() + HOLD_PATIENCE;
        let mut all = Vec::new();
        for (user, held) in asked {
            match tokio::time::timeout_at(until, held).await {
                Ok(Ok(Ok(held))) => all.push(held),
                // It has ended.
                Ok(Err(_)) => {}
                Ok(Ok(Err(why))) => return Err(user.does_not_rest(&why)),
                Err(_) => {
                    let why =
                        format!("it did not come to rest within {} s", HOLD_PATIENCE.as_secs());
                    return Err(user.does_not_rest(&why));
                }
            }
        }
        Ok(all)
    }

    /// Makes snapshots of volumes, for which their users come to rest; of an instance that is to come
    /// to rest itself, the files are copied only then.
    async fn snapshots_at_rest(
        &self,
        names: Vec<Name>,
        label: Name,
        purpose: Purpose,
        but: Option<u64>,
    ) -> Result<VolumesAtRest, String> {
        let store = self.shared().volumes()?;
        let listed: Vec<_> = names
            .iter()
            .map(|volume| VolumeSnapshot { volume: volume.clone(), label: label.clone() })
            .collect();
        let wanted = names.clone();
        let begun = spawn_blocking(move || store.begin_snapshots(&wanted, &label, purpose)).await;
        let begun = begun.map_err(|error| error.to_string())?;
        let begun = begun.map_err(|error| error.to_string())?;
        match self.hold_users(&names, &begun.volumes(), but).await {
            Ok(held) => Ok(VolumesAtRest::new(begun, listed, held)),
            Err(why) => {
                // What is left of it is gone before somebody hears of it.
                let _ = spawn_blocking(move || drop(begun)).await;
                Err(why)
            }
        }
    }

    /// Makes a snapshot of a volume, while its users rest. It is done to its end, also if nobody waits
    /// for that any more.
    ///
    /// # Errors
    /// Somebody does not rest, or the host refuses: one sentence for the operator. There is no
    /// snapshot then.
    pub async fn snapshot_volume(
        self: &Arc<Self>,
        name: Name,
        label: Name,
    ) -> Result<Copied, String> {
        let services = self.clone();
        let making = tokio::spawn(async move { services.snapshot_volume_now(name, label).await });
        making.await.map_err(|error| error.to_string())?
    }

    async fn snapshot_volume_now(&self, name: Name, label: Name) -> Result<Copied, String> {
        let store = self.shared().volumes()?;
        let copied = match store.is_open(&name) {
            true => {
                let purpose = Purpose::Operator;
                let made = self.snapshots_at_rest(vec![name], label, purpose, None).await?;
                spawn_blocking(move || {
                    made.copy(&|_| 0)?;
                    made.keep(|| Ok(())).map(|((), copied)| copied)
                })
            }
            false => spawn_blocking(move || {
                store.snapshot(&name, &label).map_err(|error| error.to_string())
            }),
        };
        copied.await.map_err(|error| error.to_string())?
    }
}

impl User {
    fn does_not_rest(&self, why: &str) -> String {
        format!(
            "instance {} of `{}`, which has volume `{}`, does not rest ({why}); try again, or end it",
            self.id, self.function, self.volumes[0]
        )
    }
}

impl Service {
    /// Begins snapshots of an instance's volumes that are to go with a checkpoint of it.
    ///
    /// # Errors
    /// One sentence for the operator; nothing is left of it then.
    pub(super) async fn begin_volumes(&self, id: u64) -> Result<Arc<VolumesAtRest>, String> {
        // Who may only read a volume must not decide what is in it.
        let all = self.volumes_of(id);
        let written = all.iter().filter(|(_, read_only)| !read_only);
        let mut names: Vec<_> = written.map(|(name, _)| name.clone()).collect();
        names.sort();
        names.dedup();
        if names.is_empty() {
            let which = if all.is_empty() { "" } else { " that it may write" };
            return Err(format!("`{}` has no volumes{which}; leave --volumes out", self.name()));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let label = Name::new(&format!("checkpoint-{}", now.as_millis()));
        let label = label.map_err(|error| error.to_string())?;
        let begun = self.services.snapshots_at_rest(names, label, Purpose::Checkpoint, Some(id));
        begun.await.map(Arc::new)
    }

    /// Waits until an instance is written whose volumes are copied when it rests. If it does not rest
    /// in time, others go on, and that is given up.
    pub(super) async fn written_with<T>(
        &self,
        id: u64,
        volumes: Option<Arc<VolumesAtRest>>,
        written: impl Future<Output = Result<T, String>>,
    ) -> Result<T, String> {
        tokio::pin!(written);
        let Some(volumes) = volumes else { return written.await };
        if let Ok(written) = timeout(HOLD_PATIENCE, &mut written).await {
            return written;
        }
        let given_up = spawn_blocking(move || volumes.give_up()).await;
        match given_up.map_err(|error| error.to_string())? {
            GiveUp::TooLate => written.await,
            GiveUp::Done => Err(format!(
                "instance {id} did not come to rest within {} s, for which others that have its \
                 volumes waited; nothing was written",
                HOLD_PATIENCE.as_secs()
            )),
        }
    }

    /// Puts snapshots back which nobody may use; whoever comes waits until that is finished.
    pub(super) async fn put_back(
        &self,
        snapshots: &[VolumeSnapshot],
    ) -> Result<Option<PutBack>, String> {
        if snapshots.is_empty() {
            return Ok(None);
        }
        let names: Vec<_> = snapshots.iter().map(|snapshot| snapshot.volume.clone()).collect();
        self.services.check_unused(&names)?;
        let (store, snapshots, services) =
            (self.shared.volumes()?, snapshots.to_vec(), self.services.clone());
        let done = spawn_blocking(move || {
            let sentence = |error: VolumeError| error.to_string();
            let mut begun = store.begin_put_back(&snapshots).map_err(sentence)?;
            // Copying takes its time.
            services.check_unused(&names)?;
            begun.exchange().map_err(sentence)?;
            Ok(Some(begun))
        });
        done.await.map_err(|error| error.to_string())?
    }

    /// Keeps what was put back, for instances that have been booted. If that fails, the files are as
    /// before when what is given back is dropped.
    pub(super) async fn keep_put_back(
        put_back: Option<PutBack>,
    ) -> Result<(), (String, Option<PutBack>)> {
        let Some(mut put_back) = put_back else { return Ok(()) };
        let kept = spawn_blocking(move || match put_back.keep() {
            Ok(()) => Ok(()),
            Err(error) => Err((error.to_string(), Some(put_back))),
        });
        kept.await.map_err(|error| (error.to_string(), None))?
    }
}
