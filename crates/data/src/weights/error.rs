//! Errors of finding, reading and writing weight files. Invariant: a message names the file or the model argument, and
//! the tensor where the error concerns a tensor.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::FileDType;
use super::hub::{HubError, is_hub_id};
use crate::printable::{EscapedPath, Name};

/// Error of finding, opening or reading weights.
#[non_exhaustive]
#[derive(Debug)]
pub enum WeightsError {
    /// The operating system refused a read or a write.
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operation that failed: `read` or `write`.
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
    /// The file is not in a supported format of weights.
    NotWeights {
        /// The file.
        path: PathBuf,
        /// The kind of file that was found, and a remedy.
        why: String,
    },
    /// The file is shorter than its header or directory says.
    Truncated {
        /// The file.
        path: PathBuf,
        /// Size in bytes that the header, the directory or the read requires.
        expected: u64,
        /// Size of the file in bytes.
        found: u64,
    },
    /// The file violates its format.
    Malformed {
        /// The file.
        path: PathBuf,
        /// The violated rule and its position.
        why: String,
    },
    /// The JSON of a safetensors header or a shard index is invalid or has an unexpected structure.
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A pickle names a function or class that is not on the allow-list. The function or class was not called.
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
    /// A tensor has an unsupported type, shape or memory layout.
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The unsupported property, and a remedy.
        why: String,
    },
    /// No tensor of this name.
    MissingTensor {
        /// The file or folder.
        path: PathBuf,
        /// The name asked for.
        tensor: String,
        /// Up to three tensors with the same last two dotted components in their names.
        similar: Vec<String>,
    },
    /// The shape of a tensor differs from the shape that the model requires.
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
    /// A tensor's element type cannot be converted to the requested type.
    ElementType {
        /// The file or folder.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type asked for: `f32`, `i64`.
        wanted: &'static str,
        /// The type in the file.
        found: FileDType,
    },
    /// A read past the end of the tensor, or into a buffer whose length differs from the range's.
    Range {
        /// The weight file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Start and (exclusive) end of the range, in elements.
        range: (u64, u64),
        /// Number of elements of the tensor.
        elements: u64,
        /// Length of the buffer in elements.
        buffer: u64,
    },
    /// An index names a shard outside its folder.
    ShardOutside {
        /// The index.
        path: PathBuf,
        /// The shard name it gives.
        shard: String,
    },
    /// An index names a shard that does not exist.
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
        /// Whether `HF_HUB_OFFLINE` is set, which disables fetching.
        offline: bool,
    },
    /// A file of a model that could not be fetched from the hub.
    Hub(HubError),
    /// A model argument that is neither an existing path nor a hub id.
    NotAModel {
        /// The argument.
        arg: String,
    },
    /// A model argument that is a path, because it has several folders or its folder exists, and does not exist.
    NoSuchPath {
        /// The argument.
        arg: String,
        /// An existing path with a similar name.
        similar: Option<PathBuf>,
    },
    /// A tensor that cannot be written with the given name, shape, values or type.
    BadTensor {
        /// The tensor.
        tensor: String,
        /// The reason.
        why: String,
    },
}

impl fmt::Display for WeightsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use WeightsError as E;
        match self {
            E::Io { path, action, .. } => write!(f, "cannot {action} `{}`", EscapedPath(path)),
            E::NoWeights { folder, looked_for } => {
                write!(f, "no weights in `{}`: looked for {}", EscapedPath(folder), looked_for.join(", "))
            }
            E::NotWeights { path, why } => write!(f, "`{}` is not a weight file: {why}", EscapedPath(path)),
            E::Truncated { path, expected, found } => write!(
                f,
                "`{}` is truncated: expected {expected} bytes, found {found}; copy or download it again",
                EscapedPath(path)
            ),
            E::Malformed { path, why } => {
                write!(f, "`{}` is damaged: {why}; copy or download it again", EscapedPath(path))
            }
            E::Json { path, .. } => {
                write!(f, "the JSON in `{}` is invalid; copy or download it again", EscapedPath(path))
            }
            E::RefusedGlobal { path, global } => write!(
                f,
                "refused: the pickle in `{}` asks for `{}`, which weights do not need; it was not run. \
                 Do not load this file elsewhere unless you trust it; ask its author for safetensors",
                EscapedPath(path),
                Name(global)
            ),
            E::RefusedOpcode { path, opcode, position } => write!(
                f,
                "refused: the pickle in `{}` uses opcode 0x{opcode:02x} at byte {position}, which torch does not \
                 write for weights; nothing was run. Save the state dict with torch.save, or as safetensors",
                EscapedPath(path)
            ),
            E::LegacyTorch { path } => write!(
                f,
                "`{}` is in torch's format of before 1.6; save it again with a newer torch: \
                 torch.save(torch.load(\"{}\", map_location=\"cpu\"), \"new.pt\")",
                EscapedPath(path),
                EscapedPath(path)
            ),
            E::Compressed { path, entry } => write!(
                f,
                "`{}` holds `{}` compressed or encrypted; torch stores entries as they are. Save it again \
                 with torch.save, or repack it with `zip -0`",
                EscapedPath(path),
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
            | E::NotAModel { .. }
            | E::NoSuchPath { .. } => self.fmt_model(f),
        }
    }
}

