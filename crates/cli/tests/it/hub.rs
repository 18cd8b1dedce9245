//! Tests of models from the Hugging Face Hub and of `plimsoll list`. Invariant: the hub is a local server with
//! the golden models.

use crate::harness::{Folder, golden};
use plimsoll_data::weights::{StoredAs, TensorData, Weights, write_safetensors};
use serde_json::{Value, json};
use server::{Reply, Request, Server};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

#[path = "../../../data/tests/it/weights/hub/server.rs"]
mod server;

/// Starts a hub with the golden models `org/esm2` and `org/dnabert_s`.
fn hub() -> Server {
    hub_of(golden("").into())
}

/// Starts a hub with the models of a folder as `org/NAME`.
fn hub_of(models: PathBuf) -> Server {
    Server::start(move |request, _| file(&models, request).unwrap_or_else(|| Reply::status(404)))
}

fn file(models: &Path, request: &Request) -> Option<Reply> {
    let (model, rest) = request.path.strip_prefix("/org/")?.split_once("/resolve/")?;
    let bytes = fs::read(models.join(model).join(rest.split_once('/')?.1)).ok()?;
    let etag: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    Some(Reply::file(request, &bytes).with("X-Linked-ETag", etag).with("X-Repo-Commit", "0123abcd"))
}

fn list(folder: &Folder) -> Vec<Value> {
    let json: Value =
        serde_json::from_str(&folder.run(&["list", "--json"]).assert_code(0).stdout()).expect("JSON");
    json["models"].as_array().expect("models").clone()
}

