//! A connection to a far host, made of a near one: every byte arrives later by the delay and the time
//! that it takes on a line of some rate, which all connections share.
//!
//! It stands in for `tc netem`, which not every host's kernel has. It models the handshake of
//! connections (one round trip), not the slow start of TCP.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that are sent at once.
const CHUNK: usize = 16 << 10;
/// Chunks that may be on their way: 64 MiB, more than a line of 10 Gbit/s and 40 ms holds.
const CHUNKS_MAX: usize = 4096;

/// What lies between two hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LineOptions {
    /// From one end to the other and back.
    pub round_trip: Duration,
    /// Bits in a second.
    pub bits: f64,
}

impl LineOptions {
    /// How long so many bytes take.
    pub(crate) fn transfer(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 * 8.0 / self.bits)
    }
}

/// One direction of a line.
struct Direction {
    line: LineOptions,
    busy_until: Mutex<Instant>,
}

impl Direction {
    fn new(line: LineOptions) -> Arc<Self> {
        Arc::new(Self { line, busy_until: Mutex::new(Instant::now()) })
    }

    /// When bytes arrive that are sent now.
    fn arrival(&self, bytes: usize) -> Instant {
        let mut busy_until = self.busy_until.lock().expect("no holder panics");
        let begin = Instant::now().max(*busy_until);
        *busy_until = begin + self.line.transfer(bytes as u64);
        *busy_until + self.line.round_trip / 2
    }
}

/// Listens in place of `far`, at the other end of a line. Lives as long as the process.
///
/// # Errors
/// The host has no port left.
pub(crate) fn line_to(far: SocketAddr, line: LineOptions) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let (there, back) = (Direction::new(line), Direction::new(line));
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(far) else { continue };
            let _ = (client.set_nodelay(true), server.set_nodelay(true));
            let (Ok(client_too), Ok(server_too)) = (client.try_clone(), server.try_clone()) else {
                continue;
            };
            carry(client, server, &there, line.round_trip);
            carry(server_too, client_too, &back, Duration::ZERO);
        }
    });
    Ok(address)
}

/// Carries all bytes from one socket to the other; none before `handshake` is over.
fn carry(mut from: TcpStream, to: TcpStream, way: &Arc<Direction>, handshake: Duration) {
    let (send, arrive) = sync_channel(CHUNKS_MAX);
    let (way, not_before) = (way.clone(), Instant::now() + handshake);
    thread::spawn(move || deliver(&arrive, to));
    thread::spawn(move || {
        let _ = read(&mut from, &way, not_before, &send);
    });
}

type Chunk = (Instant, Vec<u8>);

fn read(
    from: &mut TcpStream,
    way: &Direction,
    not_before: Instant,
    send: &SyncSender<Chunk>,
) -> std::io::Result<()> {
    let mut buffer = [0; CHUNK];
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return Ok(());
        }
        thread::sleep(not_before.saturating_duration_since(Instant::now()));
        if send.send((way.arrival(read), buffer[..read].to_vec())).is_err() {
            return Ok(());
        }
    }
}

fn deliver(arrive: &Receiver<Chunk>, mut to: TcpStream) {
    while let Ok((when, bytes)) = arrive.recv() {
        thread::sleep(when.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_after_the_delay_and_the_time_they_take() {
        let line = LineOptions { round_trip: Duration::from_millis(20), bits: 1e6 };
        let way = Direction::new(line);
        let before = Instant::now();
        let first = way.arrival(12_500);
        let second = way.arrival(12_500);
        assert!(first >= before + Duration::from_millis(110));
        assert_eq!(second - first, Duration::from_millis(100));
    }

    #[test]
    fn all_bytes_arrive_in_order() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let line = LineOptions { round_trip: Duration::from_millis(2), bits: 1e9 };
        let address = line_to(listener.local_addr().unwrap(), line).unwrap();
        let sent: Vec<u8> = (0..200_000_u32).map(|number| number as u8).collect();
        let echo = thread::spawn(move || {
            let (mut server, _) = listener.accept().unwrap();
            let mut bytes = vec![0; 200_000];
            server.read_exact(&mut bytes).unwrap();
            server.write_all(&bytes).unwrap();
        });
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(&sent).unwrap();
        let mut back = Vec::new();
        client.read_to_end(&mut back).unwrap();
        echo.join().unwrap();
        assert!(back == sent);
    }
}
