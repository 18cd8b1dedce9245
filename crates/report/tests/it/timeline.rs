//! Pages of timelines in Chromium: what they show equals the plan.

use crate::browser::Browser;
use plimsoll_report::timeline::{MeasuredStep, PlannedTimeline, write};
use plimsoll_runtime::price::{self, PriceRequest};
use plimsoll_runtime::timeline::{Timeline, TimelineTensor};
use plimsoll_runtime::{Room, Streaming, Target};
use plimsoll_testing::Folder;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;

fn planned(model: &str, tokens: u64) -> PlannedTimeline {
    let target = Target::named("h200").expect("built in");
    let request = PriceRequest {
        tokens: Some(tokens),
        budget: None,
        stream: Streaming::Never,
        room: Room::UNLIMITED,
        precision: None,
        target,
    };
    let timeline = price::program(model, &request).expect("planned").timeline();
    let budget = timeline.peak.0 + timeline.peak.0 / 10;
    PlannedTimeline { title: model.to_owned(), timeline, budget: Some(budget), process: 0, measured: None }
}

/// Writes the page of the plans; returns its folder, which is removed with it, and its path.
fn page(plans: &[PlannedTimeline]) -> (Folder, PathBuf) {
    let folder = Folder::new("timeline");
    let path = folder.path("page.html");
    write(&path, plans).expect("a page");
    (folder, path)
}

fn grouped(number: u64) -> String {
    let digits = number.to_string();
    if digits.len() <= 4 {
        return digits;
    }
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|g| std::str::from_utf8(g).expect("digits")).collect();
    groups.join("\u{202f}")
}

/// Moves the pointer over the page's canvas, from its upper left corner.
fn point(browser: &mut Browser, x: f64, y: f64) {
    let corner = browser.value(
        "(() => { const c = document.querySelector('.timeline canvas'); c.scrollIntoView({block: 'center', behavior: \
         'instant'}); const r = c.getBoundingClientRect(); return [r.x, r.y]; })()",
    );
    let [cx, cy] = [0, 1].map(|i| corner[i].as_f64().expect("a number"));
    let event = json!({"type": "mouseMoved", "x": cx + x, "y": cy + y, "pointerType": "mouse"});
    browser.call("Input.dispatchMouseEvent", event);
}

fn text(browser: &mut Browser, selector: &str) -> String {
    let value = browser.value(&format!("document.querySelector({selector:?}).textContent"));
    value.as_str().unwrap_or_else(|| panic!("{selector}: {value}")).to_owned()
}

/// The largest transient tensor, on which the pointer can be set.
fn largest(timeline: &Timeline) -> &TimelineTensor {
    let transient = timeline.tensors.iter().filter(|t| t.plan.is_some());
    transient.max_by_key(|t| (t.bytes, std::cmp::Reverse(t.birth))).expect("a tensor")
}

