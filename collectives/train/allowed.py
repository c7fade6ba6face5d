"""When a trainer may change parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CollectiveError

if TYPE_CHECKING:
    from .gathering import Gatherer


def check_changes(call: str, closed: bool, gatherer: Gatherer | None) -> None:
    """Raises CollectiveError if `call` would change what a model no longer has, or does not see.

    closed    the trainer was closed, or released its module
    gatherer  of stage 3
    """
    if closed:
        raise CollectiveError(
            f"{call}() of a trainer after its close() or release(): the parameters that it would "
            "change are not the model's any more; make another trainer"
        )
    if gatherer is not None and gatherer.in_block:
        raise CollectiveError(
            f"sharding=3: {call}() inside of gathered(), whose copies of the parameters would stay "
            "as they are: leave that block first"
        )
