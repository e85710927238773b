//! `[entry]`: how requests reach the program, and what freezes it.

use serde::de::{MapAccess, Visitor, value::MapAccessDeserializer};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use thaw_abi::control::{FLAG_ENTRY_ASKED, FLAG_ENTRY_STDIN, FLAG_ENTRY_UDP, FLAG_INIT};

/// `[entry]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Entry {
    /// How requests reach the program.
    pub kind: EntryKind,
    /// What freezes the program when it is built.
    pub freeze: FreezeAt,
    /// What goes to an instance: single requests, or connections.
    #[serde(skip_serializing_if = "Connections::is_routed")]
    pub connections: Connections,
}

/// What becomes of the connections to a function's own address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Connections {
    /// The gateway routes each request; two of them may reach two instances.
    #[default]
    Routed,
    /// Each connection goes to an instance, whatever comes on it.
    Handover,
}

impl Connections {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn is_routed(&self) -> bool {
        *self == Self::Routed
    }
}

/// The version of HTTP that the gateway speaks to a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// HTTP/1.1.
    #[default]
    Http1,
    /// HTTP/2 with prior knowledge, without TLS (RFC 9113 §3.3).
    H2c,
}

impl Protocol {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub(super) fn is_http1(&self) -> bool {
        *self == Self::Http1
    }
}

/// How requests reach the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    /// HTTP over TCP: found by the `Host` header, or at `listen`.
    #[default]
    Http,
    /// Any protocol over TCP, at `listen`.
    Tcp,
    /// Datagrams, at `listen`; each client address has an instance.
    Udp,
    /// Standard input and output: the body of an HTTP request comes in, what is
    /// printed goes out, and the exit code becomes the status.
    Stdin,
    /// There are none, and no program: processes are started from outside (`thaw exec`).
    Sandbox,
}

impl EntryKind {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Stdin => "stdin",
            Self::Sandbox => "sandbox",
        }
    }

    /// `FLAG_ENTRY_*` that tell a sandbox.
    pub fn flags(self) -> u32 {
        match self {
            Self::Http | Self::Tcp => 0,
            Self::Udp => FLAG_ENTRY_UDP,
            Self::Stdin => FLAG_ENTRY_STDIN,
            Self::Sandbox => FLAG_INIT | FLAG_ENTRY_ASKED,
        }
    }
}

/// What freezes a program. A write to `/dev/thaw` always does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FreezeAt {
    /// `"wait"`: that it first waits for a request.
    #[default]
    Wait,
    /// `"program"`: nothing else.
    Program,
    /// `{ signal = "SIGUSR2" }`: that the signal is sent, by the program itself
    /// or to `thaw build`.
    Signal(FreezeSignal),
}

impl FreezeAt {
    /// `FLAG_ENTRY_*` that tell a sandbox.
    pub fn flags(self) -> u32 {
        if self == Self::Wait { 0 } else { FLAG_ENTRY_ASKED }
    }

    /// The signal, if it is one; 0 otherwise.
    pub fn signal_number(self) -> u32 {
        match self {
            Self::Signal(signal) => signal.number(),
            _ => 0,
        }
    }
}

/// A signal that can freeze a program: one that means nothing by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum FreezeSignal {
    #[serde(rename = "SIGHUP")]
    Hangup,
    #[serde(rename = "SIGUSR1")]
    User1,
    #[serde(rename = "SIGUSR2")]
    User2,
    #[serde(rename = "SIGWINCH")]
    Window,
    #[serde(rename = "SIGPWR")]
    Power,
}

impl FreezeSignal {
    /// Its number (signal(7), x86-64).
    pub fn number(self) -> u32 {
        match self {
            Self::Hangup => 1,
            Self::User1 => 10,
            Self::User2 => 12,
            Self::Window => 28,
            Self::Power => 30,
        }
    }

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hangup => "SIGHUP",
            Self::User1 => "SIGUSR1",
            Self::User2 => "SIGUSR2",
            Self::Window => "SIGWINCH",
            Self::Power => "SIGPWR",
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BySignal {
    signal: FreezeSignal,
}

impl Serialize for FreezeAt {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Wait => serializer.serialize_str("wait"),
            Self::Program => serializer.serialize_str("program"),
            Self::Signal(signal) => BySignal { signal }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for FreezeAt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = FreezeAt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"wait\", \"program\" or { signal = \"SIGUSR2\" }")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<FreezeAt, E> {
                match text {
                    "wait" => Ok(FreezeAt::Wait),
                    "program" => Ok(FreezeAt::Program),
                    _ => Err(E::custom(format!(
                        "`{text}` does not freeze a program; write \"wait\", \"program\" or \
                         {{ signal = \"SIGUSR2\" }}"
                    ))),
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<FreezeAt, A::Error> {
                let by = BySignal::deserialize(MapAccessDeserializer::new(map))?;
                Ok(FreezeAt::Signal(by.signal))
            }
        }

        deserializer.deserialize_any(Either)
    }
}
