//! Messages and progress while a command runs. Invariant: standard output carries only results; messages go to
//! standard error and, with the time, to the log file.

use crate::error::{CliError, usage};
use crate::screen::Screen;
use indicatif::{ProgressBar, ProgressStyle};
use plimsoll_runtime::live::LiveState;
use plimsoll_runtime::{
    EscapedPath, FileTransfer, Level, Observer, OutputGuard, Progress, RuntimeError, StartProgress, StartStage,
    Trained,
};
use plimsoll_tools::monitor::{RunView, frame, line};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::flag;
use std::fmt::{self, Display, Formatter, Write as _};
use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Read, Write, stderr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Verbosity of messages on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbosity {
    /// Only warnings.
    Quiet,
    /// Warnings and information.
    Normal,
    /// Warnings, information and details.
    Verbose,
}

impl Verbosity {
    fn shows(self, level: Level) -> bool {
        match level {
            Level::Warning => true,
            Level::Info => self != Self::Quiet,
            Level::Detail => self == Self::Verbose,
        }
    }
}

/// Observer that writes to standard error and to the log file.
pub struct Terminal {
    verbosity: Verbosity,
    /// Progress bar; created by the first progress report if `shows_bar`.
    bar: Option<ProgressBar>,
    shows_bar: bool,
    shows_lines: bool,
    /// View of the run, with `--monitor`.
    monitor: Option<RunView>,
    /// Screen on which the view is drawn; `None` without a terminal, and before the first state.
    screen: Option<Screen>,
    colours: bool,
    log: Option<Log>,
    /// When the last progress line was written.
    last_line: Instant,
    /// Number of the signal that requested a stop; 0 without one.
    stop: Arc<AtomicUsize>,
}

