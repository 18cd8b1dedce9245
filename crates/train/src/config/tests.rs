//! Tests of reading, rejecting and resolving configurations. Invariant: messages are compared in full.

use super::schema::{Leaf, leaves, properties, schema};
use super::*;
use std::fmt::Write as _;

fn parse(text: &str, flags: &[&str]) -> Result<TrainConfig, String> {
    let flags: Vec<String> = flags.iter().map(|f| (*f).to_owned()).collect();
    TrainConfig::parse(text, "run.yaml", &flags).map_err(|e| e.to_string())
}

const HEAD: [&str; 3] = ["model.kind=head", "data.proteins=[b]", "data.labels=c"];
const MINIMAL: &str = "data: {train: [a.txt]}\nrun: {steps: 10}\n";

fn good(text: &str, flags: &[&str]) -> TrainConfig {
    parse(&format!("{MINIMAL}{text}"), flags).unwrap_or_else(|e| panic!("{text} {flags:?}: {e}"))
}

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name).display().to_string()
}

/// Keys that the initial model determines are taken from it, and a key that states another value is rejected by
/// name.
#[test]
fn the_initial_model_fixes_the_architecture() {
    let llama = fixture("training/llama");
    let c = good(&format!("model: {{from: {llama}}}\n"), &[]);
    let m = &c.model;
    assert_eq!((m.kind, m.hidden, m.layers, m.heads, m.kv_heads), (ModelKind::DenseLm, 16, 2, 4, Some(2)));
    assert_eq!((m.intermediate, m.vocabulary, m.activation), (24, Some(40), ActivationChoice::Swiglu));
    assert_eq!(
        (m.norm, m.norm_eps, m.bias, m.attention.mask),
        (NormChoice::RmsNorm, 1e-5, false, MaskKind::Causal)
    );
    // The resolved configuration of a run can be read again: a key that states the same value is no contradiction.
    assert_eq!(parse(&c.to_yaml().expect("YAML"), &[]).expect("read back"), c);
    good(&format!("model: {{from: {llama}, hidden: 16, vocabulary: null}}\n"), &["model.kind=dense_lm"]);
    for (key, value, own) in [
        ("kind", "moe_lm", "dense_lm"),
        ("hidden", "64", "16"),
        ("layers", "7", "2"),
        ("activation", "gelu", "swiglu"),
        ("attention.mask", "window", "causal"),
        ("norm_eps", "1e-6", "1e-5"),
        ("vocabulary", "256", "40"),
    ] {
        let flags = [format!("model.from={llama}"), format!("model.{key}={value}")];
        let error = parse(MINIMAL, &flags.each_ref().map(String::as_str)).expect_err(key);
        assert!(
            error.starts_with(&format!("overrides: `model.{key}` is {value}, and {own} in {llama}, ")),
            "{error}"
        );
        assert!(error.ends_with("remove the key, or start from other weights"), "{error}");
    }
    let text = format!("{MINIMAL}model:\n  from: {llama}\n  experts: {{count: 4}}\n  hidden: 64\n");
    let error = parse(&text, &[]).expect_err("experts");
    let lines: Vec<&str> = error.lines().collect();
    assert!(lines[0].starts_with("run.yaml, line 6: `model.hidden` is 64, and 16 in "), "{error}");
    assert!(lines[1].starts_with("run.yaml, line 5: `model.experts.count` is 4, and "), "{error}");
    assert!(lines[1].ends_with("is a dense_lm without such a setting; remove the key"), "{error}");

    let esm = format!("model.from={}", fixture("goldens/esm2"));
    let c = good("", &[&esm]);
    assert_eq!((c.model.kind, c.model.hidden, c.model.layers, c.model.heads), (ModelKind::Esm2, 40, 2, 5));
    assert_eq!((c.optimizer.betas, c.model.attention.mask), ([0.9, 0.98], MaskKind::Full));
    let error = parse(MINIMAL, &[&esm, "model.hidden=64"]).expect_err("another width");
    assert!(error.starts_with("overrides: `model.hidden` is 64, and 40 in "), "{error}");
    let error = parse(MINIMAL, &[&esm, "model.kind=dnabert_s"]).expect_err("another kind");
    assert!(error.starts_with("overrides: `model.kind` is dnabert_s, and esm2 in "), "{error}");

    let head = format!("model.from={}", fixture("goldens/head.pth"));
    let c = good("", &[&HEAD[..], &[&head]].concat());
    let hidden = c.model.hidden;
    let classes = c.model.classes;
    assert_eq!(classes, Some(2));
    let other = format!("model.hidden={}", hidden + 1);
    let error = parse(MINIMAL, &[&HEAD[..], &[&head, &other]].concat()).expect_err("another width");
    assert!(
        error.starts_with(&format!("overrides: `model.hidden` is {}, and {hidden} in ", hidden + 1)),
        "{error}"
    );
    let error = parse(MINIMAL, &[&HEAD[..], &[&head, "model.classes=3"]].concat()).expect_err("other classes");
    assert!(error.starts_with("overrides: `model.classes` is 3, and 2 in "), "{error}");
}

