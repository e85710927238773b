//! Bringing files into the page cache before they are needed, for cold boots.

use super::{WorkingSet, joined};
use crate::boot::BootPlan;
use crate::image::Image;
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use thaw_abi::image::{SOURCE_BLOB, SOURCE_IMAGE};

/// Gaps in a file up to this are read rather than skipped when reading ahead.
pub(super) const READ_AHEAD_GAP: u64 = 64 * 1024;

impl WorkingSet {
    /// Brings the set's pages of the image file into the page cache in large
    /// requests, without waiting; returns the bytes asked for. For cold boots.
    pub fn read_ahead(&self, image: &Image) -> io::Result<u64> {
        let ranges = self.file_ranges(image.mappings(), |mapping| mapping.source == SOURCE_IMAGE);
        read_ahead(image.file(), ranges)
    }

    /// The same for the blobs that travel with the boot command.
    pub fn read_ahead_blobs(&self, plan: &BootPlan) -> io::Result<u64> {
        let mut total = 0;
        for (&number, file) in plan.blob_numbers.iter().zip(&plan.blob_files) {
            let ranges = self.file_ranges(plan.mappings(), |mapping| {
                mapping.source == SOURCE_BLOB && mapping.blob == number
            });
            total += read_ahead(file, ranges)?;
        }
        Ok(total)
    }
}

impl Image {
    /// Brings the image's own pages into the page cache in large requests, `most` bytes at most,
    /// without waiting: what can be done at a boot of which no working set is known. Returns the
    /// bytes asked for.
    ///
    /// # Errors
    /// The host's error.
    pub fn read_ahead(&self, most: u64) -> io::Result<u64> {
        let own = self.mappings().iter().filter(|mapping| mapping.source == SOURCE_IMAGE);
        let mut ranges: Vec<_> = own.map(|own| own.offset..own.offset + own.len).collect();
        ranges.sort_by_key(|range| range.start);
        let mut left = most;
        let mut ranges = joined(ranges, READ_AHEAD_GAP);
        ranges.retain_mut(|range| {
            range.end = range.start + (range.end - range.start).min(left);
            left -= range.end - range.start;
            !range.is_empty()
        });
        read_ahead(self.file(), ranges)
    }
}

fn read_ahead(file: &impl AsFd, ranges: Vec<Range<u64>>) -> io::Result<u64> {
    let mut total = 0;
    for range in ranges {
        read_range_ahead(file, range.clone())?;
        total += range.end - range.start;
    }
    Ok(total)
}

/// Brings a part of a file into the page cache, without waiting.
pub(crate) fn read_range_ahead(file: &impl AsFd, range: Range<u64>) -> io::Result<()> {
    // The host kernel cuts off a longer request without a word (mm/readahead.c).
    const REQUEST: usize = 128 * 1024;
    for start in range.clone().step_by(REQUEST) {
        let len = std::num::NonZeroU64::new((range.end - start).min(REQUEST as u64));
        fadvise(file, start, len, Advice::WillNeed)?;
    }
    Ok(())
}

/// Drops a file's pages from the page cache, as far as no process maps them.
/// Writes dirty ones to disk first.
pub fn drop_from_page_cache(file: &File) -> io::Result<()> {
    file.sync_data()?;
    fadvise(file, 0, None, Advice::DontNeed)?;
    Ok(())
}