/// Turns the signal that ends a process at the limit on the size of files (`ulimit -f`) into an error of the write, which is
/// reported like that of a full disk, and after which temporary files are removed.
pub fn survive_file_limit() {
    // Without the handler, the error would only be less clear.
    let _ = flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// Whether this process ignores a signal, by the mask that the system reports; false if it reports none.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    // Signals are numbered from 1, bits of the mask from 0.
    ignored(&status).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// The mask of ignored signals in the text of /proc/self/status.
fn ignored(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// The log file.
enum Log {
    /// Lines for a file that is not opened yet, because it is not known which files the command reads.
    Waiting(PathBuf, String),
    /// The open file.
    Open(File),
}

/// Template of the progress display for input of unknown size.
const READING: &str = "{spinner} {bytes} done  {elapsed}  {wide_msg}";

/// Minimum interval between two progress lines in the log file and, without a bar, on standard error.
const BETWEEN_LINES: Duration = Duration::from_secs(30);

impl Terminal {
    /// `progress` enables a progress bar if standard error is a terminal, and otherwise a line every
    /// [`BETWEEN_LINES`]. Nothing is written to the file `log` before [`Terminal::open_log`].
    pub fn new(verbosity: Verbosity, progress: bool, log: Option<&Path>) -> Self {
        let terminal = stderr().is_terminal();
        Self {
            verbosity,
            bar: None,
            shows_bar: progress && terminal,
            shows_lines: progress && !terminal,
            monitor: None,
            screen: None,
            colours: terminal && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
            log: log.map(|path| Log::Waiting(path.to_owned(), String::new())),
            last_line: Instant::now(),
            stop: Arc::default(),
        }
    }

    /// Opens the log file, to which lines are added, after `guard` has checked it against the files that the command reads
    /// and writes.
    ///
    /// # Errors
    /// An input or an output of the command; a file that is no log; a file that cannot be opened.
    pub fn open_log(&mut self, guard: &mut OutputGuard) -> Result<(), CliError> {
        let Some(Log::Waiting(path, lines)) = &self.log else { return Ok(()) };
        guard.own_file(path).map_err(RuntimeError::from)?;
        if path.is_file() && !is_log(path).map_err(RuntimeError::io(path))? {
            let text = "the file has other content than a log of plimsoll, so no lines are added to it; choose another file";
            return Err(usage(format!("--log-file {}: {text}", EscapedPath(path))));
        }
        let open = OpenOptions::new().create(true).append(true).open(path);
        let mut file = open.map_err(RuntimeError::io(path))?;
        file.write_all(lines.as_bytes()).map_err(RuntimeError::io(path))?;
        self.log = Some(Log::Open(file));
        Ok(())
    }

    /// Shows the state of the run instead of a progress bar.
    pub fn with_monitor(self) -> Self {
        Self { monitor: Some(RunView::default()), ..self }
    }

    /// Whether a progress bar is drawn. While a run reports its state to a monitor, that has the progress.
    fn has_bar(&self) -> bool {
        self.shows_bar && self.screen.is_none()
    }

    /// Installs the handlers of the signals that request a stop of the run. A second SIGINT (Ctrl-C) or SIGTERM terminates the
    /// process with exit code 128 + signal. SIGHUP (a closed terminal), SIGUSR1 and SIGUSR2 (batch systems, before the time
    /// limit) may come several times.
    pub fn listen(&self) -> Result<(), CliError> {
        // A signal that is ignored stays so: nohup ignores SIGHUP, so that the run outlives its terminal.
        for signal in [SIGHUP, SIGUSR1, SIGUSR2].into_iter().filter(|&signal| !is_ignored(signal)) {
            flag::register_usize(signal, Arc::clone(&self.stop), signal as usize)
                .map_err(|source| RuntimeError::Io { path: "signals".into(), source })?;
        }
        for signal in [SIGINT, SIGTERM] {
            let was_requested = Arc::new(AtomicBool::new(false));
            let stop = Arc::clone(&self.stop);
            // Handlers run in the order of registration. The shutdown must come before the handler that sets
            // `was_requested`; otherwise the first signal would already terminate the process.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&was_requested))
                .and_then(|_| flag::register(signal, was_requested))
                .and_then(|_| flag::register_usize(signal, stop, signal as usize))
                .map_err(|source| RuntimeError::Io { path: "signals".into(), source })?;
        }
        Ok(())
    }

    /// Writes a progress line to the log and, without a bar, to standard error, if `BETWEEN_LINES` have passed.
    fn progress_line(&mut self, line: impl FnOnce() -> String) {
        if self.last_line.elapsed() < BETWEEN_LINES {
            return;
        }
        self.last_line = Instant::now();
        let line = line();
        self.log(&line);
        if self.shows_lines {
            self.print(&line);
        }
    }

    /// Removes the progress bar.
    fn drop_bar(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Removes the progress bar and the view of the run.
    pub fn finish(&mut self) {
        self.drop_bar();
        if let Some(mut screen) = self.screen.take() {
            screen.clear();
        }
    }

    /// Writes to the log file only.
    pub fn log(&mut self, text: &str) {
        let Some(log) = &mut self.log else { return };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = format!("{} {}\n", utc(now.as_secs()), EscapedText(text));
        let written = match log {
            Log::Waiting(_, lines) => {
                lines.push_str(&line);
                Ok(())
            }
            Log::Open(file) => file.write_all(line.as_bytes()),
        };
        if let Err(error) = written {
            self.log = None;
            self.print(&format!("warning: writing to the log file failed, so logging to it stops: {error}"));
        }
    }

    /// Writes a line to standard error, above the progress bar.
    fn print(&mut self, text: &str) {
        match (&mut self.screen, &self.bar) {
            (Some(screen), _) => screen.above(|| write(text)),
            (None, Some(bar)) => bar.suspend(|| write(text)),
            (None, None) => write(text),
        }
    }

    /// Returns the progress bar and creates it if needed; `unbounded` is the template for an unknown total.
    fn bar(&mut self, total: Option<u64>, unbounded: &str) -> &ProgressBar {
        self.bar.get_or_insert_with(|| {
            let (bar, template) = match total {
                Some(total) => (
                    ProgressBar::new(total),
                    "{bar:20} {percent:>3} %  {elapsed} of about {duration}  {wide_msg}",
                ),
                None => (ProgressBar::new_spinner(), unbounded),
            };
            // The templates are constants; an invalid one must not stop a run, so it falls back to the default bar.
            bar.with_style(
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
            )
        })
    }
}

impl Observer for Terminal {
    fn stop(&self) -> Option<u8> {
        u8::try_from(self.stop.load(Ordering::Relaxed)).ok().filter(|&signal| signal > 0)
    }

    fn say(&mut self, level: Level, text: &str) {
        let line = match level {
            Level::Warning => format!("warning: {text}"),
            Level::Info | Level::Detail => text.to_owned(),
        };
        self.log(&line);
        if !self.verbosity.shows(level) {
            return;
        }
        match level {
            // Bold yellow.
            Level::Warning if self.colours => self.print(&format!("\x1b[1;33m{}\x1b[0m", EscapedText(&line))),
            Level::Warning | Level::Info | Level::Detail => self.print(&EscapedText(&line).to_string()),
        }
    }

    fn progress(&mut self, progress: &Progress) {
        let text = numbers(progress);
        if self.has_bar() {
            let bar = self.bar(progress.bytes_total, READING);
            bar.set_position(shown(progress));
            bar.set_message(text.clone());
        }
        if self.monitor.is_some() {
            return;
        }
        let done = progress.bytes_total.filter(|&total| total > 0);
        let done = done.map(|total| format!("{:.0} % of the input, ", percent(progress.bytes, total).floor()));
        self.progress_line(|| format!("{}{text}", done.unwrap_or_default()));
    }

    fn trained(&mut self, trained: &Trained) {
        let text = training(trained);
        if self.has_bar() {
            let bar = self.bar(trained.steps, "{spinner} {elapsed}  {wide_msg}");
            bar.set_position(trained.step);
            bar.set_message(text.clone());
        }
        match &mut self.monitor {
            Some(view) => view.take_step(trained.step, trained.loss),
            None => self.progress_line(|| text),
        }
    }

    fn live(&mut self, state: &LiveState) {
        if self.monitor.is_some() && self.shows_bar {
            self.drop_bar();
        }
        let Some(view) = &mut self.monitor else { return };
        view.take(state);
        let line = line(view);
        if self.shows_bar {
            let screen = self.screen.get_or_insert_with(Screen::on_stderr);
            screen.draw(frame(view, screen.width()));
        }
        self.progress_line(|| line);
    }

    fn transfer(&mut self, transfer: &FileTransfer<'_>) {
        let FileTransfer { file, bytes, total } = *transfer;
        if self.has_bar() {
            let bar = self.bar(Some(total), READING);
            bar.set_position(bytes);
            bar.set_message(file.to_owned());
        }
        if bytes == total {
            // The next transfer creates a bar with its own total.
            self.drop_bar();
        }
        self.progress_line(|| {
            format!("{file}: {:.0} % of {:.0} MB", percent(bytes, total), total as f64 / 1e6)
        });
    }

    fn starting(&mut self, progress: &StartProgress) {
        let StartProgress { stage: of, done, total } = *progress;
        if self.has_bar() {
            let bar = self.bar(Some(total), READING);
            bar.set_position(done);
            bar.set_message(stage(of));
        }
        if done == total {
            // The next stage creates a bar with its own total.
            self.drop_bar();
        }
        self.progress_line(|| format!("{}: {:.0} %", stage(of), percent(done, total)));
    }
}

/// Describes a stage of the work before the first step.
fn stage(stage: StartStage) -> &'static str {
    match stage {
        StartStage::Compile => "compiling kernels",
        StartStage::Prepare => "preparing kernels",
        StartStage::Load => "loading weights",
    }
}

/// Writes an error to standard error without a [`Terminal`].
pub fn print_error(text: &str) {
    write(&EscapedText(text).to_string());
}

/// Writes a line to standard error. Errors are ignored: a closed pipe, as behind `head`, must not stop a run.
fn write(text: &str) {
    let _ = writeln!(stderr(), "{text}");
}

/// Displays a text with control characters escaped, except line feeds and tabs. Messages contain names from
/// files, which must not be able to send escape sequences to the terminal.
struct EscapedText<'a>(&'a str);

impl Display for EscapedText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\n' | '\t' => f.write_char(c)?,
                c if !plimsoll_runtime::is_printable(c) => {
                    c.escape_default().try_for_each(|c| f.write_char(c))?
                }
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

fn percent(part: u64, total: u64) -> f64 {
    100.0 * part as f64 / total.max(1) as f64
}

/// Position of the progress bar, which rounds to whole percent: below 99.5 % until the run has finished.
fn shown(p: &Progress) -> u64 {
    match p.bytes_total {
        Some(total) if p.bytes < total => p.bytes.min((total as f64 * 0.994) as u64),
        Some(_) | None => p.bytes,
    }
}

fn numbers(p: &Progress) -> String {
    let rate = if p.seconds > 0.0 { p.tokens as f64 / p.seconds } else { 0.0 };
    format!("{} records, {} sequences, {rate:.0} tokens/s", p.records, p.sequences)
}

/// Progress of a training run in one line, with its memory and the memory budget.
fn training(t: &Trained) -> String {
    let steps = t.steps.map_or_else(String::new, |steps| format!(" of {steps}"));
    let [memory, line] = [t.memory, t.line].map(|bytes| bytes.0 as f64 / 1e6);
    let loss = t.loss;
    let rate = t.tokens_per_second;
    format!("step {}{steps}, loss {loss:.4}, {rate:.0} tokens/s, {memory:.0} of {line:.0} MB", t.step)
}

/// Whether a file is empty or starts with a line as [`Terminal::log`] writes it: a time and a blank.
fn is_log(path: &Path) -> std::io::Result<bool> {
    const FORM: &[u8; 21] = b"dddd-dd-ddTdd:dd:ddZ ";
    let mut start = vec![];
    File::open(path)?.take(FORM.len() as u64).read_to_end(&mut start)?;
    if start.is_empty() {
        return Ok(true);
    }
    let is_time = FORM
        .iter()
        .zip(&start)
        .all(|(form, byte)| if *form == b'd' { byte.is_ascii_digit() } else { form == byte });
    Ok(start.len() == FORM.len() && is_time)
}

/// Formats seconds since 1970 as `2026-01-31T12:00:00Z`. Days are converted to dates by Howard Hinnant's
/// `civil_from_days` ("chrono-Compatible Low-Level Date Algorithms"), with years that start in March.
fn utc(seconds: u64) -> String {
    // Days since 0000-03-01: with years that start in March, the leap day is the last day of a year. An era is 400 years.
    let days = seconds / 86_400 + 719_468;
    let rest = seconds % 86_400;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let hour = rest / 3600;
    let minute = rest / 60 % 60;
    let second = rest % 60;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (seconds, wanted) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), wanted);
        }
    }

    #[test]
    fn ignored_signals_are_read() {
        // nohup ignores SIGHUP, number 1.
        assert_eq!(ignored("Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n"), Some(0x1001));
        assert_eq!(ignored("Name:\tx\n"), None);
        assert!(!is_ignored(SIGTERM));
    }

    #[test]
    fn only_a_finished_run_shows_100_percent() {
        let progress = |bytes, bytes_total| Progress { bytes, bytes_total, ..Progress::default() };
        assert_eq!(shown(&progress(500, Some(1000))), 500);
        assert_eq!(shown(&progress(999, Some(1000))), 994);
        assert_eq!(shown(&progress(1000, Some(1000))), 1000);
        assert_eq!(shown(&progress(999, None)), 999);
    }

    #[test]
    fn training_in_a_line() {
        let mut t =
            Trained { step: 20, steps: Some(200), loss: 2.5, tokens_per_second: 1234.4, ..Trained::default() };
        assert_eq!(training(&t), "step 20 of 200, loss 2.5000, 1234 tokens/s, 0 of 0 MB");
        t.steps = None;
        assert!(training(&t).starts_with("step 20, loss"));
    }

    #[test]
    fn names_cannot_command_the_terminal() {
        let check = |text: &str, wanted: &str| assert_eq!(EscapedText(text).to_string(), wanted);
        check("'a|b/../é' is empty\n\tnext", "'a|b/../é' is empty\n\tnext");
        check("'\x1b[31mred\x07\r'", "'\\u{1b}[31mred\\u{7}\\r'");
        check("\u{9b}2J", "\\u{9b}2J");
    }

    #[test]
    fn who_hears_what() {
        use Level::{Detail, Info, Warning};
        use Verbosity::{Normal, Quiet, Verbose};
        for (verbosity, wanted) in
            [(Quiet, [true, false, false]), (Normal, [true, true, false]), (Verbose, [true; 3])]
        {
            assert_eq!([Warning, Info, Detail].map(|level| verbosity.shows(level)), wanted, "{verbosity:?}");
        }
    }
}
