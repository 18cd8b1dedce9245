//! What can go wrong with weight files. Invariant: every message names the file (and the tensor,
//! where there is one) and says what to do next; nothing here is raised after a partial effect.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::DType;
use super::hub::HubError;
use crate::printable::{Name, Place};

/// Why weights could not be found, opened or read.
#[non_exhaustive]
#[derive(Debug)]
pub enum WeightsError {
    /// The operating system refused a read or a write.
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was attempted: `read`, `write`.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A folder without any known weight file.
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// The file names tried, in order.
        looked_for: &'static [&'static str],
    },
    /// The file is of a kind that holds no weights that can be read.
    NotWeights {
        /// The file.
        path: PathBuf,
        /// What it is, and what to give instead.
        why: String,
    },
    /// The file ends before its contents do.
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that its header or directory promises.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The file breaks the rules of its format.
    Malformed {
        /// The file.
        path: PathBuf,
        /// Which rule, and where.
        why: String,
    },
    /// A safetensors header or an index that is not the JSON it should be.
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser says of it.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A pickle names a function or class outside the allow-list. It was not run.
    RefusedGlobal {
        /// The file.
        path: PathBuf,
        /// `module.name` as the pickle spells it.
        global: String,
    },
    /// A pickle uses an opcode that torch does not write for weights.
    RefusedOpcode {
        /// The file.
        path: PathBuf,
        /// The opcode byte.
        opcode: u8,
        /// Its position in the pickle, bytes.
        position: u64,
    },
    /// A torch file from before the zip format (torch 1.5 and older).
    LegacyTorch {
        /// The file.
        path: PathBuf,
    },
    /// A compressed or encrypted zip entry; torch stores its entries as they are.
    Compressed {
        /// The file.
        path: PathBuf,
        /// The entry.
        entry: String,
    },
    /// A tensor is stored in a way that is not supported.
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is not supported, and what to do.
        why: String,
    },
    /// No tensor of this name.
    MissingTensor {
        /// The file or folder.
        path: PathBuf,
        /// The name asked for.
        tensor: String,
        /// Names that are there and end alike, at most three.
        similar: Vec<String>,
    },
    /// A tensor has another shape than the model needs.
    Shape {
        /// The file or folder.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape the model needs.
        expected: Vec<u64>,
        /// The shape in the file.
        found: Vec<u64>,
    },
    /// A tensor's element type cannot be read as asked.
    ElementType {
        /// The file or folder.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type asked for: `f32`, `i64`.
        wanted: &'static str,
        /// The type in the file.
        found: DType,
    },
    /// A read outside the tensor, or into a buffer of another length.
    Range {
        /// The tensor.
        tensor: String,
        /// First element and the one past the last.
        range: (u64, u64),
        /// Elements in the tensor.
        elements: u64,
        /// Elements that the buffer holds.
        buffer: u64,
    },
    /// An index names a shard outside its folder.
    ShardOutside {
        /// The index.
        path: PathBuf,
        /// The shard name it gives.
        shard: String,
    },
    /// An index names a shard that is not there.
    MissingShard {
        /// The index.
        path: PathBuf,
        /// The shard file.
        shard: PathBuf,
    },
    /// A hub id that is not in the local cache.
    NotInCache {
        /// `org/name`.
        id: String,
        /// The file or folder that was looked for; `None` when no cache folder is known.
        looked_at: Option<PathBuf>,
        /// Whether it was not fetched because `HF_HUB_OFFLINE` is set.
        offline: bool,
    },
    /// A file of a model that could not be fetched from the hub.
    Hub(HubError),
    /// A model argument that is neither an existing path nor a hub id.
    NotAModel {
        /// The argument.
        arg: String,
    },
    /// Values that cannot be written as asked.
    BadTensor {
        /// The tensor.
        tensor: String,
        /// Why not.
        why: String,
    },
}

