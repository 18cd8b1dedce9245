//! Rules on combinations of keys. Invariant: every message names the keys, their values and what would be accepted;
//! types and ranges of single keys are checked by the schema.

use super::unread::unread;
use super::{
    DataFormat, DeviceChoice, DocumentUnit, Interval, MaskKind, MaskUnit, ModelKind, Offload, OffloadPolicy,
    OffloadTo, OptimizerKind, Remat, RematPolicy, Scaling, ScheduleKind, ScheduleUnit, TrainConfig,
    TrainConfigError, Warmup,
};
use plimsoll_data::codons;
use plimsoll_data::printable::is_printable;
use plimsoll_graph::limits::MAX_ROWS;
use plimsoll_graph::{Bytes, Op};
use plimsoll_models::{CallerTask, MAX_EXPERTS, MAX_TASKS};
use plimsoll_runtime::dynamic::MAX_SIZES;
use plimsoll_runtime::machine::parse_budget;
use std::collections::BTreeSet;

/// Returns one message for each rule that the configuration violates.
pub fn broken(c: &TrainConfig) -> Vec<String> {
    let all = [model(c), caller(c), data(c), optimizer(c), batch(c), dynamic(c), run(c)];
    let broken = all.into_iter().flatten().filter(|(is_met, _)| !is_met).map(|(_, text)| text);
    broken.chain(unread(c)).collect()
}

/// Whether a rule is satisfied, and the message if it is not.
type Rule = (bool, String);

fn model(c: &TrainConfig) -> Vec<Rule> {
    let m = &c.model;
    let kind = m.kind;
    let moe = kind == ModelKind::MoeLm;
    let decoder = matches!(kind, ModelKind::MoeLm | ModelKind::DenseLm);
    let full = m.attention.mask == MaskKind::Full;
    let kv = m.kv_heads.unwrap_or(m.heads);
    let experts = m.experts.count;
    let k = m.experts.top_k;
    let head = kind == ModelKind::Head;
    vec![
        (m.preset.is_none() || moe, "model.preset applies only to model.kind moe_lm; remove it, or set \
            model.kind moe_lm".to_owned()),
        (
            // A pretrained model may have heads that are wider or narrower than hidden / heads.
            head || m.from.is_some() || m.hidden.is_multiple_of(m.heads),
            format!("model.hidden {} is not a multiple of model.heads {}", m.hidden, m.heads),
        ),
        (m.heads.is_multiple_of(kv), format!("model.kv_heads {kv} is not a divisor of model.heads {}", m.heads)),
        (
            !moe || experts.saturating_mul(m.layers) <= MAX_EXPERTS,
            format!(
                "model.experts.count {experts} in each of model.layers {} are more than {MAX_EXPERTS} experts; lower one of them",
                m.layers
            ),
        ),
        (!moe || k <= experts, format!("model.experts.top_k {k} is greater than model.experts.count {experts}")),
        (
            !decoder || !full,
            "model.attention.mask full lets a language model see the tokens that it predicts; use causal, \
                window or block_sparse"
                .to_owned(),
        ),
        (decoder || full || head, "model.attention.mask: encoders attend to every position; use full".to_owned()),
        (!decoder || m.classes.is_none(), "model.classes applies only to encoders and heads; remove it".to_owned()),
        (!head || m.classes.is_some(), "model.classes is required for a head; give the number of classes".to_owned()),
        (
            m.class_names.is_empty() || m.classes == Some(m.class_names.len() as u64),
            format!(
                "model.class_names has {} names, and model.classes is {}; give a name for each class",
                m.class_names.len(),
                m.classes.map_or_else(|| "null".to_owned(), |n| n.to_string())
            ),
        ),
        (
            m.class_names.iter().collect::<BTreeSet<_>>().len() == m.class_names.len()
                && m.class_names.iter().all(|name| is_class_name(name)),
            "model.class_names: give different names of printable characters without tabs".to_owned(),
        ),
        (
            !m.freeze_encoder || (m.classes.is_some() && !head),
            "model.freeze_encoder applies only to a classifier over an encoder; give model.classes, or remove it"
                .to_owned(),
        ),
        (
            m.lora.is_none() || matches!(kind, ModelKind::Esm2 | ModelKind::DnabertS),
            "model.lora applies only to model.kind esm2 and dnabert_s; remove it".to_owned(),
        ),
        (
            m.lora.is_none() || m.from.is_some(),
            "model.lora needs trained weights; name the model with model.from".to_owned(),
        ),
    ]
}

