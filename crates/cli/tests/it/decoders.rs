//! Tests of decoders in `plan`, `bench`, `verify` and `embed`: a checkpoint that `train` wrote is a model, for texts and for
//! sequences.

use crate::embeddings::npy;
use crate::harness::{Folder, example, golden};
use plimsoll_data::weights::Weights;
use serde_json::Value;

const CONFIG: &str = "\
model: {kind: moe_lm, hidden: 32, layers: 2, heads: 4, intermediate: 48, experts: {count: 4, top_k: 2}}
data: {train: [corpus.txt], tokenizer: bytes, longest: 64, validation_fraction: 0}
optimizer: {lr: 1e-3}
batch: {tokens: 512}
run: {steps: 2, threads: 2, device: cpu, output: out}
";

const MODEL: &str = "out/checkpoints/step-00000002";

/// A folder with a trained decoder.
fn trained(test: &str) -> Folder {
    let folder = Folder::new(test);
    folder.write("run.yaml", CONFIG);
    folder.write("corpus.txt", std::fs::read(example("corpus.txt")).expect("the example"));
    folder.run(&["train", "run.yaml", "-q", "--timeline", "step.html"]).assert_code(0);
    folder
}

fn json(folder: &Folder, words: &[&str]) -> Value {
    serde_json::from_str(&folder.run(words).assert_code(0).stdout()).expect("JSON")
}

/// The data of the page of a measured step.
fn page(folder: &Folder, name: &str) -> Value {
    let page = String::from_utf8(folder.read(name)).expect("text");
    let (_, data) = page.split_once("id=\"timeline-data-0\">").expect("the data");
    serde_json::from_str(data.split("</script>").next().expect("its end")).expect("JSON")
}

/// Checks that a page has the times of `plans` of all plans, and the measured memory of the process.
fn is_measured(data: &Value, plan: &str) {
    let plans = data["plans"].as_array().expect("plans");
    let times = data["measured"]["times"].as_array().expect("times");
    let mut found = false;
    for of_plan in plans {
        let [first, count] = [1, 2].map(|k: usize| of_plan[k].as_u64().expect("a number") as usize);
        let of_plan_measured = of_plan[0] == plan;
        found |= of_plan_measured;
        for time in &times[first..first + count] {
            assert_eq!(time.as_u64().is_some(), of_plan_measured, "{of_plan}: {time}");
        }
    }
    assert!(found, "{plans:?}");
    let measured: u64 = times.iter().filter_map(Value::as_u64).sum();
    assert!(measured > 0);
    let memory = data["measured"]["memory"].as_array().expect("memory");
    let process = memory.iter().find(|line| line[0] == "process, measured").expect("the process");
    let readings = process[1].as_array().expect("readings");
    assert!(
        readings.iter().all(|reading| reading[1].as_u64().is_some_and(|bytes| bytes > 1 << 20)),
        "{process}"
    );
    assert!(readings.is_sorted_by_key(|reading| reading[0].as_u64()), "{process}");
}

#[test]
fn a_checkpoint_is_planned_timed_and_verified() {
    let folder = trained("decoder_commands");
    is_measured(&page(&folder, "step.html"), "micro-step");
    let plan = json(&folder, &["plan", "--model", MODEL, "--tokens", "128", "--threads", "2", "--json"]);
    assert_eq!(plan["bounds"]["tokens"], 128);
    let words = ["bench", "--model", MODEL, "--batch", "4x16", "--repeats", "1", "--threads", "2", "--json"];
    let report = json(&folder, &[&words[..], &["--timeline", "bench.html"]].concat());
    assert_eq!(report["step_tokens"], 64);
    is_measured(&page(&folder, "bench.html"), "bench");
    // A page that cannot be written is refused before the work.
    for words in [&["train", "run.yaml"][..], &["bench", "--model", MODEL]] {
        let refused = folder.run(&[words, &["--timeline", "nowhere/step.html"]].concat());
        let said = refused.assert_code(1).stderr();
        assert!(
            said.contains("nowhere/step.html: cannot be written, because its folder does not exist"),
            "{said}"
        );
    }
    let said = folder.run(&["verify", "--model", MODEL, "--threads", "2", "--precision", "f32"]);
    let said = said.assert_code(0).stdout();
    for check in ["decoder with experts of width 32", "pass  company", "pass  causal", "pass  finite"] {
        assert!(said.contains(check), "{check}: {said}");
    }
}

