//! select(2) and pselect6: poll with sets of bits.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::epoll::under_mask;
use super::poll::wait_for_any;
use crate::args::{Fd, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::file::{Events, OpenFile};
use crate::platform::user::UserAddress;
use crate::task::current_process;
use crate::time::{Timeout, Timespec, Timeval};

/// What each of the three sets stands for (`fs/select.c`).
const READ: Events =
    Events::IN.union(Events::RDNORM).union(Events::RDBAND).union(Events::HUP).union(Events::ERR);
const WRITE: Events = Events::OUT.union(Events::WRNORM).union(Events::WRBAND).union(Events::ERR);
const EXCEPTION: Events = Events::PRI;
const MEANING: [Events; 3] = [READ, WRITE, EXCEPTION];

/// Words of the sets that the C library's `fd_set` holds.
const INLINE_WORDS: usize = 1024 / 64;

/// The three sets, as many words each as the descriptor count needs.
struct Sets {
    words: usize,
    inline: [[u64; INLINE_WORDS]; 3],
    heap: [Vec<u64>; 3],
}

impl Sets {
    fn new(words: usize) -> Self {
        let heap = if words > INLINE_WORDS {
            [alloc::vec![0; words], alloc::vec![0; words], alloc::vec![0; words]]
        } else {
            [Vec::new(), Vec::new(), Vec::new()]
        };
        Self { words, inline: [[0; INLINE_WORDS]; 3], heap }
    }

    fn get(&self, set: usize) -> &[u64] {
        if self.words > INLINE_WORDS { &self.heap[set] } else { &self.inline[set][..self.words] }
    }

    fn get_mut(&mut self, set: usize) -> &mut [u64] {
        if self.words > INLINE_WORDS {
            &mut self.heap[set]
        } else {
            &mut self.inline[set][..self.words]
        }
    }

    fn clear(&mut self) {
        for set in 0..3 {
            self.get_mut(set).fill(0);
        }
    }
}

/// Looks at every descriptor once, fills `found` and returns how many bits it
/// set. `EBADF` if a descriptor is not open.
fn scan(
    asked: &Sets,
    found: &mut Sets,
    mut open: impl FnMut(i32) -> Result<Arc<OpenFile>>,
    mut files: Option<&mut Vec<Arc<OpenFile>>>,
) -> Result<usize> {
    found.clear();
    let mut count = 0;
    for word in 0..asked.words {
        let mut all = asked.get(0)[word] | asked.get(1)[word] | asked.get(2)[word];
        while all != 0 {
            let bit = all.trailing_zeros();
            all &= all - 1;
            let file = open((word * 64) as i32 + bit as i32)?;
            let events = file.file.poll();
            for (set, meaning) in MEANING.iter().enumerate() {
                if asked.get(set)[word] & (1 << bit) != 0 && events.intersects(*meaning) {
                    found.get_mut(set)[word] |= 1 << bit;
                    count += 1;
                }
            }
            if let Some(files) = &mut files {
                files.push(file);
            }
        }
    }
    Ok(count)
}

/// The words of a set in guest memory.
type SetPtr = UserPtr<u64>;

/// select(2). Reports the time left.
pub fn select(
    count: i32,
    readable: SetPtr,
    writable: SetPtr,
    exceptional: SetPtr,
    timeout_at: UserPtr<Timeval>,
) -> Result<usize> {
    let timeout = Timeout::from_timeval(timeout_at)?;
    let outcome = wait_for_sets(count, [readable, writable, exceptional], timeout);
    if let Some(ns) = timeout.left_ns() {
        // The call has done its work: a read-only time-out is no error.
        let _ = timeout_at.write(&Timeval::from_ns(ns));
    }
    outcome
}

/// pselect6: pselect(2) with the signal mask behind a pointer to its address
/// and size. Reports the time left.
pub fn pselect6(
    count: i32,
    readable: SetPtr,
    writable: SetPtr,
    exceptional: SetPtr,
    timeout_at: UserPtr<Timespec>,
    mask: UserPtr<[u64; 2]>,
) -> Result<usize> {
    let timeout = Timeout::from_timespec(timeout_at)?;
    let [mask, size] = mask.read_if_some()?.unwrap_or_default();
    let outcome = under_mask(UserPtr::new(UserAddress(mask)), size as usize, || {
        wait_for_sets(count, [readable, writable, exceptional], timeout)
    });
    if let Some(ns) = timeout.left_ns() {
        let _ = timeout_at.write(&Timespec::from_ns(ns));
    }
    outcome
}

fn wait_for_sets(count: i32, at: [SetPtr; 3], timeout: Timeout) -> Result<usize> {
    let count = usize::try_from(count).map_err(|_| Errno::EINVAL)?;
    // Bits of descriptors that cannot be open are ignored, not refused.
    let count = count.min(descriptor_capacity());
    let words = count.div_ceil(64);
    let mut asked = Sets::new(words);
    let mut found = Sets::new(words);
    for (set, at) in at.iter().enumerate().filter(|(_, at)| !at.is_null()) {
        let words = asked.get_mut(set);
        at.read_slice(words)?;
        if let (Some(last), 1..) = (words.last_mut(), count % 64) {
            *last &= (1 << (count % 64)) - 1;
        }
    }
    let bits = wait_for_any(timeout, |files| scan(&asked, &mut found, |fd| Fd(fd).file(), files))?;
    for (set, at) in at.iter().enumerate().filter(|(_, at)| !at.is_null()) {
        at.write_slice(found.get(set))?;
    }
    Ok(bits)
}

/// Number of descriptors that the running process' table has room for. A
/// program that a shell starts finds room for 256 on Linux.
fn descriptor_capacity() -> usize {
    current_process().files.borrow_mut().borrow_mut().capacity().max(256)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::file::OpenFlags;
    use crate::fs::pipe::Pipe;
    use crate::io::Source;
    use crate::testing::Sandbox;

    #[test]
    fn finds_what_is_ready_in_each_set() {
        let _sandbox = Sandbox::new();
        let (reader, writer) = Pipe::pair(1);
        let reader = OpenFile::new(reader, OpenFlags::empty(), None);
        let writer = OpenFile::new(writer, OpenFlags::WRONLY, None);
        let open = |fd| match fd {
            70 => Ok(reader.clone()),
            3 => Ok(writer.clone()),
            _ => Err(Errno::EBADF),
        };
        let mut asked = Sets::new(2);
        asked.get_mut(0)[1] = 1 << (70 - 64);
        asked.get_mut(1)[0] = 1 << 3;
        let mut found = Sets::new(2);
        assert_eq!(scan(&asked, &mut found, open, None), Ok(1));
        assert_eq!((found.get(0)[1], found.get(1)[0]), (0, 1 << 3));
        writer.file.write(&mut Source::kernel(b"x"), 0).unwrap();
        let mut files = Vec::new();
        assert_eq!(scan(&asked, &mut found, open, Some(&mut files)), Ok(2));
        assert_eq!(found.get(0)[1], 1 << (70 - 64));
        assert_eq!(files.len(), 2);
        asked.get_mut(2)[0] = 1 << 4;
        assert_eq!(scan(&asked, &mut found, open, None), Err(Errno::EBADF));
    }
}
