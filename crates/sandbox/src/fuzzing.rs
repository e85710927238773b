//! The parsers of hostile bytes, one function each, for the fuzzers of `fuzz/` and
//! for the tests below. It exists in tests and with the feature `fuzzing` only.
//!
//! A function panics if a promise of its parser does not hold.

use std::fs::File;
use std::net::IpAddr;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{MemfdFlags, memfd_create};
use thaw_abi::image::{DEPTH_MAX, Mapping, SOURCE_BLOB, ancestor_depth};

use crate::boot::Rootfs;
use crate::broker::{BoundAccess, BoundDirectory, Broker, Directories, HostDirectory, Ids};
use crate::egress::dns::message as dns;
use crate::event::{Incoming, parse};
use crate::freeze::report::Report;
use crate::image::{self, ImageError};
use crate::state::protocol::Answer;
use crate::working_set::WorkingSet;

/// Most bytes of a packet that [`crate::Sandbox`] takes from a sandbox.
const PACKET_MAX: usize = 8192;

/// Most bytes of the tail of a reply.
const REPLY_MAX: usize = thaw_abi::control::MESSAGE_MAX - 64;

/// A packet from a sandbox on its control socket.
pub fn control_message(packet: &[u8]) {
    let _ = parse(&packet[..packet.len().min(PACKET_MAX)]);
}

/// A broker of a scratch directory: its root file system, and what is mounted in
/// it to be written to.
pub struct BrokerRequests {
    broker: Broker,
    directories: Directories,
}

impl std::fmt::Debug for BrokerRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BrokerRequests")
    }
}

impl BrokerRequests {
    /// Serves `directory` as the root and as mount 0, to be written to.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub fn new(directory: &Path) -> std::io::Result<Self> {
        let root = std::sync::Arc::new(HostDirectory::open(directory)?);
        let mut directories = Directories::new(Some(root.clone()));
        let bound = BoundDirectory::open(directory, BoundAccess::Write)?;
        directories.bind(0, &bound, Ids { uid: 0, gid: 0 });
        let broker = Broker::new(Rootfs::HostDirectory(root), None);
        Ok(Self { broker, directories })
    }

    /// Serves packets of a sandbox; each begins with its length, two bytes.
    pub fn serve(&mut self, mut packets: &[u8]) {
        while let Some((len, rest)) = packets.split_first_chunk::<2>() {
            let len = usize::from(u16::from_le_bytes(*len)).min(rest.len()).min(PACKET_MAX);
            let (packet, rest) = rest.split_at(len);
            packets = rest;
            if let Ok(Incoming::Request(request)) = parse(packet) {
                // Those about files, which threads of their own answer otherwise.
                if let Some(answer) = self.directories.answer_here(&request.question) {
                    let tail = answer.map_or(0, |answer| answer.tail_len());
                    assert!(tail <= REPLY_MAX, "the reply is too long");
                    continue;
                }
                let served = self.broker.serve(&request).expect("nothing waits");
                let (reply, _file) = served.expect("there is no egress");
                assert!(reply.len() <= thaw_abi::control::MESSAGE_MAX, "the reply is too long");
            }
        }
    }
}

/// A freeze report of a sandbox's kernel.
pub fn freeze_report(bytes: &[u8]) {
    let Ok(report) = Report::parse(bytes) else { return };
    assert!(!report.threads.is_empty() && !report.processes.is_empty());
    for pair in report.regions.windows(2) {
        let (first, second) = (&pair[0], &pair[1]);
        assert!((first.space, first.end()) <= (second.space, second.start), "regions overlap");
    }
}

/// An answer of the state helper, which a sandbox may have taken over.
pub fn state_answer(packet: &[u8]) {
    let Some((answer, text)) = Answer::parse(packet) else { return };
    assert!(text.chars().all(|character| character == '\t' || !character.is_control()));
    crate::freeze::take_answer(&answer, &text);
}

