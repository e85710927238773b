//! Where sandboxes connect to, while they run. All servers are on this machine.

use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use thaw_e2e::{
    Daemon, DaemonOptions, built_home, call, ok, pause_until_hibernated, python_with, repository,
    run, run_within, skip, start_with_e2b, thaw, use_e2b, wait_until, write_e2b_settings,
};

/// An echo server on the host's loopback, which lives as long as the test; its port.
fn echo_server() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(len @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..len]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// A home with functions that have no program: `box` without `[egress]`, `open` with these rules.
fn home(label: &str, rules: &str) -> PathBuf {
    let home = built_home(label, &[]);
    for (name, egress) in [("box", ""), ("open", rules)] {
        let directory = home.with_extension(name);
        fs::create_dir_all(&directory).unwrap();
        let text = format!(
            "name = \"{name}\"\nisolation = \"instance\"\npersist = true\n{egress}\n[entry]\n\
             kind = \"sandbox\"\n[runtime]\nkind = \"python3\"\nprograms = [\"bash\", \"sh\", \
             \"cat\"]\n[limits]\ninstances = 50\nmemory = \"128MiB\"\n"
        );
        fs::write(directory.join("thaw.toml"), text).unwrap();
        run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
    }
    home
}

/// How connections from a sandbox to ports of the host end.
fn knock(home: &Path, sandbox: &str, ports: &[u16]) -> Vec<String> {
    const KNOCK: &str = "import errno, socket, sys\n\
        for port in sys.argv[1:]:\n\
        \u{20} s = socket.socket()\n\
        \u{20} code = s.connect_ex(('10.0.2.2', int(port)))\n\
        \u{20} if code: print(errno.errorcode[code]); continue\n\
        \u{20} s.sendall(b'hello'); print(s.recv(9).decode())\n";
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    let mut arguments = vec!["exec", sandbox, "--", "python3", "-c", KNOCK];
    arguments.extend(ports.iter().map(String::as_str));
    ok(home, &arguments).lines().map(str::to_owned).collect()
}

fn rule(port: u16) -> String {
    format!("host.thaw.internal:{port}")
}

/// What `thaw sandbox egress --json` says.
fn egress(home: &Path, arguments: &[&str]) -> Value {
    let said = ok(home, &[&["sandbox", "egress", "--json"], arguments].concat());
    serde_json::from_str(&said).expect("JSON")
}

