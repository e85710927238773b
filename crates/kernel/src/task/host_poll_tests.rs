use super::*;
use crate::testing::Sandbox;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use crate::task::wait::Waiter;

struct Count(AtomicU32);
impl Waiter for Count {
    fn wake(&self, _: Events) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn pair() -> (HostPoll, Arc<HostFile>, UnixStream, UnixStream, Arc<Count>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let handle = Handle::OfBoot(OfBoot::new(HostFd::new(ours.as_raw_fd())));
    let file = HostFile::new(handle, Kind::Socket, Arc::new(WaitQueue::new()));
    let polls = HostPoll::new();
    polls.register(&file);
    let count = Arc::new(Count(AtomicU32::new(0)));
    file.queue().register(count.clone());
    (polls, file, ours, theirs, count)
}

fn read(file: &HostFile, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let n = file.read(&mut Sink::kernel(&mut bytes), Peek::No)?;
    bytes.truncate(n);
    Ok(bytes)
}

#[test]
fn short_reads_say_that_nothing_is_left() {
    let _sandbox = Sandbox::new();
    let (polls, file, _ours, mut theirs, count) = pair();
    assert_eq!(file.poll(), OUT);
    theirs.write_all(b"hello").unwrap();
    // Nothing in doubt: the news comes with the next look at the host.
    assert_eq!(file.poll(), OUT);
    polls.look(None);
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    assert_eq!(file.poll(), IN | OUT);
    // What is known is not asked again, and wakes nobody again.
    polls.look(None);
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    assert_eq!(read(&file, 2).unwrap(), b"he");
    assert_eq!(file.poll(), IN | OUT);
    assert_eq!(read(&file, 100).unwrap(), b"llo");
    assert_eq!(file.poll(), OUT);
    assert_eq!(read(&file, 1), Err(Errno::EAGAIN));
}

#[test]
fn an_exact_read_is_looked_at_again() {
    let _sandbox = Sandbox::new();
    let (_polls, file, _ours, mut theirs, _count) = pair();
    theirs.write_all(b"abc").unwrap();
    assert_eq!(read(&file, 3).unwrap(), b"abc");
    assert_eq!(file.poll(), OUT);
    theirs.write_all(b"d").unwrap();
    assert_eq!(read(&file, 1).unwrap(), b"d");
    theirs.write_all(b"e").unwrap();
    assert_eq!(file.poll(), IN | OUT);
}

#[test]
fn a_full_socket_is_writable_again_after_a_read() {
    let _sandbox = Sandbox::new();
    let (polls, file, _ours, mut theirs, count) = pair();
    let bytes = vec![1; 1 << 20];
    let mut sent = 0;
    loop {
        match file.write(&mut Source::kernel(&bytes)) {
            Ok(n) => sent += n,
            Err(error) => break assert_eq!(error, Errno::EAGAIN),
        }
    }
    assert_eq!(file.poll() & OUT, Events::empty());
    polls.look(None);
    assert_eq!(count.0.load(Ordering::Relaxed), 0);
    let mut drained = vec![0; sent];
    theirs.read_exact(&mut drained).unwrap();
    assert_eq!(polls.look(None).files, 1);
    assert_eq!(file.poll(), OUT);
}

#[test]
fn hang_up_is_final_and_does_not_spin() {
    let _sandbox = Sandbox::new();
    let (polls, file, _ours, theirs, count) = pair();
    drop(theirs);
    polls.look(None);
    assert!(file.poll().contains(Events::HUP | Events::IN));
    polls.look(None);
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    assert_eq!(read(&file, 10).unwrap(), b"");
    assert!(file.poll().contains(Events::HUP | Events::IN));
}

#[test]
fn small_pieces_are_sent_together() {
    let _sandbox = Sandbox::new();
    let (_polls, file, _ours, mut theirs, _count) = pair();
    let (header, body, tail) = (b"header ".to_vec(), vec![b'b'; 9000], b" tail".to_vec());
    let mut source = Source::kernel_pieces(&[&header, &body, &tail]);
    assert_eq!(file.write(&mut source), Ok(9012));
    let mut bytes = vec![0; 9012];
    theirs.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, [header, body, tail].concat());
}

#[test]
fn who_waits_for_a_descriptor_of_another_boot_is_woken() {
    let _sandbox = Sandbox::new();
    let (polls, _file, _ours, _theirs, count) = pair();
    let handle = Handle::Lost;
    let lost = HostFile::new(handle, Kind::Socket, Arc::new(WaitQueue::new()));
    let waiting = Arc::new(Count(AtomicU32::new(0)));
    lost.queue().register(waiting.clone());
    polls.register(&lost);
    polls.wake_lost();
    assert_eq!(count.0.load(Ordering::Relaxed), 0);
    assert_eq!(waiting.0.load(Ordering::Relaxed), 1);
}

#[test]
fn a_descriptor_of_another_boot_is_reset() {
    let _sandbox = Sandbox::new();
    let handle = Handle::Lost;
    let file = HostFile::new(handle, Kind::Socket, Arc::new(WaitQueue::new()));
    assert_eq!(read(&file, 1), Err(Errno::ECONNRESET));
    assert!(file.poll().contains(Events::ERR | Events::HUP));
}

#[test]
fn the_control_socket_ends_a_wait() {
    let _sandbox = Sandbox::new();
    let (polls, _file, _ours, _theirs, _count) = pair();
    let (control, mut host) = UnixStream::pair().unwrap();
    host.write_all(b"x").unwrap();
    let waited = polls.look(Some(HostFd::new(control.as_raw_fd())));
    assert_eq!(waited, Waited { control: true, files: 0, interrupted: false });
}
