#!/bin/sh
# Trains a caller from genomes to a folder that `plimsoll predict --caller` takes.
#
#   sh examples/caller/train.sh GENOMES FOLD OUT [SEED]
#
# GENOMES: a collection as prepare.py describes it, with make_chunks.py; no spaces or commas in its path. FOLD: the fold of folds.tsv that is held out for validation and calibration.
# OUT: a new folder. Further settings of `plimsoll train` go into the variable SET, such as
# SET="--set run.device=cuda --set run.steps=2000". An interrupted run goes on with the same command.
set -eu
genomes=$1 fold=$2 out=$3 seed=${4:-0}
here=$(dirname "$0")
plimsoll=${PLIMSOLL:-plimsoll}
mkdir -p "$out"
python3 "$here/prepare.py" "$genomes" --fold "$fold" --out "$out/records.tsv"
files="$genomes/fasta"
[ -d "$genomes/more/fasta" ] && files="$files,$genomes/more/fasta"
common="--set data.train=[$files] --set data.labels=$out/records.tsv --set run.seed=$seed"
# shellcheck disable=SC2086
"$plimsoll" train "$here/pretrain.yaml" $common ${SET:-} -o "$out/pretrained"
# shellcheck disable=SC2086
"$plimsoll" train "$here/train.yaml" $common --set "model.from=$out/pretrained/best" ${SET:-} -o "$out/trained"
rm -rf "$out/caller"
cp -RL "$out/trained/best/ema" "$out/caller"
python3 "$here/calibrate.py" "$out/caller" --start
results=""
for length in 100 150 300 500 1000 3000; do
    python3 "$genomes/make_chunks.py" --split train --fold "$fold" --len $length --n 2000 --out "$out/fold_$length.fa"
    "$plimsoll" predict "$out/fold_$length.fa" --caller "$out/caller" --min-length 100 --force -o "$out/fold_$length"
    results="$results $length=$out/fold_$length"
done
# shellcheck disable=SC2086
python3 "$here/calibrate.py" "$out/caller" $results
