//! What an image says of memory: which file has the content of which addresses.

use thaw_abi::image::{Mapping, SOURCE_BLOB, SOURCE_IMAGE, ancestor_depth, ancestor_number};

/// Where the content of a page can be had from without storing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It is zero.
    Zero,
    /// A blob of the rootfs or an ancestor of the image.
    File {
        /// Its number among the blobs of a mapping.
        number: u32,
        /// Offset of the first byte.
        offset: u64,
    },
}

impl Origin {
    /// That of what lies `bytes` further on.
    pub fn further(self, bytes: u64) -> Self {
        match self {
            Self::Zero => Self::Zero,
            Self::File { number, offset } => Self::File { number, offset: offset + bytes },
        }
    }
}

/// A range of memory with one origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub start: u64,
    pub end: u64,
    pub origin: Origin,
}

/// The memory of an image, as another image that descends from it refers to it.
#[derive(Debug, Default)]
pub(crate) struct Chart {
    /// Number of the address space and piece, sorted, not overlapping.
    pieces: Vec<(u32, Piece)>,
}

impl Chart {
    /// The memory of the image of this depth, whose mappings were checked. `is_known` says which
    /// ancestors may be referred to: of the others, nothing is known.
    pub fn new(mappings: &[Mapping], depth: u32, is_known: impl Fn(u32) -> bool) -> Self {
        let piece = |mapping: &Mapping| {
            let number = match mapping.source {
                SOURCE_IMAGE => Some(ancestor_number(depth)),
                SOURCE_BLOB => Some(mapping.blob),
                _ => None,
            };
            if number.and_then(ancestor_depth).is_some_and(|depth| !is_known(depth)) {
                return None;
            }
            let origin = match number {
                Some(number) => Origin::File { number, offset: mapping.offset },
                None => Origin::Zero,
            };
            let (start, end) = (mapping.start, mapping.start + mapping.len);
            Some((mapping.space(), Piece { start, end, origin }))
        };
        Self { pieces: mappings.iter().filter_map(piece).collect() }
    }

    /// The pieces of a range of an address space, in order, cut to it; there may be gaps.
    pub fn within(&self, space: u32, start: u64, end: u64) -> impl Iterator<Item = Piece> {
        let first = self.pieces.partition_point(|(of, piece)| (*of, piece.end) <= (space, start));
        let here = self.pieces[first..]
            .iter()
            .take_while(move |(of, piece)| *of == space && piece.start < end);
        here.map(move |(_, piece)| {
            let from = piece.start.max(start);
            let origin = piece.origin.further(from - piece.start);
            Piece { start: from, end: piece.end.min(end), origin }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_abi::image::{MAPPING_SPACE_SHIFT, SOURCE_ZERO};

    fn mapping(start: u64, len: u64, source: u32, blob: u32, offset: u64) -> Mapping {
        Mapping { start, len, offset, source, blob, prot: 3, flags: 0 }
    }

    #[test]
    fn an_image_tells_where_its_memory_is() {
        let mappings = [
            mapping(10, 10, SOURCE_IMAGE, 0, 100),
            mapping(20, 10, SOURCE_ZERO, 0, 0),
            mapping(30, 10, SOURCE_BLOB, 7, 200),
            mapping(40, 10, SOURCE_BLOB, ancestor_number(0), 300),
            mapping(50, 10, SOURCE_BLOB, ancestor_number(1), 300),
            Mapping { flags: 1 << MAPPING_SPACE_SHIFT, ..mapping(10, 5, SOURCE_IMAGE, 0, 900) },
        ];
        let chart = Chart::new(&mappings, 2, |depth| depth != 1);
        let pieces = |space, start, end| {
            let found = chart.within(space, start, end);
            found.map(|piece| (piece.start, piece.end, piece.origin)).collect::<Vec<_>>()
        };
        let file = |number, offset| Origin::File { number, offset };
        let own = ancestor_number(2);
        assert_eq!(
            pieces(0, 15, 60),
            [
                (15, 20, file(own, 105)),
                (20, 30, Origin::Zero),
                (30, 40, file(7, 200)),
                (40, 50, file(ancestor_number(0), 300)),
            ]
        );
        assert_eq!(pieces(0, 32, 34), [(32, 34, file(7, 202))]);
        assert_eq!(pieces(1, 0, 100), [(10, 15, file(own, 900))]);
        assert!(pieces(0, 0, 10).is_empty() && pieces(2, 0, 100).is_empty());
    }
}
