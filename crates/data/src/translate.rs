//! Six-frame translation as VirNucPro does it. Invariant: for one chunk, the open reading frames
//! come in the order F1 F2 F3 R1 R2 R3, upper-cased, each without a stop and with at least one
//! residue, and nothing is allocated once the scratch has grown to the longest chunk.
//!
//! Three rules of the original that look odd and are kept, because its models were trained on them:
//! a codon with a character other than A, C, G, T is dropped and not turned into `X`; the reverse
//! complement leaves such characters as they are; and the nucleotide slice of a frame has **one base
//! more** than its codons when the strand has one.

/// The standard genetic code (NCBI table 1), indexed `16 a + 4 b + c` with A, C, G, T = 0, 1, 2, 3.
const CODE: &[u8; 64] = b"KNKNTTTTRSRSIIMIQHQHPPPPRRRRLLLLEDEDAAAAGGGGVVVV*Y*YSSSS*CWCLFLF";

/// Marks the code of a base that is none of A, C, G, T, and of every codon that holds one.
const OTHER: u8 = 0x80;

/// The residue of each codon as it stands on the forward strand; 0 for one that is dropped.
const FORWARD: [u8; 256] = {
    let mut table = [0; 256];
    let mut codon = 0;
    while codon < 64 {
        table[codon] = CODE[codon];
        codon += 1;
    }
    table
};

/// The residue of each codon's reverse complement, by the codon on the forward strand. The complement
/// of a base is 3 minus its code.
const REVERSE: [u8; 256] = {
    let mut table = [0; 256];
    let mut codon = 0;
    while codon < 64 {
        let [a, b, c] = [codon >> 4, codon >> 2 & 3, codon & 3];
        table[codon] = CODE[(3 - c) << 4 | (3 - b) << 2 | (3 - a)];
        codon += 1;
    }
    table
};

/// A reading frame: strand and offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Frame {
    /// Forward, from base 1.
    F1,
    /// Forward, from base 2.
    F2,
    /// Forward, from base 3.
    F3,
    /// Reverse complement, from its base 1.
    R1,
    /// Reverse complement, from its base 2.
    R2,
    /// Reverse complement, from its base 3.
    R3,
}

impl Frame {
    /// All frames, in the order of the files.
    pub const ALL: [Frame; 6] = [Frame::F1, Frame::F2, Frame::F3, Frame::R1, Frame::R2, Frame::R3];

    /// Its name, the last two characters of an id.
    pub fn name(self) -> &'static str {
        match self {
            Frame::F1 => "F1",
            Frame::F2 => "F2",
            Frame::F3 => "F3",
            Frame::R1 => "R1",
            Frame::R2 => "R2",
            Frame::R3 => "R3",
        }
    }

    /// `+` or `-`, as BED writes it.
    pub fn strand(self) -> char {
        match self {
            Frame::F1 | Frame::F2 | Frame::F3 => '+',
            Frame::R1 | Frame::R2 | Frame::R3 => '-',
        }
    }

    /// The bases skipped at the start of its strand: 0, 1 or 2.
    pub fn offset(self) -> usize {
        match self {
            Frame::F1 | Frame::R1 => 0,
            Frame::F2 | Frame::R2 => 1,
            Frame::F3 | Frame::R3 => 2,
        }
    }

    /// Its place in [`Frame::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

/// An open reading frame: a whole frame without a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orf<'a> {
    /// Strand and offset.
    pub frame: Frame,
    /// Upper case, on its own strand: `min(3 aa + 1, strand - offset)` bases from the offset.
    pub nucleotide: &'a [u8],
    /// The residues, one letter each, at least one, without a stop.
    pub protein: &'a [u8],
}

/// Buffers of [`orfs`], reused from chunk to chunk: five times the longest chunk at most.
#[derive(Debug, Default)]
pub struct Scratch {
    /// The code of each base: two bits, or [`OTHER`]. Two more of these at the end.
    bases: Vec<u8>,
    /// The codon that starts at each base of the forward strand: six bits, or [`OTHER`] and more.
    codons: Vec<u8>,
    /// Whether a codon is to be dropped.
    dropped: bool,
    protein: Vec<u8>,
    /// The strands, upper case; built when a frame on them is open.
    forward: Vec<u8>,
    reverse: Vec<u8>,
}

