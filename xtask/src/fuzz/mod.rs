//! Fuzzing: feeds damaged files to every reader of external files, and extreme settings to the planner of training.
//! Invariant: a reader does not panic, uses memory in proportion to its input, ends in time and names the file in
//! its error, and accepted values are in range; each format adds further conditions.
//!
//! Every case is written to its folder before it is read, so the file is left for analysis if the process dies.

mod journals;
mod mutate;
mod random;
mod sequences;
mod settings;
mod texts;
mod training;
mod weights;

use crate::io_error;
use mutate::{Seeds, damage, mutate};
use random::Random;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A case that takes longer is a finding. The limit allows for a debug build on a busy machine.
const SLOW: Duration = Duration::from_secs(20);
/// After this time a case is considered endless, and the process exits.
const ENDLESS: Duration = Duration::from_secs(120);
/// Maximum number of findings of a format, after which the format is abandoned.
const MAX_FINDINGS: usize = 20;
/// Number of files for each case of settings.
const SETTINGS: u64 = 4;
/// Maximum length of an error message in bytes, including names.
const LONGEST_MESSAGE: usize = 4096;

/// A file format and the reader under test.
struct FuzzFormat {
    name: &'static str,
    /// File name of a case, because readers also consider names.
    file: &'static str,
    seeds: Seeds,
    /// Encodes a mutated text, for example compresses it, so that the damage reaches the reader behind the
    /// decoder.
    encode: fn(&[u8]) -> Vec<u8>,
    /// Other files in the folder of the case, by name.
    other_files: Vec<(&'static str, Vec<u8>)>,
    check: CheckCase,
}

/// Reads a case, whose path and content are given; `Err` is a finding.
type CheckCase = fn(&Path, &[u8]) -> Result<CaseResult, String>;

impl FuzzFormat {
    /// A format without an encoding and without other files in the folder.
    fn new(name: &'static str, file: &'static str, seeds: Seeds, check: CheckCase) -> Self {
        Self { name, file, seeds, encode: <[u8]>::to_vec, other_files: vec![], check }
    }
}

/// Result of a case without a finding.
struct CaseResult {
    accepted: bool,
    /// Peak heap memory in bytes, and its limit.
    peak: u64,
    allowed: u64,
}

/// Statistics of a format.
#[derive(Default)]
struct FormatTally {
    cases: u64,
    accepted: u64,
    peak: u64,
    slowest: Duration,
    findings: Vec<String>,
}

/// Options of the command.
pub struct FuzzRequest<'a> {
    /// Number of cases per format.
    pub count: u64,
    /// Seed; equal seeds give equal cases.
    pub seed: u64,
    /// Only formats whose names contain this text are tested.
    pub only: &'a str,
}

/// Parses `--count N`, `--seed N` and `--format NAME`; `None` if an argument is invalid.
pub fn request<'a>(words: &[&'a str]) -> Option<FuzzRequest<'a>> {
    let mut request = FuzzRequest { count: 10_000, seed: 1, only: "" };
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

/// Runs every format and prints one line about each; `Err` if there are findings.
pub fn run(root: &Path, request: &FuzzRequest<'_>) -> Result<(), String> {
    let folder = folder();
    let watch = Watchdog::start();
    let mut findings = 0;
    println!("{:<16} {:>8} {:>9} {:>14} {:>11}", "format", "cases", "accepted", "peak bytes", "slowest ms");
    for format in formats(root, &folder).iter().filter(|format| format.name.contains(request.only)) {
        let tally = try_format(format, request, &folder.join(format.name), &watch)?;
        tally.print(format.name);
        findings += tally.findings.len();
    }
    if settings::NAME.contains(request.only) {
        // A plan takes longer than a file.
        let count = request.count.div_ceil(SETTINGS);
        let request = FuzzRequest { count, seed: request.seed, only: request.only };
        let tally = settings::try_settings(root, &request, &folder.join(settings::NAME), &watch)?;
        tally.print(settings::NAME);
        findings += tally.findings.len();
    }
    match findings {
        0 => fs::remove_dir_all(&folder).map_err(io_error(&folder)),
        n => Err(format!("fuzz: {n} findings; their files are in {}", folder.display())),
    }
}

fn formats(root: &Path, folder: &Path) -> Vec<FuzzFormat> {
    let mut formats = sequences::formats();
    formats.extend(weights::formats(root, folder));
    formats.extend(texts::formats(root));
    formats.extend(training::formats());
    formats.extend(journals::formats(folder));
    formats
}

/// Working folder beside the executable, thus in the target folder.
fn folder() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    program.parent().unwrap_or(Path::new("target")).join(format!("fuzz-{}", std::process::id()))
}

