//! A function whose image is packed: it is opened, and unpacked, when somebody needs it, and closed
//! when its room is needed.

use super::launch::{
    Client, ComingBack, LaunchError, Launched, Launcher, NotNow, Opening, StandbyInfo,
    StandbyState, WakeError,
};
use super::live::Instance;
use super::sandboxed::{Decrypted, SandboxLauncher};
use crate::tenants::Lease;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;
use thaw_sandbox::{EgressPolicy, FreezeBase, MemoryReader, Orphan, ResourceLimits, VolumeMount};
use thaw_store::{ImageId, IndexId, KernelId};
use tokio::sync::watch;

/// Opens the image of a function, which takes tens of milliseconds where it is packed. Says in a
/// sentence why it cannot.
pub type OpenLauncher = dyn Fn() -> Result<SandboxLauncher, String> + Send + Sync;

/// What became of opening the image, in a sentence if it failed; `None`: nothing yet.
type News = watch::Receiver<Option<Result<(), String>>>;

/// Boots instances from an image that need not be open.
pub struct RestingLauncher {
    open: Box<OpenLauncher>,
    index: IndexId,
    kernel: KernelId,
    state: Mutex<State>,
    /// Held while the image is opened, so that it is unpacked once for all who wait for it.
    opening: Mutex<()>,
    /// Hears of it when somebody opens the image who was asked to by [`Launcher::opening`].
    coming: Mutex<Option<News>>,
}

#[derive(Default)]
struct State {
    launcher: Option<Arc<SandboxLauncher>>,
    last_used: Option<SystemTime>,
    /// The function is served no longer.
    stands_down: bool,
}

impl RestingLauncher {
    /// One whose image is opened when it is needed, of a function with these files and this
    /// kernel build.
    pub fn resting(index: IndexId, kernel: KernelId, open: Box<OpenLauncher>) -> Self {
        let (state, opening, coming) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { open, index, kernel, state, opening, coming }
    }

    /// One whose image is open, and is opened again once it was closed.
    pub fn opened(launcher: SandboxLauncher, index: IndexId, open: Box<OpenLauncher>) -> Self {
        let kernel = launcher.kernel_build().expect("a sandbox has one");
        let resting = Self::resting(index, kernel, open);
        resting.state().launcher = Some(Arc::new(launcher));
        resting
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// What boots, if the image is open.
    fn present(&self) -> Option<Arc<SandboxLauncher>> {
        self.state().launcher.clone()
    }

    /// The same for a boot.
    fn wanted(&self) -> Result<Arc<SandboxLauncher>, LaunchError> {
        if let Some(launcher) = self.noted_use() {
            return Ok(launcher);
        }
        let _alone = self.opening.lock().expect("no holder panics");
        if let Some(launcher) = self.noted_use() {
            return Ok(launcher);
        }
        let launcher = Arc::new((self.open)().map_err(LaunchError::Failed)?);
        let mut state = self.state();
        if state.stands_down {
            launcher.stand_down();
        }
        state.launcher = Some(launcher.clone());
        state.last_used = Some(SystemTime::now());
        Ok(launcher)
    }

    fn noted_use(&self) -> Option<Arc<SandboxLauncher>> {
        let mut state = self.state();
        state.last_used = Some(SystemTime::now());
        state.launcher.clone()
    }
}

impl Launcher for RestingLauncher {
    fn opening(self: Arc<Self>) -> Option<Opening> {
        if self.noted_use().is_some() {
            return None;
        }
        let mut coming = self.coming.lock().expect("no holder panics");
        // An earlier one has ended, and the image was closed since.
        let is_coming = coming.as_ref().is_some_and(|news| news.has_changed().is_ok());
        if !is_coming {
            let (say, news) = watch::channel(None);
            let this = self.clone();
            tokio::task::spawn_blocking(move || {
                let opened = this.wanted().map(drop).map_err(|error| error.to_string());
                // Nobody may be left who waits.
                let _ = say.send(Some(opened));
            });
            *coming = Some(news);
        }
        let mut news = coming.clone()?;
        Some(Box::pin(async move {
            let ended = news.wait_for(Option::is_some).await.ok().and_then(|news| news.clone());
            let lost = || Err("whoever opened its image has ended".to_owned());
            ended.unwrap_or_else(lost).map_err(LaunchError::Failed)
        }))
    }

    fn launch(&self, client: Option<&Client>) -> Result<Launched, LaunchError> {
        self.wanted()?.launch(client)
    }

