//! The programs that draw from what a copy has, one for each language, and how an interpreter
//! is made to load them.

use super::super::freeze::Frozen;
use super::jar;
use std::borrow::Cow;
use std::time::Duration;
use thaw_home::config::{EntryKind, FreezeAt, RuntimeKind};
use thaw_home::function::StoredFunction;

/// Where the probe lies in the sandbox.
pub(super) const DIRECTORY: &str = "/.thaw-probe";
/// A program that takes longer than this to its entry point, with its training, is not run again.
const RUN_MAX: Duration = Duration::from_secs(30);

/// How a language loads something before a program, and what to say of what was found.
pub(super) struct Probe {
    pub file: &'static str,
    pub contents: fn() -> Cow<'static, [u8]>,
    pub variable: &'static str,
    /// The variable's value, from what it was.
    pub value: fn(Option<&String>) -> String,
    /// How to draw other numbers in every copy.
    pub way_out: &'static str,
}

pub(super) const PYTHON: Probe = Probe {
    file: "sitecustomize.py",
    contents: || include_bytes!("probe.py").into(),
    variable: "PYTHONPATH",
    value: |old| match old {
        Some(old) => format!("{DIRECTORY}:{old}"),
        None => DIRECTORY.to_owned(),
    },
    way_out: "call reseed() of sdk/entrypoint/thaw.py where a request begins, or draw from `secrets` \
              or random.SystemRandom",
};

pub(super) const NODE: Probe = Probe {
    file: "probe.js",
    contents: || include_bytes!("probe.js").into(),
    variable: "NODE_OPTIONS",
    value: |old| behind(old, &format!("--require {DIRECTORY}/probe.js")),
    way_out: "start it with `node --require ./thaw-random.js` (sdk/entrypoint/thaw-random.js), or draw from \
              crypto.randomInt",
};

pub(super) const RUBY: Probe = Probe {
    file: "probe.rb",
    contents: || include_bytes!("probe.rb").into(),
    variable: "RUBYOPT",
    value: |old| behind(old, &format!("-r{DIRECTORY}/probe.rb")),
    way_out: "call Thaw.reseed of sdk/entrypoint/thaw.rb where a request begins, or draw from SecureRandom",
};

pub(super) const JAVA: Probe = Probe {
    file: "probe.jar",
    contents: || jar::of_the_probe().into(),
    variable: "JAVA_TOOL_OPTIONS",
    value: |old| behind(old, &format!("-javaagent:{DIRECTORY}/probe.jar")),
    way_out: "call Thaw.reseed of sdk/entrypoint/Thaw.java with your generators where a request begins, \
              or draw from a SecureRandom",
};

/// An option behind those that a variable has.
fn behind(old: Option<&String>, option: &str) -> String {
    let old = old.map_or_else(String::new, |old| format!("{old} "));
    format!("{old}{option}")
}

/// The probe of a language, if there is one.
pub(super) fn of_language(kind: RuntimeKind) -> Option<&'static Probe> {
    match kind {
        RuntimeKind::Python3 => Some(&PYTHON),
        RuntimeKind::Node => Some(&NODE),
        RuntimeKind::Ruby => Some(&RUBY),
        RuntimeKind::Java => Some(&JAVA),
        _ => None,
    }
}

/// Why a program must not be run a second time, or why its copies cannot be asked.
pub(super) fn obstacle(function: &StoredFunction) -> Option<&'static str> {
    let config = &function.config;
    if matches!(config.entry.freeze, FreezeAt::Signal(_)) {
        Some("it waits for a signal to be frozen")
    } else if !matches!(config.entry.kind, EntryKind::Http | EntryKind::Tcp | EntryKind::Udp) {
        Some("its copies end without a client")
    } else {
        None
    }
}

/// The same of one that was frozen once.
pub(super) fn obstacle_of_frozen(frozen: &Frozen) -> Option<&'static str> {
    let training = frozen.training.as_ref().map_or(Duration::ZERO, |training| training.duration);
    (frozen.start + training > RUN_MAX).then_some("it takes longer than 30 s to its freeze")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_keeps_what_it_had() {
        let old = "/app/site".to_owned();
        assert_eq!((PYTHON.value)(Some(&old)), "/.thaw-probe:/app/site");
        let old = "--max-old-space-size=64".to_owned();
        assert_eq!((NODE.value)(Some(&old)), format!("{old} --require /.thaw-probe/probe.js"));
        assert_eq!((RUBY.value)(None), "-r/.thaw-probe/probe.rb");
        assert_eq!((JAVA.value)(None), "-javaagent:/.thaw-probe/probe.jar");
    }
}
