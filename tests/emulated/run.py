"""Runs tests/gpu on a build of the core whose kernels run on the CPU: `run.py BUILD [pytest args]`.

BUILD is a build directory made with COLLECTIVES_CUDA=EMULATED; its `site` becomes a package
`collectives` with that core, beside a small cupy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make_site(build: Path) -> Path:
    """The sources' `collectives` with the core of the build; returns where it can be imported."""
    package = build / "site" / "collectives"
    for source in (ROOT / "collectives").iterdir():
        if source.name.startswith("_core.") and source.suffix == ".so":
            continue
        link = package / source.name
        if source.name != "__pycache__" and not link.exists():
            link.symlink_to(source)
    for name in ("cupy", "sitecustomize.py"):
        link = package.parent / name
        if not link.exists():
            link.symlink_to(ROOT / "tests" / "emulated" / name)
    return package.parent


def main() -> None:
    site = make_site(Path(sys.argv[1]).resolve())
    os.chdir(site)  # so that `python -m` finds it first, in child processes too
    paths = [site, ROOT / "tests", ROOT / "tests" / "gpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    tests = [a if a.startswith("-") or "/" not in a else str(ROOT / a) for a in sys.argv[2:]]
    arguments = ["-m", "pytest", f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    os.execve(sys.executable, [sys.executable, *arguments, *tests], environment)


main()
