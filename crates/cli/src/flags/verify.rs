//! `plimsoll verify`: the flags.

use super::machine::Machine;
use super::print;
use super::voice::Voice;
use crate::error::CliError;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;
use tools::verify::{Options, verify};

/// Run known sequences through weights and say whether the numbers are right
///
/// Compares with published values of released models, with answers that lie beside the weights
/// (golden.safetensors), and with what must hold for any model: finite values, the same bits in any company, tokens
/// that can be read back, a language model that names what it sees. With --precision bf16, int8 on the CPU, or tf32,
/// fp16 or fp8 on a GPU, it also says how far hidden states and scores are from those in f32. Exit code 0 when all models pass, 1
/// otherwise.
#[derive(Debug, Args)]
pub struct Verify {
    /// A folder with dnabert_s/, esm2/ and head.safetensors, head.pth, 500_model.pth or 300_model.pth, or one model's folder
    #[arg(long, value_name = "DIR", required_unless_present_any = ["model", "head"])]
    weights: Option<PathBuf>,

    /// An encoder, a path or a hub id such as facebook/esm2_t6_8M_UR50D; may be given several times
    #[arg(long, value_name = "PATH|HUB_ID")]
    model: Vec<String>,

    /// A head without its encoders, such as 500_model.pth; may be given several times. With --reference its scores of the
    /// embeddings in NAME_merged/ are compared with those that VirNucPro has printed
    #[arg(long, value_name = "FILE")]
    head: Vec<PathBuf>,

    /// The folder of a run of VirNucPro (NAME_nucleotide/, NAME_protein/, NAME_merged/): encoders are compared with its
    /// embeddings, heads with the scores in NAME_merged/prediction_results.txt
    #[arg(long, value_name = "DIR")]
    reference: Option<PathBuf>,

    #[command(flatten)]
    machine: Machine,

    #[command(flatten)]
    voice: Voice,
}

impl Verify {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, CliError> {
        let mut terminal = self.voice.terminal()?;
        let settings = self.machine.settings_of_one()?;
        let options = Options {
            weights: self.weights,
            models: self.model,
            heads: self.head,
            reference: self.reference,
            settings,
        };
        let done = verify(&options, &mut terminal);
        terminal.finish();
        let report = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        if self.voice.json() {
            print(&format!("{:#}", report.to_json()))?;
        } else if !self.voice.quiet() {
            print(&report.to_string())?;
        }
        Ok(ExitCode::from(u8::from(!report.passes())))
    }
}
