//! What is kept of templates.

use super::super::known::{BASE, MESSAGE_MAX};
use super::*;
use std::os::unix::fs::PermissionsExt;

fn new(name: &str, tag: &str) -> NewBuild {
    NewBuild { name: name.to_owned(), tags: vec![tag.to_owned()], limits: LimitsChange::default() }
}

fn named(text: &str) -> TemplateName {
    TemplateName::parse(text, "a").unwrap()
}

/// Builds something, to its end.
fn build(records: &TemplateRecords, name: &str, tag: &str) -> (String, String) {
    let (template, build) = records.request("a", new(name, tag), 2).unwrap();
    records.begin((&template, &build), LimitsChange::default(), 2).unwrap();
    assert!(records.finish(&template, &build, State::Ready, |_| ()));
    (template, build)
}

#[test]
fn the_next_daemon_knows_templates_and_which_builds_were_cut_off() {
    let place = tempfile::tempdir().unwrap();
    let records = TemplateRecords::load(place.path()).unwrap();
    let (template, _) = build(&records, "app", "v1");
    let (_, waiting) = records.request("a", new("app", "v2"), 2).unwrap();
    let (_, cut) = records.request("a", new("app", "v3"), 2).unwrap();
    records.begin((&template, &cut), LimitsChange::default(), 2).unwrap();
    drop(records);
    let mode = place.path().join(FILE).metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let records = TemplateRecords::load(place.path()).unwrap();
    let (_, known) = records.named("a", "app").unwrap();
    let left = [(cut.clone(), known.builds[&cut].sandbox.clone())];
    assert_eq!(records.fail_cut_off(), left);
    // Also for the one after it, should that one not come to an end with it.
    let records = TemplateRecords::load(place.path()).unwrap();
    assert_eq!(records.fail_cut_off(), left);
    records.leave_over(&cut);
    assert_eq!(records.leftovers(), [known.builds[&cut].checkpoint.clone()]);
    assert!(TemplateRecords::load(place.path()).unwrap().fail_cut_off().is_empty());
    let (_, known) = records.named("a", &template).unwrap();
    assert!(matches!(known.builds[&cut].state, State::Failed(_)));
    assert_eq!(known.builds[&waiting].state, State::Waiting);
    assert!(records.find("a", &named("app:v1")).is_some());
    assert!(records.find("a", &named("app:v3")).is_none());
    assert!(records.find("b", &named("app:v1")).is_none());
}

#[test]
fn checkpoints_that_no_tag_means_are_left_over() {
    let place = tempfile::tempdir().unwrap();
    let records = TemplateRecords::load(place.path()).unwrap();
    let checkpoint = |tag: &str| records.find("a", &named(tag)).unwrap().checkpoint;
    let (template, _) = build(&records, "app", "default");
    let first = checkpoint("app");
    assert_eq!(checkpoint("app:latest"), first);
    build(&records, "app", "default");
    assert_eq!(records.leftovers(), std::slice::from_ref(&first));
    records.forget_leftover(&first);
    let second = checkpoint("app");
    records.tag("a", &named("app"), &["kept".to_owned()]).unwrap();
    build(&records, "app", "default");
    assert!(records.leftovers().is_empty(), "it has a tag still");
    records.untag("a", "app", &["kept".to_owned()]).unwrap();
    assert_eq!(records.leftovers(), [second]);
    records.remove("a", &template).unwrap();
    assert_eq!(records.leftovers().len(), 2);
    assert!(records.named("a", "app").is_err());
}

