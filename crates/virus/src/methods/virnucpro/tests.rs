//! Tests of the result files: comparison with VirNucPro's files, and the contents of the tables in all edge cases.

use super::*;
use crate::methods::FILES;
use crate::methods::virnucpro::{embeddings, intermediate, tables};
use crate::output::NOTES;
use crate::output::{RUN_RECORD, RecordText, reports};
use crate::pipeline::record::SequenceCounts;
use plimsoll_data::outputs::{WrittenFile, WrittenFiles};
use plimsoll_data::weights::Weights;
use plimsoll_data::window::record_windows;
use plimsoll_testing::Folder;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;

/// Returns the lines of a file after the header.
fn rows(folder: &Folder, name: &str) -> Vec<String> {
    folder.read(name).lines().skip(1).map(str::to_owned).collect()
}

const PLAIN: ResultOptions = ResultOptions {
    trained: true,
    threshold: 0.5,
    keep_intermediate: false,
    save_embeddings: None,
    hits_format: HitsFormat::Fasta,
    width: 2,
    length: 10,
    sort_bytes: 1 << 20,
    source: false,
    metadata: Vec::new(),
};

/// Returns the frames F1, F2, ... with the given scores.
fn frames(scores: &[[f32; 2]]) -> Vec<OrfScore> {
    scores.iter().zip(Frame::ALL).map(|(&scores, frame)| OrfScore { frame, scores }).collect()
}

/// Writes a record with windows of ten bases, given as lists of scores of their frames; returns its call.
fn record(outputs: &mut VirNucProWriter, id: &str, windows: &[&[[f32; 2]]]) -> Call {
    let length = 10 * windows.len();
    for (index, scores) in windows.iter().enumerate() {
        let (start, end, orfs) = (10 * index, 10 * index + 10, frames(scores));
        outputs.add_window(&ScoredWindow { record: id, index, start, end, orfs: &orfs }).unwrap();
    }
    let text = RecordText { sequence: b"ACGTACGTNn".repeat(windows.len()), ..RecordText::default() };
    outputs.end_record(&RecordEnd { id, length, text: Some(&text), mate: None }).unwrap()
}

/// Run record of a version.
fn record_of(version: &'static str) -> RunRecord {
    RunRecord { version, ..RunRecord::default() }
}

/// Creates outputs in a temporary folder, runs `f` on them and finishes them.
fn written(options: ResultOptions, f: impl FnOnce(&mut VirNucProWriter)) -> (Folder, ResultCounts) {
    let folder = Folder::new("output");
    let mut outputs = VirNucProWriter::create(&folder.0, options).unwrap();
    f(&mut outputs);
    let counts = outputs.complete(&mut record_of("0")).unwrap();
    (folder, counts)
}

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/goldens/pipeline")
}

/// Open reading frames of a `prediction_results.txt` by record, in the order of the file, and by index of the
/// window.
type Rows = Vec<(String, BTreeMap<usize, Vec<OrfScore>>)>;

/// Parses a `prediction_results.txt`.
fn parse(text: &str) -> Rows {
    let mut rows = Rows::new();
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split('\t').collect();
        let (window, frame) = fields[0].split_at(fields[0].len() - 2);
        let (record, number) = window.rsplit_once("_chunk_").unwrap();
        let frame = Frame::ALL.into_iter().find(|f| f.name() == frame).unwrap();
        let scores = [fields[2].parse().unwrap(), fields[3].parse().unwrap()];
        if rows.last().is_none_or(|(id, _)| id != record) {
            rows.push((record.to_owned(), BTreeMap::new()));
        }
        let windows = &mut rows.last_mut().unwrap().1;
        windows.entry(number.parse::<usize>().unwrap() - 1).or_default().push(OrfScore { frame, scores });
    }
    rows
}

