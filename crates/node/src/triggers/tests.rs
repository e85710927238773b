//! The queue: every rule, with a clock that the tests move and a file that they break.

use super::file::QueueFile;
use super::ledger::{BOUNDS, Bounds, Carried, Ledger};
use super::record::{Job, Outcome, Terms};
use super::schedules::{Looked, look};
use super::writer::Writer;
use super::*;
use std::collections::HashSet;
use std::num::NonZeroU32;
use std::path::PathBuf;
use thaw_home::config::{AsyncConfig, ByteSize, Schedule};

const NOW: u64 = 1_795_353_540_000;
const HOUR: u64 = 3_600_000;

struct Queue {
    _directory: tempfile::TempDir,
    path: PathBuf,
    ledger: Ledger,
    terms: Terms,
}

impl Queue {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let ledger = open(&path);
        let terms = Terms { config: AsyncConfig::default(), domain: None, tenant_bytes: None };
        Self { _directory: directory, path, ledger, terms }
    }

    /// What a daemon that was killed leaves to the next one: what was committed.
    fn kill(&mut self) {
        self.ledger = Ledger::default();
        self.ledger = open(&self.path);
    }

    fn add(&mut self, key: Option<&str>, now: u64) -> Result<Queued, NotQueued> {
        let queued = self.ledger.queue(invocation("f", key), &self.terms, now);
        self.ledger.commit().unwrap();
        queued
    }

    fn take(&mut self, now: u64, most: usize) -> Vec<Job> {
        // A tenant gets half of the places.
        let room = |_: &str, running: usize| most.min(100usize.saturating_sub(running));
        self.ledger.take(now, 2 * most, room).unwrap().jobs
    }

    fn finish(&mut self, id: InvocationId, outcome: Outcome, now: u64) {
        self.ledger.finish(id, outcome, &self.terms.clone(), now);
        self.ledger.commit().unwrap();
    }

    fn only(&self) -> InvocationInfo {
        let mut all = self.ledger.list("f", 10);
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    fn counts(&self) -> (u64, u64, u64) {
        let queues = self.ledger.queues();
        let found = queues.iter().find(|queue| queue.function == "f").cloned().unwrap_or_default();
        (found.queued, found.running, found.dead)
    }
}

fn open(path: &Path) -> Ledger {
    let (file, content) = QueueFile::open(path).unwrap();
    Ledger::new(file, content, Carried::default())
}

fn invocation(function: &str, key: Option<&str>) -> NewInvocation {
    NewInvocation {
        function: function.to_owned(),
        origin: Origin::Client,
        request: QueuedRequest {
            method: "POST".into(),
            path: "/".into(),
            headers: vec![("x".into(), "y".into())],
            body: b"body".to_vec(),
        },
        key: key.map(|key| key.as_bytes().to_vec()),
    }
}

fn failed() -> Outcome {
    Outcome::Failed { reason: "status 500".into(), retry_after_ms: None }
}

#[test]
fn what_was_queued_or_runs_is_there_after_a_kill_and_what_is_done_is_not() {
    let mut queue = Queue::new();
    let ids: Vec<_> = (0..3).map(|_| queue.add(None, NOW).unwrap().id).collect();
    let jobs = queue.take(NOW, 2);
    assert_eq!(queue.counts(), (1, 2, 0));
    queue.finish(jobs[0].id, Outcome::Done(200), NOW);
    queue.kill();
    assert_eq!(queue.counts(), (2, 0, 0));
    let again = queue.take(NOW, 10);
    assert_eq!(again.len(), 2);
    assert!(again.iter().all(|job| ids.contains(&job.id) && job.id != jobs[0].id));
    assert_eq!(again[0].request, invocation("f", None).request);
}

#[test]
fn what_was_not_committed_never_was() {
    let mut queue = Queue::new();
    queue.ledger.queue(invocation("f", Some("k")), &queue.terms.clone(), NOW).unwrap();
    queue.kill();
    assert_eq!(queue.counts(), (0, 0, 0));
    assert!(!queue.add(Some("k"), NOW).unwrap().is_duplicate);
}

#[test]
fn a_key_queues_once_within_its_time_also_after_the_work_is_done() {
    let mut queue = Queue::new();
    let first = queue.add(Some("k"), NOW).unwrap();
    let other = queue.add(Some("l"), NOW).unwrap();
    assert!(!first.is_duplicate && !other.is_duplicate && first.id != other.id);
    for job in queue.take(NOW, 10) {
        queue.finish(job.id, Outcome::Done(200), NOW);
    }
    queue.kill();
    let again = queue.add(Some("k"), NOW + 23 * HOUR).unwrap();
    assert_eq!(again, Queued { id: first.id, is_duplicate: true });
    assert_eq!(queue.counts(), (0, 0, 0));
    assert!(!queue.add(Some("k"), NOW + 24 * HOUR).unwrap().is_duplicate);
    // Keys of functions do not meet.
    let terms = queue.terms.clone();
    assert!(!queue.ledger.queue(invocation("g", Some("l")), &terms, NOW).unwrap().is_duplicate);
}

