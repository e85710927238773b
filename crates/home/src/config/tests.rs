use super::*;

const MINIMAL: &str = r#"
name = "hello"
command = ["python3", "server.py"]
port = 8000

[runtime]
kind = "python3"
"#;

fn parse(text: &str) -> Result<FunctionConfig, String> {
    FunctionConfig::parse(Path::new("f/thaw.toml"), text).map_err(|error| error.to_string())
}

/// Parses [`MINIMAL`] with `from` replaced by `to` and expects an error.
fn broken(from: &str, to: &str) -> String {
    assert!(MINIMAL.contains(from), "{from}");
    parse(&MINIMAL.replacen(from, to, 1)).expect_err("the configuration is wrong")
}

#[test]
fn an_address_to_listen_at_is_explained() {
    let parse = |listen: &str| {
        let text = format!(
            "name = \"f\"\nrootfs = \"r\"\ncommand = [\"x\"]\nport = 80\nlisten = \"{listen}\"\n"
        );
        FunctionConfig::parse(Path::new("thaw.toml"), &text)
    };
    let why = parse("localhost:80").unwrap_err().to_string();
    assert!(why.starts_with("thaw.toml:5:10: give an IP address and a port"), "{why}");
    let listen = parse("9000").unwrap().listen.unwrap();
    assert_eq!(listen.to_string(), "127.0.0.1:9000");
}

#[test]
fn a_minimal_configuration_has_defaults() {
    let config = parse(MINIMAL).unwrap();
    assert_eq!(config.name.as_str(), "hello");
    assert_eq!(config.workdir, "/app");
    assert_eq!(config.files, [FileEntry { from: ".".into(), to: Some("/app".into()) }]);
    assert_eq!(config.limits.memory, ByteSize::mebibytes(256));
    assert_eq!(config.limits.concurrency.get(), 1);
    assert_eq!(config.isolation, Isolation::Request);
    assert!(config.egress.is_closed());
}

#[test]
fn everything_can_be_set_and_survives_json() {
    let config = parse(
        r#"
        name = "all"
        command = ["/app/server"]
        port = 80
        listen = "127.0.0.1:9000"
        rootfs = "./root"
        files = ["server", { from = "static", to = "/srv/www" }]
        workdir = "/srv"
        isolation = "instance"
        refresh = "24h"
        env = { A = "b" }
        limits = { memory = "64MiB", cpu = 2, processes = 7, cpu_time = "1m", crashes = 5, timeout = "1.5s", concurrency = 8, keep_alive = "10s", instances = 3, queue = "250ms" }
        build = { command = ["make"], egress = ["example.com:443"], memory = "1GiB", timeout = "5m" }
        sharing = { domain = "customer-7", private = ["secrets/**", "*.key"] }
        egress = { allow = [] }
        "#,
    )
    .unwrap();
    let limits = config.limits.of_an_instance();
    assert_eq!((limits.memory, limits.cpus, limits.processes), (64 << 20, 2, 7));
    assert_eq!(config.files[0].destination(), "/app/server");
    assert_eq!(config.files[1].destination(), "/srv/www");
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<FunctionConfig>(&json).unwrap(), config);
}

#[test]
fn unknown_keys_name_the_place_and_the_nearest_key() {
    assert_eq!(
        broken("port = 8000", "prot = 8000"),
        "f/thaw.toml:4:1: unknown key `prot`; did you mean `port`?"
    );
    assert_eq!(
        parse(&format!("{MINIMAL}[limits]\nmemroy = \"1GiB\"\n")).unwrap_err(),
        "f/thaw.toml:9:1: unknown key `memroy`; did you mean `memory`?"
    );
    assert!(
        broken("port", "colour = 1\nport")
            .contains("unknown key `colour`; the keys here are name, ")
    );
    assert!(broken("port", "trian = 1\nport").contains("did you mean `train`?"));
}

