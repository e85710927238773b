//! Bytes of a pipe as splice(2) needs them: looked at before they are taken.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::PipeEnd;
use crate::errno::{Errno, Result};
use crate::fs::file::{Events, File};
use crate::io::Source;
use crate::task::signal;

const PAGE: usize = 4096;
const OUT: Events = Events::OUT.union(Events::WRNORM);

impl PipeEnd {
    /// Whether both are ends of one pipe.
    pub fn is_same_pipe(&self, other: &PipeEnd) -> bool {
        Arc::ptr_eq(&self.pipe, &other.pipe)
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.pipe.ring.borrow_mut().slots.is_empty()
    }

    /// Copies up to `max` bytes from the front, at most one packet. Nothing is
    /// the end; `EAGAIN` if something may come.
    pub fn look(&self, max: usize) -> Result<Vec<u8>> {
        let ring = self.pipe.ring.borrow_mut();
        if ring.slots.is_empty() {
            return if ring.writers > 0 { Err(Errno::EAGAIN) } else { Ok(Vec::new()) };
        }
        let mut bytes = Vec::new();
        for slot in &ring.slots {
            if bytes.len() == max || (slot.packet && !bytes.is_empty()) {
                break;
            }
            let step = slot.len.min(max - bytes.len());
            bytes.extend_from_slice(&slot.page[slot.offset..slot.offset + step]);
            if slot.packet {
                break;
            }
        }
        Ok(bytes)
    }

    /// Takes `count` bytes, which must have been looked at, off the front.
    pub fn discard(&self, count: usize) {
        let freed = {
            let mut ring = self.pipe.ring.borrow_mut();
            let was_full = ring.is_full();
            let mut left = count;
            while let Some(slot) = ring.slots.front_mut().filter(|_| left > 0) {
                let step = slot.len.min(left);
                slot.offset += step;
                slot.len -= step;
                left -= step;
                let done = slot.len == 0;
                ring.bytes -= step;
                if done && let Some(slot) = ring.slots.pop_front() {
                    ring.keep_page(slot.page);
                }
            }
            was_full && !ring.is_full()
        };
        if freed {
            self.pipe.wake_writers(OUT);
        }
    }

    /// Bytes that are certain to fit; `EAGAIN` if none are, `EPIPE`, with the
    /// signal, if nobody reads.
    pub fn room(&self) -> Result<usize> {
        let (readers, free) = {
            let ring = self.pipe.ring.borrow_mut();
            (ring.readers, ring.limit.saturating_sub(ring.slots.len()))
        };
        match (readers, free) {
            (0, _) => {
                signal::send_sigpipe();
                Err(Errno::EPIPE)
            }
            (_, 0) => Err(Errno::EAGAIN),
            (_, free) => Ok(free * PAGE),
        }
    }

    /// Appends bytes for which there is room.
    pub fn put(&self, bytes: &[u8]) -> Result<()> {
        let written = self.write(&mut Source::kernel(bytes), 0)?;
        debug_assert_eq!(written, bytes.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::pipe::Pipe;
    use crate::io::Sink;
    use crate::testing::Sandbox;

    #[test]
    fn bytes_are_looked_at_and_taken() {
        let _sandbox = Sandbox::new();
        let (reading, writing) = Pipe::pair(1);
        assert_eq!(reading.look(10), Err(Errno::EAGAIN));
        writing.put(&[1; 5000]).unwrap();
        writing.put(b"tail").unwrap();
        assert_eq!(reading.look(usize::MAX).unwrap().len(), 5004);
        reading.discard(4999);
        assert_eq!(reading.look(3), Ok(vec![1, b't', b'a']));
        let mut rest = [0; 10];
        assert_eq!(reading.read(&mut Sink::kernel(&mut rest), 0), Ok(5));
        drop(writing);
        assert_eq!(reading.look(1), Ok(vec![]));
    }

    #[test]
    fn room_is_what_certainly_fits() {
        let _sandbox = Sandbox::new();
        let (reading, writing) = Pipe::pair(1);
        assert_eq!(writing.room(), Ok(65536));
        writing.put(b"x").unwrap();
        assert_eq!(writing.room(), Ok(61440));
        writing.put(&[0; 61440]).unwrap();
        assert_eq!(writing.room(), Err(Errno::EAGAIN));
        reading.discard(1);
        assert_eq!(writing.room(), Ok(4096));
        drop(reading);
        assert_eq!(writing.room(), Err(Errno::EPIPE));
    }
}
