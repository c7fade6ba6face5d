"""Prints the release of the torch that this Python finds, as 2_13, and its directory."""

import importlib.util
import re
import sys
from pathlib import Path

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit("no torch")
directory = Path(spec.origin).parent
version = re.search(r"__version__ = '(\d+)\.(\d+)", (directory / "version.py").read_text())
if version is None or not (directory / "include").is_dir():
    sys.exit(f"{directory} has no version or no headers")
if (int(version[1]), int(version[2])) < (2, 11):
    sys.exit(f"torch in {directory} is older than 2.11")
print(f"{version[1]}_{version[2]};{directory}", end="")
