//! A queue of bytes in pages: the buffer of a stream socket.

use alloc::collections::VecDeque;

use crate::errno::{Errno, Result};
use crate::io::{Sink, Source};
use crate::mm::pages::{PageBox, alloc_page};

const PAGE: usize = 4096;

/// Bytes in order of arrival, at most `capacity` of them. Pages are taken when
/// bytes arrive and given back when they have been read; one is kept, so that
/// a queue that is filled and drained in turn allocates nothing.
pub struct PageQueue {
    pages: VecDeque<PageBox>,
    /// Offset of the first byte in the first page.
    head: usize,
    len: usize,
    capacity: usize,
}

impl PageQueue {
    /// An empty queue for `capacity` bytes.
    pub const fn new(capacity: usize) -> Self {
        Self { pages: VecDeque::new(), head: 0, len: 0, capacity }
    }

    /// Bytes in the queue.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that fit in addition.
    pub fn room(&self) -> usize {
        self.capacity.saturating_sub(self.len)
    }

    /// Most bytes that the queue holds.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Changes the limit; what is in the queue stays.
    pub fn set_capacity(&mut self, capacity: usize) {
        self.capacity = capacity;
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.pages.truncate(1);
        self.head = 0;
        self.len = 0;
    }

    /// Appends at most `max` bytes of `source`, as many as fit. `EFAULT` and
    /// `ENOMEM` only if nothing was appended.
    pub fn push(&mut self, source: &mut Source<'_>, max: usize) -> Result<usize> {
        let want = source.remaining().min(self.room()).min(max);
        let mut done = 0;
        while done < want {
            let tail = self.head + self.len;
            let (index, offset) = (tail / PAGE, tail % PAGE);
            if index == self.pages.len() {
                match alloc_page() {
                    Ok(page) => self.pages.push_back(page),
                    Err(error) if done == 0 => return Err(error),
                    Err(_) => break,
                }
            }
            let step = (PAGE - offset).min(want - done);
            let page = self.pages.get_mut(index).ok_or(Errno::ENOMEM)?;
            match source.take(&mut page[offset..offset + step]) {
                Ok(0) => break,
                Ok(n) => {
                    self.len += n;
                    done += n;
                    if n < step {
                        break;
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Moves at most `max` bytes to `sink`. `EFAULT` only if nothing was moved.
    pub fn pop(&mut self, sink: &mut Sink<'_>, max: usize) -> Result<usize> {
        let done = self.peek(sink, 0, max)?;
        self.discard(done);
        Ok(done)
    }

    /// Copies at most `max` bytes, from `skip` bytes on, to `sink` and keeps them.
    pub fn peek(&self, sink: &mut Sink<'_>, skip: usize, max: usize) -> Result<usize> {
        let want = sink.remaining().min(self.len.saturating_sub(skip)).min(max);
        let mut done = 0;
        while done < want {
            let at = self.head + skip + done;
            let step = (PAGE - at % PAGE).min(want - done);
            let page = &self.pages[at / PAGE];
            match sink.put(&page[at % PAGE..at % PAGE + step]) {
                Ok(n) => {
                    done += n;
                    if n < step {
                        break;
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Drops the first `count` bytes.
    pub fn discard(&mut self, count: usize) {
        let count = count.min(self.len);
        self.len -= count;
        if self.len == 0 {
            self.clear();
            return;
        }
        self.head += count;
        while self.head >= PAGE {
            self.pages.pop_front();
            self.head -= PAGE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    #[test]
    fn bytes_come_out_in_order_across_pages() {
        let _sandbox = Sandbox::new();
        let mut queue = PageQueue::new(10_000);
        let input: Vec<u8> = (0..25_000u32).map(|i| (i % 251) as u8).collect();
        let mut source = Source::kernel(&input);
        let mut output = Vec::new();
        let mut chunk = [0u8; 777];
        loop {
            let pushed = queue.push(&mut source, usize::MAX).unwrap();
            assert!(queue.len() <= 10_000);
            let mut sink = Sink::kernel(&mut chunk);
            let n = queue.pop(&mut sink, usize::MAX).unwrap();
            output.extend_from_slice(&chunk[..n]);
            if pushed == 0 && n == 0 {
                break;
            }
        }
        assert_eq!(output, input);
        assert!(queue.pages.len() <= 1);
    }

    #[test]
    fn peeking_keeps_the_bytes() {
        let _sandbox = Sandbox::new();
        let mut queue = PageQueue::new(100);
        queue.push(&mut Source::kernel(b"abcdef"), usize::MAX).unwrap();
        let mut bytes = [0u8; 3];
        assert_eq!(queue.peek(&mut Sink::kernel(&mut bytes), 2, usize::MAX), Ok(3));
        assert_eq!(&bytes, b"cde");
        assert_eq!(queue.len(), 6);
        assert_eq!(queue.pop(&mut Sink::kernel(&mut bytes), 1), Ok(1));
        assert_eq!(bytes[0], b'a');
    }
}
