//! Processes that go on in a copy of their sandbox, or when it wakes from its sleep: with other
//! sockets in place of those that they had.

use super::streams::{Input, Sockets};
use super::{Exec, ExecState, Execs};
use crate::remote::RemoteChannel;
use serde::{Deserialize, Serialize};
use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thaw_abi::remote::EXECS_MAX;
use thaw_sandbox::RemoteMessage;

/// Most characters of a program's name that are noted on disk.
const NAME_MAX: usize = 64;

/// A process of a sandbox whose memory is copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecNote {
    /// The number that it had.
    pub id: u64,
    /// Program and arguments; on disk the program alone, since arguments may be secret.
    pub argv: Vec<String>,
    /// Whether it has a terminal.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub terminal: bool,
    /// Whether its standard input was open.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stdin: bool,
    /// Its sandbox ends with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ends_sandbox: bool,
    /// Its process id in the sandbox, if that was known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

impl ExecNote {
    fn of(exec: &Exec) -> Self {
        // Somebody who writes to it has it open.
        let is_open = exec.stdin.try_lock().map_or(true, |stdin| stdin.is_open());
        Self {
            id: exec.id,
            argv: exec.argv.clone(),
            terminal: exec.has_terminal,
            stdin: is_open,
            ends_sandbox: exec.ends_sandbox,
            pid: exec.pid(),
        }
    }

    /// What is written to disk.
    pub fn for_disk(mut self) -> Self {
        self.argv.truncate(1);
        for name in &mut self.argv {
            // Characters of which each takes two bytes in JSON at most.
            *name = name.chars().filter(|one| !one.is_control()).take(NAME_MAX).collect();
        }
        self
    }

    /// What is written there in the clear beside something that is encrypted.
    pub fn beside_secrets(mut self) -> Self {
        self.argv.clear();
        self
    }
}

/// The new streams of processes that are about to go on.
pub(crate) struct NewStreams(Vec<(u64, Sockets, Input)>);

impl NewStreams {
    /// Those of these processes.
    ///
    /// # Errors
    /// This process has no descriptors left.
    pub fn of(notes: &[ExecNote]) -> io::Result<Self> {
        let notes = notes.iter().take(EXECS_MAX);
        let all = notes.map(|note| {
            let (sockets, input) = Sockets::new(note.terminal, note.stdin)?;
            Ok((note.id, sockets, input))
        });
        all.collect::<io::Result<_>>().map(Self)
    }
}

impl Execs {
    /// Those that have not ended.
    pub fn notes(&self) -> Vec<ExecNote> {
        let known = self.lock();
        let alive = known.execs.values().filter(|exec| !exec.state().is_final());
        alive.map(|exec| ExecNote::of(exec)).collect()
    }

    /// Has the processes of the sandbox that this one is a copy of go on, with new numbers. Nothing
    /// is heard of those that it does not have.
    ///
    /// # Errors
    /// This process has no descriptors left; none goes on.
    pub fn go_on_in_copy(
        &self,
        notes: &[ExecNote],
        mut next: impl FnMut() -> u64,
        channel: Arc<dyn RemoteChannel>,
    ) -> io::Result<Vec<Arc<Exec>>> {
        let NewStreams(streams) = NewStreams::of(notes)?;
        let mut all = Vec::new();
        for (note, (earlier, sockets, input)) in notes.iter().zip(streams) {
            let exec = Arc::new(Exec::new(next(), note, input));
            // It is open, and has as many as its original.
            if self.insert(&exec).is_ok() {
                all.push(exec.clone());
                self.tell(&exec, earlier, sockets, &channel);
            }
        }
        // One that takes no message has ended.
        let _ = channel.send_remote(RemoteMessage::execs_go_on(), &[]);
        Ok(all)
    }

    /// Processes of an instance that an earlier daemon has put to sleep.
    pub fn asleep(notes: &[ExecNote]) -> Self {
        let execs = Self::default();
        for note in notes.iter().take(EXECS_MAX) {
            let exec = Arc::new(Exec::new(note.id, note, Input::None));
            exec.has_input.store(note.stdin, Ordering::Relaxed);
            // They ran then, or are not noted.
            exec.become_(ExecState::Running { pid: note.pid.unwrap_or_default() });
            execs.lock().execs.insert(note.id, exec);
        }
        let is_shut = execs.shut();
        debug_assert!(is_shut, "nobody has anything of it");
        execs
    }

