//! Feeds damaged files to everything that reads files of others, and sees that nothing worse than an error
//! comes of it. Invariant: a reader does not panic, takes memory in proportion to its input, ends in time,
//! names the file in its error, and what it accepts is in range; each format adds what else must hold.
//!
//! Every case is written to its folder before it is read, so it is there even if the process dies of it.

mod journals;
mod mutate;
mod random;
mod sequences;
mod texts;
mod training;
mod weights;

use mutate::{Stock, damage, mutate};
use random::Random;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A case that takes longer is a finding; it is meant for a debug build on a busy machine.
const SLOW: Duration = Duration::from_secs(20);
/// A case that takes longer does not end: the process does.
const ENDLESS: Duration = Duration::from_secs(120);
/// Of a format; then it is given up.
const MOST_FINDINGS: usize = 20;
/// Bytes of a message, names in it included.
const LONGEST_MESSAGE: usize = 4096;

/// What a reader reads.
struct Format {
    name: &'static str,
    /// The case's file: readers look at names too.
    file: &'static str,
    stock: Stock,
    /// Packs a damaged text, so that the damage is met behind the packing.
    wrap: fn(&[u8]) -> Vec<u8>,
    /// Files that lie beside the case.
    beside: Vec<(&'static str, Vec<u8>)>,
    /// Reads a case; an error is a finding.
    check: fn(&Path, &[u8]) -> Result<Seen, String>,
}

/// What came of a case.
struct Seen {
    accepted: bool,
    /// Bytes of the heap at most, and what was allowed.
    peak: u64,
    allowed: u64,
}

/// What came of a format.
#[derive(Default)]
struct Tally {
    cases: u64,
    accepted: u64,
    peak: u64,
    slowest: Duration,
    findings: Vec<String>,
}

/// What is asked for.
pub struct Request<'a> {
    /// Cases of each format.
    pub count: u64,
    /// The same seed gives the same cases.
    pub seed: u64,
    /// Only formats with this in their name.
    pub only: &'a str,
}

/// Reads `--count N`, `--seed N` and `--format NAME`.
pub fn request<'a>(words: &[&'a str]) -> Option<Request<'a>> {
    let mut request = Request { count: 10_000, seed: 1, only: "" };
    for pair in words.chunks(2) {
        match *pair {
            ["--count", n] => request.count = n.parse().ok()?,
            ["--seed", n] => request.seed = n.parse().ok()?,
            ["--format", name] => request.only = name,
            _ => return None,
        }
    }
    Some(request)
}

/// Runs every format and prints a line about each; an error when there is a finding.
pub fn run(root: &Path, request: &Request<'_>) -> Result<(), String> {
    let folder = folder();
    let watch = Watch::start();
    let mut findings = 0;
    println!("{:<16} {:>8} {:>9} {:>14} {:>11}", "format", "cases", "accepted", "peak bytes", "slowest ms");
    for format in formats(root, &folder).iter().filter(|format| format.name.contains(request.only)) {
        let tally = try_format(format, request, &folder.join(format.name), &watch)?;
        let Tally { cases, accepted, peak, slowest, .. } = tally;
        println!("{:<16} {cases:>8} {accepted:>9} {peak:>14} {:>11}", format.name, slowest.as_millis());
        tally.findings.iter().for_each(|finding| println!("  {finding}"));
        findings += tally.findings.len();
    }
    match findings {
        0 => fs::remove_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display())),
        n => Err(format!("fuzz: {n} findings; their files are in {}", folder.display())),
    }
}

fn formats(root: &Path, folder: &Path) -> Vec<Format> {
    let mut formats = sequences::formats();
    formats.extend(weights::formats(root, folder));
    formats.extend(texts::formats(root));
    formats.extend(training::formats());
    formats.extend(journals::formats(folder));
    formats
}

/// Beside the program, so below the target folder.
fn folder() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    program.parent().unwrap_or(Path::new("target")).join(format!("fuzz-{}", std::process::id()))
}

fn try_format(format: &Format, request: &Request<'_>, folder: &Path, watch: &Watch) -> Result<Tally, String> {
    let refuse = |e: std::io::Error| format!("{}: {e}", folder.display());
    fs::create_dir_all(folder).map_err(refuse)?;
    for (name, bytes) in &format.beside {
        fs::write(folder.join(name), bytes).map_err(refuse)?;
    }
    let path = folder.join(format.file);
    let mut tally = Tally::default();
    for number in 0..request.count {
        let mut random = Random::of(request.seed, format.name, number);
        let mut bytes = (format.wrap)(&mutate(&mut random, &format.stock));
        if random.once_in(4) {
            damage(&mut random, &mut bytes, &format.stock);
        }
        overwrite(&path, &bytes).map_err(refuse)?;
        let what = tally.take(format, &path, &bytes, watch);
        if let Err(what) = what {
            let kept = folder.join(format!("found-{}-{number}", request.seed));
            fs::write(&kept, &bytes).map_err(refuse)?;
            tally.findings.push(format!("{}: {what}", kept.display()));
        }
        if tally.findings.len() >= MOST_FINDINGS {
            break;
        }
    }
    Ok(tally)
}

