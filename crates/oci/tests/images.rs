//! Images as their makers write them, and as somebody would who wants to do harm.

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;
use thaw_oci::{Layout, Limits, OciError, Unpacked};
use thaw_store::index::Content;
use thaw_store::{Domain, Store};

/// A place for a layout and a store.
struct Bench {
    directory: TempDir,
    blobs: BTreeMap<String, Vec<u8>>,
}

/// How a layer is packed.
#[derive(Clone, Copy)]
enum Packing {
    Plain,
    Gzip,
    Zstd,
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

fn packed(plain: &[u8], packing: Packing) -> Vec<u8> {
    match packing {
        Packing::Plain => plain.to_vec(),
        Packing::Zstd => zstd::encode_all(plain, 1).unwrap(),
        Packing::Gzip => {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gzip.write_all(plain).unwrap();
            gzip.finish().unwrap()
        }
    }
}

/// One entry of a layer.
fn entry(builder: &mut Builder<Vec<u8>>, name: &str, kind: EntryType, mode: u32, data: &[u8]) {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(7);
    header.set_gid(8);
    header.set_mtime(1_700_000_000);
    header.set_size(data.len() as u64);
    // The library refuses what a hostile tool writes.
    let field = &mut header.as_old_mut().name;
    field[..name.len()].copy_from_slice(name.as_bytes());
    header.set_cksum();
    builder.append(&header, data).unwrap();
}

fn link(builder: &mut Builder<Vec<u8>>, name: &str, kind: EntryType, target: &str) {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o777);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
    header.set_cksum();
    builder.append(&header, &[][..]).unwrap();
}

fn layer(entries: impl FnOnce(&mut Builder<Vec<u8>>)) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    entries(&mut builder);
    builder.into_inner().unwrap()
}

impl Bench {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), blobs: BTreeMap::new() }
    }

    fn layout(&self) -> PathBuf {
        self.directory.path().join("layout")
    }

    fn blob(&mut self, bytes: &[u8]) -> (String, usize) {
        let name = digest(bytes);
        self.blobs.insert(name.clone(), bytes.to_vec());
        (name, bytes.len())
    }

    /// Writes an OCI layout with these layers, plain and packed.
    fn write(&mut self, layers: &[(Vec<u8>, Packing)]) {
        let diff_ids: Vec<_> = layers.iter().map(|(plain, _)| digest(plain)).collect();
        let config = serde_json::json!({
            "architecture": "amd64", "os": "linux", "config": { "Cmd": ["/bin/x"] },
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        let (config, config_size) = self.blob(config.to_string().as_bytes());
        let layers: Vec<_> = layers.iter().map(|(plain, packing)| {
            let (digest, size) = self.blob(&packed(plain, *packing));
            serde_json::json!({
                "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest, "size": size,
            })
        }).collect();
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": config, "size": config_size,
            },
            "layers": layers,
        });
        let (manifest, size) = self.blob(manifest.to_string().as_bytes());
        let index = serde_json::json!({
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": manifest, "size": size,
                "annotations": { "org.opencontainers.image.ref.name": "one" },
            }],
        });
        let blobs = self.layout().join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        for (name, bytes) in &self.blobs {
            fs::write(blobs.join(&name["sha256:".len()..]), bytes).unwrap();
        }
        fs::write(self.layout().join("index.json"), index.to_string()).unwrap();
        fs::write(self.layout().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    }

    fn unpack_from(&self, path: &Path, limits: Limits) -> Result<Unpacked, OciError> {
        let store = Store::open(&self.directory.path().join("store")).unwrap();
        let mut session = store.session().unwrap();
        let image = Layout::open(path)?.image(None)?;
        let unpacked = image.unpack(&mut session, &Domain::shared(), limits, &mut |_| {})?;
        session.put_index(&unpacked.tree).unwrap();
        Ok(unpacked)
    }

    fn unpack(&self) -> Result<Unpacked, OciError> {
        self.unpack_from(&self.layout(), Limits::default())
    }

    /// The refusal of an image of one layer.
    #[track_caller]
    fn refusal(entries: impl FnOnce(&mut Builder<Vec<u8>>), limits: Limits) -> String {
        let mut bench = Self::new();
        bench.write(&[(layer(entries), Packing::Gzip)]);
        let unpacked = bench.unpack_from(&bench.layout(), limits);
        let message = unpacked.expect_err("a refusal").to_string();
        let store = Store::open(&bench.directory.path().join("store")).unwrap();
        assert!(store.list_rootfs().unwrap().is_empty());
        message
    }
}

