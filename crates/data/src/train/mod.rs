//! Training data: documents, tokens, micro-batches. Invariant: the batches are a function of the data, the
//! settings and the position alone, for any number of workers; nothing is padded, no target crosses the end
//! of its document, no document that was trained on is validated on, and what the host holds is bounded by
//! numbers that are known beforehand.
//!
//! A document goes this way: `source` reads it, `split` gives it a side, `windows` puts it in the epoch's
//! order, a worker of `pipeline` makes tokens of it, `pieces` cuts it into a [`Batch`]. The head's rows of
//! numbers go a shorter one, in [`rows`].

mod byte_pairs;
mod dataset;
mod entropy;
mod files;
mod labels;
mod ledger;
mod mask;
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

pub use byte_pairs::BytePairs;
pub use dataset::{Census, Dataset, Side};
pub use entropy::order_1;
pub use labels::{Classes, LabelsFrom};
pub use ledger::Held;
pub use pieces::Batch;
pub use position::{Position, Window};
pub use settings::{
    Bounds, Format, IdWidth, MaskRates, Settings, Shuffle, Task, TextDocuments, Tokens, Validation,
};
pub use split::Split;
pub use stream::{Counts, Stream};
pub use vocabulary::Vocabulary;
