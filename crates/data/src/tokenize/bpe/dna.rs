//! Table-based BPE encoder for DNA that reads a word from left to right. Invariant: for every input, the ids are the
//! result of applying the merge rules one by one.
//!
//! The encoding is the only segmentation of a word in which every two adjacent pieces fit ([`Neighbours`]). The encoder
//! therefore takes the longest piece that fits the previous piece, and backtracks where no piece fits. The segmentation
//! of a prefix is unique too, so no position is reached twice, and the work is linear in the length of the word for any
//! content.
//!
//! Segmenting by pairs instead of merging is the idea of GitHub's `bpe` crate; the table of all pairs and the windows
//! of eight letters are possible because the alphabet has at most four letters.

use super::neighbours::Neighbours;
use super::rules::MergeRules;

/// Number of letters that index the table of longest pieces, two bits each.
const WINDOW: usize = 8;
/// Represents the absence of a piece.
const NONE: u16 = u16::MAX;

/// The tables of the encoder.
pub(super) struct Dna {
    pieces: Vec<DnaPiece>,
    neighbours: Neighbours,
    /// Indexed by the code of the next eight letters: the longest piece that they start with, or, for values from
    /// `pieces.len()` on, `pieces.len()` plus an index in `long`.
    longest: Vec<u16>,
    long: Vec<Long>,
    /// The letters of the alphabet; the last letter is repeated if there are fewer than four.
    letters: [u8; 4],
    /// Right shift after which the lowest two bits of a letter identify it.
    shift: u32,
    other: [Other; 256],
    /// Ids of `[CLS]` and `[SEP]`.
    ends: [i32; 2],
    unknown: i32,
}

struct DnaPiece {
    id: i32,
    /// The longest other piece that is a prefix of this piece, or [`NONE`].
    shorter: u16,
    len: u16,
}

/// The pieces of more than eight letters that share their first eight letters.
struct Long {
    /// Number and text of each piece, the longest first.
    pieces: Vec<(u16, Vec<u8>)>,
    /// The longest piece of at most eight letters that the shared letters start with.
    short: u16,
}

/// Class of a byte that is not a letter of the alphabet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Other {
    /// An unknown ASCII character, encoded as the unknown token.
    Unknown,
    /// ASCII whitespace, which separates words and has no token.
    Blank,
    /// Part of a multibyte UTF-8 character.
    Multibyte,
    /// The first byte of an added token such as `[MASK]`.
    Markup,
}

