//! Quotas of tenants, over a real daemon with real sandboxes: each bound is reached, and
//! whoever is not at one is served meanwhile.

use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Outcome, Response, built_home, get, has_controller, run, skip,
    thaw, wait_until,
};

/// A home with functions of `tests/guest/functions/tenant.py`: names and further keys.
fn home(label: &str, functions: &[(&'static str, &'static str)]) -> PathBuf {
    let function = |(name, keys): &(&'static str, &'static str)| Function::PythonVariant {
        program: "tenant",
        name,
        keys,
    };
    built_home(label, &functions.iter().map(function).collect::<Vec<_>>())
}

fn write_quotas(home: &Path, text: &str) {
    fs::write(home.join("tenants.toml"), text).expect("tenants.toml");
}

/// A request whose answer is read later.
fn ask(daemon: &Daemon, name: &'static str, path: &str) -> JoinHandle<Response> {
    let (gateway, path) = (daemon.gateway(), path.to_owned());
    thread::spawn(move || get(gateway, name, &path))
}

/// What the admin API says of a tenant.
#[track_caller]
fn tenant(daemon: &Daemon, domain: &str) -> Value {
    let all = daemon.admin("/tenants").json();
    let found = all.as_array().expect("an array").iter().find(|tenant| tenant["domain"] == domain);
    found.unwrap_or_else(|| panic!("no {domain} in {all}")).clone()
}

#[track_caller]
fn refused(daemon: &Daemon, response: &Response, reason: &str) {
    assert_eq!(response.status, 503, "{}", response.text());
    assert_eq!(response.json()["error"], "unavailable");
    let detail = daemon.explain(response);
    assert!(detail.contains("quota_reached") && detail.contains(reason), "{detail}");
}

fn cli(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().env("THAW_HOME", home).args(arguments))
}

#[test]
fn one_tenant_is_at_its_bound_and_the_other_is_served() {
    let of_a = "[sharing]\ndomain = \"a\"\n[limits]\nqueue = \"500ms\"";
    let home = home(
        "tenants-bound",
        &[("a1", of_a), ("a2", of_a), ("b", "[sharing]\ndomain = \"b\""), ("none", "")],
    );
    write_quotas(&home, "[default]\ninstances = 10\n[domain.a]\ninstances = 1\n");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let busy = ask(&daemon, "a1", "/hold/20");
    wait_until("it is busy", || tenant(&daemon, "a")["instances"] == 1);
    // Another function of the same tenant has to wait, and those of others have not.
    refused(&daemon, &get(daemon.gateway(), "a2", "/"), "the quota of domain `a` is 1 instance");
    for name in ["b", "none"] {
        assert_eq!(get(daemon.gateway(), name, "/").status, 200);
    }

    let table = cli(&home, &["tenants"]);
    assert_eq!(table.code, Some(0), "{}", table.stderr);
    let row = |name: &str| {
        let row = table.stdout.lines().find(|line| line.split_whitespace().next() == Some(name));
        row.unwrap_or_else(|| panic!("no {name} in\n{}", table.stdout)).to_owned()
    };
    let cells: Vec<String> = row("a").split_whitespace().map(str::to_owned).collect();
    assert_eq!(cells[1..3], ["2", "1/1"], "{}", table.stdout);
    assert!(row("-").contains("/10"), "{}", table.stdout);
    let metrics = daemon.admin("/metrics").text();
    for line in [
        "thaw_tenant_instances{domain=\"a\"} 1",
        "thaw_tenant_refused{domain=\"a\",quota=\"instances\"} 1",
        "thaw_tenant_quota{domain=\"b\",quota=\"instances\"} 10",
        "thaw_tenant_functions{domain=\"\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is missing in\n{metrics}");
    }

    // A wrong file changes nothing, and says so.
    write_quotas(&home, "[domain.a]\ninstances = \"two\"\n");
    daemon.signal(Signal::HUP);
    wait_until("the daemon says so", || {
        daemon.log().contains("the quotas of tenants stay what they were")
            && daemon.log().contains("tenants.toml:2:13")
    });
    assert_eq!(tenant(&daemon, "a")["quota"]["instances"], 1);
    let checked = cli(&home, &["tenants", "--check", home.join("tenants.toml").to_str().unwrap()]);
    assert_eq!(checked.code, Some(1), "{}", checked.stdout);
    assert!(checked.stderr.contains("or \"unlimited\""), "{}", checked.stderr);
    // A right one is in force at once.
    write_quotas(&home, "[domain.a]\ninstances = 2\n");
    daemon.signal(Signal::HUP);
    wait_until("the new quota is in force", || tenant(&daemon, "a")["quota"]["instances"] == 2);
    assert_eq!(get(daemon.gateway(), "a2", "/").status, 200);
    assert_eq!(tenant(&daemon, "b")["quota"]["instances"], Value::Null);
    assert_eq!(busy.join().expect("an answer").status, 200);
    wait_until("nothing is left", || tenant(&daemon, "a")["instances"] == 0);
}

