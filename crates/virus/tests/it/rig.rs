//! Options of predictions for tests.

use plimsoll_runtime::{Precision, Settings, Silent};
use plimsoll_testing::fixture;
use plimsoll_virus::{
    MethodOptions, Models, PredictOptions, PredictReport, VirNucProOptions, VirusError, predict,
};
use std::fs;
use std::path::Path;

/// A prediction of `input` into `output` with the golden models, windows of 500 bases, in f32 like the golden
/// results.
pub fn golden(input: &Path, output: &Path) -> PredictOptions {
    let model = |name: &str| Some(fixture("goldens").join(name).display().to_string());
    let models =
        Models { dna: model("dnabert_s"), protein: model("esm2"), head: Some(fixture("goldens/head.pth")) };
    virnucpro(builtin(input, output), |method| method.models = models)
}

/// A prediction with the built-in, untrained models in f32.
pub fn builtin(input: &Path, output: &Path) -> PredictOptions {
    let method = MethodOptions::VirNucPro(VirNucProOptions {
        keep_intermediate: true,
        ..VirNucProOptions::usual(Models::default())
    });
    let settings = Settings { threads: 2, precision: Some(Precision::F32), ..Settings::default() };
    PredictOptions {
        workers: 2,
        ..PredictOptions::usual(vec![input.to_owned()], output.to_owned(), method, settings)
    }
}

/// The options of VirNucPro's method.
pub fn method(options: &mut PredictOptions) -> &mut VirNucProOptions {
    match &mut options.method {
        MethodOptions::VirNucPro(method) => method,
        MethodOptions::Caller(_) => panic!("a caller"),
    }
}

/// Returns the options with changed options of VirNucPro's method.
pub fn virnucpro(mut options: PredictOptions, change: impl FnOnce(&mut VirNucProOptions)) -> PredictOptions {
    change(method(&mut options));
    options
}

/// Runs a prediction without an observer.
pub fn run(options: &PredictOptions) -> Result<PredictReport, VirusError> {
    predict(options, &mut Silent)
}

/// Reads a text file; panics with its name if that fails.
pub fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
