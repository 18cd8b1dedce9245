//! The section `data` of the configuration: training files and how they are read. Invariant: plain data; the same
//! settings and seed give the same batches for any number of worker threads.

use super::Auto;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Training data and how it is read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// Files or folders of training documents; for a head, the DNA embeddings. Required.
    pub train: Vec<String>,
    /// For a head, files or folders of the protein embeddings, with the same names as the DNA embeddings.
    /// Required for a head, refused otherwise.
    pub proteins: Vec<String>,
    /// For a head, pattern of the names of embedding tensors in a safetensors file, where * stands for the
    /// name of a sequence (default *).
    pub tensors: String,
    /// Files or folders of validation documents; if empty (default), a share of the training documents is
    /// held out. Applies with run.evaluate_every.
    pub validation: Vec<String>,
    /// Share of the training documents that is held out for validation if data.validation is empty, from 0 to
    /// below 1 (default 0.05). Whether a document is held out depends only on its content and on
    /// data.split_seed. Applies with run.evaluate_every.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub validation_fraction: f64,
    /// Seed of the selection of held-out documents (default 0).
    #[schemars(range(min = 0, max = 9223372036854775807_u64))]
    pub split_seed: u64,
    /// Format of the data files: auto (default) takes it from the file name, otherwise txt, jsonl, bin, fasta
    /// or embeddings; a head needs embeddings, which is its default.
    pub format: DataFormat,
    /// Field of a jsonl line that contains the text (default text).
    pub field: String,
    /// Field of a jsonl line that contains the class, a name of model.class_names or a whole number from 0 (default label).
    pub label_field: String,
    /// Table of classes for FASTA files or embeddings: one line for each sequence with its id, a tab, and its
    /// class, a word or a whole number from 0. For a caller, the table of records: a line of column names, among them id and split (train,
    /// validation, or - for records that are not used), then a line for each record. Required for a head and for
    /// a caller.
    pub labels: Option<String>,
    /// Unit of a txt file that is one document: file, paragraph (default; paragraphs are separated by blank
    /// lines), line, or separated (by lines equal to data.separator).
    pub document: DocumentUnit,
    /// Line that separates documents, such as <|endoftext|>. Required with data.document separated, refused
    /// otherwise.
    pub separator: Option<String>,
    /// Type of the token ids in a bin file: u16 (default) or u32, little-endian.
    pub bin_type: BinType,
    /// Token id that ends a document in a bin file; null (default) takes each file as one document.
    #[schemars(range(min = 0, max = 16777215))]
    pub bin_end: Option<u32>,
    /// Tokenizer: bytes, esm2, or the path of a tokenizer.json; auto (default) is the tokenizer of the model,
    /// and bytes for a language model without model.from.
    pub tokenizer: String,
    /// Special token that is appended to each document; with the tokenizer bytes any name gives id 256. null
    /// (default) appends none.
    pub end_token: Option<String>,
    /// Maximum number of tokens in a sequence (default 1024); longer documents are divided into several
    /// sequences. At most batch.pack_tokens.
    #[schemars(range(min = 2, max = 2147483647))]
    pub longest: u64,
    /// Whether a classifier truncates sequences longer than data.longest; false (default) makes a longer
    /// sequence an error.
    pub truncate: bool,
    /// Whether nucleotide sequences may be given to esm2, which reads proteins; false (default) refuses FASTA files whose letters
    /// are those of DNA or RNA.
    #[schemars(extend("changes" = "log"))]
    pub allow_dna: bool,
    /// Maximum size of a document in bytes, up to 1 GiB (default 16 MiB); a longer document is an error.
    #[schemars(range(min = 1, max = 1073741824))]
    pub longest_document: u64,
    /// Whether an oddity of sequence files is an error instead of a note: dropped characters, letters that the tokenizer does not
    /// know, a file without a record (default false).
    #[schemars(extend("changes" = "machine"))]
    pub strict: bool,
    /// Number of documents in the shuffle buffer (default 10000); 0 keeps the order of the files, as far as
    /// documents share packs.
    #[schemars(range(min = 0, max = 1000000000))]
    pub shuffle_buffer: u64,
    /// Maximum size of the shuffle buffer in bytes (default 64 MiB).
    #[schemars(range(min = 1, max = 1099511627776_u64))]
    pub shuffle_bytes: u64,
    /// Threads that read and tokenize, 1 to 256; auto (default) is the number of cores, at most 8.
    #[schemars(extend("minimum" = 1, "maximum" = 256, "changes" = "machine"))]
    pub workers: Auto<u64>,
    /// Batches of documents that each of these threads prepares ahead, 1 to 1024 (default 2).
    #[schemars(range(min = 1, max = 1024), extend("changes" = "machine"))]
    pub prefetch: u64,
    /// Selection of the tokens that an encoder is trained to predict.
    pub masking: MaskingSection,
    /// How a caller's training windows are cut from the records.
    pub crops: CropsSection,
}

