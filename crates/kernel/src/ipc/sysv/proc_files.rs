//! `/proc/sysvipc` (proc(5)).

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::registry::Object;
use crate::errno::Result;
use crate::ipc::namespace::own;
use crate::task::ids::Pid;

/// `sem`.
pub fn semaphores() -> Result<Vec<u8>> {
    let mut text = String::from(
        "       key      semid perms      nsems   uid   gid  cuid  cgid      otime      ctime\n",
    );
    for (id, set) in own().system_v.semaphores.all() {
        let owner = set.permissions().get();
        let (operated_s, changed_s) = set.look(|state| (state.operated_s, state.changed_s));
        text += &format!(
            "{:>10} {id:>10}  {:>4o} {:>10} {:>5} {:>5} {:>5} {:>5} {operated_s:>10} {changed_s:>10}\n",
            owner.key,
            owner.mode,
            set.len(),
            owner.uid,
            owner.gid,
            owner.creator_uid,
            owner.creator_gid,
        );
    }
    Ok(text.into_bytes())
}

/// `msg`.
pub fn messages() -> Result<Vec<u8>> {
    let mut text = String::from(
        "       key      msqid perms      cbytes       qnum lspid lrpid   uid   gid  cuid  cgid      stime      rtime      ctime\n",
    );
    for (id, queue) in own().system_v.messages.all() {
        let owner = queue.permissions().get();
        let (bytes, count, [sent_s, received_s, changed_s]) =
            queue.look(|state| (state.bytes, state.count(), state.times_s));
        let (sender, receiver) = queue.look(|state| (state.last_sender, state.last_receiver));
        let [sender, receiver] = [sender, receiver].map(|id| Pid::new(id).for_caller());
        text += &format!(
            "{:>10} {id:>10}  {:>4o}  {bytes:>10} {count:>10} {sender:>5} {receiver:>5} {:>5} {:>5} {:>5} {:>5} {sent_s:>10} {received_s:>10} {changed_s:>10}\n",
            owner.key, owner.mode, owner.uid, owner.gid, owner.creator_uid, owner.creator_gid,
        );
    }
    Ok(text.into_bytes())
}

/// `shm`.
pub fn memory() -> Result<Vec<u8>> {
    let mut text = String::from(
        "       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid      atime      dtime      ctime                   rss                  swap\n",
    );
    for (id, segment) in own().system_v.memory.all() {
        let owner = segment.permissions().get();
        let state = *segment.state.borrow_mut();
        let [attached_s, detached_s, changed_s] = state.times_s;
        text += &format!(
            "{:>10} {id:>10}  {:>4o} {:>21} {:>5} {:>5}  {:>5} {:>5} {:>5} {:>5} {:>5} {attached_s:>10} {detached_s:>10} {changed_s:>10} {:>21} {:>21}\n",
            owner.key,
            owner.mode | state.flags,
            segment.size,
            segment.creator.for_caller(),
            Pid::new(state.last_pid).for_caller(),
            segment.attachments(),
            owner.uid,
            owner.gid,
            owner.creator_uid,
            owner.creator_gid,
            segment.size.next_multiple_of(4096),
            0,
        );
    }
    Ok(text.into_bytes())
}