/// A function without `[egress]`: its sandbox gets a way out while it runs, and loses it.
#[test]
fn the_rules_of_a_sandbox_change_while_it_runs() {
    let (one, other) = (echo_server(), echo_server());
    let home = home("sandbox-egress", "");
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one"]);
    assert_eq!(knock(&home, "one", &[one]), ["ENETUNREACH"]);
    let shown = egress(&home, &["one"]);
    assert_eq!((&shown["allow"], &shown["reached"]), (&Value::Array(vec![]), &Value::from(0)));

    // A program that was there before: it holds a connection, and makes one for each line.
    const HOLD: &str = "import errno, socket, sys\n\
        s = None\n\
        for line in sys.stdin:\n\
        \u{20} n = socket.socket()\n\
        \u{20} code = n.connect_ex((line.split()[0], int(line.split()[1])))\n\
        \u{20} if code: print(errno.errorcode[code], end=' ')\n\
        \u{20} else: s = s or n; print('connected', end=' ')\n\
        \u{20} if s: s.sendall(b'held'); print(s.recv(4).decode(), end=' ')\n\
        \u{20} print(flush=True)\n";
    let mut program = thaw()
        .args(["exec", "-i", "one", "--", "python3", "-c", HOLD])
        .env("THAW_HOME", &home)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("thaw");
    let (mut input, output) = (program.stdin.take().unwrap(), program.stdout.take().unwrap());
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(output));
    let mut ask = |host: &str| {
        input.write_all(format!("{host} {one}\n").as_bytes()).expect("it reads");
        lines.next().expect("an answer").expect("text").trim().to_owned()
    };
    assert_eq!(ask("10.0.2.2"), "ENETUNREACH");
    ok(&home, &["sandbox", "egress", "one", "--allow", &rule(one)]);
    assert_eq!(ask("host.thaw.internal"), "connected held");
    assert_eq!(knock(&home, "one", &[one, other]), ["hello", "EACCES"]);
    ok(&home, &["sandbox", "egress", "one", "--allow", &rule(other)]);
    assert_eq!(knock(&home, "one", &[one, other]), ["EACCES", "hello"]);
    ok(&home, &["sandbox", "egress", "one", "--none"]);
    // The connection that it has stays.
    assert_eq!(ask("10.0.2.2"), "ENETUNREACH held");
    drop(input);
    assert!(program.wait().expect("it ends").success());
    assert_eq!(knock(&home, "one", &[one, other]), ["ENETUNREACH", "ENETUNREACH"]);

    wait_until("all are counted", || {
        let shown = egress(&home, &["one"]);
        (shown["reached"].as_u64(), shown["denied"].as_u64()) == (Some(3), Some(2))
    });
    let line = |word: &str, port: u16| {
        let to = format!("10.0.2.2:{port}");
        let log = ok(&home, &["sandbox", "egress", "one", "--log"]);
        log.lines().any(|line| line.contains(word) && line.contains(&to))
    };
    wait_until("they are in its log", || {
        line("allowed", one) && line("denied", one) && line("denied", other)
    });
    assert!(ok(&home, &["sandbox", "show", "one"]).contains("allowed 3, denied 2"));
    let shown = ok(&home, &["sandbox", "show", "one", "--json"]);
    let usage = serde_json::from_str::<Value>(&shown).expect("JSON")["usage"].clone();
    assert_eq!(usage["memory_max_bytes"], 128 << 20);
    // Two Pythons have run in it.
    assert!(usage["private_bytes"].as_u64().expect("it runs") > 4096, "{usage}");
    assert!(usage["cpu_ms"].as_u64().is_none_or(|ms| ms > 0), "{usage}");
    let resolver = ok(&home, &["exec", "one", "--", "cat", "/etc/resolv.conf"]);
    assert_eq!(resolver, "nameserver 10.0.2.3\n");
}

#[test]
fn copies_pauses_sleep_and_the_next_daemon_keep_the_rules() {
    let (one, other) = (echo_server(), echo_server());
    let rules = format!("[egress]\nallow = [\"{}\", \"{}\"]", rule(one), rule(other));
    let home = home("sandbox-egress-kept", &rules);
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "open", "--name", "all"]);
    assert_eq!(knock(&home, "all", &[one, other]), ["hello", "hello"]);
    ok(&home, &["sandbox", "create", "open", "--name", "one", "--allow-egress", &rule(one)]);
    ok(&home, &["sandbox", "create", "open", "--name", "none", "--no-egress"]);
    let expect = |name: &str| {
        assert_eq!(knock(&home, name, &[one, other]), ["hello", "EACCES"], "{name}");
    };
    expect("one");
    assert_eq!(knock(&home, "none", &[one]), ["ENETUNREACH"]);
    // Files that the program has changed are its own.
    ok(&home, &["exec", "one", "--", "sh", "-c", "echo '#' >> /etc/hosts"]);
    ok(&home, &["sandbox", "fork", "one", "--name", "two"]);
    expect("two");
    assert!(ok(&home, &["exec", "two", "--", "cat", "/etc/hosts"]).ends_with("#\n"));
    // A copy has its own rules from then on.
    ok(&home, &["sandbox", "egress", "two", "--none"]);
    expect("one");
    pause_until_hibernated(&home, "one");
    expect("one");
    let instance = |name: &str| {
        let shown: Value =
            serde_json::from_str(&ok(&home, &["sandbox", "show", name, "--json"])).expect("JSON");
        shown["instance"].to_string()
    };
    ok(&home, &["sleep", "open", "--instance", &instance("one")]);
    ok(&home, &["sleep", "open", "--instance", &instance("two")]);
    // One that sleeps can be changed, too.
    let shown = egress(&home, &["one"]);
    assert_eq!(shown["allow"][0], rule(one));
    expect("one");

    daemon.wait_until_kept("open");
    daemon.kill_and_await_next();
    expect("one");
    assert_eq!(knock(&home, "none", &[one]), ["ENETUNREACH"]);
    assert_eq!(knock(&home, "all", &[one, other]), ["hello", "hello"]);
    // It has slept since before this daemon.
    ok(&home, &["sandbox", "egress", "two", "--allow", &rule(one)]);
    expect("two");
}

