"""Writes the secret that the launcher has given to this rank."""

import os

os.write(1, (os.environ["COLLECTIVES_SECRET"] + "\n").encode())  # at once: ranks share the output
