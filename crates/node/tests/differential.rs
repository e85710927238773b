//! Images that store only how they differ from others, with a real program over the real kernel:
//! copies of copies hold what their originals held, page by page.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thaw_abi::control::{EntryPoint, FLAG_FREEZE_AT_ENTRY};
use thaw_abi::image::{DEPTH_MAX, Mapping, SOURCE_BLOB, SOURCE_IMAGE, ancestor_depth};
use thaw_build::build::open_image;
use thaw_home::rootfs::{self, StoredRootfs};
use thaw_sandbox::{
    BootPlan, Console, Event, FreezeBase, FreezeReport, FreezeSpec, Image, ImageError, Kernel,
    MergePolicy, PopulatePolicy, PostCopy, PrefetchLayout, Processes, Sandbox, StartSpec,
    ThawOptions, Twin, WeakLimits, WorkingSet, Zygote, ZygoteConfig, ZygoteParent, connection,
    freeze, zygote_parent_main,
};
use thaw_store::{ImageId, Store};

/// A test binary has no `main` of its own in which to become a zygote parent.
extern "C" fn before_main() {
    zygote_parent_main();
}

#[used]
// SAFETY: the section holds pointers to functions that the C library calls before `main`, with
// the signature of `before_main`.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

const PATIENCE: Duration = Duration::from_secs(60);
const PAGE: u64 = 4096;
const PORT: u16 = 8080;

/// A root file system with the program in it.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let root = tempfile::tempdir().unwrap().keep();
        let source = Path::new(env!("CARGO_MANIFEST_DIR"));
        let source = source.join("../../tests/guest/functions/writer.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-static", "-o"]).arg(root.join("writer")).arg(source);
        assert!(compiler.status().expect("a C compiler is installed").success());
        root
    })
}

/// A store with the program, and sandboxes over it.
struct Bench {
    _directory: TempDir,
    store: Store,
    rootfs: StoredRootfs,
    parent: ZygoteParent,
    merge: MergePolicy,
}

/// A running program.
struct Running {
    sandbox: Sandbox,
    /// Where its clients are from.
    listener: TcpListener,
    clients: u64,
}

/// A stored image, and what its freeze has told.
#[derive(Clone)]
struct Stored {
    id: ImageId,
    image: Arc<Image>,
    report: FreezeReport,
}

