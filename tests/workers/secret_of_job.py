"""Writes the secret that the launcher has given to this rank."""

import os

print(os.environ["COLLECTIVES_SECRET"])
