//! Programs for copies of interpreters that can load no bootstrap.
//!
//! Such an interpreter is started with *placeholders* in the place of the program's arguments, of
//! which one is the path at which it is frozen, and with variables that are room for the program's.
//! It has copied all of them to its heap before it looks for its program. So a copy has the
//! program's written over them: in the heap, where the interpreter finds them, and on the stack. Each
//! array of pointers to the variables gets pointers to those that the program has, in its order.
//!
//! All is looked for in the template's image. If it is not there as it is known, no copy is made.

use super::fit::Unfit;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::unix::fs::FileExt;
use thaw_abi::control::START_PATH;
use thaw_abi::image::{MAPPING_KERNEL, MAPPING_SHARED, Mapping, SOURCE_IMAGE};
use thaw_sandbox::{Image, MemoryWrites};

/// Bytes of the longest argument that there is room for.
pub(super) const WORD_MAX: usize = 1023;
/// Bytes of memory in which placeholders are looked for.
const MEMORY_MAX: u64 = 64 << 20;
/// How often one of the template's own variables may lie in it.
const PLACES_MAX: usize = 16;
/// Arrays of pointers to the variables: two in the heap, of which PHP frees by one, and one on the stack.
const ARRAYS: usize = 3;
/// Where an interpreter has its arguments and variables: on the stack, and in its heap.
const COPIES: usize = 2;
/// How many variables there is room for, and of how many bytes each with its name. All fit into the
/// start command of the template. That of a copy has each text three times, so not all of this room
/// can be used at a time.
const ROOM: [(usize, usize); 3] = [(96, 127), (16, 1023), (4, 8191)];
/// The beginning of the names of variables that are room.
const ROOM_NAME: &str = "THAW_TEMPLATE_";

/// An argument of a template, and what a copy has in its place.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Replacement {
    pub placeholder: String,
    pub text: String,
}

/// A word like no other.
pub(super) fn word(number: usize) -> String {
    format!("{:-<WORD_MAX$}", format!("thaw-template-{number}-"))
}

/// The path at which the interpreter is frozen, as long as others may be.
pub(super) fn start_path() -> String {
    format!("{START_PATH:/>WORD_MAX$}")
}

/// The variables that are room.
pub(super) fn room() -> impl Iterator<Item = (String, String)> {
    let sizes = ROOM.into_iter().flat_map(|(count, bytes)| (0..count).map(move |_| bytes));
    sizes.enumerate().map(|(number, bytes)| {
        let name = format!("{ROOM_NAME}{number:03}");
        let value = "-".repeat(bytes - name.len() - 1);
        (name, value)
    })
}

/// Whether there is room for the variables of a program.
///
/// # Errors
/// There is not.
pub(super) fn check_room(environment: &BTreeMap<String, String>) -> Result<(), Unfit> {
    let room: BTreeMap<_, _> = room().collect();
    arrange(&variables(&room), &variables(environment)).map(drop)
}

/// The memory that the one process of an image can write to, as far as the image stores it.
pub(super) struct Memory {
    /// By address; none begins where another one ends.
    areas: Vec<(u64, Vec<u8>)>,
}

impl Memory {
    /// Reads it; `None`: it is too large.
    ///
    /// # Errors
    /// The image cannot be read.
    pub fn of(image: &Image) -> io::Result<Option<Self>> {
        let mut areas: Vec<(u64, Vec<u8>)> = Vec::new();
        let own = || image.mappings().iter().filter(|mapping| is_own(mapping));
        if own().map(|mapping| mapping.len).sum::<u64>() > MEMORY_MAX {
            return Ok(None);
        }
        for mapping in own() {
            let mut bytes = vec![0; mapping.len as usize];
            image.file().read_exact_at(&mut bytes, mapping.offset)?;
            match areas.last_mut() {
                Some((start, before)) if *start + before.len() as u64 == mapping.start => {
                    before.append(&mut bytes);
                }
                _ => areas.push((mapping.start, bytes)),
            }
        }
        Ok(Some(Self { areas }))
    }

