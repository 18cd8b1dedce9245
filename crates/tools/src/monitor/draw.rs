//! Drawing of a view as text. Invariant: no line is longer than the width, and lines contain no control characters, so a
//! name in a file cannot command the terminal.

use super::{End, RunView};
use plimsoll_data::printable::is_printable;
use plimsoll_graph::Bytes;
use plimsoll_runtime::live::LiveState;
use plimsoll_runtime::series::{Point, Series};
use unicode_width::UnicodeWidthChar;

/// Least width in columns for which a view is drawn.
const NARROWEST: usize = 20;

/// Width of the labels at the left.
const LABEL: usize = 12;

/// Blocks of a sparkline, from the lowest to the highest.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Draws a view in lines of at most `width` columns of a terminal.
pub fn frame(view: &RunView, width: usize) -> Vec<String> {
    let width = width.max(NARROWEST);
    let room = width - LABEL;
    let state = &view.state;
    let mut lines = vec![title(view), progress_bar(state, width)];
    let mut row = |label: &str, text: String| lines.push(format!("{label:<LABEL$}{text}"));
    let Series { first, last, points, count, .. } = &view.losses;
    if *count > 0 {
        let numbers = format!("{first:.4} to {last:.4}  ");
        let points = Point::in_groups(points, room.saturating_sub(numbers.len()));
        row("loss", format!("{numbers}{}", sparkline(&points)));
    }
    if view.validations.count > 0 {
        let Series { last, lowest: (lowest, _), .. } = view.validations;
        row("validation", format!("{last:.4}, lowest {lowest:.4}"));
    }
    let records = state.records.map_or_else(String::new, |records| format!(", {records} records"));
    row("rate", format!("{:.0} tokens/s{records}", state.tokens_per_second));
    if let Some(tokens) = state.micro_tokens {
        row("batch", batch(state, tokens));
    }
    if state.budget_bytes > 0 {
        row("planned", planned(state));
    }
    let process = Meter { used: state.process_bytes, ours: None, total: 0 };
    let host =
        Meter { used: state.host_used_bytes, ours: Some(state.process_bytes), total: state.host_total_bytes };
    match &state.card {
        Some(card) => {
            let of_budget = Meter { used: card.process_bytes, total: state.budget_bytes, ..process };
            row("on card", of_budget.draw(room));
            let all = Meter { used: card.used_bytes, ours: Some(card.process_bytes), total: card.total_bytes };
            row("card", all.draw(room));
            row("process", rounded(state.process_bytes));
        }
        None => row("process", Meter { total: state.budget_bytes, ..process }.draw(room)),
    }
    if state.host_total_bytes > 0 {
        row("host", host.draw(room));
    }
    if !state.status.is_empty() {
        row("health", health(state));
    }
    lines.into_iter().map(|line| cut(&line, width)).collect()
}

/// Describes a view in one line, for logs.
pub fn line(view: &RunView) -> String {
    let state = &view.state;
    let mut parts = vec![format!("{}: {}", state.command, amount(state))];
    parts.extend(state.loss.map(|loss| format!("loss {loss:.4}")));
    parts.push(format!("{:.0} tokens/s", state.tokens_per_second));
    let [process, planned, budget] =
        [state.process_bytes, state.planned_bytes, state.budget_bytes].map(rounded);
    parts.push(format!("process {process}, planned {planned} of {budget}"));
    parts.extend(
        state.card.map(|card| format!("card {} of {}", rounded(card.used_bytes), rounded(card.total_bytes))),
    );
    parts.extend(state.micro_tokens.map(|tokens| batch(state, tokens)));
    parts.extend((!state.status.is_empty()).then(|| format!("health {}", health(state))));
    parts.push(match &view.end {
        None => state
            .seconds_left
            .map_or(state.stage.clone(), |left| format!("{}, {} left", state.stage, time(left))),
        Some(end) => words(end),
    });
    printable(&parts.join(", "))
}

