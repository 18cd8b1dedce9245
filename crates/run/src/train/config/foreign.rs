//! Keys of other trainers, and what stands for them here. Invariant: one table; errors, docs/training-keys.md and the
//! tests read it, and every key of ours that it names is in the schema.

use super::schema::{Fault, Wrong, leaves, properties, schema};

/// What stands for a key of another trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// This key, and how it differs.
    Key(&'static str, &'static str),
    /// Nothing, since it is not needed: why.
    Needless(&'static str),
    /// Nothing yet.
    Later(&'static str),
}

use Answer::{Key, Later, Needless};

const PLANNED: &str =
    "every byte has its address before the first step, so there is nothing to free or to pool";
const DYNAMIC: &str = "the micro-batch is planned to fit; changing it during a run comes with the monitor";
const MANY: &str = "several devices come with their own release";
const OFFLOAD: &str = "offload of states and parameters comes with devices that have memory of their own";
const MONITOR: &str =
    "monitoring with thresholds comes with its own release; metrics.jsonl has the bytes of each step";

/// A key of another trainer; `*` is any one key, and a path counts from its end.
pub struct Row {
    /// The key.
    pub key: &'static str,
    /// What stands for it.
    pub answer: Answer,
}

const fn row(key: &'static str, answer: Answer) -> Row {
    Row { key, answer }
}

const AVA: &[Row] = &[
    row("pool_size_gb", Key("memory.budget", "the line itself; there is one arena and no pool")),
    row("use_memory_pool", Needless(PLANNED)),
    row("clear_cache_frequency", Needless(PLANNED)),
    row("cache_clear_interval", Needless(PLANNED)),
    row("clear_cache_interval", Needless(PLANNED)),
    row("expandable_segments", Needless(PLANNED)),
    row("max_split_size_mb", Needless(PLANNED)),
    row("garbage_collection_threshold", Needless(PLANNED)),
    row("silent_mode", Needless("the flag --quiet says nothing but warnings")),
    row("eval_batch_size", Key("batch.micro_tokens", "an evaluation step holds what a micro-step holds")),
    row("sparse_block_size", Key("model.attention.block", "with model.attention.mask block_sparse")),
    row("num_local_blocks", Key("model.attention.local", "with model.attention.mask block_sparse")),
    row("num_global_blocks", Key("model.attention.global", "with model.attention.mask block_sparse")),
    row("sliding_window", Key("model.attention.window", "with model.attention.mask window")),
    row("window_size", Key("model.attention.window", "with model.attention.mask window")),
    row("use_sparse_attention", Key("model.attention.mask", "block_sparse")),
    row("use_sliding_window", Key("model.attention.mask", "window")),
    row("use_flash_attention", Needless("attention never has a matrix of all scores")),
    row("attention_type", Key("model.attention.mask", "full, causal, window or block_sparse")),
    row("adjustment_frequency", Later(DYNAMIC)),
    row("smooth_transitions", Later(DYNAMIC)),
    row("dynamic_batch_size", Later(DYNAMIC)),
    row("dynamic_batching", Later(DYNAMIC)),
    row("enable_dynamic_batching", Later(DYNAMIC)),
    row("min_batch_size", Later(DYNAMIC)),
    row("max_batch_size", Later(DYNAMIC)),
    row("target_utilization", Key("memory.budget", "a share of what is free, such as 90%")),
    row("target_memory_utilization", Key("memory.budget", "a share of what is free, such as 90%")),
    row("thresholds.*", Later(MONITOR)),
    row("warning_threshold", Later(MONITOR)),
    row("critical_threshold", Later(MONITOR)),
    row("emergency_threshold", Later(MONITOR)),
    row("memory_threshold", Later(MONITOR)),
    row("monitoring_interval", Later(MONITOR)),
    row("enable_memory_monitoring", Later(MONITOR)),
    row("leak_detection", Later(MONITOR)),
    row("profile_memory", Later(MONITOR)),
    row(
        "float32_matmul_precision",
        Key("precision.kind", "f32 is f32; shorter products are asked for by name"),
    ),
    row("allow_tf32", Key("precision.kind", "f32 is f32; shorter products are asked for by name")),
    row("torch_compile.*", Needless("the whole step is planned and fused before it starts")),
    row("use_8bit_optimizer", Key("optimizer.kind", "adamw8bit")),
    row("use_8bit_adam", Key("optimizer.kind", "adamw8bit")),
    row("nvme_offload", Later(OFFLOAD)),
    row("cpu_offload", Later(OFFLOAD)),
    row("persistent_workers", Needless("workers live as long as the run")),
    row("num_workers", Key("data.workers", "threads; the batches do not depend on their number")),
    row("prefetch_factor", Key("data.prefetch", "pieces that each worker prepares ahead")),
    row("pin_memory", Later("staging comes with devices that have memory of their own")),
    row("buffer_size", Key("data.shuffle_buffer", "documents")),
    row("shuffle_buffer_size", Key("data.shuffle_buffer", "documents")),
    row("num_experts", Key("model.experts.count", "")),
    row("num_experts_per_tok", Key("model.experts.top_k", "")),
    row("capacity_factor", Key("model.experts.capacity", "null drops nothing")),
    row("router_aux_loss_coef", Key("loss.balance", "")),
    row("router_z_loss_coef", Key("loss.router_z", "")),
];

const DEEPSPEED: &[Row] = &[
    row("zero_stage", Later(MANY)),
    row("zero_optimization.stage", Later(MANY)),
    row("zero_optimization.*", Later(MANY)),
    row("offload_optimizer.*", Later(OFFLOAD)),
    row("offload_param.*", Later(OFFLOAD)),
    row("train_batch_size", Key("batch.tokens", "counted in tokens: sequences times their length")),
    row("train_micro_batch_size_per_gpu", Key("batch.micro_tokens", "counted in tokens")),
    row("gradient_clipping", Key("optimizer.clip_norm", "")),
    row("steps_per_print", Key("run.log_every", "")),
    row("wall_clock_breakdown", Needless("metrics.jsonl has the seconds of each step")),
    row("fp16.enabled", Key("precision.kind", "fp16")),
    row("bf16.enabled", Key("precision.kind", "bf16")),
    row("fp16.initial_scale_power", Key("precision.initial_scale", "the scale itself, not its power of two")),
    row("fp16.loss_scale_window", Key("precision.growth_interval", "")),
    row("loss_scale", Key("precision.initial_scale", "it follows overflows from there")),
    row("hysteresis", Needless("each overflow halves the scale")),
    row("min_loss_scale", Needless("below 1 an overflow is an error, which names the step")),
    row("activation_checkpointing.*", Key("memory.remat", "auto, none, full, every_n or selective")),
    row("deepspeed.*", Later(MANY)),
];

const TRAINER: &[Row] = &[
    row("per_device_train_batch_size", Key("batch.micro_tokens", "counted in tokens")),
    row(
        "per_device_eval_batch_size",
        Key("batch.micro_tokens", "an evaluation step holds what a micro-step holds"),
    ),
    row(
        "gradient_accumulation_steps",
        Key("batch.micro_tokens", "batch.tokens over it is the number of micro-steps"),
    ),
    row("gradient_checkpointing", Key("memory.remat", "auto, none, full, every_n or selective")),
    row("gradient_checkpointing_kwargs.*", Key("memory.remat", "auto, none, full, every_n or selective")),
    row("learning_rate", Key("optimizer.lr", "")),
    row("lr_scheduler_type", Key("schedule.kind", "")),
    row("warmup_steps", Key("schedule.warmup", "")),
    row("warmup_ratio", Key("schedule.warmup", "in steps")),
    row("min_lr_rate", Key("schedule.min_ratio", "")),
    row("adam_beta1", Key("optimizer.betas", "a list of both")),
    row("adam_beta2", Key("optimizer.betas", "a list of both")),
    row("adam_epsilon", Key("optimizer.eps", "")),
    row("max_grad_norm", Key("optimizer.clip_norm", "")),
    row("optim", Key("optimizer.kind", "auto, adamw, adamw8bit, adafactor or sgd")),
    row("num_train_epochs", Key("run.epochs", "")),
    row("max_steps", Key("run.steps", "")),
    row("eval_steps", Key("run.evaluate_every", "")),
    row("evaluation_strategy", Key("run.evaluate_every", "in steps")),
    row("eval_strategy", Key("run.evaluate_every", "in steps")),
    row("save_steps", Key("run.save_every", "")),
    row("save_strategy", Key("run.save_every", "in steps")),
    row("save_total_limit", Key("run.keep_last", "")),
    row("load_best_model_at_end", Key("run.keep_best", "its checkpoint is kept; the newest stays too")),
    row("metric_for_best_model", Needless("the best is the lowest validation loss")),
    row("greater_is_better", Needless("the best is the lowest validation loss")),
    row("early_stopping_patience", Key("run.patience", "")),
    row("logging_steps", Key("run.log_every", "")),
    row("logging_dir", Key("run.output", "metrics.jsonl is in it")),
    row("report_to", Needless("metrics.jsonl is a line of JSON for each step, for any tracker")),
    row("output_dir", Key("run.output", "")),
    row("overwrite_output_dir", Needless("a run is never overwritten; the flag --resume says what is done")),
    row("resume_from_checkpoint", Needless("the flag --resume auto or --resume PATH")),
    row("fp16", Key("precision.kind", "fp16")),
    row("bf16", Key("precision.kind", "bf16")),
    row("tf32", Key("precision.kind", "f32 is f32; shorter products are asked for by name")),
    row("dataloader_num_workers", Key("data.workers", "threads; the batches do not depend on their number")),
    row("dataloader_prefetch_factor", Key("data.prefetch", "")),
    row("dataloader_pin_memory", Later("staging comes with devices that have memory of their own")),
    row("dataloader_persistent_workers", Needless("workers live as long as the run")),
    row("group_by_length", Needless("sequences are packed without padding")),
    row("auto_find_batch_size", Key("batch.micro_tokens", "auto finds it before the run")),
    row("torch_empty_cache_steps", Needless(PLANNED)),
    row("fsdp", Later(MANY)),
    row("fsdp_config.*", Later(MANY)),
    row("label_smoothing_factor", Later("label smoothing is not in the loss yet")),
    row("neftune_noise_alpha", Later("noise on embeddings is not in the models yet")),
    row("hidden_size", Key("model.hidden", "")),
    row("num_hidden_layers", Key("model.layers", "")),
    row("num_attention_heads", Key("model.heads", "")),
    row("num_key_value_heads", Key("model.kv_heads", "")),
    row("intermediate_size", Key("model.intermediate", "")),
    row("vocab_size", Key("model.vocabulary", "")),
    row("hidden_act", Key("model.activation", "")),
    row("tie_word_embeddings", Key("model.tied_head", "")),
    row("rms_norm_eps", Key("model.norm_eps", "")),
    row("layer_norm_eps", Key("model.norm_eps", "")),
    row("max_position_embeddings", Key("data.longest", "")),
    row("max_seq_length", Key("data.longest", "")),
    row("mlm_probability", Key("data.masking.fraction", "")),
    row("lora_alpha", Key("model.lora.alpha", "")),
    row("lora_r", Key("model.lora.rank", "")),
    row("target_modules", Key("model.lora.targets", "")),
];

const LIGHTNING: &[Row] = &[
    row(
        "accumulate_grad_batches",
        Key("batch.micro_tokens", "batch.tokens over it is the number of micro-steps"),
    ),
    row("gradient_clip_val", Key("optimizer.clip_norm", "")),
    row("gradient_clip_algorithm", Needless("clipping is by the norm of all gradients")),
    row("max_epochs", Key("run.epochs", "")),
    row("val_check_interval", Key("run.evaluate_every", "in steps")),
    row("check_val_every_n_epoch", Key("run.evaluate_every", "in steps")),
    row("limit_val_batches", Key("run.evaluate_tokens", "in targets")),
    row("log_every_n_steps", Key("run.log_every", "")),
    row("every_n_train_steps", Key("run.save_every", "")),
    row("save_top_k", Key("run.keep_best", "the best one; keep_last counts the newest")),
    row("default_root_dir", Key("run.output", "")),
    row("enable_progress_bar", Needless("the flag --no-progress")),
    row("deterministic", Needless("every run is")),
    row("benchmark", Needless("every run is deterministic")),
    row("accelerator", Key("run.device", "")),
    row("devices", Later(MANY)),
    row("num_nodes", Later(MANY)),
    row("strategy", Later(MANY)),
    row("sync_batchnorm", Later(MANY)),
];

const NANO: &[Row] = &[
    row("n_layer", Key("model.layers", "")),
    row("n_head", Key("model.heads", "")),
    row("n_embd", Key("model.hidden", "")),
    row("block_size", Key("data.longest", "")),
    row("max_iters", Key("run.steps", "")),
    row("eval_interval", Key("run.evaluate_every", "")),
    row("eval_iters", Key("run.evaluate_tokens", "in targets")),
    row("warmup_iters", Key("schedule.warmup", "")),
    row("lr_decay_iters", Key("schedule.steps", "")),
    row("min_lr", Key("schedule.min_ratio", "a share of optimizer.lr")),
    row("grad_clip", Key("optimizer.clip_norm", "")),
    row("beta1", Key("optimizer.betas", "a list of both")),
    row("beta2", Key("optimizer.betas", "a list of both")),
    row("batch_size", Key("batch.tokens", "counted in tokens: sequences times their length")),
    row("out_dir", Key("run.output", "")),
    row("dtype", Key("precision.kind", "f32, bf16 or fp16")),
    row("compile", Needless("the whole step is planned and fused before it starts")),
];

/// The table, by the trainer whose keys they are.
pub const TABLE: [(&str, &[Row]); 5] = [
    ("Ava guide", AVA),
    ("DeepSpeed", DEEPSPEED),
    ("Hugging Face Trainer", TRAINER),
    ("Lightning", LIGHTNING),
    ("nanoGPT", NANO),
];

fn rows() -> impl Iterator<Item = &'static Row> {
    TABLE.into_iter().flat_map(|(_, rows)| rows)
}

