"""The published tables and figures that `planaria reproduce` computes, by name."""

from collections.abc import Mapping
from typing import Final

from planaria.errors import ConfigError
from planaria.papers.gemini import placements, wasted_time, zero_timelines
from planaria.papers.odyssey import estimates, faults, layouts, transfers
from planaria.papers.oobleck import breakdown, planning_latency, spot, throughput
from planaria.papers.rows import GEMINI, ODYSSEY, OOBLECK, Experiment

_ALL: Final = (
    Experiment(
        "oobleck-figure-1",
        "Effective time of Bamboo and Varuna",
        f"{OOBLECK}, Figure 1",
        "percent of the authors' counts",
        breakdown.figure_1,
    ),
    Experiment(
        "oobleck-table-1",
        "Models and samples of an iteration",
        f"{OOBLECK}, Table 1",
        "samples, and 1e6 parameters",
        throughput.table_1,
    ),
    Experiment(
        "oobleck-table-2",
        "Throughput while nodes fail and none comes back",
        f"{OOBLECK}, Table 2",
        "samples/s",
        throughput.table_2,
        "Rates and transition times are the authors' measurements; the failures are replayed.",
    ),
    Experiment(
        "oobleck-table-3",
        "Time to plan a pipeline template",
        f"{OOBLECK}, Table 3",
        "seconds",
        planning_latency.table_3,
        "No number can come back, only a ratio: the machines differ.",
    ),
    Experiment(
        "oobleck-table-4",
        "The same with Varuna's saves made free",
        f"{OOBLECK}, Table 4",
        "samples/s",
        throughput.table_4,
        "As Table 2. Varuna without checkpoint overhead saves every 2 iterations, else every 10.",
    ),
    Experiment(
        "oobleck-figure-10",
        "Throughput on spot machines, with the models of Appendix C",
        f"{OOBLECK}, Figure 10",
        "samples/s, minutes, and times",
        spot.figure_10,
    ),
    Experiment(
        "oobleck-figure-11",
        "What time is spent on",
        f"{OOBLECK}, Figure 11",
        "percent of the authors' counts",
        breakdown.figure_11,
    ),
    Experiment(
        "gemini-table-1",
        "Memory of a node",
        f"{GEMINI}, Table 1",
        "GB",
        wasted_time.table_1,
    ),
    Experiment(
        "gemini-table-2",
        "Models",
        f"{GEMINI}, Table 2",
        "1e9 parameters, and GB",
        wasted_time.table_2,
    ),
    Experiment(
        "gemini-mt-nlg",
        "Saving MT-NLG 530B to remote storage",
        f"{GEMINI}, section 2.2",
        "minutes",
        wasted_time.mt_nlg,
    ),
    Experiment(
        "gemini-figure-3",
        "Placements of copies, and Theorem 1",
        f"{GEMINI}, Figure 3 and section 4",
        "pairs, percent, and probabilities",
        placements.figure_3,
    ),
    Experiment(
        "gemini-figure-7",
        "Iterations of 100e9 parameters on p4d",
        f"{GEMINI}, Figure 7",
        "seconds, and times",
        zero_timelines.figure_7,
        "Only bytes count, so GPT-2, RoBERTa and BERT are one row.",
    ),
    Experiment(
        "gemini-figure-8",
        "Idle time of the network",
        f"{GEMINI}, Figure 8",
        "seconds",
        zero_timelines.figure_8,
        "GPT-2, RoBERTa and BERT are one row.",
    ),
    Experiment(
        "gemini-figure-9",
        "Recovery from memory after nodes are lost together",
        f"{GEMINI}, Figure 9 and section 4",
        "percent",
        placements.figure_9,
        "The text prints one of these numbers.",
    ),
    Experiment(
        "gemini-figure-10",
        "Time that a failure wastes with GPT-2 100B on 16 nodes",
        f"{GEMINI}, Figure 10",
        "seconds, and times",
        wasted_time.figure_10,
    ),
    Experiment(
        "gemini-figure-11",
        "A checkpoint to memory against one to remote storage",
        f"{GEMINI}, Figure 11",
        "times faster",
        wasted_time.figure_11,
    ),
    Experiment(
        "gemini-figure-12",
        "How often GPT-2 100B is saved",
        f"{GEMINI}, Figure 12",
        "times as often",
        wasted_time.figure_12,
    ),
    Experiment(
        "gemini-figure-13",
        "Iterations and idle time on p3dn",
        f"{GEMINI}, Figure 13",
        "seconds, and times",
        zero_timelines.figure_13,
        "GPT-2, RoBERTa and BERT of a size are one row.",
    ),
    Experiment(
        "gemini-figure-14",
        "Phases of a recovery",
        f"{GEMINI}, Figure 14",
        "minutes",
        wasted_time.figure_14,
    ),
    Experiment(
        "gemini-figure-15",
        "Share of time that trains, with many failures and nodes",
        f"{GEMINI}, Figure 15",
        "percent",
        wasted_time.figure_15,
    ),
    Experiment(
        "gemini-figure-16",
        "What copies cost by when they are sent",
        f"{GEMINI}, Figure 16",
        "percent of an iteration",
        zero_timelines.figure_16,
    ),
    Experiment(
        "odyssey-table-1",
        "What fault tolerance costs without failures",
        f"{ODYSSEY}, Table I",
        "percent, and times",
        layouts.table_1,
        "The paper quotes it; only Bamboo's row has numbers.",
    ),
    Experiment(
        "odyssey-figure-6",
        "Throughput after a loss",
        f"{ODYSSEY}, Figure 6 and section V-B",
        "percent of that before",
        layouts.figure_6,
    ),
    Experiment(
        "odyssey-figure-7",
        "NPUs that are left after nine hours",
        f"{ODYSSEY}, Figure 7",
        "NPUs",
        faults.figure_7,
    ),
    Experiment(
        "odyssey-figure-8",
        "Throughput over Oobleck's and ReCycle's",
        f"{ODYSSEY}, Figure 8 and section V-B",
        "times, and seconds",
        faults.figure_8,
        "A surface over what the paper does not state, and where its numbers would hold.",
    ),
    Experiment(
        "odyssey-figure-9",
        "Errors of the estimated time of an iteration",
        f"{ODYSSEY}, Figure 9",
        "percent",
        estimates.figure_9,
    ),
    Experiment(
        "odyssey-figure-10",
        "What least bytes save of a transfer",
        f"{ODYSSEY}, Figure 10",
        "percent",
        transfers.figure_10,
    ),
    Experiment(
        "odyssey-figure-11",
        "What the order of reductions saves",
        f"{ODYSSEY}, Figure 11",
        "percent",
        transfers.figure_11,
    ),
    Experiment(
        "odyssey-figure-12",
        "Memory before and after a loss",
        f"{ODYSSEY}, Figure 12",
        "GB",
        estimates.figure_12,
    ),
    Experiment(
        "odyssey-figure-13",
        "Convergence with failures",
        f"{ODYSSEY}, Figure 13",
        "difference of the loss",
        estimates.figure_13,
    ),
)
EXPERIMENTS: Final[Mapping[str, Experiment]] = {experiment.name: experiment for experiment in _ALL}


def named_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in EXPERIMENTS:
        raise ConfigError("NAME", name, f"name one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
