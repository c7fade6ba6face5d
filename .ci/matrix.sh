#!/usr/bin/env bash
# Builds the wheel from the sdist and imports it, in an environment of its own, for
#   each CPython 3.10-3.13 found (on PATH or under ~/.pyenv), with g++, without CUDA;
#   the Python of .venv with clang++ where there is one, and with CUDA where nvcc is.
# Warnings are errors. One line for each build; a failed one shows its log, and the script goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
work=$root/build/matrix
rm -rf "$work"
mkdir -p "$work"

"$root/.venv/bin/python" -c \
  "from scikit_build_core.build import build_sdist; build_sdist('$work')" >"$work/sdist.log" 2>&1 ||
  { cat "$work/sdist.log"; exit 1; }
sdist=$(echo "$work"/*.tar.gz)
pip() { "$1/bin/python" -m pip --quiet --disable-pip-version-check "${@:2}"; }

# The newest python of a minor version, if any.
find_python() {
  local found
  found=$(compgen -G "$HOME/.pyenv/versions/$1.*/bin/python$1" | sort -V | tail -1 || true)
  if [[ -z $found ]] && "python$1" --version >/dev/null 2>&1; then found=$(command -v "python$1"); fi
  echo "$found"
}

# wheel NAME PYTHON COMPILER CUDA: build it, install it, import it.
wheel() {
  local name=$1 python=$2 venv=$work/$1/venv
  export CXX=$3 COLLECTIVES_CUDA=$4 COLLECTIVES_WERROR=ON
  export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
  "$python" -m venv "$venv" &&
    pip "$venv" install --upgrade pip &&
    pip "$venv" wheel --no-deps --wheel-dir "$work/$name" \
      --config-settings=build-dir="$work/$name/build" "$sdist" &&
    pip "$venv" install "$work/$name"/*.whl &&
    cd / && # so that the sources are not what is imported
    "$venv/bin/python" -c 'import collectives; print("imported", collectives.__version__)'
}

failed=0
try() {
  local start=$SECONDS log=$work/$1.log
  printf '%-28s' "$1"
  if (wheel "$@") >"$log" 2>&1; then
    echo "ok, $((SECONDS - start)) s"
    rm -rf "${work:?}/$1"
  else
    echo failed
    cat "$log"
    failed=1
  fi
}

for version in 3.10 3.11 3.12 3.13; do
  python=$(find_python $version)
  if [[ -n $python ]]; then
    try "python$version-g++-host" "$python" g++ OFF
  else
    echo "python$version: not found"
  fi
done

python=$root/.venv/bin/python
clang=$(command -v clang++ clang++-{19,18,17,16,15,14} | head -1 || true)
nvcc=${CUDACXX:-$(command -v nvcc || true)}
if [[ -n $clang ]]; then try clang++-host "$python" "$clang" OFF; else echo "clang++: not found"; fi
if [[ -n $nvcc ]]; then
  try g++-cuda "$python" g++ ON
  if [[ -n $clang ]]; then try clang++-cuda "$python" "$clang" ON; fi
else
  echo "nvcc: not found"
fi
exit $failed
