//! Six-frame translation, as in VirNucPro. Invariant: the open reading frames (ORFs) of a window are emitted in the
//! order F1 F2 F3 R1 R2 R3, in upper case, each without a stop codon and with at least one residue, and nothing is
//! allocated after the [`OrfScratch`] has grown to the longest window.
//!
//! Three unusual rules follow VirNucPro, because its models were trained on the resulting sequences: a codon with a
//! character other than A, C, G, T is dropped rather than translated to `X`; the reverse complement leaves such
//! characters unchanged; and the nucleotide sequence of an ORF has **one base more** than three per residue, if the
//! strand is long enough.

/// The standard genetic code (NCBI table 1), indexed `16 a + 4 b + c` with A, C, G, T = 0, 1, 2, 3.
const CODE: &[u8; 64] = b"KNKNTTTTRSRSIIMIQHQHPPPPRRRRLLLLEDEDAAAAGGGGVVVV*Y*YSSSS*CWCLFLF";

/// Flag bit of a base that is not A, C, G or T, and of every codon that contains such a base.
const OTHER: u8 = 0x80;

/// Residue by codon on the forward strand; 0 for codons to drop, which have the bit [`OTHER`].
const FORWARD: [u8; 256] = {
    let mut table = [0; 256];
    let mut codon = 0;
    while codon < 64 {
        table[codon] = CODE[codon];
        codon += 1;
    }
    table
};

/// Residue of the reverse complement of a codon, indexed by the codon on the forward strand; 0 for codons to drop. The
/// complement of base code `c` is `3 - c`.
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
    /// All frames, in the order in which [`orfs`] emits them and output files list them.
    pub const ALL: [Frame; 6] = [Frame::F1, Frame::F2, Frame::F3, Frame::R1, Frame::R2, Frame::R3];

    /// Returns the name, which is also the last two characters of an ORF's id.
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

    /// Returns the strand in BED notation: `+` (forward) or `-` (reverse complement).
    pub fn strand(self) -> char {
        match self {
            Frame::F1 | Frame::F2 | Frame::F3 => '+',
            Frame::R1 | Frame::R2 | Frame::R3 => '-',
        }
    }

    /// Returns the number of bases before the first codon of the strand: 0, 1 or 2.
    pub fn offset(self) -> usize {
        match self {
            Frame::F1 | Frame::R1 => 0,
            Frame::F2 | Frame::R2 => 1,
            Frame::F3 | Frame::R3 => 2,
        }
    }

    /// Returns the index in [`Frame::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

/// An open reading frame (ORF): here an entire reading frame of a window without a stop codon; no start codon is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orf<'a> {
    /// Strand and offset.
    pub frame: Frame,
    /// Bases of the frame's strand from its offset on, in upper case: `min(3 * residues + 1, strand length - offset)`.
    pub nucleotide: &'a [u8],
    /// Residues, one letter each; at least one, and no stop.
    pub protein: &'a [u8],
}

/// Buffers of [`orfs`], reused for all windows; they hold less than five bytes per base of the longest window.
#[derive(Debug, Default)]
pub struct OrfScratch {
    /// Code of each base: two bits, or [`OTHER`]. Two [`OTHER`] follow, so that a codon starts at every base.
    bases: Vec<u8>,
    /// The codon that starts at each base of the forward strand: six bits, with the bit [`OTHER`] if it is to be
    /// dropped.
    codons: Vec<u8>,
    /// Whether the window contains a base other than A, C, G and T, so that codons may have to be dropped.
    dropped: bool,
    /// Residues of the current frame.
    protein: Vec<u8>,
    /// Forward strand in upper case; empty until a frame on it has an ORF.
    forward: Vec<u8>,
    /// Reverse complement in upper case; empty until a frame on it has an ORF.
    reverse: Vec<u8>,
}

