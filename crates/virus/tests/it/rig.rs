//! Options of predictions for tests.

use plimsoll_runtime::{Precision, Settings, Silent};
use plimsoll_testing::fixture;
use plimsoll_virus::output::HitsFormat;
use plimsoll_virus::{MethodOptions, Models, Options, PredictReport, VirNucProOptions, VirusError, predict};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// A prediction of `input` into `output` with the golden models, windows of 500 bases, in f32 like the golden
/// results.
pub fn golden(input: &Path, output: &Path) -> Options {
    let model = |name: &str| Some(fixture("goldens").join(name).display().to_string());
    let models =
        Models { dna: model("dnabert_s"), protein: model("esm2"), head: Some(fixture("goldens/head.pth")) };
    virnucpro(builtin(input, output), |method| method.models = models)
}

/// A prediction with the built-in, untrained models in f32.
pub fn builtin(input: &Path, output: &Path) -> Options {
    Options {
        inputs: vec![input.to_owned()],
        output_dir: output.to_owned(),
        force: false,
        method: MethodOptions::VirNucPro(VirNucProOptions {
            keep_intermediate: true,
            ..VirNucProOptions::usual(Models::default())
        }),
        length: 500,
        hits_format: HitsFormat::Fasta,
        strict: false,
        workers: 2,
        prefetch: 2,
        commit_every: Duration::from_secs(5),
        shard: None,
        merge: vec![],
        source: false,
        sort_by_length: true,
        settings: Settings { threads: 2, precision: Some(Precision::F32), ..Settings::default() },
    }
}

/// The options of VirNucPro's method.
pub fn method(options: &mut Options) -> &mut VirNucProOptions {
    match &mut options.method {
        MethodOptions::VirNucPro(method) => method,
        MethodOptions::Caller(_) => panic!("a caller"),
    }
}

/// Returns the options with changed options of VirNucPro's method.
pub fn virnucpro(mut options: Options, change: impl FnOnce(&mut VirNucProOptions)) -> Options {
    change(method(&mut options));
    options
}

/// Runs a prediction without an observer.
pub fn run(options: &Options) -> Result<PredictReport, VirusError> {
    predict(options, &mut Silent)
}

/// Reads a text file; panics with its name if that fails.
pub fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
