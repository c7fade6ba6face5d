"""Prints the release of the torch that this Python finds, as 2_13, and its directory.

Exits with the reason if there is none that the extension is for; with the argument ON, one newer
than those it was tried with counts too.
"""

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
release = int(version[1]), int(version[2])
if release < (2, 11):
    sys.exit(f"torch in {directory} is older than 2.11")
if release > (2, 14) and "ON" not in sys.argv[1:]:
    sys.exit(f"torch in {directory} is newer than 2.14, the last that was tried")
print(f"{version[1]}_{version[2]};{directory}", end="")
