#!/usr/bin/env python3
"""Checks that memory settings change nothing that a training run or an evaluation computes.

    python3 bench/packs.py target/release/plimsoll --device cuda:0 --work /tmp/packs

For each model, ten steps in f32 are repeated with other micro-steps, recomputation and budgets. Losses must agree to 1e-6 with
those of the first run, and checkpoints of runs with equal micro-steps must have equal bits. The last checkpoint is then
evaluated with batches of every size, on the device and on the CPU. Prints a line for each run; exit code 1 if one differs.
"""

import argparse
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROUNDING = 1e-6

# A step has four packs in each of them.
MODELS = {
    "experts": f"""
model: {{kind: moe_lm, hidden: 128, layers: 3, heads: 4, intermediate: 256, dropout: 0.1, experts: {{count: 4, top_k: 2, capacity: 1.1}}}}
loss: {{balance: 0.05, router_z: 0.01}}
data: {{train: [{ROOT}/examples/corpus.txt], document: paragraph, tokenizer: bytes, longest: 256}}
batch: {{tokens: 1024}}
""",
    "dense": f"""
model: {{kind: dense_lm, hidden: 192, layers: 3, heads: 6, kv_heads: 2, intermediate: 512}}
loss: {{z: 1e-3}}
optimizer: {{clip_norm: null}}
data: {{train: [{ROOT}/examples/corpus.txt], document: paragraph, tokenizer: bytes, longest: 256}}
batch: {{tokens: 1024}}
""",
    "esm2": f"""
model: {{kind: esm2, from: {ROOT}/fixtures/goldens/esm2, dropout: 0.1}}
data: {{train: [{ROOT}/fixtures/goldens/pipeline/expected_500/protein.faa], longest: 128}}
batch: {{tokens: 512}}
""",
}

# (packs of a micro-step, other settings); the first is the reference of the others.
SETTINGS = [
    (4, []),
    (4, ["memory.remat=full"]),
    (2, []),
    (2, ["memory.remat=selective", "memory.budget=60%"]),
    (1, []),
    (1, ["memory.remat=full", "memory.budget=50%"]),
    (3, []),
    (None, ["memory.dynamic={}"]),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    wrong = sum(model(args, name, text) for name, text in MODELS.items())
    sys.exit(f"{wrong} runs differ" if wrong else None)


def model(args, name, text):
    """Runs all settings of a model; returns how many differ."""
    file = args.work / f"{name}.yaml"
    file.write_text(
        f"{text}schedule: {{kind: constant}}\nrun: {{steps: 10, evaluate_every: 5, save_every: null, device: '{args.device}'}}\n"
    )
    pack = 128 if name == "esm2" else 256
    wrong, reference, digests, checkpoint = 0, None, {}, None
    for number, (packs, settings) in enumerate(SETTINGS):
        output = args.work / f"{name}-{number}"
        words = settings + ([f"batch.micro_tokens={packs * pack}"] if packs else [])
        words = [word for setting in words for word in ("--set", setting)]
        run([args.binary, "train", file, "-o", output, *words])
        found = losses(output)
        reference = reference or found
        worst = difference(found, reference)
        digest = bits(output / "checkpoints/step-00000010")
        same = packs is None or digests.setdefault(packs, digest) == digest
        checkpoint = checkpoint or output / "checkpoints/step-00000010"
        fits = worst <= ROUNDING and same
        wrong += not fits
        what = f"{packs} packs a micro-step" if packs else "dynamic"
        print(f"{name:8} {what:22} {' '.join(settings):44} {worst:8.1e} {'ok' if fits else 'DIFFERS'}", flush=True)
    wanted = losses(args.work / f"{name}-0", "validation_loss")[-1:]
    for device in dict.fromkeys([args.device, "cpu"]):
        for packs in [1, 2, 3, 4]:
            words = ["--set", f"batch.micro_tokens={packs * pack}", "--device", device, "--json"]
            loss = json.loads(run([args.binary, "evaluate", checkpoint, *words]))["loss"]
            worst = difference([loss], wanted)
            wrong += worst > ROUNDING
            print(f"{name:8} evaluation of {packs} packs on {device:24} {loss:.8f} {worst:14.1e} {'ok' if worst <= ROUNDING else 'DIFFERS'}", flush=True)
    return wrong


def run(words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stderr}")
    return done.stdout


def losses(folder, *keys):
    keys = keys or ("loss", "validation_loss", "balance_loss", "router_z_loss", "dropped")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in keys if line.get(key) is not None]


def difference(found, wanted):
    if len(found) != len(wanted):
        sys.exit(f"{len(found)} losses, not {len(wanted)}")
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, wanted))


def bits(folder):
    files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


if __name__ == "__main__":
    main()