/// The length of a fractional warm-up follows the length of the run.
#[test]
fn a_warm_up_is_a_share_or_steps() {
    for (flags, wanted) in [
        (&["schedule.warmup=0.1", "run.steps=200"][..], 20),
        (&["schedule.warmup=0.1", "run.steps=6"], 1),
        (&["schedule.warmup=0.1", "run.steps=4"], 0),
        (&["schedule.warmup=0.5", "schedule.steps=50"], 25),
        (&["schedule.warmup=3"], 3),
    ] {
        assert_eq!(good("", flags).warmup(), wanted, "{flags:?}");
    }
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    for name in ["moe-mini.yaml", "moe-base.yaml", "dense-7b.yaml"] {
        TrainConfig::read(&examples.join(name), &["run.steps=6".to_owned()], &mut Silent).expect(name);
    }
}

#[test]
fn files_flags_and_presets_lie_over_each_other() {
    let c = good("model: {preset: small, layers: 3}\n", &["optimizer.lr=1e-5", "model.heads=16"]);
    assert_eq!((c.model.hidden, c.model.layers, c.model.heads), (512, 3, 16));
    assert_eq!((c.model.experts.count, c.model.vocabulary, c.optimizer.lr), (8, Some(65_536), 1e-5));
    assert_eq!(c.optimizer.betas, [0.9, 0.95]);
    let c = good("", &["batch.micro_tokens=4096", "model.kind=esm2", "optimizer.clip_norm=null"]);
    assert_eq!((c.batch.micro_tokens, c.optimizer.clip_norm), (Auto(Some(4096)), None));
    assert_eq!((c.model.attention.mask, c.optimizer.betas), (MaskKind::Full, [0.9, 0.98]));
    let c = good("", &["batch.tokens=1e5", "optimizer.no_decay=[a, 'b*']", "data.longest=64"]);
    assert_eq!((c.batch.tokens, c.optimizer.no_decay), (100_000, vec!["a".to_owned(), "b*".to_owned()]));
}

#[test]
fn what_is_printed_is_read_as_the_same() {
    let from = format!("model.from={}", fixture("goldens/esm2"));
    let lora = ["model.kind=esm2", &from, "model.lora={rank: 4}"];
    let times =
        ["schedule.warmup=0.1", "run.save_every=90s", "memory.remat=[gelu]", "memory.remat_layers=[0, 1]"];
    for flags in [&[][..], &["model.preset=large"], &lora, &HEAD, &times] {
        let config = good("", flags);
        let text = config.to_yaml().expect("YAML");
        assert_eq!(parse(&text, &[]).expect("read back"), config, "{text}");
        assert!(text.starts_with("model:\n  kind: "), "{text}");
    }
}

