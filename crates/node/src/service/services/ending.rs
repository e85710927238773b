//! The end of a node: clients are answered, and then the instances end, or are left to the next daemon.

use super::Services;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// How often a daemon that leaves its instances to the next one looks whether it can go.
const LEAVING_LOOK: Duration = Duration::from_millis(20);
/// How often in a row nobody has to be waited for: between two states a client is in no list.
const QUIET_LOOKS: u32 = 2;
/// How long clients that are connected may take for their next request before such a daemon
/// disconnects them.
const CLIENTS_PATIENCE: Duration = Duration::from_millis(500);
/// How long the connections may take whose bytes the gateway copies, until the monitor has them.
const JOINED_PATIENCE: Duration = Duration::from_secs(2);

impl Services {
    /// Takes no more requests, lets instances finish for at most `patience`,
    /// and ends them all.
    pub async fn drain(&self, patience: Duration) {
        self.shared.begin_to_end();
        let deadline = Instant::now() + patience;
        loop {
            // Clients that ask nothing now will not be served.
            self.shared.admission().let_go_of_waiting();
            let services = self.everything();
            for service in &services {
                match service.persists() {
                    true => service.send_all_to_sleep(),
                    false => service.retire_all(),
                }
                if service.is_retired() {
                    service.retire_others();
                }
            }
            let instances: usize = services.iter().map(|service| service.instance_count()).sum();
            // Answers may still be on their way when the instances are gone.
            let left = instances + self.shared.admission().busy();
            if left == 0 {
                return;
            }
            if Instant::now() >= deadline {
                tracing::warn!(instances, "ending instances that are still busy");
                for service in &services {
                    service.kill_all();
                }
                sleep(Duration::from_millis(50)).await;
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Takes no more clients, answers those that it has for at most `patience`, and has the
    /// instances outlive this daemon that can. The others end.
    pub async fn leave(&self, patience: Duration) {
        self.shared.begin_to_leave();
        if timeout(patience, self.until_left(patience)).await.is_err() {
            tracing::warn!("ending what is still busy and cannot be left");
            self.everything().iter().for_each(|service| service.kill_those_that_stay());
            sleep(LEAVING_LOOK).await;
        }
        // Last: their bytes stand still until the next daemon has them.
        self.shared.joined().leave();
        let _ = timeout(JOINED_PATIENCE, async {
            while self.shared.joined().moving() > 0 {
                sleep(LEAVING_LOOK).await;
            }
        })
        .await;
    }

    /// Waits until no client is served here, and each instance is kept or has ended.
    async fn until_left(&self, patience: Duration) {
        let began = Instant::now();
        let mut quiet_looks = 0;
        while quiet_looks < QUIET_LOOKS {
            sleep(LEAVING_LOOK).await;
            // A client that has connected a moment ago is about to ask something.
            let mut clients = self.shared.admission().busy();
            match began.elapsed() < CLIENTS_PATIENCE {
                true => clients += self.shared.admission().waiting_count(),
                false => self.shared.admission().let_go_of_waiting(),
            }
            // What is not asleep by then lives on: writing many to disk takes long.
            let may_sleep = began.elapsed() < patience / 2;
            let services = self.everything();
            let instances: usize =
                services.iter().map(|service| service.leave_all(may_sleep)).sum();
            quiet_looks = if instances + clients == 0 { quiet_looks + 1 } else { 0 };
        }
    }
}
