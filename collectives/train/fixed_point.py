"""How `norms` adds exactly, on the host and on GPUs: a number is a row of limbs of 32 bits."""

from __future__ import annotations

CHUNK = 512  # elements whose squares are added in floating point
# A float64 is a multiple of 2^-1074 below 2^1024; its 53 bits of mantissa reach 52 further down.
LOWEST = -1130
LIMBS = 69  # of 32 bits, in int64: 2^31 numbers may be added