fn sample() -> Vec<(Vec<u8>, Packing)> {
    let first = layer(|tar| {
        entry(tar, "./", EntryType::Directory, 0o755, b"");
        entry(tar, "./bin/su", EntryType::Regular, 0o4755, b"program");
        entry(tar, "./etc/gone", EntryType::Regular, 0o600, b"secret");
        entry(tar, "./etc/stays", EntryType::Regular, 0o644, b"text");
        link(tar, "./lib", EntryType::Symlink, "usr/lib");
        link(tar, "./bin/again", EntryType::Link, "./bin/su");
        entry(tar, "./big", EntryType::Regular, 0o644, &vec![0; 3 << 20]);
    });
    let second = layer(|tar| {
        entry(tar, "etc/.wh.gone", EntryType::Regular, 0o600, b"");
        entry(tar, "lib/libc.so", EntryType::Regular, 0o755, b"library");
    });
    let third = layer(|tar| entry(tar, "dev/pipe", EntryType::Fifo, 0o600, b""));
    vec![(first, Packing::Gzip), (second, Packing::Zstd), (third, Packing::Plain)]
}

#[track_caller]
fn check_sample(unpacked: &Unpacked) {
    let tree = &unpacked.tree;
    let node = |path: &str| tree.find(Path::new(path)).map(|id| tree.node(id));
    let su = node("/bin/su").expect("the program");
    assert_eq!((su.attributes.permissions, su.attributes.uid, su.attributes.gid), (0o4755, 7, 8));
    assert_eq!(su.attributes.modified.seconds, 1_700_000_000);
    assert_eq!(tree.find(Path::new("/bin/again")), tree.find(Path::new("/bin/su")));
    assert!(node("/etc/gone").is_none() && node("/etc/stays").is_some());
    assert!(node("/usr/lib/libc.so").is_some());
    assert!(matches!(node("/dev/pipe").map(|pipe| &pipe.content), Some(Content::Fifo)));
    let Some(Content::Regular(Some(blob))) = node("/big").map(|big| &big.content) else {
        panic!("a large file")
    };
    assert_eq!(blob.size, 3 << 20);
    assert_eq!(unpacked.settings.command, ["/bin/x"]);
    assert_eq!(unpacked.report.layers, 3);
}

#[test]
fn layers_of_each_packing_become_one_tree() {
    let mut bench = Bench::new();
    bench.write(&sample());
    check_sample(&bench.unpack().unwrap());
}

#[test]
fn a_layout_may_be_an_archive() {
    let mut bench = Bench::new();
    bench.write(&sample());
    let path = bench.directory.path().join("layout.tar");
    let mut archive = Builder::new(fs::File::create(&path).unwrap());
    archive.append_dir_all(".", bench.layout()).unwrap();
    archive.finish().unwrap();
    check_sample(&bench.unpack_from(&path, Limits::default()).unwrap());
}

#[test]
fn archives_of_docker_save_are_read() {
    let mut bench = Bench::new();
    bench.write(&sample());
    let layers = sample();
    let diff_ids: Vec<_> = layers.iter().map(|(plain, _)| digest(plain)).collect();
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux", "config": { "Cmd": ["/bin/x"] },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    let saved = bench.directory.path().join("saved");
    let names: Vec<_> = (0..layers.len()).map(|number| format!("{number}/layer.tar")).collect();
    for (name, (plain, _)) in names.iter().zip(&layers) {
        fs::create_dir_all(saved.join(name).parent().unwrap()).unwrap();
        fs::write(saved.join(name), plain).unwrap();
    }
    fs::write(saved.join("config.json"), config.to_string()).unwrap();
    let manifest = |tag: &str| serde_json::json!({ "Config": "config.json", "RepoTags": [tag], "Layers": names });
    let write = |manifests: &[serde_json::Value]| {
        let text = serde_json::to_string(manifests).unwrap();
        fs::write(saved.join("manifest.json"), text).unwrap();
    };
    write(&[manifest("app:1")]);
    check_sample(&bench.unpack_from(&saved, Limits::default()).unwrap());
    write(&[manifest("app:1"), manifest("app:2")]);
    let several = Layout::open(&saved).unwrap().image(None).unwrap_err().to_string();
    assert!(several.contains("app:1, app:2") && several.contains("--tag"), "{several}");
    assert!(Layout::open(&saved).unwrap().image(Some("app:2")).is_ok());
    let none = Layout::open(&saved).unwrap().image(Some("3")).unwrap_err().to_string();
    assert!(none.contains("no image `3`"), "{none}");
    // A path that leads out of the directory is no file of the image.
    write(&[serde_json::json!({ "Config": "../../etc/passwd", "Layers": [] })]);
    assert!(Layout::open(&saved).unwrap().image(None).is_err());
}

