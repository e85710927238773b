//! Training (Catalyzer's user-guided pre-initialization): the program answers
//! requests before it is frozen, so that its copies begin with warm caches and
//! compiled code. Nothing of the connections remains in the image.

use super::freeze::FreezeFailure;
use super::program::{Program, Stop, TICK};
use super::{BuildEvent, BuildOptions, OnEvent};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes};
use hyper::http::header::{CONNECTION, DATE, HOST};
use hyper::http::response::Parts;
use hyper::http::{HeaderMap, HeaderValue, Request};
use hyper_util::rt::TokioIo;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::{Duration, Instant};
use thaw_abi::control::{CAUSE_ASKED, EntryPoint};
use thaw_home::beneath;
use thaw_home::config::{FunctionConfig, Protocol, Train, TrainingRequest};
use thaw_http::call::call;
use thaw_http::message;
use thaw_sandbox::{Event, connection};

/// How long the program may take to close the connection of an answered request.
const CLOSING: Duration = Duration::from_secs(5);
/// Characters of an unexpected response that an error repeats.
const EXCERPT: usize = 200;
/// Bytes of the body of a training request that comes from a file.
const BODY_MAX: u64 = 64 << 20;

/// What was sent to a program before it was frozen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Training {
    /// Number of requests.
    pub requests: u64,
    /// Time that it took.
    pub duration: Duration,
    /// Whether the last answer had a header `Date`.
    pub is_dated: bool,
}

/// The training of a function, ready to begin.
pub(super) struct Course<'a> {
    train: &'a Train,
    name: &'a str,
    port: u16,
    protocol: Protocol,
    /// How long a response may take.
    patience: Duration,
    /// Bodies of the requests, in their order.
    bodies: Vec<Bytes>,
}

/// A request on its way, over a connection of its own.
struct Question {
    stream: TcpStream,
    request: Request<Full<Bytes>>,
    protocol: Protocol,
}

/// A response: its status and the beginning of its body.
struct Answer {
    status: u16,
    excerpt: String,
    /// Whether it has a header `Date`.
    is_dated: bool,
    /// What a call of gRPC has failed with.
    failed_call: Option<String>,
}

impl<'a> Course<'a> {
    /// Reads what is to be sent; files lie in the function's directory `source`.
    pub(super) fn prepare(
        train: &'a Train,
        config: &'a FunctionConfig,
        source: &Path,
    ) -> Result<Self, FreezeFailure> {
        let read = |file: &Path| {
            // Whoever wrote the function gets to see what is sent to it.
            let directory = beneath::open_directory(source)?;
            beneath::read(directory, file, BODY_MAX)
        };
        let body = |request: &TrainingRequest| match (&request.body, &request.file) {
            (Some(body), _) => Ok(Bytes::from(body.clone())),
            (None, None) => Ok(Bytes::new()),
            (None, Some(file)) => read(file)
                .map(Bytes::from)
                .map_err(|error| FreezeFailure::TrainingFile { path: source.join(file), error }),
        };
        Ok(Self {
            train,
            name: config.name.as_str(),
            port: config.port_number(),
            protocol: config.protocol,
            patience: config.limits.timeout.0,
            bodies: train.requests.iter().map(body).collect::<Result<_, _>>()?,
        })
    }

