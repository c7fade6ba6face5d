"""Which algorithm serves a call on device arrays; measured with `bench --device cuda`."""

from __future__ import annotations

# Up to here all_reduce goes in packets, which need no barrier, but send everything to everybody,
# twice over. Measured for two ranks; for more, the bytes that cross each link are kept alike.
_PACKETS_OF_TWO = 2 << 20
_PACKETS_OF_FEW = 256 << 10  # three and four ranks
_PACKETS_OF_MANY = 64 << 10
# One message to each peer from the root, until the root's link is full for longer than a ring of
# all ranks needs to fill.
_ROOT_SENDS_ALL = 256 << 10


def device_algorithm(collective: str, nbytes: int, nranks: int) -> str:
    """The name of the algorithm; "" for a barrier, which needs none."""
    if collective == "barrier":
        return ""
    if collective == "all_reduce":
        few = _PACKETS_OF_FEW if nranks <= 4 else _PACKETS_OF_MANY
        limit = _PACKETS_OF_TWO if nranks <= 2 else few
        return "direct_one_shot" if nbytes <= limit else "direct_two_shot"
    if collective in ("reduce_scatter", "all_gather", "all_to_all"):
        return "direct_two_shot"
    if collective in ("broadcast", "reduce") and nbytes > _ROOT_SENDS_ALL:
        return "ring"
    return "direct_one_shot"
