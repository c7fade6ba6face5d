"""What every test gets: the environment of the tests, without the names that the package refuses.

COLLECTIVES_TEST_MPICH=DIR   a virtual environment with MPICH, mpi4py and this project, for the
                             tests that start ranks under MPICH; they are skipped without it
"""

import os

# The package refuses COLLECTIVES_ names that it does not know, so the tests keep theirs under
# another one. (The workers of pytest-xdist inherit it so.)
if mpich := os.environ.pop("COLLECTIVES_TEST_MPICH", ""):
    os.environ["TESTS_MPICH"] = mpich
