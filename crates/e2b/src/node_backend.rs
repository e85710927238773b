//! The sandboxes of this node as the ones behind E2B's API.

use super::backend::*;
use super::problem::{Kind, Problem};
use std::collections::BTreeMap;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thaw_abi::remote;
use thaw_home::config::FunctionConfig;
use thaw_home::volumes::VolumeStore;
use thaw_node::catalog::{Catalog, OpenedCheckpoint};
use thaw_node::remote::egress::ClientEgress;
use thaw_node::remote::exec::{Attached, Exec, ExecProblem};
use thaw_node::remote::files::{FileProblem, FileSession};
use thaw_node::remote::ports::PortProblem;
use thaw_node::remote::tree::TreeLimits;
use thaw_node::remote::untree::unpack;
use thaw_node::remote::{ExecRequest, ExecState, LimitsChange, Next, SandboxVolume};
use thaw_node::sandboxes::registry::SandboxProblem;
use thaw_node::sandboxes::{self, NewSandbox, OnTimeout, Sandboxes};
use thaw_node::service::{REST_PATIENCE, Service, Services, VolumeFiles};
use thaw_node::usage::measure_instance;
use thaw_sandbox::SignalTo;
use thaw_store::Name;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// What is remembered of a process that runs, beside what the node knows.
type Remembered = BTreeMap<(u64, u64), WantedProcess>;

/// Whose rights are those of whoever unpacks an archive.
const SUPERUSER: &str = "0";
/// How long CPU time is looked at.
const CPU_SPAN: Duration = Duration::from_millis(200);

fn new_sandbox(wanted: Wanted) -> NewSandbox {
    NewSandbox {
        name: wanted.id,
        checkpoint: None,
        function: wanted.function,
        timeout_s: Some(wanted.timeout_s),
        on_timeout: if wanted.pauses { OnTimeout::Pause } else { OnTimeout::Kill },
        metadata: wanted.metadata,
        egress: None,
        client_egress: Some(wanted.egress),
        volumes: wanted.volumes,
        granted_volumes: wanted.granted_volumes,
    }
}

fn store_name(name: &str) -> Outcome<Name> {
    Name::new(name).map_err(Problem::invalid)
}

/// The sandboxes of a node.
pub struct NodeBackend {
    catalog: Arc<Catalog>,
    services: Arc<Services>,
    sandboxes: Arc<Sandboxes>,
    /// By instance and number of the process.
    wanted: Mutex<Remembered>,
}

impl NodeBackend {
    /// Those of this node.
    pub fn new(
        services: Arc<Services>,
        sandboxes: Arc<Sandboxes>,
        catalog: Arc<Catalog>,
    ) -> Arc<Self> {
        Arc::new(Self { catalog, services, sandboxes, wanted: Mutex::default() })
    }

    /// Makes a sandbox of a snapshot.
    async fn create_of(&self, snapshot: &str, wanted: Wanted) -> Outcome<sandboxes::SandboxInfo> {
        let opened = self.opened(snapshot).await?;
        let is_there = |volume: &SandboxVolume| {
            wanted.granted_volumes.iter().any(|name| name.as_str() == volume.name)
        };
        if !opened.volumes.iter().all(is_there) {
            return Err(Problem::new(
                Kind::NotFound,
                "a volume that the snapshot has mounted was destroyed, or is somebody else's",
            ));
        }
        let new = NewSandbox { function: String::new(), ..new_sandbox(wanted) };
        self.sandboxes.create_of(new, opened).await.map_err(problem)
    }

    /// What boots sandboxes of a snapshot, and the version of its function that they belong to.
    async fn opened(&self, snapshot: &str) -> Outcome<OpenedCheckpoint> {
        let (catalog, name) = (self.catalog.clone(), store_name(snapshot)?);
        let opened = catalog.checkpoint_for_sandbox(name.clone()).await;
        opened.map_err(|error| match catalog.store().get_checkpoint(&name) {
            Err(gone) if gone.is_not_found() => Problem::new(Kind::NotFound, error),
            _ => Problem::new(Kind::Busy, error),
        })
    }

    /// Makes a sandbox of a function.
    async fn create_of_function(&self, wanted: Wanted) -> Outcome<sandboxes::SandboxInfo> {
        self.function(&wanted.function)?;
        self.sandboxes.create(new_sandbox(wanted)).await.map_err(problem)
    }

