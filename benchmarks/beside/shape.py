"""How many ranks train, and what each of them does."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Pipelines of equal stages, one rank a stage."""

    num_pipelines: int
    num_stages: int
    microbatches_per_pipeline: int

    @property
    def num_ranks(self) -> int:
        return self.num_pipelines * self.num_stages

    @property
    def num_microbatches(self) -> int:
        return self.num_pipelines * self.microbatches_per_pipeline