#[test]
fn wrong_values_name_the_place() {
    assert!(
        broken("\"hello\"", "\"He llo\"")
            .starts_with("f/thaw.toml:2:8: `He llo` is not a function name;")
    );
    for wrong in ["0", "70000", "-1"] {
        let expected = format!("f/thaw.toml:4:8: {wrong} is not a number from 1 to 65535");
        assert!(broken("8000", wrong).starts_with(&expected), "{}", broken("8000", wrong));
    }
    assert!(broken("8000", "\"x\"").starts_with("f/thaw.toml:4:8: "));
    assert!(
        broken("[\"python3\", \"server.py\"]", "[]")
            .starts_with("f/thaw.toml:3:11: a command needs")
    );
    assert!(
        broken("\"python3\"\n", "\"cobol\"\n")
            .starts_with("f/thaw.toml:7:8: unknown variant `cobol`")
    );
    let memory = format!("{MINIMAL}[limits]\nmemory = \"256\"\n");
    assert!(parse(&memory).unwrap_err().starts_with("f/thaw.toml:9:10: `256` is not a size;"));
    assert!(broken("name = \"hello\"\n", "").contains("missing field `name`"));
    assert!(broken("port = 8000", "port 8000").starts_with("f/thaw.toml:4:6: "));
}

#[test]
fn only_what_leaves_nothing_behind_is_rewound() {
    assert_eq!(parse(&format!("rewind = true\n{MINIMAL}")).unwrap().rewind, Some(true));
    let other = parse(&format!("rewind = false\nisolation = \"instance\"\n{MINIMAL}")).unwrap();
    assert_eq!(other.rewind, Some(false));
    for (keys, tables) in [
        ("isolation = \"instance\"", ""),
        ("template = true", ""),
        ("", "[limits]\ncpu_time = \"1s\""),
        ("", "[egress]\nallow = [\"example.com:443\"]"),
    ] {
        let error = parse(&format!("rewind = true\n{keys}\n{MINIMAL}\n{tables}\n")).unwrap_err();
        assert!(error.to_string().starts_with("f/thaw.toml:1:1: `rewind`"), "{error}");
    }
}

#[test]
fn only_instances_that_stay_sleep_and_in_this_order() {
    let with =
        |keys: &str| parse(&MINIMAL.replacen("\n[runtime]", &format!("{keys}\n[runtime]"), 1));
    let stays = "isolation = \"instance\"\npersist = true\n";
    let limits = |limits: &str| format!("{stays}limits = {{ {limits} }}\n");
    let fits = limits("hibernate_after = \"1s\", sleep_after = \"2s\", keep_alive = \"3s\"");
    let config = with(&fits).unwrap();
    assert!(config.persist);
    assert_eq!(config.limits.sleep_after, Some(TimeSpan::seconds(2)));
    for (keys, reason) in [
        ("persist = true\n".to_owned(), "`persist` is for isolation"),
        (
            format!("{stays}hibernate = {{ encrypt = true }}\n"),
            "`persist` is not for `hibernate.encrypt = true`",
        ),
        ("limits = { sleep_after = \"2s\" }\n".to_owned(), "`sleep_after` is for isolation"),
        (limits("sleep_after = \"1m\""), "not shorter than `keep_alive`"),
        (
            limits("hibernate_after = \"2s\", sleep_after = \"2s\""),
            "not longer than `hibernate_after`",
        ),
        ("limits = { grace = \"1s\" }\n".to_owned(), "`grace` is for isolation"),
        (limits("grace = \"61s\""), "longer than 1m"),
        (limits("trim_after = \"999ms\""), "`trim_after` is shorter than 1s"),
    ] {
        let error = with(&keys).unwrap_err();
        assert!(error.contains(reason), "{keys}: {error}");
    }
}

#[test]
fn keys_that_contradict_each_other_are_refused() {
    assert!(broken("[runtime]\nkind = \"python3\"\n", "").contains("has no root file system"));
    assert!(
        broken("port", "rootfs = \"x\"\nport")
            .starts_with("f/thaw.toml:4:1: `rootfs` and [runtime] exclude")
    );
    assert!(
        parse(
            &MINIMAL.replace("kind = \"python3\"", "kind = \"binary\"\nrequirements = \"r.txt\"")
        )
        .unwrap_err()
        .starts_with("f/thaw.toml:8:1: `requirements` is for kind = \"python3\"")
    );
    assert!(
        parse(&format!("{MINIMAL}[limits]\ncpu = 1\nconcurrency = 2\n"))
            .unwrap_err()
            .starts_with("f/thaw.toml:10:1: isolation = \"request\"")
    );
    assert!(broken("port", "workdir = \"x\"\nport").contains("`x` is not absolute"));
    assert!(broken("port", "refresh = \"59s\"\nport").contains("at least \"1m\""));
    let one = "[limits]\nprocesses = 1\n";
    assert!(
        parse(&format!("{MINIMAL}{one}cpu = 2\n"))
            .unwrap_err()
            .starts_with("f/thaw.toml:9:1: 1 processes leave no room for 2 virtual CPUs")
    );
    assert!(
        parse(&format!("template = true\n{MINIMAL}{one}"))
            .unwrap_err()
            .starts_with("f/thaw.toml:1:1: copies of a template")
    );
    parse(&format!("{MINIMAL}{one}")).unwrap();
}

