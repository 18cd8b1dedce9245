//! Training data: from documents to tokens to packs, the sequences that belong together in training. Invariant: the
//! packs are a function of the data, the settings and the position alone, for any number of workers; packs are not
//! padded, no document is cut but by the maximum sequence length, no target crosses the end of its document, the
//! training and validation splits share no document, and host memory is bounded by figures known before training
//! starts.
//!
//! Path of a document: `source` reads it, `split` assigns it to training or validation, `windows` shuffles it into
//! the epoch's order, a worker thread of `pipeline` tokenizes it, `pieces` cuts it, the thread of `packer` fits the
//! pieces of a `block` of documents into packs, and [`DatasetStream`] gives each [`TrainingPack`]. Precomputed embeddings, the input
//! for training a head, take a shorter path in [`rows`], and crops of genomes, the input for training a classifier of
//! DNA, another in [`crops`].

mod block;
mod byte_pairs;
pub mod crops;
mod dataset;
mod entropy;
mod files;
mod labels;
mod ledger;
mod mask;
mod packer;
mod pieces;
mod pipeline;
mod position;
mod random;
pub mod rows;

mod sentence_piece;
mod settings;
mod source;
mod split;
mod stream;
mod vocabulary;
mod windows;

pub use byte_pairs::{BytePairs, TextFrame};
pub use dataset::{Dataset, DatasetStats, SplitSize};
pub use entropy::order_1;
pub use files::NamedFormat;
pub use labels::{Classes, LabelsFrom, class_words};
pub use ledger::DataMemory;
pub use pieces::TrainingPack;
pub use position::{DataPosition, ShuffleWindow};
pub use settings::{
    DatasetFormat, DatasetSettings, IdWidth, MaskRates, Objective, PackLimits, Shuffle, TextDocuments,
    TokenizerKind, Validation,
};
pub use split::Split;
pub use stream::{DatasetStream, StreamCounts};
pub use vocabulary::Vocabulary;
