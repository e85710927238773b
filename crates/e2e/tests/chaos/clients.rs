//! Clients of many habits, and what they may hear while everything around them is killed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use thaw_e2e::{Heard, Raw, Response};

/// A client that hears nothing for so long has been forgotten. The functions' own limits
/// (`timeout`, `queue`) are far below.
const BOUND: Duration = Duration::from_secs(60);
/// Requests on one connection that is kept open.
const KEPT_REQUESTS: usize = 8;
/// Between two pieces of a slow reader or a slow sender.
const PAUSE: Duration = Duration::from_millis(3);
/// Text that `words` counts.
const WORDS: &str = "to thaw or not to thaw";

/// How a client behaves.
#[derive(Clone, Copy, Debug)]
pub enum Habit {
    /// One request a connection, and says so.
    Close,
    /// Several requests a connection.
    KeepAlive,
    /// One request, whose head comes in pieces.
    SlowSender,
    /// Asks for much and reads it slowly.
    SlowReader,
    /// Posts a body of several hundred kilobytes.
    Upload,
    /// Posts standard input.
    Stdin,
}

/// Where clients find the daemon; `None` while there is none.
pub type Address = Arc<Mutex<Option<SocketAddr>>>;

/// What all clients have heard so far.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Right answers, by function.
    pub answered: BTreeMap<&'static str, usize>,
    /// Answers of the gateway, by function, status and error.
    pub refused: BTreeMap<String, usize>,
    /// Answers that were cut short.
    pub cut: usize,
    /// Connections that ended without a byte of an answer to their first request.
    pub unanswered: usize,
    /// Connections that ended between two requests.
    pub ended: usize,
    /// What must not be: silence, wrong answers.
    pub wrong: BTreeMap<String, usize>,
}

impl Tally {
    fn note(&mut self, function: &'static str, asked: usize, heard: Heard, is_right: bool) {
        match heard {
            Heard::Response(response) if response.status == 200 => match is_right {
                true => *self.answered.entry(function).or_default() += 1,
                false => self.note_wrong(format!("{function}: {:?}", brief(&response))),
            },
            Heard::Response(response) => match refusal(&response) {
                Some(error) => {
                    *self.refused.entry(format!("{function}: {error}")).or_default() += 1;
                }
                None => self.note_wrong(format!("{function}: {:?}", brief(&response))),
            },
            Heard::Cut(_) => self.cut += 1,
            Heard::End if asked == 0 => self.unanswered += 1,
            Heard::End => self.ended += 1,
            Heard::Silence => {
                self.note_wrong(format!("{function}: silence for {} s", BOUND.as_secs()));
            }
        }
    }

    fn note_wrong(&mut self, text: String) {
        *self.wrong.entry(text).or_default() += 1;
    }
}

/// The beginning of an answer, for a message.
fn brief(response: &Response) -> (u16, String) {
    (response.status, response.text().chars().take(200).collect())
}

/// Status and error of an answer of the gateway's own, which is JSON.
fn refusal(response: &Response) -> Option<String> {
    let body: serde_json::Value = serde_json::from_slice(&response.body).ok()?;
    let error = body["error"].as_str()?;
    let is_complete = (500..=599).contains(&response.status) && body["reason"].is_string();
    is_complete.then(|| format!("{} {error}: {}", response.status, kind_of(&body["reason"])))
}

/// Whether another request may follow on the connection.
fn stays_open(response: &Response) -> bool {
    response.status == 200 && response.header("connection") != Some("close")
}

/// A reason without its numbers, so that equal ones are counted together.
fn kind_of(reason: &serde_json::Value) -> String {
    reason.as_str().unwrap_or_default().replace(|c: char| c.is_ascii_digit(), "")
}

