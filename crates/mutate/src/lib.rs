#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

use std::path::Path;

/// Numbers at which lengths, offsets and counts go wrong.
const BORDERS: [u64; 16] = [
    0,
    1,
    2,
    7,
    8,
    0x7f,
    0xff,
    0xfff,
    0x1000,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 47,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// Longest input that mutations make.
const LEN_MAX: usize = 64 * 1024;

/// Gives each seed, and then `rounds` mutations of seeds, to `parser`. Always the
/// same ones. When the parser panics, the input is printed as a byte string.
///
/// With `THAW_FUZZ_CORPUS=DIRECTORY` the seeds are written to `DIRECTORY/target`
/// besides, from where the fuzzer of that name begins.
///
/// # Panics
/// There is no seed, a seed cannot be written, or `parser` panics.
pub fn survive(target: &str, seeds: &[&[u8]], rounds: u32, mut parser: impl FnMut(&[u8])) {
    assert!(!seeds.is_empty(), "there is nothing to mutate");
    if let Some(corpus) = std::env::var_os("THAW_FUZZ_CORPUS") {
        write_seeds(&Path::new(&corpus).join(target), seeds).expect("the corpus can be written");
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut give = |bytes: &[u8]| {
        let input = Printed(bytes);
        parser(input.0);
    };
    for seed in seeds {
        give(seed);
    }
    for _ in 0..rounds {
        let mut bytes = random.pick(seeds).to_vec();
        for _ in 0..=random.below(6) {
            mutate(&mut bytes, seeds, &mut random);
        }
        bytes.truncate(LEN_MAX);
        give(&bytes);
    }
}

fn write_seeds(directory: &Path, seeds: &[&[u8]]) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    for (number, seed) in seeds.iter().enumerate() {
        std::fs::write(directory.join(format!("seed-{number:03}")), seed)?;
    }
    Ok(())
}

/// Prints an input when its parser panics.
struct Printed<'a>(&'a [u8]);

impl Drop for Printed<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the input was b\"{}\"", self.0.escape_ascii());
        }
    }
}

/// xorshift64 (Marsaglia, 2003): enough to vary inputs.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `limit`, which is not zero.
    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

/// Makes one change.
fn mutate(bytes: &mut Vec<u8>, seeds: &[&[u8]], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let len = random.below(bytes.len() - at + 1);
    match random.below(9) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = random.next() as u8,
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..at + len)),
        4 => {
            let copy = bytes[at..at + len].to_vec();
            bytes.splice(at..at, copy);
        }
        5 => {
            let inserted: Vec<u8> = (0..random.below(16)).map(|_| random.next() as u8).collect();
            bytes.splice(at..at, inserted);
        }
        6 => {
            let other = *random.pick(seeds);
            let from = random.below(other.len() + 1);
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        _ => put_number(bytes, random),
    }
    bytes.truncate(LEN_MAX);
}

/// Overwrites an aligned field of one, two, four or eight bytes.
fn put_number(bytes: &mut [u8], random: &mut Random) {
    let width = 1 << random.below(4);
    if bytes.len() < width {
        return;
    }
    let at = random.below(bytes.len() / width) * width;
    let number = random.pick(&BORDERS).wrapping_add(random.below(3) as u64).wrapping_sub(1);
    bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn inputs_are_many_and_always_the_same() {
        let collect = || {
            let mut inputs = Vec::new();
            survive("mutate", &[b"one seed", b""], 2000, |bytes| inputs.push(bytes.to_vec()));
            inputs
        };
        let inputs = collect();
        assert_eq!(inputs.len(), 2002);
        assert_eq!(inputs[0], b"one seed");
        assert!(inputs.iter().collect::<BTreeSet<_>>().len() > 1000);
        assert_eq!(inputs, collect());
    }

    #[test]
    fn inputs_stay_short() {
        let seed = vec![7; LEN_MAX];
        survive("mutate", &[&seed], 500, |bytes| assert!(bytes.len() <= LEN_MAX));
    }
}
