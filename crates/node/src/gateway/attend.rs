//! Following a connection from its placement to its end, so that its client
//! gets an answer whatever becomes of the instance.

use super::answer::refuse;
use super::refusal::Refusal;
use super::socket::{Traffic, traffic, unread};
use crate::config::EntryKind;
use crate::instance::{Client, End, Outcome};
use crate::node::Shared;
use crate::service::{Placement, Service, Ticket};
use rustix::net::{Shutdown, shutdown};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout};

/// How often a connection that no instance has touched is placed anew.
const PLACEMENTS_MAX: u32 = 3;
/// How long a killed instance may take to be gone before its client is answered.
const KILL_PATIENCE: Duration = Duration::from_millis(500);

/// Places a connection, or waits with it, and follows it to its end.
pub(super) async fn attend(
    shared: Arc<Shared>,
    service: Arc<Service>,
    client: Arc<Client>,
    placement: Placement,
) {
    let result = match placement {
        Placement::Placed(ticket) => follow(&shared, &service, &client, Some(ticket)).await,
        Placement::Later => follow(&shared, &service, &client, None).await,
        Placement::Failed(error) => Err(died(&service, error.to_string())),
    };
    if let Err(refusal) = result {
        shared.metrics().refused(Some(service.name()), refusal.status(), refusal.error());
        match service.config().entry.kind {
            // Its client would not understand; that it is closed says enough.
            EntryKind::Tcp => {
                let _ = shutdown(&client.socket, Shutdown::Both);
            }
            _ => refuse(&client, &refusal).await,
        }
    }
}

/// Follows the connection through as many instances as it takes.
async fn follow(
    shared: &Shared,
    service: &Arc<Service>,
    client: &Arc<Client>,
    mut ticket: Option<Ticket>,
) -> Result<(), Refusal> {
    let mut placements = 0;
    loop {
        let placed = match ticket.take() {
            Some(placed) => placed,
            None => service.place(client).await?,
        };
        placements += 1;
        shared.metrics().connected(service.name(), placed.fresh);
        let waited = placed.waited;
        let reason = match watch(service, client, placed).await? {
            Outcome::Closed => return Ok(()),
            Outcome::Undelivered => "every instance ended before it took the connection".to_owned(),
            Outcome::Gone(end) => {
                match traffic(&client.socket) {
                    // Something was answered; the client sees where it stops.
                    Ok(Traffic { sent: 1.., .. }) => return Ok(()),
                    // An instance that was waiting may end at the moment it gets a
                    // connection. If it has read nothing, nobody
                    // can tell that it was there.
                    Ok(Traffic { received, .. })
                        if waited && unread(&client.socket).ok() == Some(received) =>
                    {
                        end.to_string()
                    }
                    _ => return Err(died(service, end.to_string())),
                }
            }
        };
        if placements == PLACEMENTS_MAX {
            return Err(died(service, reason));
        }
    }
}

