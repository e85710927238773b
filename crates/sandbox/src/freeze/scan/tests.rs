//! What is found in the memory of processes: this one is looked at, and images that are made here.

use super::*;
use crate::pagemap::PageMap;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use std::ptr;
use thaw_abi::image::{Mapping, SOURCE_IMAGE, SOURCE_ZERO, ancestor_number};

const P: u64 = PAGE_SIZE;
const PAGES: u64 = 16;

/// The memory of this process, and images by depth.
struct Own(Vec<File>);

impl Source for Own {
    fn take_space(&mut self, _: u32) -> io::Result<Space> {
        let memory = File::open("/proc/self/mem")?;
        Ok(Space { memory, pages: PageMap::own()? })
    }

    fn blobs(&mut self, numbers: &[u32]) -> Result<Vec<File>, (u32, io::Error)> {
        let file = |number: &u32| {
            let depth = number.checked_sub(ancestor_number(0)).map(|depth| depth as usize);
            let file = depth.and_then(|depth| self.0.get(depth));
            let file = file.ok_or((*number, io::ErrorKind::NotFound.into()))?;
            file.try_clone().map_err(|error| (*number, error))
        };
        numbers.iter().map(file).collect()
    }
}

/// A file whose page `n` is full of `first + n`.
fn image(first: u8) -> File {
    let file = tempfile::tempfile().unwrap();
    for page in 0..PAGES {
        file.write_all_at(&[first + page as u8; P as usize], page * P).unwrap();
    }
    file
}

/// Private memory of some pages: of an image, or anonymous.
fn memory(file: Option<&File>) -> u64 {
    let len = (PAGES * P) as usize;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe {
        match file {
            Some(file) => mmap(ptr::null_mut(), len, protection, MapFlags::PRIVATE, file, 0),
            None => mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE),
        }
    };
    start.unwrap() as u64
}

fn fill(start: u64, page: u64, byte: u8) {
    // SAFETY: a page of a mapping of `memory`, which stays for the whole test.
    unsafe { ((start + page * P) as *mut u8).write_bytes(byte, P as usize) };
}

fn chart(depth: u32, start: u64, source: u32) -> Chart {
    let mapping = Mapping { start, len: PAGES * P, offset: 0, source, blob: 0, prot: 3, flags: 0 };
    Chart::new(&[mapping], depth, |_| true)
}

fn region(start: u64, flags: u32) -> Region {
    let len = PAGES * P;
    Region { start, len, blob: None, prot: 3, flags, path: Vec::new(), space: 0 }
}

const IN_PLACE: u32 = REGION_FROM_IMAGE | REGION_IN_PLACE;

/// First page and content of each run.
fn scan(images: Vec<File>, base: Base, region: &Region) -> Vec<(u64, Content)> {
    let mut source = Own(images);
    let mut scanner = Scanner::open(&mut source, FIRST_PROCESS, 1 << 30).unwrap();
    scanner.compare_with(base, vec![Some(0)]);
    let runs = scanner.runs(region).unwrap();
    assert_eq!(runs.last().map(|run| run.end), Some(region.end()));
    runs.iter().map(|run| ((run.start - region.start) / P, run.content)).collect()
}

fn of(depth: u32, page: u64) -> Content {
    Content::File { number: ancestor_number(depth), offset: page * P }
}

fn base(parent: Chart, thawed: Chart) -> Base {
    Base { parent: Some(parent), thawed: Some(thawed) }
}

#[test]
fn only_what_differs_from_the_parent_is_its_own() {
    let file = image(1);
    let start = memory(Some(&file));
    fill(start, 3, 99);
    // Written, and equal all the same.
    fill(start, 5, 6);
    fill(start, 7, 0);
    let both = || chart(0, start, SOURCE_IMAGE);
    let expected =
        [(0, of(0, 0)), (3, Content::Own), (4, of(0, 4)), (7, Content::Zero), (8, of(0, 8))];
    let images = || vec![file.try_clone().unwrap()];
    assert_eq!(scan(images(), base(both(), both()), &region(start, IN_PLACE)), expected);
    // The same if it is not known what lies in place: all of it is compared.
    let moved = region(start, REGION_FROM_IMAGE);
    assert_eq!(scan(images(), base(both(), both()), &moved), expected);
    let unknown = Base { parent: Some(both()), thawed: None };
    assert_eq!(scan(images(), unknown, &region(start, IN_PLACE)), expected);
    // Without a base all of it is stored.
    let whole = scan(images(), Base::default(), &region(start, IN_PLACE));
    assert_eq!(whole, [(0, Content::Own), (7, Content::Zero), (8, Content::Own)]);
}

