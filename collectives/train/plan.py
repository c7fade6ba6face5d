"""What a training run will need: memory of a rank, bytes on the wire, and the time of a step.

Every figure comes from a formula that is printed beside it. Memory and wire are those of
Rajbhandari et al., "ZeRO" (SC 2020), https://arxiv.org/abs/1910.02054, sections 3 and 7: with P
parameters, a mixed-precision step of Adam holds 2 P bytes of parameters, 2 P of gradients and K P
of optimizer state, K = 12 (float32 master weights and two moments). Without master weights K is 4:
two moments of 2 bytes. With micro-batches that are reduced together a rank holds whole gradients
under ZeRO-2 and 3 too, while they are added up. Activations and buffers are not in it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .optimizers import LAMB, LARS, SGD, Adam, AdamW
from .precision import check_kept, compute_dtype

STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": SGD.slots,
    "lars": LARS.slots,
    "adam": Adam.slots,
    "adamw": AdamW.slots,
    "lamb": LAMB.slots,
}
BYTES = {"bf16": 2, "fp16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to be planned.

    params      number of parameters
    ranks       ranks that train
    node        ranks of a node; with `hybrid` a rank shares with those of its node alone
    precision   "bf16", "fp16" or "float32": of parameters and gradients
    reduced     dtype in which gradients are held and reduced, as the trainer's `reduce_dtype`;
                `precision` if None
    optimizer   a key of STATES
    masters     parameters of 16 bits have float32 master weights and state, as the trainer's
                `master_weights`; else state of their own dtype
    micro       samples a rank has in one micro-batch
    accumulate  micro-batches in a step
    tokens      tokens in a sample, or whatever the model does 6 P floating-point operations for
    flops       operations per second that a rank reaches; None: no times are predicted
    bandwidth   bytes per second that a rank sends while it receives as much
    latency     seconds of a message
    overlap     share of the communication that backward can hide, 0 to 1
    checkpoint  activations are computed again in backward: one forward more
    """

    params: float
    ranks: int
    node: int | None = None
    hybrid: bool = False
    precision: str = "bf16"
    reduced: str | None = None
    optimizer: str = "adam"
    masters: bool = True
    micro: int = 1
    accumulate: int = 1
    tokens: int = 1
    flops: float | None = None
    bandwidth: float = 100e9
    latency: float = 10e-6
    overlap: float = 1.0
    checkpoint: bool = False

    def __post_init__(self) -> None:
        for name in ("params", "ranks", "micro", "accumulate", "tokens", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap={self.overlap} must be between 0 and 1")
        if self.node is not None and (self.node < 1 or self.ranks % self.node):
            raise ValueError(f"{self.ranks} ranks are no whole nodes of {self.node}")
        if not self.masters:
            check_kept([compute_dtype(self.precision) or ""], STATES[self.optimizer])

    @property
    def sharing(self) -> int:
        """Ranks that share the shards."""
        return self.node if self.hybrid and self.node is not None else self.ranks

    @property
    def batch(self) -> int:
        """Samples of the global batch."""
        return self.micro * self.ranks * self.accumulate


class Stage(NamedTuple):
    """What one stage of sharding needs.

    memory      bytes of a rank, the sum of `parts`
    parts       bytes of parameters, gradients (with those of micro-batches that are added up),
                optimizer state
    wire        bytes that a rank sends in a step
    exposed     seconds of communication that backward does not hide; None without `flops`
    seconds     of a step; None without `flops`
    efficiency  time of a step of one rank alone divided by `seconds`
    formulas    of memory, wire and seconds, in words
    """

    stage: int
    memory: float
    parts: tuple[float, float, float]
    wire: float
    exposed: float | None
    seconds: float | None
    efficiency: float | None
    formulas: tuple[str, str, str]


def bytes_per_parameter(job: Job) -> tuple[int, int, int]:
    """Of parameters, gradients and optimizer state with master weights."""
    master, count, each = _state(job)
    return BYTES[job.precision], BYTES[job.reduced or job.precision], master + count * each


def state_words(job: Job) -> str:
    """Of what the bytes of optimizer state consist."""
    master, count, each = _state(job)
    return (f"{master} master weights + " if master else "") + f"{count} x {each}"


def _state(job: Job) -> tuple[int, int, int]:
    """Bytes of master weights, state arrays, and bytes of an element of these."""
    used, count = BYTES[job.precision], len(STATES[job.optimizer])
    if used == 4 or not job.masters:
        return 0, count, used
    return 4, count, 4


def plan(job: Job) -> list[Stage]:
    """Stages 0 to 3 of one job."""
    return [_stage(job, stage) for stage in range(4)]


def _stage(job: Job, stage: int) -> Stage:
    used, grad, state = bytes_per_parameter(job)
    share, p = job.sharing, job.params
    divide = [share if stage >= at else 1 for at in (3, 2, 1)]
    held = grad if stage >= 2 and job.accumulate > 1 else 0
    parts = (used * p / divide[0], grad * p / divide[1] + held * p, state * p / divide[2])
    each = (used, grad, state)
    split = sum(b for b, d in zip(each, divide, strict=True) if d > 1)
    whole = sum(each) - split + held
    terms = [f"{b} P" if d == 1 else f"{b} P / {d}" for b, d in ((whole, 1), (split, share)) if b]
    numbers = [
        _giga(b * p) + (f"/{d}" if d > 1 else "") for b, d in ((whole, 1), (split, share)) if b
    ]
    memory = f"{' + '.join(terms)} = {' + '.join(numbers)}"
    memory += f" = {_giga(sum(parts))} GB" if split and share > 1 else " GB"
    if held:
        memory += f", {held} P of it whole gradients while micro-batches are added up"

    reduced, gathered, wire_words, steps = _wire(job, stage)
    exposed = seconds = efficiency = None
    time_words = "no prediction without --flops"
    if job.flops is not None:
        passes = 4 if job.checkpoint else 3
        tokens = job.micro * job.accumulate * job.tokens
        compute = 2 * passes * p * tokens / job.flops
        # Gradients are reduced in the last micro-batch, beside backward.
        backward = compute * (passes - 1) / passes / job.accumulate
        reduce = reduced / job.bandwidth + steps[0] * job.latency
        gather = gathered / job.bandwidth + steps[1] * job.latency
        if stage < 3:
            exposed = max(reduce - job.overlap * backward, 0.0) + gather
            words = "max(0, reduction - overlap x backward) + gather"
            hidden = f"reduction {reduce:.4g}, backward {backward:.4g}, gather {gather:.4g} s"
        else:
            exposed = max(reduce + gather - job.overlap * compute, 0.0)
            words = "max(0, traffic - overlap x compute)"
            hidden = f"traffic {reduce + gather:.4g} s"
        seconds = compute + exposed
        efficiency = compute / seconds
        time_words = (
            f"{2 * passes} P x {tokens} tokens / flops + {words} = "
            f"{compute:.4g} + {exposed:.4g} s; {hidden}"
        )
    return Stage(
        stage,
        sum(parts),
        parts,
        reduced + gathered,
        exposed,
        seconds,
        efficiency,
        (memory, wire_words, time_words),
    )


def _wire(job: Job, stage: int) -> tuple[float, float, str, tuple[int, int]]:
    """Bytes that a rank sends in a step for gradients and for parameters, the formula, and for each
    how many messages follow each other.
    """
    n, share = job.ranks, job.sharing
    gradient = job.params * BYTES[job.reduced or job.precision]
    parameters = job.params * BYTES[job.precision]
    whole = stage == 0 or job.hybrid
    reduced = (2 if whole else 1) * (n - 1) / n * gradient
    words = f"{'2' if whole else ''}(N-1)/N x {_giga(gradient)} GB gradients"
    steps = ((2 if whole else 1) * (n - 1), 0)
    # Stage 3 gathers twice in each micro-batch, stages 1 and 2 once after the step.
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * job.accumulate}[stage] if share > 1 else 0
    gathered = gathers * (share - 1) / share * parameters
    if gathers:
        times = f"{gathers} x " if gathers > 1 else ""
        symbol = "(N-1)/N" if share == n else f"({share}-1)/{share}"
        words += f" + {times}{symbol} x {_giga(parameters)} GB parameters"
        steps = (steps[0], gathers * (share - 1))
    return reduced, gathered, f"{words} = {_giga(reduced + gathered)} GB", steps


def _giga(value: float) -> str:
    return f"{value / 1e9:.4g}"
