"""Calls on more than 2**31 elements among ranks that are processes."""

from __future__ import annotations

import os
import sys
import traceback

import test_large

import collectives as cc

if __name__ == "__main__":
    try:
        with cc.init(timeout=100) as comm:
            assert test_large.every_call(comm) == test_large.ENDS
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
