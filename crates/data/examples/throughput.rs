//! Measures throughput: BPE tokenization on one core compared with the `tokenizers` crate, conversion of FASTA to the
//! intermediate files of open reading frames (ORFs), and packs of proteins for training with one tokenizer thread. Invariant: both tokenizers get the same reads, alternate in
//! one run, and give equal tokens.
//!
//! `cargo run --release -p plimsoll-data --example throughput -- [--only bpe|orf|packs] [--tokenizer FILE]
//! [--rounds N] [--folder DIR]`; `--folder` is the folder for the FASTA file and the three intermediate files (default
//! `/dev/shm` if it exists, otherwise the temporary folder). Figures are medians over the rounds: wall time for BPE and packs,
//! CPU time for ORF files.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use plimsoll_data::intermediate::{orf_name, window_name, write_nucleotide, write_protein, write_window};
use plimsoll_data::sequence::{Reader, Record};
use plimsoll_data::tokenize::Bpe;
use plimsoll_data::train::{
    Dataset, DatasetFormat, DatasetSettings, MaskRates, Objective, PackLimits, Shuffle, Split, StreamCounts,
    TokenizerKind, TrainingPack, Validation,
};
use plimsoll_data::translate::{OrfScratch, orfs};
use plimsoll_data::window::record_windows;
use tokenizers::{ModelWrapper, Tokenizer};

const READS: usize = 2000;
const READ: usize = 500;
const RECORDS: usize = 8000;
const CODONS: usize = 1500;
const WINDOW: usize = 500;
const PROTEINS: usize = 40_000;
/// Number of bytes in a buffer from which on it is written to its file.
const FLUSH: usize = 1 << 20;

fn main() {
    let mut tokenizer =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/goldens/dnabert_s/tokenizer.json");
    let mut rounds = 15;
    let mut only = String::new();
    let shm = Path::new("/dev/shm");
    let mut folder = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().unwrap_or_else(|| panic!("{word} needs a value"));
        match word.as_str() {
            "--tokenizer" => tokenizer = PathBuf::from(value),
            "--only" => only = value,
            "--rounds" => rounds = value.parse().expect("--rounds takes a number"),
            "--folder" => folder = PathBuf::from(value),
            other => panic!("unknown flag {other}"),
        }
    }
    let is_asked = |part: &str| only.is_empty() || only == part;
    if is_asked("bpe") {
        bpe(&tokenizer, rounds);
    }
    if is_asked("orf") {
        orf_files(&folder, rounds);
    }
    if is_asked("packs") {
        packs(&folder, rounds);
    }
}

/// An xorshift64* generator, so that the data are equal on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize) % n
    }
}

fn bpe(path: &Path, rounds: usize) {
    let mut random = Random(7);
    let reads: Vec<String> =
        (0..READS).map(|_| (0..READ).map(|_| char::from(b"ACGT"[random.below(4)])).collect()).collect();
    let start = Instant::now();
    let ours = Bpe::from_file(path).expect("the tokenizer");
    let load = start.elapsed();
    let encoder = ours.kind();
    let cached = library(path, true);
    let start = Instant::now();
    let plain = library(path, false);
    let library_load = start.elapsed();
    let mut found = Vec::new();
    for read in &reads {
        found.clear();
        ours.encode(read.as_bytes(), &mut found).expect("tokens");
        let expected = plain.encode_fast(read.as_str(), true).expect("tokens");
        assert!(found.iter().map(|&t| t.cast_unsigned()).eq(expected.get_ids().iter().copied()));
    }
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..rounds {
        times[0].push(timed(|| {
            for read in &reads {
                found.clear();
                ours.encode(read.as_bytes(), &mut found).expect("tokens");
            }
        }));
        for (times, side) in times[1..].iter_mut().zip([&plain, &cached]) {
            times.push(timed(|| {
                for read in &reads {
                    std::hint::black_box(side.encode_fast(read.as_str(), true).expect("tokens"));
                }
            }));
        }
    }
    let [ours, plain, cached] = times.map(median);
    println!("BPE: {READS} random reads of {READ} bases, {} ({rounds} rounds)", path.display());
    println!("  the file allows the encoder {encoder:?}");
    let line = |name: &str, time: Duration| {
        let per_second = READS as f64 / time.as_secs_f64();
        println!("  {name:28} {per_second:10.0} reads/s {:8.1} MB/s", per_second * READ as f64 / 1e6);
    };
    line("plimsoll", ours);
    line("tokenizers, no cache", plain);
    line("tokenizers, cache of words", cached);
    let best = plain.min(cached);
    println!("  ratio to the better: {:.2}", best.as_secs_f64() / ours.as_secs_f64());
    println!("  loading: plimsoll {load:.1?} (with the crate's own), tokenizers {library_load:.1?}");
}

