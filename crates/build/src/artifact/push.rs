//! Pushing a function of the store.

use super::ArtifactError;
use super::accept::has_files;
use super::run::run_of;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::PathBuf;
use thaw_home::config::RuntimeConfig;
use thaw_home::function::{BuiltFunction, StoredFunction};
use thaw_home::home::Home;
use thaw_oci::artifact::{
    Cutter, DOCUMENT_VERSION, FunctionDocument, ImagePart, IndexPart, Naming, NamingRun, PIECE_MAX,
    PieceTable, Section,
};
use thaw_oci::{
    OciError, Push, PushProgress, PushReport, Reference, Registries, SigningKey, Upload,
};
use thaw_sandbox::Image;
use thaw_store::{Blob, Domain, KernelId, Name, OpenIndex, Store, StoreError};

/// Bytes that are read at once.
const CHUNK: usize = 1 << 20;

/// What was pushed.
#[derive(Clone, Debug)]
pub struct Pushed {
    /// What the registry got.
    pub report: PushReport,
    /// Sentences for whoever pushed it.
    pub notes: Vec<String>,
}

/// Is told how far it is.
pub type OnProgress<'a> = dyn FnMut(PushProgress) + 'a;

/// Pushes a function to a registry, as `registries.toml` of the home says, and signs it if there is
/// a key.
///
/// # Errors
/// There is no such function, a part of it is damaged, or the registry refuses.
pub fn push(
    home: &Home,
    name: &str,
    reference: &Reference,
    key: Option<&SigningKey>,
    progress: &mut OnProgress<'_>,
) -> Result<Pushed, ArtifactError> {
    let store = Store::open(&home.store())?;
    let function = BuiltFunction::read(&store, name)?;
    // What is open is not collected.
    let index = store.open_index(function.index)?;
    let image = open_whole(&store, &function)?;
    let mut notes = Vec::new();
    let build = KernelId(image.header().kernel_build);
    let kernel = match store.kernel(build) {
        Ok(elf) => Some(elf),
        Err(error) if error.is_not_found() => {
            notes.push(
                "its kernel build is not in the store: where that is not known, it is frozen anew"
                    .to_owned(),
            );
            None
        }
        Err(error) => return Err(error.into()),
    };
    if has_files(&function.function) {
        notes.push(
            "bodies of its training requests are files, which do not come along: elsewhere it cannot be \
             frozen anew"
                .to_owned(),
        );
    }
    let registries = Registries::read(&home.registries())?;
    let mounts = home.mounts()?;
    let upload = Push { reference, registries: &registries, mounts: &mounts }.begin()?;
    let mut sender =
        Sender { upload, cutter: Cutter::default(), progress, table: PieceTable::default() };
    let naming = sender.files(&store, &index, &function.function)?;
    sender.section(Section::Image, image.file())?;
    if let Some(elf) = &kernel {
        sender.bytes(Section::Kernel, elf)?;
    }
    let (working_set, run) = run_of(&store, &function, &image, &index)?;
    if let Some(set) = working_set.map(|set| set.to_bytes()).filter(|set| set.len() <= PIECE_MAX) {
        sender.bytes(Section::WorkingSet, &set)?;
    }
    match &run {
        Some(run) => sender.whole(Section::Run, &run.bytes)?,
        None => notes.push(
            "it cannot be booted before all of it is pulled: it is of several processes, or touches too much"
                .to_owned(),
        ),
    }
    let document = FunctionDocument {
        version: DOCUMENT_VERSION,
        name: Name::new(function.function.config.name.as_str()).map_err(StoreError::from)?,
        function: without_source(&function.function),
        index: IndexPart {
            id: function.index,
            size: index.file_len(),
            contents: index.index().blobs().iter().map(|blob| blob.size).sum(),
            naming,
        },
        image: ImagePart {
            id: function.image,
            size: image.header().file_len,
            kernel: build,
            cpu_features: image.header().cpu_features,
        },
        kernel: kernel.map(|elf| elf.len() as u64),
        run: run.map(|run| run.part),
        pieces: Some(std::mem::take(&mut sender.table)),
    };
    let _acting = home.act()?;
    let report = sender.upload.finish(&document, key)?;
    Ok(Pushed { report, notes })
}

/// Opens the image of a function, and checks that it is what was once frozen.
fn open_whole(store: &Store, function: &BuiltFunction) -> Result<Image, ArtifactError> {
    let ancestors = store.image_ancestors(function.image)?;
    if !ancestors.is_empty() {
        return Err(ArtifactError::Unfit {
            name: function.function.config.name.to_string(),
            reason: "its image holds only how it differs from others; build it anew".to_owned(),
        });
    }
    Ok(Image::open(store.open_image(function.image)?)?)
}

/// In place of the root file system that a function was built over.
const PUSHED_ROOTFS: &str = "pushed";

/// How it was built, with paths of this host, is none of anybody's business: its files are there.
fn without_source(function: &StoredFunction) -> serde_json::Value {
    let mut function = StoredFunction { source: PathBuf::new(), origin: None, ..function.clone() };
    let config = &mut function.config;
    config.build = None;
    config.files.clear();
    config.rootfs = config.rootfs.take().map(|_| PUSHED_ROOTFS.to_owned());
    if let Some(runtime) = &mut config.runtime {
        let (kind, image) = (runtime.kind, runtime.image.take());
        *runtime = RuntimeConfig {
            kind,
            image,
            include: Vec::new(),
            programs: Vec::new(),
            interpreter: None,
            requirements: None,
            packages: None,
        };
    }
    serde_json::to_value(function).expect("a function is plain data")
}

