"""What becomes of a damaged sample: the session fails, another sample takes its place, or its row stays blank.

The choice is a function of (policy, seed, epoch, sample id, which samples are damaged), so every worker, also one that
does a share again, makes the same. A substitute brings its pixels and its label; the augmentation draws stay those of
the sample it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from renaissance.core.errors import CorruptSample
from renaissance.core.philox import Domain, epoch_word, philox, purpose
from renaissance.data.making.spec import OnCorrupt, SessionSpec

SUBSTITUTE_ATTEMPTS = 16
MAX_TEXT = 300
"""Characters of a report; the hub keeps no more."""


@dataclass(slots=True, eq=False)
class ShareOfBatch:
    """One worker's rows of one batch, and where they go."""

    epoch: int
    index: int
    ids: npt.NDArray[np.int64]  # [k] sample ids, -1 = empty
    rows: npt.NDArray[np.int64]  # [k] rows of the slot
    out: npt.NDArray[np.uint8]  # [B, row bytes] of the slot
    hashes: npt.NDArray[np.uint64]  # [B] of the slot
    labels: npt.NDArray[np.int32]  # [B] of the slot


def substitutes(seed: int, epoch: int, validation: bool, sample: int, samples: int) -> Iterator[int]:
    """The samples that may stand for ``sample``, in order: docs/random-numbers.md, domain 8."""
    for attempt in range(SUBSTITUTE_ATTEMPTS):
        word = philox(seed, attempt, purpose(Domain.SUBSTITUTE), sample, epoch_word(epoch, validation))[0]
        yield word * samples >> 32


class Policy:
    """The policy of one session, and what it has done since ``take_reports``."""

    def __init__(self, spec: SessionSpec, labels: npt.NDArray[np.int32]) -> None:
        self._spec = spec
        self._labels = labels
        self._reports: list[dict[str, object]] = []

    def settle(
        self, share: ShareOfBatch, k: int, text: str, use: Callable[[int], None], blank: Callable[[], None]
    ) -> None:
        """Fill position ``k`` of the share, whose sample is damaged as ``text`` says.

        ``use(s)`` puts sample s there and raises CorruptSample when that is damaged too; ``blank()`` puts zeros there.
        Raises CorruptSample under the policy "fail" and when no substitute can be used.
        """
        sample, row = int(share.ids[k]), int(share.rows[k])
        action = self._spec.on_corrupt
        if action is OnCorrupt.FAIL:
            self._report(share, sample, text, action)
            raise CorruptSample(f"{text}; on_corrupt substitute or blank would go on without it")
        if action is OnCorrupt.BLANK:
            blank()
            share.labels[row] = -1
            self._report(share, sample, text, action)
            return
        spec = self._spec
        for other in substitutes(spec.seed, share.epoch, spec.validation, sample, spec.dataset.samples):
            try:
                use(other)
            except CorruptSample:
                continue
            share.labels[row] = self._labels[other]
            self._report(share, sample, text, action, other)
            return
        self._report(share, sample, text, OnCorrupt.FAIL)
        raise CorruptSample(f"{text}; none of {SUBSTITUTE_ATTEMPTS} samples drawn to take its place can be used either")

    def _report(
        self, share: ShareOfBatch, sample: int, text: str, action: OnCorrupt, substitute: int | None = None
    ) -> None:
        self._reports.append(
            {
                "sample": sample,
                "epoch": share.epoch,
                "batch": share.index,
                "text": text[:MAX_TEXT],
                "action": str(action),
                "substitute": substitute,
            }
        )

    def take_reports(self) -> list[dict[str, object]]:
        """What was done since the last call, for the hub."""
        reports, self._reports = self._reports, []
        return reports
