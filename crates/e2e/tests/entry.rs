//! Entry points: what freezes a program, and how requests reach its copies.

use std::fs;
use thaw_e2e::{Daemon, DaemonOptions, Function, built_home, get};

/// A daemon that serves one function of `tests/guest/functions`.
fn serve(name: &'static str) -> Daemon {
    let home = built_home(&format!("entry-{name}"), &[Function::Directory(name)]);
    Daemon::start(&home, &DaemonOptions::default())
}

#[test]
fn training_leaves_what_was_learnt_and_no_connection() {
    let daemon = serve("trained");
    for _ in 0..2 {
        let answer = get(daemon.gateway(), "trained", "/").text();
        // Besides the standard streams: the listener, this connection, the directory.
        let expected = "request 7, open 0,1,2,3,4,5, read ['a body', 'a file']\n";
        assert_eq!(answer, expected);
    }
}

#[test]
fn a_wrong_answer_ends_the_training_and_the_build() {
    let work = tempfile::tempdir().expect("a temporary directory");
    let source = thaw_e2e::repository().join("tests/guest/functions/trained");
    for file in ["app.py", "body.txt", "thaw.toml"] {
        fs::copy(source.join(file), work.path().join(file)).expect("a copy");
    }
    let toml = fs::read_to_string(source.join("thaw.toml")).expect("thaw.toml");
    let build = |text: String| {
        fs::write(work.path().join("thaw.toml"), text).expect("thaw.toml");
        let mut thaw = thaw_e2e::thaw();
        thaw.env("THAW_HOME", work.path().join("home")).arg("build").arg(work.path());
        let outcome = thaw_e2e::run(&mut thaw);
        assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
        outcome.stderr
    };
    let said = build(toml.replace("expect = 404", "expect = 200"));
    let reason = "request 2 of [train] (GET /404) was answered with 404, not 200: \"request 4,";
    assert!(said.contains(reason), "{said}");
    let said = build(toml.replace("body.txt", "missing.txt"));
    assert!(said.contains("missing.txt") && said.contains("correct `file` in [train]"), "{said}");
}

#[test]
fn a_signal_freezes_where_it_is_sent() {
    let daemon = serve("signalled");
    for _ in 0..2 {
        let answer = get(daemon.gateway(), "signalled", "/").text();
        assert_eq!(answer, "copy 0 has become copy 1\n");
    }
}
