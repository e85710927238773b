//! Hibernating idle instances, and putting them to sleep, while the host is short of memory.
//!
//! The host's kernel says for how much of the time somebody has waited for memory (pressure stall
//! information, Documentation/accounting/psi.rst). As long as that is too much, the instances that
//! have been idle longest give up theirs, one after the other.

use crate::node::NodeState;
use std::fs;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

const MEMORY_PRESSURE: &str = "/proc/pressure/memory";
/// How often the pressure is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Percent of the last ten seconds in which somebody has waited for memory, from which on
/// instances are hibernated.
const TOO_MUCH: f64 = 10.0;
/// Instances that are asked at a time: the next look shows whether that was enough.
const AT_A_TIME: usize = 4;

/// Watches the host's memory for as long as the node lives.
pub(crate) async fn watch_pressure(node: Arc<NodeState>) {
    if let Err(error) = memory_pressure() {
        tracing::info!(
            "instances are hibernated by time only, since this host does not tell its memory pressure: {error}"
        );
        return;
    }
    loop {
        sleep(LOOK_EVERY).await;
        if memory_pressure().is_ok_and(|percent| percent >= TOO_MUCH) {
            relieve(&node);
        }
    }
}

/// Hibernates idle instances; if all are, puts them to sleep. One that can do neither ends.
fn relieve(node: &NodeState) {
    let asked = node.hibernate_idlest(AT_A_TIME);
    if asked > 0 {
        tracing::info!(instances = asked, "memory is short: hibernating idle instances");
        return;
    }
    let asked = node.put_idlest_to_sleep(AT_A_TIME);
    if asked > 0 {
        tracing::info!(instances = asked, "memory is short: putting hibernated instances to sleep");
    }
}

/// Percent of the last ten seconds in which somebody has waited for memory.
fn memory_pressure() -> io::Result<f64> {
    let text = fs::read_to_string(MEMORY_PRESSURE)?;
    average(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// `avg10` of the line `some`.
fn average(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let value = line.split(' ').find_map(|field| field.strip_prefix("avg10="))?;
    value.parse().ok().filter(|percent| (0.0..=100.0).contains(percent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_of_ten_seconds_is_read() {
        let text = "some avg10=12.50 avg60=0.02 avg300=0.09 total=103783901\n\
                    full avg10=1.00 avg60=0.00 avg300=0.02 total=19732130\n";
        assert_eq!(average(text), Some(12.5));
        for wrong in ["", "full avg10=1.00", "some avg60=1.00", "some avg10=x", "some avg10=101"] {
            assert_eq!(average(wrong), None, "{wrong}");
        }
    }
}