    /// The service of a function that a template means.
    fn function(&self, name: &str) -> Outcome<Arc<Service>> {
        self.services.route(name).ok_or_else(|| {
            Problem::new(
                Kind::NotFound,
                format!(
                    "template \"{name}\" was not found; it is the name of a function of the node, \
                     or one that `[templates]` of its e2b.toml has"
                ),
            )
        })
    }

    /// Gives a sandbox that was just made its own limits, or ends it.
    async fn limit(&self, id: &str, limits: LimitsChange) -> Outcome<()> {
        let now = self.sandboxes.limits(id).await.map_err(problem)?;
        let is_same = limits.memory_bytes.is_none_or(|bytes| bytes == now.memory_bytes)
            && limits.cpus.is_none_or(|cpus| cpus == now.cpus);
        if is_same {
            return Ok(());
        }
        let changed = self.sandboxes.set_limits(id, limits).await;
        changed.map(drop).map_err(|error| {
            // It has perhaps ended by itself.
            let _ = self.sandboxes.kill(id);
            problem(error)
        })
    }

    /// The instance of a sandbox, and its service.
    fn instance(&self, id: &str) -> Outcome<(u64, Arc<Service>)> {
        let info = self.sandboxes.find(id).map_err(problem)?;
        let service = self.services.service_of(info.instance);
        Ok((info.instance, service.ok_or_else(|| Problem::gone(id))?))
    }

    /// The same, of one that somebody wants something of, for which it wakes.
    fn wanted_instance(&self, id: &str) -> Outcome<(u64, Arc<Service>)> {
        let found = self.instance(id)?;
        self.sandboxes.wanted(found.0);
        Ok(found)
    }

    fn view(&self, info: sandboxes::SandboxInfo) -> Option<Sandbox> {
        let service = self.services.service_of(info.instance)?;
        let (config, limits) = (service.config(), service.limits_of(info.instance));
        Some(Sandbox {
            id: info.name,
            function: info.function.to_string(),
            created_ms: info.created_ms,
            deadline_ms: info.deadline_ms,
            pauses: info.on_timeout == OnTimeout::Pause,
            metadata: info.metadata,
            cpus: limits.cpus,
            memory_bytes: limits.memory,
            directory: config.workdir.clone(),
            volumes: info.volumes,
        })
    }

    /// Remembers what was asked for, and forgets processes that have ended.
    fn remember(&self, instance: u64, exec: &Exec, wanted: WantedProcess) {
        let still_runs = |(instance, number): (u64, u64)| {
            let service = self.services.service_of(instance);
            let exec = service.and_then(|service| service.execs_of(instance)?.find(number));
            exec.is_some_and(|exec| !exec.state().is_final())
        };
        let mut all = self.wanted.lock().expect("no holder panics");
        all.retain(|key, _| still_runs(*key));
        all.insert((instance, exec.id()), wanted);
    }
}

/// What an instance has used; none: it has no process.
async fn count(service: &Service, instance: u64) -> Option<Count> {
    let used = service.use_of(instance).await?;
    let memory_bytes = match used.memory.bytes {
        Some(bytes) => bytes,
        None => measure_instance(service, instance).await?.pss,
    };
    Some(Count { cpu_time: used.cpu_time, memory_bytes })
}

fn problem(error: SandboxProblem) -> Problem {
    let kind = match &error {
        SandboxProblem::Wrong(_) => Kind::Invalid,
        SandboxProblem::Unknown(_) => Kind::NotFound,
        SandboxProblem::Refused(_) => Kind::Busy,
        SandboxProblem::Missing(_) => Kind::Unsupported,
    };
    Problem::new(kind, error)
}

fn exec_problem(error: ExecProblem) -> Problem {
    let kind = match &error {
        ExecProblem::Wrong(_) | ExecProblem::Refused(_) | ExecProblem::NotRun(..) => Kind::Invalid,
        ExecProblem::Full(_) => Kind::Exhausted,
    };
    Problem::new(kind, error)
}

fn port_problem(error: PortProblem) -> Problem {
    let kind = match &error {
        PortProblem::Closed(_) => Kind::Gone,
        PortProblem::Full(_) => Kind::Exhausted,
        PortProblem::Refused(_) => Kind::Busy,
    };
    Problem::new(kind, error)
}

fn file_problem(error: FileProblem) -> Problem {
    let kind = match &error {
        FileProblem::UnknownUser => Kind::Unauthenticated,
        FileProblem::Refused(errno, _) => match *errno {
            libc::ENOENT => Kind::NotFound,
            libc::EEXIST => Kind::Exists,
            libc::EACCES | libc::EPERM => Kind::Forbidden,
            libc::ENOSPC | libc::ENOMEM => Kind::NoSpace,
            libc::EOVERFLOW => Kind::DataLoss,
            _ => Kind::Invalid,
        },
        FileProblem::Lost(_) => Kind::Busy,
    };
    Problem::new(kind, error)
}

