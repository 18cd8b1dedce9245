//! Tests of every weight format against values that were read from the files with other tools.

use std::fs;

use plimsoll_data::weights::{
    FileDType, ObjectKind, StoredAs, TensorData, Weights, read_pt_object, write_safetensors,
};

use super::build::{Pickler, STORED, View, ZipFile, counting, one_tensor, torch_file};
use super::{all, file, folder, golden, message, refusal};

#[test]
fn esm2_golden_safetensors() {
    let weights = Weights::open(&golden("esm2")).expect("the golden opens");
    assert_eq!(weights.tensors().count(), 44);
    assert_eq!(weights.metadata()["format"], "pt");
    let bits: Vec<u32> = all(&weights, "lm_head.bias")[..3].iter().map(|value| value.to_bits()).collect();
    assert_eq!(bits, [-0.083_929_5f32, 0.073_126_4, 0.020_873_17].map(f32::to_bits));
    let name = "esm.embeddings.word_embeddings.weight";
    let tensor = weights.expect(name, &[33, 40]).expect("the shape is right");
    assert_eq!(
        (tensor.dtype(), tensor.elements(), tensor.bytes(), tensor.file()),
        (FileDType::F32, 1320, 5280, 0)
    );
    let mut part = [0.0; 2];
    weights.read_f32(name, 100..102, &mut part).expect("a range reads");
    assert_eq!(part, [-0.072_428_37, 0.183_497_74]);
    let mut ids = [0; 4];
    weights.read_i64("esm.embeddings.position_ids", 5..9, &mut ids).expect("integers read");
    assert_eq!(ids, [5, 6, 7, 8]);
    let expected = "6ccfce4f9a72c66cfb13f1a2de64ed3553bd9866fb24476e526bf47b3f409cd1";
    assert_eq!(weights.sha256().expect("it hashes"), [("model.safetensors".to_owned(), expected.to_owned())]);
    assert_eq!(weights.files(), [golden("esm2/model.safetensors")]);
}

/// A range outside of the tensor is an error before a buffer of its size is allocated.
#[test]
fn a_range_is_checked_before_memory_is_taken() {
    let weights = Weights::open(&golden("esm2")).expect("the golden opens");
    for range in [0..1 << 60, 0..41, u64::MAX - 1..u64::MAX] {
        let mut bytes = vec![];
        let error =
            weights.read_bytes("lm_head.dense.bias", range, &mut bytes).expect_err("outside").to_string();
        assert!(
            error.contains("model.safetensors: elements ") && error.contains("lm_head.dense.bias"),
            "{error}"
        );
        assert_eq!(bytes.capacity(), 0);
    }
    #[expect(clippy::reversed_empty_ranges, reason = "the range under test")]
    let error = weights.read_bytes("lm_head.dense.bias", 3..1, &mut vec![]).expect_err("reversed");
    assert!(error.to_string().contains("elements 3..1"), "{error}");
}

/// A header that claims more bytes than the file has is refused by name, whatever it claims.
#[test]
fn sizes_of_a_header_are_checked_against_the_file() {
    for (elements, end) in [(1u64 << 60, 1u64 << 62), (1 << 62, u64::MAX), (1 << 61, 1 << 63)] {
        let header =
            format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{elements}],\"data_offsets\":[0,{end}]}}}}");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        let path = file("claims", "claims.safetensors", &bytes);
        let error = Weights::open(&path).expect_err("the file is short").to_string();
        assert!(error.contains("claims.safetensors"), "{error}");
    }
}

#[test]
fn every_golden_tensor_agrees_with_the_safetensors_crate() {
    let path = golden("esm2/model.safetensors");
    let bytes = fs::read(&path).expect("the golden is there");
    let oracle = safetensors::SafeTensors::deserialize(&bytes).expect("the golden is sound");
    let weights = Weights::open(&path).expect("the golden opens");
    for (name, view) in oracle.tensors() {
        if view.dtype() == safetensors::Dtype::F32 {
            let ours: Vec<u8> = all(&weights, &name).iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(ours, view.data(), "{name}");
        }
    }
}

