//! What lies in the directory of a partial function, and reading it.

use super::rows::Rows;
use crate::config::DomainName;
use crate::function::StoredFunction;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thaw_oci::artifact::FunctionDocument;
use thaw_sandbox::{Image, PartialLayout, WorkingSet};
use thaw_store::{Blob, ForeignIndex, IndexId, KernelId, Store};

/// Version of the record.
const VERSION: u32 = 1;
/// Most bytes of a record: a document and what it says of the function, twice.
const RECORD_MAX: u64 = 16 << 20;
/// Most files and contents; the fetcher has checked the index by the bounds of its pull.
const FILES_MAX: usize = 4 << 20;

/// The files of such a directory.
pub mod parts {
    /// What is known of the function.
    pub const RECORD: &str = "record.json";
    /// The index of its files.
    pub const INDEX: &str = "index";
    /// Its image, as far as it is here.
    pub const IMAGE: &str = "image";
    /// What a request touches.
    pub const WORKING_SET: &str = "working-set";
    /// The pages of that, and all memory of the kernel.
    pub const PREFETCH: &str = "prefetch";
    /// The kernel build, if it came along.
    pub const KERNEL: &str = "kernel";
    /// The directory of its contents.
    pub const CONTENTS: &str = "contents";
    /// Where the fetcher is asked.
    pub const SOCKET: &str = "socket";
    /// Held by the fetcher.
    pub const LOCK: &str = "lock";
    /// Names the pieces.
    pub const MANIFEST: &str = "manifest";
}

/// What is known of a partial function.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartialRecord {
    version: u32,
    /// The function, as it will be stored.
    pub function: StoredFunction,
    /// What its artifact says.
    pub document: FunctionDocument,
    /// Digest of its manifest.
    pub digest: String,
    /// When it was pulled, in milliseconds since the epoch.
    pub created_ms: u64,
    /// BLAKE3 of what a boot needs ([`hash_of_run`]), in hexadecimal digits.
    pub run: String,
    /// Whether the kernel build lies there, too.
    pub has_kernel: bool,
    /// From where its pieces come.
    #[serde(default)]
    pub from: PieceSource,
}

/// From where the pieces of a partial function come.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceSource {
    /// The registry, or the mirror of it, that had the manifest.
    pub host: String,
    /// Most files that were allowed when it was pulled.
    pub files_max: u64,
}

impl PartialRecord {
    /// A record of this version.
    pub fn new(
        function: StoredFunction,
        document: FunctionDocument,
        digest: String,
        created_ms: u64,
        (run, has_kernel): (String, bool),
        from: PieceSource,
    ) -> Self {
        Self { version: VERSION, function, document, digest, created_ms, run, has_kernel, from }
    }

    /// Its bytes, and their hash, which the fetcher and whoever asks it have in common.
    pub fn to_bytes(&self) -> (Vec<u8>, [u8; 32]) {
        let bytes = serde_json::to_vec(self).expect("a record is plain data");
        let hash = hash(&[&bytes]);
        (bytes, hash)
    }
}

fn hash(parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

/// The hash of what a boot needs.
pub fn hash_of_run(index: &[u8], head: &[u8], working_set: &[u8], pages: &[u8]) -> String {
    hash(&[index, head, working_set, pages]).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Names of the functions with a directory in this one; those that are being made are not there yet.
pub fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.path().join(parts::RECORD).is_file());
    named.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Whether there is a partial function of this name.
pub fn is_partial(directory: &Path, name: &str) -> bool {
    directory.join(name).join(parts::RECORD).is_file()
}

/// How large partial functions are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartialLength {
    /// The function.
    pub name: String,
    /// Its sharing domain.
    pub domain: Option<DomainName>,
    /// Bytes of its index, contents and image when all of it is here.
    pub bytes: u64,
    /// When it was begun, in milliseconds since 1970.
    pub created_ms: u64,
}

/// Where partial functions lie beside a store.
pub fn directory_beside(store: &Store) -> PathBuf {
    store.root().parent().unwrap_or(store.root()).join("partial")
}

