"""Minutes of random collectives, verified, while memory, descriptors and threads must stay as they
are.

    python tests/soak.py --minutes 30 --ranks 4 --json build/soak.json

The ranks are processes. In each round they split as drawn (or duplicate, or stay together) and run
drawn calls on the parts: any collective, algorithm, dtype, op, count, root and order, blocking,
queued several at a time, or grouped, in place or not, on arrays of their own and on symmetric ones.
Every result is compared with tests/reference.py, byte for byte. Every rank draws the same, from the
seed alone.

What a rank holds (resident memory, descriptors, mappings, threads) is looked at after each tenth of
the time. The first tenth is for warming up; from then on nothing may grow. Writes a table and JSON;
ends with status 1 if a result was wrong or something grew.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import cases
import numpy as np
import reference
from cases import Case

import collectives as cc
from collectives.config import COLLECTIVES

CALLS = 24  # of one part in one round
TENTHS = 10
# Python and malloc keep some of what was freed; 30 minutes of calls that each lost as little as one
# allocation of 64 bytes would be above this.
SLACK = 4 << 20


class Held(NamedTuple):
    """What a process holds at one moment."""

    rss: int  # bytes
    descriptors: int
    mappings: int
    threads: int


def held() -> Held:
    """After everything that can be given back was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    with open("/proc/self/maps") as maps:
        # Other mappings come and go with the heap.
        ours = sum("collectives" in line for line in maps)
    return Held(
        rss=int(fields["VmRSS"].split()[0]) << 10,
        descriptors=len(os.listdir("/proc/self/fd")) - 1,  # less the one that lists them
        mappings=ours,
        threads=int(fields["Threads"]),
    )


def draw_count(rng: random.Random) -> int:
    """Elements: as many of each magnitude up to 2**18, now and then 2**21."""
    top = 21 if rng.random() < 0.02 else 18
    return rng.choice([0, 1, int(2 ** rng.uniform(0, top))])


def draw_case(rng: random.Random, comm: cc.Communicator, pairs: list[tuple[str, str]]) -> Case:
    collective = rng.choice(COLLECTIVES)
    names = [name for name, c in pairs if c == collective]
    algorithm = rng.choice([None, *names])
    if collective == "barrier":
        return Case(collective, algorithm)
    dtype, op = rng.choice(reference.PAIRS)
    reduces = collective in reference.REDUCING
    order = rng.choice([None, "rank"]) if reduces else None
    return Case(
        collective,
        algorithm,
        dtype,
        op if reduces else "sum",
        count=draw_count(rng),
        root=rng.randrange(comm.size) if collective in cases.ROOTED else 0,
        order=order,
        place=rng.choice(["in", "out", "new"]),
        how=rng.choice(["blocking", "blocking", "async", "group"]),
        v=collective in cases.VARIANTS
        and rng.random() < 0.3
        and not cases.forwards(algorithm, collective, comm.size, comm.nodes),
        seed=rng.randrange(1 << 30),
        data="random" if order == "rank" else "exact",
    )


class Tally:
    calls = 0
    nbytes = 0
    rounds = 0
    parts = 0


def several_at_a_time(comm: cc.Communicator, rng: random.Random, tally: Tally) -> None:
    """Queued calls, waited for in any order."""
    works = []
    for _ in range(rng.randrange(2, 9)):
        dtype = rng.choice(["float32", "bfloat16", "int64"])
        case = Case("all_reduce", dtype=dtype, count=draw_count(rng), seed=rng.randrange(1 << 30))
        x = cases.make_input(case, comm.rank, comm.size)
        tally.calls += 1
        tally.nbytes += x.nbytes
        works.append((case, comm.all_reduce(x, async_op=True)))
    rng.shuffle(works)
    for case, work in works:
        words = cases.difference(work.wait(), cases.expected(case, comm.size)[comm.rank])
        assert not words, f"rank {comm.rank} of {comm.size}, queued {case}: {words}"


def on_symmetric_memory(comm: cc.Communicator, rng: random.Random, tally: Tally) -> None:
    count = draw_count(rng)
    x = comm.empty(count, "float32")
    for _ in range(2):
        case = Case("all_reduce", count=count, seed=rng.randrange(1 << 30))
        x[:] = cases.make_input(case, comm.rank, comm.size)
        comm.all_reduce(x)
        tally.calls += 1
        tally.nbytes += x.nbytes
        words = cases.difference(x, cases.expected(case, comm.size)[comm.rank])
        assert not words, f"rank {comm.rank} of {comm.size}, symmetric {case}: {words}"


def around(comm: cc.Communicator, rng: random.Random, tally: Tally) -> None:
    """A message to the next rank, and one from the last."""
    x = np.full(draw_count(rng), comm.rank, np.int32)
    got = np.empty_like(x)
    comm.sendrecv(x, (comm.rank + 1) % comm.size, got, (comm.rank - 1) % comm.size)
    tally.calls += 1
    tally.nbytes += x.nbytes
    assert (got == (comm.rank - 1) % comm.size).all()