    /// The instance sleeps: what reached it does not any more.
    pub fn fall_asleep(&self) {
        for exec in self.lock().execs.values() {
            exec.reach_by(None);
            // Nobody writes to one that may sleep.
            if let Ok(mut stdin) = exec.stdin.try_lock() {
                exec.has_input.store(mem::take(&mut *stdin).is_open(), Ordering::Relaxed);
            }
        }
    }

    /// The instance lives on under the next daemon: these are to wait for that.
    pub fn wait_for_next(&self, channel: &dyn RemoteChannel) {
        // It may answer before the call has returned.
        self.lock().wait = true;
        if channel.send_remote(RemoteMessage::execs_wait(), &[]).is_err() {
            // It has ended.
            self.lock().wait = false;
        }
    }

    /// Waits until they do, or the instance has ended.
    pub async fn wait(&self) {
        loop {
            let waiting = self.waiting.notified();
            tokio::pin!(waiting);
            // What comes from now on is noticed.
            waiting.as_mut().enable();
            let is_awaited = {
                let known = self.lock();
                known.wait && !known.is_closed
            };
            if !is_awaited {
                return;
            }
            waiting.await;
        }
    }

    /// What is left of these: the instance was killed while it woke, and sleeps on. Processes that were
    /// just started, and those that somebody was attached to meanwhile, have ended for these.
    pub fn asleep_again(&self) -> Arc<Self> {
        let next = Self::default();
        {
            let mut known = self.lock();
            known.is_closed = true;
            self.waiting.notify_waiters();
            for (id, exec) in mem::take(&mut known.execs) {
                if !exec.waits_alone() {
                    exec.lose();
                }
                next.lock().execs.insert(id, exec);
            }
        }
        let is_shut = next.shut();
        debug_assert!(is_shut, "who does not wait alone has ended");
        next.fall_asleep();
        Arc::new(next)
    }

    /// The streams that its processes will have when the instance is awake.
    ///
    /// # Errors
    /// This process has no descriptors left.
    pub(crate) fn new_streams(&self) -> io::Result<NewStreams> {
        let mut notes = self.notes();
        for note in &mut notes {
            let exec = self.find(note.id);
            note.stdin = exec.is_some_and(|exec| exec.has_input.load(Ordering::Relaxed));
        }
        NewStreams::of(&notes)
    }

    /// There are no streams for its processes: they go on without, and nobody hears of them.
    pub fn go_on_without(&self, channel: &dyn RemoteChannel) {
        self.all().iter().for_each(|exec| exec.lose());
        // One that takes no message has ended.
        let _ = channel.send_remote(RemoteMessage::execs_go_on(), &[]);
        self.reopen();
    }

    /// The instance is awake again, and its processes go on by the numbers that they have, with these
    /// streams; `None`: its kernel cannot have them go on.
    pub(crate) fn wake(&self, channel: Arc<dyn RemoteChannel>, streams: Option<NewStreams>) {
        match streams {
            Some(NewStreams(streams)) => {
                for (id, sockets, input) in streams {
                    let Some(exec) = self.find(id) else { continue };
                    // Nobody can write before the instance is open again.
                    if let Ok(mut own) = exec.stdin.try_lock() {
                        *own = input;
                    }
                    self.tell(&exec, id, sockets, &channel);
                }
                // One that takes no message has ended.
                let _ = channel.send_remote(RemoteMessage::execs_go_on(), &[]);
            }
            None => self.all().iter().for_each(|exec| exec.lose()),
        }
        self.reopen();
    }

    /// Tells the sandbox which sockets a process has from now on.
    fn tell(
        &self,
        exec: &Arc<Exec>,
        earlier: u64,
        sockets: Sockets,
        channel: &Arc<dyn RemoteChannel>,
    ) {
        exec.goes_on.store(true, Ordering::Relaxed);
        exec.reach_by(Some(channel.clone()));
        let message = RemoteMessage::exec_goes_on(earlier, exec.id);
        match channel.send_remote(message, &sockets.lent()) {
            Ok(()) => exec.collect(sockets.ours),
            // The instance has ended. If it was just woken it may sleep on, with its processes: who hears
            // of its end decides that.
            Err(_) if exec.pid().is_some() => {}
            Err(_) => exec.lose(),
        }
    }