/// Capabilities whose bytes end lines.
const CAPABILITIES: [u8; 20] = [1, 0, 0, 2, 10, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// One entry of a layer with extended attributes.
fn with_attributes(
    builder: &mut Builder<Vec<u8>>,
    name: &str,
    kind: EntryType,
    attributes: &[(&str, &[u8])],
) {
    let keys: Vec<_> = attributes.iter().map(|(name, _)| format!("SCHILY.xattr.{name}")).collect();
    let records = keys.iter().zip(attributes).map(|(key, (_, value))| (key.as_str(), *value));
    builder.append_pax_extensions(records).unwrap();
    match kind {
        EntryType::Symlink | EntryType::Link => link(builder, name, kind, "bin/ping"),
        _ => entry(builder, name, kind, 0o755, b""),
    }
}

fn attributes_of(unpacked: &Unpacked, path: &str) -> Vec<(String, Vec<u8>)> {
    let tree = &unpacked.tree;
    let all = tree.extended(tree.find(Path::new(path)).expect(path));
    let text = |name: &[u8]| String::from_utf8(name.to_vec()).unwrap();
    all.iter().map(|(name, value)| (text(name), value.to_vec())).collect()
}

#[test]
fn extended_attributes_are_kept() {
    let capability = ("security.capability", &CAPABILITIES[..]);
    let first = layer(|tar| {
        let of_root = [("user.root", &b"/"[..]), ("security.selinux", b"label")];
        with_attributes(tar, "./", EntryType::Directory, &of_root);
        let all = [
            capability,
            ("user.text", &b"1\n2\n"[..]),
            ("user.smuggled", b"\n20 path=/etc/shadow\n"),
            ("user.empty", b""),
            ("trusted.overlay.opaque", b"y"),
            ("system.posix_acl_access", b"?"),
        ];
        with_attributes(tar, "bin/ping", EntryType::Regular, &all);
        with_attributes(tar, "again", EntryType::Link, &[("user.other", b"1")]);
        with_attributes(tar, "link", EntryType::Symlink, &[("user.none", b"1"), capability]);
        with_attributes(tar, "d", EntryType::Directory, &[("user.d", b"1")]);
        with_attributes(tar, "kept", EntryType::Regular, &[("user.kept", b"1")]);
        with_attributes(tar, "replaced", EntryType::Regular, &[("user.replaced", b"1")]);
        entry(tar, "none", EntryType::Regular, 0o644, b"");
    });
    let second = layer(|tar| {
        with_attributes(tar, "d", EntryType::Directory, &[("user.new", b"2")]);
        entry(tar, "replaced", EntryType::Regular, 0o644, b"");
    });
    let mut bench = Bench::new();
    bench.write(&[(first, Packing::Gzip), (second, Packing::Zstd)]);
    let unpacked = bench.unpack().unwrap();
    let of = |path: &str| attributes_of(&unpacked, path);
    let one = |name: &str, value: &[u8]| vec![(name.to_owned(), value.to_vec())];
    let ping = [
        one("security.capability", &CAPABILITIES),
        one("user.empty", b""),
        one("user.smuggled", b"\n20 path=/etc/shadow\n"),
        one("user.text", b"1\n2\n"),
    ];
    assert_eq!(of("/bin/ping"), ping.concat());
    assert_eq!(of("/again"), of("/bin/ping"));
    assert_eq!(of("/link"), one("security.capability", &CAPABILITIES));
    assert_eq!(of("/"), one("user.root", b"/"));
    assert_eq!(of("/d"), one("user.new", b"2"));
    assert_eq!(of("/kept"), one("user.kept", b"1"));
    assert!(of("/replaced").is_empty() && of("/none").is_empty());
    assert!(unpacked.tree.find(Path::new("/etc/shadow")).is_none());
    // The root, ping and the link had others.
    assert_eq!(unpacked.report.without_attributes, 3);
}

#[test]
fn extended_attributes_have_bounds() {
    let refused = |attributes: &[(&str, &[u8])]| {
        let of =
            |tar: &mut Builder<_>| with_attributes(tar, "bin/x", EntryType::Regular, attributes);
        let message = Bench::refusal(of, Limits::default());
        assert!(message.contains("layer 1") && message.contains("bin/x"), "{message}");
        message
    };
    let long = format!("user.{}", "n".repeat(251));
    for (name, value) in [
        (&*long, &b""[..]),
        ("user.large", &vec![0; 65537]),
        ("security.capability", b"?"),
        ("security.capability", &CAPABILITIES[..12]),
    ] {
        let message = refused(&[(name, value)]);
        assert!(message.contains("that Linux refuses"), "{message}");
    }
    let names: Vec<_> = (0..260).map(|number| format!("user.{number:0250}")).collect();
    let many: Vec<_> = names.iter().map(|name| (&**name, &b""[..])).collect();
    assert!(refused(&many).contains("65536 bytes"));
    let value = vec![b'v'; 60000];
    let names: Vec<_> = (0..18).map(|number| format!("user.{number}")).collect();
    let large: Vec<_> = names.iter().map(|name| (&**name, &*value)).collect();
    let message = Bench::refusal(
        |tar| with_attributes(tar, "bin/x", EntryType::Regular, &large),
        Limits::default(),
    );
    assert!(message.contains("longer than it may be"), "{message}");
    // All files of an image, a megabyte or so each.
    let message = Bench::refusal(
        |tar| {
            for number in 0..20 {
                let name = format!("f{number}");
                with_attributes(tar, &name, EntryType::Regular, &large[..17]);
            }
        },
        Limits::default(),
    );
    assert!(message.contains("16777216 bytes") && message.contains("f16"), "{message}");
    let hostile = |tar: &mut Builder<_>| {
        entry(tar, "x", EntryType::XHeader, 0o644, b"99 SCHILY.xattr.user.a=1\n");
        entry(tar, "bin/x", EntryType::Regular, 0o644, b"");
    };
    let message = Bench::refusal(hostile, Limits::default());
    assert!(message.contains("makes no sense"), "{message}");
}

#[test]
fn damage_is_found_wherever_it_is() {
    let mut bench = Bench::new();
    bench.write(&sample());
    for (name, bytes) in bench.blobs.clone() {
        let path = bench.layout().join("blobs/sha256").join(&name["sha256:".len()..]);
        for damaged in [flipped(&bytes), bytes[..bytes.len() / 2].to_vec(), Vec::new()] {
            fs::write(&path, damaged).unwrap();
            bench.unpack().expect_err("it is damaged");
        }
        fs::write(&path, &bytes).unwrap();
    }
    check_sample(&bench.unpack().unwrap());
}

fn flipped(bytes: &[u8]) -> Vec<u8> {
    let mut copy = bytes.to_vec();
    let middle = copy.len() / 2;
    copy[middle] ^= 1;
    copy
}

#[test]
fn paths_stay_inside_the_image() {
    let refused = |name: &str| {
        let of = |tar: &mut Builder<_>| entry(tar, name, EntryType::Regular, 0o644, b"x");
        Bench::refusal(of, Limits::default())
    };
    for name in ["../x", "a/../../x", "..", "a/.."] {
        let message = refused(name);
        assert!(message.contains("layer 1") && message.contains("leads out"), "{message}");
    }
    let outside = Bench::refusal(
        |tar| link(tar, "x", EntryType::Link, "../../etc/passwd"),
        Limits::default(),
    );
    assert!(outside.contains("leads out"), "{outside}");
    // Links may point anywhere: they are followed in the image only.
    let mut bench = Bench::new();
    let harmless = layer(|tar| {
        link(tar, "up", EntryType::Symlink, "../../../../..");
        entry(tar, "up/tmp/thaw-test-outside", EntryType::Regular, 0o644, b"x");
    });
    bench.write(&[(harmless, Packing::Plain)]);
    let unpacked = bench.unpack().unwrap();
    assert!(unpacked.tree.find(Path::new("/tmp/thaw-test-outside")).is_some());
    assert!(!Path::new("/tmp/thaw-test-outside").exists());
}

#[test]
fn what_is_larger_than_it_may_be_is_refused() {
    let limits = Limits { bytes: 1 << 20, entries: 10 };
    let long = |tar: &mut Builder<_>| {
        entry(tar, "zeros", EntryType::Regular, 0o644, &vec![0; 2 << 20]);
    };
    let message = Bench::refusal(long, limits);
    assert!(message.contains("1048576 bytes of files"), "{message}");
    let many = |tar: &mut Builder<_>| {
        for number in 0..11 {
            entry(tar, &number.to_string(), EntryType::Regular, 0o644, b"");
        }
    };
    let message = Bench::refusal(many, limits);
    assert!(message.contains("10 entries"), "{message}");
    // A name that would be kept in memory, and is some bytes when it is packed.
    let name = |tar: &mut Builder<_>| {
        entry(tar, "././@LongLink", EntryType::GNULongName, 0o644, &vec![b'a'; 8 << 20]);
        entry(tar, "x", EntryType::Regular, 0o644, b"");
    };
    let message = Bench::refusal(name, Limits::default());
    assert!(message.contains("longer than it may be"), "{message}");
    let extended = |tar: &mut Builder<_>| {
        entry(tar, "x", EntryType::XHeader, 0o644, &vec![b'a'; 8 << 20]);
        entry(tar, "x", EntryType::Regular, 0o644, b"");
    };
    let message = Bench::refusal(extended, Limits::default());
    assert!(message.contains("longer than it may be"), "{message}");
    // One that belongs to no entry is not kept either.
    let global = |tar: &mut Builder<_>| {
        entry(tar, "x", EntryType::XGlobalHeader, 0o644, &vec![b'a'; 8 << 20]);
        entry(tar, "x", EntryType::Regular, 0o644, b"");
    };
    let message = Bench::refusal(global, Limits::default());
    assert!(message.contains("longer than it may be"), "{message}");
    let unnamed = |tar: &mut Builder<_>| {
        entry(tar, &format!("{}/x", ["d"; 40].join("/")), EntryType::Regular, 0o644, b"");
    };
    let message = Bench::refusal(unnamed, limits);
    assert!(message.contains("10 entries") || message.contains("10 "), "{message}");
    let deep = |tar: &mut Builder<_>| {
        for number in 0..60 {
            let path = vec!["d"; 40].join("/");
            link(
                tar,
                &format!("l{number}"),
                EntryType::Symlink,
                &match number {
                    0 => path,
                    _ => format!("l{}/{path}", number - 1),
                },
            );
        }
        for number in 0..60 {
            entry(tar, &format!("l{number}/x"), EntryType::Regular, 0o644, b"");
        }
    };
    let message = Bench::refusal(deep, Limits::default());
    assert!(
        message.contains("nested directories") || message.contains("symbolic links"),
        "{message}"
    );
}

/// Headers that belong to nothing are unpacked all the same, so they count.
#[test]
fn headers_count_as_bytes() {
    let of = |tar: &mut Builder<_>| {
        for number in 0..8 {
            let name = vec![b'a'; 1000];
            entry(tar, "././@LongLink", EntryType::GNULongName, 0o644, &name);
            let comment = vec![b' '; 300 << 10];
            entry(tar, "g", EntryType::XGlobalHeader, 0o644, &comment);
            entry(tar, &number.to_string(), EntryType::Regular, 0o644, b"");
        }
    };
    let message = Bench::refusal(of, Limits { bytes: 2 << 20, entries: 100 });
    assert!(message.contains("2097152 bytes of files"), "{message}");
    assert!(message.contains("--max-size"), "{message}");
    let mut bench = Bench::new();
    bench.write(&[(layer(of), Packing::Gzip)]);
    bench.unpack_from(&bench.layout(), Limits { bytes: 4 << 20, entries: 100 }).unwrap();
}

/// An archive of an image has headers, too, which are read into memory.
#[test]
fn headers_of_archives_have_a_bound() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image.tar");
    for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader] {
        let long = layer(|tar| {
            entry(tar, "x", kind, 0o644, &vec![b'a'; 8 << 20]);
            entry(tar, "x", EntryType::Regular, 0o644, b"");
        });
        fs::write(&path, long).unwrap();
        let message = Layout::open(&path).expect_err("a refusal").to_string();
        assert!(message.contains("longer than it may be"), "{message}");
    }
}

