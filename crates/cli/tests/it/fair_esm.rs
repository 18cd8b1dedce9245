//! Tests of fair-esm checkpoints. Invariant: the checkpoints are written here in the published layout, by code
//! that is independent of the readers.

use crate::harness::{Folder, golden};
use crate::torch_files::{Pickler, View, torch_file};
use plimsoll_data::weights::{StoredAs, TensorData, Weights, f16_to_f32, f32_to_f16, write_safetensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;

const CHECKPOINT: &str = "esm2_t2_40_UR50D.pt";

/// Hub name, shape and values of the golden ESM-2's tensors; the values are rounded to f16 if `half`.
fn tensors(half: bool) -> Vec<(String, Vec<u64>, Vec<f32>)> {
    let weights = Weights::open(golden("esm2").as_ref()).expect("weights");
    let used = weights.tensors().filter(|t| t.dtype().is_float() && !t.name().contains("position_embeddings"));
    let read = used.map(|t| {
        let mut values = vec![0.0; t.elements() as usize];
        weights.read_f32(t.name(), 0..t.elements(), &mut values).expect("read");
        if half {
            values.iter_mut().for_each(|x| *x = f16_to_f32(f32_to_f16(*x)));
        }
        (t.name().to_owned(), t.shape().to_vec(), values)
    });
    read.collect()
}

/// Converts the hub's name of a tensor to fair-esm's name.
fn fair_name(hub: &str) -> String {
    let pairs = [
        ("esm.embeddings.word_embeddings", "encoder.sentence_encoder.embed_tokens"),
        ("esm.encoder.emb_layer_norm_after", "encoder.sentence_encoder.emb_layer_norm_after"),
        ("esm.encoder.layer", "encoder.sentence_encoder.layers"),
        ("attention.self.query", "self_attn.q_proj"),
        ("attention.self.key", "self_attn.k_proj"),
        ("attention.self.value", "self_attn.v_proj"),
        ("attention.self.rotary_embeddings", "self_attn.rot_emb"),
        ("attention.output.dense", "self_attn.out_proj"),
        ("attention.LayerNorm", "self_attn_layer_norm"),
        ("intermediate.dense", "fc1"),
        ("output.dense", "fc2"),
        ("LayerNorm", "final_layer_norm"),
    ];
    let name = if hub.starts_with("lm_head.") { format!("encoder.{hub}") } else { hub.to_owned() };
    pairs.iter().fold(name, |name, (hub, fair)| name.replace(hub, fair))
}

/// Bytes of a checkpoint in fair-esm's layout. `layers` is the number of layers in its `cfg`; without it the
/// checkpoint has no `cfg`.
fn checkpoint(half: bool, layers: Option<i64>) -> Vec<u8> {
    let mut tensors = tensors(half);
    let table = tensors.iter().find(|(name, ..)| name.contains("word_embeddings")).expect("a table").clone();
    tensors.push(("lm_head.weight".to_owned(), table.1, table.2));
    let mut pickle = Pickler::new().raw(b"}(");
    if let Some(layers) = layers {
        pickle = pickle.text("cfg").raw(b"}").text("model").global("argparse", "Namespace").raw(b")\x81}(");
        pickle = pickle.text("arch").text("esm2").text("encoder_layers").int(layers);
        pickle = pickle.text("encoder_embed_dim").int(40).text("encoder_attention_heads").int(5);
        pickle = pickle.text("token_dropout").raw(b"\x88ubs");
    }
    pickle = pickle.text("model").global("collections", "OrderedDict").raw(b")R(");
    let class = if half { "HalfStorage" } else { "FloatStorage" };
    let mut storages: Vec<Vec<u8>> = vec![];
    for (number, (name, shape, values)) in tensors.iter().enumerate() {
        let stride: Vec<u64> = (0..shape.len()).map(|i| shape[i + 1..].iter().product()).collect();
        let key = number.to_string();
        let elements = values.len() as i64;
        let view = View { class, key: &key, elements, offset: 0, shape, stride: &stride };
        pickle = pickle.text(&fair_name(name)).tensor(&view);
        storages.push(if half {
            values.iter().flat_map(|&x| f32_to_f16(x).to_le_bytes()).collect()
        } else {
            values.iter().flat_map(|x| x.to_le_bytes()).collect()
        });
    }
    let storages: Vec<&[u8]> = storages.iter().map(Vec::as_slice).collect();
    torch_file(&pickle.raw(b"uu").stop(), &storages)
}

/// Writes the model in the hub's layout to `hub/`.
fn hub_model(folder: &Folder, half: bool) {
    folder.write("hub/config.json", fs::read(golden("esm2/config.json")).expect("golden"));
    let tensors = tensors(half);
    let data: Vec<_> = tensors.iter().map(|(name, shape, data)| TensorData { name, shape, data }).collect();
    write_safetensors(&folder.path("hub/model.safetensors"), &data, &BTreeMap::new(), StoredAs::F32)
        .expect("written");
}

fn embedded(folder: &Folder, model: &str) -> Vec<u8> {
    folder
        .run(&["embed", "--model", model, &golden("esm2/proteins.faa"), "-o", "e.npy", "--force"])
        .assert_code(0);
    folder.read("e.npy")
}

#[test]
fn a_checkpoint_in_half_precision_is_the_hubs_model() {
    let folder = Folder::new("fair_half");
    hub_model(&folder, true);
    folder.write(&format!("m/{CHECKPOINT}"), checkpoint(true, Some(2)));
    folder.write("m/esm2_t2_40_UR50D-contact-regression.pt", "not read");
    let wanted = embedded(&folder, "hub");
    assert_eq!(embedded(&folder, &format!("m/{CHECKPOINT}")), wanted);
    assert_eq!(embedded(&folder, "m"), wanted);
    fs::create_dir(folder.path("c")).expect("a folder");
    let ran = folder.run(&["convert", "m", "-o", "c/model.safetensors", "--json"]);
    let report: Value = serde_json::from_str(&ran.assert_code(0).stdout()).expect("JSON");
    assert_eq!(report["config"], "c/config.json");
    assert_eq!(embedded(&folder, "c"), wanted);
    let converted = Weights::open(&folder.path("c")).expect("weights");
    let mut names: Vec<String> = tensors(true).into_iter().map(|(name, ..)| name).collect();
    names.push("lm_head.decoder.weight".to_owned());
    names.sort();
    assert_eq!(converted.tensors().map(|t| t.name().to_owned()).collect::<Vec<_>>(), names);
}

/// Training from fair-esm's file and from the hub's file gives equal checkpoints, in the hub's layout.
#[test]
fn training_starts_from_a_checkpoint() {
    let folder = Folder::new("fair_trained");
    hub_model(&folder, true);
    folder.write(&format!("m/{CHECKPOINT}"), checkpoint(true, Some(2)));
    let trained = |from: &str, output: &str| {
        let config = format!(
            "model: {{kind: esm2, from: '{from}'}}\n\
             data: {{format: fasta, train: ['{}'], longest: 128, validation_fraction: 0}}\n\
             batch: {{tokens: 256}}\nschedule: {{warmup: 0}}\nrun: {{steps: 2}}\n",
            golden("esm2/proteins.faa")
        );
        folder.write("train.yaml", config);
        folder.run(&["train", "train.yaml", "-q", "-o", output]).assert_code(0);
        let checkpoint = format!("{output}/checkpoints/step-00000002");
        assert!(folder.path(&format!("{checkpoint}/config.json")).is_file(), "{from}");
        folder.read(&format!("{checkpoint}/model.safetensors"))
    };
    let wanted = trained("hub", "a");
    assert!(trained(&format!("m/{CHECKPOINT}"), "b") == wanted);
    assert!(trained("m", "c") == wanted);
    assert!(embedded(&folder, "c/checkpoints/step-00000002") != embedded(&folder, "hub"));
}

#[test]
fn verify_passes_on_a_checkpoint() {
    let folder = Folder::new("fair_verified");
    folder.write(CHECKPOINT, checkpoint(false, Some(2)));
    for file in ["golden.safetensors", "proteins.faa"] {
        folder.write(file, fs::read(golden("esm2/") + file).expect("golden"));
    }
    let ran = folder.run(&["verify", "--model", CHECKPOINT]);
    assert!(ran.assert_code(0).stdout().contains("logits of"), "{}", ran.stdout());
}

#[test]
fn sizes_that_contradict_the_tensors_are_refused() {
    let folder = Folder::new("fair_sizes");
    for (layers, why) in [
        (Some(3), "it should have 3 layers of width 40, but its tensors are of 2 layers of width 40"),
        (None, "it states no sizes (`cfg` or `args`), and no released model has 2 layers of width 40"),
    ] {
        folder.write(CHECKPOINT, checkpoint(true, layers));
        let ran = folder.run(&["embed", "--model", CHECKPOINT, &golden("esm2/proteins.faa"), "-o", "e.npy"]);
        assert!(ran.assert_code(1).stderr().contains(why), "{}", ran.stderr());
    }
    // A file with the name of a released model must have the sizes of that model.
    folder.write("torch/hub/checkpoints/esm2_t6_8M_UR50D.pt", checkpoint(true, None));
    let words = ["embed", "--model", "facebook/esm2_t6_8M_UR50D", &golden("esm2/proteins.faa"), "-o", "e.npy"];
    let mut command = folder.command(&words);
    let output = command.env("TORCH_HOME", folder.path("torch")).output().expect("it runs");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("it should have 6 layers of width 320"), "{stderr}");
}