impl Backend for NodeBackend {
    fn check<'a>(&'a self, wanted: &'a Wanted) -> Later<'a, Outcome<()>> {
        Box::pin(async move {
            let service = match &wanted.snapshot {
                Some(snapshot) => self.opened(snapshot).await?.service,
                None => self.function(&wanted.function)?,
            };
            let possible = wanted.limits.check(&service.config().limits);
            possible.map_err(Problem::invalid)
        })
    }

    fn base(&self, wanted: &Wanted) -> Outcome<Base> {
        if let Some(snapshot) = &wanted.snapshot {
            return Ok(Base::Checkpoint(snapshot.clone()));
        }
        let service = self.function(&wanted.function)?;
        let (name, image) = (service.name().to_string(), service.image().to_owned());
        let config = serde_json::to_vec(service.config()).expect("plain data");
        let config = blake3::hash(&config).to_hex().to_string();
        Ok(Base::Function { name, version: service.version(), image, config })
    }

    fn create(&self, wanted: Wanted) -> Later<'_, Outcome<Sandbox>> {
        Box::pin(async move {
            let (id, limits) = (wanted.id.clone(), wanted.limits);
            let made = match wanted.snapshot.clone() {
                Some(snapshot) => self.create_of(&snapshot, wanted).await?,
                None => self.create_of_function(wanted).await?,
            };
            self.limit(&id, limits).await?;
            self.view(made).ok_or_else(|| Problem::gone(&id))
        })
    }

    fn is_gone(&self, id: &str) -> bool {
        !self.sandboxes.knows(id)
    }

    fn find(&self, id: &str) -> Option<Sandbox> {
        // Numbers of instances are names of others' sandboxes, too.
        let found = self.sandboxes.find(id).ok().filter(|info| info.name == id)?;
        self.view(found)
    }

    fn kill(&self, id: &str) -> Outcome<()> {
        self.sandboxes.kill(id).map(drop).map_err(problem)
    }

    fn pause<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<()>> {
        Box::pin(async move {
            self.sandboxes.pause(id).await.map_err(problem)?;
            self.sandboxes.set_timeout(id, None).map_err(problem)
        })
    }

    fn resume<'a>(&'a self, id: &'a str, timeout_s: u64) -> Later<'a, Outcome<()>> {
        Box::pin(async move {
            self.sandboxes.resume(id).await.map_err(problem)?;
            self.sandboxes.set_timeout(id, Some(timeout_s)).map_err(problem)
        })
    }

    fn set_timeout(&self, id: &str, timeout_s: u64) -> Outcome<()> {
        self.sandboxes.set_timeout(id, Some(timeout_s)).map_err(problem)
    }

    fn set_egress<'a>(&'a self, id: &'a str, asked: ClientEgress) -> Later<'a, Outcome<()>> {
        Box::pin(async move { self.sandboxes.set_client_egress(id, asked).await.map_err(problem) })
    }

    fn fork<'a>(&'a self, id: &'a str, copy: &'a str) -> Later<'a, Outcome<Sandbox>> {
        Box::pin(async move {
            let made = self.sandboxes.fork(id, copy).await.map_err(problem)?;
            self.view(made).ok_or_else(|| Problem::gone(copy))
        })
    }

    fn snapshot<'a>(&'a self, id: &'a str, name: &'a str) -> Later<'a, Outcome<()>> {
        Box::pin(async move {
            let (instance, service) = self.wanted_instance(id)?;
            let busy = |reason: String| Problem::new(Kind::Busy, reason);
            service.make_reachable(instance).await.map_err(busy)?;
            service.wake(Some(instance)).await.map_err(busy)?;
            let (name, began) = (store_name(name)?, Instant::now());
            let taken = service.checkpoint(instance, name, None, VolumeFiles::Stay).await;
            // Only one that is not waited for any more may be written yet.
            let kind = if began.elapsed() < REST_PATIENCE { Kind::Busy } else { Kind::Late };
            taken.map(drop).map_err(|reason| Problem::new(kind, reason))
        })
    }

    fn volumes(&self) -> Outcome<VolumeStore> {
        self.services.shared().volumes().map_err(|why| Problem::new(Kind::Busy, why))
    }

    fn has_volume(&self, name: &Name) -> bool {
        // What has ended may not be forgotten yet.
        let users = self.services.shared().own_volumes().users_of(name);
        users.into_iter().any(|id| self.services.may_have_instance(id))
    }

    fn remove_snapshot<'a>(&'a self, name: &'a str) -> Later<'a, Outcome<bool>> {
        Box::pin(async move {
            let (store, name) = (self.catalog.store().clone(), store_name(name)?);
            let wanted = name.clone();
            let removed = spawn_blocking(move || store.remove_checkpoint(&wanted)).await;
            if matches!(removed, Ok(Ok(()))) {
                self.catalog.close_checkpoint(&name);
            }
            match removed.map_err(|error| Problem::new(Kind::Busy, error))? {
                Ok(()) => Ok(true),
                Err(error) if error.is_not_found() => Ok(false),
                Err(error) => Err(Problem::new(Kind::Exists, error)),
            }
        })
    }

    fn snapshots<'a>(&'a self, prefix: &'a str) -> Later<'a, Outcome<Vec<String>>> {
        Box::pin(async move {
            let store = self.catalog.store().clone();
            let listed = spawn_blocking(move || store.list_checkpoints()).await;
            let busy = |error: &dyn std::fmt::Display| Problem::new(Kind::Busy, error);
            let listed = listed.map_err(|error| busy(&error))?.map_err(|error| busy(&error))?;
            let names = listed.records.into_iter().map(|one| one.name.to_string());
            Ok(names.filter(|name| name.starts_with(prefix)).collect())
        })
    }

    fn usage<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<Option<Usage>>> {
        Box::pin(async move {
            let began = Instant::now();
            let Some(before) = self.count(id).await? else { return Ok(None) };
            sleep(CPU_SPAN).await;
            let Some(after) = self.count(id).await? else { return Ok(None) };
            let used = after.cpu_time.zip(before.cpu_time);
            let used = used.map(|(after, before)| after.saturating_sub(before).as_secs_f64());
            let cpu_percent = used.map(|used| 100.0 * used / began.elapsed().as_secs_f64());
            Ok(Some(Usage { cpu_percent, memory_bytes: after.memory_bytes }))
        })
    }

    fn count<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<Option<Count>>> {
        Box::pin(async move {
            let info = self.sandboxes.find(id).map_err(problem)?;
            let service = self.services.service_of(info.instance);
            match service.filter(|_| info.is_awake()) {
                Some(service) => Ok(count(&service, info.instance).await),
                None => Ok(None),
            }
        })
    }

    fn start<'a>(&'a self, id: &'a str, wanted: WantedProcess) -> Later<'a, Outcome<Started>> {
        Box::pin(async move {
            let (instance, service) = self.wanted_instance(id)?;
            let request = ExecRequest {
                argv: wanted.argv.clone(),
                env: wanted.envs.iter().map(|(name, value)| format!("{name}={value}")).collect(),
                workdir: wanted.cwd.clone().unwrap_or_default(),
                user: wanted.user.clone().unwrap_or_else(|| own_user(service.config())),
                terminal: wanted.terminal,
                stdin: wanted.stdin,
                ..ExecRequest::default()
            };
            let started = service.exec(instance, &request).await;
            let (exec, reader) = started.map_err(exec_problem)?;
            self.remember(instance, &exec, wanted.clone());
            let pid = exec.pid().unwrap_or(0);
            let output = NodeOutput { reader, exec: exec.clone() };
            let process = NodeProcess { exec, pid, wanted };
            Ok((Arc::new(process) as Arc<dyn Process>, Box::new(output) as Box<dyn Output>))
        })
    }

    fn processes<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<Vec<Arc<dyn Process>>>> {
        Box::pin(async move {
            let (instance, service) = self.instance(id)?;
            let all = service.attach_all(instance).await.map_err(|_| Problem::gone(id))?;
            let wanted = self.wanted.lock().expect("no holder panics");
            let running = all.into_iter().filter_map(|exec| {
                let info = exec.info();
                let pid = pid(&info.state)?;
                // One that `thaw exec` has started, or that goes on in a copy.
                let other = || WantedProcess {
                    argv: info.argv.clone(),
                    terminal: info.terminal.then_some((0, 0)),
                    ..WantedProcess::default()
                };
                let wanted = wanted.get(&(instance, info.id)).cloned().unwrap_or_else(other);
                Some(Arc::new(NodeProcess { exec, pid, wanted }) as Arc<dyn Process>)
            });
            Ok(running.collect())
        })
    }

    fn port<'a>(&'a self, id: &'a str, port: u16) -> Later<'a, Outcome<Box<dyn ByteStream>>> {
        Box::pin(async move {
            let (instance, service) = self.wanted_instance(id)?;
            let stream = service.port(instance, port).await.map_err(port_problem)?;
            Ok(Box::new(stream) as Box<dyn ByteStream>)
        })
    }

    fn unpack<'a>(
        &'a self,
        id: &'a str,
        directory: &'a str,
        archive: Box<dyn Read + Send>,
    ) -> Later<'a, Outcome<()>> {
        Box::pin(async move {
            let (instance, service) = self.wanted_instance(id)?;
            let session = async || {
                let opened = service.files(instance, SUPERUSER).await;
                opened.map_err(|reason| Problem::new(Kind::Busy, reason))
            };
            let sessions = (session().await?, session().await?);
            let (handle, directory) = (Handle::current(), directory.to_owned());
            // At most as many threads as there are builds: it ends with its sandbox.
            let unpacked = spawn_blocking(move || {
                unpack(sessions, &directory, archive, &handle, TreeLimits::default())
            });
            let unpacked = unpacked.await.map_err(|error| Problem::new(Kind::Busy, error))?;
            unpacked.map(drop).map_err(file_problem)
        })
    }

    fn files<'a>(
        &'a self,
        id: &'a str,
        user: Option<&'a str>,
    ) -> Later<'a, Outcome<Box<dyn Files>>> {
        Box::pin(async move {
            let (instance, service) = self.wanted_instance(id)?;
            let opened = service.files(instance, user.unwrap_or_default()).await;
            let session = opened.map_err(|reason| Problem::new(Kind::Busy, reason))?;
            Ok(Box::new(session) as Box<dyn Files>)
        })
    }
}

