//! Layers become a tree, and their files blobs of the store.

use crate::apply::{Kind, Layer};
use crate::error::OciError;
use crate::layer::{Allowance, Hashing, Metered, uncompressed};
use crate::layout::{Image, LayerSource};
use crate::pax::{self, ExtendedHeader, Headers};
use crate::settings::Settings;
use crate::sparse::SparseHeader;
use std::io::{self, Read};
use std::path::Path;
use tar::{Archive, Entry, EntryType};
use thaw_store::index::{
    Attributes, Content, DeviceNumber, Extended, ExtendedError, Node, Timestamp,
};
use thaw_store::{Domain, Session, StoreError, Tree};

/// Most bytes of the headers of one entry: long names and attributes.
pub(crate) const HEADERS_MAX: u64 = 1 << 20;
/// Bytes that an archive is made of multiples of.
const BLOCK: u64 = 512;
/// Deepest directory: so many can be named by a path (`PATH_MAX`, limits.h).
const DEPTH_MAX: usize = 2048;
/// Most layers; Docker has 127 at most.
const LAYERS_MAX: usize = 1000;

/// What an image may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of all layers, and of all that is in them: each may have as many.
    pub bytes: u64,
    /// Entries of all layers.
    pub entries: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 64 << 30, entries: 4 << 20 }
    }
}

/// An image as the store has it.
#[derive(Debug)]
pub struct Unpacked {
    /// Its files.
    pub tree: Tree,
    /// How its program is run.
    pub settings: Settings,
    /// What came of it.
    pub report: UnpackReport,
}

/// What was unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnpackReport {
    /// Layers.
    pub layers: usize,
    /// Entries of all layers.
    pub entries: u64,
    /// Bytes of regular files of all layers.
    pub bytes: u64,
    /// Files of which extended attributes were left out.
    pub without_attributes: u64,
}

impl Image {
    /// Unpacks the layers into a tree, and the content of files into the store, where nothing is
    /// published yet. `progress` is told after each entry.
    ///
    /// # Errors
    /// A layer is damaged, leads out of the image, or is larger than allowed.
    pub fn unpack(
        &self,
        session: &mut Session,
        domain: &Domain,
        limits: Limits,
        progress: &mut dyn FnMut(&UnpackReport),
    ) -> Result<Unpacked, OciError> {
        let mut unpacker = Unpacker {
            session,
            domain,
            limits,
            progress,
            tree: Tree::new(),
            report: UnpackReport::default(),
            headers: 0,
        };
        for layer in self.layers() {
            unpacker.report.layers += 1;
            if unpacker.report.layers > LAYERS_MAX {
                return Err(OciError::TooLarge { limit: LAYERS_MAX as u64, what: "layers" });
            }
            unpacker.layer(&layer)?;
        }
        let Unpacker { mut tree, report, .. } = unpacker;
        // The program is started there, whether a layer has it or not.
        let workdir = &self.settings().workdir;
        let made = tree.make_directories(Path::new(workdir));
        made.map_err(|error| OciError::document("the image's working directory", error))?;
        if tree.depth() > DEPTH_MAX {
            return Err(OciError::TooLarge { limit: DEPTH_MAX as u64, what: "nested directories" });
        }
        Ok(Unpacked { tree, settings: self.settings().clone(), report })
    }
}

struct Unpacker<'a> {
    session: &'a mut Session,
    domain: &'a Domain,
    limits: Limits,
    progress: &'a mut dyn FnMut(&UnpackReport),
    tree: Tree,
    report: UnpackReport,
    /// Bytes of headers, and of what was skipped: they are unpacked, too.
    headers: u64,
}

