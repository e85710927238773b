//! Tests of interest sets over pipes.

use super::*;
use crate::fs::file::OpenFlags;
use crate::fs::pipe::{Pipe, PipeEnd};
use crate::io::{Sink, Source};
use crate::testing::Sandbox;

const IN: u32 = Events::IN.bits();
const OUT: u32 = Events::OUT.bits();

fn pipe() -> (Arc<OpenFile>, Arc<PipeEnd>) {
    let (reader, writer) = Pipe::pair(1);
    (OpenFile::new(reader, OpenFlags::empty(), None), writer)
}

fn write(end: &PipeEnd) {
    end.write(&mut Source::kernel(b"x"), 0).unwrap();
}

fn read(file: &OpenFile) {
    let mut byte = [0];
    file.file.read(&mut Sink::kernel(&mut byte), 0).unwrap();
}

fn event(events: u32, data: u64) -> EpollEvent {
    EpollEvent { events, data }
}

fn report(epoll: &Epoll, max: usize) -> Vec<(u32, u64)> {
    let mut events = Vec::new();
    epoll
        .report(max, |_, event| {
            events.push((event.events, event.data));
            Ok(())
        })
        .unwrap();
    events
}

#[test]
fn level_triggered_reports_until_drained() {
    let _sandbox = Sandbox::new();
    let (reader, writer) = pipe();
    let epoll = Epoll::new();
    epoll.add(3, &reader, event(IN, 30)).unwrap();
    assert_eq!(report(&epoll, 8), []);
    write(&writer);
    write(&writer);
    assert_eq!(report(&epoll, 8), [(IN, 30)]);
    read(&reader);
    assert_eq!(report(&epoll, 8), [(IN, 30)]);
    read(&reader);
    assert_eq!(report(&epoll, 8), []);
}

#[test]
fn edge_triggered_reports_each_change_once() {
    let _sandbox = Sandbox::new();
    let (reader, writer) = pipe();
    let epoll = Epoll::new();
    write(&writer);
    epoll.add(3, &reader, event(IN | Mode::EDGE.bits(), 1)).unwrap();
    assert_eq!(report(&epoll, 8), [(IN, 1)]);
    assert_eq!(report(&epoll, 8), []);
    write(&writer);
    assert_eq!(report(&epoll, 8), [(IN, 1)]);
    assert_eq!(report(&epoll, 8), []);
    // Renewing the interest looks again.
    epoll.modify(3, &reader, event(IN | Mode::EDGE.bits(), 2)).unwrap();
    assert_eq!(report(&epoll, 8), [(IN, 2)]);
    drop(writer);
    assert_eq!(report(&epoll, 8), [(IN | Events::HUP.bits(), 2)]);
}

#[test]
fn one_shot_is_silent_until_renewed() {
    let _sandbox = Sandbox::new();
    let (reader, writer) = pipe();
    let epoll = Epoll::new();
    epoll.add(3, &reader, event(IN | Mode::ONESHOT.bits(), 1)).unwrap();
    write(&writer);
    assert_eq!(report(&epoll, 8), [(IN, 1)]);
    write(&writer);
    assert_eq!(report(&epoll, 8), []);
    epoll.modify(3, &reader, event(IN | Mode::ONESHOT.bits(), 1)).unwrap();
    assert_eq!(report(&epoll, 8), [(IN, 1)]);
}

