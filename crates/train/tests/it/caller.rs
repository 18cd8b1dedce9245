//! Tests of training a caller: it learns, its checkpoints continue with equal bits, a pre-trained encoder is a start, and
//! bad requests are refused by name. Invariant: the data is generated, so that the tests need no genomes.

use plimsoll_runtime::{CallerModel, Device, Silent};
use plimsoll_testing::Folder;
use plimsoll_train::config::TrainConfig;
use plimsoll_train::{
    EvaluationRequest, Resume, TrainError, TrainReport, TrainRequest, evaluate, open, priced, train_with,
};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Writes 24 records of two classes, which use different codons, and the table of records.
pub fn genomes(folder: &Path) {
    // A multiplicative generator (Lehmer 1951), so that the data is the same everywhere.
    let mut state = 1_u64;
    let mut next = move |n: u64| {
        state = state * 48_271 % 2_147_483_647;
        state % n
    };
    let codons = [["GCC", "CTG", "GGC", "CGC", "GTG", "ACC"], ["GCA", "TTA", "GGA", "AGA", "GTA", "ACA"]];
    let mut fasta = String::new();
    let mut table = "id\tsplit\tvirus\tgroup\n".to_owned();
    for record in 0..24 {
        let class = record % 2;
        let split = if record < 20 { "train" } else { "validation" };
        let name = ["other", "virus"][class];
        writeln!(table, "r{record}\t{split}\t{name}\tg{}", record / 4).expect("a string");
        writeln!(fasta, ">r{record}").expect("a string");
        for _ in 0..60 {
            fasta.push_str(codons[class][next(6) as usize]);
        }
        fasta.push('\n');
    }
    fs::write(folder.join("genomes.fa"), fasta).expect("written");
    fs::write(folder.join("records.tsv"), table).expect("written");
}

pub fn config(folder: &Path, flags: &str) -> Result<TrainConfig, TrainError> {
    let text = format!(
        "model: {{kind: caller, hidden: 16, layers: 1, heads: 2, intermediate: 24}}\n\
         data:\n  train: [{0}/genomes.fa]\n  labels: {0}/records.tsv\n\
         \x20 crops: {{shortest: 60, longest: 90, validation_windows: 20, validation_lengths: [90]}}\n\
         optimizer: {{kind: adamw, lr: 0.01}}\nbatch: {{tokens: 1440, pack_tokens: 720}}\n\
         run: {{steps: 12, evaluate_every: 6, threads: 1}}\nmemory: {{budget: 1GiB}}\n",
        folder.display()
    );
    let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
    TrainConfig::parse(&text, "test", &flags)
}

pub const TASKS: &str = "model.tasks=[{\"name\":\"virus\",\"classes\":[other,virus]},{\"name\":\"group\",\"classes\":[g0,g1,g2,g3,g4,g5],\"weight\":0.5}]";

fn train(config: TrainConfig, output: &Path, resume: Resume) -> Result<TrainReport, TrainError> {
    let request = TrainRequest { config, output: output.to_owned(), resume };
    train_with(&request, &mut |config, observer| open(config, Device::Cpu, observer), &mut Silent)
}

#[test]
fn a_caller_learns_and_its_checkpoint_is_a_model() {
    let folder = Folder::new("train-caller");
    genomes(&folder.0);
    let run = folder.0.join("run");
    let flags = format!(
        "{TASKS} run.steps=40 run.evaluate_every=20 data.crops.shuffled=0.1 data.crops.shuffled_class=other data.crops.substitutions=0.05"
    );
    train(config(&folder.0, &flags).expect("a configuration"), &run, Resume::Never).expect("trained");
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let found = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"));
    let losses: Vec<f64> = found.filter_map(|line| line["validation_loss"].as_f64()).collect();
    // Chance is ln 2 = 0.69.
    assert!(losses.len() == 2 && losses[1] < 0.3 && losses[1] < losses[0], "{losses:?}");
    let model = CallerModel::open(&run.join("checkpoints/step-00000040")).expect("a caller");
    assert_eq!(model.config.logits(), 8);
}