fn library(path: &Path, cache: bool) -> Tokenizer {
    let mut tokenizer = Tokenizer::from_file(path).expect("the tokenizer");
    tokenizer.with_truncation(None).expect("no truncation");
    tokenizer.with_padding(None);
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { panic!("not BPE") };
    let mut model = model.clone();
    if !cache {
        model.resize_cache(0);
    }
    tokenizer.with_model(model);
    tokenizer
}

fn orf_files(folder: &Path, rounds: usize) {
    let folder = folder.join("plimsoll-throughput");
    fs::create_dir_all(&folder).expect("a folder");
    let input = folder.join("coding.fa");
    let bases = write_coding(&input);
    let mut times = [const { Vec::new() }; 2];
    let mut counts = (0, 0);
    for _ in 0..rounds {
        times[0].push(worked(|| counts = convert(&input, Some(&folder))));
        times[1].push(worked(|| counts = convert(&input, None)));
    }
    println!("FASTA to ORF files: {:.1} MB of coding sequence on both strands", bases as f64 / 1e6);
    println!("  {} open frames, {:.1} MB written ({rounds} rounds)", counts.0, counts.1 as f64 / 1e6);
    for (name, time) in ["to files", "without the writes"].iter().zip(times.map(median)) {
        println!("  {name:28} {:8.1} MB of bases a second of a core", bases as f64 / 1e6 / time.as_secs_f64());
    }
    fs::remove_dir_all(&folder).expect("the folder is ours");
}

/// Streams the packs of an epoch of proteins with log-normal lengths, exp N(5.6, 0.75), masked as for ESM-2.
fn packs(folder: &Path, rounds: usize) {
    let path = folder.join("plimsoll-throughput.faa");
    let mut random = Random(5);
    let mut text = Vec::new();
    for protein in 0..PROTEINS {
        // The sum of twelve uniform numbers has a variance of 1.
        let normal = (0..12).map(|_| random.below(1 << 20) as f64 / f64::from(1 << 20)).sum::<f64>() - 6.0;
        let length = (5.6 + 0.75 * normal).exp().round().max(1.0) as usize;
        writeln!(text, ">p{protein}").expect("memory");
        text.extend((0..length).map(|_| b"ACDEFGHIKLMNPQRSTVWY"[random.below(20)]));
        text.push(b'\n');
    }
    fs::write(&path, &text).expect("the input can be written");
    println!("packs of {PROTEINS} proteins, one tokenizer thread ({rounds} rounds)");
    for tokens in [1024, 16_384] {
        let settings = DatasetSettings {
            train: vec![path.clone()],
            validation: Validation::None,
            format: DatasetFormat::Sequences,
            tokens: TokenizerKind::Esm,
            task: Objective::Masked(MaskRates::BERT),
            bounds: PackLimits { tokens, sequences: tokens / 8, longest: 1024 },
            seed: 0,
            shuffle: Shuffle { documents: 10_000, bytes: 64 << 20 },
            longest_document: 1 << 20,
            strict: false,
            workers: 1,
            prefetch: 2,
        };
        let data = Dataset::open(settings).expect("the data");
        let mut pack = TrainingPack::with_capacity(&data.settings().bounds);
        let mut counts = StreamCounts::default();
        let times = (0..rounds).map(|_| {
            timed(|| {
                let mut stream = data.stream(Split::Train, &data.start()).expect("a stream");
                while stream.fill(&mut pack).expect("a pack") {}
                counts = stream.counts();
            })
        });
        let seconds = median(times.collect()).as_secs_f64();
        let speed = counts.tokens as f64 / seconds / 1e6;
        let room = (counts.packs * tokens as u64) as f64;
        let filled = 100.0 * counts.tokens as f64 / room;
        println!("  packs of {tokens:5} tokens {speed:8.1} million tokens/s, {filled:.1} % filled");
    }
    fs::remove_file(&path).expect("the file is ours");
}

