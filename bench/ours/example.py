"""The example's model and recipe, as the benches need them."""

from __future__ import annotations

from renaissance.algo import AdamW, CrossEntropyLoss
from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.data.recipe import Recipe
from renaissance.data.transforms import Pad, RandomCrop, RandomErasing, RandomRotation, RandomScale
from renaissance.graph import BluePrint, CompiledModel, CompileRequest, compile_model, fc, relu, seq

BATCH = 200


def train_recipe() -> Recipe:
    """Pad(2), RandomCrop(28), RandomRotation(20), RandomScale(0.8, 1.2), RandomErasing(0.5), MNIST normalisation."""
    transforms = (Pad(2), RandomCrop(28), RandomRotation(20), RandomScale(0.8, 1.2), RandomErasing(0.5))
    return Recipe.build(transforms, NormMode.MNIST, resolution=28, color_channels=1)


def compiled_mlp(bf16: bool) -> CompiledModel:
    """fc1024 relu fc512 relu fc256 relu fc10, AdamW with decay 1e-4, label smoothing 0.1, batch 200."""
    optimizer = AdamW().weight_decay(1e-4).config()
    request = CompileRequest(
        height=28,
        width=28,
        channels=1,
        num_classes=10,
        train_batch=BATCH,
        val_batch=BATCH,
        half=DType.BF16 if bf16 else None,
        optimizer=optimizer.kind,
        weight_decay=optimizer.weight_decay,
        beta=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        label_smoothing=CrossEntropyLoss().label_smoothing(0.1).config().label_smoothing,
    )
    return compile_model(BluePrint(seq(fc(1024), relu(), fc(512), relu(), fc(256), relu(), fc(10))), request)
