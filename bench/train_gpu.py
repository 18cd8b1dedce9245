#!/usr/bin/env python3
"""Training speed and memory on a GPU, Plimsoll and compiled PyTorch in one run: ESM-2 masked LM, LoRA, language models.

    python3 bench/train_gpu.py target/release/plimsoll --work /tmp/train_gpu [--rows 650m lora 3b 8m llama moe] [--steps 12]
        [--rounds 3]

ESM-2 starts from random weights in the Hub's layout, with random proteins of log-normal lengths (exp N(5.6, 0.75), 30 to
1022); the language models (1.35 B parameters: llama with 4 sequences of 4096 random tokens a step; moe, the model of
examples/moe-base.yaml, with 8 of 2048) start from random initial weights. All train in bf16 with AdamW, clipping, nothing
recomputed, and one micro-batch a step. The peers are bench/peers/training.py and bench/peers/language_model.py.
Prints tokens/s (median of the steps after the third), the largest memory of the card (NVML, every 0.3 s) of both sides,
and the seconds from our start to the end of our first step; after several rounds, in which the sides take turns, also the
medians of both sides and their ratio. `--peers none` runs our side alone.
Needs torch and safetensors.
"""

import argparse
import array
import json
import math
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time

import torch
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent

# (width, heads, layers, tokens of a step, LoRA)
ROWS = {
    "650m": (1280, 20, 33, 65536, False),
    "650m-small": (1280, 20, 33, 16384, False),
    "lora": (1280, 20, 33, 65536, True),
    "3b": (2560, 40, 36, 16384, False),
    "8m": (320, 20, 6, 65536, False),
}

# Language models: (settings of the model, vocabulary, tokens of a sequence)
LANGUAGE = {
    "llama": (
        "{kind: dense_lm, vocabulary: 32000, hidden: 2048, layers: 24, heads: 16, intermediate: 5504}",
        32000,
        4096,
    ),
    "moe": ("{kind: moe_lm, preset: base}", 65536, 2048),
}
LANGUAGE_TOKENS = 16384


def tensors_of_esm2(width, layers, normal, dtype=torch.float32):
    """The tensors of an ESM-2 in the Hub's layout: a dictionary of those outside the layers and before them, one for each layer,
    and one of those behind. `normal(rows, columns)` gives the matrices; gains are 1, biases 0."""

    def linear(tensors, at, columns, rows):
        tensors[f"{at}.weight"], tensors[f"{at}.bias"] = normal(rows, columns), torch.zeros(rows, dtype=dtype)

    def norm(tensors, at):
        tensors[f"{at}.weight"], tensors[f"{at}.bias"] = torch.ones(width, dtype=dtype), torch.zeros(width, dtype=dtype)

    yield {"esm.embeddings.word_embeddings.weight": normal(33, width), "lm_head.bias": torch.zeros(33, dtype=dtype)}
    for i in range(layers):
        tensors, layer = {}, f"esm.encoder.layer.{i}."
        norm(tensors, f"{layer}attention.LayerNorm")
        norm(tensors, f"{layer}LayerNorm")
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(tensors, f"{layer}attention.{part}", width, width)
        linear(tensors, f"{layer}intermediate.dense", width, 4 * width)
        linear(tensors, f"{layer}output.dense", 4 * width, width)
        yield tensors
    tensors = {}
    norm(tensors, "esm.encoder.emb_layer_norm_after")
    linear(tensors, "lm_head.dense", width, width)
    norm(tensors, "lm_head.layer_norm")
    yield tensors


def write_config(folder, width, heads, layers):
    """Writes the config.json of an ESM-2."""
    config = json.loads((ROOT / "fixtures/goldens/esm2/config.json").read_text())
    config |= {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))


def weights(folder, width, heads, layers):
    """An ESM-2 with random weights: normal with standard deviation 0.02, gains 1, biases 0."""
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True)
    write_config(folder, width, heads, layers)
    torch.manual_seed(7)
    tensors = {}
    for some in tensors_of_esm2(width, layers, lambda rows, columns: 0.02 * torch.randn(rows, columns)):
        tensors |= some
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def proteins(path, count):
    draw = random.Random(7)
    with open(path, "w") as file:
        for i in range(count):
            length = int(min(1022, max(30, math.exp(draw.gauss(5.6, 0.75)))))
            file.write(f">p{i}\n{''.join(draw.choices('LAGVSERTIDPKQNFYMHWC', k=length))}\n")