/// A run that stops after a checkpoint and is resumed ends with the bytes of an unbroken run, in any number of threads.
#[test]
fn a_resumed_caller_has_the_bytes_of_an_unbroken_run() {
    let folder = Folder::new("train-caller-resume");
    genomes(&folder.0);
    let weights =
        |run: &Path| fs::read(run.join("checkpoints/step-00000012/model.safetensors")).expect("a checkpoint");
    let whole = folder.0.join("whole");
    let broken = folder.0.join("broken");
    let dropout = format!("{TASKS} model.dropout=0.1 data.crops.indels=0.01");
    train(config(&folder.0, &dropout).expect("a configuration"), &whole, Resume::Never).expect("trained");
    let short = format!("{dropout} run.steps=5 schedule.steps=12 run.save_every=5 data.workers=3");
    train(config(&folder.0, &short).expect("a configuration"), &broken, Resume::Never).expect("trained");
    let long = format!("{dropout} schedule.steps=12 run.save_every=5 data.workers=2");
    train(config(&folder.0, &long).expect("a configuration"), &broken, Resume::Auto).expect("resumed");
    assert!(weights(&whole) == weights(&broken), "the resumed run has other weights");
}

/// Pre-training on masked spans of bases learns, continues with equal bits, and gives an encoder to start from.
#[test]
fn masked_bases_are_an_objective() {
    let folder = Folder::new("train-caller-bases");
    genomes(&folder.0);
    let flags = "data.masking.unit=nucleotide data.masking.span=3 schedule.steps=40 run.evaluate_every=20";
    let whole = folder.0.join("whole");
    let broken = folder.0.join("broken");
    let run = |folder_of_run: &Path, more: &str, resume: Resume| {
        let config = config(&folder.0, &format!("{flags} {more}")).expect("a configuration");
        train(config, folder_of_run, resume)
    };
    run(&whole, "run.steps=40", Resume::Never).expect("trained");
    let losses = column(&whole, "validation_loss");
    // A uniform prediction has ln 66 = 4.19.
    assert!(losses.len() == 2 && losses[1] < 3.5 && losses[1] < losses[0], "{losses:?}");
    run(&broken, "run.steps=7 data.workers=3", Resume::Never).expect("trained");
    run(&broken, "run.steps=40", Resume::Auto).expect("resumed");
    let weights =
        |run: &Path| fs::read(run.join("checkpoints/step-00000040/model.safetensors")).expect("a checkpoint");
    assert!(weights(&whole) == weights(&broken), "the resumed run has other weights");
    let error =
        run(&broken, "run.steps=50 data.masking.span=4", Resume::Auto).expect_err("refused").to_string();
    assert!(error.contains("`data.masking.span` was 3, is 4"), "{error}");
    let from = format!("{TASKS} model.from={}", whole.join("checkpoints/step-00000040").display());
    let begun = config(&folder.0, &from).expect("a configuration");
    train(begun, &folder.0.join("second"), Resume::Never).expect("trained");
}

#[test]
fn a_pretrained_encoder_is_a_start() {
    let folder = Folder::new("train-caller-from");
    genomes(&folder.0);
    let first = folder.0.join("first");
    let second = folder.0.join("second");
    train(config(&folder.0, "").expect("a configuration"), &first, Resume::Never).expect("pre-trained");
    let checkpoint = first.join("checkpoints/step-00000012");
    let error = CallerModel::open(&checkpoint).err().expect("no tasks").to_string();
    assert!(error.contains("lists no tasks"), "{error}");
    let from = format!("model.from={}", checkpoint.display());
    let begun = config(&folder.0, &format!("{TASKS} {from} optimizer.lr=1e-12")).expect("a configuration");
    train(begun, &second, Resume::Never).expect("trained");
    let read = |run: &Path, tensor: &str| {
        let weights =
            plimsoll_data::weights::Weights::open(&run.join("checkpoints/step-00000012/model.safetensors"));
        let weights = weights.expect("weights");
        let n = weights.tensor(tensor).expect("a tensor").elements();
        let mut out = vec![0.0; n as usize];
        weights.read_f32(tensor, 0..n, &mut out).expect("read");
        out
    };
    let [a, b] = [&first, &second].map(|run| read(run, "layers.0.mlp.gate_up.weight"));
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-6), "the encoder was not taken over");
    // Another model than the pre-trained one is refused.
    let error = config(&folder.0, &format!("{TASKS} {from} model.layers=2")).expect_err("refused").to_string();
    assert!(error.contains("model.layers"), "{error}");
    // Classes of a task that the model has in another order.
    let from = format!("model.from={}", second.join("checkpoints/step-00000012").display());
    let flags = format!("model.tasks=[{{\"name\":\"virus\",\"classes\":[virus,other]}}] {from}");
    let other = config(&folder.0, &flags).expect("a configuration");
    let error = train(other, &folder.0.join("third"), Resume::Never).expect_err("refused").to_string();
    assert!(error.contains("the task virus") && error.contains("other, virus"), "{error}");
}