/// Rules on callers, and on the keys that only callers have.
fn caller(c: &TrainConfig) -> Vec<Rule> {
    let m = &c.model;
    let d = &c.data;
    let crops = &d.crops;
    let usual_crops = super::CropsSection::default();
    if m.kind != ModelKind::Caller {
        let of_callers = m.tasks.is_empty()
            && *crops == usual_crops
            && c.distillation == super::DistillationSection::default();
        return vec![(
            of_callers,
            "model.tasks, data.crops and distillation apply only to model.kind caller; remove them".to_owned(),
        )];
    }
    let invalid = m
        .tasks
        .iter()
        .position(|task| !CallerTask { name: task.name.clone(), classes: task.classes.clone() }.is_valid());
    let names: BTreeSet<&str> = m.tasks.iter().map(|task| task.name.as_str()).collect();
    let too_long = crops.validation_lengths.iter().find(|&&n| !(5..=100_000).contains(&n));
    vec![
        (
            m.tasks.len() <= MAX_TASKS && names.len() == m.tasks.len(),
            format!("model.tasks: give at most {MAX_TASKS} tasks with different names"),
        ),
        (
            invalid.is_none(),
            format!(
                "model.tasks[{}]: give a name of letters, digits and _, and the names of at least two different classes \
                    without white space",
                invalid.unwrap_or_default()
            ),
        ),
        (
            c.distillation.teacher.is_empty() || !m.tasks.is_empty(),
            "distillation needs the tasks that the teachers have; give model.tasks, or remove it".to_owned(),
        ),
        (
            !c.distillation.teacher.is_empty() || c.distillation == super::DistillationSection::default(),
            "distillation.weight and temperature apply with distillation.teacher; give the folders of the teachers, or remove \
                them"
                .to_owned(),
        ),
        (d.labels.is_some(), "data.labels is required for a caller; give the table of records".to_owned()),
        (
            crops.shortest <= crops.longest,
            format!("data.crops.shortest {} is longer than data.crops.longest {}", crops.shortest, crops.longest),
        ),
        (
            too_long.is_none(),
            format!(
                "data.crops.validation_lengths: {} is not a length from 5 to 100000 bases",
                too_long.copied().unwrap_or_default()
            ),
        ),
        (
            crops.levels.iter().all(|level| !level.column.is_empty()),
            "data.crops.levels: each level needs the name of a column".to_owned(),
        ),
        (
            (crops.shuffled > 0.0) == crops.shuffled_class.is_some(),
            "data.crops.shuffled_class is required with data.crops.shuffled and refused without it".to_owned(),
        ),
        (
            crops.shuffled_class.as_ref().is_none_or(|class| {
                m.tasks.first().is_some_and(|task| task.classes.contains(class))
            }),
            "data.crops.shuffled_class must be a class of the first task of model.tasks".to_owned(),
        ),
        (
            m.tasks.is_empty() || d.masking == super::MaskingSection::default(),
            "data.masking applies to a caller only without model.tasks; remove it".to_owned(),
        ),
        (
            c.run.evaluate_every.is_some()
                || (crops.validation_windows, &crops.validation_lengths)
                    == (usual_crops.validation_windows, &usual_crops.validation_lengths),
            "data.crops.validation_windows and validation_lengths apply with run.evaluate_every; give it, or remove them"
                .to_owned(),
        ),
        (
            c.run.epochs.is_none(),
            "run.epochs: windows of a caller are drawn without end; give run.steps or run.max_tokens".to_owned(),
        ),
        (
            by_epochs(c.run.evaluate_every.as_ref()).is_none(),
            "run.evaluate_every: windows of a caller are drawn without end, so there are no epochs; give a number of steps"
                .to_owned(),
        ),
        (
            by_epochs(c.run.save_every.as_ref()).is_none(),
            "run.save_every: windows of a caller are drawn without end, so there are no epochs; give a number of steps or a \
                time"
                .to_owned(),
        ),
        (
            c.schedule.kind != ScheduleKind::Step || c.schedule.unit == ScheduleUnit::Steps,
            "schedule.unit epochs: windows of a caller are drawn without end, so there are no epochs; set schedule.unit steps"
                .to_owned(),
        ),
        (
            c.loss.z == 0.0 || m.tasks.is_empty(),
            "loss.z applies to a caller only without model.tasks; remove it".to_owned(),
        ),
    ]
}

