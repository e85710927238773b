//! `thaw bench` prints what it promises; how fast anything is, no test says.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use thaw_e2e::{Function, built_home, run, run_within, thaw};

/// How long a measurement may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(400);

/// `thaw bench` in a home.
fn bench(home: &Path) -> Command {
    let mut command = thaw();
    command.env("THAW_HOME", home).arg("bench");
    command
}

/// Runs it, and checks that the files it writes are what it prints.
fn report(command: &mut Command, subject: &str, home: &Path) -> Value {
    let output: PathBuf = home.join("output");
    let command = command.arg("--json").arg("--output").arg(&output);
    let printed = run_within(PATIENCE, command, b"").success();
    let read = |extension: &str| {
        std::fs::read_to_string(output.join(format!("{subject}.{extension}"))).expect("a file")
    };
    assert_eq!(read("json"), printed);
    let svg = read("svg");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
    serde_json::from_str(&printed).expect("JSON")
}

/// The median, after a look at the other percentiles.
fn positive(figures: &Value) -> f64 {
    let figure = |name: &str| figures[name].as_f64().expect("a number");
    assert!(figure("p50") > 0.0, "{figures}");
    assert!(figure("p50") <= figure("p90") && figure("p90") <= figure("p99"), "{figures}");
    figure("p50")
}

fn check_boot(boot: &Value) {
    assert!(boot["pss_kib"].is_u64(), "{boot}");
    positive(&boot["execution_us"]);
    let phases = ["zygote", "first_instruction", "first_byte"];
    let medians = phases.map(|phase| positive(&boot["phases_us"][phase]));
    assert!(medians.is_sorted(), "{boot}");
}

#[test]
fn the_report_has_every_phase() {
    let home = built_home("bench", &[Function::Example("hello-c")]);
    for boot in ["cold", "warm"] {
        let mut command = bench(&home);
        command.args(["boot", "hello-c", "--boot", boot, "-n", "20", "--json"]);
        let report: Value = serde_json::from_str(&run(&mut command).success()).expect("JSON");
        assert_eq!(report["function"], "hello-c");
        assert_eq!(report["boot"], boot);
        assert_eq!(report["n"], 20);
        check_boot(&report);
        positive(&report["phases_us"]["mapped"]);
        positive(&report["native_us"]["first_byte"]);
    }
}

#[test]
fn all_functions_are_booted_in_every_way() {
    let home = built_home("bench-all", &[Function::Example("hello-c")]);
    let report = report(bench(&home).args(["boot", "--all", "-n", "3"]), "boot", &home);
    let boots = report["boots"].as_array().expect("a list");
    let kinds: Vec<_> = boots.iter().map(|boot| boot["boot"].as_str().expect("a name")).collect();
    assert_eq!(kinds, ["cold", "warm", "fork", "ready"], "{report}");
    for boot in boots {
        assert_eq!(boot["n"], 3, "{boot}");
        check_boot(boot);
        positive(&boot["native_us"]["first_byte"]);
    }
    assert_eq!(report["failures"], serde_json::json!([]));
}

#[test]
fn a_function_that_fails_is_named_and_stops_nothing() {
    let home = built_home("bench-fail", &[Function::Example("hello-c")]);
    let mut command = bench(&home);
    command.args(["boot", "nobody", "hello-c", "--boot", "warm", "-n", "2", "--no-native"]);
    let report = report(&mut command, "boot", &home);
    assert_eq!(report["boots"].as_array().map(Vec::len), Some(1), "{report}");
    let failure = &report["failures"][0];
    assert_eq!(failure["function"], "nobody");
    assert!(failure["reason"].as_str().is_some_and(|reason| reason.contains("nobody")));
}

#[test]
fn instances_accumulate() {
    let home = built_home("bench-scale", &[Function::Example("hello-c")]);
    let mut command = bench(&home);
    let report = report(command.args(["scale", "hello-c", "-n", "30"]), "scale", &home);
    let boots = report["boots"].as_array().expect("a list");
    let kinds: Vec<_> = boots.iter().map(|boot| boot["boot"].as_str().expect("a name")).collect();
    assert_eq!(kinds, ["warm", "fork", "ready"], "{report}");
    for growth in boots {
        assert_eq!(growth["n"], 30, "{growth}");
        assert!(growth["failure"].is_null(), "{growth}");
        let groups = growth["groups"].as_array().expect("a list");
        assert_eq!(groups.len(), 10, "{growth}");
        assert_eq!(groups[9]["instances"], 30);
        for group in groups {
            positive(&group["first_instruction_us"]);
            positive(&group["first_byte_us"]);
        }
        assert!(growth["growth"].as_f64().is_some_and(|ratio| ratio > 0.0), "{growth}");
        assert!(growth["memory"]["pss_kib"].as_f64().is_some_and(|kib| kib > 0.0), "{growth}");
        assert!(growth["memory"]["host"]["used_kib"].is_i64(), "{growth}");
    }
}