#[test]
fn another_request_under_a_key_is_no_duplicate() {
    let mut queue = Queue::new();
    let first = queue.add(Some("k"), NOW).unwrap();
    queue.kill();
    let changes: [fn(&mut QueuedRequest); 4] = [
        |request| request.method = "PUT".into(),
        |request| request.path = "/other".into(),
        |request| request.body = b"other".to_vec(),
        |request| (request.path, request.body) = ("/b".into(), b"ody".to_vec()),
    ];
    let terms = queue.terms.clone();
    for change in changes {
        let mut other = invocation("f", Some("k"));
        change(&mut other.request);
        assert_eq!(queue.ledger.queue(other, &terms, NOW), Err(NotQueued::KeyReused));
    }
    // A client that tries again may say other things of itself.
    let mut same = invocation("f", Some("k"));
    same.request.headers.push(("traceparent".into(), "1".into()));
    let again = queue.ledger.queue(same, &terms, NOW);
    assert_eq!(again, Ok(Queued { id: first.id, is_duplicate: true }));
    assert_eq!(queue.counts(), (1, 0, 0));
}

#[test]
fn failures_wait_and_end_as_a_dead_letter() {
    let mut queue = Queue::new();
    let id = queue.add(None, NOW).unwrap().id;
    let mut now = NOW;
    for attempt in 1..=3 {
        assert_eq!(queue.take(now, 10)[0].record.attempts, attempt - 1);
        assert!(queue.take(now, 10).is_empty(), "it runs once at a time");
        queue.finish(id, failed(), now);
        queue.kill();
        if attempt < 3 {
            let due = queue.only().record.due_ms;
            let wait = 1000 << (attempt - 1);
            assert!((now + wait * 3 / 4..=now + wait * 5 / 4).contains(&due), "{}", due - now);
            assert!(queue.take(due - 1, 10).is_empty());
            now = due;
        }
    }
    let dead = queue.only();
    assert_eq!((dead.state.as_str(), dead.record.attempts), ("dead", 3));
    assert!(dead.record.dead.unwrap().reason.contains("status 500"));
    assert!(queue.take(now + HOUR, 10).is_empty());
}

#[test]
fn a_function_may_ask_for_time_and_refusals_are_final() {
    let mut queue = Queue::new();
    let id = queue.add(None, NOW).unwrap().id;
    queue.take(NOW, 1);
    let outcome = Outcome::Failed { reason: "busy".into(), retry_after_ms: Some(60_000) };
    queue.finish(id, outcome, NOW);
    assert_eq!(queue.only().record.due_ms, NOW + 60_000);
    queue.take(NOW + 60_000, 1);
    // No longer than the longest wait.
    let outcome = Outcome::Failed { reason: "busy".into(), retry_after_ms: Some(u64::MAX) };
    queue.finish(id, outcome, NOW + 60_000);
    assert_eq!(queue.only().record.due_ms, NOW + 360_000);
    queue.take(NOW + 360_000, 1);
    queue.finish(id, Outcome::Refused("status 422".into()), NOW + 360_000);
    assert_eq!(queue.counts(), (0, 0, 1));
}

#[test]
fn what_the_function_has_not_seen_is_no_attempt_but_ages() {
    let mut queue = Queue::new();
    let id = queue.add(None, NOW).unwrap().id;
    let mut now = NOW;
    for _ in 0..20 {
        assert_eq!(queue.take(now, 1).len(), 1);
        queue.finish(id, Outcome::Deferred("no room".into()), now);
        now = queue.only().record.due_ms;
    }
    assert_eq!(queue.only().record.attempts, 0);
    assert!(now > NOW + 1000 * 1000, "the waits have doubled up to five minutes");
    queue.ledger.expire(NOW + 6 * HOUR, |_| AsyncConfig::default());
    queue.ledger.commit().unwrap();
    queue.kill();
    let dead = queue.only().record.dead.unwrap();
    assert!(dead.reason.contains("max_age") && dead.reason.contains("no room"), "{dead:?}");
    // Nobody keeps dead letters for ever.
    queue.ledger.expire(NOW + 6 * HOUR + 14 * 24 * HOUR, |_| AsyncConfig::default());
    assert_eq!(queue.counts(), (0, 0, 0));
}

#[test]
fn what_runs_does_not_expire() {
    let mut queue = Queue::new();
    let id = queue.add(None, NOW).unwrap().id;
    queue.take(NOW, 1);
    queue.ledger.expire(NOW + 7 * HOUR, |_| AsyncConfig::default());
    assert_eq!(queue.counts(), (0, 1, 0));
    queue.finish(id, Outcome::Done(200), NOW + 7 * HOUR);
    assert_eq!(queue.counts(), (0, 0, 0));
}

