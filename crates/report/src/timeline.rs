//! The page of `plimsoll plan --html`: the memory of a step over its instructions. Invariant: every byte on the page is
//! that of a planner's timeline, and a page has at most 5 MB.
//!
//! A model of 1000 layers has about 175 000 tensors in training, so the data of the page is packed: columns in place of
//! rows, runs of equal numbers as one pair, each name once with a mark in place of its number, each size once, and addresses
//! as distances.

use crate::error::ReportError;
use crate::html::{escape, grouped, json};
use crate::page::{HtmlPage, PageSection};
use crate::table::{CellKind, PageColumn, PageTable};
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::printable::Name;
use plimsoll_runtime::Bytes;
use plimsoll_runtime::timeline::{MeasuredTimeline, Timeline, TimelineTensor, phase_name};
use plimsoll_setting::{Command, Setting};
use serde_json::json;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

const STYLE: &str = include_str!("timeline.css");
const SCRIPT: &str = include_str!("timeline.js");

/// Maximum size of a page in bytes.
const MOST_BYTES: usize = 5_000_000;

/// Rows of the table of the largest tensors.
const LARGEST: usize = 500;

/// Character in a name that stands for the number of a module, such as the layer. Escaped names have no control characters.
const NUMBER: char = '\u{1}';

/// A timeline on a page.
#[derive(Clone, Debug)]
pub struct PlannedTimeline {
    /// Name of the plan, such as that of the model.
    pub title: String,
    /// The timeline.
    pub timeline: Timeline,
    /// Memory budget in bytes, if there is one.
    pub budget: Option<u64>,
    /// Bytes of the budget that the process takes outside the plan.
    pub process: u64,
    /// Measurements of a step; `None` for a plan alone.
    pub measured: Option<MeasuredStep>,
}

/// Measurements of the instructions of a timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredStep {
    /// Seconds of each instruction; `None` for those that did not run.
    pub seconds: Vec<Option<f64>>,
    /// Tokens and sequences of the measured step.
    pub step: [u64; 2],
    /// Measured memory: a label, and bytes at ascending instructions.
    pub memory: Vec<(String, Vec<(usize, u64)>)>,
}

impl PlannedTimeline {
    /// A timeline with what was measured.
    pub fn measured(title: String, found: MeasuredTimeline, budget: Option<u64>, process: u64) -> Self {
        let memory = found.memory.into_iter().map(|line| (line.label, line.bytes)).collect();
        let step = [found.counts.tokens, found.counts.sequences];
        let measured = Some(MeasuredStep { seconds: found.seconds, step, memory });
        Self { title, timeline: found.timeline, budget, process, measured }
    }
}

impl MeasuredStep {
    /// Seconds of all instructions that ran.
    fn total(&self) -> f64 {
        self.seconds.iter().flatten().sum()
    }
}

/// Writes the page of one or more timelines; with several, they are set one below the other on one scale.
///
/// # Errors
/// - [`ReportError::TooManyTensors`]: the page would have more than 5 MB.
/// - [`ReportError::Runtime`]: the page cannot be written.
pub fn write(path: &Path, plans: &[PlannedTimeline]) -> Result<(), ReportError> {
    let page = page(plans).html();
    if page.len() > MOST_BYTES {
        let tensors = plans.iter().map(|plan| plan.timeline.tensors.len()).sum();
        return Err(ReportError::TooManyTensors { path: path.to_owned(), tensors, bytes: page.len() });
    }
    let mut file = AtomicFile::create(path)?;
    file.write_all(page.as_bytes()).map_err(|error| file.error(error))?;
    Ok(file.commit()?)
}

/// Checks before a run that its page can be written to `path`, so that a wrong path does not cost the run.
///
/// # Errors
/// The folder of `path` does not exist or cannot be written, or `path` is no regular file.
pub fn check(path: &Path) -> Result<(), ReportError> {
    // The temporary file of an uncommitted file is removed when it is dropped.
    Ok(AtomicFile::create(path).map(drop)?)
}