/// What stands for a key that is not ours.
pub fn counterpart(path: &str) -> Option<Answer> {
    let path: Vec<String> = path.split('.').map(|key| key.to_lowercase().replace('-', "_")).collect();
    rows().filter(|row| row.matches(&path)).max_by_key(|row| row.weight()).map(|row| row.answer)
}

impl Row {
    fn matches(&self, path: &[String]) -> bool {
        let keys: Vec<&str> = self.key.split('.').collect();
        match keys.as_slice() {
            // A section of theirs, whatever is in it.
            [section, "*"] => path.iter().any(|key| key == section),
            keys => path.len() >= keys.len() && path[path.len() - keys.len()..].iter().eq(keys.iter()),
        }
    }

    /// A key is closer than a section, a longer path than a shorter one.
    fn weight(&self) -> (bool, usize) {
        (!self.key.ends_with(".*"), self.key.matches('.').count())
    }
}

impl Answer {
    /// As the end of a sentence about the key.
    pub fn sentence(self) -> String {
        match self {
            Key(ours, "") => format!("here it is `{ours}`"),
            Key(ours, note) => format!("here it is `{ours}` ({note})"),
            Needless(why) => format!("not needed: {why}"),
            Later(why) => format!("not there yet: {why}"),
        }
    }
}