#[test]
fn dead_letters_are_bounded_and_can_be_tried_again() {
    let mut queue = Queue::new();
    queue.terms.config.dead_letters = 2;
    let ids: Vec<_> = (0..3).map(|n| queue.add(None, NOW + n).unwrap().id).collect();
    for (at, id) in ids.iter().enumerate() {
        queue.take(NOW + 5, 1);
        queue.finish(*id, Outcome::Refused("no".into()), NOW + 10 + at as u64);
    }
    let dead: Vec<_> = queue.ledger.list("f", 10).iter().map(|info| info.id).collect();
    assert_eq!(dead, [ids[2], ids[1]], "the oldest is gone");
    let terms = queue.terms.clone();
    assert_eq!(queue.ledger.retry("f", Which::One(ids[1]), &terms, NOW + HOUR), Ok(1));
    assert_eq!(queue.ledger.retry("f", Which::One(ids[0]), &terms, NOW + HOUR), Ok(0));
    assert_eq!(queue.ledger.retry("g", Which::One(ids[2]), &terms, NOW + HOUR), Ok(0));
    queue.ledger.commit().unwrap();
    queue.kill();
    assert_eq!(queue.counts(), (1, 0, 1));
    let again = &queue.take(NOW + HOUR, 5)[0];
    assert_eq!((again.id, again.record.attempts, again.record.dead.is_none()), (ids[1], 0, true));
    assert_eq!(queue.ledger.purge("f", Which::One(ids[1])), 0, "it runs");
    assert_eq!(queue.ledger.purge("f", Which::Dead), 1);
    queue.add(None, NOW).unwrap();
    assert_eq!(queue.ledger.purge("f", Which::Queued), 1);
    assert_eq!(queue.counts(), (0, 1, 0));
}

#[test]
fn every_bound_is_reached() {
    let full = |queue: &mut Queue, word: &str| match queue.add(Some("last"), NOW) {
        Err(NotQueued::Full(why)) => assert!(why.contains(word), "{why}"),
        other => panic!("{word}: {other:?}"),
    };
    let mut queue = Queue::new();
    queue.terms.config.body_max = ByteSize::mebibytes(0);
    assert_eq!(queue.add(None, NOW), Err(NotQueued::TooLarge(0)));
    let mut queue = Queue::new();
    queue.terms.domain = Some("one".to_owned());
    queue.terms.config.entries = NonZeroU32::new(2).unwrap();
    queue.add(None, NOW).unwrap();
    queue.add(None, NOW).unwrap();
    full(&mut queue, "async.entries");
    let size = queue.only_size();
    queue.terms.config.entries = NonZeroU32::new(9).unwrap();
    queue.terms.tenant_bytes = Some("1KiB".parse().unwrap());
    full(&mut queue, "quota");
    queue.terms.tenant_bytes = None;
    for (bounds, word) in [
        (Bounds { entries: 2, ..BOUNDS }, "node"),
        (Bounds { bytes: size * 2 + 1, ..BOUNDS }, "node"),
        (Bounds { keys: 0, ..BOUNDS }, "keys"),
        (Bounds { keys_of_a_function: 0, ..BOUNDS }, "keys"),
        (Bounds { keys: 1, ..BOUNDS }, "keys"),
        (Bounds { entries: 4, ..BOUNDS }, "tenant"),
        (Bounds { bytes: size * 5, ..BOUNDS }, "tenant"),
    ] {
        queue.ledger.bound(bounds);
        full(&mut queue, word);
    }
    queue.ledger.bound(BOUNDS);
    queue.terms.config.bytes = "1KiB".parse().unwrap();
    full(&mut queue, "async.bytes");
    assert_eq!(queue.counts(), (2, 0, 0));
    let mut queue = Queue::new();
    queue.ledger.bound(Bounds { dead_bytes: 0, ..BOUNDS });
    let id = queue.add(None, NOW).unwrap().id;
    queue.take(NOW, 1);
    queue.finish(id, Outcome::Refused("no".into()), NOW);
    queue.ledger.expire(NOW, |_| AsyncConfig::default());
    assert_eq!(queue.counts(), (0, 0, 0));
}

#[test]
fn a_tenant_that_fills_its_share_leaves_room_for_others() {
    let mut queue = Queue::new();
    queue.ledger.bound(Bounds { entries: 8, keys: 8, ..BOUNDS });
    queue.terms.domain = Some("one".to_owned());
    for number in 0..4 {
        queue.add(Some(&number.to_string()), NOW).unwrap();
    }
    assert!(matches!(queue.add(None, NOW), Err(NotQueued::Full(why)) if why.contains("tenant")));
    queue.terms.domain = Some("other".to_owned());
    for number in 4..6 {
        queue.add(Some(&number.to_string()), NOW).unwrap();
    }
    assert!(matches!(queue.add(None, NOW), Err(NotQueued::Full(why)) if why.contains("tenant")));
    queue.terms.domain = Some("third".to_owned());
    queue.add(Some("6"), NOW).unwrap();
    // Functions without a domain are no tenant's.
    queue.terms.domain = None;
    queue.add(Some("7"), NOW).unwrap();
    assert!(matches!(queue.add(None, NOW), Err(NotQueued::Full(why)) if why.contains("node")));
}

