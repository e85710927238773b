//! Freezing, images, thawing and working sets, with a stand-in kernel that lays
//! out memory like a frozen program.

mod common;

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;
use std::sync::Arc;

use bytemuck::Zeroable;
use common::{Blobs, index_rootfs, next, said, standin, start_with, zygote};
use tempfile::NamedTempFile;
use thaw_abi::image::{MAPPING_EAGER, MAPPING_KERNEL, SOURCE_BLOB, SOURCE_IMAGE, SOURCE_ZERO};
use thaw_abi::rootfs::{INDEX_MAGIC, IndexHeader};
use thaw_sandbox::{
    Event, Fit, FreezeError, FreezeReport, FreezeSpec, Image, ImageError, MergePolicy,
    PopulatePolicy, Sandbox, ThawOptions, WorkingSet, cpu_features, freeze,
};

/// A blob whose page `n` is full of `n + 1`.
fn blob() -> Vec<u8> {
    (0..8).flat_map(|page| vec![page + 1; 4096]).collect()
}

fn spec() -> FreezeSpec {
    FreezeSpec {
        index_hash: [3; 32],
        program: "example".into(),
        arguments: "example --serve".into(),
        about: r#"{"function":"example"}"#.into(),
        max_stored: 1 << 30,
        merge: MergePolicy { clean_gap_pages: 0, zero_gap_pages: 4 },
        base: None,
        identity: None,
        post_copy: false,
    }
}

/// A sandbox at its entry point, and what it reported.
fn at_entry_point(variant: &str) -> (Sandbox, thaw_abi::control::EntryPoint) {
    let mut sandbox = start_with(zygote(), "freeze", variant, index_rootfs(vec![blob()]), |_| {});
    match next(&mut sandbox) {
        Event::EntryPoint(entry) => (sandbox, entry),
        event => panic!("{event:?}"),
    }
}

fn frozen() -> (NamedTempFile, FreezeReport) {
    let (sandbox, entry) = at_entry_point("0");
    let file = NamedTempFile::new().unwrap();
    let report = freeze(&sandbox, entry, &spec(), file.as_file()).unwrap();
    (file, report)
}

fn fit() -> Fit {
    Fit { kernel_build: standin().build_id(), index_hash: [3; 32], cpu_features: cpu_features() }
}

fn open(file: &NamedTempFile) -> Result<Image, ImageError> {
    Image::open(File::open(file.path()).unwrap())
}

fn plan(image: &Image) -> thaw_sandbox::BootPlan {
    let header = IndexHeader { magic: INDEX_MAGIC, blob_count: 1, ..IndexHeader::zeroed() };
    let index = tempfile::tempfile().unwrap();
    index.write_all_at(bytemuck::bytes_of(&header), 0).unwrap();
    image.plan(Arc::new(index), 0, Arc::new(Blobs(vec![blob()]))).unwrap()
}

fn thaw(plan: &thaw_sandbox::BootPlan) -> Sandbox {
    let stderr = std::io::stderr();
    let options = ThawOptions {
        streams: Some([stderr.as_fd(), stderr.as_fd()]),
        limits: Default::default(),
        cpu_time_limit: None,
        flags: 0,
        resumed: &[],
        volumes: &[],
        hostname: "copy",
        secrets: None,
        egress: &Default::default(),
        cores: None,
    };
    zygote().thaw(plan, None, &options).unwrap()
}