#[test]
fn impossible_values_are_named() {
    let whole = "run.yaml, line 3";
    for (text, flags, wanted) in [
        (
            "batch: {tokens: 0}\n",
            &[][..],
            format!(
                "{whole}: `batch.tokens` is 0; it must be a whole number from \
            1 to 1099511627776"
            ),
        ),
        (
            "optimizer: {lr: fast}\n",
            &[],
            format!("{whole}: `optimizer.lr` is fast; it must be a number above 0 to 1000000"),
        ),
        (
            "optimizer: {lr: .nan}\n",
            &[],
            format!("{whole}: `optimizer.lr` is NaN; it must be a number above 0 to 1000000"),
        ),
        (
            "batch: {micro_tokens: some}\n",
            &[],
            format!(
                "{whole}: `batch.micro_tokens` is some; it must be auto or a whole number from 1 to 2147483647"
            ),
        ),
        (
            "optimizer: {kind: adam}\n",
            &[],
            format!("{whole}: `optimizer.kind` is adam; it must be auto, adamw, adamw8bit, adafactor or sgd"),
        ),
        (
            "model: {preset: huge}\n",
            &[],
            format!("{whole}: `model.preset` is huge; it must be tiny, small, base, large or null"),
        ),
        (
            "model: {tied_head: no}\n",
            &[],
            format!("{whole}: `model.tied_head` is no; it must be true or false"),
        ),
        ("model: 7\n", &[], format!("{whole}: `model` is 7; it must be a section of keys")),
        ("", &["data.train=a.txt"], "overrides: `data.train` is a.txt; it must be a list: each a text".to_owned()),
        (
            "",
            &["optimizer.betas=[0.9, 1.5]"],
            "overrides: `optimizer.betas` is [0.9, 1.5]; it must be a list of 2: each a number from 0 to 1"
                .to_owned(),
        ),
        (
            "",
            &["model.dropout=1"],
            "overrides: `model.dropout` is 1; it must be a number from 0 to below 1".to_owned(),
        ),
        ("", &["run.steps"], "run.steps: give a key and a value, such as optimizer.lr=1e-4".to_owned()),
        ("", &["model.heads=7"], "run.yaml: model.hidden 256 is not a multiple of model.heads 7".to_owned()),
        (
            "schedule: {warmup: 20}\nbatch: {micro_tokens: 3000}\n",
            &["model.experts.top_k=9"],
            "run.yaml:\n  model.experts.top_k 9 is greater than model.experts.count 8\n  schedule.warmup 20 \
                must be shorter than the 10 steps of the schedule; give fewer steps, or a share such as 0.1\n  \
                batch.micro_tokens 3000 is not a multiple of the 1024 tokens of a pack (batch.pack_tokens); a micro-step is a \
                number of whole packs"
                .to_owned(),
        ),
    ] {
        let error = parse(&format!("{MINIMAL}{text}"), flags).expect_err(&wanted);
        assert_eq!(error, wanted, "{text} {flags:?}");
    }
}