/// An image file. Its checksum is made right first: it would keep all but the
/// header from being read.
pub fn image(bytes: &[u8]) {
    let file = File::from(memfd_create("image", MemfdFlags::CLOEXEC).expect("a memory file"));
    file.write_all_at(bytes, 0).expect("room for the image");
    // Whoever opens it finds what it names.
    let open =
        |file| image::Image::open_with(file, &mut |named| Ok(image::AncestorFile::that_is(named)));
    let result = match open(file.try_clone().expect("a descriptor")) {
        Err(ImageError::Damaged(image::parse::WRONG_CHECKSUM)) => {
            image::parse::mend_checksum(&file).expect("its header was found");
            open(file)
        }
        result => result,
    };
    let Ok(image) = result else { return };
    for ancestor in image.ancestors() {
        assert!(ancestor.depth < image.header().depth && image.header().depth <= DEPTH_MAX);
    }
    let len_of = |mapping: &Mapping| {
        let depth = ancestor_depth(mapping.blob)?;
        let all = image.ancestors().iter();
        all.filter(|ancestor| ancestor.depth == depth).map(|ancestor| ancestor.file_len).next()
    };
    for mapping in image.mappings().iter().filter(|mapping| mapping.source == SOURCE_BLOB) {
        let end = mapping.offset + mapping.len;
        let limit = len_of(mapping).unwrap_or(i64::MAX as u64);
        assert!(end <= limit, "a mapping lies behind the end of its file");
    }
    for pair in image.mappings().windows(2) {
        let (first, second) = (&pair[0], &pair[1]);
        let end = first.start + first.len;
        assert!((first.space(), end) <= (second.space(), second.start), "mappings overlap");
    }
}

/// A recorded working set, without its checksum, which is added.
pub fn working_set(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    bytes.extend_from_slice(blake3::hash(&bytes).as_bytes());
    if let Ok(set) = WorkingSet::from_bytes(&bytes) {
        assert_eq!(WorkingSet::from_bytes(&set.to_bytes()), Ok(set));
    }
}