impl Unpacker<'_> {
    fn layer(&mut self, source: &LayerSource<'_>) -> Result<(), OciError> {
        let number = self.report.layers;
        let unreadable = |error: io::Error| OciError::Entry {
            layer: number,
            path: "(header)".to_owned(),
            reason: format!("{error}; copy or pull the image anew"),
        };
        let (compressed, compressed_hash) = Hashing::new(source.open()?);
        let plain = uncompressed(compressed).map_err(unreadable)?;
        let (plain, plain_hash) = Hashing::new(plain);
        // Some tools leave out the end of the last block and the two empty ones behind it.
        let plain = plain.chain(io::repeat(0).take(3 * BLOCK));
        let allowance = Allowance::new(HEADERS_MAX);
        let extended_header = ExtendedHeader::default();
        let metered = Metered::new(plain, allowance.clone());
        let mut archive = Archive::new(Headers::new(metered, extended_header.clone()));
        // Each layer can name what those before it have.
        let mut tree = std::mem::take(&mut self.tree);
        let mut layer = Layer::new(&mut tree, number);
        let mut entries = archive.entries().map_err(unreadable)?;
        loop {
            allowance.set(HEADERS_MAX);
            extended_header.expect();
            let Some(entry) = entries.next() else { break };
            let header = extended_header.take();
            let entry = entry.map_err(unreadable)?;
            self.headers = self.headers.saturating_add(HEADERS_MAX - allowance.left());
            self.check_bytes()?;
            allowance.set(HEADERS_MAX);
            self.entry(&mut layer, entry, &header, &allowance)?;
            // Directories that no entry names count as well.
            if layer.nodes() > self.limits.entries {
                return Err(self.too_many());
            }
        }
        // The digests are of all bytes, those behind the last entry, too.
        allowance.set(self.limits.bytes.saturating_sub(self.bytes()));
        let mut rest = archive.into_inner();
        let behind = io::copy(&mut rest, &mut io::sink()).map_err(unreadable)?;
        self.report.bytes = self.report.bytes.saturating_add(behind.saturating_sub(3 * BLOCK));
        self.tree = tree;
        source.check(number, &compressed_hash.digest(), &plain_hash.digest())
    }

    /// All bytes that were unpacked.
    fn bytes(&self) -> u64 {
        self.report.bytes.saturating_add(self.headers)
    }

    fn check_bytes(&self) -> Result<(), OciError> {
        match self.bytes() > self.limits.bytes {
            true => Err(OciError::TooLarge { limit: self.limits.bytes, what: "bytes of files" }),
            false => Ok(()),
        }
    }

    fn too_many(&self) -> OciError {
        OciError::TooLarge { limit: self.limits.entries, what: "entries" }
    }

    fn entry<R: Read>(
        &mut self,
        layer: &mut Layer<'_>,
        mut entry: Entry<'_, R>,
        header: &[u8],
        allowance: &Allowance,
    ) -> Result<(), OciError> {
        self.report.entries += 1;
        if self.report.entries > self.limits.entries {
            return Err(self.too_many());
        }
        let mut name = entry.path_bytes().into_owned();
        // An extended header that belongs to no entry would be read as a whole.
        let kind = entry.header().entry_type();
        if matches!(kind, EntryType::XGlobalHeader | EntryType::XHeader) {
            return Ok(());
        }
        let refuse = |layer: &Layer<'_>, name: &[u8], reason: &dyn std::fmt::Display| {
            layer.refuse(name, format!("{reason}; make the image anew"))
        };
        let mut extra = Extra::of(header).map_err(|error| refuse(layer, &name, &error))?;
        name = extra.sparse.take_name().unwrap_or(name);
        let refuse =
            |layer: &Layer<'_>, reason: &dyn std::fmt::Display| refuse(layer, &name, reason);
        let attributes = extra.attributes(&entry).map_err(|error| refuse(layer, &error))?;
        let content = match kind {
            EntryType::Link => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                return layer.apply(&name, Kind::HardLink(target));
            }
            EntryType::Directory => Content::directory(),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let stored = entry.size();
                let size = match extra.sparse.is_sparse() {
                    true => extra.sparse.size().map_err(|error| refuse(layer, &error))?,
                    false => stored,
                };
                self.report.bytes = self.report.bytes.saturating_add(size.max(stored));
                self.check_bytes()?;
                // Of a sparse file, the archive has less.
                allowance.set(stored.saturating_add(HEADERS_MAX));
                let blob = match extra.sparse.is_sparse() {
                    true => {
                        let file = extra.sparse.expand(&mut entry, stored);
                        let mut file = file.map_err(|error| refuse(layer, &error))?;
                        self.session.put_stream(&mut file, self.domain)
                    }
                    false => self.session.put_stream(&mut entry, self.domain),
                };
                let blob = blob.map_err(|error| match error {
                    StoreError::Source(error) => refuse(layer, &error),
                    // The disk may be full: that is not the image's fault.
                    error => error.into(),
                })?;
                if blob.map_or(0, |blob| blob.size) != size {
                    return Err(refuse(layer, &"the layer ends in the middle of it"));
                }
                Content::Regular(blob)
            }
            EntryType::Symlink => {
                Content::Symlink(entry.link_name_bytes().unwrap_or_default().into_owned())
            }
            EntryType::Fifo => Content::Fifo,
            EntryType::Char => Content::CharacterDevice(device(&entry)),
            EntryType::Block => Content::BlockDevice(device(&entry)),
            other => {
                return Err(refuse(layer, &format!("entries of type {other:?} are not known")));
            }
        };
        let (extended, has_others) =
            kept(&extra.extended, &content).map_err(|error| refuse(layer, &error))?;
        self.report.without_attributes += u64::from(has_others);
        layer.apply(&name, Kind::Node(Node { content, attributes }, extended))?;
        (self.progress)(&self.report);
        Ok(())
    }
}

