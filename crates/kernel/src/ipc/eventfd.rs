//! eventfd(2): a counter that can be waited for.

use alloc::format;
use alloc::string::{String, ToString};

use crate::errno::{Errno, Result};
use crate::fs::file::{Events, File};
use crate::io::{Sink, Source};
use crate::sync::KernelCell;
use crate::task::wait::WaitQueue;

/// The counter never exceeds this.
const MAXIMUM: u64 = u64::MAX - 1;

/// What a read takes from the counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMode {
    /// All of it.
    Whole,
    /// One (`EFD_SEMAPHORE`).
    One,
}

/// An eventfd object.
pub struct EventFd {
    count: KernelCell<u64>,
    mode: ReadMode,
    queue: WaitQueue,
}

impl EventFd {
    /// A counter at `initial`.
    pub fn new(initial: u64, mode: ReadMode) -> Self {
        Self { count: KernelCell::new(initial), mode, queue: WaitQueue::new() }
    }
}

impl File for EventFd {
    fn read(&self, sink: &mut Sink<'_>, _offset: u64) -> Result<usize> {
        if sink.remaining() < 8 {
            return Err(Errno::EINVAL);
        }
        let value = {
            let mut count = self.count.borrow_mut();
            let value = match self.mode {
                _ if *count == 0 => return Err(Errno::EAGAIN),
                ReadMode::Whole => *count,
                ReadMode::One => 1,
            };
            *count -= value;
            value
        };
        self.queue.wake_all(Events::OUT);
        // Like Linux, a read into a bad address consumes the value.
        if sink.put(&value.to_ne_bytes())? < 8 { Err(Errno::EFAULT) } else { Ok(8) }
    }

    fn write(&self, source: &mut Source<'_>, _offset: u64) -> Result<usize> {
        if source.remaining() != 8 {
            return Err(Errno::EINVAL);
        }
        {
            // The value is looked at before it is consumed: a write that has to
            // wait is tried again with the same source.
            let mut count = self.count.borrow_mut();
            let mut bytes = [0; 8];
            if source.peek(&mut bytes)? < 8 {
                return Err(Errno::EFAULT);
            }
            let value = u64::from_ne_bytes(bytes);
            if value == u64::MAX {
                return Err(Errno::EINVAL);
            }
            if value > MAXIMUM - *count {
                return Err(Errno::EAGAIN);
            }
            source.advance(8);
            *count += value;
        }
        self.queue.wake_all(Events::IN);
        Ok(8)
    }

    fn poll(&self) -> Events {
        let count = self.count.get();
        let mut events = Events::empty();
        if count > 0 {
            events |= Events::IN;
        }
        if count == u64::MAX {
            events |= Events::ERR;
        }
        if count < MAXIMUM {
            events |= Events::OUT;
        }
        events
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.queue)
    }

    fn details(&self) -> String {
        format!("eventfd-count: {:16x}\n", self.count.get())
    }

    fn description(&self) -> String {
        "anon_inode:[eventfd]".to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(file: &EventFd) -> Result<u64> {
        let mut bytes = [0; 8];
        file.read(&mut Sink::kernel(&mut bytes), 0)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn write(file: &EventFd, value: u64) -> Result<usize> {
        file.write(&mut Source::kernel(&value.to_ne_bytes()), 0)
    }

    #[test]
    fn counts_and_resets() {
        let file = EventFd::new(0, ReadMode::Whole);
        assert_eq!(read(&file), Err(Errno::EAGAIN));
        assert_eq!(file.poll(), Events::OUT);
        write(&file, 3).unwrap();
        write(&file, 4).unwrap();
        assert_eq!(file.poll(), Events::IN | Events::OUT);
        assert_eq!(read(&file), Ok(7));
        assert_eq!(write(&file, u64::MAX), Err(Errno::EINVAL));
        write(&file, MAXIMUM).unwrap();
        assert_eq!(write(&file, 1), Err(Errno::EAGAIN));
        assert_eq!(file.poll(), Events::IN);
    }

    #[test]
    fn a_semaphore_counts_down_by_one() {
        let file = EventFd::new(2, ReadMode::One);
        assert_eq!(read(&file), Ok(1));
        assert_eq!(read(&file), Ok(1));
        assert_eq!(read(&file), Err(Errno::EAGAIN));
    }

    #[test]
    fn short_buffers_are_refused() {
        let file = EventFd::new(1, ReadMode::Whole);
        let mut small = [0; 4];
        assert_eq!(file.read(&mut Sink::kernel(&mut small), 0), Err(Errno::EINVAL));
        assert_eq!(file.write(&mut Source::kernel(&small), 0), Err(Errno::EINVAL));
    }
}