#[test]
fn languages_have_an_interpreter_and_further_programs() {
    for kind in ["node", "java", "ruby", "php", "perl"] {
        let keys = format!("= \"{kind}\"\ninterpreter = \"/opt/x\"\nprograms = [\"git\"]");
        let config = parse(&MINIMAL.replace("= \"python3\"", &keys)).unwrap();
        let runtime = config.runtime.unwrap();
        assert_eq!(runtime.kind.language(), Some(kind));
        assert_eq!(runtime.programs, ["git"]);
    }
    assert!(
        parse(&MINIMAL.replace("= \"python3\"", "= \"binary\"\ninterpreter = \"/x\""))
            .unwrap_err()
            .starts_with("f/thaw.toml:8:1: `interpreter` is for languages")
    );
}

#[test]
fn destinations_are_checked() {
    let allow = r#"["a.com:443", "*.b.com:*", "10.0.0.0/8:5432", "192.0.2.1:53/udp", "*"]"#;
    let config = parse(&format!("{MINIMAL}[egress]\nallow = {allow}\n")).unwrap();
    assert_eq!(config.egress.allow.len(), 5);
    assert!(!config.egress.policy().is_closed());
    assert!(parse(MINIMAL).unwrap().egress.policy().is_closed());
    let many = |count| format!("{MINIMAL}[egress]\nallow = {:?}\n", vec!["10.0.0.1:1"; count]);
    assert!(parse(&many(1024)).is_ok());
    assert!(parse(&many(1025)).unwrap_err().contains("at most 1024"));
    let error = parse(&format!("{MINIMAL}[egress]\nallow = [\"a.com\"]\n")).unwrap_err();
    assert!(error.starts_with("f/thaw.toml:9:10: `a.com` is not a destination"), "{error}");
}

#[test]
fn files_stay_in_their_directory() {
    assert!(
        broken("port", "files = [\"../x\"]\nport")
            .contains("does not lie in the function's directory")
    );
    assert!(
        broken("port", "files = [{ from = \"x\", to = \"y\" }]\nport").contains("absolute path")
    );
    assert!(
        broken("port", "files = [{ from = \"x\", too = \"/y\" }]\nport")
            .contains("did you mean `to`?")
    );
}

#[test]
fn the_entry_point_can_be_chosen() {
    let config = parse(MINIMAL).unwrap();
    assert_eq!((config.entry.kind, config.entry.freeze), (EntryKind::Http, FreezeAt::Wait));
    let with = |entry: &str| parse(&format!("{MINIMAL}[entry]\n{entry}\n"));
    let config = with("freeze = \"program\"").unwrap();
    assert_eq!(config.entry.freeze, FreezeAt::Program);
    let config = with("freeze = { signal = \"SIGUSR2\" }").unwrap();
    assert_eq!(config.entry.freeze.signal_number(), 12);
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<FunctionConfig>(&json).unwrap(), config);

    let error = with("freeze = \"now\"").unwrap_err();
    assert!(error.starts_with("f/thaw.toml:9:10: `now` does not freeze a program;"), "{error}");
    let error = with("freeze = { signal = \"SIGKILL\" }").unwrap_err();
    assert!(error.contains("unknown variant `SIGKILL`"), "{error}");
    let error = with("kind = \"ftp\"").unwrap_err();
    assert!(error.contains("unknown variant `ftp`"), "{error}");
}

#[test]
fn each_kind_of_entry_has_what_it_needs() {
    let with = |from: &str, to: &str, kind: &str| {
        parse(&format!("{}[entry]\nkind = \"{kind}\"\n", MINIMAL.replacen(from, to, 1)))
    };
    let listen = "listen = \"127.0.0.1:9000\"\nport";
    for kind in ["tcp", "udp"] {
        assert!(with("port", listen, kind).is_ok());
        let error = with("port", "port", kind).unwrap_err();
        assert!(error.starts_with("f/thaw.toml:9:1: clients of kind"), "{error}");
    }
    assert_eq!(with("port = 8000\n", "", "stdin").unwrap().port_number(), 0);
    let error = with("port", "port", "stdin").unwrap_err();
    assert!(error.starts_with("f/thaw.toml:4:1: a program that reads its request"), "{error}");
    let error = with("port = 8000", "isolation = \"instance\"", "stdin").unwrap_err();
    assert!(error.starts_with("f/thaw.toml:4:1: a program reads one request"), "{error}");
    assert!(broken("port = 8000\n", "").contains("missing `port`"));
}