/// Runs the cases of one format. Cases with findings are stored under their seed and number.
fn try_format(
    format: &FuzzFormat,
    request: &FuzzRequest<'_>,
    folder: &Path,
    watch: &Watchdog,
) -> Result<FormatTally, String> {
    fs::create_dir_all(folder).map_err(io_error(folder))?;
    for (name, bytes) in &format.other_files {
        fs::write(folder.join(name), bytes).map_err(io_error(folder))?;
    }
    let path = folder.join(format.file);
    let mut tally = FormatTally::default();
    for number in 0..request.count {
        let mut random = Random::of(request.seed, format.name, number);
        let mut bytes = (format.encode)(&mutate(&mut random, &format.seeds));
        // Also damage some files after encoding, for example the compressed stream itself.
        if random.once_in(4) {
            damage(&mut random, &mut bytes, &format.seeds);
        }
        overwrite(&path, &bytes).map_err(io_error(folder))?;
        let what = tally.run_case(&path, watch, bytes.len(), || (format.check)(&path, &bytes));
        if let Err(what) = what {
            let saved = folder.join(format!("found-{}-{number}", request.seed));
            fs::write(&saved, &bytes).map_err(io_error(folder))?;
            tally.findings.push(format!("{}: {what}", saved.display()));
        }
        if tally.is_given_up() {
            break;
        }
    }
    Ok(tally)
}

impl FormatTally {
    /// Prints the line of a format, and its findings.
    fn print(&self, name: &str) {
        let Self { cases, accepted, peak, slowest, findings } = self;
        println!("{name:<16} {cases:>8} {accepted:>9} {peak:>14} {:>11}", slowest.as_millis());
        findings.iter().for_each(|finding| println!("  {finding}"));
    }

    /// Whether there are so many findings that the format is abandoned.
    fn is_given_up(&self) -> bool {
        self.findings.len() >= MAX_FINDINGS
    }

    /// Runs one case, whose input of `len` bytes is in the file `path`; `Err` is a finding.
    fn run_case(
        &mut self,
        path: &Path,
        watch: &Watchdog,
        len: usize,
        check: impl FnOnce() -> Result<CaseResult, String>,
    ) -> Result<(), String> {
        watch.begin(path);
        let start = Instant::now();
        let seen = catch_unwind(AssertUnwindSafe(check));
        let took = start.elapsed();
        watch.end();
        self.cases += 1;
        self.slowest = self.slowest.max(took);
        let seen = seen.map_err(|panic| format!("it panics: {}", panic_message(&*panic)))??;
        self.accepted += u64::from(seen.accepted);
        self.peak = self.peak.max(seen.peak);
        if seen.peak > seen.allowed {
            let CaseResult { peak, allowed, .. } = seen;
            return Err(format!("{peak} bytes of memory for {len} of input; {allowed} are allowed"));
        }
        if took > SLOW {
            return Err(format!("it takes {took:?}"));
        }
        Ok(())
    }
}

/// The message of a panic.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default().to_owned()
}

/// Replaces the content of a file without truncating it first, because some file systems write to disk after a
/// truncation.
fn overwrite(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    file.write_all_at(bytes, 0)?;
    file.set_len(bytes.len() as u64)
}

/// Returns the result of `read` and its peak heap memory in bytes. A panic is resumed after the measurement, so
/// that the counter ends regularly.
fn measured<T>(read: impl FnOnce() -> T) -> (T, u64) {
    let mut result = None;
    let counted = allocation_counter::measure(|| result = Some(catch_unwind(AssertUnwindSafe(read))));
    match result {
        Some(Ok(value)) => (value, counted.bytes_max),
        Some(Err(panic)) => std::panic::resume_unwind(panic),
        None => panic!("the measurement did not run"),
    }
}

/// Messages of the error and of each of its causes.
fn messages(error: &dyn std::error::Error) -> Vec<String> {
    let mut texts = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        texts.push(error.to_string());
        cause = error.source();
    }
    texts
}

/// Checks an error: it must name the file, and its messages must be [`check_message`].
fn check_error(error: &dyn std::error::Error, path: &Path) -> Result<(), String> {
    let texts = messages(error);
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    if !texts[0].contains(&*file) {
        return Err(format!("the message does not name the file: {}", texts[0]));
    }
    texts.iter().try_for_each(|text| check_message(text))
}

/// Checks that a message is one printable line and not too long.
fn check_message(text: &str) -> Result<(), String> {
    if text.chars().any(char::is_control) {
        return Err(format!("control characters in a message: {text:?}"));
    }
    match text.len() {
        0..=LONGEST_MESSAGE => Ok(()),
        len => Err(format!("a message of {len} bytes: {}", text.chars().take(200).collect::<String>())),
    }
}

/// Watchdog thread that exits the process if a case does not end.
struct Watchdog(Arc<Mutex<Option<(Instant, PathBuf)>>>);

impl Watchdog {
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
        Watchdog(case)
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

    /// The short run of CI; the long run is `cargo run -p xtask -- fuzz`.
    #[test]
    fn damaged_files_are_refused_or_read() {
        let request = request(&["--count", "1000"]).expect("words of ours");
        run(&crate::root(), &request).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn a_case_can_be_made_again() {
        let folder = folder();
        for format in formats(&crate::root(), &folder) {
            let case = |number| mutate(&mut Random::of(7, format.name, number), &format.seeds);
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