/// Bytes that a client sends in a round, and then receives.
const ROUND: (usize, usize) = (100_000, 30_000);

/// A server of rounds on the host's loopback; its port.
fn round_server() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let (mut request, answer) = (vec![0; ROUND.0], vec![0; ROUND.1]);
                while stream.read_exact(&mut request).is_ok() && stream.write_all(&answer).is_ok() {
                }
            });
        }
    });
    port
}

/// Makes as many rounds on one connection as stands in a file, and closes it at a negative number.
const ROUNDS: &str = "import socket, sys, time\n\
    s = socket.create_connection(('10.0.2.2', int(sys.argv[1])))\n\
    done = wanted = 0\n\
    while wanted >= 0:\n\
    \u{20} try: wanted = int(open('/wanted').read())\n\
    \u{20} except (OSError, ValueError): pass\n\
    \u{20} while done < wanted:\n\
    \u{20}  s.sendall(bytes(100000)); left = 30000; done += 1\n\
    \u{20}  while left: left -= len(s.recv(left))\n\
    \u{20} time.sleep(0.02)\n";

/// Waits until both numbers of `read`, sent and received, are those of so many rounds, or up to
/// `ends` more: the end of a connection may count as a byte.
#[track_caller]
fn wait_for_rounds(rounds: u64, ends: u64, read: impl Fn() -> Option<(u64, u64)>) {
    let (sent, received) = (rounds * ROUND.0 as u64, rounds * ROUND.1 as u64);
    wait_until(&format!("{rounds} rounds are counted: {:?}", read()), || {
        read().is_some_and(|(has_sent, has_received)| {
            (sent..=sent + ends).contains(&has_sent)
                && (received..=received + ends).contains(&has_received)
        })
    });
}

/// Bytes of a sandbox, as `network` says.
fn bytes_of(info: &Value) -> Option<(u64, u64)> {
    let network = &info["network"];
    Some((network["sent_bytes"].as_u64()?, network["received_bytes"].as_u64()?))
}

fn bytes_shown(home: &Path, name: &str) -> Option<(u64, u64)> {
    let shown = ok(home, &["sandbox", "show", name, "--json"]);
    bytes_of(&serde_json::from_str(&shown).expect("JSON"))
}

fn bytes_listed(home: &Path, name: &str) -> Option<(u64, u64)> {
    let listed: Vec<Value> =
        serde_json::from_str(&ok(home, &["sandbox", "list", "--json"])).expect("JSON");
    bytes_of(listed.iter().find(|info| info["name"] == name)?)
}

/// Bytes of a function in the metrics.
fn bytes_in_metrics(daemon: &Daemon, function: &str) -> Option<(u64, u64)> {
    let text = daemon.admin("/metrics").text().to_owned();
    let of = |direction: &str| {
        let name = format!(
            "thaw_egress_bytes_total{{function=\"{function}\",direction=\"{direction}\"}} "
        );
        text.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok())
    };
    Some((of("sent")?, of("received")?))
}