#[test]
fn bad_requests_are_refused_by_name() {
    let folder = Folder::new("train-caller-bad");
    genomes(&folder.0);
    for (flags, named) in [
        ("model.tasks=[{\"name\":\"virus\"}]", "model.tasks[0]"),
        ("model.tasks=[{\"name\":\"a.b\",\"classes\":[x,y]}]", "model.tasks[0]"),
        ("model.tasks=[{\"nam\":\"virus\",\"classes\":[x,y]}]", "model.tasks[0].nam"),
        ("model.tasks=[{\"name\":\"virus\",\"classes\":[x,y],\"weight\":0}]", "model.tasks[0].weight"),
        ("model.tasks=[{\"name\":\"v\",\"classes\":[x,y]},{\"name\":\"v\",\"classes\":[x,y]}]", "model.tasks"),
        ("model.norm=layer_norm", "of the section model"),
        ("model.experts.count=4", "of the section model"),
        ("data.longest=100", "of the section data"),
        ("data.validation=[x.fa]", "of the section data"),
        ("data.crops.shortest=95", "data.crops.shortest 95"),
        ("data.crops.shuffled=0.1", "data.crops.shuffled"),
        ("data.crops.shuffled_class=other", "data.crops.shuffled_class"),
        ("data.crops.shuffled=0.1 data.crops.shuffled_class=other", "must be a class of the first task"),
        ("run.evaluate_every=null", "validation_windows"),
        ("data.masking.fraction=0.5 model.tasks=[{\"name\":\"v\",\"classes\":[x,y]}]", "data.masking"),
        ("data.crops.levels=[{\"power\":0.5}]", "data.crops.levels"),
        ("data.masking.unit=base", "data.masking.unit"),
        ("data.masking.unit=nucleotide data.masking.span=0", "data.masking.span"),
        ("data.masking.span=3", "data.masking.span applies only"),
        ("data.masking.unit=nucleotide model.tasks=[{\"name\":\"v\",\"classes\":[x,y]}]", "data.masking"),
        ("data.crops.validation_lengths=[4]", "data.crops.validation_lengths"),
        ("run.epochs=2", "run.epochs"),
        ("model.kind=moe_lm model.hidden=16", "data.crops"),
        ("batch.pack_tokens=60", "data.crops.longest"),
    ] {
        let error = config(&folder.0, flags).map(|_| ()).expect_err(flags).to_string();
        assert!(error.contains(named), "{flags}: {error}");
    }
    // A class that the table has and the task lacks: the reader names file, line and column.
    let flags = "model.tasks=[{\"name\":\"virus\",\"classes\":[other,phage]}]";
    let run = config(&folder.0, flags).expect("a configuration");
    let error = train(run, &folder.0.join("run"), Resume::Never).expect_err("refused").to_string();
    assert!(error.contains("records.tsv") && error.contains("virus"), "{error}");
}

/// Trains a wider and deeper caller with the same tasks; returns its newest checkpoint.
fn teacher(folder: &Path, name: &str, flags: &str) -> PathBuf {
    let run = folder.join(name);
    let flags = format!("{TASKS} model.hidden=24 model.layers=2 {flags}");
    train(config(folder, &flags).expect("a configuration"), &run, Resume::Never)
        .expect("trained")
        .checkpoint
        .expect("saved")
}

/// The values of a column of metrics.jsonl in the lines that have it.
fn column(run: &Path, name: &str) -> Vec<f64> {
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"));
    lines.filter_map(|line| line[name].as_f64()).collect()
}

