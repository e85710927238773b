//! Who is logged in.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Name of the cookie.
pub(super) const COOKIE: &str = "thaw_session";
/// Sessions at a time; the one that was used longest ago ends for another.
pub(super) const SESSIONS_MAX: usize = 64;
/// How long one lasts.
pub(super) const LIFE: Duration = Duration::from_secs(12 * 3600);
/// How long one lasts that nobody uses.
const IDLE: Duration = Duration::from_secs(2 * 3600);
/// Random bytes of names of sessions, and of what their forms carry.
const SECRET_BYTES: usize = 32;

/// The sessions.
#[derive(Default)]
pub(super) struct Sessions {
    all: Mutex<Vec<Kept>>,
}

struct Kept {
    id: String,
    session: Session,
    began: Instant,
    used: Instant,
    /// Dropped with it.
    _alive: watch::Sender<()>,
}

/// A session, as handlers see it.
#[derive(Clone, Debug)]
pub(super) struct Session {
    /// What every form carries: a page of somebody else does not know it.
    pub form: Arc<str>,
    ended: watch::Receiver<()>,
}

impl Session {
    /// Whether a form carries the session's secret.
    pub fn has_sent(&self, form: &str) -> bool {
        is_equal(self.form.as_bytes(), form.as_bytes())
    }

    /// Waits until it has ended. What goes on for long ends with it.
    pub async fn ended(&self) {
        let mut ended = self.ended.clone();
        // Nothing is ever sent: the sender goes.
        while ended.changed().await.is_ok() {}
    }
}

/// Compares secrets; how long this takes says nothing of them (`blake3::Hash`, `PartialEq`).
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    blake3::hash(a) == blake3::hash(b)
}

fn secret() -> String {
    let mut bytes = [0; SECRET_BYTES];
    let source = ring::rand::SystemRandom::new();
    ring::rand::SecureRandom::fill(&source, &mut bytes).expect("the host has random numbers");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Sessions {
    /// Begins one; its name, which the browser keeps.
    pub fn begin(&self) -> String {
        self.begin_at(Instant::now())
    }

    fn begin_at(&self, now: Instant) -> String {
        let id = secret();
        let (alive, ended) = watch::channel(());
        let session = Session { form: secret().into(), ended };
        let mut all = self.all(now);
        if all.len() >= SESSIONS_MAX {
            let oldest = all.iter().enumerate().min_by_key(|(_, kept)| kept.used);
            let oldest = oldest.map(|(index, _)| index).expect("there are some");
            all.swap_remove(oldest);
        }
        all.push(Kept { id: id.clone(), session, began: now, used: now, _alive: alive });
        id
    }

    /// The session of that name, which is used now.
    pub fn find(&self, id: &str) -> Option<Session> {
        self.find_at(id, Instant::now())
    }

    fn find_at(&self, id: &str, now: Instant) -> Option<Session> {
        let mut all = self.all(now);
        // All are looked at, so that the time says nothing.
        let mut found = None;
        for kept in all.iter_mut() {
            if is_equal(kept.id.as_bytes(), id.as_bytes()) {
                found = Some(kept);
            }
        }
        let kept = found?;
        kept.used = now;
        Some(kept.session.clone())
    }

    /// Ends one.
    pub fn end(&self, id: &str) {
        self.all(Instant::now()).retain(|kept| !is_equal(kept.id.as_bytes(), id.as_bytes()));
    }

    /// Ends those whose time is over.
    pub fn tidy(&self) {
        drop(self.all(Instant::now()));
    }

    fn all(&self, now: Instant) -> MutexGuard<'_, Vec<Kept>> {
        let mut all = self.all.lock().expect("no holder panics");
        all.retain(|kept| {
            now.saturating_duration_since(kept.began) < LIFE
                && now.saturating_duration_since(kept.used) < IDLE
        });
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_so_many_sessions_and_the_one_unused_longest_ends() {
        let sessions = Sessions::default();
        let start = Instant::now();
        let at = |second: usize| start + Duration::from_secs(second as u64);
        let ids: Vec<_> = (0..SESSIONS_MAX).map(|n| sessions.begin_at(at(n))).collect();
        let first = sessions.find_at(&ids[0], at(100)).unwrap();
        let second = sessions.find_at(&ids[1], at(1)).unwrap();
        sessions.begin_at(at(101));
        assert!(sessions.find_at(&ids[0], at(102)).is_some());
        assert!(sessions.find_at(&ids[1], at(102)).is_none());
        assert!(first.ended.has_changed().is_ok());
        assert!(second.ended.has_changed().is_err(), "what it began goes on");
    }

    #[test]
    fn sessions_end_with_time_and_by_request() {
        let sessions = Sessions::default();
        let start = Instant::now();
        let id = sessions.begin_at(start);
        assert!(sessions.find_at(&id, start + IDLE / 2).is_some());
        assert!(sessions.find_at(&id, start + IDLE * 2).is_none());
        let id = sessions.begin();
        sessions.end(&id);
        assert!(sessions.find(&id).is_none());
        assert!(sessions.find("").is_none());
    }

    #[test]
    fn sessions_and_their_forms_have_secrets_of_their_own() {
        let sessions = Sessions::default();
        let (a, b) = (sessions.begin(), sessions.begin());
        assert_ne!(a, b);
        let (of_a, of_b) = (sessions.find(&a).unwrap(), sessions.find(&b).unwrap());
        assert!(of_a.has_sent(&of_a.form) && !of_a.has_sent(&of_b.form) && !of_a.has_sent(""));
    }
}
