"""CompileRequest: everything besides the model that decides a compilation, as plain frozen data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from renaissance.core.dtype import FP32_ROUNDS_TO_ONE, FP32_SMALLEST_NORMAL, DType
from renaissance.core.enums import OptimizerKind
from renaissance.core.errors import DTypeError, MissingKernelError, ValueRejected
from renaissance.graph.ids import Variant
from renaissance.tensor.init import Initializer

INITIAL_LOSS_SCALE = 8192.0
"""fp16 only; bf16 has the exponent range of fp32 and needs no scaling."""

ADAM_KINDS = frozenset({OptimizerKind.ADAM, OptimizerKind.ADAMW})
UPDATE_OPS = {
    OptimizerKind.SGD: "RANGE_UPDATE_SGD",
    OptimizerKind.SGD_MOMENTUM: "RANGE_UPDATE_MOMENTUM",
    OptimizerKind.SGD_NESTEROV: "RANGE_UPDATE_NESTEROV",
    OptimizerKind.ADAM: "RANGE_UPDATE_ADAM",
    OptimizerKind.ADAMW: "RANGE_UPDATE_ADAMW",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """Input sizes, numeric profile, optimizer and hyper-parameters of one compilation.

    ``beta`` is the momentum of the SGD kinds and beta1 of the Adam kinds. ``grad_clip`` <= 0 is off. The ``*_last``
    batch sizes are those of the short batch that ends an epoch; None means the full size. ``train_end_size`` and
    ``val_size`` are (height, width) where they differ from (``height``, ``width``).

    Raises ValueRejected for a value outside its range, DTypeError for a ``half`` that is not a 16-bit float, and
    MissingKernelError for an optimizer without an update op.
    """

    height: int
    width: int
    channels: int
    num_classes: int
    train_batch: int
    val_batch: int
    train_last: int | None = None
    val_last: int | None = None
    train_end_size: tuple[int, int] | None = None
    val_size: tuple[int, int] | None = None
    half: DType | None = None
    optimizer: OptimizerKind = OptimizerKind.SGD_MOMENTUM
    label_smoothing: float = 0.0
    weight_decay: float = 0.0
    beta: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    grad_clip: float = 0.0
    world_size: int = 1
    external_inputs: bool = True
    """True on the CPU: the input regions are the shared slots and take no arena memory."""
    backend: str = "cpu"
    """"cpu" or "cuda": decides the channel padding of half tensors (spec/framework 2.3)."""
    initializer: Initializer | None = None
    supported_ops: frozenset[str] | None = None
    """Ops the backend can run; an op outside the set fails the compilation by name. None checks nothing."""

    def __post_init__(self) -> None:
        for name in ("height", "width", "channels", "num_classes", "train_batch", "val_batch", "world_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueRejected(f"compile: {name} is {value}; expected at least 1")
        for name, full in (("train_last", self.train_batch), ("val_last", self.val_batch)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= full:
                raise ValueRejected(f"compile: {name} is {value}; expected 1 to the full batch size {full}")
        for name in ("train_end_size", "val_size"):
            size = getattr(self, name)
            if size is not None and min(size) < 1:
                raise ValueRejected(f"compile: {name} is {size}; expected (height, width) of at least 1")
        if self.half is not None and not self.half.is_half:
            raise DTypeError(f"compile: half is {self.half.name}; expected None, FP16 or BF16")
        if self.optimizer not in UPDATE_OPS:
            known = ", ".join(k.name for k in UPDATE_OPS)
            raise MissingKernelError(f"optimizer {self.optimizer.name} has no update op; expected one of: {known}")
        self._check_hyper_parameters()

    def _check_hyper_parameters(self) -> None:
        betas = (0.0, FP32_ROUNDS_TO_ONE)
        ranges = {
            "label_smoothing": (0.0, 1.0),
            "weight_decay": (0.0, math.inf),
            "beta": betas if self.is_adam else (0.0, math.inf),
            "beta2": betas,
            "eps": (FP32_SMALLEST_NORMAL if self.is_adam else 0.0, math.inf),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value < high:
                raise ValueRejected(f"compile: {name} is {value}; expected {low} <= {name} < {high}")
        if not math.isfinite(self.grad_clip):
            raise ValueRejected(f"compile: grad_clip is {self.grad_clip}; expected a finite number (<= 0: off)")

    @property
    def is_adam(self) -> bool:
        return self.optimizer in ADAM_KINDS

    @property
    def has_momentum(self) -> bool:
        """True when the optimizer keeps a first moment."""
        return self.optimizer is not OptimizerKind.SGD

    @property
    def has_loss_scaling(self) -> bool:
        return self.half is DType.FP16

    def batch(self, variant: Variant) -> int:
        """Rows of a batch of ``variant``."""
        train_last = self.train_batch if self.train_last is None else self.train_last
        val_last = self.val_batch if self.val_last is None else self.val_last
        sizes = (self.train_batch, train_last, self.train_batch, train_last, self.val_batch, val_last)
        return sizes[variant]

    def size(self, variant: Variant) -> tuple[int, int]:
        """(height, width) of the images of ``variant``."""
        base = (self.height, self.width)
        if variant in (Variant.TRAIN_LOWRES, Variant.TRAIN_LOWRES_LAST):
            return self.train_end_size or base
        return base if variant.is_training else self.val_size or base
