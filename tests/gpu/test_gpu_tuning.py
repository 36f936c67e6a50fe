"""Measured plans on a GPU: as right as the first ones, and the same bits from the same file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gpu_models import batches, compiled, losses, on_device, state_digest

from renaissance.backend.cuda.device import DeviceContext, open_device
from renaissance.backend.cuda.tuning import PlanChoices
from renaissance.core.dtype import DType

STEPS = 5


def opened(like: DeviceContext, choices: PlanChoices) -> DeviceContext:
    """Another context on the same device, whose plans are measured."""
    if like.name != "stand-in":
        return open_device(0, choices=choices)
    import cuda_standin

    return cuda_standin.device(tuning=cuda_standin.timed(choices))


def test_a_network_trains_alike_with_measured_plans_and_again_from_their_file(
    device: DeviceContext, tmp_path: Path
) -> None:
    model = compiled("mlp" if device.name == "stand-in" else "resnet18", DType.FP16)
    data = batches(model, STEPS)
    executor = on_device(device, model)
    expected = losses(executor, data)
    executor.close()
    runs = []
    for known in (False, True):
        choices = PlanChoices(tmp_path / "plans.json")
        with opened(device, choices) as tuned:
            executor = on_device(tuned, model)
            runs.append((losses(executor, data), state_digest(executor), choices.digest()))
            executor.close()
        assert (choices.measured == 0) == known
        print(choices.text())
    assert runs[0] == runs[1]
    np.testing.assert_allclose(runs[0][0], expected, rtol=3e-2)
    stored = json.loads((tmp_path / "plans.json").read_text())["plans"]
    assert len(stored) > 5
    for key, choice in stored.items():
        times = [value for value in choice["ms"].values() if value is not None]
        assert all(0 < value < 1e3 for value in times), key
        if times and choice["plan"] != next(iter(choice["ms"])):
            assert choice["ms"][choice["plan"]] == min(times) < times[0], key
