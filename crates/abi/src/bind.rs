//! Requests on directories of the host that are mounted in a sandbox.
//!
//! All are of kind [`crate::control::MSG_BIND`]: a [`BindRequest`], then a tail
//! that the operation describes. Paths are relative to the bound directory, as
//! in `MSG_FS_*`; two paths are separated by a NUL. Open files are numbers that the host gives out.

use core::sync::atomic::AtomicU64;

use bytemuck::{Pod, Zeroable};

/// Most bytes in the tail of a [`BIND_WRITE`].
pub const BIND_WRITE_MAX: usize = 7168;
/// Most bytes in the reply to a [`BIND_READ`].
pub const BIND_READ_MAX: usize = 128 * 1024;

/// Body of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BindRequest {
    /// Number of the mount, in the order of the start command.
    pub mount: u32,
    /// `BIND_*`.
    pub operation: u32,
    /// Depends on the operation.
    pub a: u64,
    /// Depends on the operation.
    pub b: u64,
    /// Depends on the operation.
    pub c: u64,
}

/// Attributes of a path. Reply: [`crate::control::FileAttributes`].
pub const BIND_STAT: u32 = 1;
/// Entries of a directory from number `a` on, as [`crate::control::MSG_FS_LIST`], without attributes.
pub const BIND_LIST: u32 = 2;
/// Target of a symbolic link.
pub const BIND_READLINK: u32 = 3;
/// Open a regular file: `a` has the flags of open(2) ([`BIND_OPEN_FLAGS`]), `b`
/// the permissions of a new file. Reply: the file's number, a `u64`, or if `c` is 1 an
/// [`OpenedBoundFile`], and a descriptor of a file that is opened to be read only.
pub const BIND_OPEN: u32 = 4;
/// Close open file `a`.
pub const BIND_CLOSE: u32 = 5;
/// Read from open file `a` at `b`, at most `c` bytes. Reply: the bytes.
pub const BIND_READ: u32 = 6;
/// Write the tail to open file `a` at `b`. Reply: how many bytes, a `u64`.
pub const BIND_WRITE: u32 = 7;
/// Attributes of open file `a`.
pub const BIND_FSTAT: u32 = 8;
/// Set the size of open file `a` to `b`.
pub const BIND_FTRUNCATE: u32 = 9;
/// Wait until open file `a` is on disk.
pub const BIND_SYNC: u32 = 10;
/// Make a directory with permissions `a`.
pub const BIND_MKDIR: u32 = 11;
/// Remove a name that is no directory.
pub const BIND_UNLINK: u32 = 12;
/// Remove an empty directory.
pub const BIND_RMDIR: u32 = 13;
/// Move the first path to the second; `a` is 0, `RENAME_NOREPLACE` (1) or
/// `RENAME_EXCHANGE` (2).
pub const BIND_RENAME: u32 = 14;
/// Give the file at the first path the second as another name.
pub const BIND_LINK: u32 = 15;
/// Make a symbolic link at the first path to the second, which is any text.
pub const BIND_SYMLINK: u32 = 16;
/// Set permissions to `a`, without set-user-id and set-group-id.
pub const BIND_CHMOD: u32 = 17;
/// Set the times of last access and modification to `a` and `b`, nanoseconds
/// since the epoch as `i64`; [`BIND_TIME_OMIT`] leaves one alone.
pub const BIND_UTIMES: u32 = 18;
/// Set the size of the file at a path to `a`.
pub const BIND_TRUNCATE: u32 = 19;
/// About the file system: [`BindStatfs`].
pub const BIND_STATFS: u32 = 20;
/// Give a file to user `a` and group `b`; [`BIND_ID_OMIT`] leaves one alone. Owners do not change, so it is
/// `EPERM` unless the file belongs to them.
pub const BIND_CHOWN: u32 = 21;
/// Attributes of what each name of a path stands for, but for the first `a`. It ends with what is no
/// directory. Reply: a [`Walked`], then a [`crate::control::FileAttributes`] for each name.
pub const BIND_WALK: u32 = 22;

/// The beginning of the reply to a [`BIND_WALK`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Walked {
    /// Error number for the name behind the last one that was found; 0: there is none, or it was not
    /// looked for.
    pub errno: i32,
    /// Zero.
    pub reserved: u32,
}

/// Reply to a [`BIND_OPEN`] of a file of a bound directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OpenedBoundFile {
    /// The file's number.
    pub handle: u64,
    /// 1: its mount lets programs be executed (mount(2), `MS_NOEXEC`). What is mapped of another one
    /// cannot become executable.
    pub is_executable: u64,
}

// Operations on files of volumes ([`MOUNT_VOLUME`]) only. There BIND_OPEN has a descriptor and
// an [`OpenedVolumeFile`] in its reply, and there is neither BIND_READ nor BIND_WRITE.

