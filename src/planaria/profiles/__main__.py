"""`python -m planaria.profiles [DIRECTORY]` prints a table of what the shipped models cost. Given a
directory, it first writes each profile to a file there (`make profiles`).
"""

import sys
from pathlib import Path

from planaria.profiles.analytic import (
    OPTIMIZER_BYTES,
    VALUE_BYTES,
    num_parameters,
    sample_flops,
)
from planaria.profiles.profile_json import encode_profile
from planaria.profiles.shipped import SHIPPED, shipped_profiles

_HEADINGS = (
    "name",
    "layers",
    "parameters",
    "sequence",
    "samples in a microbatch",
    "TFLOP a sample",
    "parameters and optimizer, GB",
    "activations of a microbatch, GB",
    "seconds a microbatch, 1 device",
    "8 devices",
)


def profiles_table() -> str:
    """Markdown table of what each model costs; seconds are those of forward and backward."""
    rows = [f"| {' | '.join(_HEADINGS)} |", "|---" * len(_HEADINGS) + "|"]
    for (shape, microbatch_size), profile in zip(SHIPPED, shipped_profiles(), strict=True):
        parameters = num_parameters(shape)
        activation_bytes = sum(layer.activation_bytes for layer in profile.layers)
        alone_s, shared_s = (
            sum(layer.forward_s[count] + layer.backward_s(count) for layer in profile.layers)
            for count in (1, 8)
        )
        cells = (
            *(shape.name, str(len(profile.layers)), f"{parameters / 1e6:,.1f} M"),
            *(str(shape.sequence_length), str(microbatch_size)),
            f"{sample_flops(shape) / 1e12:,.2f}",
            f"{(VALUE_BYTES + OPTIMIZER_BYTES) * parameters / 1e9:,.1f}",
            *(f"{activation_bytes / 1e9:.1f}", f"{alone_s:.3f}", f"{shared_s:.3f}"),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def write_profiles(directory: Path) -> None:
    """Writes every shipped profile to directory/NAME.json."""
    for profile in shipped_profiles():
        (directory / f"{profile.model}.json").write_bytes(encode_profile(profile))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_profiles(Path(sys.argv[1]))
    print(profiles_table(), end="")