impl Bench {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("store")).unwrap();
        let (index, _) = rootfs::import(&store, program(), "writer", &mut |_| {}).unwrap();
        let rootfs = StoredRootfs::open(&store, index).unwrap();
        let config = ZygoteConfig {
            weak_limits: WeakLimits::Accept,
            ..ZygoteConfig::new(Kernel::embedded().unwrap(), Console::Pipe)
        };
        let parent = ZygoteParent::start(config).unwrap();
        let merge = MergePolicy { clean_gap_pages: 2, zero_gap_pages: 4 };
        Self { _directory: directory, store, rootfs, parent, merge }
    }

    fn zygote(&self) -> Zygote {
        self.parent.create().unwrap()
    }

    /// The program at its entry point.
    fn start(&self) -> (Running, EntryPoint) {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let spec = StartSpec {
            program: None,
            argv: vec!["/writer".into()],
            env: Vec::new(),
            cwd: "/".into(),
            hostname: "writer".into(),
            uid: 0,
            gid: 0,
            port: PORT,
            entry_signal: 0,
            cpus: 1,
            memory_limit: 0,
            process_limit: 0,
            cpu_time_limit: None,
            flags: FLAG_FREEZE_AT_ENTRY,
            rootfs: self.rootfs.rootfs(),
            egress: Arc::default(),
            mounts: Vec::new(),
            stdio: [null.as_fd(); 3],
            window: None,
        };
        let mut sandbox = self.zygote().start(&spec).unwrap();
        let entry = entry_of(&mut sandbox);
        (Running::new(sandbox), entry)
    }

    /// Stores an image of a program at rest.
    fn store(&self, running: &Running, entry: EntryPoint, parent: Option<&Stored>) -> Stored {
        let base = parent
            .map(|parent| FreezeBase { image: parent.image.clone(), name: *parent.id.as_bytes() });
        let spec = FreezeSpec {
            index_hash: *self.rootfs.id().as_bytes(),
            program: "writer".into(),
            arguments: "/writer".into(),
            about: "{}".into(),
            max_stored: 1 << 30,
            merge: self.merge,
            base,
            identity: None,
            post_copy: false,
        };
        let mut session = self.store.session().unwrap();
        let new = session.new_image_file().unwrap();
        let report = freeze(&running.sandbox, entry, &spec, new.file()).unwrap();
        let parsed = Image::open_with(new.file().try_clone().unwrap(), &mut |ancestor| {
            thaw_build::build::open_ancestor(&self.store, ancestor)
        });
        let ancestors: Vec<ImageId> =
            parsed.unwrap().ancestors().iter().map(|ancestor| ImageId(ancestor.name)).collect();
        let id = session.commit_checkpoint_image(new, &ancestors).unwrap();
        let image = Arc::new(open_image(&self.store, id, &self.rootfs).unwrap());
        assert_eq!(image.header().depth, report.depth);
        Stored { id, image, report }
    }

    fn plan(&self, stored: &Stored) -> Arc<BootPlan> {
        let rootfs = &self.rootfs;
        Arc::new(stored.image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs()).unwrap())
    }

    /// A copy of an image.
    fn thaw(&self, stored: &Stored) -> Running {
        let egress = Arc::default();
        Running::new(self.zygote().thaw(&self.plan(stored), None, &options(&egress)).unwrap())
    }

    /// A page of an image; `None`: it is zero.
    fn read(&self, stored: &Stored, mapping: &Mapping, at: u64) -> Option<Vec<u8>> {
        let offset = mapping.offset + (at - mapping.start);
        let mut page = vec![0; PAGE as usize];
        let file: File = match mapping.source {
            SOURCE_IMAGE => stored.image.file().try_clone().unwrap(),
            SOURCE_BLOB => match ancestor_depth(mapping.blob) {
                Some(depth) => {
                    let mut all = stored.image.ancestors().iter();
                    let name = all.find(|ancestor| ancestor.depth == depth).unwrap().name;
                    self.store.open_image(ImageId(name)).unwrap()
                }
                None => self.rootfs.blobs().open_blob(mapping.blob).unwrap().into(),
            },
            _ => return None,
        };
        // Behind the end of a blob there are zeros.
        let mut read = 0;
        while read < page.len() {
            match file.read_at(&mut page[read..], offset + read as u64).unwrap() {
                0 => break,
                more => read += more,
            }
        }
        page.iter().any(|&byte| byte != 0).then_some(page)
    }

    /// Every page that an image maps, with its protection and a hash of its content.
    fn pages(&self, stored: &Stored) -> BTreeMap<(u32, u64), (u32, u64)> {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut pages = BTreeMap::new();
        for mapping in stored.image.mappings() {
            for at in (mapping.start..mapping.start + mapping.len).step_by(PAGE as usize) {
                let mut hasher = DefaultHasher::new();
                self.read(stored, mapping, at).hash(&mut hasher);
                pages.insert((mapping.space(), at), (mapping.prot, hasher.finish()));
            }
        }
        pages
    }
}

fn options(egress: &Arc<thaw_sandbox::EgressPolicy>) -> ThawOptions<'_> {
    ThawOptions {
        streams: None,
        limits: Default::default(),
        cpu_time_limit: None,
        flags: 0,
        resumed: &[],
        volumes: &[],
        hostname: "",
        secrets: None,
        egress,
        cores: None,
    }
}

fn entry_of(sandbox: &mut Sandbox) -> EntryPoint {
    loop {
        match sandbox.wait_event(Some(PATIENCE)).unwrap().expect("an entry point") {
            Event::EntryPoint(entry) => return entry,
            Event::Booted(_) | Event::ConnectionClosed { .. } => {}
            event => panic!("{event:?}"),
        }
    }
}

