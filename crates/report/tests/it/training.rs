//! Pages of training runs in Chromium: the values that they show equal those of metrics.jsonl.

use crate::browser::Browser;
use plimsoll_report::{ReportOptions, report};
use plimsoll_testing::Folder;
use plimsoll_train::charts::number;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

/// Writes a run of `steps` steps; returns its folder.
fn run(folder: &Folder, name: &str, steps: u64, rate: f64) -> PathBuf {
    let path = folder.path(name);
    fs::create_dir_all(&path).expect("a folder");
    let mut metrics = String::new();
    for step in 1..=steps {
        let line = json!({
            "step": step, "loss": loss(step, rate), "lr": rate * 1e-3, "grad_norm": 1.0 + (step % 7) as f64,
            "tokens": 64 * step, "tokens_per_second": 1000.0 * rate, "skipped": u64::from(step > 12),
            "memory_bytes": 3_000_000 + step, "expert_load": {"0": [0.75, 0.25], "1": [0.5, 0.5]},
        });
        writeln!(metrics, "{line}").expect("a String");
        if step.is_multiple_of(10) {
            let line = json!({"step": step, "validation_loss": loss(step, rate) + 0.5, "best": true});
            writeln!(metrics, "{line}").expect("a String");
        }
        if step == 5 {
            let line = json!({"event": "</script><img/src=x/onerror=alert(1)>", "step": 5, "note": "a & b"});
            writeln!(metrics, "{line}").expect("a String");
        }
    }
    fs::write(path.join("metrics.jsonl"), metrics).expect("written");
    let config = format!("optimizer: {{lr: {}}}\nrun: {{steps: {steps}}}\n", rate * 1e-3);
    fs::write(path.join("config.yaml"), config).expect("written");
    let record = json!({
        "plimsoll": "0.1.0", "status": "finished", "config": {}, "device": "the CPU", "peak_bytes": 4_000_000,
        "memory": [{"stage": "opened", "resident_bytes": 1_048_576, "peak_bytes": 2_097_152}],
    });
    fs::write(path.join("run.json"), record.to_string()).expect("written");
    path
}

fn page(folder: &Folder, results: &[PathBuf]) -> PathBuf {
    let output = folder.path("page.html");
    let results = results.to_vec();
    report(&ReportOptions { results, output: output.clone(), title: None, force: true }).expect("a page");
    output
}

fn loss(step: u64, rate: f64) -> f64 {
    1.0 + 10.0 / (1.0 + rate * step as f64)
}

/// Places of the pointer: a share of the width of a chart, at half of its height.
fn mouse(browser: &mut Browser, kind: &str, chart: &str, part: f64) {
    let place = browser.value(&format!(
        "(() => {{ const p = document.querySelector('[data-chart={chart}] svg.plot'); p.scrollIntoView({{block: 'center', \
         behavior: 'instant'}}); const r = p.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; }})()"
    ));
    let [x, y, width, height] = [0, 1, 2, 3].map(|i| place[i].as_f64().expect("a number"));
    let (button, buttons) = if kind == "mouseMoved" { ("none", 0) } else { ("left", 1) };
    let event = json!({
        "type": kind, "x": x + part * width, "y": y + height / 2.0, "button": button, "buttons": buttons,
        "clickCount": 1, "pointerType": "mouse",
    });
    browser.call("Input.dispatchMouseEvent", event);
}

/// What the page says at the pointer: the steps, and for each line its run, series and value.
fn told(browser: &mut Browser, chart: &str) -> Value {
    browser.value(&format!(
        "(() => {{ const t = document.querySelector('[data-chart={chart}] .tip'); return t.hidden ? null : \
         [t.querySelector('strong').textContent, ...[...t.querySelectorAll('p')].map((p) => p.textContent)]; }})()"
    ))
}

fn labels(browser: &mut Browser, chart: &str) -> Vec<String> {
    let found = browser.value(&format!(
        "[...document.querySelectorAll('[data-chart={chart}] svg.plot > text')].map((t) => t.textContent)"
    ));
    let found = found.as_array().expect("labels").iter();
    found.map(|text| text.as_str().expect("text").to_owned()).collect()
}

