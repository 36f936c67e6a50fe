"""PyTorch's side of ``bench.zoo_gradients``: repeats a step from a file and prints the errors as one line of JSON."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.peers.zoo_models import Parameters, build, give_dropout

NOISE = 1e-6
"""Of the root mean square of a convolution's output: what Winograd's F(4x4) loses in fp32."""
CANCELLED = 1e-9
"""A gradient that is smaller than this, relative to that of the parameter before it, is 0 in exact arithmetic."""
Arrays = Mapping[str, np.ndarray]


@dataclass
class Result:
    """What one step gave: loss, gradients and running statistics in model order."""

    loss: float
    gradients: list[np.ndarray]
    statistics: list[np.ndarray]


def ours(step: Arrays, count: int) -> Result:
    norms = sum(key.startswith("mean") for key in step)
    statistics_ = [step[f"{kind}{i}"] for i in range(norms) for kind in ("mean", "var")]
    return Result(float(step["loss"].item()), [step[f"grad{i}"] for i in range(count)], statistics_)


def theirs(
    name: str,
    step: Arrays,
    weights: list[np.ndarray],
    images: np.ndarray,
    dtype: torch.dtype,
    autocast: bool = False,
    disturb: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Result:
    """PyTorch's step in ``dtype``, or under autocast to bf16. ``disturb`` gives what a convolution's output is off."""
    classes = weights[-1].size
    model = build(name, classes, images.shape[1]).train()
    for module in model.modules():
        if disturb is not None and isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _module, _inputs, y: y + disturb(y.detach()))
    give_dropout(model, [step[f"mask{i}"] for i in range(sum(key.startswith("mask") for key in step))])
    parameters = Parameters(model)
    model.to(dtype)
    parameters.load(weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(torch.from_numpy(images).to(dtype).permute(0, 3, 1, 2))
    logits = logits if dtype is torch.float64 else logits.float()
    labels = torch.from_numpy(step["labels"]).long()
    loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    loss.backward()
    return Result(float(loss.detach()), parameters.gradients(), parameters.statistics())


def small_noise(y: torch.Tensor) -> torch.Tensor:
    return NOISE * y.square().mean().sqrt() * torch.randn_like(y)


def rounding(y: torch.Tensor) -> torch.Tensor:
    return y.bfloat16().to(y.dtype) - y


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.reshape(-1) - want.reshape(-1)) / np.linalg.norm(want))


def errors(names: list[str], got: Result, want: Result) -> dict[str, float | str]:
    """Some gradients are 0 by nature: of a bias that a batch norm takes out again, its own layer's or one further up.
    They are measured against the gradient of the weights before them."""
    gradients, zeros = {}, 0.0
    sizes = [float(np.linalg.norm(g)) for g in want.gradients]
    for i, name in enumerate(names):
        if i and sizes[i] < CANCELLED * sizes[i - 1]:
            before = max(sizes[max(i - 2, 0) : i])
            zeros = max(zeros, float(np.linalg.norm(got.gradients[i])) / before)
        else:
            gradients[name] = relative(got.gradients[i], want.gradients[i])
    worst = max(gradients, key=lambda name: gradients[name])
    pairs = zip(got.statistics, want.statistics, strict=True)
    return {
        "loss": abs(got.loss - want.loss) / want.loss,
        "median": statistics.median(gradients.values()),
        "worst": gradients[worst],
        "where": worst,
        "zeros": zeros,
        "statistics": max((relative(a, b) for a, b in pairs), default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("step")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    with np.load(options.step) as file:
        step = {key: file[key] for key in file.files}
    names = [str(name) for name in step["names"]]
    weights = [step[f"weight{i}"] for i in range(len(names))]
    got = ours(step, len(names))
    own = theirs(options.model, step, weights, step["images"], torch.float32, autocast=options.bf16)
    exact_weights = [step.get(f"rounded{i}", w) for i, w in enumerate(weights)]
    exact = theirs(options.model, step, exact_weights, step.get("rounded_images", step["images"]), torch.float64)
    answer: dict[str, Any] = {
        "ours": errors(names, got, exact),
        "own": errors(names, own, exact),
        "images": "x".join(map(str, step["images"].shape)),
        "parameters": sum(w.size for w in weights),
        "torch": torch.__version__,
    }
    disturb, images = rounding if options.bf16 else small_noise, step.get("rounded_images", step["images"])
    disturbed = theirs(options.model, step, exact_weights, images, torch.float64, disturb=disturb)
    answer["disturbed"] = errors(names, disturbed, exact)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