    /// Trains the program, which is at rest at `entry`, and waits until it is at
    /// rest again.
    pub(super) fn hold(
        &self,
        program: &mut Program,
        entry: EntryPoint,
        options: &BuildOptions,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(EntryPoint, Training), Stop> {
        if entry.cause == CAUSE_ASKED {
            return Err(Stop::Training(
                "the program wrote to /dev/thaw before it could answer the requests of [train]; \
                 remove one of them"
                    .to_owned(),
            ));
        }
        on_event(BuildEvent::Stage("training"));
        let started = Instant::now();
        program.sandbox().resume().map_err(Stop::Io)?;
        let (questions, answers) = start_client(self.patience).map_err(Stop::Io)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Stop::Io)?;
        let total = self.train.total();
        let mut done = 0;
        let mut is_dated = false;
        let deadline = started + options.training_timeout;
        for (number, (spec, body)) in self.train.requests.iter().zip(&self.bodies).enumerate() {
            for _ in 0..spec.repeat.get() {
                if Instant::now() >= deadline {
                    return Err(Stop::Training(too_long(options.training_timeout, done, total)));
                }
                done += 1;
                let stream = self.connect(program, &listener, done).map_err(Stop::Io)?;
                let (request, protocol) = (self.request(spec, body), self.protocol);
                let question = Question { stream, request, protocol };
                let sent = questions.send(question);
                sent.map_err(|_| Stop::Io(io::ErrorKind::BrokenPipe.into()))?;
                let answer = self.await_answer(program, &answers, done, on_event)?;
                let named = || {
                    format!("request {} of [train] ({} {})", number + 1, spec.method(), spec.path.0)
                };
                match answer {
                    Ok(Answer { failed_call: Some(why), .. }) if spec.expect.is_none() => {
                        return Err(Stop::Training(format!("{} failed: {why}", named())));
                    }
                    Ok(answer) if spec.accepts(answer.status) => is_dated = answer.is_dated,
                    Ok(answer) => return Err(Stop::Training(unexpected(&named(), spec, &answer))),
                    Err(reason) => {
                        return Err(Stop::Training(format!(
                            "{} got no answer ({reason})",
                            named()
                        )));
                    }
                }
                on_event(BuildEvent::Trained { done, total });
            }
        }
        // Only now may the image be made: nothing can run, nobody is connected.
        program.sandbox().request_freeze().map_err(Stop::Io)?;
        let entry = program.run_to_entry(options.entry_timeout, on_event)?;
        Ok((entry, Training { requests: total, duration: started.elapsed(), is_dated }))
    }

    /// Connects to the program: its end goes into the sandbox, the other one is
    /// returned.
    fn connect(
        &self,
        program: &mut Program,
        listener: &TcpListener,
        id: u64,
    ) -> io::Result<TcpStream> {
        let client = TcpStream::connect(listener.local_addr()?)?;
        let own = client.local_addr()?;
        let server = loop {
            let (server, peer) = listener.accept()?;
            // Anybody on this machine can connect to the listener.
            if peer == own {
                break server;
            }
        };
        server.set_nonblocking(true)?;
        server.set_nodelay(true)?;
        client.set_nodelay(true)?;
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let connector = program.sandbox().connector();
        connector.send_connection(&connection(id, own, local), server.as_fd())?;
        program.sandbox().ring_if_unread()?;
        Ok(client)
    }

    fn request(&self, spec: &TrainingRequest, body: &Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body.clone()));
        *request.method_mut() = spec.method().parse().expect("the configuration was checked");
        *request.uri_mut() = spec.path.0.parse().expect("the configuration was checked");
        let headers = request.headers_mut();
        for (name, value) in &spec.headers {
            let name: hyper::http::HeaderName = name.0.parse().expect("checked as well");
            headers.insert(name, value.0.parse().expect("checked as well"));
        }
        let host = HeaderValue::from_str(self.name).expect("a function's name is a host name");
        headers.insert(HOST, host);
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        request
    }

    /// Serves the sandbox until the answer is here and the program has closed the
    /// connection: neither may be in the image.
    fn await_answer(
        &self,
        program: &mut Program,
        answers: &Receiver<Result<Answer, String>>,
        connection: u64,
        on_event: &mut OnEvent<'_>,
    ) -> Result<Result<Answer, String>, Stop> {
        let mut closed = false;
        let mut answered: Option<(Result<Answer, String>, Instant)> = None;
        loop {
            // Whichever is still to come is what is waited for.
            match closed {
                false => match program.step(on_event)? {
                    Some(Event::ConnectionClosed { id }) => closed |= id == connection,
                    Some(Event::EntryPoint(_)) => {
                        return Err(Stop::Died("it reported an entry point unasked".to_owned()));
                    }
                    _ => {}
                },
                true => {
                    if let Ok(answer) = answers.recv_timeout(TICK) {
                        return Ok(answer);
                    }
                    program.step(on_event)?;
                }
            }
            if answered.is_none()
                && let Ok(answer) = answers.try_recv()
            {
                answered = Some((answer, Instant::now()));
            }
            match answered.take() {
                Some((answer, _)) if closed || answer.is_err() => return Ok(answer),
                Some((_, since)) if since.elapsed() > CLOSING => {
                    return Err(Stop::Training(format!(
                        "the program did not close the connection of a training request within {} s \
                         of its client's end; its copies would have it",
                        CLOSING.as_secs()
                    )));
                }
                waits => answered = waits,
            }
        }
    }
}

