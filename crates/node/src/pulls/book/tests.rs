//! What is decided of pulls, without a process that fetches.

use super::*;
use std::fs;
use thaw_home::partial::parts;

fn new(reference: &str) -> NewPull {
    let reference = reference.to_owned();
    NewPull { reference, name: None, domain: None, allow_egress: false, lazy: true }
}

fn failed(reason: &str, is_refusal: bool) -> News {
    News::Failed { reason: reason.to_owned(), is_refusal }
}

/// A directory with partial functions of these names.
fn directory(names: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in names {
        let place = directory.path().join(name);
        fs::create_dir(&place).unwrap();
        fs::write(place.join(parts::RECORD), b"{}").unwrap();
        fs::write(place.join(parts::LOCK), b"").unwrap();
    }
    directory
}

fn served() -> BTreeSet<String> {
    ["shop", "far"].map(str::to_owned).into()
}

fn states(pulls: &Pulls) -> Vec<PullState> {
    pulls.all().into_iter().map(|pull| pull.fetching.state).collect()
}

#[test]
fn functions_that_nobody_fetches_are_adopted_once() {
    let (pulls, directory) = (Pulls::default(), directory(&["shop", "far"]));
    let lock = fs::File::open(directory.path().join("far").join(parts::LOCK)).unwrap();
    lock.lock().unwrap();
    pulls.adopt(directory.path(), &served());
    pulls.adopt(directory.path(), &served());
    assert_eq!(states(&pulls), [PullState::Waiting]);
    assert_eq!(pulls.fetching("far").unwrap().state, PullState::Command);
    assert_eq!(pulls.next(), Some((1, Order::GoOn("shop".to_owned()))));
    assert_eq!(pulls.next(), None);
    // The command is killed.
    drop(lock);
    pulls.adopt(directory.path(), &served());
    assert_eq!(pulls.next(), Some((2, Order::GoOn("far".to_owned()))));
    assert_eq!(pulls.fetching("far").unwrap().state, PullState::Fetching);
}

#[test]
fn failures_are_tried_again_with_growing_pauses_and_refusals_are_not() {
    let (pulls, directory) = (Pulls::default(), directory(&["shop"]));
    let place = directory.path();
    pulls.adopt(place, &served());
    let mut pauses = Vec::new();
    for _ in 0..8 {
        pulls.state().pulls.get_mut(&1).unwrap().not_before = None;
        pulls.next().unwrap();
        pauses.extend(pulls.ended(place, 1, failed("no network", false)));
        assert_eq!(pulls.next(), None, "not at once");
    }
    assert_eq!(
        pauses.iter().map(Duration::as_secs).collect::<Vec<_>>(),
        [1, 2, 4, 8, 16, 32, 60, 60]
    );
    assert_eq!(pulls.of(1).unwrap().fetching.problem.as_deref(), Some("no network"));
    // A piece that has come makes it begin with short pauses again.
    pulls.state().pulls.get_mut(&1).unwrap().not_before = None;
    pulls.next().unwrap();
    let progress = News::Progress { bytes: 5, of: 9, moved: 5, failed: 2 };
    assert_eq!(pulls.note(1, &progress), Counted { moved: 5, failed_fetches: 2 });
    assert_eq!(pulls.note(1, &progress), Counted::default());
    assert_eq!(pulls.ended(place, 1, failed("no network", false)), Some(PAUSES.0));
    pulls.state().pulls.get_mut(&1).unwrap().not_before = None;
    pulls.next().unwrap();
    assert_eq!(pulls.ended(place, 1, failed("it lies", true)), None);
    assert_eq!(states(&pulls), [PullState::Failed]);
    pulls.adopt(place, &served());
    assert_eq!(pulls.all().len(), 1, "it is left alone");
    // Until it is pulled anew.
    let record = place.join("shop").join(parts::RECORD);
    fs::write(place.join("new"), b"{}").unwrap();
    fs::rename(place.join("new"), record).unwrap();
    pulls.adopt(place, &served());
    assert_eq!(pulls.next().unwrap().0, 2);
}

