//! Bundles of cosign in registries of both kinds: with a list of what refers to a manifest, and without.

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thaw_oci::{Limits, Pull, Reference, Registries};
use thaw_store::Owner;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const BUNDLE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
/// What `sha256:` of the signed manifest is.
const SIGNED: &str = "9509672b26279027200e192b5dd4e55e7658e5a8f2808f632b57e41de48022c3";

/// What a registry has, by path.
type Contents = BTreeMap<String, Vec<u8>>;

fn made_by_cosign(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cosign").join(name)
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// A registry with a manifest and nothing that this names.
fn registry() -> Contents {
    let manifest = fs::read(made_by_cosign("manifest.json")).unwrap();
    assert_eq!(digest(&manifest), format!("sha256:{SIGNED}"));
    Contents::from([("/v2/a/manifests/1".to_owned(), manifest)])
}

/// Adds a manifest with a bundle; its descriptor, as `cosign` has it in an index.
fn add_bundle(contents: &mut Contents, bundle: &[u8]) -> Value {
    let layer = json!({ "mediaType": BUNDLE, "size": bundle.len(), "digest": digest(bundle) });
    contents.insert(format!("/v2/a/blobs/{}", digest(bundle)), bundle.to_vec());
    let empty = "application/vnd.oci.empty.v1+json";
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": BUNDLE,
        "config": { "mediaType": empty, "size": 2, "digest": digest(b"{}") },
        "layers": [layer],
    });
    let manifest = manifest.to_string().into_bytes();
    let (size, digest) = (manifest.len(), digest(&manifest));
    contents.insert(format!("/v2/a/manifests/{digest}"), manifest);
    json!({ "mediaType": MANIFEST, "size": size, "digest": digest, "artifactType": empty })
}

fn index(manifests: &[Value]) -> Vec<u8> {
    let kind = "application/vnd.oci.image.index.v1+json";
    json!({ "schemaVersion": 2, "mediaType": kind, "manifests": manifests })
        .to_string()
        .into_bytes()
}

/// Where the contents have the header `Link` of the answer for a path.
fn link_of(path: &str) -> String {
    format!("link of {path}")
}

fn answer(client: TcpStream, contents: &Contents) {
    let mut lines = BufReader::new(&client).lines();
    let first = lines.next().unwrap().unwrap();
    lines.map_while(Result::ok).find(String::is_empty);
    let path = first.split(' ').nth(1).unwrap();
    let empty = Vec::new();
    let (status, body) = match (path, contents.get(path)) {
        ("/v2/", _) => ("200 OK", &empty),
        (_, Some(body)) => ("200 OK", body),
        (_, None) => ("404 Not Found", &empty),
    };
    let link = contents.get(&link_of(path)).map(|link| String::from_utf8_lossy(link));
    let link = link.map_or_else(String::new, |link| format!("Link: {link}\r\n"));
    let len = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\n{link}Content-Length: {len}\r\nConnection: close\r\n\r\n");
    let _ = (&client).write_all(&[head.as_bytes(), body].concat());
}

/// Why a pull fails of which nothing but the manifest is there.
fn pull(contents: Contents) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let contents = Arc::new(contents);
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let contents = contents.clone();
            std::thread::spawn(move || answer(client, &contents));
        }
    });
    let directory = tempfile::tempdir().unwrap();
    let settings = directory.path().join("registries.toml");
    let key = made_by_cosign("cosign.pub");
    let text =
        format!("[[registry]]\nhost = \"127.0.0.1:{port}\"\nhttp = true\nverify_key = {key:?}\n");
    fs::write(&settings, text).unwrap();
    let registries = &Registries::read(&settings).unwrap();
    let reference: &Reference = &format!("127.0.0.1:{port}/a:1").parse().unwrap();
    let (owner, limits, directory) = (Owner::Caller, Limits::default(), directory.path());
    let pull = Pull { reference, registries, directory, owner, limits };
    pull.run(None, &mut |_| {}).unwrap_err().to_string()
}

#[test]
fn a_bundle_counts_wherever_the_registry_lists_it() {
    let bundle = fs::read(made_by_cosign("bundle.json")).unwrap();
    for place in ["referrers/sha256:", "manifests/sha256-"] {
        let mut contents = registry();
        let good = add_bundle(&mut contents, &bundle);
        contents.insert(format!("/v2/a/{place}{SIGNED}"), index(&[good]));
        let why = pull(contents);
        assert!(!why.contains("verify_key"), "{place}: {why}");
    }
    assert!(pull(registry()).contains("it has no signature"));
}