fn too_long(limit: Duration, done: u64, total: u64) -> String {
    format!(
        "the program answered {done} of {total} training requests within {} s; is \
         `--training-timeout` long enough?",
        limit.as_secs_f64()
    )
}

fn unexpected(named: &str, spec: &TrainingRequest, answer: &Answer) -> String {
    let expected = spec.expect.map_or("2xx".to_owned(), |status| status.0.to_string());
    format!("{named} was answered with {}, not {expected}: {:?}", answer.status, answer.excerpt)
}

type Client = (SyncSender<Question>, Receiver<Result<Answer, String>>);

/// Starts a thread that asks one question after the other; it ends when nobody
/// asks any more.
fn start_client(patience: Duration) -> io::Result<Client> {
    // Each question is asked when the one before has its answer.
    let (questions, to_ask) = mpsc::sync_channel::<Question>(1);
    let (give, answers) = mpsc::sync_channel(1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name("training".to_owned()).spawn(move || {
        while let Ok(question) = to_ask.recv() {
            let answer = runtime.block_on(async {
                match tokio::time::timeout(patience, exchange(question)).await {
                    Ok(answer) => answer.map_err(|error| error.to_string()),
                    Err(_) => Err(format!("it took longer than {} s", patience.as_secs_f64())),
                }
            });
            if give.send(answer).is_err() {
                return;
            }
        }
    })?;
    Ok((questions, answers))
}

/// Why there is no answer.
type Unanswered = Box<dyn std::error::Error + Send + Sync>;

async fn exchange(question: Question) -> Result<Answer, Unanswered> {
    question.stream.set_nonblocking(true)?;
    let stream = tokio::net::TcpStream::from_std(question.stream)?;
    if question.protocol == Protocol::H2c {
        let (mut head, body) = question.request.into_parts();
        // Nothing is read of the name that is not in the request.
        message::to_http2(&mut head, "")?;
        let (head, mut body) = call(stream, Request::from_parts(head, body)).await?.into_parts();
        let answer = read(&head, &mut body).await;
        body.close().await;
        return answer;
    }
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let (head, mut body) = sender.send_request(question.request).await?.into_parts();
    let answer = read(&head, &mut body).await;
    // Without its task the connection is closed for sure.
    connection.abort();
    let _ = connection.await;
    answer
}

/// Reads an answer to its end.
async fn read<B>(head: &Parts, body: &mut B) -> Result<Answer, Unanswered>
where
    B: Body<Data = Bytes, Error: Into<Unanswered>> + Unpin,
{
    let status = head.status.as_u16();
    let mut failed_call = failed_call(&head.headers);
    let mut excerpt = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(Into::into)?;
        if let Some(trailers) = frame.trailers_ref() {
            failed_call = failed_call.or_else(|| self::failed_call(trailers));
        }
        if let Ok(data) = frame.into_data() {
            excerpt.extend_from_slice(&data[..data.len().min(EXCERPT - excerpt.len())]);
        }
    }
    let excerpt = String::from_utf8_lossy(&excerpt).into_owned();
    let is_dated = head.headers.contains_key(DATE);
    Ok(Answer { status, excerpt, is_dated, failed_call })
}

/// What a call of gRPC has failed with, as its trailers, or its head, say.
fn failed_call(headers: &HeaderMap) -> Option<String> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let status = text("grpc-status").filter(|status| *status != "0")?;
    let message = text("grpc-message").unwrap_or_default();
    Some(format!("its grpc-status is {status}, {message:?}"))
}
