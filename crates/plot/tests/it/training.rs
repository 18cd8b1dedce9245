//! Pictures of training runs: their content, the choice of series, and folders that are refused.

use crate::rig::read;
use plimsoll_plot::{PictureFormat, PictureOutput, PlotOptions, plot};
use plimsoll_testing::Folder;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// Writes the folder of a run of `steps` steps with a mixture of two layers and four experts.
fn run(folder: &Folder, name: &str, steps: u64, rate: f64) -> PathBuf {
    let mut metrics = String::new();
    for step in 1..=steps {
        let x = step as f64;
        let part = step as f64 / steps as f64;
        let loss = 1.0 + 4.0 * (-rate * 5.0 * part).exp();
        let wave = 0.1 * (x * 0.7).sin();
        let first = 0.25 + 0.2 * part;
        let memory = 1_000_000 + 1000 * step;
        let rest = (1.0 - first) / 3.0;
        writeln!(
            metrics,
            "{{\"step\":{step},\"loss\":{},\"balance_loss\":0.01,\"lr\":{},\"grad_norm\":{},\"tokens\":{},\
             \"tokens_per_second\":{},\"skipped\":{},\"memory_bytes\":{memory},\
             \"expert_load\":{{\"0\":[{first},{rest},{rest},{rest}],\"1\":[0.25,0.25,0.25,0.25]}}}}",
            loss + wave,
            rate * 1e-3 * part,
            1.0 + wave,
            step * 100,
            900.0 + 50.0 * wave,
            u64::from(step > 7)
        )
        .expect("a String");
        if step % 10 == 0 {
            writeln!(metrics, "{{\"step\":{step},\"validation_loss\":{},\"best\":true}}", loss + 0.2)
                .expect("a String");
        }
    }
    let path = folder.path(name);
    fs::create_dir_all(&path).expect("created");
    fs::write(path.join("metrics.jsonl"), metrics).expect("written");
    let record = "{\"plimsoll\": \"0.1.0\", \"status\": \"finished\", \"config\": {}, \"device\": \"the CPU\", \
                  \"peak_bytes\": 1200000}";
    fs::write(path.join("run.json"), record).expect("written");
    path
}

fn options(folder: &Folder, runs: &[PathBuf]) -> PlotOptions {
    PlotOptions {
        results: runs.to_vec(),
        records: vec![],
        series: vec![],
        log: false,
        output: PictureOutput::Folder(folder.path("plots"), vec![PictureFormat::Svg]),
        width: 180.0,
        dpi: 72,
        force: true,
    }
}

fn pictures(options: &PlotOptions) -> Vec<String> {
    plot(options).expect("drawn").iter().map(read).collect()
}

#[test]
fn a_picture_of_two_runs_is_as_it_was() {
    let folder = Folder::new("plot-training");
    let runs = [run(&folder, "slow", 40, 0.5), run(&folder, "fast", 30, 1.0)];
    let found = pictures(&options(&folder, &runs)).concat();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots/training.svg");
    if std::env::var_os("UPDATE").is_some_and(|v| v == "1") {
        fs::write(&path, &found).expect("written");
    }
    let wanted = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == wanted, "the picture has changed; look at it, and if it is right, run with UPDATE=1");
}

#[test]
fn texts_of_a_picture_of_training() {
    let folder = Folder::new("plot-training-texts");
    let runs = [run(&folder, "alone", 40, 0.5)];
    let [charts, loads] = &pictures(&options(&folder, &runs))[..] else { panic!("two pictures") };
    for wanted in [
        ">alone<",
        ">40 steps · finished · the CPU · plimsoll 0.1.0<",
        ">Loss<",
        ">nats<",
        ">loss<",
        ">validation_loss<",
        ">Learning rate<",
        ">Auxiliary losses: balance_loss<",
        ">Norm of the gradients<",
        ">Tokens per second<",
        ">Memory<",
        ">planned peak<",
        ">triangles: 1 event<",
    ] {
        assert!(charts.contains(wanted), "{wanted}");
    }
    for wanted in [">Layer 0<", ">Layer 1<", ">expert 3<"] {
        assert!(loads.contains(wanted), "{wanted}");
    }
    assert!(!charts.contains("the mean of neighbouring steps"));
}

/// A line passes through the values of metrics.jsonl.
#[test]
fn a_line_has_the_values_of_its_steps() {
    let folder = Folder::new("plot-training-values");
    let path = folder.path("run");
    fs::create_dir_all(&path).expect("created");
    let values = [1.0, 3.0, 2.0, 4.0];
    let line = |(value, step): (&f64, usize)| format!("{{\"step\":{step},\"grad_norm\":{value}}}\n");
    fs::write(path.join("metrics.jsonl"), values.iter().zip(1..).map(line).collect::<String>())
        .expect("written");
    let [picture] = &pictures(&options(&folder, &[path]))[..] else { panic!("one picture") };
    // The line of the only series is the only one of width 1.
    let line = picture.lines().find(|line| line.contains("stroke-width=\"1\"")).expect("a line");
    let path = line.split(" d=\"").nth(1).and_then(|d| d.split('"').next()).expect("a path");
    let places: Vec<f64> = path
        .trim_start_matches('M')
        .split(['L', ' '])
        .map(|number| number.parse().expect("a number"))
        .collect();
    let places: Vec<(f64, f64)> = places.chunks(2).map(|pair| (pair[0], pair[1])).collect();
    assert_eq!(places.len(), values.len());
    // The axes are linear: equal distances on both for equal differences.
    let right = (places[3].0 - places[0].0) / 3.0;
    let up = (places[0].1 - places[3].1) / 3.0;
    for (place, (value, step)) in places.iter().zip(values.iter().zip(0..)) {
        assert!((place.0 - places[0].0 - right * f64::from(step)).abs() < 0.02, "{places:?}");
        assert!((places[0].1 - place.1 - up * (value - 1.0)).abs() < 0.02, "{places:?}");
    }
}

