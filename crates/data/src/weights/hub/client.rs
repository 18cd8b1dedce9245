//! HTTP client of a Hugging Face hub: redirects, authorization, timeouts. Invariant: the token is sent only to the
//! origin of `HF_ENDPOINT`, and a file's commit, etag and size are taken only from responses of that origin, never
//! from a host that it redirects to.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use ureq::http::Response;
use ureq::http::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, LOCATION, RETRY_AFTER};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy};

use super::error::HubErrorKind;
use super::patience::retry_after;
use super::{HubEnv, RetryPolicy};
use crate::printable::{EscapedPath, Name};

/// Maximum number of redirects that are followed for one request.
const MAX_REDIRECTS: usize = 8;

// Response headers with a file's commit, etag and size. Source: huggingface_hub, `get_hf_file_metadata`.
const COMMIT: &str = "x-repo-commit";
const LINKED_ETAG: &str = "x-linked-etag";
const LINKED_SIZE: &str = "x-linked-size";

/// A client of one hub.
pub(super) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    pub(super) patience: RetryPolicy,
}

/// A file of a repository on the hub.
#[derive(Debug, Clone)]
pub(super) struct HubFile {
    /// Id of the repository.
    pub(super) id: String,
    /// A branch, a tag or a commit.
    pub(super) revision: String,
    pub(super) name: String,
}

/// Metadata of a file from the hub's response headers.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct FileMetadata {
    pub(super) commit: Option<String>,
    pub(super) etag: Option<String>,
    pub(super) size: Option<u64>,
}

/// The error of a request, with whether to retry it.
pub(super) enum HubRequestError {
    /// A transient error: a retry may succeed.
    Transient(HubErrorKind),
    /// A transient error, with the pause before a retry that the server asks for.
    Later(HubErrorKind, Duration),
    /// A permanent error: a retry would fail again.
    Permanent(HubErrorKind),
}

impl Client {
    pub(super) fn new(env: &HubEnv) -> Result<Client, HubErrorKind> {
        let endpoint = env.endpoint().trim_end_matches('/').to_owned();
        if origin(&endpoint).is_none() {
            let why = if has_user(&endpoint) {
                // Not shown: it may contain a password.
                "HF_ENDPOINT has a user name or a password, which is not supported; give the address of the hub \
                         alone, and a token in HF_TOKEN"
                    .to_owned()
            } else {
                format!("HF_ENDPOINT is `{}`; give an address that begins with https://", Name(&endpoint))
            };
            return Err(HubErrorKind::Setting(why));
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .accept_encoding("identity")
            .user_agent(concat!("plimsoll/", env!("CARGO_PKG_VERSION")))
            .proxy(if env.proxies { Proxy::try_from_env() } else { None })
            .tls_config(TlsConfig::builder().root_certs(roots(env)?).build())
            .timeout_resolve(Some(env.patience.timeout))
            .timeout_connect(Some(env.patience.timeout))
            .timeout_recv_response(Some(env.patience.timeout))
            .timeout_per_read(Some(env.patience.timeout));
        let agent = config.build().new_agent();
        Ok(Client { agent, endpoint, token: env.token(), patience: env.patience })
    }

    /// Requests the metadata of a file (HTTP HEAD); `None` if the hub has no such file (404).
    pub(super) fn facts(&self, file: &HubFile) -> Result<Option<FileMetadata>, HubRequestError> {
        let (answer, facts) = self.request(&self.address(file), None)?;
        match answer.status().as_u16() {
            200..=399 => Ok(Some(facts)),
            404 => Ok(None),
            _ => Err(refused(&answer)),
        }
    }

    /// Requests the content of a file from byte `start` on, following redirects to any host. The status is 200, 206
    /// or 416; others are errors.
    pub(super) fn body(&self, file: &HubFile, start: u64) -> Result<Response<Body>, HubRequestError> {
        let (answer, _) = self.request(&self.address(file), Some(start))?;
        match answer.status().as_u16() {
            200 | 206 | 416 => Ok(answer),
            _ => Err(refused(&answer)),
        }
    }

    fn address(&self, file: &HubFile) -> String {
        let HubFile { id, revision, name } = file;
        format!("{}/{id}/resolve/{revision}/{name}", self.endpoint)
    }

    /// Sends a request and follows redirects. With `start` it is a GET from that byte on, and all redirects are
    /// followed; without it is a HEAD, and only redirects within the hub are followed, because other hosts are not
    /// trusted for metadata.
    fn request(
        &self,
        address: &str,
        start: Option<u64>,
    ) -> Result<(Response<Body>, FileMetadata), HubRequestError> {
        let mut address = address.to_owned();
        let mut facts = FileMetadata::default();
        for _ in 0..=MAX_REDIRECTS {
            let at_hub = origin(&address) == origin(&self.endpoint);
            let answer = self.send(&address, start, at_hub)?;
            if at_hub {
                facts = FileMetadata::of(&answer).or(facts);
            }
            if !matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok((answer, facts));
            }
            let next = self.next(&address, answer.headers())?;
            if start.is_none() && origin(&next) != origin(&self.endpoint) {
                return Ok((answer, facts));
            }
            address = next;
        }
        Err(HubRequestError::Permanent(HubErrorKind::Answer(format!("more than {MAX_REDIRECTS} redirects"))))
    }

