//! Messages between a caller, the resolver process and its workers. All ends are this same
//! executable, so there is no version. A worker trusts its caller; the caller does not trust a
//! worker, which an answer from the network may have taken over.

use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use bytemuck::{Pod, Zeroable, bytes_of, bytes_of_mut};

use crate::message;
use crate::text::printable;

/// Hidden first argument that makes an executable a resolver process.
pub const RESOLVER_ARGUMENT: &str = "--thaw-resolver";

/// Most bytes of a name (RFC 1035, 2.3.4: 255 in a message, which are 253 as text).
pub const NAME_MAX: usize = 253;
/// Most addresses in an answer. Sandboxes are told of 24 of them.
pub const ADDRESSES_MAX: usize = 64;

/// How long a look-up may take. The C library asks each of three name servers twice, and
/// waits for five seconds each time (resolv.conf(5)).
pub const LOOK_UP_MAX: Duration = Duration::from_secs(60);

/// Caller → resolver process: fork a worker for the attached socket.
pub const REQUEST_WORKER: u32 = 1;

/// Resolver process → caller, once: questions are served.
pub const REPORT_SERVING: u32 = 1;
/// Resolver process → caller, once: it could not be set up, and ends.
pub const REPORT_FAILED: u32 = 2;

/// What the resolver process says when it starts.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Report {
    /// `REPORT_*`.
    pub kind: u32,
    /// Of [`REPORT_FAILED`]: the host's error number.
    pub errno: i32,
    /// Of [`REPORT_FAILED`]: which step failed, in words; zeros follow.
    step: [u8; 120],
}

impl Report {
    pub fn serving() -> Self {
        Self { kind: REPORT_SERVING, ..Self::zeroed() }
    }

    pub fn failed(step: &str, source: &io::Error) -> Self {
        let mut report = Self {
            kind: REPORT_FAILED,
            errno: source.raw_os_error().unwrap_or(libc::EIO),
            ..Self::zeroed()
        };
        let len = step.len().min(report.step.len());
        report.step[..len].copy_from_slice(&step.as_bytes()[..len]);
        report
    }

    pub fn step(&self) -> String {
        let len = self.step.iter().position(|&byte| byte == 0).unwrap_or(self.step.len());
        printable(&self.step[..len])
    }
}

/// Caller → worker: the name to look up.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Question {
    len: u32,
    name: [u8; 256],
}

impl Question {
    /// `None` if no name is so long.
    pub fn new(name: &str) -> Option<Self> {
        let mut question = Self::zeroed();
        if name.is_empty() || name.len() > NAME_MAX {
            return None;
        }
        question.len = name.len() as u32;
        question.name[..name.len()].copy_from_slice(name.as_bytes());
        Some(question)
    }

    /// The name; `None`: no caller sends such a one.
    pub fn name(&self) -> Option<&str> {
        let len = usize::try_from(self.len).ok().filter(|len| (1..=NAME_MAX).contains(len))?;
        std::str::from_utf8(self.name.get(..len)?).ok()
    }
}

/// What the host's resolver says of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// These addresses, [`ADDRESSES_MAX`] at most; of IPv4 or IPv6, never the one in the
    /// clothes of the other.
    Addresses(Vec<IpAddr>),
    /// There is no such name.
    NoSuchName,
    /// It could not be found out.
    Failed,
}

const FOUND: u32 = 1;
const NO_SUCH_NAME: u32 = 2;
const FAILED: u32 = 3;

/// Worker → caller.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Answer {
    outcome: u32,
    count: u32,
    addresses: [[u8; 16]; ADDRESSES_MAX],
}

impl Answer {
    pub fn new(found: &Found) -> Self {
        let mut answer = Self::zeroed();
        let addresses: &[IpAddr] = match found {
            Found::Addresses(addresses) => addresses,
            _ => &[],
        };
        answer.outcome = match found {
            Found::Addresses(_) => FOUND,
            Found::NoSuchName => NO_SUCH_NAME,
            Found::Failed => FAILED,
        };
        for (place, ip) in answer.addresses.iter_mut().zip(addresses) {
            *place = match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => *ip,
            }
            .octets();
            answer.count += 1;
        }
        answer
    }

    /// What it says; `None`: no worker says so that is its own master.
    pub fn found(&self) -> Option<Found> {
        match (self.outcome, usize::try_from(self.count).ok()?) {
            (FOUND, count) => {
                let addresses = self.addresses.get(..count)?;
                let canonical = |octets: &[u8; 16]| IpAddr::from(Ipv6Addr::from(*octets));
                Some(Found::Addresses(
                    addresses.iter().map(|octets| canonical(octets).to_canonical()).collect(),
                ))
            }
            (NO_SUCH_NAME, 0) => Some(Found::NoSuchName),
            (FAILED, 0) => Some(Found::Failed),
            _ => None,
        }
    }
}