/// Clients that ask without pause, each on a thread of its own.
pub struct Load {
    stop: Arc<AtomicBool>,
    tally: Arc<Mutex<Tally>>,
    functions: Vec<&'static str>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts a client for each pair of a function and a habit.
    pub fn start(address: &Address, clients: &[(&'static str, Habit)]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Mutex::new(Tally::default()));
        let start = |&(function, habit): &(&'static str, Habit)| {
            let client = Client { function, habit, address: address.clone(), tally: tally.clone() };
            let stop = stop.clone();
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    client.visit();
                }
            })
        };
        let functions = clients.iter().map(|(function, _)| *function).collect();
        let clients = clients.iter().map(start).collect();
        Self { stop, tally, functions, clients }
    }

    /// Whether every function has answered.
    pub fn has_heard_all(&self) -> bool {
        let tally = self.tally.lock().expect("no client panics");
        self.functions.iter().all(|function| tally.answered.contains_key(function))
    }

    /// Lets every client finish what it does, which takes [`BOUND`] at most.
    pub fn finish(self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().expect("a client does not panic");
        }
        self.tally.lock().expect("no client panics").clone()
    }
}

struct Client {
    function: &'static str,
    habit: Habit,
    address: Address,
    tally: Arc<Mutex<Tally>>,
}

impl Client {
    /// One connection, from its beginning to its end.
    fn visit(&self) {
        let address = *self.address.lock().expect("no holder panics");
        let connection = address.and_then(|address| Raw::try_connect(address, BOUND).ok());
        let Some(mut connection) = connection else {
            // The daemon is just not there.
            thread::sleep(Duration::from_millis(20));
            return;
        };
        let requests = match self.habit {
            Habit::KeepAlive => KEPT_REQUESTS,
            _ => 1,
        };
        for asked in 0..requests {
            self.ask(&mut connection);
            let pause = match self.habit {
                Habit::SlowReader => PAUSE,
                _ => Duration::ZERO,
            };
            let heard = connection.hear(pause);
            let goes_on = matches!(&heard, Heard::Response(response) if stays_open(response));
            let is_right = matches!(&heard, Heard::Response(response) if self.is_right(response));
            let mut tally = self.tally.lock().expect("no client panics");
            tally.note(self.function, asked, heard, is_right);
            if !goes_on {
                return;
            }
        }
    }

    /// Sends a request.
    fn ask(&self, connection: &mut Raw) {
        let function = self.function;
        let post = |body: &[u8]| {
            let length = body.len();
            let head = format!(
                "POST / HTTP/1.1\r\nHost: {function}\r\nContent-Length: {length}\r\n\
                 Connection: close\r\n\r\n"
            );
            [head.as_bytes(), body].concat()
        };
        let request = match self.habit {
            Habit::Close | Habit::SlowSender => {
                format!("GET / HTTP/1.1\r\nHost: {function}\r\nConnection: close\r\n\r\n").into()
            }
            Habit::KeepAlive => format!("GET / HTTP/1.1\r\nHost: {function}\r\n\r\n").into(),
            Habit::SlowReader => {
                format!("GET /long HTTP/1.1\r\nHost: {function}\r\nConnection: close\r\n\r\n")
                    .into()
            }
            Habit::Upload => post(&vec![b'x'; 300_000]),
            Habit::Stdin => post(WORDS.as_bytes()),
        };
        let piece = match self.habit {
            Habit::SlowSender => request.len().div_ceil(3),
            _ => request.len(),
        };
        for piece in request.chunks(piece) {
            connection.send(piece);
            if piece.len() < request.len() {
                thread::sleep(PAUSE);
            }
        }
    }

    /// Whether a response with status 200 is what the function answers.
    fn is_right(&self, response: &Response) -> bool {
        match self.habit {
            Habit::Close | Habit::KeepAlive | Habit::SlowSender => {
                response.text().starts_with("Hello")
            }
            Habit::SlowReader => {
                let in_order = |(i, byte): (usize, &u8)| *byte == i as u8;
                response.body.len() == 2 << 20 && response.body.iter().enumerate().all(in_order)
            }
            Habit::Upload => response.text() == "300000 bytes\n",
            Habit::Stdin => response.text() == "6 words in 22 characters, request 1\n",
        }
    }
}