#[test]
fn a_student_learns_from_its_teachers_alone() {
    let folder = Folder::new("train-caller-distillation");
    genomes(&folder.0);
    let first = teacher(&folder.0, "first", "run.steps=40 run.evaluate_every=40");
    let second = teacher(&folder.0, "second", "run.steps=40 run.evaluate_every=40 run.seed=3");
    let run = folder.0.join("student");
    let distilled = format!(
        "{TASKS} distillation.teacher=[{},{}] distillation.weight=1 run.steps=40 run.evaluate_every=20",
        first.display(),
        second.display()
    );
    let report = train(config(&folder.0, &distilled).expect("a configuration"), &run, Resume::Never);
    let report = report.expect("trained");
    // With the weight 1 the classes of the records have no gradient.
    let losses = column(&run, "validation_loss");
    assert!(losses.len() == 2 && losses[1] < 0.3, "{losses:?}");
    let distances = column(&run, "distillation_loss");
    assert_eq!(distances.len(), 40);
    assert!(distances[39] < 0.5 * distances[0] && distances.iter().all(|&x| x >= 0.0), "{distances:?}");
    assert!(column(&run, "loss")[39] < column(&run, "loss")[0]);
    // The checkpoint is the student alone, and names the files of the teachers.
    let model = CallerModel::open(report.checkpoint.as_deref().expect("saved")).expect("a caller");
    assert_eq!((model.config.hidden_size, model.config.layers), (16, 1));
    assert!(model.weights.tensors().all(|tensor| !tensor.name().contains("teacher")));
    let teachers = report.run_record.state.position["teachers"].as_array().expect("a list");
    assert_eq!(teachers.len(), 2);
    assert!(
        teachers.iter().all(|files| files["model.safetensors"].as_str().is_some_and(|sum| sum.len() == 64))
    );
    // Evaluating the student needs no teacher.
    fs::remove_dir_all(folder.0.join("first")).expect("removed");
    let request =
        EvaluationRequest { checkpoint: report.checkpoint.expect("saved"), data: vec![], flags: vec![] };
    let evaluated = request.configuration(&mut Silent).expect("a configuration");
    evaluate(&request, &evaluated, Device::Cpu, &mut Silent).expect("evaluated");
}

/// Records without a class teach by the predictions of the teacher, whatever the weight.
#[test]
fn a_student_learns_from_records_without_a_class() {
    let folder = Folder::new("train-caller-distillation-unlabelled");
    genomes(&folder.0);
    let teacher = teacher(&folder.0, "teacher", "run.steps=40 run.evaluate_every=40");
    let table = fs::read_to_string(folder.0.join("records.tsv")).expect("a table");
    let without = |line: &str| match line.split('\t').collect::<Vec<_>>()[..] {
        [id, "train", ..] => format!("{id}\ttrain\t?\t?\n"),
        _ => format!("{line}\n"),
    };
    fs::write(folder.0.join("records.tsv"), table.lines().map(without).collect::<String>()).expect("written");
    let run = folder.0.join("student");
    let flags =
        format!("{TASKS} distillation.teacher=[{}] run.steps=40 run.evaluate_every=20", teacher.display());
    train(config(&folder.0, &flags).expect("a configuration"), &run, Resume::Never).expect("trained");
    let losses = column(&run, "validation_loss");
    assert!(losses.len() == 2 && losses[1] < 0.3, "{losses:?}");
    assert!(column(&run, "loss").iter().all(|&loss| loss == 0.0));
}