/// Writes all records of `rows`, each with all windows up to the last window that has a frame.
fn replay(rows: &Rows, outputs: &mut VirNucProWriter) {
    for (id, windows) in rows {
        let count = windows.keys().max().unwrap() + 1;
        for index in 0..count {
            let orfs = windows.get(&index).map_or(&[][..], |orfs| orfs);
            let (start, end) = (10 * index, 10 * index + 10);
            outputs.add_window(&ScoredWindow { record: id, index, start, end, orfs }).unwrap();
        }
        let text = RecordText { sequence: b"A".to_vec(), ..RecordText::default() };
        outputs.end_record(&RecordEnd { id, length: 10 * count, text: Some(&text), mate: None }).unwrap();
    }
}

/// Checks that the scores of the reference model, in full precision instead of as printed, give VirNucPro's files.
fn check_golden(length: usize) {
    let expected = goldens().join(format!("expected_{length}"));
    let expect = |name: &str| fs::read_to_string(expected.join(name)).unwrap();
    let mut rows = parse(&expect(tables::ROWS));
    let weights = Weights::open(&expected.join("golden.safetensors")).unwrap();
    let count = weights.tensor("scores").unwrap().shape()[0] as usize;
    let mut scores = vec![0.0; 2 * count];
    weights.read_f32("scores", 0..2 * count as u64, &mut scores).unwrap();
    let orfs = rows.iter_mut().flat_map(|(_, windows)| windows.values_mut().flatten());
    let replaced = orfs.zip(scores.chunks_exact(2)).map(|(orf, s)| orf.scores = [s[0], s[1]]).count();
    assert_eq!(replaced, count);

    let (folder, counts) = written(PLAIN, |outputs| replay(&rows, outputs));
    assert_eq!(counts.orfs, count as u64);
    assert_eq!(folder.read(tables::ROWS), expect(tables::ROWS));
    assert_eq!(folder.read(tables::CONSENSUS), expect(tables::CONSENSUS));
}

#[test]
fn the_goldens_at_500() {
    check_golden(500);
}

#[test]
fn the_goldens_at_300() {
    check_golden(300);
}

#[test]
fn the_real_results() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/real/virnucpro");
    for run in ["test_with_orfs_merged", "test_fixed_500bp_merged"] {
        let Ok(text) = fs::read_to_string(folder.join(run).join(tables::ROWS)) else {
            println!("skipped: {} is not there", folder.join(run).display());
            continue;
        };
        let (out, _) = written(PLAIN, |outputs| replay(&parse(&text), outputs));
        let consensus = fs::read_to_string(folder.join(run).join(tables::CONSENSUS)).unwrap();
        assert_eq!(out.read(tables::ROWS), text);
        assert_eq!(out.read(tables::CONSENSUS), consensus);
    }
}

/// Writes four records: a virus; a record called other with a window whose scores tie; a record without a
/// scored frame; an empty record.
fn four_records(outputs: &mut VirNucProWriter) {
    record(outputs, "r1", &[&[[0.25, 0.75], [0.1, 0.9]], &[]]);
    record(outputs, "r2", &[&[[0.75, 0.25]], &[[0.5, 0.5], [0.5, 0.5]], &[[0.5, 0.25]]]);
    record(outputs, "r3", &[&[]]);
    record(outputs, "r4", &[]);
}

