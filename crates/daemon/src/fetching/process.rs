//! The life of a fetcher: the process that pulls one function for the daemon.

use crate::monitor::{FetcherStart, become_fetcher, confine_memory};
use std::ffi::OsString;
use std::io::{self, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};
use thaw_build::artifact::{self, ArtifactError, Installed, Part, PullEvent, Pulled};
use thaw_build::container::ImageProgress;
use thaw_home::function::StoredFunction;
use thaw_home::home::Home;
use thaw_node::pulls::{News, Order, PullsError, hear, options_of, say};
use thaw_sandbox::monitor::FetcherCommand;

/// Hidden first argument that makes this executable a fetcher.
const ARGUMENT: &str = "--thaw-fetcher";
/// Variables that a fetcher is given: where credentials, certificates and proxies are.
const ENVIRONMENT: [&str; 12] = [
    "HOME",
    "DOCKER_CONFIG",
    "AWS_",
    "SSL_CERT_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "THAW_",
    "RUST_",
];
/// How long the daemon may take to serve what is here.
const SERVE_PATIENCE: Duration = Duration::from_secs(120);
/// How often the daemon hears how far it is.
const NEWS_INTERVAL: Duration = Duration::from_millis(200);

/// How fetchers are started for this home: by a monitor for its daemon, or by a daemon that has none.
pub fn command(start: &FetcherStart) -> FetcherCommand {
    let text = serde_json::to_string(start).expect("plain data");
    let is_given = |name: &OsString| {
        let name = name.as_encoded_bytes();
        ENVIRONMENT.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
    };
    FetcherCommand {
        arguments: vec![ARGUMENT.into(), text.into()],
        environment: std::env::vars_os().filter(|(name, _)| is_given(name)).collect(),
    }
}

/// Starts a fetcher at the other end of the socket that is returned.
///
/// # Errors
/// There are as many as there may be, or the host refuses.
pub(super) fn start(home: &Home) -> io::Result<UnixStream> {
    let (own, its) = UnixStream::pair()?;
    if let Some(link) = thaw_sandbox::monitor::of_this_process() {
        link.start_fetcher(its.into())?;
        return Ok(own);
    }
    let start = FetcherStart { home: home.clone(), linked: Vec::new(), user: None };
    let mut child = command(&start).with(OwnedFd::from(its)).spawn()?;
    // Somebody must hear of its end.
    thread::Builder::new().name("thaw-fetcher".to_owned()).spawn(move || child.wait())?;
    Ok(own)
}

/// The life of a fetcher, if this process was started as one. To be called before there are threads.
pub fn fetcher_main() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != ARGUMENT {
        return None;
    }
    let code = |lived: Result<(), Box<dyn std::error::Error>>| match lived {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("thaw: a fetcher cannot begin: {error}");
            ExitCode::FAILURE
        }
    };
    Some(code((|| {
        let text = arguments.next().and_then(|text| text.into_string().ok());
        let start: FetcherStart = serde_json::from_str(&text.ok_or("it was not told how")?)?;
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        // Before the daemon, which may have the same user id, could look into it.
        confine_memory()?;
        thaw_oci::credentials::read_ahead();
        let listening = become_fetcher(&start)?;
        Ok(live(&start.home, socket, listening)?)
    })()))
}

/// Does what the daemon says, and ends with it.
fn live(home: &Home, socket: UnixStream, listening: Option<OwnedFd>) -> io::Result<()> {
    let mut from = BufReader::new(socket.try_clone()?);
    let Some(order) = hear::<Order>(&mut from)? else { return Ok(()) };
    let (acknowledge, served) = channel();
    thread::Builder::new().name("thaw-daemon".to_owned()).spawn(move || {
        while let Ok(Some(())) = hear::<()>(&mut from) {
            let _ = acknowledge.send(());
        }
        // The daemon has ended, or wants nothing more.
        thaw_sandbox::monitor::exit_at_once(0)
    })?;
    let fetching = Fetching { home, to: Mutex::new(socket), served };
    let last = match fetching.obey(order, listening) {
        Ok((name, digest)) => News::Done { name, digest },
        Err((reason, is_refusal)) => News::Failed { reason: News::sentence(&reason), is_refusal },
    };
    fetching.say(&last);
    Ok(())
}

/// A fetcher at work.
struct Fetching<'a> {
    home: &'a Home,
    to: Mutex<UnixStream>,
    /// The daemon serves what it was to serve.
    served: Receiver<()>,
}

/// Why nothing was stored, and whether that is a refusal.
type Failed = (String, bool);

impl Fetching<'_> {
    /// The name of what was pulled, and the digest of its manifest if it is a function.
    fn obey(
        &self,
        order: Order,
        listening: Option<OwnedFd>,
    ) -> Result<(String, Option<String>), Failed> {
        let mut last = Instant::now();
        let on_event = &mut |event: PullEvent<'_>| match event {
            PullEvent::Progress(ImageProgress::Pulling(now)) => {
                if last.elapsed() >= NEWS_INTERVAL || now.bytes == now.of {
                    last = Instant::now();
                    let (bytes, of, moved, failed) = (now.bytes, now.of, now.moved, now.failed);
                    self.say(&News::Progress { bytes, of, moved, failed });
                }
            }
            PullEvent::Progress(ImageProgress::Waiting(awaited)) => {
                self.say(&News::Note(News::sentence(awaited.sentence())));
            }
            PullEvent::Progress(_) | PullEvent::Build(_) => {}
            PullEvent::Note(note) => self.say(&News::Note(News::sentence(note))),
        };
        let on_served = &mut |function: &StoredFunction, part| self.serve(function, part);
        let failed = |error: ArtifactError| (error.to_string(), error.is_refusal());
        let new = match order {
            Order::GoOn(function) => {
                let on_served = (on_served as &mut artifact::OnServed<'_>, listening);
                let installed = artifact::go_on(self.home, &function, on_event, on_served);
                return installed.map(named).map_err(failed);
            }
            Order::Pull(new) => new,
        };
        let refused = |error: PullsError| (error.to_string(), true);
        let (reference, options) = options_of(&new).map_err(refused)?;
        let pulled = match new.lazy {
            true => artifact::pull_lazily(
                self.home,
                &reference,
                &options,
                on_event,
                (on_served, listening),
            ),
            false => artifact::pull(self.home, &reference, &options, on_event),
        };
        match pulled.map_err(failed)? {
            Pulled::Function(installed) => {
                self.serve(&installed.function.function, Part::Whole);
                Ok(named(*installed))
            }
            Pulled::Image(image, _) => Ok((image.name.to_string(), None)),
        }
    }

    /// Has the daemon serve it, and waits until it does.
    fn serve(&self, function: &StoredFunction, part: Part) {
        self.say(&News::Serve { function: function.config.name.to_string(), part });
        // A daemon that takes so long finds it by itself one day.
        let _ = self.served.recv_timeout(SERVE_PATIENCE);
    }

    fn say(&self, news: &News) {
        // With the daemon this process ends, too.
        let _ = say(&*self.to.lock().expect("no holder panics"), news);
    }
}

fn named(installed: Installed) -> (String, Option<String>) {
    (installed.function.function.config.name.to_string(), Some(installed.digest))
}
