//! A program that tries to get out of its sandbox, watched from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use thaw_e2e::{
    Daemon, DaemonOptions, Descriptor, Function, Linking, Outcome, Raw, built_home, compile,
    descendants, descriptors, exists, get, kernel_symbol, run, thaw, wait_until,
};

/// What the hostile program aims at.
struct Target {
    directory: tempfile::TempDir,
    victim: Child,
    listener: TcpListener,
    host_name: String,
}

impl Target {
    fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("thaw-watch-").tempdir().expect("/tmp");
        fs::write(directory.path().join("secret"), "top secret").expect("a file");
        fs::create_dir(directory.path().join("empty")).expect("a directory");
        let victim = Command::new("sleep").arg("600").spawn().expect("sleep");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("an option");
        Self { directory, victim, listener, host_name: host_name() }
    }

    /// Runs the hostile program with `--rootfs` set to `root`.
    fn attack(&self, root: &Path, program: &Path, arguments: &[&str]) -> Outcome {
        let address = kernel_symbol("thaw_hostcall");
        let port = self.listener.local_addr().expect("an address").port();
        let mut command = thaw();
        command.args(["run", "--as-root", "--rootfs"]).arg(root);
        command.arg(format!("--env=THAW_TEST_HOSTCALL={address:x}"));
        command.arg(format!("--env=WATCH={}", self.directory.path().display()));
        command.arg(format!("--env=VICTIM={}", self.victim.id()));
        command.arg(format!("--env=PORT={port}"));
        let outcome = run(command.arg("--").arg(program).args(arguments));
        self.check();
        outcome
    }

    /// Nothing outside may have changed.
    fn check(&self) {
        let entries = |path: &Path| -> BTreeSet<String> {
            let names = fs::read_dir(path).expect("the directory");
            names.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
        };
        let path = self.directory.path();
        assert_eq!(entries(path), BTreeSet::from(["empty".to_owned(), "secret".to_owned()]));
        assert_eq!(entries(&path.join("empty")), BTreeSet::new());
        assert_eq!(fs::read_to_string(path.join("secret")).expect("the file"), "top secret");
        let mode = fs::metadata(path.join("secret")).expect("attributes").permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o644);
        assert!(exists(self.victim.id()), "the victim has ended");
        let accepted = self.listener.accept().map_err(|error| error.kind());
        assert!(matches!(accepted, Err(std::io::ErrorKind::WouldBlock)), "a connection came");
        assert_eq!(self.host_name, host_name());
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.victim.kill();
        let _ = self.victim.wait();
    }
}

fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").expect("/proc")
}

fn hostile() -> PathBuf {
    compile("hostile/hostile", Linking::Static)
}

/// The numbers that `thaw doctor --filter` has on a list.
fn allowed(list: &str) -> BTreeMap<u64, String> {
    let text = run(thaw().args(["doctor", "--filter", "--json"])).success();
    let calls: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let call = |call: &serde_json::Value| {
        let reason = call["reason"].as_str().expect("a reason");
        assert!(reason.len() > 10, "{call}");
        (call["number"].as_u64().expect("a number"), call["name"].as_str().expect("a name").into())
    };
    let is_on = |call: &&serde_json::Value| {
        call["lists"].as_array().expect("lists").iter().any(|name| name == list)
    };
    calls.as_array().expect("a list").iter().filter(is_on).map(call).collect()
}

/// `uretprobe` and `uprobe`: Linux runs them without asking any filter
/// (`seccomp_uprobe_exception` in kernel/seccomp.c). They serve the trampolines
/// that uprobes write into a process, and from anywhere else they end in
/// `SIGILL` or `ENXIO`.
const NOT_FILTERED: [u64; 2] = [335, 336];

/// Runs a mode of the program that goes through a list, again from the next
/// item when the sandbox was ended, and collects `item → result`.
fn collect(target: &Target, arguments: &dyn Fn(u64) -> Vec<String>, first: u64) -> Results {
    let attack = |arguments: &[&str]| {
        let outcome = target.attack(Path::new("/"), &hostile(), arguments);
        assert!(outcome.code.is_some(), "{arguments:?} was stuck: {}", outcome.stderr);
        outcome.stdout
    };
    collect_from(&attack, arguments, first)
}