#[test]
fn every_rule_can_be_broken() {
    let llama = format!("model.from={}", fixture("training/llama"));
    for (flags, wanted) in [
        (&["model.kind=esm2", "model.preset=tiny"][..], "model.preset applies only to model.kind moe_lm"),
        (
            &["model.layers=1024", "model.experts.count=1024"],
            "model.experts.count 1024 in each of model.layers 1024 are more than 131072 experts",
        ),
        (&["model.kv_heads=3"], "model.kv_heads 3 is not a divisor of model.heads 4"),
        (&["model.attention.mask=full"], "see the tokens that it predicts"),
        (&["model.kind=esm2", "model.attention.mask=causal"], "encoders attend to every position"),
        (&["model.classes=2"], "model.classes applies only to encoders and heads"),
        (&["model.kind=head", "model.classes=null"], "model.classes is required for a head"),
        (&["model.freeze_encoder=true"], "give model.classes"),
        (&["data.format=embeddings"], "are required for model.kind head"),
        (&["model.kind=head"], "data.labels is required for a head"),
        (&["model.lora={}", &llama], "model.lora applies only to model.kind esm2 and dnabert_s"),
        (&["model.preset=tiny", &llama], "model.preset and model.from both determine the sizes"),
        (&["schedule.warmup=2.5"], "schedule.warmup 2.5 is neither a whole number of steps nor a share"),
        (
            &["model.kind=esm2", "model.classes=3", "model.class_names=[a, b]"],
            "model.class_names has 2 names, and model.classes is 3",
        ),
        (&["model.kind=esm2", "model.class_names=[a, a]"], "model.class_names: give different names"),
        (&["model.kind=esm2", "model.class_names=[a, 'b\tc']"], "model.class_names: give different names"),
        (&["run.save_every=10m"], "run.save_every `10m` is neither a number of steps, nor a number of epochs"),
        (&["run.save_every=0 epochs"], "run.save_every `0 epochs` is neither"),
        (&["run.save_every=never", "run.keep_last=3"], "run.keep_last has no effect with run.save_every never"),
        (&["run.evaluate_every=never"], "run.evaluate_every `never` is neither"),
        (
            &["run.evaluate_every=10min"],
            "run.evaluate_every `10min` is neither a number of steps nor a number of epochs",
        ),
        (&["run.evaluate_every=half an epoch"], "run.evaluate_every `half an epoch` is neither"),
        (&["run.evaluate_every=0"], "`run.evaluate_every` is 0"),
        (&["run.seed=1e-400"], "`run.seed` is \"1e-400\"; it must be a whole number"),
        (&["optimizer.lr=1e-400"], "`optimizer.lr` is \"1e-400\"; it must be a number above 0"),
        (&["optimizer.lr=1e-60"], "and 0 or in the range of 32-bit floating point"),
        (&["memory.budget=20GB and much"], "memory.budget `20GB and much` is not a size"),
        (&["run.save_every=0s"], "run.save_every `0s` is neither"),
        (&["memory.remat=[gelu, gleu]"], "memory.remat: there is no op `gleu`; ops are"),
        (&["memory.remat_layers=[0, 1]"], "memory.remat_layers applies only to memory.remat full"),
        (&["memory.remat=full", "memory.remat_layers=[0, 4]"], "the first and the last of 4 layers"),
        (
            &["memory.remat=full", "memory.remat_layers=[2, 1]"],
            "memory.remat_layers [2, 1]: give the first and the last",
        ),
        (&["model.lora={}", "model.kind=esm2"], "name the model with model.from"),
        (&["data.train=[]"], "give the files to train on"),
        (&["data.masking.mask=0.95"], "sum to more than 1"),
        (&["data.separator=x"], "data.separator is required with data.document separated"),
        (&["data.document=separated"], "data.separator is required with data.document separated"),
        (&["optimizer.betas=[0.9, 1]"], "both decay rates must be less than 1"),
        (&["optimizer.nesterov=true"], "needs optimizer.kind sgd"),
        (&["schedule.scaling=sqrt"], "schedule.reference_tokens, the batch.tokens"),
        (&["precision.initial_scale=8"], "apply only to precision.kind fp16"),
        (&["batch.tokens=512"], "data.longest 1024"),
        (&["memory.budget=much"], "memory.budget `much` is not a size"),
        (&["memory.remat_every=4"], "applies only to memory.remat every_n"),
        (&["memory.offload_to=disk"], "memory.offload_to applies only with memory.offload"),
        (&["memory.offload=[weights]"], "memory.offload"),
        (&["memory.offload=[]"], "memory.offload"),
        (&["run.steps=null", "schedule.kind=constant"], "the end of the run is missing"),
        (&["run.evaluate_every=5", "data.validation_fraction=0"], "run.evaluate_every needs validation data"),
        (&["run.patience=5"], "give run.evaluate_every"),
        (&["run.min_delta=0.1"], "run.min_delta 0.1 applies only with run.patience"),
        (&["optimizer.ema=0.99999999"], "optimizer.ema 0.99999999 is 0 or 1 in 32 bits"),
        (&["optimizer.ema=1"], "`optimizer.ema` is 1"),
        (&["optimizer.ema=0"], "`optimizer.ema` is 0"),
        (&["run.min_delta=-1"], "`run.min_delta` is -1"),
    ] {
        let error = parse(MINIMAL, flags).expect_err(wanted);
        assert!(error.contains(wanted), "{flags:?}: {error}");
    }
}

#[test]
fn values_of_another_type_are_described_in_words() {
    let refused = |text: &str, flags: &[&str]| parse(text, flags).expect_err("refused");
    assert_eq!(refused("[a]\n", &[]), "run.yaml, line 1: [a] is not a section of keys");
    let found = refused(MINIMAL, &["memory=3"]);
    assert_eq!(found, "overrides: `memory` is 3; it must be a section of keys");
    let found = refused(MINIMAL, &["data.train=[1]"]);
    assert!(found.ends_with("it must be a list: each a text"), "{found}");
    let found = refused(MINIMAL, &["optimizer.lr=1e-4\nother: 2"]);
    assert!(found.contains("is not a YAML value"), "{found}");
}