/// Calls `f` for every open reading frame of `chunk`, in the order of [`Frame::ALL`]. Frames with a
/// stop, and frames without a residue, are skipped.
///
/// The bases are coded once, the stops of all six frames found in that code a vector at a time; only
/// frames without a stop are translated, and only the strands that they are on are spelled.
pub fn orfs(chunk: &[u8], scratch: &mut Scratch, mut f: impl FnMut(Orf<'_>)) {
    scratch.code(chunk);
    let stops = stops(&scratch.codons);
    let Scratch { codons, dropped, protein, forward, reverse, .. } = scratch;
    forward.clear();
    reverse.clear();
    for frame in Frame::ALL {
        let Some(first) = first_codon(frame, chunk.len()) else { continue };
        if stops[first % 3] & strand_bit(frame) != 0 {
            continue;
        }
        translate(frame, codons, *dropped, protein);
        if protein.is_empty() {
            continue;
        }
        let strand = match frame.strand() {
            '+' => spelled(forward, chunk, spell_forward),
            _ => spelled(reverse, chunk, spell_reverse),
        };
        let strand = &strand[frame.offset()..];
        let end = strand.len().min(3 * protein.len() + 1);
        f(Orf { frame, nucleotide: &strand[..end], protein });
    }
}

impl Scratch {
    /// Codes the bases of `chunk` and its codons. Written so that the compiler does it a vector at
    /// a time.
    fn code(&mut self, chunk: &[u8]) {
        self.bases.clear();
        self.bases.extend(chunk.iter().map(|&b| base(b)));
        self.dropped = self.bases.iter().fold(0, |all, b| all | b) & OTHER != 0;
        self.bases.extend([OTHER; 2]);
        let codons = self.bases.iter().zip(&self.bases[1..]).zip(&self.bases[2..]);
        let codon = |((a, b), c): ((&u8, &u8), &u8)| (a << 4 | b << 2 | c) & 0x3f | (a | b | c) & OTHER;
        self.codons.clear();
        self.codons.extend(codons.map(codon));
    }
}

/// The base on the forward strand at which the first codon of `frame` starts (on the reverse strand:
/// ends), if `bases` are enough for one. The others are multiples of three away.
fn first_codon(frame: Frame, bases: usize) -> Option<usize> {
    match frame.strand() {
        '+' => (bases >= frame.offset() + 3).then_some(frame.offset()),
        _ => bases.checked_sub(frame.offset() + 3),
    }
}

/// The bit of [`stops`] that stands for the strand of `frame`.
fn strand_bit(frame: Frame) -> u8 {
    1 << u8::from(frame.strand() == '-')
}

/// For the codons at 0, 3, 6, ..., those at 1, 4, 7, ... and those at 2, 5, 8, ...: bit 0 if one is
/// a stop on the forward strand, bit 1 if one is a stop on the reverse strand.
fn stops(codons: &[u8]) -> [u8; 3] {
    /// Vectors of any length up to 32 bytes divide it, and three does.
    const BLOCK: usize = 96;
    let mut found = [0; BLOCK];
    let (blocks, rest) = codons.as_chunks::<BLOCK>();
    for block in blocks {
        found.iter_mut().zip(block).for_each(|(found, &codon)| *found |= stop(codon));
    }
    found.iter_mut().zip(rest).for_each(|(found, &codon)| *found |= stop(codon));
    let (threes, _) = found.as_chunks::<3>();
    threes.iter().fold([0; 3], |[a, b, c], [x, y, z]| [a | x, b | y, c | z])
}

/// Bit 0 if `codon` is a stop, bit 1 if its reverse complement is.
#[inline]
fn stop(codon: u8) -> u8 {
    const TAA: u8 = 0b11_00_00;
    const TAG: u8 = 0b11_00_10;
    const TGA: u8 = 0b11_10_00;
    const TTA: u8 = 0b11_11_00;
    const CTA: u8 = 0b01_11_00;
    const TCA: u8 = 0b11_01_00;
    let forward = (codon == TAA) | (codon == TAG) | (codon == TGA);
    let reverse = (codon == TTA) | (codon == CTA) | (codon == TCA);
    u8::from(forward) | u8::from(reverse) << 1
}

/// Sets `protein` to the residues of `frame`, which has no stop. There is a codon for each base.
fn translate(frame: Frame, codons: &[u8], dropped: bool, protein: &mut Vec<u8>) {
    let bases = codons.len();
    let whole = (bases - frame.offset()) / 3 * 3;
    protein.clear();
    if frame.strand() == '+' {
        let (codons, _) = codons[frame.offset()..][..whole].as_chunks::<3>();
        protein.extend(codons.iter().map(|&[codon, ..]| FORWARD[usize::from(codon)]));
    } else {
        let end = bases - frame.offset();
        let (codons, _) = codons[end - whole..end].as_chunks::<3>();
        protein.extend(codons.iter().rev().map(|&[codon, ..]| REVERSE[usize::from(codon)]));
    }
    if dropped {
        protein.retain(|&residue| residue != 0);
    }
}

/// The code of a base of either case.
#[inline]
fn base(letter: u8) -> u8 {
    // Clears the bit of lower case; what becomes A, C, G or T thereby was one.
    let upper = letter & !0x20;
    let known = (upper == b'A') | (upper == b'C') | (upper == b'G') | (upper == b'T');
    // In ASCII these bits of the four letters are 0, 1, 2, 3 in this order.
    let code = (upper >> 1 ^ upper >> 2) & 3;
    if known { code } else { OTHER }
}

/// The strand that `strand` holds, or, when that is empty, that `spell` makes of `chunk`.
fn spelled<'a>(strand: &'a mut Vec<u8>, chunk: &[u8], spell: fn(&[u8], &mut Vec<u8>)) -> &'a [u8] {
    if strand.is_empty() {
        spell(chunk, strand);
    }
    strand
}

