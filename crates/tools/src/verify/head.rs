//! Checks of VirNucPro's classification head. Invariant: except for the distance between precisions, its inputs
//! are given embeddings, so the verdict does not depend on the encoders.

use super::encoder::OpenedEncoder;
use super::facts::{ANCHORS, DNA_WIDTH, PROTEIN_WIDTH, SCORE_BOUND};
use super::reference::merged_sets;
use super::{Verdict, VerifyOptions, chain, distance, worst};
use crate::ToolError;
use plimsoll_data::pack::Order;
use plimsoll_data::weights::Weights;
use plimsoll_graph::Bounds;
use plimsoll_models::{HeadConfig, mlp_head};
use plimsoll_plan::Policy;
use plimsoll_runtime::session::{ModelId, Next, PlanPart, SearchStage, StageStart, StagesRequest, StepSession};
use plimsoll_runtime::{HeadModel, RuntimeError, Settings, Silent};
use std::fs;
use std::path::Path;

/// Rows of a step.
const ROWS: u64 = 256;

/// Number of random test rows: more than one step, and not a multiple of a step, so that a partial step occurs.
const OWN_ROWS: usize = 300;

/// Window length in bases that the published scores are for.
const LENGTH: usize = 500;

/// A head to verify, and its context.
pub(super) struct HeadCase<'a> {
    pub(super) path: &'a Path,
    pub(super) encoders: Encoders<'a>,
    /// Folder that may contain reference outputs.
    pub(super) bundle: &'a Path,
}

/// State of the encoders that belong to a head.
#[derive(Clone, Copy)]
pub(super) enum Encoders<'a> {
    /// The opened nucleotide and protein encoder of the bundle.
    Opened(&'a OpenedEncoder, &'a OpenedEncoder),
    /// An encoder of the bundle is missing or could not be opened.
    Missing,
    /// The head was given without a bundle.
    Unknown,
}

/// Verifies a head.
pub(super) fn verify(case: &HeadCase<'_>, options: &VerifyOptions) -> Result<Verdict, ToolError> {
    let mut verdict = Verdict::new(&case.path.display().to_string());
    let opened = match case.encoders {
        Encoders::Opened(dna, protein) => HeadModel::open(case.path, dna.width, protein.width),
        Encoders::Unknown => HeadModel::open_alone(case.path),
        Encoders::Missing => {
            verdict.add("opens", false, "its encoders could not be opened, so its sizes are not known");
            return Ok(verdict);
        }
    };
    let head = match opened {
        Ok(head) => head,
        Err(error) => {
            verdict.add("opens", false, chain(&error));
            return Ok(verdict);
        }
    };
    let HeadConfig { dna, protein, .. } = head.config;
    verdict.about = match case.encoders {
        Encoders::Unknown => format!("VirNucPro's head of {} columns", dna + protein),
        Encoders::Opened(..) | Encoders::Missing => format!("VirNucPro's head of {dna} + {protein} columns"),
    };
    let tensors = head.weights.tensors().count();
    verdict.add("opens", true, format!("{tensors} tensors; {} hidden units", head.config.hidden));
    variance(&head, &mut verdict)?;
    let mut runner = HeadRunner::start(&head, &options.settings)?;
    answers(case.bundle, &mut runner, &mut verdict)?;
    reference(&head, options, &mut runner, &mut verdict)?;
    batch_invariance(&mut runner, &mut verdict)?;
    let means = match case.encoders {
        Encoders::Opened(dna, protein) => dna.means.as_ref().zip(protein.means.as_ref()),
        Encoders::Missing | Encoders::Unknown => None,
    };
    if let Some((dna, protein)) = means {
        let wide = runner.scores(&paired(&dna.wide, &protein.wide))?;
        let narrow = runner.scores(&paired(&dna.narrow, &protein.narrow))?;
        distance::scores(&wide, &narrow, &mut verdict);
    }
    Ok(verdict)
}

/// All pairs of a nucleotide and a protein embedding, as merged rows.
fn paired(dna: &[Vec<f32>], protein: &[Vec<f32>]) -> Vec<f32> {
    let rows = dna.iter().flat_map(|d| protein.iter().map(move |p| [&d[..], &p[..]].concat()));
    rows.flatten().collect()
}

