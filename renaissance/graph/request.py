"""CompileRequest: everything besides the model that decides a compilation, as plain frozen data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from renaissance.core.dtype import FP32_ROUNDS_TO_ONE, FP32_SMALLEST_NORMAL, DType
from renaissance.core.enums import TTA, OptimizerKind
from renaissance.core.errors import DTypeError, MissingKernelError, ValueRejected
from renaissance.graph.ids import Variant
from renaissance.tensor.init import Initializer

INITIAL_LOSS_SCALE = 8192.0
"""Of fp16; bf16 has the exponent range of fp32 and needs no scaling unless it is asked for."""
SCALE_FLOOR = 1.0
"""A loss scale is never halved below this."""

ADAM_KINDS = frozenset({OptimizerKind.ADAM, OptimizerKind.ADAMW})
LARS_KINDS = frozenset({OptimizerKind.LARS, OptimizerKind.LARS_NESTEROV})
UPDATE_OPS = {
    OptimizerKind.SGD: "RANGE_UPDATE_SGD",
    OptimizerKind.SGD_MOMENTUM: "RANGE_UPDATE_MOMENTUM",
    OptimizerKind.SGD_NESTEROV: "RANGE_UPDATE_NESTEROV",
    OptimizerKind.LARS: "RANGE_UPDATE_MOMENTUM",
    OptimizerKind.LARS_NESTEROV: "RANGE_UPDATE_NESTEROV",
    OptimizerKind.ADAM: "RANGE_UPDATE_ADAM",
    OptimizerKind.ADAMW: "RANGE_UPDATE_ADAMW",
}
"""The op that updates whole spans. Of the LARS kinds it is that of biases and batch norm; their weights have
LARS_UPDATE, one node each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """Input sizes, numeric profile, optimizer and hyper-parameters of one compilation.

    ``beta`` is the momentum of the SGD and LARS kinds and beta1 of the Adam kinds. ``grad_clip`` <= 0 is off. The
    ``*_last`` batch sizes are those of the short batch that ends an epoch; None means the full size. ``train_end_size``
    and ``val_size`` are (height, width) where they differ from (``height``, ``width``). ``loss_scale`` None scales the
    loss of fp16 by 8192 at first and others not at all; a number is the first scale whatever the dtype.
    ``freeze_first_layer`` keeps the programs that train everything but the first convolution.

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
    trust_coefficient: float = 1e-3
    """LARS only."""
    grad_clip: float = 0.0
    loss_scale: float | None = None
    ema: bool = False
    """Keep a moving average of all parameters: E = ema_decay * E + (1 - ema_decay) * W after every step that counts."""
    ema_decay: float = 0.9
    freeze_first_layer: bool = False
    tta: TTA = TTA.DISABLED
    world_size: int = 1
    external_inputs: bool = True
    """True on the CPU: the input regions are the shared slots and take no arena memory. False on a GPU, whose copy
    engine fills them."""
    initializer: Initializer | None = None
    reuse: bool = True
    """Pack activations, gradients and temporaries by lifetime; False gives each its own memory, for comparison."""
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
            "trust_coefficient": (FP32_SMALLEST_NORMAL, math.inf),
            "ema_decay": (0.0, FP32_ROUNDS_TO_ONE),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value < high:
                raise ValueRejected(f"compile: {name} is {value}; expected {low} <= {name} < {high}")
        if not math.isfinite(self.grad_clip):
            raise ValueRejected(f"compile: grad_clip is {self.grad_clip}; expected a finite number (<= 0: off)")
        if self.loss_scale is not None and not SCALE_FLOOR <= self.loss_scale < math.inf:
            raise ValueRejected(
                f"compile: loss_scale is {self.loss_scale}; expected None or a finite number of at least {SCALE_FLOOR}"
            )

    @property
    def is_adam(self) -> bool:
        return self.optimizer in ADAM_KINDS

    @property
    def is_lars(self) -> bool:
        return self.optimizer in LARS_KINDS

    @property
    def has_momentum(self) -> bool:
        """True when the optimizer keeps a first moment."""
        return self.optimizer is not OptimizerKind.SGD

    @property
    def has_loss_scaling(self) -> bool:
        """True when the loss scale is not 1 for ever."""
        return self.half is DType.FP16 or self.loss_scale is not None

    @property
    def initial_loss_scale(self) -> float:
        """The loss scale before the first step."""
        if self.loss_scale is not None:
            return self.loss_scale
        return INITIAL_LOSS_SCALE if self.has_loss_scaling else 1.0

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
