#!/usr/bin/env bash
# Measures the host runtime on this machine, beside its peers in the same runs, and writes bench/results/host-*.json; then
# `python bench/table.py` makes the tables. Takes about ten minutes on two quiet cores; nothing else may run.
#
#   bench/host.sh [ENVIRONMENT...]     environments with the project and an MPI (.venv .venv-mpich)
#
# Ranks are bound to cores where there are enough: between calls the operating system would move them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
results=bench/results
mkdir -p "$results"
environments=("$@")
[ $# -gt 0 ] || environments=(.venv .venv-mpich)

# measure NAME RANKS ARGUMENTS...: one run in the current environment.
measure() {
  local name=$1 ranks=$2 bind=()
  shift 2
  if [ "$ranks" -le "$(nproc)" ]; then bind=("${binding[@]}"); fi
  echo "== $mpi-$name ($ranks ranks)"
  "$environment/bin/${launcher}" "${bind[@]}" -n "$ranks" "$environment/bin/python" -m collectives bench \
    --peer mpi --seconds 0.15 --json "$results/host-$mpi-$name-$ranks.json" "$@" >"$results/.log" 2>&1 ||
    { cat "$results/.log"; exit 1; }
}

for environment in "${environments[@]}"; do
  environment=$(cd "$environment" && pwd)
  if "$environment/bin/python" -c 'import mpi4py.MPI as m, sys; sys.exit("Open MPI" not in m.Get_library_version())'; then
    mpi=openmpi launcher=mpirun binding=(--bind-to core)
  elif [ -x "$environment/bin/impi_info" ]; then
    mpi=intelmpi launcher=mpiexec.hydra binding=()
  else
    mpi=mpich launcher=mpiexec binding=(-bind-to core)
  fi
  measure all_reduce 2 -b 4 -e 256M -f 4
  measure symmetric 2 -b 4 -e 256M -f 4 --in-place --symmetric
  measure collectives 2 -b 64 -e 16M -f 16 --collective reduce_scatter,all_gather,broadcast,all_to_all,barrier
  if [ "$mpi" != openmpi ]; then continue; fi
  measure all_reduce 4 -b 4 -e 64M -f 8 --in-place
  measure symmetric 4 -b 4 -e 64M -f 8 --in-place --symmetric
  for ranks in 8 16; do  # a core each, or they are left out
    if [ "$ranks" -gt "$(nproc)" ]; then continue; fi
    measure all_reduce "$ranks" -b 4 -e 64M -f 8 --in-place
    measure collectives "$ranks" -b 64 -e 16M -f 16 \
      --collective reduce_scatter,all_gather,broadcast,reduce,all_to_all,barrier
  done
  measure python 2 -b 4 -e 256K -f 16 --python \
    --collective all_reduce,reduce_scatter,all_gather,broadcast,reduce,all_to_all,barrier
  measure algorithms 2 -b 64K -e 16M -f 4 --in-place -a ring -a halving_doubling -a double_binary_tree
  COLLECTIVES_TRANSPORT=mpi measure over-mpi 2 -b 64K -e 16M -f 4 --in-place -a halving_doubling -a recursive_doubling
  measure gloo 2 -b 4 -e 16M -f 16 --in-place --peer gloo
done
rm -f "$results/.log"