fn page(plans: &[PlannedTimeline]) -> HtmlPage {
    let titles: Vec<String> = plans.iter().map(|plan| Name(&plan.title).to_string()).collect();
    let targets: Vec<&str> = plans.iter().map(|plan| plan.timeline.target.as_str()).collect();
    let mut lead =
        format!("<p class=\"sub\">Planned for {}", escape(targets[..1].first().unwrap_or(&"nothing")));
    let is_measured = plans.iter().any(|plan| plan.measured.is_some());
    if is_measured {
        lead += ", with the times and the memory that were measured";
    }
    let _ = writeln!(lead, " · plimsoll {}</p>", escape(env!("CARGO_PKG_VERSION")));
    let table = table(plans, &titles);
    let mut sections = vec![
        PageSection {
            id: "memory",
            title: "Memory over the step",
            body: cards(plans) + &figures(plans, &titles),
        },
        PageSection { id: "ledger", title: "Memory at the peak", body: ledger(plans, &titles) },
        PageSection { id: "tensors", title: "Largest tensors", body: table.html() },
        PageSection { id: "columns", title: "Columns of the table", body: table.legend() },
    ];
    if let [PlannedTimeline { timeline, measured: Some(measured), .. }] = plans {
        let slowest = slowest(timeline, measured);
        let body = slowest.html() + &slowest.legend();
        sections.insert(1, PageSection { id: "slowest", title: "Slowest instructions", body });
    }
    HtmlPage {
        title: format!("Memory plan of {}", titles.join(" and ")),
        lead,
        sections,
        footer: format!(
            "Sizes and addresses are those of the plan, which a run follows to the byte; expected times are computed from \
             the rates of the target{}.",
            if is_measured { "; measured times include the wait for each instruction" } else { "" }
        ),
        own_style: STYLE,
        own_script: SCRIPT,
    }
}

/// A card: a number with its title and a detail.
fn card(title: &str, number: &str, detail: &str) -> String {
    format!("<div><dt>{title}</dt><dd>{number}<small>{detail}</small></dd></div>\n")
}

/// Peak, budget, arena, time and counts of the first plan; of all plans the peak and the time where there are several.
fn cards(plans: &[PlannedTimeline]) -> String {
    let mut cards = String::new();
    for (number, plan) in plans.iter().enumerate() {
        let PlannedTimeline { timeline, budget, .. } = plan;
        let plan_suffix = if plans.len() > 1 { format!(" of plan {}", number + 1) } else { String::new() };
        let seconds: f64 = timeline.instructions.iter().map(|i| i.seconds).sum();
        cards += &card(
            &format!("Peak{plan_suffix}"),
            &short(timeline.peak),
            &format!("{} B", grouped(timeline.peak.0)),
        );
        if let Some(budget) = budget {
            let free = budget.saturating_sub(timeline.peak.0 + plan.process);
            cards += &card(
                &format!("Budget{plan_suffix}"),
                &short(Bytes(*budget)),
                &format!("{} left", short(Bytes(free))),
            );
        }
        if plans.len() == 1 {
            let outside = short(timeline.peak - timeline.arena);
            cards += &card("Arena", &short(timeline.arena), &format!("{outside} outside it"));
            let tensors = format!("{} tensors", grouped(timeline.tensors.len() as u64));
            cards += &card("Instructions", &grouped(timeline.instructions.len() as u64), &tensors);
        }
        cards += &card(
            &format!("{}{plan_suffix}", if plans.len() == 1 { "Expected time" } else { "Time" }),
            &time(seconds),
            "all instructions once",
        );
        if let Some(measured) = &plan.measured {
            let expected = timeline.instructions.iter().zip(&measured.seconds).filter(|(_, s)| s.is_some());
            let expected: f64 = expected.map(|(instruction, _)| instruction.seconds).sum();
            let [tokens, sequences] = measured.step.map(grouped);
            let detail = format!("{} expected; {tokens} tokens, {sequences} sequences", time(expected));
            cards += &card(&format!("Measured time{plan_suffix}"), &time(measured.total()), &detail);
        }
    }
    format!("<dl class=\"cards\">\n{cards}</dl>\n")
}