#[test]
fn tags_and_checkpoints_of_a_name_have_bounds() {
    let place = tempfile::tempdir().unwrap();
    let records = TemplateRecords::load(place.path()).unwrap();
    build(&records, "app", "default");
    let tags: Vec<_> = (0..TAGS_MAX).map(|n| n.to_string()).collect();
    let full = records.tag("a", &named("app"), &tags).unwrap_err();
    assert_eq!(full.kind, Kind::Exhausted);
    records.tag("a", &named("app"), &tags[1..]).unwrap();
    assert_eq!(records.request("a", new("app", "new"), 2).unwrap_err().kind, Kind::Exhausted);
    assert_eq!(Failure::new(BASE, &"ä".repeat(MESSAGE_MAX)).message.len(), MESSAGE_MAX);
    // Others stand on those that are left over, so they count.
    for n in 1..2 * CHECKPOINTS_PER_TEMPLATE {
        records.contents.lock().leftovers.insert(n.to_string(), "a".to_owned());
    }
    let full = records.request("a", new("app", "default"), 2).unwrap_err();
    assert_eq!(full.kind, Kind::Exhausted);
    records.forget_leftover("1");
    let begin = |build: &str, template: &str| {
        records.begin((template, build), LimitsChange::default(), 2).map_err(|full| full.kind)
    };
    let asked = [(); 2].map(|()| records.request("a", new("app", "default"), 2).unwrap());
    let begun = asked.map(|(template, build)| begin(&build, &template));
    assert_eq!(begun, [Ok(()), Err(Kind::Exhausted)]);
    records.request("b", new("app", "default"), 2).unwrap();
}

#[test]
fn nothing_is_left_of_a_deleted_template_whose_build_its_daemon_did_not_end() {
    let place = tempfile::tempdir().unwrap();
    let records = TemplateRecords::load(place.path()).unwrap();
    let (template, cut) = records.request("a", new("app", "v1"), 2).unwrap();
    records.begin((&template, &cut), LimitsChange::default(), 2).unwrap();
    let build = records.named("a", "app").unwrap().1.builds[&cut].clone();
    records.remove("a", &template).unwrap();
    assert!(records.leftovers().is_empty(), "it may be written yet");
    let records = TemplateRecords::load(place.path()).unwrap();
    assert_eq!(records.fail_cut_off(), [(cut.clone(), build.sandbox)]);
    records.leave_over(&cut);
    assert_eq!(records.leftovers(), [build.checkpoint]);
    // One that ends before its daemon leaves its checkpoint.
    let (template, ended) = records.request("a", new("app", "v1"), 2).unwrap();
    records.begin((&template, &ended), LimitsChange::default(), 2).unwrap();
    records.remove("a", &template).unwrap();
    assert_eq!(records.contents.lock().checkpoints_of("a"), 2);
    assert!(!records.finish(&template, &ended, State::Ready, |_| ()));
    records.leave_over(&ended);
    assert_eq!(records.leftovers().len(), 2);
    let records = TemplateRecords::load(place.path()).unwrap();
    assert!(records.fail_cut_off().is_empty());
}

#[test]
fn a_clock_that_was_ahead_makes_no_new_build_go() {
    let place = tempfile::tempdir().unwrap();
    let records = TemplateRecords::load(place.path()).unwrap();
    for n in 0..30 {
        let (template, build) = records.request("a", new("app", "v1"), 2).unwrap();
        let mut contents = records.contents.lock();
        let builds = &mut contents.templates.get_mut(&template).unwrap().builds;
        assert!(builds.contains_key(&build), "{n}");
        assert!(builds.len() <= 10);
        // The next ones come an hour before this one.
        builds.get_mut(&build).unwrap().created_ms += 3_600_000;
    }
}

#[test]
fn tags_that_builds_are_going_to_get_count() {
    let place = tempfile::tempdir().unwrap();
    let records = TemplateRecords::load(place.path()).unwrap();
    for n in 0..TAGS_MAX / 16 {
        let tags = (0..16).map(|m| format!("{n}.{m}")).collect();
        records.request("a", NewBuild { tags, ..new("app", "") }, 2).unwrap();
    }
    let full = records.request("a", new("app", "one"), 2).unwrap_err();
    assert_eq!(full.kind, Kind::Exhausted);
    records.request("a", new("app", "0.0"), 2).unwrap();
}

#[test]
fn ids_of_builds_are_uuids() {
    let id = random_uuid().unwrap();
    let parts: Vec<_> = id.split('-').map(str::len).collect();
    assert_eq!(parts, [8, 4, 4, 4, 12]);
    assert!(id.as_bytes()[14] == b'4' && b"89ab".contains(&id.as_bytes()[19]), "{id}");
    assert_ne!(random_uuid().unwrap(), id);
}
