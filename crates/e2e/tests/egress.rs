//! Outgoing connections go where the policy says, and nowhere else. All servers
//! are on this machine.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use thaw_e2e::{
    Daemon, DaemonOptions, Outcome, built_home, free_port, get, post, python, repository, run,
    thaw, wait_until,
};

/// An echo server on TCP and UDP; it ends with the test.
fn echo_server(ip: IpAddr) -> u16 {
    counting_echo_server(ip).0
}

/// As [`echo_server`], with the number of TCP connections it has had.
fn counting_echo_server(ip: IpAddr) -> (u16, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    // Free for both.
    let port = free_port();
    let listener = TcpListener::bind((ip, port)).expect("the port");
    let datagrams = UdpSocket::bind((ip, port)).expect("the same port for UDP");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            counted.fetch_add(1, Ordering::Relaxed);
            thread::spawn(move || echo(stream));
        }
    });
    thread::spawn(move || {
        let mut buffer = [0; 2000];
        while let Ok((len, from)) = datagrams.recv_from(&mut buffer) {
            let _ = datagrams.send_to(&buffer[..len], from);
        }
    });
    (port, count)
}

fn echo(mut stream: TcpStream) {
    let mut buffer = [0; 65536];
    while let Ok(len @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..len]).is_err() {
            return;
        }
    }
}

fn reach_out(rules: &[String], program: &str, arguments: &[String]) -> Outcome {
    let script = repository().join("tests/guest/egress").join(program);
    let mut command = thaw();
    command.args(["run", "--as-root", "--rootfs", "/"]);
    for rule in rules {
        command.args(["--allow-egress", rule]);
    }
    command.arg("--").arg(python()).arg(script).args(arguments);
    run(&mut command)
}

#[test]
fn the_host_is_reached_where_it_is_allowed() {
    let (allowed, forbidden) =
        (echo_server(Ipv4Addr::LOCALHOST.into()), echo_server(Ipv4Addr::LOCALHOST.into()));
    let closed = free_port();
    let rules: Vec<String> = [allowed, closed]
        .iter()
        .flat_map(|port| ["tcp", "udp"].map(|how| format!("host.thaw.internal:{port}/{how}")))
        .collect();
    let ports = [allowed, forbidden, closed].map(|port| port.to_string());
    let expected = "\
names 10.0.2.15 True
echoed 300000 then b''
forbidden port EACCES
forbidden address EACCES
closed port ECONNREFUSED
host's own loopback ECONNREFUSED
at once allowed EINPROGRESS 4 0
again 0 EISCONN
at once closed EINPROGRESS 28 ECONNREFUSED
at once forbidden EINPROGRESS 28 EACCES
udp b'one' True
udp empty b''
udp forbidden EACCES
udp own 10.0.2.15
udp cut b'a long'
udp closed ECONNREFUSED
asked host.thaw.internal 1 (0, 1)
asked host.thaw.internal 28 (0, 0)
asked forbidden.example.com 1 (3, 0)
asked over tcp (0, 1)
looked up host.thaw.internal ['10.0.2.2']
looked up forbidden.example.com True
own address 10.0.2.15 10.0.2.15
";
    assert_eq!(reach_out(&rules, "reach.py", &ports).success(), expected);
}

#[test]
fn without_a_rule_there_is_no_network() {
    let script = "import socket, errno\n\
                  for to in ('192.0.2.1', 80), ('10.0.2.2', 80), ('10.0.2.3', 53):\n\
                  \u{20} print(errno.errorcode[socket.socket().connect_ex(to)])";
    let mut command = thaw();
    command.args(["run", "--as-root", "--rootfs", "/", "--"]).arg(python()).args(["-c", script]);
    assert_eq!(run(&mut command).success(), "ENETUNREACH\n".repeat(3));
}

/// The port on which the second host of `network.sh` accepts connections.
const PORT: &str = "7000";

