//! Finding generators of random numbers that were seeded before the freeze: the program is
//! started again with a probe of its language, frozen, and thawed twice. Both copies draw from
//! the generators that the program has then. What is equal is named; nothing is guessed.
//!
//! The copies also say which times of before the freeze they keep, and whether their server keeps
//! the `Date` of its answers.
//!
//! The probe is loaded by the interpreter, so this is for languages whose interpreters load
//! something for a variable: Python, Node.js, Ruby, Java. The function itself is not touched, and the
//! second start acts on nothing: it has no connections, and copies of its volumes. It goes on beside the
//! first one where there is room for both. Of
//! programs in Go the machine code says what draws (`go`).

mod beam;
mod copy;
mod go;
mod go_times;
mod jar;
mod probe;
mod volumes;

use super::Way;
use super::findings::{of_dates, of_generators, of_times};
use super::freeze::{Frozen, ImageOrder, open_image_of_any_build, write_image};
use super::program::{Program, is_wanted};
use super::train::Course;
use super::{BuildError, BuildEvent, BuildOptions, FreezeFailure, ImportFailure, OnEvent};
pub(super) use beam::clock as clock_of_erlang;
use copy::{Answer, Named, ask};
pub(super) use go::generators as generators_of_go;
pub(super) use go_times::times as times_of_go;
use probe::{DIRECTORY, Probe};
use std::fs;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use thaw_home::config::{Egress, EntryKind, RuntimeKind};
use thaw_home::function::Finding;
use thaw_home::function::StoredFunction;
use thaw_home::rootfs::StoredRootfs;
use thaw_store::index::{Attributes, Content, Node};
use thaw_store::{Domain, ImageId, IndexId, Session, Store};
use volumes::CopiedVolumes;

/// How long copies that are over may keep their image.
const DISCARD_PATIENCE: Duration = Duration::from_secs(2);
/// What the stage is called.
const STAGE: &str = "comparing what two copies draw at random";
/// Names of generators, or of times, that a finding lists.
const NAMED_MAX: usize = 6;

/// A comparison that is made while the program itself is frozen. It is given up when this is dropped.
pub(super) struct Begun {
    probed: Probed,
    /// None: it was waited for.
    thread: Option<JoinHandle<Result<[Answer; 2], BuildError>>>,
    wanted: Arc<AtomicBool>,
}

