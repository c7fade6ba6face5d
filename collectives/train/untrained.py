"""Arrays that no optimizer steps, buffers and frozen parameters: ranks begin with those of rank 0,
and checkpoints keep them.

Forward may have frozen parameters in fewer bits than they came in with. A checkpoint has them as
they came in, for which rank 0 keeps those on the host: 4 bytes for each element of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array import dtype_name, namespace
from .settings import is_real
from .sharding import host

if TYPE_CHECKING:
    from ..communicator import Communicator
    from .model import Model


class Untrained:
    """Buffers and frozen parameters of a model that was not bound yet, by name. Making one is
    collective: all ranks have those of rank 0 from then on.

    dtype  that frozen parameters are going to have, as in `Model.bind`
    """

    def __init__(self, model: Model, comm: Communicator, dtype: str | None) -> None:
        self._model = model
        for name, x in model.frozen.items():
            model.frozen[name] = comm.broadcast(x)
        model.buffers = {name: comm.broadcast(x) for name, x in model.buffers.items()}
        self._given = {n: dtype_name(x.dtype) for n, x in model.frozen.items()}
        self._wide: dict[str, Any] = {}  # on rank 0, what is rounded
        if comm.rank == 0 and dtype is not None:
            self._wide = {
                n: np.array(host(x))
                for n, x in model.frozen.items()
                if is_real(x) and n not in model.wide and self._given[n] != dtype
            }

    def kinds(self) -> dict[str, tuple[list[int], str]]:
        """Shapes and dtypes of what a checkpoint holds."""
        return {
            name: (list(x.shape), self._given.get(name) or dtype_name(x.dtype))
            for name, x in self._arrays().items()
        }

    def arrays(self) -> dict[str, Any]:
        """What a checkpoint holds, on the host. For rank 0."""
        found = {name: np.array(host(x)) for name, x in self._arrays().items()}
        for name, wide in self._wide.items():
            # The model may have written some since then.
            same = wide.astype(found[name].dtype) == found[name]
            found[name] = np.where(same, wide, found[name].astype(wide.dtype))
        return found

    def restore(self, values: Mapping[str, Any]) -> None:
        """Sets all to what a checkpoint held, arrays of numpy in their shapes."""
        set_to = {name: values[name].astype(x.dtype) for name, x in self._arrays().items()}
        for name, x in self._model.frozen.items():
            if name in self._wide:
                self._wide[name] = values[name].astype(self._wide[name].dtype)
            x[...] = namespace(x).asarray(set_to.pop(name))
        self._model.buffers = set_to

    def _arrays(self) -> dict[str, Any]:
        """Those of checkpoints, as they are now."""
        # Torch keeps some buffers of modules out of their state.
        passing = getattr(self._model, "passing", ())
        buffers = {n: x for n, x in self._model.buffers.items() if n not in passing}
        return self._model.frozen | buffers