#[test]
fn reports_take_turns_when_there_is_little_room() {
    let _sandbox = Sandbox::new();
    let epoll = Epoll::new();
    let pipes: Vec<_> = (0..3).map(|_| pipe()).collect();
    for (n, (reader, writer)) in pipes.iter().enumerate() {
        epoll.add(n as i32, reader, event(IN, n as u64)).unwrap();
        write(writer);
    }
    let seen: Vec<u64> = (0..6).map(|_| report(&epoll, 1)[0].1).collect();
    assert_eq!(seen, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn interest_and_hint_filter_events() {
    let _sandbox = Sandbox::new();
    let (reader, writer) = Pipe::pair(1);
    let writer_file = OpenFile::new(writer.clone(), OpenFlags::WRONLY, None);
    let epoll = Epoll::new();
    epoll.add(4, &writer_file, event(OUT | Mode::EDGE.bits(), 4)).unwrap();
    assert_eq!(report(&epoll, 8), [(OUT, 4)]);
    write(&writer);
    assert_eq!(report(&epoll, 8), []);
    drop(reader);
    assert_eq!(report(&epoll, 8), [(OUT | Events::ERR.bits(), 4)]);
}

#[test]
fn closing_the_description_ends_the_watch() {
    let _sandbox = Sandbox::new();
    let (reader, writer) = pipe();
    let epoll = Epoll::new();
    epoll.add(3, &reader, event(IN, 1)).unwrap();
    write(&writer);
    let duplicate = reader.clone();
    drop(reader);
    assert_eq!(report(&epoll, 8), [(IN, 1)]);
    drop(duplicate);
    assert_eq!(report(&epoll, 8), []);
    // The number is free for another file.
    let (other, _writer) = pipe();
    epoll.add(3, &other, event(IN, 2)).unwrap();
    assert_eq!(epoll.shared.state.borrow_mut().items.len(), 1);
}

#[test]
fn dropping_the_set_leaves_the_file_alone() {
    let (reader, _writer) = pipe();
    let epoll = Epoll::new();
    epoll.add(3, &reader, event(IN, 1)).unwrap();
    assert!(!reader.file.wait_queue().unwrap().is_empty());
    drop(epoll);
    assert!(reader.file.wait_queue().unwrap().is_empty());
}

#[test]
fn control_errors() {
    let (reader, _writer) = pipe();
    let epoll = Epoll::new();
    assert_eq!(epoll.modify(3, &reader, event(IN, 1)), Err(Errno::ENOENT));
    assert_eq!(epoll.remove(3, &reader), Err(Errno::ENOENT));
    epoll.add(3, &reader, event(IN, 1)).unwrap();
    assert_eq!(epoll.add(3, &reader, event(IN, 1)), Err(Errno::EEXIST));
    // The same file by another number is another item.
    epoll.add(4, &reader, event(IN, 1)).unwrap();
    epoll.remove(3, &reader).unwrap();
    let exclusive = Mode::EXCLUSIVE.bits();
    assert_eq!(
        epoll.add(5, &reader, event(IN | exclusive | Mode::ONESHOT.bits(), 1)),
        Err(Errno::EINVAL)
    );
    epoll.add(5, &reader, event(IN | exclusive, 1)).unwrap();
    assert_eq!(epoll.modify(5, &reader, event(IN, 1)), Err(Errno::EINVAL));
}

#[test]
fn a_nested_set_is_ready_when_it_would_report() {
    let _sandbox = Sandbox::new();
    let (reader, writer) = pipe();
    let inner = Arc::new(Epoll::new());
    inner.add(3, &reader, event(IN, 1)).unwrap();
    let inner_file = OpenFile::new(inner.clone(), OpenFlags::RDWR, None);
    let outer = Epoll::new();
    outer.add(4, &inner_file, event(IN, 2)).unwrap();
    assert_eq!(report(&outer, 8), []);
    write(&writer);
    assert_eq!(report(&outer, 8), [(IN, 2)]);
    assert_eq!(report(&inner, 8), [(IN, 1)]);
    read(&reader);
    assert_eq!(report(&outer, 8), []);
}

#[test]
fn loops_and_deep_nests_are_refused() {
    let sets: Vec<_> = (0..7).map(|_| Arc::new(Epoll::new())).collect();
    let files: Vec<_> =
        sets.iter().map(|set| OpenFile::new(set.clone(), OpenFlags::RDWR, None)).collect();
    for n in 0..4 {
        sets[n].add(10, &files[n + 1], event(IN, 0)).unwrap();
    }
    assert_eq!(sets[4].add(10, &files[5], event(IN, 0)), Err(Errno::ELOOP));
    assert_eq!(sets[5].add(10, &files[0], event(IN, 0)), Err(Errno::ELOOP));
    assert_eq!(sets[2].add(11, &files[0], event(IN, 0)), Err(Errno::ELOOP));
    assert_eq!(sets[1].add(11, &files[1], event(IN, 0)), Err(Errno::ELOOP));
}