#[test]
fn so_many_are_fetched_at_a_time_and_so_many_wait() {
    let pulls = Pulls::default();
    let asked = || pulls.begin(new("registry.example/shop:1"));
    for _ in 0..FETCHERS_MAX {
        asked().unwrap();
        pulls.next().unwrap();
    }
    for _ in 0..WAITING_MAX {
        asked().unwrap();
        assert_eq!(pulls.next(), None);
    }
    assert_eq!(asked(), Err(PullsError::Full));
    assert_eq!(pulls.ended(Path::new("/"), 1, failed("no", false)), None);
    assert_eq!(pulls.next().unwrap().0, FETCHERS_MAX as u64 + 1);
    asked().unwrap();
    assert!(matches!(pulls.begin(new("s3://")), Err(PullsError::Wrong(_))));
}

#[test]
fn those_that_fail_keep_no_other_one_from_its_turn() {
    let (pulls, directory) = (Pulls::default(), directory(&["shop"]));
    pulls.adopt(directory.path(), &served());
    assert_eq!(pulls.next().unwrap().0, 1);
    pulls.begin(new("registry.example/other:1")).unwrap();
    pulls.ended(directory.path(), 1, failed("no network", false));
    pulls.state().pulls.get_mut(&1).unwrap().not_before = None;
    assert_eq!((pulls.next().unwrap().0, pulls.next().unwrap().0), (2, 1));
}

/// Begins the next pull, and has its fetcher connect; its number, and the fetcher's side.
fn begin_next(pulls: &Pulls) -> (u64, UnixStream) {
    let (id, _) = pulls.next().unwrap();
    let (own, fetcher) = UnixStream::pair().unwrap();
    assert!(pulls.connected(id, own));
    (id, fetcher)
}

fn progress(pulls: &Pulls, id: u64, bytes: u64, of: u64) {
    pulls.note(id, &News::Progress { bytes, of, moved: 0, failed: 0 });
}

#[test]
fn slow_pulls_take_turns_with_those_that_wait() {
    let names = ["a", "b", "c", "d"];
    let (pulls, directory) = (Pulls::default(), directory(&names));
    let served = names.map(str::to_owned).into();
    pulls.adopt(directory.path(), &served);
    let fetchers: Vec<_> = (0..FETCHERS_MAX).map(|_| begin_next(&pulls)).collect();
    let is_ended = |id: u64| {
        let fetcher = &fetchers.iter().find(|(of, _)| *of == id).unwrap().1;
        fetcher.set_nonblocking(true).unwrap();
        std::io::Read::read(&mut &*fetcher, &mut [0]).is_ok()
    };
    let ended = || (1..=4).filter(|id| is_ended(*id)).collect::<Vec<_>>();
    progress(&pulls, 2, 5, 9);
    let now = Instant::now() + TURN;
    assert_eq!((pulls.next_at(now), ended()), (None, vec![]), "nobody waits");
    pulls.begin(new("registry.example/other:1")).unwrap();
    pulls.begin(new("registry.example/third:1")).unwrap();
    assert_eq!((pulls.next(), ended()), (None, vec![]), "they have time still");
    // One that has all pieces stores them, and is not disturbed. No other one is ended as long as one ends.
    progress(&pulls, 1, 9, 9);
    assert_eq!((pulls.next_at(now), ended()), (None, vec![2]));
    assert_eq!((pulls.next_at(now), ended()), (None, vec![2]));
    let gone = News::Note(String::new());
    assert_eq!(pulls.ended(directory.path(), 2, gone), Some(Duration::ZERO));
    let waiting = pulls.of(2).unwrap().fetching;
    assert_eq!((waiting.state, waiting.failed_tries), (PullState::Waiting, 0));
    assert_eq!(waiting.problem, None);
    // It is behind those that waited.
    assert_eq!(pulls.next_at(now).unwrap().0, 5);
    assert_eq!((pulls.next_at(now), ended()), (None, vec![2, 3]));
    pulls.ended(directory.path(), 3, failed("no network", false));
    assert_eq!(pulls.next_at(now).unwrap().0, 6);
    assert_eq!((pulls.next_at(now), ended()), (None, vec![2, 3, 4]));
    assert_eq!(pulls.ended(directory.path(), 4, failed("it lies", true)), None);
    assert_eq!(pulls.next_at(now), Some((2, Order::GoOn("b".to_owned()))));
    assert_eq!(pulls.next_at(now), None);
    // It has failed in its next turn, and is tried again after a pause.
    let pause = pulls.ended(directory.path(), 2, failed("no network", false));
    assert_eq!(pause, Some(PAUSES.0));
}

