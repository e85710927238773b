//! What programs see of the processor: `thaw build --cpu-baseline`.

use serde_json::Value;
use std::fs;
use std::path::Path;
use thaw_e2e::{Daemon, DaemonOptions, Outcome, built_home, get, repository, run, skip, thaw};

/// Bits of `cpuid`, by leaf and register.
const AVX: u64 = 1 << 28;
const OSXSAVE: u64 = 1 << 27;
const SSE4_2: u64 = 1 << 20;
const AES: u64 = 1 << 25;
const AVX2: u64 = 1 << 5;
const AVX512F: u64 = 1 << 16;

fn host_has(flag: &str) -> bool {
    let text = fs::read_to_string("/proc/cpuinfo").expect("/proc");
    let line = text.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    line.split_whitespace().any(|word| word == flag)
}

/// Whether programs of this host can be held to a level.
fn can_mask() -> bool {
    let can = host_has("cpuid_fault") && host_has("avx2");
    if !can {
        skip("this host has no CPUID faulting, or no AVX2");
    }
    can
}

fn build(home: &Path, name: &str, level: &str) -> Outcome {
    let directory = tempfile::tempdir().expect("a directory");
    let program = repository().join("tests/guest/functions/processor/processor.c");
    fs::copy(program, directory.path().join("processor.c")).expect("a program");
    let text = format!(
        "name = \"{name}\"\ncommand = [\"/app/processor\"]\nport = 8080\nfiles = [\"processor\"]\n\
         build = {{ command = [\"cc\", \"-O2\", \"-pthread\", \"-o\", \"processor\", \"processor.c\"] }}\n\
         [runtime]\nkind = \"binary\"\n"
    );
    fs::write(directory.path().join("thaw.toml"), text).expect("thaw.toml");
    let mut building = thaw();
    building.env("THAW_HOME", home).args(["build", "--weak-limits", "--cpu-baseline", level]);
    run(building.arg(directory.path()))
}

fn inspect(home: &Path, name: &str) -> Value {
    let said = run(thaw().env("THAW_HOME", home).args(["inspect", name, "--json"])).success();
    serde_json::from_str(&said).expect("JSON")
}

fn ask(daemon: &Daemon, name: &str) -> Value {
    let response = get(daemon.gateway(), name, "/");
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()
}

fn number(view: &Value, name: &str) -> u64 {
    view[name].as_u64().unwrap_or_else(|| panic!("{name} of {view}"))
}

fn flags(view: &Value) -> Vec<&str> {
    view["flags"].as_str().expect("flags").split_whitespace().collect()
}

/// What vectors, a handler that was waiting, and faults are like, in a copy.
fn runs_well(answer: &Value) {
    assert_eq!((&answer["handler"], &answer["faults"]), (&1.into(), &1.into()), "{answer}");
    assert_ne!(answer["vectors"], 0, "{answer}");
}

#[test]
fn a_program_sees_no_more_than_its_level_until_it_is_frozen() {
    if !can_mask() {
        return;
    }
    let home = built_home("processor", &[]);
    let mut levels = vec!["x86-64-v2", "x86-64-v3"];
    levels.extend(host_has("avx512vl").then_some("x86-64-v4"));
    for level in &levels {
        build(&home, level, level).success();
        let report = inspect(&home, level);
        assert_eq!(report["image"]["cpu_level"], **level, "{report}");
    }
    build(&home, "all", "host").success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let all = ask(&daemon, "all");
    runs_well(&all);
    for level in &levels {
        let answer = ask(&daemon, level);
        let (has_avx2, has_avx512) = (*level != "x86-64-v2", *level == "x86-64-v4");
        for who in ["start", "thread", "child"] {
            let view = &answer[who];
            let (ecx, ebx) = (number(view, "leaf_1_ecx"), number(view, "leaf_7_ebx"));
            assert_eq!(ecx & (SSE4_2 | AES), SSE4_2, "{who} of {level}");
            assert_eq!(ecx & OSXSAVE != 0, has_avx2, "{who} of {level}");
            assert_eq!((ecx & AVX != 0, ebx & AVX2 != 0), (has_avx2, has_avx2), "{who} of {level}");
            assert_eq!(ebx & AVX512F != 0, has_avx512, "{who} of {level}");
            assert_eq!((number(view, "leaf_7_ecx"), number(view, "leaf_7_edx")), (0, 0));
            assert_eq!((number(view, "hypervisor"), number(view, "frequency")), (0, 0));
            assert_eq!(number(view, "hwcap"), number(view, "leaf_1_edx"));
            // The C library and the compiler's helpers follow cpuid.
            assert_eq!((view["avx2"] == 1, view["avx512f"] == 1), (has_avx2, has_avx512));
            let flags = flags(view);
            assert_eq!(flags.contains(&"avx2"), has_avx2, "{who} of {level}");
            assert_eq!(flags.contains(&"avx512f"), has_avx512, "{who} of {level}");
            assert!(flags.contains(&"sse4_2") && !flags.contains(&"aes"), "{flags:?}");
            // Room for what `xsave` stores here, whatever the level.
            let room = number(&all["now"], "area").max(2688);
            let (components, area) = match *level {
                "x86-64-v2" => (0, 0),
                "x86-64-v3" => (0b111, room),
                _ => (0b1110_0111, room),
            };
            assert_eq!((number(view, "components"), number(view, "area")), (components, area));
        }
        // A copy sees the machine that it runs on, whose state is saved, too.
        let now = &answer["now"];
        for word in ["leaf_1_ecx", "leaf_7_ebx", "leaf_7_ecx", "components", "area"] {
            // The program was held to its level when it asked for its own features; now it is not.
            assert_eq!(number(now, word), number(&all["now"], word), "{word} of {level}");
        }
        runs_well(&answer);
        // Once more: another copy.
        runs_well(&ask(&daemon, level));
    }
}

#[test]
fn a_level_that_does_not_exist_or_cannot_be_had_is_refused() {
    let home = built_home("processor-refused", &[]);
    let unknown = build(&home, "unknown", "x86-64-v9");
    assert_eq!(unknown.code, Some(2), "{unknown:?}");
    assert!(unknown.stderr.contains("x86-64-v3"), "{}", unknown.stderr);
    if !host_has("cpuid_fault") {
        let refused = build(&home, "refused", "x86-64-v2");
        assert!(refused.stderr.contains("cpuid_fault"), "{}", refused.stderr);
    }
    if !host_has("avx512vl") {
        let refused = build(&home, "refused", "x86-64-v4");
        assert!(refused.stderr.contains("avx512"), "{}", refused.stderr);
    }
}
