//! What the service manager hears of this process (sd_notify(3)), if it wants to: a unit of
//! `Type=notify` has `NOTIFY_SOCKET` in its environment, and without that nothing is sent.
//!
//! The process that was started as the unit tells it, and no other (`NotifyAccess=main`). So a monitor
//! does for a daemon that it has started, which does not see the socket either. Processes that Thaw
//! starts have environments without the variable; a program that is executed in the place of a monitor
//! has it still.
//!
//! A status is a line in `systemctl status`. It has numbers and addresses of this host, and nothing that
//! tenants or clients have chosen.

use sd_notify::NotifyState;
use std::net::SocketAddr;

/// Clients of a gateway at this address are served.
pub(crate) fn serving(gateway: SocketAddr) {
    ready(&format!("Serving on http://{gateway}"));
}

/// This process has begun, or has ended a reload.
pub(crate) fn ready(status: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// This process reloads, until it is [`ready`].
pub(crate) fn reloading(status: &str) {
    // Without the time a newer service manager waits for another message.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now, NotifyState::Status(status)]),
        Err(error) => warn(&error),
    }
}

/// This process begins to end.
pub(crate) fn stopping(status: &str) {
    tell(&[NotifyState::Stopping, NotifyState::Status(status)]);
}

/// What this process does just now.
pub(crate) fn status(status: &str) {
    tell(&[NotifyState::Status(status)]);
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn(&error);
    }
}

fn warn(error: &std::io::Error) {
    tracing::warn!("the service manager cannot be told how far this process is ({error})");
}