#[test]
fn behind_the_last_entry_there_is_an_end() {
    let mut bench = Bench::new();
    let mut plain = layer(|tar| entry(tar, "x", EntryType::Regular, 0o644, b"content"));
    plain.resize(8 << 20, 0);
    bench.write(&[(plain, Packing::Gzip)]);
    let limits = Limits { bytes: 1 << 20, entries: 10 };
    let message = bench.unpack_from(&bench.layout(), limits).expect_err("a refusal").to_string();
    assert!(message.contains("longer than it may be"), "{message}");
    bench.unpack().unwrap();
    // As umoci writes them: without the end of the last block.
    let mut bench = Bench::new();
    let plain = layer(|tar| entry(tar, "x", EntryType::Regular, 0o644, b"content"));
    bench.write(&[(plain[..512 + 7].to_vec(), Packing::Gzip)]);
    bench.unpack().unwrap();
}

#[test]
fn what_is_no_image_is_said_to_be_none() {
    let directory = tempfile::tempdir().unwrap();
    let message = |path: &Path| Layout::open(path).expect_err("no image").to_string();
    assert!(message(&directory.path().join("none")).contains("No such file"));
    assert!(message(directory.path()).contains("neither index.json nor manifest.json"));
    let file = directory.path().join("file");
    fs::write(&file, "text").unwrap();
    assert!(message(&file).contains("docker save"), "{}", message(&file));
    assert!(message(Path::new("/dev/null")).contains("neither a file nor a directory"));
}

