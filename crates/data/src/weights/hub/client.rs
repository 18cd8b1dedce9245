//! Requests to a hub: redirects, the token, timeouts. Invariant: the token goes to the host of `HF_ENDPOINT` and
//! to no other, and what a file is (commit, etag, size) is said by that host alone, never by one that it
//! redirects to.

use std::fs;
use std::time::Duration;

use ureq::http::Response;
use ureq::http::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, LOCATION};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy};

use super::error::HubErrorKind;
use super::{HubEnv, Patience};
use crate::printable::Place;

/// More redirects than any hub needs.
const MOST_REDIRECTS: usize = 8;

/// A file's facts are in these headers of a hub; source: huggingface_hub, `get_hf_file_metadata`.
const COMMIT: &str = "x-repo-commit";
const LINKED_ETAG: &str = "x-linked-etag";
const LINKED_SIZE: &str = "x-linked-size";

/// One hub.
pub(super) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    pub(super) patience: Patience,
}

/// What a hub says about a file.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) commit: Option<String>,
    pub(super) etag: Option<String>,
    pub(super) size: Option<u64>,
}

/// Why a request gave nothing.
pub(super) enum Trouble {
    /// Another try may help.
    Passing(HubErrorKind),
    /// It will not.
    Lasting(HubErrorKind),
}

impl Client {
    pub(super) fn new(env: &HubEnv) -> Result<Client, HubErrorKind> {
        let endpoint = env.endpoint().trim_end_matches('/').to_owned();
        if origin(&endpoint).is_none() {
            let why = format!("HF_ENDPOINT is `{endpoint}`; give an address that begins with https://");
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
            .timeout_resolve(Some(env.patience.answer))
            .timeout_connect(Some(env.patience.answer))
            .timeout_recv_response(Some(env.patience.answer))
            .timeout_per_read(Some(env.patience.answer));
        let agent = config.build().new_agent();
        Ok(Client { agent, endpoint, token: env.token(), patience: env.patience })
    }

    /// What the hub says about `file` at `revision`; `None` where there is no such file.
    pub(super) fn facts(&self, id: &str, revision: &str, file: &str) -> Result<Option<Facts>, Trouble> {
        let (answer, facts) = self.ask(&self.address(id, revision, file), None)?;
        match answer.status().as_u16() {
            200..=399 => Ok(Some(facts)),
            404 => Ok(None),
            status => Err(refused(status)),
        }
    }

    /// The file from byte `start` on, wherever it is.
    pub(super) fn body(
        &self,
        (id, revision, file): (&str, &str, &str),
        start: u64,
    ) -> Result<Response<Body>, Trouble> {
        let (answer, _) = self.ask(&self.address(id, revision, file), Some(start))?;
        match answer.status().as_u16() {
            200 | 206 | 416 => Ok(answer),
            status => Err(refused(status)),
        }
    }

    fn address(&self, id: &str, revision: &str, file: &str) -> String {
        format!("{}/{id}/resolve/{revision}/{file}", self.endpoint)
    }

    /// Follows redirects: all of them where the body is asked for, from byte `start` on; only those on the hub
    /// itself for the facts alone.
    fn ask(&self, address: &str, start: Option<u64>) -> Result<(Response<Body>, Facts), Trouble> {
        let (mut address, mut facts) = (address.to_owned(), Facts::default());
        for _ in 0..=MOST_REDIRECTS {
            let at_hub = origin(&address) == origin(&self.endpoint);
            let answer = self.send(&address, start, at_hub)?;
            if at_hub {
                facts = Facts::of(&answer).or(facts);
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
        Err(Trouble::Lasting(HubErrorKind::Answer(format!("more than {MOST_REDIRECTS} redirects"))))
    }

    fn send(&self, address: &str, start: Option<u64>, at_hub: bool) -> Result<Response<Body>, Trouble> {
        let mut request = match start {
            None => self.agent.head(address),
            Some(0) => self.agent.get(address),
            Some(start) => self.agent.get(address).header("Range", format!("bytes={start}-")),
        };
        if let Some(token) = self.token.as_ref().filter(|_| at_hub) {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        request.call().map_err(|error| match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => Trouble::Lasting(HubErrorKind::Setting(
                "the address or the token has a character that cannot be sent; check HF_ENDPOINT and HF_TOKEN"
                    .to_owned(),
            )),
            // What rustls does not trust, it will not trust the next time.
            ureq::Error::Io(io) if io.kind() == std::io::ErrorKind::InvalidData => {
                Trouble::Lasting(HubErrorKind::Unreachable(Box::new(ureq::Error::Io(io))))
            }
            error => Trouble::Passing(HubErrorKind::Unreachable(Box::new(error))),
        })
    }

    /// Where a redirect leads.
    fn next(&self, from: &str, headers: &HeaderMap) -> Result<String, Trouble> {
        let location = headers.get(LOCATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let bad = |what: &str| Err(Trouble::Lasting(HubErrorKind::Answer(format!("a redirect {what}"))));
        if location.starts_with('/') && !location.starts_with("//") {
            return Ok(format!("{}{location}", origin(from).unwrap_or_default()));
        }
        let secure = |address: &str| address.starts_with("https://");
        match origin(location) {
            None => bad("to nowhere"),
            Some(_) if secure(&self.endpoint) && !secure(location) => {
                bad("from https to http, which is refused")
            }
            Some(_) => Ok(location.to_owned()),
        }
    }
}

impl Facts {
    fn of(answer: &Response<Body>) -> Facts {
        let text = |name: &str| Some(answer.headers().get(name)?.to_str().ok()?.trim().to_owned());
        let is_file = answer.status().is_success();
        let length = || text(CONTENT_LENGTH.as_str()).filter(|_| is_file);
        let etag = text(LINKED_ETAG).or_else(|| text(ETAG.as_str()));
        let bare = |etag: String| etag.trim_start_matches("W/").trim_matches('"').to_owned();
        Facts {
            commit: text(COMMIT),
            etag: etag.map(bare),
            size: text(LINKED_SIZE).or_else(length).and_then(|size| size.parse().ok()),
        }
    }

    fn or(self, other: Facts) -> Facts {
        Facts {
            commit: self.commit.or(other.commit),
            etag: self.etag.or(other.etag),
            size: self.size.or(other.size),
        }
    }
}

/// (first byte, bytes of the whole file) of a `Content-Range: bytes 5-9/10`.
pub(super) fn content_range(headers: &HeaderMap) -> Option<(u64, u64)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, total) = text.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()?))
}