#[test]
fn texts_and_sequences_have_embeddings() {
    let folder = trained("decoder_embed");
    let texts = ["The first text.", "second", "Ein dritter: 満載喫水線"];
    let lines: Vec<String> = texts
        .iter()
        .enumerate()
        .map(|(i, text)| serde_json::json!({"id": format!("t{i}"), "text": text}).to_string())
        .collect();
    folder.write("texts.jsonl", lines.join("\n"));
    folder.write("texts.txt", texts.join("\n"));
    folder.write("reads.fa", ">a\nACGTNACG\n>b\nGG\n");
    let embed = |input: &str, output: &str, more: &[&str]| {
        let words = ["embed", "--model", MODEL, input, "-o", output, "-q", "--threads", "2"];
        folder.run(&[&words[..], more].concat()).assert_code(0);
    };
    embed("texts.jsonl", "a.npy", &["--precision", "f32"]);
    embed("texts.txt", "b.npy", &["--precision", "f32"]);
    assert_eq!(folder.read("a.npy"), folder.read("b.npy"), "one text has one embedding");
    let ids = |stem: &str| npy(&folder, stem).into_iter().map(|(id, _)| id).collect::<Vec<_>>();
    assert_eq!(
        (ids("a"), ids("b")),
        (vec!["t0".into(), "t1".into(), "t2".into()], vec!["1".into(), "2".into(), "3".into()])
    );
    // The mean of the rows of all tokens, which are bytes, is the mean.
    embed("texts.jsonl", "rows.safetensors", &["--pool", "tokens", "--precision", "f32"]);
    let rows = Weights::open(&folder.path("rows.safetensors")).expect("opened");
    for (text, (name, mean)) in texts.iter().zip(npy(&folder, "a")) {
        assert_eq!(rows.tensor(&name).expect("rows").shape(), [text.len() as u64, 32]);
        let mut values = vec![0.0; text.len() * 32];
        rows.read_f32(&name, 0..values.len() as u64, &mut values).expect("read");
        for (d, mean) in mean.iter().enumerate() {
            let sum: f32 = values.iter().skip(d).step_by(32).sum();
            assert!((sum / text.len() as f32 - mean).abs() < 1e-5, "{name} {d}");
        }
    }
    // The last token is the last row.
    embed("texts.jsonl", "last.npy", &["--pool", "last", "--precision", "f32"]);
    for (text, (name, last)) in texts.iter().zip(npy(&folder, "last")) {
        let mut values = vec![0.0; text.len() * 32];
        rows.read_f32(&name, 0..values.len() as u64, &mut values).expect("read");
        assert_eq!(last, values[values.len() - 32..], "{name}");
    }
    // A newline or a quotation mark in an id stays on its line.
    let odd =
        [r#"{"id": "a\nb", "text": "x"}"#, r#"{"id": "\"q", "text": "y"}"#, r#"{"id": "a\\nb", "text": "z"}"#];
    folder.write("odd.jsonl", odd.join("\n"));
    embed("odd.jsonl", "odd.npy", &[]);
    assert_eq!(ids("odd"), ["a\\nb#1.1", "\\\"q", "a\\nb"]);
    embed("reads.fa", "reads.npy", &["--layers", "0,-1"]);
    let reads = npy(&folder, "reads");
    assert_eq!(
        reads.iter().map(|(id, row)| (id.as_str(), row.len())).collect::<Vec<_>>(),
        [("a", 64), ("b", 64)]
    );
    // Texts are for decoders; a decoder whose config.json does not say that its tokens are bytes needs its tokenizer.
    folder.run(&["embed", "--model", &golden("esm2"), "texts.txt", "-o", "x.npy"]).assert_code(1);
    let path = format!("{MODEL}/config.json");
    let mut config: Value = serde_json::from_slice(&folder.read(&path)).expect("JSON");
    assert_eq!(config.as_object_mut().expect("an object").remove("plimsoll_tokenizer"), Some("bytes".into()));
    folder.write(&path, config.to_string());
    let texts = ["embed", "--model", MODEL, "texts.txt", "-o", "x.npy"];
    for words in [&texts[..], &["verify", "--model", MODEL]] {
        let ran = folder.run(words);
        let ran = ran.assert_code(1);
        let said = format!("{}{}", ran.stdout(), ran.stderr());
        assert!(said.contains("has no tokenizer.json"), "{words:?}: {said}");
    }
}
