//! Embeddings with a custom pooling: the maximum of each hidden unit over the residues of a protein, computed by a
//! [`Session`] within the memory budget.
//!
//! ```sh
//! cargo run --release -p plimsoll-runtime --example max_pooling -- facebook/esm2_t6_8M_UR50D proteins.fa > rows.tsv
//! ```

use plimsoll_data::pack::Order;
use plimsoll_data::sequence::{Reader, Record};
use plimsoll_data::weights::HubEnv;
use plimsoll_graph::Bytes;
use plimsoll_models::Output;
use plimsoll_runtime::session::bounds::{bounds, copies, output_bytes, with_outputs};
use plimsoll_runtime::session::{
    Completed, InOrder, Next, PlanPart, Push, Request, SearchStage, Session, Start,
};
use plimsoll_runtime::{EncoderModel, RuntimeError, Settings, Silent};
use std::path::PathBuf;

/// Number of tokens of the longest accepted protein, including BOS and EOS.
const LONGEST: u64 = 1024;

/// Name of the encoder in the session.
const ENCODER: &str = "encoder";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(model), Some(input)) = (arguments.next(), arguments.next()) else {
        return Err("usage: max_pooling MODEL PROTEINS.fa".into());
    };
    let model = EncoderModel::open(&model, &HubEnv::from_process(), &mut Silent)?;
    max_pooled(&model, &[input.into()], &Settings::default(), |id, row| {
        let columns: Vec<String> = row.iter().map(f32::to_string).collect();
        println!("{id}\t{}", columns.join("\t"));
    })?;
    Ok(())
}

/// Calls `row` with the id and the pooled row of each protein, in the order of the input.
///
/// # Errors
/// An input file cannot be read, a protein has more than [`LONGEST`] tokens, or the model does not fit in memory.
pub fn max_pooled(
    model: &EncoderModel,
    inputs: &[PathBuf],
    settings: &Settings,
    mut row: impl FnMut(&str, &[f32]),
) -> Result<(), RuntimeError> {
    let planned = settings.plan(Request {
        alternatives: vec![vec![stage(model, settings)?]],
        replicas: settings.most_replicas(None),
        tokens: settings.tokens,
        budgets: vec![settings.read_budget()?],
    })?;
    eprintln!("{}", planned.programs()[0].ledger());
    let start = Start { order: Order::Input, weights: vec![model], running: vec![], kept: "hidden states" };
    let mut session = planned.start(0, start, &mut Silent)?;
    let encoder = session.model(ENCODER).ok_or_else(|| RuntimeError::bug("the session has no encoder"))?;

    // Steps complete in any order; `InOrder` returns the rows in the order of the input.
    let mut waiting: InOrder<String> = InOrder::default();
    let (mut reader, mut record, mut tokens) = (Reader::open(inputs)?, Record::default(), vec![]);
    while reader.read_into(&mut record)? {
        tokens.clear();
        model.tokenizer.encode(&record.seq, &mut tokens)?;
        let key = waiting.next_key();
        // A full session accepts nothing until a completed step is taken from it.
        while session.push([(encoder, key, &tokens[..])])? == Push::Full {
            emit(&mut session, &mut waiting, &mut row)?;
        }
        waiting.add(record.id.clone());
    }
    session.end();
    while emit(&mut session, &mut waiting, &mut row)? {}
    Ok(())
}

/// A stage with one encoder and one output, the hidden states of all tokens `(T, D)`.
fn stage<'a>(model: &'a EncoderModel, settings: &Settings) -> Result<SearchStage<'a>, RuntimeError> {
    let part = PlanPart {
        name: ENCODER,
        graph: Box::new(|tokens| model.encoder.graph(bounds(tokens, LONGEST), &[Output::Hidden])),
        policy: settings.policy()?,
        streams: true,
    };
    Ok(SearchStage {
        parts: vec![part],
        longest: LONGEST,
        finish: Box::new(|program, replicas| with_outputs(program, copies(replicas), 0, None)),
        kept: Box::new(|program, steps| Bytes(output_bytes(program).0 * steps as u64)),
    })
}

/// Waits for a step, pools its sequences, and passes all rows whose predecessors are complete to `row`. Returns
/// false if no step is in flight.
fn emit(
    session: &mut Session<'_>,
    waiting: &mut InOrder<String>,
    row: &mut impl FnMut(&str, &[f32]),
) -> Result<bool, RuntimeError> {
    let Next::Ready(step) = session.next(&|| Ok(()))? else { return Ok(false) };
    let width = session.outputs(step.model)[0].width;
    for (i, &key) in step.keys.iter().enumerate() {
        pool(&step, i, width, waiting.values_of(key)?.1);
    }
    session.recycle(step);
    waiting.take(|id, values| {
        row(id, values);
        Ok::<(), RuntimeError>(())
    })?;
    Ok(true)
}

/// Writes to `into` the maximum of each column over the residues of sequence `i`, i.e. over all tokens except
/// the first (BOS) and the last (EOS).
fn pool(step: &Completed, i: usize, width: usize, into: &mut Vec<f32>) {
    into.resize(width, f32::NEG_INFINITY);
    let tokens = step.values(0, i).len() / width;
    for state in step.values(0, i).chunks_exact(width).take(tokens - 1).skip(1) {
        into.iter_mut().zip(state).for_each(|(most, x)| *most = most.max(*x));
    }
}
