"""Times ESM-2 in transformers (PyTorch, SDPA) on CPU cores, a peer of BENCHMARKS.md.

Random weights of the real shapes, random residues, one forward pass to the last hidden state,
no padding (all sequences have equal lengths). Prints one JSON line per model and dtype:
side, model, dtype, batch, length, threads, tokens_per_s (from the median), seconds (all of
them), torch and transformers versions. Set-up: README.md beside this file.
"""

import torch
import transformers
from transformers import EsmConfig, EsmModel

from cpu_timing import DTYPES, options, say, timed

# name: (layers, hidden size, heads), as in the hub's config.json
SHAPES = {
    "facebook/esm2_t6_8M_UR50D": (6, 320, 20),
    "facebook/esm2_t12_35M_UR50D": (12, 480, 20),
    "facebook/esm2_t30_150M_UR50D": (30, 640, 20),
    "facebook/esm2_t33_650M_UR50D": (33, 1280, 20),
}


def build(model, dtype):
    """The encoder with random weights; token dropout and rotary embeddings as published."""
    layers, hidden, heads = SHAPES[model]
    config = EsmConfig(
        vocab_size=33,
        mask_token_id=32,
        pad_token_id=1,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=1026,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        position_embedding_type="rotary",
        emb_layer_norm_before=False,
        token_dropout=True,
    )
    config._attn_implementation = "sdpa"
    encoder = EsmModel(config, add_pooling_layer=False).eval().to(DTYPES[dtype])
    if encoder.config._attn_implementation != "sdpa":
        raise SystemExit("this transformers has no SDPA for ESM: compare with one that has")
    return encoder


def tokens(batch, length):
    """(batch, length) ids: <cls>, residues, <eos>."""
    ids = torch.randint(4, 24, (batch, length))
    ids[:, 0], ids[:, -1] = 0, 2
    return ids


def measure(encoder, ids, warmup, repeats):
    """Seconds of each timed forward pass, without the warm-up passes."""
    mask = torch.ones_like(ids)
    return timed(lambda: encoder(input_ids=ids, attention_mask=mask), warmup, repeats)


def arguments():
    parser = options(__doc__, 64, 168)
    parser.add_argument("--model", action="append", choices=sorted(SHAPES), help="repeatable; all by default")
    return parser.parse_args()


def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for model in args.model or SHAPES:
        for dtype in args.dtype or ["f32"]:
            ids = tokens(args.batch, args.length)
            seconds = measure(build(model, dtype), ids, args.warmup, args.repeats)
            say("transformers", model, dtype, args, seconds, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