#[test]
fn pulls_of_clients_have_turns_when_something_of_them_is_kept() {
    let pulls = Pulls::default();
    let whole = || NewPull { lazy: false, ..new("registry.example/image:1") };
    (0..=FETCHERS_MAX).for_each(|_| drop(pulls.begin(whole()).unwrap()));
    let _fetchers: Vec<_> = (0..FETCHERS_MAX).map(|_| begin_next(&pulls)).collect();
    let now = Instant::now() + TURN;
    progress(&pulls, 1, 0, 9);
    progress(&pulls, 2, 9, 9);
    pulls.next_at(now);
    let is_turn_over = |id: u64| pulls.state().pulls[&id].is_turn_over;
    assert!(!(1..=4).any(is_turn_over));
    progress(&pulls, 4, 1, 9);
    pulls.next_at(now);
    assert!(is_turn_over(4));
    // It has come to its end all the same.
    let done = News::Done { name: "shop".to_owned(), digest: None };
    assert_eq!(pulls.ended(Path::new("/"), 4, done), None);
    assert_eq!(pulls.next().unwrap().0, 5);
}

#[test]
fn turns_end_for_those_that_wait_in_earnest_and_come_again() {
    let names = ["a", "b", "c", "d", "e"];
    let (pulls, directory) = (Pulls::default(), directory(&names));
    let served = names.map(str::to_owned).into();
    pulls.adopt(directory.path(), &served);
    let mut fetchers: Vec<_> = (0..FETCHERS_MAX).map(|_| begin_next(&pulls)).collect();
    let is_turn_over = |id: u64| pulls.state().pulls[&id].is_turn_over;
    // One that has just failed may fail for ever.
    pulls.ended(directory.path(), 1, failed("no network", false));
    fetchers.push(begin_next(&pulls));
    assert_eq!(fetchers.last().unwrap().0, 5);
    pulls.state().pulls.get_mut(&1).unwrap().not_before = None;
    pulls.state().pulls.get_mut(&1).unwrap().waits_since = Instant::now() + TURN / 2;
    assert_eq!(pulls.next_at(Instant::now() + TURN), None);
    assert!(!(2..=5).any(is_turn_over));
    assert_eq!(pulls.next_at(Instant::now() + 2 * TURN), None);
    assert!(is_turn_over(2));
    // It waits before whoever comes later.
    pulls.ended(directory.path(), 2, News::Note(String::new()));
    pulls.begin(new("registry.example/later:1")).unwrap();
    assert_eq!(pulls.next(), Some((2, Order::GoOn("b".to_owned()))));
}

#[test]
fn one_that_pulls_all_at_once_holds_up_no_partial_function() {
    let (pulls, directory) = (Pulls::default(), directory(&["shop"]));
    pulls.begin(NewPull { lazy: false, ..new("registry.example/image:1") }).unwrap();
    pulls.next().unwrap();
    let (own, _fetcher) = UnixStream::pair().unwrap();
    assert!(pulls.connected(1, own));
    pulls.adopt(directory.path(), &served());
    assert_eq!(pulls.next(), Some((2, Order::GoOn("shop".to_owned()))));
}

#[test]
fn those_that_were_ended_before_their_turn_are_forgotten_too() {
    let pulls = Pulls::default();
    for id in 1..=2 * ENDED_MAX as u64 {
        pulls.begin(new("registry.example/shop:1")).unwrap();
        pulls.cancel(Path::new("/"), id).unwrap();
    }
    assert!(pulls.all().len() <= ENDED_MAX + 1);
}

