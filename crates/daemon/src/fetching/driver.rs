//! Begins pulls, and hears what their fetchers say.

use super::process;
use std::collections::BTreeMap;
use std::io::{self, BufReader};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use thaw_build::artifact::Part;
use thaw_home::home::Home;
use thaw_node::catalog::Catalog;
use thaw_node::pulls::{News, Order, Pulls, hear, say};
use tokio::runtime::Handle;

/// How often it is looked for functions that nobody fetches.
const LOOK: Duration = Duration::from_secs(1);

/// Called after functions were loaded anew; those that cannot be reached, with the reason.
pub type OnReload = Arc<dyn Fn() -> BTreeMap<String, String> + Send + Sync>;

/// Begins to have everything fetched that is to be, for as long as the daemon lives. It has a thread of its
/// own: looking for work each second would keep all idle threads of the runtime alive.
///
/// # Errors
/// The host has no thread left.
pub fn keep_fetching(catalog: Arc<Catalog>, home: Home, on_reload: OnReload) -> io::Result<()> {
    let driver = Driver { catalog, home, on_reload };
    let runtime = Handle::current();
    let work = move || loop {
        let served = driver.catalog.partial_functions();
        driver.pulls().adopt(&driver.home.partial(), &served);
        while let Some((id, order)) = driver.pulls().next() {
            let driver = driver.clone();
            runtime.spawn_blocking(move || driver.run(id, &order));
        }
        if !driver.pulls().wait(LOOK) {
            return;
        }
    };
    thread::Builder::new().name("thaw-pulls".to_owned()).spawn(work).map(drop)
}

#[derive(Clone)]
struct Driver {
    catalog: Arc<Catalog>,
    home: Home,
    on_reload: OnReload,
}

impl Driver {
    fn pulls(&self) -> &Pulls {
        self.catalog.node().pulls()
    }

    /// Has a fetcher do one pull.
    fn run(&self, id: u64, order: &Order) {
        let what = match order {
            Order::GoOn(function) => function.clone(),
            Order::Pull(new) => new.reference.clone(),
        };
        tracing::info!(pull = id, "fetching {}", thaw_sandbox::escape(what.as_bytes()));
        let metrics = self.catalog.node().metrics().pulls();
        let last = self.talk(id, order).unwrap_or_else(|error| News::Failed {
            reason: format!("its fetcher cannot be talked to ({error})"),
            is_refusal: false,
        });
        let outcome = match &last {
            News::Done { .. } => "done",
            News::Failed { is_refusal: true, .. } => "refused",
            _ => "failed",
        };
        let reason = match &last {
            News::Failed { reason, .. } => reason.clone(),
            _ => "its fetcher has ended".to_owned(),
        };
        let is_done = outcome == "done";
        let again = self.pulls().ended(&self.home.partial(), id, last);
        let is_turn_over = again.is_some_and(|pause| pause.is_zero());
        metrics.ended(if is_turn_over { "turn_over" } else { outcome });
        let what = thaw_sandbox::escape(what.as_bytes());
        match (is_done, again) {
            (true, _) => tracing::info!(pull = id, "all of {what} is here"),
            (false, Some(_)) if is_turn_over => {
                tracing::info!(pull = id, "{what} waits while others are fetched");
            }
            (false, Some(pause)) => tracing::warn!(
                pull = id,
                "{what} is not all here: {reason}; tried again in {} s",
                pause.as_secs()
            ),
            (false, None) => tracing::error!(pull = id, "{what} is not pulled: {reason}"),
        }
        self.pulls().look();
    }

    /// Talks to the fetcher until it ends; its last words.
    fn talk(&self, id: u64, order: &Order) -> io::Result<News> {
        let socket = process::start(&self.home)?;
        if !self.pulls().connected(id, socket.try_clone()?) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        say(&socket, order)?;
        let mut from = BufReader::new(socket.try_clone()?);
        let mut last = News::Note(String::new());
        while let Some(news) = hear::<News>(&mut from)? {
            self.heed(id, &news, &socket)?;
            last = news;
        }
        Ok(last)
    }

    fn heed(&self, id: u64, news: &News, socket: &UnixStream) -> io::Result<()> {
        let News::Serve { function, part } = news else {
            let counted = self.pulls().note(id, news);
            let metrics = self.catalog.node().metrics().pulls();
            metrics.moved(counted.moved);
            metrics.failed_fetches(counted.failed_fetches);
            return Ok(());
        };
        if *part == Part::Whole {
            self.pulls().note(id, news);
        }
        let problem = match self.catalog.reload() {
            Ok(report) => report.broken.get(function).cloned(),
            Err(error) => Some(error.to_string()),
        };
        (self.on_reload)();
        if *part == Part::Run {
            // Not before it is served.
            self.pulls().note(id, news);
        }
        if let Some(problem) = problem {
            let part = if *part == Part::Run { "before all of it is here" } else { "yet" };
            self.pulls().note(id, &News::Note(format!("it is not served {part}: {problem}")));
        }
        say(socket, &())
    }
}