impl Running {
    fn new(sandbox: Sandbox) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Self { sandbox, listener, clients: 0 }
    }

    /// Has it do something, and tells what it holds then.
    fn ask(&mut self, command: &str) -> String {
        let mut client = self.send(command);
        self.receive(&mut client, PATIENCE).unwrap_or_else(|| panic!("no answer to {command}"))
    }

    /// Tells it what to do.
    fn send(&mut self, command: &str) -> TcpStream {
        let mut client = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        let (socket, peer) = self.listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        self.clients += 1;
        let about = connection(self.clients, peer, ([127, 0, 0, 1], PORT).into());
        self.sandbox.connector().send_connection(&about, socket.as_fd()).unwrap();
        self.sandbox.ring_if_unread().unwrap();
        drop(socket);
        client.write_all(command.as_bytes()).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        client
    }

    /// What it holds after a command that went well; `None`: it has not answered for so long.
    fn receive(&mut self, client: &mut TcpStream, patience: Duration) -> Option<String> {
        let mut answer = String::new();
        let deadline = Instant::now() + patience;
        while client.read_to_string(&mut answer).is_err() {
            if Instant::now() > deadline {
                return None;
            }
            // It may want something of its host.
            self.serve();
        }
        let (result, held) = answer.split_once(' ').expect("an answer");
        assert_eq!(result, "0");
        Some(held.to_owned())
    }

    /// Serves what it asks its host for.
    fn serve(&mut self) {
        if let Some(event) = self.sandbox.wait_event(Some(Duration::ZERO)).unwrap() {
            let is_expected = matches!(event, Event::Booted(_) | Event::ConnectionClosed { .. });
            assert!(is_expected, "{event:?}");
        }
    }

    fn held(&mut self) -> String {
        self.ask("h 0 0 0 0")
    }

    fn rest(&mut self) -> EntryPoint {
        self.sandbox.request_freeze().unwrap();
        entry_of(&mut self.sandbox)
    }

    fn go_on(&mut self) {
        self.sandbox.resume().unwrap();
    }
}

/// What a program does to its memory between two images, everything that the kernel book-keeps.
const ROUNDS: [&[&str]; 3] = [
    &[
        "w 1 10 3 77",
        // Equal to what was there.
        "w 1 20 1 11",
        "w 1 40 8 0",
        "d 1 60 10 0",
        "d 0 60 10 0",
        "w 0 100 2 5",
        "p 1 200 4 0",
        "w 2 300 12 7",
    ],
    &["m 2 300 8 0", "w 1 500 2 9", "n 2 7 3 44", "d 1 308 4 0", "p 1 200 4 1", "w 1 201 1 3"],
    &["w 2 7 1 0", "w 1 64 2 12", "d 0 62 2 0", "w 0 63 1 9", "m 2 8 1 0", "n 1 0 3 1"],
];

#[test]
fn copies_of_copies_hold_what_their_originals_held() {
    let bench = Bench::new();
    let (running, entry) = bench.start();
    let mut stored = bench.store(&running, entry, None);
    assert_eq!((stored.report.depth, stored.image.ancestors().len()), (0, 0));
    let root_len = stored.report.stored;
    drop(running);
    for (depth, round) in (1..).zip(ROUNDS) {
        let mut copy = bench.thaw(&stored);
        let before = copy.held();
        let held = round.iter().map(|command| copy.ask(command)).last().unwrap();
        assert_ne!(held, before);
        let entry = copy.rest();
        let whole = bench.store(&copy, entry, None);
        let next = bench.store(&copy, entry, Some(&stored));
        assert_eq!((next.report.depth, whole.report.depth), (depth, 0));
        let stored_less = next.report.stored * 4 < root_len;
        assert!(stored_less, "{:?} of {root_len}", next.report);
        assert!(next.report.from_ancestors > 0 && whole.report.from_ancestors == 0);
        // The same memory, whatever holds it.
        let (pages, expected) = (bench.pages(&next), bench.pages(&whole));
        let differ: Vec<_> =
            expected.iter().filter(|(at, page)| pages.get(at) != Some(page)).collect();
        assert!(differ.is_empty(), "{} pages: {:x?}", differ.len(), &differ[..differ.len().min(9)]);
        assert_eq!(pages.len(), expected.len());
        // The original goes on, and so do copies.
        copy.go_on();
        assert_eq!(copy.held(), held);
        assert_eq!(bench.thaw(&next).held(), held);
        stored = next;
    }
    assert_eq!(stored.image.ancestors().last().unwrap().depth, 2);
    check_with_tools(&bench, &stored);
    everything_boots_it(&bench, &stored);
}

