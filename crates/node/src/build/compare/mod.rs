//! Finding generators of random numbers that were seeded before the freeze: the program is
//! started again with a probe of its language, frozen, and thawed twice. Both copies draw from
//! the generators that the program has then. What is equal is named; nothing is guessed.
//!
//! The probe is loaded by the interpreter, so this is for languages whose interpreters load
//! something for a variable: Python, Node.js, Ruby. The function itself is not touched.

mod copy;

use super::Way;
use super::findings::Finding;
use super::freeze::{Frozen, ImageOrder, open_image_of_any_build, write_image};
use super::program::Program;
use super::train::Course;
use super::{BuildError, BuildEvent, BuildOptions, FreezeFailure, ImportFailure, OnEvent};
use crate::config::{EntryKind, FreezeAt, RuntimeKind};
use crate::function::StoredFunction;
use crate::rootfs::StoredRootfs;
use copy::{Drawn, draw};
use std::path::Path;
use std::time::Duration;
use thaw_store::index::{Attributes, Content, Node};
use thaw_store::{Domain, ImageId, IndexId, Session};

/// Where the probe lies in the sandbox.
const DIRECTORY: &str = "/.thaw-probe";
/// A program that takes longer than this to its entry point, with its training, is not run again.
const RUN_MAX: Duration = Duration::from_secs(30);
/// Names of generators that a finding lists.
const NAMED_MAX: usize = 6;

/// How a language loads something before a program, and what to say of what was found.
struct Probe {
    file: &'static str,
    text: &'static [u8],
    variable: &'static str,
    /// The variable's value, from what it was.
    value: fn(Option<&String>) -> String,
    way_out: &'static str,
}

const PYTHON: Probe = Probe {
    file: "sitecustomize.py",
    text: include_bytes!("probe.py"),
    variable: "PYTHONPATH",
    value: |old| match old {
        Some(old) => format!("{DIRECTORY}:{old}"),
        None => DIRECTORY.to_owned(),
    },
    way_out: "call reseed() of sdk/entrypoint/thaw.py where a request begins, or draw from `secrets` \
              or random.SystemRandom",
};

const NODE: Probe = Probe {
    file: "probe.js",
    text: include_bytes!("probe.js"),
    variable: "NODE_OPTIONS",
    value: |old| {
        let old = old.map_or_else(String::new, |old| format!("{old} "));
        format!("{old}--require {DIRECTORY}/probe.js")
    },
    way_out: "start it with `node --require ./thaw-random.js` (sdk/entrypoint), or draw from \
              crypto.randomInt",
};

const RUBY: Probe = Probe {
    file: "probe.rb",
    text: include_bytes!("probe.rb"),
    variable: "RUBYOPT",
    value: |old| {
        let old = old.map_or_else(String::new, |old| format!("{old} "));
        format!("{old}-r{DIRECTORY}/probe.rb")
    },
    way_out: "call Thaw.reseed of sdk/entrypoint/thaw.rb where a request begins, or draw from SecureRandom",
};

/// The probe for a function; `None`: its language has none, or it must not be run twice.
fn probe_of(function: &StoredFunction, frozen: &Frozen) -> Option<&'static Probe> {
    let config = &function.config;
    let probe = match config.runtime.as_ref()?.kind {
        RuntimeKind::Python3 => &PYTHON,
        RuntimeKind::Node => &NODE,
        RuntimeKind::Ruby => &RUBY,
        _ => return None,
    };
    let training = frozen.training.as_ref().map_or(Duration::ZERO, |training| training.duration);
    // What it does outside would be done twice, and copies without a client may end.
    let is_alone =
        config.egress.is_closed() && config.secrets.is_default() && config.volumes.is_empty();
    let rests = matches!(config.entry.kind, EntryKind::Http | EntryKind::Tcp | EntryKind::Udp)
        && config.entry.freeze == FreezeAt::Wait;
    let is_quick = frozen.start + training <= RUN_MAX;
    (is_alone && rests && is_quick).then_some(probe)
}