/// Runs a program of this directory in a sandbox on the first of two hosts; see
/// `network.sh`. `None` if this machine cannot have them.
fn on_first_host(rules: &[&str], program: &str, arguments: &[&str]) -> Option<Outcome> {
    let has_ip = Command::new("ip").arg("-V").output().is_ok_and(|said| said.status.success());
    if !rustix::process::geteuid().is_root() || !has_ip {
        eprintln!("skipped: two hosts in namespaces take root and ip(8)");
        return None;
    }
    let directory = repository().join("tests/guest/egress");
    let mut command = Command::new("unshare");
    command.arg("--net").arg(directory.join("network.sh")).arg(PORT);
    command.arg(thaw().get_program()).args(["run", "--as-root", "--rootfs", "/"]);
    for rule in rules {
        command.args(["--allow-egress", rule]);
    }
    command.arg("--").arg(python()).arg(directory.join(program)).args(arguments);
    Some(run(&mut command))
}

/// How connections to these addresses end.
fn knock(rules: &[&str], addresses: &[&str]) -> Option<Vec<String>> {
    let arguments: Vec<&str> = addresses.iter().flat_map(|address| [address, PORT]).collect();
    let said = on_first_host(rules, "knock.py", &arguments)?.success();
    let ends = |line: &str| line.split_once(' ').map(|(_, how)| how.to_owned());
    Some(said.lines().filter_map(ends).collect())
}

/// What answers there: somebody on the Internet, two private servers, two metadata
/// services, and the host itself.
const PLACES: [&str; 7] = [
    "198.51.100.2",
    "10.213.0.2",
    "fd00:213::2",
    "168.63.129.16",
    "100.100.100.200",
    "10.213.0.1",
    "fd00:213::1",
];

#[test]
fn everything_is_what_is_public_unless_it_says_private() {
    const NO: &str = "EACCES";
    let Some(ends) = knock(&["*"], &PLACES) else { return };
    assert_eq!(ends, ["connected", NO, NO, NO, NO, NO, NO]);
    let ends = knock(&["private:*"], &PLACES).expect("the same machine");
    assert_eq!(ends, ["connected", "connected", "connected", NO, NO, NO, NO]);
}

#[test]
fn what_is_written_out_is_reached() {
    const NO: &str = "EACCES";
    // Nobody listens on the host itself.
    let rules = ["168.63.129.16:7000", "10.213.0.0/24:*", "10.213.0.1:7000", "[fd00::/8]:*"];
    let Some(ends) = knock(&rules, &PLACES) else { return };
    let refused = "ECONNREFUSED";
    assert_eq!(ends, [NO, "connected", "connected", "connected", NO, refused, NO]);
    // A network does not mean the host's own addresses in it.
    let ends = knock(&["10.213.0.0/24:*", "[::/0]:*"], &PLACES).expect("the same machine");
    assert_eq!(ends, [NO, "connected", NO, NO, NO, NO, NO]);
}

/// A name is what getaddrinfo(3) takes for an address, so that it needs no server.
/// Whoever has the name can make it lead anywhere, also to the host.
#[test]
fn names_lead_to_private_addresses_only_where_they_may() {
    let asked = |rule: &str, name: &str| {
        on_first_host(&[rule], "learn.py", &[name, PORT]).map(Outcome::success)
    };
    let Some(public) = asked("*.51.100.2:7000", "198.51.100.2") else { return };
    assert_eq!(public, "EACCES\nTrue\nconnected\n");
    for (rule, name, end) in [
        ("*.213.0.2:7000", "10.213.0.2", "EACCES"),
        ("private:*.213.0.2:7000", "10.213.0.2", "connected"),
        ("private:*.213.0.1:7000", "10.213.0.1", "EACCES"),
        ("private:*.63.129.16:7000", "168.63.129.16", "EACCES"),
    ] {
        let said = asked(rule, name).expect("the same machine");
        assert_eq!(said, format!("EACCES\nTrue\n{end}\n"), "{rule}");
    }
}

