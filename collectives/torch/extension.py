"""The extension `_torch_2_13` (say): calls that are like ones before, made in C++.

It is compiled against one torch and serves only that one, so it is an option: `pip install
--no-build-isolation` builds it where torch is there already. Without it the same calls are made in
Python, which takes longer on the host; nothing else differs.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from typing import Any

import collectives

_PREFIX = "_torch_"


def built_for() -> list[str]:
    """The releases of torch that this build has an extension for, as 2.13, for this Python."""
    found = [
        module.name.removeprefix(_PREFIX).replace("_", ".")
        for module in pkgutil.iter_modules(collectives.__path__)
        if module.name.startswith(_PREFIX)
    ]
    return sorted(found, key=lambda release: [int(part) for part in release.split(".")])


@functools.cache
def load(version: str) -> Any:
    """The extension for a torch of this version; None where there is none, with a warning where
    there are ones for others, or it cannot be loaded.
    """
    release = ".".join(version.split(".")[:2])
    releases = built_for()
    why = f"this is {version}"
    if release in releases:
        try:
            return importlib.import_module(f"collectives.{_PREFIX}{release.replace('.', '_')}")
        except ImportError as error:  # of another build of that release
            why = f"that cannot be loaded: {error}"
    if releases:
        warnings.warn(
            f"collectives was built for torch {', '.join(releases)}, and {why}: calls on "
            "CUDA tensors are made in Python, which takes longer on the host; pip install "
            "--no-build-isolation builds it for this torch",
            RuntimeWarning,
            stacklevel=2,
        )
    return None
