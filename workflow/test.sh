#!/usr/bin/env bash
# Runs the workflow with three shards on this machine, on the example and on a larger input that gives every
# shard windows. All results must have the same bytes as a plain run. usage: test.sh [PLIMSOLL]
# Installs the pinned version of Snakemake into a cache outside the repository, once; fails if it cannot.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
plimsoll=$(realpath "${1:-${CARGO_TARGET_DIR:-$root/target}/release/plimsoll}")
pins=$root/workflow/requirements.txt
cache=${XDG_CACHE_HOME:-$HOME/.cache}/plimsoll
venv=$cache/snakemake-$(sha256sum "$pins" | cut -c1-12)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ ! -e "$venv/complete" ]; then
    rm -rf "$venv"
    mkdir -p "$cache"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$pins"
    touch "$venv/complete"
fi

# run SETTING...: runs the workflow in $work, which has the paths that the example names.
run() {
    (cd "$work" && "$venv/bin/snakemake" --snakefile "$root/workflow/Snakefile" \
        --profile "$root/workflow/profiles/local" --cores 2 --quiet rules \
        --configfile config.yaml --config plimsoll="$plimsoll" "$@") 2>&1 | tee "$work/said"
}

# compare SAMPLE FLAG...: compares the results of SAMPLE with those of a plain run with FLAG.
compare() {
    local sample=$1 files
    shift
    # Run in the same folder, because result files contain the input's path as given.
    (cd "$work" && "$plimsoll" predict "examples/$sample.fa" "$@" --quiet -o "plain/$sample")
    files=$(ls "$work/plain/$sample")
    if [ "$files" != "$(ls "$work/results/$sample")" ]; then
        diff "$work/plain/$sample" "$work/results/$sample" || true
        echo "$sample: the files are not those of a plain run" >&2
        return 1
    fi
    for file in $files; do
        # run.json contains times, which differ between runs.
        [ "$file" = run.json ] || cmp "$work/plain/$sample/$file" "$work/results/$sample/$file"
    done
    echo "$sample: $(wc -w <<<"$files") files, the same as of a plain run"
}

mkdir "$work/examples"
ln -s "$root/examples/reads.fa" "$work/examples/reads.fa"
ln -s "$root/fixtures/goldens" "$work/weights"
cp "$root/workflow/example/config.yaml" "$work/config.yaml"
# Shards get windows in groups of some hundreds: this input has several groups for each shard.
for copy in $(seq 8); do
    sed "s/^>/>copy${copy}_/" "$root/examples/reads.fa"
done >"$work/examples/many.fa"

echo "== the example"
run
compare reads

echo "== a larger input, trained weights, every kind of result"
sed -i 's|^  reads:.*|&\n  many: [examples/many.fa]|' "$work/config.yaml"
# Other models write other files. Snakemake removes the files of the rule, run.json among them, so that those of the built-in
# caller would be files that no run wrote, which a run does not replace.
rm -r "$work/plain" "$work/results"
cat >>"$work/config.yaml" <<END
weights: weights
length: 300
keep_intermediate: true
save_embeddings: npy
source: true
END
flags=(--weights weights --length 300 --keep-intermediate --save-embeddings npy --source)
run
compare reads "${flags[@]}"
compare many "${flags[@]}"

echo "== once more, with other threads and memory"
run threads=2 mem_mb=3000
if ! grep -q "Nothing to be done" "$work/said"; then
    echo "the second run computed something again" >&2
    exit 1
fi
