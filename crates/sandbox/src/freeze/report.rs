//! Reading the kernel's freeze report. Every number in it is hostile.

use thaw_abi::freeze::{
    FrozenRegion, FrozenThread, NO_ORIGIN, REGION_FROM_IMAGE, REGION_IN_PLACE, REGION_KERNEL,
    REGION_SHARED, REGION_STACK, REGION_WIPE, REPORT_MAGIC, REPORT_MAX, ReportHeader,
};
use thaw_abi::image::MAX_SPACES;
use thaw_abi::layout::LAYOUT_END;
use thaw_abi::rootfs::NO_BLOB;

use super::FreezeError;
use crate::area::{Area, area_of};

/// Most threads that an image describes.
const THREADS_MAX: u32 = 65_536;
/// Most bytes of the path of a mapped file (`PATH_MAX`).
const PATH_MAX: u32 = 4096;
/// Most bytes of all paths: regions may share the bytes of one, but each gets a copy.
const PATHS_MAX: usize = 16 << 20;

/// A range that the sandbox has mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub start: u64,
    pub len: u64,
    /// The mapped blob and the offset in it of the first byte.
    pub blob: Option<(u32, u64)>,
    /// `PROT_*`.
    pub prot: u32,
    /// `REGION_*`.
    pub flags: u32,
    /// Path of the mapped file; empty for anonymous memory.
    pub path: Vec<u8>,
    /// Number of the address space.
    pub space: u32,
}

impl Region {
    pub fn end(&self) -> u64 {
        self.start + self.len
    }

    pub fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// A freeze report, checked.
#[derive(Debug)]
pub(crate) struct Report {
    /// Process of each address space, as the sandbox' pid namespace numbers it.
    pub processes: Vec<u32>,
    /// Number of each address space in the image that the sandbox is a copy of.
    pub origins: Vec<Option<u32>>,
    /// Sorted by address space and address, not overlapping.
    pub regions: Vec<Region>,
    /// At least one; the first is the main thread.
    pub threads: Vec<FrozenThread>,
    /// Blobs in use.
    pub blobs: Vec<u32>,
    pub auxv: Vec<u8>,
    pub pid: u32,
}

/// Whether a report can lie there.
pub(crate) fn is_plausible_place(address: u64, len: u64) -> bool {
    len <= REPORT_MAX && address.checked_add(len).is_some_and(|end| end <= LAYOUT_END)
}

/// Takes values off the front of a byte string.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<T: bytemuck::AnyBitPattern>(&mut self, count: u32) -> Option<Vec<T>> {
        let bytes = self.bytes((count as usize).checked_mul(size_of::<T>())?)?;
        Some(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }
}

impl Report {
    /// Reads a report from its bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, FreezeError> {
        let truncated = || FreezeError::Report("it is shorter than its counts say".to_owned());
        let wrong = |what: &str| Err(FreezeError::Report(what.to_owned()));
        let mut reader = Reader(bytes);
        let [header] = reader.array::<ReportHeader>(1).ok_or_else(truncated)?[..] else {
            return Err(truncated());
        };
        if header.magic != REPORT_MAGIC {
            return wrong("it does not begin as a report");
        }
        if header.thread_count == 0 || header.thread_count > THREADS_MAX {
            return wrong("its number of threads is impossible");
        }
        if header.space_count == 0 || header.space_count > MAX_SPACES {
            return wrong("its number of address spaces is impossible");
        }
        let processes = reader.array::<u32>(header.space_count).ok_or_else(truncated)?;
        let origins = reader.array::<u32>(header.space_count).ok_or_else(truncated)?;
        let origins = origins.into_iter().map(|number| (number != NO_ORIGIN).then_some(number));
        let origins = origins.collect();
        let regions = reader.array::<FrozenRegion>(header.region_count).ok_or_else(truncated)?;
        let threads = reader.array::<FrozenThread>(header.thread_count).ok_or_else(truncated)?;
        let blobs = reader.array::<u32>(header.blob_count).ok_or_else(truncated)?;
        let padding = (bytes.len() - reader.0.len()).next_multiple_of(8) + reader.0.len();
        reader.bytes(padding - bytes.len()).ok_or_else(truncated)?;
        let auxv = reader.bytes(header.auxv_len as usize).ok_or_else(truncated)?.to_vec();
        let strings = reader.bytes(header.strings_len as usize).ok_or_else(truncated)?;

