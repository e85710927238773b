//! Another version of Thaw has another build of the kernel. An image runs under the build that
//! it was frozen under, so the store keeps that one: no checkpoint and no function is lost.

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use thaw_e2e::{
    Daemon, DaemonOptions, ask, begin, built_home, changed_kernel, command, get, repository, run,
    skip, thaw, wait_until,
};

/// `NT_GNU_BUILD_ID`: the linker's name for a build.
const BUILD_ID: u32 = 3;
/// The note with the version of the control protocol.
const PROTOCOL: u32 = 0x7468_0010;
/// Put at the begin of the linker's name of the newer kernel, to know it by.
const NEWER: [u8; 12] = *b"newer kernel";

/// A store with the server that is never idle, as `alone` and, with an instance for each
/// request, as `once`; as `quiet` it is idle and stays.
fn home(label: &str, kernel: Option<&Path>) -> PathBuf {
    let home = built_home(label, &[]);
    let variants =
        [("alone", "", "instance"), ("quiet", ", \"quiet\"", "instance"), ("once", "", "request")];
    for (name, argument, isolation) in variants {
        // Freezing it anew takes so long that it has an instance before.
        let before = if name == "alone" { "import time; time.sleep(20)\n" } else { "" };
        build_program(&home, before, name, argument, isolation, kernel);
    }
    home
}

/// Builds the server as a function, under a kernel.
fn build(home: &Path, name: &str, argument: &str, isolation: &str, kernel: Option<&Path>) {
    build_program(home, "", name, argument, isolation, kernel);
}

/// The same with a line before the program.
fn build_program(
    home: &Path,
    before: &str,
    name: &str,
    argument: &str,
    isolation: &str,
    kernel: Option<&Path>,
) {
    let directory = tempfile::tempdir().expect("a directory");
    let program = repository().join("tests/guest/functions/alive/app.py");
    let program = fs::read_to_string(program).expect("a program");
    fs::write(directory.path().join("app.py"), format!("{before}{program}")).expect("a program");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"{argument}]\nport = 8080\n\
         files = [\"app.py\"]\nisolation = \"{isolation}\"\n\
         [limits]\ninstances = 12\n{}\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n",
        if isolation == "instance" { "keep_alive = \"10m\"\n" } else { "" },
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let mut building = thaw();
    building.env("THAW_HOME", home).args(["build", "--no-compare"]).arg(directory.path());
    if let Some(kernel) = kernel {
        building.env("THAW_KERNEL", kernel);
    }
    run(&mut building).success();
}

/// A kernel in a place where the daemon of that home can read it.
fn kernel_in(home: &Path, name: &str, elf: &[u8]) -> PathBuf {
    let path = home.join(name);
    fs::write(&path, elf).expect("a kernel");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("a mode");
    path
}

/// The kernel of a newer version.
fn newer_kernel(home: &Path) -> PathBuf {
    let elf = changed_kernel(BUILD_ID, b"GNU\0", |id| id[..NEWER.len()].copy_from_slice(&NEWER));
    kernel_in(home, "newer.elf", &elf)
}

/// A kernel that speaks another version of the control protocol.
fn foreign_kernel(home: &Path) -> PathBuf {
    let elf = changed_kernel(PROTOCOL, b"THAW\0\0\0\0", |version| version[0] = 99);
    kernel_in(home, "foreign.elf", &elf)
}

/// A daemon whose own kernel is this one.
fn daemon_with(home: &Path, kernel: &Path) -> Daemon {
    let program = ["/usr/bin/env".to_owned(), format!("THAW_KERNEL={}", kernel.display())];
    Daemon::start_by(&program, home, &DaemonOptions::default())
}

fn checkpoint(daemon: &Daemon, instance: u64, name: &str) {
    command(daemon, &["checkpoint", &instance.to_string(), name]).success();
}

#[track_caller]
fn restore(daemon: &Daemon, name: &str) -> u64 {
    let said: Value =
        serde_json::from_str(&command(daemon, &["restore", name, "--json"]).success())
            .expect("JSON");
    said["ids"][0].as_u64().expect("a number")
}

/// Waits until all that the server does beside its requests has gone on.
#[track_caller]
fn goes_on(daemon: &Daemon, function: &str, instance: u64) {
    let before = ask(daemon, function, instance, "/");
    for what in ["spins", "ticks", "echoes"] {
        wait_until(what, || {
            ask(daemon, function, instance, "/")[what].as_u64() > before[what].as_u64()
        });
    }
    assert_eq!(before["heap"], true, "{before}");
}

/// Whether an instance runs the newer kernel.
#[track_caller]
fn runs_newer(daemon: &Daemon, function: &str, instance: u64) -> bool {
    let instances = daemon.instances(function);
    let found = instances.iter().find(|known| known["id"] == instance).expect("it lives");
    let program = fs::read(format!("/proc/{}/exe", found["pid"])).expect("its kernel");
    program.windows(NEWER.len()).any(|window| window == NEWER)
}

fn kernels(home: &Path) -> BTreeSet<String> {
    let all = fs::read_dir(home.join("store/kernels")).expect("a store");
    all.map(|entry| entry.expect("an entry").file_name().into_string().expect("a hash")).collect()
}

