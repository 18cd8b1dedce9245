//! Keys that have no effect on the results of a configuration. Invariant: two configurations with equal
//! [`TrainConfig::with_effect`] give equal results; a key is reset only where no code reads it.

use super::{
    DataFormat, DocumentUnit, Interval, MaskKind, ModelKind, OptimizerKind, PositionChoice, ScheduleKind,
    TrainConfig, usual,
};

impl TrainConfig {
    /// Returns the configuration with the defaults of all keys that have no effect on its results, such as
    /// `optimizer.momentum` of adamw, so that a run is not refused a checkpoint because of them.
    pub(crate) fn with_effect(&self) -> Self {
        let mut c = self.clone();
        let usual = usual(c.model.kind, None);
        let is_head = c.model.kind == ModelKind::Head;
        let is_caller = c.model.kind == ModelKind::Caller;
        let is_encoder = matches!(c.model.kind, ModelKind::Esm2 | ModelKind::DnabertS);

        // The sizes of a preset are in the other keys.
        c.model.preset = None;
        if c.model.kind != ModelKind::MoeLm {
            c.model.experts = usual.model.experts;
            c.loss.balance = usual.loss.balance;
            c.loss.router_z = usual.loss.router_z;
        }
        if is_head {
            // The widths of a head are those of its embeddings, `hidden` and `classes`.
            let from = c.model.from.clone();
            let dropout = c.model.dropout;
            let hidden = c.model.hidden;
            let classes = c.model.classes;
            let names = c.model.class_names.clone();
            c.model = usual.model.clone();
            (c.model.from, c.model.dropout, c.model.hidden) = (from, dropout, hidden);
            (c.model.classes, c.model.class_names) = (classes, names);
        }
        let attention = &mut c.model.attention;
        if attention.mask != MaskKind::Window {
            attention.window = usual.model.attention.window;
        }
        if attention.mask != MaskKind::BlockSparse {
            attention.block = usual.model.attention.block;
            attention.local = usual.model.attention.local;
            attention.global = usual.model.attention.global;
        }
        if c.model.position != PositionChoice::Rotary {
            c.model.rope_theta = usual.model.rope_theta;
        }

        let o = &mut c.optimizer;
        if o.kind != OptimizerKind::Sgd {
            o.momentum = usual.optimizer.momentum;
            o.nesterov = usual.optimizer.nesterov;
        }
        if o.kind != OptimizerKind::Adafactor {
            o.update_clip = usual.optimizer.update_clip;
            o.decay_exponent = usual.optimizer.decay_exponent;
        }
        if matches!(o.kind, OptimizerKind::Sgd | OptimizerKind::Adafactor) {
            o.betas = usual.optimizer.betas;
            o.eps = usual.optimizer.eps;
        }

        let s = &mut c.schedule;
        if s.kind != ScheduleKind::Polynomial {
            s.power = usual.schedule.power;
        }
        if s.kind != ScheduleKind::CosineRestarts {
            s.cycle = usual.schedule.cycle;
            s.cycle_growth = usual.schedule.cycle_growth;
        }
        if s.kind != ScheduleKind::Wsd {
            s.decay_share = usual.schedule.decay_share;
            s.decay_shape = usual.schedule.decay_shape;
        }
        if s.kind != ScheduleKind::Step {
            s.every = usual.schedule.every;
            s.unit = usual.schedule.unit;
            s.gamma = usual.schedule.gamma;
        }
        if matches!(s.kind, ScheduleKind::Constant | ScheduleKind::Step) {
            s.min_ratio = usual.schedule.min_ratio;
        }
        // The end of the schedule is compared by itself: other keys give it, too.
        s.steps = usual.schedule.steps;

        if !c.precision.scales_loss() {
            c.precision.initial_scale = usual.precision.initial_scale;
            c.precision.growth_interval = usual.precision.growth_interval;
        }

        let is_masked = (is_encoder && c.model.classes.is_none()) || (is_caller && c.model.tasks.is_empty());
        let d = &mut c.data;
        if !is_masked {
            d.masking = usual.data.masking;
        }
        if is_head || is_caller || c.model.classes.is_none() {
            d.truncate = usual.data.truncate;
            d.label_field = usual.data.label_field;
        }
        if !is_head && !is_caller && c.model.classes.is_none() {
            d.labels = None;
        }
        if d.labels.is_some() {
            "label".clone_into(&mut d.label_field);
        }
        if c.run.evaluate_every.is_none() && !is_caller {
            d.validation.clear();
            d.validation_fraction = usual.data.validation_fraction;
        }
        if !d.validation.is_empty() {
            d.validation_fraction = usual.data.validation_fraction;
            d.split_seed = usual.data.split_seed;
        }
        if d.validation_fraction == 0.0 {
            d.split_seed = usual.data.split_seed;
        }
        if d.shuffle_buffer == 0 {
            d.shuffle_bytes = usual.data.shuffle_bytes;
        }
        // With `auto` the format comes from the names of the files.
        if matches!(d.format, DataFormat::Fasta | DataFormat::Bin | DataFormat::Embeddings) {
            "text".clone_into(&mut d.field);
        }
        if matches!(d.format, DataFormat::Jsonl | DataFormat::Fasta | DataFormat::Bin | DataFormat::Embeddings)
        {
            d.document = DocumentUnit::Paragraph;
            d.separator = None;
        }
        if matches!(d.format, DataFormat::Txt | DataFormat::Jsonl | DataFormat::Fasta | DataFormat::Embeddings)
        {
            d.bin_type = usual.data.bin_type;
            d.bin_end = usual.data.bin_end;
        }
        if is_head {
            d.longest = usual.data.longest;
            d.longest_document = usual.data.longest_document;
            d.tokenizer = usual.data.tokenizer;
            d.end_token = None;
            d.shuffle_buffer = usual.data.shuffle_buffer;
            d.shuffle_bytes = usual.data.shuffle_bytes;
        }
        // Evaluations draw no random numbers of the training, but a caller has windows for them only if it evaluates.
        c.run.evaluate_every = c.run.evaluate_every.map(|_| Interval::Steps(1));
        c
    }
}
