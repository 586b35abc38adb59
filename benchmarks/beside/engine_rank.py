"""A rank of planaria without worker, agent and coordinator: its engine alone.

It does in an iteration what a worker does (engine/worker.py): it runs its schedule up to the commit
vector and takes the optimizer steps.
"""

from itertools import pairwise
from pathlib import Path

from beside.shape import Shape
from peers.small_gpt import LEARNING_RATE, MICROBATCH_SIZE, NUM_BLOCKS
from planaria.core.commit import Votes, vector_layout
from planaria.core.job import DataConfig, JobConfig, ModelConfig, TrainingConfig
from planaria.core.plan import Pipeline, PipelineTemplate, Plan, Stage, plain_plan
from planaria.data.batches import Batches
from planaria.engine.comm.host import HostComm
from planaria.engine.devices import PROCESSOR
from planaria.engine.iteration.executor import Executor, ExecutorCallbacks, RankContext
from planaria.engine.iteration.groups import iteration_peers
from planaria.engine.iteration.lateness import ActionTimes
from planaria.engine.optimizer import clip_scale, learning_rate
from planaria.engine.prepare import load_data, load_model
from planaria.engine.stage import RankStage
from planaria.schedule.lower import rank_schedule
from planaria.transport.links import Address, Links
from planaria.transport.pulse import Pulse

NUM_LAYERS = NUM_BLOCKS + 2
_TOKEN = b"beside torch"
_TIMEOUT_S = 60.0
_NO_VOTES = Votes(0, 0, 0, 0)
IDLE_CALLBACKS = ExecutorCallbacks(
    on_step=lambda *_: None,
    on_action_done=lambda: None,
    on_computed=lambda _: None,
    is_timed=lambda: False,
    on_tensors=lambda _: None,
)


def job_of(shape: Shape, *, is_deterministic: bool) -> JobConfig:
    """A job that trains the small GPT-2 in this shape."""
    return JobConfig(
        name="beside",
        model=ModelConfig(kind="python", target="peers.small_gpt:layers"),
        data=DataConfig(kind="python", target="peers.small_gpt:Tokens"),
        training=TrainingConfig(
            iterations=1 << 20,
            global_batch_size=shape.num_microbatches * MICROBATCH_SIZE,
            microbatch_size=MICROBATCH_SIZE,
            learning_rate=LEARNING_RATE,
            deterministic=is_deterministic,
        ),
    )


def plan_of(shape: Shape) -> Plan:
    """Equal pipelines of one node a stage; ranks of a pipeline follow each other."""
    bounds = [NUM_LAYERS * i // shape.num_stages for i in range(shape.num_stages + 1)]
    stages = tuple(Stage(a, b, 1) for a, b in pairwise(bounds))
    template = PipelineTemplate(stages, shape.num_stages)
    pipelines = tuple(
        Pipeline(template, tuple(range(first, first + shape.num_stages)))
        for first in range(0, shape.num_ranks, shape.num_stages)
    )
    return plain_plan(0, pipelines, (shape.microbatches_per_pipeline,) * len(pipelines))


class EngineRank:
    """A rank's layers, links and executor.

    Attributes:
        reduce_s, hidden_s: seconds of all reductions so far, and of these the seconds that passed
            before the last forward or backward of their iteration had ended.
    """

    def __init__(self, config: JobConfig, plan: Plan, links: Links) -> None:
        self._config = config
        self._links = links
        self._plan = plan
        self.reduce_s = self.hidden_s = 0.0
        model = load_model(
            config, cache_directory=Path(), profile=None, timekeeper=links.timekeeper
        )
        self._dataset = load_data(config, objective=model.objective, cache_directory=Path())
        self._stage = RankStage(model, training=config.training)
        self._stage.hold(sorted(plan.held_by_rank[links.rank]), states={}, age=0)
        self._layout = vector_layout(config, model.num_layers)

    def enter(self, addresses: dict[int, Address]) -> None:
        """Makes the links to the ranks at these addresses."""
        rank = self._links.rank
        schedule = rank_schedule(self._plan, rank)
        peers = iteration_peers(schedule, rank, self._plan.all_ranks)
        self._links.begin(0, addresses=addresses, peers=peers, timeout_s=_TIMEOUT_S)
        self._executor = Executor(
            self._plan,
            schedule,
            context=RankContext(
                stage=self._stage,
                links=self._links,
                layout=self._layout,
                pulse=Pulse(),
                times=ActionTimes(self._config),
                resilience=self._config.resilience,
            ),
            comm=HostComm(self._links, PROCESSOR),
            callbacks=IDLE_CALLBACKS,
        )

    def train(self, iteration: int) -> float:
        """Trains an iteration; returns the loss of the global batch."""
        training = self._config.training
        batches = Batches(self._dataset, training, iteration=iteration)
        vector, spans = self._executor.run(iteration, batches, votes=lambda: _NO_VOTES)
        scale = clip_scale(training, vector.gradient_norm)
        rate = learning_rate(training, iteration)
        layers = sorted(self._stage.complete_layers())
        self._stage.apply(layers, iteration, learning_rate=rate, scale=scale)
        computed_s = max(span.end_s for span in spans if span.lane == "compute")
        for span in spans:
            if span.lane == "reduce":
                self.reduce_s += span.end_s - span.start_s
                self.hidden_s += max(0.0, min(span.end_s, computed_s) - span.start_s)
        return vector.loss

    def close(self) -> None:
        """Ends the threads."""
        self._executor.close()
        self._links.close()


def open_links(rank: int) -> Links:
    """The links of a rank, which has peers at none of them yet."""
    return Links(rank, token=_TOKEN)