/// Compares what two copies of a program draw, if that can be done. A failure is noted, and is
/// none of the build.
pub(super) fn compare(
    session: &mut Session,
    function: &StoredFunction,
    (index, way): (IndexId, Way<'_>),
    frozen: &Frozen,
    options: &BuildOptions,
    on_event: &mut OnEvent<'_>,
) -> Option<Finding> {
    let probe = probe_of(function, frozen)?;
    let mut function = with_probe(function, probe);
    if matches!(way, Way::Template(_)) {
        // The program that is compared is started; one from a template begins with its
        // generators seeded.
        function.environment.insert("THAW_PROBE_SEEDED".to_owned(), "1".to_owned());
    }
    on_event(BuildEvent::Stage("comparing what two copies draw at random"));
    match drawn_twice(session, probe, &function, index, options) {
        Ok([one, other]) => {
            let same = same(&one, &other);
            (!same.is_empty()).then(|| Finding::of_generators(&same, probe.way_out))
        }
        Err(error) => {
            let text = format!("what two copies draw could not be compared: {error}");
            on_event(BuildEvent::Note(&thaw_sandbox::escape(text.as_bytes())));
            None
        }
    }
}

/// Names of the generators that drew the same, in the order in which they were asked.
fn same(one: &Drawn, other: &Drawn) -> Vec<String> {
    let equal = |(name, value): &&(String, String)| {
        other.iter().any(|(their, drawn)| their == name && drawn == value)
    };
    let mut names: Vec<String> = one.iter().filter(equal).map(|(name, _)| name.clone()).collect();
    let more = names.len().saturating_sub(NAMED_MAX);
    names.truncate(NAMED_MAX);
    if more > 0 {
        names.push(format!("{more} more"));
    }
    names
}

fn drawn_twice(
    session: &mut Session,
    probe: &Probe,
    function: &StoredFunction,
    index: IndexId,
    options: &BuildOptions,
) -> Result<[Drawn; 2], BuildError> {
    let index = with_file(session, probe, index)?;
    let rootfs = StoredRootfs::open(session, index)?;
    let image = freeze(session, function, &rootfs, options)?;
    let image = open_image_of_any_build(session, image, &rootfs)?;
    let plan = image
        .plan(rootfs.file(), rootfs.file_len(), rootfs.blobs())
        .map_err(FreezeFailure::Plan)?;
    let one = draw(function, &plan, options)?;
    Ok([one, draw(function, &plan, options)?])
}

fn with_probe(function: &StoredFunction, probe: &Probe) -> StoredFunction {
    let mut function = function.clone();
    let old = function.environment.get(probe.variable).cloned();
    if let (Some(old), RuntimeKind::Python3) = (&old, kind(&function)) {
        // The program is to see its own.
        function.environment.insert("THAW_PROBE_PYTHONPATH".to_owned(), old.clone());
    }
    let value = (probe.value)(old.as_ref());
    function.environment.insert(probe.variable.to_owned(), value);
    function
}

fn kind(function: &StoredFunction) -> RuntimeKind {
    function.runtime().map_or(RuntimeKind::Image, |runtime| runtime.kind)
}

/// The index of the function's files with the probe.
fn with_file(session: &mut Session, probe: &Probe, index: IndexId) -> Result<IndexId, BuildError> {
    let mut tree = StoredRootfs::open(session, index)?.tree().map_err(ImportFailure::from)?;
    let blob = session.put_blob(probe.text, &Domain::default())?;
    let attributes = Attributes::root(0o644);
    let node = Node { content: Content::Regular(blob), attributes };
    let path = Path::new(DIRECTORY).join(probe.file);
    tree.add_at(&path, node).map_err(ImportFailure::from)?;
    Ok(session.put_index(&tree)?)
}

/// Runs the program to its entry point and freezes it, as the build has done. What it prints was
/// seen before.
fn freeze(
    session: &mut Session,
    function: &StoredFunction,
    rootfs: &StoredRootfs,
    options: &BuildOptions,
) -> Result<ImageId, FreezeFailure> {
    let quiet: &mut OnEvent<'_> = &mut |_| {};
    let config = &function.config;
    let course =
        config.train.as_ref().map(|train| Course::prepare(train, config, &function.source));
    let course = course.transpose()?;
    let mut program = Program::start(function, rootfs, options)?;
    let run = |program: &mut Program, quiet: &mut OnEvent<'_>| {
        let entry = program.run_to_entry(options.entry_timeout, quiet)?;
        match &course {
            None => Ok(entry),
            Some(course) => Ok(course.hold(program, entry, options, quiet)?.0),
        }
    };
    let entry = match run(&mut program, quiet) {
        Ok(entry) => entry,
        Err(stop) => return Err(program.fail(stop, quiet)),
    };
    let (sandbox, _parent) = program.into_sandbox(quiet);
    let order = ImageOrder { entry, function, rootfs, merge: options.merge, base: None };
    Ok(write_image(session, &sandbox, &order)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(all: &[(&str, &str)]) -> Drawn {
        all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn what_is_equal_is_named() {
        let one = drawn(&[("a", "1"), ("b", "2"), ("c", "3")]);
        let other = drawn(&[("c", "3"), ("b", "0"), ("a", "1")]);
        assert_eq!(same(&one, &other), ["a", "c"]);
        assert!(same(&one, &drawn(&[])).is_empty());
        let many: Vec<(String, &str)> = (0..9).map(|i| (format!("g{i}"), "1")).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|(name, v)| (name.as_str(), *v)).collect();
        let named = same(&drawn(&many), &drawn(&many));
        assert_eq!(named.last().map(String::as_str), Some("3 more"));
    }

    #[test]
    fn a_variable_keeps_what_it_had() {
        let old = "/app/site".to_owned();
        assert_eq!((PYTHON.value)(Some(&old)), "/.thaw-probe:/app/site");
        let old = "--max-old-space-size=64".to_owned();
        assert_eq!((NODE.value)(Some(&old)), format!("{old} --require /.thaw-probe/probe.js"));
        assert_eq!((RUBY.value)(None), "-r/.thaw-probe/probe.rb");
    }
}
