//! An instance that rests for somebody: to be frozen, copied or checkpointed.

use super::{Supervisor, keep_time};
use crate::instance::{
    Checkpoint, Checkpointed, Command, Copied, Held, Hold, Launcher, Pause, Reading, ReadingStep,
    Rest, Unread,
};
use crate::remote::ExecNote;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thaw_abi::control::EntryPoint;
use thaw_sandbox::Twin;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// How many wait for a rest of an instance at most, besides the one who has it.
const NEXT_MAX: usize = 16;

impl Supervisor {
    /// Asks the instance to come to rest, for one who wants it at a time.
    pub(super) fn ask_to_rest(&mut self, rest: Rest, twin: Twin) {
        if self.sleepiness.is_asked() || self.sleepiness.is_late {
            return rest.refuse("it is being put to sleep; try again".to_owned());
        }
        if self.service.shared().is_leaving() {
            return rest.refuse("the daemon is being restarted; try again".to_owned());
        }
        if let Some(why) = rest.lays_bare(self.instance.owner_key()) {
            return rest.refuse(why);
        }
        let is_taken = match &self.rest {
            Some(earlier) => {
                let would_go_on = self.may_have_twin && twin == Twin::Refused;
                earlier.is_wanted() || !rest.is_checkpoint() || would_go_on
            }
            None => self.twin.is_some(),
        };
        if is_taken {
            return self.rest_later(rest, twin);
        }
        // Its program sees the end of a probe before it rests.
        self.health.cancel();
        self.is_disturbed = true;
        // The next daemon would not know that it is to rest.
        self.connections.note_kept(None);
        let asked = match &self.rest {
            // It was asked, and its rest is for somebody else now.
            Some(_) => Ok(()),
            None if rest.is_checkpoint() => self.instance.request_checkpoint(twin),
            None => self.instance.request_rest(),
        };
        match asked {
            Ok(()) => {
                self.may_have_twin |= twin == Twin::Allowed;
                self.rest = Some(rest);
            }
            // The report of its end is on the way.
            Err(error) => rest.refuse(format!("instance {} has ended ({error})", self.id)),
        }
    }

    /// Asks it when nobody else has it rest, or its twin read, any more.
    fn rest_later(&mut self, rest: Rest, twin: Twin) {
        self.next_rests.retain(|(earlier, _)| earlier.is_wanted());
        match self.next_rests.len() < NEXT_MAX {
            true => self.next_rests.push_back((rest, twin)),
            false => rest.refuse(format!("{NEXT_MAX} others wait for copies of it; try again")),
        }
    }

    /// Asks it for the next one who waits for that.
    fn ask_next(&mut self) {
        while self.rest.is_none()
            && self.twin.is_none()
            && let Some((next, twin)) = self.next_rests.pop_front()
        {
            if next.is_wanted() {
                self.ask_to_rest(next.asked_now(), twin);
            }
        }
    }

    /// The instance rests, as somebody has asked, who may have lost patience. With a twin it has
    /// gone on already.
    pub(super) fn at_rest(&mut self, rest: EntryPoint) {
        self.use_rest(rest);
        self.ask_next();
    }

    fn use_rest(&mut self, rest: EntryPoint) {
        let has_twin = rest.process != 0;
        self.may_have_twin = false;
        match self.rest.take() {
            Some(lost) if lost.is_checkpoint() && !lost.is_wanted() => {
                if has_twin {
                    self.instance.end_twin();
                }
                self.go_on();
            }
            Some(Rest::Copy(reply, since)) => match self.instance.copy(rest) {
                Err(error) => self.not_copied(Rest::Copy(reply, since), error, has_twin),
                Ok(reading) => {
                    let result = copied_with(self.connections.execs().notes());
                    if has_twin {
                        self.go_on();
                        let again = move |reply| Rest::Copy(reply, since);
                        self.read_twin(reading, reply, since, result, again);
                    } else {
                        self.read_at_rest(reading, reply, since, result);
                    }
                }
            },
            Some(Rest::Hold(hold)) => self.hold(hold),
            Some(Rest::Held) => self.rest = Some(Rest::Held),
            Some(Rest::Checkpoint(new, reply, since, room)) => {
                if let Err(error) = self.copy_volumes(&new) {
                    let rest = Rest::Checkpoint(new, reply, since, room);
                    return self.not_copied(rest, error, has_twin);
                }
                let noted = new.clone().with_execs(self.connections.execs().notes());
                match self.instance.checkpoint(rest, noted) {
                    Err(error) => {
                        self.not_copied(Rest::Checkpoint(new, reply, since, room), error, has_twin);
                    }
                    Ok(reading) if has_twin => {
                        self.go_on();
                        let again = move |reply| Rest::Checkpoint(new, reply, since, None);
                        self.read_twin(reading, reply, since, with_pause, again);
                        self.twin = Some(room);
                    }
                    Ok(reading) => self.read_at_rest(reading, reply, since, with_pause),
                }
            }
            Some(Rest::Freeze(reply)) => {
                let _ = reply.send(tokio::task::block_in_place(|| self.instance.freeze(rest)));
                self.instance.kill();
            }
            None => self.instance.kill(),
        }
    }