#[test]
fn layers_of_any_bytes_are_survived() {
    let plain = sample().remove(0).0;
    let small = plain[..plain.len() - (3 << 20)].to_vec();
    let attributes = layer(|tar| {
        let all = [("user.a", &b"1\n2"[..]), ("security.capability", &CAPABILITIES)];
        with_attributes(tar, "x", EntryType::Regular, &all);
    });
    let gzip = packed(&small, Packing::Gzip);
    let seeds = [&small[..], &gzip, &packed(&small, Packing::Zstd), &attributes];
    let limits = Limits { bytes: 1 << 20, entries: 100 };
    thaw_mutate::survive("oci_layer", &seeds, 300, |bytes| {
        let mut bench = Bench::new();
        bench.write(&[(bytes.to_vec(), Packing::Plain)]);
        drop(bench.unpack_from(&bench.layout(), limits));
    });
}

#[test]
fn documents_of_any_bytes_are_survived() {
    let mut bench = Bench::new();
    bench.write(&sample());
    let index = fs::read(bench.layout().join("index.json")).unwrap();
    thaw_mutate::survive("oci_index", &[&index[..]], 300, |bytes| {
        fs::write(bench.layout().join("index.json"), bytes).unwrap();
        drop(bench.unpack_from(&bench.layout(), Limits { bytes: 8 << 20, entries: 100 }));
    });
}