/// Calls `f` for every ORF of `window`, in the order of [`Frame::ALL`]. Frames with a stop codon and frames without a
/// residue are skipped.
///
/// The bases are encoded once, and the stop codons of all six frames are searched in that encoding with SIMD. Only
/// frames without a stop codon are translated, and only the strands of such frames are built.
pub fn orfs(window: &[u8], scratch: &mut OrfScratch, mut f: impl FnMut(Orf<'_>)) {
    scratch.code(window);
    let stops = stops(&scratch.codons);
    let OrfScratch { codons, dropped, protein, forward, reverse, .. } = scratch;
    forward.clear();
    reverse.clear();
    for frame in Frame::ALL {
        let Some(first) = first_codon(frame, window.len()) else { continue };
        if stops[first % 3] & strand_bit(frame) != 0 {
            continue;
        }
        translate(frame, codons, *dropped, protein);
        if protein.is_empty() {
            continue;
        }
        let strand = match frame.strand() {
            '+' => spelled(forward, window, spell_forward),
            _ => spelled(reverse, window, spell_reverse),
        };
        let strand = &strand[frame.offset()..];
        let end = strand.len().min(3 * protein.len() + 1);
        f(Orf { frame, nucleotide: &strand[..end], protein });
    }
}

impl OrfScratch {
    /// Sets `bases`, `codons` and `dropped` from `window`. The loops have no branches, so that the compiler vectorizes
    /// them.
    fn code(&mut self, window: &[u8]) {
        self.bases.clear();
        self.bases.extend(window.iter().map(|&b| base(b)));
        self.dropped = self.bases.iter().fold(0, |all, b| all | b) & OTHER != 0;
        self.bases.extend([OTHER; 2]);
        let codons = self.bases.iter().zip(&self.bases[1..]).zip(&self.bases[2..]);
        self.codons.clear();
        self.codons.extend(codons.map(|((a, b), c)| (a << 4 | b << 2 | c) & 0x3f | (a | b | c) & OTHER));
    }
}

/// Returns the lowest forward-strand index of the three bases of the first codon of `frame`, or `None` if a window of
/// `bases` bases is too short for a codon. The other codons of the frame are multiples of three away.
fn first_codon(frame: Frame, bases: usize) -> Option<usize> {
    match frame.strand() {
        '+' => (bases >= frame.offset() + 3).then_some(frame.offset()),
        _ => bases.checked_sub(frame.offset() + 3),
    }
}

/// Returns the bit of [`stops`] for the strand of `frame`.
fn strand_bit(frame: Frame) -> u8 {
    1 << u8::from(frame.strand() == '-')
}

/// Returns flags for each phase `i mod 3` of the codon index `i`: bit 0 is set if any codon of the phase is a stop
/// codon on the forward strand, bit 1 if any is a stop codon on the reverse strand.
fn stops(codons: &[u8]) -> [u8; 3] {
    /// A multiple of 3, so that a position in the block has the same phase in every block, and of 32, so that whole
    /// SIMD vectors of up to 32 bytes fill it.
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

/// Returns bit 0 if `codon` is a stop codon, and bit 1 if its reverse complement is a stop codon.
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

/// Sets `protein` to the residues of `frame`, which has no stop codon. `codons[i]` is the codon that starts at base
/// `i`.
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

/// Returns the code of a base in upper or lower case: A, C, G, T = 0, 1, 2, 3, anything else [`OTHER`].
#[inline]
fn base(letter: u8) -> u8 {
    // Clears the ASCII lower-case bit; only the letters A, C, G, T of either case become A, C, G, T by this.
    let upper = letter & !0x20;
    let known = (upper == b'A') | (upper == b'C') | (upper == b'G') | (upper == b'T');
    // The XOR of bits 1-2 and 2-3 of the ASCII codes of A, C, G, T is 0, 1, 2, 3.
    let code = (upper >> 1 ^ upper >> 2) & 3;
    if known { code } else { OTHER }
}

/// Returns `strand`, after filling it from `window` with `spell` if it is empty.
fn spelled<'a>(strand: &'a mut Vec<u8>, window: &[u8], spell: fn(&[u8], &mut Vec<u8>)) -> &'a [u8] {
    if strand.is_empty() {
        spell(window, strand);
    }
    strand
}

fn spell_forward(window: &[u8], strand: &mut Vec<u8>) {
    strand.extend(window.iter().map(u8::to_ascii_uppercase));
}

/// Fills `strand` with the reverse complement of `window` in upper case. Letters other than A, C, G, T are their own
/// complement.
fn spell_reverse(window: &[u8], strand: &mut Vec<u8>) {
    let (rest, eights) = window.as_rchunks::<8>();
    // Reverses eight letters at a time by a byte swap, then complements in place: XOR with `A ^ T` swaps A and T, XOR
    // with `C ^ G` swaps C and G.
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

    /// Compares the ORFs of `window` with `expected`, a list of "frame protein/nucleotide".
    fn check(window: &str, expected: &str) {
        let mut found = Vec::new();
        orfs(window.as_bytes(), &mut OrfScratch::default(), |o| {
            let text = |b: &[u8]| String::from_utf8(b.to_vec()).unwrap();
            found.push(format!("{} {}/{}", o.frame.name(), text(o.protein), text(o.nucleotide)));
        });
        assert_eq!(found.join(", "), expected, "{window}");
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
        orfs(b"ATGNNNGCC", &mut OrfScratch::default(), |o| {
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

    /// Reference implementation: builds both strands and translates each frame codon by codon.
    fn by_the_letter(window: &[u8]) -> Vec<(Frame, Vec<u8>, Vec<u8>)> {
        let forward: Vec<u8> = window.to_ascii_uppercase();
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

    fn check_by_the_letter(window: &[u8], scratch: &mut OrfScratch) {
        let mut found = Vec::new();
        orfs(window, scratch, |o| found.push((o.frame, o.nucleotide.to_vec(), o.protein.to_vec())));
        assert_eq!(found, by_the_letter(window), "{}", window.escape_ascii());
    }

    #[test]
    fn every_byte_is_what_the_definition_says() {
        let mut scratch = OrfScratch::default();
        for byte in 0..=255 {
            check_by_the_letter(&[byte, b'C', b'A', byte, byte, b'g', b'C', byte], &mut scratch);
            check_by_the_letter(&[byte; 10], &mut scratch);
        }
    }

    #[test]
    fn every_codon_on_every_frame() {
        let mut scratch = OrfScratch::default();
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
        fn any_windows(
            windows in prop::collection::vec(prop::collection::vec(
                prop::sample::select(b"AACCCCGGGGTTACGTACGTacgtNRU-".to_vec()), 0..120), 1..4),
        ) {
            let mut scratch = OrfScratch::default();
            windows.iter().for_each(|window| check_by_the_letter(window, &mut scratch));
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