    /// Copies the files of the instance's volumes, which rests, if they are to go with a checkpoint.
    fn copy_volumes(&self, new: &Checkpoint) -> Result<(), String> {
        let Some(volumes) = &new.volumes else { return Ok(()) };
        // Others of the runtime's tasks go on elsewhere meanwhile.
        tokio::task::block_in_place(|| volumes.copy(&|volume| self.instance.open_files_of(volume)))
    }

    /// Has the instance stay at rest for as long as somebody wants.
    fn hold(&mut self, hold: Hold) {
        let Hold { volumes, reply } = hold;
        let open = volumes.iter().map(|volume| self.instance.open_files_of(volume)).collect();
        self.rest = Some(Rest::Held);
        // If nobody wants that any more, it goes on when this is dropped.
        let _ = reply.send(Ok(Held::new(self.connections.clone(), volumes, open)));
    }

    /// Nobody wants the instance to stay at rest any more.
    pub(super) fn let_go(&mut self) {
        if matches!(self.rest, Some(Rest::Held)) {
            self.rest = None;
            self.go_on();
            self.ask_next();
        }
    }

    /// Nobody can read its memory.
    fn not_copied(&mut self, rest: Rest, error: String, has_twin: bool) {
        if has_twin {
            self.instance.end_twin();
        }
        self.go_on();
        rest.refuse(error);
    }

    /// Reads the memory of the instance, which goes on as soon as that is done.
    fn read_at_rest<T: Send + 'static, R: Send + 'static>(
        &mut self,
        reading: Reading<T>,
        reply: oneshot::Sender<Result<R, String>>,
        since: Instant,
        result: impl FnOnce(T, Pause) -> R + Send + 'static,
    ) {
        let mut pause = None;
        // Others of the runtime's tasks go on elsewhere meanwhile.
        let read = tokio::task::block_in_place(|| {
            reading(&mut |step| {
                // There is nothing that could be used before: only a twin is copied so.
                if let ReadingStep::Read = step {
                    self.instance.resume();
                    pause = Some(since.elapsed());
                }
            })
        });
        self.go_on();
        let time = pause.unwrap_or_else(|| since.elapsed());
        let pause = Pause { time, had_twin: false };
        tokio::task::spawn_blocking(move || {
            if reply.is_closed() {
                // Whoever has asked was told that there is none.
                return;
            }
            let finished = read.map_err(|error| error.to_string()).and_then(|finish| finish());
            let _ = reply.send(finished.map(|made| result(made, pause)));
        });
    }

    /// Has the memory of the instance's twin read, while the instance goes on. If the twin ends
    /// before that is done, the instance is asked `again`, and rests.
    fn read_twin<T: Send + 'static, R: Send + 'static>(
        &mut self,
        reading: Reading<T>,
        reply: oneshot::Sender<Result<R, String>>,
        since: Instant,
        result: impl FnOnce(T, Pause) -> R + Send + 'static,
        again: impl FnOnce(oneshot::Sender<Result<R, String>>) -> Rest + Send + 'static,
    ) {
        self.twin = Some(None);
        let pause = Pause { time: since.elapsed(), had_twin: true };
        let (table, copies_wait) = (self.connections.clone(), self.copies_wait.clone());
        tokio::task::spawn_blocking(move || {
            let (mut is_read, mut reply) = (false, Some((reply, result)));
            let read = reading(&mut |step| match step {
                ReadingStep::Read => {
                    is_read = true;
                    table.tell(Command::TwinRead(None));
                }
                ReadingStep::Usable(made) => {
                    if let Some((reply, result)) = reply.take() {
                        copies_wait.store(true, Ordering::Release);
                        // Whoever has asked may have lost patience.
                        let _ = reply.send(Ok(result(made, pause)));
                    }
                }
            });
            if !is_read {
                let has_ended = matches!(read, Err(Unread::Ended(_)));
                let again = reply.take_if(|_| has_ended).map(|(reply, _)| again(reply));
                table.tell(Command::TwinRead(again));
            }
            // Whoever has been answered hears of an error by the end of what was made.
            let Some((reply, result)) = reply.filter(|(reply, _)| !reply.is_closed()) else {
                return;
            };
            let finished = read.map_err(|error| error.to_string()).and_then(|finish| finish());
            let _ = reply.send(finished.map(|made| result(made, pause)));
        });
    }

    /// Nobody reads the memory of the instance's twin any more. If that has ended before, the
    /// instance is asked `again`, and rests.
    pub(super) fn twin_read(&mut self, again: Option<Rest>) {
        self.twin = None;
        self.copies_wait.store(false, Ordering::Release);
        self.instance.end_twin();
        if self.end_if_it_had_to_live() {
            return;
        }
        if let Some(again) = again {
            self.ask_to_rest(again, Twin::Refused);
        }
        self.ask_next();
    }

    /// Ends the rest of the instance.
    pub(super) fn go_on(&mut self) {
        self.instance.resume();
        self.keep_at = keep_time(&self.service);
    }
}

/// Makes copies, in which these processes from outside go on.
fn copied_with(execs: Vec<ExecNote>) -> impl FnOnce(Arc<dyn Launcher>, Pause) -> Copied {
    move |launcher, pause| {
        launcher.go_on_with(execs);
        Copied { launcher, pause }
    }
}

fn with_pause(checkpoint: Checkpointed, pause: Pause) -> (Checkpointed, Pause) {
    (checkpoint, pause)
}