/// Sends a packet.
pub fn send<T: Pod>(
    socket: impl AsFd,
    packet: &T,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    message::send(socket, &[IoSlice::new(bytes_of(packet))], descriptors)
}

/// What [`receive`] found.
#[derive(Clone, Copy, Debug)]
pub enum Received<T> {
    /// This packet.
    Packet(T),
    /// One that is shorter or longer, or brings descriptors.
    Nonsense,
    /// The other end is closed.
    End,
}

/// Receives a packet that brings no descriptors.
pub fn receive<T: Pod>(socket: impl AsFd) -> io::Result<Received<T>> {
    let mut packet = T::zeroed();
    let received = message::receive(socket, bytes_of_mut(&mut packet), None)?;
    Ok(match received.len {
        0 => Received::End,
        len if len != size_of::<T>() || received.truncated || received.descriptors_dropped => {
            Received::Nonsense
        }
        _ => Received::Packet(packet),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_arrive_as_they_were_asked_for() {
        let longest = "x".repeat(NAME_MAX);
        for name in ["a", "api.example.com", &longest] {
            assert_eq!(Question::new(name).unwrap().name(), Some(name));
        }
        assert!(Question::new("").is_none());
        assert!(Question::new(&"x".repeat(NAME_MAX + 1)).is_none());
        let name = Question::new("api").unwrap();
        for len in [0, NAME_MAX as u32 + 1, 256, 257, u32::MAX] {
            assert_eq!(Question { len, ..name }.name(), None, "{len}");
        }
        assert_eq!(Question { name: [0xff; 256], ..name }.name(), None);
    }

    #[test]
    fn answers_arrive_as_they_were_given() {
        let ips = ["192.0.2.1", "2001:db8::1"].map(|ip| ip.parse().unwrap());
        for found in [
            Found::Addresses(ips.to_vec()),
            Found::Addresses(vec![]),
            Found::NoSuchName,
            Found::Failed,
        ] {
            assert_eq!(Answer::new(&found).found(), Some(found));
        }
        let many = vec![ips[0]; 2 * ADDRESSES_MAX];
        let Some(Found::Addresses(kept)) = Answer::new(&Found::Addresses(many)).found() else {
            panic!("the host has found some")
        };
        assert_eq!(kept.len(), ADDRESSES_MAX);
    }

    #[test]
    fn answers_that_make_no_sense_are_none() {
        let none = Answer::new(&Found::NoSuchName);
        for (outcome, count) in [
            (0, 0),
            (4, 0),
            (u32::MAX, 0),
            (FOUND, ADDRESSES_MAX as u32 + 1),
            (FOUND, u32::MAX),
            (NO_SUCH_NAME, 1),
            (FAILED, 1),
        ] {
            assert_eq!(Answer { outcome, count, ..none }.found(), None, "{outcome}, {count}");
        }
    }

    #[test]
    fn a_report_is_cut_and_escaped() {
        let error = io::Error::from_raw_os_error(libc::EPERM);
        let report = Report::failed("take\x1b user ids", &error);
        assert_eq!((report.errno, report.step()), (libc::EPERM, "take\\x1b user ids".to_owned()));
        assert_eq!(Report::failed(&"x".repeat(1000), &error).step().len(), 120);
    }

    #[test]
    fn packets_of_another_length_and_those_with_descriptors_are_nonsense() {
        let (own, remote) = message::control_pair().unwrap();
        let answer = Answer::new(&Found::NoSuchName);
        let bytes = [bytes_of(&answer), &[0]].concat();
        for len in [1, bytes.len() - 2, bytes.len()] {
            message::send(&remote, &[IoSlice::new(&bytes[..len])], &[]).unwrap();
            assert!(matches!(receive::<Answer>(&own).unwrap(), Received::Nonsense), "{len}");
        }
        send(&remote, &answer, &[own.as_fd()]).unwrap();
        assert!(matches!(receive::<Answer>(&own).unwrap(), Received::Nonsense));
        send(&remote, &answer, &[]).unwrap();
        assert!(matches!(receive::<Answer>(&own).unwrap(), Received::Packet(_)));
        drop(remote);
        assert!(matches!(receive::<Answer>(&own).unwrap(), Received::End));
    }
}
