"""The example's MLP and optimizer in PyTorch, as a careful user writes them."""

from __future__ import annotations

import itertools

import torch
from torch import nn


def build(fused: bool, lr: float = 1e-3) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    """Model, AdamW and loss of the example."""
    sizes = (784, 1024, 512, 256, 10)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-4, fused=fused)
    return model, optimizer, nn.CrossEntropyLoss(label_smoothing=0.1)


def training_step(
    model: nn.Module, loss_function: nn.Module, optimizer: torch.optim.Optimizer, bf16: bool, compiled: bool
):
    """A function (images [N,784], labels [N]) -> loss tensor that trains one step."""

    def forward(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(images)
        return loss_function(logits.float(), labels)

    forward = torch.compile(forward) if compiled else forward

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(images, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