/// Make open file `a` at least `b` bytes long, within the volume's quota; its new bytes are
/// zeros. Reply: the bytes that it has then, a `u64`.
pub const VOLUME_GROW: u32 = 70;
/// Make open file `a` longer by `b` bytes. Reply: how many it had before, a `u64`: they are the
/// caller's to be written.
pub const VOLUME_APPEND: u32 = 71;
/// Take a record lock for reading of `c` bytes (0: all) of open file `a` from `b` on, for the
/// sandbox as a whole; one that it has there is replaced. `EAGAIN` if another sandbox stands in
/// the way. Reply: the bytes of the file, a `u64`.
pub const VOLUME_LOCK_READ: u32 = 72;
/// As [`VOLUME_LOCK_READ`], for writing.
pub const VOLUME_LOCK_WRITE: u32 = 73;
/// Give up the sandbox' record locks of a range, as in [`VOLUME_LOCK_READ`].
pub const VOLUME_UNLOCK: u32 = 74;
/// What stands in the way of a record lock from byte `b` of open file `a` on, for writing if
/// `c` is 1; the tail is the number of bytes (0: all), a `u64`. Reply: a [`VolumeLock`]; an empty
/// one: nothing.
pub const VOLUME_TEST_LOCK: u32 = 75;
/// Take or give up the sandbox' lock of the whole of open file `a` (flock(2)): `b` is
/// `LOCK_SH` (1), `LOCK_EX` (2) or `LOCK_UN` (8). `EAGAIN` as above. Reply: the bytes of the file.
pub const VOLUME_FLOCK: u32 = 76;

/// Give me a socket of my own for requests about all my volumes; granted once. Reply: that socket, on
/// which requests and replies are as on the control socket, but for two things. Nothing is asked
/// before the reply to the last request was read. When a request has taken too long, the host ends
/// the socket after its reply, and the control socket is there for the next one; what it has not
/// replied to then, nobody has served.
pub const VOLUME_SOCKET: u32 = 77;

/// Give me what tells how long the files of this volume are that I open from now on: if `a` is 0 a
/// [`LengthsPage`], to be mapped shared and to be read; if it is 1 the [`EndsPage`] that belongs to
/// it, to be mapped shared and to be written; each is granted once. Reply: its descriptor.
/// `EOPNOTSUPP`: there is none, since others than the host may change lengths.
pub const VOLUME_LENGTHS: u32 = 78;
/// Make open file `a`, whose length is delegated to me, longer on the host, so that I may write up to
/// byte `b`. Reply: [`FileLength::granted`], a `u64`. `EAGAIN`: its length is not delegated any more.
pub const VOLUME_GRANT: u32 = 79;

/// Write the tail, at most [`BIND_WRITE_MAX`] bytes, to open file `a` at `b`, or at its end if `b` is
/// [`VOLUME_END`]. Whoever sees that the file is longer sees these bytes. Reply: where they are, a
/// `u64`.
pub const VOLUME_WRITE: u32 = 80;
/// See [`VOLUME_WRITE`].
pub const VOLUME_END: u64 = u64::MAX;

/// The host that has served me before is gone, and this one knows none of my files and locks of this
/// volume: until I have taken my files back (RFC 8881, 8.4.2, calls it to reclaim), it answers all other
/// requests about the volume with `ENOTCONN`, and has served none of them. `a` says how far I am:
/// [`RENEW_ASK`], [`RENEW_LET_GO`], [`RENEW_DONE`], [`RENEW_LOST`]. Each is answered at once. What I ask
/// for in between may wait until all others who had the volume have let go; what others ask for waits
/// until they are done.
pub const VOLUME_RENEW: u32 = 81;
/// Is there something to take back? Reply: 1 or 0, a `u64`.
pub const RENEW_ASK: u64 = 0;
/// I write by no delegation of the former host any more.
pub const RENEW_LET_GO: u64 = 1;
/// My files are open again, with my locks, as far as that can be.
pub const RENEW_DONE: u64 = 2;
/// My programs take themselves to have locks that I cannot have again: end me.
pub const RENEW_LOST: u64 = 3;

/// How long a file of a volume is that a sandbox has open. Stored by the host.
///
/// As long as the length is [*delegated*](LENGTH_DELEGATED), no other sandbox has the file open, and this
/// one alone says how long it is: it may write up to `granted`, where the file ends on the host, and
/// stores where its bytes end in the [`EndsPage`]. The host takes a delegation back by storing
/// [`LENGTH_WITHDRAWN`] and waiting until the sandbox is not [busy](EndsPage::busy); then it cuts the
/// file at that end, if that lies between the length before and `granted`, and tells the length.
#[derive(Debug, Default, Zeroable)]
#[repr(C)]
pub struct FileLength {
    /// Bytes of the file if the length is told; [`LENGTH_UNKNOWN`]: the host has to be asked.
    pub length: AtomicU64,
    /// Bytes that a file whose length is delegated has on the host.
    pub granted: AtomicU64,
    /// `LENGTH_TOLD`, `LENGTH_DELEGATED` or `LENGTH_WITHDRAWN`.
    pub state: AtomicU64,
    reserved: u64,
}

