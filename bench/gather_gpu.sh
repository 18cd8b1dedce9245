#!/bin/sh
# Gathers what runs on a GPU machine without Rust: the tests, the benches, the goldens, PyTorch's side.
#
#   bench/gather_gpu.sh FOLDER        then, on the GPU machine: cd FOLDER && ./run.sh [tests|bench|peers|all]
#
# Needs cargo here, and there an NVIDIA driver, NVRTC and cuBLASLt (`plimsoll doctor` says what it finds); PyTorch for peers.
set -eu
to=${1:?the folder to gather into}
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
profile=${PROFILE:-release}
mkdir -p "$to/bin" "$to/peers"
cargo build --profile "$profile" -p plimsoll
# The tests are compiled as `cargo test` does; their paths are listed by cargo itself.
tests=$(cargo test -p plimsoll-exec -p plimsoll-cuda --test it --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))/\1/p')
for test in $tests; do
  case $test in
    */target/*) crate=$(strings -a "$test" | grep -o -m1 'crates/[a-z]*/tests/it' | cut -d/ -f2) ;;
  esac
  strip -o "$to/bin/test-$crate" "$test"
done
dir=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
strip -o "$to/bin/plimsoll" "$dir/$profile/plimsoll"
cp bench/peers/*.py "$to/peers/"
mkdir -p "$to/fixtures"
cp -r fixtures/goldens fixtures/training "$to/fixtures/"
# Tests know their fixtures by the path of this checkout.
printf '%s\n' "$root" >"$to/checkout"
cat >"$to/run.sh" <<'RUN'
#!/bin/sh
# Runs what was gathered; see bench/gather_gpu.sh.
set -u
cd "$(dirname "$0")"
here=$(pwd)
checkout=$(cat checkout)
if [ ! -e "$checkout" ]; then
  mkdir -p "$checkout/crates/exec" "$checkout/crates/cuda"
  ln -s "$here/fixtures" "$checkout/fixtures"
fi
what=${1:-all}
export PATH="$here/bin:$PATH"
plimsoll doctor | head -40
case $what in tests|all)
  test-exec cuda --nocapture --test-threads=1
  test-cuda --nocapture --test-threads=1 ;;
esac
case $what in bench|all)
  for model in facebook/esm2_t36_3B_UR50D facebook/esm2_t33_650M_UR50D facebook/esm2_t30_150M_UR50D facebook/esm2_t12_35M_UR50D facebook/esm2_t6_8M_UR50D; do
    for batch in 97x168 390x168; do
      plimsoll bench --device cuda --model $model --batch $batch --tokens 65536
    done
  done
  plimsoll bench --device cuda --model zhihan1996/DNABERT-S --batch 624x105 --tokens 65536 ;;
esac
case $what in peers|all)
  for model in 3B 650M 150M 35M 8M; do
    python3 peers/esm2.py --model $model --pack 16384 65536
  done ;;
esac
RUN
chmod +x "$to/run.sh"
du -sh "$to"
