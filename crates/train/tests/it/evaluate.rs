//! Tests of evaluations of checkpoints: they equal the trainer's own evaluation and a direct computation from
//! probabilities. Invariant: tests are hermetic.

use crate::caller::{TASKS, config, genomes};
use crate::interop::{classified_file, labels};
use crate::train::lines;
use crate::training::{ESM, TINY, corpus, esm, train};
use plimsoll_runtime::{Device, Failure, Settings, Silent};
use plimsoll_testing::{Folder, fixture};
use plimsoll_train::{
    EvaluationReport, EvaluationRequest, Resume, TrainError, TrainRequest, evaluate, open, train_with,
};
use std::fs;
use std::path::Path;

fn evaluated(checkpoint: &Path, data: &[&Path], flags: &str) -> Result<EvaluationReport, TrainError> {
    let request = EvaluationRequest {
        checkpoint: checkpoint.to_owned(),
        data: data.iter().map(|path| path.display().to_string()).collect(),
        flags: flags.split_whitespace().map(str::to_owned).collect(),
    };
    let config = request.configuration(&mut Silent)?;
    evaluate(&request, &config, Device::Cpu, &mut Silent)
}

fn close(found: f64, wanted: f64) {
    assert!((found - wanted).abs() < 1e-6, "{found} is not {wanted}");
}

/// Models with and without experts and with a z-loss; all data, and the averaged weights.
#[test]
fn a_language_model_has_the_validation_loss_of_its_run() {
    let (text, data) = corpus("evaluate-lm");
    let dense = TINY.replace("moe_lm", "dense_lm").replace(", experts: {count: 4, top_k: 2}", "");
    for (model, flags) in [(TINY, ""), (dense.as_str(), "loss.z=0.1")] {
        let folder = Folder::new("evaluate-lm-run");
        let run = train(&folder.0, model, &format!("{data} run.evaluate_every=12 optimizer.ema=0.9 {flags}"));
        let last =
            lines(&folder).into_iter().rfind(|line| line.get("validation_loss").is_some()).expect("a line");
        // A run with averaged weights evaluates these.
        let found = evaluated(&folder.path("best/ema"), &[], "").expect("evaluated");
        close(found.loss, last["validation_loss"].as_f64().expect("a loss"));
        assert_eq!(Some(found.targets), last["validation_targets"].as_u64());
        close(found.perplexity.expect("a perplexity"), found.loss.exp());
        assert!(found.tasks.is_empty() && found.peak <= found.budget);
        let all = evaluated(run.checkpoint.as_deref().expect("saved"), &[&text.path("corpus.txt")], "")
            .expect("evaluated");
        assert!(all.targets > 5 * found.targets, "{} of {}", found.targets, all.targets);
        let last = evaluated(run.checkpoint.as_deref().expect("saved"), &[], "").expect("evaluated");
        assert!(last.loss != found.loss && last.targets == found.targets);
    }
}

#[test]
fn a_caller_has_the_validation_loss_of_its_run_and_metrics_of_every_task() {
    let folder = Folder::new("evaluate-caller");
    genomes(&folder.0);
    let run = folder.path("run");
    let flags = format!("{TASKS} run.steps=40 run.evaluate_every=40");
    let config = config(&folder.0, &flags).expect("a configuration");
    let request = TrainRequest { config, output: run.clone(), resume: Resume::Never };
    train_with(&request, &mut |c, observer| open(c, Device::Cpu, observer), &mut Silent).expect("trained");
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let wanted = metrics.lines().find_map(|line| {
        serde_json::from_str::<serde_json::Value>(line).expect("a line")["validation_loss"].as_f64()
    });
    let found = evaluated(&run.join("best"), &[], "").expect("evaluated");
    close(found.loss, wanted.expect("a loss"));
    let [virus, group] = &found.tasks[..] else { panic!("{:?}", found.tasks) };
    assert_eq!((virus.task.as_str(), virus.examples, virus.classes.len()), ("virus", 20, 2));
    assert_eq!((group.task.as_str(), group.classes.len()), ("group", 6));
    // A loss far below ln 2 is possible only if most examples are ranked and classified rightly.
    assert!(virus.accuracy > 0.8 && virus.auroc.expect("both classes") > 0.9, "{virus:?}");
    assert_eq!(virus.classes.iter().map(|class| class.examples).sum::<u64>(), 20);
}