fn data(c: &TrainConfig) -> Vec<Rule> {
    let d = &c.data;
    let m = d.masking;
    let head = c.model.kind == ModelKind::Head;
    let separated = d.document == DocumentUnit::Separated;
    vec![
        (
            head == (d.format == DataFormat::Embeddings) && head != d.proteins.is_empty(),
            "data.format embeddings and data.proteins are required for model.kind head and refused for other \
                models"
                .to_owned(),
        ),
        (
            !head || d.labels.is_some(),
            "data.labels is required for a head; give the table of classes".to_owned(),
        ),
        (!d.train.is_empty(), "data.train is required; give the files to train on".to_owned()),
        (
            m.mask + m.random <= 1.0,
            format!("data.masking.mask {} and random {} sum to more than 1", m.mask, m.random),
        ),
        (
            m.unit == MaskUnit::Token || c.model.kind == ModelKind::Caller,
            "data.masking.unit nucleotide applies only to model.kind caller; remove it".to_owned(),
        ),
        (
            m.unit == MaskUnit::Nucleotide || m.span == super::MaskingSection::default().span,
            "data.masking.span applies only to data.masking.unit nucleotide; give it as well, or remove the key".to_owned(),
        ),
        (
            separated == d.separator.is_some(),
            "data.separator is required with data.document separated and refused without it".to_owned(),
        ),
    ]
}

fn optimizer(c: &TrainConfig) -> Vec<Rule> {
    let o = &c.optimizer;
    let s = &c.schedule;
    let sgd = o.kind == OptimizerKind::Sgd;
    let falls = s.kind.ends();
    let horizon = c.horizon();
    let scales = s.scaling != Scaling::None;
    vec![
        (
            o.lr as f32 > 0.0 && (o.lr as f32).is_finite() && o.eps as f32 > 0.0 && (o.eps as f32).is_finite(),
            format!("optimizer.lr {:?} or optimizer.eps {:?} is 0 or infinite in 32 bits; give another value", o.lr, o.eps),
        ),
        (
            o.betas.iter().all(|&beta| beta < 1.0),
            format!("optimizer.betas {:?}: both decay rates must be less than 1", o.betas),
        ),
        (
            o.ema.is_none_or(|decay| decay as f32 > 0.0 && (decay as f32) < 1.0),
            format!(
                "optimizer.ema {} is 0 or 1 in 32 bits; give a decay from 1e-37 to 0.9999999, such as 0.999",
                o.ema.unwrap_or_default()
            ),
        ),
        (!o.nesterov || (sgd && o.momentum > 0.0), "optimizer.nesterov needs optimizer.kind sgd and \
            optimizer.momentum above 0".to_owned()),
        (
            !falls || horizon.is_some() || c.run.epochs.is_some(),
            format!(
                "schedule.kind {} needs a last step; give run.steps, run.epochs, run.max_tokens or schedule.steps",
                s.kind.name()
            ),
        ),
        (
            !falls || horizon.is_none_or(|end| c.warmup() < end),
            format!(
                "schedule.warmup {} must be shorter than the {} steps of the schedule; give fewer steps, or a \
                    share such as 0.1",
                s.warmup,
                horizon.unwrap_or(0)
            ),
        ),
        (
            !matches!(s.warmup, Warmup::Share(x) if !(x > 0.0 && x < 1.0)),
            format!("schedule.warmup {} is neither a whole number of steps nor a share above 0 and below 1", s.warmup),
        ),
        (
            horizon.is_some() || c.run.epochs.is_some() || matches!(s.warmup, Warmup::Steps(_)),
            format!(
                "schedule.warmup {} is a share of the steps of the schedule, which has no last step; give \
                    run.steps, run.epochs, run.max_tokens or \
                 schedule.steps, or a number of steps",
                s.warmup
            ),
        ),
        (
            scales == s.reference_tokens.is_some(),
            "schedule.reference_tokens, the batch.tokens for which optimizer.lr is meant, is required with \
                schedule.scaling linear or sqrt and refused with none"
                .to_owned(),
        ),
        (
            c.precision.scales_loss() || c.precision == super::PrecisionSection { kind: c.precision.kind, ..Default::default() },
            "precision.initial_scale and precision.growth_interval apply only to precision.kind fp16; remove them"
                .to_owned(),
        ),
    ]
}

