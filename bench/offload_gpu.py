#!/usr/bin/env python3
"""Training and embedding with offload on one GPU: memory planned and held, speed expected and measured, losses.

    python3 bench/offload_gpu.py target/release/plimsoll --work /tmp/offload [--rows esm2-3b-optimizer ...] [--rounds 3]
        [--peer ../shared/proofs/peers/fp8_offload.py]

ESM-2 3B and 15B start from random weights in the Hub's layout (bf16, shards) and train on random proteins (lengths exp
N(5.6, 0.75), 30 to 1022); the Llama shape of 8 B parameters starts from random weights on random tokens. For each row it
prints a JSON object: bytes planned, bytes held (NVML, every 0.3 s, MiB) and their difference, tokens/s expected and
measured (median of the steps after the second), the losses, and the seconds until the first step ended. The rows of
embedding embed 2 000 proteins with resident and with streamed weights. With --peer, torchao's CPUOffloadOptimizer does the work of
esm2-3b-optimizer in turns with it. Needs torch and safetensors, the peer torchao; esm2-15b rows need 31 GB of disk.
"""

import argparse
import array
import json
import multiprocessing
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import time

import torch
from safetensors.torch import save_file
from train_gpu import Memory, proteins, tensors_of_esm2, write_config

# ESM-2: width, heads, layers.
ESM2 = {"3b": (2560, 40, 36), "15b": (5120, 40, 48)}
LLAMA = "{kind: dense_lm, vocabulary: 128256, hidden: 4096, layers: 32, heads: 32, kv_heads: 8, intermediate: 14336}"

# Rows of training: model, tokens of a micro-step, micro-steps of a step, steps, and further settings.
TRAINING = {
    "esm2-3b": ("3b", 8192, 1, 10, "--set optimizer.clip_norm=null --set memory.remat=none"),
    "esm2-3b-optimizer": ("3b", 8192, 1, 10, "--set optimizer.clip_norm=null --set memory.remat=none --set memory.offload=[optimizer]"),
    "esm2-3b-optimizer-clip": ("3b", 8192, 1, 10, "--set optimizer.clip_norm=1.0 --set memory.remat=none --set memory.offload=[optimizer]"),
    "esm2-3b-optimizer-masters": ("3b", 8192, 1, 10, "--set optimizer.clip_norm=null --set memory.remat=none --set memory.offload=[optimizer,masters]"),
    "esm2-3b-8": ("3b", 8192, 8, 6, "--set optimizer.clip_norm=null --set memory.remat=none"),
    "esm2-3b-8-optimizer": ("3b", 8192, 8, 6, "--set optimizer.clip_norm=null --set memory.remat=none --set memory.offload=[optimizer]"),
    "esm2-3b-12gib": ("3b", 8192, 1, 6, "--set optimizer.clip_norm=null --set memory.offload=auto --set memory.budget=12GiB"),
    "esm2-15b": ("15b", 8192, 1, 20, "--set optimizer.lr=5e-7 --set optimizer.kind=adamw8bit --set optimizer.clip_norm=null --set memory.offload=auto --set memory.budget=79GiB"),
    "llama-8b": ("llama", 4096, 1, 6, "--set optimizer.clip_norm=null --set memory.offload=[optimizer,masters] --set memory.budget=22GiB"),
    "llama-8b-24gib": ("llama", 4096, 1, 6, "--set optimizer.clip_norm=null --set memory.offload=[optimizer,masters] --set memory.budget=23.5GiB"),
}
# Rows of embedding: model and settings.
EMBEDDING = {
    "esm2-3b-embed": ("3b", "--stream-weights never"),
    "esm2-3b-embed-streamed": ("3b", "--stream-weights always"),
    "esm2-15b-embed": ("15b", "--stream-weights never"),
    "esm2-15b-embed-8gib": ("15b", "--memory-budget 8GiB"),
}


