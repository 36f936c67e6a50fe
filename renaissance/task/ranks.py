"""Several ranks as a task sees them: one process for each GPU of one machine, started by a launcher.

Every rank runs the whole task on its share of each batch. Rank 0 alone starts the dataserver, prints and writes; what
the ranks decide (early stop, skipped steps, the end) follows from numbers that are the same on all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from renaissance.backend.cuda.libraries import Collectives
from renaissance.backend.cuda.nccl import NcclCollectives, new_unique_id
from renaissance.backend.ranks.exchange import RankFailed, Ranks
from renaissance.backend.ranks.launch import launched, meeting_place, rank_of, remove_leftovers
from renaissance.core.digest import DIGEST_BYTES, chain_digest
from renaissance.core.errors import DeviceError, ValueRejected
from renaissance.core.log import get_logger
from renaissance.core.machine import allowed_cpus, format_cpus
from renaissance.data.address import runtime_folder

_log = get_logger("task.ranks")

NEWS_SECONDS = 1.0
"""What another rank's death breaks here may be noticed before the death is."""


def require_equal_shares(samples: int, world_size: int, drop_last: bool) -> None:
    """Raise ValueRejected when the last training batch would not give every rank as many samples.

    Gradients are means over ranks of means over samples, so the samples of a smaller share would count for more.
    """
    if samples % world_size and not drop_last:
        raise ValueRejected(
            f"{samples} training samples cannot be shared evenly by {world_size} ranks, and in the last batch of an "
            "epoch the samples of a smaller share would count for more; call PREPROCESSOR_SETTING.drop_last(True), "
            "which leaves out a batch that is not full"
        )


def refuse_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raise DeviceError when a launcher has started several processes for a run that is not shared."""
    try:
        launch = launched(environ)
    except ValueRejected:  # stray variables are no launcher
        return
    if launch is not None:
        raise DeviceError(
            f"{launch.launcher} has started {launch.size} processes, but a run on the CPU has one, and each would "
            "train the same; start it without a launcher, or call use_gpu()"
        )


class Peers:
    """The ranks of this run, this one included (``loop.Peers``). Made by ``join``."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @classmethod
    def join(cls, gpus: Sequence[int], environ: Mapping[str, str] = os.environ) -> Self | None:
        """Meet the other ranks; None when there is one GPU.

        Raises DeviceError unless there is a process for each GPU, or when they do not come.
        """
        launch = launched(environ)
        rank_of(gpus, launch)
        if launch is None or len(gpus) == 1:
            return None
        folder = runtime_folder()
        remove_leftovers(folder)
        peers = cls(Ranks.join(launch, meeting_place(launch, folder, environ)))
        try:
            with peers.telling():
                peers._look_at_cpus()
        except BaseException:
            peers.close()
            raise
        return peers

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def size(self) -> int:
        return self._ranks.size

    def _look_at_cpus(self) -> None:
        """Say so when the launcher keeps rank 0, and so the dataserver, from CPUs that other ranks may use."""
        own, *others = [json.loads(text) for text in self._ranks.gather("CPUs", json.dumps(allowed_cpus()).encode())]
        everywhere = sorted({*own, *(cpu for cpus in others for cpu in cpus)})
        if self.rank == 0 and len(own) < len(everywhere):
            _log.warning(
                "the launcher lets rank 0, and with it the workers of the dataserver, run on CPU %s only, and all ranks"
                " together on %s; start with mpiexec --bind-to none or srun --cpu-bind=none",
                format_cpus(own),
                format_cpus(everywhere),
            )

    def share(self, what: str, text: str = "") -> str:
        """Rank 0's ``text``, on all ranks."""
        return self._ranks.share(what, text)

    def agree(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raise ValueRejected, naming the first difference, unless all ranks have the same ``facts``."""
        self._ranks.agree(what, facts)

    def finish(self, digests: Mapping[str, str | None]) -> None:
        """Compare the digests of what was trained; after it a rank may leave. Raises ValueRejected."""
        hint = "their GPUs, libraries or NCCL do not compute alike, so this result is of no use"
        self._ranks.agree("what they have trained", digests, hint=hint, last=True)

    def connect(self) -> Collectives:
        """NCCL among the ranks, on the GPU that is current. A rank that is lost ends what others wait for."""
        unique = self._ranks.gather("NCCL", new_unique_id() if self.rank == 0 else b"")[0]
        collectives = NcclCollectives.connect(unique, self.rank, self.size)
        self._ranks.on_failure(collectives.abort)
        return collectives

    def combine(self, digests: list[bytes]) -> list[bytes]:
        """The digest of each step: of the digests of its batches, in the order of the ranks."""
        own = self._ranks.gather("batches", b"".join(digests))
        if len({len(part) for part in own}) > 1:
            counts = ", ".join(str(len(part) // DIGEST_BYTES) for part in own)
            raise RankFailed(f"the ranks are not in step: they have trained on {counts} batches since the last time")
        starts = range(0, len(own[0]), DIGEST_BYTES)
        return [chain_digest([part[at : at + DIGEST_BYTES] for part in own]) for at in starts]

    def check(self) -> None:
        """Raise RankFailed when another rank is lost."""
        self._ranks.check()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error inside is told to the others; if one of them had failed before, theirs is raised instead."""
        try:
            yield
        except RankFailed:
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self._ranks.check(NEWS_SECONDS)
            interrupted = isinstance(error, KeyboardInterrupt)
            self._ranks.fail("interrupted" if interrupted else str(error) or type(error).__name__)
            raise

    def close(self) -> None:
        """Leave the others. May be called again."""
        self._ranks.close()
