//! `struct msghdr` and control messages (sendmsg(2), cmsg(3), unix(7)).

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::address::{AF_INET, AF_INET6, AF_UNIX};
use super::departure::Departure;
use super::socket::{Ancillary, Outgoing, PeerCredentials};
use crate::args::Fd;
use crate::errno::{Errno, Result};
use crate::fs::fd_table::NewDescriptor;
use crate::fs::fd_table::OnExec;
use crate::fs::file::{OpenFile, OpenFlags};
use crate::platform::user::UserAddress;

/// `SOL_SOCKET`.
pub const SOL_SOCKET: i32 = 1;
const SCM_RIGHTS: i32 = 1;
const SCM_CREDENTIALS: i32 = 2;
/// Most descriptors in one message.
const SCM_MAX_FD: usize = 253;
/// `net.core.optmem_max`: longest control buffer of a sender.
const CONTROL_MAX: usize = 131_072;
/// Bytes of `struct cmsghdr`.
const CMSG_HEADER: usize = 16;

/// `struct msghdr` of the x86-64 ABI.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
#[allow(missing_docs)]
pub struct MessageHeader {
    pub name: u64,
    pub name_len: u32,
    pub pad0: u32,
    pub vectors: u64,
    pub vector_count: u64,
    pub control: u64,
    pub control_len: u64,
    pub flags: u32,
    pub pad1: u32,
}

impl MessageHeader {
    /// Offset of `msg_namelen`.
    pub const NAME_LEN_AT: u64 = 8;
    /// Offset of `msg_controllen`.
    pub const CONTROL_LEN_AT: u64 = 40;
    /// Offset of `msg_flags`.
    pub const FLAGS_AT: u64 = 48;
}

/// `struct cmsghdr`.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct ControlHeader {
    len: u64,
    level: i32,
    kind: i32,
}

/// One control message.
#[derive(Debug, PartialEq, Eq)]
pub struct Control<'a> {
    /// `SOL_*`.
    pub level: i32,
    /// What the level calls it.
    pub kind: i32,
    /// The data.
    pub data: &'a [u8],
}

/// Splits a control buffer. `EINVAL` if a length does not fit.
pub fn split(mut bytes: &[u8]) -> Result<Vec<Control<'_>>> {
    let mut messages = Vec::new();
    while let Some((header, _)) = bytes.split_at_checked(CMSG_HEADER) {
        let header: ControlHeader = bytemuck::pod_read_unaligned(header);
        let len = usize::try_from(header.len).map_err(|_| Errno::EINVAL)?;
        if len < CMSG_HEADER || len > bytes.len() {
            return Err(Errno::EINVAL);
        }
        messages.push(Control {
            level: header.level,
            kind: header.kind,
            data: &bytes[CMSG_HEADER..len],
        });
        bytes = bytes.get(len.next_multiple_of(8)..).unwrap_or(&[]);
    }
    Ok(messages)
}

/// Reads the control messages of a sender on a socket of a family into a message.
pub fn read_control(at: UserAddress, len: u64, family: u16, message: &mut Outgoing) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let len = usize::try_from(len).ok().filter(|len| *len <= CONTROL_MAX).ok_or(Errno::ENOBUFS)?;
    let mut bytes = alloc::vec![0; len];
    at.read_bytes(&mut bytes)?;
    match family {
        AF_UNIX => message.ancillary = parse(&bytes, |fd| Fd(fd).file())?,
        AF_INET | AF_INET6 => message.departure = Departure::parse(&bytes, family)?,
        _ => {}
    }
    Ok(())
}

fn parse(bytes: &[u8], open: impl Fn(i32) -> Result<Arc<OpenFile>>) -> Result<Ancillary> {
    let mut ancillary = Ancillary::default();
    for message in split(bytes)? {
        match (message.level, message.kind) {
            (SOL_SOCKET, SCM_RIGHTS) => {
                for fd in message.data.chunks_exact(4) {
                    if ancillary.files.len() == SCM_MAX_FD {
                        return Err(Errno::EINVAL);
                    }
                    ancillary.files.push(open(bytemuck::pod_read_unaligned(fd))?);
                }
            }
            (SOL_SOCKET, SCM_CREDENTIALS) => {
                if message.data.len() != size_of::<PeerCredentials>() {
                    return Err(Errno::EINVAL);
                }
                let claimed: PeerCredentials = bytemuck::pod_read_unaligned(message.data);
                ancillary.credentials = Some(claimed.claimed()?);
            }
            (SOL_SOCKET, _) => return Err(Errno::EINVAL),
            _ => {}
        }
    }
    Ok(ancillary)
}

