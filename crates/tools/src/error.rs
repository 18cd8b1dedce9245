//! Errors of the tools. Invariant: every message names the file, the tensor or the flag that caused it, and the next
//! step.

use plimsoll_data::printable::{EscapedPath, Name};
use plimsoll_runtime::{Failure, HEAD_NAMES, RuntimeError};
use plimsoll_setting::Setting;
use std::path::PathBuf;

/// Error of a tool.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// Opening a model, planning, computing, reading or writing failed.
    #[error(transparent)]
    Runtime(RuntimeError),
    /// A folder without a run.
    #[error(
        "{}: there is no run in it (no run.json, no progress.json); give the output folder of train or predict",
        EscapedPath(folder)
    )]
    NoRun {
        /// The folder.
        folder: PathBuf,
    },
    /// A run.json that is not a record of a run.
    #[error("{} is not the record of a run; give the output folder of train or predict", EscapedPath(path))]
    NotARecord {
        /// The file.
        path: PathBuf,
    },
    /// The output exists and must not be replaced.
    #[error("{} already exists; use {advice}", EscapedPath(path))]
    Exists {
        /// The output.
        path: PathBuf,
        /// The alternative to suggest.
        advice: &'static str,
    },
    /// A temporary folder exists that may belong to a running process.
    #[error("{} exists; if no other plimsoll writes there, remove it and start again", EscapedPath(path))]
    LeftBehind {
        /// The folder.
        path: PathBuf,
    },
    /// The output name of `convert` does not end in .safetensors.
    #[error("{}: give an output that ends in .safetensors", EscapedPath(path))]
    NotSafetensors {
        /// The output.
        path: PathBuf,
    },
    /// The name of a target file does not end in .toml.
    #[error(
        "{}: the name of the target file must end in .toml",
        Setting::Calibrate.to(path.display())
    )]
    NotToml {
        /// The file.
        path: PathBuf,
    },
    /// A line of the texts of reference outputs that is not an object with `id` and `text`.
    #[error("{}, line {line}: expected a JSON object with `id` and `text`", EscapedPath(path))]
    BadTexts {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
    },
    /// A fair-esm tensor without an equivalent in the hub's format.
    #[error("{}: ESM-2 on the hub has no tensor for `{}`", EscapedPath(path), Name(tensor))]
    NotOnHub {
        /// The checkpoint.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// Two tensors that map to the same tensor of the hub's format.
    #[error("{}: `{}` and `{}` are the same tensor of the hub", EscapedPath(path), Name(one), Name(other))]
    SameTensor {
        /// The checkpoint.
        path: PathBuf,
        /// Name of the first tensor.
        one: String,
        /// Name of the second tensor.
        other: String,
    },
    /// A tensor has the name that safetensors reserves.
    #[error("{}: a tensor is called `{tensor}`, a reserved name; rename it", EscapedPath(path))]
    ReservedName {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor differs from the input when read back.
    #[error(
        "{}: `{}` differs from the input after writing; the output was removed. The input may have changed, or \
            the disk may be faulty",
        EscapedPath(path),
        Name(tensor)
    )]
    NotSameAfterWriting {
        /// The input.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor of an adapter matches no weight of the model.
    #[error(
        "{}: `{}` does not exist in {model}; give the model that the adapter was trained on with {base}",
        EscapedPath(path),
        Name(tensor),
        base = Setting::Base
    )]
    AdapterTensor {
        /// The adapter's weights.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The model.
        model: String,
    },
    /// The head's file does not exist.
    #[error("{}: there is no such file", Setting::Head.to(EscapedPath(path)))]
    NoHead {
        /// The file.
        path: PathBuf,
    },
    /// A folder without a model.
    #[error(
        "{}: the folder contains no model; give a model's folder with its config.json, or a folder that \
         contains {}/, {}/ and a head ({HEAD_NAMES})",
        Setting::Weights.to(EscapedPath(folder)),
        crate::verify::DNA,
        crate::verify::PROTEIN
    )]
    NothingToVerify {
        /// The folder.
        folder: PathBuf,
    },
    /// A folder without the files of a VirNucPro run.
    #[error(
        "{}: there is no NAME_{part}/ in it; give the output folder of a VirNucPro run",
        Setting::Reference.to(EscapedPath(folder))
    )]
    NoReference {
        /// The folder.
        folder: PathBuf,
        /// Expected suffix of the subfolder's name.
        part: &'static str,
    },
    /// An unreadable line in VirNucPro's results.
    #[error(
        "{}, line {line}: expected an id, a prediction and two scores, separated by tabs, as VirNucPro writes them",
        EscapedPath(path)
    )]
    ReferenceLine {
        /// Path of the results file.
        path: PathBuf,
        /// Line number, counted from 1.
        line: usize,
    },
    /// A VirNucPro file with unexpected contents.
    #[error("{}: the contents are not those of a VirNucPro output file", EscapedPath(path))]
    ReferenceFile {
        /// The file.
        path: PathBuf,
    },
    /// An element type that is only benchmarked in whole models, not in single matmuls.
    #[error(
        "{given}: applies only to the matmuls of a model's layers; give {model}",
        given = Setting::Precision.to(precision),
        model = Setting::Model
    )]
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