/// Whom a process runs as whose request names nobody: the function's user, by name, so that `HOME` and
/// `USER` are that user's. The environment of the function's thaw.toml goes before that.
fn own_user(config: &FunctionConfig) -> String {
    let has_home = config.env.contains_key("HOME");
    config.user.clone().filter(|_| !has_home).unwrap_or_default()
}

fn pid(state: &ExecState) -> Option<u32> {
    match state {
        ExecState::Running { pid } => Some(*pid),
        _ => None,
    }
}

struct NodeProcess {
    exec: Attached,
    pid: u32,
    wanted: WantedProcess,
}

impl Process for NodeProcess {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn wanted(&self) -> WantedProcess {
        self.wanted.clone()
    }

    fn follow(&self) -> Outcome<Box<dyn Output>> {
        // What it has printed before is not asked for.
        let reader = self.exec.output.reader_from_now().ok_or_else(|| {
            let most = thaw_node::remote::READERS_MAX;
            let message = format!("{most} clients follow the process already; end one");
            Problem::new(Kind::Exhausted, message)
        })?;
        Ok(Box::new(NodeOutput { reader, exec: self.exec.clone() }))
    }

    fn write<'a>(&'a self, bytes: &'a [u8]) -> Later<'a, ()> {
        Box::pin(self.exec.write(bytes))
    }