#[test]
fn in_chromium_a_page_shows_tensors_with_addresses_and_lifetimes() {
    let plan = planned("facebook/esm2_t6_8M_UR50D", 16_384);
    let (_folder, path) = page(std::slice::from_ref(&plan));
    let Some(mut browser) = Browser::start("timeline", 1280) else { return };
    browser.open(&path);
    let timeline = &plan.timeline;
    let readout = text(&mut browser, ".timeline .readout");
    assert!(readout.contains(&format!("Peak {} B at instruction", grouped(timeline.peak.0))), "{readout}");
    let legend =
        browser.value("[...document.querySelectorAll('.timeline .swatches li')].map((l) => l.textContent)");
    for line in ["params", "activations", "workspace", "reserved: CUDA context"] {
        assert!(legend.as_array().is_some_and(|all| all.iter().any(|l| l == line)), "{line} in {legend}");
    }
    // The ledger at the peak sums to the peak.
    let sums = browser.value(
        "[...document.querySelectorAll('.ledger tbody tr')].map((r) => Number(r.children[1].textContent.replace(/\\u202f/g, '')))",
    );
    let mut sums: Vec<u64> =
        sums.as_array().expect("rows").iter().map(|n| n.as_u64().expect("a number")).collect();
    assert_eq!(sums.pop(), Some(timeline.peak.0));
    assert_eq!(sums.iter().sum::<u64>(), timeline.peak.0);
    // The table begins with the largest tensor.
    let most = timeline.tensors.iter().map(|t| t.bytes.0).max().expect("tensors");
    assert_eq!(
        browser.value("document.querySelector('.data tbody td').textContent"),
        Value::from(grouped(most))
    );

    // Hovering: the point of a tensor in the map of addresses, from the sizes that the script documents.
    let tensor = largest(timeline);
    let width = browser.value("document.querySelector('.timeline').clientWidth").as_f64().expect("a number");
    let [left, right, map_top, map] = [64.0, 10.0, 22.0 + 280.0 + 34.0 + 40.0, 260.0];
    let count = timeline.instructions.len() as f64;
    let low = if timeline.lasting.0 as f64 > 0.6 * timeline.arena.0 as f64 { timeline.lasting.0 } else { 0 };
    let middle = (tensor.address + tensor.bytes.0 / 2 - low) as f64 / (timeline.arena.0 - low) as f64;
    let x = left + (tensor.birth as f64 + 0.5) / count * (width - left - right);
    point(&mut browser, x, map_top + map - middle * map);
    let tip = text(&mut browser, ".tip");
    let step = |i: usize| format!("{}, {}", grouped(i as u64), timeline.instructions[i].label);
    for part in [
        tensor.name.clone(),
        format!("size{} B", grouped(tensor.bytes.0)),
        format!("line{}", tensor.line),
        format!("birth{}", step(tensor.birth)),
        format!("death{}", step(tensor.death)),
        format!("address0x{:x}", tensor.address),
    ] {
        assert!(tip.contains(&part), "{part} in {tip}");
    }
    // Above the map: the instruction, with all bytes in use.
    let at = timeline.peak_instruction;
    point(&mut browser, left + (at as f64 + 0.5) / count * (width - left - right), 150.0);
    let tip = text(&mut browser, ".tip");
    let lines = timeline.lines();
    assert!(tip.contains(&timeline.instructions[at].label) && tip.contains("phaseforward"), "{tip}");
    assert!(tip.contains(&format!("in use{} B", grouped(lines.total(at).0))), "{tip}");

    // Search, layers and zoom.
    browser.type_into("#timeline-search", "Layer.1.");
    let found: Vec<&TimelineTensor> =
        timeline.tensors.iter().filter(|t| t.name.to_lowercase().contains("layer.1.")).collect();
    assert!(found.len() > 5);
    let readout = text(&mut browser, ".timeline .readout");
    assert!(readout.contains(&format!("{} tensors match", found.len())), "{readout}");
    let most = found.iter().map(|t| t.bytes).max().expect("found");
    let largest = found.iter().find(|t| t.bytes == most).expect("found");
    assert!(readout.contains(&format!("{},", largest.name)), "{readout}");
    assert!(readout.contains(&format!("0x{:x}", largest.address)), "{readout}");
    // With all addresses, a parameter can be pointed at.
    browser.choose("#timeline-addresses", "all");
    let weight = timeline.tensors.iter().filter(|t| t.line == "params").max_by_key(|t| t.bytes);
    let weight = weight.expect("parameters");
    let middle = (weight.address + weight.bytes.0 / 2) as f64 / timeline.arena.0 as f64;
    point(&mut browser, 0.5 * width, map_top + map - middle * map);
    let tip = text(&mut browser, ".tip");
    assert!(tip.contains(&weight.name) && tip.contains("birthbefore the run"), "{tip}");
    browser.choose("#timeline-stack", "layer");
    let legend = text(&mut browser, ".timeline .swatches");
    for layer in ["no layer", "layer 0", "layer 5"] {
        assert!(legend.contains(layer), "{layer} in {legend}");
    }
    browser.click("[data-action=zoom-in]");
    assert!(text(&mut browser, ".timeline .readout").contains("Shown: instructions"));
    browser.click("[data-action=zoom-all]");
    assert!(!text(&mut browser, ".timeline .readout").contains("Shown: instructions"));
}

#[test]
fn in_chromium_two_plans_are_compared_on_a_phone() {
    let plans = [planned("facebook/esm2_t6_8M_UR50D", 4096), planned("facebook/esm2_t12_35M_UR50D", 4096)];
    let (_folder, path) = page(&plans);
    let Some(mut browser) = Browser::start("timeline-phone", 390) else { return };
    browser.open(&path);
    let root = "document.documentElement";
    assert_eq!(browser.value(&format!("{root}.scrollWidth - {root}.clientWidth")), 0);
    assert_eq!(browser.value("document.querySelectorAll('.timeline canvas').length"), 2);
    let last =
        browser.value("[...document.querySelectorAll('.ledger .sum td')].map((cell) => cell.textContent)");
    let peaks = [0, 1].map(|n: usize| plans[n].timeline.peak.0);
    let difference = format!("+{}", grouped(peaks[1] - peaks[0]));
    assert_eq!(last, json!([grouped(peaks[0]), grouped(peaks[1]), difference]));
}

