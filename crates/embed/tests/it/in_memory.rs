//! `embed_sequences`. Invariant: its values are bit-identical to the values that `embed` writes for a file with
//! the same sequences.

use plimsoll_data::weights::HubEnv;
use plimsoll_embed::{EmbedError, EmbedOptions, InMemoryOptions, Pooling, embed, embed_sequences};
use plimsoll_runtime::{EncoderModel, RuntimeError, Settings, Silent};
use plimsoll_testing::{Folder, fixture};

fn open(model: &str) -> EncoderModel {
    let path = fixture("goldens").join(model).display().to_string();
    EncoderModel::open(&path, &HubEnv::from_process(), &mut Silent).expect("a model")
}

/// Reads the values of a one-dimensional or row-major `.npy` file of f32.
fn values(npy: &[u8]) -> Vec<f32> {
    let header = 10 + usize::from(u16::from_le_bytes([npy[8], npy[9]]));
    npy[header..]
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")))
        .collect()
}

#[test]
fn values_are_those_of_a_file() {
    let proteins = ["MKTAYIAKQRQISFVKSHFSRQ*", "MV", "MVLSPADKTNVKAAWGKVGAHAGEYGAEALERMFLSFPTTKTYFPHF", "mkv"];
    let reads = ["ACGUACGGTTNACCA", "TTGACCAGGT", "ACGATCGATCGACTAGCATCGACTACGACTACGACTCAGCAT"];
    for (name, sequences) in [("esm2", &proteins[..]), ("dnabert_s", &reads[..])] {
        for (pool, layers) in [(Pooling::Mean, None), (Pooling::Cls, None), (Pooling::Mean, Some(vec![0, -1]))]
        {
            let folder = Folder::new(&format!("in-memory-{name}"));
            let records: String =
                sequences.iter().enumerate().map(|(i, letters)| format!(">{i}\n{letters}\n")).collect();
            let model = fixture("goldens").join(name).display().to_string();
            let usual = EmbedOptions::usual(model, folder.write("in.fa", records), folder.path("out.npy"));
            let options = EmbedOptions { pool, layers: layers.clone(), ..usual };
            embed(&options, &mut Silent).expect("embedded");
            let written = values(&std::fs::read(folder.path("out.npy")).expect("written"));
            let settings = &options.settings;
            let options = InMemoryOptions { pool, layers: layers.as_deref(), settings };
            let rows = embed_sequences(&open(name), sequences, &options, &mut Silent);
            assert_eq!(rows.expect("embedded").concat(), written, "{name} {pool:?} {layers:?}");
        }
    }
}

#[test]
fn tokens_have_a_row_each() {
    let model = open("esm2");
    let width = model.encoder.hidden_size() as usize;
    let settings = Settings::default();
    let options = InMemoryOptions { pool: Pooling::Tokens, layers: None, settings: &settings };
    let rows = embed_sequences(&model, &["MKTAY", "MK"], &options, &mut Silent);
    let lengths: Vec<usize> = rows.expect("embedded").iter().map(|row| row.len() / width).collect();
    assert_eq!(lengths, [5, 2]);
    let options = InMemoryOptions { pool: Pooling::Mean, ..options };
    let none = embed_sequences(&model, &[""; 0], &options, &mut Silent);
    assert!(none.expect("nothing to do").is_empty());
}

#[test]
fn wrong_sequences_are_named() {
    let check = |model: &str, sequences: &[&str], wanted: &str| {
        let settings = Settings::default();
        let options = InMemoryOptions { pool: Pooling::Mean, layers: None, settings: &settings };
        let error = embed_sequences(&open(model), sequences, &options, &mut Silent).expect_err("refused");
        assert!(
            matches!(error, EmbedError::Runtime(RuntimeError::Sequence { .. }))
                && error.to_string().contains(wanted),
            "{error}"
        );
    };
    check("esm2", &["MKV", ""], "sequence 1: it has no letters");
    check("esm2", &["*"], "sequence 0: it has no letters");
    check("esm2", &[&"ACGT".repeat(12)], "sequence 0: no protein");
    check("dnabert_s", &["ACGT", "MKVLEFPQ"], "sequence 1: no nucleotide sequence");
}