/// The bits of a distilled model depend neither on a resume nor on recomputation; another teacher is refused.
#[test]
fn a_resumed_student_has_the_bytes_of_an_unbroken_run() {
    let folder = Folder::new("train-caller-distillation-resume");
    genomes(&folder.0);
    let first = teacher(&folder.0, "first", "run.steps=2 run.evaluate_every=2");
    let second = teacher(&folder.0, "second", "run.steps=2 run.evaluate_every=2 run.seed=3");
    let flags = format!(
        "{TASKS} model.layers=3 model.dropout=0.1 optimizer.ema=0.9 precision.kind=bf16 \
         distillation.teacher=[{}] schedule.steps=12 run.save_every=5",
        first.display()
    );
    let run = |name: &str, more: &str, resume: Resume| {
        let config = config(&folder.0, &format!("{flags} {more}")).expect("a configuration");
        train(config, &folder.0.join(name), resume)
    };
    let weights = |name: &str| {
        let checkpoint = folder.0.join(name).join("checkpoints/step-00000012");
        ["model.safetensors", "state.safetensors", "ema/model.safetensors"]
            .map(|file| fs::read(checkpoint.join(file)).expect("a checkpoint"))
    };
    run("whole", "", Resume::Never).expect("trained");
    for remat in ["none", "full", "selective", "[scale,linear,kl_divergence]"] {
        run(remat, &format!("memory.remat={remat}"), Resume::Never).expect("trained");
        assert!(weights("whole") == weights(remat), "{remat}: other weights");
    }
    run("broken", "run.steps=5", Resume::Never).expect("trained");
    let kept = fs::read(first.join("model.safetensors")).expect("the teacher");
    fs::copy(second.join("model.safetensors"), first.join("model.safetensors")).expect("replaced");
    let error = run("broken", "", Resume::Auto).expect_err("another teacher");
    assert!(matches!(error, TrainError::OtherTeachers), "{error}");
    let other = format!("distillation.teacher=[{}]", second.display());
    let error = run("broken", &other, Resume::Auto).expect_err("another teacher").to_string();
    assert!(error.contains("distillation.teacher"), "{error}");
    fs::write(first.join("model.safetensors"), kept).expect("restored");
    run("broken", "", Resume::Auto).expect("resumed");
    assert!(weights("whole") == weights("broken"), "the resumed run has other weights");
}

/// The teachers are in the plan, and their activations are not kept for the backward pass.
#[test]
fn teachers_are_planned() {
    let folder = Folder::new("train-caller-distillation-plan");
    genomes(&folder.0);
    let deep = teacher(&folder.0, "deep", "run.steps=1 run.evaluate_every=1 model.layers=8");
    let flat = teacher(&folder.0, "flat", "run.steps=1 run.evaluate_every=1");
    let peak = |flags: &str| {
        let config = config(&folder.0, &format!("{TASKS} {flags}")).expect("a configuration");
        let target = priced::target(&config, "cpu").expect("a target");
        let found = priced::found(&config, &target, &mut Silent).expect("planned");
        (found.program.peak().0, priced::to_text(&config, &found).expect("a text"))
    };
    let (alone, text) = peak("");
    assert!(!text.contains("teachers"), "{text}");
    let with = |teacher: &Path| peak(&format!("distillation.teacher=[{}]", teacher.display()));
    let (flat, text) = with(&flat);
    let (deep, _) = with(&deep);
    assert!(text.contains("teachers of ") && text.contains("caller of "), "{text}");
    // Six layers more of 24 x (4 x 24 + 3 x 24) + 2 x 24 f32 parameters, aligned, and nothing else.
    let parameters = 6 * 4 * (24 * (4 * 24 + 3 * 24) + 2 * 24);
    assert!(flat > alone, "{flat} and {alone}");
    assert!((parameters..parameters + 6 * 8 * 256).contains(&(deep - flat)), "{deep} and {flat}: {parameters}");
}

