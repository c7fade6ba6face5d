"""What a stream that waits costs the kernels of another, on one GPU.

    python bench/waiting_gpu.py --json bench/results/waiting-gpu.json

The default stream runs a chain of small kernels, put there before the first may begin, so that the
host does not count. Meanwhile a stream beside it, which has run a kernel before, waits:

    nothing       it does not
    word          for a word in memory (cuStreamWaitValue64)
    kernel        a kernel of one thread there looks at the word
    event         for an event behind the chain
    interprocess  for an event that other processes may wait for
    through       for an event in a third stream, which waits for the word and never did anything
                  else

Figures are microseconds from one kernel of the chain to the next, medians over rounds in which the
ways take turns in changing orders.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import turns

import collectives as cc
from collectives.bench import machine

KERNELS = 200  # of a chain
SOURCE = r"""
extern "C" __global__ void nothing() {}
extern "C" __global__ void look(const volatile unsigned long long* word, unsigned long long until) {
  while (*word < until) {
  }
}
"""


class Words:
    """Words in pinned memory of the host, which streams wait for and the host writes."""

    def __init__(self, count: int) -> None:
        self._wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue64_v2
        self._wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
        self._memory = cupy.cuda.alloc_pinned_memory(count * 8)
        self._words = (ctypes.c_uint64 * count).from_address(self._memory.ptr)
        for i in range(count):
            self._words[i] = 0

    def address(self, i: int) -> int:
        return int(self._memory.ptr) + 8 * i

    def write(self, i: int, value: int) -> None:
        self._words[i] = value

    def wait(self, stream: cupy.cuda.Stream, i: int, value: int) -> None:
        """The stream goes on when the word is `value` or more."""
        error = self._wait(stream.ptr, self.address(i), value, 0)
        if error != 0:
            raise RuntimeError(f"cuStreamWaitValue64: error {error}")


class Bench:
    GO, END = 0, 1  # words

    def __init__(self) -> None:
        module = cupy.RawModule(code=SOURCE)
        self.nothing, self.look = module.get_function("nothing"), module.get_function("look")
        self.words = Words(2)
        self.main = cupy.cuda.Stream.null
        self.side, self.third = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self.began, self.ended = cupy.cuda.Event(), cupy.cuda.Event()
        self.mark = cupy.cuda.Event(disable_timing=True)
        self.shared = cupy.cuda.Event(disable_timing=True, interprocess=True)
        self.turn = 0
        self.ways: dict[str, Callable[[], None]] = {
            "nothing": lambda: None,
            "word": lambda: self.words.wait(self.side, self.END, self.turn),
            "kernel": self._look,
            "event": lambda: self._wait_for(self.mark, self.main),
            "interprocess": lambda: self._wait_for(self.shared, self.main),
            "through": self._through,
        }
        for stream in (self.main, self.side):  # loads the kernels, which waits for the GPU
            with stream:
                self.nothing((1,), (32,), ())
                self.look((1,), (1,), (self.words.address(self.GO), cupy.uint64(0)))
            stream.synchronize()

    def _look(self) -> None:
        with self.side:
            self.look((1,), (1,), (self.words.address(self.END), cupy.uint64(self.turn)))

    def _wait_for(self, event: cupy.cuda.Event, behind: cupy.cuda.Stream) -> None:
        event.record(behind)
        self.side.wait_event(event)

    def _through(self) -> None:
        self.words.wait(self.third, self.END, self.turn)
        self._wait_for(self.mark, self.third)

    def measure(self, way: str) -> float:
        """Microseconds of a kernel of the chain."""
        self.turn += 1
        with self.side:  # it has run one since it last waited
            self.nothing((1,), (32,), ())
        self.side.synchronize()
        self.words.wait(self.main, self.GO, self.turn)
        self.began.record(self.main)
        with self.main:
            for _ in range(KERNELS):
                self.nothing((1,), (32,), ())
        self.ended.record(self.main)
        self.ways[way]()
        time.sleep(0.0005)  # till the GPU has come to both waits
        self.words.write(self.GO, self.turn)
        self.ended.synchronize()
        self.words.write(self.END, self.turn)
        for stream in (self.main, self.side, self.third):
            stream.synchronize()
        return float(cupy.cuda.get_elapsed_time(self.began, self.ended)) * 1e3 / KERNELS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--rounds", type=int, default=50, help="of each way")
    options = parser.parse_args()
    bench = Bench()
    for way in bench.ways:
        bench.measure(way)
    found = turns.in_turns(list(bench.ways), bench.measure, lambda _: None, rounds=options.rounds)
    with cc.init() as comm:
        about: dict[str, Any] = {
            "header": machine.header(comm, machine.command_of_script()),
            "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "rounds": options.rounds,
            "kernels": KERNELS,
            "us": {way: statistics.median(times) for way, times in found.items()},
            "spread": {way: turns.spread(times) for way, times in found.items()},
        }
    turns.write(options.json, about)
    for way, us in about["us"].items():
        print(f"{way:13}{us:6.2f} us")


if __name__ == "__main__":
    main()
