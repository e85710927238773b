//! Sandboxes that live in memory, for tests of what is above [`Backend`]. A process prints its
//! arguments but the program, then all that it is told, and ends when its input ends or a signal
//! comes. Those of builds do what [`Play`] says.

use super::backend::*;
use super::problem::{Kind, Problem};
use std::collections::{BTreeMap, VecDeque};
use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_home::volumes::VolumeStore;
use thaw_node::remote::egress::ClientEgress;
use thaw_store::Name;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;

/// What a process of a test has printed, and how it has ended.
#[derive(Clone, Default)]
struct Printed {
    pieces: Vec<Vec<u8>>,
    ended: Option<Ended>,
    /// Its sandbox has ended before it.
    is_cut_off: bool,
}

struct FakeProcess {
    pid: u32,
    wanted: WantedProcess,
    printed: watch::Sender<Printed>,
}

impl FakeProcess {
    fn end(&self, ended: Ended) {
        self.printed.send_modify(|printed| printed.ended = Some(ended));
    }
}

impl Process for FakeProcess {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn wanted(&self) -> WantedProcess {
        self.wanted.clone()
    }

    fn follow(&self) -> Outcome<Box<dyn Output>> {
        let printed = self.printed.subscribe();
        let at = printed.borrow().pieces.len();
        Ok(Box::new(FakeOutput { printed, at }))
    }

    fn write<'a>(&'a self, bytes: &'a [u8]) -> Later<'a, ()> {
        self.printed.send_modify(|printed| printed.pieces.push(bytes.to_vec()));
        Box::pin(async {})
    }

    fn close_stdin(&self) -> Later<'_, ()> {
        self.end(Ended::Code(0));
        Box::pin(async {})
    }

    fn signal(&self, number: u32) -> Outcome<()> {
        self.end(Ended::Signal(number as u8));
        Ok(())
    }

    fn resize(&self, (rows, columns): (u16, u16)) {
        let text = format!("{rows}x{columns}").into_bytes();
        self.printed.send_modify(|printed| printed.pieces.push(text));
    }

    fn ended(&self) -> Later<'_, ()> {
        let mut printed = self.printed.subscribe();
        Box::pin(async move {
            let _ = printed.wait_for(|printed| printed.ended.is_some()).await;
        })
    }
}

/// What a process of a test does by itself.
struct Play {
    pieces: Vec<Vec<u8>>,
    ended: Option<Ended>,
}

impl Play {
    /// A script with arguments prints the first of them. `exit N` ends so, and `hang` does not end.
    fn of(wanted: &WantedProcess) -> Self {
        let is_script = wanted.argv.get(3).is_some_and(|name| name == "thaw");
        let shown =
            if is_script { wanted.argv.get(4..5).unwrap_or_default() } else { &wanted.argv[1..] };
        let last = wanted.argv.last().map_or("", String::as_str);
        let code = last.strip_prefix("exit ").and_then(|code| code.parse().ok()).unwrap_or(0);
        let has_ended = !wanted.stdin && wanted.terminal.is_none() && last != "hang";
        Self {
            pieces: shown.iter().map(|text| text.clone().into_bytes()).collect(),
            ended: has_ended.then_some(Ended::Code(code)),
        }
    }
}

struct FakeOutput {
    printed: watch::Receiver<Printed>,
    at: usize,
}

impl Output for FakeOutput {
    fn next(&mut self) -> Later<'_, Piece> {
        Box::pin(async move {
            let at = self.at;
            let has_more = |printed: &Printed| {
                printed.pieces.len() > at || printed.ended.is_some() || printed.is_cut_off
            };
            let printed = self.printed.wait_for(has_more).await.unwrap().clone();
            match (printed.pieces.get(at), printed.ended) {
                (Some(piece), _) => {
                    self.at += 1;
                    Piece::Stdout(piece.clone())
                }
                (None, Some(ended)) => Piece::End(ended),
                (None, None) => Piece::Gone,
            }
        })
    }
}

/// Files by path; a directory has no contents.
type Tree = Arc<Mutex<BTreeMap<String, Option<Vec<u8>>>>>;