#[test]
fn dead_letters_of_the_largest_tenant_go_first() {
    let mut queue = Queue::new();
    let die = |queue: &mut Queue, domain: &str, at: u64| {
        queue.terms.domain = Some(domain.to_owned());
        let id = queue.add(None, NOW).unwrap().id;
        assert_eq!(queue.take(NOW, 1).len(), 1);
        queue.finish(id, Outcome::Refused("no".into()), NOW + at);
        id
    };
    let mine = die(&mut queue, "mine", 1);
    queue.terms.domain = None;
    let others: Vec<_> = (2..5)
        .map(|at| {
            let id = queue.ledger.queue(invocation("g", None), &queue.terms, NOW).unwrap().id;
            queue.ledger.commit().unwrap();
            queue.take(NOW, 1);
            queue.finish(id, Outcome::Refused("no".into()), NOW + at);
            id
        })
        .collect();
    queue.ledger.bound(Bounds { dead: 2, ..BOUNDS });
    queue.ledger.expire(NOW + HOUR, |_| AsyncConfig::default());
    queue.ledger.commit().unwrap();
    queue.kill();
    let left = |queue: &Queue, function: &str| -> Vec<_> {
        queue.ledger.list(function, 10).iter().map(|info| info.id).collect()
    };
    assert_eq!((left(&queue, "f"), left(&queue, "g")), (vec![mine], vec![others[2]]));
}

#[test]
fn of_long_paths_and_methods_the_beginning_is_in_memory_and_all_is_sent() {
    let mut queue = Queue::new();
    let mut new = invocation("f", None);
    (new.request.path, new.request.method) = ("/é".repeat(5000), "M".repeat(5000));
    let sent = new.request.clone();
    queue.ledger.queue(new, &queue.terms, NOW).unwrap();
    queue.ledger.commit().unwrap();
    queue.kill();
    let record = queue.only().record;
    assert!(record.path.len() <= 256 && sent.path.starts_with(&record.path), "{}", record.path);
    assert_eq!(record.method.len(), 32);
    assert_eq!(queue.take(NOW, 1)[0].request, sent);
}

#[test]
fn keys_count_for_their_tenant_until_they_are_purged() {
    let mut queue = Queue::new();
    queue.add(Some("done"), NOW).unwrap();
    let job = queue.take(NOW, 1).remove(0);
    queue.finish(job.id, Outcome::Done(200), NOW);
    queue.kill();
    let bytes = |queue: &Queue| queue.ledger.bytes_of_tenants().get(&None).copied().unwrap_or(0);
    assert_eq!(bytes(&queue), 256);
    queue.add(Some("waits"), NOW).unwrap();
    queue.terms.tenant_bytes = Some("1KiB".parse().unwrap());
    assert!(matches!(queue.add(Some("more"), NOW), Err(NotQueued::Full(_))));
    assert_eq!(queue.ledger.purge("f", Which::Dead), 0);
    assert!(queue.add(Some("done"), NOW).unwrap().is_duplicate);
    assert_eq!(queue.ledger.purge("f", Which::Queued), 1);
    queue.ledger.commit().unwrap();
    queue.kill();
    assert_eq!((bytes(&queue), queue.ledger.queues().len()), (0, 0));
    assert!(!queue.add(Some("waits"), NOW).unwrap().is_duplicate);
}

impl Queue {
    fn only_size(&self) -> u64 {
        self.ledger.queues()[0].bytes / self.counts().0
    }
}

#[test]
fn what_is_not_on_the_disk_yet_is_not_attempted() {
    let mut queue = Queue::new();
    let terms = queue.terms.clone();
    queue.ledger.queue(invocation("f", None), &terms, NOW).unwrap();
    assert!(queue.take(NOW, 1).is_empty());
    assert_eq!(queue.counts(), (1, 0, 0));
    queue.ledger.commit().unwrap();
    let job = queue.take(NOW, 1).remove(0);
    // If this batch is lost, nobody attempts the job.
    assert!(queue.ledger.running().is_empty());
    queue.ledger.commit().unwrap();
    assert_eq!(queue.ledger.running(), HashSet::from([job.id]));
}

#[test]
fn functions_take_turns_and_one_without_room_waits() {
    let mut queue = Queue::new();
    for (at, function) in ["a", "a", "a", "b", "c"].into_iter().enumerate() {
        // Each is of another tenant.
        let terms = Terms { domain: Some(format!("t{at}")), ..queue.terms.clone() };
        queue.ledger.queue(invocation(function, None), &terms, NOW).unwrap();
    }
    queue.ledger.commit().unwrap();
    let names = |taken: &super::ledger::Taken| -> Vec<String> {
        taken.jobs.iter().map(|job| job.record.function.clone()).collect()
    };
    let room = |name: &str, running: usize| match name {
        "c" => 0,
        _ => 9usize.saturating_sub(running),
    };
    let first = queue.ledger.take(NOW, 3, room).unwrap();
    assert_eq!(names(&first), ["a", "b", "a"]);
    let second = queue.ledger.take(NOW, 3, room).unwrap();
    assert_eq!((names(&second), second.next_due_ms), (vec!["a".to_owned()], None));
    let third = queue.ledger.take(NOW, 3, |_, _| 1).unwrap();
    assert_eq!(names(&third), ["c"]);
}