    fn launch_now(&self, client: Option<&Client>) -> Result<Launched, NotNow> {
        self.noted_use().ok_or(NotNow::WouldWait)?.launch_now(client)
    }

    fn coming_back(&self) -> Option<ComingBack> {
        self.present()?.coming_back()
    }

    fn take_over(
        &self,
        orphan: Orphan,
        thawed: Option<ImageId>,
        egress: Option<&Arc<EgressPolicy>>,
        limits: ResourceLimits,
    ) -> Result<Box<dyn Instance>, LaunchError> {
        self.wanted()?.take_over(orphan, thawed, egress, limits)
    }

    fn egress(&self) -> Option<Arc<EgressPolicy>> {
        self.wanted().ok()?.egress()
    }

    fn waken(
        &self,
        file: File,
        checksum: ImageId,
        base: Option<&FreezeBase>,
        clients: Vec<Arc<Client>>,
        decrypted: Option<Decrypted>,
        limits: ResourceLimits,
    ) -> Result<Arc<dyn Launcher>, WakeError> {
        let launcher = self.wanted().map_err(|error| WakeError::Later(error.to_string()))?;
        launcher.waken(file, checksum, base, clients, decrypted, limits)
    }

    fn mounting(&self, more: &[VolumeMount]) -> Result<(Arc<dyn Launcher>, u32), LaunchError> {
        self.wanted()?.mounting(more)
    }

    fn index(&self) -> Option<IndexId> {
        Some(self.index)
    }

    fn kernel_build(&self) -> Option<KernelId> {
        Some(self.kernel)
    }

    fn is_ready(&self) -> bool {
        self.present().is_some_and(|launcher| launcher.is_ready())
    }

    fn standby(&self) -> StandbyInfo {
        self.present().map(|launcher| launcher.standby()).unwrap_or_default()
    }

    fn standby_memory(&self) -> Vec<(StandbyState, MemoryReader)> {
        self.present().map(|launcher| launcher.standby_memory()).unwrap_or_default()
    }

    fn spare_room(&self) -> Option<Lease> {
        self.present()?.spare_room()
    }

    fn give_up_one(&self) -> bool {
        self.present().is_some_and(|launcher| launcher.give_up_one())
    }

    fn give_up_ready(&self) {
        if let Some(launcher) = self.present() {
            launcher.give_up_ready();
        }
    }

    fn stand_down(&self) {
        let launcher = {
            let mut state = self.state();
            state.stands_down = true;
            state.launcher.clone()
        };
        if let Some(launcher) = launcher {
            launcher.stand_down();
        }
    }

    fn withdraw_secrets(&self) {
        if let Some(launcher) = self.present() {
            launcher.withdraw_secrets();
        }
    }

    fn last_used(&self) -> Option<SystemTime> {
        self.state().last_used
    }

    fn close_if_unused(&self) {
        let mut state = self.state();
        // Boots that have begun have a copy.
        let is_unused = state
            .launcher
            .as_ref()
            .is_some_and(|launcher| Arc::strong_count(launcher) == 1 && launcher.is_unused());
        let closed = if is_unused { state.launcher.take() } else { None };
        drop(state);
        drop(closed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    #[test]
    fn one_thread_opens_for_all_who_wait() {
        // One to open, and one for others.
        let runtime =
            tokio::runtime::Builder::new_current_thread().max_blocking_threads(2).build().unwrap();
        let opened = Arc::new(AtomicU32::new(0));
        let (go_on, until) = mpsc::channel();
        let (count, until) = (opened.clone(), Mutex::new(until));
        let open = move || {
            count.fetch_add(1, Ordering::Relaxed);
            until.lock().unwrap().recv().unwrap();
            Err("it is damaged".to_owned())
        };
        let launcher =
            RestingLauncher::resting(IndexId([1; 32]), KernelId([2; 32]), Box::new(open));
        let launcher = Arc::new(launcher);
        runtime.block_on(async {
            for times in 1..=2 {
                let waiting: Vec<_> =
                    (0..1000).map(|_| launcher.clone().opening().expect("it is packed")).collect();
                // There is a thread left.
                tokio::task::spawn_blocking(|| ()).await.unwrap();
                go_on.send(()).unwrap();
                for opening in waiting {
                    assert_eq!(opening.await.unwrap_err().to_string(), "it is damaged");
                }
                // Whoever comes later has it tried again, once the thread has ended.
                while launcher.coming.lock().unwrap().as_ref().unwrap().has_changed().is_ok() {
                    tokio::task::yield_now().await;
                }
                assert_eq!(opened.load(Ordering::Relaxed), times);
            }
        });
    }
}
