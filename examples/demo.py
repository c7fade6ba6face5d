"""What `make demo` runs: all algorithms compared on this machine, then training on real scans.

    python examples/demo.py [--ranks 4] [--output build/demo]

1. Times every all_reduce algorithm between 2 ranks and between --ranks, over shared memory and over
   MPI: a table and a picture each. Every result is verified before it is timed. The MPI part is
   left out where there is no mpirun or no mpi4py.
2. Trains a classifier of handwritten digits on --ranks ranks, and compares it with one process.
3. Trains it on 1, 2 and --ranks ranks under every stage of sharding, ZeRO-0 to ZeRO-3, and compares
   the stages bit for bit.

Exits with the status of the first part that fails.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZES = ["-b", "64", "-e", "4M", "-f", "8", "--seconds", "0.05"]
# Open MPI starts as root, and with more ranks than cores, only when told to.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def find_mpirun() -> str | None:
    """The launcher beside this Python, else the first on PATH; None without it or mpi4py."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    return mpirun if importlib.util.find_spec("mpi4py") else None


def run(title: str, command: list[str], **environment: str) -> None:
    """Runs a command under a title; ends the demo if it fails."""
    print(f"\n=== {title}\n", flush=True)
    status = subprocess.run(command, env=os.environ | OPEN_MPI | environment).returncode
    if status:
        print(f"\nfailed with status {status}: {' '.join(command)}")
        sys.exit(1 if status < 0 else status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="the larger number of ranks (4)")
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="for the pictures")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    python, mpirun, pictures = sys.executable, find_mpirun(), []
    compare = ["-m", "collectives", "compare", "all_reduce", *SIZES]

    for ranks in sorted({2, args.ranks}):
        ways = {"shm": [python, *compare, "--ranks", str(ranks)]}
        if mpirun:
            ways["mpi"] = [mpirun, "-n", str(ranks), python, *compare, "--peer", "mpi"]
        for transport, command in ways.items():
            picture = args.output / f"{transport}-{ranks}-ranks.png"
            over = "shared memory" if transport == "shm" else "MPI"
            title = f"all_reduce between {ranks} ranks over {over}"
            run(title, [*command, "--png", str(picture)], COLLECTIVES_TRANSPORT=transport)
            pictures.append(picture)

    launcher = [python, "-m", "collectives", "run", "-n", str(args.ranks)]
    run(f"handwritten digits on {args.ranks} ranks", [*launcher, str(HERE / "digits.py")])

    for ranks in sorted({1, 2, args.ranks}):
        launcher = [python, "-m", "collectives", "run", "-n", str(ranks)]
        title = f"the same under every stage of sharding, on {ranks} rank{'s'[: ranks - 1]}"
        run(title, [*launcher, str(HERE / "digits_zero.py")])

    print(f"\n=== done in {time.monotonic() - start:.0f} s; the pictures:\n")
    print("\n".join(f"  {picture.resolve()}" for picture in pictures))
    if not mpirun:
        print("\nMPI was left out: there is no mpirun, or mpi4py is not installed")


if __name__ == "__main__":
    main()