#[test]
fn training_requests_are_checked() {
    let with = |requests: &str| parse(&format!("{MINIMAL}[train]\nrequests = [{requests}]\n"));
    let config = with(
        "{ path = \"/a?b=c\", repeat = 20 }, \
         { body = \"x\", headers = { content-type = \"text/plain\" }, expect = 201 }, \
         { method = \"PUT\", file = \"a/b.jpg\" }",
    )
    .unwrap();
    let train = config.train.clone().unwrap();
    assert_eq!(train.total(), 22);
    let methods: Vec<_> = train.requests.iter().map(|request| request.method()).collect();
    assert_eq!(methods, ["GET", "POST", "PUT"]);
    assert!(train.requests[0].accepts(204) && !train.requests[0].accepts(404));
    assert!(train.requests[1].accepts(201) && !train.requests[1].accepts(200));
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<FunctionConfig>(&json).unwrap(), config);

    for (wrong, message) in [
        ("", "training needs a request"),
        ("{ path = \"a\" }", "`a` is not a path of a request"),
        ("{ path = \"/a b\" }", "`/a b` is not a path of a request"),
        ("{ method = \"G T\" }", "`G T` is not an HTTP method"),
        ("{ headers = { \"a b\" = \"c\" } }", "`a b` cannot name a header"),
        ("{ headers = { a = \"c\\n\" } }", "cannot be the value of a header"),
        ("{ expect = 99 }", "`99` is not a status"),
        ("{ repeat = 0 }", "0 is not a number from 1 to 4294967295"),
        ("{ paht = \"/\" }", "did you mean `path`?"),
        ("{ body = \"x\", file = \"y\" }", "`body` and `file` exclude each other"),
        ("{ file = \"../y\" }", "does not lie in the function's directory"),
    ] {
        let error = with(wrong).unwrap_err();
        assert!(error.starts_with("f/thaw.toml:9:") && error.contains(message), "{error}");
    }
    let stdin = MINIMAL.replace("port = 8000\n", "");
    let stdin = format!("{stdin}[entry]\nkind = \"stdin\"\n[train]\nrequests = [{{}}]\n");
    assert!(parse(&stdin).unwrap_err().contains("which kind = \"stdin\" does not answer"));
    let asked = "[entry]\nfreeze = \"program\"\n[train]\nrequests = [{}]\n";
    let error = parse(&format!("{MINIMAL}{asked}")).unwrap_err();
    assert!(error.contains("[train] begins when the program waits"), "{error}");
}