#[test]
fn compiled_in_bytes_read_like_a_file() {
    static BYTES: &[u8] =
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/goldens/esm2/model.safetensors"));
    let memory = Weights::from_bytes("built-in", BYTES);
    let disk = Weights::open(&golden("esm2"));
    let memory = memory.expect("bytes open");
    let disk = disk.expect("the golden opens");
    assert_eq!(all(&memory, "lm_head.dense.weight"), all(&disk, "lm_head.dense.weight"));
    assert!(memory.files().is_empty());
    let ours = memory.sha256().expect("it hashes");
    let theirs = disk.sha256().expect("it hashes");
    assert_eq!((ours[0].0.as_str(), &ours[0].1), ("built-in", &theirs[0].1));
}

#[test]
fn dnabert_s_golden_torch_zip() {
    let weights = Weights::open(&golden("dnabert_s")).expect("the golden opens");
    assert_eq!(weights.tensors().count(), 28);
    let words = all(&weights, "embeddings.word_embeddings.weight");
    assert_eq!(words[..3], [0.087_560_706, -0.049_711_51, -0.061_417_68]);
    assert_eq!(words[98301..], [-0.115_681_484, 0.042_008_497, -0.078_849_11]);
    assert_eq!(all(&weights, "embeddings.token_type_embeddings.weight")[..2], [0.093_651_01, -0.068_226_494]);
    let expected = "f4f73f6338f1629ce11c5316f2f3c53ebbba84785f65b0f94421eccbc878bf41";
    assert_eq!(weights.sha256().expect("it hashes"), [("pytorch_model.bin".to_owned(), expected.to_owned())]);
}

#[test]
fn whole_module_head() {
    let weights = Weights::open(&golden("head.pth")).expect("the golden opens");
    let found: Vec<(&str, &[u64])> = weights.tensors().map(|tensor| (tensor.name(), tensor.shape())).collect();
    let expected: [(&str, &[u64]); 9] = [
        ("bn1.bias", &[32]),
        ("bn1.num_batches_tracked", &[]),
        ("bn1.running_mean", &[32]),
        ("bn1.running_var", &[32]),
        ("bn1.weight", &[32]),
        ("hidden_layer.bias", &[32]),
        ("hidden_layer.weight", &[32, 136]),
        ("output_layer.bias", &[2]),
        ("output_layer.weight", &[2, 32]),
    ];
    assert_eq!(found, expected);
    assert_eq!(all(&weights, "hidden_layer.weight")[..2], [-0.038_909_62, 0.018_181_15]);
    assert_eq!(all(&weights, "bn1.running_mean")[..2], [0.320_787_25, -0.312_433_8]);
    assert_eq!(all(&weights, "bn1.running_var")[..2], [0.009_161_466, 0.007_764_246_3]);
    assert_eq!(all(&weights, "output_layer.bias"), [1.258_514_5, 0.954_161_8]);
    let mut batches = [0];
    weights.read_i64("bn1.num_batches_tracked", 0..1, &mut batches).expect("a scalar reads");
    assert_eq!(batches, [7]);
}

