//! E2B's API: its SDKs as PyPI and npm have them, not changed, against a daemon.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, E2B_JS_SDK, E2B_SDK, Function, build_directory, built_home, free_port,
    js_module, python_with, repository, run, run_within, skip, thaw, wait_until,
};

/// The one for code, of which docs/e2b.md says that it works, too.
const INTERPRETER: &str = "e2b-code-interpreter==2.11.5";
/// The one for code.
const JS_INTERPRETER: &str = "@e2b/code-interpreter@2.8.0";
/// A key, and the SHA-256 hash of it.
const KEY: &str = "e2b_0123456789abcdef0123456789abcdef";
/// How long installing the SDK, and all that is done with it, may take.
const PATIENCE: Duration = Duration::from_secs(400);

/// What `base` is in the tests: some programs of this host.
const BOX: &str = r#"
name = "box"
isolation = "instance"
[entry]
kind = "sandbox"
[runtime]
kind = "python3"
programs = ["bash", "sh", "cat", "sleep", "id", "stty", "head", "tr", "wc", "ln", "mv", "rm"]
[limits]
instances = 50
"#;

/// A Python with the SDK. None if it cannot be had.
fn python() -> Option<PathBuf> {
    python_with(&[E2B_SDK])
}

fn hash_of(key: &str) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A home with the function, and with settings.
fn home(label: &str) -> PathBuf {
    let home = built_home(label, &[]);
    let directory = home.with_extension("box");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("thaw.toml"), BOX).unwrap();
    run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
    let settings = format!(
        "[templates]\nbase = \"box\"\n[[keys]]\nname = \"tests\"\nsha256 = \"{}\"\n",
        hash_of(KEY)
    );
    fs::write(home.join("e2b.toml"), settings).unwrap();
    home
}

fn options() -> DaemonOptions {
    DaemonOptions { arguments: ["--e2b", "127.0.0.1:0"].map(str::to_owned).into() }
}

/// Where E2B's API of a daemon is.
fn url(daemon: &Daemon) -> String {
    let announced = fs::read(daemon.home().join("daemon.json")).expect("a running daemon");
    let announced: Value = serde_json::from_slice(&announced).expect("JSON");
    format!("http://{}", announced["e2b"].as_str().expect("an address"))
}

/// Runs a script of `tests/e2b` with an SDK against a daemon; what it prints.
fn check(label: &str, program: &mut Command, script: &str) -> String {
    let home = home(label);
    let daemon = Daemon::start(&home, &options());
    let url = url(&daemon);
    program.arg(repository().join("tests/e2b").join(script));
    program.env("E2B_API_URL", &url).env("E2B_SANDBOX_URL", &url).env("E2B_API_KEY", KEY);
    let printed = run_within(PATIENCE, program, b"").success();
    wait_until("nothing is left of the sandboxes", || daemon.instances("box").is_empty());
    printed
}

#[test]
fn the_python_sdk_works_unmodified() {
    let Some(python) = python() else { return };
    let mut program = Command::new(python);
    program.env("PYTHONPYCACHEPREFIX", build_directory().join("pycache"));
    let printed = check("e2b-python", &mut program, "python_sdk.py");
    assert!(printed.lines().any(|line| line == "the_asynchronous_sdk_works"), "{printed}");
}

#[test]
fn the_javascript_sdk_works_unmodified() {
    let Some(module) = js_module(E2B_JS_SDK) else { return };
    let mut program = Command::new("node");
    let printed = check("e2b-js", program.env("E2B_SDK", module), "js_sdk.mjs");
    assert!(printed.lines().any(|line| line == "whatIsMissingSaysSo"), "{printed}");
}

/// A CA, and a certificate of it for `*.box.test` in the home's `tls`; the CA's certificate.
fn certificates(home: &Path) -> PathBuf {
    let place = home.join("tls");
    fs::create_dir_all(&place).unwrap();
    let openssl = |arguments: &str| {
        let mut command = Command::new("openssl");
        run(command.args(arguments.split(' ')).current_dir(&place)).success();
    };
    let names = "subjectAltName=DNS:*.box.test\nbasicConstraints=CA:FALSE\n";
    fs::write(place.join("names"), names).unwrap();
    let key = "-newkey rsa:2048 -nodes -keyout";
    openssl(&format!("req -x509 {key} ca.key -out ca.pem -days 2 -subj /CN=tests"));
    openssl(&format!("req {key} key.pem -out request -subj /CN=box.test"));
    openssl(
        "x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -out chain.pem -days 2 \
         -extfile names",
    );
    run(Command::new("chmod").arg("600").arg(place.join("key.pem"))).success();
    place.join("ca.pem")
}

