//! Mutations that imitate storage faults, editing errors and hostile authors. Invariant: the result has at most
//! [`LARGEST`] bytes, so no case is slow only because of its size.

use super::random::Random;

/// Maximum length of a case in bytes.
const LARGEST: usize = 1 << 20;

/// Material for mutations of a format.
#[derive(Clone)]
pub struct Seeds {
    /// Files to mutate: valid, or close to valid.
    pub corpus: Vec<Vec<u8>>,
    /// Fragments with a meaning in the format.
    pub words: Vec<Vec<u8>>,
}

type Mutation = fn(&mut Random, &mut Vec<u8>, &Seeds);

const MUTATIONS: [Mutation; 16] = [
    |random, bytes, _| flip(random, bytes),
    |random, bytes, _| overwrite(random, bytes),
    cut,
    splice,
    repeat,
    remove,
    insert_word,
    insert_words,
    replace_by_word,
    replace_token,
    copy_token,
    |random, bytes, _| size(random, bytes),
    number,
    nest,
    run,
    swap,
];

/// A file of the corpus with one to four mutations, or, in one of 50 cases, unchanged.
pub fn mutate(random: &mut Random, seeds: &Seeds) -> Vec<u8> {
    let mut bytes = random.pick(&seeds.corpus).clone();
    if !random.once_in(50) {
        damage(random, &mut bytes, seeds);
    }
    bytes
}

/// Applies one to four mutations to `bytes`.
pub fn damage(random: &mut Random, bytes: &mut Vec<u8>, seeds: &Seeds) {
    let times = if random.once_in(2) { 1 } else { 1 + random.below(4) };
    for _ in 0..times {
        random.pick(&MUTATIONS)(random, bytes, seeds);
        bytes.truncate(LARGEST);
    }
}

/// Flips a bit.
fn flip(random: &mut Random, bytes: &mut [u8]) {
    let at = random.below(bytes.len());
    let bit = random.below(8);
    bytes.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << bit);
}

/// Overwrites a byte, mostly by a byte that has a meaning in many formats.
fn overwrite(random: &mut Random, bytes: &mut [u8]) {
    const SPECIAL_BYTES: &[u8] = b"\0\x01\x7f\x80\xff\n\r\t >@+\"'{}[](),:.-/\\\x1b";
    let at = random.below(bytes.len());
    let byte = if random.once_in(3) { random.next() as u8 } else { *random.pick(SPECIAL_BYTES) };
    bytes.iter_mut().skip(at).take(1).for_each(|b| *b = byte);
}

/// Truncates the file.
fn cut(random: &mut Random, bytes: &mut Vec<u8>, _: &Seeds) {
    bytes.truncate(random.below(bytes.len() + 1));
}

/// Joins a prefix of this file and a suffix of another file of the corpus.
fn splice(random: &mut Random, bytes: &mut Vec<u8>, seeds: &Seeds) {
    let other = random.pick(&seeds.corpus);
    bytes.truncate(random.below(bytes.len() + 1));
    bytes.extend_from_slice(&other[random.below(other.len() + 1)..]);
}

/// Repeats a block up to 128 times.
fn repeat(random: &mut Random, bytes: &mut Vec<u8>, _: &Seeds) {
    let block = block(random, bytes);
    let piece = bytes[block.clone()].repeat(1 << random.below(8));
    bytes.splice(block.end..block.end, piece.into_iter().take(LARGEST));
}

/// Removes a block.
fn remove(random: &mut Random, bytes: &mut Vec<u8>, _: &Seeds) {
    bytes.drain(block(random, bytes));
}

/// Inserts a fragment.
fn insert_word(random: &mut Random, bytes: &mut Vec<u8>, seeds: &Seeds) {
    let at = random.below(bytes.len() + 1);
    bytes.splice(at..at, random.pick(&seeds.words).iter().copied());
}

/// Inserts a sequence of fragments, which is a program in formats whose fragments are instructions.
fn insert_words(random: &mut Random, bytes: &mut Vec<u8>, seeds: &Seeds) {
    let at = random.below(bytes.len() + 1);
    let words: Vec<u8> = (0..1 + random.below(30)).flat_map(|_| random.pick(&seeds.words).clone()).collect();
    bytes.splice(at..at, words);
}

/// Replaces a name, number or string by a fragment, which preserves the syntax of texts.
fn replace_token(random: &mut Random, bytes: &mut Vec<u8>, seeds: &Seeds) {
    if let Some(token) = some_token(random, bytes) {
        bytes.splice(token, random.pick(&seeds.words).iter().copied());
    }
}

/// Replaces a name, number or string by another one of the file.
fn copy_token(random: &mut Random, bytes: &mut Vec<u8>, _: &Seeds) {
    if let (Some(from), Some(to)) = (some_token(random, bytes), some_token(random, bytes)) {
        let copy = bytes[from].to_vec();
        bytes.splice(to, copy);
    }
}

