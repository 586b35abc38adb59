"""Bytes of tensors that a rank holds, counted by hand."""

from dataclasses import replace

import torch
from torch import nn

from planaria.core.job import ModelConfig, TrainingConfig
from planaria.engine.iteration.memory_peaks import TensorPeak
from planaria.engine.iteration.split_backward import input_gradient
from planaria.engine.prepare import split_model
from planaria.engine.stage import HeldLayer, RankStage

TRAINING = TrainingConfig(optimizer={"name": "SGD"}, deterministic=False)
INPUT, WIDTH, BATCH = 8, 3, 4  # Floats; those of a linear layer.
PARAMETERS = INPUT * WIDTH + WIDTH


def _stage(training: TrainingConfig) -> RankStage:
    """A linear layer whose optimizer has no state."""
    model = ModelConfig(kind="python", target="helpers.user_models:factories")
    split = split_model(model, seed=0, vocabulary_size=0, sequence_length=0)
    stage = RankStage(split, training=training)
    stage.layers[0] = HeldLayer(0, nn.Linear(INPUT, WIDTH), training=training, tied=())
    return stage


def test_state_counts_always_and_what_autograd_keeps_until_its_backward() -> None:
    """Parameters and sums; of each microbatch its input, which is kept once though it waits too;
    and outputs that wait."""
    stage = _stage(TRAINING)
    peak = TensorPeak(stage)
    state_bytes = 4 * 2 * PARAMETERS
    inputs = [torch.ones(BATCH, INPUT, requires_grad=True) for _ in range(2)]
    with peak.watch():
        peak.count_bytes(())
        assert peak.peak_bytes == state_bytes
        outputs = [stage.layers[0].module(one) for one in inputs]
        peak.count_bytes((*inputs, *outputs))
        both_bytes = state_bytes + 2 * 4 * BATCH * (INPUT + WIDTH)
        assert peak.peak_bytes == both_bytes
        for output in outputs:
            output.sum().backward()
        peak.count_bytes(())
    assert peak.peak_bytes == both_bytes

    with peak.watch():
        peak.count_bytes(())

    assert peak.peak_bytes == state_bytes


def test_float64_sums_count_as_what_they_are() -> None:
    """Twice the parameters' bytes, beside the reduced gradients."""
    peak = TensorPeak(_stage(replace(TRAINING, deterministic=True)))
    with peak.watch():
        peak.count_bytes(())

    assert peak.peak_bytes == 4 * (1 + 2 + 1) * PARAMETERS


def test_a_graph_that_a_backward_retains_is_let_go_of_with_its_output() -> None:
    """Both parts of a split backward do; tanh saves its own output, which once was never freed."""
    stage = _stage(TRAINING)
    module = stage.layers[0].module
    peak = TensorPeak(stage)
    for _ in range(2):
        with peak.watch():
            x = torch.ones(BATCH, INPUT, requires_grad=True)
            output = module(x).tanh()
            gradient = torch.ones_like(output)
            _, put_off = input_gradient(output, gradient, x, module.parameters())
            del output
            peak.count_bytes(put_off.gradients())
            put_off.run()
            stage.accumulate(0, 1)
            del put_off, x

        # The input of the linear layer, and the gradient of its output; that of tanh is gone.
        assert peak.peak_bytes == 4 * 2 * PARAMETERS + 4 * BATCH * (INPUT + WIDTH)


def test_what_is_watched_has_the_same_bits() -> None:
    """The tensors that autograd keeps go through the count and come back as they were."""
    stage = _stage(TRAINING)
    module = stage.layers[0].module
    x = torch.linspace(-1.0, 1.0, BATCH * INPUT).view(BATCH, INPUT)
    sums = []
    for is_watched in (False, True):
        stage.layers[0].clear()
        if is_watched:
            with TensorPeak(stage).watch():
                module(x).exp().tanh().sum().backward()
        else:
            module(x).exp().tanh().sum().backward()
        sums.append(stage.layers[0].sums.clone())

    assert torch.equal(*sums)
    assert sums[0].any()
