#!/usr/bin/env bash
# Trains a head with run.tensorboard, interrupts and resumes it, and compares what TensorBoard reads with metrics.jsonl.
# usage: tensorboard.sh [PLIMSOLL]. Installs the pinned version of TensorBoard into a cache outside the repository, once; fails if
# it cannot.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
plimsoll=$(realpath "${1:-${CARGO_TARGET_DIR:-$root/target}/release/plimsoll}")
venv=${XDG_CACHE_HOME:-$HOME/.cache}/plimsoll/tensorboard-2.20.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ ! -e "$venv/complete" ]; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    # setuptools below 81 still has pkg_resources, which this version of TensorBoard imports.
    "$venv/bin/pip" install --quiet --disable-pip-version-check tensorboard==2.20.0 'setuptools<81'
    touch "$venv/complete"
fi

cd "$root"
train() {
    "$plimsoll" train examples/head.yaml --quiet --set run.tensorboard=true --set run.patience=null \
        --set run.epochs=null --set schedule.steps=40 --set run.save_every=10 -o "$work/run" "$@"
}
train --set run.steps=30
# As after a kill at step 30 that lost its checkpoint: starts again from step 20 and repeats ten steps.
rm -r "$work/run/checkpoints/step-00000030"
train --set run.steps=40
"$venv/bin/python" .ci/read_events.py "$work/run"