#[test]
fn rates_are_given_for_everything_that_serves() {
    let home = built_home("bench-throughput", &[Function::Example("hello-c")]);
    let mut command = bench(&home);
    command.args(["throughput", "hello-c", "--clients", "1", "--clients", "4", "--seconds", "1"]);
    let report = report(&mut command, "throughput", &home);
    let rates = report["rates"].as_array().expect("a list");
    let served: Vec<_> =
        rates.iter().map(|rate| rate["served"].as_str().expect("a name")).collect();
    assert_eq!(served, ["warm", "fork", "ready", "rewind", "reuse"].repeat(2), "{report}");
    for rate in rates {
        assert!(rate["failure"].is_null(), "{rate}");
        assert!(rate["requests_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{rate}");
        positive(&rate["latency_us"]);
        if rate["served"] != "reuse" {
            assert!(rate["boots_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{rate}");
        }
    }
}

#[test]
fn handoff_and_proxy_bring_the_same_argument() {
    let home = built_home("bench-handoff", &[Function::Example("hello-python")]);
    let mut command = bench(&home);
    command.args(["handoff", "hello-python", "-n", "3", "--argument", "1MB"]);
    let report = report(&mut command, "handoff", &home);
    assert_eq!(report["argument_bytes"], 1_000_000);
    let function = &report["functions"][0];
    assert_eq!(function["function"], "hello-python");
    assert!(function["response_bytes"].as_u64().is_some_and(|bytes| bytes > 1_000_000));
    for way in ["handoff", "proxy"] {
        positive(&function[way]["latency_us"]);
        positive(&function[way]["host_cpu_us"]);
    }
}

#[test]
fn instances_are_measured_in_every_state() {
    let home = built_home("bench-hibernate", &[Function::Example("hello-c")]);
    let mut command = bench(&home);
    command.args(["hibernate", "hello-c", "-n", "5", "--instances", "2"]);
    let report = report(&mut command, "hibernate", &home);
    assert_eq!((&report["function"], &report["instances"]), (&"hello-c".into(), &2.into()));
    for state in ["warm", "hibernated_faults", "hibernated_reap", "woken_up"] {
        positive(&report["first_byte_us"][state]);
    }
    let memory = |state: &str| report["memory_kib"][state].as_f64().expect("a number");
    assert!(memory("hibernated") > 0.0 && memory("hibernated") < memory("warm"), "{report}");
    assert!(memory("woken_up") > 0.0, "{report}");
    assert!(memory("without_image") > memory("hibernated"), "{report}");
    assert!(report["stored"].as_u64().is_some_and(|stored| stored > 0), "{report}");
}

#[test]
fn every_technique_is_left_out_once() {
    let home = built_home("bench-ablation", &[Function::Example("hello-c")]);
    for boot in ["warm", "cold"] {
        let mut command = bench(&home);
        command.args(["ablation", "hello-c", "-n", "3", "--boot", boot]);
        let report = report(&mut command, "ablation", &home);
        assert_eq!((&report["boot"], &report["n"]), (&boot.into(), &3.into()), "{report}");
        let variants = report["variants"].as_array().expect("a list");
        let without: Vec<_> = variants.iter().map(|variant| variant["without"].as_str()).collect();
        let techniques = ["lazy-mapping", "working-set", "io-cache", "zygotes", "merging"];
        assert_eq!(without[0], None, "{report}");
        assert_eq!(without[1..], techniques.map(Some), "{report}");
        for variant in variants {
            positive(&variant["first_instruction_us"]);
            positive(&variant["first_byte_us"]);
            assert!(variant["mappings"].as_u64().is_some_and(|mappings| mappings > 0));
        }
        assert_eq!(variants[0]["ratio_first_byte"], 1.0, "{report}");
    }
}

#[test]
fn an_unknown_function_is_an_error_that_names_it() {
    let home = built_home("bench-empty", &[]);
    let subjects: [&[&str]; 6] = [
        &["boot", "nobody", "-n", "1"],
        &["boot", "nobody", "nothing", "-n", "1"],
        &["scale", "nobody", "-n", "1"],
        &["throughput", "nobody"],
        &["handoff", "nobody"],
        &["ablation", "nobody"],
    ];
    for subject in subjects {
        let outcome = run(bench(&home).args(subject));
        assert_eq!(outcome.code, Some(1), "{subject:?}");
        assert!(outcome.stderr.contains("nobody"), "{}", outcome.stderr);
    }
}

#[test]
fn both_sides_of_every_system_call_are_measured() {
    let mut command = thaw();
    command.args(["bench", "syscalls", "-n", "1", "--no-compute", "--json"]);
    let report: Value = serde_json::from_str(&run(&mut command).success()).expect("JSON");
    let calls = report["calls"].as_array().expect("a list");
    for name in ["getppid", "clock_gettime", "pipe", "futex", "fork-exec-wait", "read-1m"] {
        let call = calls.iter().find(|call| call["name"] == name).expect(name);
        for figures in ["p50_ns", "p99_ns"] {
            for side in ["native", "thaw"] {
                assert!(call[figures][side].as_f64().is_some_and(|ns| ns > 0.0), "{call}");
            }
        }
    }
}

#[test]
fn paging_strategies_are_compared_and_a_neighbour_is_found() {
    let python =
        |name| Function::Variant { example: "hello-python", name, keys: String::new(), limits: "" };
    let home = built_home("bench-paging", &[python("one"), python("two")]);
    let report = report(bench(&home).args(["paging", "one", "-n", "1"]), "paging", &home);
    assert_eq!((&report["n"], &report["failures"]), (&1.into(), &serde_json::json!([])));
    let functions = report["functions"].as_array().expect("a list");
    let pairs: Vec<_> = functions.iter().map(|one| (&one["function"], &one["neighbour"])).collect();
    let [one, two] = ["one", "two"].map(Value::from);
    assert_eq!(pairs, [(&one, &two)], "{report}");
    for function in functions {
        assert!(function["neighbour_bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20));
        let strategies = function["strategies"].as_array().expect("a list");
        let names: Vec<_> = strategies.iter().map(|one| one["strategy"].as_str()).collect();
        let all = ["eager", "lazy", "prefault", "first", "shared", "resident"];
        assert_eq!(names, all.map(Some), "{function}");
        for strategy in strategies {
            positive(&strategy["response_us"]);
            let reads_all = strategy["strategy"] == "eager";
            assert_eq!(strategy["read_bytes"].as_u64().is_some_and(|bytes| bytes > 0), reads_all);
        }
        assert_eq!(strategies[5]["ratio"], 1.0, "{function}");
    }
    // What cannot be measured is named.
    let mut unknown = bench(&home);
    let outcome = run(unknown.args(["paging", "nobody", "-n", "1", "--strategy", "lazy"]));
    assert!(outcome.code == Some(1) && outcome.stderr.contains("nobody"), "{}", outcome.stderr);
}

#[test]
fn density_counts_what_is_shared_once() {
    let python =
        |name| Function::Variant { example: "hello-python", name, keys: String::new(), limits: "" };
    let functions = [python("a"), python("b"), Function::Example("hello-c")];
    let home = built_home("bench-density", &functions);
    let report = report(bench(&home).arg("density"), "density", &home);
    assert_eq!((&report["functions"], &report["failures"]), (&3.into(), &serde_json::json!([])));
    let steps = report["steps"].as_array().expect("a list");
    let bytes = |step: usize, key: &str| steps[step][key].as_u64().expect("a number");
    assert_eq!(bytes(0, "disk_bytes"), bytes(0, "alone_bytes"), "{report}");
    // The second one's interpreter is there already.
    let second = bytes(1, "disk_bytes") - bytes(0, "disk_bytes");
    assert!(second < bytes(1, "alone_bytes") / 2 && second >= bytes(1, "own_bytes"), "{report}");
    assert!(bytes(2, "disk_bytes") > bytes(1, "disk_bytes"), "{report}");
    let each = |key: &str| report[key].as_u64().expect("a number");
    assert!(each("disk_bytes_each") < each("disk_bytes_each_alone"), "{report}");
    assert_eq!(each("disk_bytes_each"), bytes(2, "disk_bytes") / 3);
    for step in steps {
        assert!(step["pss_kib"].as_u64().is_some_and(|kib| kib > 0), "{step}");
    }
}

#[test]
fn a_mix_is_served_by_all_sides() {
    if !rustix::process::geteuid().is_root() {
        thaw_e2e::skip("to enter the networks of other processes takes root");
        return;
    }
    // Native runs need the directories that the functions were built from.
    let functions = ["hello-c", "hello-c-dynamic", "hello-python"].map(Function::Example);
    let home = built_home("bench-mix", &functions);
    let mut command = bench(&home);
    // So long that each function is asked, however busy the machine is.
    command.args(["mix", "--clients", "2", "--seconds", "4", "--exponent", "0"]);
    let report = report(&mut command, "mix", &home);
    assert_eq!((&report["functions"], &report["clients"]), (&3.into(), &2.into()), "{report}");
    let sides = report["sides"].as_array().expect("a list");
    let names: Vec<_> = sides.iter().map(|side| side["side"].as_str()).collect();
    assert_eq!(names, ["thaw", "processes", "process-per-request"].map(Some));
    for side in sides {
        assert!(side["failure"].is_null(), "{side}");
        assert!(side["requests_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{side}");
        positive(&side["latency_us"]);
    }
    for side in &sides[..2] {
        assert_eq!(side["functions_asked"], 3, "{side}");
    }
    let misused = run(bench(&home).args(["mix", "--exponent", "-1"]));
    assert_eq!(misused.code, Some(2), "{}", misused.stderr);
    let unknown = run(bench(&home).args(["mix", "nobody"]));
    assert!(unknown.code == Some(1) && unknown.stderr.contains("nobody"), "{}", unknown.stderr);
}

#[test]
fn each_use_of_a_sandbox_is_measured() {
    let home = built_home("bench-sandbox", &[Function::Example("agent")]);
    let mut command = bench(&home);
    command.args(["sandbox", "agent", "-n", "3", "--json"]);
    command.args(["--program", "echo there; read line", "--", "cat", "/dev/null"]);
    let report: Value =
        serde_json::from_str(&run_within(PATIENCE, &mut command, b"").success()).expect("JSON");
    assert_eq!(report["n"], 3);
    let commands = ["begin_ready", "begin_image", "command_ready", "command", "next_command"];
    let uses = [
        "create_ready",
        "create_image",
        "write",
        "read",
        "fork",
        "pause",
        "given_back",
        "resume",
        "resume_early",
    ];
    let beside = ["fork_command", "native"];
    for what in uses.iter().chain(&commands).chain(&beside) {
        positive(&report[format!("{what}_us")]);
    }
    let file = &report["large_file"];
    assert_eq!((file["bytes"].as_u64(), file["n"].as_u64()), (Some(100 << 20), Some(3)), "{file}");
    for what in ["copy_us", "write_us", "read_us"] {
        positive(&file[what]);
    }
    // Where no container runs, one sentence says why.
    let missing = report["missing"].as_array().expect("a list");
    match report["container"].is_object() {
        true => {
            positive(&report["container"]["run_us"]);
            positive(&report["container"]["exec_us"]);
            assert!(missing.is_empty(), "{missing:?}");
        }
        false => {
            let why = missing.iter().filter_map(Value::as_str).collect::<Vec<_>>();
            assert!(why.len() == 1 && why[0].starts_with("no plain container"), "{why:?}");
        }
    }
    let mut command = bench(&home);
    command.args(["sandbox", "agent", "-n", "1", "--", "sh", "-c", "exit 3"]);
    let failed = run_within(PATIENCE, &mut command, b"");
    assert_eq!(failed.code, Some(1));
    assert!(failed.stderr.contains("has not ended well"), "{}", failed.stderr);
}

#[test]
fn the_memory_of_many_sandboxes_is_counted() {
    let home = built_home("bench-population", &[Function::Example("agent")]);
    for (idle, paused_with) in [("3", "shell"), ("0", "nothing")] {
        let mut command = bench(&home);
        command.args(["sandbox", "agent", "--idle", idle, "--paused", "3", "--json"]);
        command.args(["--paused-with", paused_with, "--", "sh"]);
        let printed = run_within(PATIENCE, &mut command, b"").success();
        let report: Value = serde_json::from_str(&printed).expect("JSON");
        assert_eq!(report["idle"].is_null(), idle == "0", "{report}");
        for of in ["idle", "paused"].map(|kind| &report[kind]).iter().filter(|of| of.is_object()) {
            assert_eq!(of["n"], 3, "{of}");
            assert!(of["failure"].is_null(), "{of}");
        }
        // Those that sleep have no process, also with a shell.
        let kept = report["paused"]["own"]["processes"].as_i64().expect("a number");
        assert!(kept < 3, "{report}");
    }
    let mut command = bench(&home);
    command.args(["sandbox", "agent", "--idle", "1", "--", "sh", "-c", "exit"]);
    let failed = run_within(PATIENCE, &mut command, b"");
    assert!(failed.stderr.contains("ended without a word"), "{}", failed.stderr);
}

#[test]
fn files_of_volumes_are_compared_with_native_ones() {
    let home = built_home("bench-volume", &[]);
    let mut command = bench(&home);
    command.args(["volume", "--rounds", "1", "--json"]);
    let printed = run_within(PATIENCE, &mut command, b"").success();
    let report: Value = serde_json::from_str(&printed).expect("JSON");
    let uses = report["uses"].as_array().expect("a list");
    assert!(uses.len() >= 16, "{report}");
    for one in uses {
        for side in ["thaw", "native"] {
            let figure = |name: &str| one[name][side].as_f64().expect("a number");
            assert!(figure("p50_ns") > 0.0 && figure("p50_ns") <= figure("p99_ns"), "{one}");
        }
    }
    // Nothing of it is left.
    assert_eq!(std::fs::read_dir(home.join("volumes")).expect("a directory").count(), 0);
}