fn spell_forward(chunk: &[u8], strand: &mut Vec<u8>) {
    strand.extend(chunk.iter().map(u8::to_ascii_uppercase));
}

/// The reverse complement; any letter but A, C, G, T is its own complement.
fn spell_reverse(chunk: &[u8], strand: &mut Vec<u8>) {
    let (rest, eights) = chunk.as_rchunks::<8>();
    strand.resize(8 * eights.len(), 0);
    for (to, from) in strand.as_chunks_mut::<8>().0.iter_mut().zip(eights.iter().rev()) {
        *to = u64::from_le_bytes(*from).to_be_bytes();
    }
    strand.extend(rest.iter().rev());
    for letter in strand {
        let upper = letter.to_ascii_uppercase();
        let weak = if (upper == b'A') | (upper == b'T') { b'A' ^ b'T' } else { 0 };
        let strong = if (upper == b'C') | (upper == b'G') { b'C' ^ b'G' } else { 0 };
        *letter = upper ^ weak ^ strong;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `expected`: "frame protein/nucleotide" of every frame that is kept.
    fn check(chunk: &str, expected: &str) {
        let mut found = Vec::new();
        orfs(chunk.as_bytes(), &mut Scratch::default(), |o| {
            let text = |b: &[u8]| String::from_utf8(b.to_vec()).unwrap();
            found.push(format!("{} {}/{}", o.frame.name(), text(o.protein), text(o.nucleotide)));
        });
        assert_eq!(found.join(", "), expected, "{chunk}");
    }

    #[test]
    fn the_edge_vectors_of_the_specification() {
        check("", "");
        check("A", "");
        check("AC", "");
        check("ACG", "F1 T/ACG, R1 R/CGT");
        check("ACGTA", "F1 T/ACGT, F2 R/CGTA, F3 V/GTA, R1 Y/TACG, R2 T/ACGT, R3 R/CGT");
        check("ATGRAAGCC", "F1 MA/ATGRAAG, F2 K/TGRA, F3 S/GRAA, R1 GH/GGCTTRC, R2 A/GCTT, R3 L/CTTR");
        check("AUGGCC", "F1 A/AUGG, F3 G/GGCC, R1 G/GGCC, R2 A/GCCU");
        check("NNNNNNNN", "");
    }

    #[test]
    fn a_dropped_codon_shortens_the_slice() {
        let mut found = None;
        orfs(b"ATGNNNGCC", &mut Scratch::default(), |o| {
            if o.frame == Frame::F1 {
                found = Some((o.protein.to_vec(), o.nucleotide.to_vec()));
            }
        });
        assert_eq!(found, Some((b"MA".to_vec(), b"ATGNNNG".to_vec())));
    }

    #[test]
    fn case_does_not_matter() {
        check("acgTA", "F1 T/ACGT, F2 R/CGTA, F3 V/GTA, R1 Y/TACG, R2 T/ACGT, R3 R/CGT");
    }

    #[test]
    fn a_frame_with_a_stop_is_closed() {
        check("TAATAG", "F2 N/AATA, F3 I/ATAG, R1 LL/CTATTA, R2 Y/TATT, R3 I/ATTA");
    }

    /// The definition, step by step: both strands spelled, each frame read codon by codon.
    fn by_the_letter(chunk: &[u8]) -> Vec<(Frame, Vec<u8>, Vec<u8>)> {
        let forward: Vec<u8> = chunk.to_ascii_uppercase();
        let complement = |b: &u8| match b {
            b'A' => b'T',
            b'C' => b'G',
            b'G' => b'C',
            b'T' => b'A',
            other => *other,
        };
        let reverse: Vec<u8> = forward.iter().rev().map(complement).collect();
        let mut found = Vec::new();
        for frame in Frame::ALL {
            let strand = if frame.strand() == '+' { &forward } else { &reverse };
            let Some(strand) = strand.get(frame.offset()..) else { continue };
            let index = |b: &u8| b"ACGT".iter().position(|x| x == b);
            let codes = strand.chunks_exact(3).filter_map(|codon| {
                let [a, b, c] = [index(&codon[0])?, index(&codon[1])?, index(&codon[2])?];
                Some(CODE[16 * a + 4 * b + c])
            });
            let protein: Vec<u8> = codes.collect();
            if !protein.is_empty() && !protein.contains(&b'*') {
                let end = strand.len().min(3 * protein.len() + 1);
                found.push((frame, strand[..end].to_vec(), protein));
            }
        }
        found
    }

    fn check_by_the_letter(chunk: &[u8], scratch: &mut Scratch) {
        let mut found = Vec::new();
        orfs(chunk, scratch, |o| found.push((o.frame, o.nucleotide.to_vec(), o.protein.to_vec())));
        assert_eq!(found, by_the_letter(chunk), "{}", chunk.escape_ascii());
    }

    #[test]
    fn every_byte_is_what_the_definition_says() {
        let mut scratch = Scratch::default();
        for byte in 0..=255 {
            check_by_the_letter(&[byte, b'C', b'A', byte, byte, b'g', b'C', byte], &mut scratch);
            check_by_the_letter(&[byte; 10], &mut scratch);
        }
    }

    #[test]
    fn every_codon_on_every_frame() {
        let mut scratch = Scratch::default();
        let bases = b"ACGTN";
        for code in 0..125 {
            let codon = [code / 25, code / 5 % 5, code % 5].map(|i| bases[i]);
            for length in 0..8 {
                check_by_the_letter(&[&b"GCCGCCG"[..length], &codon, b"GGC"].concat(), &mut scratch);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

        #[test]
        fn any_chunks(
            chunks in prop::collection::vec(prop::collection::vec(
                prop::sample::select(b"AACCCCGGGGTTACGTACGTacgtNRU-".to_vec()), 0..120), 1..4),
        ) {
            let mut scratch = Scratch::default();
            chunks.iter().for_each(|chunk| check_by_the_letter(chunk, &mut scratch));
        }
    }

    #[test]
    fn the_code_is_table_1() {
        // NCBI prints table 1 in the order T, C, A, G.
        let ncbi = b"FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG";
        let order = [3, 1, 0, 2];
        for (i, &residue) in ncbi.iter().enumerate() {
            let index = 16 * order[i / 16] + 4 * order[i / 4 % 4] + order[i % 4];
            assert_eq!(CODE[index], residue);
        }
    }

    #[test]
    fn names_strands_and_offsets() {
        let all: Vec<_> =
            Frame::ALL.iter().map(|f| format!("{}{}{}", f.name(), f.strand(), f.offset())).collect();
        assert_eq!(all.join(" "), "F1+0 F2+1 F3+2 R1-0 R2-1 R3-2");
        assert!(Frame::ALL.iter().enumerate().all(|(i, f)| f.index() == i));
    }
}