    fn close_stdin(&self) -> Later<'_, ()> {
        Box::pin(self.exec.write(&[]))
    }

    fn signal(&self, number: u32) -> Outcome<()> {
        let sent = self.exec.signal(number, SignalTo::Group);
        sent.map_err(|reason| Problem::new(Kind::Busy, reason))
    }

    fn resize(&self, size: (u16, u16)) {
        self.exec.resize(size);
    }

    fn ended(&self) -> Later<'_, ()> {
        Box::pin(async move { drop(self.exec.ended().await) })
    }
}

struct NodeOutput {
    reader: thaw_node::remote::Reader,
    exec: Attached,
}

impl Output for NodeOutput {
    fn next(&mut self) -> Later<'_, Piece> {
        Box::pin(async move {
            match self.reader.next().await {
                Next::Bytes(thaw_node::remote::Stream::Stdout, bytes) => Piece::Stdout(bytes),
                Next::Bytes(thaw_node::remote::Stream::Stderr, bytes) => Piece::Stderr(bytes),
                Next::Lost(bytes) => Piece::Lost(bytes),
                Next::End => match self.exec.ended().await {
                    _ if self.exec.is_cut_off() => Piece::Gone,
                    ExecState::Ended { code: Some(code), .. } => Piece::End(Ended::Code(code)),
                    ExecState::Ended { signal: Some(signal), .. } => {
                        Piece::End(Ended::Signal(signal))
                    }
                    _ => Piece::Gone,
                },
            }
        })
    }
}

