//! Flags of `plimsoll embed`. Invariant: every flag has its default and help here.

use super::messages::MonitorFlag;
use super::print;
use super::sequences::{SequenceFlags, StrictFlag, letters};
use crate::error::CliError;
use crate::report;
use clap::{Args, ValueEnum};
use plimsoll_embed::{EmbedDestination, EmbedFormat, EmbedOptions, Pooling, ValueType, embed};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{OutputGuard, RuntimeError};
use std::path::PathBuf;
use std::process::ExitCode;

/// Compute embeddings of DNA or protein sequences
///
/// Writes one row for each sequence, in the order of the input. With a decoder language model the input can also be texts.
#[derive(Debug, Args)]
pub struct EmbedCommand {
    /// Sequence files: FASTA or FASTQ, plain or compressed (.gz, .bz2, .zst, .xz); a folder selects all sequence files
    /// in it, and - reads standard input. For a decoder also texts: .txt, one on each line, or .jsonl, objects with the
    /// fields text and, if the line number is not the id, id
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,

    /// Model: a folder, a weight file, or a Hugging Face hub id such as facebook/esm2_t33_650M_UR50D or
    /// zhihan1996/DNABERT-S, also with a branch, tag or commit (org/name@revision); files missing from the local cache are
    /// downloaded. A decoder is a checkpoint of plimsoll train,
    /// or a folder or hub id of a Llama, Mistral or Mixtral model
    #[arg(long, value_name = "PATH|HUB_ID")]
    model: String,

    /// Output file: OUT.npy (with the ids in OUT.ids.txt, and metadata and ids in OUT.json), OUT.npz, OUT.safetensors, or
    /// OUT.parquet (columns id, length and embedding); with --per-input, a folder
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,

    /// Write one output file for each input, named after the input, in the folder OUT; the model is loaded once
    #[arg(long)]
    per_input: bool,

    /// File format of the output files, with --per-input
    #[arg(long, value_enum, default_value_t = FormatName::Npy, requires = "per_input")]
    format: FormatName,

    /// Replace an existing output
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    strict: StrictFlag,

    /// Pooling: how the hidden states of a sequence's tokens become its embedding
    #[arg(long, value_enum, default_value_t = PoolName::Mean)]
    pool: PoolName,

    /// Element type of the values in the output. A value beyond the range of float16 is an error
    #[arg(long, value_enum, default_value_t = ValueName::Float32)]
    dtype: ValueName,

    /// Layers whose hidden states are written: 0 is the embedding layer, 1 the first block, -1 the last block [default:
    /// the last block, without a layer dimension]
    #[arg(long, value_name = "I,J,...", value_delimiter = ',', value_parser = layer, allow_hyphen_values = true)]
    layers: Option<Vec<i64>>,

    /// Maximum length of a sequence in letters (residues or bases; bytes of texts) [default: 1022 for ESM-2, no limit for other models]
    #[arg(long, value_name = "N", value_parser = letters)]
    max_length: Option<u64>,

    #[command(flatten)]
    sequences: SequenceFlags,

    #[command(flatten)]
    monitor: MonitorFlag,
}

/// Element type of the values.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ValueName {
    Float32,
    Float16,
}

/// Pooling of a sequence's hidden states.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum PoolName {
    /// The mean over residues (ESM-2) or over all tokens (DNABERT-S, decoders)
    Mean,
    /// The row of the first token (CLS)
    Cls,
    /// The row of the last token, which has seen all others (decoders)
    Last,
    /// One row per residue (ESM-2, without BOS and EOS) or per token (DNABERT-S, decoders); not for .npy
    Tokens,
}

/// File format of a result.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormatName {
    Npy,
    Npz,
    Safetensors,
    Parquet,
}

fn layer(text: &str) -> Result<i64, String> {
    let number = text.trim().parse::<i64>().ok().filter(|n| n.unsigned_abs() <= 1 << 24);
    number.ok_or_else(|| "give layer numbers separated by commas, such as 0,6,-1".to_owned())
}

impl EmbedCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let options = self.options()?;
        let messages = &self.sequences.messages;
        let mut guard = OutputGuard::new(options.input_files(), false);
        guard.own_file(&self.output).map_err(RuntimeError::from)?;
        let mut terminal = messages.terminal_with(&self.monitor, &mut guard)?;
        terminal.listen()?;
        let done = embed(&options, &mut terminal);
        terminal.finish();
        let report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        if messages.json() {
            print(&format!("{:#}", to_json(&report)))?;
        } else if !messages.quiet() {
            print(&report::embedded(&report, "values of a row"))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn options(&self) -> Result<EmbedOptions, CliError> {
        Ok(EmbedOptions {
            model: self.model.clone(),
            inputs: self.inputs.clone(),
            output: self.destination(),
            force: self.force,
            strict: self.strict.strict,
            pool: match self.pool {
                PoolName::Mean => Pooling::Mean,
                PoolName::Cls => Pooling::Cls,
                PoolName::Last => Pooling::Last,
                PoolName::Tokens => Pooling::Tokens,
            },
            layers: self.layers.clone(),
            values: match self.dtype {
                ValueName::Float32 => ValueType::F32,
                ValueName::Float16 => ValueType::F16,
            },
            sort_by_length: self.sequences.sort_by_length(),
            max_length: self.max_length.map(|n| n as usize),
            truncate: self.sequences.truncate,
            allow_dna: self.sequences.allow_dna,
            prefetch: self.sequences.prefetch as usize,
            journal: self.sequences.journal(),
            commit_every: self.sequences.commit_every(),
            settings: self.sequences.settings()?,
        })
    }

    fn destination(&self) -> EmbedDestination {
        if !self.per_input {
            return EmbedDestination::File(self.output.clone());
        }
        let format = match self.format {
            FormatName::Npy => EmbedFormat::Npy,
            FormatName::Npz => EmbedFormat::Npz,
            FormatName::Safetensors => EmbedFormat::Safetensors,
            FormatName::Parquet => EmbedFormat::Parquet,
        };
        EmbedDestination::PerInput { folder: self.output.clone(), format }
    }
}