#[test]
fn what_is_missing_is_fetched_and_nothing_else() {
    let folder = Folder::new("fetched");
    let hub = hub();
    folder.write("p.faa", ">a\nMKVLA\n");
    folder.write("d.fna", ">a\nACGTTGCA\n");
    let paths = |from: usize| {
        let gets = hub.asked().into_iter().skip(from).filter(|r| r.method == "GET");
        gets.map(|r| r.path.rsplit('/').next().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    folder.run_online(&["plan", "--model", "org/esm2", "--tokens", "64"], &hub.address()).assert_code(0);
    assert_eq!(paths(0), ["config.json"]);
    let from = hub.asked().len();
    let embed = |model: &str, input: &str, out: &str| {
        folder.run_online(&["embed", "--model", model, input, "-o", out], &hub.address())
    };
    let ran = embed("org/esm2", "p.faa", "e.npy");
    assert!(ran.assert_code(0).stderr().contains("model.safetensors: 347 420 B"), "{}", ran.stderr());
    // The vocabulary shows whether token ids stand for the residues that they are given for.
    assert_eq!(paths(from), ["vocab.txt", "model.safetensors"]);
    let from = hub.asked().len();
    embed("org/dnabert_s", "d.fna", "f.npy").assert_code(0);
    assert_eq!(paths(from), ["config.json", "tokenizer.json", "pytorch_model.bin"]);
    let from = hub.asked().len();
    embed("org/esm2", "p.faa", "g.npy").assert_code(0);
    assert_eq!((hub.asked().len(), folder.read("g.npy")), (from, folder.read("e.npy")));
    folder.run(&["embed", "--model", &golden("esm2"), "p.faa", "-o", "h.npy"]).assert_code(0);
    assert_eq!(folder.read("h.npy"), folder.read("e.npy"));
    let cached = list(&folder);
    let state = |id: &str| cached.iter().find(|m| m["id"] == id).map(|m| m["cached"].clone());
    assert_eq!(state("org/esm2"), Some(json!("complete")));
    assert_eq!(state("org/dnabert_s"), Some(json!("complete")));
}

/// `model.from` may name a language model on the hub, and config.yaml has the sizes of that model.
#[test]
fn a_language_model_of_the_hub_is_trained() {
    let folder = Folder::new("hub_decoder");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/training/llama");
    for name in ["config.json", "model.safetensors"] {
        folder.write(&format!("models/llama/{name}"), fs::read(fixture.join(name)).expect("fixture"));
    }
    let ids: Vec<u8> = (0..4000u16).flat_map(|i| (i % 199 * (i % 199) % 39).to_le_bytes()).collect();
    folder.write("other.bin", &ids[..400]);
    folder.write("ids.bin", ids);
    let run = "model: {from: org/llama}\ndata: {train: [ids.bin], validation: [other.bin], longest: 16, workers: 1}\n\
               batch: {tokens: 64, micro_tokens: 64}\nrun: {steps: 2, threads: 1, evaluate_every: 2, output: out}\n";
    folder.write("run.yaml", run);
    let hub = hub_of(folder.path("models"));
    let gets = |from: usize| {
        let gets = hub.asked().into_iter().skip(from).filter(|r| r.method == "GET");
        gets.map(|r| r.path.rsplit('/').next().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    folder.run_online(&["train", "run.yaml", "--print-config"], &hub.address()).assert_code(0);
    assert_eq!(gets(0), ["config.json"]);
    let from = hub.asked().len();
    folder.run_online(&["train", "run.yaml"], &hub.address()).assert_code(0);
    assert!(gets(from).contains(&"model.safetensors".to_owned()), "{:?}", gets(from));
    let ran = String::from_utf8(folder.read("out/config.yaml")).expect("text");
    for line in ["kind: dense_lm", "from: org/llama", "hidden: 16", "kv_heads: 2", "intermediate: 24"] {
        assert!(ran.contains(line), "{line}: {ran}");
    }
    let refused = folder.run_online(&["train", "run.yaml", "--set", "model.hidden=64"], &hub.address());
    let wanted = "--set: `model.hidden` is 64, and 16 in org/llama, the model of model.from";
    assert!(refused.assert_code(1).stderr().contains(wanted), "{}", refused.stderr());
}

/// Writes the golden ESM-2 as two safetensors shards with an index.
fn sharded(folder: &Folder, model: &str) {
    folder.write(&format!("{model}/config.json"), fs::read(golden("esm2/config.json")).expect("golden"));
    let weights = Weights::open(golden("esm2/model.safetensors").as_ref()).expect("weights");
    let mut map = BTreeMap::new();
    let mut shards = [vec![], vec![]];
    for (i, tensor) in weights.tensors().filter(|t| t.dtype().is_float()).enumerate() {
        let mut values = vec![0.0; tensor.elements() as usize];
        weights.read_f32(tensor.name(), 0..tensor.elements(), &mut values).expect("read");
        map.insert(tensor.name(), format!("model-{}-of-2.safetensors", i % 2));
        shards[i % 2].push((tensor.name(), tensor.shape(), values));
    }
    for (i, shard) in shards.iter().enumerate() {
        let data: Vec<_> = shard.iter().map(|(name, shape, data)| TensorData { name, shape, data }).collect();
        let path = folder.path(&format!("{model}/model-{i}-of-2.safetensors"));
        write_safetensors(&path, &data, &BTreeMap::new(), StoredAs::F32).expect("written");
    }
    let index = json!({"metadata": {}, "weight_map": map}).to_string();
    folder.write(&format!("{model}/model.safetensors.index.json"), index);
}

#[test]
fn shards_are_fetched_and_those_that_are_missing_later() {
    let folder = Folder::new("hub_shards");
    sharded(&folder, "models/sharded");
    folder.write("p.faa", ">a\nMKVLA\n");
    let hub = hub_of(folder.path("models"));
    let embed = |out: &str| {
        let words = ["embed", "--model", "org/sharded", "p.faa", "-o", out];
        folder.run_online(&words, &hub.address()).assert_code(0);
    };
    embed("a.npy");
    let snapshot = "hf/hub/models--org--sharded/snapshots/0123abcd";
    fs::remove_file(folder.path(&format!("{snapshot}/model-1-of-2.safetensors"))).expect("removed");
    let state = list(&folder).pop().expect("a model");
    assert_eq!(
        (&state["cached"], &state["missing"]),
        (&json!("incomplete"), &json!(["model-1-of-2.safetensors"]))
    );
    embed("b.npy");
    folder.run(&["embed", "--model", &golden("esm2"), "p.faa", "-o", "c.npy"]).assert_code(0);
    assert_eq!(folder.read("a.npy"), folder.read("c.npy"));
    assert_eq!(folder.read("b.npy"), folder.read("c.npy"));
}

#[test]
fn a_model_that_cannot_be_run_is_not_fetched() {
    let folder = Folder::new("hub_family");
    folder.write("models/other/config.json", "{\"model_type\": \"gpt2\"}");
    folder.write("models/other/model.safetensors", "large");
    folder.write("p.faa", ">a\nMKVLA\n");
    let hub = hub_of(folder.path("models"));
    let ran = folder.run_online(&["embed", "--model", "org/other", "p.faa", "-o", "e.npy"], &hub.address());
    assert!(ran.assert_code(1).stderr().contains("model_type `gpt2` is not known"), "{}", ran.stderr());
    assert!(hub.asked().iter().all(|r| r.path.ends_with("config.json")));
}

/// A language model of the hub is read with its own tokenizer, in every command; a file of another alphabet is found there as
/// in a folder; and a model that no run wrote is evaluated by its name.
#[test]
fn decoders_of_the_hub_need_their_tokenizer() {
    let folder = Folder::new("hub_tokenizer");
    for (model, files) in [
        ("bare", &["config.json", "model.safetensors"][..]),
        ("whole", &["config.json", "model.safetensors", "tokenizer.json"]),
    ] {
        for file in files {
            let bytes = fs::read(golden(&format!("llama3/{file}"))).expect("golden");
            folder.write(&format!("models/{model}/{file}"), bytes);
        }
    }
    for file in ["config.json", "model.safetensors"] {
        folder.write(
            &format!("models/alphabet/{file}"),
            fs::read(golden(&format!("esm2/{file}"))).expect("golden"),
        );
    }
    let vocabulary = fs::read_to_string(golden("esm2/vocab.txt")).expect("golden");
    folder.write("models/alphabet/vocab.txt", vocabulary.replace("L\nA\n", "A\nL\n"));
    folder.write("t.txt", "The ship's load is 12345 tonnes, and the line shows it.\n".repeat(40));
    folder.write("p.faa", ">a\nMKVLA\n");
    let run = |model: &str| {
        format!(
            "model: {{from: {model}}}\ndata: {{train: [t.txt], longest: 32, validation_fraction: 0}}\n\
                                      batch: {{tokens: 64}}\nrun: {{steps: 1, threads: 1, output: {}}}\n",
            model.replace('/', "_")
        )
    };
    folder.write("bare.yaml", run("org/bare"));
    folder.write("whole.yaml", run("org/whole"));
    let hub = hub_of(folder.path("models"));
    let none = "org/bare has no tokenizer.json; a language model is read with its own tokenizer only";
    for (words, code, said) in [
        (&["embed", "--model", "org/bare", "t.txt", "-o", "a.npy"][..], 1, none),
        (&["train", "bare.yaml"], 1, none),
        (&["evaluate", "org/bare", "t.txt"], 1, none),
        (&["verify", "--model", "org/bare"], 1, none),
        (
            &["embed", "--model", "org/alphabet", "p.faa", "-o", "b.npy"],
            1,
            "vocab.txt, line 5: expected `L`, found `A`",
        ),
        (&["embed", "--model", "org/whole", "t.txt", "-o", "c.npy"], 0, "tokenizer.json"),
        (&["train", "whole.yaml"], 0, ""),
        (&["evaluate", "org/whole", "t.txt", "--set", "data.longest=32"], 0, "perplexity"),
        (
            &["evaluate", "org/whole"],
            1,
            "no run wrote the model org/whole, so that it has no data of its own; give DATA",
        ),
    ] {
        let ran = folder.run_online(words, &hub.address());
        let ran = ran.assert_code(code);
        let text = format!("{}{}", ran.stdout(), ran.stderr());
        assert!(text.contains(said), "{words:?}: {text}");
    }
    // doctor and list know what embed knows.
    let list = list(&folder);
    let state = |id: &str| list.iter().find(|m| m["id"] == id).map(|m| m["cached"].clone());
    assert_eq!((state("org/whole"), state("org/bare")), (Some(json!("complete")), Some(json!("incomplete"))));
    let doctor = folder.run(&["doctor"]).assert_code(0).stdout();
    assert!(doctor.contains("org/whole: decoder\n"), "{doctor}");
}

#[test]
fn a_model_that_the_hub_has_not() {
    let folder = Folder::new("hub_404");
    let hub = hub();
    folder.write("p.faa", ">a\nMKVLA\n");
    let ran = folder.run_online(&["embed", "--model", "org/other", "p.faa", "-o", "e.npy"], &hub.address());
    let said = "model `org/other`, config.json: the hub answered with status 404: there is no such model or file; \
            check the id";
    assert!(ran.assert_code(1).stderr().contains(said), "{}", ran.stderr());
}

#[test]
fn the_list_has_all_known_models() {
    let folder = Folder::new("list");
    folder.run(&["list"]).assert_code(0).matches("list");
    let models = list(&folder);
    let ids: Vec<&str> = models.iter().filter_map(|m| m["id"].as_str()).collect();
    assert_eq!(ids, plimsoll_models::KNOWN.iter().map(|(id, _)| *id).collect::<Vec<_>>());
    assert_eq!(models[0]["parameters"], 7_512_353);
    assert!(models.iter().all(|m| m["torch_checkpoint"].is_null()), "{models:?}");
    for file in
        ["esm2_t12_35M_UR50D.pt", "esm2_t12_35M_UR50D-contact-regression.pt", "esm1v_t33_650M_UR90S_1.pt"]
    {
        folder.write(&format!("torch/hub/checkpoints/{file}"), "12345");
    }
    let text = folder.run(&["list"]).assert_code(0).stdout();
    let row = text.lines().find(|line| line.contains("esm2_t12_35M_UR50D")).expect("a row");
    assert!(row.ends_with("  torch hub, 5 B") && text.matches("torch hub, ").count() == 1, "{text}");
    assert!(
        text.contains(&format!("the torch hub cache is {}", folder.path("torch/hub/checkpoints").display()))
    );
    let models = list(&folder);
    assert_eq!(models[1]["torch_checkpoint_bytes"], 5, "{models:?}");
    let model = "hf/hub/models--org--half";
    folder.write(&format!("{model}/refs/main"), "0123abcd");
    let config = fs::read(golden("dnabert_s/config.json")).expect("golden");
    folder.write(&format!("{model}/snapshots/0123abcd/config.json"), config);
    let half = list(&folder).pop().expect("a model");
    assert_eq!((&half["id"], &half["family"]), (&json!("org/half"), &json!("DNABERT-S")));
    assert_eq!(half["cached"], "incomplete");
    assert_eq!(half["missing"], json!(["tokenizer.json", "model.safetensors"]));
}