struct FakeFiles {
    tree: Tree,
    reading: VecDeque<Vec<u8>>,
    writing: Vec<u8>,
    events: u32,
}

fn view(path: &str, contents: Option<&Vec<u8>>) -> FileView {
    FileView {
        name: path.rsplit('/').next().unwrap_or_default().to_owned(),
        kind: if contents.is_some() { FileKind::File } else { FileKind::Directory },
        size: contents.map_or(0, |contents| contents.len() as u64),
        mode: 0o644,
        uid: 0,
        gid: 0,
        mtime: 0,
    }
}

impl FakeFiles {
    fn get(&self, path: &str) -> Outcome<Option<Vec<u8>>> {
        let found = self.tree.lock().unwrap().get(path).cloned();
        found.ok_or_else(|| Problem::new(Kind::NotFound, format!("{path}: it does not exist")))
    }

    fn make_parents(&self, path: &str) {
        let mut tree = self.tree.lock().unwrap();
        for (at, _) in path.match_indices('/').skip(1) {
            tree.entry(path[..at].to_owned()).or_insert(None);
        }
    }
}

fn now<'a, T: Send + 'a>(value: T) -> Later<'a, T> {
    Box::pin(async move { value })
}

impl Files for FakeFiles {
    fn stat<'a>(&'a mut self, path: &'a str, _links: Links) -> Later<'a, Outcome<FileView>> {
        now(self.get(path).map(|contents| view(path, contents.as_ref())))
    }

    fn read_link<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<String>> {
        now(Err(Problem::invalid(format!("{path} is no link"))))
    }

    fn list<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<Vec<FileView>>> {
        let tree = self.tree.lock().unwrap();
        let start = format!("{}/", path.trim_end_matches('/'));
        let inside = |name: &String| {
            name.strip_prefix(&start).is_some_and(|rest| !rest.is_empty() && !rest.contains('/'))
        };
        let found = tree.iter().filter(|(name, _)| inside(name));
        now(Ok(found.map(|(name, contents)| view(name, contents.as_ref())).collect()))
    }

    fn make_directory<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<()>> {
        self.make_parents(&format!("{path}/"));
        now(Ok(()))
    }

    fn rename<'a>(&'a mut self, from: &'a str, to: &'a str) -> Later<'a, Outcome<()>> {
        let contents = self.get(from);
        now(contents.map(|contents| {
            let mut tree = self.tree.lock().unwrap();
            tree.remove(from);
            tree.insert(to.to_owned(), contents);
        }))
    }

    fn remove<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<()>> {
        let start = format!("{path}/");
        let found = self.get(path);
        self.tree.lock().unwrap().retain(|name, _| name != path && !name.starts_with(&start));
        now(found.map(drop))
    }

    fn read<'a>(&'a mut self, path: &'a str, _most: u64) -> Later<'a, Outcome<FileView>> {
        now(self.get(path).map(|contents| {
            let found = view(path, contents.as_ref());
            self.reading = contents.unwrap_or_default().chunks(3).map(<[u8]>::to_vec).collect();
            found
        }))
    }

    fn next_piece<'a>(&'a mut self, _path: &'a str) -> Later<'a, Outcome<Option<Vec<u8>>>> {
        now(Ok(self.reading.pop_front()))
    }

    fn write<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<()>> {
        self.make_parents(path);
        now(Ok(()))
    }

    fn watch<'a>(&'a mut self, path: &'a str, _depth: Depth) -> Later<'a, Outcome<()>> {
        now(self.get(path).map(drop))
    }

    /// There are two events, or with `/busy` ever more.
    fn next_event<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<(Happened, String)>> {
        self.events += 1;
        match self.events {
            1 => now(Ok((Happened::Created, "file".to_owned()))),
            2 => now(Ok((Happened::Written, "file".to_owned()))),
            _ if path == "/busy" => now(Ok((Happened::Changed, "x".repeat(255)))),
            _ => Box::pin(std::future::pending()),
        }
    }

    fn put<'a>(&'a mut self, bytes: &'a [u8]) -> Later<'a, Outcome<()>> {
        self.writing.extend_from_slice(bytes);
        now(Ok(()))
    }

    fn finish<'a>(&'a mut self, path: &'a str) -> Later<'a, Outcome<FileView>> {
        let contents = std::mem::take(&mut self.writing);
        let found = view(path, Some(&contents));
        self.tree.lock().unwrap().insert(path.to_owned(), Some(contents));
        now(Ok(found))
    }
}