#[test]
fn those_that_have_ended_are_forgotten_one_day() {
    let pulls = Pulls::default();
    for id in 1..=ENDED_MAX as u64 + 3 {
        pulls.begin(new("registry.example/shop:1")).unwrap();
        pulls.next().unwrap();
        let done = News::Done { name: "shop".to_owned(), digest: None };
        assert_eq!(pulls.ended(Path::new("/"), id, done), None);
    }
    assert_eq!(pulls.all().len(), ENDED_MAX);
    assert!(pulls.of(3).is_none() && pulls.of(4).is_some());
    assert_eq!(pulls.fetching("shop").unwrap().state, PullState::Done);
}

#[test]
fn one_that_is_cancelled_is_left_alone() {
    let (pulls, directory) = (Pulls::default(), directory(&["shop"]));
    pulls.begin(new("registry.example/shop:1")).unwrap();
    pulls.next().unwrap();
    let (own, fetcher) = UnixStream::pair().unwrap();
    assert!(pulls.connected(1, own));
    let serve = News::Serve { function: "shop".to_owned(), part: Part::Run };
    pulls.note(1, &serve);
    let cancelled = pulls.cancel(directory.path(), 1).unwrap();
    assert_eq!(cancelled.fetching.state, PullState::Cancelled);
    assert_eq!(std::io::Read::read(&mut &fetcher, &mut [0]).unwrap(), 0, "it hears its end");
    assert_eq!(pulls.ended(directory.path(), 1, failed("gone", false)), None);
    pulls.adopt(directory.path(), &served());
    assert_eq!(states(&pulls), [PullState::Cancelled]);
    assert_eq!(pulls.cancel(directory.path(), 7), None);
}

#[test]
fn what_is_served_in_part_no_more_is_not_fetched() {
    let (pulls, directory) = (Pulls::default(), directory(&["shop", "far"]));
    let without = |gone: &str| served().into_iter().filter(|name| name != gone).collect();
    pulls.adopt(directory.path(), &without("far"));
    assert_eq!(pulls.next(), Some((1, Order::GoOn("shop".to_owned()))));
    pulls.adopt(directory.path(), &without("shop"));
    assert_eq!(states(&pulls), [PullState::Fetching, PullState::Waiting]);
    pulls.adopt(directory.path(), &served());
    pulls.adopt(directory.path(), &without("shop"));
    let long_ago = Instant::now() - SUPERSEDED_FOR;
    let since = pulls.state().pulls.get_mut(&1).unwrap().superseded.replace(long_ago);
    assert!(since.is_some_and(|since| since > long_ago), "it began anew");
    pulls.adopt(directory.path(), &without("shop"));
    assert_eq!(states(&pulls), [PullState::Cancelled, PullState::Waiting]);
    // One that has just stored all of it is.
    pulls.next().unwrap();
    pulls.note(2, &News::Serve { function: "far".to_owned(), part: Part::Whole });
    pulls.adopt(directory.path(), &BTreeSet::new());
    assert_eq!(states(&pulls), [PullState::Cancelled, PullState::Fetching]);
}

#[test]
fn a_pull_that_was_served_goes_on_after_a_failure() {
    let pulls = Pulls::default();
    pulls.begin(new("registry.example/shop:1")).unwrap();
    pulls.next().unwrap();
    pulls.note(1, &News::Serve { function: "shop".to_owned(), part: Part::Run });
    assert!(pulls.ended(Path::new("/"), 1, failed("lost", false)).is_some());
    pulls.state().pulls.get_mut(&1).unwrap().not_before = None;
    assert_eq!(pulls.next(), Some((1, Order::GoOn("shop".to_owned()))));
    assert!(pulls.wait(Duration::from_secs(60)), "it hears at once of what was begun");
    pulls.stop();
    assert!(!pulls.wait(Duration::from_secs(60)));
    let (own, _fetcher) = UnixStream::pair().unwrap();
    assert!(!pulls.connected(1, own), "nothing is begun any more");
}
