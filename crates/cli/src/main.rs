//! The command line: parses flags into options of the applications and prints their results. Invariant: this
//! crate has no logic; the commands are implemented in `virus`, `embed`, `train`, `tools`, `plot`,
//! `report` and `runtime`, and the flags of a command are defined in its file in `flags`.
//!
//! Exit codes: 0 success; 1 failure, bad usage or bad input; 2 some sequences failed to compute; 3 the output
//! of an earlier run cannot be used; 4 does not fit in memory; 130 and 143 interrupted by a signal.
#![forbid(unsafe_code)]

mod error;
mod flags;
mod report;
mod screen;
mod terminal;
mod words;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::process::ExitCode;

/// Find viruses in DNA sequences, compute embeddings of DNA and proteins, and train transformers, within a memory
/// budget that is checked before the run starts
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version, verbatim_doc_comment, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Subcommands,
}

/// Help text about exit codes, which are stable for scripts.
const EXIT_CODES: &str = "\
Exit codes: 0 success; 1 failure, bad usage or bad input; 2 some sequences failed to compute;
3 the output folder contains the results of another run or damaged results (predict, embed; for train its checkpoints);
4 the run does not fit in memory;
130 and 143 interrupted (Ctrl-C, SIGTERM; 129, 138 and 140: SIGHUP, SIGUSR1, SIGUSR2): the same command resumes (predict; train, from the checkpoint that it has
just written) or starts over (embed)";

#[derive(Debug, Subcommand)]
enum Subcommands {
    Predict(Box<flags::predict::PredictCommand>),
    Embed(flags::embed::EmbedCommand),
    Classify(flags::classify::ClassifyCommand),
    Train(flags::train::TrainCommand),
    Evaluate(flags::evaluate::EvaluateCommand),
    Monitor(flags::monitor::MonitorCommand),
    Plan(flags::plan::PlanCommand),
    Plot(flags::plot::PlotCommand),
    Report(flags::report::ReportCommand),
    Bench(Box<flags::bench::BenchCommand>),
    Doctor(flags::doctor::DoctorCommand),
    List(flags::list::ListCommand),
    Convert(flags::convert::ConvertCommand),
    Merge(flags::merge::MergeCommand),
    Verify(Box<flags::verify::VerifyCommand>),
    Completions(flags::completions::CompletionsCommand),
    Man(flags::man::ManCommand),
    Licenses(flags::licenses::LicensesCommand),
}

/// Global allocator that ends the process with exit code 4 if the system refuses memory.
#[global_allocator]
static HEAP: plimsoll_runtime::Heap = plimsoll_runtime::Heap;

fn main() -> ExitCode {
    words::register();
    terminal::survive_file_limit();
    plimsoll_runtime::limit_slack();
    plimsoll_runtime::bill_whole_process();
    let parsed = command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            return print_parse_error(&error);
        }
    };
    let done = match cli.command {
        Subcommands::Predict(command) => command.run(),
        Subcommands::Embed(command) => command.run(),
        Subcommands::Classify(command) => command.run(),
        Subcommands::Train(command) => command.run(),
        Subcommands::Evaluate(command) => command.run(),
        Subcommands::Monitor(command) => command.run(),
        Subcommands::Plan(command) => command.run(),
        Subcommands::Plot(command) => command.run(),
        Subcommands::Report(command) => command.run(),
        Subcommands::Bench(command) => command.run(),
        Subcommands::Doctor(command) => command.run(),
        Subcommands::List(command) => command.run(),
        Subcommands::Convert(command) => command.run(),
        Subcommands::Merge(command) => command.run(),
        Subcommands::Verify(command) => command.run(),
        Subcommands::Completions(command) => command.run(),
        Subcommands::Man(command) => command.run(),
        Subcommands::Licenses(command) => command.run(),
    };
    done.unwrap_or_else(|error| {
        terminal::print_error(&error.chain());
        ExitCode::from(error.exit_code())
    })
}

/// The flags of all commands. A negative number after a flag is its value, so that the message about it says which values
/// the flag takes, and not that there is no flag `-5`.
fn command() -> clap::Command {
    Cli::command().mut_subcommands(|command| {
        command.mut_args(|arg| {
            if arg.is_positional() || !arg.get_action().takes_values() {
                arg
            } else {
                arg.allow_negative_numbers(true)
            }
        })
    })
}

/// Prints the message of the argument parser, which is a help text or a usage error, and returns the exit code.
fn print_parse_error(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    if error.use_stderr() {
        terminal::print_error(text.trim_end());
        ExitCode::FAILURE
    } else {
        ExitCode::from(u8::from(flags::print(text.trim_end()).is_err()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_consistent() {
        command().debug_assert();
    }
}
