//! The devices without a counterpart on the host.

use alloc::string::String;
use alloc::sync::Arc;

use crate::errno::{Errno, Result};
use crate::fs::file::{File, Stat};
use crate::fs::inode::Inode;
use crate::io::{Sink, Source};
use crate::mm::backing::MmapSource;
use crate::sync::KernelCell;
use crate::task::wait::WaitQueue;

/// The parts of `File` that all devices share.
macro_rules! device_file {
    () => {
        fn seekable(&self) -> bool {
            true
        }
        fn keeps_position(&self) -> bool {
            false
        }
        fn stat(&self) -> Result<Stat> {
            Ok(self.inode.attributes().to_stat())
        }
        fn description(&self) -> String {
            String::from("device")
        }
    };
}

/// Takes everything without looking at it.
fn swallow(source: &mut Source<'_>) -> usize {
    let count = source.remaining();
    source.advance(count);
    count
}

/// `/dev/null` (null(4)).
pub struct Null {
    inode: Arc<dyn Inode>,
}

impl Null {
    /// An open `/dev/null`.
    pub fn new(inode: Arc<dyn Inode>) -> Self {
        Self { inode }
    }
}

impl File for Null {
    fn read(&self, _: &mut Sink<'_>, _: u64) -> Result<usize> {
        Ok(0)
    }
    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        Ok(swallow(source))
    }
    device_file!();
}

/// What a device of zeros does with what is written to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// `/dev/zero`.
    Vanish,
    /// `/dev/full`: `ENOSPC`.
    Fail,
}

/// `/dev/zero` and `/dev/full` (null(4), full(4)).
pub struct Zero {
    inode: Arc<dyn Inode>,
    writes: Writes,
}

impl Zero {
    /// An open device of zeros.
    pub fn new(inode: Arc<dyn Inode>, writes: Writes) -> Self {
        Self { inode, writes }
    }
}

impl File for Zero {
    fn read(&self, sink: &mut Sink<'_>, _: u64) -> Result<usize> {
        sink.put_zeros(sink.remaining())
    }
    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        match self.writes {
            Writes::Vanish => Ok(swallow(source)),
            Writes::Fail => Err(Errno::ENOSPC),
        }
    }
    fn mmap_source(&self) -> Result<MmapSource> {
        match self.writes {
            Writes::Vanish => Ok(MmapSource::Zero),
            Writes::Fail => Err(Errno::ENODEV),
        }
    }
    device_file!();
}

/// `/dev/random` and `/dev/urandom` (random(4)).
pub struct Random {
    inode: Arc<dyn Inode>,
}

impl Random {
    /// An open source of random numbers.
    pub fn new(inode: Arc<dyn Inode>) -> Self {
        Self { inode }
    }
}

impl File for Random {
    fn read(&self, sink: &mut Sink<'_>, _: u64) -> Result<usize> {
        let mut done = 0;
        let mut block = [0u8; 256];
        while sink.remaining() > 0 {
            let step = sink.remaining().min(block.len());
            crate::state::kernel().random.borrow_mut().fill(&mut block[..step]);
            match sink.put(&block[..step]) {
                Ok(count) if count == step => done += count,
                Ok(count) => return Ok(done + count),
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        // Anybody may stir the pool and nobody gains by it: the generator's
        // key comes from the host and stays as good as it was.
        Ok(swallow(source))
    }

    fn ioctl(&self, request: u32, argument: crate::platform::user::UserAddress) -> Result<u64> {
        const RNDGETENTCNT: u32 = 0x8004_5200;
        match request {
            RNDGETENTCNT => argument.write(&256u32).map(|()| 0),
            _ => Err(Errno::EINVAL),
        }
    }
    device_file!();
}

/// `/dev/thaw` (`docs/uniqueness.md`): reading tells which copy this is, writing
/// asks for a freeze and returns when it has happened.
pub struct Thaw {
    inode: Arc<dyn Inode>,
    /// The generation in which a write has asked for a freeze that has not answered it yet.
    asked_in: KernelCell<Option<u64>>,
}

impl Thaw {
    /// An open `/dev/thaw`.
    pub fn new(inode: Arc<dyn Inode>) -> Self {
        Self { inode, asked_in: KernelCell::new(None) }
    }

    /// Asks for a freeze; `EAGAIN` until it has happened. A copy that may be frozen again
    /// must not take the same write for another question.
    fn ask(&self) -> Result<()> {
        let now = crate::state::generation();
        if self.asked_in.get().is_some_and(|asked| asked != now) {
            self.asked_in.set(None);
            return Ok(());
        }
        let outcome = crate::task::freeze_request::ask();
        self.asked_in.set(outcome.is_err().then_some(now));
        outcome
    }
}

impl File for Thaw {
    fn read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        let text = alloc::format!("{}\n", crate::state::thaws_of_program());
        let rest = usize::try_from(offset).ok().and_then(|offset| text.as_bytes().get(offset..));
        sink.put(rest.unwrap_or(&[]))
    }
    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        self.ask()?;
        Ok(swallow(source))
    }
    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(crate::task::freeze_request::happened())
    }
    fn stat(&self) -> Result<Stat> {
        Ok(self.inode.attributes().to_stat())
    }
    fn seekable(&self) -> bool {
        true
    }
    fn description(&self) -> String {
        String::from("/dev/thaw")
    }
}