#[test]
fn a_wrong_rule_is_refused_with_a_reason() {
    let outcome = run(thaw().args([
        "run",
        "--as-root",
        "--rootfs",
        "/",
        "--allow-egress",
        "127.0.0.1:80",
        "--",
        "true",
    ]));
    assert_eq!(outcome.code, Some(2));
    assert!(outcome.stderr.contains("host.thaw.internal"), "{}", outcome.stderr);
}

/// Builds `tests/guest/egress/NAME.py` with these variables and `[egress]`.
fn build_function(home: &Path, name: &str, env: &str, egress: &str) {
    build_named(home, name, name, env, egress);
}

/// The same for `tests/guest/egress/PROGRAM.py`.
fn build_named(home: &Path, program: &str, name: &str, env: &str, egress: &str) {
    let directory = home.join(name);
    fs::create_dir_all(&directory).expect("a directory");
    for (script, file) in [(program, "app.py"), ("clients", "clients.py")] {
        let script = repository().join(format!("tests/guest/egress/{script}.py"));
        fs::copy(script, directory.join(file)).expect("a copy");
    }
    let text = format!(
        "name = \"{name}\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
         files = [\"app.py\", \"clients.py\"]\nenv = {{ {env} }}\n\
         [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n\
         [egress]\n{egress}\n"
    );
    fs::write(directory.join("thaw.toml"), text).expect("thaw.toml");
    run(thaw().env("THAW_HOME", home).arg("build").arg(&directory)).success();
}

/// Without [egress] its own kernel denies it everything: that is logged and counted, too.
#[test]
fn what_a_function_without_a_way_out_wants_is_logged_and_counted() {
    let home = built_home("egress-none", &[]);
    let directory = home.join("source");
    fs::create_dir_all(&directory).expect("a directory");
    let program = repository().join("tests/guest/functions/volumes.py");
    fs::copy(program, directory.join("app.py")).expect("a copy");
    let text = "name = \"closed\"\ncommand = [\"python3\", \"app.py\"]\nport = 8080\n\
        files = [\"app.py\"]\nisolation = \"instance\"\n\
        [runtime]\nkind = \"python3\"\ninterpreter = \"/usr/bin/python3\"\n";
    fs::write(directory.join("thaw.toml"), text).expect("thaw.toml");
    run(thaw().env("THAW_HOME", &home).arg("build").arg(&directory)).success();
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let code = "import socket\nresult = 0\n\
        for _ in range(16 + 2 * 64 + 5):\n  try: socket.create_connection(('192.0.2.1', 80))\n  \
        except OSError: result += 1";
    let answer = post(daemon.gateway(), "closed", "/", code.as_bytes()).json();
    assert_eq!(answer["result"], 149, "{answer}");
    wait_until("the denials are counted", || {
        let metrics = daemon.admin("/metrics").text();
        // The last five are too few for one more message.
        metrics.contains("thaw_egress_denied_total{function=\"closed\"} 144")
    });
    let denied = "denied an outgoing connection to 192.0.2.1:80; see [egress] in its thaw.toml";
    wait_until("they are logged", || daemon.log().matches(denied).count() >= 16);
    assert_eq!(daemon.log().matches(denied).count(), 16, "{}", daemon.log());
    wait_until("its owner is shown them", || {
        let shown = run(thaw().env("THAW_HOME", &home).args(["logs", "closed"])).success();
        shown.contains(denied)
    });
    let code = "import socket\ntry: socket.getaddrinfo('example.com', 80)\nexcept OSError: pass";
    post(daemon.gateway(), "closed", "/", code.as_bytes());
    assert_eq!(daemon.stop(), Some(0));
}

/// A function may connect before it is frozen; its copies find the connection
/// reset, datagrams find their way again, and the policy holds for all of them; what
/// it denies is logged and counted.
#[test]
fn a_thawed_copy_connects_anew() {
    let port = echo_server(Ipv4Addr::LOCALHOST.into());
    let home = built_home("egress", &[]);
    let rules =
        format!("allow = [\"host.thaw.internal:{port}\", \"host.thaw.internal:{port}/udp\"]");
    build_function(&home, "caller", &format!("ECHO_PORT = \"{port}\""), &rules);
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let expected = format!("ECONNRESET\nb''\nENOTCONN\nb'after'\n('10.0.2.2', {port})\nEACCES");
    for _ in 0..3 {
        assert_eq!(get(daemon.gateway(), "caller", "/").text(), expected);
    }
    let denied = format!("denied an outgoing connection to 10.0.2.2:{}", port + 1);
    wait_until("connections and denials are counted, and these are logged", || {
        let metrics = daemon.admin("/metrics").text();
        // Each copy connects once over TCP and once over UDP.
        daemon.log().matches(&denied).count() == 3
            && metrics.contains("thaw_egress_connections_total{function=\"caller\"} 6")
            && metrics.contains("thaw_egress_denied_total{function=\"caller\"} 3")
    });
    if daemon.log().contains("bytes of outgoing connections are not counted") {
        return;
    }
    // Five bytes each over TCP, and perhaps one for the end; none over UDP or of the build.
    let bytes = |direction: &str| -> Option<u64> {
        let metrics = daemon.admin("/metrics").text().to_owned();
        let series = format!("{{function=\"caller\",direction=\"{direction}\"}} ");
        let name = format!("thaw_egress_bytes_total{series}");
        metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok())
    };
    wait_until("bytes are counted", || {
        ["sent", "received"].iter().all(|way| bytes(way).is_some_and(|n| (15..=18).contains(&n)))
    });
}

