//! `thaw df`: what is stored and shared, with a daemon and without.

use serde_json::Value;
use std::cell::RefCell;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, built_home, copy_home, get, run, thaw, wait_until,
};

const STAYS: &str = "isolation = \"instance\"\nlimits.keep_alive = \"10m\"";

/// Two programs of one interpreter, one of them in a domain of its own, and one that has nothing in
/// common with them.
fn home(label: &str) -> PathBuf {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let home = HOME.get_or_init(|| {
        let survivor = |name, keys| Function::PythonVariant { program: "survivor", name, keys };
        let functions = [
            survivor("one", STAYS),
            survivor("two", STAYS),
            survivor("apart", "isolation = \"instance\"\nsharing = { domain = \"customer\" }"),
            Function::Example("hello-c"),
        ];
        built_home("df", &functions)
    });
    copy_home(home, &format!("df-{label}"))
}

fn df(home: &Path) -> Value {
    let printed = run(thaw().env("THAW_HOME", home).args(["df", "--json"])).success();
    serde_json::from_str(&printed).expect("JSON")
}

/// The entry with this name in a list.
#[track_caller]
fn named<'a>(report: &'a Value, list: &str, name: &str) -> &'a Value {
    let entries = report[list].as_array().expect("a list");
    let found = entries.iter().find(|entry| entry["name"] == name);
    found.unwrap_or_else(|| panic!("{list} has no {name}: {report}"))
}

#[track_caller]
fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} is no number in {value}"))
}

/// Blocks of all files below a directory, without those of directories.
fn on_disk(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).expect("a directory").flatten();
    let sizes = entries.map(|entry| match entry.metadata().expect("a file") {
        metadata if metadata.is_dir() => on_disk(&entry.path()),
        metadata => metadata.blocks() * 512,
    });
    sizes.sum()
}

#[test]
fn functions_of_one_interpreter_share_its_files_and_others_do_not() {
    let home = home("disk");
    let report = df(&home);
    for name in ["one", "two"] {
        let function = named(&report, "functions", name);
        assert_eq!((&function["base"], &function["memory"]), (&Value::Null, &Value::Null));
        // The interpreter is shared; the image is nobody else's.
        assert!(number(function, "shared_bytes") > 4 << 20, "{function}");
        assert!(number(function, "own_bytes") > 1 << 20, "{function}");
    }
    for name in ["apart", "hello-c"] {
        let function = named(&report, "functions", name);
        let (own, shared) = (number(function, "own_bytes"), number(function, "shared_bytes"));
        // Files such as /etc/services are everywhere.
        assert!(shared < own / 2, "{function}");
    }
    let domains = report["domains"].as_array().expect("a list");
    let shown: Vec<_> = domains.iter().map(|one| (&one["domain"], &one["functions"])).collect();
    assert_eq!(shown, [(&Value::Null, &3.into()), (&"customer".into(), &1.into())]);
    assert_eq!(report["kernels"].as_array().map(Vec::len), Some(1), "{report}");
    assert_eq!(report["damaged"], serde_json::json!([]));
    // Whatever it is called, it is all there is.
    let store = &report["store"];
    let difference = on_disk(&home.join("store")).abs_diff(number(store, "total_bytes"));
    assert!(difference <= 64 << 10, "{difference} of {store}");
    let text = run(thaw().env("THAW_HOME", &home).arg("df")).success();
    for word in ["FUNCTION", "one", "customer", "store: ", "1 kernel build"] {
        assert!(text.contains(word), "{word} is missing in {text}");
    }
    // What is own is what removing and collecting frees.
    let own = number(named(&report, "functions", "one"), "own_bytes");
    run(thaw().env("THAW_HOME", &home).args(["remove", "one"])).success();
    run(thaw().env("THAW_HOME", &home).arg("gc")).success();
    let freed = number(store, "total_bytes") - number(&df(&home)["store"], "total_bytes");
    assert_eq!(freed, own);
}

#[test]
fn live_sleeping_and_checkpointed_instances_are_counted() {
    let home = home("live");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let command =
        |arguments: &[&str]| run(thaw().env("THAW_HOME", daemon.home()).args(arguments)).success();
    for name in ["one", "two"] {
        assert_eq!(get(daemon.gateway(), name, "/count").status, 200, "{}", daemon.log());
    }
    let live = RefCell::new(Value::Null);
    // A busy machine may count too late for one report.
    wait_until("the memory of both is counted", || {
        let report = df(&home);
        let counted = |name| number(&named(&report, "functions", name)["memory"], "counted");
        let is_counted = ["one", "two"].iter().all(|name| counted(name) == 1);
        live.replace(report);
        is_counted
    });
    let live = live.into_inner();
    for name in ["one", "two"] {
        let memory = &named(&live, "functions", name)["memory"];
        assert_eq!((number(memory, "instances"), number(memory, "counted")), (1, 1), "{memory}");
        let [private, pss] = ["private_bytes", "pss_bytes"].map(|key| number(memory, key));
        assert!(private > 0 && pss >= private, "{memory}");
        // Pages of the interpreter, which both have mapped.
        assert!(number(memory, "shared_bytes") > 0, "{memory}");
    }
    let idle = &named(&live, "functions", "hello-c")["memory"];
    assert_eq!((number(idle, "instances"), number(idle, "private_bytes")), (0, 0));
    assert_eq!(live["domains"][0]["memory"]["instances"], 2, "{live}");
    assert_eq!(live["home"]["swap_bytes"], 0);

    let id = daemon.first_instance("one")["id"].as_u64().expect("a number").to_string();
    command(&["checkpoint", &id, "kept"]);
    wait_until("it is idle", || daemon.instance("two").2 == "idle");
    command(&["hibernate", "two"]);
    let later = df(&home);
    let checkpoint = named(&later, "checkpoints", "kept");
    let image = daemon.admin("/functions/one").json()["image"].clone();
    assert_eq!((&checkpoint["function"], &checkpoint["base"]), (&"one".into(), &image));
    // It is a difference from the function's image, which now is no longer the function's own.
    let base = number(checkpoint, "base_bytes");
    assert!(base > number(checkpoint, "own_bytes"), "{checkpoint}");
    let before = number(named(&live, "functions", "one"), "own_bytes");
    let now = number(named(&later, "functions", "one"), "own_bytes");
    assert!(now + base <= before + (8 << 20) && now < before, "{before} {now} {base}");
    assert!(number(&later["home"], "swap_bytes") > 0, "{later}");
    let private = |report| number(&named(report, "functions", "two")["memory"], "private_bytes");
    assert!(private(&later) < private(&live), "{} {}", private(&later), private(&live));

    wait_until("it is idle", || daemon.instance("one").2 == "idle");
    command(&["sleep", "one"]);
    let asleep = df(&home);
    let one = named(&asleep, "functions", "one");
    assert_eq!(number(&one["asleep"], "instances"), 1, "{one}");
    assert!(number(&one["asleep"], "bytes") > 0, "{one}");
    assert_eq!(number(&one["memory"], "instances"), 0, "{one}");
    assert_eq!(asleep["home"]["asleep"], one["asleep"]);
    assert_eq!(asleep["store"]["unused_bytes"], 0, "{asleep}");
    // The same as over the admin API.
    let answer = daemon.admin("/df");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["checkpoints"], asleep["checkpoints"]);
    assert_eq!(daemon.stop(), Some(0));
}