#[test]
fn a_daemon_does_not_start_with_wrong_quotas() {
    let home = built_home("tenants-wrong", &[]);
    write_quotas(&home, "[domain.a]\ninstence = 1\n");
    let log = Daemon::try_start(&home, &DaemonOptions::default()).expect_err("a wrong file");
    assert!(log.contains("tenants.toml:2:1"), "{log}");
    assert!(log.contains("did you mean `instances`?"), "{log}");
}

#[test]
fn the_memory_of_a_tenant_is_bounded_by_what_its_instances_may_use() {
    let limits = "[sharing]\ndomain = \"a\"\n[limits]\nmemory = \"128MiB\"\nqueue = \"500ms\"";
    let home = home("tenants-memory", &[("a1", limits), ("a2", limits)]);
    write_quotas(&home, "[domain.a]\nmemory = \"300MiB\"\n");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let busy = [ask(&daemon, "a1", "/keep/40/20"), ask(&daemon, "a2", "/keep/40/20")];
    wait_until("two are busy", || tenant(&daemon, "a")["memory_reserved"] == 256 << 20);
    refused(
        &daemon,
        &get(daemon.gateway(), "a1", "/"),
        "an instance of this function may use 128MiB",
    );
    if has_controller("memory") {
        wait_until("their memory is counted", || {
            tenant(&daemon, "a")["memory_used"].as_u64() > Some(80 << 20)
        });
    } else {
        skip("counting memory needs a control group");
    }
    for answer in busy {
        assert_eq!(answer.join().expect("an answer").text(), "kept 40\n");
    }
}

#[test]
fn a_tenant_that_has_spent_its_cpu_time_is_refused_and_what_goes_on_ends() {
    if !has_controller("cpuacct") {
        return skip("counting CPU time needs a control group");
    }
    let of_a = "[sharing]\ndomain = \"a\"\n[limits]\ntimeout = \"60s\"";
    let home = home("tenants-cpu", &[("a", of_a), ("b", "")]);
    write_quotas(&home, "[domain.a]\ncpu_time = \"2s per 1h\"\n");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    // Of instances that have ended, however little a busy host gives them.
    for _ in 0..4 {
        assert_eq!(get(daemon.gateway(), "a", "/spin/0.3").status, 200);
    }
    wait_until("it is counted", || tenant(&daemon, "a")["cpu_ms"].as_u64() > Some(100));
    assert_eq!(tenant(&daemon, "a")["cpu_period"]["is_spent"], false);
    // It goes on for longer than it may.
    let endless = get(daemon.gateway(), "a", "/spin/50");
    assert_eq!(endless.status, 502, "{}", endless.text());
    let reason = daemon.explain(&endless);
    assert!(reason.contains("spent its CPU time"), "{reason}");
    refused(
        &daemon,
        &get(daemon.gateway(), "a", "/"),
        "the CPU time of domain `a` is spent, 2s per 1h",
    );
    wait_until("nothing runs", || daemon.instances("a").is_empty());
    let period = tenant(&daemon, "a")["cpu_period"].clone();
    assert_eq!(period["is_spent"], true);
    let used = period["used_ms"].as_u64().expect("a number");
    assert!((2000..20_000).contains(&used), "{period}");
    assert!(daemon.log().contains("ending the instances of domain `a`"), "{}", daemon.log());
    assert_eq!(get(daemon.gateway(), "b", "/").status, 200);
    // A daemon that starts anew does not forget it.
    assert_eq!(daemon.stop(), Some(0));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    refused(
        &daemon,
        &get(daemon.gateway(), "a", "/"),
        "the CPU time of domain `a` is spent, 2s per 1h",
    );
    // The quota is raised.
    write_quotas(&home, "[domain.a]\ncpu_time = \"10m per 1h\"\n");
    daemon.signal(Signal::HUP);
    wait_until("it is served again", || get(daemon.gateway(), "a", "/").status == 200);
}

#[test]
fn what_is_kept_ready_counts_and_makes_room() {
    let ready = "ready = 2\n[sharing]\ndomain = \"a\"\n[limits]\nqueue = \"20s\"";
    let template = "template = true\n[sharing]\ndomain = \"a\"\n[limits]\nqueue = \"20s\"";
    let plain = "[sharing]\ndomain = \"a\"\n[limits]\nqueue = \"20s\"";
    let home = home("tenants-ready", &[("ready", ready), ("fork", template), ("plain", plain)]);
    write_quotas(&home, "[domain.a]\ninstances = 2\n");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let standby =
        |name: &str| daemon.admin(&format!("/functions/{name}")).json()["standby"].clone();
    let count = |list: &Value| list.as_array().map_or(0, Vec::len);
    // Ready instances, the template and what it has forked ahead take places alike.
    let kept = || {
        let (ready, fork) = (standby("ready"), standby("fork"));
        let template = usize::from(!fork["template"].is_null());
        count(&ready["ready"]) + template + count(&fork["forked"])
    };
    wait_until("both places are taken", || kept() == 2);
    assert_eq!(tenant(&daemon, "a")["instances"], 2);
    // Each function in turn, though the two places are taken by what is only ready.
    for _ in 0..3 {
        for name in ["plain", "ready", "fork"] {
            let response = get(daemon.gateway(), name, "/");
            assert_eq!(response.status, 200, "{name}: {}", response.text());
            let instances = tenant(&daemon, "a")["instances"].as_u64();
            assert!(instances <= Some(2), "{instances:?}");
        }
    }
    // A lowered quota ends what nobody uses.
    write_quotas(&home, "[domain.a]\ninstances = 0\n");
    daemon.signal(Signal::HUP);
    wait_until("the quota is in force", || daemon.log().contains("reloaded: "));
    wait_until("nothing is kept ready", || tenant(&daemon, "a")["instances"] == 0);
    wait_until("nothing is shown as kept", || kept() == 0);
    refused(&daemon, &get(daemon.gateway(), "plain", "/"), "is 0 instances");
}

