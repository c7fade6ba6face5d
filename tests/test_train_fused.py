"""One-pass kernels of GPUs, compiled for the host: their text has the bits of the optimizers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from optimizers import OPTIMIZERS

from collectives.array.dtypes import numpy_dtype
from collectives.train import LAMB, fused, norms
from collectives.train.norms_on_gpu import EXACT

SIZE = 14_000
CUTS = [(0, 5003), (5003, 5003), (5003, 9500), (9504, SIZE), (9500, 9504)]
COMPILER = shutil.which("g++") or shutil.which("c++")
# As a GPU's: to nearest, ties to even.
HALF = """
struct float16 {
  unsigned short bits;
  float16() = default;
  explicit operator float() const {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent ? std::ldexp(mantissa + 1024.f, exponent - 25)
                                : std::ldexp((float)mantissa, -24);
    return bits >> 15 ? -size : size;
  }
  explicit float16(float value) {
    int exponent;
    std::frexp(value, &exponent);
    if (exponent < -13) exponent = -13;
    const int mantissa = (int)std::nearbyint(std::ldexp(std::fabs(value), 11 - exponent));
    const int size = ((exponent + 13) << 10) + mantissa;
    bits = (unsigned short)((std::signbit(value) ? 0x8000 : 0) | (size < 0x7c00 ? size : 0x7c00));
  }
};
"""


# The kernel's threads one after another, block by block.
DRIVER = """
#include <cmath>
using std::sqrt;
#define __device__
#define __global__
#define __launch_bounds__(threads)
struct Index {{ int x; }};
static Index blockIdx, threadIdx;
{text}
extern "C" void run(const void* parts, int count, int blocks, int threads) {{
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
      collectives_{name}((const Part*)parts, count);
}}
"""


class Array:
    """An array of numpy with what cupy's have."""

    def __init__(self, values):
        self.held, self.size, self.dtype = values, values.size, values.dtype
        self.data = SimpleNamespace(ptr=values.ctypes.data)
        self.device = SimpleNamespace(id=0)


def on_host(folder, name, parts, numbers, monkeypatch):
    """`fused.Parts` whose kernel is compiled for the host."""

    def kernel(name, kinds, numbers):
        text = HALF + fused.BFLOAT + fused.source(name, kinds, numbers)
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        source.write_text(DRIVER.format(text=text, name=name))
        command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=60)
        run = ctypes.CDLL(str(library)).run

        def launch(grid, block, arguments):
            rows, count = arguments
            run(ctypes.c_void_p(rows.held.ctypes.data), int(count), grid[0], block[0])

        return launch

    device = SimpleNamespace(Device=lambda ordinal: nullcontext())
    cupy = SimpleNamespace(cuda=device, asarray=Array)
    monkeypatch.setattr(fused, "_kernel", kernel)
    monkeypatch.setattr(fused, "namespace", lambda x: cupy)
    return fused.Parts(
        name, numbers, [{k: Array(x) for k, x in arrays.items()} for arrays in parts]
    )


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "kinds",
    [
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
        ("float64", "float64", "float64"),
        ("bfloat16", "bfloat16", None),
        ("bfloat16", "float32", None),
        ("float16", "float16", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_the_text_has_the_bits_of_the_optimizer(optimizer, kinds, tmp_path, monkeypatch):
    """Dtypes are those of what is kept, of gradients, and of parameters as they are used. Parts
    are longer than a tile, begin at any address, or have nothing in them.
    """
    kept, low, to = kinds
    random = np.random.default_rng(3)
    w, *state = (random.normal(size=SIZE).astype(numpy_dtype(kept)) for _ in range(3))
    w[:20] = w[:20] * w.dtype.type(1e-6)  # less than a normal float16
    states = dict(zip(optimizer.slots, map(np.abs, state), strict=False))
    g = random.normal(size=SIZE).astype(numpy_dtype(low))
    coefficient, lr, step = 0.37, 0.05, 3
    wide = np.float64 if kept == "float64" else np.float32
    wanted, theirs = w.astype(wide), {k: v.astype(wide) for k, v in states.items()}
    x = g.astype(wide) * wide(coefficient)
    work = np.empty_like(x)
    if isinstance(optimizer, LAMB):
        name, numbers = optimizer.direction_on_gpu(step)
        optimizer.direction(wanted, x, theirs, step, work)
        states["direction"], theirs["direction"] = np.empty_like(x), x
    else:
        name, numbers = optimizer.on_gpu(lr, step)
        if optimizer.layerwise:
            optimizer.apply(wanted, x, theirs, lr)
        else:
            optimizer.update(wanted, x, theirs, lr, step, work)
        if name == "sgd":
            states, theirs = {}, {}
    arrays = {"g": g, "w": w, **states}
    if to is not None:
        arrays["used"] = np.empty(SIZE, numpy_dtype(to))
    parts = [{k: x[low:high] for k, x in arrays.items()} for low, high in CUTS]
    run = on_host(tmp_path, name, parts, tuple(numbers), monkeypatch).run
    # What the empty part is told reaches no other.
    told = (coefficient, *numbers.values())
    run([told, (5.0,) * len(told), *[told] * (len(CUTS) - 2)])
    assert w.tobytes() == wanted.astype(w.dtype).tobytes()
    if to is not None:
        assert arrays["used"].tobytes() == wanted.astype(numpy_dtype(to)).tobytes()
    for key, value in states.items():
        assert value.tobytes() == theirs[key].astype(value.dtype).tobytes(), key


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_text_of_exact_sums(tmp_path):
    """The same table as the host's, from the least number to the largest, and what is not one."""
    random = np.random.default_rng(7)
    values = np.ldexp(random.random(4000), random.integers(-1070, 1024, 4000))
    values[:6] = [0.0, 5e-324, np.finfo(float).max, np.inf, np.nan, 2.0**-1022]
    rows = random.integers(0, 3, values.size)
    wanted = norms.exact(values, rows, 3)
    lines = ["#include <cmath>", "using std::frexp;"]
    lines += ['extern "C" void run(long n, const double* v_, const long* rows, long long* table) {']
    lines += ["for (long i = 0; i < n; ++i) { const double v = v_[i];"]
    lines += [f"long long* row = table + rows[i] * {wanted.shape[1]};"]
    lines += ["auto add = [&](int limb, unsigned long long x) { row[limb] += x; };"]
    lines += [f"{EXACT} }} }}"]
    source, library = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    source.write_text("\n".join(lines))
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    table = np.zeros_like(wanted)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (values, rows, table)]
    ctypes.CDLL(str(library)).run(ctypes.c_long(values.size), *pointers)
    assert (table == wanted).all()
