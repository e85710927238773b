//! The zygote parent: what runs in its process.
//!
//! The executable that [`super::ZygoteParent::start`] spawns is only a launcher.
//! It forks its own *sibling* (`CLONE_PARENT`) into new namespaces, maps user
//! ids for it and exits. The sibling is process 1 of its pid namespace, so that
//! the host kernel kills every sandbox when it ends, and a child of the thread
//! that spawned the launcher, so that its parent-death signal follows the
//! daemon.

mod ids;
mod namespaces;
mod priority;
mod zygote;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Signal, WaitOptions, wait};
use thaw_abi::control::SINGLE_PROCESS_NAME;
use thaw_abi::cpu::MASKED_NAME;

pub(crate) use ids::{Subordinate, map_to_themselves, set_ids};
pub(super) use ids::{subordinate_window, window_of_namespace};

use super::protocol::{
    During, Failure, PARENT_ARGUMENT, REPORT_COPY_EXITED, REPORT_CREATE_FAILED, REPORT_CREATED,
    REPORT_EXITED, REPORT_FAILED, REPORT_SERVING, REPORT_STARTED, REQUEST_CREATE,
    REQUEST_CREATE_MASKED, REQUEST_CREATE_SINGLE, REQUEST_CREATE_TEMPLATE, REQUEST_SETUP,
    REQUEST_SETUP_INSIDE, Report, Request, Step, receive, send,
};
use crate::broker;
use crate::confine::enter_empty_root;
use crate::host;
use crate::join::Join;
use crate::monitor;
use crate::resolver;
use crate::state;
use crate::sys::{self, CloseOnExec};
use priority::Priority;
use zygote::{HostMemory, Maker, PROGRAM_NAME, Purpose};

/// Entry of the zygote parent: to be called first thing in `main`, before any
/// thread is started. Returns at once unless this process was spawned as a
/// zygote parent, as another process of the library's, or to try a host call; then it never
/// returns.
pub fn zygote_parent_main() {
    let other = state::helper_main()
        .or_else(resolver::main)
        .or_else(broker::files_main)
        .or_else(monitor::init_main)
        .or_else(host::call_main);
    if let Some(code) = other {
        std::process::exit(code);
    }
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|argument| argument != PARENT_ARGUMENT) {
        return;
    }
    let join = arguments.next().and_then(|argument| Join::from_argument(&argument));
    let join = join.unwrap_or(Join::Nothing);
    let inherited = take_descriptors(join);
    let code = match inherited {
        Ok(inherited) => run(inherited, join),
        Err(error) => {
            eprintln!("thaw: the zygote parent was started without its descriptors: {error}");
            1
        }
    };
    std::process::exit(code);
}

/// What a launcher is started with.
struct Inherited {
    control: OwnedFd,
    kernel: OwnedFd,
    /// The user namespace that it joins, if it joins one.
    namespace: OwnedFd,
}

/// Takes the control socket, passed as standard input, the kernel ELF, passed as
/// standard output, and a namespace, passed as standard error, and closes whatever else
/// the library's process let slip through.
fn take_descriptors(join: Join) -> io::Result<Inherited> {
    // Nothing can own these numbers yet: this runs first in the process.
    let control = sys::duplicate_to(io::stdin().as_fd(), 3)?;
    let kernel = sys::duplicate_to(io::stdout().as_fd(), 4)?;
    let namespace = sys::duplicate_to(io::stderr().as_fd(), 5)?;
    sys::close_descriptors(6, u32::MAX)?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let standard = if join == Join::Nothing { 0..2 } else { 0..3 };
    for number in standard {
        sys::place_descriptor(null.as_raw_fd(), number, CloseOnExec::No)?;
    }
    Ok(Inherited { control, kernel, namespace })
}

fn run(inherited: Inherited, join: Join) -> i32 {
    let Inherited { control, kernel, namespace } = inherited;
    let joined = join.enter(&namespace).map_err(|(_, errno)| errno).during(Step::TakeIds);
    drop(namespace);
    match joined.and_then(|()| launch(&control, kernel)) {
        Ok(()) => 0,
        Err(failure) => {
            // If the library is gone, there is nobody left to tell.
            let _ = send(&control, &failure.report(REPORT_FAILED, 0), &[]);
            1
        }
    }
}

/// Runs in the launcher until its sibling exists, and in the sibling forever.
fn launch(control: &OwnedFd, kernel: OwnedFd) -> Result<(), Failure> {
    let Some(setup) = receive::<Request>(control, &mut Vec::new()).during(Step::Receive)? else {
        return Ok(());
    };
    let is_inside = setup.kind == REQUEST_SETUP_INSIDE;
    if !is_inside && setup.kind != REQUEST_SETUP {
        return Err(io::Error::from(Errno::PROTO)).during(Step::Receive);
    }
    let (go, start) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).during(Step::Fork)?;
    // While the rights of the host's root are there, if they are.
    let priority = Priority::raise();
    // While this process sees its own control groups.
    let host = HostMemory::now();
    let (forked, namespace) = namespaces::fork_sibling(is_inside).during(Step::Fork)?;
    match forked {
        sys::Forked::Parent { pid, pidfd } => {
            drop(go);
            let map = match is_inside {
                true => ids::IdMap::given(setup.first, setup.count),
                false => ids::map(pid, namespace, setup.first, setup.count).during(Step::MapIds)?,
            };
            send(control, &Report::new(REPORT_STARTED, 0, 0), &[pidfd.as_fd()])
                .during(Step::Receive)?;
            rustix::io::write(&start, &map.to_bytes()).during(Step::MapIds)?;
            Ok(())
        }
        sys::Forked::Child => {
            drop(start);
            let mut bytes = [0; ids::IdMap::BYTES];
            let read = rustix::io::read(&go, &mut bytes).during(Step::MapIds)?;
            if read != bytes.len() {
                // The launcher failed and has said why.
                return Ok(());
            }
            serve(control, kernel, ids::IdMap::from_bytes(bytes), priority, host)
        }
    }
}