/// The same with any way to run the program, which returns what it said.
fn collect_from(
    attack: &dyn Fn(&[&str]) -> String,
    arguments: &dyn Fn(u64) -> Vec<String>,
    first: u64,
) -> Results {
    let mut results = Results::default();
    let mut next = first;
    for _ in 0..50 {
        let arguments = arguments(next);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let said = attack(&arguments);
        let mut at = None;
        for line in said.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["at", number] => at = number.parse().ok(),
                ["sweep" | "attack" | "int80", number, name, result] => {
                    let number = number.parse().expect("a number");
                    results.calls.push((number, name.to_owned(), result.to_owned()));
                }
                _ => {}
            }
        }
        if said.ends_with("done\n") {
            return results;
        }
        let at = at.unwrap_or_else(|| panic!("it did not even start: {said}"));
        results.ended.push(at);
        next = at + 1;
    }
    panic!("the sandbox was ended too often, at {:?}", results.ended);
}

#[derive(Debug, Default)]
struct Results {
    /// Number, name, result.
    calls: Vec<(u64, String, String)>,
    /// Items at which the sandbox was ended.
    ended: Vec<u64>,
}

fn texts<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

#[test]
fn the_lists_of_host_calls_are_short() {
    for (list, most) in [("single_process", 18), ("general", 24), ("templates", 29)] {
        let allowed = allowed(list);
        assert!((5..=most).contains(&allowed.len()), "{list}: {allowed:?}");
    }
}

#[test]
fn no_number_passes_the_filter_that_is_not_on_its_list() {
    let target = Target::new();
    let allowed = allowed("general");
    for base in [0, 0x4000_0000] {
        let range =
            |first: u64| texts(["kernel", "sweep", &first.to_string(), &(base + 600).to_string()]);
        let results = collect(&target, &range, base);
        assert!(results.calls.len() + results.ended.len() >= 600, "{results:?}");
        for (number, _, result) in &results.calls {
            if allowed.contains_key(number) {
                assert_ne!(result, "ok", "call {number} takes nonsense");
            } else if NOT_FILTERED.contains(number) {
                assert!(
                    ["EPERM", "ENXIO", "ENOSYS"].contains(&result.as_str()),
                    "{number} {result}"
                );
            } else {
                assert_eq!(result, "EPERM", "call {number} is not on the list");
            }
        }
    }
}

#[test]
fn attacks_by_the_kernels_own_instruction_fail() {
    let target = Target::new();
    let results = collect(&target, &|first| texts(["kernel", "attack", &first.to_string()]), 0);
    assert!(results.calls.len() > 150, "{}", results.calls.len());
    let allowed = allowed("general");
    for (number, name, result) in &results.calls {
        // The attacks on allowed calls, whose arguments must not pass, are
        // called `call-attack`; what is called as the call itself is harmless.
        if allowed.get(number) != Some(name) {
            assert_eq!(result, "EPERM", "{name} ({number})");
        }
    }
}

/// A copy that a template has forked is as confined as one that a zygote became,
/// although its filter lets more calls pass.
#[test]
fn copies_of_a_template_are_no_way_out() {
    let target = Target::new();
    let home = hostile_home(&target, "hostile", "template = true");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let standby = || daemon.admin("/functions/hostile").json()["standby"]["template"].clone();
    let attack = |arguments: &[&str]| attack_by_request(&target, &daemon, arguments);
    // The first copies come from the image.
    for _ in 0..4 {
        attack(&["kernel", "sweep", "0", "1"]);
    }
    wait_until("there is a template", || !standby().is_null());
    let template = standby();

    let allowed = allowed("templates");
    let attacked = sweep_and_attack(&attack, &allowed);
    for (number, name, result) in &attacked.calls {
        let changes_ids = ["setresuid", "setresgid", "capset"].contains(&name.as_str());
        if allowed.get(number) != Some(name) || changes_ids {
            assert_ne!(result, "ok", "{name} ({number})");
        }
    }
    attack(&["console"]);
    wait_until("the daemon's log has it", || {
        let log = daemon.log();
        let line = log.lines().find(|line| line.contains("all is well"));
        line.is_some_and(|line| {
            line.contains(r"kernel: \x1b[2J\x1b]0;forged\x07thaw") && line.contains("hostile")
        })
    });
    assert_eq!(standby(), template, "the template has ended");
    let boots = daemon.admin("/functions/hostile").json()["boots"].clone();
    assert_eq!(boots[0]["kind"], "fork", "{boots}");
}