fn batch(c: &TrainConfig) -> Vec<Rule> {
    let b = &c.batch;
    let pack = c.pack_tokens();
    let longest = c.longest_sequence();
    let rows = c.model.kind == ModelKind::Head;
    let micro = b.micro_tokens.0.unwrap_or(pack);
    let (remat, ops): (_, &[String]) = match &c.memory.remat {
        Remat::Policy(policy) => (Some(*policy), &[]),
        Remat::Ops(ops) => (None, ops),
    };
    let unknown = ops.iter().find(|op| !Op::NAMES.contains(&op.as_str()));
    let layers = if rows { 0 } else { c.model.layers };
    vec![
        (
            pack <= MAX_ROWS,
            format!("a pack of {pack} tokens has more than {MAX_ROWS}; give batch.pack_tokens, or other batch.tokens"),
        ),
        (
            b.tokens.is_multiple_of(pack),
            format!("batch.pack_tokens {pack} is not a divisor of batch.tokens {}", b.tokens),
        ),
        (
            !b.tokens.is_multiple_of(pack) || rows || micro.is_multiple_of(pack),
            format!(
                "batch.micro_tokens {micro} is not a multiple of the {pack} tokens of a pack (batch.pack_tokens); a micro-step \
                    is a number of whole packs"
            ),
        ),
        (
            rows || micro <= b.tokens,
            format!("batch.micro_tokens {micro} is greater than batch.tokens {}", b.tokens),
        ),
        (
            rows || longest <= pack,
            if c.model.kind == ModelKind::Caller {
                format!(
                    "data.crops.longest and validation_lengths give windows of up to {longest} tokens, which do not fit in a \
                         pack of {pack}; raise batch.tokens or batch.pack_tokens, or shorten the windows"
                )
            } else {
                format!(
                    "data.longest {longest}: such a sequence does not fit in a pack of {pack}; \
                         raise batch.tokens or batch.pack_tokens, or lower data.longest"
                )
            },
        ),
        (
            parse_budget(&c.memory.budget, Bytes(1 << 40)).is_ok(),
            format!(
                "memory.budget `{}` is not a size; write it like 22GiB, 500MB, 80% or a number of bytes in quotes",
                c.memory.budget
            ),
        ),
        (
            remat == Some(RematPolicy::EveryN) || c.memory.remat_every == super::MemorySection::default().remat_every,
            "memory.remat_every applies only to memory.remat every_n; remove it".to_owned(),
        ),
        (
            c.memory.offload != Offload::Policy(OffloadPolicy::None) || c.memory.offload_to == OffloadTo::Host,
            "memory.offload_to applies only with memory.offload; remove it".to_owned(),
        ),
        (
            c.memory.remat_layers.is_none() || !matches!(remat, Some(RematPolicy::Auto | RematPolicy::None)),
            "memory.remat_layers applies only to memory.remat full, every_n, selective or a list of ops; remove it"
                .to_owned(),
        ),
        (
            c.memory.remat_layers.is_none_or(|[first, last]| first <= last && last < layers),
            format!(
                "memory.remat_layers {:?}: give the first and the last of {layers} layers, counted from 0",
                c.memory.remat_layers.unwrap_or_default()
            ),
        ),
        (
            unknown.is_none(),
            format!(
                "memory.remat: there is no op `{}`; ops are {}",
                unknown.map_or("", String::as_str),
                Op::NAMES.join(", ")
            ),
        ),
    ]
}