fn check_with_tools(bench: &Bench, stored: &Stored) {
    let path = bench.store.root().join("images").join(stored.id.to_string());
    let output = Command::new("readelf").arg("-lnW").arg(&path).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("NT_PRSTATUS") && !text.to_lowercase().contains("warning"), "{text}");
    let program = program().join("writer");
    let mut debugger = Command::new("gdb");
    debugger.args(["-nx", "-q", "-batch", "-ex", "info registers rip", "-ex", "bt"]);
    // Not everybody has it; readelf has read the image.
    let Ok(output) = debugger.arg(program).arg(&path).output() else { return };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("accept"), "{text}");
}

/// Warm, ready, off a template, and taken back.
fn everything_boots_it(bench: &Bench, stored: &Stored) {
    let plan = bench.plan(stored);
    let egress = Arc::default();
    let options = options(&egress);
    let held = bench.thaw(stored).held();
    let ready = bench.zygote().hold(&plan, &options).unwrap();
    let Ok(sandbox) = ready.go(None, &options) else { panic!("it does not go") };
    assert_eq!(Running::new(sandbox).held(), held);
    rewinds(bench, &plan, &options, &held);
    prefetches(bench, stored, &options, &held);
    let template = bench.parent.template(&plan, &options).unwrap();
    for _ in 0..2 {
        let mut copy = Running::new(template.fork(None, &options).unwrap());
        assert_eq!(copy.held(), held);
        // It has the front of the kernel's heap from its template.
        copy.ask("w 1 1 1 200");
        let entry = copy.rest();
        let whole = bench.store(&copy, entry, None);
        let next = bench.store(&copy, entry, Some(stored));
        assert_eq!(bench.pages(&next), bench.pages(&whole));
    }
}

/// A copy is put back into the state in which it waited to be wanted.
fn rewinds(bench: &Bench, plan: &Arc<BootPlan>, options: &ThawOptions<'_>, held: &str) {
    let zygote = bench.parent.create_with(Processes::One).unwrap();
    let mut ready = zygote.hold(plan, options).unwrap();
    if let Err(error) = ready.take_down() {
        let line = format!("SKIPPED rewinding: {error}\n");
        // Not by a macro: the test harness would keep that to itself.
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return;
    }
    for _ in 0..3 {
        let Ok(sandbox) = ready.go(None, options) else { panic!("it does not go") };
        let mut copy = Running::new(sandbox);
        assert_eq!(copy.held(), held);
        copy.ask("w 1 1 3 201");
        copy.ask("d 0 1 3 0");
        let (sender, rewound) = std::sync::mpsc::channel();
        copy.sandbox.rewind(move |result| sender.send(result).expect("it is waited for"));
        (ready, _) = rewound.recv().unwrap().unwrap();
    }
}

/// Its working set is recorded, and a cold boot reads that from a file of its own.
fn prefetches(bench: &Bench, stored: &Stored, options: &ThawOptions<'_>, held: &str) {
    let mut copy = bench.thaw(stored);
    copy.held();
    let rootfs = &bench.rootfs;
    let mut plan = stored
        .image
        .plan(rootfs.file(), rootfs.file_len(), rootfs.blobs())
        .unwrap()
        .without_blobs();
    let set = WorkingSet::recorder(&copy.sandbox).unwrap().record(&plan).unwrap();
    assert!(set.blobs().iter().all(|&blob| ancestor_depth(blob).is_none()));
    plan.apply_working_set(&set, PopulatePolicy::Both).unwrap();
    let held_by =
        |plan: &BootPlan| Running::new(bench.zygote().thaw(plan, None, options).unwrap()).held();
    assert_eq!(held_by(&plan), held);
    let Some(layout) = PrefetchLayout::new(&plan, &set, PAGE, 1 << 30) else {
        assert!(plan.mappings().len() > 2000);
        return;
    };
    let file = tempfile::tempfile().unwrap();
    file.set_len(PAGE + layout.len()).unwrap();
    layout.write(&plan, &file).unwrap();
    plan.prefetch(Arc::new(file), layout, &set, PopulatePolicy::Both).unwrap();
    assert!(plan.prefetches());
    assert_eq!(held_by(&plan), held);
}