/// The lengths of all in a directory. One whose record cannot be read is not served, and cannot be
/// counted.
pub fn lengths(directory: &Path) -> Vec<PartialLength> {
    let length = |name: String| {
        let (_, bytes) = read(&directory.join(&name).join(parts::RECORD), RECORD_MAX).ok()?;
        let record: PartialRecord = serde_json::from_slice(&bytes).ok()?;
        let (bytes, created_ms) = (length_of(&record.document), record.created_ms);
        Some(PartialLength {
            name,
            domain: record.function.config.sharing.domain,
            bytes,
            created_ms,
        })
    };
    names(directory).into_iter().filter_map(length).collect()
}

/// Bytes of a function's index, contents and image.
pub fn length_of(document: &FunctionDocument) -> u64 {
    let parts = [document.index.size, document.index.contents, document.image.size];
    parts.into_iter().fold(0, u64::saturating_add)
}

/// Which record a partial function has: another pull of it makes another one.
pub type RecordIdentity = (u64, u64, i64, i64);

/// That of a partial function, if there is one of this name.
pub fn identity(directory: &Path, name: &str) -> Option<RecordIdentity> {
    let found = fs::metadata(directory.join(name).join(parts::RECORD)).ok()?;
    Some((found.dev(), found.ino(), found.mtime(), found.mtime_nsec()))
}

/// Whether somebody holds the directory of a partial function to fetch it.
pub fn is_being_fetched(directory: &Path, name: &str) -> bool {
    let lock = File::open(directory.join(name).join(parts::LOCK));
    lock.is_ok_and(|lock| lock.try_lock_shared().is_err())
}

/// The kernel builds that partial functions in this directory need and have not brought along. Of
/// one whose record cannot be read, nothing can be booted.
pub fn kernels_of_partial(directory: &Path) -> BTreeSet<KernelId> {
    let record = |name: String| {
        let (_, bytes) = read(&directory.join(name).join(parts::RECORD), RECORD_MAX).ok()?;
        serde_json::from_slice::<PartialRecord>(&bytes).ok()
    };
    let records = names(directory).into_iter().filter_map(record);
    records.filter(|found| !found.has_kernel).map(|found| found.document.image.kernel).collect()
}

/// A partial function that can be booted.
#[derive(Debug)]
pub struct PartialFunction {
    /// What is known of it.
    pub record: PartialRecord,
    /// Hash of the record's bytes.
    pub hash: [u8; 32],
    /// Where it lies.
    pub directory: PathBuf,
    /// The index of its files.
    pub index: Arc<File>,
    /// The directory of its contents.
    pub contents: File,
    /// Its image.
    pub image: Image,
    /// What a request touches.
    pub working_set: WorkingSet,
    /// The pages of that.
    pub prefetch: Arc<File>,
    /// Where the segments lie.
    pub layout: PartialLayout,
    /// What is told apart of its image and contents.
    pub rows: Rows,
    /// The contents of its files, in the order of the index.
    pub blobs: Vec<Blob>,
}

impl PartialFunction {
    /// Reads and verifies what a boot needs.
    ///
    /// # Errors
    /// One sentence: a part is missing or damaged.
    pub fn open(directory: &Path) -> Result<Self, String> {
        Self::open_as(directory, parts::RECORD)
    }

    /// The same, whose record has another name yet.
    ///
    /// # Errors
    /// As above.
    pub fn open_as(directory: &Path, record_name: &str) -> Result<Self, String> {
        let read = |name: &str, most: u64| {
            read(&directory.join(name), most).map_err(|error| {
                format!("{name} of the partial function cannot be read ({error}); pull it again")
            })
        };
        let (record_file, bytes) = read(record_name, RECORD_MAX)?;
        let record: PartialRecord = serde_json::from_slice(&bytes)
            .map_err(|error| format!("its record makes no sense ({error}); pull it again"))?;
        if record.version != VERSION {
            return Err("its record is of another version of Thaw; pull it again".to_owned());
        }
        let run = record.document.run.clone().ok_or("its artifact has no run; pull it again")?;
        let (index, index_bytes) = read(parts::INDEX, record.document.index.size)?;
        let (_, set_bytes) = read(parts::WORKING_SET, run.working_set)?;
        let (prefetch, pages) = read(parts::PREFETCH, run.pages)?;
        let open = |name: &str| {
            let opened = File::open(directory.join(name));
            opened
                .map_err(|error| format!("{name} of the partial function: {error}; pull it again"))
        };
        let (file, contents) = (open(parts::IMAGE)?, open(parts::CONTENTS)?);
        let head = read_head(&file, run.head).map_err(|error| error.to_string())?;
        if hash_of_run(&index_bytes, &head, &set_bytes, &pages) != record.run {
            return Err("what it is booted from is damaged; pull it again".to_owned());
        }
        let hash = self::hash(&[&bytes]);
        let parsed = parse(&record.document, file, &index_bytes, &set_bytes)?;
        let Parsed { image, working_set, layout, rows, blobs } = parsed;
        let (index, prefetch) = (Arc::new(index), Arc::new(prefetch));
        // Another pull begins by removing the record, and makes all others anew after that.
        if !is_named(&record_file, &directory.join(record_name)) {
            return Err("it is being pulled anew".to_owned());
        }
        let directory = directory.to_owned();
        Ok(Self {
            record,
            hash,
            directory,
            index,
            contents,
            image,
            working_set,
            prefetch,
            layout,
            rows,
            blobs,
        })
    }

