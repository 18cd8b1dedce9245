//! Times bf16 attention in the form that inference uses, with the best instructions of this CPU and with the
//! best without AMX tiles, against f32 attention without tiles, taking turns in one process; prints medians.
//! With AMX, the rate is also given as a share of the peak rate of the tiles on these threads.
//!
//! `cargo run --release -p plimsoll-cpu --example attention_bf16 [-- threads [turns]]`

use plimsoll_cpu::attention::{
    AttentionConfig, AttentionOperands, RotaryTables, attention, attention_bf16, workspace_bytes,
};
use plimsoll_cpu::{Bf16, Cpu, Isa, Rows, RowsMut, peak, rows::rope};
use plimsoll_graph::ops::{Mask, alibi_slopes};
use std::time::Instant;

/// (heads, head dimension, length, sequences): ESM-2's 8M, 35M, 150M and 650M with rotary positions; the last,
/// with 12 heads, is DNABERT-S with ALiBi.
const SHAPES: [(usize, usize, usize, usize); 11] = [
    (20, 16, 64, 168),
    (20, 16, 168, 64),
    (20, 16, 512, 21),
    (20, 24, 168, 64),
    (20, 24, 512, 21),
    (20, 32, 64, 168),
    (20, 32, 168, 64),
    (20, 32, 512, 21),
    (20, 64, 168, 64),
    (20, 64, 512, 16),
    (12, 64, 105, 64),
];

fn main() {
    let mut args = std::env::args().skip(1).map(|a| a.parse().expect("a number"));
    let threads = args.next().unwrap_or(2);
    let turns = args.next().unwrap_or(7);
    let best = Cpu::new(threads);
    let lanes = Isa::available().find(|isa| !isa.has_tiles()).expect("portable code");
    let lanes = Cpu::with_isa(threads, lanes);
    let raw = peak::amx_gflops(&best, peak::FactorType::Bf16, 0.3);
    print!("{} x {threads}; medians of {turns} turns in ms", best.isa().name());
    println!("{}", raw.map_or(String::new(), |raw| format!("; tiles alone {raw:.0} GFLOP/s")));
    println!("{:>24} {:>8} {:>8} {:>8} | f32 over bf16, share of tiles", "", "bf16", "lanes", "f32");
    for shape in SHAPES {
        time([&best, &lanes], shape, turns, raw);
    }
}

fn time(
    cpus: [&Cpu; 2],
    (heads, hd, len, sequences): (usize, usize, usize, usize),
    turns: usize,
    raw: Option<f64>,
) {
    let t = len * sequences;
    let d = heads * hd;
    let alibi = heads == 12;
    let frequencies: Vec<f32> = (0..hd / 2).map(|j| 1e4f32.powf(-2.0 * j as f32 / hd as f32)).collect();
    let [mut cos, mut sin] = [(); 2].map(|()| vec![0.0; len * hd / 2]);
    rope::table(&frequencies, len, &mut cos, &mut sin);
    let slopes: Vec<f32> = alibi_slopes(heads as u32).collect();
    let config = AttentionConfig {
        heads,
        kv_heads: heads,
        head_dim: hd,
        scale: (hd as f32).sqrt().recip(),
        mask: Mask::Full,
        rope: (!alibi).then_some(RotaryTables { cos: &cos, sin: &sin }),
        slopes: alibi.then_some(&slopes),
    };
    let spans: Vec<[u32; 2]> = (0..sequences).map(|s| [(s * len) as u32, ((s + 1) * len) as u32]).collect();
    let number = |i: usize| ((i * 7919 + 13) % 2003) as f32 / 500.0 - 2.0;
    let wide = Aligned::new(3 * t * d, number);
    let narrow = Aligned::new(3 * t * d, |i| Bf16((number(i).to_bits() >> 16) as u16));
    let mut scratch = Aligned::new(workspace_bytes(hd) / 4 * cpus[0].threads(), |_| 0.0f32);
    let mut o = Aligned::new(t * d, |_| Bf16(0));
    let mut o_wide = Aligned::new(t * d, |_| 0.0f32);
    let mut seconds = [const { Vec::new() }; 3];
    for turn in 0..turns + 1 {
        for (way, seconds) in seconds.iter_mut().enumerate() {
            let start = Instant::now();
            if way < 2 {
                let x = Rows::new(narrow.get(), t, 3 * d, 3 * d);
                let [q, k, v] = [0, d, 2 * d].map(|at| x.columns(at, d));
                let out = RowsMut::new(o.get_mut(), t, d, d);
                let operands = AttentionOperands { q, k, v, spans: &spans, o: out, lse: None };
                attention_bf16(cpus[way], config, operands, scratch.get_mut());
            } else {
                let x = Rows::new(wide.get(), t, 3 * d, 3 * d);
                let [q, k, v] = [0, d, 2 * d].map(|at| x.columns(at, d));
                let out = RowsMut::new(o_wide.get_mut(), t, d, d);
                let operands = AttentionOperands { q, k, v, spans: &spans, o: out, lse: None };
                attention(cpus[1], config, operands, scratch.get_mut());
            }
            if turn > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let [best, lanes, f32] = seconds.map(median);
    let what = format!("{heads} x {hd}, {sequences} x {len}");
    print!("{what:>24} {:>8.2} {:>8.2} {:>8.2} | {:.2}", 1e3 * best, 1e3 * lanes, 1e3 * f32, f32 / best);
    let flops = 4e-9 * (len * len * sequences * d) as f64;
    println!("{}", raw.map_or(String::new(), |raw| format!(" {:.0} %", 100.0 * flops / best / raw)));
}

/// A vector whose elements start on a cache line, as tensors in an arena do.
struct Aligned<T> {
    all: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Clone> Aligned<T> {
    fn new(len: usize, of: impl Fn(usize) -> T) -> Self {
        const LINE: usize = 64;
        let mut all: Vec<T> = Vec::with_capacity(len + LINE);
        let start = all.as_ptr().align_offset(LINE);
        all.extend((0..start).map(|_| of(0)).chain((0..len).map(&of)));
        Self { all, start, len }
    }

    fn get(&self) -> &[T] {
        &self.all[self.start..][..self.len]
    }

    fn get_mut(&mut self) -> &mut [T] {
        &mut self.all[self.start..][..self.len]
    }
}

/// The median; of an even number of values, the upper of the middle two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
