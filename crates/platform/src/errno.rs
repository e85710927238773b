//! Error numbers of the Linux ABI (errno(3)).

use core::fmt;

/// An error number, as a system call returns it negated.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

/// Result of anything that can fail with an error number.
pub type Result<T> = core::result::Result<T, Errno>;

macro_rules! errnos {
    ($($name:ident = $value:expr),* $(,)?) => {
        #[allow(missing_docs)]
        impl Errno {
            $(pub const $name: Errno = Errno($value);)*

            /// The symbolic name, such as `ENOENT`.
            pub fn name(self) -> &'static str {
                match self.0 {
                    $($value => stringify!($name),)*
                    _ => "E?",
                }
            }
        }
    };
}

errnos! {
    EPERM = 1, ENOENT = 2, ESRCH = 3, EINTR = 4, EIO = 5, ENXIO = 6, E2BIG = 7, ENOEXEC = 8,
    EBADF = 9, ECHILD = 10, EAGAIN = 11, ENOMEM = 12, EACCES = 13, EFAULT = 14, ENOTBLK = 15,
    EBUSY = 16, EEXIST = 17, EXDEV = 18, ENODEV = 19, ENOTDIR = 20, EISDIR = 21, EINVAL = 22,
    ENFILE = 23, EMFILE = 24, ENOTTY = 25, ETXTBSY = 26, EFBIG = 27, ENOSPC = 28, ESPIPE = 29,
    EROFS = 30, EMLINK = 31, EPIPE = 32, EDOM = 33, ERANGE = 34, EDEADLK = 35, ENAMETOOLONG = 36,
    ENOLCK = 37, ENOSYS = 38, ENOTEMPTY = 39, ELOOP = 40, ENOMSG = 42, EIDRM = 43, ENODATA = 61, ETIME = 62, EOVERFLOW = 75,
    EBADFD = 77, EILSEQ = 84, EUSERS = 87, ENOTSOCK = 88, EDESTADDRREQ = 89, EMSGSIZE = 90,
    EPROTOTYPE = 91, ENOPROTOOPT = 92, EPROTONOSUPPORT = 93, ESOCKTNOSUPPORT = 94, EOPNOTSUPP = 95,
    EPFNOSUPPORT = 96, EAFNOSUPPORT = 97, EADDRINUSE = 98, EADDRNOTAVAIL = 99, ENETDOWN = 100,
    ENETUNREACH = 101, ECONNABORTED = 103, ECONNRESET = 104, ENOBUFS = 105, EISCONN = 106,
    ENOTCONN = 107, ESHUTDOWN = 108, ETIMEDOUT = 110, ECONNREFUSED = 111, EHOSTDOWN = 112,
    EHOSTUNREACH = 113, EALREADY = 114, EINPROGRESS = 115, ESTALE = 116, EDQUOT = 122,
    ECANCELED = 125,
    // Never seen by the guest (include/linux/errno.h): what to do with an
    // interrupted system call once the signal has been dealt with.
    ERESTARTSYS = 512, ERESTARTNOINTR = 513, ERESTARTNOHAND = 514, ERESTART_RESTARTBLOCK = 516,
}

impl Errno {
    /// `EWOULDBLOCK` is `EAGAIN` on Linux.
    pub const EWOULDBLOCK: Errno = Errno::EAGAIN;
    /// `ENOTSUP` is `EOPNOTSUPP` on Linux.
    pub const ENOTSUP: Errno = Errno::EOPNOTSUPP;

    /// Splits the return value of a host call into value or error.
    pub fn from_return(value: u64) -> Result<u64> {
        let signed = value as i64;
        if (-4095..0).contains(&signed) { Err(Errno(-signed as i32)) } else { Ok(value) }
    }

    /// The value that the system call returns in `rax`.
    pub fn to_return(self) -> u64 {
        -(self.0 as i64) as u64
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn return_values_split_at_minus_4095() {
        assert_eq!(Errno::from_return(5), Ok(5));
        assert_eq!(Errno::from_return(-2i64 as u64), Err(Errno::ENOENT));
        assert_eq!(Errno::from_return(-4096i64 as u64), Ok(-4096i64 as u64));
        assert_eq!(Errno::ENOENT.to_return(), -2i64 as u64);
    }
}
