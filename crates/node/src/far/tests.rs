//! A fetcher that is played by the test.

use super::*;
use std::fs;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, channel};
use thaw_home::partial::write_reply;

const HASH: [u8; 32] = [7; 32];
const SOON: Duration = Duration::from_secs(20);

struct Place {
    directory: tempfile::TempDir,
    far: FarContents,
}

/// A function of three contents and two segments.
fn place() -> Place {
    place_with(Duration::ZERO)
}

/// The same, where it is waited so long for a fetcher.
fn place_with(without_fetcher: Duration) -> Place {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join(parts::CONTENTS)).unwrap();
    fs::write(directory.path().join(parts::IMAGE), b"image").unwrap();
    fs::write(directory.path().join(parts::CONTENTS).join("1"), b"content").unwrap();
    let image = Segment { of: MovedFile::Image, piece: 0 };
    let content = Segment { of: MovedFile::Content(2), piece: 1 };
    let shared = Shared {
        socket: directory.path().join(parts::SOCKET),
        image: File::open(directory.path().join(parts::IMAGE)).unwrap(),
        directory: File::open(directory.path().join(parts::CONTENTS)).unwrap(),
        hash: HASH,
        contents: 3,
        segments: vec![image, content],
        without_fetcher,
        counters: PartCounters::default(),
        problem: Box::new(|| Some("no network".to_owned())),
        state: Mutex::default(),
    };
    Place { directory, far: FarContents { shared: Arc::new(shared) } }
}

impl Place {
    fn listen(&self) -> UnixListener {
        let path = self.directory.path().join(parts::SOCKET);
        let _ = fs::remove_file(&path);
        UnixListener::bind(path).unwrap()
    }

    fn ask(&self, number: u32) -> Receiver<io::Result<String>> {
        let (say, answer) = channel();
        let asked = self.far.fetch(
            number,
            Box::new(move |found| {
                let text = found.map(|file| io::read_to_string(File::from(file)).unwrap());
                let _ = say.send(text);
            }),
        );
        assert!(asked.is_ok());
        answer
    }
}

fn accept(listener: &UnixListener) -> UnixStream {
    let (mut stream, _) = listener.accept().unwrap();
    let mut hash = [0; 32];
    stream.read_exact(&mut hash).unwrap();
    assert_eq!(hash, HASH);
    stream
}

fn question(stream: &mut UnixStream) -> u32 {
    let mut number = [0; 4];
    stream.read_exact(&mut number).unwrap();
    u32::from_le_bytes(number)
}

fn reply(stream: &mut UnixStream, number: u32, outcome: Result<(), String>) {
    let mut bytes = Vec::new();
    write_reply(&Reply { number, outcome }, &mut bytes);
    stream.write_all(&bytes).unwrap();
}

#[test]
fn all_who_wait_for_the_same_are_answered_by_one_question() {
    let place = place();
    let listener = place.listen();
    let first = place.ask(1);
    let mut fetcher = accept(&listener);
    assert_eq!(question(&mut fetcher), 1);
    let (second, other) = (place.ask(1), place.ask(3));
    assert_eq!(question(&mut fetcher), 3);
    reply(&mut fetcher, 3, Ok(()));
    assert_eq!(other.recv_timeout(SOON).unwrap().unwrap(), "image");
    reply(&mut fetcher, 1, Ok(()));
    for answer in [first, second] {
        assert_eq!(answer.recv_timeout(SOON).unwrap().unwrap(), "content");
    }
    assert!(place.far.failure().is_none());
}