class Memory:
    """The largest memory in use on the first card, in MiB, while the block runs."""

    def __enter__(self):
        self.most, self.ended = 0, False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self.ended:
            self.most = max(self.most, int(subprocess.run(query, capture_output=True, text=True).stdout or 0))
            time.sleep(0.3)

    def __exit__(self, *_):
        self.ended = True
        self.thread.join()


def encoder(args, name):
    """The configuration of an ESM-2 but for its precision, optimizer and run, and its tokens a step."""
    width, heads, layers, tokens, lora = ROWS[name]
    model = args.work / f"esm2-{width}"
    weights(model, width, heads, layers)
    adapters = ", lora: {rank: 16, targets: [query, key, value, attention.output.dense]}" if lora else ""
    data = f"{{train: [{args.work / 'proteins.faa'}], longest: 1024, validation_fraction: 0}}"
    return f"model: {{kind: esm2, from: {model}{adapters}}}\ndata: {data}\n", tokens


def language_model(args, name):
    model, vocabulary, longest = LANGUAGE[name]
    data = args.work / f"{name}.bin"
    draw = random.Random(7)
    tokens = LANGUAGE_TOKENS * (args.steps + 20)
    data.write_bytes(array.array("H", (draw.randrange(vocabulary) for _ in range(tokens))).tobytes())
    return f"model: {model}\ndata: {{train: [{data}], longest: {longest}, validation_fraction: 0}}\n", LANGUAGE_TOKENS


def ours(args, name):
    output = args.work / f"run-{name}"
    shutil.rmtree(output, ignore_errors=True)
    config = args.work / f"{name}.yaml"
    text, tokens = (language_model if name in LANGUAGE else encoder)(args, name)
    config.write_text(
        text + "optimizer: {kind: adamw, lr: 1e-4}\nprecision: {kind: bf16}\nmemory: {remat: none, budget: 97%}\n"
        f"batch: {{tokens: {tokens}, micro_tokens: {tokens}}}\nrun: {{steps: {args.steps + 10}, save_every: null, device: cuda}}\n"
    )
    metrics, began, first = output / "metrics.jsonl", time.time(), None
    with Memory() as memory:
        run = subprocess.Popen([args.binary, "train", config, "-o", output], stderr=subprocess.PIPE, text=True)
        # Ended before its last step: the checkpoint at the end is not measured.
        while run.poll() is None:
            # Lines without a loss are of stages.
            done = metrics.read_text().count('"loss":') if metrics.exists() else 0
            if done > 0 and first is None:
                first = time.time() - began
            if done >= args.steps:
                break
            time.sleep(0.1)
        run.kill()
        errors = run.communicate()[1]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    rates = [line["tokens_per_second"] for line in lines if "loss" in line][3:]
    if not rates:
        sys.exit(f"{name}: {errors}")
    rate = statistics.median(rates)
    print(f"{name:12} plimsoll {rate:12.0f} tokens/s {memory.most:8} MiB, first step after {first:.1f} s", flush=True)
    return rate, memory.most


def peer(args, name):
    if name in LANGUAGE:
        words = ["bench/peers/language_model.py", name]
    else:
        width, heads, layers, tokens, lora = ROWS[name]
        words = ["bench/peers/training.py", *map(str, (width, heads, layers, tokens, 16 if lora else 0))]
    with Memory() as memory:
        run = subprocess.run([sys.executable, ROOT / words[0], *words[1:]], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{name}: {run.stderr}")
    print(f"{name:12} PyTorch  {float(run.stdout):12.0f} tokens/s {memory.most:8} MiB", flush=True)
    return float(run.stdout), memory.most


def medians(name, ours, peers):
    """Prints the medians of the rounds of both sides, each a list of (tokens/s, MiB), and our figures divided by the peer's."""
    rate, memory = (statistics.median(figures) for figures in zip(*ours))
    peer_rate, peer_memory = (statistics.median(figures) for figures in zip(*peers))
    print(
        f"{name:12} medians {rate:.0f} / {peer_rate:.0f} tokens/s ({rate / peer_rate:.2f}), "
        f"{memory:.0f} / {peer_memory:.0f} MiB ({memory / peer_memory:.2f})",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--rows", nargs="*", default=[*ROWS, *LANGUAGE], choices=[*ROWS, *LANGUAGE])
    parser.add_argument("--peers", choices=["all", "none"], default="all")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    proteins(args.work / "proteins.faa", 60000)
    for name in args.rows:
        own, others = [], []
        for _ in range(args.rounds):
            if args.peers == "all":
                others.append(peer(args, name))
            own.append(ours(args, name))
        if args.rounds > 1 and others:
            medians(name, own, others)


if __name__ == "__main__":
    main()