#[test]
fn the_tables_of_a_trained_model() {
    let (folder, counts) = written(PLAIN, four_records);
    assert_eq!(
        folder.read(PREDICTIONS).replace('\t', " "),
        "seq_name length n_windows n_scored n_virus virus_score prediction\n\
         r1 20 2 1 1 0.782609 virus\n\
         r2 30 3 3 1 0.361111 other\n\
         r3 10 1 0 0 NA no_call\n\
         r4 0 0 0 0 NA skipped\n"
    );
    assert_eq!(
        folder.read(WINDOWS).replace('\t', " "),
        "seq_name window start end n_orfs best_frame score_other score_virus prediction\n\
         r1 1 1 10 2 F2 0.25 0.9 virus\n\
         r1 2 11 20 0 NA NA NA no_call\n\
         r2 1 1 10 1 F1 0.75 0.25 other\n\
         r2 2 11 20 2 F1 0.5 0.5 virus\n\
         r2 3 21 30 1 F1 0.5 0.25 other\n\
         r3 1 1 10 0 NA NA NA no_call\n"
    );
    assert_eq!(
        folder.read(BED).replace('\t', " "),
        "r1 0 10 r1|1 783 +\nr2 0 10 r2|1 250 +\nr2 10 20 r2|2 500 +\nr2 20 30 r2|3 333 +\n"
    );
    assert_eq!(
        folder.read(HitsFormat::Fasta.file()),
        ">r1 virus_score=0.782609 prediction=virus\nACGTACGTNnACGTACGTNn\n"
    );
    assert_eq!(rows(&folder, tables::ROWS)[3].replace('\t', " "), "r2_chunk_2F1 others 0.5 0.5");
    assert_eq!(rows(&folder, tables::CONSENSUS)[2].replace('\t', " "), "r2_chunk_2 True");
    assert_eq!(folder.read(NOTES), "seq_name\tkind\tdetail\taction\n");
    let run = folder.read(RUN_RECORD);
    assert!(run.starts_with("{\n  \"arithmetic\": ") && run.ends_with("\n}\n"), "{run}");
    assert_eq!(ResultCounts::from_record(&serde_json::from_str(&run).unwrap()), counts);
    let sums = ResultCounts {
        records: 4,
        windows: 6,
        scored_windows: 4,
        orfs: 6,
        virus: 1,
        ..ResultCounts::default()
    };
    assert_eq!(counts, ResultCounts { other: 1, no_call: 1, skipped: 1, ..sums });
}