/// Accuracy, loss and areas of an encoder's classifier, computed from the table that `classify` writes.
#[test]
fn an_encoder_has_the_metrics_of_its_probabilities() {
    let folder = Folder::new("evaluate-encoder");
    let flags = esm(&format!("run.steps=3 {}", labels(&folder)));
    let run = train(&folder.path("run"), ESM, &flags);
    let settings = Settings { precision: Some(plimsoll_runtime::Precision::F32), ..Settings::default() };
    let proteins = fixture("goldens/pipeline/expected_500/protein.faa");
    // With the tokens at both ends these letters are `data.longest` tokens.
    let input = (proteins, Some(126));
    let table = classified_file(&folder, run.checkpoint.as_deref().expect("saved"), input, settings)
        .expect("classified");
    let classes = fs::read_to_string(folder.path("labels.tsv")).expect("labels");
    let class = |id: &str| -> usize {
        let of = classes.lines().find_map(|line| line.strip_prefix(id)?.strip_prefix('\t'));
        of.expect("a class").parse().expect("a number")
    };
    let rows: Vec<(usize, Vec<f64>)> = table
        .lines()
        .skip(1)
        .map(|line| {
            let columns: Vec<&str> = line.split('\t').collect();
            (class(columns[0]), columns[2..].iter().map(|x| x.parse().expect("a score")).collect())
        })
        .collect();
    let found = evaluated(
        run.checkpoint.as_deref().expect("saved"),
        &[&fixture("goldens/pipeline/expected_500/protein.faa")],
        "",
    );
    let found = found.expect("evaluated");
    let task = &found.tasks[0];
    assert_eq!(task.examples, rows.len() as u64);
    let n = rows.len() as f64;
    close(found.loss, -rows.iter().map(|(c, p)| p[*c].ln()).sum::<f64>() / n);
    let largest = |p: &[f64]| p.iter().copied().fold(0.0, f64::max);
    let right = rows.iter().filter(|(c, p)| p[*c] == largest(p)).count();
    close(task.accuracy, right as f64 / n);
    // The area is the share of pairs that are in the right order.
    let area = |c: usize| {
        let mut sum = 0.0;
        let mut pairs = 0.0;
        for (a, p) in rows.iter().filter(|(a, _)| *a == c) {
            for (_, q) in rows.iter().filter(|(b, _)| b != a) {
                sum += if p[c] > q[c] {
                    1.0
                } else if p[c] == q[c] {
                    0.5
                } else {
                    0.0
                };
                pairs += 1.0;
            }
        }
        sum / pairs
    };
    close(task.auroc.expect("three classes"), (area(0) + area(1) + area(2)) / 3.0);
    assert_eq!(task.calibration.iter().map(|bin| bin.examples).sum::<u64>(), task.examples);
}

#[test]
fn what_cannot_be_evaluated_is_refused() {
    let (_text, data) = corpus("evaluate-refused");
    let folder = Folder::new("evaluate-refused-run");
    let run = train(&folder.0, TINY, &format!("{data} run.steps=1 run.evaluate_every=1"));
    for (flags, code, named) in [
        ("run.evaluate_every=2", 1, "an evaluation reads what the run held out"),
        ("memory.budget=1MiB", 4, "1 048 576 B"),
        ("run.nothing=1", 1, "run.nothing"),
        ("model.hidden=48", 1, "model.hidden"),
    ] {
        let error =
            evaluated(run.checkpoint.as_deref().expect("saved"), &[], flags).map(|_| ()).expect_err(flags);
        assert!(error.exit_code() == code && error.to_string().contains(named), "{flags}: {error}");
    }
    let whole = evaluated(run.checkpoint.as_deref().expect("saved"), &[], "data.validation_fraction=0")
        .expect("all data");
    assert!(
        whole.targets
            > 10 * evaluated(run.checkpoint.as_deref().expect("saved"), &[], "").expect("held out").targets
    );
    // A run that does not evaluate holds nothing out.
    let trained = Folder::new("evaluate-nothing-held-out");
    let run = train(&trained.0, TINY, &format!("{data} run.steps=1"));
    let error = evaluated(run.checkpoint.as_deref().expect("saved"), &[], "")
        .map(|_| ())
        .expect_err("nothing held out")
        .to_string();
    assert!(error.contains("it held no data out; give the data to evaluate as DATA"), "{error}");
    let all = evaluated(run.checkpoint.as_deref().expect("saved"), &[], "data.validation_fraction=0")
        .expect("all data");
    assert_eq!(all.targets, whole.targets);
    let head = Folder::new("evaluate-head");
    let root = fixture("").join("../examples/head");
    let config = format!(
        "model: {{kind: head}}\ndata: {{train: [{0}/dna.npy], proteins: [{0}/proteins.npy], labels: {0}/labels.tsv}}\n\
         run: {{steps: 1}}\n",
        root.display()
    );
    let run = train(&head.0, &config, "");
    evaluated(run.checkpoint.as_deref().expect("saved"), &[], "").map(|_| ()).expect_err("nothing held out");
    let rows = evaluated(run.checkpoint.as_deref().expect("saved"), &[], "data.validation_fraction=0")
        .expect("all rows");
    assert!(rows.targets > 70, "{}", rows.targets);
    let error = evaluated(&folder.path("checkpoints"), &[], "").map(|_| ()).expect_err("no checkpoint");
    assert_eq!(error.exit_code(), 1, "{error}");
    let adapters = Folder::new("evaluate-adapters");
    let run = train(&adapters.0, ESM, &esm("run.steps=1 model.lora.rank=2"));
    let error = evaluated(run.checkpoint.as_deref().expect("saved"), &[], "")
        .map(|_| ())
        .expect_err("adapters")
        .to_string();
    assert!(error.contains("with `merge` into"), "{error}");
    let other = Folder::new("evaluate-no-run");
    let error = evaluated(&other.0, &[], "").map(|_| ()).expect_err("no run").to_string();
    assert!(error.contains("RUN/best"), "{error}");
}
