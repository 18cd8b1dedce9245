//! Tests of `--stream-weights`: a command works in a budget smaller than the weights, and reports the bytes
//! that it reads from disk in each step.

use crate::harness::{Folder, golden};
use plimsoll_data::weights::{StoredAs, TensorData, Weights, write_safetensors};
use serde_json::Value;
use std::path::Path;

/// Number of layers of the deep model. Its weights are larger than the arena of its streamed program.
const LAYERS: u64 = 64;

const PROTEINS: &str = ">a\nMKVLATGSER\n>b\nLAGVSERTIDPKQNFYMHWC\n>c\nMK\n";

/// Writes a copy of the golden ESM-2 that repeats the first layer [`LAYERS`] times.
fn deep(folder: &Folder) {
    let config = String::from_utf8(std::fs::read(golden("esm2/config.json")).expect("golden")).expect("text");
    let layers = "\"num_hidden_layers\": 2";
    assert!(config.contains(layers), "{config}");
    folder.write("deep/config.json", config.replace(layers, &format!("\"num_hidden_layers\": {LAYERS}")));
    let weights = Weights::open(Path::new(&golden("esm2"))).expect("golden");
    let mut tensors: Vec<(String, &[u64], Vec<f32>)> = vec![];
    for tensor in weights.tensors().filter(|tensor| tensor.dtype().is_float()) {
        let mut data = vec![0.0; tensor.elements() as usize];
        weights.read_f32(tensor.name(), 0..tensor.elements(), &mut data).expect("floats");
        match tensor.name().split_once(".layer.0.") {
            Some((before, after)) => {
                let name = |i| (format!("{before}.layer.{i}.{after}"), tensor.shape(), data.clone());
                tensors.extend((0..LAYERS).map(name));
            }
            None if tensor.name().contains(".layer.") => {}
            None => tensors.push((tensor.name().to_owned(), tensor.shape(), data)),
        }
    }
    let data: Vec<TensorData<'_>> =
        tensors.iter().map(|(name, shape, data)| TensorData { name, shape, data }).collect();
    write_safetensors(&folder.path("deep/model.safetensors"), &data, &Default::default(), StoredAs::F32)
        .expect("written");
}

/// In f32, so that the resident weights have the size of the file on every CPU.
const EMBED: [&str; 11] =
    ["embed", "--model", "deep", "p.faa", "-o", "e.npy", "--force", "--threads", "1", "--precision", "f32"];

/// Budgets from the size of the weights down to the minimum named by the bill give identical bits; one byte
/// less is refused.
#[test]
fn embeddings_in_less_memory_than_the_weights() {
    let folder = Folder::new("streaming");
    deep(&folder);
    folder.write("p.faa", PROTEINS);
    let run = |words: &[&str], code| {
        let ran = folder.run(&[&EMBED, words, &["-v"]].concat());
        ran.assert_code(code).stderr()
    };
    let said = run(&[], 0);
    assert!(!said.contains("stream"), "{said}");
    let wanted = folder.read("e.npy");
    // Memory of the process outside the plan, in a run that is planned as the tight ones are.
    let said = run(&["--memory-budget", "100MB"], 0);
    let process = said.split("the process itself up to ").nth(1).and_then(|text| text.split(" B").next());
    let process: u64 =
        process.map(|text| text.replace(' ', "")).and_then(|text| text.parse().ok()).expect("a number");

    let refused = run(&["--memory-budget", "1kB"], 4);
    let least = refused.split("--memory-budget ").nth(1).and_then(|text| text.split(' ').next());
    let least: u64 = least.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{refused}"));
    let size = folder.read("deep/model.safetensors").len() as u64;
    let size = size + process;
    assert!(least < size, "the test wants a model larger than its step: {least} B, not {size} B");
    for budget in [size, least] {
        let said = run(&["--memory-budget", &budget.to_string()], 0);
        assert!(said.contains("; weights stream from disk: ") && said.contains(" per step"), "{said}");
        assert!(folder.read("e.npy") == wanted, "{budget} B");
    }
    let below = run(&["--memory-budget", &(least - 1).to_string()], 4);
    assert!(below.contains("short by 1 B") && below.contains(&format!("--memory-budget {least}")), "{below}");

    // With `never` the run is refused and the bill suggests streaming; with `always` weights are streamed
    // although they fit.
    let refused = run(&["--memory-budget", &size.to_string(), "--stream-weights", "never"], 4);
    assert!(refused.contains("what fits, cheapest first:  --stream-weights always  saves "), "{refused}");
    let said = run(&["--stream-weights", "always"], 0);
    assert!(said.contains("weights stream from disk"), "{said}");
    assert!(folder.read("e.npy") == wanted);
}

fn plan(folder: &Folder, words: &[&str]) -> Value {
    let model = ["plan", "--model", "facebook/esm2_t36_3B_UR50D", "--precision", "f32", "--format", "json"];
    serde_json::from_str(&folder.run(&[&model[..], words].concat()).assert_code(0).stdout()).expect("JSON")
}

#[test]
fn plans_say_what_streams() {
    let folder = Folder::new("streaming_plans");
    let resident = plan(&folder, &["--budget", "20GB", "--tokens", "4096"]);
    assert_eq!(resident["streamed_bytes_per_step"], 0);
    let always = ["--budget", "20GB", "--tokens", "4096", "--stream-weights", "always"];
    let streamed = plan(&folder, &always);
    assert_eq!(streamed["streamed_bytes_per_step"], resident["ledger"]["params"]);
    assert!(streamed["ledger"]["streamed params"].as_u64() > Some(0), "{streamed}");
    assert_ne!(streamed["digest"], resident["digest"]);

    // The weights do not fit in 2 GB, so they are streamed, with the largest step that fits.
    let tokens = |plan: &Value| plan["bounds"]["tokens"].as_u64();
    let small = plan(&folder, &["--budget", "2GB"]);
    assert!(small["streamed_bytes_per_step"].as_u64() > Some(0) && tokens(&small) > Some(16384), "{small}");
    let smaller = plan(&folder, &["--budget", "500MB"]);
    assert!(tokens(&smaller) > Some(1024) && tokens(&smaller) < tokens(&small), "{smaller}");

    let words = ["plan", "--model", "facebook/esm2_t36_3B_UR50D", "--target", "4090", "--budget", "2GB"];
    folder.run(&words).assert_code(0).matches("plan_3b_streamed");
    folder.run(&[&words[..], &["--stream-weights", "never"]].concat()).assert_code(4).matches("plan_3b_never");
    let dump = folder.run(&[&words[..], &["--dump-after", "offload"]].concat());
    assert!(dump.assert_code(0).stdout().starts_with("graph T <= "), "{}", dump.stdout());
}