/// The elements that the script fills, and its data.
fn figures(plans: &[PlannedTimeline], titles: &[String]) -> String {
    let mut html = "<div class=\"controls\" id=\"timeline-controls\"></div>\n".to_owned();
    html += "<noscript><p class=\"note\">Without JavaScript the page shows the tables only.</p></noscript>\n";
    for (number, (plan, title)) in plans.iter().zip(titles).enumerate() {
        let heading = if plans.len() > 1 {
            format!("<h3>Plan {}: {}</h3>\n", number + 1, escape(title))
        } else {
            String::new()
        };
        let _ = write!(
            html,
            "{heading}<figure class=\"timeline\" data-timeline=\"timeline-data-{number}\"></figure>\n\
             <script type=\"application/json\" id=\"timeline-data-{number}\">{}</script>\n",
            data(plan, title)
        );
    }
    html
}

/// Places of distinct numbers, in order of their first use.
#[derive(Default)]
struct DistinctNumbers {
    places: HashMap<u64, i64>,
    numbers: Vec<u64>,
}

impl DistinctNumbers {
    fn number(&mut self, number: u64) -> i64 {
        *self.places.entry(number).or_insert_with(|| {
            self.numbers.push(number);
            self.numbers.len() as i64 - 1
        })
    }
}

/// Numbers of distinct texts, in order of their first use.
#[derive(Default)]
struct DistinctWords {
    numbers: HashMap<String, usize>,
    words: Vec<String>,
}

impl DistinctWords {
    fn number(&mut self, word: String) -> usize {
        *self.numbers.entry(word).or_insert_with_key(|word| {
            self.words.push(word.clone());
            self.words.len() - 1
        })
    }

    /// The number of a name whose module number is replaced by [`NUMBER`], and the module number or -1.
    fn name(&mut self, name: &str) -> [i64; 2] {
        let (template, number) = templated(&Name(name).to_string());
        [self.number(template) as i64, number]
    }
}

/// Replaces the first number of a name that is a word of its own between dots and spaces; returns -1 if there is none.
fn templated(name: &str) -> (String, i64) {
    let mut at = 0;
    for word in name.split(['.', ' ']) {
        let before = &name[..at];
        let after = &name[at + word.len()..];
        let number = word.parse::<u32>().ok().filter(|number| number.to_string() == word);
        if let Some(number) = number
            && !before.is_empty()
        {
            return (format!("{before}{NUMBER}{after}"), i64::from(number));
        }
        at += word.len() + 1;
    }
    (name.to_owned(), -1)
}

/// Column of integers as comma-separated JSON, in which a pair `[value,count]` stands for a run of equal values.
#[derive(Default)]
struct RunLengthColumn {
    text: String,
    run: Option<(i64, usize)>,
}

impl RunLengthColumn {
    fn push(&mut self, number: i64) {
        match &mut self.run {
            Some((value, count)) if *value == number => *count += 1,
            _ => {
                self.end_run();
                self.run = Some((number, 1));
            }
        }
    }

    fn end_run(&mut self) {
        let Some((value, count)) = self.run.take() else { return };
        // A pair is shorter than four values of one digit.
        let items = if count < 4 { vec![value.to_string(); count] } else { vec![format!("[{value},{count}]")] };
        for item in items {
            let comma = if self.text.is_empty() { "" } else { "," };
            let _ = write!(self.text, "{comma}{item}");
        }
    }

    fn json(mut self) -> String {
        self.end_run();
        format!("[{}]", self.text)
    }
}

/// Numbers as distances from the preceding one.
#[derive(Default)]
struct Distances(i64);

impl Distances {
    /// Returns the distance of `number` from the number before.
    fn delta(&mut self, number: i64) -> i64 {
        let distance = number - self.0;
        self.0 = number;
        distance
    }
}

/// Appends a row of numbers, one to each column.
fn push_row<const N: usize>(columns: &mut [RunLengthColumn; N], row: [i64; N]) {
    columns.iter_mut().zip(row).for_each(|(column, number)| column.push(number));
}