#[derive(Clone)]
struct FakeSandbox {
    sandbox: Sandbox,
    processes: Vec<Arc<FakeProcess>>,
    tree: Tree,
    /// The snapshot that it was made of.
    parent: Option<String>,
    /// How often its use was counted.
    looked_at: u64,
}

/// A program that answers with the head of the request.
async fn show_head(mut stream: tokio::io::DuplexStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let start = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", head.len());
    stream.write_all(&[start.as_bytes(), &head].concat()).await.unwrap();
}

/// Bytes of memory of its sandboxes, unless they have limits of their own.
const MEMORY: u64 = 512 << 20;

/// Sandboxes in memory, of one function `python`.
#[derive(Default)]
pub(super) struct Fake {
    all: Mutex<BTreeMap<String, FakeSandbox>>,
    snapshots: Mutex<BTreeMap<String, FakeSandbox>>,
    /// Snapshots are not written as long as somebody waits for them.
    pub is_slow: AtomicBool,
    /// The version of the function.
    pub version: AtomicU32,
    /// Those that are being written.
    written_late: Mutex<BTreeMap<String, FakeSandbox>>,
    /// Volumes, if the test has some.
    pub volumes: Mutex<Option<VolumeStore>>,
    /// Whether some sandbox has each of them.
    pub has_volumes: AtomicBool,
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

impl Fake {
    fn change<T>(&self, id: &str, does: impl FnOnce(&mut FakeSandbox) -> T) -> Outcome<T> {
        let mut all = self.all.lock().unwrap();
        all.get_mut(id).map(does).ok_or_else(|| Problem::no_sandbox(id))
    }

    /// The file at a path of a sandbox.
    pub fn file(&self, id: &str, path: &str) -> Option<Vec<u8>> {
        let tree = self.change(id, |one| one.tree.clone()).unwrap();
        let found = tree.lock().unwrap().get(path).cloned();
        found.flatten()
    }

    /// How many sandboxes and snapshots there are.
    pub fn counts(&self) -> (usize, usize) {
        (self.all.lock().unwrap().len(), self.snapshots.lock().unwrap().len())
    }

    /// Names of all snapshots.
    pub fn snapshot_names(&self) -> Vec<String> {
        self.snapshots.lock().unwrap().keys().cloned().collect()
    }

    /// What was asked for of the processes of a sandbox.
    pub fn wanted(&self, id: &str) -> Vec<WantedProcess> {
        self.change(id, |one| one.processes.iter().map(|one| one.wanted()).collect()).unwrap()
    }

    /// Snapshots come that nobody waits for any more.
    pub fn write_late(&self) {
        self.snapshots.lock().unwrap().append(&mut self.written_late.lock().unwrap());
    }

    /// Puts a file there.
    pub fn put(&self, id: &str, path: &str, contents: Option<&[u8]>) {
        let tree = self.change(id, |one| one.tree.clone()).unwrap();
        tree.lock().unwrap().insert(path.to_owned(), contents.map(<[u8]>::to_vec));
    }
}

impl Backend for Fake {
    fn check<'a>(&'a self, wanted: &'a Wanted) -> Later<'a, Outcome<()>> {
        let is_too_much = wanted.limits.cpus.is_some_and(|cpus| cpus > 2);
        now(match wanted.snapshot.is_none() && wanted.function != "python" {
            true => Err(Problem::new(Kind::NotFound, "there is no such function")),
            false if is_too_much => Err(Problem::invalid("its function allows 2 processors")),
            false => Ok(()),
        })
    }

    fn base(&self, wanted: &Wanted) -> Outcome<Base> {
        Ok(match &wanted.snapshot {
            Some(snapshot) => Base::Checkpoint(snapshot.clone()),
            None => {
                let version = self.version.load(Ordering::SeqCst);
                let [image, config] = ["image", "config"].map(str::to_owned);
                Base::Function { name: wanted.function.clone(), version, image, config }
            }
        })
    }

