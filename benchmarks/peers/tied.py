"""Runs a module as `python -m` does, in a process that ends when the benchmark ends.

Standard input is a pipe whose write end only the benchmark holds, so it ends however the benchmark
ends. Workers inherit it from torchrun; PR_SET_PDEATHSIG would miss them.
"""

import os
import runpy
import sys
import threading


def _leave_with_benchmark() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_leave_with_benchmark, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