#[test]
fn all_unknown_keys_are_named_with_their_counterparts() {
    let text = "modle: {hidden: 7}\nmodel:\n  hiden: 64\n  num_experts: 4\nmemory:\n  pool_size_gb: 20\n  \
                clear_cache_frequency: 100\ndeepspeed:\n  zero_stage: 2\ntorch_compile: {mode: max-autotune}\n\
                run: {lr: 1e-3}\nqwertyuiop: 1\n";
    assert_eq!(
        parse(text, &["optimizer.weight-decay=1"]).expect_err("unknown"),
        "run.yaml: 10 keys cannot be used\n\
         run.yaml, line 1: `modle.hidden`: there is no such key; did you mean `model.hidden`?\n\
         run.yaml, line 3: `model.hiden`: there is no such key; did you mean `model.hidden`?\n\
         run.yaml, line 4: `model.num_experts`: use `model.experts.count` (0 and 1 are a dense_lm)\n\
         run.yaml, line 6: `memory.pool_size_gb`: use `memory.budget` (the budget of the whole run; there is no pool)\n\
         run.yaml, line 7: `memory.clear_cache_frequency`: not needed: all memory is planned and allocated before the first step, so there is no cache and no pool\n\
         run.yaml, line 9: `deepspeed.zero_stage`: not supported: training uses a single device\n\
         run.yaml, line 10: `torch_compile.mode`: not needed: the whole step is planned and fused before it starts\n\
         run.yaml, line 11: `run.lr`: there is no such key; did you mean `optimizer.lr`?\n\
         run.yaml, line 12: `qwertyuiop`: there is no such key; `train schema` lists all keys\n\
         overrides: `optimizer.weight-decay`: use `optimizer.weight_decay`"
    );
}

#[test]
fn keys_of_others_lead_to_ours() {
    let schema = schema();
    let known: Vec<String> = leaves(&schema).into_iter().map(|leaf| leaf.path).collect();
    let rows: Vec<&foreign::ForeignKey> = foreign::table().iter().flat_map(|trainer| &trainer.keys).collect();
    assert!(rows.len() > 200, "foreign.toml is not read");
    let mut seen: Vec<&str> = rows.iter().map(|row| row.key.as_str()).collect();
    for row in rows {
        match row.answer() {
            Answer::Key(ours, _) => {
                assert!(known.iter().any(|key| key == ours), "{}: there is no {ours}", row.key);
                // Every mapped word must be a valid value of the equivalent key.
                for word in row.words.iter().flat_map(|words| words.values()).chain(&row.true_is) {
                    let flags = [format!("{ours}={word}")];
                    let error = TrainConfig::parse(MINIMAL, "t", &flags)
                        .err()
                        .map(|e| e.to_string())
                        .unwrap_or_default();
                    assert!(!error.contains(&format!("`{ours}` is ")), "{}: {error}", row.key);
                }
            }
            Answer::Needless(why) | Answer::No(why) => assert!(!why.is_empty(), "{}: no reason", row.key),
        }
        // All settings that the table names are known.
        assert!(!row.answer().sentence().contains('{'), "{}", row.key);
        let path = row.key.replace('*', "anything");
        assert_eq!(counterpart(&format!("x.{path}")), Some(row.answer()), "{}", row.key);
    }
    // Keys of the Ava guide. Some match several rows of the table, of which the most specific must be chosen.
    for (key, wanted) in [
        ("model.deepspeed_activation_checkpointing", "use `memory.remat` (full"),
        ("deepspeed.activation_checkpointing", "use `memory.remat` (full"),
        ("model.num_layers", "use `model.layers`"),
        ("training.mixed_precision", "use `precision.kind` (f32, bf16 or fp16)"),
        ("training.optimizer", "use `optimizer.kind` (auto, adamw"),
        ("memory.enable_cpu_offload", "use `memory.offload` (optimizer and masters"),
        ("dynamic_batching.enabled", "use `memory.dynamic.profile` (aggressive, balanced"),
        ("data.max_length", "use `data.longest`"),
        ("gpu.float32_matmul_precision", "use `precision.kind` (tf32, for f32 on a GPU"),
    ] {
        let sentence = counterpart(key).expect(key).sentence();
        assert!(sentence.starts_with(wanted), "{key}: {sentence}");
    }
    let count = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), count, "a key stands twice");
    assert_eq!(counterpart("train.Silent-Mode"), counterpart("silent_mode"));
}

