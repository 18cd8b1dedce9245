//! Integration tests of inference models: parameter counts, outputs, and configurations that are accepted or
//! refused.

mod training;

use plimsoll_graph::Bounds;
use plimsoll_models::{ConfigError, Encoder, HeadConfig, KNOWN, Output, known, mlp_head};

const BOUNDS: Bounds = Bounds { tokens: 4096, sequences: 64, longest: 1024, packs: 1 };

#[test]
fn parameters_are_those_of_the_release() {
    // Published numbers: with the tied embedding table and the language-model head, without the contact head.
    for (id, parameters) in [
        ("facebook/esm2_t6_8M_UR50D", 7_512_353),
        ("facebook/esm2_t12_35M_UR50D", 33_501_153),
        ("facebook/esm2_t30_150M_UR50D", 148_139_553),
        ("facebook/esm2_t33_650M_UR50D", 651_042_593),
        ("facebook/esm2_t36_3B_UR50D", 2_839_004_193),
        ("facebook/esm2_t48_15B_UR50D", 15_129_098_273u64),
    ] {
        let Some(Encoder::Esm2(c)) = known(id) else { panic!("{id} is not known") };
        let graph = Encoder::Esm2(c.clone()).graph(BOUNDS, &[Output::Logits]).expect("verified");
        let frequencies = c.hidden_size / c.heads / 2;
        assert_eq!(graph.parameter_count() - frequencies, parameters, "{id}");
    }
}

#[test]
fn every_known_model_builds() {
    for (id, _) in KNOWN {
        let encoder = known(id).unwrap_or_else(|| panic!("{id} has no configuration"));
        let graph = encoder.graph(BOUNDS, &[Output::Mean, Output::Hidden, Output::Cls]).expect("verified");
        assert_eq!(graph.outputs.len(), 3, "{id}");
    }
    mlp_head(&HeadConfig { dna: 768, protein: 2560, hidden: 512, classes: 2 }, BOUNDS).expect("verified");
}

#[test]
fn outputs_of_layers_have_their_names() {
    for (id, _) in KNOWN {
        let encoder = known(id).unwrap_or_else(|| panic!("{id} has no configuration"));
        let last = encoder.layers() as u32;
        let wanted =
            [Output::MeanOf(last), Output::ClsOf(0), Output::HiddenOf(3), Output::Mean, Output::ClsOf(1)];
        let graph = encoder.graph(BOUNDS, &wanted).expect("verified");
        let mut names: Vec<String> = graph.outputs.iter().map(|(role, _)| role.to_string()).collect();
        names.sort_unstable();
        let mut wanted = wanted.map(Output::name);
        wanted.sort_unstable();
        assert_eq!(names, wanted, "{id}");
        assert_eq!(graph.inputs.iter().filter(|(name, _)| name == "rows").count(), 1, "{id}");
        let none = encoder.graph(BOUNDS, &[Output::Mean, Output::MeanOf(last + 1)]).expect("verified");
        assert_eq!(none.outputs.len(), 1, "{id}: a layer that it has not");
    }
}

#[test]
fn golden_configurations_are_read() {
    let read = |name: &str| {
        let path = format!("{}/../../fixtures/goldens/{name}/config.json", env!("CARGO_MANIFEST_DIR"));
        Encoder::from_json(&std::fs::read_to_string(path).expect("a fixture")).expect("a known model")
    };
    let Encoder::Esm2(esm) = read("esm2") else { panic!("not ESM-2") };
    assert_eq!((esm.hidden_size, esm.layers, esm.heads, esm.intermediate_size), (40, 2, 5, 160));
    let Encoder::DnabertS(dna) = read("dnabert_s") else { panic!("not DNABERT-S") };
    assert_eq!((dna.hidden_size, dna.layers, dna.heads, dna.vocab_size), (96, 2, 12, 1024));
}

#[test]
fn what_would_change_the_numbers_is_refused() {
    let base = r#""model_type":"esm","vocab_size":33,"mask_token_id":32,"hidden_size":40,
        "num_hidden_layers":2,"intermediate_size":160,"layer_norm_eps":1e-5,"token_dropout":true"#;
    let check = |extra: &str, wanted: &str| {
        let error = Encoder::from_json(&format!("{{{base},{extra}}}")).expect_err("refused");
        assert!(error.to_string().contains(wanted), "{error}");
    };
    let rotary = r#""position_embedding_type":"rotary""#;
    check(&format!(r#"{rotary},"num_attention_heads":3"#), "num_attention_heads");
    check(&format!(r#"{rotary},"num_attention_heads":5,"hidden_act":"gelu_new""#), "hidden_act");
    check(
        &format!(r#"{rotary},"num_attention_heads":5,"emb_layer_norm_before":true"#),
        "emb_layer_norm_before",
    );
    check(r#""num_attention_heads":5,"position_embedding_type":"absolute""#, "position_embedding_type");
    check(r#""num_attention_heads":5"#, "position_embedding_type");
    assert!(matches!(Encoder::from_json("{"), Err(ConfigError::Json(_))));
    assert!(matches!(Encoder::from_json(r#"{"model_type":"bert"}"#), Err(ConfigError::Kind(_))));
}

#[test]
fn what_would_take_all_memory_or_give_no_numbers_is_refused() {
    let whole = r#"{"model_type":"esm","vocab_size":33,"mask_token_id":32,"hidden_size":40,"num_hidden_layers":2,
        "intermediate_size":160,"layer_norm_eps":1e-5,"num_attention_heads":5,"position_embedding_type":"rotary"}"#;
    Encoder::from_json(whole).expect("a sound one");
    let check = |from: &str, to: &str, wanted: &str| {
        let error = Encoder::from_json(&whole.replace(from, to)).expect_err(to).to_string();
        assert!(error.starts_with(wanted), "{error}");
        assert!(error.len() < 300 && !error.contains(char::is_control), "{error}");
    };
    let layers = "`num_hidden_layers` must be a whole number between 1 and 1024, found";
    check("layers\":2", "layers\":16777216", layers);
    let eps = "`layer_norm_eps` must be a number between 0 and 1, found";
    for wrong in ["1e300", "1e-300", "0", "-1", "1", "null"] {
        check("1e-5", wrong, eps);
    }
    check("\":32", "\":33", "`mask_token_id` must be a whole number below vocab_size 33, found 33");
    check("\":33", &format!("\":\"{}\"", "[".repeat(1 << 20)), "`vocab_size` must be a whole number between");
    check("\"esm\"", r#""\u001b[2J\nerror: none""#, "model_type `?[2J?error: none` is not known");
}
