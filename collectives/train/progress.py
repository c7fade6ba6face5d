"""What a run tells: one line of JSON for each step, and a line on a terminal."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..agreement import on_rank_0, plain

if TYPE_CHECKING:
    from ..communicator import Communicator

_EVERY = 0.1  # seconds between two looks


@dataclasses.dataclass
class Metrics:
    """One optimizer step.

    step       number of the step, from 1
    loss       mean over the global batch
    lr         learning rate of the first group
    samples    samples, or tokens, of the global batch
    grad_norm  of the mean gradient, before clipping; NaN in a step that is left out
    skipped    True if gradients overflowed in fp16, and nothing was written
    scale      of the loss
    seconds    that the step took on this rank
    exposed    seconds of communication that backward did not hide
    overlap    how much of it was hidden, in percent
    """

    step: int
    loss: float
    lr: float
    samples: int
    grad_norm: float
    skipped: bool
    scale: float
    seconds: float
    exposed: float
    overlap: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds else 0.0

    def json(self) -> str:
        """One line; what is not finite is null."""
        fields = dataclasses.asdict(self) | {"samples_per_second": self.rate}
        finite = {
            k: None if isinstance(v, float) and not abs(v) < float("inf") else v
            for k, v in fields.items()
        }
        return json.dumps(finite, default=plain)


class Log:
    """Metrics of rank 0, appended to a file of JSON lines; nothing on other ranks.

    Raises OSError on all ranks if rank 0 cannot write there. Making one is collective. If it cannot
    later, which is no reason to end the steps of all, there is a RuntimeWarning and nothing more.
    """

    def __init__(self, path: str | Path | None, comm: Communicator) -> None:
        self._path = Path(path) if path is not None and comm.rank == 0 else None
        on_rank_0(comm, "write metrics", self._try)

    def _try(self) -> None:
        if self._path is not None:
            self._path.open("a", encoding="utf-8").close()

    def write(self, metrics: Metrics) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(metrics.json() + "\n")
        except OSError as error:
            warnings.warn(
                f"metrics of step {metrics.step} and all after it are not written: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            self._path = None


class Bar:
    """Loss, samples per second and exposed communication on one line of a terminal: rank 0 alone,
    and nothing where the stream is none.
    """

    def __init__(self, total: int | None, rank: int, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total = total
        self._shown = rank == 0 and self._stream.isatty()
        self._done = 0
        self._next = 0.0

    def step(self, metrics: Metrics | None, about: str = "") -> None:
        """A step is done; `about`, what there is to say of the run, comes before the first line."""
        self._done += 1
        if self._shown and self._done == 1 and about:
            self._stream.write(f"{about}\n")
        now = time.monotonic()
        last = self._total is not None and self._done >= self._total
        if not self._shown or metrics is None or (now < self._next and not last):
            return
        self._next = now + _EVERY
        of = "" if self._total is None else f"/{self._total}"
        text = (
            f"\rstep {self._done}{of}  loss {metrics.loss:.4f}  {metrics.rate:,.0f} samples/s  "
            f"exposed {1e3 * metrics.exposed:.1f} ms ({metrics.overlap:.0f} % hidden)"
        )
        self._stream.write(text[:99].ljust(99))
        self._stream.flush()

    def close(self) -> None:
        if self._shown and self._done:
            self._stream.write("\n")
            self._stream.flush()


def number(loss: Any) -> float:
    """A loss that a model returned: a number, or an array of one on the host or a GPU."""
    return float(loss.item() if hasattr(loss, "item") else loss)