#[test]
fn what_cannot_be_had_is_told_and_asked_for_anew() {
    let place = place();
    let listener = place.listen();
    let answer = place.ask(1);
    let mut fetcher = accept(&listener);
    question(&mut fetcher);
    reply(&mut fetcher, 1, Err("it is gone".to_owned()));
    let error = answer.recv_timeout(SOON).unwrap().unwrap_err();
    assert_eq!(error.to_string(), "it is gone");
    assert_eq!(place.far.failure().as_deref(), Some("it is gone"));
    let again = place.ask(1);
    assert_eq!(question(&mut fetcher), 1);
    reply(&mut fetcher, 1, Ok(()));
    again.recv_timeout(SOON).unwrap().unwrap();
    // There is no such number, and nobody is asked.
    for number in [5, u32::MAX] {
        let error = place.ask(number).recv_timeout(SOON).unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}

#[test]
fn a_fetcher_that_ends_leaves_nobody_waiting() {
    let place = place();
    let is_known = |error: io::Error| {
        let error = error.to_string();
        assert!(error.contains("nobody fetches") && error.contains("no network"), "{error}");
    };
    is_known(place.ask(1).recv_timeout(SOON).unwrap().unwrap_err());
    let listener = place.listen();
    let answer = place.ask(1);
    drop(accept(&listener));
    drop(listener);
    is_known(answer.recv_timeout(SOON).unwrap().unwrap_err());
    assert_eq!(place.far.shared.counters.failed.get(), 2);
    // Another one is found by itself.
    let listener = place.listen();
    let answer = place.ask(3);
    let mut fetcher = accept(&listener);
    assert_eq!(question(&mut fetcher), 3);
    reply(&mut fetcher, 3, Ok(()));
    assert_eq!(answer.recv_timeout(SOON).unwrap().unwrap(), "image");
}

#[test]
fn those_who_wait_are_answered_by_the_next_fetcher() {
    let place = place_with(PATIENCE);
    let waiting = place.ask(1);
    let listener = place.listen();
    let mut fetcher = accept(&listener);
    assert_eq!(question(&mut fetcher), 1);
    let other = place.ask(3);
    // It is killed, and there is none for a while.
    drop(listener);
    drop(fetcher);
    std::thread::sleep(3 * LOOK_FOR_FETCHER);
    assert!(waiting.try_recv().is_err() && other.try_recv().is_err());
    let listener = place.listen();
    let mut fetcher = accept(&listener);
    let mut questions = [question(&mut fetcher), question(&mut fetcher)];
    questions.sort_unstable();
    assert_eq!(questions, [1, 3]);
    questions.into_iter().for_each(|number| reply(&mut fetcher, number, Ok(())));
    assert_eq!(waiting.recv_timeout(SOON).unwrap().unwrap(), "content");
    assert_eq!(other.recv_timeout(SOON).unwrap().unwrap(), "image");
    assert!(place.far.shared.state().alone_since.is_none());
}

/// One that has read another record closes each connection.
#[test]
fn fetchers_that_close_each_connection_are_given_up() {
    // Also on a busy machine it is tried more than once.
    let place = place_with(50 * LOOK_FOR_FETCHER);
    let listener = place.listen();
    let closing =
        std::thread::spawn(move || listener.incoming().take(2).filter(Result::is_ok).count());
    let error = place.ask(1).recv_timeout(SOON).unwrap().unwrap_err();
    assert!(error.to_string().contains("nobody fetches"), "{error}");
    assert_eq!(closing.join().unwrap(), 2, "it was tried again");
}

/// One that has accepted nothing, and with which nobody else can connect.
#[test]
fn a_fetcher_that_hangs_holds_nobody_up_who_asks() {
    let place = place();
    let listener = place.listen();
    let path = place.directory.path().join(parts::SOCKET);
    rustix::net::listen(&listener, 0).unwrap();
    let _in_the_queue = UnixStream::connect(&path).unwrap();
    let asked = Instant::now();
    let waiting: Vec<_> = [1, 3, 4].into_iter().map(|number| place.ask(number)).collect();
    // Who has it for something else has it for a moment.
    let is_free = (0..50).any(|_| {
        std::thread::sleep(LOOK / 200);
        place.far.shared.state.try_lock().is_ok()
    });
    assert!(is_free, "somebody asks under the lock");
    // Before connect(2) gives up for each.
    assert!(waiting.iter().all(|answer| answer.try_recv().is_err()) || asked.elapsed() > LOOK);
    for answer in waiting {
        let error = answer.recv_timeout(SOON).unwrap().unwrap_err().to_string();
        assert!(error.contains("nobody fetches"), "{error}");
    }
}

#[test]
fn what_another_pull_has_put_there_is_not_handed_out() {
    let place = place();
    let listener = place.listen();
    let asked = [1, 3].map(|number| place.ask(number));
    let mut fetcher = accept(&listener);
    let questions = [question(&mut fetcher), question(&mut fetcher)];
    let contents = place.directory.path().join(parts::CONTENTS);
    fs::remove_dir_all(&contents).unwrap();
    fs::create_dir(&contents).unwrap();
    let image = place.directory.path().join(parts::IMAGE);
    fs::remove_file(&image).unwrap();
    for path in [image, contents.join("1")] {
        fs::write(path, b"another function").unwrap();
    }
    questions.into_iter().for_each(|number| reply(&mut fetcher, number, Ok(())));
    let [content, image] = asked.map(|answer| answer.recv_timeout(SOON).unwrap());
    assert_eq!(content.unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(image.unwrap(), "image");
}

#[test]
fn waiting_has_a_bound() {
    let place = place();
    let _listener = place.listen();
    let waiting: Vec<_> = (0..WAITING_MAX).map(|_| place.ask(1)).collect();
    let error = place.ask(2).recv_timeout(SOON).unwrap().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
    assert!(waiting[0].try_recv().is_err(), "it still waits");
    let counted = || place.far.shared.counters.waiting.get();
    assert_eq!(counted(), WAITING_MAX as i64);
    place.far.shared.lose(None, "nobody is there");
    assert_eq!(counted(), 0);
}

#[test]
fn a_whole_function_is_asked_for_nowhere() {
    struct Stored;
    impl BlobSource for Stored {
        fn open_blob(&self, number: u32) -> io::Result<OwnedFd> {
            assert!(number < 3);
            Ok(File::open("/proc/self/stat")?.into())
        }
    }
    let place = place();
    let _listener = place.listen();
    let waiting = place.ask(1);
    let image = File::open(place.directory.path().join(parts::IMAGE)).unwrap();
    place.far.complete(image, Arc::new(Stored));
    assert!(!waiting.recv_timeout(SOON).unwrap().unwrap().is_empty());
    assert!(place.far.fetch(3, Box::new(|_| panic!("it is here"))).is_err());
    for number in 0..5 {
        place.far.open_blob(number).unwrap();
    }
    assert_eq!(place.far.open_blob(5).unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn who_has_waited_for_too_long_goes_alone() {
    let place = place();
    let listener = place.listen();
    let late = place.ask(1);
    let mut fetcher = accept(&listener);
    assert_eq!(question(&mut fetcher), 1);
    let (joined, other) = (place.ask(1), place.ask(3));
    assert_eq!(question(&mut fetcher), 3);
    let long_ago = Instant::now() - 2 * PATIENCE;
    place.far.shared.state().waiting.get_mut(&1).unwrap()[0].since = long_ago;
    let error = late.recv_timeout(SOON).unwrap().unwrap_err().to_string();
    assert!(error.contains("takes too long"), "{error}");
    [3, 1].into_iter().for_each(|number| reply(&mut fetcher, number, Ok(())));
    assert_eq!(other.recv_timeout(SOON).unwrap().unwrap(), "image");
    assert_eq!(joined.recv_timeout(SOON).unwrap().unwrap(), "content");
    assert_eq!(place.far.shared.counters.failed.get(), 1);
}

#[test]
fn a_connection_that_is_given_up_ends() {
    let place = place();
    let listener = place.listen();
    let answer = place.ask(1);
    let mut fetcher = accept(&listener);
    question(&mut fetcher);
    place.far.shared.lose(None, "nobody is there");
    answer.recv_timeout(SOON).unwrap().unwrap_err();
    fetcher.set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(fetcher.read(&mut [0]).unwrap(), 0);
}

#[test]
fn one_who_does_not_read_holds_up_no_one_who_says_that_all_is_here() {
    struct Stored;
    impl BlobSource for Stored {
        fn open_blob(&self, _: u32) -> io::Result<OwnedFd> {
            Ok(File::open("/proc/self/stat")?.into())
        }
    }
    let place = place();
    let _listener = place.listen();
    let ((go, may_go), (say, answered)) = (channel(), channel());
    let answer = move |_| say.send(may_go.recv_timeout(SOON)).unwrap();
    assert!(place.far.fetch(1, Box::new(answer)).is_ok());
    let image = File::open(place.directory.path().join(parts::IMAGE)).unwrap();
    place.far.complete(image, Arc::new(Stored));
    go.send(()).unwrap();
    assert_eq!(answered.recv().unwrap(), Ok(()));
}
