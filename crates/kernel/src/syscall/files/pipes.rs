//! System calls that make pipes (pipe(7)).

use crate::args::{Flags, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::fd_table;
use crate::fs::file::{OpenFile, OpenFlags};
use crate::fs::pipe::{PacketMode, Pipe};
use crate::state::kernel;

/// pipe(2).
pub fn pipe(to: UserPtr<[i32; 2]>) -> Result<()> {
    pipe2(to, Flags(0))
}

/// pipe2(2).
pub fn pipe2(to: UserPtr<[i32; 2]>, Flags(flags): Flags) -> Result<()> {
    let flags = OpenFlags::from_bits_retain(flags);
    // O_NOTIFICATION_PIPE has the value of O_EXCL and needs CONFIG_WATCH_QUEUE.
    if !(OpenFlags::CLOEXEC | OpenFlags::NONBLOCK | OpenFlags::DIRECT).contains(flags) {
        return Err(Errno::EINVAL);
    }
    to.check(1)?;
    let status = flags & (OpenFlags::NONBLOCK | OpenFlags::DIRECT);
    let (reader, writer) = Pipe::pair(kernel().net.inodes.next());
    if flags.contains(OpenFlags::DIRECT) {
        writer.set_packet_mode(PacketMode::On);
    }
    let reader = OpenFile::new(reader, status, None);
    let writer = OpenFile::new(writer, status | OpenFlags::WRONLY, None);
    fd_table::install_pair(to, [reader, writer], flags)
}