    /// All that lies between two NULs, with its address.
    fn strings(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.areas.iter().flat_map(|(start, bytes)| {
            let mut at = *start;
            bytes.split(|&byte| byte == 0).map(move |string| {
                let address = at;
                at += string.len() as u64 + 1;
                (address, string)
            })
        })
    }

    /// The aligned words of each area, and its address, which is a page's.
    fn words(&self) -> impl Iterator<Item = (u64, Vec<u64>)> {
        self.areas.iter().map(|(start, bytes)| {
            let (words, _) = bytes.as_chunks::<8>();
            (*start, words.iter().map(|&word| u64::from_le_bytes(word)).collect())
        })
    }
}

fn is_own(mapping: &Mapping) -> bool {
    mapping.source == SOURCE_IMAGE
        && mapping.prot & libc::PROT_WRITE as u32 != 0
        && mapping.flags & (MAPPING_KERNEL | MAPPING_SHARED) == 0
        && mapping.space() == 0
}

/// An array of pointers to all variables of a template.
struct Array {
    address: u64,
    pointers: Vec<u64>,
}

impl Array {
    fn has(&self, place: u64) -> bool {
        self.pointers.contains(&place)
    }
}

/// What is written to the memory of a copy. `words` are the arguments, `template` is the environment
/// that the interpreter was started with, and `program` that of the program.
///
/// # Errors
/// There is no room, or the memory is not as it is known.
pub(super) fn writes(
    memory: &Memory,
    words: &[Replacement],
    template: &BTreeMap<String, String>,
    program: &BTreeMap<String, String>,
) -> Result<MemoryWrites, Unfit> {
    let (template, program) = (variables(template), variables(program));
    let places = arrange(&template, &program)?;
    let placeholders = words.iter().map(|word| &word.placeholder).chain(&template);
    let texts: Vec<&str> = placeholders.map(String::as_str).collect();
    let found = find(memory, &texts);
    let (arguments, found) = found.split_at(words.len());
    let rooms = found.iter().zip(&template).filter(|(_, variable)| is_room(variable));
    let rooms: Vec<_> = rooms.map(|(places, _)| places).collect();
    let are_known = arguments.iter().chain(rooms.iter().copied()).all(|all| all.len() == COPIES)
        && found.iter().all(|places| places.len() <= PLACES_MAX);
    let arrays = if are_known { arrays(memory, found) } else { Vec::new() };
    let in_arrays = |place: u64| arrays.iter().filter(|array| array.has(place)).count();
    let is_known = arrays.len() == ARRAYS
        && rooms.iter().all(|places| places.iter().all(|&place| in_arrays(place) > 0))
        && runs_of_pointers(memory, &rooms) == ARRAYS;
    if !is_known {
        return Err(Unfit("its interpreter does not keep its arguments as it is known".to_owned()));
    }
    let mut writes = MemoryWrites::default();
    let mut write = |places: &[u64], text: &str| {
        let bytes = [text.as_bytes(), &[0]].concat();
        places.iter().for_each(|&place| writes.add(place, bytes.clone()));
    };
    for (places, word) in arguments.iter().zip(words) {
        write(places, &word.text);
    }
    for (&place, text) in places.iter().zip(&program) {
        if is_room(&template[place]) {
            write(&found[place], text);
        }
    }
    for array in &arrays {
        let pointers = places.iter().map(|&place| array.pointers[place]).chain([0]);
        writes.add(array.address, pointers.flat_map(u64::to_le_bytes).collect());
    }
    Ok(writes)
}

/// An environment as it lies in memory.
fn variables(environment: &BTreeMap<String, String>) -> Vec<String> {
    environment.iter().map(|(name, value)| format!("{name}={value}")).collect()
}