/// The kernel that the image of a function needs.
fn kernel_of(home: &Path, function: &str) -> String {
    let store = thaw_store::Store::open(&home.join("store")).expect("a store");
    let name = thaw_store::Name::new(function).expect("a name");
    let image = store.get_function(&name).expect("a function").image.expect("an image");
    store.image_kernel(image).expect("a record").expect("it needs one").to_string()
}

#[test]
fn an_upgrade_loses_no_checkpoint_and_no_function() {
    let home = home("upgrade", None);
    let newer = newer_kernel(&home);
    let old = kernels(&home);
    assert_eq!(old.len(), 1, "all were built under one: {old:?}");
    let old = old.into_iter().next().expect("one");

    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "alone");
    goes_on(&daemon, "alone", original);
    ask(&daemon, "alone", original, "/write?before");
    checkpoint(&daemon, original, "kept");
    assert_eq!(daemon.stop(), Some(0));

    let daemon = daemon_with(&home, &newer);
    // At once, and without that anything is frozen anew first.
    let restored = restore(&daemon, "kept");
    goes_on(&daemon, "alone", restored);
    assert_eq!(ask(&daemon, "alone", restored, "/read")["file"], "before");
    assert!(!runs_newer(&daemon, "alone", restored));
    assert_eq!(get(daemon.gateway(), "once", "/").status, 200);
    // Copies, and checkpoints of what was restored.
    let forked = command(&daemon, &["fork", &restored.to_string(), "--json"]).success();
    let forked: Value = serde_json::from_str(&forked).expect("JSON");
    let copy = forked["ids"][0].as_u64().expect("a number");
    goes_on(&daemon, "alone", copy);
    assert!(!runs_newer(&daemon, "alone", copy));
    ask(&daemon, "alone", copy, "/write?after");
    checkpoint(&daemon, copy, "kept-again");
    let again = restore(&daemon, "kept-again");
    assert_eq!(ask(&daemon, "alone", again, "/read")["file"], "after");

    // Functions are frozen anew where that ends nobody.
    wait_until("the function has an image of the newer kernel", || kernel_of(&home, "once") != old);
    assert_eq!(get(daemon.gateway(), "once", "/").status, 200);
    wait_until("that of the other one is dropped", || {
        daemon.log().contains("which a new image would end")
    });
    assert_eq!(kernel_of(&home, "alone"), old);
    assert_eq!(daemon.instances("alone").len(), 3, "nobody was ended");
    let both = kernels(&home);
    assert_eq!(both.len(), 2, "{both:?}");

    // The collector keeps what a checkpoint needs, and not longer.
    command(&daemon, &["gc"]).success();
    assert_eq!(kernels(&home), both);
    assert_eq!(daemon.stop(), Some(0));
    for name in ["alone", "quiet", "once"] {
        run(thaw().env("THAW_HOME", &home).args(["remove", name])).success();
    }
    build(&home, "alone", "", "instance", Some(&newer));
    run(thaw().env("THAW_HOME", &home).arg("gc")).success();
    assert_eq!(kernels(&home), both);
    let daemon = daemon_with(&home, &newer);
    let of_the_new = begin(&daemon, "alone");
    assert!(runs_newer(&daemon, "alone", of_the_new));
    let restored = restore(&daemon, "kept-again");
    assert_eq!(ask(&daemon, "alone", restored, "/read")["file"], "after");
    assert!(!runs_newer(&daemon, "alone", restored));
    assert_eq!(daemon.stop(), Some(0));
    for name in ["kept-again", "kept"] {
        run(thaw().env("THAW_HOME", &home).args(["checkpoints", "--remove", name])).success();
    }
    run(thaw().env("THAW_HOME", &home).arg("gc")).success();
    assert_eq!(kernels(&home), BTreeSet::from([kernel_of(&home, "alone")]));
    assert!(!kernels(&home).contains(&old));
}

/// Instances of an older build are hibernated and woken as all others, and outlive their daemon;
/// a new image that would end them is dropped.
#[test]
fn live_and_hibernated_instances_of_an_older_build_outlive_a_daemon() {
    let home = built_home("upgrade-live", &[]);
    let newer = newer_kernel(&home);
    // Freezing it anew takes so long that the older image has instances before.
    let slow = "import time; time.sleep(25)\n";
    build_program(&home, slow, "alone", "", "instance", None);
    build_program(&home, slow, "quiet", ", \"quiet\"", "instance", None);
    let mut daemon = daemon_with(&home, &newer);
    let instances = [("quiet", begin(&daemon, "quiet")), ("alone", begin(&daemon, "alone"))];
    for (function, instance) in instances {
        assert!(!runs_newer(&daemon, function, instance), "{function}");
        ask(&daemon, function, instance, "/write?mine");
    }
    let (_, quiet) = instances[0];
    let is_idle = |known: &Value| known["id"] == quiet && known["state"] == "idle";
    wait_until("it is idle", || daemon.instances("quiet").iter().any(is_idle));
    command(&daemon, &["hibernate", "quiet", "--instance", &quiet.to_string()]).success();
    let dropped = || daemon.log().matches("which a new image would end").count();
    wait_until("a new image is dropped", || dropped() >= 1);
    wait_until("new images are dropped", || dropped() == instances.len());
    daemon.kill_and_await_next();
    for (function, instance) in instances {
        assert_eq!(ask(&daemon, function, instance, "/read")["file"], "mine", "{function}");
        assert!(!runs_newer(&daemon, function, instance), "{function}");
    }
    goes_on(&daemon, "alone", instances[1].1);
}