#[test]
fn names_of_hosts_and_tls_lead_to_sandboxes() {
    let Some(python) = python() else { return };
    let home = home("e2b-domain");
    let ca = certificates(&home);
    let settings = fs::read_to_string(home.join("e2b.toml")).unwrap();
    let tls = "[[certificates]]\nchain = \"tls/chain.pem\"\nkey = \"tls/key.pem\"\n";
    let settings = format!("domain = \"box.test\"\n{settings}{tls}");
    fs::write(home.join("e2b.toml"), settings).unwrap();
    let daemon = Daemon::start(&home, &options());
    let url = url(&daemon);
    let port = url.rsplit(':').next().expect("a port");
    let mut program = Command::new(python);
    program.arg(repository().join("tests/e2b/python_domain.py"));
    program.env("PYTHONPYCACHEPREFIX", build_directory().join("pycache"));
    program.env("E2B_DOMAIN", "box.test").env("THAW_E2B_PORT", port).env("E2B_API_KEY", KEY);
    let printed = run_within(PATIENCE, program.env("SSL_CERT_FILE", ca), b"").success();
    assert_eq!(printed, "names and TLS work\n");
}

#[test]
fn certificates_that_are_of_no_use_are_said_at_the_start() {
    let home = home("e2b-certificates");
    let settings = fs::read_to_string(home.join("e2b.toml")).unwrap();
    let tls = "[[certificates]]\nchain = \"none.pem\"\nkey = \"none.key\"\n";
    fs::write(home.join("e2b.toml"), settings + tls).unwrap();
    let said = Daemon::try_start(&home, &options()).expect_err("it has no certificate");
    assert!(said.contains("none.pem"), "{said}");
}

/// The template takes minutes to build, and more than half a gigabyte.
#[test]
#[ignore = "installs matplotlib and pandas; `make runtimes` runs it"]
fn the_code_interpreter_works_unmodified() {
    let Some(python) = python() else { return };
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", INTERPRETER]);
    let installed = run_within(PATIENCE, &mut pip, b"");
    if installed.code != Some(0) {
        return skip(&format!("PyPI does not give {INTERPRETER}: {}", installed.stderr));
    }
    let home = built_home("e2b-interpreter", &[Function::Example("code-interpreter")]);
    let settings = format!(
        "[templates]\ncode-interpreter-v1 = \"code-interpreter\"\n[[keys]]\nname = \"tests\"\n\
         sha256 = \"{}\"\n",
        hash_of(KEY)
    );
    fs::write(home.join("e2b.toml"), settings).unwrap();
    let daemon = Daemon::start(&home, &options());
    let url = url(&daemon);
    let mut program = Command::new(python);
    program.arg(repository().join("tests/e2b/code_interpreter.py"));
    program.env("PYTHONPYCACHEPREFIX", build_directory().join("pycache"));
    program.env("E2B_API_URL", &url).env("E2B_SANDBOX_URL", &url).env("E2B_API_KEY", KEY);
    assert_eq!(run_within(PATIENCE, &mut program, b"").success(), "code runs\n");
    let Some(module) = js_module(JS_INTERPRETER) else { return };
    let mut program = Command::new("node");
    program.arg(repository().join("tests/e2b/code_interpreter.mjs"));
    program.env("E2B_API_URL", &url).env("E2B_SANDBOX_URL", &url).env("E2B_API_KEY", KEY);
    program.env("CODE_INTERPRETER", module);
    assert_eq!(run_within(PATIENCE, &mut program, b"").success(), "code runs\n");
}

