"""What Oobleck's authors measured, and how their replays lose nodes.

`RATES` are samples per second on 30, 29, .. 15 nodes with one NVIDIA A40 each (section 7.1). GPT-3
6.7b does not fit on 15 nodes with Oobleck. Bamboo has not enough memory for any GPT-3 (Table 2).
All is retyped from SymbioticLab/Oobleck, branch sosp23-artifact, tools/simulator:
oobleck_simulator.py, varuna_simulator.py, bamboo_simulator.py, and traces/{6h,1h,10m}.csv. That
repository has the MIT licence.
"""

from collections.abc import Mapping
from typing import Final

from planaria.papers.oobleck.replay import Change

MODELS: Final = ("BERT-Large", "GPT-2", "GPT-3 Medium", "GPT-3 2.7b", "GPT-3 6.7b")
FREQUENCIES: Final = ("6h", "1h", "10m")

# Samples of an iteration in the authors' simulator. Table 1 of the paper has 8192 for GPT-2 and
# GPT-3 Medium, and 1024 for GPT-3 2.7b.
SAMPLES_PER_ITERATION: Final[Mapping[str, float]] = {
    "BERT-Large": 8192,
    "GPT-2": 1024,
    "GPT-3 Medium": 819,
    "GPT-3 2.7b": 512,
    "GPT-3 6.7b": 1024,
}

# Milliseconds. A restart of Varuna takes as long as is given for the number of nodes; 0 stands for
# all other numbers.
OOBLECK_RECONFIGURATION_MS: Final[Mapping[str, int]] = {
    "BERT-Large": 2_000,
    "GPT-2": 2_000,
    "GPT-3 Medium": 3_000,
    "GPT-3 2.7b": 6_000,
    "GPT-3 6.7b": 10_000,
}
# fmt: off
VARUNA_RESTART_MS: Final[Mapping[str, Mapping[int, int]]] = {
    "BERT-Large": {
        0: 76_000, 30: 71_300, 29: 67_600, 28: 67_600, 27: 49_100, 26: 112_000, 25: 108_300,
        24: 104_600, 23: 100_900, 22: 97_200, 21: 93_500, 20: 89_800, 19: 86_100, 18: 82_400,
        17: 78_700, 16: 75_000, 15: 71_300,
    },
    "GPT-2": {0: 83_000},
    "GPT-3 Medium": {0: 78_700},
    "GPT-3 2.7b": {0: 515_000},
    "GPT-3 6.7b": {0: 701_000},
}
# fmt: on
VARUNA_SAVE_MS: Final[Mapping[str, int]] = {
    "BERT-Large": 15_800,
    "GPT-2": 11_500,
    "GPT-3 Medium": 11_200,
    "GPT-3 2.7b": 50_000,
    "GPT-3 6.7b": 120_000,
}
BAMBOO_REBALANCE_MS: Final[Mapping[str, int]] = {"BERT-Large": 76_000, "GPT-2": 80_000}
# fmt: off
# Nodes that Varuna's grid leaves idle with GPT-3 6.7b, by the number of nodes.
VARUNA_IDLE_NODES: Final[Mapping[str, Mapping[int, int]]] = {
    "GPT-3 6.7b": {
        30: 2, 29: 2, 28: 0, 27: 3, 26: 2, 25: 1, 24: 0, 23: 3,
        22: 2, 21: 1, 20: 0, 19: 3, 18: 2, 17: 1, 16: 0, 15: 3,
    },
}