/// The rewinder compares with what it took down of the same sandbox, whatever its kernel.
#[test]
fn instances_of_an_older_build_are_put_back() {
    if !rustix::process::geteuid().is_root() {
        skip("rewinding needs a user namespace of the sandboxes");
        return;
    }
    let home = built_home("upgrade-rewind", &[]);
    let newer = newer_kernel(&home);
    let directory = tempfile::tempdir().expect("a directory");
    let program = fs::read_to_string(repository().join("examples/hello-python/app.py"));
    // Freezing it anew takes so long that the older image serves for a while.
    let program = format!("import time; time.sleep(40)\n{}", program.expect("a program"));
    fs::write(directory.path().join("app.py"), program).expect("a program");
    let text = "name = \"hello\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
                files = [\"app.py\"]\nrewind = true\n\
                [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n";
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    run(thaw()
        .env("THAW_HOME", &home)
        .args(["build", "--weak-limits", "--no-compare"])
        .arg(directory.path()))
    .success();
    let old = kernel_of(&home, "hello");
    let daemon = daemon_with(&home, &newer);
    let rewinds = || {
        let said = command(&daemon, &["inspect", "hello", "--json"]).success();
        let said: Value = serde_json::from_str(&said).expect("JSON");
        said["standby"]["rewinds"].clone()
    };
    wait_until("an instance was put back", || {
        assert_eq!(get(daemon.gateway(), "hello", "/").status, 200);
        rewinds()["done"].as_u64() > Some(2)
    });
    assert_eq!(rewinds()["refused"], 0, "{}", rewinds());
    assert_eq!(kernel_of(&home, "hello"), old, "by the older kernel");
    let mut inspect = thaw();
    inspect.env("THAW_HOME", &home).env("THAW_KERNEL", &newer).args(["inspect", "hello"]);
    let shown = run(&mut inspect).success();
    assert!(shown.contains("an older build, which runs it"), "{shown}");
    // Later by the new one.
    wait_until("it is frozen anew", || kernel_of(&home, "hello") != old);
    assert_eq!(get(daemon.gateway(), "hello", "/").status, 200);
}

#[test]
fn a_kernel_that_speaks_another_version_is_refused_by_name() {
    let home = built_home("upgrade-foreign", &[]);
    let foreign = foreign_kernel(&home);
    build(&home, "alone", "", "instance", Some(&foreign));
    let daemon = daemon_with(&home, &foreign);
    let original = begin(&daemon, "alone");
    checkpoint(&daemon, original, "kept");
    assert_eq!(daemon.stop(), Some(0));

    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let foreign = kernel_of(&home, "alone");
    // The function is frozen anew.
    wait_until("it is served", || get(daemon.gateway(), "alone", "/").status == 200);
    assert_ne!(kernel_of(&home, "alone"), foreign);
    let refused = command(&daemon, &["restore", "kept"]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    for text in ["`kept`", "version 99 of the control protocol", &foreign[..12]] {
        assert!(refused.stderr.contains(text), "{}", refused.stderr);
    }
}

#[test]
fn a_kernel_that_is_lost_or_damaged_runs_nothing() {
    let home = built_home("upgrade-lost", &[]);
    let newer = newer_kernel(&home);
    build(&home, "alone", "", "instance", None);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let original = begin(&daemon, "alone");
    checkpoint(&daemon, original, "kept");
    assert_eq!(daemon.stop(), Some(0));
    let old = kernel_of(&home, "alone");
    let path = home.join("store/kernels").join(&old);
    let intact = fs::read(&path).expect("a kernel");
    let mut flipped = intact.clone();
    // In its text.
    flipped[0x10_0000] ^= 1;

    for (damage, says) in [(Some(&flipped), "damaged"), (None, "no kernel build")] {
        fs::remove_file(&path).expect("it is there");
        if let Some(bytes) = damage {
            fs::write(&path, bytes).expect("a kernel");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("a mode");
        }
        let daemon = daemon_with(&home, &newer);
        let refused = command(&daemon, &["restore", "kept"]);
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(
            refused.stderr.contains(says) && refused.stderr.contains(&old),
            "{}",
            refused.stderr
        );
        assert!(daemon.instances("alone").is_empty());
        // What can be frozen anew is.
        wait_until("it is served", || get(daemon.gateway(), "alone", "/").status == 200);
        assert_eq!(daemon.stop(), Some(0));
        fs::write(&path, &intact).expect("a kernel");
    }
    let daemon = daemon_with(&home, &newer);
    restore(&daemon, "kept");
}