#[test]
fn teachers_that_do_not_fit_are_refused_by_name() {
    let folder = Folder::new("train-caller-distillation-bad");
    genomes(&folder.0);
    let there = teacher(&folder.0, "teacher", "run.steps=1 run.evaluate_every=1");
    for (flags, named) in [
        ("distillation.weight=0.3", "apply with distillation.teacher"),
        ("distillation.teacher=[x] distillation.weight=0", "distillation.weight"),
        ("distillation.teacher=[x] distillation.weight=1.5", "distillation.weight"),
        ("distillation.teacher=[x] distillation.temperature=0", "distillation.temperature"),
        ("distillation.teacher=null", "distillation.teacher"),
        ("distillation.teachers=[x]", "distillation.teachers"),
        ("distillation.teacher=[x] model.tasks=[]", "distillation needs the tasks"),
        ("distillation.teacher=[x] model.kind=dense_lm model.tasks=[]", "distillation"),
    ] {
        let error = config(&folder.0, &format!("{TASKS} {flags}")).map(|_| ()).expect_err(flags).to_string();
        assert!(error.contains(named), "{flags}: {error}");
    }
    let teacher = format!("distillation.teacher=[{}]", there.display());
    for (flags, named) in [
        ("distillation.teacher=[nowhere]".to_owned(), "nowhere"),
        (
            format!("{teacher} model.tasks=[{{\"name\":\"virus\",\"classes\":[virus,other]}}]"),
            "the task virus with the classes virus, other",
        ),
        (
            format!("{teacher} model.tasks=[{{\"name\":\"split\",\"classes\":[train,validation]}}]"),
            "its tasks are virus, group",
        ),
    ] {
        let flags = format!("{TASKS} {flags}");
        let run = config(&folder.0, &flags).unwrap_or_else(|e| panic!("{flags}: {e}"));
        let error = train(run, &folder.0.join("run"), Resume::Never).expect_err("refused").to_string();
        assert!(error.contains(named), "{flags}: {error}");
    }
}

/// The configurations of the example differ in what their comments say, and train a teacher and its student.
#[test]
fn the_example_trains_a_teacher_and_its_student() {
    let folder = Folder::new("train-caller-example");
    genomes(&folder.0);
    // The columns that the example's table has.
    let table = fs::read_to_string(folder.0.join("records.tsv")).expect("a table");
    let more = |(i, line): (usize, &str)| match (i, line.contains("\tvirus\t")) {
        (0, _) => "id\tsplit\tvirus\tgroup\tclass\tgc\tkind\tbucket\tspecies\n".to_owned(),
        (_, true) => format!("{line}\tphage\tg50\tphage\tb1\ts{i}\n"),
        (_, false) => format!("{line}\tbacteria\tg50\tbacteria\tb2\ts{i}\n"),
    };
    let table: String = table.lines().enumerate().map(more).collect();
    fs::write(folder.0.join("records.tsv"), table).expect("written");
    let example = |name: &str, flags: &[String]| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/caller").join(name);
        TrainConfig::read(&path, flags, &mut Silent).unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    let files = [
        format!("data.train=[{}/genomes.fa]", folder.0.display()),
        format!("data.labels={}/records.tsv", folder.0.display()),
    ];
    let plain = example("train.yaml", &files);
    let mut of_teacher = example("teacher.yaml", &files);
    assert!(of_teacher.model.hidden > plain.model.hidden && of_teacher.model.layers > plain.model.layers);
    of_teacher.model = plain.model.clone();
    assert_eq!(of_teacher, plain);
    let mut of_student = example("distill.yaml", &files);
    assert!(!of_student.distillation.teacher.is_empty());
    of_student.distillation = plain.distillation.clone();
    assert_eq!(of_student, plain);
    let tiny = |flags: &str| {
        let flags = flags.split_whitespace().map(str::to_owned);
        let crops = "data.crops.shortest=60 data.crops.longest=90 data.crops.validation_lengths=[90] \
                     data.crops.validation_windows=8 batch.tokens=1440 batch.pack_tokens=720 run.steps=2 \
                     run.evaluate_every=2 run.threads=1 run.device=cpu memory.budget=1GiB schedule.warmup=0";
        flags.chain(crops.split_whitespace().map(str::to_owned)).chain(files.clone()).collect::<Vec<_>>()
    };
    let sizes = |hidden: u64, layers: u64| {
        format!("model.hidden={hidden} model.layers={layers} model.heads=2 model.intermediate=24")
    };
    let teacher = example("teacher.yaml", &tiny(&sizes(24, 2)));
    train(teacher, &folder.0.join("teacher"), Resume::Never).expect("trained");
    let teacher = folder.0.join("teacher/checkpoints/step-00000002/ema");
    let flags = format!("{} distillation.teacher=[{}]", sizes(16, 1), teacher.display());
    let run = folder.0.join("student");
    train(example("distill.yaml", &tiny(&flags)), &run, Resume::Never).expect("trained");
    assert_eq!(column(&run, "distillation_loss").len(), 2);
    CallerModel::open(&run.join("checkpoints/step-00000002/ema")).expect("a caller");
}