#[test]
fn an_image_holds_what_must_be_stored_and_nothing_else() {
    let (file, report) = frozen();
    let image = open(&file).unwrap();
    image.check_fit(&fit()).unwrap();
    let mappings: Vec<(u64, u64, u32)> = image
        .mappings()
        .iter()
        .map(|mapping| (mapping.start, mapping.len, mapping.source))
        .collect();
    assert_eq!(
        mappings,
        [
            // The text: one page differs from its blob.
            (0x40_0000, 0x3000, SOURCE_BLOB),
            (0x40_3000, 0x1000, SOURCE_IMAGE),
            (0x40_4000, 0x4000, SOURCE_BLOB),
            // The data: two pages with a small hole between them.
            (0x60_0000, 0x4000, SOURCE_IMAGE),
            (0x60_4000, 0x7c000, SOURCE_ZERO),
            (0x68_0000, 0x8000, SOURCE_IMAGE),
            // Zeros, and behind them memory that is wiped on fork.
            (0x68_8000, 0x78000, SOURCE_ZERO),
            // A guard page with content.
            (0x70_0000, 0x1000, SOURCE_IMAGE),
            (0x70_1000, 0x3000, SOURCE_ZERO),
            // The kernel's heap: behind its first content one mapping, whose
            // zeros are holes in the file.
            (0x7e10_0000_0000, 0x1000, SOURCE_ZERO),
            (0x7e10_0000_1000, 0xf000, SOURCE_IMAGE),
        ]
    );
    for mapping in image.mappings() {
        let kernel = mapping.start >= 0x7e00_0000_0000;
        assert_eq!(mapping.flags, if kernel { MAPPING_KERNEL | MAPPING_EAGER } else { 0 });
    }
    assert_eq!(image.blobs(), [0]);
    assert_eq!(image.about(), r#"{"function":"example"}"#);
    // With the two pages of zeros in the small hole.
    assert_eq!(report.stored, 15 * 4096);
    assert_eq!(report.from_blobs, 7 * 4096);
    assert_eq!(report.mappings, mappings.len());
    assert_eq!(report.file_len, file.as_file().metadata().unwrap().len());
    assert_eq!(report.checksum, image.header().checksum);
    // Many pages of zeros are holes.
    assert!(file.as_file().metadata().unwrap().blocks() * 512 <= report.stored + 8192);
}

#[test]
fn merging_stores_clean_pages_to_save_mappings() {
    let (sandbox, entry) = at_entry_point("0");
    let file = NamedTempFile::new().unwrap();
    let merge = MergePolicy { clean_gap_pages: 100, zero_gap_pages: 1000 };
    let report = freeze(&sandbox, entry, &FreezeSpec { merge, ..spec() }, file.as_file()).unwrap();
    assert!(report.mappings < 12, "{}", report.mappings);
    let mut copy = thaw(&plan(&open(&file).unwrap()));
    assert!(matches!(next(&mut copy), Event::Booted(_)));
    assert_eq!(said(&mut copy), "thawed");
}

#[test]
fn the_frozen_sandbox_can_go_on() {
    let (mut sandbox, entry) = at_entry_point("0");
    freeze(&sandbox, entry, &spec(), NamedTempFile::new().unwrap().as_file()).unwrap();
    sandbox.resume().unwrap();
    assert_eq!(said(&mut sandbox), "resumed");
}

#[test]
fn readelf_reads_an_image_without_a_warning() {
    let (file, _) = frozen();
    let output = Command::new("readelf").arg("-lnW").arg(file.path()).output().unwrap();
    assert!(output.status.success());
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(complaints.is_empty(), "{complaints}");
    let text = String::from_utf8_lossy(&output.stdout);
    for expected in ["NT_PRSTATUS", "NT_PRPSINFO", "NT_AUXV", "NT_FILE", "THAW"] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    assert!(!text.to_lowercase().contains("warning"), "{text}");
}

#[test]
fn gdb_reads_memory_registers_and_files_of_an_image() {
    let (file, _) = frozen();
    let Ok(output) = Command::new("gdb")
        .args(["-nx", "-q", "-batch", "-core"])
        .arg(file.path())
        .args(["-ex", "info registers rip rsp", "-ex", "x/1bx 0x600fff", "-ex", "x/1bx 0x403005"])
        .args(["-ex", "info proc mappings", "-ex", "info threads"])
        .output()
    else {
        // Not installed; readelf has read it.
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    for expected in [
        "0x400010",
        "0x6000f0",
        "0x600fff:\t0xab",
        "0x403005:\t0xee",
        "example --serve",
        "/bin/example",
    ] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    assert_eq!(text.matches("New LWP").count(), 1, "{text}");
}

#[test]
fn lying_kernels_are_refused() {
    for variant in 1..=20 {
        let (sandbox, entry) = at_entry_point(&variant.to_string());
        let file = NamedTempFile::new().unwrap();
        let error = freeze(&sandbox, entry, &spec(), file.as_file()).unwrap_err();
        let is_expected = match variant {
            5 | 19 => matches!(error, FreezeError::Memory(_)),
            7 | 13 => matches!(error, FreezeError::Blob { blob: 77, .. }),
            _ => matches!(error, FreezeError::Report(_)),
        };
        assert!(is_expected, "{variant}: {error}");
    }
}

#[test]
fn more_memory_than_allowed_is_refused() {
    let (sandbox, entry) = at_entry_point("0");
    let spec = FreezeSpec { max_stored: 8192, ..spec() };
    let error =
        freeze(&sandbox, entry, &spec, NamedTempFile::new().unwrap().as_file()).unwrap_err();
    assert!(matches!(error, FreezeError::TooLarge { limit: 8192, .. }), "{error}");
}

#[test]
fn a_full_disk_is_an_error() {
    let (sandbox, entry) = at_entry_point("0");
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    let error = freeze(&sandbox, entry, &spec(), &full).unwrap_err();
    assert!(matches!(error, FreezeError::Write(_)), "{error}");
}

#[test]
fn an_image_that_does_not_fit_is_refused() {
    let (file, _) = frozen();
    let image = open(&file).unwrap();
    let refusal = |fit: Fit| image.check_fit(&fit).unwrap_err();
    assert!(matches!(refusal(Fit { kernel_build: [0; 32], ..fit() }), ImageError::OtherKernel));
    assert!(matches!(refusal(Fit { index_hash: [0; 32], ..fit() }), ImageError::OtherRootfs));
    assert!(matches!(refusal(Fit { cpu_features: [0; 8], ..fit() }), ImageError::Cpu(_)));
}

#[test]
fn a_truncated_image_is_refused_at_any_length() {
    let (file, report) = frozen();
    let last = report.file_len;
    for len in [last - 1, last / 2, 4096, 2000, 1000, 500, 100, 64, 63, 1, 0] {
        file.as_file().set_len(len).unwrap();
        assert!(matches!(open(&file), Err(ImageError::Truncated { .. })), "{len}");
    }
}

#[test]
fn a_flipped_byte_is_noticed_wherever_it_is() {
    let (mut file, report) = frozen();
    let mut original = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut original).unwrap();
    let positions = (0..4096.min(report.file_len)).chain((4096..report.file_len).step_by(777));
    for position in positions {
        let byte = original[position as usize];
        file.as_file().write_all_at(&[byte ^ 0x10], position).unwrap();
        assert!(open(&file).is_err(), "{position}");
        file.as_file().write_all_at(&[byte], position).unwrap();
    }
    open(&file).unwrap();
}

#[test]
fn a_foreign_file_is_refused() {
    let refusal = |bytes: &[u8]| {
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        open(&file).unwrap_err()
    };
    assert!(matches!(refusal(&[b'x'; 5000]), ImageError::NotAnImage(_)));
    let program = std::fs::read("/proc/self/exe").unwrap();
    assert!(matches!(refusal(&program), ImageError::NotAnImage(_)));
}

#[test]
fn a_longer_file_is_refused() {
    let (file, report) = frozen();
    file.as_file().set_len(report.file_len + 1).unwrap();
    assert!(matches!(open(&file), Err(ImageError::Damaged(_))));
}

#[test]
fn another_version_is_refused() {
    let (mut file, _) = frozen();
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    // The header begins with the version and the kernel's build id follows 16 bytes on.
    let build = standin().build_id();
    let at = bytes.windows(32).position(|window| window == build).unwrap() - 16;
    file.as_file().write_all_at(&[9], at as u64).unwrap();
    assert!(matches!(open(&file), Err(ImageError::Version { found: 9, .. })));
}

#[test]
fn a_thawed_copy_has_the_memory_and_its_working_set_is_recorded() {
    let (file, _) = frozen();
    let image = open(&file).unwrap();
    let mut plan = plan(&image);
    let mut copy = thaw(&plan);
    assert!(matches!(next(&mut copy), Event::Booted(_)));
    assert_eq!(said(&mut copy), "thawed");
    let set = WorkingSet::recorder(&copy).unwrap().record(&plan).unwrap();
    let (read, written) = set.pages();
    assert!(read >= 5, "{read}");
    assert_eq!(written, 8);
    assert_eq!(set.blobs(), [0]);
    assert_eq!(plan.blobs(), [0]);
    assert_eq!(WorkingSet::from_bytes(&set.to_bytes()).unwrap(), set);

    for policy in
        [PopulatePolicy::None, PopulatePolicy::Read, PopulatePolicy::Write, PopulatePolicy::Both]
    {
        plan.apply_working_set(&set, policy).unwrap();
        let written = [(0x68_0000, 0x8000, 1)];
        let ranges: Vec<(u64, u64, u64)> = plan
            .populate()
            .iter()
            .filter(|range| range.how == 1)
            .map(|range| (range.start, range.len, range.how))
            .collect();
        match policy {
            PopulatePolicy::Write | PopulatePolicy::Both => assert_eq!(ranges, written),
            _ => assert!(ranges.is_empty()),
        }
        let eager = |start| {
            plan.mappings().iter().find(|m| m.start == start).unwrap().flags & MAPPING_EAGER != 0
        };
        assert!(eager(0x68_0000) && eager(0x40_0000) && eager(0x7e10_0000_0000));
        // Nobody touched what lies behind the guard.
        assert!(!eager(0x70_1000));
        let mut copy = thaw(&plan);
        assert!(matches!(next(&mut copy), Event::Booted(_)));
        assert_eq!(said(&mut copy), "thawed");
    }
    assert!(set.read_ahead(&image).unwrap() > 0);
    assert!(set.read_ahead_blobs(&plan).unwrap() > 0);
    thaw_sandbox::working_set::drop_from_page_cache(image.file()).unwrap();
}

#[test]
fn a_working_set_of_another_image_is_refused() {
    let (file, _) = frozen();
    let image = open(&file).unwrap();
    let mut first = plan(&image);
    let mut copy = thaw(&first);
    next(&mut copy);
    let set = WorkingSet::recorder(&copy).unwrap().record(&first).unwrap();
    // Other text in the image, so another checksum.
    let (sandbox, entry) = at_entry_point("0");
    let file = NamedTempFile::new().unwrap();
    let about = "{}".into();
    freeze(&sandbox, entry, &FreezeSpec { about, ..spec() }, file.as_file()).unwrap();
    let mut second = plan(&open(&file).unwrap());
    first.apply_working_set(&set, PopulatePolicy::Both).unwrap();
    second.apply_working_set(&set, PopulatePolicy::Both).unwrap_err();
}

#[test]
fn a_host_directory_cannot_be_frozen() {
    let rootfs = common::host_rootfs("/".as_ref());
    let mut sandbox = start_with(zygote(), "freeze", "0", rootfs, |_| {});
    let Event::EntryPoint(entry) = next(&mut sandbox) else { panic!() };
    let file = NamedTempFile::new().unwrap();
    let error = freeze(&sandbox, entry, &spec(), file.as_file()).unwrap_err();
    assert!(matches!(error, FreezeError::HostDirectory));
}