    fn create(&self, wanted: Wanted) -> Later<'_, Outcome<Sandbox>> {
        if let Some(snapshot) = &wanted.snapshot {
            let found = self.snapshots.lock().unwrap().get(snapshot).cloned();
            let Some(mut copy) = found else {
                return now(Err(Problem::new(Kind::NotFound, "there is no such checkpoint")));
            };
            copy.sandbox.id = wanted.id.clone();
            copy.parent = Some(snapshot.clone());
            copy.sandbox.memory_bytes = wanted.limits.memory_bytes.unwrap_or(MEMORY);
            self.all.lock().unwrap().insert(wanted.id, copy.clone());
            return now(Ok(copy.sandbox));
        }
        if wanted.function != "python" {
            return now(Err(Problem::new(Kind::NotFound, "there is no such function")));
        }
        let sandbox = Sandbox {
            id: wanted.id.clone(),
            function: wanted.function,
            created_ms: now_ms(),
            deadline_ms: Some(now_ms() + 1000 * wanted.timeout_s),
            pauses: wanted.pauses,
            metadata: wanted.metadata,
            cpus: 2,
            memory_bytes: wanted.limits.memory_bytes.unwrap_or(MEMORY),
            directory: "/work".to_owned(),
            volumes: wanted.volumes,
        };
        let made = FakeSandbox {
            sandbox: sandbox.clone(),
            processes: Vec::new(),
            tree: Arc::new(Mutex::new([("/work".to_owned(), None)].into())),
            parent: None,
            looked_at: 0,
        };
        self.all.lock().unwrap().insert(wanted.id, made);
        now(Ok(sandbox))
    }

    fn find(&self, id: &str) -> Option<Sandbox> {
        self.change(id, |one| one.sandbox.clone()).ok()
    }

    fn kill(&self, id: &str) -> Outcome<()> {
        let found = self.all.lock().unwrap().remove(id);
        let found = found.ok_or_else(|| Problem::no_sandbox(id))?;
        for process in &found.processes {
            process.printed.send_modify(|printed| printed.is_cut_off = true);
        }
        Ok(())
    }

    fn pause<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<()>> {
        now(self.change(id, |one| one.sandbox.deadline_ms = None))
    }

    fn resume<'a>(&'a self, id: &'a str, timeout_s: u64) -> Later<'a, Outcome<()>> {
        now(self.set_timeout(id, timeout_s))
    }

    fn set_timeout(&self, id: &str, timeout_s: u64) -> Outcome<()> {
        self.change(id, |one| one.sandbox.deadline_ms = Some(now_ms() + 1000 * timeout_s))
    }

    fn set_egress<'a>(&'a self, id: &'a str, _: ClientEgress) -> Later<'a, Outcome<()>> {
        now(self.change(id, |_| ()))
    }

