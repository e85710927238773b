//! The directories of the host that a sandbox uses, and its questions about them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use thaw_abi::bind::{BindRequest, VOLUME_SOCKET};

use super::bound::{Bound, BoundAccess, BoundDirectory};
use super::host_directory::{Description, HostDirectory, Listing};
use super::owners::{Ids, Owners};
use super::rights::FileRights;
use super::volume::{MountedVolume, Share, Volume, VolumeHolder, VolumeMount};
use super::{Answer, Question, check_read_only};

/// A question about files, without what it borrowed.
#[derive(Clone, Debug)]
pub enum FileQuestion {
    Stat(Vec<u8>),
    List { path: Vec<u8>, skip: u64 },
    ReadLink(Vec<u8>),
    Open(Vec<u8>),
    Socket,
    Bind(BindRequest, Vec<u8>),
}

impl FileQuestion {
    /// `None`: it is about something else.
    pub fn of(question: &Question<'_>) -> Option<Self> {
        Some(match *question {
            Question::Stat(path) => Self::Stat(path.to_vec()),
            Question::List { path, skip } => Self::List { path: path.to_vec(), skip },
            Question::ReadLink(path) => Self::ReadLink(path.to_vec()),
            Question::Open(path) => Self::Open(path.to_vec()),
            Question::FilesSocket => Self::Socket,
            Question::Bind(request, tail) => Self::Bind(request, tail.to_vec()),
            _ => return None,
        })
    }
}

/// A sandbox that has volumes.
#[derive(Clone, Copy, Debug)]
pub struct VolumeUser<'a> {
    /// Its number.
    pub holder: VolumeHolder,
    /// Its first process, if the daemon before this one has left it.
    pub left: Option<BorrowedFd<'a>>,
}

impl VolumeUser<'_> {
    /// A sandbox that begins.
    pub fn new(holder: VolumeHolder) -> Self {
        Self { holder, left: None }
    }
}

/// The directories of the host that a sandbox uses.
#[derive(Default)]
pub struct Directories {
    /// Its root, if that is one.
    pub root: Option<Arc<HostDirectory>>,
    /// Those that are mounted, by number of the mount.
    bound: BTreeMap<u32, Bound>,
    /// Volumes that are mounted, by number of the mount.
    volumes: BTreeMap<u32, MountedVolume>,
    /// The directory that is being listed, so that a long one is read once.
    listing: Mutex<Option<Listing>>,
    restricted: bool,
}

impl Directories {
    /// Those of a sandbox with this root directory.
    pub fn new(root: Option<Arc<HostDirectory>>) -> Self {
        let restricted =
            root.as_ref().is_some_and(|root| root.rights() == FileRights::Unprivileged);
        Self { root, restricted, ..Self::default() }
    }

    /// Adds a mount for a sandbox whose program runs as `own`.
    pub fn bind(&mut self, mount: u32, directory: &BoundDirectory, own: Ids) {
        self.restricted |= directory.directory().rights() == FileRights::Unprivileged;
        self.bound.insert(mount, Bound::with_owners(directory, directory.owners(own)));
    }

    /// Volumes of a sandbox by number of the mount.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn of_volumes<'a>(
        volumes: impl Iterator<Item = (u32, &'a VolumeMount)>,
        user: &VolumeUser<'_>,
    ) -> io::Result<Self> {
        let share = Share::default();
        let mounted = |(number, mount)| {
            let (share, holder) = (share.clone(), user.holder);
            let mounted = match user.left {
                Some(process) => {
                    MountedVolume::left(mount, share, holder, process.try_clone_to_owned()?)
                }
                None => MountedVolume::new(mount, share, holder),
            };
            Ok((number, mounted))
        };
        let volumes = volumes.map(mounted).collect::<io::Result<_>>()?;
        Ok(Self { volumes, ..Self::default() })
    }

    /// What another process must know to serve them, and their descriptors in the order in
    /// which they are told of.
    pub(super) fn setup(&self) -> (Setup, Vec<BorrowedFd<'_>>) {
        let mut descriptors: Vec<_> = self.root.iter().map(|root| root.as_fd()).collect();
        descriptors.extend(self.bound.values().map(|bound| bound.directory().as_fd()));
        let described = |(number, bound): (&u32, &Bound)| {
            (*number, bound.access(), bound.owners(), bound.directory().description())
        };
        let setup = Setup {
            rights: self.rights(),
            root: self.root.as_ref().map(|root| root.description()),
            bound: self.bound.iter().map(described).collect(),
        };
        (setup, descriptors)
    }