/// Waits for the end of a connection and enforces the function's times.
async fn watch(
    service: &Arc<Service>,
    client: &Client,
    mut ticket: Ticket,
) -> Result<Outcome, Refusal> {
    let limit = service.config().limits.timeout.0;
    let keep_alive = service.keep_alive();
    let mut check = Instant::now() + limit;
    let gone = || Outcome::Gone(End::Killed(None));
    loop {
        tokio::select! {
            // A keeper that vanishes without a word has lost its instance.
            outcome = &mut ticket.done => return Ok(outcome.unwrap_or_else(|_| gone())),
            () = sleep_until(check) => {}
        }
        let now = traffic(&client.socket).unwrap_or_default();
        let verdict = match service.config().entry.kind {
            EntryKind::Tcp => judge_silence(now, keep_alive),
            _ => judge(now, limit, keep_alive),
        };
        match verdict {
            Verdict::Fine(again) => check = Instant::now() + again,
            Verdict::Idle => {
                // The guest sees the end of the stream and closes; a guest that
                // does not is asked again.
                let _ = shutdown(&client.socket, Shutdown::Read);
                check = Instant::now() + limit;
            }
            Verdict::Late => {
                tracing::warn!(function = %service.name(), instance = ticket.instance, "no answer within {} s, ending the instance", limit.as_secs_f64());
                service.kill(ticket.instance);
                // Only when the instance is gone can it answer no more.
                let outcome = timeout(KILL_PATIENCE, &mut ticket.done).await;
                let answered = traffic(&client.socket).is_ok_and(|now| now.sent > 0);
                return match outcome {
                    _ if !answered => Err(Refusal::Timeout {
                        function: service.name().to_string(),
                        timeout: limit,
                    }),
                    Ok(Ok(outcome)) => Ok(outcome),
                    _ => Ok(gone()),
                };
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// Look again after this time.
    Fine(Duration),
    /// The client has asked nothing for longer than the function keeps idle connections.
    Idle,
    /// A request waits for its answer longer than the function's timeout.
    Late,
}

/// Judges a connection by what it carried. A request counts as answered when
/// the last byte sent is younger than the last byte received; so a response
/// that makes progress is never late, and neither is a slow upload.
fn judge(traffic: Traffic, limit: Duration, keep_alive: Duration) -> Verdict {
    let since_sent = Duration::from_millis(traffic.last_sent_ms.into());
    let since_received = Duration::from_millis(traffic.last_received_ms.into());
    let waits = traffic.sent == 0 || since_received < since_sent;
    let (elapsed, allowed, verdict) = match waits {
        true => (since_received, limit, Verdict::Late),
        false => (since_sent, keep_alive, Verdict::Idle),
    };
    match allowed.checked_sub(elapsed) {
        // The counters have a resolution of some milliseconds.
        Some(left) if left > Duration::from_millis(10) => {
            let least = Duration::from_millis(50).min(limit);
            Verdict::Fine(left.min(limit).max(least))
        }
        _ => verdict,
    }
}

/// Judges a connection whose protocol is not known: nobody can say whose turn it
/// is, so it is only ever idle.
fn judge_silence(traffic: Traffic, keep_alive: Duration) -> Verdict {
    let last_ms = match traffic.sent {
        0 => traffic.last_received_ms,
        _ => traffic.last_received_ms.min(traffic.last_sent_ms),
    };
    match keep_alive.checked_sub(Duration::from_millis(last_ms.into())) {
        Some(left) if left > Duration::from_millis(10) => Verdict::Fine(left),
        _ => Verdict::Idle,
    }
}

pub(super) fn died(service: &Service, reason: String) -> Refusal {
    Refusal::InstanceDied { function: service.name().to_string(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(2);
    const KEEP: Duration = Duration::from_secs(60);

    fn verdict(sent: u64, last_sent_ms: u32, last_received_ms: u32) -> Verdict {
        let traffic = Traffic { received: 10, sent, last_sent_ms, last_received_ms };
        judge(traffic, LIMIT, KEEP)
    }

    #[test]
    fn a_request_without_an_answer_is_late() {
        assert_eq!(verdict(0, 0, 2000), Verdict::Late);
        assert_eq!(verdict(5, 9000, 2000), Verdict::Late, "the second request");
    }

    #[test]
    fn progress_is_not_late() {
        assert_eq!(verdict(0, 0, 500), Verdict::Fine(Duration::from_millis(1500)), "a slow upload");
        assert_eq!(verdict(5, 100, 9000), Verdict::Fine(LIMIT), "a slow download");
    }

    #[test]
    fn a_connection_of_an_unknown_protocol_is_never_late() {
        let verdict = |sent, last_sent_ms, last_received_ms| {
            let traffic = Traffic { received: 10, sent, last_sent_ms, last_received_ms };
            judge_silence(traffic, KEEP)
        };
        assert_eq!(verdict(0, 0, 59_000), Verdict::Fine(Duration::from_secs(1)));
        assert_eq!(verdict(5, 1_000, 90_000), Verdict::Fine(Duration::from_secs(59)));
        assert_eq!(verdict(5, 61_000, 90_000), Verdict::Idle);
    }

    #[test]
    fn an_answered_connection_is_idle_after_keep_alive() {
        assert_eq!(verdict(5, 60_000, 60_001), Verdict::Idle);
    }
}
