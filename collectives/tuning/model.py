"""What a call is expected to take: alpha for each step, beta for each byte sent, gamma for each
byte combined, and something for each further slice and for entering the call.

    time = entry + steps · alpha + further slices · slice + sent · beta + combined · gamma

`work.py` says what a call has to do. A message longer than a slice goes as several: all but the
first cost `slice` each, on the rank that sends most messages, and no step, since they follow each
other.

Steps and bytes between nodes count with the figures of the network, the rest with those of shared
memory. The ranks of a node share its link, so what counts there are the bytes that leave the node,
not those of a rank. Where ranks share cores, what they copy and combine takes longer in proportion,
and a step costs a turn of the scheduler.

Each kind of call has figures of its own. `python -m collectives tune` fits them to the machine at
hand; those below are of other machines, so that a prediction made with them says which algorithms
are near each other and where they cross, not what another machine will show.

On GPUs of one node the same holds with the kinds that their kernels are: see `work.py`. All pairs
of GPUs are taken to be as near as those that were measured, and a rank's bytes to cross one port,
so figures that were fitted to two ranks say something of more. Of what few ranks cannot show, such
as what each further peer costs a kernel, they know nothing.

Source: R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994),
doi:10.1016/S0167-8191(06)80021-9; gamma as in R. Thakur, R. Rabenseifner, W. Gropp, "Optimization
of Collective Communication Operations in MPICH", IJHPCA 19 (2005), doi:10.1177/1094342005051521;
the cost of further messages is LogP's overhead: D. Culler et al., "LogP: towards a realistic model
of parallel computation", PPoPP 1993, doi:10.1145/155332.155333.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .work import GPU, GPU_SYMMETRIC, Work, agreement, work_of


@dataclass(frozen=True)
class LinkModel:
    """What a link costs.

    alpha_s           seconds for a step: from the sender's call to the receiver's return
    beta_s_per_byte   seconds for a byte that a rank sends (between nodes: that a node sends)
    gamma_s_per_byte  seconds for a byte that a rank combines with its own
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Figures:
    """What calls of one kind cost: `near` within a node, `far` between nodes.

    entry_s  seconds for a call, whatever it does
    slice_s  seconds for each slice of a message after its first
    """

    near: LinkModel
    far: LinkModel
    entry_s: float = 0.0
    slice_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """As a table's file has it."""
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Figures:
        """What `as_json` gave. Raises KeyError, TypeError, ValueError or OverflowError for anything
        else.
        """

        def link(numbers: Mapping[str, Any]) -> LinkModel:
            return LinkModel(**{name: _figure(number) for name, number in numbers.items()})

        near, far = link(found["near"]), link(found["far"])
        return Figures(near, far, _figure(found["entry_s"]), _figure(found["slice_s"]))


def _figure(found: Any) -> float:
    number = found if isinstance(found, (int, float)) and not isinstance(found, bool) else -1
    if not 0 <= float(number) < math.inf:
        raise ValueError(f"{found!r} is no figure of the cost model")
    return float(number)


# Fitted to all_reduce of float32, 4 B to 4 MiB, with two ranks, each bound to a core of a two-core
# virtual machine (Xeon, AVX-512, a cache line exchanged in 132 ns), over Open MPI 5.0.11 where that
# carries the data. Half of those times are predicted within a factor of 1.2, nine of ten within
# 1.6, the worst (threads, 256 B, disturbed by other programs) within 3.6. That was without the
# steps of the agreement, which "steps" over MPI are behind. With them what is predicted to be the
# fastest takes 1.2 times as long as the fastest on 2 hosts of 2 ranks at 10 Gbit/s, in the mean
# over 6 collectives of 64 B to 4 MiB, and without them 2.7 times (tests/test_predictions.py).
LINKS: dict[str, dict[str, LinkModel]] = {
    "threads": {
        "direct": LinkModel(1.49e-7, 1.26e-10, 4.87e-12),
        "steps": LinkModel(4.75e-7, 1.08e-10, 1.97e-11),
    },
    "shm": {
        "direct": LinkModel(2.10e-7, 1.16e-10, 3.82e-11),
        "steps": LinkModel(4.83e-7, 1.21e-10, 1.79e-11),
    },
    "mpi": {
        "assembled": LinkModel(1.39e-6, 2.41e-10, 7.92e-11),
        "steps": LinkModel(1.29e-6, 2.62e-10, 5.02e-11),
    },
}
# A step between ranks that share a core takes so much longer: the scheduler runs the other one
# first. Four ranks on the same two cores: 3.6 us for a step of "direct", 3.5 us for one of "steps".
SWITCH_S = 3e-6