/// Rules on `memory.dynamic`.
fn dynamic(c: &TrainConfig) -> Vec<Rule> {
    let Some(dynamic) = &c.memory.dynamic else { return vec![] };
    let fault = dynamic.thresholds().fault();
    let pack = c.pack_tokens();
    let max_batch = dynamic.max_batch.0.unwrap_or(c.batch.tokens);
    let min_batch = dynamic.min_batch.0;
    vec![
        (fault.is_none(), format!("memory.dynamic: {}", fault.unwrap_or_default())),
        (
            c.batch.micro_tokens.0.is_none(),
            "batch.micro_tokens is one size of all micro-steps; remove it, or give memory.dynamic.min_batch and max_batch \
                instead"
                .to_owned(),
        ),
        (
            max_batch <= c.batch.tokens,
            format!("memory.dynamic.max_batch {max_batch} is greater than batch.tokens {}", c.batch.tokens),
        ),
        (
            [dynamic.min_batch.0, dynamic.max_batch.0].into_iter().flatten().all(|n| n.is_multiple_of(pack)),
            format!(
                "memory.dynamic.min_batch or max_batch is not a multiple of the {pack} tokens of a pack (batch.pack_tokens); a \
                    micro-step is a number of whole packs"
            ),
        ),
        (
            min_batch.is_none_or(|min_batch| min_batch <= max_batch),
            format!(
                "memory.dynamic.min_batch {} is greater than the largest micro-step of {max_batch} tokens",
                min_batch.unwrap_or_default()
            ),
        ),
        (
            c.dynamic_sizes().len() > 1,
            format!(
                "memory.dynamic has nothing to change to: micro-steps of {} tokens are packs of {pack} (batch.pack_tokens) that \
                    cannot be halved; raise batch.tokens or max_batch, or lower min_batch or batch.pack_tokens",
                min_batch.unwrap_or(max_batch),
            ),
        ),
        (
            c.model.kind != ModelKind::Head,
            "memory.dynamic: a micro-step of model.kind head is a pack, whose size is fixed; remove memory.dynamic"
                .to_owned(),
        ),
    ]
}

fn run(c: &TrainConfig) -> Vec<Rule> {
    let r = &c.run;
    let validates = !c.data.validation.is_empty() || c.data.validation_fraction > 0.0;
    vec![
        (
            r.steps.is_some() || r.epochs.is_some() || r.max_tokens.is_some(),
            "the end of the run is missing; give run.steps, run.epochs or run.max_tokens".to_owned(),
        ),
        (
            r.evaluate_every.is_none() || validates || c.model.kind == ModelKind::Caller,
            "run.evaluate_every needs validation data; give data.validation or data.validation_fraction"
                .to_owned(),
        ),
        (
            r.save_every.as_ref().is_none_or(|every| every.is_valid() || every.is_never()),
            format!(
                "run.save_every `{}` is neither a number of steps, nor a number of epochs such as 1 epoch, nor a time such as \
                    10min (its units are s, min and h), nor never",
                written(r.save_every.as_ref())
            ),
        ),
        (
            r.writes_checkpoints() || r.keep_last == super::RunSection::default().keep_last,
            "run.keep_last has no effect with run.save_every never; remove it".to_owned(),
        ),
        (
            // An evaluation decides which checkpoint is the best, so it must not depend on a clock.
            r.evaluate_every
                .as_ref()
                .is_none_or(|every| matches!(every, Interval::Steps(_)) || every.epochs().is_some()),
            format!(
                "run.evaluate_every `{}` is neither a number of steps nor a number of epochs such as 1 epoch",
                written(r.evaluate_every.as_ref())
            ),
        ),
        (
            DeviceChoice::parse(&r.device).is_some(),
            format!("run.device `{}` is none of auto, cpu, cuda and cuda:N, such as cuda:0", r.device),
        ),
        (
            r.threads.0.is_none() || !matches!(DeviceChoice::parse(&r.device), Some(DeviceChoice::Cuda(_))),
            "run.threads are threads of the CPU; remove it, or set run.device cpu".to_owned(),
        ),
        (
            r.patience.is_none() || r.evaluate_every.is_some(),
            "run.patience counts evaluations; give run.evaluate_every as well".to_owned(),
        ),
        (
            r.min_delta == 0.0 || r.patience.is_some(),
            format!(
                "run.min_delta {} applies only with run.patience; give it as well, or remove the key",
                r.min_delta
            ),
        ),
    ]
}