/// All are tested by the SDKs, too, if the template has them.
#[test]
fn workers_of_the_code_interpreter_keep_state_and_outlive_errors_and_interrupts() {
    let example = repository().join("examples/code-interpreter");
    for (language, program) in [
        ("bash", "bash"),
        ("r", "Rscript"),
        ("java", "java"),
        ("javascript", "node"),
        ("typescript", "node"),
        ("python", "python3"),
    ] {
        if !is_in_path(program) {
            skip(&format!("{program} is not here"));
            continue;
        }
        if program == "node" && !example.join("build/node_modules/acorn").is_dir() {
            skip("the packages of the code interpreter are not installed");
            continue;
        }
        if language == "python" && !example.join("build/site/ipykernel").is_dir() {
            skip("the modules of the code interpreter are not installed");
            continue;
        }
        let mut worker = Command::new("python3");
        worker.arg(repository().join("tests/e2b/code_workers.py")).arg(&example).arg(language);
        worker.env("PYTHONDONTWRITEBYTECODE", "1");
        let printed = run_within(PATIENCE, &mut worker, b"").success();
        assert_eq!(printed, format!("{language} runs\n"));
    }
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Runs some lines of Python with the SDK; what they print.
fn python_lines(python: &Path, url: &str, lines: &str) -> String {
    let lines = format!("from e2b import Sandbox\n{lines}");
    let mut command = Command::new(python);
    command.args(["-c", &lines]).env("PYTHONPYCACHEPREFIX", build_directory().join("pycache"));
    command.env("E2B_API_URL", url).env("E2B_SANDBOX_URL", url).env("E2B_API_KEY", KEY);
    run_within(PATIENCE, &mut command, b"").success().trim().to_owned()
}

#[test]
fn the_next_daemon_knows_the_sandboxes_their_owners_and_tokens() {
    let Some(python) = python() else { return };
    let home = home("e2b-restart");
    let address = format!("127.0.0.1:{}", free_port());
    let options = DaemonOptions { arguments: vec!["--e2b".to_owned(), address.clone()] };
    let mut daemon = Daemon::start(&home, &options);
    let url = format!("http://{address}");
    let made = python_lines(
        &python,
        &url,
        "box = Sandbox.create(envs={'A': 'kept'}, metadata={'m': 'n'})\n\
         box.files.write('/tmp/x', 'y')\nprint(box.sandbox_id, box._envd_access_token)",
    );
    let (id, token) = made.split_once(' ').expect("an id and a token");
    daemon.wait_until_kept("box");
    daemon.kill_and_await_next();
    let found = python_lines(
        &python,
        &url,
        &format!(
            "box = Sandbox.connect('{id}')\nassert box._envd_access_token == '{token}'\n\
             [info] = Sandbox.list().next_items()\nassert info.metadata == {{'m': 'n'}}\n\
             print(box.files.read('/tmp/x'), box.commands.run('echo $A').stdout, box.kill())"
        ),
    );
    assert_eq!(found.split_whitespace().collect::<Vec<_>>(), ["y", "kept", "True"]);
}

#[test]
fn sandboxes_stay_when_their_template_is_built_anew() {
    let Some(python) = python() else { return };
    let home = home("e2b-template");
    let daemon = Daemon::start(&home, &options());
    let url = url(&daemon);
    let made = python_lines(
        &python,
        &url,
        "for paused in (False, True):\n\
         \x20 box = Sandbox.create()\n\
         \x20 box.files.write('/tmp/x', 'kept')\n\
         \x20 if paused: box.pause()\n\
         \x20 print(box.sandbox_id)",
    );
    let directory = home.with_extension("box");
    fs::write(directory.join("new-file"), "new").unwrap();
    run(thaw().arg("build").arg(&directory).env("THAW_HOME", &home)).success();
    for id in made.lines() {
        let lines = format!(
            "box = Sandbox.connect('{id}')\nprint(box.files.read('/tmp/x'), box.commands.run('cat /tmp/x').stdout, box.kill())"
        );
        assert_eq!(python_lines(&python, &url, &lines), "kept kept True");
    }
    let made = "print(Sandbox.create().commands.run('cat /app/new-file').stdout)";
    assert_eq!(python_lines(&python, &url, made), "new");
}

#[test]
fn without_settings_the_daemon_says_what_is_missing() {
    let home = built_home("e2b-settings", &[]);
    for (settings, words) in [
        (None, "`thaw key create NAME` makes a key"),
        (Some("[templates]\n"), "no `[[keys]]`"),
        (Some("[[keys]]\nname = \"a\"\nsha256 = \"plain\"\n"), "64 hexadecimal digits"),
    ] {
        if let Some(settings) = settings {
            fs::write(home.join("e2b.toml"), settings).unwrap();
        }
        let said = Daemon::try_start(&home, &options()).expect_err("it has nobody to serve");
        assert!(said.contains(words), "{said}");
    }
}