/// The data of a timeline for the script; `read` in timeline.js undoes the packing.
fn data(plan: &PlannedTimeline, title: &str) -> String {
    let timeline = &plan.timeline;
    let mut names = DistinctWords::default();
    let mut lines = DistinctWords::default();
    let mut phases = DistinctWords::default();
    let mut kernels = DistinctWords::default();
    let mut sizes = DistinctNumbers::default();
    let mut times = DistinctNumbers::default();
    let mut numbers = Distances::default();
    let mut layers = Distances::default();
    let mut instructions: [RunLengthColumn; 6] = Default::default();
    for i in &timeline.instructions {
        let kernel = i.kernel.map_or(-1, |kernel| kernels.number(kernel.to_owned()) as i64);
        let phase = phases.number(phase_name(i.phase).to_owned()) as i64;
        let nanoseconds = times.number((1e9 * i.seconds).round() as u64);
        let [name, number] = names.name(&i.label);
        let layer = layers.delta(i.layer.map_or(-1, i64::from));
        push_row(&mut instructions, [name, numbers.delta(number), layer, phase, kernel, nanoseconds]);
    }
    let mut numbers = Distances::default();
    let mut layers = Distances::default();
    let mut births = Distances::default();
    let mut tensors: [RunLengthColumn; 9] = Default::default();
    let mut end = 0_i64;
    let alignment = timeline.alignment.max(1) as i64;
    for t in &timeline.tensors {
        // Addresses are multiples of the alignment, and most tensors that live for the whole run follow each other.
        let distance = t.address as i64 / alignment - end;
        end = (t.address + t.bytes.0).div_ceil(alignment as u64) as i64;
        let phase = t.phase.map_or(-1, |phase| phases.number(phase_name(phase).to_owned()) as i64);
        // A life of -1 is the whole run.
        let life = if t.plan.is_some() { (t.death - t.birth) as i64 } else { -1 };
        let line = lines.number(t.line.clone()) as i64;
        let [name, number] = names.name(&t.name);
        let layer = layers.delta(t.layer.map_or(-1, i64::from));
        let birth = births.delta(t.birth as i64);
        let size = sizes.number(t.bytes.0);
        let row = [name, numbers.delta(number), layer, phase, line, birth, life, distance, size];
        push_row(&mut tensors, row);
    }
    let plans: Vec<_> =
        timeline.plans.iter().map(|p| json!([Name(&p.name).to_string(), p.first, p.count])).collect();
    let outside: Vec<_> = timeline.outside.iter().map(|s| json!([s.label, s.bytes.0])).collect();
    let measured = plan.measured.as_ref().map(|measured| {
        let nanoseconds = measured.seconds.iter().map(|s| s.map(|s| (1e9 * s).round() as u64));
        json!({"times": nanoseconds.collect::<Vec<_>>(), "memory": measured.memory})
    });
    let head = json!({
        "measured": measured, "title": title, "budget": plan.budget, "process": plan.process, "arena": timeline.arena.0,
        "lasting": timeline.lasting.0, "peak": timeline.peak.0, "peakAt": timeline.peak_instruction,
        "alignment": alignment, "plans": plans, "outside": outside, "sizes": sizes.numbers, "times": times.numbers, "names": names.words,
        "lines": lines.words, "phases": phases.words, "kernels": kernels.words,
    });
    let head = json(&head.to_string());
    // The head is an object, which ends in a brace.
    let open = &head[..head.len() - 1];
    format!(
        "{open},\"instructions\":[{}],\"tensors\":[{}]}}",
        instructions.map(RunLengthColumn::json).join(","),
        tensors.map(RunLengthColumn::json).join(",")
    )
}

