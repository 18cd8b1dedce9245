//! Why a tool fails. Invariant: every message names the file, the tensor or the flag that it is about, and the next step.

use data::printable::{Name, Place};
use runtime::{Failure, HEAD_NAMES, RuntimeError};
use std::path::PathBuf;

/// Why a tool fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// Opening a model, planning, computing, reading or writing failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// The output is there, and may not be replaced.
    #[error("{} is there already; use {advice}", Place(path))]
    Exists {
        /// The output.
        path: PathBuf,
        /// What to use.
        advice: &'static str,
    },
    /// An output of `convert` that is no safetensors file.
    #[error("{}: give an output that ends in .safetensors", Place(path))]
    NotSafetensors {
        /// The output.
        path: PathBuf,
    },
    /// A target file that is no TOML file.
    #[error("--calibrate {}: name a file that ends in .toml", path.display())]
    NotToml {
        /// The file.
        path: PathBuf,
    },
    /// A tensor of fair-esm that the hub's files do not have.
    #[error("{}: ESM-2 on the hub has no tensor for `{}`", Place(path), Name(tensor))]
    NotOnHub {
        /// The checkpoint.
        path: PathBuf,
        /// Its tensor.
        tensor: String,
    },
    /// Two tensors that become one.
    #[error("{}: `{}` and `{}` are the same tensor of the hub", Place(path), Name(one), Name(other))]
    SameTensor {
        /// The checkpoint.
        path: PathBuf,
        /// A tensor.
        one: String,
        /// Another.
        other: String,
    },
    /// A tensor with the name that safetensors reserves.
    #[error("{}: a tensor is called `{tensor}`, a reserved name; rename it", Place(path))]
    ReservedName {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor that differs when it is read back.
    #[error(
        "{}: `{}` is not the same after writing; nothing was kept. Did the input change meanwhile, or is the disk broken?",
        Place(path),
        Name(tensor)
    )]
    NotSameAfterWriting {
        /// The input.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor of an adapter that the model has no place for.
    #[error(
        "{}: `{}` has no place in {model}; give the model that the adapter was trained over with --base",
        Place(path),
        Name(tensor)
    )]
    AdapterTensor {
        /// The adapter's weights.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The model.
        model: String,
    },
    /// A head that is not there.
    #[error("--head {}: there is no such file", Place(path))]
    NoHead {
        /// The file.
        path: PathBuf,
    },
    /// A folder without a model.
    #[error(
        "--weights {}: there is nothing to verify in it; give a model's folder with its config.json, or a folder with {}/, {}/ and \
         a head ({HEAD_NAMES})",
        Place(folder),
        crate::verify::DNA,
        crate::verify::PROTEIN
    )]
    NothingToVerify {
        /// The folder.
        folder: PathBuf,
    },
    /// A folder without the files of a run of VirNucPro.
    #[error(
        "--reference {}: there is no NAME_{part}/ in it; give the folder in which VirNucPro has left its files",
        Place(folder)
    )]
    NoReference {
        /// The folder.
        folder: PathBuf,
        /// What the name of a subfolder ends in.
        part: &'static str,
    },
    /// A line of VirNucPro's results that cannot be read.
    #[error(
        "{}, line {line}: not an id, a prediction and two scores, as VirNucPro writes them there",
        Place(path)
    )]
    ReferenceLine {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// A file of VirNucPro's that holds something else.
    #[error("{}: it does not hold what VirNucPro writes there", Place(path))]
    ReferenceFile {
        /// The file.
        path: PathBuf,
    },
    /// An element type in which single products are not timed.
    #[error("--precision {precision}: only products of a model's layers; give --model")]
    OnlyOfModels {
        /// The element type.
        precision: &'static str,
    },
}

impl<E: Into<RuntimeError>> From<E> for ToolError {
    fn from(error: E) -> Self {
        Self::Runtime(error.into())
    }
}

impl Failure for ToolError {
    fn of_runtime(&self) -> Option<&RuntimeError> {
        match self {
            Self::Runtime(error) => Some(error),
            _ => None,
        }
    }
}