#[test]
fn a_run_of_many_steps_is_a_small_picture() {
    let folder = Folder::new("plot-training-long");
    let runs = [run(&folder, "long", 20_000, 0.5)];
    let [charts, loads] = &pictures(&options(&folder, &runs))[..] else { panic!("two pictures") };
    assert!(charts.contains("the mean of neighbouring steps, and its band their range"), "{charts}");
    for picture in [charts, loads] {
        assert!(picture.len() < 500_000, "{}", picture.len());
    }
}

#[test]
fn series_are_chosen_by_name() {
    let folder = Folder::new("plot-training-series");
    let runs = [run(&folder, "one", 40, 0.5)];
    let with = |series: &[&str]| PlotOptions {
        series: series.iter().map(|&name| name.to_owned()).collect(),
        ..options(&folder, &runs)
    };
    let [picture] = &pictures(&with(&["lr", "validation_loss"]))[..] else { panic!("one picture") };
    assert!(picture.contains(">Learning rate<") && picture.contains(">Loss<"));
    assert!(!picture.contains(">Memory<") && !picture.contains(">loss<"));
    let files = plot(&with(&["expert_load", "lr"])).expect("drawn");
    let names: Vec<_> = files.iter().filter_map(|file| file.file_name()?.to_str()).collect();
    assert_eq!(names, ["training.svg", "expert_load.svg"]);
    let log = PlotOptions { log: true, ..with(&["lr"]) };
    assert!(pictures(&log)[0].contains(">log<"));
    let log = PlotOptions { log: true, ..with(&["memory", "expert_load"]) };
    let refused = plot(&log).expect_err("refused").to_string();
    let wanted = "log: none of memory, expert_load can have a logarithmic axis; ";
    assert!(refused.starts_with(wanted), "{refused}");
    let file = |series: &[&str]| PlotOptions {
        output: PictureOutput::File(folder.path("x.png"), PictureFormat::Png),
        ..with(series)
    };
    assert_eq!(plot(&file(&[])).expect("drawn").len(), 1);
    assert_eq!(plot(&file(&["expert_load"])).expect("drawn").len(), 1);
    let fails = |options: &PlotOptions| plot(options).expect_err("refused").to_string();
    assert!(fails(&file(&["expert_load", "lr"])).contains("give a folder with output"));
    let text = fails(&with(&["los"]));
    let known = "loss, validation_loss, auxiliary, balance_loss, lr, grad_norm, tokens_per_second, memory, \
                 memory_bytes, experts, fullest_expert, skipped, expert_load";
    let wanted = format!("series=los: no such series in these runs (did you mean loss?); there are {known}");
    assert_eq!(text, wanted);
}

#[test]
fn folders_and_options_that_do_not_belong_together() {
    let folder = Folder::new("plot-training-refused");
    let one = run(&folder, "one", 10, 0.5);
    let other = folder.path("other");
    fs::create_dir_all(&other).expect("created");
    let fails = |options: &PlotOptions| {
        let text = plot(options).expect_err("refused").to_string();
        text.replace(&folder.path("").display().to_string(), "")
    };
    let mixed = options(&folder, &[one.clone(), other.clone()]);
    assert_eq!(
        fails(&mixed),
        "one is a training run and other is not; give only training runs, or one folder of a prediction"
    );
    let missing = folder.path("missing");
    assert_eq!(
        fails(&options(&folder, &[one.clone(), missing.clone()])),
        "one is a training run and missing does not exist; give only training runs, or one folder of a prediction"
    );
    let log = PlotOptions { log: true, ..options(&folder, &[missing]) };
    assert_eq!(fails(&log), "missing: there is no such folder; check the path");
    let records = PlotOptions { records: vec!["a".to_owned()], ..options(&folder, std::slice::from_ref(&one)) };
    assert_eq!(
        fails(&records),
        "records is for predictions, and one is a training run; omit records, or choose charts with series"
    );
    let log = PlotOptions { log: true, ..options(&folder, std::slice::from_ref(&other)) };
    assert_eq!(fails(&log), "log is for training runs, and other is not one; omit log");
    let two = options(&folder, &[other.clone(), other]);
    assert!(fails(&two).starts_with("the pictures of a prediction are of one folder"));
    let many = options(&folder, &vec![one.clone(); 17]);
    assert!(fails(&many).starts_with("17 training runs; at most 16"));
    fs::write(one.join("metrics.jsonl"), "").expect("written");
    assert_eq!(
        fails(&options(&folder, std::slice::from_ref(&one))),
        "one: metrics.jsonl has no number yet; wait for the first logged step"
    );
}