/// They do not fit a boot command, and would be most of the memory if the pages between them
/// were stored.
#[test]
fn scattered_writes_make_as_many_mappings_as_it_takes() {
    let mut bench = Bench::new();
    bench.merge = MergePolicy { clean_gap_pages: 0, zero_gap_pages: 0 };
    let (running, entry) = bench.start();
    let root = bench.store(&running, entry, None);
    drop(running);
    let mut copy = bench.thaw(&root);
    for command in ["s 0 0 2 250", "s 1 1 2 250", "s 2 1 2 250"] {
        copy.ask(command);
    }
    let held = copy.held();
    let entry = copy.rest();
    let whole = bench.store(&copy, entry, None);
    let next = bench.store(&copy, entry, Some(&root));
    assert!(next.report.mappings > 3000 && next.report.stored_clean == 0, "{:?}", next.report);
    assert!(whole.report.mappings <= 3000, "{:?}", whole.report);
    assert_eq!(bench.pages(&next), bench.pages(&whole));
    copy.go_on();
    assert_eq!(copy.held(), held);
    drop(copy);
    everything_boots_it(&bench, &next);
    let mut copy = bench.thaw(&next);
    assert_eq!(copy.held(), held);
    copy.ask("w 1 0 3 1");
    let held = copy.held();
    let entry = copy.rest();
    let last = bench.store(&copy, entry, Some(&next));
    assert!(last.report.stored * 4 < root.report.stored, "{:?}", last.report);
    assert_eq!(bench.thaw(&last).held(), held);
}

/// The original of a chain of images was started without any.
#[test]
fn later_images_of_one_sandbox_store_what_is_new() {
    let bench = Bench::new();
    let (mut running, entry) = bench.start();
    let first = bench.store(&running, entry, None);
    running.go_on();
    let mut last = first.clone();
    for round in 0..3 {
        running.ask(&format!("w 1 {} 2 99", 100 + 10 * round));
        running.ask(&format!("d 1 {} 2 0", 500 + 10 * round));
        let held = running.held();
        let entry = running.rest();
        let whole = bench.store(&running, entry, None);
        let next = bench.store(&running, entry, Some(&last));
        assert_eq!(bench.pages(&next), bench.pages(&whole));
        assert!(next.report.stored * 4 < first.report.stored, "{:?}", next.report);
        running.go_on();
        assert_eq!(bench.thaw(&next).held(), held);
        last = next;
    }
    // Then one of a copy, which is compared with a later image than its own.
    let mut copy = bench.thaw(&first);
    copy.ask("w 1 100 2 99");
    copy.ask("d 1 700 2 0");
    let held = copy.held();
    let entry = copy.rest();
    let whole = bench.store(&copy, entry, None);
    let next = bench.store(&copy, entry, Some(&last));
    assert_eq!(bench.pages(&next), bench.pages(&whole));
    assert!(next.report.stored * 4 < first.report.stored, "{:?}", next.report);
    assert_eq!(bench.thaw(&next).held(), held);
}

#[test]
fn processes_have_ancestors_of_their_own() {
    let bench = Bench::new();
    let (running, entry) = bench.start();
    let root = bench.store(&running, entry, None);
    drop(running);
    let mut parent = root;
    // One child more in each copy: the first is made in a copy of an image of one process.
    for round in 0..3 {
        let mut copy = bench.thaw(&parent);
        copy.ask(&format!("w 1 {} 1 3", 20 * round));
        copy.ask(&format!("f 1 {} 5 {}", 100 + round, 50 + round));
        copy.ask(&format!("d 1 {} 2 0", 400 + 10 * round));
        let held = copy.held();
        let entry = copy.rest();
        let whole = bench.store(&copy, entry, None);
        let next = bench.store(&copy, entry, Some(&parent));
        let (pages, expected) = (bench.pages(&next), bench.pages(&whole));
        assert_eq!(pages.keys().map(|(space, _)| space).max(), Some(&(round + 1)));
        let differ: Vec<_> =
            expected.iter().filter(|(at, page)| pages.get(at) != Some(page)).collect();
        assert!(differ.is_empty(), "{} pages: {:x?}", differ.len(), &differ[..differ.len().min(9)]);
        assert!(next.report.stored * 2 < whole.report.stored, "{:?}", next.report);
        copy.go_on();
        assert_eq!(copy.held(), held);
        assert_eq!(bench.thaw(&next).held(), held);
        parent = next;
    }
}

