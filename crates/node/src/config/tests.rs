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
        env = { A = "b" }
        limits = { memory = "64MiB", cpu = 2, cpu_time = "1m", timeout = "1.5s", concurrency = 8, keep_alive = "10s", instances = 3, queue = "250ms" }
        build = { command = ["make"] }
        egress = { allow = [] }
        "#,
    )
    .unwrap();
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
        broken("port", "ready = 1\nport").contains("unknown key `ready`; the keys here are name, ")
    );
    assert!(broken("port", "train = 1\nport").contains("unknown key `train`"));
}

#[test]
fn wrong_values_name_the_place() {
    assert!(
        broken("\"hello\"", "\"He llo\"")
            .starts_with("f/thaw.toml:2:8: `He llo` is not a function name;")
    );
    assert!(broken("8000", "0").starts_with("f/thaw.toml:4:8: "));
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
    assert!(!egress_policy(&config.egress.allow).is_closed());
    assert!(egress_policy(&parse(MINIMAL).unwrap().egress.allow).is_closed());
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
