//! Images on this host: OCI layouts, as directories or archives, and archives of `docker save`.

use crate::error::{OciError, escaped};
use crate::layer::{Allowance, Metered, digest};
use crate::settings::{Configuration, Settings};
use crate::unpack::HEADERS_MAX;
use oci_spec::image::{Arch, Descriptor, Digest, ImageIndex, ImageManifest, MediaType, Os};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tar::Archive;

/// Longest document: manifests and configurations are some KiB.
const DOCUMENT_MAX: u64 = 4 << 20;
/// Most files of an archive.
const MEMBERS_MAX: usize = 100_000;
/// Deepest index of indexes.
const NESTED_MAX: usize = 4;
/// Names an image of a layout (OCI image layout, annotations).
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// A place with images.
#[derive(Debug)]
pub struct Layout {
    files: Files,
    images: Vec<Found>,
}

/// How the files of a layout are reached.
#[derive(Debug)]
enum Files {
    Directory(PathBuf),
    Archive {
        file: File,
        path: PathBuf,
        /// Where each regular file lies.
        members: HashMap<Vec<u8>, Range<u64>>,
    },
}

/// An image of a layout.
#[derive(Clone, Debug)]
struct Found {
    tags: Vec<String>,
    manifest: Document,
}

#[derive(Clone, Debug)]
enum Document {
    /// Of the OCI: what `index.json` says of it.
    Described(Box<Descriptor>),
    /// Of `docker save`.
    Docker(DockerManifest),
}

/// An entry of `manifest.json` (Docker image specification 1.2, "Combined image JSON").
#[derive(Clone, Debug, Deserialize)]
struct DockerManifest {
    #[serde(rename = "Config")]
    config: String,
    #[serde(rename = "RepoTags")]
    tags: Option<Vec<String>>,
    #[serde(rename = "Layers")]
    layers: Vec<String>,
}

/// One image, whose manifest and configuration were read and verified.
#[derive(Debug)]
pub struct Image {
    files: Files,
    settings: Settings,
    layers: Vec<LayerFile>,
}

#[derive(Debug)]
struct LayerFile {
    path: Vec<u8>,
    /// Digest of the file, if it is known.
    digest: Option<String>,
    /// Digest of what it uncompresses to.
    diff_id: String,
}

/// A layer that can be read.
pub(crate) struct LayerSource<'a> {
    files: &'a Files,
    layer: &'a LayerFile,
}

impl Layout {
    /// Opens a directory or an archive.
    ///
    /// # Errors
    /// There is none, or it holds no images.
    pub fn open(path: &Path) -> Result<Self, OciError> {
        let found = path.metadata().map_err(|error| OciError::file("open", path, error))?;
        let files = match found.is_dir() {
            true => Files::Directory(path.to_owned()),
            false => Files::archive(path)?,
        };
        let images = files.images()?;
        Ok(Self { files, images })
    }

    /// Whether a directory is an OCI layout rather than a root file system.
    pub fn is_layout(directory: &Path) -> bool {
        directory.join("oci-layout").is_file() && directory.join("index.json").is_file()
    }

    /// The image with a tag, or the only one.
    ///
    /// # Errors
    /// There is none, there are several, or its documents are damaged.
    pub fn image(self, tag: Option<&str>) -> Result<Image, OciError> {
        let Self { files, images } = self;
        let tags = || images.iter().flat_map(|image| image.tags.clone()).collect::<Vec<_>>();
        let fits = |image: &&Found| {
            tag.is_none_or(|wanted| image.tags.iter().any(|tag| is_tagged(tag, wanted)))
        };
        let mut fitting = images.iter().filter(fits);
        let found = match (fitting.next(), fitting.next()) {
            (Some(found), None) => found.clone(),
            (Some(_), Some(_)) => return Err(OciError::Several { tags: tags() }),
            (None, _) => {
                let wanted = tag.unwrap_or_default().to_owned();
                return Err(OciError::NoSuchTag { wanted, tags: tags() });
            }
        };
        match found.manifest {
            Document::Described(descriptor) => described(files, &descriptor),
            Document::Docker(manifest) => saved(files, &manifest),
        }
    }
}

/// Whether a tag such as `docker.io/library/a:1` or `1` is what somebody means by `wanted`.
fn is_tagged(tag: &str, wanted: &str) -> bool {
    let ends_so =
        |separator| tag.strip_suffix(wanted).is_some_and(|rest: &str| rest.ends_with(separator));
    tag == wanted || ends_so('/') || ends_so(':')
}

impl Image {
    /// How its program is run.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = LayerSource<'_>> {
        self.layers.iter().map(|layer| LayerSource { files: &self.files, layer })
    }
}

