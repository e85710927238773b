//! Messages between the library and its zygote parent. Both ends are this same
//! executable, or that of a monitor which speaks the same version
//! ([`crate::monitor::VERSION`]: change it with these). There is no distrust; the packets have
//! a fixed size.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytemuck::{Pod, Zeroable, bytes_of};

use crate::message;

/// Hidden first argument that makes an executable a zygote parent.
pub const PARENT_ARGUMENT: &str = "--thaw-zygote-parent";

/// Library → parent: [`Request::first`] is the first host user id that is reserved
/// for this parent, [`Request::count`] how many sandboxes can have their own.
pub const REQUEST_SETUP: u32 = 1;
/// Library → parent: make the zygote [`Request::id`] in slot [`Request::first`].
pub const REQUEST_CREATE: u32 = 2;
/// Library → parent: make the zygote [`Request::id`], which is to become a template.
pub const REQUEST_CREATE_TEMPLATE: u32 = 3;
/// Library → parent: as [`REQUEST_CREATE`], with the filter of a single process.
pub const REQUEST_CREATE_SINGLE: u32 = 4;
/// Library → parent: as [`REQUEST_CREATE`], for a program that is held to a level of the
/// instruction set.
pub const REQUEST_CREATE_MASKED: u32 = 6;
/// Library → parent, in place of [`REQUEST_SETUP`]: the parent is root of its user
/// namespace already. [`Request::first`] is the id before that of the first sandbox, as
/// the namespace numbers them.
pub const REQUEST_SETUP_INSIDE: u32 = 5;

/// A packet from the library to the parent.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Request {
    /// `REQUEST_*`.
    pub kind: u32,
    /// See the kinds.
    pub first: u32,
    /// See the kinds.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
    /// See the kinds.
    pub id: u64,
}

/// Parent → library: the parent's process exists; its pidfd is attached.
pub const REPORT_STARTED: u32 = 1;
/// Parent → library: requests are served. [`Report::value`] is a [`UserIds`],
/// [`Report::id`] the number of slots, [`Report::base`] the user id that comes
/// before that of the first slot, or the one that all sandboxes share.
pub const REPORT_SERVING: u32 = 2;
/// Parent → library: the parent could not be set up; [`Report::step`] failed
/// with errno [`Report::value`].
pub const REPORT_FAILED: u32 = 3;
/// Parent → library: zygote [`Report::id`] exists; its pidfd is attached.
pub const REPORT_CREATED: u32 = 4;
/// Parent → library: zygote [`Report::id`] could not be made.
pub const REPORT_CREATE_FAILED: u32 = 5;
/// Parent → library: the process of zygote [`Report::id`] has ended with the
/// wait status [`Report::value`].
pub const REPORT_EXITED: u32 = 6;
/// Parent → library: a process that a template has forked has ended with the
/// wait status [`Report::value`]; [`Report::id`] is its number in the parent's
/// pid namespace.
pub const REPORT_COPY_EXITED: u32 = 7;

/// A packet from the parent to the library.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Report {
    /// `REPORT_*`.
    pub kind: u32,
    /// A [`Step`] as a number.
    pub step: u32,
    /// See the kinds.
    pub value: i32,
    /// See the kinds; otherwise zero.
    pub base: u32,
    /// See the kinds.
    pub id: u64,
}

impl Report {
    /// A report about one zygote, or about the parent with `id` 0.
    pub fn new(kind: u32, id: u64, value: i32) -> Self {
        Self { kind, step: 0, value, base: 0, id }
    }
}

/// How user ids are given to sandboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserIds {
    /// Each sandbox has a user id of its own.
    OnePerSandbox = 0,
    /// All have the caller's: there is no `newuidmap` or no range in `/etc/subuid`.
    Shared = 1,
}

impl UserIds {
    /// The user id of the sandbox in a slot, as the parent numbers it; see
    /// [`REPORT_SERVING`].
    pub(super) fn of_slot(self, base: u32, slot: u32) -> u32 {
        if self == Self::Shared { base } else { base + 1 + slot }
    }

    pub(super) fn from_number(number: i32) -> Self {
        if number == Self::OnePerSandbox as i32 { Self::OnePerSandbox } else { Self::Shared }
    }
}

macro_rules! steps {
    ($($name:ident = $text:literal,)*) => {
        /// What the parent or a zygote was doing when it failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Step { $(#[doc = $text] $name,)* }

        impl Step {
            const ALL: &[Self] = &[$(Self::$name,)*];

            /// The step in words.
            pub fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

steps! {
    Receive = "read the request",
    Fork = "create the process with its namespaces",
    MapIds = "map user ids",
    TakeIds = "take user ids",
    EnterRoot = "enter an empty root directory",
    DropCapabilities = "drop capabilities",
    WatchChildren = "watch child processes",
    OomScore = "set the out-of-memory score",
    ForkZygote = "fork a zygote",
    EnterCgroup = "enter the control group",
    SetLimits = "set resource limits",
    NewSession = "start a session",
    NoNewPrivileges = "forbid new privileges",
    PlaceDescriptors = "arrange descriptors",
    Execute = "execute the kernel",
}

impl Step {
    /// The step that [`Report::step`] holds.
    pub fn from_number(number: u32) -> Self {
        Self::ALL.get(number as usize).copied().unwrap_or(Self::Receive)
    }
}

/// A step and why it failed.
#[derive(Debug)]
pub struct Failure {
    pub step: Step,
    pub source: io::Error,
}

impl Failure {
    pub fn report(&self, kind: u32, id: u64) -> Report {
        let errno = self.source.raw_os_error().unwrap_or(libc::EIO);
        Report { step: self.step as u32, ..Report::new(kind, id, errno) }
    }
}

/// Names the step that an error belongs to.
pub trait During<T> {
    fn during(self, step: Step) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, step: Step) -> Result<T, Failure> {
        self.map_err(|source| Failure { step, source: source.into() })
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

/// Receives a packet; `None` when the other end is closed.
pub fn receive<T: Pod>(socket: impl AsFd, descriptors: &mut Vec<OwnedFd>) -> io::Result<Option<T>> {
    let mut value = T::zeroed();
    let bytes = bytemuck::bytes_of_mut(&mut value);
    let expected = bytes.len();
    let packet = message::receive(socket, bytes, Some(descriptors))?;
    match packet.len {
        0 => Ok(None),
        len if len == expected && !packet.truncated => Ok(Some(value)),
        _ => Err(io::Error::from(io::ErrorKind::InvalidData)),
    }
}
