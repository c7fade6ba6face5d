"""What torch is told when it is imported."""

from __future__ import annotations

import functools
import importlib
from typing import Any

NAME = "collectives"
DEVICES = ["cpu", "cuda"]  # a list: torch takes a string to be one device per letter


def register() -> None:
    """Makes "collectives" a backend of torch.distributed. Calling it again changes nothing.

    Does nothing where torch was built without torch.distributed. Two functions of torch know only
    the backends that come with it, and are extended for this one: the rendezvous `env://`, which
    finds ranks that no variables of torch number (see `rendezvous`), and `monitored_barrier`.
    """
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
    _extend_rendezvous()
    _extend_monitored_barrier(dist)


def _create(options: Any, backend_options: Any) -> Any:
    from .group import CollectivesGroup
    from .mixed import in_place

    return in_place(CollectivesGroup.create(options, backend_options))


def _extend_rendezvous() -> None:
    # The attribute of this name in torch.distributed is a function.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    by_environment = handlers.get("env")
    if by_environment is None:  # another torch; `import torch` must not fail here
        return

    @functools.wraps(by_environment)
    def by_environment_or_launcher(url: str, *args: Any, **kwargs: Any) -> Any:
        from .rendezvous import through_launcher

        return through_launcher(url, *args, **kwargs) or by_environment(url, *args, **kwargs)

    handlers["env"] = by_environment_or_launcher


def _extend_monitored_barrier(dist: Any) -> None:
    """torch refuses monitored_barrier for all backends but Gloo, before it asks them."""
    c10d = dist.distributed_c10d
    gloo_only = getattr(c10d, "monitored_barrier", None)
    if gloo_only is None:
        return

    @functools.wraps(gloo_only)
    def monitored_barrier(
        group: Any = c10d.GroupMember.WORLD, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        mine = c10d._get_default_group() if group is None else group
        if getattr(mine, "monitors_barriers", False):
            return mine.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
        return gloo_only(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
