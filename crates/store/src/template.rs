//! Runtime templates: images of interpreters that have not seen a program, from which
//! functions are built that store only how they differ.
//!
//! Nobody asks for a template by its record: it is there to be found again by whoever would
//! make the same one. So it is kept as long as an image refers to its image, and is collected
//! with the last of them.

use serde::{Deserialize, Serialize};

use crate::error::{Kind, Result, StoreError};
use crate::function::{RECORD_VERSION, check_record, names, now_ms, read_record, to_json};
use crate::id::{ImageId, IndexId, Name};
use crate::session::Session;
use crate::stage::{Existing, RECORD_MODE};
use crate::store::Store;

/// What the store knows about a runtime template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TemplateRecord {
    /// [`RECORD_VERSION`]; another one is refused.
    version: u32,
    /// Its name, which says what it was made of.
    pub name: Name,
    /// What it was made of, of which the store understands nothing.
    pub config: serde_json::Value,
    /// The root file system that those of its functions extend.
    pub index: IndexId,
    /// Its image.
    pub image: ImageId,
    /// When this record was written, milliseconds since the epoch.
    pub created_ms: u64,
}

impl TemplateRecord {
    /// The name of a template of a language that is made of these: equal for equal ones only.
    pub fn name_of(language: &str, made_of: &[&[u8]]) -> Name {
        let mut hasher = blake3::Hasher::new();
        for part in made_of {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        let hash = hasher.finalize().to_hex();
        Name::new(&format!("{language}-{}", &hash[..24])).expect("a language and digits are a name")
    }
}

impl Session {
    /// Stores a template, in the place of one of the same name.
    ///
    /// # Errors
    /// The index or the image, or one of its ancestors, is not there.
    pub fn put_template(
        &mut self,
        name: &Name,
        config: serde_json::Value,
        index: IndexId,
        image: ImageId,
    ) -> Result<TemplateRecord> {
        let _acting = self.layout.act()?;
        drop(self.open_index(index)?);
        drop(self.open_image(image)?);
        let record = TemplateRecord {
            version: RECORD_VERSION,
            name: name.clone(),
            config,
            index,
            image,
            created_ms: now_ms(),
        };
        let to = self.layout.template(name);
        self.write_record_as(&to, &[&to_json(&record)], Existing::Replace, RECORD_MODE)?;
        Ok(record)
    }
}

impl Store {
    /// The record of a template.
    ///
    /// # Errors
    /// There is none of that name, or it is damaged.
    pub fn get_template(&self, name: &Name) -> Result<TemplateRecord> {
        let _acting = self.layout.act()?;
        let path = self.layout.template(name);
        let read = read_record(&path, Kind::Template, name);
        let record: TemplateRecord = read.map_err(|error| match error {
            // It is made again, as one that is damaged.
            StoreError::LaterRecord { .. } => StoreError::damaged(Kind::Template, name, error),
            error => error,
        })?;
        check_record(record.version, &record.name, Kind::Template, name)?;
        Ok(record)
    }

    /// All templates; those whose records are damaged are left out, since they can be made
    /// again.
    pub fn list_templates(&self) -> Result<Vec<TemplateRecord>> {
        let _acting = self.layout.act()?;
        let mut found = Vec::new();
        for name in names(&self.layout.templates())? {
            match self.get_template(&name) {
                Ok(record) => found.push(record),
                Err(StoreError::NotFound { .. } | StoreError::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }
}