RATES: Final[Mapping[tuple[str, str], tuple[float, ...]]] = {
    ("oobleck", "BERT-Large"): (
        368.2457947, 362.2151579, 328.35419, 327.7784909, 329.1392983, 307.2134406, 304.4540075,
        278.5264442, 285.8442276, 260.3144683, 261.6788898, 243.5568988, 228.0545262, 209.2082907,
        214.8045205, 192.304776,
    ),
    ("oobleck", "GPT-2"): (
        110.006361, 109.6700319, 98.83702293, 100.0745098, 99.47997185, 91.01817697, 90.52226774,
        83.40446265, 83.33064533, 76.94978926, 76.71496194, 71.58697434, 66.7500461, 63.01561583,
        62.74772262, 55.9161269,
    ),
    ("oobleck", "GPT-3 Medium"): (
        38.46834258, 37.18606449, 35.90378641, 34.62150832, 33.33923024, 31.66581788, 30.24118675,
        28.96443398, 27.77451984, 26.68489205, 25.68850493, 23.82505659, 23.0340881, 21.57654709,
        20.86545671, 19.10313139,
    ),
    ("oobleck", "GPT-3 2.7b"): (
        9.214308445, 8.90716483, 8.600021215, 8.2928776, 7.985733985, 7.627088295, 7.512265791,
        7.435358417, 7.052828884, 6.704817778, 6.797312924, 6.105000318, 6.115063714, 5.630658991,
        5.630621249, 5.130663366,
    ),
    ("oobleck", "GPT-3 6.7b"): (
        5.507784136, 5.324191332, 5.140598527, 4.957005722, 4.773412918, 4.808826127, 4.329925297,
        4.185194343, 3.947198754, 4.010855553, 4.15443025, 3.71233106, 3.593275995, 3.283996229,
        3.530908551, 0.0,
    ),
    ("varuna", "BERT-Large"): (
        343.1328746, 331.6951121, 329.5800552, 326.5438348, 306.0386227, 298.3794267, 290.038974,
        280.0744467, 267.8972968, 255.720147, 243.5429971, 232.9541711, 222.3653452, 211.7765192,
        202.5688445, 193.3611697,
    ),
    ("varuna", "GPT-2"): (
        125.7855818, 117.6280102, 117.6280102, 106.8250673, 110.9162094, 102.0772415, 102.0772415,
        96.65353837, 96.65353837, 85.83389481, 88.31094283, 78.31133417, 78.31133417, 70.46360441,
        70.46360441, 64.29935764,
    ),
    ("varuna", "GPT-3 Medium"): (
        41.99773336, 38.88588843, 38.88588843, 35.85035677, 33.42576818, 33.42576818, 33.42576818,
        28.26386056, 28.26386056, 28.26386056, 28.23158201, 25.26139038, 25.26139038, 22.8891583,
        22.8891583, 20.91158092,
    ),
    ("varuna", "GPT-3 2.7b"): (
        9.767532721, 9.424740405, 9.424740405, 9.099911677, 9.099911677, 9.099911677, 9.099911677,
        7.469736582, 7.469736582, 7.469736582, 7.469736582, 6.424614304, 6.424614304, 6.424614304,
        6.424614304, 4.863785398,
    ),
    ("varuna", "GPT-3 6.7b"): (
        5.240635953, 5.240635953, 5.240635953, 5.096885803, 5.096885803, 5.096885803, 5.096885803,
        4.503390788, 4.503390788, 4.503390788, 4.503390788, 3.953767179, 3.953767179, 3.953767179,
        3.953767179, 3.016421755,
    ),
    ("bamboo", "BERT-Large"): (
        119.2546584, 99.37888199, 99.37888199, 99.37888199, 99.37888199, 99.37888199, 99.37888199,
        74.53416149, 74.53416149, 74.53416149, 74.53416149, 74.53416149, 74.53416149, 49.68944099,
        49.68944099, 49.68944099,
    ),
    ("bamboo", "GPT-2"): (
        27.02956359, 22.52463632, 22.52463632, 22.52463632, 22.52463632, 22.52463632, 22.52463632,
        16.89347724, 16.89347724, 16.89347724, 16.89347724, 16.89347724, 16.89347724, 11.26231816,
        11.26231816, 11.26231816,
    ),
}
# fmt: on

# Milliseconds between losses, and the nodes that are lost, one at a time; none comes back.
_LOSSES: Final[Mapping[str, tuple[int, tuple[int, ...]]]] = {
    "6h": (21_600_000, (10, 14, 4, 16, 7, 28, 22, 17, 21, 26, 6, 24, 29, 25, 19)),
    "1h": (3_600_000, (21, 15, 14, 17, 19, 11, 3, 13, 2, 26, 4, 8, 16, 7, 18)),
    "10m": (601_200, (5, 21, 20, 15, 1, 17, 30, 28, 22, 16, 23, 12, 13, 25, 9)),
}


def controlled_losses(frequency: str) -> tuple[Change, ...]:
    """The changes of 30 nodes of which one is lost every 6 h, 1 h or 10 min, until 15 are left."""
    period_ms, lost = _LOSSES[frequency]
    return (
        *((0, "add", number) for number in range(1, 31)),
        *((period_ms * count, "remove", number) for count, number in enumerate(lost, start=1)),
    )
