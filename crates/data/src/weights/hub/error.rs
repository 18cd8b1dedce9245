//! Errors of downloading a model from a hub. Invariant: every message names the model, the file and a remedy; no
//! message shows the requested address or a token.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::printable::{EscapedPath, Name};

/// The error of fetching one file of a model.
#[derive(Debug)]
pub struct HubError {
    /// `org/name`.
    pub id: String,
    /// The file's name in the repository.
    pub file: String,
    /// The cause.
    pub kind: HubErrorKind,
}

/// Reason why a file could not be fetched.
#[derive(Debug)]
#[non_exhaustive]
pub enum HubErrorKind {
    /// The hub, or a host that it redirected to, answered with this HTTP error status.
    Status(u16),
    /// No connection or no response within the timeout, after all retries; or a TLS failure, which is not retried.
    Unreachable(Box<ureq::Error>),
    /// The connection was closed before the end of the file, also in all retries.
    Broken {
        /// Bytes received so far.
        found: u64,
        /// Size of the file in bytes.
        expected: u64,
    },
    /// The length of the response differs from the file's size in the hub's metadata.
    Size {
        /// Size of the response in bytes, or the bytes received when the limit was exceeded.
        found: u64,
        /// Size of the file in the metadata, in bytes.
        expected: u64,
    },
    /// The digest of the content differs from the file's etag.
    Hash {
        /// The digest of the received content, in hexadecimal.
        found: String,
        /// The digest in the hub's metadata, in hexadecimal.
        expected: String,
    },
    /// A response that violates the hub's protocol, or a file name that is not accepted; the text says why.
    Answer(String),
    /// An invalid setting in the environment; the text says which.
    Setting(String),
    /// The caller's progress callback returned `Break`.
    Stopped,
    /// The cache cannot be read or written.
    Disk {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl fmt::Display for HubError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "model `{}`, {}: {}", self.id, Name(&self.file), self.kind)
    }
}

impl fmt::Display for HubErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "the hub answered with status {status}: {}", advice(*status)),
            Self::Unreachable(_) => f.write_str(
                "the hub cannot be reached; check the network, HF_ENDPOINT, HTTPS_PROXY and, if a proxy has its \
                    own certificate, SSL_CERT_FILE; or download the model on another machine with `hf download` and copy \
                 its folder here",
            ),
            Self::Broken { found, expected } => write!(
                f,
                "the connection failed repeatedly after {found} of {expected} bytes; run the command again to \
                    resume the download"
            ),
            Self::Size { found, expected } => write!(
                f,
                "the server offers {found} bytes, but the hub's metadata states {expected}; try again later, \
                    and check \
                 HF_ENDPOINT and proxies"
            ),
            Self::Hash { found, expected } => write!(
                f,
                "its digest is {found}, but the hub's metadata states {expected}; the file was deleted; try \
                    again, and check HF_ENDPOINT and proxies"
            ),
            Self::Answer(why) => write!(f, "{why}; check that HF_ENDPOINT is the address of a hub"),
            Self::Setting(why) => f.write_str(why),
            Self::Stopped => f.write_str("the download was stopped; the downloaded part is kept"),
            Self::Disk { path, source } if source.kind() == io::ErrorKind::StorageFull => write!(
                f,
                "the disk is full at `{}`; free some space, or set HF_HUB_CACHE to a folder on another disk. \
                    The downloaded part is kept, and the next run resumes the download",
                EscapedPath(path)
            ),
            Self::Disk { path, .. } => write!(
                f,
                "cannot write `{}`; check its permissions, or set HF_HUB_CACHE to a folder that you can write to",
                EscapedPath(path)
            ),
        }
    }
}

/// The remedy for an HTTP status, for the error message.
fn advice(status: u16) -> &'static str {
    match status {
        401 => {
            "check the id; a private or gated model needs a token that may read it, in HF_TOKEN or by \
             `hf auth login`"
        }
        403 => "this account may not read it; accept the model's terms on its page, or use another HF_TOKEN",
        404 => "there is no such model or file; check the id",
        408 | 429 => "too many requests; wait a few minutes, or set HF_TOKEN, which has a separate limit",
        500.. => "the hub has a problem; try again later",
        _ => "check the id and HF_ENDPOINT",
    }
}

impl std::error::Error for HubError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.kind {
            HubErrorKind::Unreachable(source) => Some(source.as_ref()),
            HubErrorKind::Disk { source, .. } => Some(source),
            HubErrorKind::Status(_)
            | HubErrorKind::Broken { .. }
            | HubErrorKind::Size { .. }
            | HubErrorKind::Hash { .. }
            | HubErrorKind::Answer(_)
            | HubErrorKind::Stopped
            | HubErrorKind::Setting(_) => None,
        }
    }
}

impl HubErrorKind {
    /// Returns a closure that converts an I/O error at `path` into `Disk`, for `map_err`.
    pub(super) fn disk(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Disk { path, source }
    }
}
