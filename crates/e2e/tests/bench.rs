//! `thaw bench boot` prints what it promises; how fast anything is, no test says.

use thaw_e2e::{Function, built_home, run, thaw};

#[test]
fn the_report_has_every_phase() {
    let home = built_home("bench", &[Function::Example("hello-c")]);
    for boot in ["cold", "warm"] {
        let mut command = thaw();
        command.env("THAW_HOME", &home);
        command.args(["bench", "boot", "hello-c", "--boot", boot, "-n", "20", "--json"]);
        let report: serde_json::Value =
            serde_json::from_str(&run(&mut command).success()).expect("JSON");
        assert_eq!(report["function"], "hello-c");
        assert_eq!(report["boot"], boot);
        assert_eq!(report["n"], 20);
        assert!(report["pss_kib"].is_u64(), "{report}");
        let positive = |figures: &serde_json::Value| {
            let figure = |name: &str| figures[name].as_f64().expect("a number");
            assert!(figure("p50") > 0.0, "{figures}");
            assert!(figure("p50") <= figure("p90") && figure("p90") <= figure("p99"), "{figures}");
            figure("p50")
        };
        positive(&report["native_us"]["first_byte"]);
        let phases = ["zygote", "mapped", "first_instruction", "first_byte"];
        let medians = phases.map(|phase| positive(&report["phases_us"][phase]));
        assert!(medians.is_sorted(), "{report}");
    }
}

#[test]
fn an_unknown_function_is_an_error_that_names_it() {
    let home = built_home("bench-empty", &[]);
    let outcome = run(thaw().env("THAW_HOME", &home).args(["bench", "boot", "nobody", "-n", "1"]));
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stderr.contains("nobody"), "{}", outcome.stderr);
}

#[test]
fn both_sides_of_every_system_call_are_measured() {
    let mut command = thaw();
    command.args(["bench", "syscalls", "-n", "1", "--no-compute", "--json"]);
    let report: serde_json::Value =
        serde_json::from_str(&run(&mut command).success()).expect("JSON");
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
