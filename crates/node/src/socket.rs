//! What the node asks the host about a client's socket, beyond what safe wrappers
//! offer.
#![allow(unsafe_code)]

use rustix::net::RecvFlags;
use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// How many bytes a socket has carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Payload bytes received from the client, read or not.
    pub received: u64,
    /// Payload bytes sent or waiting to be sent to the client.
    pub sent: u64,
    /// Milliseconds since the last payload was sent; meaningless before.
    pub last_sent_ms: u32,
    /// Milliseconds since the last payload was received.
    pub last_received_ms: u32,
}

/// `struct tcp_info` of `linux/tcp.h`, up to the last field that is used here.
#[repr(C)]
#[derive(Clone, Copy)]
struct TcpInfo {
    _state_to_last_ack_sent_a: [u8; 8],
    _rto_to_fackets: [u32; 9],
    last_data_sent: u32,
    _last_ack_sent: u32,
    last_data_recv: u32,
    _last_ack_recv_to_total_retrans: [u32; 12],
    _pacing_rates_and_bytes_acked: [u64; 3],
    bytes_received: u64,
    _segments: [u32; 2],
    notsent_bytes: u32,
    _min_rtt_to_data_segs_out: [u32; 3],
    _delivery_rate_to_sndbuf_limited: [u64; 4],
    _delivered: [u32; 2],
    bytes_sent: u64,
}

/// Reads a TCP socket's counters (`TCP_INFO`, tcp(7)).
///
/// # Errors
/// The host's error, or `Unsupported` from a host kernel older than 4.19.
pub fn traffic(socket: impl AsFd) -> io::Result<Traffic> {
    let mut info = MaybeUninit::<TcpInfo>::zeroed();
    let mut len = mem::size_of::<TcpInfo>() as libc::socklen_t;
    // SAFETY: `info` is writable for `len` bytes, and the host writes at most that.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if (len as usize) < mem::size_of::<TcpInfo>() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // SAFETY: every bit pattern is a valid `TcpInfo`, and it was zeroed before.
    let info = unsafe { info.assume_init() };
    Ok(Traffic {
        received: info.bytes_received,
        sent: info.bytes_sent + u64::from(info.notsent_bytes),
        last_sent_ms: info.last_data_sent,
        last_received_ms: info.last_data_recv,
    })
}

/// Makes `accept` return a connection only when its first bytes are there, or
/// after about `seconds` (`TCP_DEFER_ACCEPT`, tcp(7)). The fast path then finds
/// the request head at once, instead of being woken twice.
///
/// # Errors
/// The host's error.
pub fn defer_accept(listener: impl AsFd, seconds: i32) -> io::Result<()> {
    set_tcp_option(listener.as_fd(), libc::TCP_DEFER_ACCEPT, seconds)
}

/// Disables Nagle's algorithm; an accepted socket inherits it from its listener.
///
/// # Errors
/// The host's error.
pub fn set_nodelay(socket: impl AsFd) -> io::Result<()> {
    set_tcp_option(socket.as_fd(), libc::TCP_NODELAY, 1)
}

fn set_tcp_option(socket: BorrowedFd<'_>, option: i32, value: i32) -> io::Result<()> {
    // SAFETY: the option value is an `int` that lives through the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw const value).cast(),
            mem::size_of::<i32>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Copies the bytes that wait on a socket into `buffer` without consuming them.
/// 0 means that the client has closed its side.
///
/// # Errors
/// `WouldBlock` if nothing waits, or the host's error.
pub fn peek(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (copied, _) = rustix::net::recv(socket, buffer, flags)?;
    Ok(copied)
}

/// Number of bytes that wait on a socket.
///
/// # Errors
/// The host's error.
pub fn unread(socket: impl AsFd) -> io::Result<u64> {
    Ok(rustix::io::ioctl_fionread(socket)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn traffic_counts_both_directions() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        assert_eq!(traffic(&server).unwrap().sent, 0);
        client.write_all(b"12345").unwrap();
        let mut buffer = [0; 5];
        server.read_exact(&mut buffer).unwrap();
        server.write_all(b"123").unwrap();
        client.read_exact(&mut buffer[..3]).unwrap();
        let seen = traffic(&server).unwrap();
        assert_eq!((seen.received, seen.sent), (5, 3));
    }

    #[test]
    fn counters_lie_where_the_host_puts_them() {
        assert_eq!(mem::offset_of!(TcpInfo, last_data_sent), 44);
        assert_eq!(mem::offset_of!(TcpInfo, last_data_recv), 52);
        assert_eq!(mem::offset_of!(TcpInfo, bytes_received), 128);
        assert_eq!(mem::offset_of!(TcpInfo, notsent_bytes), 144);
        assert_eq!(mem::offset_of!(TcpInfo, bytes_sent), 200);
    }

    #[test]
    fn peeking_consumes_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let mut buffer = [0; 8];
        assert_eq!(peek(&server, &mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        client.write_all(b"abc").unwrap();
        let mut read = [0; 3];
        server.peek(&mut read).unwrap(); // waits until the bytes are there
        assert_eq!(peek(&server, &mut buffer).unwrap(), 3);
        server.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"abc");
        drop(client);
        assert_eq!(server.read(&mut read).unwrap(), 0);
        assert_eq!(peek(&server, &mut buffer).unwrap(), 0);
    }
}
