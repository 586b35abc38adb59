"""Measures what a device can do at best: copies to and from its host, and matrix products.

Prints one line of JSON: GB/s of copies between pinned memory and the device in each direction, GB/s
of copies within the device, and TFLOP/s of products of bfloat16 matrices. On a processor all copies
are within its memory, and no page is pinned.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

_NUM_RUNS = 7
_NUM_AT_ONCE = 4


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--width", type=int, default=8192)
    options = parser.parse_args()
    device = torch.device(options.device)
    is_host = device.type == "cpu"
    on_host = torch.empty(options.bytes, dtype=torch.uint8, pin_memory=not is_host)
    on_device = torch.empty(options.bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(on_device)
    left = torch.randn(options.width, options.width, device=device).to(torch.bfloat16)
    right = torch.randn(options.width, options.width, device=device).to(torch.bfloat16)

    def measure(call: Callable[[], object]) -> float:
        return _median_s(call, waits=not is_host)

    to_host_s = measure(lambda: on_host.copy_(on_device, non_blocking=True))
    to_device_s = measure(lambda: on_device.copy_(on_host, non_blocking=True))
    within_s = measure(lambda: other.copy_(on_device))
    product_s = measure(lambda: left @ right)
    found = {
        "to_host_gb_per_s": options.bytes / to_host_s / 1e9,
        "to_device_gb_per_s": options.bytes / to_device_s / 1e9,
        "within_gb_per_s": 2 * options.bytes / within_s / 1e9,
        "tflop_per_s": 2 * options.width**3 / product_s / 1e12,
        "name": "cpu" if is_host else torch.cuda.get_device_name(),
    }
    print(json.dumps(found))
    return 0


def _median_s(call: Callable[[], object], *, waits: bool) -> float:
    """The median seconds of a call, of which some are made at once."""
    seconds = []
    for _ in range(_NUM_RUNS):
        began_s = time.perf_counter()
        for _ in range(_NUM_AT_ONCE):
            call()
        if waits:
            torch.accelerator.synchronize()
        seconds.append((time.perf_counter() - began_s) / _NUM_AT_ONCE)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    sys.exit(main())
