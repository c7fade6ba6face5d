"""The negative controls of tests/emulated/mutants.py still change something: they are run by hand
(`make mutants`, a minute for each), not in continuous integration.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_each_changes_one_place_of_a_kernel():
    path = HERE / "emulated" / "mutants.py"
    spec = importlib.util.spec_from_file_location("mutants", path)
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    for mutant in mutants.MUTANTS:
        text = (HERE.parent / "kernels" / mutant.file).read_text()
        assert text.count(mutant.before) == 1, mutant.name
        assert (HERE / "gpu" / mutant.module).exists(), mutant.name