@lru_cache
def registry(n: int, nodes: tuple[int, ...]) -> list[tuple[str, str]]:
    return cases.registry(n, nodes)


def calls_on(comm: cc.Communicator, rng: random.Random, tally: Tally) -> None:
    pairs = registry(comm.size, tuple(comm.nodes))
    for _ in range(rng.randrange(1, CALLS)):
        case = draw_case(rng, comm, pairs)
        cases.check(comm, case)
        tally.calls += 1
        tally.nbytes += cases.input_length(case, comm.rank, comm.size) * (
            reference.DTYPES[case.dtype].itemsize
        )
    if rng.random() < 0.5:
        several_at_a_time(comm, rng, tally)
    if rng.random() < 0.5:
        on_symmetric_memory(comm, rng, tally)
    if rng.random() < 0.5:
        around(comm, rng, tally)


def one_round(comm: cc.Communicator, seed: int, tally: Tally) -> None:
    """Parts as drawn, and calls on each."""
    rng = random.Random(f"{seed} {tally.rounds}")
    tally.rounds += 1
    colors = [rng.choice([None, 0, 0, 1, 1, 2]) for _ in range(comm.size)]
    keys = [rng.randrange(4) for _ in range(comm.size)]
    how = rng.choice(["whole", "split", "split", "duplicate"])
    if how == "whole":
        return calls_on(comm, rng, tally)
    color = colors[comm.rank] if how == "split" else 0
    part = comm.split(color, keys[comm.rank]) if how == "split" else comm.duplicate()
    if part is None:
        return None
    tally.parts += 1
    # Ranks of one part draw alike; other parts draw other calls.
    calls_on(part, random.Random(f"{rng.random()} {color}"), tally)
    part.close()
    return None


def rounds(comm: cc.Communicator, minutes: float) -> Iterator[int]:
    """Yields, before each round, how many tenths of the time are over, until rank 0 says it is."""
    began = time.monotonic()
    while True:
        tenth = np.array([int((time.monotonic() - began) / (6 * minutes))])
        comm.broadcast(tenth, 0)
        if tenth[0] >= TENTHS:
            return
        yield int(tenth[0])


def work(minutes: float, seed: int, output: str) -> None:
    """What each rank does."""
    comm = cc.init(timeout=300)
    tally = Tally()
    seen: list[Held] = []
    last = 0
    began = time.monotonic()
    for tenth in rounds(comm, minutes):
        if tenth != last:
            last = tenth
            seen.append(held())
        one_round(comm, seed, tally)
    seen.append(held())
    mine = {
        "rank": comm.rank,
        "seconds": time.monotonic() - began,
        "calls": tally.calls,
        "bytes": tally.nbytes,
        "rounds": tally.rounds,
        "parts": tally.parts,
        "held": [h._asdict() for h in seen],
    }
    Path(f"{output}.{comm.rank}").write_text(json.dumps(mine))
    comm.close()


def judge(ranks: list[dict[str, Any]]) -> list[str]:
    """What has grown since the first tenth of the time, in words; memory, since the first half: in
    that the schedules of all subgroups come into caches.
    """
    words = []
    for r in ranks:
        last = r["held"][-1]
        for what in Held._fields:
            first = r["held"][TENTHS // 2 if what == "rss" else 0]
            slack = SLACK if what == "rss" else 0
            if last[what] > first[what] + slack:
                words.append(f"rank {r['rank']}: {what} grew from {first[what]} to {last[what]}")
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2, help="nodes that the ranks count as")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="build/soak.json")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    output = os.path.abspath(args.json)
    if args.rank:
        work(args.minutes, args.seed, output)
        return 0
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "collectives", "run", "-n", args.ranks, "--nodes", args.nodes]
    command += [__file__, "--rank", "--minutes", args.minutes, "--seed", args.seed]
    command += ["--json", output]
    ended = subprocess.run([str(c) for c in command])
    if ended.returncode:
        return ended.returncode
    ranks = []
    for r in range(args.ranks):
        part = Path(f"{output}.{r}")
        ranks.append(json.loads(part.read_text()))
        part.unlink()
    grown = judge(ranks)
    report = {"machine": platform.platform(), "python": platform.python_version(), **vars(args)}
    report |= {"ranks": ranks, "grown": grown, "collectives": cc.__version__}
    Path(output).write_text(json.dumps(report, indent=1))
    print("rank  seconds   calls  GB in  parts  RSS, descriptors, mappings, threads: first -> last")
    for r in ranks:
        a, b = r["held"][0], r["held"][-1]
        print(
            f"{r['rank']:4d} {r['seconds']:8.0f} {r['calls']:7d} {r['bytes'] / 1e9:6.2f} "
            f"{r['parts']:6d}  {a['rss'] / 2**20:.1f} -> {b['rss'] / 2**20:.1f} MiB, "
            + ", ".join(f"{a[w]} -> {b[w]}" for w in Held._fields[1:])
        )
    print("\n".join(grown) or "nothing grew")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