#[test]
fn a_tenant_gets_half_of_the_places_that_others_leave() {
    let mut queue = Queue::new();
    for tenant in ["a", "b"] {
        let terms = Terms { domain: Some(tenant.to_owned()), ..queue.terms.clone() };
        for _ in 0..20 {
            queue.ledger.queue(invocation(tenant, None), &terms, NOW).unwrap();
        }
        queue.ledger.commit().unwrap();
        let free = if tenant == "a" { 8 } else { 4 };
        let taken = queue.ledger.take(NOW, free, |_, _| 100).unwrap();
        let of = |name: &str| taken.jobs.iter().filter(|job| job.record.function == name).count();
        assert_eq!((of("a"), of("b")), if tenant == "a" { (4, 0) } else { (0, 2) });
        assert_eq!(taken.next_due_ms, None, "the end of an attempt wakes it");
    }
    let mut queue = Queue::new();
    queue.add(None, NOW).unwrap();
    assert_eq!(queue.ledger.take(NOW, 1, |_, _| 1).unwrap().jobs.len(), 1, "at least one");
}

#[test]
fn a_clock_that_goes_back_delays_nothing_for_long() {
    let mut queue = Queue::new();
    queue.add(None, NOW + 1000 * HOUR).unwrap();
    assert_eq!(queue.take(NOW, 1).len(), 1);
}

fn schedule(rest: &str) -> Schedule {
    toml::from_str(&format!("name = \"s\"\n{rest}")).unwrap()
}

impl Queue {
    fn look(&mut self, schedule: &Schedule, now: u64) -> Looked {
        let last = schedule.cron.last_until(now, &schedule.timezone.zone());
        let looked = look(&mut self.ledger, "f", schedule, last, (&self.terms.clone(), None), now);
        self.ledger.commit().unwrap();
        looked
    }

    /// Whether the time was left out.
    fn skips(&mut self, schedule: &Schedule, now: u64) -> bool {
        matches!(self.look(schedule, now), Looked::Skipped(_))
    }
}

/// NOW is 39 minutes past an hour.
const NEXT_HOUR: u64 = NOW - NOW % HOUR + HOUR;

#[test]
fn a_schedule_fires_once_for_each_time_also_across_kills() {
    let mut queue = Queue::new();
    let hourly = schedule("cron = \"0 * * * *\"\nbody = \"x\"");
    assert_eq!(queue.look(&hourly, NOW), Looked::Nothing, "a new one has missed nothing");
    assert_eq!(queue.look(&hourly, NEXT_HOUR - 1), Looked::Nothing);
    assert_eq!(queue.look(&hourly, NEXT_HOUR), Looked::Fired);
    assert_eq!(queue.look(&hourly, NEXT_HOUR + 1), Looked::Nothing);
    queue.kill();
    assert_eq!(queue.look(&hourly, NEXT_HOUR + 2), Looked::Nothing);
    // A clock that goes back fires nothing twice.
    assert_eq!(queue.look(&hourly, NEXT_HOUR - HOUR), Looked::Nothing);
    assert_eq!(queue.look(&hourly, NEXT_HOUR), Looked::Nothing);
    assert_eq!(queue.look(&hourly, NEXT_HOUR + HOUR), Looked::Fired);
    assert_eq!(queue.counts(), (2, 0, 0));
    let job = &queue.take(NEXT_HOUR + HOUR, 1)[0];
    assert_eq!((job.request.method.as_str(), &*job.request.body), ("POST", &b"x"[..]));
    let header =
        |name: &str| job.request.headers.iter().find(|(n, _)| n == name).unwrap().1.clone();
    assert_eq!(header("ce-source"), "/functions/f/schedules/s");
    assert_eq!(header("ce-id"), format!("s-{NEXT_HOUR}"));
}

#[test]
fn missed_times_are_left_out_or_the_last_one_is_made_up_for() {
    let mut queue = Queue::new();
    let none = schedule("cron = \"0 * * * *\"");
    queue.look(&none, NOW);
    assert!(queue.skips(&none, NEXT_HOUR + 3 * HOUR + 120_000));
    assert_eq!(queue.counts(), (0, 0, 0));
    assert_eq!(queue.look(&none, NEXT_HOUR + 3 * HOUR + 130_000), Looked::Nothing);
    let mut queue = Queue::new();
    let last = schedule("cron = \"0 * * * *\"\ncatch_up = \"last\"");
    queue.look(&last, NOW);
    assert_eq!(queue.look(&last, NEXT_HOUR + 3 * HOUR + 120_000), Looked::Fired);
    assert_eq!(queue.look(&last, NEXT_HOUR + 3 * HOUR + 130_000), Looked::Nothing);
    assert_eq!(queue.counts(), (1, 0, 0));
    // With another expression it begins anew.
    let other = schedule("cron = \"30 * * * *\"\ncatch_up = \"last\"");
    assert_eq!(queue.look(&other, NEXT_HOUR + 9 * HOUR), Looked::Nothing);
    assert_eq!(queue.counts(), (1, 0, 0));
}

