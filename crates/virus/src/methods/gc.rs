//! The smallest method, for tests: a window is virus if at least half of its bases are G or C. It has no models, so that
//! results follow from the records alone.

use super::{
    CutWindow, FinishedResults, FinishedWindow, Method, MethodDigests, MethodWeights, ResultsOptions,
    ResultsWriter, WindowBases, WindowNotes, WindowSource, WindowTokenizer,
};
use crate::options::PredictOptions;
use crate::output::table::{Field, TableWriter};
use crate::output::{CommonResults, OutputError, RecordEnd, WINDOWS, commit};
use crate::pipeline::letters::{LetterCounts, WindowLetters};
use crate::pipeline::record::{MethodRecord, RunRecord};
use crate::pipeline::records::WindowBatch;
use crate::pipeline::shape::{HostCosts, MethodNames, MethodShape, StageNames};
use plimsoll_data::window::{RecordWindow, record_windows};
use plimsoll_runtime::RuntimeError;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// The method.
pub(crate) struct GcContent {
    shape: MethodShape,
    digests: MethodDigests,
}

impl GcContent {
    pub(crate) fn new(length: usize) -> Self {
        let shape = MethodShape {
            encoders: vec![],
            head: None,
            length: length as u64,
            sequences: |_| 1,
            window_lengths: |record, window| record_windows(record, window).map(|window| window.len).collect(),
            sequences_of_window: Some(0),
            names: MethodNames {
                stages: StageNames { whole: "the bases", split: None },
                sequence: "window",
                sequences_key: "windows",
                rows: "nothing",
            },
            host: HostCosts::default(),
        };
        Self { shape, digests: MethodDigests::new() }
    }
}

impl Method for GcContent {
    fn shape(&self) -> &MethodShape {
        &self.shape
    }

    fn weights(&self) -> MethodWeights<'_> {
        MethodWeights { encoders: vec![], head: None }
    }

    fn digests(&self) -> &MethodDigests {
        &self.digests
    }

    fn is_trained(&self) -> bool {
        true
    }

    fn parameters(&self, options: &PredictOptions) -> Value {
        json!({"length": options.length})
    }

    fn record(&self) -> MethodRecord {
        MethodRecord::default()
    }

    fn window_source(&self, options: &PredictOptions, _writes_results: bool) -> Arc<dyn WindowSource> {
        Arc::new(GcWindows { length: options.length })
    }

    fn results(&self, run: &ResultsOptions<'_>) -> Result<Box<dyn ResultsWriter>, OutputError> {
        let common = CommonResults::create(run.folder, run.options.source)?;
        let windows = common.table(run.folder, WINDOWS, "seq_name start end gc prediction")?;
        Ok(Box::new(GcWriter { folder: run.folder.to_owned(), common, windows, record_windows: vec![] }))
    }
}

/// Windows without sequences.
pub(crate) struct GcWindows {
    pub(crate) length: usize,
}

impl WindowSource for GcWindows {
    fn cut<'a>(&self, record: &'a [u8]) -> Box<dyn Iterator<Item = CutWindow> + 'a> {
        let windows = record_windows(record.len(), self.length);
        Box::new(windows.map(|location| CutWindow { location, overlap: 0, left_out: LetterCounts::default() }))
    }

    fn tokenizer(&self) -> Box<dyn WindowTokenizer> {
        Box::new(NoTokens)
    }

    fn notes(&self) -> &'static WindowNotes {
        &WindowNotes { non_iupac: "no G or C", all_n: "no G or C", longest_gap: usize::MAX, gap: "" }
    }
}

struct NoTokens;

impl WindowTokenizer for NoTokens {
    fn tokenize(&mut self, _: &WindowBases<'_>, _: &mut WindowBatch) -> Result<WindowLetters, RuntimeError> {
        Ok(WindowLetters::default())
    }
}

struct GcWriter {
    folder: PathBuf,
    common: CommonResults,
    windows: TableWriter,
    /// Windows of the current record.
    record_windows: Vec<RecordWindow>,
}

impl ResultsWriter for GcWriter {
    fn common(&mut self) -> &mut CommonResults {
        &mut self.common
    }

    fn window(&mut self, window: &FinishedWindow<'_>) -> Result<(), OutputError> {
        self.common.counts.windows += 1;
        self.record_windows.push(window.location);
        Ok(())
    }

    fn record(&mut self, record: &RecordEnd<'_>) -> Result<(), OutputError> {
        self.common.counts.records += 1;
        for location in std::mem::take(&mut self.record_windows) {
            let bases = record.text.map_or(&[][..], |text| &text.sequence[location.start..location.end()]);
            let gc = bases.iter().filter(|base| b"GCgc".contains(base)).count() as f64 / location.len as f64;
            let prediction = if gc >= 0.5 { "virus" } else { "other" };
            let name = Field(record.id);
            self.windows.row(format_args!(
                "{name}\t{}\t{}\t{gc:.3}\t{prediction}{}",
                location.start + 1,
                location.end(),
                self.common.source()
            ))?;
        }
        Ok(())
    }

    fn finish(self: Box<Self>, run_record: &mut RunRecord) -> Result<FinishedResults, OutputError> {
        let counts = self.common.counts;
        let files = [self.windows, self.common.into_notes()].map(TableWriter::into_file);
        commit(&self.folder, files.into(), run_record, counts)?;
        Ok(FinishedResults { counts, calls: None })
    }
}

mod tests {
    use super::*;
    use crate::options::{MethodOptions, Models, VirNucProOptions, WindowShard};
    use crate::{FolderPrediction, predict_one};
    use plimsoll_runtime::{Settings, Silent};
    use plimsoll_testing::Folder;
    use std::path::Path;
    use std::time::{Duration, Instant};

    fn options(input: &Path, output_dir: PathBuf) -> PredictOptions {
        let method = MethodOptions::VirNucPro(VirNucProOptions::usual(Models::default()));
        let settings = Settings { threads: 1, ..Settings::default() };
        PredictOptions {
            length: 4,
            commit_every: Duration::ZERO,
            ..PredictOptions::usual(vec![input.to_owned()], output_dir, method, settings)
        }
    }

    fn run(options: &PredictOptions) -> String {
        let method = GcContent::new(options.length);
        let prediction = FolderPrediction { options, method: &method, shared: None, start: Instant::now() };
        predict_one(&prediction, &mut None, &mut Silent).expect("predicted");
        std::fs::read_to_string(options.output_dir.join(WINDOWS)).unwrap_or_default()
    }

    /// A method needs nothing but this file: the pipeline reads, shards and merges for it.
    #[test]
    fn windows_are_scored_by_their_content_of_g_and_c() {
        let folder = Folder::new("gc");
        let input = folder.write("in.fa", format!(">a\nGGCCAATT\n>b\n{}\n", "GATA".repeat(600)));
        let whole = run(&options(&input, folder.path("whole")));
        let start = "seq_name\tstart\tend\tgc\tprediction\na\t1\t4\t1.000\tvirus\na\t5\t8\t0.000\tother\nb\t1\t4\t0.250\tother\n";
        assert!(whole.starts_with(start), "{whole}");
        assert_eq!(whole.lines().count(), 1 + 2 + 600);
        let shards = [1, 2].map(|number| {
            let shard = folder.path(&format!("shard{number}"));
            let shard_options =
                PredictOptions { shard: Some(WindowShard { number, of: 2 }), ..options(&input, shard.clone()) };
            run(&shard_options);
            shard
        });
        let merge = PredictOptions { merge: shards.to_vec(), ..options(&input, folder.path("merged")) };
        assert_eq!(run(&merge), whole);
    }
}