#[test]
fn a_bundle_is_found_among_others_and_none_of_them_counts_in_its_place() {
    let bundle = fs::read(made_by_cosign("bundle.json")).unwrap();
    let other = String::from_utf8(bundle.clone()).unwrap().replace("sig\":\"ME", "sig\":\"MF");
    let mut contents = registry();
    let about = |mut descriptor: Value, what: &str| {
        descriptor["annotations"] = json!({ "dev.sigstore.bundle.predicateType": what });
        descriptor
    };
    let list = about(add_bundle(&mut contents, b"{}"), "https://spdx.dev/Document");
    let broken = add_bundle(&mut contents, b"nonsense");
    let forged = add_bundle(&mut contents, other.as_bytes());
    let long = add_bundle(&mut contents, &[b' '; 300 << 10]);
    let gone = json!({ "mediaType": MANIFEST, "size": 2, "digest": digest(b"gone") });
    let mut all = vec![long, gone, broken, forged];
    all.resize(40, list);
    let referrers = format!("/v2/a/referrers/sha256:{SIGNED}");
    contents.insert(referrers.clone(), index(&all));
    let refused = pull(contents.clone());
    assert!(refused.contains("verify_key") && refused.contains("another key's"), "{refused}");
    let good = add_bundle(&mut contents, &bundle);
    all.push(good.clone());
    contents.insert(referrers.clone(), index(&all));
    let why = pull(contents.clone());
    assert!(!why.contains("verify_key"), "{why}");
    // One that says what it is comes first, however many do not.
    let mut many = vec![add_bundle(&mut contents, other.as_bytes()); 100];
    many.push(about(good, "https://sigstore.dev/cosign/sign/v1"));
    contents.insert(referrers.clone(), index(&many));
    let why = pull(contents.clone());
    assert!(!why.contains("verify_key"), "{why}");
    contents.insert(referrers.clone(), b"[]".to_vec());
    assert!(pull(contents.clone()).contains("makes no sense"));
    // Neither what cannot be read of the other form, nor a page for people, hides it.
    let tag = format!("/v2/a/manifests/sha256-{SIGNED}");
    contents.insert(referrers, b"<html>".to_vec());
    contents.insert(format!("{tag}.sig"), b"nonsense".to_vec());
    let senseless = json!({ "mediaType": MANIFEST, "size": 2, "digest": "nonsense" });
    contents.insert(tag.clone(), index(&[senseless, add_bundle(&mut contents.clone(), &bundle)]));
    assert!(!pull(contents.clone()).contains("verify_key"));
    contents.remove(&tag);
    assert!(pull(contents).contains("the manifest of signatures"));
}

#[test]
fn a_bundle_is_found_on_a_later_page_of_the_list() {
    let bundle = fs::read(made_by_cosign("bundle.json")).unwrap();
    let mut contents = registry();
    let good = add_bundle(&mut contents, &bundle);
    let first = format!("/v2/a/referrers/sha256:{SIGNED}");
    let page = |number: u32| format!("{first}?page={number}");
    contents.insert(first.clone(), index(&[]));
    let to_second = format!("<{first}?page=0>; rel=\"prev\", <{}>; rel=\"next\"", page(2));
    contents.insert(link_of(&first), to_second.into_bytes());
    contents.insert(page(2), index(&[]));
    // An address may be relative, too.
    let to_third = b"<?page=3>;title=\"a\";rel=next".to_vec();
    contents.insert(link_of(&page(2)), to_third);
    contents.insert(page(3), index(std::slice::from_ref(&good)));
    let why = pull(contents.clone());
    assert!(!why.contains("verify_key"), "{why}");
    // Nobody else is asked, who would get the name and password.
    let elsewhere = b"<http://127.0.0.1:9/v2/a/more>; rel=\"next\"".to_vec();
    contents.insert(link_of(&page(2)), elsewhere);
    let why = pull(contents.clone());
    assert!(why.contains("goes on at another place"), "{why}");
    // What is known may be enough.
    contents.insert(page(2), index(&[good]));
    let why = pull(contents.clone());
    assert!(!why.contains("verify_key"), "{why}");
    contents.insert(page(2), index(&[]));
    // A list without an end has one here.
    let to_itself = format!("<{}>; rel=\"next\"", page(2));
    contents.insert(link_of(&page(2)), to_itself.into_bytes());
    let why = pull(contents);
    assert!(why.contains("it has no signature"), "{why}");
}