impl Dna {
    /// Builds the encoder of `rules`. Errors with the reason if the tables cannot represent them.
    pub(super) fn new(rules: &MergeRules) -> Result<Self, &'static str> {
        if rules.texts.iter().any(|text| text.len() > usize::from(u16::MAX)) {
            return Err("a piece is too long");
        }
        let mut letters = [*rules.letters.last().unwrap_or(&0); 4];
        letters[..rules.letters.len()].copy_from_slice(&rules.letters);
        let mut new = Dna {
            pieces: pieces(rules),
            neighbours: Neighbours::new(rules)?,
            longest: vec![NONE; 1 << (2 * WINDOW)],
            long: Vec::new(),
            letters,
            shift: shift(&rules.letters).ok_or("no two bits tell its letters apart")?,
            other: others(&rules.markup),
            ends: rules.ends,
            unknown: rules.unknown,
        };
        new.fill_longest(&rules.texts);
        Ok(new)
    }

    /// Appends the token ids of `sequence`, including `[CLS]` and `[SEP]`, and returns the number of unknown tokens.
    /// Returns `None`, with nothing appended, if the sequence contains the first byte of an added token.
    pub(super) fn encode(&self, sequence: &[u8], tokens: &mut Vec<i32>) -> Option<usize> {
        let before = tokens.len();
        let mut unknown = 0;
        tokens.push(self.ends[0]);
        let mut rest = sequence;
        loop {
            let (word, after) = rest.split_at(self.letters_at_start(rest));
            self.word(word, tokens);
            let Some(&first) = after.first() else { break };
            rest = &after[1..];
            match self.other[usize::from(first)] {
                Other::Unknown => {
                    tokens.push(self.unknown);
                    unknown += 1;
                }
                Other::Blank => {}
                Other::Multibyte => {
                    let end = after.iter().position(u8::is_ascii).unwrap_or(after.len());
                    let visible = visible(&after[..end]);
                    tokens.extend(std::iter::repeat_n(self.unknown, visible));
                    unknown += visible;
                    rest = &after[end..];
                }
                Other::Markup => {
                    tokens.truncate(before);
                    return None;
                }
            }
        }
        tokens.push(self.ends[1]);
        Some(unknown)
    }

    /// Appends the token ids of a word, which consists of letters of the alphabet only.
    fn word(&self, word: &[u8], tokens: &mut Vec<i32>) {
        if word.is_empty() {
            return;
        }
        // `tokens` holds piece numbers until the end, because backtracking needs the pieces and not their ids.
        let start = tokens.len();
        let mut at = 0;
        let mut last = self.neighbours.edge();
        let mut piece = self.longest(word);
        loop {
            if self.neighbours.fits(last, usize::from(piece)) {
                tokens.push(i32::from(piece));
                at += usize::from(self.pieces[usize::from(piece)].len);
                if at >= word.len() {
                    break;
                }
                last = usize::from(piece);
                piece = self.longest(&word[at..]);
                continue;
            }
            piece = self.pieces[usize::from(piece)].shorter;
            while piece == NONE {
                // A word always has an encoding, so backtracking never runs out of pieces; `return` is unreachable.
                let Some(wrong) = tokens.pop() else { return };
                let wrong = &self.pieces[wrong as usize];
                at -= usize::from(wrong.len);
                piece = wrong.shorter;
                last = tokens[start..].last().map_or(self.neighbours.edge(), |&last| last as usize);
            }
        }
        for token in &mut tokens[start..] {
            *token = self.pieces[*token as usize].id;
        }
    }

    /// Returns the longest piece that is a prefix of `word`, which must not be empty.
    #[inline]
    fn longest(&self, word: &[u8]) -> u16 {
        let window = match word.first_chunk() {
            Some(&letters) => letters,
            None => {
                // The padding can complete a piece that is longer than the word; the loop at the end goes on to shorter
                // prefixes, of which the last is a single letter.
                let mut letters = [self.letters[0]; WINDOW];
                letters[..word.len()].copy_from_slice(word);
                letters
            }
        };
        let mut piece = self.longest[self.code(window)];
        if let Some(long) = usize::from(piece).checked_sub(self.pieces.len()) {
            let Long { pieces, short } = &self.long[long];
            piece = pieces.iter().find(|(_, text)| word.starts_with(text)).map_or(*short, |(long, _)| *long);
        }
        while usize::from(self.pieces[usize::from(piece)].len) > word.len() {
            piece = self.pieces[usize::from(piece)].shorter;
        }
        piece
    }

    /// Packs eight letters into 16 bits, two bits each, the first letter in the lowest bits.
    #[inline]
    fn code(&self, letters: [u8; WINDOW]) -> usize {
        // Each step halves the number of groups of bits: 8 groups of 2, 4 of 4, 2 of 8, 1 of 16.
        let bits = u64::from_le_bytes(letters) >> self.shift & 0x0303_0303_0303_0303;
        let bits = (bits | bits >> 6) & 0x000f_000f_000f_000f;
        let bits = (bits | bits >> 12) & 0x0000_00ff_0000_00ff;
        ((bits | bits >> 24) & 0xffff) as usize
    }

    /// Returns the length of the longest prefix of `text` that consists of letters of the alphabet.
    fn letters_at_start(&self, text: &[u8]) -> usize {
        let [a, b, c, d] = self.letters;
        let letter = |&x: &u8| (x == a) | (x == b) | (x == c) | (x == d);
        // Blocks of 64 bytes without a branch inside, so that the compiler vectorizes the comparisons.
        let blocks =
            text.chunks_exact(64).take_while(|block| block.iter().fold(true, |all, x| all & letter(x)));
        let whole = 64 * blocks.count();
        whole + text[whole..].iter().position(|x| !letter(x)).unwrap_or(text.len() - whole)
    }

    /// Fills `longest` and `long` in the order of increasing length, so that longer pieces overwrite shorter pieces.
    fn fill_longest(&mut self, texts: &[Vec<u8>]) {
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|&piece| texts[piece].len());
        for piece in order {
            let text = &texts[piece];
            let len = text.len().min(WINDOW);
            let mut window = [self.letters[0]; WINDOW];
            window[..len].copy_from_slice(&text[..len]);
            let low = self.code(window) & ((1 << (2 * len)) - 1);
            if text.len() > WINDOW {
                self.add_long(low, piece as u16, text);
                continue;
            }
            for rest in 0..1_usize << (2 * (WINDOW - len)) {
                self.longest[rest << (2 * len) | low] = piece as u16;
            }
        }
    }

    fn add_long(&mut self, code: usize, piece: u16, text: &[u8]) {
        let now = self.longest[code];
        let entry = (piece, text.to_vec());
        match usize::from(now).checked_sub(self.pieces.len()) {
            Some(long) => self.long[long].pieces.insert(0, entry),
            None => {
                self.longest[code] = (self.pieces.len() + self.long.len()) as u16;
                self.long.push(Long { pieces: vec![entry], short: now });
            }
        }
    }
}

/// Returns the pieces of `rules`, each with the longest other piece that is a prefix of it.
fn pieces(rules: &MergeRules) -> Vec<DnaPiece> {
    let by_text: std::collections::HashMap<&[u8], u16> =
        rules.texts.iter().map(Vec::as_slice).zip(0..).collect();
    let mut pieces = Vec::with_capacity(rules.texts.len());
    for (text, &id) in rules.texts.iter().zip(&rules.ids) {
        let mut starts = (1..text.len()).rev().map(|len| &text[..len]);
        let shorter = starts.find_map(|start| by_text.get(start).copied()).unwrap_or(NONE);
        pieces.push(DnaPiece { id, shorter, len: text.len() as u16 });
    }
    pieces
}

/// Returns the lowest right shift after which the lowest two bits differ between any two of `letters`, if one exists.
fn shift(letters: &[u8]) -> Option<u32> {
    (0..7).find(|shift| {
        // A bit for each value of the lowest two bits.
        let seen = letters.iter().fold(0, |seen, &letter| seen | 1_u8 << (letter >> shift & 3));
        seen.count_ones() as usize == letters.len()
    })
}

/// Returns the class of each byte that is not a letter. The pre-tokenizer's regular expression uses Unicode's
/// definition of whitespace, which in ASCII is tab to carriage return and the space.
fn others(markup: &[u8]) -> [Other; 256] {
    let mut table = [Other::Unknown; 256];
    table[0x80..].fill(Other::Multibyte);
    table[usize::from(b'\t')..=usize::from(b'\r')].fill(Other::Blank);
    table[usize::from(b' ')] = Other::Blank;
    markup.iter().for_each(|&first| table[usize::from(first)] = Other::Markup);
    table
}

/// Returns the number of non-whitespace characters in a run of non-ASCII bytes. Invalid UTF-8 counts as the number of
/// replacement characters that it is decoded to.
#[cold]
fn visible(bytes: &[u8]) -> usize {
    String::from_utf8_lossy(bytes).chars().filter(|c| !c.is_whitespace()).count()
}
