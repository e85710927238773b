//! The thread that reads the questions of all sandboxes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::super::names::{ChannelSlot, Names};
use super::channel::{Channel, Goes};
pub use super::message::Framing;

struct Service {
    channels: Mutex<Vec<Arc<Channel>>>,
    /// Written to when there is a new channel.
    news: OwnedFd,
}

impl Service {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Channel>>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The service of this process, started when it is first wanted.
    fn get() -> io::Result<&'static Self> {
        static SERVICE: OnceLock<Service> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        if let Some(service) = SERVICE.get() {
            return Ok(service);
        }
        let _guard = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(service) = SERVICE.get() {
            return Ok(service);
        }
        let news = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let service = SERVICE.get_or_init(|| Self { channels: Mutex::default(), news });
        std::thread::Builder::new().name("thaw-resolver".into()).spawn(|| service.run())?;
        Ok(service)
    }

    fn run(&self) {
        loop {
            let channels = self.lock().clone();
            let mut requests = vec![PollFd::new(&self.news, PollFlags::IN)];
            requests.extend(
                channels.iter().map(|c| PollFd::from_borrowed_fd(c.socket(), PollFlags::IN)),
            );
            match poll(&mut requests, None) {
                Ok(_) | Err(Errno::INTR) => {}
                // Short of memory: there is nobody to tell, and it may pass.
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(100)),
            }
            if !requests[0].revents().is_empty() {
                let _ = rustix::io::read(&self.news, &mut [0; 8]);
            }
            let ready = |request: &PollFd<'_>| !request.revents().is_empty();
            let ended: Vec<&Arc<Channel>> = channels
                .iter()
                .zip(&requests[1..])
                .filter(|(channel, request)| ready(request) && channel.serve() == Goes::NoFurther)
                .map(|(channel, _)| channel)
                .collect();
            if !ended.is_empty() {
                self.lock()
                    .retain(|channel| !ended.iter().any(|ended| Arc::ptr_eq(ended, channel)));
            }
        }
    }
}

/// Makes a connection to the resolver; the descriptor is the sandbox's end,
/// non-blocking.
pub fn open(framing: Framing, names: &Arc<Names>, slot: ChannelSlot) -> io::Result<OwnedFd> {
    let service = Service::get()?;
    let kind = match framing {
        // Keeps bounds, as UDP does, and tells when the other end is closed.
        Framing::Packets => SocketType::SEQPACKET,
        Framing::Stream => SocketType::STREAM,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
    service.lock().push(Channel::new(ours, framing, names.clone(), slot));
    rustix::io::write(service.news.as_fd(), &1_u64.to_ne_bytes())?;
    Ok(theirs)
}