def esm2(folder, width, heads, layers):
    """An ESM-2 with random bf16 weights in shards: normal with standard deviation 0.02, gains 1, biases 0."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    index = {}

    def normal(rows, columns):
        return 0.02 * torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

    for number, tensors in enumerate(tensors_of_esm2(width, layers, normal, torch.bfloat16), 1):
        name = f"model-{number:05}-of-{layers + 2:05}.safetensors"
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / name, metadata={"format": "pt"})
        index.update({key: name for key in tensors})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    # Written last: it tells `made` that the weights are complete.
    write_config(folder, width, heads, layers)


def made(args, model):
    """The folder of an ESM-2, made by another process, so that this one holds no memory of the card."""
    folder = args.work / f"esm2-{model}"
    if not (folder / "config.json").exists():
        process = multiprocessing.get_context("spawn").Process(target=esm2, args=(folder, *ESM2[model]))
        process.start()
        process.join()
        if process.exitcode != 0:
            sys.exit(f"{folder}: weights were not made")
    return folder


def training(args, name):
    model, tokens, micro_steps, steps, settings = TRAINING[name]
    if model == "llama":
        data = args.work / "tokens.bin"
        draw = random.Random(7)
        data.write_bytes(array.array("I", (draw.randrange(128256) for _ in range(tokens * (steps + 2)))).tobytes())
        text = f"model: {LLAMA}\ndata: {{train: [{data}], bin_type: u32, longest: {tokens}, validation_fraction: 0}}\n"
    else:
        folder = made(args, model)
        text = f"model: {{kind: esm2, from: {folder}}}\ndata: {{train: [{args.work / 'proteins.faa'}], longest: 1024, validation_fraction: 0}}\n"
    config, output = args.work / f"{name}.yaml", args.work / f"run-{name}"
    config.write_text(
        text + "optimizer: {kind: adamw, lr: 1e-4}\nprecision: {kind: bf16}\nmemory: {budget: 97%}\n"
        f"batch: {{tokens: {tokens * micro_steps}, micro_tokens: {tokens}}}\n"
        f"run: {{steps: {steps}, save_every: never, device: cuda}}\n"
    )
    words = settings.split()
    planned = run([args.binary, "plan", "--train", config, *words, "--target", "device", "--json"])
    plan = json.loads(planned.stdout)
    shutil.rmtree(output, ignore_errors=True)
    metrics, began, first = output / "metrics.jsonl", time.time(), None
    with Memory() as memory, open(args.work / "stderr", "w+") as errors:
        process = subprocess.Popen([args.binary, "train", config, "-o", output, *words], stderr=errors)
        while process.poll() is None:
            if first is None and metrics.exists() and '"loss":' in metrics.read_text():
                first = round(time.time() - began, 1)
            time.sleep(0.1)
        errors.seek(0)
        if process.returncode != 0:
            return {"row": name, "error": errors.read()[-2000:]}
    ran = json.loads((output / "run.json").read_text())
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    return {
        "row": name,
        "planned": ran["peak_bytes"],
        "held": memory.most << 20,
        "more": (memory.most << 20) - ran["peak_bytes"],
        "host": plan["host_staging_bytes"],
        "expected": round(plan["tokens_per_second"]),
        "measured": round(statistics.median([step["tokens_per_second"] for step in steps][2:])),
        "first_step": first,
        "losses": [round(step["loss"], 4) for step in steps],
    }


def embedding(args, name):
    model, settings = EMBEDDING[name]
    folder = made(args, model)
    few = args.work / "few.faa"
    proteins(few, 2000)
    words = ["--model", folder, "--precision", "bf16", *settings.split()]
    plan = json.loads(run([args.binary, "plan", *words, "--target", "device", "--json"]).stdout)
    output = args.work / "few.safetensors"
    with Memory() as memory:
        report = json.loads(run([args.binary, "embed", few, *words, "--device", "cuda", "-o", output, "--force", "--json"]).stdout)
    return {
        "row": name,
        "planned": report["devices"],
        "held": memory.most << 20,
        "expected": plan.get("tokens_per_second"),
        "measured": round(report["tokens_per_second"]),
        "seconds": report["seconds"],
    }


def run(words):
    process = subprocess.run(words, capture_output=True, text=True)
    if process.returncode != 0:
        sys.exit(f"{words}: {process.stderr}")
    return process


def peer(args):
    with Memory() as memory:
        process = run([sys.executable, args.peer, "300", "optimizer on host"])
    rate = re.search(r"([\d.]+) tok/s", process.stdout)
    return {"row": "peer", "measured": float(rate.group(1)) if rate else process.stdout, "held": memory.most << 20}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--rows", nargs="*", default=[*TRAINING, *EMBEDDING], choices=[*TRAINING, *EMBEDDING])
    parser.add_argument("--peer", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    proteins(args.work / "proteins.faa", 20000)
    for _ in range(args.rounds):
        for name in args.rows:
            print(json.dumps((training if name in TRAINING else embedding)(args, name)), flush=True)
        if args.peer:
            print(json.dumps(peer(args)), flush=True)


if __name__ == "__main__":
    main()