# Arrays on GPUs, by kind. Fitted by bench/predict_gpu.py to what two H200 on NVLink 4 took, in CUDA
# graphs (bench/results/gpu-nccl-*-2.json): half of those times are predicted within 3 %, the worst
# within 17 %. Two ranks do not tell entry from steps, so each has half, where no times of calls
# with fewer steps said otherwise.
_NO_FAR = LinkModel(0.0, 0.0)
GPU_LINKS: dict[str, Figures] = {
    "packets": Figures(LinkModel(1.277e-6, 3.706e-12), _NO_FAR, 1.277e-6),
    "lines": Figures(LinkModel(1.638e-6, 3.257e-12), _NO_FAR, 1.638e-6),
    "fifos": Figures(LinkModel(1.358e-6, 2.844e-12), _NO_FAR, 8.219e-6),
    "written": Figures(LinkModel(2.273e-6, 2.738e-12), _NO_FAR, 4.545e-6),
    "steps": Figures(LinkModel(4.726e-6, 3.170e-12), _NO_FAR, 9.452e-6),
}
# Whose figures count where a kind has none: it does nearly the same.
_STAND_INS = {
    "packets": ("lines",),
    "lines": ("packets",),
    "fifos": ("written", "pulled"),
    "written": ("fifos", "pulled"),
    "pulled": ("written", "fifos"),
}


def predict(
    algorithm: str,
    collective: str,
    nbytes: int,
    nodes: Sequence[int],
    transport: str,
    *,
    root: int = 0,
    cores: int | None = None,
    figures: Mapping[str, Figures] | None = None,
) -> float | None:
    """Seconds that a call is expected to take; None where there is no schedule to judge.

    nbytes     of the whole vector (of all blocks together)
    nodes      node of each rank
    transport  "threads", "shm", "mpi" or "shm+mpi", as `Communicator.transports`; work.GPU or
               work.GPU_SYMMETRIC for arrays on GPUs
    cores      that the ranks of a node share; None: each has one of its own
    figures    by kind, fitted to these very ranks: then `cores` says nothing more
    """
    on_gpus = transport in (GPU, GPU_SYMMETRIC)
    if len(nodes) < 2 or algorithm in ("auto", "") or (on_gpus and len(set(nodes)) > 1):
        return None
    kind, work = work_of(algorithm, collective, nbytes, nodes, transport, root)
    if figures is not None:
        known = _of_kind(kind, figures)
        return None if known is None else _time(known, work)
    if on_gpus:
        return _time(_gpu_figures(kind), work)
    if kind == "steps":
        near, far = agreement(nodes, transport)
        work = work._replace(near_steps=work.near_steps + near, far_steps=work.far_steps + far)
    found = _default_figures(kind, transport)
    local = max(list(nodes).count(node) for node in set(nodes))
    crowd = max(1.0, local / cores) if cores else 1.0
    if crowd > 1:
        found = replace(
            found,
            near=LinkModel(
                found.near.alpha_s + SWITCH_S,
                found.near.beta_s_per_byte * crowd,
                found.near.gamma_s_per_byte * crowd,
            ),
        )
    return _time(found, work)


def _time(figures: Figures, work: Work) -> float:
    near, far = figures.near, figures.far
    factors = (
        figures.entry_s,
        figures.slice_s,
        near.alpha_s,
        near.beta_s_per_byte,
        near.gamma_s_per_byte,
        far.alpha_s,
        far.beta_s_per_byte,
    )
    return sum(a * b for a, b in zip(factors, work.row(), strict=True))


def _of_kind(kind: str, figures: Mapping[str, Figures]) -> Figures | None:
    """The figures of a kind, or of what stands in for it."""
    names = (kind, *_STAND_INS.get(kind, ()), "steps")
    return next((figures[name] for name in names if name in figures), None)


def _gpu_figures(kind: str) -> Figures:
    found = _of_kind(kind, GPU_LINKS)
    assert found is not None, "every kind has figures, or one that stands in for it"
    return found


def _default_figures(kind: str, transport: str) -> Figures:
    inside = LINKS["shm" if transport in ("shm+mpi", "self") else transport]
    far = LINKS["mpi"]["steps" if kind == "direct" else kind]
    return Figures(inside.get(kind) or inside["steps"], far)


# ---- fitting ------------------------------------------------------------------------------------


class Measurement(NamedTuple):
    """A measured call, to fit to."""

    algorithm: str
    collective: str
    nbytes: int
    seconds: float