#[test]
fn a_clock_that_was_far_ahead_stops_no_schedule() {
    let mut queue = Queue::new();
    let hourly = schedule("cron = \"0 * * * *\"");
    queue.look(&hourly, NOW + 30 * 24 * HOUR);
    assert_eq!(queue.look(&hourly, NOW), Looked::Nothing);
    assert_eq!(queue.look(&hourly, NEXT_HOUR), Looked::Fired);
}

#[test]
fn a_schedule_that_must_not_overlap_waits_for_its_invocation() {
    let mut queue = Queue::new();
    let hourly = schedule("cron = \"0 * * * *\"\noverlap = \"skip\"");
    queue.look(&hourly, NOW);
    assert_eq!(queue.look(&hourly, NEXT_HOUR), Looked::Fired);
    assert!(queue.skips(&hourly, NEXT_HOUR + HOUR));
    let job = queue.take(NEXT_HOUR + HOUR, 1).remove(0);
    assert!(queue.skips(&hourly, NEXT_HOUR + 2 * HOUR));
    queue.finish(job.id, Outcome::Done(200), NEXT_HOUR + 2 * HOUR);
    assert_eq!(queue.look(&hourly, NEXT_HOUR + 3 * HOUR), Looked::Fired);
    // A full queue is a reason that is shown.
    queue.terms.config.entries = NonZeroU32::new(1).unwrap();
    let all = schedule("cron = \"0 * * * *\"");
    assert!(queue.skips(&all, NEXT_HOUR + 4 * HOUR));
    let row = queue.ledger.schedule("f/s").unwrap();
    assert!(row.skipped == 3 && row.problem.as_ref().unwrap().contains("async.entries"));
}

#[test]
fn fields_of_a_connection_are_not_kept_and_preferences_are_read() {
    let mut headers = HeaderMap::new();
    for (name, value) in
        [("connection", "close"), ("prefer", "respond-async, wait=10"), ("x-own", "1")]
    {
        headers.insert(name, value.parse().unwrap());
    }
    assert!(prefers_async(&headers));
    assert_eq!(carried(&headers).unwrap(), [("x-own".to_owned(), "1".to_owned())]);
    headers.insert("prefer", "return=minimal; respond-async".parse().unwrap());
    assert!(!prefers_async(&headers));
    headers.insert("x-own", HeaderValue::from_bytes(b"\xff").unwrap());
    assert!(carried(&headers).is_err());
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn what_was_answered_is_on_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    let (writer, thread) = Writer::start(path.clone()).unwrap();
    let terms = Terms { config: AsyncConfig::default(), domain: None, tenant_bytes: None };
    runtime().block_on(async {
        let asked = (0..50).map(|n| {
            let (writer, terms) = (writer.clone(), terms.clone());
            tokio::spawn(async move {
                let new = invocation("f", Some(&n.to_string()));
                writer.ask(move |ledger| ledger.queue(new, &terms, NOW)).await.unwrap().unwrap()
            })
        });
        for one in asked.collect::<Vec<_>>() {
            one.await.unwrap();
        }
    });
    // The file as it is, as after a kill.
    let copy = directory.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    assert_eq!(open(&copy).queues()[0].queued, 50);
    drop(writer);
    thread.join().unwrap();
}

#[test]
fn a_damaged_file_is_left_alone_and_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    std::fs::write(&path, b"this is no database at all".repeat(1000)).unwrap();
    let before = std::fs::read(&path).unwrap();
    let (writer, _thread) = Writer::start(path.clone()).unwrap();
    let asked = runtime().block_on(writer.ask(|ledger| ledger.queues()));
    let why = asked.unwrap_err().to_string();
    assert!(why.contains("move it away"), "{why}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn what_became_of_an_invocation_is_known_for_a_while_also_after_a_kill() {
    let mut queue = Queue::new();
    let ids: Vec<_> = (0..3).map(|_| queue.add(None, NOW).unwrap().id).collect();
    let state = |queue: &Queue, id| queue.ledger.status("f", id).map(|found| found.state);
    assert_eq!(state(&queue, ids[0]), Some("queued"));
    assert_eq!(queue.take(NOW, 3).len(), 3);
    assert_eq!(state(&queue, ids[0]), Some("running"));
    queue.finish(ids[0], Outcome::Done(204), NOW);
    queue.finish(ids[1], Outcome::Refused("status 422".into()), NOW);
    queue.finish(ids[2], failed(), NOW);
    queue.kill();
    let done = queue.ledger.status("f", ids[0]).unwrap();
    assert_eq!((done.state, done.attempts, done.status), ("done", 1, Some(204)));
    assert_eq!((state(&queue, ids[1]), state(&queue, ids[2])), (Some("dead"), Some("queued")));
    // It is nobody else's, and is forgotten.
    assert_eq!(queue.ledger.status("g", ids[0]), None);
    queue.ledger.expire(NOW + HOUR, |_| AsyncConfig::default());
    queue.ledger.commit().unwrap();
    queue.kill();
    assert_eq!(state(&queue, ids[0]), None);
    // A purge leaves nothing, and without `results` nothing is kept.
    queue.ledger.purge("f", Which::Queued);
    queue.ledger.purge("f", Which::Dead);
    assert!(queue.ledger.queues().is_empty());
    queue.terms.config.results = thaw_home::config::TimeSpan::seconds(0);
    let id = queue.add(None, NOW).unwrap().id;
    queue.take(NOW, 1);
    queue.finish(id, Outcome::Done(200), NOW);
    assert_eq!(state(&queue, id), None);
}

