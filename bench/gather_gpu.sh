#!/usr/bin/env bash
# Gathers what runs on a GPU machine without Rust: the binary, the tests, the goldens, PyTorch's side.
#
#   bench/gather_gpu.sh FOLDER        then, on the GPU machine: cd FOLDER && ./run.sh [tests | SECTION...]
#
# Needs cargo here, and there an NVIDIA driver, NVRTC and cuBLASLt (`plimsoll doctor` says what it finds); python3 with PyTorch
# for the peers, safetensors for `predict`. SECTION is one of gpu.sh's; without any, the tests and all sections run.
set -euo pipefail
to=$(realpath -m "${1:?the folder to gather into}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
profile=${PROFILE:-release}
folder=${CARGO_TARGET_DIR:-$root/target}/$([ "$profile" = dev ] && echo debug || echo "$profile")
mkdir -p "$to/bin" "$to/bench/peers" "$to/fixtures"

# built PATTERN ARGUMENT...: runs cargo with the arguments and prints the path of the built file from the line that
# contains PATTERN.
built() {
    local pattern=$1
    shift
    cargo "$@" 2>&1 | tee /dev/stderr | sed -n "s/.*Executable.*$pattern.*(\(.*\))/\1/p"
}

cargo build --profile "$profile" -p plimsoll-cli
strip -o "$to/bin/plimsoll" "$folder/plimsoll"
cargo build --profile "$profile" -p plimsoll-cuda --example attention
strip -o "$to/bin/attention" "$folder/examples/attention"
for crate in exec cuda; do
    strip -o "$to/bin/test-$crate" "$(built tests/it test -p "plimsoll-$crate" --test it --no-run)"
done
cp bench/gpu.sh bench/gpu_summary.py bench/predict_gpu.py "$to/bench/"
cp bench/peers/*.py "$to/bench/peers/"
cp -r fixtures/goldens fixtures/training "$to/fixtures/"
# Tests know their fixtures by the path of this checkout.
printf '%s\n' "$root" >"$to/checkout"
cat >"$to/run.sh" <<'RUN'
#!/usr/bin/env bash
# Runs what was gathered; see bench/gather_gpu.sh.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")"
here=$(pwd)
export PLIMSOLL=$here/bin/plimsoll
tests() {
    local checkout
    checkout=$(cat checkout)
    if [ ! -e "$checkout" ]; then
        mkdir -p "$checkout/crates/exec" "$checkout/crates/cuda"
        ln -s "$here/fixtures" "$checkout/fixtures"
    fi
    bin/test-exec cuda --nocapture --test-threads=1
    bin/test-cuda --nocapture --test-threads=1
}
case ${1:-} in
'') tests; bench/gpu.sh ;;
tests) tests ;;
*) bench/gpu.sh "$@" ;;
esac
RUN
chmod +x "$to/run.sh"
du -sh "$to"
