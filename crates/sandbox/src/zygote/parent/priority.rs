//! When the zygote parent runs.

use std::io;

use rustix::process::{getpriority_process, setpriority_process};

/// How much sooner than others the parent has its turn. It makes one zygote after the other, and
/// every boot that finds none waits for it: if it had to wait for the boots before it in turn,
/// processors would be idle at times while there is more to do than they can.
const LEAD: i32 = 10;
/// The highest priority (getpriority(2)).
const HIGHEST: i32 = -20;

/// The priority of this process and, before it was raised, of its maker.
#[derive(Clone, Copy, Debug)]
pub struct Priority {
    /// As a nice value; `None`: it was not raised.
    before: Option<i32>,
}

impl Priority {
    /// Raises that of this process and its children, where it has the right to do so: others go
    /// on as they are.
    pub fn raise() -> Self {
        let raise = || {
            let own = getpriority_process(None)?;
            setpriority_process(None, own.saturating_sub(LEAD).max(HIGHEST)).map(|()| own)
        };
        Self { before: raise().ok() }
    }

    /// Makes this process one like others again, for good: its limit allows no more.
    pub fn give_up(self) -> io::Result<()> {
        match self.before {
            Some(before) => Ok(setpriority_process(None, before)?),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a thread, which has a priority of its own.
    #[test]
    fn a_raised_priority_can_be_given_up() {
        let thread = std::thread::spawn(|| {
            let own = || getpriority_process(None).unwrap();
            let before = own();
            let priority = Priority::raise();
            assert!(own() < before || priority.before.is_none() || before == HIGHEST);
            priority.give_up().unwrap();
            assert_eq!(own(), before);
        });
        thread.join().unwrap();
    }
}
