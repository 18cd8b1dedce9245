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

/// What [`BASE`] says of a character that is none of A, C, G, T.
const OTHER: u8 = 0x80;

/// Two bits per base; [`OTHER`] for the rest. Input is upper case.
const BASE: [u8; 256] = {
    let mut table = [OTHER; 256];
    table[b'A' as usize] = 0;
    table[b'C' as usize] = 1;
    table[b'G' as usize] = 2;
    table[b'T' as usize] = 3;
    table
};

/// The complement of A, C, G, T; any other character is its own.
const COMPLEMENT: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        table[i] = i as u8;
        i += 1;
    }
    table[b'A' as usize] = b'T';
    table[b'C' as usize] = b'G';
    table[b'G' as usize] = b'C';
    table[b'T' as usize] = b'A';
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

/// Buffers of [`orfs`], reused from chunk to chunk: three times the longest chunk at most.
#[derive(Debug, Default)]
pub struct Scratch {
    forward: Vec<u8>,
    reverse: Vec<u8>,
    protein: Vec<u8>,
}

/// Calls `f` for every open reading frame of `chunk`, in the order of [`Frame::ALL`]. Frames with a
/// stop, and frames without a residue, are skipped.
pub fn orfs(chunk: &[u8], scratch: &mut Scratch, mut f: impl FnMut(Orf<'_>)) {
    let Scratch { forward, reverse, protein } = scratch;
    forward.clear();
    forward.extend(chunk.iter().map(u8::to_ascii_uppercase));
    reverse.clear();
    reverse.extend(forward.iter().rev().map(|&b| COMPLEMENT[usize::from(b)]));
    for frame in Frame::ALL {
        let strand: &[u8] = if frame.strand() == '+' { forward } else { reverse };
        let Some(strand) = strand.get(frame.offset()..) else { continue };
        if open_frame(strand, protein) && !protein.is_empty() {
            let end = strand.len().min(3 * protein.len() + 1);
            f(Orf { frame, nucleotide: &strand[..end], protein });
        }
    }
}

/// Translates the codons of `strand` into `protein`; false at the first stop.
fn open_frame(strand: &[u8], protein: &mut Vec<u8>) -> bool {
    protein.clear();
    for codon in strand.chunks_exact(3) {
        let [a, b, c] = [codon[0], codon[1], codon[2]].map(|x| BASE[usize::from(x)]);
        if (a | b | c) & OTHER != 0 {
            continue;
        }
        match CODE[usize::from(a << 4 | b << 2 | c)] {
            b'*' => return false,
            residue => protein.push(residue),
        }
    }
    true
}

#[cfg(test)]
mod tests {
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