/// Every number has a lower and an upper limit, in the schema or by a rule.
#[test]
fn every_number_has_limits() {
    /// Adds the keys of numbers without a limit; a limit may stand beside the alternatives of a value.
    fn walk(schema: &serde_json::Value, path: &str, limited: [bool; 2], found: &mut Vec<String>) {
        let has = |words: [&str; 2]| words.iter().any(|word| schema.get(word).is_some());
        let limited = [
            limited[0] || has(["minimum", "exclusiveMinimum"]),
            limited[1] || has(["maximum", "exclusiveMaximum"]),
        ];
        let is_number = |name: &serde_json::Value| matches!(name.as_str(), Some("integer" | "number"));
        let types = schema["type"].as_array().map_or_else(|| vec![&schema["type"]], |all| all.iter().collect());
        if types.into_iter().any(is_number) && limited != [true, true] {
            found.push(path.to_owned());
        }
        for (key, inner) in schema["properties"].as_object().into_iter().flatten() {
            walk(inner, &format!("{path}.{key}"), [false, false], found);
        }
        for inner in ["anyOf", "oneOf"].iter().filter_map(|word| schema[word].as_array()).flatten() {
            walk(inner, path, limited, found);
        }
        if let Some(items) = schema.get("items") {
            walk(items, &format!("{path}[]"), limited, found);
        }
    }
    let mut found = vec![];
    walk(&schema(), "", [false, false], &mut found);
    // Rules limit these: to 5 to 100000 bases, and to the layers of the model.
    found.retain(|path| {
        ![".data.crops.validation_lengths[]", ".memory.remat_layers[]"].contains(&path.as_str())
    });
    assert_eq!(found, Vec::<String>::new());
}

/// Values below, at and above the limits of keys, and values that are no numbers.
#[test]
fn extreme_values_are_refused_by_key_value_and_range() {
    for (flag, wanted) in [
        (
            "batch.tokens=4611686018427387904",
            "`batch.tokens` is 4611686018427387904; it must be a whole number from 1 to 1099511627776",
        ),
        ("batch.tokens=-1", "`batch.tokens` is -1; it must be a whole number from 1 to 1099511627776"),
        ("batch.tokens=9223372036854775808", "`batch.tokens` is "),
        ("batch.micro_tokens=2147483648", "it must be auto or a whole number from 1 to 2147483647"),
        ("model.hidden=4611686018427387904", "it must be a whole number from 1 to 1048576"),
        ("model.layers=1025", "it must be a whole number from 1 to 1024"),
        ("model.experts.count=100000", "it must be a whole number from 1 to 1024"),
        ("model.vocabulary=16777217", "it must be a whole number from 2 to 16777216 or null"),
        ("model.attention.window=4294967297", "it must be a whole number from 1 to 2147483647"),
        ("data.bin_end=4294967296", "it must be a whole number from 0 to 16777215 or null"),
        ("model.experts.capacity=0.0001", "it must be a number from 0.001 to 1000 or null"),
        ("data.longest=4294967296", "it must be a whole number from 2 to 2147483647"),
        ("memory.loss_chunk=4294967296", "it must be auto or a whole number from 1 to 2147483647"),
        ("run.steps=9007199254740993", "it must be a whole number from 1 to 1000000000000 or null"),
        ("optimizer.lr=1e308", "`optimizer.lr` is "),
        ("optimizer.lr=1e-60", "and 0 or in the range of 32-bit floating point"),
        ("optimizer.weight_decay=1e-60", "and 0 or in the range of 32-bit floating point"),
        ("optimizer.lr=.inf", "`optimizer.lr` is "),
        ("batch.tokens=null", "`batch.tokens` is null"),
        ("batch.tokens=[64]", "`batch.tokens` is [64]"),
        ("batch.tokens=true", "`batch.tokens` is true"),
        ("batch.tokens=''", "`batch.tokens` is "),
        ("batch.tokens=64.5", "`batch.tokens` is 64.5"),
        (
            // A prime number.
            "batch.tokens=1099511627689",
            "a pack of 1099511627689 tokens has more than 2147483647",
        ),
    ] {
        let error = parse(MINIMAL, &[flag]).expect_err(flag);
        assert!(error.contains(wanted), "{flag}: {error}");
    }
}