/// The lines of the ledger at the peak, beside each other for several plans.
fn ledger(plans: &[PlannedTimeline], titles: &[String]) -> String {
    let ledgers: Vec<Vec<LedgerLine>> = plans.iter().map(at_peak).collect();
    let mut labels: Vec<&str> = vec![];
    for line in ledgers.iter().flatten() {
        if !labels.contains(&line.label.as_str()) {
            labels.push(&line.label);
        }
    }
    let mut head = "<th scope=\"col\">Line</th>".to_owned();
    for (number, title) in titles.iter().enumerate() {
        let _ = match plans.len() {
            1 => write!(head, "<th scope=\"col\">Bytes</th><th scope=\"col\">Share</th>"),
            _ => write!(head, "<th scope=\"col\" title=\"{}\">Plan {}</th>", escape(title), number + 1),
        };
    }
    if plans.len() == 2 {
        head += "<th scope=\"col\">Difference</th>";
    }
    let mut rows = String::new();
    for label in labels {
        let lines = ledgers.iter().map(|ledger| ledger.iter().find(|line| line.label == label));
        let bytes: Vec<u64> = lines.map(|line| line.map_or(0, |line| line.bytes)).collect();
        rows += &ledger_row(plans, label, &bytes, "");
    }
    let peaks: Vec<u64> = plans.iter().map(|plan| plan.timeline.peak.0).collect();
    rows += &ledger_row(plans, "peak", &peaks, " class=\"sum\"");
    format!(
        "<div class=\"scroll\"><table class=\"numbers ledger\"><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>\n"
    )
}

/// A row of the ledger: the bytes of each plan, with their share of the peak for a single plan, and the difference of two.
fn ledger_row(plans: &[PlannedTimeline], label: &str, bytes: &[u64], class: &str) -> String {
    let mut cells = String::new();
    for (number, bytes) in bytes.iter().enumerate() {
        let _ = write!(cells, "<td>{}</td>", grouped(*bytes));
        if plans.len() == 1 {
            let share = crate::html::percent(*bytes, plans[number].timeline.peak.0);
            let _ = write!(cells, "<td>{share}</td>");
        }
    }
    if let [a, b] = bytes {
        let sign = match b.cmp(a) {
            Ordering::Greater => "+",
            Ordering::Less => "−",
            Ordering::Equal => "",
        };
        let _ = write!(cells, "<td>{sign}{}</td>", grouped(a.abs_diff(*b)));
    }
    format!("<tr{class}><th scope=\"row\">{}</th>{cells}</tr>\n", escape(label))
}

/// A line of the ledger.
struct LedgerLine {
    label: String,
    bytes: u64,
}

/// Lines with bytes at the peak; padding is what the peak has beside them.
fn at_peak(plan: &PlannedTimeline) -> Vec<LedgerLine> {
    let timeline = &plan.timeline;
    let at = timeline.peak_instruction;
    let live = timeline.tensors.iter().filter(|t| (t.birth..=t.death).contains(&at));
    let live = live.map(|t| (&t.line, t.bytes.0));
    let outside = timeline.outside.iter().map(|s| (&s.label, s.bytes.0));
    let mut lines: Vec<LedgerLine> = vec![];
    for (label, bytes) in live.chain(outside) {
        match lines.iter_mut().find(|line| line.label == *label) {
            Some(line) => line.bytes += bytes,
            None => lines.push(LedgerLine { label: label.clone(), bytes }),
        }
    }
    let sum: u64 = lines.iter().map(|line| line.bytes).sum();
    if timeline.peak.0 > sum {
        lines.push(LedgerLine { label: "padding and packing".to_owned(), bytes: timeline.peak.0 - sum });
    }
    lines
}

/// Rows of the table of the slowest instructions.
const SLOWEST: usize = 500;

/// A number as it is stored in a column.
fn cell_text(cells: &CellKind, value: f64) -> String {
    let mut text = String::new();
    cells.write(value, &mut text);
    text
}