/// Whether a name of a class can be a column of a table.
fn is_class_name(name: &str) -> bool {
    !name.trim().is_empty() && name.trim() == name && name.chars().all(is_printable)
}

/// The number of epochs of an interval; `None` for other intervals, or without one.
fn by_epochs(interval: Option<&Interval>) -> Option<u64> {
    interval.and_then(Interval::epochs)
}

/// An interval as it is written in a configuration.
fn written(interval: Option<&Interval>) -> String {
    match interval {
        Some(Interval::Text(text)) => text.clone(),
        Some(Interval::Steps(n)) => n.to_string(),
        None => String::new(),
    }
}

/// Longest windows of a caller for which a pack has room, if its size is not given.
const WINDOWS_OF_PACK: u64 = 8;

/// Tokens of a pack that is not given: the least divisor of the `step` tokens of a step that is at least `min_tokens`, or the step.
pub(super) fn pack_of_step(step: u64, min_tokens: u64) -> u64 {
    // Divisors come in pairs `i` and `step / i`, of which the smaller is at most the root.
    let small = (1..=step.isqrt()).filter(|&i| step.is_multiple_of(i));
    small.flat_map(|i| [i, step / i]).filter(|&divisor| divisor >= min_tokens).min().unwrap_or(step)
}

/// `n` and its halves, rounded up, to 1.
pub(crate) fn halves(n: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(n), |&n| (n > 1).then(|| n.div_ceil(2)))
}

impl ScheduleKind {
    /// Whether the schedule is defined by the step at which it ends.
    pub fn ends(self) -> bool {
        match self {
            Self::Linear | Self::Cosine | Self::Polynomial | Self::Wsd => true,
            Self::Constant | Self::CosineRestarts | Self::Step => false,
        }
    }

    /// The value of `schedule.kind` in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Linear => "linear",
            Self::Cosine => "cosine",
            Self::CosineRestarts => "cosine_restarts",
            Self::Polynomial => "polynomial",
            Self::Wsd => "wsd",
            Self::Step => "step",
        }
    }
}