#[test]
fn what_was_written_is_stored_unseen_if_the_page_map_is_trusted_and_bounded_all_the_same() {
    let file = image(1);
    let start = memory(Some(&file));
    // Equal to what the image has, and zero: nobody looks.
    fill(start, 5, 6);
    fill(start, 7, 0);
    let both = || chart(0, start, SOURCE_IMAGE);
    let mut source = Own(vec![file]);
    for (max_stored, fits) in [(2 * P, true), (P, false)] {
        let mut scanner = Scanner::open(&mut source, FIRST_PROCESS, max_stored).unwrap();
        scanner.compare_with(base(both(), both()), vec![Some(0)]);
        scanner.trust_page_map();
        match scanner.runs(&region(start, IN_PLACE)) {
            Ok(runs) => {
                let own = runs.iter().filter(|run| run.content == Content::Own);
                let pages: Vec<u64> = own.map(|run| (run.start - start) / P).collect();
                assert!(fits && pages == [5, 7], "{pages:?}");
            }
            Err(error) => {
                assert!(!fits && matches!(error, FreezeError::TooLarge { .. }), "{error}");
            }
        }
    }
}

#[test]
fn pieces_of_an_image_are_bounded_however_many_have_them() {
    let start = 1 << 20;
    let mapping = |page: u64| Mapping {
        start: start + page * P,
        len: P,
        // Not one behind the other.
        offset: (PAGES - page) * P,
        source: SOURCE_IMAGE,
        blob: 0,
        prot: 3,
        flags: 0,
    };
    let mappings: Vec<Mapping> = (0..PAGES).map(mapping).collect();
    let mut source = Own(Vec::new());
    let mut scanner = Scanner::open(&mut source, FIRST_PROCESS, 1 << 30).unwrap();
    scanner.spaces.push(Own(Vec::new()).take_space(1).unwrap());
    let thawed = Some(Chart::new(&mappings, 0, |_| true));
    // Two address spaces come from the same one, as a kernel may claim of a thousand.
    scanner.compare_with(Base { parent: None, thawed }, vec![Some(0), Some(0)]);
    let first = region(start, IN_PLACE | REGION_KERNEL);
    let regions = [first.clone(), Region { space: 1, ..first }];
    let runs = 2 * PAGES as usize;
    let scanned = crate::freeze::scan(&mut scanner, &regions, runs).unwrap();
    assert_eq!(scanned.iter().map(|region| region.runs.len()).sum::<usize>(), runs);
    let refused = crate::freeze::scan(&mut scanner, &regions, runs - 1).unwrap_err();
    assert!(matches!(refused, FreezeError::TooManyMappings { .. }), "{refused}");
}

/// Two processes after a fork: what neither has written since is stored once.
#[test]
fn what_an_earlier_process_has_stored_is_not_stored_again() {
    for trusts in [false, true] {
        let start = memory(None);
        for page in [1, 2, 3, 6] {
            fill(start, page, 7 + page as u8);
        }
        let mut source = Own(Vec::new());
        let mut scanner = Scanner::open(&mut source, FIRST_PROCESS, 5 * P).unwrap();
        scanner.spaces.push(Own(Vec::new()).take_space(1).unwrap());
        if trusts {
            scanner.trust_page_map();
        }
        let first = region(start, 0);
        let own: Vec<Run> = scanner.runs(&Region { len: 3 * P, ..first.clone() }).unwrap();
        assert_eq!(
            own.iter().map(|run| run.content).collect::<Vec<_>>(),
            [Content::Zero, Content::Own]
        );
        assert_eq!(scanner.stored, 2 * P);
        // This test has one process: the second one is the same memory.
        let second = scanner.runs(&Region { space: 1, ..first.clone() }).unwrap();
        let found: Vec<_> =
            second.iter().map(|run| ((run.start - start) / P, run.content)).collect();
        let same = Content::Same { space: 0 };
        let own = Content::Own;
        assert_eq!(
            found,
            [
                (0, Content::Zero),
                (1, same),
                (3, own),
                (4, Content::Zero),
                (6, own),
                (7, Content::Zero)
            ]
        );
        assert_eq!(scanner.stored, 4 * P);
        // Memory that processes share is no matter of a fork.
        let shared = Region { space: 1, flags: REGION_SHARED, ..first };
        assert!(scanner.earlier(&shared, start, P as usize).is_empty());
    }
}

/// Memory of which pages can be read from a part of it only.
fn readable(part: Range<u64>) -> Space {
    let memory = File::from(memfd_create("readable", MemfdFlags::CLOEXEC).unwrap());
    memory.write_all_at(&vec![7; (part.end - part.start) as usize], part.start).unwrap();
    Space { memory, pages: PageMap::own().unwrap() }
}