/// The instructions that ran, with the most measured time first.
fn slowest(timeline: &Timeline, measured: &MeasuredStep) -> PageTable {
    let ran = measured.seconds.iter().enumerate().filter_map(|(i, seconds)| Some((i, (*seconds)?)));
    let mut ran: Vec<(usize, f64)> = ran.collect();
    let count = ran.len();
    ran.sort_by(|a, b| b.1.total_cmp(&a.1));
    ran.truncate(SLOWEST);
    let mut phases = DistinctWords::default();
    let mut kernels = DistinctWords::default();
    let microseconds = CellKind::Number { stored: 3 };
    let ratios = CellKind::Number { stored: 3 };
    let mut values: [Vec<String>; 8] = Default::default();
    for &(i, seconds) in &ran {
        let instruction = &timeline.instructions[i];
        let ratio = if instruction.seconds > 0.0 { seconds / instruction.seconds } else { f64::NAN };
        let row = [
            json(&json!(Name(&instruction.label).to_string()).to_string()),
            cell_text(&microseconds, 1e6 * seconds),
            cell_text(&microseconds, 1e6 * instruction.seconds),
            cell_text(&ratios, ratio),
            instruction.layer.map_or_else(|| "null".to_owned(), |layer| layer.to_string()),
            phases.number(phase_name(instruction.phase).to_owned()).to_string(),
            kernels.number(instruction.kernel.unwrap_or("none").to_owned()).to_string(),
            i.to_string(),
        ];
        values.iter_mut().zip(row).for_each(|(column, cell)| column.push(cell));
    }
    let columns = vec![
        PageColumn::new("label", "Instruction", "Op, with its parameter or layer", CellKind::Text).filtered(),
        PageColumn::new("measured", "Measured", "Measured time in microseconds", microseconds),
        PageColumn::new(
            "expected",
            "Expected",
            "Time in microseconds that the plan expects of this step",
            CellKind::Number { stored: 3 },
        ),
        PageColumn::new("ratio", "Ratio", "Measured time divided by expected time", ratios).filtered(),
        PageColumn::new("step_layer", "Layer", "Transformer layer", CellKind::Count),
        PageColumn::new("step_phase", "Phase", "Phase of the step", CellKind::Words(phases.words)).filtered(),
        PageColumn::new("kernel", "Kernel", "Kernel of a launch", CellKind::Words(kernels.words)).filtered(),
        PageColumn::new("number", "Number", "Number of the instruction, counted from 0", CellKind::Count),
    ];
    PageTable {
        id: "instruction-table",
        caption: format!("The {} slowest of {count} measured instructions", ran.len()),
        elsewhere: format!("{} {} lists the slowest kernels", Command::Bench, Setting::Json),
        columns,
        sort_key: "measured",
        sort_descending: true,
        values: values.into_iter().map(|cells| cells.join(",")).collect(),
    }
}

