//! The parsers of files in the store, one function each, for the fuzzers of `fuzz/`
//! and for the tests below. It exists in tests and with the feature `fuzzing` only.

use thaw_abi::extended::{is_kept, is_possible};
use thaw_abi::rootfs::Index;

use crate::function::FunctionRecord;
use crate::index::check_structure;

/// The index of a root file system, whatever its name (its checksum) says.
pub fn rootfs_index(bytes: &[u8]) {
    // The file is read into words, so that it is aligned.
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    let aligned = &mut bytemuck::cast_slice_mut(&mut words)[..bytes.len()];
    aligned.copy_from_slice(bytes);
    let Ok(index) = Index::parse(aligned) else { return };
    let is_sound = check_structure(&index).is_ok();
    for (number, inode) in (0u32..).zip(index.inodes()) {
        let entries = index.entries(inode);
        for entry in entries {
            let name = index.name(entry);
            let _ = index.lookup(inode, name);
            // Every entry of a sound index has a name and an inode.
            assert!(!is_sound || !name.is_empty() && index.inode(entry.inode).is_some());
        }
        let _ = index.link_target(inode);
        for attribute in index.extended(number) {
            let name = index.extended_name(attribute);
            let value = index.extended_value(attribute);
            assert!(!is_sound || is_kept(name, inode.mode) && is_possible(name, value));
        }
    }
    // Each extended attribute of a sound index is found.
    let found = (0u32..).zip(index.inodes()).map(|(number, _)| index.extended(number).len());
    assert!(!is_sound || found.sum::<usize>() == index.all_extended().len());
}

/// The header of a prefetch file of as many bytes as the first eight say.
pub fn prefetch_header(bytes: &[u8]) {
    let Some((len, page)) = bytes.split_first_chunk() else { return };
    crate::prefetch::check_header(page, u64::from_le_bytes(*len));
}

/// The header and the tables of a packed image of as many bytes as the first eight say.
pub fn packed_image(bytes: &[u8]) {
    let Some((len, rest)) = bytes.split_first_chunk() else { return };
    crate::pack::check_tables(rest, u64::from_le_bytes(*len));
}

/// The record of a function.
pub fn function_record(bytes: &[u8]) {
    let Ok(record) = serde_json::from_slice::<FunctionRecord>(bytes) else { return };
    let written = serde_json::to_vec(&record).expect("a record can be written");
    // Numbers with a fraction may differ in their last bit, so nothing is compared but:
    let again: FunctionRecord = serde_json::from_slice(&written).expect("and read again");
    assert_eq!((again.name, again.index, again.image), (record.name, record.index, record.image));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use thaw_mutate::survive;

    use crate::index::{Attributes, Content, Extended, Node, Tree};

    #[test]
    fn indexes_are_survived() {
        let mut tree = Tree::new();
        let node = |content| Node { content, attributes: Attributes::root(0o644) };
        let file = || node(Content::Regular(None));
        tree.add_at(Path::new("/bin/tool"), file()).unwrap();
        tree.add_at(Path::new("/bin/other"), file()).unwrap();
        tree.make_directories(Path::new("/a/b/c")).unwrap();
        let seed = tree.to_index().unwrap();
        let mut extended = Extended::default();
        extended.insert(b"user.a", b"value").unwrap();
        extended.insert(b"user.b", b"").unwrap();
        for path in ["/bin/tool", "/a/b"] {
            let id = tree.find(Path::new(path)).unwrap();
            tree.set_extended(id, extended.clone()).unwrap();
        }
        let with_attributes = tree.to_index().unwrap();
        survive("rootfs_index", &[&seed, &with_attributes], 100_000, rootfs_index);
    }

    #[test]
    fn prefetch_headers_are_survived() {
        let mut seed = (3 * 4096_u64).to_le_bytes().to_vec();
        seed.extend(crate::prefetch::tests::page(2 * 4096));
        survive("prefetch_header", &[&seed], 100_000, prefetch_header);
    }

    #[test]
    fn packed_images_are_survived() {
        let (tables, len) = crate::pack::seed();
        let seed = [&len.to_le_bytes()[..], &tables].concat();
        survive("packed_image", &[&seed], 100_000, packed_image);
    }

    #[test]
    fn records_are_survived() {
        let id = "11".repeat(32);
        let version = format!(
            r#""config":{{"a":[1,-2.5e300,null],"b":"\u00e4"}},"index":"{id}","image":"{id}","created_ms":5"#
        );
        let seed = format!(r#"{{"version":1,"name":"hello",{version},"previous":{{{version}}}}}"#);
        serde_json::from_str::<FunctionRecord>(&seed).unwrap();
        survive("function_record", &[seed.as_bytes()], 100_000, function_record);
    }
}