/// Control messages being written into a receiver's buffer.
pub struct ControlWriter {
    at: UserAddress,
    room: usize,
    written: usize,
    /// Something did not fit (`MSG_CTRUNC`).
    pub cut: bool,
}

impl ControlWriter {
    /// Into `len` bytes at `at`.
    pub fn new(at: UserAddress, len: u64) -> Self {
        let room = if at.is_null() { 0 } else { usize::try_from(len).unwrap_or(0) };
        Self { at, room, written: 0, cut: false }
    }

    /// Bytes written, padding included.
    pub fn written(&self) -> usize {
        self.written
    }

    /// A control message.
    pub fn put(&mut self, level: i32, kind: i32, data: &[u8]) -> Result<()> {
        let left = self.room - self.written;
        if left < CMSG_HEADER {
            self.cut = true;
            return Ok(());
        }
        let fits = data.len().min(left - CMSG_HEADER);
        self.cut |= fits < data.len();
        let header = ControlHeader { len: (CMSG_HEADER + fits) as u64, level, kind };
        let at = self.at.offset(self.written as u64);
        at.write(&header)?;
        at.offset(CMSG_HEADER as u64).write_bytes(&data[..fits])?;
        self.written += (CMSG_HEADER + fits).next_multiple_of(8).min(left);
        Ok(())
    }

    /// `SCM_CREDENTIALS`.
    pub fn put_credentials(&mut self, credentials: PeerCredentials) -> Result<()> {
        self.put(SOL_SOCKET, SCM_CREDENTIALS, bytemuck::bytes_of(&credentials))
    }

    /// `SCM_RIGHTS`: gives the running process descriptors for as many files
    /// as fit, and closes the others; all of them if it cannot be told the numbers.
    pub fn put_files(&mut self, files: Vec<Arc<OpenFile>>, flags: OpenFlags) {
        if files.is_empty() {
            return;
        }
        let fit = (self.room - self.written).saturating_sub(CMSG_HEADER) / 4;
        self.cut |= files.len() > fit;
        let mut new = Vec::new();
        for file in files.into_iter().take(fit) {
            let Ok(descriptor) = NewDescriptor::reserve() else {
                self.cut = true;
                break;
            };
            new.push((descriptor, file));
        }
        let numbers: Vec<i32> = new.iter().map(|(descriptor, _)| descriptor.number()).collect();
        if new.is_empty() {
            return;
        }
        if self.put(SOL_SOCKET, SCM_RIGHTS, bytemuck::cast_slice(&numbers)).is_err() {
            self.cut = true;
            return;
        }
        for (descriptor, file) in new {
            descriptor.install(file, OnExec::of(flags));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::pipe::Pipe;
    use crate::testing::Sandbox;

    const OWN: PeerCredentials = PeerCredentials { pid: 1, uid: 1000, gid: 1000 };

    fn control(kind: i32, data: &[u8]) -> Vec<u8> {
        let header =
            ControlHeader { len: (CMSG_HEADER + data.len()) as u64, level: SOL_SOCKET, kind };
        let mut bytes = bytemuck::bytes_of(&header).to_vec();
        bytes.extend_from_slice(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn rights_and_credentials_are_parsed() {
        let _sandbox = Sandbox::new();
        let (reader, _writer) = Pipe::pair(1);
        let file = OpenFile::new(reader, OpenFlags::empty(), None);
        let open = |fd| if fd == 4 { Ok(file.clone()) } else { Err(Errno::EBADF) };
        let mut bytes = control(SCM_RIGHTS, bytemuck::cast_slice(&[4i32, 4, 4]));
        bytes.extend(control(SCM_CREDENTIALS, bytemuck::bytes_of(&OWN)));
        let ancillary = parse(&bytes, open).unwrap();
        assert_eq!(ancillary.files.len(), 3);
        assert_eq!(ancillary.credentials, Some(OWN));
        let bad = control(SCM_RIGHTS, bytemuck::cast_slice(&[9i32]));
        assert_eq!(parse(&bad, open).err(), Some(Errno::EBADF));
        let many = control(SCM_RIGHTS, bytemuck::cast_slice(&[4i32; 254]));
        assert_eq!(parse(&many, open).err(), Some(Errno::EINVAL));
        let forged =
            control(SCM_CREDENTIALS, bytemuck::bytes_of(&PeerCredentials { pid: 5, ..OWN }));
        assert_eq!(parse(&forged, open).err(), Some(Errno::EPERM));
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let mut bytes = control(SCM_RIGHTS, &[0; 4]);
        bytes[0] = 200;
        assert_eq!(split(&bytes), Err(Errno::EINVAL));
        bytes[0] = 8;
        assert_eq!(split(&bytes), Err(Errno::EINVAL));
        assert_eq!(split(&bytes[..10]), Ok(Vec::new()));
    }
}