/// Begins to compare what two copies of a program draw and keep, on a thread of its own, if the
/// program may be run twice at a time here. [`compare`] does the rest.
pub(super) fn begin(
    session: &Session,
    function: &StoredFunction,
    (index, way): (IndexId, Way<'_>),
    options: &BuildOptions,
) -> Option<Begun> {
    let probe = probe::of_language(kind(function))?;
    if probe::obstacle(function).is_some() || !is_room_for_two(function) {
        return None;
    }
    let wanted = Arc::new(AtomicBool::new(true));
    let options = BuildOptions { volumes: None, wanted: Some(wanted.clone()), ..options.clone() };
    let probed = Probed::of(function, probe, way);
    let (store, for_thread) = (Store::clone(session), probed.clone());
    let compare = move || for_thread.asked_twice(&mut store.session()?, index, &options);
    let thread = thread::Builder::new().name("comparison".to_owned()).spawn(compare).ok()?;
    Some(Begun { probed, thread: Some(thread), wanted })
}

/// Whether a program can be run twice at a time without taking from itself what it needs: there are
/// processors and memory for a second one, and nothing that both would write to.
fn is_room_for_two(function: &StoredFunction) -> bool {
    let limits = &function.config.limits;
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let room = memory_left().unwrap_or(0);
    function.config.volumes.is_empty()
        && processors >= 2 * limits.cpu.get() as usize
        && room / 2 >= limits.memory.bytes()
}

/// Bytes that this process and its sandboxes may still take, as far as that is known: of the machine, and
/// of the control group whose file system it sees (version 2, or 1).
fn memory_left() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let of_machine = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10;
    let number = |name: &str| {
        let text = fs::read_to_string(Path::new("/sys/fs/cgroup").join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let of_group = |most: &str, used: &str| Some(number(most)?.saturating_sub(number(used)?));
    let groups = [
        of_group("memory.max", "memory.current"),
        of_group("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ];
    groups.into_iter().flatten().chain([of_machine]).min()
}

impl Begun {
    /// Waits for what was found.
    pub fn end(
        mut self,
        function: &StoredFunction,
        frozen: &Frozen,
        on_event: &mut OnEvent<'_>,
    ) -> Vec<Finding> {
        let is_done = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        if !is_done && let Some(obstacle) = probe::obstacle_of_frozen(frozen) {
            note(obstacle, on_event);
            return Vec::new();
        }
        on_event(BuildEvent::Stage(STAGE));
        let Some(thread) = self.thread.take() else { return Vec::new() };
        let answers = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        self.probed.findings(function, answers, on_event)
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.wanted.store(false, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Nobody wants to know what came of it.
            let _ = thread.join();
        }
    }
}

/// Compares what two copies of a program draw and keep, if that can be done. What prevents it is
/// noted, and is no failure of the build.
pub(super) fn compare(
    session: &mut Session,
    function: &StoredFunction,
    (index, way): (IndexId, Way<'_>),
    frozen: &Frozen,
    options: &BuildOptions,
    on_event: &mut OnEvent<'_>,
) -> Vec<Finding> {
    let Some(probe) = probe::of_language(kind(function)) else { return Vec::new() };
    // Nothing runs in a sandbox that is made to be worked in from outside.
    if function.config.entry.kind == EntryKind::Sandbox {
        return Vec::new();
    }
    let copied = match probe::obstacle(function).or_else(|| probe::obstacle_of_frozen(frozen)) {
        Some(obstacle) => Err(obstacle.to_owned()),
        None if function.config.volumes.is_empty() => Ok(None),
        None => CopiedVolumes::of(&function.config, options.volumes.as_ref()).map(Some),
    };
    let copied = match copied {
        Ok(copied) => copied,
        Err(obstacle) => {
            note(&obstacle, on_event);
            return Vec::new();
        }
    };
    let volumes = copied.as_ref().map(CopiedVolumes::store);
    let options = &BuildOptions { volumes, ..options.clone() };
    on_event(BuildEvent::Stage(STAGE));
    let probed = Probed::of(function, probe, way);
    let answers = probed.asked_twice(session, index, options);
    probed.findings(function, answers, on_event)
}

/// A function whose program is run with a probe.
#[derive(Clone)]
struct Probed {
    probe: &'static Probe,
    function: StoredFunction,
}

impl Probed {
    fn of(function: &StoredFunction, probe: &'static Probe, way: Way<'_>) -> Self {
        let mut function = with_probe(function, probe);
        function.config.egress = Egress::default();
        if matches!(way, Way::Template(_)) {
            // The program that is compared is started; one from a template begins with its
            // generators seeded.
            function.environment.insert("THAW_PROBE_SEEDED".to_owned(), "1".to_owned());
        }
        Self { probe, function }
    }

    fn asked_twice(
        &self,
        session: &mut Session,
        index: IndexId,
        options: &BuildOptions,
    ) -> Result<[Answer; 2], BuildError> {
        let index = with_file(session, self.probe, index)?;
        let rootfs = StoredRootfs::open(session, index)?;
        check_wanted(options)?;
        let image = freeze(session, &self.function, &rootfs, options)?;
        let answers = answers(session, &self.function, image, &rootfs, options);
        discard(session, image);
        answers
    }

    /// What the answers say of the function as it is without the probe.
    fn findings(
        &self,
        function: &StoredFunction,
        answers: Result<[Answer; 2], BuildError>,
        on_event: &mut OnEvent<'_>,
    ) -> Vec<Finding> {
        match answers {
            Ok([one, other]) => return findings(&one, &other, self.probe.way_out),
            Err(error) if !function.config.egress.is_closed() => {
                tracing::debug!("a second start without connections: {error}");
                note("it does not come to its freeze a second time, without connections", on_event);
            }
            Err(error) => {
                let text = format!("what two copies draw could not be compared: {error}");
                on_event(BuildEvent::Note(&thaw_sandbox::escape(text.as_bytes())));
            }
        }
        Vec::new()
    }
}

/// Says why nothing is compared.
fn note(obstacle: &str, on_event: &mut OnEvent<'_>) {
    let text = format!(
        "two copies of the program were not compared in what they draw at random and which times \
         they keep: {obstacle} (docs/uniqueness.md)"
    );
    on_event(BuildEvent::Note(&thaw_sandbox::escape(text.as_bytes())));
}

/// What is the same in two copies.
fn findings(one: &Answer, other: &Answer, way_out: &str) -> Vec<Finding> {
    let generators = same(&one.drawn, &other.drawn);
    let generators = (!generators.is_empty()).then(|| of_generators(&listed(generators), way_out));
    let times = same(&one.times, &other.times);
    let times = (!times.is_empty()).then(|| of_times(&listed(times)));
    let dates = same(&one.dates, &other.dates);
    let dates = dates.iter().map(|server| of_dates(server, "start it with `--no-date-header`"));
    generators.into_iter().chain(times).chain(dates).collect()
}

/// A finding if copies of a program in Node.js keep the `Date` of its last training answer: Node.js
/// keeps the text for the rest of the second, by a timer that stands still while the program is frozen.
pub(super) fn dates_of_node(function: &StoredFunction, frozen: &Frozen) -> Option<Finding> {
    let is_dated = frozen.training.as_ref().is_some_and(|training| training.is_dated);
    let keeps = is_dated && kind(function) == RuntimeKind::Node;
    keeps.then(|| of_dates("Node.js", "set `response.sendDate = false`"))
}

/// Names of what has the same value in two copies, in the order in which one has said it.
fn same(one: &Named, other: &Named) -> Vec<String> {
    let equal = |(name, value): &&(String, String)| {
        other.iter().any(|(their, found)| their == name && found == value)
    };
    one.iter().filter(equal).map(|(name, _)| name.clone()).collect()
}

/// The first of many names, and how many more there are.
fn listed(mut names: Vec<String>) -> Vec<String> {
    let more = names.len().saturating_sub(NAMED_MAX);
    names.truncate(NAMED_MAX);
    if more > 0 {
        names.push(format!("{more} more"));
    }
    names
}

/// Removes the image of a comparison once the copies have let go of it. The collector does otherwise.
fn discard(session: &Session, image: ImageId) {
    let deadline = Instant::now() + DISCARD_PATIENCE;
    while let Ok(false) = session.discard_image(image)
        && Instant::now() < deadline
    {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Thaws an image twice and asks both copies.
fn answers(
    session: &Session,
    function: &StoredFunction,
    image: ImageId,
    rootfs: &StoredRootfs,
    options: &BuildOptions,
) -> Result<[Answer; 2], BuildError> {
    let image = open_image_of_any_build(session, image, rootfs)?;
    let plan = image
        .plan(rootfs.file(), rootfs.file_len(), rootfs.blobs())
        .map_err(FreezeFailure::Plan)?;
    let one = ask(function, &plan, options)?;
    Ok([one, ask(function, &plan, options)?])
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
    let blob = session.put_blob(&(probe.contents)(), &Domain::default())?;
    let attributes = Attributes::root(0o644);
    let node = Node { content: Content::Regular(blob), attributes };
    let path = Path::new(DIRECTORY).join(probe.file);
    tree.add_at(&path, node).map_err(ImportFailure::from)?;
    Ok(session.put_index(&tree)?)
}

/// An error if nobody waits for the comparison any more.
fn check_wanted(options: &BuildOptions) -> Result<(), FreezeFailure> {
    match is_wanted(options.wanted.as_ref()) {
        true => Ok(()),
        false => Err(FreezeFailure::Unwanted),
    }
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
    check_wanted(options)?;
    let order = ImageOrder { entry, function, rootfs, merge: options.merge, base: None };
    Ok(write_image(session, &sandbox, &order)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_home::function::FindingKind;

    fn named(all: &[(&str, &str)]) -> Named {
        all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn what_is_equal_is_named() {
        let one = named(&[("a", "1"), ("b", "2"), ("c", "3")]);
        let other = named(&[("c", "3"), ("b", "0"), ("a", "1")]);
        assert_eq!(same(&one, &other), ["a", "c"]);
        assert!(same(&one, &named(&[])).is_empty());
        let many: Vec<String> = (0..9).map(|i| format!("g{i}")).collect();
        let listed = listed(many);
        assert_eq!((listed.len(), listed[6].as_str()), (7, "3 more"));
    }

    #[test]
    fn generators_and_times_are_findings_of_their_own() {
        let answer = |drawn, times: [(&str, &str); 2]| Answer {
            drawn: named(&[("a", drawn)]),
            times: named(&times),
            dates: Named::new(),
        };
        let (one, other) =
            (answer("1", [("t", "5"), ("u", "6")]), answer("2", [("t", "5"), ("u", "7")]));
        let kinds = |found: Vec<Finding>| found.iter().map(|one| one.kind).collect::<Vec<_>>();
        assert_eq!(kinds(findings(&one, &other, "")), [FindingKind::Time]);
        assert_eq!(kinds(findings(&one, &one, "")), [FindingKind::Generator, FindingKind::Time]);
        let dated = Answer { dates: named(&[("uvicorn", "kept")]), ..Answer::default() };
        let found = findings(&dated, &dated, "");
        assert!(found[0].text.starts_with("uvicorn keeps the `Date`"), "{found:?}");
    }
}
