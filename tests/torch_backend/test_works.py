"""Works of several calls, on stand-ins for their parts."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from with_torch import torch

import collectives
from collectives.torch.work import JoinedWork

pytestmark = pytest.mark.torch


class Part(torch.distributed.Work):
    """A call that takes some time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.allowed: list[timedelta] = []

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.allowed.append(timeout)
        if timeout != timedelta(0) and timeout.total_seconds() < self._seconds:
            raise collectives.DeadlineError("it goes on")
        time.sleep(self._seconds)
        return True


def joined(*seconds: float) -> tuple[Any, list[Part]]:
    parts = [Part(each) for each in seconds]
    return JoinedWork(parts), parts


def test_a_timeout_is_of_all_parts_together() -> None:
    work, parts = joined(0.2, 0.2, 0.2)
    with pytest.raises(collectives.DeadlineError):
        work.wait(timedelta(seconds=0.5))
    left = [part.allowed[0].total_seconds() for part in parts]
    assert 0.49 < left[0] <= 0.5 and left[1] <= 0.3 and left[2] <= 0.1


def test_parts_are_not_waited_for_where_the_time_is_up() -> None:
    work, parts = joined(0.0, 0.1)
    with pytest.raises(collectives.DeadlineError):
        work.wait(timedelta(seconds=-1))
    assert all(part.allowed[0] < timedelta(0) for part in parts if part.allowed)


def test_without_a_timeout_that_of_the_group_holds() -> None:
    work, parts = joined(0.0, 0.01)
    assert work.wait()
    assert [part.allowed for part in parts] == [[timedelta(0)]] * 2