        let mut checked: Vec<Region> = Vec::with_capacity(regions.len());
        let mut paths = 0;
        for region in &regions {
            let region =
                check(region, strings).map_err(|what| FreezeError::Report(what.to_owned()))?;
            if region.space >= header.space_count {
                return wrong("a region belongs to no address space");
            }
            let is_behind = |previous: &Region| {
                (previous.space, previous.end()) <= (region.space, region.start)
            };
            if !checked.last().is_none_or(is_behind) {
                return wrong("its regions overlap or are not sorted");
            }
            paths += region.path.len();
            if paths > PATHS_MAX {
                return wrong("the paths of its regions are too long together");
            }
            checked.push(region);
        }
        Ok(Self { processes, origins, regions: checked, threads, blobs, auxv, pid: header.pid })
    }
}

fn check(region: &FrozenRegion, strings: &[u8]) -> Result<Region, &'static str> {
    const FLAGS: u32 = REGION_KERNEL
        | REGION_SHARED
        | REGION_WIPE
        | REGION_FROM_IMAGE
        | REGION_STACK
        | REGION_IN_PLACE;
    let area = area_of(region.start, region.len).ok_or("a region lies where none can be")?;
    if (area == Area::Kernel) != (region.flags & REGION_KERNEL != 0) {
        return Err("a region is marked as somebody else's");
    }
    if region.flags & !FLAGS != 0 || region.prot & !7 != 0 {
        return Err("a region has unknown flags");
    }
    let blob = match region.blob {
        NO_BLOB => None,
        blob => {
            let end = region.blob_offset.checked_add(region.len);
            if !region.blob_offset.is_multiple_of(thaw_abi::PAGE_SIZE)
                || end.is_none_or(|end| end > i64::MAX as u64)
            {
                return Err("a region maps an impossible part of a blob");
            }
            Some((blob, region.blob_offset))
        }
    };
    if region.path_len > PATH_MAX {
        return Err("the path of a region is too long");
    }
    let path = (region.path_offset as usize)
        .checked_add(region.path_len as usize)
        .and_then(|end| strings.get(region.path_offset as usize..end))
        .ok_or("the path of a region lies outside the report")?;
    Ok(Region {
        start: region.start,
        len: region.len,
        blob,
        prot: region.prot,
        flags: region.flags,
        path: path.to_vec(),
        space: region.space,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use bytemuck::{Zeroable, bytes_of};

    fn region(start: u64, len: u64) -> FrozenRegion {
        FrozenRegion { start, len, blob: NO_BLOB, prot: 3, ..FrozenRegion::zeroed() }
    }

    fn encode(regions: &[FrozenRegion], change: impl FnOnce(&mut ReportHeader)) -> Vec<u8> {
        let mut header = ReportHeader {
            magic: REPORT_MAGIC,
            region_count: regions.len() as u32,
            thread_count: 1,
            blob_count: 1,
            auxv_len: 16,
            strings_len: 4,
            pid: 1,
            space_count: 1,
            reserved: 0,
        };
        change(&mut header);
        let mut bytes = bytes_of(&header).to_vec();
        bytes.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(bytemuck::cast_slice(regions));
        bytes.extend_from_slice(bytes_of(&FrozenThread::zeroed()));
        bytes.extend_from_slice(&[5, 0, 0, 0]);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes.extend_from_slice(&[6; 16]);
        bytes.extend_from_slice(b"/bin");
        bytes
    }

    /// A report that passes.
    pub(crate) fn sample() -> Vec<u8> {
        let mapped = FrozenRegion { blob: 5, path_len: 4, ..region(0x40_0000, 0x2000) };
        encode(&[mapped, region(0x50_0000, 0x1000), region(0x60_0000, 0x4000)], |_| {})
    }

    #[test]
    fn a_report_is_read() {
        let mapped = FrozenRegion { blob: 5, path_len: 4, ..region(0x40_0000, 0x2000) };
        let report = Report::parse(&encode(&[mapped, region(0x50_0000, 0x1000)], |_| {})).unwrap();
        assert_eq!((report.blobs, report.origins), (vec![5], vec![Some(0)]));
        assert_eq!(report.auxv, [6; 16]);
        assert_eq!(report.regions[0].path, b"/bin");
        assert_eq!(report.regions[0].blob, Some((5, 0)));
        assert_eq!(report.regions[1].blob, None);
    }

    #[test]
    fn an_address_space_may_be_newer_than_the_image() {
        let mut bytes = encode(&[region(0x40_0000, 0x2000)], |_| {});
        let at = size_of::<ReportHeader>() + 4;
        bytes[at..at + 4].copy_from_slice(&NO_ORIGIN.to_le_bytes());
        assert_eq!(Report::parse(&bytes).unwrap().origins, [None]);
    }

    #[test]
    fn lies_are_refused() {
        let good = region(0x40_0000, 0x2000);
        for regions in [
            vec![good, region(0x40_1000, 0x1000)],
            vec![region(0x50_0000, 0x1000), good],
            vec![region(0x40_0000, 0x7fff_ffff_ffff_f000)],
            vec![region(0x40_0001, 0x1000)],
            vec![region(thaw_abi::layout::KERNEL_BASE, 0x1000)],
            vec![region(thaw_abi::layout::HEAP_BASE, 0x1000)],
            vec![FrozenRegion { flags: REGION_KERNEL, ..good }],
            vec![FrozenRegion { flags: 1 << 20, ..good }],
            vec![FrozenRegion { prot: 8, ..good }],
            vec![FrozenRegion { path_len: 5, ..good }],
            vec![FrozenRegion { path_offset: u32::MAX, path_len: u32::MAX, ..good }],
            vec![FrozenRegion { blob: 1, blob_offset: 1, ..good }],
            vec![FrozenRegion { blob: 1, blob_offset: !0xfff, ..good }],
        ] {
            Report::parse(&encode(&regions, |_| {})).expect_err("a lie");
        }
        let headers: [fn(&mut ReportHeader); 7] = [
            |header| header.magic[0] = 0,
            |header| header.region_count = u32::MAX,
            |header| header.thread_count = 0,
            |header| header.thread_count = u32::MAX,
            |header| header.blob_count = u32::MAX,
            |header| header.auxv_len = u32::MAX,
            |header| header.strings_len = 5,
        ];
        for change in headers {
            Report::parse(&encode(&[good], change)).expect_err("a lie");
        }
    }

    /// Before paths were bounded, such a report of 64 MiB took terabytes.
    #[test]
    fn regions_that_share_one_long_path_do_not_multiply_it() {
        let encode_with = |count: u64, path_len: u32| {
            let regions: Vec<_> = (0..count)
                .map(|at| FrozenRegion { path_len, ..region(0x40_0000 + at * 0x2000, 0x1000) })
                .collect();
            let mut bytes = encode(&regions, |header| header.strings_len = path_len);
            bytes.resize(bytes.len() - 4 + path_len as usize, b'/');
            bytes
        };
        let most = PATHS_MAX as u64 / u64::from(PATH_MAX);
        let report = Report::parse(&encode_with(most, PATH_MAX)).unwrap();
        assert_eq!(report.regions.len() as u64, most);
        for (count, len) in [(most + 1, PATH_MAX), (1, PATH_MAX + 1), (60_000, 1 << 20)] {
            let error = Report::parse(&encode_with(count, len)).unwrap_err().to_string();
            assert!(error.contains("too long"), "{error}");
        }
    }

    #[test]
    fn every_prefix_and_every_flipped_byte_is_survived() {
        let bytes = encode(&[region(0x40_0000, 0x2000), region(0x50_0000, 0x1000)], |_| {});
        for len in 0..bytes.len() {
            Report::parse(&bytes[..len]).expect_err("a prefix");
        }
        for position in 0..bytes.len() {
            for flip in [1, 0x80, 0xff] {
                let mut bytes = bytes.clone();
                bytes[position] ^= flip;
                let _ = Report::parse(&bytes);
            }
        }
    }
}