#[test]
fn every_byte_of_a_connection_is_counted_once() {
    let probes: Vec<Value> =
        serde_json::from_str(&run(thaw().args(["doctor", "--json"])).stdout).expect("JSON");
    let probe = probes.iter().find(|probe| probe["name"] == "bytes of connections");
    if probe.expect("it is told")["status"] != "good" {
        return skip("this host does not say how many bytes connections have carried");
    }
    let port = round_server();
    let home = home("sandbox-egress-bytes", &format!("[egress]\nallow = [\"{}\"]", rule(port)));
    let mut daemon = Daemon::start(&home, &DaemonOptions::default());
    let port = port.to_string();
    ok(&home, &["sandbox", "create", "open", "--name", "one"]);
    assert_eq!(bytes_shown(&home, "one"), Some((0, 0)));
    assert_eq!(bytes_in_metrics(&daemon, "open"), None);
    let want = |name: &str, rounds: i32| {
        ok(&home, &["exec", name, "--", "sh", "-c", &format!("echo {rounds} > /wanted")]);
    };

    // While the connection is open, to the byte.
    ok(&home, &["exec", "-d", "one", "--", "python3", "-c", ROUNDS, &port]);
    want("one", 1);
    wait_for_rounds(1, 0, || bytes_shown(&home, "one"));
    wait_for_rounds(1, 0, || bytes_listed(&home, "one"));
    wait_for_rounds(1, 0, || bytes_in_metrics(&daemon, "open"));
    let said = ok(&home, &["sandbox", "show", "one"]);
    assert!(said.contains("\nTCP: 97.7KiB sent, 29.3KiB received"), "{said}");

    // When one ends, whose sandbox goes on, and one whose sandbox ends with it.
    const ONE_ROUND: &str = "import socket, sys\n\
        s = socket.create_connection(('10.0.2.2', int(sys.argv[1])))\n\
        s.sendall(bytes(100000)); left = 30000\n\
        while left: left -= len(s.recv(left))\n";
    ok(&home, &["exec", "one", "--", "python3", "-c", ONE_ROUND, &port]);
    wait_for_rounds(2, 1, || bytes_shown(&home, "one"));
    ok(&home, &["sandbox", "create", "open", "--name", "other"]);
    ok(&home, &["exec", "other", "--", "python3", "-c", ONE_ROUND, &port]);
    ok(&home, &["sandbox", "kill", "other"]);
    wait_for_rounds(3, 2, || bytes_in_metrics(&daemon, "open"));
    wait_for_rounds(2, 1, || bytes_shown(&home, "one"));
    // A copy has nothing yet.
    ok(&home, &["sandbox", "fork", "one", "--name", "two"]);
    assert_eq!(bytes_shown(&home, "two"), Some((0, 0)));

    // The next daemon goes on with those of the sandbox, and begins those of the function.
    daemon.wait_until_kept("open");
    daemon.kill_and_await_next();
    wait_for_rounds(2, 1, || bytes_shown(&home, "one"));
    want("one", 2);
    wait_for_rounds(3, 1, || bytes_shown(&home, "one"));
    wait_for_rounds(1, 0, || bytes_in_metrics(&daemon, "open"));
    want("one", -1);
    wait_for_rounds(3, 2, || bytes_listed(&home, "one"));
    ok(&home, &["exec", "one", "--", "python3", "-c", ONE_ROUND, &port]);
    wait_for_rounds(4, 3, || bytes_shown(&home, "one"));
    wait_for_rounds(2, 2, || bytes_in_metrics(&daemon, "open"));
    // One that sleeps has them, too.
    let instance = ok(&home, &["sandbox", "show", "one", "--json"]);
    let instance: Value = serde_json::from_str(&instance).expect("JSON");
    ok(&home, &["sleep", "open", "--instance", &instance["instance"].to_string()]);
    wait_for_rounds(4, 3, || bytes_listed(&home, "one"));
}

