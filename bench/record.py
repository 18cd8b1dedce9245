"""Records the behaviour of a binary for a fixed list of commands: exit codes, hashes of outputs, digests of plans (which include every address), messages.

    python3 bench/record.py PLIMSOLL OUT.json [--device cuda:0] [--only WORD]
    python3 bench/record.py --compare BEFORE.json AFTER.json

The comparison prints every difference and the times of both binaries. Its exit code is 1 if anything except a time differs. Use it for a change that
must not change results: record the binary before and after the change, then compare.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT.parent / "shared" / "goldens"
GENOME = str(ROOT.parent / "shared" / "genomes" / "fasta" / "protozoa.fa.gz")
CONTIGS = ROOT.parent / "shared" / "real" / "virnucpro" / "test_with_orfs.fa"

# In commands, {g} is the folder of the goldens, {o} the folder of the command, and {c} the folder that all commands share. Commands run in order.
ESM2, DNA, READS = "{g}/esm2", "{g}/dnabert_s", "{g}/pipeline/reads.fa"
WEIGHTS = ["--weights", "{c}/weights"]
MOE = ["train", "examples/moe-mini.yaml", "--set", "model.hidden=64", "--set", "model.layers=2", "--set", "batch.tokens=512", "--set", "run.steps=6",
       "--set", "schedule.warmup=0", "--set", "run.save_every=3", "--set", "run.evaluate_every=3", "--set", "run.evaluate_tokens=1024", "--set", "run.threads=2"]


def plan(*words):
    return ["plan", "--json", *words]


def plan_train(file, *pairs, target="null"):
    sets = [word for pair in pairs for word in ("--set", pair)]
    return plan("--train", file, "--target", target, *sets)


COMMANDS = {
    # Plans, which need neither weights nor the planned machine.
    "plan-8M-f32": plan("--model", "esm2_t6_8M_UR50D", "--precision", "f32", "--threads", "2", "--budget", "4GB"),
    "plan-650M-bf16": plan("--model", "esm2_t33_650M_UR50D", "--precision", "bf16", "--threads", "8", "--budget", "16GB"),
    "plan-3B-int8": plan("--model", "esm2_t36_3B_UR50D", "--precision", "int8", "--threads", "2", "--budget", "20GB"),
    "plan-3B-streamed": plan("--model", "esm2_t36_3B_UR50D", "--precision", "bf16", "--threads", "2", "--tokens", "2048", "--stream-weights", "always",
                             "--budget", "4GB"),
    "plan-dnabert-f32": plan("--model", "zhihan1996/DNABERT-S", "--precision", "f32", "--threads", "2", "--tokens", "2048", "--budget", "4GB"),
    "plan-dnabert-bf16": plan("--model", "zhihan1996/DNABERT-S", "--precision", "bf16", "--threads", "2", "--tokens", "2048", "--budget", "4GB"),
    "plan-3B-h200": plan("--model", "esm2_t36_3B_UR50D", "--target", "h200"),
    "plan-3B-h200-fp8": plan("--model", "esm2_t36_3B_UR50D", "--target", "h200", "--precision", "fp8"),
    "plan-35M-h200-tf32": plan("--model", "esm2_t12_35M_UR50D", "--target", "h200", "--precision", "tf32"),
    "plan-8M-a100-fp16": plan("--model", "esm2_t6_8M_UR50D", "--target", "a100-40", "--precision", "fp16"),
    "plan-3B-4090-budget": plan("--model", "esm2_t36_3B_UR50D", "--target", "4090", "--budget", "4GiB"),
    "plan-dnabert-null": plan("--model", "zhihan1996/DNABERT-S", "--target", "null", "--precision", "f32"),
    "plan-refused": plan("--model", "esm2_t36_3B_UR50D", "--target", "4090", "--budget", "1GiB", "--stream-weights", "never"),
    "plan-predict": plan("--predict", "--precision", "bf16", "--threads", "2", "--budget", "16GB"),
    "plan-predict-h200": plan("--predict", "--target", "h200"),
    "plan-moe": plan_train("examples/moe-mini.yaml"),
    "plan-moe-cpu": [*plan_train("examples/moe-mini.yaml", "run.threads=2", "optimizer.kind=adamw8bit", target="cpu"), "--budget", "2GB"],
    "plan-moe-tight": [*plan_train("examples/moe-mini.yaml", "run.threads=2", "optimizer.kind=auto", target="cpu"), "--budget", "120MB"],
    "plan-moe-remat": plan_train("examples/moe-mini.yaml", "memory.remat=full", "optimizer.kind=adafactor"),
    "plan-moe-bf16": [*plan_train("examples/moe-mini.yaml", "precision.kind=bf16", "run.threads=2", target="cpu"), "--budget", "2GB"],
    "plan-dense-largest": [*plan_train("examples/dense-7b.yaml", "run.threads=16", target="cpu"), "--budget", "60GB", "--largest", "layers"],
    "plan-head": [*plan_train("examples/head.yaml", "run.threads=2", target="cpu"), "--budget", "2GB"],
    "plan-train-h200": plan_train("examples/dense-7b.yaml", target="h200"),
    # Runs.
    "embed-mean": ["embed", "--model", ESM2, "{g}/esm2/proteins.faa", "-o", "{o}/e.npy"],
    "embed-cls-parquet": ["embed", "--model", DNA, "{g}/dnabert_s/reads.fa", "-o", "{o}/e.parquet", "--pool", "cls", "--threads", "1"],
    "embed-tokens-layers": ["embed", "--model", ESM2, "{g}/esm2/proteins.faa", "-o", "{o}/e.safetensors", "--pool", "tokens", "--layers", "0,1,-1"],
    "embed-bf16": ["embed", "--model", ESM2, "{g}/esm2/proteins.faa", "-o", "{o}/e.npy", "--precision", "bf16", "--tokens", "1100"],
    "embed-int8-lanes": ["embed", "--model", ESM2, "{g}/esm2/proteins.faa", "-o", "{o}/e.npy", "--precision", "int8", "--threads", "3"],
    "embed-streamed": ["embed", "--model", DNA, CONTIGS, "-o", "{o}/e.npy", "--stream-weights", "always", "--max-length", "2000", "--truncate"],
    "embed-per-input": ["embed", "--model", DNA, READS, CONTIGS, "-o", "{o}/each", "--per-input"],
    "embed-refused": ["embed", "--model", DNA, READS, "-o", "{o}/e.npy", "--memory-budget", "12MB"],
    "predict-built-in": ["predict", "examples/reads.fa", "-o", "{o}/r"],
    "predict-500": ["predict", READS, *WEIGHTS, "-o", "{o}/r", "--keep-intermediate"],
    "predict-300": ["predict", READS, *WEIGHTS, "-o", "{o}/r", "--length", "300", "--save-embeddings", "npy", "--threads", "3"],
    "predict-contigs-bf16": ["predict", CONTIGS, *WEIGHTS, "-o", "{o}/r", "--precision", "bf16", "--hits-format", "fasta.gz"],
    "predict-killed": ["predict", GENOME, *WEIGHTS, "-o", "{o}/r", "--threads", "1", "--commit-every", "0"],
    "predict-resumed": ["predict", GENOME, *WEIGHTS, "-o", "{c}/predict-killed/r", "--threads", "1", "--commit-every", "0"],
    "predict-shard-1": ["predict", READS, *WEIGHTS, "-o", "{o}/r", "--shard", "1/2"],
    "predict-shard-2": ["predict", READS, *WEIGHTS, "-o", "{o}/r", "--shard", "2/2"],
    "predict-merged": ["predict", READS, *WEIGHTS, "-o", "{o}/r", "--merge", "{c}/predict-shard-1/r", "--merge", "{c}/predict-shard-2/r"],
    "plot": ["plot", "{c}/predict-500/r", "-o", "{o}/p"],
    "train-moe": [*MOE, "-o", "{o}/run"],
    "train-moe-resumed": [*MOE, "-o", "{o}/run"],
    "train-moe-8bit": [*MOE, "--set", "optimizer.kind=adamw8bit", "--set", "memory.remat=full", "-o", "{o}/run"],
    "train-moe-bf16": [*MOE, "--set", "precision.kind=bf16", "--set", "optimizer.kind=adafactor", "-o", "{o}/run"],
    "train-head": ["train", "examples/head.yaml", "--set", "run.epochs=3", "--set", "run.threads=2", "-o", "{o}/run"],
    "train-refused": [*MOE, "--budget", "20MB", "-o", "{o}/run"],
    "train-unknown-key": [*MOE, "--set", "model.widht=3", "-o", "{o}/run"],
    "verify": ["verify", *WEIGHTS],
    "convert": ["convert", DNA, "-o", "{o}/w.safetensors"],
    "missing-input": ["predict", "{o}/nothing.fa", "-o", "{o}/r"],
}
# Commands that are not run with --device, because they do not use a device or are refused on a GPU.
CPU_ALONE = {"embed-int8-lanes", "embed-refused", "train-refused", "train-unknown-key", "missing-input", "convert", "plot"}


def sha(data):
    return hashlib.sha256(data).hexdigest()[:16]


def same_text(text, folder):
    """A message with numbers and folders removed, which differ between runs."""
    text = text.replace(str(folder), "").replace(str(ROOT), "")
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    return re.sub(r"\s*[0-9][0-9 ,.:]*", " #", text)


def keys(value, path=""):
    """The keys of a JSON value, with the values of keys that are determined by the input."""
    if isinstance(value, dict):
        return [line for key in sorted(value) for line in keys(value[key], f"{path}.{key}")]
    kept = path.rsplit(".", 1)[-1] in ("digest", "format", "peak_bytes", "windows", "orfs", "virus", "records", "arithmetic", "loss", "step", "tokens")
    return [f"{path} = {value}" if kept and not isinstance(value, float) else path]


def outputs(folder):
    found = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.is_file():
            if file.name in ("run.json", "state.json"):
                found[name] = {line.split(" = ")[0]: line for line in keys(json.loads(file.read_text()))}
            elif file.name in ("metrics.csv", "metrics.jsonl"):
                found[name] = [line for line in metrics(file)]
            elif file.suffix in (".html", ".log"):
                found[name] = "present"
            else:
                found[name] = sha(file.read_bytes())
    return found


def metrics(file):
    """The steps and losses of a metrics file; other columns are times."""
    for line in file.read_text().splitlines():
        if file.suffix == ".jsonl":
            row = json.loads(line)
            # Lines of stages and events depend on the machine.
            if "stage" not in row and "event" not in row:
                yield {key: row[key] for key in row if "loss" in key or key == "step"}
        else:
            yield line.split(",")[:3]


def plan_of(text):
    """A plan as JSON without times and without the memory of the planning process."""
    def kept(value):
        if isinstance(value, dict):
            return {key: kept(v) for key, v in value.items() if key not in ("process", "seconds", "free_bytes")}
        if isinstance(value, list):
            return [kept(v) for v in value]
        return "float" if isinstance(value, float) else value
    return kept(json.loads(text))


def run(binary, name, words, folder, device):
    own = folder / name
    own.mkdir()
    names = {"g": str(GOLDENS), "o": str(own), "c": str(folder)}
    words = [str(word).format(**names) for word in words]
    if name == "train-moe-resumed":
        shutil.copytree(folder / "train-moe" / "run", own / "run")
        shutil.rmtree(own / "run" / "checkpoints" / "step-00000006")
    if device and words[0] in ("embed", "predict", "verify") and "--merge" not in words:
        words += ["--device", device]
    env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder / "home"), "NO_COLOR": "1"}
    start = time.time()
    process = subprocess.Popen([str(binary), *words], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if name == "predict-killed":
        journal = own / "r" / "progress.journal"
        while process.poll() is None and not (journal.exists() and journal.stat().st_size > 4096):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    out, error = process.communicate(timeout=600)
    found = {"exit": process.returncode, "seconds": round(time.time() - start, 2)}
    if name == "predict-killed":
        # The number of finished steps depends on timing.
        return found | {"files": sorted({re.sub("[0-9]+", "#", str(f.relative_to(own))) for f in own.rglob("*") if f.is_file()})}
    if words[0] == "plan" and process.returncode == 0:
        found["plan"] = plan_of(out)
    else:
        found["stdout"] = same_text(out, folder)
    found["stderr"] = same_text(error, folder) if process.returncode else ""
    place = folder / "predict-killed" if name == "predict-resumed" else own
    return found | {"outputs": outputs(place)}


def record(binary, out, device, only):
    folder = Path(tempfile.mkdtemp(prefix="record-"))
    weights = folder / "weights"
    weights.mkdir()
    (weights / "dnabert_s").symlink_to(GOLDENS / "dnabert_s")
    (weights / "esm2").symlink_to(GOLDENS / "esm2")
    shutil.copy(GOLDENS / "head.pth", weights / "head.pth")
    results = {}
    for name, words in COMMANDS.items():
        if (device and (name in CPU_ALONE or name.startswith(("plan", "train")))) or (only and only not in name):
            continue
        results[name] = run(binary, name, words, folder, device)
        print(f"{name:22} exit {results[name]['exit']:4} {results[name]['seconds']:6.2f} s", flush=True)
    out.write_text(json.dumps(results, indent=1, sort_keys=True))
    shutil.rmtree(folder)


def differences(before, after, path):
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if key != "seconds":
                yield from differences(before.get(key, "absent"), after.get(key, "absent"), f"{path}.{key}")
    elif before != after:
        yield f"{path}: {before} -> {after}"


def compare(before, after):
    before, after = (json.loads(Path(file).read_text()) for file in (before, after))
    found = [line for name in sorted(before.keys() | after.keys())
             for line in differences(before.get(name, "absent"), after.get(name, "absent"), name)]
    print("\n".join(found) if found else f"{len(before)} commands, no difference")
    both = [(before[name]["seconds"], after[name]["seconds"]) for name in before if name in after]
    print(f"seconds {sum(b for b, _ in both):.1f} -> {sum(a for _, a in both):.1f}")
    return 1 if found else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--only")
    parser.add_argument("first")
    parser.add_argument("second", type=Path)
    args = parser.parse_args()
    if args.compare:
        return compare(args.first, args.second)
    record(Path(args.first).resolve(), args.second, args.device, args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