fn is_room(variable: &str) -> bool {
    variable.starts_with(ROOM_NAME)
}

/// For each variable of a program, which of the template's is in its place: the same one, or the
/// smallest that is room for it.
fn arrange(template: &[String], program: &[String]) -> Result<Vec<usize>, Unfit> {
    let numbered = || template.iter().enumerate();
    let mut room: Vec<_> = numbered().filter(|(_, variable)| is_room(variable)).collect();
    // The smallest is the last.
    room.sort_by_key(|(_, variable)| Reverse(variable.len()));
    let mut places = vec![None; program.len()];
    let mut others = Vec::new();
    for (number, variable) in program.iter().enumerate() {
        places[number] = numbered()
            .find(|(_, there)| *there == variable && !is_room(there))
            .map(|(there, _)| there);
        if places[number].is_none() {
            others.push((variable.len(), number));
        }
    }
    // The shortest first: none takes what a longer one needs.
    others.sort_unstable();
    for (len, number) in others {
        while room.last().is_some_and(|(_, variable)| variable.len() < len) {
            room.pop();
        }
        let Some((there, _)) = room.pop() else { return Err(no_room(len)) };
        places[number] = Some(there);
    }
    Ok(places.into_iter().flatten().collect())
}

fn no_room(len: usize) -> Unfit {
    let (_, longest) = ROOM[ROOM.len() - 1];
    let all: usize = ROOM.iter().map(|(count, _)| count).sum();
    let long: Vec<_> = (1..ROOM.len())
        .map(|class| {
            let count: usize = ROOM[class..].iter().map(|(count, _)| count).sum();
            format!("{count} of more than {} bytes", ROOM[class - 1].1)
        })
        .collect();
    Unfit(match len > longest {
        true => format!("a variable of its environment has more than {longest} bytes"),
        false => format!(
            "its environment has more than {all} variables, or more than {}",
            long.join(", or ")
        ),
    })
}

/// Where each of these lies as a string of its own.
fn find(memory: &Memory, texts: &[&str]) -> Vec<Vec<u64>> {
    let numbers: HashMap<&[u8], usize> =
        texts.iter().enumerate().map(|(number, text)| (text.as_bytes(), number)).collect();
    let mut found = vec![Vec::new(); texts.len()];
    // Most strings have a length that none of these has, and need not be hashed.
    let longest = texts.iter().map(|text| text.len()).max().unwrap_or_default();
    let mut lengths = vec![false; longest + 1];
    texts.iter().for_each(|text| lengths[text.len()] = true);
    for (address, string) in memory.strings() {
        if lengths.get(string.len()) != Some(&true) {
            continue;
        }
        if let Some(&number) = numbers.get(string) {
            found[number].push(address);
        }
    }
    found
}

/// All arrays of pointers to the variables of a template, in their order, with nothing behind the
/// last one. `found` is where each variable lies.
fn arrays(memory: &Memory, found: &[Vec<u64>]) -> Vec<Array> {
    let is_array = |words: &[u64]| {
        let mut pairs = words.iter().zip(found);
        pairs.all(|(word, places)| places.contains(word))
    };
    let mut arrays = Vec::new();
    for (start, words) in memory.words() {
        for (at, window) in words.windows(found.len()).enumerate() {
            let after = words.get(at + found.len());
            if after.is_none_or(|&after| after == 0) && is_array(window) {
                let address = start + 8 * at as u64;
                arrays.push(Array { address, pointers: window.to_vec() });
            }
        }
    }
    arrays
}