    fn fork<'a>(&'a self, id: &'a str, copy: &'a str) -> Later<'a, Outcome<Sandbox>> {
        let copied = self.change(id, |one| one.clone()).map(|mut one| {
            one.sandbox.id = copy.to_owned();
            self.all.lock().unwrap().insert(copy.to_owned(), one.clone());
            one.sandbox
        });
        now(copied)
    }

    fn snapshot<'a>(&'a self, id: &'a str, name: &'a str) -> Later<'a, Outcome<()>> {
        now(self.change(id, |one| one.clone()).and_then(|one| {
            let is_slow = self.is_slow.load(Ordering::SeqCst);
            let into = if is_slow { &self.written_late } else { &self.snapshots };
            into.lock().unwrap().insert(name.to_owned(), one);
            match is_slow {
                true => Err(Problem::new(Kind::Late, "it was not written in time")),
                false => Ok(()),
            }
        }))
    }

    fn volumes(&self) -> Outcome<VolumeStore> {
        let volumes = self.volumes.lock().unwrap().clone();
        volumes.ok_or_else(|| Problem::unsupported("there are no volumes in this test"))
    }

    fn has_volume(&self, _name: &Name) -> bool {
        self.has_volumes.load(Ordering::SeqCst)
    }

    fn remove_snapshot<'a>(&'a self, name: &'a str) -> Later<'a, Outcome<bool>> {
        let mut snapshots = self.snapshots.lock().unwrap();
        if snapshots.values().any(|one| one.parent.as_deref() == Some(name)) {
            return now(Err(Problem::new(Kind::Exists, "others descend from it")));
        }
        now(Ok(snapshots.remove(name).is_some()))
    }

    fn snapshots<'a>(&'a self, prefix: &'a str) -> Later<'a, Outcome<Vec<String>>> {
        let mut names = self.snapshot_names();
        names.retain(|name| name.starts_with(prefix));
        now(Ok(names))
    }

    fn usage<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<Option<Usage>>> {
        now(self.change(id, |_| Some(Usage { cpu_percent: Some(50.0), memory_bytes: 1 << 20 })))
    }

    /// Each time that one is looked at, it has used a second more.
    fn count<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<Option<Count>>> {
        now(self.change(id, |one| {
            one.looked_at += 1;
            let cpu_time = Some(Duration::from_secs(one.looked_at));
            Some(Count { cpu_time, memory_bytes: 2 << 20 })
        }))
    }

    fn start<'a>(&'a self, id: &'a str, wanted: WantedProcess) -> Later<'a, Outcome<Started>> {
        now(self.change(id, |one| {
            let Play { pieces, ended } = Play::of(&wanted);
            let (printed, _) = watch::channel(Printed { pieces, ended, is_cut_off: false });
            let pid = 100 + one.processes.len() as u32;
            let process = Arc::new(FakeProcess { pid, wanted, printed });
            one.processes.push(process.clone());
            let output = FakeOutput { printed: process.printed.subscribe(), at: 0 };
            (process as Arc<dyn Process>, Box::new(output) as Box<dyn Output>)
        }))
    }

    fn processes<'a>(&'a self, id: &'a str) -> Later<'a, Outcome<Vec<Arc<dyn Process>>>> {
        now(self.change(id, |one| {
            let running = one.processes.iter().filter(|one| one.printed.borrow().ended.is_none());
            running.map(|process| process.clone() as Arc<dyn Process>).collect()
        }))
    }

    fn port<'a>(&'a self, id: &'a str, port: u16) -> Later<'a, Outcome<Box<dyn ByteStream>>> {
        if ![8080, 49999].contains(&port) {
            return now(Err(Problem::new(Kind::Gone, format!("nothing listens on port {port}"))));
        }
        now(self.change(id, |_| {
            let (ours, theirs) = tokio::io::duplex(1024);
            tokio::spawn(show_head(theirs));
            Box::new(ours) as Box<dyn ByteStream>
        }))
    }

    fn unpack<'a>(
        &'a self,
        id: &'a str,
        directory: &'a str,
        archive: Box<dyn Read + Send>,
    ) -> Later<'a, Outcome<()>> {
        let unpacked = self.change(id, |one| one.tree.clone()).and_then(|tree| {
            let wrong = |error: std::io::Error| Problem::invalid(error);
            let mut archive = tar::Archive::new(archive);
            for entry in archive.entries().map_err(wrong)? {
                let mut entry = entry.map_err(wrong)?;
                let path = format!("{directory}/{}", entry.path().map_err(wrong)?.display());
                let mut contents = Vec::new();
                entry.read_to_end(&mut contents).map_err(wrong)?;
                tree.lock().unwrap().insert(path, Some(contents));
            }
            Ok(())
        });
        now(unpacked)
    }

    fn files<'a>(
        &'a self,
        id: &'a str,
        user: Option<&'a str>,
    ) -> Later<'a, Outcome<Box<dyn Files>>> {
        if user.is_some_and(|user| user != "root") {
            return now(Err(Problem::new(Kind::Unauthenticated, "the sandbox does not know it")));
        }
        now(self.change(id, |one| {
            let (reading, writing) = (VecDeque::new(), Vec::new());
            let tree = one.tree.clone();
            Box::new(FakeFiles { tree, reading, writing, events: 0 }) as Box<dyn Files>
        }))
    }
}
