//! Tests of the reports and traces of `plimsoll bench`. Measured times are not checked.

use crate::harness::{Folder, golden};
use serde_json::Value;

fn bench(folder: &Folder, words: &[&str]) -> Value {
    let ran = folder.run(&[&["bench", "--json", "--repeats", "1", "--threads", "2"], words].concat());
    let text = ran.assert_code(0).stdout();
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).expect("JSON")
}

/// Asserts the keys and values that all reports have in common.
fn check(report: &Value, keys: &[&str]) {
    let object = report.as_object().expect("an object");
    let all = [
        "side",
        "dtype",
        "device",
        "threads",
        "replicas",
        "steps",
        "step_tokens",
        "passes",
        "seconds",
        "tokens_per_s",
        "flops",
        "tflops",
        "raw_loop",
        "raw_tflops",
        "utilisation",
        "planned_peak_bytes",
        "resident_bytes",
        "resident_peak_bytes",
        "kernels",
    ];
    let mut wanted: Vec<&str> = all.iter().chain(keys).copied().collect();
    wanted.sort_unstable();
    assert_eq!(object.keys().collect::<Vec<_>>(), wanted);
    for key in ["tokens_per_s", "tflops", "raw_tflops", "utilisation", "planned_peak_bytes", "resident_bytes"] {
        assert!(report[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {report}");
    }
    assert_eq!(report["seconds"].as_array().map(Vec::len), Some(1));
    let shares = report["kernels"].as_array().expect("an array").iter().map(|k| k["share"].as_f64());
    let sum: f64 = shares.map(|share| share.expect("a number")).sum();
    assert!((sum - 1.0).abs() < 1e-9, "{sum}: {report}");
}

#[test]
fn a_model_is_timed() {
    let folder = Folder::new("bench_model");
    let config = golden("esm2/config.json");
    let report =
        bench(&folder, &["--model", &config, "--batch", "3x20", "--tokens", "45", "--precision", "f32"]);
    check(&report, &["model", "batch", "length"]);
    assert_eq!((&report["batch"], &report["length"]), (&3.into(), &20.into()));
    assert_eq!(
        (&report["steps"], &report["step_tokens"], &report["threads"]),
        (&2.into(), &40.into(), &2.into())
    );
    assert_eq!(report["side"], "plimsoll");
    let kernels = report["kernels"].as_array().expect("an array");
    let dense = kernels.iter().find(|k| k["label"] == "encoder.layer.*.output.dense").expect("in the table");
    // Two layers in each of two steps.
    assert_eq!((&dense["op"], &dense["launches"]), (&"linear".into(), &4.into()));

    let words = ["bench", "--model", &config, "--batch", "2x20", "--repeats", "1", "--precision", "f32"];
    let text = folder.run(&words).assert_code(0).stdout();
    for part in ["2 x 20 tokens", "tokens per second", "utilisation", "planned peak", "linear encoder.layer.*"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_trace_has_every_launch_and_copy() {
    let folder = Folder::new("bench_trace");
    let config = golden("esm2/config.json");
    let words = ["--model", &config, "--batch", "3xlognormal", "--tokens", "1100", "--device", "cpu"];
    let report = bench(&folder, &[&words[..], &["--trace", "trace.json"]].concat());
    assert_eq!((&report["batch"], &report["length"]), (&3.into(), &"lognormal".into()));
    let launches: u64 =
        report["kernels"].as_array().expect("kernels").iter().filter_map(|k| k["launches"].as_u64()).sum();
    let text = std::fs::read_to_string(folder.path("trace.json")).expect("written");
    let trace: Value = serde_json::from_str(&text).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let (names, spans): (Vec<&Value>, Vec<&Value>) = events.iter().partition(|event| event["ph"] == "M");
    let tracks: Vec<_> = names.iter().map(|event| event["args"]["name"].as_str().expect("a name")).collect();
    assert_eq!(tracks[1..], ["in", "compute", "out"]);
    assert!(spans.iter().all(|span| span["ph"] == "X" && span["ts"].is_f64() && span["dur"].is_f64()));
    let of = |category: &str| spans.iter().filter(|span| span["cat"] == category).count() as u64;
    // The trace has two passes. Each step copies ids and spans to the device, and means to the host.
    assert_eq!(of("kernel"), 2 * launches);
    assert_eq!(of("copy"), 2 * 3 * report["steps"].as_u64().expect("a number"));
    let dense = spans.iter().find(|span| span["args"]["launch"] == "linear encoder.layer.1.output.dense");
    assert_eq!(dense.map(|span| (&span["name"], &span["args"]["layer"])), Some((&"linear".into(), &1.into())));
}

/// A trace has one process per CPU replica; together they have all launches.
#[test]
fn a_trace_has_every_lane() {
    let folder = Folder::new("bench_trace_lanes");
    let config = golden("esm2/config.json");
    let words =
        ["bench", "--json", "--repeats", "1", "--model", &config, "--batch", "31x100", "--device", "cpu"];
    let ran = folder.run(&[&words[..], &["--threads", "3", "--trace", "trace.json"]].concat());
    let report: Value = serde_json::from_str(&ran.assert_code(0).stdout()).expect("JSON");
    assert_eq!((&report["replicas"], &report["threads"], &report["steps"]), (&3.into(), &3.into(), &3.into()));
    let launches: u64 =
        report["kernels"].as_array().expect("kernels").iter().filter_map(|k| k["launches"].as_u64()).sum();
    let text = std::fs::read_to_string(folder.path("trace.json")).expect("written");
    let trace: Value = serde_json::from_str(&text).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let replicas: Vec<&str> = events
        .iter()
        .filter(|event| event["name"] == "process_name")
        .filter_map(|event| event["args"]["name"].as_str())
        .collect();
    assert!(replicas.len() == 3 && replicas[1].starts_with("cpu (replica 2 of 3, "), "{replicas:?}");
    let kernels = events.iter().filter(|event| event["cat"] == "kernel").count() as u64;
    assert_eq!(kernels, 2 * launches);
}

#[test]
fn a_product_is_timed() {
    let folder = Folder::new("bench_shape");
    for precision in ["f32", "bf16"] {
        let report = bench(&folder, &["--shape", "33x70x50", "--device", "cpu", "--precision", precision]);
        check(&report, &["shape"]);
        assert_eq!((&report["shape"], &report["dtype"]), (&serde_json::json!([33, 70, 50]), &precision.into()));
        // One multiply and one add for each element and k, and one add for the bias.
        assert_eq!(report["flops"].as_f64(), Some(33.0 * 70.0 * (2.0 * 50.0 + 1.0)));
        assert_eq!(report["kernels"].as_array().map(Vec::len), Some(1));
    }
}

#[test]
fn a_bench_has_a_memory_line() {
    let folder = Folder::new("bench_line");
    let config = golden("esm2/config.json");
    folder.run(&["bench", "--model", &config, "--memory-budget", "1kB"]).assert_code(4);
    folder.run(&["bench", "--shape", "1000x1000x1000", "--memory-budget", "1MB"]).assert_code(4);
}

#[test]
fn a_calibration_is_a_target() {
    let folder = Folder::new("bench_calibrate");
    let words = ["bench", "--calibrate", "this machine.toml", "--repeats", "1", "--threads", "2"];
    let said = folder.run(&words).assert_code(0).stdout();
    assert!(said.contains("wrote this machine.toml"), "{said}");
    // The file has the factors of training kernels.
    let file = String::from_utf8(folder.read("this machine.toml")).expect("text");
    let (_, slower) = file.split_once("[slower]").expect("a table of kernels");
    for kernel in [
        "product_f32",
        "linear_weight_grad_f32",
        "adamw_f32",
        "adamw_8bit_f32",
        "adafactor_f32",
        "flash_grad_f32",
    ] {
        let line =
            slower.lines().find_map(|line| line.strip_prefix(kernel)?.strip_prefix(" = ")).expect(kernel);
        assert!((0.05..100.0).contains(&line.parse::<f64>().expect("a factor")), "{kernel} = {line}");
    }
    let words = ["plan", "--model", "esm2_t6_8M_UR50D", "--tokens", "1024", "--budget", "1TB", "--json"];
    let words = [&words[..], &["--precision", "f32"]].concat();
    let plan = |target: &[&str]| -> Value {
        let ran = folder.run(&[&words[..], &["--target"], target].concat());
        serde_json::from_str(&ran.assert_code(0).stdout()).expect("JSON")
    };
    // The target has the number of threads of the calibration.
    let here = plan(&["this machine.toml"]);
    let cpu = plan(&["cpu", "--threads", "2"]);
    assert_eq!(here["target"], "this machine");
    let json: Value = serde_json::from_str(
        &folder
            .run(&["bench", "--calibrate", "again.toml", "--repeats", "1", "--json"])
            .assert_code(0)
            .stdout(),
    )
    .expect("JSON");
    let storage = &json["rates"]["storage"];
    assert!(storage.is_null() || storage.as_f64().is_some_and(|rate| rate > 0.0), "{json}");
    assert_eq!((&here["ledger"], &here["bounds"]), (&cpu["ledger"], &cpu["bounds"]));
}

#[test]
fn bad_requests_are_refused() {
    let folder = Folder::new("bench_bad");
    let config = golden("esm2/config.json");
    let model = ["bench", "--model", &config];
    for batch in [
        "20",
        "0xlognormal",
        "2xnormal",
        "lognormal",
        "0x20",
        "2x",
        "2x20x3",
        "x",
        "2X20",
        "2x 20",
        "1x99999999999999999999",
        "2000000x2",
    ] {
        let said = folder.run(&[&model[..], &["--batch", batch]].concat()).assert_code(1).stderr();
        assert!(said.contains("--batch"), "{said}");
    }
    for shape in ["4", "4x5", "0x4x5", "4x5x6x7", "4x5xsix"] {
        let said = folder.run(&["bench", "--shape", shape]).assert_code(1).stderr();
        assert!(said.contains("--shape"), "{said}");
    }
    let both = ["bench", "--shape", "4x4x4", "--calibrate", "a.toml"];
    let ignored = ["bench", "--shape", "4x4x4", "--tokens", "4"];
    let wrong_suffix = ["bench", "--calibrate", "rates.json"];
    for words in [&["bench"][..], &both, &ignored, &wrong_suffix, &["bench", "--calibrate", "no/such.toml"]] {
        folder.run(words).assert_code(1);
    }
    folder.run(&[&model[..], &["--batch", "2x20", "--tokens", "19"]].concat()).assert_code(1);
    assert!(!folder.path("rates.json").exists());
}

#[test]
fn a_gpu_in_place_is_planned_for_or_refused() {
    let folder = Folder::new("bench_in_place");
    for target in ["device", "cuda:0"] {
        let words = ["plan", "--model", "esm2_t6_8M_UR50D", "--tokens", "1024", "--json", "--target", target];
        let ran = folder.run(&words);
        if ran.code() == 0 {
            let plan: Value = serde_json::from_str(&ran.stdout()).expect("JSON");
            assert!(plan["peak_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{plan}");
            continue;
        }
        println!("skipped: no CUDA device");
        let said = ran.assert_code(1).stderr();
        assert!(said.contains(&format!("--target {target}: ")), "{said}");
    }
}

#[test]
fn a_bad_target_file_is_named() {
    let folder = Folder::new("bench_target");
    folder.write("bad.toml", "name = \"x\"\ncolour = 3\n");
    for (file, says) in [("bad.toml", "colour"), ("nowhere.toml", "No such file")] {
        let said =
            folder.run(&["plan", "--model", "esm2_t6_8M_UR50D", "--target", file]).assert_code(1).stderr();
        assert!(said.contains(file) && said.contains(says), "{said}");
    }
}