impl fmt::Display for WeightsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use WeightsError as E;
        match self {
            E::Io { path, action, .. } => write!(f, "cannot {action} `{}`", Place(path)),
            E::NoWeights { folder, looked_for } => {
                write!(f, "no weights in `{}`: looked for {}", Place(folder), looked_for.join(", "))
            }
            E::NotWeights { path, why } => write!(f, "`{}` is not a weight file: {why}", Place(path)),
            E::Truncated { path, expected, found } => write!(
                f,
                "`{}` is cut short: expected {expected} bytes, found {found}; copy or download it again",
                Place(path)
            ),
            E::Malformed { path, why } => {
                write!(f, "`{}` is damaged: {why}; copy or download it again", Place(path))
            }
            E::Json { path, .. } => {
                write!(f, "the JSON in `{}` is not as it should be; copy or download it again", Place(path))
            }
            E::RefusedGlobal { path, global } => write!(
                f,
                "refused: the pickle in `{}` asks for `{}`, which weights have no use for; it was not run. \
                 Do not load this file elsewhere unless you trust it; ask its author for safetensors",
                Place(path),
                Name(global)
            ),
            E::RefusedOpcode { path, opcode, position } => write!(
                f,
                "refused: the pickle in `{}` uses opcode 0x{opcode:02x} at byte {position}, which torch does not \
                 write for weights; nothing was run. Save the state dict with torch.save, or as safetensors",
                Place(path)
            ),
            E::LegacyTorch { path } => write!(
                f,
                "`{}` is in torch's format of before 1.6; save it again with a newer torch: \
                 torch.save(torch.load(\"{}\", map_location=\"cpu\"), \"new.pt\")",
                Place(path),
                Place(path)
            ),
            E::Compressed { path, entry } => write!(
                f,
                "`{}` holds `{}` compressed or encrypted; torch stores entries as they are. Save it again \
                 with torch.save, or repack it with `zip -0`",
                Place(path),
                Name(entry)
            ),
            E::Unsupported { .. }
            | E::MissingTensor { .. }
            | E::Shape { .. }
            | E::ElementType { .. }
            | E::Range { .. }
            | E::BadTensor { .. } => self.fmt_tensor(f),
            E::ShardOutside { .. }
            | E::MissingShard { .. }
            | E::NotInCache { .. }
            | E::Hub(_)
            | E::NotAModel { .. } => self.fmt_model(f),
        }
    }
}

impl WeightsError {
    /// `Json` without more of the file than a line holds: the parser quotes it.
    pub(super) fn json(path: &Path, error: serde_json::Error) -> Self {
        WeightsError::Json { path: path.to_owned(), source: Name(&error.to_string()).to_string().into() }
    }

    /// `Display` of what concerns one tensor.
    fn fmt_tensor(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use WeightsError as E;
        match self {
            E::Unsupported { path, tensor, why } => {
                write!(f, "tensor `{}` in `{}`: {why}", Name(tensor), Place(path))
            }
            E::MissingTensor { path, tensor, similar } => {
                write!(f, "no tensor `{}` in `{}`", Name(tensor), Place(path))?;
                let similar: Vec<String> = similar.iter().map(|name| Name(name).to_string()).collect();
                match similar.is_empty() {
                    true => write!(f, "; are these weights of another model?"),
                    false => write!(f, "; it holds `{}`", similar.join("`, `")),
                }
            }
            E::Shape { path, tensor, expected, found } => write!(
                f,
                "tensor `{}` in `{}` has shape {found:?}, the model needs {expected:?}; \
                 do the weights belong to this config?",
                Name(tensor),
                Place(path)
            ),
            E::ElementType { path, tensor, wanted, found } => write!(
                f,
                "tensor `{}` in `{}` holds {} and cannot be read as {wanted}",
                Name(tensor),
                Place(path),
                found.name()
            ),
            E::Range { tensor, range: (start, end), elements, buffer } => write!(
                f,
                "elements {start}..{end} of tensor `{}` ({elements} elements) asked for into a buffer of {buffer}",
                Name(tensor)
            ),
            E::BadTensor { tensor, why } => write!(f, "cannot write tensor `{}`: {why}", Name(tensor)),
            _ => Ok(()),
        }
    }

    /// `Display` of what concerns finding a model's files.
    fn fmt_model(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use WeightsError as E;
        match self {
            E::ShardOutside { path, shard } => write!(
                f,
                "refused: `{}` names the shard `{}`, which is outside its folder",
                Place(path),
                Name(shard)
            ),
            E::MissingShard { path, shard } => write!(
                f,
                "`{}` names the shard `{}`, which is not there; download the whole model",
                Place(path),
                Name(&shard.to_string_lossy())
            ),
            E::NotInCache { id, looked_at: Some(at), offline } => {
                write!(f, "model `{id}` is not in the Hugging Face cache (looked at `{}`); ", Place(at))?;
                if *offline {
                    write!(f, "HF_HUB_OFFLINE keeps it from being fetched: unset it, ")?;
                }
                write!(f, "fetch it with `hf download {id}`, or copy its folder here and give the path")
            }
            E::Hub(error) => write!(f, "{error}"),
            E::NotInCache { id, looked_at: None, .. } => write!(
                f,
                "model `{id}`: no Hugging Face cache is known, since neither HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME \
                 nor HOME is set; set one, or give the model's folder"
            ),
            E::NotAModel { arg } => write!(
                f,
                "`{arg}` is neither a file or folder that exists nor a hub id; expected a model's folder, a weight \
                 file, a config.json, or `org/name`"
            ),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for WeightsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            WeightsError::Io { source, .. } => Some(source),
            WeightsError::Json { source, .. } => Some(source.as_ref()),
            // It prints itself above, so the chain goes on behind it.
            WeightsError::Hub(error) => error.source(),
            _ => None,
        }
    }
}
