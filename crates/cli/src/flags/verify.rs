//! Flags of `plimsoll verify`. Invariant: at least one model is selected.

use super::machine::MachineFlags;
use super::messages::MessageFlags;
use super::print;
use crate::error::CliError;
use clap::Args;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{InputFiles, OutputGuard, hub};
use plimsoll_tools::verify::{VerifyOptions, verify};
use std::path::PathBuf;
use std::process::ExitCode;

/// Check that model weights give correct results on known sequences
///
/// Compares results with published values of released models, with reference results beside the weights
/// (golden.safetensors), and with properties that hold for every model: finite values, results independent of the other
/// sequences in the batch, tokens that decode to the input, a language model that predicts unmasked tokens, a decoder
/// in which no token depends on the tokens after it. With
/// --precision bf16, with int8 on the CPU, or with tf32, fp16 or fp8 on a GPU, it also reports how far hidden states
/// and scores are from f32. The exit code is 0 if all models pass, and 1 otherwise.
#[derive(Debug, Args)]
pub struct VerifyCommand {
    /// Folder of a single model, or folder that contains dnabert_s/, esm2/ and a head (head.safetensors, head.pth,
    /// 500_model.pth or 300_model.pth)
    #[arg(long, value_name = "DIR", required_unless_present_any = ["model", "head"])]
    weights: Option<PathBuf>,

    /// Encoder or decoder: a path or a Hugging Face hub id such as facebook/esm2_t6_8M_UR50D; can be given several times
    #[arg(long, value_name = "PATH|HUB_ID")]
    model: Vec<String>,

    /// Head file, checked without its encoders, such as 500_model.pth; can be given several times. With --reference,
    /// its scores of the embeddings in NAME_merged/ are compared with VirNucPro's scores
    #[arg(long, value_name = "FILE")]
    head: Vec<PathBuf>,

    /// Output folder of a VirNucPro run (NAME_nucleotide/, NAME_protein/, NAME_merged/): encoders are compared with its
    /// embeddings, heads with the scores in NAME_merged/prediction_results.txt
    #[arg(long, value_name = "DIR")]
    reference: Option<PathBuf>,

    #[command(flatten)]
    machine: MachineFlags,

    #[command(flatten)]
    messages: MessageFlags,
}

impl VerifyCommand {
    /// The files that the command reads.
    fn input_files(&self) -> InputFiles {
        let mut files = InputFiles::default();
        self.weights.iter().chain(&self.reference).for_each(|path| files.add_model(path));
        self.model.iter().for_each(|model| hub::add_model_files(model, &mut files));
        self.head.iter().for_each(|head| files.add(head));
        files
    }

    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let mut terminal = self.messages.terminal(&mut OutputGuard::new(self.input_files(), false))?;
        let settings = self.machine.settings_of_one()?;
        let options = VerifyOptions {
            weights: self.weights,
            models: self.model,
            heads: self.head,
            reference: self.reference,
            settings,
        };
        let done = verify(&options, &mut terminal);
        terminal.finish();
        let report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        if self.messages.json() {
            print(&format!("{:#}", to_json(&report)))?;
        } else if !self.messages.quiet() {
            print(&report.to_string())?;
        }
        Ok(ExitCode::from(u8::from(!report.passes())))
    }
}
