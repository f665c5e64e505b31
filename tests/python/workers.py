"""What other processes run. They find it by name, as they could not find a test module that pytest has loaded."""

from __future__ import annotations

import torch
from support import ALL_FLAGS, V_FIRST, make_inputs, output_gradients, run


def training_step(seed: int) -> list[torch.Tensor]:
    inputs = make_inputs(lengths=[100, 30], H=2, HV=4, K=32, V=32, seed=seed, flags=ALL_FLAGS)
    return list(run(inputs, gradients=output_gradients(inputs, ALL_FLAGS), **ALL_FLAGS).values())


def report_training_step(queue, inputs) -> None:
    """Little else of torch is used here: its own thread pool does not survive a fork."""
    if inputs is None:
        queue.put([x.numpy() for x in training_step(0)])
    else:
        queue.put([x.numpy() for x in run(inputs, gradients=output_gradients(inputs, V_FIRST), **V_FIRST).values()])