fn device<R: Read>(entry: &Entry<'_, R>) -> DeviceNumber {
    let number = |field: io::Result<Option<u32>>| field.ok().flatten().unwrap_or_default();
    let header = entry.header();
    DeviceNumber { major: number(header.device_major()), minor: number(header.device_minor()) }
}

/// What the extended header of an entry says (pax(1)).
#[derive(Default)]
struct Extra {
    modified: Option<Timestamp>,
    /// Names and values of extended attributes.
    extended: Vec<(Vec<u8>, Vec<u8>)>,
    sparse: SparseHeader,
}

impl Extra {
    fn of(header: &[u8]) -> io::Result<Self> {
        let mut extra = Self::default();
        pax::records(header, |key, value| {
            if let Some(name) = key.strip_prefix(pax::XATTR) {
                extra.extended.push((name.to_vec(), value.to_vec()));
            } else if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                extra.sparse.note(key, value)?;
            } else if key == b"mtime" {
                extra.modified = std::str::from_utf8(value).ok().and_then(timestamp);
            }
            Ok(())
        })?;
        Ok(extra)
    }

    fn attributes<R: Read>(&self, entry: &Entry<'_, R>) -> io::Result<Attributes> {
        let header = entry.header();
        let id = |number: u64| {
            u32::try_from(number).map_err(|_| io::Error::other("its owner has no 32-bit number"))
        };
        let seconds = i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0);
        Ok(Attributes {
            permissions: header.mode()? & 0o7777,
            uid: id(header.uid()?)?,
            gid: id(header.gid()?)?,
            modified: self.modified.unwrap_or(Timestamp { seconds, nanoseconds: 0 }),
        })
    }
}

/// The extended attributes that such a file keeps, and whether there are others.
fn kept(all: &[(Vec<u8>, Vec<u8>)], content: &Content) -> Result<(Extended, bool), ExtendedError> {
    let mut kept = Extended::default();
    for (name, value) in all.iter().filter(|(name, _)| content.may_have(name)) {
        kept.insert(name, value)?;
    }
    Ok((kept, all.iter().any(|(name, _)| !content.may_have(name))))
}

/// A time such as `1700000000.25`.
fn timestamp(text: &str) -> Option<Timestamp> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    Some(Timestamp { seconds: seconds.parse().ok()?, nanoseconds: digits.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_fractions() {
        assert_eq!(timestamp("5.25"), Some(Timestamp { seconds: 5, nanoseconds: 250_000_000 }));
        assert_eq!(timestamp("5"), Some(Timestamp { seconds: 5, nanoseconds: 0 }));
        assert_eq!(timestamp("1.1234567890123").map(|time| time.nanoseconds), Some(123_456_789));
        assert_eq!(timestamp("x"), None);
        assert_eq!(timestamp("1.-2"), None);
    }
}
