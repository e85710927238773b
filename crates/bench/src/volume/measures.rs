//! What is measured: 4 KiB of a file at a time, as a C program reads and writes them, and the
//! worker that does it in its current directory.
#![allow(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::{self, Error, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

/// Bytes of the file that is there, as many as the kernel can have mapped at once to write to.
const FILE_SIZE: u64 = 64 << 20;
/// Bytes that are read or written at a time.
const PIECE: usize = 4096;
const PIECES: u64 = FILE_SIZE / PIECE as u64;

/// A way to use a file.
pub struct Measure {
    /// Name, as in the report and in orders to workers. Without blanks.
    pub name: &'static str,
    /// What it does, for people.
    pub what: &'static str,
    /// Calls of one sample: enough for the clock not to matter.
    calls: usize,
    /// Makes so many calls.
    run: Run,
}

type Run = fn(&mut Workplace, usize) -> io::Result<()>;

const fn measure(name: &'static str, what: &'static str, calls: usize, run: Run) -> Measure {
    Measure { name, what, calls, run }
}

/// Everything that is measured.
pub const MEASURES: &[Measure] = &[
    measure("read", "read, one after the other", 64, |place, calls| {
        place.rewind_for(calls)?;
        each(calls, |_| place.file.read_exact(&mut place.piece))
    }),
    measure("pread-random", "pread, anywhere", 64, |place, calls| {
        each(calls, |_| {
            let at = place.random.piece();
            place.file.read_exact_at(&mut place.piece, at)
        })
    }),
    measure("write", "write, one after the other", 64, |place, calls| {
        place.rewind_for(calls)?;
        each(calls, |_| place.file.write_all(&place.piece))
    }),
    measure("pwrite-random", "pwrite, anywhere", 64, |place, calls| {
        each(calls, |_| {
            let at = place.random.piece();
            place.file.write_all_at(&place.piece, at)
        })
    }),
    measure("pwrite-near", "pwrite, anywhere in 1 MiB", 64, |place, calls| {
        each(calls, |_| {
            let at = place.random.piece() % (1 << 20);
            place.file.write_all_at(&place.piece, at)
        })
    }),
    measure("write-longer", "write, which makes the file longer", 64, |place, calls| {
        let mut file = place.empty_file(false)?;
        each(calls, |_| file.write_all(&place.piece))
    }),
    measure("pwrite-longer", "pwrite, which makes the file longer", 64, |place, calls| {
        let file = place.empty_file(false)?;
        each(calls, |call| file.write_all_at(&place.piece, (call * PIECE) as u64))
    }),
    measure("append", "write with O_APPEND", 64, |place, calls| {
        let mut file = place.empty_file(true)?;
        each(calls, |_| file.write_all(&place.piece))
    }),
    measure("write-1m-longer", "write of 1 MiB, which makes the file longer", 4, |place, calls| {
        let mut file = place.empty_file(false)?;
        let large = vec![7; 1 << 20];
        each(calls, |_| file.write_all(&large))
    }),
    measure(
        "map-read",
        "first read of a mapped page, one after the other",
        1024,
        |place, calls| {
            let start = place.random.piece().min(FILE_SIZE - (calls * PIECE) as u64);
            place.map(libc::PROT_READ, |memory| {
                each(calls, |call| memory.read(start + (call * PIECE) as u64))
            })
        },
    ),
    measure("map-read-random", "first read of a mapped page, anywhere", 1024, |place, calls| {
        let mut random = place.random;
        place.map(libc::PROT_READ, |memory| each(calls, |_| memory.read(random.piece())))?;
        place.random = random;
        Ok(())
    }),
    measure("map-write", "first write of a mapped page, one after the other", 1024, {
        |place, calls| {
            let start = place.random.piece().min(FILE_SIZE - (calls * PIECE) as u64);
            place.map(libc::PROT_READ | libc::PROT_WRITE, |memory| {
                each(calls, |call| memory.write(start + (call * PIECE) as u64))
            })
        }
    }),
    measure("map-write-random", "first write of a mapped page, anywhere", 1024, |place, calls| {
        let mut random = place.random;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        place.map(access, |memory| each(calls, |_| memory.write(random.piece())))?;
        place.random = random;
        Ok(())
    }),
    measure("open-close", "open + close", 16, |place, calls| {
        let path = place.directory.join("file");
        each(calls, |_| File::open(&path).map(drop))
    }),
    measure("stat", "stat", 16, |place, calls| {
        let path = place.directory.join("file");
        each(calls, |_| fs::metadata(&path).map(drop))
    }),
    measure("fsync", "pwrite + fsync", 1, |place, calls| {
        each(calls, |_| {
            let at = place.random.piece();
            place.file.write_all_at(&place.piece, at)?;
            place.file.sync_all()
        })
    }),
];