/// All that is wrong in a file, as one message.
pub fn complaint(name: &str, faults: &[Fault]) -> String {
    let lines: Vec<String> = faults.iter().map(|fault| sentence(name, fault)).collect();
    match lines.as_slice() {
        [only] => only.clone(),
        many => format!("{name}: {} keys cannot be used\n{}", many.len(), many.join("\n")),
    }
}

fn sentence(name: &str, fault: &Fault) -> String {
    let path = &fault.path;
    let place = if fault.line == 0 { "--set".to_owned() } else { format!("{name}, line {}", fault.line) };
    match &fault.what {
        Wrong::Value { found, allowed } if path.is_empty() => format!("{place}: {found} is no {allowed}"),
        Wrong::Value { found, allowed } => format!("{place}: `{path}` is {found}; it is {allowed}"),
        Wrong::Unknown => {
            let answer = match (counterpart(path), nearest(path)) {
                (Some(answer), _) => answer.sentence(),
                (None, Some(near)) => format!("there is no such key; did you mean `{near}`?"),
                (None, None) => "there is no such key; plimsoll train --schema lists all".to_owned(),
            };
            format!("{place}: `{path}`: {answer}")
        }
    }
}

/// The key of ours that a misspelt one is nearest to.
fn nearest(path: &str) -> Option<String> {
    let schema = schema();
    let mut known: Vec<String> = leaves(&schema).into_iter().map(|leaf| leaf.path).collect();
    known.extend(properties(&schema).into_iter().flatten().map(|(section, _)| section.clone()));
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_lowercase().replace('-', "_");
    let wanted = last(path);
    let distance = |ours: &String| {
        let (by_key, by_path) = (strsim::osa_distance(&wanted, &last(ours)), strsim::osa_distance(path, ours));
        (by_key.min(by_path), by_path)
    };
    let near = known.into_iter().min_by_key(distance)?;
    // A third of the letters: more is another word.
    (distance(&near).0 <= (wanted.chars().count() / 3).max(1)).then_some(near)
}
