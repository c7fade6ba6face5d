"""What is one batch, what is several, and how one is cut."""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np
import pytest

from collectives.train.batches import each_array, micro_batches, samples


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


X, Y = np.arange(6), np.arange(6) * 10


class Named(collections.OrderedDict):
    """As transformers has them: with attributes of their own."""

    def __init__(self, more=(), /, **items):
        super().__init__(more, **items)
        self.kind = "named"


class Attributes(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


def test_a_dict_keeps_its_type_and_what_it_has_beside_items():
    default = collections.defaultdict(list, x=X, y=Y)
    for batch in (Named(x=X, y=Y), Attributes(x=X, y=Y), default):
        before = dict(batch)
        for part in micro_batches(batch, 2):
            assert type(part) is type(batch) and list(part) == ["x", "y"]
            assert len(part["x"]) == len(part["y"]) == 3
            if batch is default:
                assert part["z"] == []
            elif isinstance(batch, Named):
                assert part.kind == "named"
            else:
                assert part.x is part["x"]
        assert all(batch[key] is before[key] for key in before) and len(batch) == 2


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], Pair(X, Y), {"x": X, "y": Y}, [X, {"y": Y}]])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_one_batch_is_cut_along_its_first_axis(batch, parts):
    """Also a list of arrays, as torch's DataLoader makes, and a named tuple."""
    cut = micro_batches(batch, parts)
    assert [type(part) for part in cut] == [type(batch)] * parts
    assert [samples(part) for part in cut] == [len(x) for x in np.array_split(X, parts)]
    seen: list[int] = []
    for part in cut:
        each_array(part, lambda x: seen.extend(x.tolist()))
    assert sorted(seen) == sorted([*X.tolist(), *Y.tolist()])


@pytest.mark.parametrize(
    "batches", [[(X, Y), (Y, X)], [None, (X,)], [{"x": X}, {"x": Y}], [[X, Y], [X, Y]], [None] * 2]
)
def test_a_list_of_batches_is_the_micro_batches(batches):
    assert micro_batches(batches, 2) == batches
    with pytest.raises(ValueError, match="a list of 2 micro-batches, accumulate=3"):
        micro_batches(batches, 3)


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (None, TypeError, "holds a NoneType without samples; with accumulate, pass a list"),
        (3, TypeError, "holds a int without samples"),
        (np.array(3), TypeError, "holds a ndarray without samples"),
        (np.ones((9, 2)), ValueError, r"a batch of 6 samples .* an array of \(9, 2\)"),
    ],
)
def test_what_has_other_samples_is_not_cut(other, error, words):
    """Weights of classes, say, would lose some."""
    for batch in ((X, other), {"x": X, "more": [other]}):
        assert micro_batches(batch, 1) == [batch]
        with pytest.raises(error, match=words):
            micro_batches(batch, 2)


@pytest.mark.torch
def test_what_a_data_loader_makes():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    (batch,) = torch.utils.data.DataLoader(data, batch_size=6)
    assert [part[1].tolist() for part in micro_batches(batch, 2)] == [[0, 10, 20], [30, 40, 50]]
