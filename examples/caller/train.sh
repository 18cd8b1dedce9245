#!/bin/sh
# Trains a caller from genomes to a folder that `plimsoll predict --caller` takes, as the built-in caller was trained.
#
#   sh examples/caller/train.sh GENOMES OUT
#
# GENOMES: a collection as prepare.py describes it, with make_chunks.py. OUT: a new folder; the result is OUT/caller. No spaces or
# commas in either path. An interrupted run goes on with the same command. Settings, as variables:
#   SEEDS="0 1 2"   seeds that are compared: that with the highest mean AUROC over five folds is trained on all records
#   SET="--set run.device=cuda"   further settings of `plimsoll train`
#   TEACHERS="0 1 2 3"   seeds of the larger callers (teacher.yaml) that the final training learns from; "" for none
#   PLIMSOLL=plimsoll             the program
set -eu
genomes=$1 out=$2
case "$genomes$out" in
*[\ ,]*) echo "$0: a space or a comma in $genomes or $out; choose other paths" >&2 && exit 1 ;;
esac
[ -z "${DISTILL:-}" ] || { echo "$0: DISTILL is now TEACHERS: the seeds of the teachers" >&2 && exit 1; }
here=$(dirname "$0")
plimsoll=${PLIMSOLL:-plimsoll}
seeds=${SEEDS:-0 1 2}
teachers=${TEACHERS-0 1 2 3}
files="$genomes/fasta"
[ -d "$genomes/more/fasta" ] && files="$files,$genomes/more/fasta"
mkdir -p "$out"

# last RUN: its last checkpoint. Not the best on the fold: a fold that chose the checkpoint would flatter the seed.
last() {
    ls -d "$1/checkpoints"/step-* | tail -n 1
}

# fit NAME TABLE SEED PRETRAINING_STEPS STEPS CONFIG SIZES MORE: pre-trains with the settings SIZES, and trains with CONFIG and
# the settings MORE. The result is the last checkpoint of OUT/NAME/trained.
fit() {
    common="--set data.train=[$files] --set data.labels=$2 --set run.seed=$3"
    # shellcheck disable=SC2086
    "$plimsoll" train "$here/pretrain.yaml" $common --set "run.steps=$4" $7 ${SET:-} -o "$out/$1/pretrained"
    pretrained=$(last "$out/$1/pretrained")
    # shellcheck disable=SC2086
    "$plimsoll" train "$here/$6" $common --set "run.steps=$5" --set "model.from=$pretrained" $8 ${SET:-} -o "$out/$1/trained"
}

# train NAME TABLE SEED PRETRAINING_STEPS STEPS CONFIG MORE: writes the averaged weights to OUT/NAME/caller.
train() {
    fit "$1" "$2" "$3" "$4" "$5" "$6" "" "$7"
    rm -rf "$out/$1/caller"
    trained=$(last "$out/$1/trained")
    cp -R "$trained/ema" "$out/$1/caller"
    python3 "$here/calibrate.py" "$out/$1/caller" --start
}

# predict NAME WINDOWS RESULT
predict() {
    "$plimsoll" predict "$2" --caller "$out/$1/caller" --min-length 100 --force -o "$3"
}

# Windows of every fold and of the split val. The folds together weigh as much as val in the calibration.
# Records of 10 kb are calibrated as such: the mean over their windows varies less than one window does.
for length in 100 150 300 500 1000 3000 10000; do
    n=1000
    [ $length = 3000 ] && n=300
    [ $length = 10000 ] && n=100
    python3 "$genomes/make_chunks.py" --split val --len $length --n $n --out "$out/val_$length.fa"
    for fold in 0 1 2 3 4; do
        python3 "$genomes/make_chunks.py" --split train --fold $fold --len $length --n $((n / 5)) --out "$out/fold${fold}_$length.fa"
    done
done

# Cross-validation: a shorter training for every seed and fold, without teachers.
for fold in 0 1 2 3 4; do
    python3 "$here/prepare.py" "$genomes" --fold $fold --out "$out/fold$fold.tsv"
    python3 "$genomes/make_chunks.py" --split train --fold $fold --len 500 --n 1000 --out "$out/fold$fold.fa"
    for seed in $seeds; do
        train "seed$seed-fold$fold" "$out/fold$fold.tsv" "$seed" 5000 3500 train.yaml ""
        predict "seed$seed-fold$fold" "$out/fold$fold.fa" "$out/seed$seed-fold$fold/selection"
    done
done
rm -f "$out/seeds.txt"
for seed in $seeds; do
    mean=$(python3 "$here/metrics.py" "$out/seed$seed"-fold?/selection)
    echo "$mean $seed" >>"$out/seeds.txt"
done
best=$(LC_ALL=C sort -g "$out/seeds.txt" | tail -n 1 | cut -d ' ' -f 2)

# The teachers, and the caller itself: the best seed, on all training records.
python3 "$here/prepare.py" "$genomes" --out "$out/all.tsv"
# The sizes of teacher.yaml.
sizes="--set model.hidden=320 --set model.layers=8 --set model.heads=5 --set model.intermediate=864"
folders=""
for teacher in $teachers; do
    fit "teacher$teacher" "$out/all.tsv" "$teacher" 26000 5000 teacher.yaml "$sizes" ""
    folders="$folders${folders:+,}$(last "$out/teacher$teacher/trained")/ema"
done
if [ -n "$folders" ]; then
    train final "$out/all.tsv" "$best" 10000 13000 distill.yaml "--set distillation.teacher=[$folders]"
else
    train final "$out/all.tsv" "$best" 10000 13000 train.yaml ""
fi
results=""
for length in 100 150 300 500 1000 3000 10000; do
    predict final "$out/val_$length.fa" "$out/final/val_$length"
    results="$results $length=$out/final/val_$length"
    for fold in 0 1 2 3 4; do
        predict "seed$best-fold$fold" "$out/fold${fold}_$length.fa" "$out/seed$best-fold$fold/$length"
        results="$results $length=$out/seed$best-fold$fold/$length"
    done
done
# shellcheck disable=SC2086
python3 "$here/calibrate.py" "$out/final/caller" $results
rm -rf "$out/caller"
python3 "$here/pack.py" "$out/final/caller" "$out/caller"
