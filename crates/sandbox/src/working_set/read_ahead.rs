//! Bringing files into the page cache before they are needed, for cold boots.

use super::{WorkingSet, joined};
use crate::boot::BootPlan;
use crate::image::Image;
use rustix::fs::{Advice, fadvise};
use rustix::io::pread;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use thaw_abi::PAGE_SIZE;
use thaw_abi::image::{Mapping, SOURCE_BLOB, SOURCE_IMAGE};

/// Gaps in a file up to this are read rather than skipped when reading ahead.
pub(super) const READ_AHEAD_GAP: u64 = 64 * 1024;

impl WorkingSet {
    /// Brings the set's pages of the image file into the page cache in large
    /// requests, without waiting; returns the bytes asked for. For cold boots.
    pub fn read_ahead(&self, image: &Image) -> io::Result<u64> {
        read_ahead(image.file().as_fd(), self.ranges_of_image(image))
    }

    /// The same for the blobs that travel with the boot command.
    pub fn read_ahead_blobs(&self, plan: &BootPlan) -> io::Result<u64> {
        self.ranges_of_blobs(plan).map(|(file, ranges)| read_ahead(file, ranges)).sum()
    }

    /// Brings the same pages into the page cache for the boots to come: in large pieces, and waits
    /// until they are there.
    ///
    /// # Errors
    /// The host's error.
    pub fn read_in_order(&self, image: &Image, plan: &BootPlan) -> io::Result<()> {
        let blobs = self.ranges_of_blobs(plan);
        let mut files = blobs.chain([(image.file().as_fd(), self.ranges_of_image(image))]);
        files.try_for_each(|(file, ranges)| {
            ranges.into_iter().try_for_each(|range| read_in_order(file, range))
        })
    }

    fn ranges_of_image(&self, image: &Image) -> Vec<Range<u64>> {
        self.file_ranges(image.mappings(), |mapping| mapping.source == SOURCE_IMAGE)
    }

    /// The blobs that travel with a boot command, each with the parts that are touched.
    fn ranges_of_blobs<'a>(
        &'a self,
        plan: &'a BootPlan,
    ) -> impl Iterator<Item = (BorrowedFd<'a>, Vec<Range<u64>>)> {
        plan.blob_numbers.iter().zip(&plan.blob_files).map(|(&number, file)| {
            let is_of_it =
                |mapping: &Mapping| mapping.source == SOURCE_BLOB && mapping.blob == number;
            (file.as_fd(), self.file_ranges(plan.mappings(), is_of_it))
        })
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
        read_ahead(self.file().as_fd(), ranges)
    }
}

fn read_ahead(file: BorrowedFd<'_>, ranges: Vec<Range<u64>>) -> io::Result<u64> {
    let mut total = 0;
    for range in ranges {
        read_range_ahead(&file, range.clone())?;
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

/// Reads a part of a file page by page, from its begin to its end. The host kernel reads ahead of
/// whoever reads in order, in pieces that become larger each time (`page_cache_ra_order` in
/// mm/readahead.c), and what it has read in one piece it maps in one step: a page fault takes a sixth
/// of what it takes where [`read_range_ahead`], or page faults, have made each page a piece of its own.
fn read_in_order(file: BorrowedFd<'_>, range: Range<u64>) -> io::Result<()> {
    let mut page = [0; PAGE_SIZE as usize];
    for at in range.step_by(page.len()) {
        if pread(file, &mut page, at)? == 0 {
            break;
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::cached_pages;
    use std::io::Write;

    #[test]
    fn what_is_read_in_order_is_in_the_page_cache_up_to_the_end_of_the_file() {
        // Not in a memory file system, whose pages are never dropped.
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all(&vec![7; 1 << 20]).unwrap();
        drop_from_page_cache(&file).unwrap();
        let cached = |from, len| cached_pages(file.as_fd(), from, len);
        let before = cached(0, 0);
        read_in_order(file.as_fd(), 0x8_0000..0x8_4000).unwrap();
        if let (Ok(before), Ok(after)) = (before, cached(0x8_0000, 0x4000)) {
            assert_eq!((before, after), (0, 4));
        }
        read_in_order(file.as_fd(), 0x8_0000..0x20_0000).unwrap();
        if let Ok(after) = cached(0x8_0000, 0x8_0000) {
            assert_eq!(after, 128);
        }
    }
}
