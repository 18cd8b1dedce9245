//! Lifetimes of the values of real models, from their sequence of instructions.
//!
//! Invariant: a value is live from the instruction that writes it to the last instruction that reads it.

use super::PackItem;

/// Records lifetimes from a sequence of instructions.
struct Tape {
    items: Vec<PackItem>,
    now: u32,
}

type Id = usize;

impl Tape {
    fn new() -> Self {
        Self { items: Vec::new(), now: 0 }
    }

    /// Records an instruction that reads `inputs`, writes values of the sizes `outputs` and uses `workspace` bytes.
    fn op<const N: usize>(&mut self, inputs: &[Id], outputs: [u64; N], workspace: u64) -> [Id; N] {
        for &i in inputs {
            self.items[i].death = self.now;
        }
        let mut add = |size| {
            self.items.push(PackItem { size, birth: self.now, death: self.now });
            self.items.len() - 1
        };
        let ids = outputs.map(&mut add);
        if workspace > 0 {
            add(workspace);
        }
        self.now += 1;
        ids
    }
}

/// Sizes of a transformer.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// Rows of every activation.
    pub(super) tokens: u64,
    /// Width of the residual stream.
    pub(super) d: u64,
    /// Inner width of the feed-forward part.
    pub(super) ffn: u64,
    /// Attention heads.
    pub(super) heads: u64,
    /// Layers.
    pub(super) layers: usize,
    /// Number of logits per token.
    pub(super) vocab: u64,
    /// Bytes of an element.
    pub(super) elem: u64,
    /// Workspace bytes of a linear; attention needs twice as much.
    pub(super) workspace: u64,
    /// Whether one linear computes q, k and v.
    pub(super) fused_qkv: bool,
    /// Whether the residual stream is updated in place and the activation is applied in place.
    pub(super) in_place: bool,
}

/// ESM-2 forward (pre-LN).
pub(super) fn esm2_forward(s: Shape) -> Vec<PackItem> {
    let mut t = Tape::new();
    let (td, tf, th, ws) =
        (s.tokens * s.d * s.elem, s.tokens * s.ffn * s.elem, s.tokens * s.heads * 4, s.workspace);
    let [ids] = t.op(&[], [s.tokens * 4], 0);
    let [mut x] = t.op(&[ids], [td], 0);
    for _ in 0..s.layers {
        let [h] = t.op(&[x], [td], 0);
        let o = if s.fused_qkv {
            let [qkv] = t.op(&[h], [3 * td], ws);
            t.op(&[qkv], [td, th], 2 * ws)[0]
        } else {
            let [q] = t.op(&[h], [td], ws);
            let [k] = t.op(&[h], [td], ws);
            let [v] = t.op(&[h], [td], ws);
            t.op(&[q, k, v], [td, th], 2 * ws)[0]
        };
        if s.in_place {
            t.op(&[x, o], [], ws);
        } else {
            let [p] = t.op(&[o], [td], ws);
            [x] = t.op(&[x, p], [td], 0);
        }
        let [h] = t.op(&[x], [td], 0);
        let [f] = t.op(&[h], [tf], ws);
        let [g] = if s.in_place { [f] } else { t.op(&[f], [tf], 0) };
        if s.in_place {
            t.op(&[x, g], [], ws);
        } else {
            let [p] = t.op(&[g], [td], ws);
            [x] = t.op(&[x, p], [td], 0);
        }
    }
    let [h] = t.op(&[x], [td], 0);
    let [l] = t.op(&[h], [s.tokens * s.vocab * s.elem], ws);
    t.op(&[l], [], 0);
    t.items
}

/// DNABERT-S forward (post-LN, gated MLP).
pub(super) fn bert_forward(s: Shape) -> Vec<PackItem> {
    let mut t = Tape::new();
    let (td, tf, th, ws) =
        (s.tokens * s.d * s.elem, s.tokens * s.ffn * s.elem, s.tokens * s.heads * 4, s.workspace);
    let [mut x] = t.op(&[], [td], 0);
    for _ in 0..s.layers {
        let [qkv] = t.op(&[x], [3 * td], ws);
        let [o, _] = t.op(&[qkv], [td, th], 2 * ws);
        let [p] = t.op(&[o], [td], ws);
        let [a] = t.op(&[x, p], [td], 0);
        [x] = t.op(&[a], [td], 0);
        let [g] = t.op(&[x], [2 * tf], ws);
        let [m] = t.op(&[g], [tf], 0);
        let [p] = t.op(&[m], [td], ws);
        let [a] = t.op(&[x, p], [td], 0);
        [x] = t.op(&[a], [td], 0);
    }
    t.op(&[x], [s.d * 64 * 4], 0);
    t.items
}

/// A training step under construction.
struct Training {
    tape: Tape,
    shape: Shape,
    /// Weight gradients that live to the end of the step; `None` if the optimizer consumes each immediately.
    grads: Option<Vec<Id>>,
}

impl Training {
    /// Bytes of a `(T, columns)` activation.
    fn rows(&self, columns: u64) -> u64 {
        self.shape.tokens * columns * self.shape.elem
    }

    fn linear<const N: usize>(&mut self, inputs: &[Id], outputs: [u64; N]) -> [Id; N] {
        self.tape.op(inputs, outputs, self.shape.workspace)
    }