/// Where the policy says so, copies make the connections of the frozen time again:
/// when they use them, and only those on which nothing was under way.
#[test]
fn a_thawed_copy_makes_its_connections_again_when_it_uses_them() {
    let (port, count) = counting_echo_server(Ipv4Addr::LOCALHOST.into());
    // Nobody else gets the port when it is free again.
    let gone = free_port();
    let passing = TcpListener::bind((Ipv4Addr::LOCALHOST, gone)).expect("the port");
    let server = thread::spawn(move || echo(passing.accept().expect("a client").0));
    let home = built_home("egress-pool", &[]);
    let env = format!("ECHO_PORT = \"{port}\", GONE_PORT = \"{gone}\"");
    let rules =
        format!("reconnect = [\"host.thaw.internal:{port}\", \"host.thaw.internal:{gone}\"]");
    build_function(&home, "pool", &env, &rules);
    server.join().expect("the program that was frozen has ended, and its connection");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    let expected = "[0, 1, 0]\n10.0.2.2\nTrue\n0\nb'again'\nb'and again'\nb'after'\n\
                    ECONNRESET\nECONNRESET\nb''\n[0, 1, 0]";
    for _ in 0..3 {
        let before = count.load(Ordering::Relaxed);
        assert_eq!(get(daemon.gateway(), "pool", "/").text(), expected);
        // `used` and `stream`, but neither `unused` nor `waiting`.
        assert_eq!(count.load(Ordering::Relaxed) - before, 2);
    }
}

/// The daemon's own ports are not among those of the host that a rule includes
/// without naming them.
#[test]
fn the_daemons_own_ports_must_be_written_out() {
    let free = free_port();
    let listening = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let open = listening.local_addr().expect("an address").port();
    let home = built_home("egress-doors", &[]);
    build_function(&home, "doors", "", "allow = [\"host.thaw.internal:*\"]");
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    // The daemon takes it in while it serves.
    let rules = format!("allow = [\"host.thaw.internal:{}\"]", daemon.gateway().port());
    build_named(&home, "doors", "inside", "", &rules);
    let knock =
        |name: &str, port: u16| get(daemon.gateway(), name, &format!("/{port}")).text().to_owned();
    assert_eq!(knock("doors", open), "10.0.2.2");
    assert_eq!(knock("doors", free), "ECONNREFUSED");
    assert_eq!(knock("doors", daemon.gateway().port()), "EACCES");
    assert_eq!(knock("inside", daemon.gateway().port()), "10.0.2.2");
}