/// The largest tensors of all plans.
fn table(plans: &[PlannedTimeline], titles: &[String]) -> PageTable {
    let mut lines = DistinctWords::default();
    let mut phases = DistinctWords::default();
    let mut steps = DistinctWords::default();
    let mut all: Vec<(usize, &TimelineTensor)> = plans
        .iter()
        .enumerate()
        .flat_map(|(n, plan)| plan.timeline.tensors.iter().map(move |t| (n, t)))
        .collect();
    // A stable sort: equal sizes stay in the order of the timeline.
    all.sort_by_key(|(_, t)| std::cmp::Reverse(t.bytes));
    let count = all.len();
    all.truncate(LARGEST);
    let mut values: [Vec<String>; 9] = Default::default();
    for (number, t) in &all {
        let timeline = &plans[*number].timeline;
        let step = match (t.plan, plans.len()) {
            (None, 1) => "whole run".to_owned(),
            (Some(plan), 1) => timeline.plans[plan].name.clone(),
            _ => format!("plan {}", number + 1),
        };
        let row = [
            json(&json!(Name(&t.name).to_string()).to_string()),
            t.bytes.0.to_string(),
            lines.number(t.line.clone()).to_string(),
            t.layer.map_or("null".to_owned(), |layer| layer.to_string()),
            t.phase.map_or("null".to_owned(), |phase| phases.number(phase_name(phase).to_owned()).to_string()),
            steps.number(step).to_string(),
            t.birth.to_string(),
            t.death.to_string(),
            t.address.to_string(),
        ];
        values.iter_mut().zip(row).for_each(|(column, cell)| column.push(cell));
    }
    let columns = vec![
        PageColumn::new(
            "name",
            "Name",
            "Parameter, state or input; for a computed tensor the instruction that writes it",
            CellKind::Text,
        )
        .filtered(),
        PageColumn::new("bytes", "Bytes", "Size in a step of the largest size", CellKind::Count),
        PageColumn::new(
            "line",
            "Line",
            "Line of the ledger that counts the bytes",
            CellKind::Words(lines.words),
        )
        .filtered(),
        PageColumn::new(
            "layer",
            "Layer",
            "Transformer layer of the instruction that writes the tensor, or of the first that reads it",
            CellKind::Count,
        ),
        PageColumn::new(
            "phase",
            "Phase",
            "Phase of the step in which the tensor is written; none for tensors that live for the whole run",
            CellKind::Words(phases.words),
        )
        .filtered(),
        PageColumn::new(
            "plan",
            "Plan",
            "Part of the step that the tensor belongs to",
            CellKind::Words(steps.words),
        )
        .filtered()
        .hidden(),
        PageColumn::new(
            "birth",
            "Birth",
            "First instruction at which the tensor is in memory, counted from 0",
            CellKind::Count,
        ),
        PageColumn::new("death", "Death", "Last instruction at which the tensor is in memory", CellKind::Count),
        PageColumn::new("address", "Address", "Offset in the arena in bytes", CellKind::Count),
    ];
    PageTable {
        id: "tensor-table",
        caption: format!("The {} largest of {} tensors of {}", all.len(), count, titles.join(" and ")),
        elsewhere: format!("{} {} writes the timeline as JSON", Command::Plan, Setting::Trace),
        columns,
        sort_key: "bytes",
        sort_descending: true,
        values: values.into_iter().map(|cells| cells.join(",")).collect(),
    }
}

/// A size with three digits, on one line.
fn short(bytes: Bytes) -> String {
    bytes.digits(3).replace(' ', "\u{a0}")
}

/// A time with three digits.
fn time(seconds: f64) -> String {
    let (number, unit) = match seconds {
        1.0.. => (seconds, "s"),
        1e-3.. => (1e3 * seconds, "ms"),
        _ => (1e6 * seconds, "µs"),
    };
    let digits = if number < 10.0 { 2 } else { usize::from(number < 100.0) };
    format!("{number:.digits$}\u{a0}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shared_by_layers() {
        for (name, wanted, number) in [
            ("layers.12.fc1", "layers.\u{1}.fc1", 12),
            ("adamw layers.3.experts.7.w", "adamw layers.\u{1}.experts.7.w", 3),
            ("add layer 3", "add layer \u{1}", 3),
            ("layers.012.fc", "layers.012.fc", -1),
            ("fc1", "fc1", -1),
            ("7", "7", -1),
            ("a..5", "a..\u{1}", 5),
        ] {
            assert_eq!(templated(name), (wanted.to_owned(), number));
        }
    }

    #[test]
    fn runs_of_equal_numbers_are_pairs() {
        let mut column = RunLengthColumn::default();
        [1, 1, 1, 2, 2, 2, 2, -3].into_iter().for_each(|number| column.push(number));
        assert_eq!(column.json(), "[1,1,1,[2,4],-3]");
        assert_eq!(RunLengthColumn::default().json(), "[]");
    }

    #[test]
    fn sizes_and_times_have_three_digits() {
        let sizes = [
            (999, "999\u{a0}B"),
            (1_000, "1.00\u{a0}kB"),
            (12_345_678, "12.3\u{a0}MB"),
            (123_400_000_000, "123\u{a0}GB"),
            (999_950, "1.00\u{a0}MB"),
        ];
        for (bytes, text) in sizes {
            assert_eq!(short(Bytes(bytes)), text);
        }
        for (seconds, text) in [(2.5e-6, "2.50\u{a0}µs"), (0.0123, "12.3\u{a0}ms"), (239.2, "239\u{a0}s")] {
            assert_eq!(time(seconds), text);
        }
    }
}
