"""Shows the columns of docstrings as lists in the API page.

Docstrings of this project tell arguments in two columns, a name and its meaning:

    x    array of any shape
    out  where the result goes;
         x itself otherwise

Markdown would join these lines, so they become a list before it sees them. A summary that wraps
without a blank line after it stays as it is.
"""

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*) {2,}(\S.*)")
_CODE = re.compile(r"\s{4,}\S")


def columns_to_list(text: str) -> str:
    """`text` with a Markdown list in place of each run of two-column lines."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry:
            if not inside and lines and lines[-1]:
                lines.append("")
            lines.append(f"- `{entry[1]}`: {entry[2]}")
            inside = True
        elif inside and _CODE.match(line):
            lines.append("  " + line.strip())
        else:
            if inside and line:
                lines.append("")
            inside = False
            lines.append(line)
    return "\n".join(lines)


class Columns(griffe.Extension):
    """Rewrites every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = columns_to_list(obj.docstring.value)