/// A key that the kind of the model does not read, or that another key disables, is refused by name unless it has its
/// default, as in the saved configuration of a run.
#[test]
fn keys_without_effect_are_refused_by_name() {
    let head = HEAD.join(" ");
    let caller = "model.kind=caller data.labels=c run.evaluate_every=5";
    for (flags, key) in [
        (format!("{head} model.layers=7"), "model.layers 7"),
        (format!("{head} model.heads=2"), "model.heads 2"),
        (format!("{head} model.vocabulary=100"), "model.vocabulary 100"),
        (format!("{head} model.attention.mask=full"), "model.attention.mask full"),
        (format!("{head} model.experts.count=4"), "model.experts.count 4"),
        (format!("{head} data.longest=64"), "data.longest 64"),
        (format!("{head} data.tokenizer=bytes"), "data.tokenizer bytes"),
        (format!("{head} data.masking.fraction=0.5"), "data.masking.fraction 0.5"),
        (format!("{head} batch.sequences=4"), "batch.sequences 4"),
        (format!("{head} loss.balance=0.5"), "loss.balance 0.5"),
        (format!("{caller} model.norm=layer_norm"), "model.norm layer_norm"),
        (format!("{caller} model.vocabulary=67"), "model.vocabulary 67"),
        (format!("{caller} data.longest=100"), "data.longest 100"),
        (format!("{caller} loss.router_z=0.5"), "loss.router_z 0.5"),
        ("model.kind=dense_lm model.experts.top_k=1".to_owned(), "model.experts.top_k 1"),
        ("model.kind=dense_lm loss.balance=0.5".to_owned(), "loss.balance 0.5"),
        ("model.kind=esm2 model.experts.count=4".to_owned(), "model.experts.count 4"),
        ("model.kind=esm2 model.classes=2 data.masking.fraction=0.5".to_owned(), "data.masking.fraction 0.5"),
        ("data.masking.fraction=0.5".to_owned(), "data.masking.fraction 0.5"),
        ("model.attention.window=7".to_owned(), "model.attention.window 7"),
        ("model.attention.block=7".to_owned(), "model.attention.block 7"),
        ("model.attention.mask=window model.attention.local=7".to_owned(), "model.attention.local 7"),
        ("model.position=alibi model.rope_theta=500".to_owned(), "model.rope_theta 500"),
        ("data.tensors=x".to_owned(), "data.tensors x"),
        ("data.labels=x.tsv".to_owned(), "data.labels x.tsv"),
        ("data.truncate=true".to_owned(), "data.truncate true"),
        ("data.field=body".to_owned(), "data.field body"),
        ("data.format=jsonl data.document=line".to_owned(), "data.document line"),
        ("data.format=jsonl data.label_field=y".to_owned(), "data.label_field y"),
        ("data.bin_end=3".to_owned(), "data.bin_end 3"),
        ("data.format=bin data.tokenizer=bytes".to_owned(), "data.tokenizer bytes"),
        ("data.validation=[v.txt] data.split_seed=3".to_owned(), "data.split_seed 3"),
    ] {
        let words: Vec<&str> = flags.split_whitespace().collect();
        let error = parse(MINIMAL, &words).expect_err(&flags);
        assert!(
            error.contains(&format!("{key} has no effect: ")) && error.contains("; remove it"),
            "{flags}: {error}"
        );
    }
    // The default of the kind is no statement.
    good("", &[&HEAD[..], &["model.layers=4", "data.longest=1024"]].concat());
    good("", &["model.attention.mask=window", "model.attention.window=7"]);
    good("", &["data.format=jsonl", "data.field=body"]);
}

/// Every leaf key has a description and states what it changes.
#[test]
fn the_schema_describes_every_key() {
    let schema = schema();
    let all = leaves(&schema);
    assert!(all.len() > 90, "{}", all.len());
    for leaf in &all {
        assert!(!leaf.about.is_empty(), "{}: no description", leaf.path);
        assert!(["results", "rounding", "end", "machine", "log"].contains(&leaf.changes.as_str()), "{leaf:?}");
    }
    // The schema and the serialised configuration have the same keys.
    let written = YamlNode::of(&TrainConfig::default()).expect("a tree");
    for (section, inner) in properties(&schema).expect("sections") {
        let there = written.get(section).expect("a section");
        for key in properties(inner).expect("keys").keys() {
            assert!(there.get(key).is_some(), "{section}.{key}");
        }
    }
    assert!(schema::faults(&written, &schema).is_empty());
}