impl WeightsError {
    /// Creates a `Json` error. The parser's message may quote the untrusted file, so `Name` makes it printable and
    /// limits its length.
    pub(super) fn json(path: &Path, error: serde_json::Error) -> Self {
        WeightsError::Json { path: path.to_owned(), source: Name(&error.to_string()).to_string().into() }
    }

    /// `Display` of the variants that concern one tensor.
    fn fmt_tensor(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use WeightsError as E;
        match self {
            E::Unsupported { path, tensor, why } => {
                write!(f, "tensor `{}` in `{}`: {why}", Name(tensor), EscapedPath(path))
            }
            E::MissingTensor { path, tensor, similar } => {
                write!(f, "no tensor `{}` in `{}`", Name(tensor), EscapedPath(path))?;
                let similar: Vec<String> = similar.iter().map(|name| Name(name).to_string()).collect();
                if similar.is_empty() {
                    write!(f, "; the weights may belong to another model")
                } else {
                    write!(f, "; it contains `{}`", similar.join("`, `"))
                }
            }
            E::Shape { path, tensor, expected, found } => write!(
                f,
                "tensor `{}` in `{}` has shape {found:?}, the model needs {expected:?}; check that the weights \
                    belong to this config.json",
                Name(tensor),
                EscapedPath(path)
            ),
            E::ElementType { path, tensor, wanted, found } => write!(
                f,
                "tensor `{}` in `{}` holds {} and cannot be read as {wanted}",
                Name(tensor),
                EscapedPath(path),
                found.name()
            ),
            E::Range { path, tensor, range: (start, end), elements, buffer } => write!(
                f,
                "{}: elements {start}..{end} of tensor `{}` ({elements} elements) asked for into a buffer of {buffer}",
                EscapedPath(path),
                Name(tensor)
            ),
            E::BadTensor { tensor, why } => write!(f, "cannot write tensor `{}`: {why}", Name(tensor)),
            _ => Ok(()),
        }
    }

    /// `Display` of the variants that concern finding a model's files.
    fn fmt_model(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use WeightsError as E;
        match self {
            E::ShardOutside { path, shard } => write!(
                f,
                "refused: `{}` names the shard `{}`, which is outside its folder",
                EscapedPath(path),
                Name(shard)
            ),
            E::MissingShard { path, shard } => write!(
                f,
                "`{}` names the shard `{}`, which was not found; download the whole model",
                EscapedPath(path),
                Name(&shard.to_string_lossy())
            ),
            E::NotInCache { id, looked_at: Some(at), offline } => {
                write!(f, "model `{id}` is not in the Hugging Face cache (looked at `{}`); ", EscapedPath(at))?;
                if *offline {
                    write!(f, "HF_HUB_OFFLINE prevents the download: unset it, ")?;
                }
                let command = match id.split_once('@') {
                    Some((id, revision)) => format!("{id} --revision {revision}"),
                    None => id.clone(),
                };
                write!(f, "download it with `hf download {command}`, or copy its folder here and give the path")
            }
            E::Hub(error) => write!(f, "{error}"),
            E::NotInCache { id, looked_at: None, .. } => write!(
                f,
                "model `{id}`: no Hugging Face cache is known, since neither HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME \
                 nor HOME is set; set one, or give the model's folder"
            ),
            E::NoSuchPath { arg, similar } => {
                write!(f, "there is no file or folder `{}`", Name(arg))?;
                match similar {
                    Some(similar) => write!(f, "; did you mean `{}`?", EscapedPath(similar)),
                    None => write!(f, "; check the path"),
                }?;
                if is_hub_id(arg) {
                    write!(
                        f,
                        " (It is taken for a path, and not for a model of the hub, because of folders here)"
                    )
                } else {
                    Ok(())
                }
            }
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
            // `Display` already prints the hub error, so the chain continues with that error's source.
            WeightsError::Hub(error) => error.source(),
            _ => None,
        }
    }
}