/// Windows that are cut at random from records of DNA while training. Windows are drawn without end: a run with them
/// has no epochs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CropsSection {
    /// Shortest window in bases (default 150).
    #[schemars(range(min = 5, max = 100000))]
    pub shortest: u64,
    /// Longest window in bases (default 1000); the lengths between are drawn uniformly on a logarithmic scale.
    #[schemars(range(min = 5, max = 100000))]
    pub longest: u64,
    /// Highest rate of substituted bases, from 0 to 0.5 (default 0); each window draws its own rate from 0 to it.
    #[schemars(range(min = 0, max = 0.5))]
    pub substitutions: f64,
    /// Rate of insertions and deletions of 1 to 3 bases for each base, from 0 to 0.1 (default 0).
    #[schemars(range(min = 0, max = 0.1))]
    pub indels: f64,
    /// Share of windows whose letters are shuffled, with equal counts of dinucleotides, from 0 to below 1 (default 0).
    /// Requires data.crops.shuffled_class.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub shuffled: f64,
    /// Class of shuffled windows in the first task, such as other; they have no class in the other tasks. Required with
    /// data.crops.shuffled, refused without it.
    pub shuffled_class: Option<String>,
    /// Levels of sampling, from the outermost on; within the last level a record is drawn in proportion to its bases. If
    /// empty (default), all records are in one group.
    pub levels: Vec<CropLevelSection>,
    /// Number of validation windows of each length (default 1000); applies with run.evaluate_every.
    #[schemars(range(min = 1, max = 1000000))]
    pub validation_windows: u64,
    /// Lengths of the validation windows in bases (default one length, 500); applies with run.evaluate_every.
    #[schemars(length(min = 1))]
    pub validation_lengths: Vec<u64>,
}

/// A level of sampling: draws a value of a column of the table of records.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CropLevelSection {
    /// Column of the table data.labels. Required.
    pub column: String,
    /// A value is drawn with a probability in proportion to the number of its bases to this power, from 0 (default), all
    /// values equally often, to 1, in proportion to the bases.
    #[schemars(range(min = 0, max = 1))]
    pub power: f64,
}

/// Format of the data files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DataFormat {
    /// Determined from the file name: .txt, .jsonl, .bin, .fa and so on, .npy and .safetensors.
    Auto,
    /// Plain text.
    Txt,
    /// One JSON object per line.
    Jsonl,
    /// Token ids, little-endian.
    Bin,
    /// FASTA or FASTQ, optionally compressed.
    Fasta,
    /// Embedding vectors, one row per sequence, for training a head.
    Embeddings,
}

/// How a txt file is divided into documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DocumentUnit {
    /// The whole file is one document.
    File,
    /// Documents are separated by blank lines.
    Paragraph,
    /// Every line is a document.
    Line,
    /// Documents are separated by lines that equal `data.separator`.
    Separated,
}

/// Widths of the token ids in a bin file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BinType {
    /// 16 bits.
    U16,
    /// 32 bits.
    U32,
}

/// Selection of masked-language-model targets (Devlin et al. 2019).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MaskingSection {
    /// What is masked: token (default), or for a caller nucleotide: spans of bases. A masked base is hidden, and a replaced one
    /// replaced, in every codon of all six frames that contains it, and these codons are the targets.
    pub unit: MaskUnit,
    /// With unit nucleotide, the bases of a span, 1 to 1000 (default 1).
    #[schemars(range(min = 1, max = 1000))]
    pub span: u64,
    /// Share of the tokens that are targets, above 0 to 1 (default 0.15).
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    pub fraction: f64,
    /// Share of the targets (with unit nucleotide: of the spans) that are replaced by the mask token, 0 to 1 (default 0.8).
    #[schemars(range(min = 0, max = 1))]
    pub mask: f64,
    /// Share of the targets (with unit nucleotide: of the spans) that are replaced by random tokens or bases, 0 to 1 (default
    /// 0.1); the remaining ones are unchanged. The sum with data.masking.mask is at most 1.
    #[schemars(range(min = 0, max = 1))]
    pub random: f64,
}

/// What masking selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MaskUnit {
    /// Single tokens: codons of a caller.
    Token,
    /// Spans of bases.
    Nucleotide,
}

impl Default for DataSection {
    fn default() -> Self {
        Self {
            train: vec![],
            proteins: vec![],
            tensors: "*".to_owned(),
            validation: vec![],
            validation_fraction: 0.05,
            split_seed: 0,
            format: DataFormat::Auto,
            field: "text".to_owned(),
            label_field: "label".to_owned(),
            labels: None,
            document: DocumentUnit::Paragraph,
            separator: None,
            bin_type: BinType::U16,
            bin_end: None,
            tokenizer: "auto".to_owned(),
            end_token: None,
            longest: 1024,
            truncate: false,
            allow_dna: false,
            longest_document: 16 << 20,
            strict: false,
            shuffle_buffer: 10_000,
            shuffle_bytes: 64 << 20,
            workers: Auto(None),
            prefetch: 2,
            masking: MaskingSection::default(),
            crops: CropsSection::default(),
        }
    }
}

impl Default for CropsSection {
    fn default() -> Self {
        Self {
            shortest: 150,
            longest: 1000,
            substitutions: 0.0,
            indels: 0.0,
            shuffled: 0.0,
            shuffled_class: None,
            levels: vec![],
            validation_windows: 1000,
            validation_lengths: vec![500],
        }
    }
}

impl Default for MaskingSection {
    fn default() -> Self {
        Self { unit: MaskUnit::Token, span: 1, fraction: 0.15, mask: 0.8, random: 0.1 }
    }
}
