//! The command as a shell sees it: exit codes, and where messages go. Nothing
//! here needs a sandbox.

use std::path::Path;
use std::process::{Command, Output};

/// Runs `thaw` over an empty state directory.
fn thaw(home: &Path, arguments: &[&str]) -> Output {
    thaw_e2e::thaw().args(arguments).env("THAW_HOME", home).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn misuse_is_exit_code_2() {
    let home = tempfile::tempdir().unwrap();
    for arguments in [
        &[][..],
        &["fly"],
        &["run"],
        &["run", "--rootfs", "/"],
        &["run", "--", "ls"],
        &["run", "--rootfs", "/", "--memory", "7MiB", "--", "ls"],
        &["run", "--rootfs", "/", "--memory", "12", "--", "ls"],
        &["run", "--rootfs", "/", "--user", "root", "--", "ls"],
        &["serve", "--listen", "here"],
        &["serve", "--no-working-set", "--populate", "both"],
        &["invoke", "f", "--header", "nothing"],
        &["bench", "boot"],
        &["bench", "boot", "f", "-n", "0"],
        &["bench", "boot", "f", "--path", "x"],
        &["bench", "check", "boot.json"],
        &["bench", "check", "--bounds", "bounds.toml"],
        &["logs", "f", "--admin", "127.0.0.1:1"],
        &["logs", "Not A Name"],
        &["completions", "no-shell"],
        &["man", "fly"],
        &["bench", "worker", "nobody"],
    ] {
        let output = thaw(home.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{arguments:?}");
        assert_ne!(stderr(&output), "", "{arguments:?}");
    }
}

#[test]
fn a_port_alone_is_an_address_and_what_is_none_is_explained() {
    let home = tempfile::tempdir().unwrap();
    for verb in [
        &["serve", "--listen"][..],
        &["serve", "--admin"],
        &["serve", "--dashboard"],
        &["serve", "--e2b"],
        &["dev", "--listen"],
        &["sandbox", "port", "box", "1", "--listen"],
    ] {
        let output = thaw(home.path(), &[verb, &[":80"]].concat());
        assert_eq!(output.status.code(), Some(2), "{verb:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("or a port alone"), "{verb:?}: {}", stderr(&output));
    }
    // It is understood, and there is no daemon.
    let output = thaw(home.path(), &["sandbox", "port", "box", "1", "--listen", "8200"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
}

#[test]
fn too_little_memory_is_refused_before_anything_is_made() {
    let home = tempfile::tempdir().unwrap();
    for arguments in [
        &["run", "--rootfs", "/", "--memory", "1KiB", "--", "ls"][..],
        &["run", "--name", "box", "--memory", "1KiB", "debian:12"],
    ] {
        let output = thaw(home.path(), arguments);
        let expected = "thaw: 1KiB is too little memory for a sandbox; give at least 8MiB\n";
        assert_eq!(stderr(&output), expected, "{arguments:?}");
    }
}

#[test]
fn numbers_that_are_none_are_explained_with_what_to_write() {
    let home = tempfile::tempdir().unwrap();
    let run = ["run", "--rootfs", "/", "--cpus"];
    for (arguments, way_out) in [
        (&[&run[..], &["0", "--", "ls"]].concat()[..], "a whole number from 1"),
        (&[&run[..], &["1.5", "--", "ls"]].concat(), "a whole number from 1"),
        (&["fork", "1", "-n", "0"], "a whole number from 1"),
        (&["bench", "boot", "f", "-n", "0"], "a whole number from 1"),
        (&["sandbox", "port", "box", "0"], "from 1 to 65535"),
        (&["sandbox", "port", "box", "99999"], "from 1 to 65535"),
        (&["run"], "`thaw run debian:12 -- ls`"),
    ] {
        let output = thaw(home.path(), arguments);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(way_out), "{arguments:?}: {message}");
    }
}

#[test]
fn a_file_that_is_no_archive_is_quoted_without_its_control_characters() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("file");
    std::fs::write(&file, "one\ntwo\u{1b}[2J\n".repeat(100)).unwrap();
    let output = thaw(home.path(), &["import", file.to_str().unwrap(), "app"]);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.contains("\\n") && !message.contains('\u{1b}'), "{message}");
}

#[test]
fn failure_is_exit_code_1_and_one_line_that_says_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let missing = home.path().join("missing");
    for (arguments, way_out) in [
        (&["ps"][..], "thaw serve"),
        (&["invoke", "f"], "thaw serve"),
        (&["logs", "-f", "f"], "thaw serve"),
        (&["logs", "f"], "no function is named `f`; `thaw list` shows"),
        (&["inspect", "f"], "no function f"),
        (&["remove", "f"], "no function f"),
        (&["bench", "boot", "f"], "no function f"),
        (&["build", missing.to_str().unwrap()], "thaw.toml"),
        (&["run", "--name", "x", "app"], "thaw serve"),
        (&["run", "--rootfs", "nothing-stored", "--", "ls"], "no rootfs nothing-stored"),
        (&["run", "--rootfs", missing.to_str().unwrap(), "--", "ls"], "name another directory"),
    ] {
        let output = thaw(home.path(), arguments);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{arguments:?}: {message}");
        assert!(
            message.starts_with("thaw: ") && message.contains(way_out),
            "{arguments:?}: {message}"
        );
        assert_eq!(stdout(&output), "", "{arguments:?}");
    }
}

#[test]
fn options_that_a_sandbox_of_the_daemon_cannot_have_are_refused_with_a_way_out() {
    let home = tempfile::tempdir().unwrap();
    for (options, way_out) in [
        (&["--volume", ".:/work", "app"][..], "`thaw sandbox cp`"),
        (&["--volume", "data:data", "app"], "absolute path"),
        (&["--bind", ".:/work", "app"], "`thaw sandbox cp`"),
        (&["--tmpfs", "/tmp", "app"], "in memory"),
        (&["--processes", "3", "app"], "`thaw sandbox create`"),
        (&["--cpu-time", "3s", "app"], "`thaw sandbox create`"),
        (&["--weak-limits", "app"], "`thaw serve`"),
        (&["--hostname", "box", "app"], "leave it out"),
        (&["--memory", "0B", "app"], "leave it out"),
        (&["--detach", "--publish", "80", "app"], "`thaw sandbox port`"),
        (&["./prog"], "thaw run --name x debian:12"),
        (&["--rootfs", "/", "--", "prog"], "thaw run --name x debian:12"),
    ] {
        let output = thaw(home.path(), &[&["run", "--name", "x"], options].concat());
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{options:?}: {message}");
        assert!(message.contains(way_out), "{options:?}: {message}");
    }
}

#[test]
fn a_wrong_configuration_is_shown_with_its_place() {
    let home = tempfile::tempdir().unwrap();
    let function = tempfile::tempdir().unwrap();
    std::fs::write(function.path().join("thaw.toml"), "name = \"f\"\nprot = 1\n").unwrap();
    let output = thaw(home.path(), &["build", function.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    assert!(
        message.contains("thaw.toml:2:1: unknown key `prot`; did you mean `port`?"),
        "{message}"
    );
}

#[test]
fn a_failing_build_command_is_shown_with_its_output() {
    let home = tempfile::tempdir().unwrap();
    let function = tempfile::tempdir().unwrap();
    let text = "name = \"f\"\ncommand = [\"/app/f\"]\nport = 1\n[runtime]\nkind = \"binary\"\n\
                [build]\ncommand = [\"sh\", \"-c\", \"echo out; echo err >&2; exit 3\"]\n";
    std::fs::write(function.path().join("thaw.toml"), text).unwrap();
    let output = thaw(home.path(), &["build", function.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    for line in ["build | out", "build | err", "it ended with exit code 3"] {
        assert!(message.contains(line), "{line} is missing in {message}");
    }
    let quiet = thaw(home.path(), &["build", "-q", function.path().to_str().unwrap()]);
    let message = stderr(&quiet);
    assert!(message.starts_with("build | out\nbuild | err\nthaw: "), "{message}");
}

#[test]
fn a_build_command_that_lacks_a_package_is_told_when_packages_are_installed() {
    let home = tempfile::tempdir().unwrap();
    let function = tempfile::tempdir().unwrap();
    let text = "name = \"f\"\ncommand = [\"python3\", \"f.py\"]\nport = 1\n\
                [runtime]\nkind = \"python3\"\nrequirements = \"requirements.txt\"\n\
                [build]\ncommand = [\"python3\", \"-c\", \"import no_such_package\"]\n";
    std::fs::write(function.path().join("thaw.toml"), text).unwrap();
    std::fs::write(function.path().join("requirements.txt"), "no-such-package\n").unwrap();
    let output = thaw(home.path(), &["build", function.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    assert!(message.contains("It runs before `pip` installs"), "{message}");
}

#[test]
fn a_home_that_is_not_there_is_named_and_not_made() {
    let directory = tempfile::tempdir().unwrap();
    let home = directory.path().join("typo");
    for arguments in
        [&["list"][..], &["images"], &["df"], &["gc"], &["inspect", "f"], &["logs", "f"]]
    {
        let output = thaw(&home, arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let message = stderr(&output);
        assert!(message.contains("there is no Thaw home in"), "{arguments:?}: {message}");
        assert!(!home.exists(), "{arguments:?}");
    }
}

#[test]
fn a_secret_that_looks_like_a_slip_is_set_with_a_remark() {
    let home = tempfile::tempdir().unwrap();
    let output = thaw(home.path(), &["secret", "set", "f", "key", "--file", "/dev/null"]);
    assert_eq!(output.status.code(), Some(0));
    let message = stderr(&output);
    assert!(message.contains("there is no function f yet"), "{message}");
    assert!(message.contains("the value of key is empty"), "{message}");
    let output = thaw(home.path(), &["secret", "list", "f"]);
    assert!(stdout(&output).contains("key"));
}

#[test]
fn an_empty_store_is_shown_empty() {
    let home = tempfile::tempdir().unwrap();
    let output = thaw(home.path(), &["images", "--json"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "[]\n"));
    let output = thaw(home.path(), &["gc"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "nothing to remove\n"));
}

#[test]
fn a_directory_is_imported_under_a_name() {
    let home = tempfile::tempdir().unwrap();
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("file"), "content").unwrap();
    let path = directory.path().to_str().unwrap();
    let output = thaw(home.path(), &["import", path, "base"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).ends_with("as base\n"), "{}", stdout(&output));
    let output = thaw(home.path(), &["gc"]);
    assert_eq!(stdout(&output), "nothing to remove\n");
    let output = thaw(home.path(), &["import", path, "not/a/name"]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn the_filter_is_printed_with_reasons() {
    let home = tempfile::tempdir().unwrap();
    let text = stdout(&thaw(home.path(), &["doctor", "--filter"]));
    assert!(text.lines().any(|line| line.starts_with("mmap ")), "{text}");
    let json = stdout(&thaw(home.path(), &["doctor", "--filter", "--json"]));
    let calls: Vec<serde_json::Value> = serde_json::from_str(&json).unwrap();
    assert_eq!(calls.len() + 1, text.lines().count());
    assert!(calls.iter().all(|call| call["reason"].as_str().is_some_and(|r| !r.is_empty())));
}

#[test]
fn workers_of_benchmarks_are_not_shown() {
    let home = tempfile::tempdir().unwrap();
    assert!(!stdout(&thaw(home.path(), &["bench", "--help"])).contains("worker"));
    // Without orders it ends at once, with what it says when it begins.
    let output = thaw(home.path(), &["bench", "worker", "calls"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "ready\n"));
}

#[test]
fn manual_pages_are_written_to_a_directory() {
    let home = tempfile::tempdir().unwrap();
    let pages = home.path().join("man1");
    let output = thaw(home.path(), &["man", "--output", pages.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let page = std::fs::read_to_string(pages.join("thaw-run.1")).unwrap();
    assert_eq!(stdout(&thaw(home.path(), &["man", "run"])), page);
}

#[test]
fn completions_are_valid_bash() {
    let home = tempfile::tempdir().unwrap();
    let script = stdout(&thaw(home.path(), &["completions", "bash"]));
    let path = home.path().join("thaw");
    std::fs::write(&path, script).unwrap();
    let complete = "source $0; COMP_WORDS=(thaw insp); COMP_CWORD=1; _thaw thaw insp thaw; echo ${COMPREPLY[@]}";
    let output = Command::new("bash").arg("-c").arg(complete).arg(&path).output().unwrap();
    assert_eq!(stdout(&output), "inspect\n", "{}", stderr(&output));
}

#[test]
fn every_verb_explains_itself() {
    let home = tempfile::tempdir().unwrap();
    for verb in [
        "run",
        "build",
        "serve",
        "invoke",
        "ps",
        "images",
        "inspect",
        "logs",
        "import",
        "remove",
        "gc",
        "doctor",
        "bench",
        "completions",
        "man",
    ] {
        let output = thaw(home.path(), &[verb, "--help"]);
        assert_eq!(output.status.code(), Some(0), "{verb}");
        assert!(stdout(&output).contains("Example"), "{verb}");
    }
}

#[test]
fn each_bound_that_is_missed_is_one_sentence() {
    let home = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = home.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_string_lossy().into_owned()
    };
    let bounds = file(
        "bounds.toml",
        "[[call]]\nname = \"stat\"\nratio = 0.5\n[[http]]\nfunction = \"f\"\nratio = 0.9\n",
    );
    let check = |report: &str| {
        let report = file("syscalls.json", report);
        thaw(home.path(), &["bench", "check", "--bounds", &bounds, &report])
    };
    let calls = |stat: f64, f: f64| {
        format!(
            r#"{{ "calls": [{{ "name": "stat", "ratio_p50": {stat} }}],
                "http": [{{ "function": "f", "ratio": {f} }}] }}"#
        )
    };
    let kept = check(&calls(0.4, 0.95));
    assert_eq!(kept.status.code(), Some(0), "{}", stderr(&kept));
    assert_eq!(stderr(&kept), "");
    assert_eq!(stdout(&kept).matches("met").count(), 2, "{}", stdout(&kept));
    let missed = check(&calls(0.6, 0.95));
    assert_eq!(missed.status.code(), Some(1));
    let expected = "time of the system call `stat` by the native one is 0.600, and at most 0.5 is \
                    allowed.\nthaw: 1 of 2 bounds are missed\n";
    assert_eq!(stderr(&missed), expected);
    let nothing = check("{}");
    assert_eq!(nothing.status.code(), Some(1));
    assert_eq!(stderr(&nothing).lines().count(), 3, "{}", stderr(&nothing));
}