impl<'a> LayerSource<'a> {
    pub fn open(&self) -> Result<Box<dyn Read + 'a>, OciError> {
        self.files.open(&self.layer.path)
    }

    /// Compares the digests of what was read with those that are wanted.
    pub fn check(&self, number: usize, compressed: &str, plain: &str) -> Result<(), OciError> {
        let wanted =
            [(self.layer.digest.as_deref(), compressed), (Some(&*self.layer.diff_id), plain)];
        for (wanted, found) in wanted {
            check_digest(&format!("layer {number}"), wanted, found)?;
        }
        Ok(())
    }
}

fn check_digest(what: &str, wanted: Option<&str>, found: &str) -> Result<(), OciError> {
    match wanted.filter(|&wanted| wanted != found) {
        None => Ok(()),
        Some(wanted) => Err(OciError::Digest {
            what: what.to_owned(),
            found: found.to_owned(),
            wanted: escaped(wanted.as_bytes()),
        }),
    }
}

/// An image with a manifest of the OCI or of Docker's registries, which look the same.
fn described(files: Files, descriptor: &Descriptor) -> Result<Image, OciError> {
    let descriptor = files.for_this_machine(descriptor.clone(), 0)?;
    let manifest: ImageManifest = files.document("the image's manifest", &descriptor)?;
    let config = files.described("the image's configuration", manifest.config())?;
    let configuration = Configuration::parse(&config)?;
    let layers = manifest.layers().iter();
    let layers = layers.map(|layer| (blob_path(layer.digest()), Some(layer.digest().to_string())));
    image(files, configuration, layers.collect())
}

/// An image with a manifest of `docker save`.
fn saved(files: Files, manifest: &DockerManifest) -> Result<Image, OciError> {
    let config = files.read("the image's configuration", manifest.config.as_bytes())?;
    let configuration = Configuration::parse(&config)?;
    let layers = manifest.layers.iter().map(|path| (path.clone().into_bytes(), None));
    image(files, configuration, layers.collect())
}

fn image(
    files: Files,
    configuration: Configuration,
    layers: Vec<(Vec<u8>, Option<String>)>,
) -> Result<Image, OciError> {
    let Configuration { settings, diff_ids } = configuration;
    if layers.len() != diff_ids.len() {
        let reason = format!("it has {} layers, its manifest {}", diff_ids.len(), layers.len());
        return Err(OciError::document("the image's configuration", reason));
    }
    let with_id = |((path, digest), diff_id)| LayerFile { path, digest, diff_id };
    let layers = layers.into_iter().zip(diff_ids).map(with_id).collect();
    Ok(Image { files, settings, layers })
}

fn blob_path(digest: &Digest) -> Vec<u8> {
    format!("blobs/{}/{}", digest.algorithm(), digest.digest()).into_bytes()
}

impl Files {
    fn archive(path: &Path) -> Result<Self, OciError> {
        let unreadable = |error| OciError::file("read", path, error);
        let not_an_image = |reason: &dyn std::fmt::Display| OciError::NotAnImage {
            path: path.to_owned(),
            reason: reason.to_string(),
        };
        let file = File::open(path).map_err(unreadable)?;
        if !file.metadata().map_err(unreadable)?.is_file() {
            return Err(not_an_image(&"it is neither a file nor a directory"));
        }
        let mut members = HashMap::new();
        // Long names and extended headers are read as a whole.
        let allowance = Allowance::new(HEADERS_MAX);
        let mut archive = Archive::new(Metered::new(&file, allowance.clone()));
        let entries = archive.entries_with_seek().map_err(unreadable)?;
        for entry in entries {
            // It quotes the bytes that are no header.
            let entry =
                entry.map_err(|error| not_an_image(&escaped(error.to_string().as_bytes())))?;
            allowance.set(HEADERS_MAX);
            let start = entry.raw_file_position();
            if entry.header().entry_type().is_file() {
                let name = entry.path_bytes();
                let name = name.strip_prefix(b"./").unwrap_or(&name).to_vec();
                members.insert(name, start..start.saturating_add(entry.size()));
            }
            if members.len() > MEMBERS_MAX {
                return Err(OciError::TooLarge { limit: MEMBERS_MAX as u64, what: "files" });
            }
        }
        Ok(Self::Archive { file, path: path.to_owned(), members })
    }

    fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::Archive { path, .. } => path,
        }
    }

    /// What the layout lists.
    fn images(&self) -> Result<Vec<Found>, OciError> {
        if self.has(b"index.json") {
            let index: ImageIndex = parse("index.json", &self.read("index.json", b"index.json")?)?;
            let found = index.manifests().iter().map(|descriptor| {
                let name = descriptor.annotations().as_ref().and_then(|all| all.get(REF_NAME));
                let tags = name.into_iter().cloned().collect();
                Found { tags, manifest: Document::Described(Box::new(descriptor.clone())) }
            });
            return Ok(found.collect());
        }
        if self.has(b"manifest.json") {
            let manifests: Vec<DockerManifest> =
                parse("manifest.json", &self.read("manifest.json", b"manifest.json")?)?;
            let found = manifests.into_iter().map(|manifest| Found {
                tags: manifest.tags.clone().unwrap_or_default(),
                manifest: Document::Docker(manifest),
            });
            return Ok(found.collect());
        }
        Err(OciError::NotAnImage {
            path: self.path().to_owned(),
            reason: "it has neither index.json nor manifest.json".to_owned(),
        })
    }

    /// The manifest for linux/amd64, where there are several.
    fn for_this_machine(
        &self,
        descriptor: Descriptor,
        nested: usize,
    ) -> Result<Descriptor, OciError> {
        let is_index = matches!(descriptor.media_type(), MediaType::ImageIndex)
            || descriptor.media_type().to_string().ends_with("manifest.list.v2+json");
        if !is_index {
            return Ok(descriptor);
        }
        if nested == NESTED_MAX {
            return Err(OciError::document("the image's index", "it is nested too deeply"));
        }
        let index: ImageIndex = self.document("the image's index", &descriptor)?;
        let fits = |descriptor: &&Descriptor| {
            descriptor.platform().as_ref().is_none_or(|platform| {
                *platform.os() == Os::Linux && *platform.architecture() == Arch::Amd64
            })
        };
        match index.manifests().iter().find(fits) {
            Some(found) => self.for_this_machine(found.clone(), nested + 1),
            None => {
                let platforms = index.manifests().iter().filter_map(|one| one.platform().as_ref());
                let text = |platform: &oci_spec::image::Platform| {
                    format!("{}/{}", platform.os(), platform.architecture())
                };
                let has = platforms.map(text).collect::<Vec<_>>().join(", ");
                Err(OciError::Platform { has: escaped(has.as_bytes()) })
            }
        }
    }

    fn document<T: DeserializeOwned>(
        &self,
        what: &str,
        descriptor: &Descriptor,
    ) -> Result<T, OciError> {
        parse(what, &self.described(what, descriptor)?)
    }

    /// A document, verified.
    fn described(&self, what: &str, descriptor: &Descriptor) -> Result<Vec<u8>, OciError> {
        let bytes = self.read(what, &blob_path(descriptor.digest()))?;
        check_digest(what, Some(descriptor.digest().as_ref()), &digest(&bytes))?;
        Ok(bytes)
    }

    fn read(&self, what: &str, path: &[u8]) -> Result<Vec<u8>, OciError> {
        let mut bytes = Vec::new();
        let source = self.open(path)?;
        let read = source.take(DOCUMENT_MAX + 1).read_to_end(&mut bytes);
        read.map_err(|error| OciError::document(what, error))?;
        match bytes.len() as u64 > DOCUMENT_MAX {
            true => Err(OciError::document(what, "it is longer than 4 MiB")),
            false => Ok(bytes),
        }
    }

    fn has(&self, path: &[u8]) -> bool {
        match self {
            Self::Directory(directory) => {
                directory.join(std::ffi::OsStr::from_bytes(path)).is_file()
            }
            Self::Archive { members, .. } => members.contains_key(path),
        }
    }

    /// A file of the layout. Its path comes from the image, so it must lie below the directory.
    fn open<'a>(&'a self, path: &[u8]) -> Result<Box<dyn Read + 'a>, OciError> {
        let named = || self.path().join(escaped(path));
        let missing = || OciError::file("read", named(), io::Error::from(io::ErrorKind::NotFound));
        match self {
            Self::Directory(directory) => {
                let below = Path::new(std::ffi::OsStr::from_bytes(path));
                let is_plain = |part| matches!(part, std::path::Component::Normal(_));
                if !below.components().all(is_plain) {
                    return Err(missing());
                }
                let file = open_beneath(directory, below);
                Ok(Box::new(file.map_err(|error| OciError::file("read", named(), error))?))
            }
            Self::Archive { file, members, .. } => {
                let range = members.get(path).ok_or_else(missing)?.clone();
                Ok(Box::new(Part { file, range }))
            }
        }
    }
}

fn parse<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, OciError> {
    serde_json::from_slice(bytes).map_err(|error| OciError::document(what, error))
}

/// Opens a regular file below a directory, never through a symbolic link.
fn open_beneath(directory: &Path, path: &Path) -> io::Result<File> {
    let root = File::open(directory)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let file = File::from(openat2(root, path, flags, Mode::empty(), resolve)?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// A part of a file.
struct Part<'a> {
    file: &'a File,
    range: Range<u64>,
}

impl Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.range.end.saturating_sub(self.range.start);
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let count = self.file.read_at(&mut buffer[..most], self.range.start)?;
        self.range.start += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_may_be_given_short() {
        for wanted in ["docker.io/library/a:1", "a:1", "library/a:1", "1"] {
            assert!(is_tagged("docker.io/library/a:1", wanted), "{wanted}");
        }
        assert!(!is_tagged("docker.io/library/a:11", "1") && !is_tagged("a:1", ":1"));
    }
}