    /// The sandbox has no such process: it has ended, and nobody knows how. One of which nobody has
    /// ever known that it ran is forgotten.
    pub(super) fn is_absent(&self, exec: &Exec) {
        match exec.pid() {
            Some(_) => exec.become_(ExecState::lost()),
            None => {
                self.lock().execs.remove(&exec.id);
                exec.lose();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ExecProblem;
    use super::*;
    use crate::remote::Next;
    use std::os::fd::{BorrowedFd, OwnedFd};
    use std::sync::Mutex;
    use thaw_sandbox::RemoteEvent;

    /// A sandbox that keeps the sockets that it is given.
    #[derive(Default)]
    struct Sandbox {
        sockets: Mutex<Vec<OwnedFd>>,
        is_dead: bool,
    }

    impl RemoteChannel for Sandbox {
        fn send_remote(&self, _: RemoteMessage, sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
            if self.is_dead {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let own = sockets.iter().map(|socket| socket.try_clone_to_owned().unwrap());
            self.sockets.lock().unwrap().extend(own);
            Ok(())
        }
    }

    fn note(id: u64) -> ExecNote {
        ExecNote {
            id,
            argv: vec!["sh".to_owned()],
            terminal: false,
            stdin: true,
            ends_sandbox: true,
            pid: Some(4),
        }
    }

    fn started(execs: &Execs, id: u64) {
        execs.heard(RemoteEvent::Started { id, pid: 4 });
    }

    #[tokio::test]
    async fn one_that_is_killed_while_it_wakes_sleeps_on_with_those_that_nobody_has_used() {
        let execs = Execs::asleep(&[note(1), note(2), note(3)]);
        assert!(execs.is_shut() && execs.attach(1).is_err());
        let channel: Arc<dyn RemoteChannel> = Arc::new(Sandbox::default());
        execs.wake(channel.clone(), Some(execs.new_streams().unwrap()));
        // One is attached, one was, and one has been left alone.
        let attached = execs.attach(1).unwrap().unwrap();
        attached.write(b"lost").await;
        drop(execs.attach(2).unwrap());
        let next = execs.asleep_again();
        assert!(attached.is_cut_off() && attached.state().is_final());
        let alive: Vec<_> = next.notes().iter().map(|note| (note.id, note.stdin)).collect();
        assert_eq!(alive, [(3, false)]);
        assert!(next.is_shut() && next.new_streams().unwrap().0.len() == 1);
        // Whoever comes late to the former table is refused.
        let request = super::super::ExecRequest { argv: vec!["sh".into()], ..Default::default() };
        let late = execs.start(9, &request, channel).await;
        assert!(matches!(late.err(), Some(ExecProblem::Refused(_))));
    }

    #[tokio::test]
    async fn input_that_was_not_read_keeps_a_sandbox_awake_also_behind_its_end() {
        for ends in [false, true] {
            let (execs, sandbox) = (Execs::default(), Arc::new(Sandbox::default()));
            let channel: Arc<dyn RemoteChannel> = sandbox.clone();
            let all = execs.go_on_in_copy(&[note(7)], || 8, channel).unwrap();
            assert_eq!(all[0].id(), 8);
            assert!(!execs.may_sleep(), "it is not known whether it runs");
            started(&execs, 8);
            let attached = execs.attach(8).unwrap().unwrap();
            attached.write(b"text").await;
            if ends {
                attached.write(b"").await;
            }
            assert!(!execs.may_sleep());
            drop(attached);
            assert!(!execs.may_sleep() && !execs.shut());
            let mut text = [0; 8];
            let read = rustix::io::read(&sandbox.sockets.lock().unwrap()[0], &mut text[..]);
            assert_eq!(read, Ok(4));
            assert!(execs.may_sleep() && execs.shut());
            execs.fall_asleep();
            let streams = execs.new_streams().unwrap();
            assert_eq!(streams.0[0].2.is_open(), !ends);
        }
    }

    #[tokio::test]
    async fn those_that_are_lost_end_for_who_reads_them() {
        let dead: Arc<dyn RemoteChannel> =
            Arc::new(Sandbox { is_dead: true, ..Sandbox::default() });
        let execs = Execs::default();
        let all = execs.go_on_in_copy(&[note(1)], || 2, dead.clone()).unwrap();
        let mut reader = all[0].output.reader().unwrap();
        assert_eq!(reader.next().await, Next::End);
        // One that was killed as soon as it woke sleeps on with them.
        let asleep = Execs::asleep(&[note(1)]);
        asleep.wake(dead.clone(), Some(asleep.new_streams().unwrap()));
        let asleep = asleep.asleep_again();
        assert!(asleep.new_streams().unwrap().0[0].2.is_open());
        let mut reader = asleep.find(1).unwrap().output.reader().unwrap();
        asleep.wake(dead, None);
        assert_eq!(reader.next().await, Next::End);
        assert!(asleep.find(1).unwrap().is_cut_off());
    }
}
