"""What happens in a round of faults."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from ..schedule import algorithms, why_unsupported
from .verify import WAYS, Call

# How a victim ends, or what else goes wrong.
KINDS = (
    "sigkill",
    "exit",  # os._exit: nothing of Python's end happens
    "leave",  # Python ends, and nobody has called close
    "raise",  # ... with an exception
    "sigstop",
    "sigcont",  # stopped until long after the deadline, and then it goes on
    "pause",  # stopped for less than the deadline: nothing may come of it
    "close",
    "abort",
    "mismatch",
)
# Seconds that a stopped rank stays so: a "sigcont" for so long after its deadline, a pause, whose
# deadline is 20 s, in all.
STOPPED = {"sigcont": 2.0, "pause": 0.7}
# The deadline where one is to pass, seconds. On GPUs the first call of a communicator maps memory
# and loads kernels, which takes long where many ranks do it at once.
_DEADLINE = {"cpu": 1.5, "cuda": 3.0}
_AMPLE = 20.0  # and where none is

# When. What each moment means is in rank.py.
MOMENTS = (
    "before init",
    "in init",
    "between calls",
    "in a call",
    "queued calls",
    "in a subgroup",
    "in shrink",
    "at close",
)

# What can happen when; the rest makes no sense (nobody aborts before there is a communicator).
POSSIBLE: dict[str, tuple[str, ...]] = {
    "before init": ("sigkill", "exit", "leave", "raise", "sigstop"),
    "in init": ("sigkill", "sigstop"),
    "between calls": KINDS,
    "in a call": ("sigkill", "exit", "sigstop", "sigcont", "pause", "abort"),
    "queued calls": ("sigkill", "exit", "sigstop", "sigcont", "abort"),
    "in a subgroup": ("sigkill", "leave", "raise", "sigstop", "sigcont", "pause", "abort"),
    "in shrink": ("sigkill", "sigstop"),
    "at close": ("sigkill", "exit", "leave", "raise", "sigstop", "sigcont", "pause"),
}

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
COUNTS = (1, 12, 300, 5_000, 70_000, 600_000)
# On GPUs 2 to 16 MB too, for which there are other kernels than for 1 MB.
COUNTS_ON_GPUS = (*COUNTS, 2_000_000)
DTYPES = ("float32", "float64", "int32", "uint8")


class Plan(NamedTuple):
    """A round: the fault, and the calls that it hits.

    victims   ranks that it happens to; only "in shrink" has a second one
    delay     seconds between the moment that the victim tells of and the blow
    server    who hosts the rendezvous: "rank 0", or "apart" for a process of its own
    timeout   of the communicator, seconds
    device    "cpu", or "cuda": where the arrays of the calls lie
    way       how calls on GPUs are made: see verify.WAYS
    """

    number: int
    ranks: int
    kind: str
    moment: str
    victims: tuple[int, ...]
    delay: float
    server: str
    timeout: float
    collective: str
    algorithm: str | None
    elements: int
    dtype: str
    async_op: bool
    device: str = "cpu"
    way: str = ""

    @property
    def call(self) -> Call:
        return Call(
            self.collective, self.elements, self.dtype, self.algorithm, self.async_op, self.way
        )

    @property
    def stopped(self) -> float:
        """Seconds until a stopped rank goes on."""
        return STOPPED[self.kind] + (self.timeout if self.kind == "sigcont" else 0.0)

    @property
    def deadly(self) -> bool:
        """The victims do not come back to the others."""
        return self.kind not in ("abort", "mismatch", "pause")

    @property
    def survivors(self) -> list[int]:
        return [r for r in range(self.ranks) if not self.deadly or r not in self.victims]

    def __str__(self) -> str:
        call = f"{self.collective}({self.elements} {self.dtype}, {self.algorithm or 'auto'})"
        how = "".join(f", {word}" for word in (self.way, self.async_op and "async") if word)
        who = "rank " + " and rank ".join(map(str, self.victims))
        return (
            f"{self.kind} {self.moment}, {who} of {self.ranks}, after {self.delay * 1e3:.1f} ms; "
            f"{call}{how}; rendezvous: {self.server}"
        )


def draw(seed: int, number: int, ranks: int, device: str = "cpu") -> Plan:
    """Round `number` of a seed; the same whenever and wherever it is drawn.

    ranks   at most so many, and at least 2; on the host, a round "in shrink" has 3 at least
    device  "cpu" or "cuda": whose seeds have nothing to do with each other
    """
    on_gpus = device == "cuda"
    rng = random.Random(f"{seed}/{number}/cuda" if on_gpus else f"{seed}/{number}")
    n = rng.randint(2, max(2, ranks))
    moment = rng.choice(_moments_on_gpus(ranks) if on_gpus else MOMENTS)
    if moment == "in shrink" and n < 3:
        n = 3
    kind = rng.choice(POSSIBLE[moment])
    victims = tuple(rng.sample(range(n), 2 if moment == "in shrink" else 1))
    collective = rng.choice(COLLECTIVES)
    server = rng.choice(("rank 0", "apart"))
    if kind == "sigcont" and moment == "in a subgroup":
        # A server that was stopped may answer when it goes on, later than the deadline; then nobody
        # raises (docs/reliability.md, what is not promised).
        server = "apart"
    known = [
        a.name for a in algorithms() if not why_unsupported(a.name, collective, n, node=[0] * n)
    ]
    waits = kind in ("sigstop", "sigcont") or "init" in moment
    return Plan(
        number=number,
        ranks=n,
        kind=kind,
        moment=moment,
        victims=victims,
        # Moments last from a millisecond (shrink) to some tens (init, a large call).
        delay=rng.choice((0.0, rng.uniform(0, 0.004), rng.uniform(0, 0.04))),
        server=server,
        timeout=_DEADLINE[device] if waits else _AMPLE,
        collective=collective,
        algorithm=rng.choice([None, *known]),
        elements=rng.choice(COUNTS_ON_GPUS if on_gpus else COUNTS),
        dtype=rng.choice(DTYPES),
        async_op=rng.random() < 0.3,
        device=device,
        way=rng.choice(WAYS) if on_gpus else "",
    )


def _moments_on_gpus(ranks: int) -> list[str]:
    """Moments in which kernels run come more often; "in shrink" takes 3 ranks."""
    kernels = ("between calls", "in a call", "in a call", "queued calls")
    return [m for m in (*MOMENTS, *kernels) if ranks > 2 or m != "in shrink"]


def as_json(plan: Plan) -> dict[str, Any]:
    return {**plan._asdict(), "victims": list(plan.victims)}