/// Writes a FASTA file of random codons without stop codons; every second record is reverse-complemented. Returns the
/// number of bases.
fn write_coding(path: &Path) -> usize {
    let mut random = Random(11);
    let mut text = Vec::new();
    for record in 0..RECORDS {
        let mut sequence = Vec::with_capacity(3 * CODONS);
        while sequence.len() < 3 * CODONS {
            let codon = [0; 3].map(|_| b"ACGT"[random.below(4)]);
            if ![b"TAA", b"TAG", b"TGA"].contains(&&codon) {
                sequence.extend(codon);
            }
        }
        if record % 2 == 1 {
            sequence.reverse();
            for base in &mut sequence {
                *base = b"TGCA"[b"ACGT".iter().position(|b| b == base).expect("a base")];
            }
        }
        writeln!(text, ">gene_{record} coding").expect("memory");
        for line in sequence.chunks(60) {
            text.extend_from_slice(line);
            text.push(b'\n');
        }
    }
    fs::write(path, &text).expect("the input can be written");
    RECORDS * 3 * CODONS
}

/// Writes the three intermediate files of `input` to `folder`, or only formats them without a folder. Returns the
/// numbers of ORFs and of output bytes.
fn convert(input: &Path, folder: Option<&Path>) -> (usize, usize) {
    let names = ["chunked.fa", "nucleotide.fa", "protein.faa"];
    let mut outs = names.map(|name| (Vec::with_capacity(FLUSH + FLUSH / 4), folder.map(|f| create(f, name))));
    let mut record = Record::default();
    let mut scratch = OrfScratch::default();
    let mut name = String::new();
    let mut open = 0;
    let mut bytes = 0;
    let mut reader = Reader::open([input]).expect("the input");
    while reader.read_into(&mut record).expect("a record") {
        for window in record_windows(record.seq.len(), WINDOW) {
            let bases = window.of(&record.seq);
            window_name(&record.id, window.index, &mut name);
            write_window(&mut outs[0].0, &name, bases).expect("memory");
            orfs(bases, &mut scratch, |orf| {
                open += 1;
                orf_name(&record.id, window.index, orf.frame, &mut name);
                write_nucleotide(&mut outs[1].0, &name, &orf).expect("memory");
                write_protein(&mut outs[2].0, &name, &orf).expect("memory");
            });
        }
        for out in &mut outs {
            if out.0.len() >= FLUSH {
                bytes += flush(out);
            }
        }
    }
    (open, bytes + outs.iter_mut().map(flush).sum::<usize>())
}

fn create(folder: &Path, name: &str) -> File {
    File::create(folder.join(name)).expect("a file")
}

fn flush((buffer, file): &mut (Vec<u8>, Option<File>)) -> usize {
    if let Some(file) = file {
        file.write_all(buffer).expect("the file can be written");
    }
    let bytes = buffer.len();
    buffer.clear();
    bytes
}

fn timed(f: impl FnOnce()) -> Duration {
    let start = Instant::now();
    f();
    start.elapsed()
}

/// CPU time of this thread during `f`, system calls included. On a busy machine it gives the rate of one core, where
/// wall time would include other processes. Falls back to wall time on systems without `/proc/thread-self/schedstat`.
fn worked(f: impl FnOnce()) -> Duration {
    let now = || {
        let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    };
    let before = now();
    let clock = timed(f);
    before.zip(now()).map_or(clock, |(before, after)| after - before)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