#[test]
fn untrained_weights_call_nothing() {
    let (folder, counts) = written(ResultOptions { trained: false, ..PLAIN }, four_records);
    let calls = |name| {
        let last = |row: &String| row.rsplit('\t').next().unwrap().to_owned();
        rows(&folder, name).iter().map(last).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(calls(PREDICTIONS), "untrained untrained no_call skipped");
    assert_eq!(calls(WINDOWS), "untrained no_call untrained untrained untrained no_call");
    assert_eq!(rows(&folder, PREDICTIONS)[0].replace('\t', " "), "r1 20 2 1 NA NA untrained");
    assert_eq!(rows(&folder, WINDOWS)[0].replace('\t', " "), "r1 1 1 10 2 NA NA NA untrained");
    assert!(folder.read(BED).starts_with("r1\t0\t10\tr1|1\t.\t.\n"));
    let [table, bar, versions] = [reports::MULTIQC, reports::MULTIQC_CALLS, reports::VERSIONS];
    assert_eq!(folder.names(), [NOTES, bar, table, PREDICTIONS, RUN_RECORD, versions, BED, WINDOWS]);
    assert_eq!((counts.untrained, counts.no_call, counts.virus, counts.other), (2, 1, 0, 0));
}

#[test]
fn the_threshold_changes_calls_of_records_only() {
    for (threshold, expected) in
        [(0.0, Call::Virus), (0.375, Call::Virus), (0.376, Call::Other), (1.0, Call::Other)]
    {
        let (folder, _) = written(ResultOptions { threshold, ..PLAIN }, |outputs| {
            assert_eq!(record(outputs, "a", &[&[[0.75, 0.25]], &[[0.5, 0.5]]]), expected);
        });
        assert_eq!(rows(&folder, WINDOWS)[1].rsplit('\t').next(), Some("virus"));
        assert_eq!(folder.read(HitsFormat::Fasta.file()).is_empty(), expected == Call::Other);
    }
}

#[test]
fn odd_names_stay_on_their_line() {
    let id = "a\u{1b}|b\"'\\é,#\u{85}";
    let (folder, _) = written(PLAIN, |outputs| {
        record(outputs, id, &[&[[0.25, 0.75]]]);
        let (seq_name, detail) = (id.to_owned(), "tab\there\nand\r\nthere".to_owned());
        outputs.common().note(&Note { seq_name, kind: "x", detail, action: "" }).unwrap();
    });
    let name = "a\\u{1b}|b\"'\\é,#\\u{85}";
    assert_eq!(rows(&folder, PREDICTIONS), [format!("{name}\t10\t1\t1\t1\t0.750000\tvirus")]);
    assert_eq!(rows(&folder, NOTES), [format!("{name}\tx\ttab\\there\\nand\\r\\nthere\t")]);
    assert_eq!(folder.read(BED), format!("{name}\t0\t10\t{name}|1\t750\t+\n"));
    assert_eq!(rows(&folder, tables::CONSENSUS), [format!("{name}_chunk_1\tTrue")]);
    assert!(
        folder
            .read(HitsFormat::Fasta.file())
            .starts_with(&format!(">{id} virus_score=0.750000 prediction=virus\n"))
    );
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let folder = Folder::new("output");
    let options =
        ResultOptions { keep_intermediate: true, save_embeddings: Some(EmbeddingFormat::Safetensors), ..PLAIN };
    let mut outputs = VirNucProWriter::create(&folder.0, options).unwrap();
    four_records(&mut outputs);
    assert!(!folder.names().is_empty(), "temporaries");
    drop(outputs);
    assert_eq!(folder.names(), Vec::<String>::new());
}

#[test]
fn a_second_run_replaces_the_first_at_its_end() {
    let folder = Folder::new("output");
    let mut list = WrittenFiles::default();
    for name in FILES {
        list.insert(name, WrittenFile::of(&folder.write(name, "old")));
    }
    let old = json!({"outputs": list}).to_string();
    folder.write(RUN_RECORD, &old);
    // A file that no run wrote stays, and so does a file of the first run that was edited.
    folder.write("mine.txt", "mine");
    folder.write(intermediate::CHUNKED, "edited");
    let options = ResultOptions { trained: false, ..PLAIN };
    drop(VirNucProWriter::create(&folder.0, options.clone()).unwrap());
    assert_eq!(folder.names().len(), FILES.len() + 1);
    let outputs = VirNucProWriter::create(&folder.0, options).unwrap();
    assert_eq!(folder.read(RUN_RECORD), old);
    outputs.complete(&mut RunRecord::default()).unwrap();
    let [table, bar, versions] = [reports::MULTIQC, reports::MULTIQC_CALLS, reports::VERSIONS];
    let chunked = intermediate::CHUNKED;
    let wanted = [chunked, "mine.txt", NOTES, bar, table, PREDICTIONS, RUN_RECORD, versions, BED, WINDOWS];
    assert_eq!(folder.names(), wanted);
    assert_eq!([folder.read("mine.txt"), folder.read(chunked)], ["mine", "edited"]);
    assert!(folder.read(RUN_RECORD).contains("counts"));
    // The new record lists the new files, by which a third run knows them.
    let list = WrittenFiles::of_record(&folder.read(RUN_RECORD));
    assert!(
        wanted.iter().all(|name| list.has(&folder.0, name) != [chunked, "mine.txt", RUN_RECORD].contains(name))
    );
}

/// Writes two frames with embeddings.
fn embedded(format: EmbeddingFormat) -> Folder {
    let options = ResultOptions { save_embeddings: Some(format), ..PLAIN };
    let (folder, _) = written(options, |outputs| {
        record(outputs, "a", &[&[], &[[0.5, 0.5], [0.5, 0.5]]]);
        outputs.embedding("a_chunk_2F1", 9, &[1.0, -2.0]).unwrap();
        outputs.embedding("a_chunk_2F2", 8, &[3.0, 4.0]).unwrap();
    });
    folder
}

#[test]
fn embeddings_stand_in_input_order() {
    let values: Vec<u8> = [1.0f32, -2.0, 3.0, 4.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let folder = embedded(EmbeddingFormat::Npy);
    assert_eq!(folder.read(embeddings::NPY_IDS), "a_chunk_2F1\na_chunk_2F2\n");
    let npy = fs::read(folder.path(embeddings::NPY)).unwrap();
    assert_eq!(npy[npy.len() - 16..], values);

    let folder = embedded(EmbeddingFormat::Safetensors);
    let weights = Weights::open(&folder.path(embeddings::SAFETENSORS)).unwrap();
    assert_eq!(weights.metadata()["ids"], "[\"a_chunk_2F1\",\"a_chunk_2F2\"]");
    assert_eq!(weights.tensor("embeddings").unwrap().shape(), [2, 2]);
    assert!(!folder.names().iter().any(|name| name.ends_with(".npy")));

    let folder = embedded(EmbeddingFormat::Parquet);
    let table = fs::read(folder.path(embeddings::PARQUET)).unwrap();
    assert!(table.starts_with(b"PAR1") && table.ends_with(b"PAR1"));
}

#[test]
fn intermediate_files_hold_what_was_given() {
    let (folder, _) = written(ResultOptions { keep_intermediate: true, ..PLAIN }, |outputs| {
        outputs.texts(&[">a\n", "n", ""].map(Vec::from)).unwrap();
        outputs.texts(&["AC\n", "", "p"].map(Vec::from)).unwrap();
    });
    let texts =
        [intermediate::CHUNKED, intermediate::NUCLEOTIDE, intermediate::PROTEIN].map(|n| folder.read(n));
    assert_eq!(texts, [">a\nAC\n", "n", "p"]);
    let (folder, _) = written(PLAIN, |outputs| outputs.texts(&["x", "x", "x"].map(Vec::from)).unwrap());
    assert!(!folder.names().iter().any(|name| name.ends_with(".fa")));
}

/// Checks the last line of the report `name` for a run of four records and a failed frame on the input `input`.
fn check_report(name: &str, input: &str, expected: &str) {
    let folder = Folder::new("output");
    let mut outputs = VirNucProWriter::create(&folder.0, PLAIN).unwrap();
    four_records(&mut outputs);
    let inputs = [input, "b.fa"].map(str::to_owned).to_vec();
    let sequences = SequenceCounts { failed: 1, ..SequenceCounts::default() };
    let mut run_record = RunRecord { inputs, sequences, ..RunRecord::default() };
    outputs.complete(&mut run_record).unwrap();
    let last = rows(&folder, name).last().map(|line| line.replace('\t', " "));
    assert_eq!(last.as_deref(), Some(expected));
}

#[test]
fn reports_are_of_the_run() {
    check_report(reports::MULTIQC, "x/reads.fa.gz", "reads 4 6 4 6 1 1 1 1 1 0 0");
    check_report(reports::MULTIQC_CALLS, "-", "stdin 1 1 1 1 0");
    check_report(reports::VERSIONS, "-", concat!("    plimsoll: ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn every_file_and_column_is_documented() {
    let docs = include_str!("../../../../../docs/file-formats.md");
    let (folder, _) = written(PLAIN, four_records);
    let columns = [PREDICTIONS, WINDOWS, NOTES, tables::ROWS, tables::CONSENSUS];
    let header = |name: &str| folder.read(name).lines().next().unwrap().replace('\t', " ");
    let headers = columns.map(header).join(" ");
    for name in FILES.into_iter().chain(headers.split(' ')) {
        assert!(docs.contains(&format!("`{name}`")), "docs/file-formats.md does not tell of `{name}`");
    }
}

#[test]
fn a_run_of_nothing_has_headers() {
    let (folder, counts) = written(PLAIN, |_| {});
    assert_eq!(counts, ResultCounts::default());
    assert_eq!(folder.read(tables::CONSENSUS), "Modified_ID\tIs_Virus\n");
    assert_eq!((folder.read(HitsFormat::Fasta.file()), folder.read(BED)), (String::new(), String::new()));
}

#[test]
fn a_long_virus_is_wrapped_as_it_is() {
    let sequence = b"acgtN".repeat(25);
    let (folder, _) = written(PLAIN, |outputs| {
        for (index, window) in record_windows(sequence.len(), 50).enumerate() {
            let (start, end, orfs) = (window.start, window.end(), frames(&[[0.0, 1.0]]));
            outputs.add_window(&ScoredWindow { record: "v", index, start, end, orfs: &orfs }).unwrap();
        }
        assert_eq!(outputs.call(), Call::Virus);
        let text = RecordText { sequence: sequence.clone(), ..RecordText::default() };
        outputs
            .end_record(&RecordEnd { id: "v", length: sequence.len(), text: Some(&text), mate: None })
            .unwrap();
    });
    let widths: Vec<usize> = rows(&folder, HitsFormat::Fasta.file()).iter().map(String::len).collect();
    assert_eq!(widths, [60, 60, 5]);
    assert_eq!(rows(&folder, HitsFormat::Fasta.file()).concat().as_bytes(), sequence);
}

/// Checks that `f` fails with a message that contains `expected`, after a valid window of bases 0..10 of record
/// `r`.
fn check_refused(f: impl FnOnce(&mut VirNucProWriter) -> Result<(), OutputError>, expected: &str) {
    let folder = Folder::new("output");
    let options = ResultOptions { save_embeddings: Some(EmbeddingFormat::Npy), ..PLAIN };
    let mut outputs = VirNucProWriter::create(&folder.0, options).unwrap();
    let orfs = frames(&[[0.0, 1.0]]);
    outputs.add_window(&ScoredWindow { record: "r", index: 0, start: 0, end: 10, orfs: &orfs }).unwrap();
    let error = f(&mut outputs).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn results_out_of_place_are_refused() {
    let next = |record, index, start, end| {
        move |o: &mut VirNucProWriter| o.add_window(&ScoredWindow { record, index, start, end, orfs: &[] })
    };
    check_refused(next("s", 0, 0, 10), "'s': its window comes before 'r' has ended");
    check_refused(next("r", 0, 0, 10), "window 1 of bases 0..10 follows 1 windows up to base 10");
    check_refused(next("r", 2, 10, 20), "window 3 of bases 10..20");
    check_refused(next("r", 1, 11, 20), "window 2 of bases 11..20");
    check_refused(next("r", 1, 10, 10), "window 2 of bases 10..10");
    let end = |id, length| {
        move |o: &mut VirNucProWriter| o.end_record(&RecordEnd { id, length, text: None, mate: None }).map(drop)
    };
    check_refused(end("s", 10), "'s': it ends after windows of 'r'");
    check_refused(end("r", 11), "'r': its windows end at base 10 of 11");
    check_refused(end("r", 10), "'r': called virus, and its sequence is not there");
}

#[test]
fn bad_scores_and_embeddings_are_refused() {
    let scored = |orfs: Vec<OrfScore>| {
        move |o: &mut VirNucProWriter| {
            o.add_window(&ScoredWindow { record: "r", index: 1, start: 10, end: 20, orfs: &orfs })
        }
    };
    check_refused(scored(frames(&[[0.5, 0.5], [f32::NAN, 0.5]])), "'r_chunk_2F2': the scores are NaN and 0.5");
    check_refused(scored(frames(&[[0.5, f32::INFINITY]])), "'r_chunk_2F1': the scores are 0.5 and inf");
    check_refused(scored(frames(&[[-0.5, 0.5]])), "the scores are -0.5 and 0.5");
    check_refused(scored(frames(&[[0.0, 0.0]])), "the scores are 0 and 0");
    let twice = OrfScore { frame: Frame::F2, scores: [0.5, 0.5] };
    check_refused(scored(vec![twice, twice]), "frames of window 2 are doubled");
    let row = |values: &'static [f32]| move |o: &mut VirNucProWriter| o.embedding("r_chunk_1F1", 3, values);
    check_refused(row(&[1.0, f32::NAN]), "'r_chunk_1F1': its embedding contains a NaN or infinite value");
    check_refused(row(&[1.0]), "a row of 1 values in a file of 2 columns");
}

#[test]
fn an_incomplete_run_is_refused() {
    let folder = Folder::new("output");
    let options = ResultOptions { save_embeddings: Some(EmbeddingFormat::Npy), ..PLAIN };
    let open = |options: &ResultOptions| VirNucProWriter::create(&folder.0, options.clone()).unwrap();
    let check = |outputs: VirNucProWriter, expected: &str| {
        let error = outputs.complete(&mut RunRecord::default()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(folder.names(), Vec::<String>::new());
    };
    let mut outputs = open(&PLAIN);
    outputs.add_window(&ScoredWindow { record: "r", index: 0, start: 0, end: 10, orfs: &[] }).unwrap();
    check(outputs, "'r': its windows were given, it was not");

    let mut outputs = open(&options);
    record(&mut outputs, "r", &[&[[0.5, 0.5]]]);
    check(outputs, "'embeddings': 0 rows for 1 open reading frames");

    let mut outputs = open(&PLAIN);
    record(&mut outputs, "r", &[&[[0.5, 0.5]]]);
    record(&mut outputs, "r", &[&[[0.5, 0.5]]]);
    check(outputs, "'r_chunk_1': two results for this chunk");
}

/// The files of a run are completed before the results of an earlier run are touched: an embedding file that cannot be
/// completed leaves them whole, with their run.json.
#[test]
fn results_stay_until_all_files_of_the_next_run_are_complete() {
    for format in [EmbeddingFormat::Npy, EmbeddingFormat::Safetensors, EmbeddingFormat::Parquet] {
        let (folder, _) = written(PLAIN, |outputs| {
            record(outputs, "old", &[&[[0.1, 0.9]]]);
        });
        let before = ["run.json", "predictions.tsv"].map(|name| folder.read(name));
        let write = |block: Option<&str>| {
            let options = ResultOptions { save_embeddings: Some(format), ..PLAIN };
            let mut outputs = VirNucProWriter::create(&folder.0, options).unwrap();
            record(&mut outputs, "new", &[&[[0.9, 0.1]]]);
            outputs.embedding("new_chunk_1F1", 9, &[1.0, 2.0]).unwrap();
            block.iter().for_each(|name| fs::create_dir(folder.path(name)).unwrap());
            outputs.complete(&mut record_of("1"))
        };
        if format == EmbeddingFormat::Safetensors {
            // Its file is created only when the number of rows is known.
            write(Some("embeddings.safetensors")).expect_err("there is a folder");
            assert_eq!(["run.json", "predictions.tsv"].map(|name| folder.read(name)), before);
            fs::remove_dir(folder.path("embeddings.safetensors")).unwrap();
        }
        write(None).unwrap();
        assert!(folder.read("run.json").contains("\"plimsoll\": \"1\""), "{format:?}");
        assert!(folder.names().iter().any(|name| name.starts_with("embeddings.")), "{format:?}");
        assert!(folder.names().iter().all(|name| !name.ends_with(".part")), "{:?}", folder.names());
        // The next run writes no embeddings, and those of this run go.
        let mut outputs = VirNucProWriter::create(&folder.0, PLAIN).unwrap();
        record(&mut outputs, "last", &[&[[0.9, 0.1]]]);
        outputs.complete(&mut record_of("2")).unwrap();
        assert!(folder.names().iter().all(|name| !name.starts_with("embeddings.")), "{:?}", folder.names());
    }
}

/// A kill between the removal of the earlier run.json and the new one leaves a folder without run.json, which claims
/// nothing; a failed rename at that point stands for the kill.
#[test]
fn a_folder_claims_nothing_between_two_results() {
    let (folder, _) = written(PLAIN, |outputs| {
        record(outputs, "old", &[&[[0.1, 0.9]]]);
    });
    let options = ResultOptions { save_embeddings: Some(EmbeddingFormat::Npy), ..PLAIN };
    let mut outputs = VirNucProWriter::create(&folder.0, options).unwrap();
    record(&mut outputs, "new", &[&[[0.9, 0.1]]]);
    outputs.embedding("new_chunk_1F1", 9, &[1.0, 2.0]).unwrap();
    fs::create_dir(folder.path("embeddings.npy")).unwrap();
    outputs.complete(&mut record_of("1")).expect_err("there is a folder");
    assert!(!folder.names().contains(&"run.json".to_owned()), "{:?}", folder.names());
    assert!(folder.read("predictions.tsv").contains("new"));
}