    fn send(&self, address: &str, start: Option<u64>, at_hub: bool) -> Result<Response<Body>, HubRequestError> {
        let mut request = match start {
            None => self.agent.head(address),
            Some(0) => self.agent.get(address),
            Some(start) => self.agent.get(address).header("Range", format!("bytes={start}-")),
        };
        if let Some(token) = self.token.as_ref().filter(|_| at_hub) {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        request.call().map_err(|error| match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => HubRequestError::Permanent(HubErrorKind::Setting(
                "the address or the token has a character that cannot be sent; check HF_ENDPOINT and HF_TOKEN"
                    .to_owned(),
            )),
            // `InvalidData` is how a TLS failure appears, such as a certificate that rustls does not trust: a retry
            // would fail again.
            ureq::Error::Io(io) if io.kind() == std::io::ErrorKind::InvalidData => {
                HubRequestError::Permanent(HubErrorKind::Unreachable(Box::new(ureq::Error::Io(io))))
            }
            error => HubRequestError::Transient(HubErrorKind::Unreachable(Box::new(error))),
        })
    }

    /// The address that a redirect response of `from` names. Refuses a redirect from https to http.
    fn next(&self, from: &str, headers: &HeaderMap) -> Result<String, HubRequestError> {
        let location = headers.get(LOCATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if location.starts_with('/') && !location.starts_with("//") {
            return Ok(format!("{}{location}", origin(from).unwrap_or_default()));
        }
        let is_downgrade = self.endpoint.starts_with("https://") && !location.starts_with("https://");
        let why = match origin(location) {
            None => "a redirect to nowhere",
            Some(_) if is_downgrade => "a redirect from https to http, which is refused",
            Some(_) => return Ok(location.to_owned()),
        };
        Err(HubRequestError::Permanent(HubErrorKind::Answer(why.to_owned())))
    }
}

impl FileMetadata {
    fn of(answer: &Response<Body>) -> FileMetadata {
        let is_file = answer.status().is_success();
        let etag = header_text(answer, LINKED_ETAG).or_else(|| header_text(answer, ETAG.as_str()));
        FileMetadata {
            commit: header_text(answer, COMMIT),
            etag: etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned()),
            size: header_text(answer, LINKED_SIZE)
                .or_else(|| header_text(answer, CONTENT_LENGTH.as_str()).filter(|_| is_file))
                .and_then(|size| size.parse().ok()),
        }
    }

    fn or(self, other: FileMetadata) -> FileMetadata {
        FileMetadata {
            commit: self.commit.or(other.commit),
            etag: self.etag.or(other.etag),
            size: self.size.or(other.size),
        }
    }
}

/// The text of a response header without white space around it.
fn header_text(answer: &Response<Body>, name: &str) -> Option<String> {
    Some(answer.headers().get(name)?.to_str().ok()?.trim().to_owned())
}

/// Parses `Content-Range: bytes 5-9/10` to (first byte, size of the whole file): here (5, 10).
pub(super) fn content_range(headers: &HeaderMap) -> Option<(u64, u64)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, total) = text.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()?))
}