/// Cuts sections and sends their pieces.
struct Sender<'a, 'p> {
    upload: Upload,
    cutter: Cutter,
    progress: &'a mut OnProgress<'p>,
    /// Where pieces were cut.
    table: PieceTable,
}

/// Who may have named a content.
struct Candidates {
    own: Option<Domain>,
    private: Domain,
    name: Name,
}

impl Sender<'_, '_> {
    /// Sends what `cut` makes of the section.
    fn cut(
        &mut self,
        section: Section,
        cut: impl FnOnce(
            &mut Cutter,
            &mut dyn FnMut(Vec<u8>) -> Result<(), OciError>,
        ) -> Result<(), OciError>,
    ) -> Result<(), OciError> {
        let Self { upload, cutter, progress, table } = self;
        cut(cutter, &mut |piece| {
            match section {
                Section::Files => table.files.push(piece.len() as u32),
                Section::Image => table.image.push(piece.len() as u32),
                Section::Kernel | Section::WorkingSet | Section::Run => {}
            }
            progress(upload.piece(section, &piece)?);
            Ok(())
        })
    }

    /// Sends something in one piece.
    fn whole(&mut self, section: Section, piece: &[u8]) -> Result<(), ArtifactError> {
        (self.progress)(self.upload.piece(section, piece)?);
        Ok(())
    }

    fn bytes(&mut self, section: Section, bytes: &[u8]) -> Result<(), ArtifactError> {
        self.cut(section, |cutter, done| {
            cutter.add(bytes, done)?;
            cutter.cut(done)
        })?;
        Ok(())
    }

    /// A whole file, from its beginning.
    fn section(&mut self, section: Section, file: &File) -> Result<(), ArtifactError> {
        let mut file = file;
        file.rewind().map_err(StoreError::Source)?;
        self.copy(section, &mut file)?;
        self.cut(section, |cutter, done| cutter.cut(done))?;
        Ok(())
    }

    fn copy(&mut self, section: Section, source: &mut dyn Read) -> Result<(), ArtifactError> {
        let mut chunk = Vec::with_capacity(CHUNK);
        loop {
            chunk.clear();
            source.take(CHUNK as u64).read_to_end(&mut chunk).map_err(StoreError::Source)?;
            if chunk.is_empty() {
                return Ok(());
            }
            self.cut(section, |cutter, done| cutter.add(&chunk, done))?;
        }
    }

    /// The index and the contents of all files. Returns by whose names they are named.
    fn files(
        &mut self,
        store: &Store,
        index: &OpenIndex,
        function: &StoredFunction,
    ) -> Result<Vec<NamingRun>, ArtifactError> {
        self.section(Section::Files, index.file())?;
        let candidates = Candidates::of(function)?;
        let mut runs: Vec<NamingRun> = Vec::new();
        for blob in index.index().blobs() {
            let blob = Blob { hash: blob.hash.into(), size: blob.size };
            let naming = self.content(store, blob, &candidates)?;
            match runs.last_mut() {
                Some(run) if run.naming == naming => run.count += 1,
                _ => runs.push(NamingRun { naming, count: 1 }),
            }
        }
        self.cut(Section::Files, |cutter, done| cutter.cut(done))?;
        Ok(runs)
    }

    fn content(
        &mut self,
        store: &Store,
        blob: Blob,
        candidates: &Candidates,
    ) -> Result<Naming, ArtifactError> {
        self.cut(Section::Files, |cutter, done| cutter.begin_file(blob.size, done))?;
        let own = candidates.own.as_ref().unwrap_or(&candidates.private);
        let file = store.open_blob(blob.hash)?;
        let mut read = Domain::shared().naming(own.naming(candidates.private.naming(file)));
        self.copy(Section::Files, &mut read)?;
        let shared = read.blob();
        self.cut(Section::Files, |cutter, done| {
            cutter.end_file(blob.size, shared.hash.as_bytes(), done)
        })?;
        let name = || candidates.name.clone();
        if shared == blob {
            Ok(Naming::Shared)
        } else if read.source().source().blob() == blob {
            Ok(Naming::Private(name()))
        } else if let Some(domain) = candidates.own.as_ref().and_then(Domain::name)
            && read.source().blob() == blob
        {
            Ok(Naming::Domain(domain.clone()))
        } else {
            let reason = format!(
                "its content {} is damaged, or of a sharing domain that is not the function's; build it anew",
                blob.hash
            );
            Err(ArtifactError::Unfit { name: candidates.name.to_string(), reason })
        }
    }
}

impl Candidates {
    fn of(function: &StoredFunction) -> Result<Self, ArtifactError> {
        let config = &function.config;
        let domain = config.domain();
        Ok(Self {
            own: domain.name().is_some().then_some(domain),
            private: config.private_domain(),
            name: Name::new(config.name.as_str()).map_err(StoreError::from)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_function_was_built_is_not_told() {
        let function = serde_json::json!({
            "config": {
                "name": "shop", "command": ["/srv/shop"], "port": 80,
                "files": [{ "from": "alice/secret", "to": "/srv" }],
                "runtime": { "kind": "binary", "include": ["/home/alice/x"], "programs": ["/home/alice/y"] },
            },
            "environment": {},
            "source": "/home/alice/shop",
        });
        let function: StoredFunction = serde_json::from_value(function).unwrap();
        let told = without_source(&function);
        assert!(!told.to_string().contains("alice"), "{told}");
        let back: StoredFunction = serde_json::from_value(told).unwrap();
        back.config.check().unwrap();
    }
}