/// Replaces a block by a fragment.
fn replace_by_word(random: &mut Random, bytes: &mut Vec<u8>, seeds: &Seeds) {
    let block = block(random, bytes);
    bytes.splice(block, random.pick(&seeds.words).iter().copied());
}

/// Overwrites 2, 4 or 8 bytes by a wrong little-endian size.
fn size(random: &mut Random, bytes: &mut [u8]) {
    let len = bytes.len() as u64;
    let extremes = [0, 1, len - len.min(1), len, len + 1, 0x7fff, 0xffff, 1 << 31, 1 << 32, 1 << 62, 1 << 63];
    let value = random.pick(&extremes).wrapping_sub(random.below(2) as u64);
    let width = *random.pick(&[2, 4, 8]);
    let at = random.below(bytes.len());
    bytes.iter_mut().skip(at).zip(value.to_le_bytes()).take(width).for_each(|(b, new)| *b = new);
}

/// Replaces a number of a text by a wrong number or another literal.
fn number(random: &mut Random, bytes: &mut Vec<u8>, _: &Seeds) {
    const LIES: &[&str] = &[
        "0",
        "-0",
        "-1",
        "1",
        "2",
        "7.5",
        "1e308",
        "-1e308",
        "1e999",
        "1e-999",
        "NaN",
        "nan",
        "inf",
        "-inf",
        "Infinity",
        "2147483647",
        "2147483648",
        "4294967295",
        "4294967296",
        "9223372036854775807",
        "9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "99999999999999999999999",
        "null",
        "true",
        "\"1\"",
        "[]",
        "{}",
        "16777216",
        "16777217",
        "0x10",
        "1_000",
    ];
    if let Some(number) = some_number(random, bytes) {
        bytes.splice(number, random.pick(LIES).bytes());
    }
}

/// Inserts brackets nested up to 16 384 deep, in place of a number or anywhere.
fn nest(random: &mut Random, bytes: &mut Vec<u8>, _: &Seeds) {
    const KINDS: &[(&str, &str)] =
        &[("[", "]"), ("{\"a\":", "}"), ("(", ")"), ("(", "t"), ("]", "a"), ("{a=", "}")];
    let (open, close) = *random.pick(KINDS);
    let depth = 1 << random.below(15);
    let closed = if random.once_in(2) { depth } else { 0 };
    let text = [open.repeat(depth), "1".to_owned(), close.repeat(closed)].concat();
    let at = random.below(bytes.len() + 1);
    let place = if random.once_in(2) { some_number(random, bytes) } else { None };
    bytes.splice(place.unwrap_or(at..at), text.bytes());
}

/// Inserts a long run of one byte.
fn run(random: &mut Random, bytes: &mut Vec<u8>, _: &Seeds) {
    let at = random.below(bytes.len() + 1);
    let byte = bytes.get(at).copied().unwrap_or(random.next() as u8);
    bytes.splice(at..at, std::iter::repeat_n(byte, 1 << random.below(17)));
}

/// Moves a block to another position.
fn swap(random: &mut Random, bytes: &mut Vec<u8>, _: &Seeds) {
    let block = block(random, bytes);
    let piece: Vec<u8> = bytes.drain(block).collect();
    let at = random.below(bytes.len() + 1);
    bytes.splice(at..at, piece);
}

/// A random range of `bytes`, short in three of four cases.
fn block(random: &mut Random, bytes: &[u8]) -> std::ops::Range<usize> {
    let start = random.below(bytes.len());
    let longest = if random.once_in(4) { bytes.len() } else { 16 };
    start..(start + random.below(longest + 1)).min(bytes.len())
}

/// Range of a number in a text: the first after a random position.
fn some_number(random: &mut Random, bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let from = random.below(bytes.len());
    let start = from + bytes[from..].iter().position(u8::is_ascii_digit)?;
    let len = bytes[start..].iter().position(|&b| !is_number_byte(b)).unwrap_or(bytes.len() - start);
    Some(start..start + len)
}

/// Whether a number can contain the byte.
fn is_number_byte(byte: u8) -> bool {
    byte.is_ascii_digit() || matches!(byte, b'-' | b'.')
}

/// Whether a word can contain the byte.
fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._".contains(&byte)
}

/// Range of a quoted string or a word: the first after a random position.
fn some_token(random: &mut Random, bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let from = random.below(bytes.len());
    let start = from + bytes[from..].iter().position(|&b| is_word_byte(b) || b == b'"')?;
    let len = match bytes[start] {
        b'"' => 2 + bytes[start + 1..].iter().position(|&b| b == b'"')?,
        _ => bytes[start..].iter().position(|&b| !is_word_byte(b)).unwrap_or(bytes.len() - start),
    };
    Some(start..start + len)
}