/// A network without a loopback, in which the daemon cannot try whether bytes are counted.
#[test]
fn a_host_that_counts_no_bytes_has_no_numbers_and_all_else() {
    let can_unshare = Command::new("unshare").args(["--net", "true"]).status();
    if !can_unshare.is_ok_and(|status| status.success()) {
        return skip("another network takes root and unshare(1)");
    }
    let home = home("sandbox-egress-uncounted", "");
    let apart = ["unshare".to_owned(), "--net".to_owned()];
    let daemon = Daemon::start_by(&apart, &home, &DaemonOptions::default());
    let line = "bytes of outgoing connections are not counted: ";
    assert_eq!(daemon.log().matches(line).count(), 1, "{}", daemon.log());
    ok(&home, &["sandbox", "create", "box", "--name", "one", "--egress", "host.thaw.internal:1"]);
    assert_eq!(knock(&home, "one", &[1]), ["ENETUNREACH"]);
    assert_eq!(bytes_shown(&home, "one"), None);
    assert_eq!(bytes_listed(&home, "one"), None);
    assert!(!ok(&home, &["sandbox", "show", "one"]).contains("TCP: "));
    let metrics = daemon.admin("/metrics").text().to_owned();
    assert!(!metrics.contains("thaw_egress_bytes"), "{metrics}");
    assert!(metrics.contains("thaw_zygotes"), "{metrics}");
}

#[test]
fn nobody_gets_more_than_the_operator_allows_and_rules_have_a_bound() {
    let (one, other) = (echo_server(), echo_server());
    let home = home("sandbox-egress-most", "");
    let quotas = format!("[default.egress]\nallow = [\"{}\"]\n", rule(one));
    fs::write(home.join("tenants.toml"), quotas).unwrap();
    let _daemon = Daemon::start(&home, &DaemonOptions::default());
    ok(&home, &["sandbox", "create", "box", "--name", "one", "--egress", "host.thaw.internal:*"]);
    assert_eq!(knock(&home, "one", &[one, other]), ["hello", "EACCES"]);

    let change = ["sandbox", "egress", "one"];
    let many: Vec<&str> = (0..257).flat_map(|_| ["--allow", "10.0.0.1:1"]).collect();
    let refused = call(&home, &[&change[..], &many].concat());
    assert!(refused.stderr.contains("at most 256 rules"), "{refused:?}");
    let deny = ["--allow", "*", "--deny", "a.example.com:443"];
    let refused = call(&home, &[&change[..], &deny].concat());
    assert!(refused.stderr.contains("can be denied"), "{refused:?}");
    let wrong = call(&home, &["sandbox", "egress", "one", "--allow", "127.0.0.1:80"]);
    assert_eq!(wrong.code, Some(2));
    // Nothing of that has changed anything.
    assert_eq!(knock(&home, "one", &[one, other]), ["hello", "EACCES"]);
}

/// E2B's SDK from PyPI, not changed.
#[test]
fn e2bs_sdk_says_where_a_sandbox_connects_to() {
    let Some(python) = python_with(&["e2b==2.63.0"]) else { return };
    let (one, other) = (echo_server(), echo_server());
    let rules = format!("[egress]\nallow = [\"{}\"]", rule(one));
    let home = home("sandbox-egress-e2b", &rules);
    write_e2b_settings(&home, "base = \"open\"\nshut = \"box\"");
    let daemon = start_with_e2b(&home);
    let mut program = std::process::Command::new(python);
    program.arg(repository().join("tests/e2b/network.py"));
    program.args([one.to_string(), other.to_string()]);
    use_e2b(&mut program, &daemon);
    let printed = run_within(std::time::Duration::from_secs(200), &mut program, b"").success();
    assert_eq!(
        printed,
        "default hello EACCES\nshut ENETUNREACH\nno internet ENETUNREACH\n\
         denied EACCES {'deny_out': ['10.0.0.0/8'], 'allow_public_traffic': False}\n\
         exempt hello {'allow_out': ['host.thaw.internal'], 'deny_out': ['0.0.0.0/0'], \
         'allow_public_traffic': False}\n\
         updated ENETUNREACH\nupdated back hello\nfork ENETUNREACH False\nwrong 400\n"
    );
}