    fn pointwise(&mut self, inputs: &[Id], output: u64) -> Id {
        self.tape.op(inputs, [output], 0)[0]
    }

    /// Layer norm; returns y, mean and rstd.
    fn norm(&mut self, x: Id) -> [Id; 3] {
        let sizes = [self.rows(self.shape.d), self.shape.tokens * 4, self.shape.tokens * 4];
        self.tape.op(&[x], sizes, 0)
    }

    /// Stores weight gradients to the end of the step, or consumes them immediately.
    fn update(&mut self, new: &[Id]) {
        match &mut self.grads {
            Some(grads) => grads.extend(new),
            None => drop(self.tape.op(new, [], 0)),
        }
    }

    /// Computes the gradients of a weight and its bias.
    fn weight_grad(&mut self, x: Id, dy: Id, columns: u64) {
        let (d, elem) = (self.shape.d, self.shape.elem);
        let grads = self.linear(&[x, dy], [d * columns * elem, columns * elem]);
        self.update(&grads);
    }

    fn norm_grad(&mut self, x: Id, dy: Id, mean: Id, rstd: Id) -> Id {
        let (td, row) = (self.rows(self.shape.d), self.shape.d * self.shape.elem);
        let [dx, gamma, beta] = self.linear(&[x, dy, mean, rstd], [td, row, row]);
        self.update(&[gamma, beta]);
        dx
    }

    /// Forward pass of a layer; returns its output and the values that the backward pass reads.
    fn forward(&mut self, x: Id) -> (Id, Saved) {
        let (td, tf, th) =
            (self.rows(self.shape.d), self.rows(self.shape.ffn), self.shape.tokens * self.shape.heads * 4);
        let n1 = self.norm(x);
        let qkv = [(); 3].map(|()| self.linear(&[n1[0]], [td])[0]);
        let a = self.linear(&qkv, [td, th]);
        let [p] = self.linear(&[a[0]], [td]);
        let x2 = self.pointwise(&[x, p], td);
        let n2 = self.norm(x2);
        let [f] = self.linear(&[n2[0]], [tf]);
        let g = self.pointwise(&[f], tf);
        let [p] = self.linear(&[g], [td]);
        let y = self.pointwise(&[x2, p], td);
        (y, Saved { x, n1, qkv, a, x2, n2, f, g })
    }

    /// Backward pass of a layer; returns the gradient of its input.
    fn backward(&mut self, s: Saved, dy: Id) -> Id {
        let (td, tf, d, ffn) =
            (self.rows(self.shape.d), self.rows(self.shape.ffn), self.shape.d, self.shape.ffn);
        self.weight_grad(s.g, dy, ffn);
        let [dg] = self.linear(&[dy], [tf]);
        let df = self.pointwise(&[s.f, dg], tf);
        self.weight_grad(s.n2[0], df, ffn);
        let [dh] = self.linear(&[df], [td]);
        let dn = self.norm_grad(s.x2, dh, s.n2[1], s.n2[2]);
        let dx2 = self.pointwise(&[dn, dy], td);
        self.weight_grad(s.a[0], dx2, d);
        let [da] = self.linear(&[dx2], [td]);
        let dqkv = self.linear(&[da, s.qkv[0], s.qkv[1], s.qkv[2], s.a[0], s.a[1]], [td; 3]);
        let dh = dqkv.map(|d_| {
            self.weight_grad(s.n1[0], d_, d);
            self.linear(&[d_], [td])[0]
        });
        let sum = self.pointwise(&dh[..2], td);
        let dh = self.pointwise(&[sum, dh[2]], td);
        let dn = self.norm_grad(s.x, dh, s.n1[1], s.n1[2]);
        self.pointwise(&[dn, dx2], td)
    }
}

/// Values that the backward pass of a layer reads: norms as (y, mean, rstd), attention as (output, log-sum-exp).
struct Saved {
    x: Id,
    n1: [Id; 3],
    qkv: [Id; 3],
    a: [Id; 2],
    x2: Id,
    n2: [Id; 3],
    f: Id,
    g: Id,
}

/// ESM-2 forward and backward. The backward pass reads the stored activations of the layers in reverse order. With
/// `keep_grads` weight gradients live to the end of the step, otherwise the optimizer consumes them immediately.
pub(super) fn esm2_training(shape: Shape, keep_grads: bool) -> Vec<PackItem> {
    let mut t = Training { tape: Tape::new(), shape, grads: keep_grads.then(Vec::new) };
    let (td, tv) = (t.rows(shape.d), t.rows(shape.vocab));
    let mut x = t.pointwise(&[], td);
    let mut layers = Vec::new();
    for _ in 0..shape.layers {
        let (y, saved) = t.forward(x);
        layers.push(saved);
        x = y;
    }
    let [logits] = t.linear(&[x], [tv]);
    let dlogits = t.pointwise(&[logits], tv);
    let [mut dx] = t.linear(&[dlogits], [td]);
    while let Some(saved) = layers.pop() {
        dx = t.backward(saved, dx);
    }
    let grads = t.grads.take().unwrap_or_default();
    t.tape.op(&grads, [], 0);
    t.tape.items
}