#[test]
fn instances_that_stay_can_be_asked_whether_they_are_well() {
    let with = |isolation: &str, liveness: &str| {
        let text = MINIMAL.replace("port = 8000\n", &format!("port = 8000\n{isolation}"));
        parse(&format!("{text}[liveness]\n{liveness}"))
    };
    let stays = "isolation = \"instance\"\n";
    let config = with(stays, "path = \"/healthz?deep=1\"").unwrap();
    let liveness = config.liveness.as_ref().unwrap();
    assert_eq!((liveness.period, liveness.timeout), (TimeSpan::seconds(10), TimeSpan::seconds(1)));
    assert_eq!(
        (liveness.path.as_ref().unwrap().0.as_str(), liveness.failures),
        ("/healthz?deep=1", 3)
    );
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<FunctionConfig>(&json).unwrap(), config);
    let edges = "path = \"/\"\nperiod = \"1h\"\ntimeout = \"1m\"\nfailures = 100";
    assert!(with(stays, edges).is_ok());

    for (wrong, complaint) in [
        ("", "needs a `path`, unless it is of `kind = \"tcp\"`"),
        ("kind = \"tcp\"\npath = \"/\"", "asks for no `path`"),
        ("kind = \"dns\"", "unknown variant `dns`"),
        ("kind = \"grpc\"", "asks by gRPC, which needs HTTP/2"),
        (
            "path = \"/\"\nservice = \"s\"",
            "only a probe of `kind = \"grpc\"` asks about a `service`",
        ),
        ("path = \"healthz\"", "is not a path of a request"),
        ("path = \"/a b\"", "is not a path of a request"),
        ("path = \"/\"\nperiod = \"999ms\"", "probes are sent every 1s to 1h"),
        ("path = \"/\"\nperiod = \"61m\"", "probes are sent every 1s to 1h"),
        ("path = \"/\"\ntimeout = \"99ms\"", "may take from 100ms to `period`, 10s"),
        ("path = \"/\"\ntimeout = \"11s\"", "may take from 100ms to `period`, 10s"),
        ("path = \"/\"\nperiod = \"5m\"\ntimeout = \"61s\"", "and 1m at most"),
        ("path = \"/\"\nfailures = 0", "from 1 to 100"),
        ("path = \"/\"\nfailures = 101", "from 1 to 100"),
        ("path = \"/\"\nperoid = \"2s\"", "did you mean `period`?"),
    ] {
        let error = with(stays, wrong).expect_err(wrong);
        assert!(error.contains(complaint), "{wrong}: {error}");
    }
    let long = format!("path = \"/{}\"", "x".repeat(1024));
    assert!(with(stays, &long).unwrap_err().contains("longer than 1024 bytes"));
    let error = with("", "path = \"/\"").unwrap_err();
    assert!(error.contains("[liveness] is for isolation = \"instance\""), "{error}");
    let tcp = "isolation = \"instance\"\nlisten = \"127.0.0.1:9000\"\n[entry]\nkind = \"tcp\"\n";
    let error = with(tcp, "path = \"/\"").unwrap_err();
    assert!(error.contains("which kind = \"tcp\" does not answer"), "{error}");
    for serves in [stays, tcp] {
        assert!(with(serves, "kind = \"tcp\"\nperiod = \"2s\"").is_ok());
    }
    let h2c = "isolation = \"instance\"\nprotocol = \"h2c\"\n";
    for liveness in ["kind = \"grpc\"", "kind = \"grpc\"\nservice = \"a.B\"", "path = \"/\""] {
        assert!(with(h2c, liveness).is_ok(), "{liveness}");
    }
    let error = with(h2c, "kind = \"grpc\"\npath = \"/\"").unwrap_err();
    assert!(error.contains("`kind = \"grpc\"` asks for no `path`"), "{error}");
    let long = format!("kind = \"grpc\"\nservice = \"{}\"", "s".repeat(256));
    assert!(with(h2c, &long).unwrap_err().contains("longer than 255 bytes"));
}

#[test]
fn http2_is_for_functions_whose_requests_are_routed() {
    let with =
        |keys: &str| parse(&MINIMAL.replace("port = 8000\n", &format!("port = 8000\n{keys}\n")));
    let config = with("protocol = \"h2c\"").unwrap();
    assert_eq!(config.protocol, Protocol::H2c);
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<FunctionConfig>(&json).unwrap(), config);
    // Images and stores of before know no such key.
    assert!(!serde_json::to_string(&with("").unwrap()).unwrap().contains("protocol"));
    for (keys, complaint) in [
        ("protocol = \"h2\"", "unknown variant `h2`"),
        (
            "protocol = \"h2c\"\nlisten = \"127.0.0.1:9000\"\nentry = { kind = \"tcp\" }",
            "which kind = \"tcp\" does not speak",
        ),
        (
            "protocol = \"h2c\"\nlisten = \"127.0.0.1:9000\"\nentry = { connections = \"handover\" }",
            "hands no connection over",
        ),
    ] {
        let error = with(keys).expect_err(keys);
        assert!(error.contains(complaint), "{keys}: {error}");
    }
}

#[test]
fn builds_have_settings_that_make_sense() {
    let with = |build: &str| parse(&format!("{MINIMAL}[build]\n{build}"));
    let build = with("command = [\"make\"]").unwrap().build.unwrap();
    assert_eq!(build.timeout, TimeSpan::seconds(1800));
    assert!(build.egress.is_empty());
    for (wrong, complaint) in [
        ("", "nothing to do"),
        ("command = []", "a command needs a program"),
        ("command = [\"make\"]\ntimeout = \"0s\"", "no build is done in no time"),
        ("command = [\"make\"]\nmemory = \"1MiB\"", "too little memory"),
        ("command = [\"a\\u0000b\"]", "NUL"),
        ("command = [\"make\"]\negress = [\"nowhere\"]", "egress"),
    ] {
        let error = with(wrong).expect_err(wrong);
        assert!(error.contains(complaint) || complaint == "egress", "{wrong}: {error}");
    }
    // pip has something to do without a command.
    let text = format!("{MINIMAL}requirements = \"r.txt\"\n[build]\negress = [\"pypi.org:443\"]");
    assert!(parse(&text).unwrap().build.unwrap().command.is_empty());
}

