//! Tests of downloads from a hub that works, is slow, is broken or sends false data. Invariant: in every case a blob is
//! complete with the expected digest, or it is absent and the error says what to do.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_data::weights::{FetchEvent, HubEnv, Repository, RetryPolicy, WeightsError, find_in_hub};
use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::super::{folder, message};
use super::server::{Reply, Request, Server};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const CONFIG: &[u8] = b"{\"model_type\": \"esm\"}";
const QUICK: RetryPolicy =
    RetryPolicy { timeout: Duration::from_secs(5), backoff: Duration::ZERO, attempts: 3 };

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn git(bytes: &[u8]) -> String {
    hex(&Sha1::digest([format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat()))
}

fn lfs(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Weights of 300 kB.
fn weights() -> Vec<u8> {
    (0..300_000u32).map(|i| ((i * 7919) >> 3) as u8).collect()
}

/// Adds the headers with which the hub describes a file: its ETag and the commit.
fn said(reply: Reply, etag: &str) -> Reply {
    reply.with("ETag", format!("\"{etag}\"")).with("X-Repo-Commit", COMMIT)
}

/// Reply of a hub that serves `weights.bin` itself, without a redirect.
fn honest(request: &Request) -> Reply {
    said(Reply::file(request, &weights()), &lfs(&weights()))
}

struct Rig {
    cache: PathBuf,
    env: HubEnv,
    steps: Vec<FetchEvent>,
}

impl Rig {
    fn new(test: &str, endpoint: &str) -> Rig {
        let cache = folder(test);
        let lookup = |name: &str| match name {
            "HF_HUB_CACHE" => Some(cache.clone().into()),
            "HF_ENDPOINT" => Some(endpoint.into()),
            "HF_TOKEN" => Some("secret".into()),
            _ => None,
        };
        let env = HubEnv { patience: QUICK, ..HubEnv::from_lookup(lookup) };
        Rig { cache, env, steps: vec![] }
    }

    fn repository(&self) -> Repository {
        Repository::open("org/name", &self.env).expect("settings that can be used")
    }

    fn fetch(&mut self, file: &str) -> Result<Option<PathBuf>, WeightsError> {
        self.repository().fetch(file, &mut |_, _, step| {
            self.steps.push(step);
            ControlFlow::Continue(())
        })
    }

    fn weights(&mut self) -> Vec<u8> {
        let place = self.fetch("weights.bin").unwrap_or_else(|e| panic!("{}", message(&e)));
        fs::read(place.expect("it is there")).expect("it can be read")
    }

    fn refusal(&mut self, file: &str) -> String {
        message(&self.fetch(file).expect_err("it must not be fetched"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.cache.join("models--org--name").join(name)
    }

    /// Writes the partial file of an interrupted download, and returns its path.
    fn partial(&self, bytes: &[u8]) -> PathBuf {
        let path = self.path(&format!("blobs/{}.incomplete", lfs(&weights())));
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(&path, bytes).expect("written");
        path
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_model_arrives_in_the_layout_of_the_cache() {
    let cdn = Server::start(|request, _| Reply::file(request, &weights()));
    let at_cdn = format!("{}/signed?key=1", cdn.address());
    let hub = Server::start(move |request, _| match request.path.rsplit('/').next() {
        Some("config.json") => said(Reply::file(request, CONFIG), &git(CONFIG)),
        Some("weights.bin") => said(Reply::status(302), "not-the-one")
            .with("X-Linked-ETag", format!("\"{}\"", lfs(&weights())))
            .with("X-Linked-Size", weights().len().to_string())
            .with("Location", at_cdn.clone()),
        _ => Reply::status(404),
    });
    let mut rig = Rig::new("fetch_layout", &format!("{}/", hub.address()));
    let mut repository = rig.repository();
    let mut told = vec![];
    let mut fetch = |file: &str| {
        let place = repository.fetch(file, &mut |name, size, step| {
            told.push((name.to_owned(), size, step));
            ControlFlow::Continue(())
        });
        place.unwrap_or_else(|e| panic!("{}", message(&e)))
    };
    let snapshot = rig.path("snapshots").join(COMMIT);
    assert_eq!(fetch("config.json"), Some(snapshot.join("config.json")));
    assert_eq!(fetch("vocab.txt"), None);
    assert_eq!(fetch("weights.bin"), Some(snapshot.join("weights.bin")));
    assert!(find_in_hub("org/name", &rig.env).is_err(), "half a model must not be found");
    repository.write_ref().expect("kept");
    assert_eq!(find_in_hub("org/name", &rig.env).expect("found"), snapshot);
    assert_eq!(fs::read(rig.path("refs/main")).expect("a reference"), COMMIT.as_bytes());
    assert_eq!(fs::read(snapshot.join("config.json")).expect("it is there"), CONFIG);
    assert_eq!(
        fs::read_link(snapshot.join("weights.bin")).expect("a link"),
        PathBuf::from(format!("../../blobs/{}", lfs(&weights())))
    );
    let mut blobs = vec![git(CONFIG), lfs(&weights())];
    blobs.sort();
    assert_eq!(names(&rig.path("blobs")), blobs);
    let last = told.iter().rfind(|(_, _, step)| *step != FetchEvent::Idle);
    assert_eq!(last, Some(&("weights.bin".to_owned(), 300_000, FetchEvent::Checking)));

    let asked = hub.asked();
    assert!(asked.iter().all(|r| r.headers.get("authorization").is_some_and(|t| t == "Bearer secret")));
    assert!(asked[0].path.contains("/resolve/main/"), "{}", asked[0].path);
    assert!(asked[2..].iter().all(|r| r.path.contains(&format!("/resolve/{COMMIT}/"))), "one commit");
    assert!(cdn.asked().iter().all(|r| !r.headers.contains_key("authorization")), "the token leaked");
    rig.env.endpoint = None;
    assert_eq!(rig.weights(), weights());
    assert_eq!(asked.len(), hub.asked().len(), "what is there is not asked for");
}

#[test]
fn a_moved_repository_is_followed() {
    let hub = Server::start(|request, _| match request.path.strip_prefix("/org/name/") {
        Some(rest) => Reply::status(307).with("Location", format!("/new/name/{rest}")),
        None => honest(request),
    });
    assert_eq!(Rig::new("fetch_moved", &hub.address()).weights(), weights());
    assert!(hub.asked().iter().all(|r| r.headers.contains_key("authorization")));
}

#[test]
fn a_broken_connection_goes_on_where_it_ended() {
    let hub = Server::start(|request, before| match request.method.as_str() {
        "GET" if before == 0 => Reply { cut: Some(100_000), ..honest(request) },
        _ => honest(request),
    });
    let mut rig = Rig::new("fetch_resumed", &hub.address());
    assert_eq!(rig.weights(), weights());
    let starts: Vec<_> = hub.asked().iter().filter(|r| r.method == "GET").map(Request::start).collect();
    assert_eq!(starts, [None, Some(100_000)]);
    assert!(rig.steps.contains(&FetchEvent::Again));
}

#[test]
fn what_an_earlier_run_left_is_used_or_thrown_away() {
    let check = |test: &str, left: &[u8], ranges: bool, starts: &[Option<usize>]| {
        let hub = Server::start(move |request, _| {
            if ranges {
                honest(request)
            } else {
                said(Reply { status: 200, body: weights(), ..Reply::default() }, &lfs(&weights()))
            }
        });
        let mut rig = Rig::new(test, &hub.address());
        rig.partial(left);
        assert_eq!(rig.weights(), weights(), "{test}");
        assert_eq!(names(&rig.path("blobs")), [lfs(&weights())], "{test}");
        let asked: Vec<_> = hub.asked().iter().filter(|r| r.method == "GET").map(Request::start).collect();
        assert_eq!(asked, starts, "{test}");
    };
    check("fetch_left", &weights()[..1000], true, &[Some(1000)]);
    check("fetch_left_whole", &weights(), true, &[]);
    check("fetch_left_longer", &[0; 300_001], true, &[None]);
    check("fetch_left_wrong", &[0; 1000], true, &[Some(1000), None]);
    check("fetch_left_no_range", &weights()[..1000], false, &[Some(1000)]);
}

#[test]
fn a_hub_in_trouble_is_asked_again() {
    let hub = Server::start(|request, before| match before {
        0 => Reply::status(500),
        1 => Reply::status(429),
        _ => honest(request),
    });
    assert_eq!(Rig::new("fetch_again", &hub.address()).weights(), weights());
    assert_eq!(hub.asked().len(), 6);
}

#[test]
fn refusals_say_what_to_do() {
    let check = |status, tries: usize, advice: &str| {
        let hub = Server::start(move |_, _| Reply::status(status));
        let said = Rig::new(&format!("fetch_{status}"), &hub.address()).refusal("weights.bin");
        let start = format!("model `org/name`, weights.bin: the hub answered with status {status}: ");
        assert!(said.starts_with(&start) && said.contains(advice), "{said}");
        assert!(!said.contains("127.0.0.1") && !said.contains("secret"), "{said}");
        assert_eq!(hub.asked().len(), tries, "{status}");
    };
    check(401, 1, "in HF_TOKEN or by `hf auth login`");
    check(403, 1, "accept the model's terms");
    check(429, 3, "wait a few minutes");
    check(503, 3, "try again later");
    let hub = Server::start(|_, _| Reply::status(404));
    let rig = Rig::new("fetch_404", &hub.address());
    let mut repository = rig.repository();
    assert_eq!(
        repository.fetch("config.json", &mut |_, _, _| ControlFlow::Continue(())).expect("an answer"),
        None
    );
    assert_eq!(
        message(&repository.missing_file_error("config.json")),
        "model `org/name`, config.json: the hub answered with status 404: there is no such model or file; check \
            the id"
    );
}

#[test]
fn lies_are_found() {
    let check = |test: &str, answer: fn(&Request) -> Reply, expected: &str| {
        let hub = Server::start(move |request, _| answer(request));
        let mut rig = Rig::new(test, &hub.address());
        let said = rig.refusal("weights.bin");
        assert!(said.contains(expected), "{test}: {said}");
        assert!(!rig.path("blobs").join(lfs(&weights())).exists(), "{test}");
        rig
    };
    let other = |request: &Request| {
        let mut bytes = weights();
        bytes[200_000] ^= 1;
        said(Reply::file(request, &bytes), &lfs(&weights()))
    };
    let rig = check("fetch_lie_hash", other, "the hub's metadata states");
    assert!(names(&rig.path("blobs")).is_empty(), "wrong bytes must not be resumed");
    let size = |request: &Request| honest(request).with("X-Linked-Size", "300001");
    check("fetch_lie_size", size, "the server offers 300000 bytes, but the hub's metadata states 300001");
    let cut = |request: &Request| Reply { cut: Some(10), ..honest(request) };
    let rig = check("fetch_lie_cut", cut, "30 of 300000 bytes; run the command again");
    assert_eq!(names(&rig.path("blobs")), [format!("{}.incomplete", lfs(&weights()))]);
    let range = |request: &Request| match request.start() {
        None => Reply { cut: Some(10), ..honest(request) },
        Some(_) => honest(request).with("Content-Range", "bytes 0-299999/300000"),
    };
    check(
        "fetch_lie_range",
        range,
        "the server did not send the requested range, which starts at byte 10; \
        check that HF_ENDPOINT",
    );
    check("fetch_lie_commit", |r| honest(r).with("X-Repo-Commit", "../../x"), "does not state the commit");
    check("fetch_lie_etag", |r| honest(r).with("ETag", "../../x"), "does not state the digest");
    check("fetch_lie_nowhere", |_| Reply::status(302).with("Location", "ftp://a"), "a redirect to nowhere");
    check("fetch_lie_round", |r| Reply::status(302).with("Location", r.path.clone()), "more than 8 redirects");
}

#[test]
fn a_hub_that_is_not_there() {
    let gone = Server::start(|_, _| Reply::status(500)).address();
    let said = Rig::new("fetch_gone", &gone).refusal("weights.bin");
    assert!(said.contains("weights.bin: the hub cannot be reached; check the network"), "{said}");
    let silent = Server::start(|_, _| {
        thread::sleep(Duration::from_secs(2));
        Reply::status(200)
    });
    let mut rig = Rig::new("fetch_silent", &silent.address());
    rig.env.patience = RetryPolicy { timeout: Duration::from_millis(50), attempts: 2, ..QUICK };
    assert!(rig.refusal("weights.bin").contains("cannot be reached"));
    assert_eq!(silent.asked().len(), 2);
    let rig = Rig::new("fetch_endpoint", "huggingface");
    let error = Repository::open("org/name", &rig.env).err().expect("no address");
    assert!(message(&error).contains("give an address that begins with https://"), "{}", message(&error));
}

#[test]
fn a_full_disk_is_named() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        println!("skipped: there is no device that is always full here");
        return;
    }
    let hub = Server::start(|request, _| honest(request));
    let mut rig = Rig::new("fetch_full", &hub.address());
    let partial = rig.partial(b"");
    fs::remove_file(&partial).expect("removed");
    std::os::unix::fs::symlink(full, &partial).expect("a link");
    let said = rig.refusal("weights.bin");
    assert!(said.contains("weights.bin: the disk is full at") && said.contains("set HF_HUB_CACHE"), "{said}");
}

#[test]
fn two_at_once_fetch_one_file_once() {
    let hub = Server::start(|request, _| {
        if request.method == "GET" {
            thread::sleep(Duration::from_millis(300));
        }
        honest(request)
    });
    let rig = Rig::new("fetch_both", &hub.address());
    let steps = Arc::new(Mutex::new(vec![]));
    let both: Vec<_> = (0..2)
        .map(|_| {
            let env = rig.env.clone();
            let steps = steps.clone();
            thread::spawn(move || {
                let mut repository = Repository::open("org/name", &env).expect("settings");
                let mut told = |_: &str, _: u64, step| {
                    steps.lock().expect("not poisoned").push(step);
                    ControlFlow::Continue(())
                };
                let place = repository.fetch("weights.bin", &mut told).expect("fetched");
                fs::read(place.expect("it is there")).expect("it can be read")
            })
        })
        .collect();
    for one in both {
        assert_eq!(one.join().expect("it ends"), weights());
    }
    assert_eq!(hub.asked().iter().filter(|r| r.method == "GET").count(), 1);
    assert!(steps.lock().expect("not poisoned").contains(&FetchEvent::Waiting));
}

#[test]
fn a_fetch_can_be_stopped_and_goes_on_later() {
    let hub = Server::start(|request, _| honest(request));
    let mut rig = Rig::new("fetch_stopped", &hub.address());
    let mut told = |_: &str, _: u64, step| match step {
        FetchEvent::Bytes(bytes) if bytes > 0 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let error = rig.repository().fetch("weights.bin", &mut told).expect_err("it is stopped");
    assert!(message(&error).contains("the downloaded part is kept"), "{}", message(&error));
    assert_eq!(rig.weights(), weights());
    let starts: Vec<_> = hub.asked().iter().filter(|r| r.method == "GET").map(Request::start).collect();
    assert!(starts.len() == 2 && starts[1] > Some(0), "{starts:?}");
}

/// A fetch that waits, for whatever reason, is ended within a second.
#[test]
fn every_wait_of_a_fetch_can_be_ended() {
    let stalled = |seconds: u64| move || std::thread::sleep(Duration::from_secs(seconds));
    // Name, the server's reply, and whether another process holds the lock.
    type Answer = Box<dyn Fn(&Request) -> Reply + Send + Sync>;
    let late: Answer = Box::new(move |request| {
        stalled(5)();
        honest(request)
    });
    let busy: Answer = Box::new(|_| Reply::status(503));
    let asks: Answer = Box::new(|_| Reply::status(429).with("Retry-After", "60"));
    let half: Answer = Box::new(|request| match request.method.as_str() {
        "GET" => Reply { stall: Some(Duration::from_secs(5)), cut: Some(1000), ..honest(request) },
        _ => honest(request),
    });
    let locked: Answer = Box::new(honest);
    for (name, answer, is_locked) in [
        ("headers", late, false),
        ("backoff", busy, false),
        ("retry_after", asks, false),
        ("body", half, false),
        ("lock", locked, true),
    ] {
        let hub = Server::start(move |request, _| answer(request));
        let mut rig = Rig::new(&format!("fetch_ended_{name}"), &hub.address());
        rig.env.patience = RetryPolicy { backoff: Duration::from_secs(5), ..RetryPolicy::default() };
        let lock = rig.cache.join(".locks/models--org--name").join(format!("{}.lock", lfs(&weights())));
        fs::create_dir_all(lock.parent().expect("a folder")).expect("made");
        let lock = fs::File::create(&lock).expect("made");
        if is_locked {
            lock.lock().expect("locked");
        }
        let start = Instant::now();
        let mut told = |_: &str, _: u64, _| {
            if start.elapsed() > Duration::from_millis(300) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        let error = rig.repository().fetch("weights.bin", &mut told).expect_err("it is stopped");
        assert!(message(&error).contains("the download was stopped"), "{name}: {}", message(&error));
        assert!(start.elapsed() < Duration::from_secs(1), "{name}: {:?}", start.elapsed());
    }
}

#[test]
fn the_hub_is_asked_again_when_it_says_so() {
    let hub = Server::start(|request, before| match (request.method.as_str(), before) {
        ("HEAD", 0) => Reply::status(429).with("Retry-After", "1"),
        ("GET", 0) => Reply::status(503).with("Retry-After", "Thu, 01 Jan 1970 00:00:10 GMT"),
        _ => honest(request),
    });
    let mut rig = Rig::new("fetch_later", &hub.address());
    let start = Instant::now();
    assert_eq!(rig.weights(), weights());
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    let pauses: Vec<u64> = rig
        .steps
        .iter()
        .filter_map(|step| match step {
            FetchEvent::Pause(pause) => Some(pause.as_secs()),
            _ => None,
        })
        .collect();
    assert_eq!(pauses, [1, 0]);
    // A pause that no run waits for is an error at once.
    let hub = Server::start(|_, _| Reply::status(429).with("Retry-After", "86400"));
    let said = Rig::new("fetch_too_late", &hub.address()).refusal("weights.bin");
    assert!(said.contains("status 429: too many requests"), "{said}");
    assert_eq!(hub.asked().len(), 1);
}

#[test]
fn the_token_comes_from_a_file_too() {
    let hub = Server::start(|request, _| honest(request));
    let mut rig = Rig::new("fetch_token", &hub.address());
    fs::write(rig.cache.join("token"), "from-file\n").expect("written");
    rig.env.token = None;
    rig.env.hf_home = Some(rig.cache.clone());
    rig.weights();
    let tokens: Vec<_> = hub.asked().iter().filter_map(|r| r.headers.get("authorization").cloned()).collect();
    assert_eq!(tokens, ["Bearer from-file"; 2]);
    assert!(!format!("{:?}", Rig::new("fetch_debug", "http://x").env).contains("secret"));
}