#[test]
fn results_are_bounded_for_a_function_and_for_the_node() {
    let mut queue = Queue::new();
    queue.terms.config.entries = NonZeroU32::new(3).unwrap();
    let run = |queue: &mut Queue, now| {
        let id = queue.add(None, now).unwrap().id;
        queue.take(now, 1);
        queue.finish(id, Outcome::Done(200), now);
        id
    };
    let ids: Vec<_> = (0..5).map(|n| run(&mut queue, NOW + n)).collect();
    let known = |queue: &Queue, id: &InvocationId| queue.ledger.status("f", *id).is_some();
    let kept: Vec<bool> = ids.iter().map(|id| known(&queue, id)).collect();
    assert_eq!(kept, [false, false, true, true, true]);
    queue.ledger.bound(Bounds { results: 2, ..BOUNDS });
    let last = run(&mut queue, NOW + 9);
    queue.kill();
    let kept = [&ids[3], &ids[4], &last].map(|id| known(&queue, id));
    assert_eq!(kept, [false, true, true]);
}

/// Functions with destinations, by name: whom those call that are done, and dead.
fn terms_with(
    destinations: &'static [(&'static str, Option<&'static str>, Option<&'static str>)],
) -> impl Fn(&str) -> Option<Terms> {
    move |name| {
        let (_, done, dead) = destinations.iter().find(|(known, ..)| *known == name)?;
        let function = |name: &Option<&str>| name.map(|name| name.parse().unwrap());
        let config = AsyncConfig {
            on_success: function(done),
            on_failure: function(dead),
            ..AsyncConfig::default()
        };
        let domain = name.starts_with("theirs").then(|| "other".to_owned());
        Some(Terms { config, domain, tenant_bytes: None })
    }
}

#[test]
fn a_destination_hears_once_of_each_end() {
    let mut queue = Queue::new();
    let terms =
        terms_with(&[("f", Some("glad"), Some("sad")), ("glad", None, None), ("sad", None, None)]);
    let all: Vec<_> = (0..3).map(|_| queue.add(None, NOW).unwrap().id).collect();
    let mut ids: Vec<_> = queue.take(NOW, 2).iter().map(|job| job.id).collect();
    ids.extend(all.iter().filter(|id| !ids.contains(id)).copied().collect::<Vec<_>>());
    queue.ledger.finish(ids[0], Outcome::Done(201), &queue.terms.clone(), NOW);
    queue.ledger.finish(ids[1], Outcome::Refused("status 422".into()), &queue.terms.clone(), NOW);
    // The third one grows too old.
    queue.ledger.expire(NOW + 7 * HOUR, |_| AsyncConfig::default());
    let called = queue.ledger.call_destinations(NOW + 7 * HOUR, &terms);
    assert!(called.iter().all(|called| called.is_queued) && called.len() == 3, "{called:?}");
    assert!(queue.ledger.call_destinations(NOW, &terms).is_empty());
    queue.ledger.commit().unwrap();
    queue.kill();
    let jobs = queue.take(NOW + 7 * HOUR, 9);
    let mut bodies = Vec::new();
    for job in &jobs {
        let body: serde_json::Value = serde_json::from_slice(&job.request.body).unwrap();
        assert_eq!(job.record.origin, Origin::Function("f".into()));
        let kind =
            ("ce-type".to_owned(), format!("thaw.invocation.{}", body["state"].as_str().unwrap()));
        assert!(job.request.headers.contains(&kind), "{:?}", job.request.headers);
        bodies.push((job.record.function.clone(), body["id"].clone(), body["status"].clone()));
    }
    bodies.sort_by_key(|(function, id, _)| (function.clone(), id.to_string()));
    let name = |id: InvocationId| serde_json::json!(id.to_string());
    assert_eq!(bodies[0], ("glad".to_owned(), name(ids[0]), serde_json::json!(201)));
    let mut dead: Vec<_> = bodies[1..].iter().map(|(_, id, _)| id.clone()).collect();
    dead.sort_by_key(ToString::to_string);
    let mut expected = vec![name(ids[1]), name(ids[2])];
    expected.sort_by_key(ToString::to_string);
    assert_eq!((bodies.len(), dead), (3, expected));
}