/// The image of a program with two processes.
fn image_of_two(bench: &Bench) -> (Stored, String) {
    let (mut running, _) = bench.start();
    running.go_on();
    running.ask("f 1 100 500 7");
    let held = running.held();
    let entry = running.rest();
    (bench.store(&running, entry, None), held)
}

/// An image that is still being written.
struct Growing {
    /// With holes in place of what the second process has for itself.
    file: File,
    whole: Vec<u8>,
    rest: Arc<PostCopy>,
}

impl Growing {
    fn begin(stored: &Stored) -> Self {
        let mut whole = Vec::new();
        let mut file = File::open(format!("/proc/self/fd/{}", stored.image.file().as_raw_fd()));
        file.as_mut().unwrap().read_to_end(&mut whole).unwrap();
        let mut part = whole.clone();
        let of_first = |mapping: &&Mapping| mapping.space() == 0;
        let stored_of = |offset: u64| {
            let all = stored.image.mappings().iter().filter(of_first);
            all.clone().any(|first| {
                first.source == SOURCE_IMAGE
                    && (first.offset..first.offset + first.len).contains(&offset)
            })
        };
        let mut left_out = 0;
        for mapping in stored.image.mappings().iter().filter(|mapping| !of_first(mapping)) {
            for page in (0..mapping.len).step_by(PAGE as usize) {
                let offset = mapping.offset + page;
                if mapping.source == SOURCE_IMAGE && !stored_of(offset) {
                    part[offset as usize..(offset + PAGE) as usize].fill(0);
                    left_out += 1;
                }
            }
        }
        assert!(left_out >= 500, "{left_out} pages");
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&part).unwrap();
        Self { file, whole, rest: Arc::new(PostCopy::new()) }
    }

    fn thaw(&self, bench: &Bench) -> Running {
        let image = Image::open_partial(self.file.try_clone().unwrap()).unwrap();
        let rootfs = &bench.rootfs;
        let plan = image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs()).unwrap();
        let plan = plan.post_copy(self.rest.clone());
        let egress = Arc::default();
        Running::new(bench.zygote().thaw(&plan, None, &options(&egress)).unwrap())
    }

    fn complete(&self) {
        self.file.write_all_at(&self.whole, 0).unwrap();
        self.rest.complete();
    }
}

/// The pipes that a sandbox has open.
fn pipes_of(running: &Running) -> usize {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", running.sandbox.pid())).unwrap();
    let targets = descriptors.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("pipe:")).count()
}

