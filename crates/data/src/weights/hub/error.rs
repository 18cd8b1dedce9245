//! What can go wrong when a model is fetched. Invariant: every message names the model, the file and what to do
//! next; none shows an address or a token.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::printable::{Name, Place};

/// A file of a model that could not be fetched.
#[derive(Debug)]
pub struct HubError {
    /// `org/name`.
    pub id: String,
    /// The file in its repository.
    pub file: String,
    /// Why.
    pub kind: HubErrorKind,
}

/// Why a file could not be fetched.
#[derive(Debug)]
#[non_exhaustive]
pub enum HubErrorKind {
    /// The hub, or whom it sent us to, refused with this HTTP status.
    Status(u16),
    /// No connection, or no answer in time, after several tries.
    Unreachable(Box<ureq::Error>),
    /// The connection ended before the file did, again and again.
    Broken {
        /// Bytes that are there.
        found: u64,
        /// Bytes of the file.
        expected: u64,
    },
    /// The body has another length than the hub says that the file has.
    Size {
        /// Bytes offered.
        found: u64,
        /// Bytes of the file.
        expected: u64,
    },
    /// The content is not what the hub says it is.
    Hash {
        /// Its digest.
        found: String,
        /// The hub's.
        expected: String,
    },
    /// An answer that no hub gives.
    Answer(String),
    /// A setting of the environment that cannot be used.
    Setting(String),
    /// Who asked for it does not want it any more.
    Stopped,
    /// The cache cannot be written.
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
            Self::Status(status) => write!(f, "the hub answers {status}: {}", advice(*status)),
            Self::Unreachable(_) => f.write_str(
                "the hub cannot be reached; check the network, HF_ENDPOINT, HTTPS_PROXY and, where a proxy has a \
                 certificate of its own, SSL_CERT_FILE; or fetch the model elsewhere with `hf download` and copy \
                 its folder here",
            ),
            Self::Broken { found, expected } => write!(
                f,
                "the connection broke again and again, {found} of {expected} bytes are there; run the command \
                 again, it goes on from there"
            ),
            Self::Size { found, expected } => write!(
                f,
                "{found} bytes are offered where the hub promises {expected}; try again later, and check \
                 HF_ENDPOINT and proxies"
            ),
            Self::Hash { found, expected } => write!(
                f,
                "its digest is {found}, the hub promises {expected}; it was thrown away: try again, and check \
                 HF_ENDPOINT and proxies"
            ),
            Self::Answer(why) => write!(f, "{why}; is HF_ENDPOINT the address of a hub?"),
            Self::Setting(why) => f.write_str(why),
            Self::Stopped => f.write_str("the fetch was stopped; what is there is kept"),
            Self::Disk { path, source } if source.kind() == io::ErrorKind::StorageFull => write!(
                f,
                "the disk is full at `{}`; free some space, or set HF_HUB_CACHE to a folder on another disk. What \
                 is there is kept, and the next run goes on from it",
                Place(path)
            ),
            Self::Disk { path, .. } => write!(
                f,
                "cannot write `{}`; check its permissions, or set HF_HUB_CACHE to a folder of your own",
                Place(path)
            ),
        }
    }
}

/// What a user can do about a status.
fn advice(status: u16) -> &'static str {
    match status {
        401 => {
            "check the id; a private or gated model needs a token that may read it, in HF_TOKEN or by \
             `hf auth login`"
        }
        403 => "this account may not read it; accept the model's terms on its page, or use another HF_TOKEN",
        404 => "there is no such model or file; check the id",
        408 | 429 => "too many requests; wait a few minutes, or set HF_TOKEN, which has a limit of its own",
        500.. => "it is in trouble; try again later",
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
    /// A refused write.
    pub(super) fn disk(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Disk { path, source }
    }
}
