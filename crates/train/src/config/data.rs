//! The section `data` of the configuration: training files and how they are read. Invariant: plain data; the same
//! settings and seed give the same batches for any number of worker threads.

use super::Auto;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Training data and how it is read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// Files or folders to train on; for a head, the embeddings of the nucleotides.
    pub train: Vec<String>,
    /// For a head, the embeddings of the proteins, by the same names.
    pub proteins: Vec<String>,
    /// What tensors of a safetensors file are called that are embeddings; * is the name of a sequence.
    pub tensors: String,
    /// Files or folders to evaluate on; with none, a share of the documents to train on is kept for it.
    pub validation: Vec<String>,
    /// That share. A document's side depends on its content alone.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub validation_fraction: f64,
    /// Another number draws another share.
    pub split_seed: u64,
    /// What the files hold; auto goes by their names.
    pub format: Format,
    /// The field of a jsonl line that holds the text.
    pub field: String,
    /// The field of a jsonl line that holds the class, a number from 0.
    pub label_field: String,
    /// A table of id, tab, class for FASTA or embeddings.
    pub labels: Option<String>,
    /// What a document of a txt file is.
    pub document: Document,
    /// The line that stands between documents with document separated, such as <|endoftext|>.
    pub separator: Option<String>,
    /// Width of the ids in a bin file.
    pub bin_type: BinType,
    /// The id that ends a document in a bin file.
    pub bin_end: Option<u32>,
    /// bytes, esm2, or the path of a tokenizer.json; auto is the model's own, for language models bytes.
    pub tokenizer: String,
    /// The special token that ends a document; bytes have one, the id 256, if any name is given.
    pub end_token: Option<String>,
    /// Tokens of the longest sequence; longer documents are cut into several.
    #[schemars(range(min = 2))]
    pub longest: u64,
    /// Whether a classifier's longer sequences are cut off there; else one is an error.
    pub truncate: bool,
    /// Bytes of the longest document; a longer one is an error.
    #[schemars(range(min = 1, max = 1073741824))]
    pub longest_document: u64,
    /// Documents that are shuffled among each other; 0 keeps the order of the files.
    pub shuffle_buffer: u64,
    /// The most bytes that these have.
    #[schemars(range(min = 1))]
    pub shuffle_bytes: u64,
    /// Threads that read and tokenize; auto is the cores, at most 8.
    #[schemars(extend("minimum" = 1, "maximum" = 256, "changes" = "machine"))]
    pub workers: Auto<u64>,
    /// Pieces that each of them prepares ahead.
    #[schemars(range(min = 1, max = 1024), extend("changes" = "machine"))]
    pub prefetch: u64,
    /// Which tokens an encoder has to guess.
    pub masking: Masking,
}

/// Format of the data files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Format {
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
pub enum Document {
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
pub struct Masking {
    /// Share of the tokens that are targets.
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    pub fraction: f64,
    /// Share of the targets that read as the mask.
    #[schemars(range(min = 0, max = 1))]
    pub mask: f64,
    /// Share of the targets that read as a random token.
    #[schemars(range(min = 0, max = 1))]
    pub random: f64,
}

impl Default for Data {
    fn default() -> Self {
        Self {
            train: vec![],
            proteins: vec![],
            tensors: "*".to_owned(),
            validation: vec![],
            validation_fraction: 0.05,
            split_seed: 0,
            format: Format::Auto,
            field: "text".to_owned(),
            label_field: "label".to_owned(),
            labels: None,
            document: Document::Paragraph,
            separator: None,
            bin_type: BinType::U16,
            bin_end: None,
            tokenizer: "auto".to_owned(),
            end_token: None,
            longest: 1024,
            truncate: false,
            longest_document: 16 << 20,
            shuffle_buffer: 10_000,
            shuffle_bytes: 64 << 20,
            workers: Auto(None),
            prefetch: 2,
            masking: Masking::default(),
        }
    }
}

impl Default for Masking {
    fn default() -> Self {
        Self { fraction: 0.15, mask: 0.8, random: 0.1 }
    }
}