def fit(
    measured: Iterable[Measurement], nodes: Sequence[int], transport: str
) -> dict[str, Figures]:
    """Figures by kind that predict `measured`, of these ranks, with the least errors in logarithms.
    Kinds without measurements are left out. Where all calls of a kind had as many steps, nothing
    tells entry from steps: then each gets half.
    """
    rows: dict[str, list[tuple[float, ...]]] = {}
    for m in measured:
        if m.seconds <= 0:
            continue
        kind, work = work_of(m.algorithm, m.collective, m.nbytes, nodes, transport)
        rows.setdefault(kind, []).append(tuple(v / m.seconds for v in work.row()))
    found = {}
    for kind, lines in rows.items():
        x = [float(v) for v in _least_absolute(np.array(lines))]
        found[kind] = Figures(LinkModel(*x[2:5]), LinkModel(*x[5:7]), entry_s=x[0], slice_s=x[1])
    return found


def in_words(figures: Figures) -> str:
    """The figures of a kind, in a line."""

    def link(name: str, found: LinkModel) -> str:
        words = f"{name} {found.alpha_s * 1e6:.3g} us a step, "
        words += f"{found.beta_s_per_byte * 1e9:.3g} ns/B sent"
        if found.gamma_s_per_byte:
            words += f", {found.gamma_s_per_byte * 1e9:.3g} ns/B combined"
        return words

    parts = [f"entry {figures.entry_s * 1e6:.3g} us", link("near", figures.near)]
    if figures.far.alpha_s or figures.far.beta_s_per_byte:
        parts.append(link("far", figures.far))
    if figures.slice_s:
        parts.append(f"{figures.slice_s * 1e6:.3g} us a further slice")
    return "; ".join(parts)


def errors(
    measured: Iterable[Measurement],
    nodes: Sequence[int],
    transport: str,
    figures: Mapping[str, Figures],
) -> np.ndarray[Any, Any]:
    """How far predictions are off, as parts of the measured times."""
    found = []
    for m in measured:
        predicted = predict(m.algorithm, m.collective, m.nbytes, nodes, transport, figures=figures)
        if predicted is not None and m.seconds > 0:
            found.append(abs(predicted / m.seconds - 1))
    return np.array(found)


_REPEATS = 20  # of a fit with new weights, at most
_SMALL_ERROR = 0.02  # below it all errors weigh alike
_LEAST = 1e-6  # of a measured time that a prediction counts as
_TIE = 0.3  # weight of what decides where times hardly do
_ENTRY, _STEPS = 0, 2  # columns of `Work.row`


def _least_absolute(lines: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """x >= 0 for which lines · x, ratios of predicted to measured times, are near ones: the sum of
    |log| is what counts, so that single times that were disturbed count little, whether they are
    too long or too short. Least squares, repeated with new weights.

    Columns are those of `Work.row`. One more equation, of little weight, says that entry takes as
    long as the steps: it decides where calls of one number of steps leave that open.
    """
    weights = np.ones(len(lines))
    tie = np.zeros(lines.shape[1])
    if lines[:, _ENTRY].max() > 0:
        per_call = lines[:, _ENTRY].max()  # of the shortest call
        steps = float(np.median(lines[:, _STEPS] / lines[:, _ENTRY]))
        tie[_ENTRY], tie[_STEPS] = _TIE * per_call, -_TIE * per_call * steps
    x = np.zeros(lines.shape[1])
    for _ in range(_REPEATS):
        before = x
        x = _least_squares(np.vstack([lines * weights[:, None], tie]), np.append(weights, 0.0))
        if np.allclose(x, before, rtol=1e-4, atol=0.0):
            break
        ratios = np.maximum(lines @ x, _LEAST)
        # Of |log r| the slope is 1 / r, that of the weighted square w² (r - 1).
        weights = 1 / np.sqrt(ratios * np.maximum(np.abs(ratios - 1), _SMALL_ERROR))
    return x


def _least_squares(
    lines: np.ndarray[Any, Any], target: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """x >= 0 for which lines · x is nearest to the target."""
    columns = [i for i in range(lines.shape[1]) if np.abs(lines[:, i]).max() > 0]
    scale = np.maximum(np.abs(lines).max(axis=0), 1e-300)
    best, best_error = np.zeros(lines.shape[1]), float("inf")
    # Few unknowns: every choice of those that are zero is tried.
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(columns, count):
            part = (lines / scale)[:, chosen]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(np.sum((part @ found - target) ** 2))
            if error < best_error * (1 - 1e-9):
                best_error = error
                best = np.zeros(lines.shape[1])
                best[list(chosen)] = found
    return best / scale
