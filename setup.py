"""The shim that older tooling expects; pyproject.toml and CMakeLists.txt hold everything.

`python setup.py install | develop | build_ext | bdist_wheel` is handed to pip, so that there is one
way to build. `--name` and `--version` answer from pyproject.toml.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PIP_COMMANDS = {
    "install": ["install", "."],
    "develop": ["install", "--editable", "."],
    "build_ext": ["install", "--editable", "."],
    "bdist_wheel": ["wheel", "--no-deps", "--wheel-dir", "dist", "."],
}


def main(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command in PIP_COMMANDS:
        return subprocess.call([sys.executable, "-m", "pip", *PIP_COMMANDS[command]], cwd=ROOT)
    if command in ("--name", "--version"):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        found = re.search(rf'^{command[2:]} = "(.*)"$', text, re.MULTILINE)
        assert found, f"pyproject.toml has no {command[2:]}"
        print(found[1])
        return 0
    known = ", ".join([*PIP_COMMANDS, "--name", "--version"])
    print(f"setup.py: unknown command {command!r}; use pip install, or one of {known}")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