impl TrainConfig {
    /// Lengths in bases of the shortest and longest training windows of a caller, and of all validation windows.
    pub fn window_lengths(&self) -> impl Iterator<Item = u64> + '_ {
        let crops = &self.data.crops;
        let validation = self.run.evaluate_every.iter().flat_map(|_| crops.validation_lengths.iter().copied());
        validation.chain([crops.shortest, crops.longest])
    }

    /// Tokens of a pack: those that are given, or else the least divisor of `batch.tokens` that holds a sequence of
    /// `data.longest` tokens, or eight of the longest windows of a caller. A pack of a head is a step, unless it is given.
    pub fn pack_tokens(&self) -> u64 {
        let step = self.batch.tokens;
        let min_tokens = match self.model.kind {
            ModelKind::Head => step,
            ModelKind::Caller => WINDOWS_OF_PACK.saturating_mul(self.longest_sequence()),
            ModelKind::MoeLm | ModelKind::DenseLm | ModelKind::Esm2 | ModelKind::DnabertS => {
                self.longest_sequence()
            }
        };
        self.batch.pack_tokens.0.unwrap_or_else(|| pack_of_step(step, min_tokens))
    }

    /// Number of packs of a step, unless an epoch ends in it.
    pub fn packs_of_step(&self) -> u64 {
        (self.batch.tokens / self.pack_tokens()).max(1)
    }

    /// Tokens of the micro-steps that may be chosen, in descending order: of all packs of a step, and of half as many, rounded
    /// up, and so on. A micro-step of a head is a pack.
    pub fn micro_sizes(&self) -> Vec<u64> {
        let pack = self.pack_tokens();
        if self.model.kind == ModelKind::Head {
            return vec![pack];
        }
        halves(self.packs_of_step())
            .map(|packs| packs.saturating_mul(pack))
            .filter(|&n| n <= MAX_ROWS)
            .collect()
    }

    /// Tokens of the micro-steps that `memory.dynamic` may choose from, in descending order: the largest, half as many packs,
    /// rounded up, and so on to the smallest; empty without `memory.dynamic`.
    pub fn dynamic_sizes(&self) -> Vec<u64> {
        let Some(dynamic) = &self.memory.dynamic else { return vec![] };
        let max_batch = dynamic.max_batch.0.unwrap_or(self.batch.tokens);
        let pack = self.pack_tokens();
        let sizes =
            halves(max_batch / pack).map(|packs| packs.saturating_mul(pack)).skip_while(|&n| n > MAX_ROWS);
        match dynamic.min_batch.0 {
            Some(min_batch) => sizes
                .take_while(|&n| n > min_batch)
                .chain((min_batch <= max_batch).then_some(min_batch))
                .collect(),
            None => sizes.take(MAX_SIZES).collect(),
        }
    }

    /// Maximum number of tokens of a sequence.
    pub fn longest_sequence(&self) -> u64 {
        match self.model.kind {
            ModelKind::Caller => {
                let bases = self.window_lengths().max().unwrap_or(self.data.crops.longest);
                codons::tokens_of(bases as usize) as u64
            }
            ModelKind::MoeLm | ModelKind::DenseLm | ModelKind::Esm2 | ModelKind::DnabertS | ModelKind::Head => {
                self.data.longest
            }
        }
    }

    /// Whether the learning rates depend on the number of steps of the run: a decaying schedule, or a warm-up that is a share
    /// of the steps.
    pub fn rates_depend_on_end(&self) -> bool {
        self.schedule.kind.ends() || matches!(self.schedule.warmup, Warmup::Share(_))
    }

    /// The number of epochs whose steps must be counted before the first step, because the learning rates depend on their
    /// number; `None` if the schedule has its end without them.
    pub fn epochs_to_count(&self) -> Option<u64> {
        self.run.epochs.filter(|_| self.schedule.steps.is_none() && self.rates_depend_on_end())
    }

    /// Checks that the warm-up is shorter than a schedule of `steps` steps, which were counted from the data.
    pub(crate) fn check_warmup(&self, steps: u64) -> Result<(), TrainConfigError> {
        let Warmup::Steps(warmup) = self.schedule.warmup else { return Ok(()) };
        if warmup < steps {
            return Ok(());
        }
        let rule = format!(
            "schedule.warmup {warmup} must be shorter than the {steps} steps of run.epochs {}; give fewer steps, or a share such \
             as 0.1",
            self.run.epochs.unwrap_or_default()
        );
        Err(TrainConfigError::Rules { name: "the configuration".to_owned(), broken: vec![rule] })
    }

    /// Returns the step at which a decaying learning rate ends by keys that state steps or tokens; `None` if there are none.
    /// For epochs, `schedule.steps` is chosen when the data is open.
    pub fn horizon(&self) -> Option<u64> {
        let by_tokens = self.run.max_tokens.map(|most| most.div_ceil(self.batch.tokens));
        let by_run = [self.run.steps, by_tokens].into_iter().flatten().min();
        self.schedule.steps.or(by_run)
    }

    /// Returns the number of warm-up steps; a fraction of the schedule is rounded to whole steps.
    pub fn warmup(&self) -> u64 {
        match self.schedule.warmup {
            Warmup::Steps(steps) => steps,
            Warmup::Share(share) => (self.horizon().unwrap_or(0) as f64 * share).round() as u64,
        }
    }
}