/// A function that promises to have one process has a filter that holds it to that,
/// whatever it was booted from.
#[test]
fn one_process_has_the_shortest_list() {
    let target = Target::new();
    let keys = "ready = 1\nlimits = { processes = 1 }";
    let home = hostile_home(&target, "hostile-single", keys);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let attack = |arguments: &[&str]| attack_by_request(&target, &daemon, arguments);
    let allowed = allowed("single_process");
    assert!(!allowed.contains_key(&56), "clone");

    let attacked = sweep_and_attack(&attack, &allowed);
    for (number, name, result) in &attacked.calls {
        if allowed.get(number) != Some(name) {
            assert_eq!(result, "EPERM", "{name} ({number})");
        }
    }
    // On a busy machine, those that come one after the other may find none that is ready.
    let detail = || daemon.admin("/functions/hostile").json();
    wait_until("one was booted ahead", || {
        let is_ready = detail()["standby"]["ready"].as_array().is_some_and(|all| !all.is_empty());
        if is_ready {
            attack(&["kernel", "sweep", "0", "1"]);
        }
        detail()["boots"].to_string().contains("\"ready\"")
    });
}

/// Makes every call in a copy, of which only those on its list may pass, and with no
/// nonsense; what became of the attacks.
fn sweep_and_attack(
    attack: &dyn Fn(&[&str]) -> String,
    allowed: &BTreeMap<u64, String>,
) -> Results {
    let range = |first: u64| texts(["kernel", "sweep", &first.to_string(), "600"]);
    let swept = collect_from(attack, &range, 0);
    assert!(swept.calls.len() + swept.ended.len() >= 600, "{swept:?}");
    for (number, _, result) in &swept.calls {
        if allowed.contains_key(number) {
            assert_ne!(result, "ok", "call {number} takes nonsense");
        } else if !NOT_FILTERED.contains(number) {
            assert_eq!(result, "EPERM", "call {number} is not on the list");
        }
    }
    let list = |first: u64| texts(["kernel", "attack", &first.to_string()]);
    let attacked = collect_from(attack, &list, 0);
    assert!(attacked.calls.len() > 150, "{}", attacked.calls.len());
    attacked
}

/// Attacks from a copy that a request boots; what it said.
fn attack_by_request(target: &Target, daemon: &Daemon, arguments: &[&str]) -> String {
    let path = format!("/{}", arguments.join("/"));
    let request = format!("GET {path} HTTP/1.1\r\nHost: hostile\r\nConnection: close\r\n\r\n");
    let said = Raw::connect(daemon.gateway()).send(request).read_to_end();
    target.check();
    String::from_utf8_lossy(&said).into_owned()
}

