//! Random numbers for the guest: ChaCha20 with fast key erasure, as in Linux'
//! `drivers/char/random.c`. The key comes from the host at every boot, so two
//! copies of one image never share a stream.

/// The generator behind `getrandom`, `/dev/random` and `/dev/urandom`.
pub struct Generator {
    key: [u32; 8],
}

impl Generator {
    /// A generator with this key.
    pub fn new(seed: [u8; 32]) -> Self {
        let mut key = [0; 8];
        for (word, bytes) in key.iter_mut().zip(seed.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Self { key }
    }

    /// Replaces the key by `seed` (a thaw). Nothing of the old one remains: it
    /// is known to every other copy of the image.
    pub fn reseed(&mut self, seed: [u8; 32]) {
        *self = Self::new(seed);
    }

    /// Fills `out`. The first half of the first block becomes the next key, so
    /// that a later look into memory does not reveal what was given out.
    pub fn fill(&mut self, out: &mut [u8]) {
        let mut block = [0u8; 64];
        chacha20_block(&self.key, 0, &mut block);
        let (next_key, rest) = block.split_at(32);
        let mut seed = [0; 32];
        seed.copy_from_slice(next_key);
        let stream_key = self.key;
        *self = Self::new(seed);

        let (head, tail) = out.split_at_mut(out.len().min(32));
        head.copy_from_slice(&rest[..head.len()]);
        for (index, chunk) in tail.chunks_mut(64).enumerate() {
            chacha20_block(&stream_key, index as u64 + 1, &mut block);
            chunk.copy_from_slice(&block[..chunk.len()]);
        }
    }

    /// A random word.
    pub fn next_u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }
}

/// One block of ChaCha20 with a 64-bit counter and a zero nonce (RFC 8439, with
/// the original counter width).
fn chacha20_block(key: &[u32; 8], counter: u64, out: &mut [u8; 64]) {
    const SIGMA: [u32; 4] = [0x61707865, 0x3320646e, 0x79622d32, 0x6b206574];
    let mut input = [0u32; 16];
    input[..4].copy_from_slice(&SIGMA);
    input[4..12].copy_from_slice(key);
    input[12] = counter as u32;
    input[13] = (counter >> 32) as u32;
    let mut state = input;
    for _ in 0..10 {
        quarter_round(&mut state, 0, 4, 8, 12);
        quarter_round(&mut state, 1, 5, 9, 13);
        quarter_round(&mut state, 2, 6, 10, 14);
        quarter_round(&mut state, 3, 7, 11, 15);
        quarter_round(&mut state, 0, 5, 10, 15);
        quarter_round(&mut state, 1, 6, 11, 12);
        quarter_round(&mut state, 2, 7, 8, 13);
        quarter_round(&mut state, 3, 4, 9, 14);
    }
    for (i, chunk) in out.chunks_exact_mut(4).enumerate() {
        chunk.copy_from_slice(&state[i].wrapping_add(input[i]).to_le_bytes());
    }
}

fn quarter_round(s: &mut [u32; 16], a: usize, b: usize, c: usize, d: usize) {
    s[a] = s[a].wrapping_add(s[b]);
    s[d] = (s[d] ^ s[a]).rotate_left(16);
    s[c] = s[c].wrapping_add(s[d]);
    s[b] = (s[b] ^ s[c]).rotate_left(12);
    s[a] = s[a].wrapping_add(s[b]);
    s[d] = (s[d] ^ s[a]).rotate_left(8);
    s[c] = s[c].wrapping_add(s[d]);
    s[b] = (s[b] ^ s[c]).rotate_left(7);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test vector 1 of RFC 8439 appendix A.1 (key, nonce and counter zero).
    #[test]
    fn chacha20_matches_the_rfc() {
        let mut out = [0; 64];
        chacha20_block(&[0; 8], 0, &mut out);
        assert_eq!(out[..8], [0x76, 0xb8, 0xe0, 0xad, 0xa0, 0xf1, 0x3d, 0x90]);
        assert_eq!(out[60..], [0xb2, 0xee, 0x65, 0x86]);
    }

    #[test]
    fn equal_seeds_give_equal_streams_and_the_key_moves_on() {
        let mut a = Generator::new([7; 32]);
        let mut b = Generator::new([7; 32]);
        let (mut x, mut y) = ([0u8; 100], [0u8; 100]);
        a.fill(&mut x);
        b.fill(&mut y);
        assert_eq!(x, y);
        a.fill(&mut x);
        assert_ne!(x, y);
        b.reseed([8; 32]);
        b.fill(&mut y);
        assert_ne!(x, y);
    }
}
