"""Tell what is wrong: with this machine, or with a job whose ranks have written dumps.

Without files, the machine is examined: shared memory, leftovers of crashed jobs, namespaces, what
processes may do with each other, limits, processors, MPI, GPUs, libraries, and what the environment
sets. Each finding that is not "ok" has its cure. The exit status is 1 if there is a problem,
something that this package needs and that does not work.

With files, which the flight recorders of the ranks have written (COLLECTIVES_DUMP, SIGUSR1,
Communicator.dump), they are merged, and one sentence for each communicator says who is behind,
where, and since when. The exit status is 1 if anybody waits, or something has failed.
"""

from __future__ import annotations

import argparse
import json

from . import _common

EXAMPLES = """\
examples:
  python -m collectives doctor
  mkdir -p /tmp/dumps
  COLLECTIVES_DUMP=/tmp/dumps python -m collectives run -n 4 train.py &
  # when it is stuck, in the same shell:
  kill -USR1 $!; sleep 1; python -m collectives doctor /tmp/dumps/*.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="dumps of the ranks of a job")
    parser.add_argument("--json", action="store_true", help="as JSON")


@_common.in_words
def run(args: argparse.Namespace) -> int:
    return _read_dumps(args) if args.files else _examine(args)


def _read_dumps(args: argparse.Namespace) -> int:
    from ..doctor.merging import judge, read

    judged = judge(read(args.files))
    if args.json:
        print(json.dumps([one._asdict() for one in judged], indent=1))
    else:
        print("\n".join(one.sentence for one in judged) or "the files hold no communicator")
    return int(any(one.trouble for one in judged))


def _examine(args: argparse.Namespace) -> int:
    from ..doctor import packages, system, variables
    from ..doctor.findings import as_text

    settings = list(variables.examine())  # before the core is asked, which reads some of them too
    found = [*system.examine(), *packages.examine(), *settings]
    print(json.dumps([f._asdict() for f in found], indent=1) if args.json else as_text(found))
    return int(any(f.level == "problem" for f in found))