#[test]
fn in_chromium_a_page_of_two_runs_shows_their_values() {
    let folder = Folder::new("training-page");
    let runs = [run(&folder, "slow", 40, 0.5), run(&folder, "fast", 20, 2.0)];
    let page = page(&folder, &runs);
    let Some(mut browser) = Browser::start("training", 1280) else { return };
    browser.open(&page);
    assert_eq!(browser.value("document.title"), "2 training runs: slow, fast");
    let charts = browser.value("[...document.querySelectorAll('[data-chart]')].map((f) => f.dataset.chart)");
    assert_eq!(charts, json!(["loss", "lr", "grad_norm", "tokens_per_second", "memory", "experts", "skipped"]));
    // The text of a file that looks like markup is text.
    assert_eq!(browser.value("document.querySelectorAll('img').length"), 0);
    let events = browser.value("document.querySelector('#events').textContent");
    assert!(
        events.as_str().is_some_and(|text| text.contains("onerror=alert(1)") && text.contains("note a & b"))
    );

    // Values at a step are those of metrics.jsonl; the other run has its last value.
    let nats = |value: f64| format!("{} nats", number(value));
    for step in [1_u64, 13, 20] {
        mouse(&mut browser, "mouseMoved", "loss", step as f64 / 40.0);
        let validation = |run: &str, rate: f64| {
            let nearest = if step < 15 { 10 } else { 20 };
            let at = if nearest == step { String::new() } else { format!(", step {nearest}") };
            format!("{run}, validation_loss{at}: {}", nats(loss(nearest, rate) + 0.5))
        };
        let wanted = json!([
            format!("step {step}"),
            format!("slow, loss: {}", nats(loss(step, 0.5))),
            format!("fast, loss: {}", nats(loss(step, 2.0))),
            validation("slow", 0.5),
            validation("fast", 2.0),
        ]);
        assert_eq!(told(&mut browser, "loss"), wanted);
    }
    mouse(&mut browser, "mouseMoved", "loss", 0.995);
    let wanted = format!("fast, loss, step 20: {}", nats(loss(20, 2.0)));
    assert_eq!(told(&mut browser, "loss")[2], wanted);

    // A hidden run has no line and no value, and the axis fits the other.
    let before = labels(&mut browser, "lr");
    browser.click("input[data-run='1']");
    let lines = "[...document.querySelectorAll('.curves path.line')].map((p) => p.dataset.run)";
    let shown = browser.value(lines);
    assert!(shown.as_array().is_some_and(|all| all.len() == 8 && all.iter().all(|run| run == "0")), "{shown}");
    assert_ne!(labels(&mut browser, "lr"), before);
    mouse(&mut browser, "mouseMoved", "lr", 0.5);
    assert_eq!(told(&mut browser, "lr"), json!(["step 20", "slow, lr: 5e-4"]));
    browser.click("input[data-run='1']");
    assert_eq!(labels(&mut browser, "lr"), before);

    // Logarithmic axis: the labels are decades or their multiples, and 0 is none of them.
    assert!(labels(&mut browser, "grad_norm").contains(&"0".to_owned()));
    browser.click("[data-log=grad_norm]");
    assert_eq!(labels(&mut browser, "grad_norm")[..3], ["1", "2", "5"]);
    browser.click("[data-log=grad_norm]");

    // Dragging selects steps in all charts.
    mouse(&mut browser, "mouseMoved", "loss", 0.25);
    mouse(&mut browser, "mousePressed", "loss", 0.25);
    let place = "[...document.querySelectorAll('[data-step]')].map((f) => f.value)";
    for part in [0.4, 0.5] {
        let kind = "mouseMoved";
        mouse(&mut browser, kind, "loss", part);
    }
    mouse(&mut browser, "mouseReleased", "loss", 0.5);
    assert_eq!(browser.value(place), json!(["10", "20"]));
    mouse(&mut browser, "mouseMoved", "lr", 0.5);
    assert_eq!(told(&mut browser, "lr")[0], "step 15");
    let steps = labels(&mut browser, "memory");
    assert!(steps.ends_with(&["10", "12", "14", "16", "18", "20"].map(str::to_owned)), "{steps:?}");
    browser.click("[data-action=all-steps]");
    assert_eq!(browser.value(place), json!(["0", "40"]));

    // The tables: values, and the keys that differ.
    let row = |title: &str| {
        format!(
            "[...document.querySelectorAll('.compared tr')].filter((r) => r.firstElementChild.textContent === {title:?})\
             .map((r) => [...r.querySelectorAll('td')].map((c) => c.textContent))[0]"
        )
    };
    let both = |of: fn(u64, f64) -> f64| json!([number(of(40, 0.5)), number(of(20, 2.0))]);
    assert_eq!(browser.value(&row("Last loss")), both(loss));
    assert_eq!(browser.value(&row("Steps")), json!(["40", "20"]));
    assert_eq!(browser.value(&row("optimizer.lr")), json!(["0.0005", "0.002"]));
    let lowest = format!("{} at step 40", number(loss(40, 0.5) + 0.5));
    assert_eq!(browser.value(&row("Lowest validation loss"))[0], lowest);
    assert_eq!(browser.value("document.querySelectorAll('.load').length"), 4);
}

/// A page fits the width of a phone, and printing shows the charts and tables.
#[test]
fn in_chromium_a_page_of_training_fits_a_phone_and_prints() {
    let folder = Folder::new("training-page");
    let runs = [run(&folder, "a-run-with-a-rather-long-name-of-its-own", 30, 0.5), run(&folder, "b", 20, 2.0)];
    let page = page(&folder, &runs);
    let Some(mut browser) = Browser::start("training-phone", 390) else { return };
    browser.open(&page);
    let root = "document.documentElement";
    assert_eq!(browser.value(&format!("{root}.scrollWidth - {root}.clientWidth")), 0);
    browser.call("Emulation.setEmulatedMedia", json!({"media": "print"}));
    let visible = |selector: &str| format!("document.querySelector('{selector}').getClientRects().length > 0");
    for selector in [".curves svg.plot path", ".load path", ".compared td", "#events td"] {
        assert_eq!(browser.value(&visible(selector)), true, "{selector}");
    }
    assert_eq!(browser.value(&visible("nav")), false);
}