#[test]
fn an_end_that_was_not_committed_calls_nobody() {
    let mut queue = Queue::new();
    let terms = terms_with(&[("f", Some("glad"), None), ("glad", None, None)]);
    let id = queue.add(None, NOW).unwrap().id;
    queue.take(NOW, 1);
    queue.ledger.finish(id, Outcome::Done(200), &queue.terms.clone(), NOW);
    assert_eq!(queue.ledger.call_destinations(NOW, &terms).len(), 1);
    queue.kill();
    // It runs again, and the end of that one is heard of.
    let jobs = queue.take(NOW, 9);
    assert_eq!(jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [id]);
}

#[test]
fn destinations_end_somewhere_stay_with_their_tenant_and_within_bounds() {
    let mut queue = Queue::new();
    let terms = terms_with(&[
        ("f", Some("g"), Some("theirs")),
        ("g", Some("f"), Some("nobody")),
        ("theirs", None, None),
    ]);
    queue.add(None, NOW).unwrap();
    let mut rounds = 0;
    while let Some(job) = queue.take(NOW, 1).pop() {
        queue.ledger.finish(job.id, Outcome::Done(200), &queue.terms.clone(), NOW);
        queue.ledger.call_destinations(NOW, &terms);
        queue.ledger.commit().unwrap();
        rounds += 1;
        assert!(rounds < 100, "two functions call each other for ever");
    }
    assert_eq!(rounds, 9);
    // Another tenant's function, and one that is not there, hear of nothing.
    let id = queue.add(None, NOW).unwrap().id;
    queue.take(NOW, 1);
    queue.ledger.finish(id, Outcome::Refused("no".into()), &queue.terms.clone(), NOW);
    let called = queue.ledger.call_destinations(NOW, &terms);
    assert_eq!(called.len(), 1);
    assert!(!called[0].is_queued && queue.take(NOW, 9).is_empty());
    // A full queue of the destination keeps the end itself from nothing.
    let id = queue.add(None, NOW).unwrap().id;
    queue.take(NOW, 1);
    queue.ledger.bound(Bounds { entries: 0, ..BOUNDS });
    queue.ledger.finish(id, Outcome::Done(200), &queue.terms.clone(), NOW);
    let called = queue.ledger.call_destinations(NOW, &terms);
    assert_eq!(called.iter().map(|called| called.is_queued).collect::<Vec<_>>(), [false]);
    queue.ledger.commit().unwrap();
    queue.kill();
    assert_eq!(queue.ledger.status("f", id).map(|found| found.state), Some("done"));
    assert!(queue.take(NOW, 9).is_empty());
}

#[test]
fn what_destinations_are_queued_by_is_read_by_earlier_versions_too() {
    let mut queue = Queue::new();
    let terms = terms_with(&[("f", Some("glad"), None), ("glad", None, None)]);
    let id = queue.add(None, NOW).unwrap().id;
    queue.take(NOW, 1);
    queue.ledger.finish(id, Outcome::Done(200), &queue.terms.clone(), NOW);
    queue.ledger.call_destinations(NOW, &terms);
    queue.ledger.commit().unwrap();
    let record = queue.take(NOW, 1).remove(0).record;
    assert_eq!(record.origin, Origin::Function("f".into()));
    let stored = serde_json::to_value(&record).unwrap();
    assert_eq!((&stored["origin"], &stored["origin_function"]), (&"client".into(), &"f".into()));
    // What this version wrote before has the function in the origin itself.
    let mut before = stored.clone();
    before["origin"] = serde_json::json!({"function": "f"});
    before.as_object_mut().unwrap().remove("origin_function");
    for stored in [stored, before] {
        assert_eq!(serde_json::from_value::<record::Record>(stored).unwrap(), record);
    }
}

#[test]
fn results_of_the_largest_tenant_go_first() {
    let mut queue = Queue::new();
    let run = |queue: &mut Queue, function: &str, domain: &str, now| {
        queue.terms.domain = Some(domain.to_owned());
        let terms = queue.terms.clone();
        let id = queue.ledger.queue(invocation(function, None), &terms, now).unwrap().id;
        queue.ledger.commit().unwrap();
        queue.take(now, 1);
        queue.finish(id, Outcome::Done(200), now);
        id
    };
    // One tenant has the largest function, another one has more of them.
    let of_small: Vec<_> = (0..3).map(|n| run(&mut queue, "s", "small", NOW + n)).collect();
    let names = ["l1", "l2", "l3"];
    let of_large: Vec<_> =
        (0..6).map(|n| run(&mut queue, names[n % 3], "large", NOW + 9 + n as u64)).collect();
    queue.ledger.bound(Bounds { results: 8, ..BOUNDS });
    run(&mut queue, "l1", "large", NOW + 99);
    let known = |function: &str, id: &InvocationId| queue.ledger.status(function, *id).is_some();
    assert!(of_small.iter().all(|id| known("s", id)));
    let kept = of_large.iter().enumerate().filter(|(n, id)| known(names[n % 3], id));
    assert_eq!(kept.count(), 4);
}