impl Tally {
    /// Reads one case.
    fn take(&mut self, format: &Format, path: &Path, bytes: &[u8], watch: &Watch) -> Result<(), String> {
        watch.begin(path);
        let start = Instant::now();
        let seen = catch_unwind(AssertUnwindSafe(|| (format.check)(path, bytes)));
        let took = start.elapsed();
        watch.end();
        self.cases += 1;
        self.slowest = self.slowest.max(took);
        let seen = seen.map_err(|panic| format!("it panics: {}", words_of(&*panic)))??;
        self.accepted += u64::from(seen.accepted);
        self.peak = self.peak.max(seen.peak);
        if seen.peak > seen.allowed {
            let (len, Seen { peak, allowed, .. }) = (bytes.len(), seen);
            return Err(format!("{peak} bytes of memory for {len} of input; {allowed} are allowed"));
        }
        if took > SLOW {
            return Err(format!("it takes {took:?}"));
        }
        Ok(())
    }
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default().to_owned()
}

/// Replaces a file's contents without emptying it first, after which some file systems write to disk.
fn overwrite(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    file.write_all_at(bytes, 0)?;
    file.set_len(bytes.len() as u64)
}

/// What `read` gives, and the most bytes that it held on the heap. A panic goes on after the measurement.
fn measured<T>(read: impl FnOnce() -> T) -> (T, u64) {
    let mut result = None;
    let counted = allocation_counter::measure(|| result = Some(catch_unwind(AssertUnwindSafe(read))));
    match result {
        Some(Ok(value)) => (value, counted.bytes_max),
        Some(Err(panic)) => std::panic::resume_unwind(panic),
        None => panic!("the measurement did not run"),
    }
}

/// The error and its causes, each on its own.
fn messages(error: &dyn std::error::Error) -> Vec<String> {
    let mut texts = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        texts.push(error.to_string());
        cause = error.source();
    }
    texts
}

/// A refusal must name the file, in one line of printable text that is not too long.
fn fit(error: &dyn std::error::Error, path: &Path) -> Result<(), String> {
    let texts = messages(error);
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    if !texts[0].contains(&*file) {
        return Err(format!("the message does not name the file: {}", texts[0]));
    }
    texts.iter().try_for_each(|text| plain(text))
}

/// One line of printable text that is not too long.
fn plain(text: &str) -> Result<(), String> {
    if text.chars().any(char::is_control) {
        return Err(format!("control characters in a message: {text:?}"));
    }
    match text.len() {
        0..=LONGEST_MESSAGE => Ok(()),
        len => Err(format!("a message of {len} bytes: {}", text.chars().take(200).collect::<String>())),
    }
}

/// Ends the process when a case does not end.
struct Watch(Arc<Mutex<Option<(Instant, PathBuf)>>>);

impl Watch {
    fn start() -> Self {
        let case: Arc<Mutex<Option<(Instant, PathBuf)>>> = Arc::default();
        let seen = Arc::clone(&case);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let case = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if let Some((_, path)) = case.filter(|(start, _)| start.elapsed() > ENDLESS) {
                    eprintln!("fuzz: no end after {ENDLESS:?}: {}", path.display());
                    std::process::exit(1);
                }
            }
        });
        Watch(case)
    }

    fn begin(&self, path: &Path) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), path.to_owned()));
    }

    fn end(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What CI runs; the long form is `cargo run -p xtask -- fuzz`.
    #[test]
    fn damaged_files_are_refused_or_read() {
        let request = request(&["--count", "1000"]).expect("words of ours");
        run(&crate::root(), &request).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn a_case_can_be_made_again() {
        let folder = folder();
        for format in formats(&crate::root(), &folder) {
            let case = |number| mutate(&mut Random::of(7, format.name, number), &format.stock);
            assert_eq!((0..20).map(case).collect::<Vec<_>>(), (0..20).map(case).collect::<Vec<_>>());
        }
    }

    #[test]
    fn words_are_read() {
        let read = |words: &[&str]| request(words).map(|r| (r.count, r.seed, r.only.to_owned()));
        assert_eq!(read(&[]), Some((10_000, 1, String::new())));
        assert_eq!(read(&["--seed", "9", "--format", "gz"]), Some((10_000, 9, "gz".to_owned())));
        assert_eq!(read(&["--count"]), None);
        assert_eq!(read(&["--count", "many"]), None);
    }
}