#[test]
fn a_build_beyond_the_quota_of_its_tenant_is_refused() {
    let home = built_home("tenants-store", &[]);
    let directory = home.join("function");
    fs::create_dir_all(&directory).expect("a directory");
    let program = thaw_e2e::repository().join("tests/guest/functions/tenant.py");
    fs::copy(program, directory.join("app.py")).expect("a copy");
    let text = "name = \"f\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n[runtime]\n\
                kind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n";
    fs::write(directory.join("thaw.toml"), text).expect("thaw.toml");
    let build = |domain: &str| {
        let path = directory.to_str().expect("a path");
        cli(&home, &["build", "--weak-limits", "--domain", domain, path])
    };
    write_quotas(&home, "[default]\nstore = \"1GiB\"\n[domain.small]\nstore = \"1MiB\"\n");
    let outcome = build("small");
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    for part in
        ["the quota of domain `small` is 1.0 MiB in the store", "it would have", "`thaw remove`"]
    {
        assert!(outcome.stderr.contains(part), "{}", outcome.stderr);
    }
    let functions = home.join("store/functions/f/record.json");
    assert!(!functions.exists(), "it was stored all the same");
    // Who has room is served, and what it has is shown.
    build("large").success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_eq!(get(daemon.gateway(), "f", "/").status, 200);
    let stored = tenant(&daemon, "large")["store"].as_u64().expect("a number");
    assert!(stored > 1 << 20, "{stored}");
    assert_eq!(tenant(&daemon, "small")["store"], 0);
    // Exactly so much: a build that changes nothing needs no more than there is. Images of
    // two builds differ, so there are two of them.
    write_quotas(&home, &format!("[default]\nstore = \"{}B\"\n", stored + (1 << 20)));
    fs::write(directory.join("large"), vec![b'x'; 4 << 20]).expect("a file");
    let outcome = build("large");
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    // A file that cannot be understood refuses everything.
    write_quotas(&home, "[default]\nstore = 5\n");
    let outcome = build("other");
    assert!(outcome.stderr.contains("tenants.toml:2:9"), "{}", outcome.stderr);
}

/// A server that accepts and keeps connections; its port.
fn server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let _ = stream.read(&mut [0]);
            });
        }
    });
    port
}

#[test]
fn the_functions_of_a_tenant_share_their_outgoing_connections() {
    let port = server();
    let keys = |domain: &str| -> &'static str {
        let allow = format!("allow = [\"host.thaw.internal:{port}\"]");
        format!("[sharing]\ndomain = \"{domain}\"\n[egress]\n{allow}").leak()
    };
    let functions = [("a1", keys("a")), ("a2", keys("a")), ("b", keys("b"))];
    let home = home("tenants-egress", &functions);
    write_quotas(&home, "[domain.a]\negress.connections = 4\n");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let holding = ask(&daemon, "a1", &format!("/connect/{port}/3/20"));
    wait_until("they are counted", || tenant(&daemon, "a")["egress_connections"] == 3);
    // As where no local port is left; the look-up of the name takes none that counts.
    let second = get(daemon.gateway(), "a2", &format!("/connect/{port}/3/0")).text();
    assert_eq!(second, "made EADDRNOTAVAIL EADDRNOTAVAIL\n");
    let other = get(daemon.gateway(), "b", &format!("/connect/{port}/6/0")).text();
    assert_eq!(other, "made made made made made made\n");
    assert_eq!(holding.join().expect("an answer").text(), "made made made\n");
    // Those that were closed count no more.
    for _ in 0..5 {
        wait_until("all that there may be are made", || {
            let again = get(daemon.gateway(), "a2", &format!("/connect/{port}/4/0")).text();
            again == "made made made made\n"
        });
    }
    write_quotas(&home, "[domain.a]\negress.per_second = 5\n");
    daemon.signal(Signal::HUP);
    wait_until("the new quota is in force", || {
        tenant(&daemon, "a")["quota"]["egress_per_second"] == 5
    });
    let fast = get(daemon.gateway(), "a2", &format!("/connect/{port}/40/0")).text();
    let made = fast.split_whitespace().filter(|outcome| *outcome == "made").count();
    assert!((1..40).contains(&made), "{fast}");
    assert!(fast.contains("EADDRNOTAVAIL"), "{fast}");
    let other = get(daemon.gateway(), "b", &format!("/connect/{port}/40/0")).text();
    assert!(!other.contains("EADDRNOTAVAIL"), "{other}");
}
