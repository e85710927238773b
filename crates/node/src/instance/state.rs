//! The states of an instance and what leads from one to the next.

use serde::{Deserialize, Serialize};

/// What an instance does at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum InstanceState {
    /// The boot command is sent; the sandbox has not reported yet.
    Booting,
    /// It has at least one connection.
    Busy,
    /// It waits for a connection.
    Idle,
    /// Nothing in it runs, since it was paused. It still has its memory, which is being written.
    Paused,
    /// It has given up its memory, and waits for a connection.
    Hibernated,
    /// It has at least one connection, and was hibernated before.
    HibernateRunning,
    /// It waits for a connection with that part of its memory that it has needed since it was
    /// hibernated.
    WokenUp,
    /// Its process has ended, and a file is left from which the next connection boots it again.
    Asleep,
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
    /// Nothing in it runs, and it has its memory; it has this many connections.
    Paused {
        /// Connections now.
        connections: u32,
    },
    /// It goes on after that; it has this many connections.
    Unpaused {
        /// Connections now.
        connections: u32,
    },
    /// It has given up its memory; it has this many connections.
    Hibernated {
        /// Connections now.
        connections: u32,
    },
    /// It goes on after that; it has this many connections.
    Woken {
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
        let after_sleep =
            |connections| if connections == 0 { Self::WokenUp } else { Self::HibernateRunning };
        match (self, change) {
            // Nothing leads out of the last state.
            (Self::Ending, _) | (_, Change::End) => Self::Ending,
            (_, Change::Booted { connections } | Change::Unpaused { connections }) => {
                by_load(connections)
            }
            // Connections of a booting instance wait in its accept queue.
            (Self::Booting, Change::Connections { .. }) => Self::Booting,
            // With a connection it wakes by itself.
            (Self::Paused, Change::Connections { connections: 0 })
            | (_, Change::Paused { connections: 0 }) => Self::Paused,
            (Self::Hibernated, Change::Connections { connections: 0 })
            | (_, Change::Hibernated { connections: 0 }) => Self::Hibernated,
            (_, Change::Hibernated { connections } | Change::Woken { connections })
            | (
                Self::Hibernated | Self::HibernateRunning | Self::WokenUp,
                Change::Connections { connections },
            ) => after_sleep(connections),
            (_, Change::Connections { connections } | Change::Paused { connections }) => {
                by_load(connections)
            }
        }
    }

    /// Its name, as the API and `thaw ps` show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Booting => "booting",
            Self::Busy => "busy",
            Self::Idle => "idle",
            Self::Paused => "paused",
            Self::Hibernated => "hibernated",
            Self::HibernateRunning => "hibernate-running",
            Self::WokenUp => "woken-up",
            Self::Asleep => "asleep",
            Self::Ending => "ending",
        }
    }

    /// Whether the instance waits for a connection, with its memory or without.
    pub fn is_idle(self) -> bool {
        matches!(self, Self::Idle | Self::Paused | Self::Hibernated | Self::WokenUp)
    }

    /// Whether the instance waits and has memory to give up.
    pub fn may_hibernate(self) -> bool {
        matches!(self, Self::Idle | Self::Paused | Self::WokenUp)
    }

    /// Whether the instance has its memory, and runs.
    pub fn has_memory(self) -> bool {
        matches!(self, Self::Idle | Self::Busy | Self::WokenUp | Self::HibernateRunning)
    }

    /// Whether the instance may get another connection.
    pub fn takes_connections(self) -> bool {
        self != Self::Ending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The states and transitions 2 to 9 of Hibernate Container, Figure 3.
    #[test]
    fn an_instance_hibernates_and_wakes() {
        let connections = |connections| Change::Connections { connections };
        let (asleep, woken) =
            (Change::Hibernated { connections: 0 }, Change::Woken { connections: 0 });
        let mut state = InstanceState::Idle;
        for (change, expected) in [
            (connections(1), InstanceState::Busy),
            (connections(0), InstanceState::Idle),
            (asleep, InstanceState::Hibernated),
            (connections(1), InstanceState::HibernateRunning),
            (Change::Woken { connections: 1 }, InstanceState::HibernateRunning),
            (connections(0), InstanceState::WokenUp),
            (connections(1), InstanceState::HibernateRunning),
            (connections(0), InstanceState::WokenUp),
            (asleep, InstanceState::Hibernated),
            (woken, InstanceState::WokenUp),
            // A request came while it gave up its memory.
            (Change::Hibernated { connections: 1 }, InstanceState::HibernateRunning),
            (Change::End, InstanceState::Ending),
            (asleep, InstanceState::Ending),
            (woken, InstanceState::Ending),
        ] {
            state = state.after(change);
            assert_eq!(state, expected, "{change:?}");
            assert_eq!(
                state.may_hibernate(),
                state.is_idle() && state != InstanceState::Hibernated
            );
        }
        for state in
            [InstanceState::Booting, InstanceState::HibernateRunning, InstanceState::WokenUp]
        {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
    }

    #[test]
    fn a_paused_instance_has_its_memory_until_that_is_written() {
        let paused = Change::Paused { connections: 0 };
        let mut state = InstanceState::WokenUp;
        for (change, expected) in [
            (paused, InstanceState::Paused),
            (Change::Connections { connections: 0 }, InstanceState::Paused),
            (Change::Unpaused { connections: 0 }, InstanceState::Idle),
            (paused, InstanceState::Paused),
            (Change::Connections { connections: 1 }, InstanceState::Busy),
            // It was at rest for a moment, and somebody had come.
            (Change::Paused { connections: 1 }, InstanceState::Busy),
            (paused, InstanceState::Paused),
            (Change::Hibernated { connections: 0 }, InstanceState::Hibernated),
            (Change::End, InstanceState::Ending),
            (paused, InstanceState::Ending),
        ] {
            state = state.after(change);
            assert_eq!(state, expected, "{change:?}");
        }
        assert!(InstanceState::Paused.is_idle() && InstanceState::Paused.may_hibernate());
        assert!(!InstanceState::Paused.has_memory(), "nothing may ask it whether it is well");
        assert_eq!(serde_json::to_value(InstanceState::Paused).unwrap(), "paused");
    }

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
