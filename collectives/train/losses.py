"""What models return as their loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .progress import number


def told(loss: Any) -> Any:
    """The loss of a pass, looked at before anything comes of its gradients: its number; or on a GPU
    the array of one that came, which nobody waits for yet.

    Raises TypeError for what is no real number, ValueError for an array of several.
    """
    if isinstance(loss, float):
        return loss
    shape = tuple(getattr(loss, "shape", ()))
    if math.prod(shape) != 1:
        raise ValueError(f"the model returned a loss of shape {shape}; {_WANTED}")
    if "complex" in str(getattr(loss, "dtype", "")):
        raise TypeError(f"the model returned a loss of {loss.dtype}; {_WANTED}")
    if not _on_host(loss):
        return loss
    try:
        return number(loss)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the model returned a loss of {type(loss).__name__}; {_WANTED}") from error


_WANTED = "return its mean over the batch, a number or an array of one"


def _on_host(loss: Any) -> bool:
    if isinstance(loss, (np.ndarray, np.generic)):
        return True
    place = getattr(loss, "device", "cpu")  # of jax with a platform, of torch with a type
    return bool(getattr(place, "platform", getattr(place, "type", place)) == "cpu")
