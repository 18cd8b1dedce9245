//! Tests that the intermediate files (windows and open reading frames) equal those of VirNucPro byte for byte.

use std::fs;
use std::path::Path;

use md5::{Digest, Md5};
use plimsoll_data::intermediate::{orf_name, window_name, write_nucleotide, write_protein, write_window};
use plimsoll_data::sequence::{Reader, Record};
use plimsoll_data::translate::{OrfScratch, orfs};
use plimsoll_data::window::record_windows;

use crate::support::{golden, real};

#[derive(Default)]
struct Files {
    chunked: Vec<u8>,
    nucleotide: Vec<u8>,
    protein: Vec<u8>,
    orfs: Vec<String>,
    windows: usize,
}

/// The three intermediate files of `input` with windows of `size` bases.
fn files(input: &Path, size: usize) -> Files {
    let mut out = Files::default();
    let mut name = String::new();
    let mut scratch = OrfScratch::default();
    let mut reader = Reader::open([input]).unwrap();
    let mut record = Record::default();
    while reader.read_into(&mut record).unwrap() {
        for window in record_windows(record.seq.len(), size) {
            let bases = window.of(&record.seq);
            window_name(&record.id, window.index, &mut name);
            write_window(&mut out.chunked, &name, bases).unwrap();
            out.windows += 1;
            orfs(bases, &mut scratch, |orf| {
                orf_name(&record.id, window.index, orf.frame, &mut name);
                write_nucleotide(&mut out.nucleotide, &name, &orf).unwrap();
                write_protein(&mut out.protein, &name, &orf).unwrap();
                out.orfs.push(name.clone());
            });
        }
    }
    out
}

fn check(found: &[u8], expected: &Path) {
    let expected_bytes = fs::read(expected).unwrap();
    let same = found.iter().zip(&expected_bytes).take_while(|(a, b)| a == b).count();
    assert!(
        found == expected_bytes,
        "{}: differs at byte {same} of {} (found {})",
        expected.display(),
        expected_bytes.len(),
        found.len()
    );
}

#[test]
fn the_goldens_byte_for_byte() {
    for size in [300, 500] {
        let found = files(&golden("pipeline/reads.fa"), size);
        let expected = golden(&format!("pipeline/expected_{size}"));
        check(&found.chunked, &expected.join("chunked.fa"));
        check(&found.nucleotide, &expected.join("nucleotide.fa"));
        check(&found.protein, &expected.join("protein.faa"));
        assert!(found.orfs.len() > 10);
    }
}

#[test]
fn the_originals_test_files_byte_for_byte() {
    for stem in ["test_with_orfs", "test_fixed_500bp"] {
        let Some(input) = real(&format!("virnucpro/{stem}.fa")) else { return };
        let found = files(&input, 500);
        let beside = |rest: &str| input.with_file_name(format!("{stem}_{rest}"));
        check(&found.chunked, &beside("chunked500.fa"));
        check(&found.nucleotide, &beside("identified_nucleotide.fa"));
        check(&found.protein, &beside("identified_protein.faa"));
    }
}

fn md5(bytes: &[u8]) -> String {
    Md5::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn the_originals_md5_sums() {
    let Some(input) = real("virnucpro/test_sequences.fa") else { return };
    let found = files(&input, 300);
    assert_eq!(md5(&found.chunked), "e5703449f261adfa9a3c38a5ce1e5c8f");
    assert_eq!(md5(&found.nucleotide), "da0fd0fe267da90c145652898954f679");
    assert_eq!(md5(&found.protein), "14fc3cd708441cddb98dce28cae932f7");
    assert_eq!(found.windows, 200);
    let ids: Vec<&str> = found.orfs.iter().map(|n| n.strip_prefix("test_seq_").unwrap()).collect();
    let expected = "1_chunk_1R3 4_chunk_2R2 12_chunk_2F1 12_chunk_2R1 26_chunk_2F2 45_chunk_2R1 \
                    57_chunk_2F2 60_chunk_1R3 76_chunk_2R3";
    assert_eq!(ids.join(" "), expected);
    let found = files(&input, 500);
    assert_eq!(md5(&found.chunked), "76da3335c38711c7ea24eed513a77103");
    assert!(found.orfs.is_empty() && found.nucleotide.is_empty() && found.protein.is_empty());
}