#[test]
fn real_result_files_read_as_objects() {
    let real = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/real/virnucpro");
    if !real.is_dir() {
        eprintln!("skipped: {} is not there", real.display());
        return;
    }
    let open = |name: &str| read_pt_object(&real.join(name)).expect("a real file opens");
    let dna = open("test_with_orfs_nucleotide/output_1_DNABERT_S.pt");
    let protein = open("test_with_orfs_protein/output_1_ESM.pt");
    let merged = open("test_with_orfs_merged/output_1_merged.pt");
    let rows = dna.root().get("data").expect("it has data");
    let first = rows.items().next().expect("it has a row");
    assert_eq!(first.get("label").and_then(|label| label.as_str()), Some("synthetic_seq_1_chunk_1R1"));
    let mean =
        first.get("mean_representation").expect("it has a mean").items().filter_map(|value| value.as_f64());
    let mean: Vec<f64> = mean.collect();
    assert_eq!(mean.len(), 768);
    assert!((mean[0] + 0.070582).abs() < 1e-6 && (mean.iter().sum::<f64>() - 2.22611).abs() < 1e-5);
    let ids: Vec<&str> =
        merged.root().get("ids").expect("it has ids").items().filter_map(|id| id.as_str()).collect();
    let data = merged.root().get("data").expect("it has data");
    assert_eq!(merged.tensor(data).expect("it is a tensor").shape(), [4, 3328]);
    let vectors = merged.read_f32(data).expect("it reads");
    assert_eq!(vectors[..768], mean.iter().map(|&value| value as f32).collect::<Vec<_>>());
    let proteins = protein.root().get("proteins").expect("it has ids").items();
    let place = proteins.map(|id| id.as_str()).position(|id| id == Some(ids[0])).expect("the id is there");
    let tensor = protein.root().get("data").expect("it has data").items().nth(place).expect("its row is there");
    assert_eq!(tensor.kind(), ObjectKind::Tensor);
    assert_eq!(vectors[768..3328], protein.read_f32(tensor).expect("it reads"));
}