/// A store with the hostile program as a function with these keys.
fn hostile_home(target: &Target, label: &str, keys: &str) -> PathBuf {
    let home = built_home(label, &[]);
    let directory = tempfile::tempdir().expect("a directory");
    fs::copy(hostile(), directory.path().join("hostile")).expect("a program");
    let port = target.listener.local_addr().expect("an address").port();
    let text = format!(
        "name = \"hostile\"\ncommand = [\"/app/hostile\", \"serve\"]\nport = 8080\n\
         files = [\"hostile\"]\n{keys}\n[runtime]\nkind = \"binary\"\n[env]\n\
         THAW_TEST_HOSTCALL = \"{:x}\"\nWATCH = \"{}\"\nVICTIM = \"{}\"\nPORT = \"{port}\"\n",
        kernel_symbol("thaw_hostcall"),
        target.directory.path().display(),
        target.victim.id(),
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    run(thaw().env("THAW_HOME", &home).arg("build").arg(directory.path())).success();
    home
}

#[test]
fn attacks_by_a_system_call_of_ones_own_stay_in_the_sandbox() {
    let target = Target::new();
    let range = |first: u64| texts(["guest", "sweep", &first.to_string(), "600"]);
    let results = collect(&target, &range, 0);
    assert!(results.ended.is_empty(), "the guest's kernel fell over at {:?}", results.ended);
    let results = collect(&target, &|first| texts(["guest", "attack", &first.to_string()]), 0);
    assert!(results.ended.is_empty(), "the guest's kernel fell over at {:?}", results.ended);
    for (_, name, result) in &results.calls {
        // What would reach the host or another process; files are the sandbox's own.
        let forbidden = [
            "ptrace",
            "process_vm",
            // The kernel's own pidfds reach guest processes only.
            "pidfd_open-victim",
            "pidfd_getfd",
            "kill-victim",
            "tkill",
            "tgkill",
            "bpf",
            "io_uring",
            "userfaultfd",
            "perf_event",
            "setns",
            "mount",
            "kexec",
            "init_module",
            "open_by_handle",
            "iopl",
            "x32",
        ];
        if forbidden.iter().any(|start| name.starts_with(start)) {
            assert_ne!(result, "ok", "{name}");
        }
    }
}

#[test]
fn calls_of_another_architecture_end_the_process() {
    let target = Target::new();
    // exit, fork, open, execve, getpid, kill, socketcall, clone of i386
    for number in ["1", "2", "5", "11", "20", "37", "102", "120", "400"] {
        let outcome = target.attack(Path::new("/"), &hostile(), &["int80", number, number]);
        assert!(!outcome.stdout.contains("ok"), "{}", outcome.stdout);
        assert_eq!(outcome.code, Some(128 + libc::SIGSEGV), "{}", outcome.stderr);
    }
    let program = hostile();
    let script = format!(
        "for n in 1 2 11 20; do {0} int80 $n $n; echo ended with $?; done",
        program.display()
    );
    let outcome = target.attack(Path::new("/"), Path::new("/bin/sh"), &["-c", &script]);
    assert_eq!(outcome.stdout.matches("ended with 139").count(), 4, "{outcome:?}");
    // Not every processor has each of these: without it, it is an invalid instruction.
    let ways = "syscall32 sysenter32 sysenter";
    let script = format!("for w in {ways}; do {0} $w; echo ended with $?; done", program.display());
    let outcome = target.attack(Path::new("/"), Path::new("/bin/sh"), &["-c", &script]);
    let ended = |how: &str| outcome.stdout.matches(&format!("ended with {how}")).count();
    assert_eq!(ended("139") + ended("132"), 3, "{outcome:?}");
}

#[test]
fn the_sandbox_holds_no_descriptor_that_it_could_harm_with() {
    let target = Target::new();
    let outcome = target.attack(Path::new("/"), &hostile(), &["descriptors"]);
    let text = outcome.success();
    let (mut count, mut own_sockets) = (0, 0);
    for line in text.lines().filter(|line| line.starts_with("descriptor ")) {
        let words: Vec<&str> = line.split(' ').collect();
        let ["descriptor", fd, "write", write, "socket", socket, "writable-mapping", shared, ..] =
            words[..]
        else {
            panic!("{line}");
        };
        count += 1;
        assert_ne!(shared, "ok", "{line}");
        // 0 to 2: standard streams, 3: control socket, 4: console.
        if !["0", "1", "2", "3", "4"].contains(&fd) {
            let is_socket = (write, socket) == ("ok", "yes");
            own_sockets += u32::from(is_socket);
            assert!(is_socket || (write, socket) == ("EBADF", "no"), "{line}");
        }
        if fd == "4" {
            assert!(!line.ends_with("read ok"), "{line}");
        }
    }
    assert!((5..20).contains(&count), "{text}");
    assert_eq!(own_sockets, 1, "the one for requests about host directories: {text}");

    // The same, looked at from outside: the caller's streams are its own and no more.
    // Standard error can be read, as a terminal can.
    let file = tempfile::tempfile().expect("a file");
    let mut child = thaw()
        .args([
            "run",
            "--as-root",
            "--rootfs",
            "/",
            "--",
            "sh",
            "-c",
            "echo ready; read x; (read y); exit",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(file)
        .spawn()
        .expect("thaw");
    let mut ready = [0; 6];
    child.stdout.as_mut().expect("piped").read_exact(&mut ready).expect("it starts");
    let own = descriptors(child.id());
    let sandboxes = sandboxes_below(child.id());
    assert!(!sandboxes.is_empty());
    for process in sandboxes {
        let held = descriptors(process);
        for number in 0..3 {
            assert_eq!(held[&number].target, own[&number].target, "{held:?}");
            assert_eq!(held[&number].flags & 3, own[&number].flags & 3, "{held:?}");
        }
        check_held(&held, &own);
    }
    drop(child.stdin.take());
    child.wait().expect("our child");
}

/// The processes below a process that are the kernel of a sandbox, or a template.
fn sandboxes_below(pid: u32) -> Vec<u32> {
    let is_sandbox = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        [&b"thaw-kernel"[..], b"thaw-single", b"thaw-template"]
            .iter()
            .any(|name| line.starts_with(name))
    };
    descendants(pid).iter().map(|process| process.pid).filter(is_sandbox).collect()
}

/// Whatever a sandbox holds is on this list, which the README of `thaw-sandbox` has, too.
/// `callers` is what the process that made it has open.
fn check_held(held: &BTreeMap<u32, Descriptor>, callers: &BTreeMap<u32, Descriptor>) {
    assert!(held[&3].target.starts_with("socket:"), "control socket: {held:?}");
    assert!(held[&4].is_pipe_to_write(), "console: {held:?}");
    assert!((0..3).all(|number| callers[&number].target != held[&4].target), "console: {held:?}");
    for (number, descriptor) in held {
        let target = descriptor.target.as_str();
        let is_file = target.starts_with('/') && !target.starts_with("/memfd:");
        let is_known = match number {
            0..=2 if callers[number].target == target => true,
            // Zygotes, and what becomes of them: nothing to be read there.
            0..=2 if target == "/dev/null" => true,
            // The control socket and clients' sockets.
            _ if target.starts_with("socket:") => true,
            // Standard output and error of functions, and the console.
            _ if target.starts_with("pipe:") => descriptor.is_write_only(),
            // Image, index, blobs and files of the root.
            _ if is_file => descriptor.is_read_only(),
            // Memory that its processes share, and the socket with which they wake each other.
            _ => target.starts_with("/memfd:thaw-") || target == "anon_inode:[eventfd]",
        };
        assert!(is_known, "{number} is {descriptor:?}");
    }
}

/// Zygotes, instances, those that are booted ahead, templates and their copies.
#[test]
fn no_sandbox_of_a_daemon_holds_more_than_is_listed() {
    let home = built_home(
        "hostile-descriptors",
        &[("warm", "template = false"), ("fork", "template = true"), ("ready", "ready = 1")].map(
            |(name, keys)| Function::Variant {
                example: "hello-c",
                name,
                keys: format!("{keys}\nisolation = \"instance\""),
                limits: "",
            },
        ),
    );
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for name in ["warm", "fork", "ready"] {
        let booted_by = |kind: &str| {
            let response = get(daemon.gateway(), name, "/");
            assert_eq!(response.status, 200);
            for instance in daemon.instances(name) {
                let pid = instance["pid"].as_u64().expect("a process id") as u32;
                // Not before others have been looked at.
                // Zygotes of the pool among them, as soon as it is full again.
                wait_until("several are looked at", || check_all(&daemon) > 2);
                thaw_e2e::kill(pid);
            }
            wait_until("they are gone", || daemon.instances(name).is_empty());
            let boots = daemon.admin(&format!("/functions/{name}")).json()["boots"].clone();
            boots.as_array().expect("boots").iter().any(|boot| boot["kind"] == kind)
        };
        let kind = if name == "warm" { "warm" } else { name };
        let began = std::time::Instant::now();
        while !booted_by(kind) {
            assert!(began.elapsed().as_secs() < 60, "{name} is never booted by {kind}");
        }
    }
}

/// Looks at all sandboxes that there are just now; how many that were.
#[track_caller]
fn check_all(daemon: &Daemon) -> usize {
    let own = descriptors(daemon.pid());
    let mut consoles = BTreeSet::new();
    for pid in sandboxes_below(daemon.main_pid()) {
        let held = descriptors(pid);
        // One that ends meanwhile has none, or not all.
        if !exists(pid) || !held.contains_key(&4) {
            continue;
        }
        check_held(&held, &own);
        assert!(consoles.insert(held[&4].target.clone()), "two share a console: {held:?}");
    }
    consoles.len()
}

#[test]
fn what_is_written_on_the_console_is_escaped_and_cannot_be_read_back() {
    let target = Target::new();
    let outcome = target.attack(Path::new("/"), &hostile(), &["console"]);
    assert!(outcome.stdout.contains("console read E"), "{}", outcome.stdout);
    let expected = "thaw: kernel: \\x1b[2J\\x1b]0;forged\\x07thaw: all is well\n\
                    thaw: kernel: \\u{202e}\n";
    assert_eq!(outcome.stderr, expected);
}

#[test]
fn a_flood_on_the_console_fills_nothing() {
    let mut log = tempfile::tempfile().expect("a file");
    let mut command = thaw();
    command.args(["run", "--as-root", "--rootfs", "/", "--cpu-time=10s"]);
    let address = kernel_symbol("thaw_hostcall");
    command.arg(format!("--env=THAW_TEST_HOSTCALL={address:x}")).arg("--env=WATCH=/");
    command.arg("--").arg(hostile()).arg("flood");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.stderr(log.try_clone().expect("a descriptor")).spawn().expect("thaw");
    let written = || log.metadata().expect("our file").len();
    wait_until("it writes more than is passed on", || written() > 1 << 10);
    std::thread::sleep(std::time::Duration::from_secs(2));
    sandboxes_below(child.id()).into_iter().for_each(thaw_e2e::kill);
    wait_until("thaw has ended", || !exists(child.id()));
    child.wait().expect("our child");
    let mut text = String::new();
    std::io::Seek::rewind(&mut log).expect("a file");
    log.take(1 << 20).read_to_string(&mut text).expect("text");
    assert!(text.len() < 64 << 10, "{} bytes", text.len());
    assert!(
        text.contains("bytes of the consoles of sandboxes that have ended were dropped"),
        "{text}"
    );
}

/// Copies of an image have the same descriptions of its files. An offset that one of
/// them could move would tell the others something.
#[test]
fn no_copy_moves_an_offset_that_others_share() {
    let target = Target::new();
    let home = hostile_home(&target, "hostile-offsets", "template = true");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let attack = || {
        let said = attack_by_request(&target, &daemon, &["offsets"]);
        assert!(said.ends_with("done\n"), "{said}");
        let lines = said.lines().filter(|line| line.starts_with("offset "));
        let mut files = 0;
        for line in lines {
            let words: Vec<&str> = line.split(' ').collect();
            let [
                "offset",
                fd,
                "file",
                file,
                "read",
                read,
                "bytes",
                bytes,
                "renumbered",
                renumbered,
            ] = words[..]
            else {
                panic!("{line}");
            };
            files += usize::from(file == "yes");
            assert_ne!(renumbered, "ok", "{line}");
            match fd {
                // /dev/null: nothing to be read, and no offset.
                "0" | "1" | "2" => assert_eq!((file, bytes), ("no", "0"), "{line}"),
                _ => assert_eq!(read, "EPERM", "{line}"),
            }
        }
        // The image and the index, at least.
        assert!(files >= 2, "{said}");
    };
    let standby = || daemon.admin("/functions/hostile").json()["standby"]["template"].clone();
    (0..4).for_each(|_| attack());
    wait_until("there is a template", || !standby().is_null());
    attack();
    // It may have answered before its boot is noted.
    wait_until("it was forked", || {
        daemon.admin("/functions/hostile").json()["boots"][0]["kind"] == "fork"
    });
}

#[test]
fn the_broker_gives_nothing_from_outside_the_root() {
    let target = Target::new();
    let root = target
        .directory
        .path()
        .parent()
        .expect("/tmp")
        .join(format!("thaw-root-{}", std::process::id()));
    fs::create_dir_all(root.join("a")).expect("a root");
    fs::write(root.join("inside.txt"), "inside\n").expect("a file");
    fs::copy(hostile(), root.join("hostile")).expect("a program");
    let secret = target.directory.path().join("secret");
    std::os::unix::fs::symlink(&secret, root.join("link-to-secret")).expect("a link");
    std::os::unix::fs::symlink(target.directory.path(), root.join("link-up")).expect("a link");
    fs::write(root.parent().expect("/tmp").join("secret"), "top secret").expect("a file");
    run(Command::new("mkfifo").arg(root.join("fifo"))).success();

    let outcome = target.attack(&root, Path::new("/hostile"), &["broker"]);
    let text = outcome.stdout;
    assert!(
        text.contains("broker 205 \"inside.txt\": descriptor with \"inside\", write EBADF"),
        "{text}\n{}",
        outcome.stderr
    );
    let with_content = text.lines().filter(|line| line.contains(": descriptor with"));
    for line in with_content {
        assert!(
            line.contains("inside.txt")
                && !line.contains("write ok")
                && !line.contains("mapping ok"),
            "{line}"
        );
    }
    for escape in ["../secret", "a/../../secret", "/etc/passwd", "link-up/secret"] {
        for line in text.lines().filter(|line| line.contains(&format!("\"{escape}\""))) {
            assert!(
                line.contains(": E") || line.contains("closed") || line.contains("cannot send"),
                "{line}"
            );
        }
    }
    fs::remove_file(root.parent().expect("/tmp").join("secret")).expect("removable");
    fs::remove_dir_all(root).expect("removable");
}

#[test]
fn the_host_survives_garbage_on_the_control_socket() {
    let target = Target::new();
    for seed in 1..=12 {
        let seed = (seed * 7_919_u64).to_string();
        let outcome = target.attack(Path::new("/"), &hostile(), &["garbage", &seed]);
        assert!(outcome.code.is_some(), "stuck with seed {seed}: {}", outcome.stderr);
        assert!(!outcome.stderr.contains("panicked"), "seed {seed}: {}", outcome.stderr);
    }
}