/// The error of a response with an error status. A server that asks for a pause that is too long, or in a form that is not
/// known, is not asked again.
fn refused(answer: &Response<Body>) -> HubRequestError {
    let status = answer.status().as_u16();
    let kind = HubErrorKind::Status(status);
    match (status, answer.headers().get(RETRY_AFTER).map(|value| value.to_str().unwrap_or_default())) {
        (408 | 429 | 500.., None) => HubRequestError::Transient(kind),
        (408 | 429 | 500.., Some(text)) => match retry_after(text, SystemTime::now()) {
            Some(pause) => HubRequestError::Later(kind, pause),
            None => HubRequestError::Permanent(kind),
        },
        _ => HubRequestError::Permanent(kind),
    }
}

/// Whether the host of an address comes after a user name.
fn has_user(address: &str) -> bool {
    let host = address.split_once("://").map_or(address, |(_, rest)| rest);
    host.split(['/', '?', '#']).next().is_some_and(|host| host.contains('@'))
}

/// Scheme, host and port of an address; `None` if the scheme is not http(s) or the address has user information.
fn origin(address: &str) -> Option<&str> {
    let host = address.strip_prefix("https://").or_else(|| address.strip_prefix("http://"))?;
    let end = host.find(['/', '?', '#']).unwrap_or(host.len());
    // In `https://hub@evil/` the host is `evil`: addresses with an `@` are refused instead of parsed.
    let named = end > 0 && !host[..end].contains('@');
    named.then(|| &address[..address.len() - host.len() + end])
}

/// Root certificates: the bundled certificates, or a PEM file that the environment names. A proxy that intercepts TLS
/// needs such a file.
fn roots(env: &HubEnv) -> Result<RootCerts, HubErrorKind> {
    let Some(path) = &env.certificates else { return Ok(RootCerts::WebPki) };
    let pem = fs::read(path).map_err(|error| unusable_certificates(path, error.to_string()))?;
    let items: Result<Vec<_>, _> = parse_pem(&pem).collect();
    let items = items.map_err(|error| unusable_certificates(path, error.to_string()))?;
    let certificates: Vec<_> = items
        .into_iter()
        .filter_map(|item| match item {
            PemItem::Certificate(certificate) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        Err(unusable_certificates(path, "there is none".to_owned()))
    } else {
        Ok(RootCerts::new_with_certs(&certificates))
    }
}

/// The error for a file of certificates that cannot be used.
fn unusable_certificates(path: &Path, why: String) -> HubErrorKind {
    HubErrorKind::Setting(format!(
        "the certificates in `{}` cannot be used ({why}); SSL_CERT_FILE, REQUESTS_CA_BUNDLE and \
         CURL_CA_BUNDLE name a PEM file",
        EscapedPath(path)
    ))
}

impl RetryPolicy {
    /// The pause after failed attempt number `attempt` (from 1): `backoff`, doubled with each further attempt up to 64
    /// times `backoff`.
    pub(super) fn pause_before(&self, attempt: u32) -> Duration {
        self.backoff * 2u32.pow(attempt.saturating_sub(1).min(6))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins() {
        let check = |address, expected| assert_eq!(origin(address), expected, "{address}");
        check("https://a.b/c", Some("https://a.b"));
        check("http://a.b:80?c", Some("http://a.b:80"));
        check("https://a.b", Some("https://a.b"));
        check("https://a.b@c.d/e", None);
        check("https:///e", None);
        check("ftp://a.b/c", None);
        check("/c", None);
    }

    #[test]
    fn an_address_with_a_password_is_not_shown() {
        for endpoint in
            ["https://me:secret@hub.example", "http://secret@hub", "ftp://me:secret@hub", "me:secret@hub"]
        {
            let env = HubEnv { endpoint: Some(endpoint.to_owned()), ..HubEnv::default() };
            let error = Client::new(&env).err().expect("refused").to_string();
            assert!(!error.contains("secret") && error.contains("HF_TOKEN"), "{endpoint}: {error}");
        }
    }

    #[test]
    fn ranges() {
        let check = |text: &str, expected| {
            let headers = [(CONTENT_RANGE, text.parse().expect("a value"))].into_iter().collect();
            assert_eq!(content_range(&headers), expected, "{text}");
        };
        check("bytes 5-9/10", Some((5, 10)));
        check("bytes 5-9/*", None);
        check("bytes */10", None);
    }
}
