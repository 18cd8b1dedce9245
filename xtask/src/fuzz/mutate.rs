//! Damages bytes as broken disks, careless editors and hostile authors do. Invariant: the result is at most
//! [`LARGEST`] bytes, so no case is slow by its size alone.

use super::random::Random;

/// The longest case.
const LARGEST: usize = 1 << 20;

/// What a mutation draws from: sound files of the format, and the words of its language.
pub struct Stock {
    /// Sound (or at least telling) files.
    pub corpus: Vec<Vec<u8>>,
    /// Pieces that mean something to the reader.
    pub words: Vec<Vec<u8>>,
}

type Mutation = fn(&mut Random, &mut Vec<u8>, &Stock);

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

/// A member of the corpus, damaged one to four times; now and then as it is.
pub fn mutate(random: &mut Random, stock: &Stock) -> Vec<u8> {
    let mut bytes = random.pick(&stock.corpus).clone();
    if !random.once_in(50) {
        damage(random, &mut bytes, stock);
    }
    bytes
}

/// Damages `bytes` once, or up to four times.
pub fn damage(random: &mut Random, bytes: &mut Vec<u8>, stock: &Stock) {
    let times = if random.once_in(2) { 1 } else { 1 + random.below(4) };
    for _ in 0..times {
        random.pick(&MUTATIONS)(random, bytes, stock);
        bytes.truncate(LARGEST);
    }
}

fn flip(random: &mut Random, bytes: &mut [u8]) {
    let (at, bit) = (random.below(bytes.len()), random.below(8));
    bytes.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << bit);
}

fn overwrite(random: &mut Random, bytes: &mut [u8]) {
    const TELLING: &[u8] = b"\0\x01\x7f\x80\xff\n\r\t >@+\"'{}[](),:.-/\\\x1b";
    let at = random.below(bytes.len());
    let byte = if random.once_in(3) { random.next() as u8 } else { *random.pick(TELLING) };
    bytes.iter_mut().skip(at).take(1).for_each(|b| *b = byte);
}

fn cut(random: &mut Random, bytes: &mut Vec<u8>, _: &Stock) {
    bytes.truncate(random.below(bytes.len() + 1));
}

/// The beginning of this and the end of another.
fn splice(random: &mut Random, bytes: &mut Vec<u8>, stock: &Stock) {
    let other = random.pick(&stock.corpus);
    bytes.truncate(random.below(bytes.len() + 1));
    bytes.extend_from_slice(&other[random.below(other.len() + 1)..]);
}

fn repeat(random: &mut Random, bytes: &mut Vec<u8>, _: &Stock) {
    let block = block(random, bytes);
    let piece = bytes[block.clone()].repeat(1 << random.below(8));
    bytes.splice(block.end..block.end, piece.into_iter().take(LARGEST));
}

fn remove(random: &mut Random, bytes: &mut Vec<u8>, _: &Stock) {
    bytes.drain(block(random, bytes));
}

fn insert_word(random: &mut Random, bytes: &mut Vec<u8>, stock: &Stock) {
    let at = random.below(bytes.len() + 1);
    bytes.splice(at..at, random.pick(&stock.words).iter().copied());
}

/// As a program, for formats whose words are instructions.
fn insert_words(random: &mut Random, bytes: &mut Vec<u8>, stock: &Stock) {
    let at = random.below(bytes.len() + 1);
    let words: Vec<u8> = (0..1 + random.below(30)).flat_map(|_| random.pick(&stock.words).clone()).collect();
    bytes.splice(at..at, words);
}

/// A word in the place of a name, a number or a string, so that the syntax of texts lives on.
fn replace_token(random: &mut Random, bytes: &mut Vec<u8>, stock: &Stock) {
    if let Some(token) = some_token(random, bytes) {
        bytes.splice(token, random.pick(&stock.words).iter().copied());
    }
}

/// A name, number or string in the place of another.
fn copy_token(random: &mut Random, bytes: &mut Vec<u8>, _: &Stock) {
    if let (Some(from), Some(to)) = (some_token(random, bytes), some_token(random, bytes)) {
        let copy = bytes[from].to_vec();
        bytes.splice(to, copy);
    }
}

fn replace_by_word(random: &mut Random, bytes: &mut Vec<u8>, stock: &Stock) {
    let block = block(random, bytes);
    bytes.splice(block, random.pick(&stock.words).iter().copied());
}

/// A binary size that lies: of 2, 4 or 8 bytes, little-endian.
fn size(random: &mut Random, bytes: &mut [u8]) {
    let len = bytes.len() as u64;
    let extremes = [0, 1, len - len.min(1), len, len + 1, 0x7fff, 0xffff, 1 << 31, 1 << 32, 1 << 62, 1 << 63];
    let value = random.pick(&extremes).wrapping_sub(random.below(2) as u64);
    let width = *random.pick(&[2, 4, 8]);
    let at = random.below(bytes.len());
    bytes.iter_mut().skip(at).zip(value.to_le_bytes()).take(width).for_each(|(b, new)| *b = new);
}

/// A number in a text that lies.
fn number(random: &mut Random, bytes: &mut Vec<u8>, _: &Stock) {
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

/// Brackets in brackets, up to 16 384 deep, in the place of a number or anywhere.
fn nest(random: &mut Random, bytes: &mut Vec<u8>, _: &Stock) {
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

/// A long run of one byte.
fn run(random: &mut Random, bytes: &mut Vec<u8>, _: &Stock) {
    let at = random.below(bytes.len() + 1);
    let byte = bytes.get(at).copied().unwrap_or(random.next() as u8);
    bytes.splice(at..at, std::iter::repeat_n(byte, 1 << random.below(17)));
}

/// Two blocks change places.
fn swap(random: &mut Random, bytes: &mut Vec<u8>, _: &Stock) {
    let block = block(random, bytes);
    let piece: Vec<u8> = bytes.drain(block).collect();
    let at = random.below(bytes.len() + 1);
    bytes.splice(at..at, piece);
}

/// A part of `bytes`: mostly short.
fn block(random: &mut Random, bytes: &[u8]) -> std::ops::Range<usize> {
    let start = random.below(bytes.len());
    let most = if random.once_in(4) { bytes.len() } else { 16 };
    start..(start + random.below(most + 1)).min(bytes.len())
}

/// The place of some number in a text.
fn some_number(random: &mut Random, bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let is_part = |b: &u8| b.is_ascii_digit() || matches!(b, b'-' | b'.');
    let from = random.below(bytes.len());
    let start = from + bytes[from..].iter().position(u8::is_ascii_digit)?;
    let len = bytes[start..].iter().position(|b| !is_part(b)).unwrap_or(bytes.len() - start);
    Some(start..start + len)
}

/// The place of some string in quotes or word.
fn some_token(random: &mut Random, bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let is_part = |b: &u8| b.is_ascii_alphanumeric() || b"-._".contains(b);
    let from = random.below(bytes.len());
    let start = from + bytes[from..].iter().position(|b| is_part(b) || *b == b'"')?;
    let len = match bytes[start] {
        b'"' => 2 + bytes[start + 1..].iter().position(|&b| b == b'"')?,
        _ => bytes[start..].iter().position(|b| !is_part(b)).unwrap_or(bytes.len() - start),
    };
    Some(start..start + len)
}
