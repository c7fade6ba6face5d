"""How the programs of this folder end: a rank that fails says why and ends the whole launch."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def run(main: Callable[[], None]) -> None:
    """Runs main(). After an exception the process ends at once, without waiting for its peers."""
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
