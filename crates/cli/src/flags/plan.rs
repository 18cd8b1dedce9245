//! `plimsoll plan`: the flags.

use super::machine::Streaming;
use super::{at_least_one, print};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Args, Command, Error, ValueEnum};
use run::price::{self, Request};
use run::{RunError, Stream, Target};
use std::ffi::OsStr;
use std::process::ExitCode;

/// Show what a model would take of a machine's memory, to the byte, from its configuration alone
///
/// Neither the machine nor the weights need to be there.
#[derive(Debug, Args)]
pub struct Plan {
    /// The model: a hub id such as facebook/esm2_t36_3B_UR50D, a folder, or a config.json
    #[arg(long, value_name = "PATH|HUB_ID")]
    model: String,

    /// Tokens computed in one step [default: the most that fit the budget and bring speed]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    tokens: Option<u64>,

    /// The most memory it may take, like 24GiB or 80% of the target's [default: the target's memory; of this machine 80% of what is free]
    #[arg(long, alias = "memory-budget", value_name = "SIZE")]
    budget: Option<String>,

    /// The machine, by name or as the FILE.toml that bench --calibrate wrote
    #[arg(long, default_value = "cpu", value_name = "NAME|FILE.toml", value_parser = TargetParser)]
    target: String,

    #[command(flatten)]
    streaming: Streaming,

    /// How to print the plan
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,

    /// Print the graph as it is after this pass instead; a wrong name lists them
    #[arg(long, value_name = "PASS", conflicts_with = "format")]
    dump_after: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// A known name, with suggestions for a misspelt one, or anything that ends in `.toml`.
#[derive(Clone)]
struct TargetParser;

impl TypedValueParser for TargetParser {
    type Value = String;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<String, Error> {
        match value.to_str() {
            Some(file) if file.ends_with(".toml") => Ok(file.to_owned()),
            Some(_) | None => PossibleValuesParser::new(Target::names()).parse_ref(command, arg, value),
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(Target::names().map(PossibleValue::new)))
    }
}

impl Plan {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode, RunError> {
        let target = price::target(&self.target)?;
        let budget = self.budget.as_deref().map(|text| price::parse_budget(text, &target)).transpose()?;
        let request = Request { tokens: self.tokens, budget, stream: self.streaming.stream(), target };
        let text = match (&self.dump_after, self.format) {
            (Some(pass), _) => self.dump(pass, request)?,
            (None, Format::Text) => price::to_text(&self.model, &price::program(&self.model, &request)?)?,
            (None, Format::Json) => format!("{:#}", price::to_json(&price::program(&self.model, &request)?)?),
        };
        print(text.trim_end())?;
        Ok(ExitCode::SUCCESS)
    }

    /// The graph after a pass, of the plan that the other formats print.
    fn dump(&self, pass: &str, mut request: Request) -> Result<String, RunError> {
        let program = price::program(&self.model, &request)?;
        // The search builds graphs of other sizes and with other weights too; asked for these, there is one.
        request.tokens = program.plans().first().map(|(_, plan)| plan.graph.bounds.tokens);
        request.stream = match program.is_streamed() {
            true => Stream::Always,
            false => Stream::Never,
        };
        let (mut passes, mut text) = (vec![], None);
        price::program_with(&self.model, &request, &mut |name, graph| {
            passes.push(name);
            if name == pass {
                text = Some(graph.to_string());
            }
        })?;
        text.ok_or_else(|| {
            let passes = passes.join(", ");
            RunError::Refused(format!("--dump-after {pass}: there is no such pass here; there are {passes}"))
        })
    }
}