#[test]
fn domains_and_private_files_are_checked() {
    let with = |sharing: &str| parse(&format!("{MINIMAL}[sharing]\n{sharing}"));
    let config = with("domain = \"a\"\nprivate = [\"secrets\"]").unwrap();
    assert_eq!(config.domain().name().unwrap().as_str(), "a");
    assert_eq!(parse(MINIMAL).unwrap().domain(), thaw_store::Domain::shared());
    assert_ne!(config.private_domain(), config.domain());
    for wrong in [
        "domain = \"\"",
        "domain = \"../a\"",
        "domain = \"private.a\"",
        "private = [\"/etc\"]",
        "private = [\"a/../b\"]",
        "private = [\"\"]",
        "privat = []",
    ] {
        with(wrong).expect_err(wrong);
    }
    // The longest name of a function has a domain for its private files.
    let long = "a".repeat(63);
    let config = parse(&MINIMAL.replacen("hello", &long, 1)).unwrap();
    assert!(config.private_domain().name().is_some());
}

#[test]
fn a_configuration_is_read_from_its_directory_only() {
    let all = tempfile::tempdir().unwrap();
    let directory = all.path().join("function");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(all.path().join("elsewhere.toml"), MINIMAL).unwrap();
    let file = directory.join(CONFIG_FILE);
    std::os::unix::fs::symlink("../elsewhere.toml", &file).unwrap();
    assert!(matches!(FunctionConfig::load(&directory), Err(ConfigError::Read { .. })));
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, vec![b'#'; 2 << 20]).unwrap();
    assert!(matches!(FunctionConfig::load(&directory), Err(ConfigError::Read { .. })));
    std::fs::write(&file, MINIMAL).unwrap();
    FunctionConfig::load(&directory).unwrap();
}

#[test]
fn whole_connections_are_for_http_at_an_address_of_its_own() {
    let with = |keys: &str| parse(&MINIMAL.replacen("port = 8000", keys, 1));
    let listen = "port = 8000\nlisten = \"127.0.0.1:9000\"";
    let handover = "entry = { connections = \"handover\" }";
    let config = with(&format!("{listen}\n{handover}")).unwrap();
    assert_eq!(config.entry.connections, Connections::Handover);
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<FunctionConfig>(&json).unwrap(), config);
    assert_eq!(parse(MINIMAL).unwrap().entry.connections, Connections::Routed);
    let error = with(&format!("port = 8000\n{handover}")).unwrap_err();
    assert!(error.contains("set `listen`"), "{error}");
    let tcp = "entry = { kind = \"tcp\", connections = \"handover\" }";
    let error = with(&format!("{listen}\n{tcp}")).unwrap_err();
    assert!(error.contains("kind = \"tcp\" leaves no choice"), "{error}");
}

/// It was written to the store with an empty command, which could not be read again.
#[test]
fn a_sandbox_has_no_program_and_its_record_can_be_read() {
    const SANDBOX: &str = "name = \"box\"\nisolation = \"instance\"\n[entry]\nkind = \
                           \"sandbox\"\n[runtime]\nkind = \"python3\"\n";
    let config = parse(SANDBOX).unwrap();
    assert!(config.command.is_empty() && config.port.is_none());
    let record = serde_json::to_value(&config).unwrap();
    assert_eq!(serde_json::from_value::<FunctionConfig>(record).unwrap(), config);
    for (from, to, reason) in [
        ("name", "command = [\"sh\"]\nname", "has no program of its own"),
        ("name", "port = 80\nname", "listens nowhere"),
        ("name", "listen = \"127.0.0.1:9\"\nname", "listens nowhere"),
        ("isolation = \"instance\"\n", "", "set isolation = \"instance\""),
        ("\"python3\"", "\"binary\"", "give another `kind`"),
        ("[runtime]", "freeze = \"program\"\n[runtime]", "remove `freeze`"),
        ("[runtime]", "[limits]\nprocesses = 1\n[runtime]", "raise `processes`"),
    ] {
        let error = parse(&SANDBOX.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
