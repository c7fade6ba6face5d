#!/usr/bin/env bash
# Measures the GPU runtime on this machine, beside NCCL in the same runs, and writes bench/results/gpu-*.json; then
# `python bench/table.py` makes the tables. Takes about five minutes; nothing else may use the GPUs.
#
#   bench/gpu.sh [RANKS] [PYTHON]     ranks, one a GPU (2), and the Python that has the project, cupy and NCCL (.venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ranks=${1:-2}
python=${2:-.venv/bin/python}
results=bench/results
mkdir -p "$results"

# measure NAME ARGUMENTS...: one run.
measure() {
  local name=$1
  shift
  echo "== $name ($ranks ranks)"
  "$python" -m collectives bench --device cuda --ranks "$ranks" --peer nccl \
    --json "$results/gpu-nccl-$name-$ranks.json" "$@" >"$results/.log" 2>&1 || { cat "$results/.log"; exit 1; }
}

measure all_reduce -b 256 -e 1G -f 4 --mode both --out-of-place
measure symmetric -b 256 -e 1G -f 4 --symmetric
measure bfloat16 -b 256 -e 64M -f 16 -d bfloat16 --out-of-place
measure collectives -b 1K -e 256M -f 16 --collective reduce_scatter,all_gather,broadcast,all_to_all --out-of-place
measure algorithms -b 256 -e 256M -f 4 --out-of-place -a ring -a double_binary_tree -a halving_doubling -a direct_two_shot
measure blocks -b 64M -e 64M --max-blocks 8 --symmetric --in-place
rm -f "$results/.log"