#[test]
fn shards_join_and_are_kept_inside_their_folder() {
    let folder = folder("shards");
    let write = |name: &str, tensor: &str, data: &[f32]| {
        let tensors = [
            TensorData { name: tensor, shape: &[data.len() as u64], data },
            TensorData { name: "elsewhere", shape: &[1], data: &data[..1] },
        ];
        write_safetensors(&folder.join(name), &tensors, &Default::default(), StoredAs::F32).expect("it writes");
    };
    write("model-1.safetensors", "a", &[1.0, 2.0]);
    write("model-2.safetensors", "b", &[3.0]);
    let index = folder.join("model.safetensors.index.json");
    let set = |map: &str| {
        fs::write(&index, format!("{{\"metadata\":{{}},\"weight_map\":{{{map}}}}}")).expect("it writes")
    };
    set(r#""a":"model-1.safetensors","b":"model-2.safetensors","elsewhere":"model-1.safetensors""#);
    for path in [&folder, &index] {
        let weights = Weights::open(path).expect("shards open");
        assert_eq!((all(&weights, "a"), all(&weights, "b")), (vec![1.0, 2.0], vec![3.0]));
        assert_eq!(all(&weights, "elsewhere"), [1.0], "the index decides which shard");
        let files: Vec<_> = weights.files().iter().filter_map(|path| path.file_name()?.to_str()).collect();
        assert_eq!(files, ["model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"]);
        assert_eq!(weights.sha256().expect("it hashes").len(), 3);
    }
    let check = |map: &str, expected: &str| {
        set(map);
        assert_eq!(refusal(&index), expected);
    };
    let outside = |shard: &str| {
        format!(
            "refused: `shards/model.safetensors.index.json` names the shard `{shard}`, which is outside its folder"
        )
    };
    check(r#""a":"../x""#, &outside("../x"));
    check(r#""a":"x\u001b[2J\n/..""#, &outside("x\\u{1b}[2J\\n/.."));
    check(r#""a":"/etc/passwd""#, &outside("/etc/passwd"));
    check(r#""a":"""#, &outside(""));
    check(
        r#""a":"model-3.safetensors""#,
        "`shards/model.safetensors.index.json` names the shard `shards/model-3.safetensors`, which was not \
            found; download the whole model",
    );
    check(
        r#""a":"model-2.safetensors""#,
        "no tensor `a` in `shards/model-2.safetensors`; the weights may belong to another model",
    );
}

#[test]
fn torch_shards_join() {
    let folder = folder("torch_shards");
    let stride = [2, 1];
    for (number, rows) in [1u64, 2].into_iter().enumerate() {
        let name = format!("w{number}");
        let shape = [rows, 2];
        let view = View::rows("0", &shape, &stride);
        let pickle = Pickler::new().raw(b"}").text(&name).tensor(&view).raw(b"s").stop();
        let bytes = torch_file(&pickle, &[&counting(2 * rows as usize)]);
        fs::write(folder.join(format!("pytorch_model-{number}.bin")), bytes).expect("it writes");
    }
    let map = r#"{"weight_map":{"w0":"pytorch_model-0.bin","w1":"pytorch_model-1.bin"}}"#;
    fs::write(folder.join("pytorch_model.bin.index.json"), map).expect("it writes");
    let weights = Weights::open(&folder).expect("shards open");
    assert_eq!(all(&weights, "w1"), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(weights.tensor("w1").expect("it is there").file(), 1);
}

#[test]
fn views_of_storages_read_in_c_order() {
    let check = |shape: &[u64; 2], stride: &[u64; 2], offset: i64, elements: i64| {
        let view = View { offset, elements, ..View::rows("0", shape, stride) };
        let path = file("views", "view.pt", &one_tensor(&view, &counting(elements as usize)));
        let weights = Weights::open(&path).expect("a view opens");
        let at = |i: u64, j: u64| (offset as u64 + i * stride[0] + j * stride[1]) as f32;
        let expected: Vec<f32> = (0..shape[0] * shape[1]).map(|e| at(e / shape[1], e % shape[1])).collect();
        for start in 0..=expected.len() {
            for end in start..=expected.len() {
                let mut out = vec![f32::NAN; end - start];
                weights.read_f32("w", start as u64..end as u64, &mut out).expect("a range reads");
                assert_eq!(out, expected[start..end], "{shape:?} {stride:?} {start}..{end}");
                let mut bytes = vec![9];
                weights.read_bytes("w", start as u64..end as u64, &mut bytes).expect("a range reads");
                let values = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
                assert!(
                    values.eq(out) && bytes.len() == 4 * (end - start),
                    "{shape:?} {stride:?} {start}..{end}"
                );
            }
        }
    };
    check(&[3, 5], &[5, 1], 0, 15);
    check(&[3, 5], &[5, 1], 4, 20);
    check(&[3, 5], &[1, 3], 0, 15);
    check(&[4, 3], &[1, 6], 1, 20);
    check(&[4, 3], &[7, 1], 2, 30);
}

#[test]
fn long_reads_pass_through_the_small_buffer() {
    // 70 000 elements fill the 32 kB read buffer several times. The view is transposed, and its 7 000 consecutive
    // elements of a column exceed the 1024 values that are scattered at a time.
    let rows = 7_000u64;
    let columns = 10u64;
    let shape = [rows, columns];
    let stride = [1, rows];
    let view = View::rows("0", &shape, &stride);
    let path = file("long", "view.pt", &one_tensor(&view, &counting(70_000)));
    let weights = Weights::open(&path).expect("a view opens");
    let values = all(&weights, "w");
    let expected = (0..70_000u64).map(|e| (e / columns + (e % columns) * rows) as f32);
    assert!(values.iter().copied().eq(expected));
}

#[test]
fn half_types_and_tied_tensors() {
    let ones: Vec<u8> =
        [0x3c00u16, 0xc000, 0x0001, 0x7c00].iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let brain: Vec<u8> =
        [0x3f80u16, 0xc000, 0x0001, 0x7f80].iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let half = View { class: "HalfStorage", ..View::rows("0", &[2, 2], &[2, 1]) };
    let bfloat = View { class: "BFloat16Storage", key: "1", ..half };
    let tied = View { offset: 1, shape: &[2], stride: &[1], ..half };
    let pickle = Pickler::new().raw(b"}(").text("half").tensor(&half).text("brain").tensor(&bfloat);
    let pickle = pickle.text("tied").tensor(&tied).raw(b"u").stop();
    let weights =
        Weights::open(&file("half", "w.pt", &torch_file(&pickle, &[&ones, &brain]))).expect("it opens");
    assert_eq!(all(&weights, "half"), [1.0, -2.0, 2f32.powi(-24), f32::INFINITY]);
    assert_eq!(all(&weights, "brain"), [1.0, -2.0, f32::from_bits(1 << 16), f32::INFINITY]);
    assert_eq!(all(&weights, "tied"), [-2.0, 2f32.powi(-24)]);
    let error = weights.read_i64("half", 0..1, &mut [0]).expect_err("floats are no integers");
    assert_eq!(message(&error), "tensor `half` in `half/w.pt` holds F16 and cannot be read as i64");
}

#[test]
fn fair_esm_files_unwrap() {
    let stride = [2, 1];
    let view = View::rows("0", &[2, 2], &stride);
    let pickle = Pickler::new().raw(b"}(").text("args").global("argparse", "Namespace").raw(b")\x81}");
    let pickle = pickle.text("arch").text("roberta_large").raw(b"sb").text("model");
    let pickle = pickle.global("collections", "OrderedDict").raw(b")R(").text("encoder.embed_tokens.weight");
    let pickle = pickle.tensor(&view).raw(b"u}").text("_metadata").raw(b"Nsbu").stop();
    let weights =
        Weights::open(&file("fair", "esm.pt", &torch_file(&pickle, &[&counting(4)]))).expect("it opens");
    assert_eq!(all(&weights, "encoder.embed_tokens.weight"), [0.0, 1.0, 2.0, 3.0]);
}

#[test]
fn zip64_directories_are_read() {
    let pickle = Pickler::new().raw(b"}").text("w").tensor(&View::rows("0", &[1, 3], &[3, 1])).raw(b"s").stop();
    let entries: [(&str, &[u8]); 2] = [("a/data.pkl", &pickle), ("a/data/0", &counting(3))];
    let zip = ZipFile { wide: true, ..STORED };
    let weights = Weights::open(&file("zip64", "w.pt", &zip.of(&entries))).expect("zip64 opens");
    assert_eq!(all(&weights, "w"), [0.0, 1.0, 2.0]);
}

#[test]
fn threads_read_the_same_bits() {
    let weights = Weights::open(&golden("dnabert_s")).expect("the golden opens");
    let expected = all(&weights, "embeddings.word_embeddings.weight");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(all(&weights, "embeddings.word_embeddings.weight"), expected));
        }
    });
}

#[test]
fn wrong_names_shapes_and_ranges_are_explained() {
    let weights = Weights::open(&golden("esm2")).expect("the golden opens");
    let text = |error| message(&error).replace(golden("").to_str().expect("a path"), "");
    let error = weights.tensor("embeddings.word_embeddings.weight").expect_err("it has a prefix");
    assert_eq!(
        text(error),
        "no tensor `embeddings.word_embeddings.weight` in `esm2`; it contains `esm.embeddings.word_embeddings.weight`"
    );
    let error = weights.expect("lm_head.bias", &[20]).expect_err("another shape");
    assert_eq!(
        text(error),
        "tensor `lm_head.bias` in `esm2` has shape [33], the model needs [20]; check that the weights belong to \
            this config.json"
    );
    let error = weights.read_f32("lm_head.bias", 30..34, &mut [0.0; 4]).expect_err("past the end");
    assert_eq!(
        text(error),
        "esm2/model.safetensors: elements 30..34 of tensor `lm_head.bias` (33 elements) asked for into a buffer of 4"
    );
    weights.read_f32("lm_head.bias", 0..2, &mut [0.0; 3]).expect_err("another length");
    weights.read_f32("lm_head.bias", 33..33, &mut []).expect("nothing reads");
    let empty = folder("empty_folder");
    assert_eq!(
        refusal(&empty),
        "no weights in `empty_folder`: looked for model.safetensors, model.safetensors.index.json, \
         pytorch_model.bin, pytorch_model.bin.index.json"
    );
}
