//! Artifacts that nobody would push who means well: a good one, changed.

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::io::Read;
use thaw_e2e::Registry;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// A function in a registry, whose parts can be changed.
#[derive(Clone)]
pub struct Crafted<'a> {
    registry: &'a Registry,
    repository: &'static str,
    pub manifest: Value,
    pub document: Value,
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

impl<'a> Crafted<'a> {
    /// Reads what was pushed as `repository:tag`.
    pub fn read(registry: &'a Registry, repository: &'static str, tag: &str) -> Self {
        let mut crafted =
            Self { registry, repository, manifest: Value::Null, document: Value::Null };
        let manifest = crafted.get(&format!("manifests/{tag}"));
        crafted.manifest = serde_json::from_slice(&manifest).expect("a manifest");
        let config = crafted.manifest["config"]["digest"].as_str().expect("a digest");
        crafted.document = serde_json::from_slice(&crafted.blob(config)).expect("a document");
        crafted
    }

    /// A manifest of signatures, by the digest of what they sign.
    pub fn read_manifest(registry: &'a Registry, repository: &'static str, tag: &str) -> Value {
        let (manifest, document) = (Value::Null, Value::Null);
        let crafted = Self { registry, repository, manifest, document };
        serde_json::from_slice(&crafted.get(&format!("manifests/{tag}.sig"))).expect("a manifest")
    }

    /// A blob of a repository.
    pub fn blob_of(registry: &'a Registry, repository: &'static str, digest: &str) -> Vec<u8> {
        let (manifest, document) = (Value::Null, Value::Null);
        Self { registry, repository, manifest, document }.blob(digest)
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}/v2/{}/{path}", self.registry.address(), self.repository)
    }

    fn get(&self, path: &str) -> Vec<u8> {
        let answer = ureq::get(self.url(path)).header("Accept", MANIFEST).call();
        let mut bytes = Vec::new();
        let mut answer = answer.expect("an answer").into_body();
        answer.as_reader().read_to_end(&mut bytes).expect("all of it");
        bytes
    }

    pub fn blob(&self, digest: &str) -> Vec<u8> {
        self.get(&format!("blobs/{digest}"))
    }

    /// Stores a blob; its descriptor, of this kind.
    fn put_blob(&self, kind: &str, bytes: &[u8]) -> Value {
        let begun = ureq::post(self.url("blobs/uploads/")).send_empty().expect("an upload");
        let place = begun.headers()["location"].to_str().expect("a place").to_owned();
        let digest = digest(bytes);
        let put = ureq::put(format!("{place}&digest={digest}"));
        put.header("Content-Type", "application/octet-stream").send(bytes).expect("a blob");
        json!({ "mediaType": kind, "digest": digest, "size": bytes.len() })
    }

    /// The numbers of the pieces of a section.
    pub fn pieces(&self, section: &str) -> Vec<usize> {
        let layers = self.manifest["layers"].as_array().expect("layers");
        let is_of = |layer: &Value| layer["mediaType"].as_str().expect("a kind").contains(section);
        (0..layers.len()).filter(|&number| is_of(&layers[number])).collect()
    }

    /// What a piece holds.
    pub fn piece(&self, number: usize) -> Vec<u8> {
        let digest = self.manifest["layers"][number]["digest"].as_str().expect("a digest");
        zstd::decode_all(&self.blob(digest)[..]).expect("a piece")
    }

    /// Replaces a piece, as it travels.
    pub fn replace_packed(&mut self, number: usize, packed: &[u8]) {
        let kind =
            self.manifest["layers"][number]["mediaType"].as_str().expect("a kind").to_owned();
        self.manifest["layers"][number] = self.put_blob(&kind, packed);
    }

    /// Replaces what a piece holds.
    pub fn replace(&mut self, number: usize, piece: &[u8]) {
        self.replace_packed(number, &zstd::encode_all(piece, 1).expect("a piece"));
    }

    pub fn layers(&mut self) -> &mut Vec<Value> {
        self.manifest["layers"].as_array_mut().expect("layers")
    }

    /// Pushes it under another tag; its reference.
    pub fn push(&self, tag: &str) -> String {
        let mut manifest = self.manifest.clone();
        let kind = manifest["config"]["mediaType"].as_str().expect("a kind").to_owned();
        manifest["config"] = self.put_blob(&kind, self.document.to_string().as_bytes());
        let put = ureq::put(self.url(&format!("manifests/{tag}")));
        put.header("Content-Type", MANIFEST).send(manifest.to_string()).expect("a manifest");
        self.registry.image(&format!("{}:{tag}", self.repository))
    }
}