/// Checks that the running variances of the batch norm are finite and not negative.
fn variance(head: &HeadModel, verdict: &mut Verdict) -> Result<(), ToolError> {
    let mut values = vec![0.0; head.config.hidden as usize];
    head.weights.read_f32("bn1.running_var", 0..head.config.hidden, &mut values)?;
    let bad = values.iter().filter(|x| !(x.is_finite() && **x >= 0.0)).count();
    verdict.add("statistics", bad == 0, format!("{bad} running variances are negative, NaN or infinite"));
    Ok(())
}

/// Compares with the reference files `pipeline/*/golden.safetensors` beside the head, which hold `merged`
/// inputs and their `scores`.
fn answers(bundle: &Path, runner: &mut HeadRunner, verdict: &mut Verdict) -> Result<(), ToolError> {
    let folders = fs::read_dir(bundle.join("pipeline")).into_iter().flatten().flatten().map(|e| e.path());
    let mut files: Vec<_> =
        folders.map(|folder| folder.join("golden.safetensors")).filter(|f| f.exists()).collect();
    files.sort();
    for file in files {
        let answers = Weights::open(&file)?;
        let rows = answers.tensor("merged")?.shape().first().copied().unwrap_or(0);
        let merged = read_matrix(&answers, "merged", [rows, runner.columns as u64])?;
        let wanted = read_matrix(&answers, "scores", [rows, 2])?;
        let difference = worst(&runner.scores(&merged)?, &wanted);
        let folder = file.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        verdict.near("answers", &format!("{rows} scores of {folder}"), difference, SCORE_BOUND);
    }
    Ok(())
}

/// Reads a matrix, whose shape must be `shape`.
fn read_matrix(weights: &Weights, name: &str, shape: [u64; 2]) -> Result<Vec<f32>, ToolError> {
    let elements = weights.expect(name, &shape)?.elements();
    let mut values = vec![0.0; elements as usize];
    weights.read_f32(name, 0..elements, &mut values)?;
    Ok(values)
}

/// Compares with the scores that VirNucPro computed from the merged embeddings of its own runs: the scores
/// in its `prediction_results.txt`, or else the published scores of the head for 500 bases.
fn reference(
    head: &HeadModel,
    options: &VerifyOptions,
    runner: &mut HeadRunner,
    verdict: &mut Verdict,
) -> Result<(), ToolError> {
    let Some(folder) = &options.reference else { return Ok(()) };
    let columns = runner.columns;
    for set in merged_sets(folder)? {
        let name = &set.name;
        let Some(rows) = set.merged()? else {
            verdict.note("reference", format!("{name}: there is no output_1_merged.pt"));
            continue;
        };
        if let Some((_, row)) = rows.iter().find(|(_, row)| row.len() != columns) {
            let text = format!("{name}: its rows have {} columns, those of this head {columns}", row.len());
            verdict.note("reference", text);
            continue;
        }
        if let (Some(of_head), Some(of_set)) = (head.named_length(), set.length())
            && of_head != of_set
        {
            let text = format!("{name}: its windows have {of_set} bases, this head is for {of_head}");
            verdict.note("reference", text);
            continue;
        }
        let printed = set.scores()?;
        let is_published = head.named_length().is_none_or(|length| length == LENGTH)
            && columns as u64 == DNA_WIDTH + PROTEIN_WIDTH;
        let mut count = 0;
        let mut difference = 0f32;
        for (id, row) in &rows {
            let wanted = match &printed {
                Some(scores) => scores.get(id).copied(),
                None if !is_published => None,
                None => ANCHORS.iter().find(|anchor| anchor.id == id).map(|anchor| anchor.scores),
            };
            if let Some(wanted) = wanted {
                difference = difference.max(worst(&runner.scores(row)?, &wanted));
                count += 1;
            }
        }
        match count {
            0 => verdict.note("reference", format!("{name}: no scores of its {} rows are known", rows.len())),
            _ => {
                verdict.near("reference", &format!("{name}: {count} scores"), difference, SCORE_BOUND);
            }
        }
    }
    Ok(())
}