/// The size of the steps, where it changes during the run.
fn batch(state: &LiveState, tokens: u64) -> String {
    let step = if state.command == "train" { "micro-step" } else { "step" };
    format!("{tokens} tokens in a {step}")
}

/// First line: the command, the name of the run, and what it does.
fn title(view: &RunView) -> String {
    let state = &view.state;
    let name = if view.name.is_empty() { String::new() } else { format!(" {}", view.name) };
    let now = view.end.as_ref().map_or_else(|| state.stage.clone(), words);
    format!("{}{name}: {now}", state.command)
}

/// Describes the end of a run.
fn words(end: &End) -> String {
    match end {
        End::Finished => "finished".to_owned(),
        End::Interrupted => "interrupted; the same command resumes it".to_owned(),
        End::Failed(why) => format!("failed: {why}"),
        End::Gone => "killed or failed: the process is gone and recorded no end".to_owned(),
    }
}

/// Bar of the finished work, with the time.
fn progress_bar(state: &LiveState, width: usize) -> String {
    let left = state.seconds_left.map_or_else(String::new, |left| format!(", {} left", time(left)));
    let numbers = format!("{}, {}{left}", amount(state), time(state.seconds));
    // The time left says more than the time so far.
    let numbers = if columns(&numbers) > width { format!("{}{left}", amount(state)) } else { numbers };
    match state.total.filter(|&total| total > 0) {
        None => numbers,
        Some(total) => {
            // Two brackets and a space; a bar of fewer than eight characters shows nothing.
            let room = width.saturating_sub(columns(&numbers) + 3).min(40);
            let share = state.done as f64 / total as f64;
            if room < 8 { numbers } else { format!("[{}] {numbers}", filled(share, room)) }
        }
    }
}

/// The finished work in words.
fn amount(state: &LiveState) -> String {
    let LiveState { done, total, unit, .. } = state;
    match (&**unit, total) {
        ("bytes", Some(total)) => {
            let percent = 100.0 * *done as f64 / (*total).max(1) as f64;
            format!("{:.0} % of the input", percent.floor())
        }
        ("bytes", None) => format!("{} of the input", rounded(*done)),
        (_, Some(total)) => format!("step {done} of {total}"),
        (_, None) => format!("step {done}"),
    }
}

/// The planned memory.
fn planned(state: &LiveState) -> String {
    let [peak, budget, held] = [state.planned_bytes, state.budget_bytes, state.held_bytes].map(rounded);
    let held = if state.held_bytes > 0 { format!(", arena {held}") } else { String::new() };
    format!("{peak} of {budget}{held}")
}

/// The health of a run.
fn health(state: &LiveState) -> String {
    let leak = state.leak_bytes_per_step;
    let leak =
        leak.map_or_else(String::new, |bytes| format!(", host memory grows by {} a step", rounded(bytes)));
    format!(
        "{}, budget {:.0} %, risk {:.0} %{leak}",
        state.status,
        100.0 * state.utilisation,
        100.0 * state.oom_risk
    )
}

/// Bar of memory in use.
#[derive(Clone, Copy)]
struct Meter {
    used: u64,
    /// Part of `used` that is this process's.
    ours: Option<u64>,
    total: u64,
}

impl Meter {
    /// Draws the bar: `#` is memory of this process, `+` memory of others.
    fn draw(self, width: usize) -> String {
        let numbers = match self.total {
            0 => return rounded(self.used),
            total => format!("{} of {}", rounded(self.used), rounded(total)),
        };
        // The numbers take the same width in all rows, so that the bars are in one column.
        let room = width.saturating_sub(NUMBERS + 3).min(40);
        if room < 8 {
            return numbers;
        }
        let all = self.cells(self.used, room);
        let ours = self.ours.map_or(all, |ours| self.cells(ours, room).min(all));
        let bar = format!("{}{}{}", "#".repeat(ours), "+".repeat(all - ours), " ".repeat(room - all));
        format!("[{bar}] {numbers}")
    }

    /// Width of the part of a bar of `room` characters that stands for `bytes`.
    fn cells(self, bytes: u64, room: usize) -> usize {
        ((bytes as f64 / self.total as f64 * room as f64).round() as usize).min(room)
    }
}

