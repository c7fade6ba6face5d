"""Negative controls: builds the core with kernels that lack something they need, and runs a few
tests, which must fail: `mutants.py BUILD`.

BUILD is a build directory made with COLLECTIVES_CUDA=EMULATED; each mutant is built there, from a
changed copy of the kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    name: str
    file: str
    before: str
    after: str
    tests: str
    module: str = "test_direct.py"


MUTANTS = (
    Mutant(
        "packets with a flag beside one half only", "parcels.cuh",
        "return p.low_flag == flags.first && p.high_flag == flags.second;",
        "return p.high_flag == flags.second;",
        "test_one_shot and packets-3",
    ),
    Mutant(
        "packets of calls that are alike with the same second flag", "parcels.cuh",
        "first * kSpread)", "0u)", "test_hurried and one_shot-packets",
    ),
    Mutant(
        "packets with one buffer for all calls", "direct_one_shot.cu",
        "const int parity = static_cast<int>(epoch & 1);", "const int parity = 0;",
        "test_hurried and one_shot",
    ),
    Mutant(
        "lines that do not look at the flag", "parcels.cuh",
        "return __all_sync(kTogether, flag == flag_of(flags)) != 0;",
        "return __all_sync(kTogether, flag == flag_of(flags) || true) != 0;",
        "test_one_shot and lines-3",
    ),
    Mutant(
        "results that do not wait for the last rank", "parcels.cuh",
        "if (q != rank && !carrier.open(", "if (q != rank && q + 1 != n && !carrier.open(",
        "test_results_wait_for_all or test_hurried_blocks",
    ),
    Mutant(
        "results looked for where contributions are", "two_shot_lines.cuh",
        "const u64 wanted = call_.parcels + min(", "const u64 wanted = min(",
        "test_two_shot and lines-any-3",
    ),
    Mutant(
        "messages taken before they have come", "fifo.cuh",
        "return u32(seen) == number + 1;", "return true;", "test_two_shot and push-any-3",
    ),
    Mutant(
        "messages written over those not yet taken", "fifo.cuh",
        "return number - u32(seen) < u32(kDepth);", "return true;", "test_one_way",
    ),
    Mutant(
        "a message told before its block has written it", "fifo.cuh",
        "    named_barrier(kDone, kThreads + 32);\n    if (role_ == Role::worker) return true;",
        "    if (role_ == Role::worker) return true;", "test_two_shot and push-any-3",
    ),
    Mutant(
        "work that does not wait for what it needs", "fifo.cuh",
        "    named_barrier(kReady, kThreads + 32);\n    if (!has_failed())",
        "    if (!has_failed())", "test_two_shot and push-any-3",
    ),
    Mutant(
        "bulk loads that are used before they have landed", "bulk.cuh",
        "while (!has_landed(&landings_.loaded[turn.stage], turn.parity)) poll_again();", "",
        "test_two_shot and bulk-symmetric-3",
    ),
    Mutant(
        "bulk loads over what is still being stored", "bulk.cuh",
        "wait_bulk_read<kStoring>();", "", "test_two_shot and bulk and symmetric",
    ),
    Mutant(
        "bulk stores that nobody waits for", "bulk.cuh",
        "    wait_bulk_written();", "", "test_two_shot and bulk-symmetric-3",
    ),
    Mutant(
        "no waiting for ranks that still read or write", "direct_two_shot.cu",
        "return (alone || wait(true, false)) && part();", "return true;",
        "test_hurried and symmetric",
    ),
    Mutant(
        "an epoch that is advanced before all blocks have read it", "signal.cuh",
        "if (!counts() || ticket != gridDim.x - 1) return;",
        "if (!counts() || ticket != 0) return;",
        "test_hurried and one_shot",
    ),
    Mutant(
        "calls that do not look at each other's signature", "signal.cuh",
        "if (u32(word >> 32) != u32(epoch) || u32(word) == head.hash) return false;",
        "return false;", "test_symmetric_buffers or test_pairs",
    ),
    Mutant(
        "kernels between copies that do not look who is in the call", "copies.cu",
        "const bool all_are_here = agree(w, step.head, entry);", "const bool all_are_here = true;",
        "test_a_peer_in_another_call", "test_copies.py",
    ),
    Mutant(
        "segments that a strand works at in turns share scratch", "plan.cu",
        "((u64(strand_) * call_.together + at_) * call_.cells", "(u64(strand_) * call_.cells",
        "test_large", "test_device.py",
    ),
    Mutant(
        "a receive that does not wait for its message", "transfer.cu",
        "ready = seen == next_ + 1;", "ready = true;", "test_every_size or test_hurried",
        "test_point_to_point.py",
    ),
    Mutant(
        "a send over messages that were not taken", "transfer.cu",
        "ready = next_ - seen < u32(kTransferDepth);", "ready = true;",
        "test_larger_than_what_fits", "test_point_to_point.py",
    ),
    Mutant(
        "a message of a transfer told before its block has written it", "transfer.cu",
        "if (told_ != next_) tell();", "if (ready) tell();",
        "test_larger_than_what_fits", "test_point_to_point.py",
    ),
    Mutant(
        "transfers that do not look at each other's envelope", "transfer.cu",
        "(t.sends || message != 0 || agrees(t, own))", "true", "test_mismatches",
        "test_point_to_point.py",
    ),
    Mutant(
        "transfers of a pair that do not wait for those before them", "transfer.cu",
        "if (before_ >= 0 && left[before_] != 0) return Shared::kNothing;", "",
        "test_a_group", "test_point_to_point.py",
    ),
    Mutant(
        "transfers that the pair does not count", "transfer.cu",
        "(t.sends ? pair.sent : pair.received) += 1;", "(void)pair;", "test_mismatches",
        "test_point_to_point.py",
    ),
)  # fmt: skip


def build(directory: Path) -> None:
    subprocess.run(
        ["cmake", "--build", str(directory), "--target", "_core"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def survives(mutant: Mutant, directory: Path, kernels: Path) -> bool:
    path = kernels / mutant.file
    source = path.read_text()
    if source.count(mutant.before) < 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} has no\n{mutant.before}")
    path.write_text(source.replace(mutant.before, mutant.after))
    try:
        build(directory)
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests/emulated/run.py"), str(directory), "-q", "-x",
             "-p", "no:cacheprovider", f"tests/gpu/{mutant.module}", "-k", mutant.tests],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        path.write_text(source)
    if done.returncode not in (0, 1) and "segmentation" not in done.stdout.lower():
        raise SystemExit(f"{mutant.name}: the tests did not run\n{done.stdout}")
    return done.returncode == 0


def main() -> None:
    directory = Path(sys.argv[1]).resolve()
    kernels = directory / "mutant-kernels"
    shutil.rmtree(kernels, ignore_errors=True)
    shutil.copytree(ROOT / "kernels", kernels)
    subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(directory), f"-DCOLLECTIVES_KERNELS={kernels}"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.environ.setdefault("EMULATED_THIN", "4")
    alive = []
    for mutant in MUTANTS:
        lives = survives(mutant, directory, kernels)
        print(f"{'NOT NOTICED' if lives else 'noticed':12} {mutant.name}", flush=True)
        if lives:
            alive.append(mutant.name)
    if alive:
        raise SystemExit(f"{len(alive)} of {len(MUTANTS)} mutants pass the tests")


if __name__ == "__main__":
    main()