/// Compares the tables of docs/configuration.md with those generated from the schema and the table of other
/// trainers' keys; the text before them is written by hand.
#[test]
fn the_page_of_keys_is_this_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let there = std::fs::read_to_string(&path).expect("docs/configuration.md");
    let start = there.find(HEADER).expect("the table of keys");
    let page = there[..start].to_owned() + &tables();
    if std::env::var_os("UPDATE").is_some_and(|v| v == "1") {
        std::fs::write(&path, &page).expect("written");
        return;
    }
    let (there, page): (Vec<&str>, Vec<&str>) = (there.lines().collect(), page.lines().collect());
    let other = page.iter().zip(&there).find(|(a, b)| a != b);
    assert_eq!(other, None, "UPDATE=1 writes the tables");
    assert_eq!(page.len(), there.len(), "UPDATE=1 writes the tables");
}

/// The first line of the generated part of docs/configuration.md.
const HEADER: &str = "| key | meaning | values | changes |\n";

/// Replaces settings in braces by their flags: the page is for users of the command line.
fn with_flags(text: &str) -> String {
    let mut written = text.replace("{train}", "train");
    while let Some((before, inside, after)) = written
        .split_once('{')
        .and_then(|(before, rest)| rest.split_once('}').map(|(inside, after)| (before, inside, after)))
    {
        written = format!("{before}--{}{after}", inside.replace('_', "-").replace('=', " "));
    }
    written
}

/// Generates the tables of docs/configuration.md.
fn tables() -> String {
    let mut text = HEADER.to_owned() + "|---|---|---|---|\n";
    for leaf in leaves(&schema()) {
        // Writing to a String cannot fail.
        let Leaf { path, about, allowed, changes } = leaf;
        let _ = writeln!(text, "| `{path}` | {} | {allowed} | {changes} |", about.replace('|', "\\|"));
    }
    for trainer in foreign::table() {
        let _ = write!(text, "\n## {}\n| key | here |\n|---|---|\n", trainer.name);
        for row in &trainer.keys {
            let _ = writeln!(text, "| `{}` | {} |", row.key, with_flags(&row.answer().text()));
        }
    }
    text
}

/// A run with `memory.dynamic` writes the sizes that it chose, and they are the same sizes when they are read again.
#[test]
fn chosen_sizes_of_micro_steps_can_be_read_again() {
    for packs in [2, 3, 6, 24, 100] {
        let tokens = format!("batch.tokens={}", 64 * packs);
        let flags = ["data.longest=64", tokens.as_str()];
        let c = good("memory: {dynamic: {}}\n", &flags);
        let sizes = c.dynamic_sizes();
        assert!(sizes[0] == 64 * packs && sizes.is_sorted_by(|a, b| a > b), "{sizes:?}");
        let least = sizes[sizes.len() - 1];
        for (chosen, largest) in sizes[..sizes.len() - 1].iter().enumerate() {
            let of = |key: &str, value: u64| format!("memory.dynamic.{key}={value}");
            let choices =
                [of("min_batch", least), of("max_batch", *largest), "batch.pack_tokens=64".to_owned()];
            let flags: Vec<&str> = flags.iter().copied().chain(choices.iter().map(String::as_str)).collect();
            let run = good("memory: {dynamic: {}}\n", &flags);
            assert_eq!(run.dynamic_sizes(), sizes[chosen..], "{packs} packs");
            assert_eq!(parse(&run.to_yaml().expect("YAML"), &[]).expect("read back"), run);
        }
    }
}

/// (tokens of a step, longest sequence, tokens of a pack)
#[test]
fn a_pack_is_the_longest_sequence_or_the_next_divisor_of_a_step() {
    for (tokens, longest, wanted) in [
        (16_384, 1024, 1024),
        (16_384, 1000, 1024),
        (6000, 700, 750),
        (10_007, 1000, 10_007),
        (12_288, 1024, 1024),
    ] {
        let flags = [format!("batch.tokens={tokens}"), format!("data.longest={longest}")];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        assert_eq!(good("", &flags).pack_tokens(), wanted, "{flags:?}");
    }
}