/// Width of two sizes, such as `23.4 GB of 99 GB`.
const NUMBERS: usize = 18;

/// A bar of `width` characters of which `share` is filled.
fn filled(share: f64, width: usize) -> String {
    let cells = ((share.clamp(0.0, 1.0) * width as f64) as usize).min(width);
    format!("{}{}", "#".repeat(cells), " ".repeat(width - cells))
}

/// Draws points as a row of blocks between their lowest and their highest value.
fn sparkline(points: &[Point]) -> String {
    let means = points.iter().map(Point::mean);
    let low = means.clone().fold(f64::INFINITY, f64::min);
    let high = means.clone().fold(f64::NEG_INFINITY, f64::max);
    let span = high - low;
    means
        .map(
            |x| {
                if span > 0.0 { BLOCKS[(((x - low) / span * 7.0).round() as usize).min(7)] } else { BLOCKS[0] }
            },
        )
        .collect()
}

/// A duration, such as `1 h 02 min`, `3 min 20 s` or `12 s`.
fn time(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} min"),
    }
}

fn rounded(bytes: u64) -> String {
    Bytes(bytes).rounded()
}

/// The text with characters that are not printable replaced by `?`.
fn printable(text: &str) -> String {
    text.chars().map(|c| if is_printable(c) { c } else { '?' }).collect()
}

/// Number of columns that a printable text takes on a terminal: two for wide characters, none for combining ones.
pub fn columns(text: &str) -> usize {
    text.chars().map(columns_of).sum()
}

/// Columns of a character. Terminals differ in whether they draw joined emoji as one, so each counts: a line that is too
/// short is harmless, but one that wraps would spoil the lines above it.
fn columns_of(c: char) -> usize {
    match c {
        // Variation selector 16 makes a wide emoji of the narrow symbol before it.
        '\u{fe0f}' => 1,
        c => c.width().unwrap_or(0),
    }
}