    /// Those that another process has told of. Whoever serves them has taken the rights for
    /// it before.
    pub(super) fn told(setup: Setup, descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or(io::ErrorKind::InvalidData);
        let root = setup.root.map(|root| HostDirectory::described(next()?, root)).transpose()?;
        let mut all = Self { root: root.map(Arc::new), ..Self::default() };
        for (number, access, owners, directory) in setup.bound {
            let directory = HostDirectory::described(next()?, directory)?;
            let directory = BoundDirectory::new(directory, access);
            all.bound.insert(number, Bound::with_owners(&directory, owners));
        }
        Ok(all)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.root.is_none() && self.bound.is_empty()
    }

    /// The rights that are enough for none and too much for none.
    fn rights(&self) -> FileRights {
        if self.restricted { FileRights::Unprivileged } else { FileRights::Caller }
    }

    /// Answers on the calling thread; `None`: the question is about something else.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn answer_here(&self, question: &Question<'_>) -> Option<Result<Answer, Errno>> {
        FileQuestion::of(question).map(|question| self.answer(&question))
    }

    /// Whether a question asks for a socket of the sandbox' own.
    pub fn is_about_socket(&self, question: &FileQuestion) -> bool {
        match question {
            FileQuestion::Socket => true,
            FileQuestion::Bind(request, _) if request.operation == VOLUME_SOCKET => {
                self.volumes.get(&request.mount).is_some_and(|volume| !volume.is_left())
            }
            _ => false,
        }
    }

    /// How many files of a volume are open.
    pub fn open_files_of(&self, volume: &Volume) -> usize {
        self.volumes.values().map(|mounted| mounted.open_files_of(volume)).sum()
    }

    /// Closes all files of volumes: nothing runs in the sandbox any more.
    pub fn end(&self) {
        self.volumes.values().for_each(MountedVolume::end);
    }

    /// Answers a question.
    pub fn answer(&self, question: &FileQuestion) -> Result<Answer, Errno> {
        if let FileQuestion::Bind(request, tail) = question {
            if let Some(volume) = self.volumes.get(&request.mount) {
                return volume.serve(request, tail);
            }
            let bound = self.bound.get(&request.mount).ok_or(Errno::NODEV)?;
            return bound.serve(request, tail);
        }
        // The sandbox has the other kind of rootfs.
        let root = self.root.as_ref().ok_or(Errno::NOSYS)?;
        match question {
            FileQuestion::Stat(path) => Ok(Answer::data(root.stat(path)?)),
            FileQuestion::ReadLink(path) => Ok(Answer::data(root.read_link(path)?)),
            FileQuestion::Open(path) => {
                let (file, attributes) = root.open_file(path)?;
                check_read_only(file.as_fd())?;
                Ok(Answer::file(file, attributes))
            }
            FileQuestion::List { path, skip } => {
                let last = self.last_listing().take();
                let listing = match last {
                    Some(listing) if *skip > 0 && listing.is_of(path) => listing,
                    _ => root.list(path)?,
                };
                let tail = root.page_with_attributes(&listing, *skip);
                // An empty page is the end; the listing is not asked for again.
                *self.last_listing() = (!tail.is_empty()).then_some(listing);
                Ok(Answer::data(tail))
            }
            // Given by who serves ([`super::FileServer`]), or nobody.
            FileQuestion::Socket | FileQuestion::Bind(..) => Err(Errno::NOSYS),
        }
    }

    fn last_listing(&self) -> MutexGuard<'_, Option<Listing>> {
        self.listing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// [`Directories`] in the words that another process is told.
#[derive(Debug, Serialize, Deserialize)]
pub struct Setup {
    /// Under whose rights they are served.
    pub rights: FileRights,
    root: Option<Description>,
    bound: Vec<(u32, BoundAccess, Owners, Description)>,
}

impl Setup {
    /// How many descriptors belong to it.
    pub fn descriptors(&self) -> usize {
        usize::from(self.root.is_some()) + self.bound.len()
    }

    /// Whether any of the directories may be written to.
    pub fn access(&self) -> BoundAccess {
        let writable = self.bound.iter().any(|(_, access, ..)| *access == BoundAccess::Write);
        if writable { BoundAccess::Write } else { BoundAccess::Read }
    }
}