/// The host says how long the file is.
pub const LENGTH_TOLD: u64 = 0;
/// The sandbox does.
pub const LENGTH_DELEGATED: u64 = 1;
/// What the sandbox has said holds still, and it says nothing more.
pub const LENGTH_WITHDRAWN: u64 = 2;
/// See [`FileLength::length`].
pub const LENGTH_UNKNOWN: u64 = u64::MAX;
/// Most files of a volume whose lengths a sandbox is told.
pub const LENGTHS: usize = 255;

/// See [`EndsPage::busy`].
pub const DELEGATED_WRITE_MAX: u64 = 1 << 20;

/// What the host tells a sandbox about files of one volume.
#[derive(Zeroable)]
#[repr(C)]
pub struct LengthsPage {
    /// The files, by [`OpenedVolumeFile::place`] from 1 on.
    pub files: [FileLength; LENGTHS],
    reserved: [u64; 4],
}

/// What a sandbox tells the host about files of one volume. The file behind it may be on a full disk:
/// a store may fail.
#[derive(Zeroable)]
#[repr(C)]
pub struct EndsPage {
    /// 1 while the sandbox writes by a delegation: it stores that, looks whether the length is
    /// delegated, writes at most [`DELEGATED_WRITE_MAX`] bytes, stores the end, and stores 0. Meanwhile it
    /// sends the host nothing. It may have to wait for a disk.
    pub busy: AtomicU64,
    /// Bytes of the files whose length is delegated, by place from 1 on. The host stores the
    /// first one before it delegates.
    pub ends: [AtomicU64; LENGTHS],
    /// 1: the sandbox has written to the file since the host has stored 0. Its time is to change.
    pub written: [AtomicU64; LENGTHS],
    reserved: u64,
}

const _: () = assert!(size_of::<LengthsPage>() == 8192 && size_of::<EndsPage>() == 4096);

/// Reply to [`BIND_OPEN`] of a volume's file; the descriptor comes along.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OpenedVolumeFile {
    /// The file's number.
    pub handle: u64,
    /// Its inode number on the host.
    pub inode: u64,
    /// Its bytes.
    pub size: u64,
    /// Its place in the [`LengthsPage`], the same for all that the sandbox has open of one file; 0: none.
    /// Hosts of before say nothing here.
    pub place: u64,
}

/// Reply to [`VOLUME_TEST_LOCK`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct VolumeLock {
    /// First byte.
    pub start: u64,
    /// Number of bytes; 0: all.
    pub len: u64,
    /// Whether it is held for writing, 0 or 1.
    pub is_write: u64,
}

/// Flags of open(2) that [`BIND_OPEN`] takes: access mode, `O_CREAT`, `O_EXCL`,
/// `O_APPEND`.
pub const BIND_OPEN_FLAGS: u64 = 0o3 | 0o100 | 0o200 | 0o2000;
/// See [`BIND_UTIMES`].
pub const BIND_TIME_OMIT: u64 = i64::MIN as u64;
/// See [`BIND_CHOWN`].
pub const BIND_ID_OMIT: u64 = u64::MAX;

/// Reply to [`BIND_STATFS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BindStatfs {
    /// Bytes of a block.
    pub block_size: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Blocks that are free.
    pub free: u64,
    /// Files in all.
    pub files: u64,
    /// Files that can still be made.
    pub free_files: u64,
}

/// What is mounted: `b`, a directory of the host, read-only.
pub const MOUNT_BIND: u8 = b'b';
/// `B`: a directory of the host, to be written to.
pub const MOUNT_BIND_WRITABLE: u8 = b'B';
/// `v`: a volume, read-only.
pub const MOUNT_VOLUME: u8 = b'v';
/// `V`: a volume, to be written to.
pub const MOUNT_VOLUME_WRITABLE: u8 = b'V';
/// `t`: an empty file system in memory.
pub const MOUNT_TMPFS: u8 = b't';

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_fits_a_message() {
        assert_eq!(size_of::<BindRequest>(), 32);
        assert!(BIND_WRITE_MAX + size_of::<BindRequest>() + 16 <= 8192);
        const { assert!(BIND_READ_MAX + 64 <= crate::control::MESSAGE_MAX) };
    }
}
