//! The thread that reads the questions of all sandboxes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    fn get() -> io::Result<Arc<Self>> {
        static SERVICE: Running = Running::new();
        SERVICE.get(|service| {
            let thread = std::thread::Builder::new().name("thaw-resolver".into());
            thread.spawn(move || service.run()).map(drop)
        })
    }

    fn new() -> io::Result<Arc<Self>> {
        let news = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { channels: Mutex::default(), news }))
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

/// The service, once it has a thread. A host that has no thread left fails the
/// connection that wanted the service, and the next one tries again.
struct Running(Mutex<Option<Arc<Service>>>);

impl Running {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// The service; `start` gives a new one its thread.
    fn get(&self, start: impl FnOnce(Arc<Service>) -> io::Result<()>) -> io::Result<Arc<Service>> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(service) = &*running {
            return Ok(service.clone());
        }
        let service = Service::new()?;
        start(service.clone())?;
        Ok(running.insert(service).clone())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_cannot_start_is_tried_again() {
        let running = Running::new();
        let no_thread = |_| Err(io::ErrorKind::WouldBlock.into());
        for _ in 0..2 {
            assert_eq!(
                running.get(no_thread).err().map(|error| error.kind()),
                Some(io::ErrorKind::WouldBlock)
            );
        }
        let service = running.get(|_| Ok(())).unwrap();
        // It runs: nobody starts another one.
        let same = running.get(no_thread).unwrap();
        assert!(Arc::ptr_eq(&service, &same));
    }
}