fn each(calls: usize, call: impl FnMut(usize) -> io::Result<()>) -> io::Result<()> {
    (0..calls).try_for_each(call)
}

impl Measure {
    /// Takes samples: nanoseconds for one call each.
    fn take(&self, place: &mut Workplace, samples: usize) -> io::Result<Vec<f64>> {
        // The first calls find the sites not patched.
        (self.run)(place, self.calls)?;
        (0..samples)
            .map(|_| {
                let begin = Instant::now();
                (self.run)(place, self.calls)?;
                Ok(begin.elapsed().as_nanos() as f64 / self.calls as f64)
            })
            .collect()
    }
}

/// The same numbers on both sides (splitmix64).
#[derive(Clone, Copy)]
struct Random(u64);

impl Random {
    /// The offset of some piece of the file.
    fn piece(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % PIECES * PIECE as u64
    }
}

/// A directory with a file of its own, gone when dropped.
struct Workplace {
    directory: PathBuf,
    file: File,
    piece: Vec<u8>,
    random: Random,
}

impl Drop for Workplace {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Workplace {
    fn prepare() -> io::Result<Self> {
        let directory = own_directory()?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        let mut file = options.open(directory.join("file"))?;
        let some = vec![5; 1 << 20];
        (0..FILE_SIZE >> 20).try_for_each(|_| file.write_all(&some))?;
        file.sync_all()?;
        Ok(Self { directory, file, piece: vec![6; PIECE], random: Random(1) })
    }

    /// Goes back to the beginning if so many pieces are not left.
    fn rewind_for(&mut self, calls: usize) -> io::Result<()> {
        let at = self.file.stream_position()?;
        if at + (calls * PIECE) as u64 > FILE_SIZE {
            self.file.seek(SeekFrom::Start(0))?;
        }
        Ok(())
    }

    fn empty_file(&self, appends: bool) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.create(true);
        match appends {
            true => options.append(true),
            false => options.write(true),
        };
        let file = options.open(self.directory.join("longer"))?;
        file.set_len(0)?;
        Ok(file)
    }

    /// Does something with a new mapping of the whole file.
    fn map(&self, access: i32, work: impl FnOnce(Mapped) -> io::Result<()>) -> io::Result<()> {
        let (len, fd) = (FILE_SIZE as usize, self.file.as_raw_fd());
        let nowhere = std::ptr::null_mut();
        // SAFETY: a new mapping, which takes the place of none.
        let start = unsafe { libc::mmap(nowhere, len, access, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        let done = work(Mapped(start.cast()));
        // SAFETY: the mapping was made above, and `work` keeps no address of it.
        match unsafe { libc::munmap(start, len) } {
            0 => done,
            _ => Err(Error::last_os_error()),
        }
    }
}

/// A mapping of [`FILE_SIZE`] bytes.
struct Mapped(*mut u8);

impl Mapped {
    fn read(&self, at: u64) -> io::Result<()> {
        assert!(at < FILE_SIZE);
        // SAFETY: within the mapping, which is there as long as this is.
        black_box(unsafe { self.0.add(at as usize).read_volatile() });
        Ok(())
    }

    fn write(&self, at: u64) -> io::Result<()> {
        assert!(at < FILE_SIZE);
        // SAFETY: as above; whoever writes has made it with write access.
        unsafe { self.0.add(at as usize).write_volatile(at as u8) };
        Ok(())
    }
}

/// A new directory in the current one; the other side has one there, too.
fn own_directory() -> io::Result<PathBuf> {
    for number in 0..100 {
        let directory = PathBuf::from(format!("files-{number}"));
        match fs::create_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|()| directory),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Takes samples in the current directory until standard input ends.
pub(crate) fn serve_files() -> io::Result<()> {
    let mut place = Workplace::prepare()?;
    crate::syscalls::serve_orders(|name, samples| {
        let measure = MEASURES.iter().find(|measure| measure.name == name)?;
        Some(measure.take(&mut place, samples))
    })
}