/// A DNS message of a guest, and the answers to it.
pub fn dns_message(bytes: &[u8]) {
    let dns::Parsed::Question(question) = dns::parse(bytes) else { return };
    if let Some(name) = &question.name {
        assert!(name.len() <= 255 && !name.ends_with('.'), "{name}");
    }
    let addresses: Vec<IpAddr> = (0..40)
        .map(|n| match n % 2 {
            0 => IpAddr::V4((0x0a00_0000 + n).into()),
            _ => IpAddr::V6((0xfd00_u128 << 112 | u128::from(n)).into()),
        })
        .collect();
    for outcome in
        [dns::Outcome::Addresses(addresses), dns::Outcome::NoSuchName, dns::Outcome::Failed]
    {
        for framing in [dns::Framing::Packets, dns::Framing::Stream] {
            if let Some(answer) = question.answer(&outcome, framing) {
                assert!(!matches!(dns::parse(&answer), dns::Parsed::Question(_)), "it asks back");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_abi::control::MessageHeader;
    use thaw_mutate::survive;

    fn packet(kind: u32, body: &[u8]) -> Vec<u8> {
        let header: MessageHeader = crate::message::header(kind, body.len(), 7);
        [bytemuck::bytes_of(&header), body].concat()
    }

    fn prefixed(packet: &[u8]) -> Vec<u8> {
        [&(packet.len() as u16).to_le_bytes()[..], packet].concat()
    }

    /// A message of each kind that a sandbox sends, with a body that may fit.
    fn packets() -> Vec<Vec<u8>> {
        let lengths = [0, 8, 16, 24, 32, 40];
        let kinds = (100..110).chain(200..250);
        let mut packets: Vec<Vec<u8>> = kinds
            .flat_map(|kind| lengths.map(|len| packet(kind, &vec![0; len])))
            .filter(|packet| parse(packet).is_ok())
            .collect();
        assert!(packets.len() > 10, "{}", packets.len());
        packets.push(packet(thaw_abi::control::MSG_FS_STAT, b"sub/file"));
        packets
    }

    #[test]
    fn control_messages_are_survived() {
        let packets = packets();
        let seeds: Vec<&[u8]> = packets.iter().map(Vec::as_slice).collect();
        survive("control_message", &seeds, 200_000, control_message);
    }

    /// Nothing outside the directory changes, whatever is asked for.
    #[test]
    fn broker_requests_are_survived() {
        use thaw_abi::bind::*;
        let all = tempfile::tempdir().unwrap();
        let served = all.path().join("served");
        std::fs::create_dir_all(served.join("sub")).unwrap();
        std::fs::write(served.join("file"), "content").unwrap();
        std::fs::write(all.path().join("secret"), "secret").unwrap();
        std::os::unix::fs::symlink("../secret", served.join("out")).unwrap();
        let ask = |operation, a, b, tail: &[u8]| {
            let request = BindRequest { mount: 0, operation, a, b, c: 64 };
            let body = [bytemuck::bytes_of(&request), tail].concat();
            prefixed(&packet(thaw_abi::control::MSG_BIND, &body))
        };
        let mut seeds: Vec<Vec<u8>> = packets().iter().map(|packet| prefixed(packet)).collect();
        for operation in BIND_STAT..=BIND_STATFS {
            let tail: &[u8] = match operation {
                BIND_RENAME | BIND_LINK | BIND_SYMLINK => b"file\0out/../../secret",
                _ => b"sub/new",
            };
            let open = ask(BIND_OPEN, 0o102, 0o644, b"sub/new");
            seeds.push([open, ask(operation, 1, 8, tail), ask(operation, 0, 0, b"out")].concat());
        }
        let seeds: Vec<&[u8]> = seeds.iter().map(Vec::as_slice).collect();
        let mut broker = BrokerRequests::new(&served).unwrap();
        survive("broker_requests", &seeds, 10_000, |bytes| broker.serve(bytes));
        let mut names: Vec<_> = std::fs::read_dir(all.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["secret", "served"]);
        assert_eq!(std::fs::read_to_string(all.path().join("secret")).unwrap(), "secret");
    }

    #[test]
    fn freeze_reports_are_survived() {
        survive(
            "freeze_report",
            &[&crate::freeze::report::tests::sample()],
            100_000,
            freeze_report,
        );
    }

    #[test]
    fn state_answers_are_survived() {
        let done = Answer { numbers: [9, 8, 7, 6, 5, 4, 3, 2], ..Answer::new(5) };
        let seeds: Vec<Vec<u8>> = (0..=8)
            .map(|error| Answer { error, errno: 5, ..Answer::new(6) }.with_text("why \x1b[2J"))
            .chain([done.with_text("")])
            .collect();
        let seeds: Vec<&[u8]> = seeds.iter().map(Vec::as_slice).collect();
        survive("state_answer", &seeds, 100_000, state_answer);
    }

    #[test]
    fn working_sets_are_survived() {
        let set = crate::working_set::tests::sample().to_bytes();
        survive("working_set", &[&set[..set.len() - 32]], 100_000, working_set);
    }

    #[test]
    fn dns_messages_are_survived() {
        let question = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\x01\x03www\x07example\x03com\0\0\x1c\0\x01\
            \0\0\x29\x10\0\0\0\0\0\0\0";
        let answer = b"\x12\x34\x81\x80\0\x01\0\x01\0\0\0\0\x01a\0\0\x01\0\x01\xc0\x0c\0\x01\0\x01\
            \0\0\0\x05\0\x04\x7f\0\0\x01";
        survive("dns_message", &[&question[..], &answer[..]], 100_000, dns_message);
    }

    /// A small image that passes: notes and two pages.
    fn sample_image() -> Vec<u8> {
        use crate::image::elf::*;
        use bytemuck::{Zeroable, bytes_of};
        use thaw_abi::image::*;
        const NOTES: u64 = 0x100;
        let len = 0x3000;
        let mapping = Mapping {
            start: 0x40_0000,
            len: 0x2000,
            offset: 0x1000,
            source: SOURCE_IMAGE,
            blob: 0,
            prot: 3,
            flags: 0,
        };
        let other = Mapping { start: 0x50_0000, source: SOURCE_BLOB, blob: 3, ..mapping };
        let of_root = Mapping { start: 0x60_0000, blob: ancestor_number(0), ..other };
        let version = IMAGE_VERSION_DIFFERENTIAL;
        let header = ImageHeader { version, depth: 2, file_len: len, ..ImageHeader::zeroed() };
        let root = Ancestor { depth: 0, file_len: 0x5000, ..Ancestor::zeroed() };
        let mut notes = Vec::new();
        push_note(&mut notes, b"CORE\0", 1, &[0; 336]);
        push_note(&mut notes, NOTE_OWNER, NOTE_HEADER, bytes_of(&header));
        let mappings = [mapping, other, of_root];
        push_note(&mut notes, NOTE_OWNER, NOTE_MAPPINGS, bytemuck::cast_slice(&mappings));
        push_note(&mut notes, NOTE_OWNER, NOTE_BLOBS, &[3, 0, 0, 0]);
        push_note(&mut notes, NOTE_OWNER, NOTE_ANCESTORS, bytes_of(&root));
        push_note(&mut notes, NOTE_OWNER, NOTE_ABOUT, b"{}");
        let file = FileHeader {
            ident: IDENT,
            kind: ET_CORE,
            machine: EM_X86_64,
            phoff: size_of::<FileHeader>() as u64,
            phentsize: size_of::<ProgramHeader>() as u16,
            phnum: 1,
            ..FileHeader::zeroed()
        };
        let segment = ProgramHeader {
            kind: PT_NOTE,
            offset: NOTES,
            filesz: notes.len() as u64,
            ..ProgramHeader::zeroed()
        };
        let mut image = [bytes_of(&file), bytes_of(&segment)].concat();
        image.resize(NOTES as usize, 0);
        image.extend_from_slice(&notes);
        image.resize(len as usize, 0);
        image
    }

    #[test]
    fn an_image_is_moved_to_another_index_and_names_no_other_contents() {
        use thaw_abi::image::{Ancestor, SOURCE_BLOB, ancestor_depth};
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &sample_image()).unwrap();
        image::parse::mend_checksum(&file).unwrap();
        let open = || {
            let find = &mut |named: &Ancestor| Ok(image::AncestorFile::that_is(named));
            image::Image::open_with(file.try_clone().unwrap(), find).unwrap()
        };
        let image = open();
        let mapped = image.mappings().iter().filter(|mapping| mapping.source == SOURCE_BLOB);
        let named = mapped.map(|mapping| mapping.blob).chain(image.blobs().iter().copied());
        let most = named.filter(|&number| ancestor_depth(number).is_none()).max().unwrap();
        image.check_contents(most as usize + 1).unwrap();
        image.check_contents(most as usize).unwrap_err();
        let before = *image.header();
        image.move_to_index([7; 32]).unwrap();
        let after = *open().header();
        assert_eq!((after.index, after.kernel_build), ([7; 32], before.kernel_build));
        assert_ne!(after.checksum, before.checksum);
    }

    #[test]
    fn the_sample_image_passes() {
        use thaw_abi::image::Ancestor;
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &sample_image()).unwrap();
        image::parse::mend_checksum(&file).unwrap();
        let differential = image::Image::open(file.try_clone().unwrap()).unwrap_err();
        assert!(matches!(differential, ImageError::Differential), "{differential}");
        let find = &mut |named: &Ancestor| Ok(image::AncestorFile::that_is(named));
        let image = image::Image::open_with(file.try_clone().unwrap(), find).unwrap();
        assert_eq!((image.mappings().len(), image.ancestors().len()), (3, 1));
        // Another file than the one that it names.
        for other in [
            Ancestor { depth: 1, ..image.ancestors()[0] },
            Ancestor { file_len: 0x6000, ..image.ancestors()[0] },
            Ancestor { checksum: [1; 32], ..image.ancestors()[0] },
        ] {
            let find = &mut |_: &Ancestor| Ok(image::AncestorFile::that_is(&other));
            let refused = image::Image::open_with(file.try_clone().unwrap(), find).unwrap_err();
            assert!(matches!(refused, ImageError::WrongAncestor { depth: 0 }), "{refused}");
        }
    }

    #[test]
    fn images_are_survived() {
        survive("image", &[&sample_image()], 20_000, image);
    }
}
