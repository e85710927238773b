//! Contents and segments of a partial function, as sandboxes ask for them: a fetcher in another
//! process gets them.

use super::protocol::{self, Reply};
use super::record::{PartialFunction, parts};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use thaw_sandbox::{BlobSource, FetchAnswer, MovedFile, Segment};

/// How long a fetcher may take; it gives up earlier by itself.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often it is looked for questions that have waited too long.
const LOOK: Duration = Duration::from_secs(1);
/// How long a failure is told to those whose instances end.
const FAILURE_KEPT: Duration = Duration::from_secs(10);
/// Most sandboxes that wait for one function. Each waits for one answer at a time.
const WAITING_MAX: usize = 4096;

/// Asks the fetcher of a function.
pub struct FarContents {
    shared: Arc<Shared>,
}

struct Shared {
    directory: PathBuf,
    hash: [u8; 32],
    contents: u32,
    segments: Vec<Segment>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connection: Option<UnixStream>,
    /// Which connection that is: an earlier one's end is no news.
    number: u64,
    /// Who waits for what, and since when.
    waiting: HashMap<u32, (Instant, Vec<FetchAnswer>)>,
    failure: Option<(Instant, String)>,
    /// The whole function, once it is here.
    whole: Option<Whole>,
}

/// A function of which everything is in the store.
struct Whole {
    image: File,
    contents: Arc<dyn BlobSource>,
}