/// Waits until a sandbox has so many pipes open: it lets go of one a moment after it was of use.
#[track_caller]
fn wait_for_pipes(running: &Running, count: usize) {
    let deadline = Instant::now() + PATIENCE;
    while pipes_of(running) != count {
        assert!(Instant::now() < deadline, "it has {} pipes, not {count}", pipes_of(running));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_copy_runs_before_the_memory_of_its_other_processes_is_there() {
    let bench = Bench::new();
    let (stored, held) = image_of_two(&bench);
    let growing = Growing::begin(&stored);
    let usual = pipes_of(&bench.thaw(&stored));
    let (mut first, mut second) = (growing.thaw(&bench), growing.thaw(&bench));
    let mut waiting = Vec::new();
    for copy in [&mut first, &mut second] {
        assert_eq!(copy.held(), held);
        copy.ask("w 2 1 1 9");
        assert_eq!(pipes_of(copy), usual + 1, "it waits at one");
        let mut client = copy.send("c 1 0 500 7");
        let answer = copy.receive(&mut client, Duration::from_millis(300));
        assert_eq!(answer, None, "its second process has nothing of its memory yet");
        waiting.push(client);
    }
    growing.complete();
    for (copy, client) in [&mut first, &mut second].into_iter().zip(&mut waiting) {
        let after = copy.receive(client, PATIENCE).expect("an answer");
        assert_ne!(after, held);
        wait_for_pipes(copy, usual);
        // It is a copy as any other one.
        copy.ask("f 1 100 500 8");
        copy.ask("c 1 0 500 8");
        let held = copy.held();
        let entry = copy.rest();
        let next = bench.store(copy, entry, None);
        assert_eq!(bench.thaw(&next).held(), held);
    }
    let mut late = growing.thaw(&bench);
    assert_eq!(late.held(), held);
    wait_for_pipes(&late, usual);
    late.ask("c 1 0 500 7");
}

#[test]
fn a_copy_does_not_come_to_rest_before_its_memory_is_there() {
    let bench = Bench::new();
    let (stored, held) = image_of_two(&bench);
    for is_at_once in [false, true] {
        let growing = Growing::begin(&stored);
        let mut copy = growing.thaw(&bench);
        match is_at_once {
            false => copy.sandbox.request_freeze().unwrap(),
            true => copy.sandbox.request_checkpoint(Twin::Refused).unwrap(),
        }
        for _ in 0..10 {
            assert_eq!(copy.held(), held, "it goes on meanwhile");
        }
        growing.complete();
        let entry = entry_of(&mut copy.sandbox);
        let next = bench.store(&copy, entry, None);
        let mut copy = bench.thaw(&next);
        assert_eq!(copy.held(), held);
        copy.ask("c 1 0 500 7");
    }
}

#[test]
fn a_copy_ends_if_the_rest_of_its_memory_does_not_come() {
    let bench = Bench::new();
    let (stored, held) = image_of_two(&bench);
    for is_dropped in [false, true] {
        let growing = Growing::begin(&stored);
        let mut copy = growing.thaw(&bench);
        assert_eq!(copy.held(), held);
        match is_dropped {
            false => growing.rest.fail(),
            true => drop(growing),
        }
        let deadline = Instant::now() + PATIENCE;
        while copy.sandbox.try_wait().is_none() {
            assert!(Instant::now() < deadline, "it goes on");
            let _ = copy.sandbox.wait_event(Some(Duration::from_millis(10)));
        }
    }
}

#[test]
fn an_image_is_of_no_use_without_its_ancestors() {
    let bench = Bench::new();
    let (mut running, entry) = bench.start();
    let root = bench.store(&running, entry, None);
    running.go_on();
    running.ask("w 1 10 3 77");
    let entry = running.rest();
    let next = bench.store(&running, entry, Some(&root));
    let alone = Image::open(bench.store.open_image(next.id).unwrap()).unwrap_err();
    assert!(matches!(alone, ImageError::Differential), "{alone}");
    let refusal = || match open_image(&bench.store, next.id, &bench.rootfs) {
        Ok(_) => panic!("it is opened"),
        Err(error) => error.to_string(),
    };
    let path = bench.store.root().join("images").join(root.id.to_string());
    let content = fs::read(&path).unwrap();
    let replace_with = |content: &[u8]| {
        fs::remove_file(&path).unwrap();
        fs::write(&path, content).unwrap();
    };
    let mut flipped = content.clone();
    *flipped.last_mut().unwrap() ^= 1;
    replace_with(&flipped);
    let damaged = refusal();
    assert!(damaged.contains("of depth 0") && damaged.contains("damaged"), "{damaged}");
    // An image, but another one.
    replace_with(&fs::read(bench.store.root().join("images").join(next.id.to_string())).unwrap());
    assert!(refusal().contains("that is not what it was"), "{}", refusal());
    replace_with(&content);
    open_image(&bench.store, next.id, &bench.rootfs).unwrap();
    fs::remove_file(&path).unwrap();
    assert!(refusal().contains("there is no image"), "{}", refusal());
}

#[test]
fn a_chain_that_is_deep_enough_begins_anew() {
    let bench = Bench::new();
    let (mut running, entry) = bench.start();
    let mut last = bench.store(&running, entry, None);
    for depth in 1..=DEPTH_MAX {
        running.go_on();
        running.ask(&format!("w 1 {depth} 1 250"));
        let entry = running.rest();
        last = bench.store(&running, entry, Some(&last));
        assert_eq!(last.report.depth, depth);
    }
    running.go_on();
    let held = running.held();
    assert_eq!(bench.thaw(&last).held(), held);
    let entry = running.rest();
    let next = bench.store(&running, entry, Some(&last));
    assert_eq!((next.report.depth, next.image.ancestors().len()), (0, 0));
    assert_eq!(bench.thaw(&next).held(), held);
}