/// The parent's life: sets itself up, then serves requests until the library's
/// end of the control socket closes.
fn serve(
    control: &OwnedFd,
    kernel: OwnedFd,
    ids: ids::IdMap,
    priority: Priority,
    host: HostMemory,
) -> Result<(), Failure> {
    let mut oom_score = OomScore::open().during(Step::OomScore)?;
    ids.take().during(Step::TakeIds)?;
    // Set after the user id has changed, which clears it. A library that died
    // before this line is noticed as the end of the control socket.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).during(Step::Fork)?;
    enter_empty_root().during(Step::EnterRoot)?;
    zygote::keep_capabilities_for_zygotes().during(Step::DropCapabilities)?;
    let mut maker = Maker::new(kernel, ids, priority, host).during(Step::ForkZygote)?;
    let ids = maker.ids();
    let ended = sys::child_signal_descriptor().during(Step::WatchChildren)?;
    let serving = Report {
        base: ids.base(),
        ..Report::new(REPORT_SERVING, ids.slots(), ids.user_ids() as i32)
    };
    send(control, &serving, &[]).during(Step::Receive)?;

    let mut alive: HashMap<i32, u64> = HashMap::new();
    loop {
        let mut events = [PollFd::new(control, PollFlags::IN), PollFd::new(&ended, PollFlags::IN)];
        match poll(&mut events, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).during(Step::WatchChildren),
        }
        let requested = !events[0].revents().is_empty();
        if !events[1].revents().is_empty() {
            let mut information = [0; 128];
            // Only empties the descriptor; how many signals it held does not matter.
            let _ = rustix::io::read(&ended, &mut information);
            if !report_ended(control, &mut alive) {
                return Ok(());
            }
        }
        if requested {
            let mut descriptors = Vec::new();
            let Some(request) =
                receive::<Request>(control, &mut descriptors).during(Step::Receive)?
            else {
                return Ok(());
            };
            let sandbox = |name| Purpose::Sandbox { id: maker.ids().of_slot(request.first), name };
            let purpose = match request.kind {
                REQUEST_CREATE => sandbox(PROGRAM_NAME),
                REQUEST_CREATE_SINGLE => sandbox(SINGLE_PROCESS_NAME),
                REQUEST_CREATE_MASKED => sandbox(MASKED_NAME),
                REQUEST_CREATE_TEMPLATE => Purpose::Template,
                _ => return Err(io::Error::from(Errno::PROTO)).during(Step::Receive),
            };
            let made = oom_score.raised(|| maker.make(&descriptors, purpose));
            let sent = match made {
                Ok((pid, pidfd)) => {
                    alive.insert(pid, request.id);
                    send(control, &Report::new(REPORT_CREATED, request.id, 0), &[pidfd.as_fd()])
                }
                Err(failure) => {
                    send(control, &failure.report(REPORT_CREATE_FAILED, request.id), &[])
                }
            };
            if sent.is_err() {
                return Ok(());
            }
        }
    }
}

/// Reaps and reports all processes that have ended; false if the library is gone.
fn report_ended(control: &OwnedFd, alive: &mut HashMap<i32, u64>) -> bool {
    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
        let pid = pid.as_raw_nonzero().get();
        let (kind, id) = match alive.remove(&pid) {
            Some(id) => (REPORT_EXITED, id),
            // The processes of a sandbox end in its own pid namespace.
            None => (REPORT_COPY_EXITED, pid as u64),
        };
        if send(control, &Report::new(kind, id, status.as_raw()), &[]).is_err() {
            return false;
        }
    }
    true
}

/// The parent's out-of-memory score, which a forked zygote inherits: sandboxes
/// are to be killed first, the parent, with which all of them die, is not.
/// There is no `/proc` in the parent's root, so the file stays open.
struct OomScore {
    file: File,
    own: String,
}

impl OomScore {
    fn open() -> io::Result<Self> {
        let path = "/proc/self/oom_score_adj";
        let own = std::fs::read_to_string(path)?;
        let file = File::options().write(true).open(path)?;
        Ok(Self { file, own: own.trim().to_owned() })
    }

    /// Runs `fork` with the highest score.
    fn raised<T>(&mut self, fork: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        self.set("1000").during(Step::OomScore)?;
        let result = fork();
        let own = self.own.clone();
        self.set(&own).during(Step::OomScore)?;
        result
    }

    fn set(&mut self, score: &str) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        self.file.write_all_at(score.as_bytes(), 0)
    }
}