/// Checks on random rows that the two scores sum to 1, and that they are bitwise equal whether rows are
/// computed alone or together.
fn batch_invariance(runner: &mut HeadRunner, verdict: &mut Verdict) -> Result<(), ToolError> {
    let columns = runner.columns;
    let mut state = 0u64;
    // Knuth's linear congruential generator; its upper 24 bits give a number in [-1, 1).
    let number = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let rows: Vec<f32> = std::iter::repeat_with(number).take(OWN_ROWS * columns).collect();
    let together = runner.scores(&rows)?;
    let mut alone = vec![];
    for row in rows.chunks(columns) {
        alone.extend(runner.scores(row)?);
    }
    let off = together.chunks(2).map(|pair| (pair.iter().sum::<f32>() - 1.0).abs());
    let off = off.fold(0.0, |worst: f32, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) });
    verdict.near("probabilities", &format!("sums of {OWN_ROWS} pairs of scores"), off, 1e-6);
    let same = together.iter().map(|x| x.to_bits()).eq(alone.iter().map(|x| x.to_bits()));
    let detail =
        format!("{OWN_ROWS} rows alone and together: {}", if same { "the same bits" } else { "other bits" });
    verdict.add("company", same, detail);
    Ok(())
}

/// Name of the head's plan in the program.
const HEAD: &str = "head";

/// A head with loaded weights that is ready to run.
struct HeadRunner {
    session: StepSession<'static>,
    head: ModelId,
    /// Indices of the inputs `dna` and `protein`.
    inputs: [usize; 2],
    /// Number of columns of the nucleotide embedding, which come first in a merged row.
    dna: usize,
    /// Number of columns of a merged row.
    columns: usize,
}

impl HeadRunner {
    fn start(head: &HeadModel, settings: &Settings) -> Result<Self, RuntimeError> {
        let rows = Bounds { tokens: 1, sequences: ROWS, longest: 1, packs: 1 };
        let part = PlanPart {
            name: HEAD.to_owned(),
            graph: Box::new(|_| mlp_head(&head.config, rows)),
            policy: Policy::default(),
            streams: false,
        };
        let stage = SearchStage::new(vec![part], 1);
        let planned = settings.plan_stages(StagesRequest {
            alternatives: vec![vec![stage]],
            replicas: 1,
            tokens: Some(1),
            budgets: vec![settings.read_budget()?],
        })?;
        let start = StageStart { order: Order::Input, weights: vec![head], running: vec![], kept: "scores" };
        let session = planned.start(0, start, &mut Silent)?.detached();
        let missing = || RuntimeError::bug("the program has no head over two embeddings");
        let model = session.model(HEAD).ok_or_else(missing)?;
        let dna_input = session.row_input(model, "dna").ok_or_else(missing)?;
        let protein_input = session.row_input(model, "protein").ok_or_else(missing)?;
        let inputs = [dna_input, protein_input];
        let dna = head.config.dna as usize;
        let protein = head.config.protein as usize;
        Ok(Self { inputs, session, head: model, dna, columns: dna + protein })
    }

    /// Computes two scores for each merged row of `columns` values.
    fn scores(&mut self, merged: &[f32]) -> Result<Vec<f32>, ToolError> {
        let mut scores = vec![];
        for rows in merged.chunks(ROWS as usize * self.columns) {
            let mut buffers = self.session.row_buffers(self.head);
            for row in rows.chunks_exact(self.columns) {
                let (dna, protein) = row.split_at(self.dna);
                buffers[self.inputs[0]].extend_from_slice(dna);
                buffers[self.inputs[1]].extend_from_slice(protein);
            }
            let keys = (0..(rows.len() / self.columns) as u64).collect();
            self.session.submit_rows(self.head, keys, buffers)?;
            if let Next::Ready(step) = self.session.next(&|| Ok(()))? {
                (0..step.keys.len()).for_each(|row| scores.extend_from_slice(step.values(0, row)));
                self.session.recycle(step);
            }
        }
        Ok(scores)
    }
}
