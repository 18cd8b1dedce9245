"""Expected against measured seconds of a training step on this CPU, over twenty configurations.

    PLIMSOLL=target/release/plimsoll python3 bench/training_price.py [--target RATES.toml] [--steps 6] [--json]

Without --target the rates are measured first (`plimsoll bench --calibrate`). Each configuration is planned with
`plimsoll plan --train` and run with `plimsoll train`; the measured time is the median over the steps but the first.
The last line gives the number of configurations with a measured time within 25 % of the expected time. Run it on an idle
machine: other processes increase the measured time, not the expected one.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BOUND = 0.25
# Changes of each configuration to examples/moe-mini.yaml.
CONFIGURATIONS = {
    "moe": [],
    "moe, bf16": ["precision.kind=bf16"],
    "moe, adamw8bit": ["optimizer.kind=adamw8bit"],
    "moe, adafactor": ["optimizer.kind=adafactor"],
    "moe, sgd": ["optimizer.kind=sgd"],
    "moe, no clip": ["optimizer.clip_norm=null"],
    "moe, 4 micro-batches": ["batch.micro_tokens=512"],
    "moe, all recomputed": ["memory.remat=full"],
    "moe, hidden 128": ["model.hidden=128", "model.intermediate=256"],
    "moe, 8 layers": ["model.layers=8"],
    "dense": ["model.kind=dense_lm"],
    "dense, bf16": ["model.kind=dense_lm", "precision.kind=bf16"],
    "dense, adamw8bit": ["model.kind=dense_lm", "optimizer.kind=adamw8bit"],
    "dense, hidden 512": ["model.kind=dense_lm", "model.hidden=512", "model.intermediate=1536", "model.heads=8"],
    "dense, hidden 512, adamw8bit": [
        "model.kind=dense_lm", "model.hidden=512", "model.intermediate=1536", "model.heads=8", "optimizer.kind=adamw8bit",
    ],
    "dense, hidden 512, 512 tokens": [
        "model.kind=dense_lm", "model.hidden=512", "model.intermediate=1536", "model.heads=8", "batch.tokens=512",
    ],
    "dense, longest 1024": ["model.kind=dense_lm", "data.longest=1024"],
    "dense, 512 tokens": ["model.kind=dense_lm", "batch.tokens=512"],
    "dense, 8192 tokens": ["model.kind=dense_lm", "batch.tokens=8192"],
    "dense, selective": ["model.kind=dense_lm", "memory.remat=selective"],
}


def plimsoll(*words):
    return subprocess.run([os.environ["PLIMSOLL"], *words], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def settings(keys, **more):
    keys = [*keys, *(f"{key.replace('__', '.')}={value}" for key, value in more.items())]
    return [word for key in keys for word in ("--set", key)]


def measured(keys, steps, folder):
    """Median seconds of a step without the first step, which also loads data and caches."""
    words = settings(keys, run__steps=steps, run__evaluate_every="null", run__log_every=1, schedule__warmup=0)
    plimsoll("train", "examples/moe-mini.yaml", "-o", str(folder), "--resume", "never", "-q", *words)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ends = [line["seconds"] for line in lines if "loss" in line]
    return statistics.median(b - a for a, b in zip(ends, ends[1:]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", help="a target file of `plimsoll bench --calibrate`; measured first where absent")
    parser.add_argument("--steps", type=int, default=6, help="steps of each run [default: 6]")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each configuration")
    asked = parser.parse_args()
    within = 0
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        target = asked.target and str(pathlib.Path(asked.target).resolve())
        if target is None:
            target = str(work / "here.toml")
            plimsoll("bench", "--calibrate", target)
        for i, (name, keys) in enumerate(CONFIGURATIONS.items()):
            plan = json.loads(plimsoll("plan", "--train", "examples/moe-mini.yaml", "--target", target, "--json", *settings(keys)))
            expected, found = plan["seconds_per_step"], measured(keys, asked.steps, work / str(i))
            off = expected / found - 1
            within += abs(off) <= BOUND
            row = {"configuration": name, "expected": expected, "measured": found, "off": off}
            print(json.dumps(row) if asked.json else f"{name:<32} {expected:9.4f} s  {found:9.4f} s  {100 * off:+7.1f} %", flush=True)
    print(f"{within} of {len(CONFIGURATIONS)} within {100 * BOUND:.0f} %")


if __name__ == "__main__":
    main()