/// How often so many pointers to room lie one behind the other that they are an environment, maybe one
/// that something has changed.
fn runs_of_pointers(memory: &Memory, rooms: &[&Vec<u64>]) -> usize {
    /// Fewer are left on the stack by chance.
    const SHORTEST: usize = 8;
    let all: HashSet<u64> = rooms.iter().copied().flatten().copied().collect();
    let in_area = |words: Vec<u64>| {
        let runs = words.split(|word| !all.contains(word));
        runs.filter(|run| run.len() >= SHORTEST).count()
    };
    memory.words().map(|(_, words)| in_area(words)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Strings one after the other from an address that is a page's; where they lie.
    fn place(strings: &[String], start: u64) -> (Vec<u64>, Vec<u8>) {
        let (mut places, mut bytes) = (Vec::new(), vec![0; 16]);
        for string in strings {
            places.push(start + bytes.len() as u64);
            bytes.extend([string.as_bytes(), &[0]].concat());
        }
        (places, bytes)
    }

    fn array_of(places: &[u64]) -> Vec<u8> {
        places.iter().chain(&[0]).flat_map(|place| place.to_le_bytes()).collect()
    }

    const STACK: u64 = 0x7000_0000;
    const HEAP: u64 = 0x1000_0000;
    const ARRAYS: [u64; 3] = [0x2000_0000, 0x3000_0000, 0x7100_0000];

    /// The memory of an interpreter with these arguments and variables.
    fn memory(arguments: &[String], environment: &BTreeMap<String, String>) -> Memory {
        let all = [arguments, &variables(environment)[..]].concat();
        let (on_stack, stack) = place(&all, STACK);
        let (in_heap, heap) = place(&all, HEAP);
        let first = arguments.len();
        let areas = vec![
            (HEAP, heap),
            (ARRAYS[0], array_of(&in_heap[first..])),
            (ARRAYS[1], array_of(&in_heap[first..])),
            (STACK, stack),
            (ARRAYS[2], array_of(&on_stack[first..])),
        ];
        Memory { areas }
    }

    fn template() -> BTreeMap<String, String> {
        let own = [("PATH", "/bin"), ("TZ", "UTC")];
        let own = own.map(|(name, value)| (name.to_owned(), value.to_owned()));
        room().chain(own).collect()
    }

    fn replacements() -> Vec<Replacement> {
        let texts = [(start_path(), "app.php"), (word(1), ""), (word(2), "ä")];
        let texts = texts.map(|(placeholder, text)| (placeholder, text.to_owned()));
        texts.into_iter().map(|(placeholder, text)| Replacement { placeholder, text }).collect()
    }

    fn arguments() -> Vec<String> {
        let placeholders = replacements().into_iter().map(|word| word.placeholder);
        [String::from("php")].into_iter().chain(placeholders).collect()
    }

    /// The memory after what is written.
    fn written(memory: &Memory, writes: &[(u64, Vec<u8>)]) -> Memory {
        let mut areas = memory.areas.clone();
        for (address, bytes) in writes {
            let area = areas.iter_mut().rev().find(|(start, _)| start <= address).unwrap();
            let at = (address - area.0) as usize;
            area.1[at..at + bytes.len()].copy_from_slice(bytes);
        }
        Memory { areas }
    }

    fn string_at(memory: &Memory, address: u64) -> String {
        let area = memory.areas.iter().rev().find(|(start, _)| *start <= address).unwrap();
        let bytes = &area.1[(address - area.0) as usize..];
        let end = bytes.iter().position(|&byte| byte == 0).unwrap();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    }

    fn environment_at(memory: &Memory, address: u64) -> Vec<String> {
        let (_, words) = memory.words().find(|(start, _)| *start == address).unwrap();
        words.iter().take_while(|&&word| word != 0).map(|&word| string_at(memory, word)).collect()
    }

    #[test]
    fn a_copy_has_what_the_program_is_started_with() {
        let template = template();
        let memory = memory(&arguments(), &template);
        let long = "x".repeat(3000);
        let program = [("A", "b"), ("LONG", long.as_str()), ("PATH", "/bin"), ("Z", "")];
        let program =
            program.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter().collect();
        let writes = writes(&memory, &replacements(), &template, &program).unwrap();
        let after = written(&memory, writes.all());
        for array in ARRAYS {
            assert_eq!(environment_at(&after, array), variables(&program));
        }
        let before = find(&memory, &[&start_path(), &word(1), &word(2), "php"]);
        for (places, text) in before.iter().zip(["app.php", "", "ä", "php"]) {
            assert_eq!(places.len(), 2);
            places.iter().for_each(|&place| assert_eq!(string_at(&after, place), text));
        }
    }

    #[test]
    fn memory_that_is_not_as_it_is_known_is_left_alone() {
        let (template, words) = (template(), replacements());
        let good = memory(&arguments(), &template);
        let program = BTreeMap::from([("A".to_owned(), "b".to_owned())]);
        assert!(writes(&good, &words, &template, &program).is_ok());
        let refused = |memory: &Memory| writes(memory, &words, &template, &program).is_err();
        // A third copy, one less, and an array that has more or another order.
        let mut more = memory(&arguments(), &template);
        more.areas.push((0x7200_0000, [word(2).as_bytes(), &[0]].concat()));
        assert!(refused(&more));
        assert!(refused(&memory(&arguments()[..3], &template)));
        let mut longer = memory(&arguments(), &template);
        let end = longer.areas[4].1.len() - 8;
        longer.areas[4].1[end] = 1;
        assert!(refused(&longer));
        let mut turned = memory(&arguments(), &template);
        turned.areas[4].1.rotate_left(8);
        assert!(refused(&turned));
        // Something has set a variable meanwhile, or changed one: the C library has another array.
        let live = memory(&arguments(), &template).areas[1].1.clone();
        let mut added = memory(&arguments(), &template);
        let mut longer = live.clone();
        longer.truncate(live.len() - 8);
        longer.extend([0x1234_u64, 0].into_iter().flat_map(u64::to_le_bytes));
        added.areas.push((0x7200_0000, longer));
        assert!(refused(&added));
        let mut changed = memory(&arguments(), &template);
        changed.areas[1].1[8..16].copy_from_slice(&0x1234_u64.to_le_bytes());
        assert!(refused(&changed));
        // The name of the last variable comes behind those of the room.
        let mut last = memory(&arguments(), &template);
        let end = live.len();
        last.areas[1].1[end - 16..end - 8].copy_from_slice(&0x1234_u64.to_le_bytes());
        assert!(refused(&last));
    }

    #[test]
    fn variables_take_the_smallest_room_that_is_enough() {
        let environment = |lengths: &[usize]| -> BTreeMap<String, String> {
            let numbered = lengths.iter().enumerate();
            numbered.map(|(number, len)| (format!("{number:03}"), "x".repeat(len - 4))).collect()
        };
        let check = |lengths: &[usize]| {
            check_room(&environment(lengths)).map_err(|Unfit(why)| why).err().unwrap_or_default()
        };
        assert_eq!(check(&[127; 116]), "");
        assert!(check(&[127; 117]).contains("more than 116 variables"));
        assert_eq!(check(&[vec![128; 20], vec![5; 96]].concat()), "");
        assert!(check(&[128; 21]).contains("20 of more than 127 bytes"));
        assert_eq!(check(&[8191, 8191, 8191, 8191, 1023]), "");
        assert!(check(&[1024; 5]).contains("4 of more than 1023 bytes"));
        assert!(check(&[8192]).contains("more than 8191 bytes"));
        assert_eq!(check(&[]), "");
    }

    #[test]
    fn placeholders_have_room_for_the_longest_word() {
        for text in [start_path(), word(0), word(31)] {
            assert_eq!(text.len(), WORD_MAX);
        }
        assert!(start_path().ends_with("///dev/thaw-start"));
        let bytes: usize = room().map(|(name, value)| name.len() + value.len() + 2).sum();
        assert_eq!(bytes, 96 * 128 + 16 * 1024 + 4 * 8192);
    }
}
