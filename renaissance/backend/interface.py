"""What a task asks of an executor, whatever the device: ``backend.executor.GraphExecutor`` on the host, the CUDA one.

Host memory of a slot is read by a step: on the CPU until the step returns, on a GPU until its copy engine has read it,
which is later. So whoever holds a slot does not give it back himself, but hands the executor what does it::

    executor.run_train_step(batch.slot, lr=0.1, valid=batch.valid)
    executor.release_when_copied(batch.slot, batch.release)
    ...
    executor.drain()        # the pass is over: every slot has been given back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from renaissance.graph import Variant

Memory = int | npt.NDArray[Any]
"""An address, or an array whose memory is used (and kept alive)."""
ACCUMULATORS = ("accum_loss", "accum_top1", "accum_top5", "accum_count")
"""The scalars that sum up metrics over the steps of a pass."""


class Executor(Protocol):
    """Runs one compiled model. Use it from one thread at a time."""

    # -- steps --------------------------------------------------------------------------------------------------

    def run_train_step(
        self,
        slot: int,
        variant: Variant = Variant.TRAIN_BASE,
        *,
        lr: float | None = None,
        valid: int | None = None,
        frozen: bool = False,
    ) -> None:
        """One training step on input slot ``slot``; ``lr`` and ``valid`` belong to this step alone, however many steps
        are under way. May return before the step has run, and before it has begun."""

    def prepare_validation(self, ema: bool = False) -> None:
        """Make what every step of a validation pass reads."""

    def run_val_step(
        self, slot: int, variant: Variant = Variant.VAL_BASE, *, valid: int | None = None, ema: bool = False
    ) -> None:
        """One validation step on input slot ``slot``, with the main weights or (``ema``) their average."""

    def release_when_copied(self, slot: int, release: Callable[[], None]) -> None:
        """Call ``release`` as soon as nothing reads the host memory of ``slot`` any more, which the last step was run
        on; at once, or during a later call of this executor. Slots are given back in the order of their steps, and one
        of them at least is free when this returns: it waits for the oldest when all slots of the ring are held."""

    def drain(self) -> None:
        """Wait until every slot that was handed over has been given back. The steps may still be computing."""

    def clear_metrics(self) -> None:
        """Zero the accumulated metrics, after the steps that are under way."""

    def reduce_metrics(self) -> None:
        """Make the metrics of a validation pass their mean over the ranks, after the steps that are under way; nothing
        with one rank. In training they are means already. All ranks call alike."""

    def cast_weights(self) -> None:
        """The master weights were written from outside: make their half copies, and what validation derives, again."""

    # -- tensors ------------------------------------------------------------------------------------------------

    def read(self, tensor_id: int, variant: Variant = Variant.TRAIN_BASE) -> npt.NDArray[Any]:
        """A tensor [N,H,W,C] after every step so far; BF16 as uint16 bit patterns. A view on the host, a copy of what
        lies on a GPU, so it is for reading only: ``write`` is for writing."""

    def write(self, tensor_id: int, values: npt.NDArray[Any]) -> None:
        """Copy ``values``, which broadcast to [N,H,W,C], into a tensor, after every step so far."""

    def read_scalar(self, name: str) -> float | int:
        """Value of a step scalar after every step so far."""

    def write_scalar(self, name: str, value: float) -> None:
        """Set a step scalar; the next step reads it."""

    def scalars(self) -> Mapping[str, float]:
        """The ``ACCUMULATORS`` after every step so far; waits for them."""

    def scalars_soon(self) -> Mapping[str, float]:
        """The newest ``ACCUMULATORS`` that are known without waiting, of this pass; zeros where none are yet."""

    # -- life and facts -----------------------------------------------------------------------------------------

    def release_slots(self) -> None:
        """No more steps: wait for those under way, give every slot back, and forget the slots and whatever is bound to
        them, so that their memory can be unmapped. Tensors stay readable. May be called again, also after an error."""

    def profile(self) -> dict[str, Any]:
        """What besides data, model and options the bits of a run may depend on."""

    def versions(self) -> dict[str, str]:
        """Versions of the native libraries in use."""

    def notes(self) -> dict[str, str]:
        """What a run prints of choices that were made for it and decide nothing about its bits, by a short name."""