/// Several chunks of one run: an earlier process has some of the second one only. To read the
/// third one fails.
#[test]
fn only_chunks_that_an_earlier_process_has_some_of_are_compared() {
    let pages = 3 * CHUNK / P;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses, which is filled.
    let start = unsafe {
        let start =
            mmap_anonymous(ptr::null_mut(), (pages * P) as usize, protection, MapFlags::PRIVATE)
                .unwrap();
        start.cast::<u8>().write_bytes(7, (pages * P) as usize);
        start as u64
    };
    let mut source = Own(Vec::new());
    let mut scanner = Scanner::open(&mut source, FIRST_PROCESS, pages * P).unwrap();
    scanner.spaces.push(readable(start + CHUNK..start + 2 * CHUNK));
    scanner.trust_page_map();
    let part = |space: u32, first: u64, pages: u64| Region {
        start: start + first * P,
        len: pages * P,
        space,
        ..region(start, 0)
    };
    let shared = pages / 2;
    scanner.runs(&part(0, shared, 1)).unwrap();
    let found: Vec<_> = scanner
        .runs(&part(1, 0, pages))
        .unwrap()
        .iter()
        .map(|run| ((run.start - start) / P, run.content))
        .collect();
    let same = Content::Same { space: 0 };
    assert_eq!(found, [(0, Content::Own), (shared, same), (shared + 1, Content::Own)]);
    assert_eq!(scanner.stored, pages * P, "the page is counted once");
    // The bound holds for what is not compared, too.
    scanner.max_stored = pages * P;
    assert!(matches!(scanner.runs(&part(1, 0, 1)), Err(FreezeError::TooLarge { .. })));
}

#[test]
fn memory_in_place_is_not_even_read() {
    let file = image(1);
    // Not what the image has, so that a look would show.
    let start = memory(None);
    let thawed = chart(0, start, SOURCE_IMAGE);
    let found = scan(vec![file], base(Chart::default(), thawed), &region(start, IN_PLACE));
    assert_eq!(found, [(0, of(0, 0))]);
}

#[test]
fn a_later_image_of_the_same_sandbox_stores_only_what_is_new() {
    let root = image(1);
    let start = memory(Some(&root));
    fill(start, 3, 99);
    fill(start, 4, 98);
    // What the last image had of it.
    let last = tempfile::tempfile().unwrap();
    last.write_all_at(&[99; P as usize], 0).unwrap();
    let mapping = |page: u64, pages: u64, source, blob, offset: u64| Mapping {
        start: start + page * P,
        len: pages * P,
        offset: offset * P,
        source,
        blob,
        prot: 3,
        flags: 0,
    };
    let mappings = [
        mapping(0, 3, thaw_abi::image::SOURCE_BLOB, ancestor_number(0), 0),
        mapping(3, 1, SOURCE_IMAGE, 0, 0),
        mapping(4, 12, thaw_abi::image::SOURCE_BLOB, ancestor_number(0), 4),
    ];
    let parent = Chart::new(&mappings, 1, |_| true);
    let thawed = chart(0, start, SOURCE_IMAGE);
    let found = scan(vec![root, last], base(parent, thawed), &region(start, IN_PLACE));
    assert_eq!(found, [(0, of(0, 0)), (3, of(1, 0)), (4, Content::Own), (5, of(0, 5))]);
}

#[test]
fn new_mappings_are_zero_where_nobody_wrote() {
    let start = memory(None);
    fill(start, 2, 7);
    // The parent had something else there.
    let parent = || chart(0, start, SOURCE_IMAGE);
    let found = scan(vec![image(1)], base(parent(), parent()), &region(start, 0));
    assert_eq!(found, [(0, Content::Zero), (2, Content::Own), (3, Content::Zero)]);
}

#[test]
fn of_what_the_image_does_not_say_only_the_kernel_is_believed() {
    let start = memory(None);
    fill(start, 2, 7);
    let elsewhere = || base(chart(0, P, SOURCE_ZERO), chart(0, P, SOURCE_ZERO));
    let expected = [(0, Content::Zero), (2, Content::Own), (3, Content::Zero)];
    for flags in [IN_PLACE, IN_PLACE | REGION_KERNEL] {
        assert_eq!(scan(Vec::new(), elsewhere(), &region(start, flags)), expected);
    }
    // Content that the kernel does not admit to is read if it is the guest's.
    let file = image(1);
    let start = memory(Some(&file));
    let guest = scan(Vec::new(), elsewhere(), &region(start, IN_PLACE));
    assert_eq!(guest, [(0, Content::Own)]);
    let kernel = scan(Vec::new(), elsewhere(), &region(start, IN_PLACE | REGION_KERNEL));
    assert_eq!(kernel, [(0, Content::Zero)]);
}

#[test]
fn shared_memory_is_always_read() {
    let file = image(1);
    let start = memory(Some(&file));
    let wrong = || chart(0, start, SOURCE_ZERO);
    let shared = region(start, IN_PLACE | REGION_SHARED);
    assert_eq!(scan(vec![file], base(wrong(), wrong()), &shared), [(0, Content::Own)]);
}