/// The page of 1000 layers: the timeline of six layers, repeated, with the names and sizes of every layer.
#[test]
fn a_page_of_a_thousand_layers_has_at_most_5_mb() {
    let mut plan = planned("facebook/esm2_t6_8M_UR50D", 16_384);
    let small = plan.timeline.clone();
    let count = small.instructions.len();
    let blocks = 167;
    let named = |name: &str, layer: Option<u32>, block: u32| {
        layer.map_or(name.to_owned(), |l| name.replace(&format!(".{l}."), &format!(".{}.", l + 6 * block)))
    };
    plan.timeline.instructions = vec![];
    plan.timeline.tensors = vec![];
    for block in 0..blocks {
        let moved = |layer: Option<u32>| layer.map(|layer| layer + 6 * block);
        // A training step has about three instructions and three tensors where inference has one.
        for phase in 0..3 {
            let before = (3 * block as usize + phase) * count;
            for i in &small.instructions {
                let mut i = i.clone();
                (i.label, i.layer) = (named(&i.label, i.layer, block), moved(i.layer));
                plan.timeline.instructions.push(i);
            }
            for t in &small.tensors {
                let mut t = t.clone();
                (t.name, t.layer) = (named(&t.name, t.layer, block), moved(t.layer));
                (t.birth, t.death) = (t.birth + before, t.death + before);
                t.address += u64::from(block) * plan.timeline.arena.0;
                plan.timeline.tensors.push(t);
            }
        }
    }
    let layers = plan.timeline.tensors.iter().filter_map(|t| t.layer).max();
    assert_eq!(layers, Some(1001));
    let tensors = plan.timeline.tensors.len();
    assert!(tensors > 50_000, "{tensors}");
    let (_folder, path) = page(&[plan]);
    let bytes = fs::metadata(&path).expect("a file").len();
    assert!(bytes <= 5_000_000, "{bytes} for {tensors} tensors");
    let text = fs::read_to_string(&path).expect("a page");
    for foreign in ["http:", "https:", "//cdn", "@import", "innerHTML", "src=", "url("] {
        assert!(!text.contains(foreign), "{foreign}");
    }
}

/// A measured step: the page has the times and the memory that were measured, and an axis of measured time.
#[test]
fn in_chromium_a_measured_step_is_set_over_the_plan() {
    let mut plan = planned("facebook/esm2_t6_8M_UR50D", 4096);
    let count = plan.timeline.instructions.len();
    let slowest = count / 2;
    let seconds: Vec<Option<f64>> = (0..count).map(|i| Some(if i == slowest { 0.5 } else { 1e-4 })).collect();
    let peak = plan.timeline.peak.0;
    let memory =
        vec![("process, measured".to_owned(), vec![(0, peak / 2), (slowest, peak + 1000), (count - 1, peak)])];
    plan.measured = Some(MeasuredStep { seconds, step: [4000, 12], memory });
    let (_folder, path) = page(std::slice::from_ref(&plan));
    let text = fs::read_to_string(&path).expect("a page");
    assert!(
        text.contains("Measured time") && text.contains("4\u{202f}000 tokens") | text.contains("4000 tokens")
    );
    let Some(mut browser) = Browser::start("timeline-measured", 1280) else { return };
    browser.open(&path);
    // The slowest instruction is the first of the table, with its time in microseconds.
    let label = self::text(&mut browser, "#instruction-table tbody tr th");
    assert_eq!(label, plan.timeline.instructions[slowest].label);
    let time = self::text(&mut browser, "#instruction-table tbody tr td");
    assert!(time.replace('\u{202f}', "").starts_with("500000"), "{time}");
    let readout = text_of(&mut browser);
    assert!(readout.contains("The process, measured: at most"), "{readout}");
    // On the axis of measured time the slowest instruction fills most of the width, so the middle is in it.
    browser.choose("#timeline-axis", "measured");
    let width = browser.value("document.querySelector('.timeline').clientWidth").as_f64().expect("a number");
    point(&mut browser, width / 2.0, 150.0);
    let tip = self::text(&mut browser, ".tip");
    assert!(tip.contains(&plan.timeline.instructions[slowest].label), "{tip}");
    assert!(tip.contains("measured500000.0 µs"), "{tip}");
    browser.choose("#timeline-axis", "instructions");
    point(&mut browser, width - 12.0, 150.0);
    let tip = self::text(&mut browser, ".tip");
    assert!(tip.contains("measured100.0 µs"), "{tip}");
}

fn text_of(browser: &mut Browser) -> String {
    text(browser, ".timeline .readout")
}