fn file_view(info: thaw_node::remote::files::FileInfo) -> FileView {
    let kind = match info.kind {
        thaw_node::remote::files::FileKind::File => FileKind::File,
        thaw_node::remote::files::FileKind::Directory => FileKind::Directory,
        thaw_node::remote::files::FileKind::Link => FileKind::Link,
        thaw_node::remote::files::FileKind::Other => FileKind::Other,
    };
    let thaw_node::remote::files::FileInfo { name, size, mode, uid, gid, mtime, .. } = info;
    FileView { name, kind, size, mode, uid, gid, mtime }
}

fn happened(what: u32) -> Option<Happened> {
    match what {
        remote::WATCH_CREATED => Some(Happened::Created),
        remote::WATCH_WRITTEN => Some(Happened::Written),
        remote::WATCH_REMOVED => Some(Happened::Removed),
        remote::WATCH_RENAMED => Some(Happened::Renamed),
        remote::WATCH_CHANGED => Some(Happened::Changed),
        _ => None,
    }
}

impl Files for FileSession {
    fn stat<'a>(&'a mut self, path: &'a str, links: Links) -> Later<'a, Outcome<FileView>> {
        Box::pin(async move {
            let found = FileSession::stat(self, path, links == Links::Followed).await;
            found.map(file_view).map_err(file_problem)
        })
    }

    fn read_link<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<String>> {
        Box::pin(async move { FileSession::read_link(self, path).await.map_err(file_problem) })
    }

    fn list<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<Vec<FileView>>> {
        Box::pin(async move {
            let found = FileSession::list(self, path).await.map_err(file_problem)?;
            Ok(found.into_iter().map(file_view).collect())
        })
    }

    fn make_directory<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<()>> {
        Box::pin(async move {
            FileSession::make_directory(self, path, None).await.map_err(file_problem)
        })
    }

    fn rename<'a>(&'a mut self, from: &'a str, to: &'a str) -> Later<'a, Outcome<()>> {
        Box::pin(async move { FileSession::rename(self, from, to).await.map_err(file_problem) })
    }

    fn remove<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<()>> {
        Box::pin(async move { FileSession::remove(self, path, true).await.map_err(file_problem) })
    }

    fn read<'a>(&'a mut self, path: &'a str, most: u64) -> Later<'a, Outcome<FileView>> {
        Box::pin(async move {
            let begun = FileSession::read_up_to(self, path, most).await;
            begun.map(file_view).map_err(file_problem)
        })
    }

    fn next_piece<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<Option<Vec<u8>>>> {
        Box::pin(async move { FileSession::next_piece(self, path).await.map_err(file_problem) })
    }

    fn write<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<()>> {
        Box::pin(
            async move { FileSession::write(self, path, None, None).await.map_err(file_problem) },
        )
    }

    fn watch<'a>(&'a mut self, path: &'a str, depth: Depth) -> Later<'a, Outcome<()>> {
        Box::pin(async move {
            FileSession::watch(self, path, depth == Depth::All).await.map_err(file_problem)
        })
    }

    fn next_event<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<(Happened, String)>> {
        Box::pin(async move {
            loop {
                let event = FileSession::next_event(self, path).await;
                let (what, name) = event.map_err(file_problem)?;
                // A sandbox may say what it likes.
                if let Some(what) = happened(what) {
                    return Ok((what, name));
                }
            }
        })
    }

    fn put<'a>(&'a mut self, bytes: &'a [u8]) -> Later<'a, Outcome<()>> {
        Box::pin(async move { FileSession::put(self, bytes).await.map_err(file_problem) })
    }

    fn finish<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<FileView>> {
        Box::pin(async move {
            let written = FileSession::finish(self, path).await;
            written.map(file_view).map_err(file_problem)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_home_of_the_functions_user_unless_it_names_another() {
        let user = |more: &str| {
            let text = format!(
                "name = \"box\"\nisolation = \"instance\"\nrootfs = \"tree\"\n{more}\n\
                 [entry]\nkind = \"sandbox\""
            );
            own_user(&FunctionConfig::parse("thaw.toml".as_ref(), &text).unwrap())
        };
        assert_eq!(user(""), "");
        assert_eq!(user("user = \"app\""), "app");
        assert_eq!(user("user = \"app\"\nenv = { HOME = \"/tmp\" }"), "");
    }
}
