//! The data layer of Plimsoll (floor 0). It reads sequence and weight files, splits records into windows, finds open
//! reading frames, tokenizes, packs token sequences into steps, makes training batches and writes result files.
//! Invariant: all data streams in input order within bounded memory, results are deterministic, and nothing that is
//! read is ever executed.

#![forbid(unsafe_code)]

/// Nucleotide and protein alphabets: RNA to DNA, and rejection of input of the wrong kind.
pub mod alphabet;
/// Files that are written completely or not at all.
pub mod atomic;
/// Reads small files with an upper limit on their size.
pub mod bounded;
/// VirNucPro's rule for splitting a record into overlapping windows.
pub mod chunk;
/// The error type of this crate.
pub mod error;
/// Hexadecimal text of digests.
pub mod hex;
/// A compact set of record ids, used to find duplicates.
pub mod ids;
/// VirNucPro's intermediate FASTA files.
pub mod intermediate;
/// Append-only journals of finished results, from which an interrupted run resumes.
pub mod journal;
/// Limits of the operating system: address space, threads, open files.
pub mod limits;
/// Numbers formatted as numpy prints them.
pub mod number;
/// Packs variable-length token sequences into steps without padding.
pub mod pack;
/// Names and paths escaped for error messages.
pub mod printable;
/// Writers for result files: `.npy`, `.safetensors`, `.parquet`.
pub mod rows;
/// Readers for FASTA and FASTQ files.
pub mod sequence;
/// Tokenizers of ESM-2 and DNABERT-S.
pub mod tokenize;
/// Training data: documents, splits, windows, batches.
pub mod train;
/// Six-frame translation into open reading frames.
pub mod translate;
/// Weight files: safetensors, PyTorch checkpoints, the Hugging Face hub.
pub mod weights;

pub use error::{DataError, DataErrorKind};