fn refused(status: u16) -> Trouble {
    match status {
        408 | 429 | 500.. => Trouble::Passing(HubErrorKind::Status(status)),
        _ => Trouble::Lasting(HubErrorKind::Status(status)),
    }
}

/// Scheme, host and port of an address.
fn origin(address: &str) -> Option<&str> {
    let host = address.strip_prefix("https://").or_else(|| address.strip_prefix("http://"))?;
    let end = host.find(['/', '?', '#']).unwrap_or(host.len());
    // Whoever is named before an @ is not the host.
    let named = end > 0 && !host[..end].contains('@');
    named.then(|| &address[..address.len() - host.len() + end])
}

/// Bundled certificates, or those that the environment names: behind a proxy that opens TLS its own is needed.
fn roots(env: &HubEnv) -> Result<RootCerts, HubErrorKind> {
    let Some(path) = &env.certificates else { return Ok(RootCerts::WebPki) };
    let unusable = |why: String| {
        HubErrorKind::Setting(format!(
            "the certificates in `{}` cannot be used ({why}); SSL_CERT_FILE, REQUESTS_CA_BUNDLE and \
             CURL_CA_BUNDLE name a PEM file",
            Place(path)
        ))
    };
    let pem = fs::read(path).map_err(|error| unusable(error.to_string()))?;
    let items: Result<Vec<_>, _> = parse_pem(&pem).collect();
    let items = items.map_err(|error| unusable(error.to_string()))?;
    let certificates: Vec<_> = items
        .into_iter()
        .filter_map(|item| match item {
            PemItem::Certificate(certificate) => Some(certificate),
            _ => None,
        })
        .collect();
    match certificates.is_empty() {
        true => Err(unusable("there is none".to_owned())),
        false => Ok(RootCerts::new_with_certs(&certificates)),
    }
}

impl Patience {
    /// How long to wait before try number `attempt` (from 1): twice as long each time.
    pub(super) fn pause_before(&self, attempt: u32) -> Duration {
        self.pause * 2u32.pow(attempt.saturating_sub(1).min(6))
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