impl FarContents {
    /// Those of a function; the fetcher is looked for when something is asked for.
    pub fn new(function: &PartialFunction) -> Self {
        let shared = Shared {
            directory: function.directory.clone(),
            hash: function.hash,
            contents: function.rows.contents(),
            segments: function.layout.segments().to_vec(),
            state: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Nothing is missing any more: this is the image, over files with these contents.
    pub fn complete(&self, image: File, contents: Arc<dyn BlobSource>) {
        let mut state = self.shared.state();
        state.whole = Some(Whole { image, contents });
        state.failure = None;
        let waiting = mem::take(&mut state.waiting);
        drop(state);
        for (number, (_, all)) in waiting {
            all.into_iter().for_each(|answer| answer(self.open_blob(number)));
        }
    }
}

impl BlobSource for FarContents {
    fn open_blob(&self, number: u32) -> io::Result<OwnedFd> {
        let state = self.shared.state();
        // Whoever cannot wait for it gets it when the function is whole.
        let whole = state.whole.as_ref().ok_or_else(|| {
            io::Error::other("the function is being pulled; try again when that is done")
        })?;
        let Some(segment) = number.checked_sub(self.shared.contents) else {
            return whole.contents.open_blob(number);
        };
        let segment = self.shared.segments.get(segment as usize).ok_or(io::ErrorKind::NotFound)?;
        match segment.of {
            MovedFile::Image => Ok(whole.image.try_clone()?.into()),
            MovedFile::Content(number) => whole.contents.open_blob(number),
        }
    }

    fn fetch(&self, number: u32, answer: FetchAnswer) -> Result<(), FetchAnswer> {
        let shared = &self.shared;
        if shared.path(number).is_none() {
            answer(Err(io::ErrorKind::NotFound.into()));
            return Ok(());
        }
        let mut state = shared.state();
        if state.whole.is_some() {
            return Err(answer);
        }
        if state.waiting.values().map(|(_, all)| all.len()).sum::<usize>() >= WAITING_MAX {
            drop(state);
            answer(Err(io::ErrorKind::ResourceBusy.into()));
            return Ok(());
        }
        let (_, all) = state.waiting.entry(number).or_insert((Instant::now(), Vec::new()));
        all.push(answer);
        let is_first = all.len() == 1;
        let asked = if is_first { shared.ask(&mut state, number) } else { Ok(()) };
        drop(state);
        if let Err(error) = asked {
            shared.lose(None, &format!(
                "nobody fetches what is missing of the function ({error}); run `thaw pull --lazy` again"
            ));
        }
        Ok(())
    }

    fn failure(&self) -> Option<String> {
        let state = self.shared.state();
        let (since, why) = state.failure.as_ref()?;
        (since.elapsed() < FAILURE_KEPT).then(|| why.clone())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// Where something lies when it is here; `None`: there is no such number.
    fn path(&self, number: u32) -> Option<PathBuf> {
        let content = |name: String| self.directory.join(parts::CONTENTS).join(name);
        let Some(segment) = number.checked_sub(self.contents) else {
            return Some(content(number.to_string()));
        };
        Some(match self.segments.get(segment as usize)?.of {
            MovedFile::Image => self.directory.join(parts::IMAGE),
            MovedFile::Content(number) => content(format!("{number}.part")),
        })
    }

    fn ask(self: &Arc<Self>, state: &mut State, number: u32) -> io::Result<()> {
        if let Some(connection) = &state.connection
            && protocol::ask(connection, number).is_ok()
        {
            return Ok(());
        }
        // There may be another fetcher by now. Others that wait are asked for there.
        self.connect(state)?;
        let connection = state.connection.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        state.waiting.keys().try_for_each(|number| protocol::ask(connection, *number))
    }

    fn connect(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let mut stream = UnixStream::connect(self.directory.join(parts::SOCKET))?;
        stream.set_write_timeout(Some(LOOK))?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.write_all(&self.hash)?;
        state.number += 1;
        let (reader, number, shared) = (stream.try_clone()?, state.number, Arc::downgrade(self));
        std::thread::Builder::new().name("thaw-far".to_owned()).spawn(move || {
            let mut received = Vec::new();
            loop {
                let more = protocol::receive(&reader, &mut received);
                // Nobody boots the function any more.
                let Some(shared) = shared.upgrade() else { return };
                let why = match more {
                    Ok(true) => shared.take_replies(&mut received).err(),
                    Err(error) if is_timeout(&error) => shared.is_late().then(|| {
                        "what is missing of the function takes too long to come".to_owned()
                    }),
                    // A connection is reset if it ends with questions unread.
                    Ok(false) | Err(_) => {
                        Some("whoever fetched what is missing of the function has ended".to_owned())
                    }
                };
                if let Some(why) = why {
                    return shared
                        .lose(Some(number), &format!("{why}; run `thaw pull --lazy` again"));
                }
            }
        })?;
        state.connection = Some(stream);
        Ok(())
    }

    fn is_late(&self) -> bool {
        self.state().waiting.values().any(|(since, _)| since.elapsed() > PATIENCE)
    }

    fn take_replies(&self, received: &mut Vec<u8>) -> Result<(), String> {
        let taken = |error: io::Error| format!("its fetcher makes no sense ({error})");
        while let Some(Reply { number, outcome }) = protocol::take_reply(received).map_err(taken)? {
            let mut state = self.state();
            let (_, all) = state.waiting.remove(&number).unwrap_or((Instant::now(), Vec::new()));
            if let Err(why) = &outcome {
                state.failure = Some((Instant::now(), why.clone()));
            }
            drop(state);
            for answer in all {
                let path = self.path(number).ok_or(io::ErrorKind::NotFound);
                answer(match &outcome {
                    Ok(()) => path.map_err(io::Error::from).and_then(File::open).map(OwnedFd::from),
                    Err(why) => Err(io::Error::other(why.clone())),
                });
            }
        }
        Ok(())
    }

    /// The connection of this number, or every one, has ended: nothing comes any more.
    fn lose(&self, number: Option<u64>, why: &str) {
        let mut state = self.state();
        if number.is_some_and(|number| number != state.number) {
            return;
        }
        state.connection = None;
        let waiting = mem::take(&mut state.waiting);
        if !waiting.is_empty() {
            state.failure = Some((Instant::now(), why.to_owned()));
        }
        drop(state);
        for answer in waiting.into_values().flat_map(|(_, all)| all) {
            answer(Err(io::Error::other(why.to_owned())));
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc::{Receiver, channel};

    const HASH: [u8; 32] = [7; 32];
    const SOON: Duration = Duration::from_secs(20);

    struct Place {
        directory: tempfile::TempDir,
        far: FarContents,
    }

    /// A function of three contents and two segments.
    fn place() -> Place {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join(parts::CONTENTS)).unwrap();
        fs::write(directory.path().join(parts::IMAGE), b"image").unwrap();
        fs::write(directory.path().join(parts::CONTENTS).join("1"), b"content").unwrap();
        let image = Segment { of: MovedFile::Image, piece: 0 };
        let content = Segment { of: MovedFile::Content(2), piece: 1 };
        let shared = Shared {
            directory: directory.path().to_owned(),
            hash: HASH,
            contents: 3,
            segments: vec![image, content],
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
        protocol::write_reply(&Reply { number, outcome }, &mut bytes);
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
        let error = place.ask(1).recv_timeout(SOON).unwrap().unwrap_err();
        assert!(error.to_string().contains("thaw pull --lazy"), "{error}");
        let listener = place.listen();
        let answer = place.ask(1);
        drop(accept(&listener));
        let error = answer.recv_timeout(SOON).unwrap().unwrap_err().to_string();
        assert!(error.contains("has ended"), "{error}");
        // Another one is found by itself.
        let listener = place.listen();
        let answer = place.ask(3);
        let mut fetcher = accept(&listener);
        assert_eq!(question(&mut fetcher), 3);
        reply(&mut fetcher, 3, Ok(()));
        assert_eq!(answer.recv_timeout(SOON).unwrap().unwrap(), "image");
    }

    #[test]
    fn waiting_has_a_bound() {
        let place = place();
        let _listener = place.listen();
        let waiting: Vec<_> = (0..WAITING_MAX).map(|_| place.ask(1)).collect();
        let error = place.ask(2).recv_timeout(SOON).unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert!(waiting[0].try_recv().is_err(), "it still waits");
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
}
