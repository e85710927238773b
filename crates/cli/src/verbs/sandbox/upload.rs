//! A directory of this machine as a stream of tar, for `thaw sandbox cp`.

use crate::failure::Failure;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, PipeReader, PipeWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use tar::{Builder, EntryType, Header};

/// Bytes that are written to the stream at once.
const BUFFER: usize = 64 << 10;

/// The stream. A file that cannot be read breaks it off: whoever reads it must not take what has
/// come for all.
pub struct Upload {
    reader: PipeReader,
    packer: Option<JoinHandle<Result<(), Failure>>>,
    /// Why it was broken off.
    failure: Option<Failure>,
}

impl Upload {
    /// Begins to pack a directory.
    ///
    /// # Errors
    /// There is no pipe.
    pub fn of(directory: PathBuf) -> Result<Self, Failure> {
        let (reader, writer) = io::pipe()?;
        let packer = std::thread::spawn(move || pack(&directory, writer));
        Ok(Self { reader, packer: Some(packer), failure: None })
    }

    /// Why it was broken off, if it was.
    pub fn failure(self) -> Option<Failure> {
        self.failure
    }
}

impl Read for Upload {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(buffer)?;
        if count == 0
            && let Some(packer) = self.packer.take()
        {
            let packed = packer.join().unwrap_or_else(|_| Err(Failure::failed("packing failed")));
            self.failure = packed.err();
        }
        match (count, &self.failure) {
            (0, Some(_)) => Err(io::Error::other("the directory cannot be packed")),
            _ => Ok(count),
        }
    }
}

fn pack(directory: &Path, writer: PipeWriter) -> Result<(), Failure> {
    let mut builder = Builder::new(BufWriter::with_capacity(BUFFER, writer));
    let found = fs::symlink_metadata(directory).map_err(told(directory))?;
    add(&mut builder, directory, Path::new("./"), &found)?;
    let mut writer = builder.into_inner().map_err(told(directory))?;
    writer.flush().map_err(told(directory))
}

fn told(path: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| Failure::failed(format!("{}: {error}", path.display()))
}

fn add(
    builder: &mut Builder<impl Write>,
    from: &Path,
    to: &Path,
    found: &Metadata,
) -> Result<(), Failure> {
    let told = told(from);
    let mut header = Header::new_gnu();
    header.set_mode(found.mode() & 0o7777);
    header.set_mtime(u64::try_from(found.mtime()).unwrap_or(0));
    header.set_size(0);
    if found.is_dir() {
        header.set_entry_type(EntryType::Directory);
        builder.append_data(&mut header, to, io::empty()).map_err(&told)?;
        return add_all(builder, from, to);
    }
    if found.is_symlink() {
        header.set_entry_type(EntryType::Symlink);
        let target = fs::read_link(from).map_err(&told)?;
        return builder.append_link(&mut header, to, target).map_err(told);
    }
    if !found.is_file() {
        eprintln!("thaw: {} is no file or directory, and left out", from.display());
        return Ok(());
    }
    let file = File::open(from).map_err(&told)?;
    let size = file.metadata().map_err(&told)?.len();
    header.set_size(size);
    header.set_entry_type(EntryType::Regular);
    let mut contents = Counted { inner: file.take(size), count: 0 };
    builder.append_data(&mut header, to, &mut contents).map_err(&told)?;
    match contents.count == size {
        true => Ok(()),
        false => Err(told(io::Error::other("it became shorter while it was copied"))),
    }
}

fn add_all(builder: &mut Builder<impl Write>, from: &Path, to: &Path) -> Result<(), Failure> {
    for entry in fs::read_dir(from).map_err(told(from))? {
        let entry = entry.map_err(told(from))?;
        let path = entry.path();
        let name = entry.file_name();
        if name.to_str().is_none() {
            return Err(Failure::failed(format!("{}: its name is not UTF-8", path.display())));
        }
        let found = fs::symlink_metadata(&path).map_err(told(&path))?;
        let to = match to == Path::new("./") {
            true => PathBuf::from(name),
            false => to.join(name),
        };
        add(builder, &path, &to, &found)?;
    }
    Ok(())
}

/// Counts what is read through it.
struct Counted<R> {
    inner: R,
    count: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.count += count as u64;
        Ok(count)
    }
}