/// The printable text, cut to `width` columns.
fn cut(text: &str, width: usize) -> String {
    let text = printable(text);
    if columns(&text) <= width {
        return text.trim_end().to_owned();
    }
    let mut taken = 0;
    text.chars()
        .take_while(|c| {
            taken += columns_of(*c);
            // A column is left for the ellipsis.
            taken < width
        })
        .chain(['…'])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_runtime::live::LiveCard;

    const GB: u64 = 1_000_000_000;

    fn training() -> RunView {
        let state = LiveState {
            command: "train".to_owned(),
            stage: "training".to_owned(),
            seconds: 754.0,
            done: 620,
            total: Some(1000),
            unit: "steps".to_owned(),
            seconds_left: Some(462.0),
            tokens_per_second: 12_345.6,
            loss: Some(2.125),
            budget_bytes: 24 * GB,
            planned_bytes: 22_400_000_000,
            held_bytes: 21 * GB,
            process_bytes: 21_900_000_000,
            host_used_bytes: 40 * GB,
            host_total_bytes: 64 * GB,
            status: "ok".to_owned(),
            utilisation: 0.9125,
            oom_risk: 0.02,
            ..LiveState::default()
        };
        let mut view = RunView { name: "out/run".to_owned(), state, ..RunView::default() };
        (0..620_u32)
            .for_each(|step| view.losses.add(step.into(), 2.125 + 3.0 * (-f64::from(step) / 100.0).exp()));
        [(300, 2.2), (600, 2.25)].into_iter().for_each(|(step, loss)| view.validations.add(step, loss));
        view
    }

    /// Compares the frame with a text, and checks the width of every line.
    fn check(view: &RunView, width: usize, wanted: &str) {
        let lines = frame(view, width);
        assert!(lines.iter().all(|line| columns(line) <= width), "{lines:#?}");
        assert_eq!(lines.join("\n"), wanted.trim_matches('\n'), "\n{}", lines.join("\n"));
    }

    #[test]
    fn a_training_run_in_80_columns() {
        check(&training(), 80, include_str!("frames/train_80.txt"));
    }

    #[test]
    fn a_training_run_in_40_columns() {
        check(&training(), 40, include_str!("frames/train_40.txt"));
    }

    #[test]
    fn a_training_run_on_a_gpu() {
        let mut view = training();
        let [process_bytes, used_bytes, total_bytes] = [22 * GB, 60 * GB, 80 * GB];
        view.state.card = Some(LiveCard { process_bytes, used_bytes, total_bytes });
        view.state.process_bytes = 3 * GB;
        view.state.micro_tokens = Some(4096);
        view.state.leak_bytes_per_step = Some(1 << 20);
        check(&view, 80, include_str!("frames/train_gpu_80.txt"));
    }

    #[test]
    fn a_prediction() {
        let mut view = training();
        view.state = LiveState {
            command: "predict".to_owned(),
            stage: "computing".to_owned(),
            unit: "bytes".to_owned(),
            done: 450_000_000,
            total: Some(900_000_000),
            loss: None,
            records: Some(120_345),
            ..view.state
        };
        (view.losses, view.validations) = Default::default();
        check(&view, 80, include_str!("frames/predict_80.txt"));
        view.state.total = None;
        view.state.seconds_left = None;
        assert_eq!(frame(&view, 80)[1], "450 MB of the input, 12 min 34 s");
    }

    #[test]
    fn one_line_for_logs() {
        let mut view = training();
        let wanted = "train: step 620 of 1000, loss 2.1250, 12346 tokens/s, process 22 GB, planned 22 GB of 24 GB, \
                      health ok, budget 91 %, risk 2 %, training, 7 min 42 s left";
        assert_eq!(line(&view), wanted);
        view.end = Some(End::Gone);
        assert!(line(&view).ends_with(", killed or failed: the process is gone and recorded no end"));
    }

    #[test]
    fn names_cannot_command_the_terminal() {
        let mut view = training();
        view.name = "a\x1b[2Jb\n".to_owned();
        view.end = Some(End::Failed("\x07".to_owned()));
        assert_eq!(frame(&view, 80)[0], "train a?[2Jb?: failed: ?");
        assert!(line(&view).ends_with("failed: ?"));
        for width in 0..200 {
            assert!(frame(&view, width).iter().all(|line| columns(line) <= width.max(NARROWEST)));
        }
    }

    /// Wide characters take two columns, and combining ones none.
    #[test]
    fn lines_are_measured_in_columns() {
        for (text, wanted) in [
            ("abc", 3),
            ("é", 1),
            ("e\u{301}", 1),
            ("中文", 4),
            ("ｱ", 1),
            ("👩\u{200d}🔬", 4),
            ("❤\u{fe0f}", 2),
            ("", 0),
        ] {
            assert_eq!(columns(text), wanted, "{text}");
        }
        for (text, width, wanted) in [
            ("中文字", 6, "中文字"),
            ("中文字", 5, "中文…"),
            ("中文字", 4, "中…"),
            ("e\u{301}e\u{301}e\u{301}", 3, "e\u{301}e\u{301}e\u{301}"),
            ("e\u{301}e\u{301}e\u{301}", 2, "e\u{301}…"),
            ("abc  ", 5, "abc"),
        ] {
            assert_eq!(cut(text, width), wanted, "{text} in {width}");
        }
        let mut view = training();
        view.name = "実行".repeat(30);
        view.state.stage = "e\u{301}".repeat(90);
        for width in NARROWEST..140 {
            assert!(frame(&view, width).iter().all(|line| columns(line) <= width), "{width}");
        }
        // The name is cut before a wide character that would need one column too many.
        assert_eq!([40, 41].map(|width| columns(&frame(&view, width)[0])), [39, 41]);
    }

    #[test]
    fn times() {
        for (seconds, wanted) in [(-1.0, "0 s"), (59.9, "59 s"), (200.0, "3 min 20 s"), (3725.0, "1 h 02 min")]
        {
            assert_eq!(time(seconds), wanted);
        }
    }
}
