"""Python imports this at its start, from the site that run.py makes: an editable installation would
put its own `collectives` before what is there.
"""

import sys

sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
