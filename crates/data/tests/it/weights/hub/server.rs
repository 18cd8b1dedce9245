//! An HTTP server on the loopback interface with the replies of a test, including false ones. Invariant: it answers one
//! request on each connection and records all requests.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A request that the server received.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    /// Headers; names are in lower case.
    pub headers: BTreeMap<String, String>,
}

impl Request {
    /// First byte of the requested range: 5 for `Range: bytes=5-`.
    pub fn start(&self) -> Option<usize> {
        self.headers.get("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// A reply of the server.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Number of bytes of the body after which the connection is closed.
    pub cut: Option<usize>,
    /// How long the connection stays open after the last byte that is sent.
    pub stall: Option<Duration>,
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

    /// Reply with `bytes`, or with the requested range of them.
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

/// A running server. Dropping it stops the server.
pub struct Server {
    port: u16,
    asked: Arc<Mutex<Vec<Request>>>,
    ended: Arc<AtomicBool>,
}

impl Server {
    /// Starts a server. `answer` gets a request and the number of earlier requests with its method and path.
    pub fn start(answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port on loopback");
        let port = listener.local_addr().expect("an address").port();
        let server = Server { port, asked: Arc::default(), ended: Arc::default() };
        let asked = server.asked.clone();
        let ended = server.ended.clone();
        let answer = Arc::new(answer);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if ended.load(Ordering::SeqCst) {
                    break;
                }
                let asked = asked.clone();
                let answer = answer.clone();
                // One thread per connection, so that a slow reply does not delay others.
                thread::spawn(move || serve(&stream, &asked, &*answer));
            }
        });
        server
    }

    pub fn address(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// All requests received so far.
    pub fn asked(&self) -> Vec<Request> {
        self.asked.lock().expect("not poisoned").clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // A connection wakes the thread from `accept`, so that it sees `ended`. The thread may have ended already.
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
    // The client may have closed the connection, so a write error is ignored.
    let mut out = stream;
    let _ = out.write_all(format!("{head}\r\n").as_bytes()).and_then(|()| out.write_all(body));
    if let Some(stall) = reply.stall {
        thread::sleep(stall);
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ').map(str::to_owned);
    let method = words.next()?;
    let path = words.next()?;
    let headers = lines.map_while(Result::ok).take_while(|line| !line.is_empty());
    let headers = headers.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_lowercase(), value.trim().to_owned()))
    });
    Some(Request { method, path, headers: headers.collect() })
}