/// Archives of sparse files in all formats that GNU tar writes have the files that it was given.
#[test]
fn sparse_files_of_gnu_tar_are_read() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("data/disk");
    fs::create_dir(path.parent().unwrap()).unwrap();
    let mut content = vec![0; 5 << 20];
    content[1 << 20..][..5000].fill(b'a');
    content[3 << 20..][..4096].fill(b'b');
    let disk = fs::File::create(&path).unwrap();
    disk.set_len(content.len() as u64).unwrap();
    for at in [1 << 20, 3 << 20] {
        use std::os::unix::fs::FileExt;
        disk.write_all_at(&content[at..][..5000], at as u64).unwrap();
    }
    let expected = Store::open(&files.path().join("store")).unwrap();
    let expected = expected.session().unwrap().put_blob(&content, &Domain::shared()).unwrap();
    for version in ["0.0", "0.1", "1.0", "gnu"] {
        let format = if version == "gnu" { "gnu" } else { "posix" };
        let mut tar = std::process::Command::new("tar");
        tar.args(["--create", "--sparse", "--format", format]);
        if version != "gnu" {
            tar.args(["--sparse-version", version]);
        }
        let archive = tar.arg("--directory").arg(files.path()).arg("data").output().unwrap();
        assert!(archive.status.success(), "{archive:?}");
        assert!(archive.stdout.len() < 1 << 20, "tar has found no holes");
        let mut bench = Bench::new();
        bench.write(&[(archive.stdout, Packing::Gzip)]);
        let unpacked = bench.unpack().unwrap();
        let tree = &unpacked.tree;
        let found = tree.find(Path::new("/data/disk")).expect("under its own name");
        let Content::Regular(blob) = &tree.node(found).content else { panic!("a file") };
        assert_eq!(*blob, expected, "{version}");
        assert_eq!(unpacked.report.bytes >> 20, 5);
        // It counts with its holes, before it is written.
        let limits = Limits { bytes: 4 << 20, ..Limits::default() };
        let refused = bench.unpack_from(&bench.layout(), limits).unwrap_err().to_string();
        assert!(refused.contains("bytes of files"), "{refused}");
    }
}
