//! A hub on loopback that does what a test tells it, lies included. Invariant: it answers one request on each
//! connection, and remembers all of them.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// What was asked.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
}

impl Request {
    /// The first byte of a `Range: bytes=5-`.
    pub fn start(&self) -> Option<usize> {
        self.headers.get("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// What is answered.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// The connection ends after so many bytes of the body.
    pub cut: Option<usize>,
}

impl Reply {
    pub fn status(status: u16) -> Reply {
        Reply { status, ..Reply::default() }
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Reply {
        self.headers.retain(|(known, _)| *known != name);
        self.headers.push((name, value.into()));
        self
    }

    /// `bytes`, or the part of them that was asked for.
    pub fn file(request: &Request, bytes: &[u8]) -> Reply {
        let whole = Reply { status: 200, body: bytes.to_vec(), ..Reply::default() };
        match request.start() {
            None => whole,
            Some(start) if start >= bytes.len() => Reply::status(416),
            Some(start) => Reply { status: 206, body: bytes[start..].to_vec(), ..whole }
                .with("Content-Range", format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len())),
        }
    }
}

/// A server; it ends with its owner.
pub struct Server {
    port: u16,
    asked: Arc<Mutex<Vec<Request>>>,
    ended: Arc<AtomicBool>,
}

impl Server {
    /// `answer` gets a request, and how many of the same method and path came before.
    pub fn start(answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port on loopback");
        let port = listener.local_addr().expect("an address").port();
        let server = Server { port, asked: Arc::default(), ended: Arc::default() };
        let (asked, ended, answer) = (server.asked.clone(), server.ended.clone(), Arc::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if ended.load(Ordering::SeqCst) {
                    break;
                }
                let (asked, answer) = (asked.clone(), answer.clone());
                // Each its own thread: a slow answer must not hold the others.
                thread::spawn(move || serve(&stream, &asked, &*answer));
            }
        });
        server
    }

    pub fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// All requests so far.
    pub fn asked(&self) -> Vec<Request> {
        self.asked.lock().expect("not poisoned").clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // Wakes the thread; it may have ended already.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn serve(stream: &TcpStream, asked: &Mutex<Vec<Request>>, answer: &dyn Fn(&Request, usize) -> Reply) {
    let Some(request) = read(stream) else { return };
    let before = {
        let mut asked = asked.lock().expect("not poisoned");
        let same = |r: &&Request| r.method == request.method && r.path == request.path;
        let before = asked.iter().filter(same).count();
        asked.push(request.clone());
        before
    };
    let reply = answer(&request, before);
    let mut head = format!("HTTP/1.1 {} said\r\nConnection: close\r\n", reply.status);
    let length = ("Content-Length", reply.body.len().to_string());
    let lies = reply.headers.iter().any(|(name, _)| *name == "Content-Length");
    for (name, value) in reply.headers.iter().chain((!lies).then_some(&length)) {
        head += &format!("{name}: {value}\r\n");
    }
    let body = match request.method.as_str() {
        "HEAD" => &[],
        _ => &reply.body[..reply.cut.unwrap_or(reply.body.len())],
    };
    // The other side may have left.
    let mut out = stream;
    let _ = out.write_all(format!("{head}\r\n").as_bytes()).and_then(|()| out.write_all(body));
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ').map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let headers = lines.map_while(Result::ok).take_while(|line| !line.is_empty());
    let headers = headers.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_lowercase(), value.trim().to_owned()))
    });
    Some(Request { method, path, headers: headers.collect() })
}