    /// Its root file system.
    pub fn index_id(&self) -> IndexId {
        self.record.document.index.id
    }
}

/// What a boot needs, understood.
pub struct Parsed {
    pub image: Image,
    pub working_set: WorkingSet,
    pub layout: PartialLayout,
    pub rows: Rows,
    pub blobs: Vec<Blob>,
}

/// Interprets what a boot needs, and compares it with the document.
///
/// # Errors
/// One sentence: it makes no sense.
pub fn parse(
    document: &FunctionDocument,
    image: File,
    index: &[u8],
    working_set: &[u8],
) -> Result<Parsed, String> {
    let index =
        ForeignIndex::parse(index, FILES_MAX).map_err(|error| format!("of its index, {error}"))?;
    if index.id() != document.index.id {
        return Err("its index is another one than its document says".to_owned());
    }
    let rows = Rows::new(document, index.blobs().map(|blob| blob.size))?;
    let image = Image::open_partial(image).map_err(|error| error.to_string())?;
    let (header, part) = (image.header(), &document.image);
    if header.depth != 0 || header.file_len != part.size {
        return Err("its image is another one than its document says".to_owned());
    }
    if header.kernel_build != part.kernel.0 || header.cpu_features != part.cpu_features {
        return Err(
            "its image needs another kernel build or processor than its document says".to_owned()
        );
    }
    if header.index != *document.index.id.as_bytes() {
        return Err("its image was frozen over other files".to_owned());
    }
    image.check_contents(index.blobs().len()).map_err(|error| error.to_string())?;
    let working_set = WorkingSet::from_bytes(working_set).map_err(|error| error.to_string())?;
    if working_set.image_checksum() != header.checksum {
        return Err("its working set belongs to another image".to_owned());
    }
    let run = document.run.as_ref().ok_or("its artifact has no run")?;
    let plain =
        thaw_sandbox::run_layout(&image, &working_set).ok_or("it cannot be booted in parts")?;
    let name: String = plain.name().iter().map(|byte| format!("{byte:02x}")).collect();
    if name != run.layout || plain.len() != run.pages || image.head_len() != run.head {
        return Err("its run was made by another version of Thaw".to_owned());
    }
    let layout = PartialLayout::new(&image, &working_set, rows.contents(), &rows)
        .ok_or("it cannot be booted in parts")?;
    Ok(Parsed { image, working_set, layout, rows, blobs: index.blobs().collect() })
}

/// A file, and all of its bytes.
fn read(path: &Path, most: u64) -> io::Result<(File, Vec<u8>)> {
    let file = File::open(path)?;
    let mut bytes = Vec::new();
    (&file).take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(io::Error::other("it is too long")),
        false => Ok((file, bytes)),
    }
}

/// Whether a path names a file that is open.
fn is_named(file: &File, path: &Path) -> bool {
    let Ok(open) = file.metadata() else { return false };
    fs::symlink_metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == (open.dev(), open.ino()))
}

fn read_head(mut file: &File, len: u64) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    Read::by_ref(&mut file).take(len).read_to_end(&mut head)?;
    match head.len() as u64 == len {
        true => Ok(head),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
