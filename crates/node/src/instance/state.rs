//! The states of an instance and what leads from one to the next.

use serde::{Deserialize, Serialize};

/// What an instance does at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InstanceState {
    /// The boot command is sent; the sandbox has not reported yet.
    Booting,
    /// It has at least one connection.
    Busy,
    /// It waits for a connection.
    Idle,
    /// It has been told to end, or has ended; it gets no more connections.
    Ending,
}

/// What happens to an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The sandbox reported its boot complete; it has this many connections.
    Booted {
        /// Connections now.
        connections: u32,
    },
    /// A connection came or went; it has this many now.
    Connections {
        /// Connections now.
        connections: u32,
    },
    /// It is told to end, or its process has ended.
    End,
}

impl InstanceState {
    /// The state after `change`.
    pub fn after(self, change: Change) -> Self {
        let by_load = |connections| if connections == 0 { Self::Idle } else { Self::Busy };
        match (self, change) {
            // Nothing leads out of the last state.
            (Self::Ending, _) | (_, Change::End) => Self::Ending,
            (_, Change::Booted { connections }) => by_load(connections),
            // Connections of a booting instance wait in its accept queue.
            (Self::Booting, Change::Connections { .. }) => Self::Booting,
            (_, Change::Connections { connections }) => by_load(connections),
        }
    }

    /// Whether the instance may get another connection.
    pub fn takes_connections(self) -> bool {
        self != Self::Ending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_goes_from_boot_to_end() {
        let mut state = InstanceState::Booting;
        for (change, expected) in [
            (Change::Connections { connections: 1 }, InstanceState::Booting),
            (Change::Booted { connections: 1 }, InstanceState::Busy),
            (Change::Connections { connections: 0 }, InstanceState::Idle),
            (Change::Connections { connections: 2 }, InstanceState::Busy),
            (Change::End, InstanceState::Ending),
            (Change::Connections { connections: 0 }, InstanceState::Ending),
            (Change::Booted { connections: 0 }, InstanceState::Ending),
        ] {
            state = state.after(change);
            assert_eq!(state, expected, "{change:?}");
        }
        assert!(!state.takes_connections());
    }
}
