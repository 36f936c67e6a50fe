"""What the daemon says about itself: sessions, workers, memory, loads. Asking waits for nothing."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path

from dataserver.digests import DigestFolder, stored_format, stored_level
from dataserver.hub import Hub
from dataserver.pool import WorkerSlot
from dataserver.session import Member, Session
from dataserver.store import DatasetStore
from renaissance.data.recipe import Recipe
from renaissance.data.wire import dataserver_pb2 as pb

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATES = {"R": "running", "S": "sleeping", "D": "disk", "T": "stopped", "t": "stopped"}


def build_stats(hub: Hub, store: DatasetStore, digests: DigestFolder | None, started: float) -> pb.StatsReply:
    """In the hub's thread. ``started``: monotonic time of the daemon's start."""
    now = time.monotonic()
    rss, own = process_memory(os.getpid())
    sessions = [session_stats(session, now) for session in hub.sessions]
    return pb.StatsReply(
        uptime_seconds=now - started,
        sessions=sessions,
        workers=[_worker_stats(hub, slot, now) for slot in hub.workers],
        dataset_bytes=store.loaded_bytes,
        sessions_opened=hub.sessions_opened,
        sessions_failed=hub.sessions_failed,
        loading=[
            pb.LoadProgress(dataset=p.name, split=p.split, done_bytes=p.done_bytes, total_bytes=p.total_bytes)
            for p in store.progress()
        ],
        batches=hub.batches,
        samples=hub.samples,
        corrupt_occurrences=hub.corrupt_occurrences,
        rss_bytes=rss,
        own_bytes=own,
        ring_bytes=sum(session.ring_bytes for session in sessions),
        digest_files=digests.written if digests else 0,
        digest_failures=digests.failed if digests else 0,
    )


def session_stats(session: Session, now: float) -> pb.SessionStats:
    spec, layout = session.spec, session.spec.layout
    fingerprint, decode = _recipe_facts(spec.recipe_json)
    prepared, held, free = session.occupancy()
    batches_per_second, samples_per_second = session.rates.per_second()
    return pb.SessionStats(
        session=session.number,
        dataset=spec.dataset_name,
        split=spec.split,
        dtype=layout.dtype.name.lower(),
        batch_size=layout.batch_size,
        depth=layout.depth,
        rank=spec.rank,
        world_size=spec.world_size,
        seed=spec.seed,
        consumer_pid=session.consumer_pid,
        epoch=session.epoch,
        batch=session.index,
        batches=session.batches,
        samples=session.samples,
        seconds=now - session.opened,
        ring_bytes=layout.total_bytes,
        epoch_digests=[pb.EpochDigest(epoch=e, digest=d) for e, d in session.epoch_digests],
        recipe=fingerprint,
        prepared=prepared,
        held=held,
        free=free,
        waits_for=session.waits_for(),
        samples_per_second=samples_per_second,
        batches_per_second=batches_per_second,
        corrupt=session.corrupt.distinct,
        corrupt_occurrences=session.corrupt.occurrences,
        order=spec.order,
        on_corrupt=spec.on_corrupt,
        load=spec.dataset.load,
        format=stored_format(spec),
        encoding=spec.dataset.encoding,
        level=stored_level(spec),
        decode=decode if session.decoder else "",
        decoder=session.decoder,
        share=session.share,
        members=[_member_stats(session, member) for member in session.members],
        batches_per_epoch=spec.batches_per_epoch,
        num_samples=spec.dataset.samples,
    )


@lru_cache(maxsize=256)
def _recipe_facts(recipe_json: str) -> tuple[str, str]:
    """(fingerprint, decode mode); every second for every session is too often to parse a recipe."""
    recipe = Recipe.from_json(recipe_json)
    return recipe.fingerprint(), recipe.decode


def _member_stats(session: Session, member: Member) -> pb.MemberStats:
    taken, waiting, seconds = session.member_words(member.number)
    return pb.MemberStats(
        member=member.number,
        state=member.state,
        consumer_pid=member.pid,
        taken=taken,
        held=session.held_by(member.number),
        waiting=waiting and member.consumer is not None,
        wait_seconds=seconds,
    )


def _worker_stats(hub: Hub, slot: WorkerSlot, now: float) -> pb.WorkerStats:
    rss, own = process_memory(slot.pid) if slot.pid else (0, 0)
    return pb.WorkerStats(
        worker=slot.number,
        pid=slot.pid,
        restarts=slot.restarts,
        session=hub.current_session(slot),
        age_seconds=now - slot.started,
        rss_bytes=rss,
        own_bytes=own,
        state=process_state(slot.pid) if slot.pid else "starting",
    )


def process_memory(pid: int) -> tuple[int, int]:
    """(resident bytes, those of them that are not shared); zeros once the process is gone."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return 0, 0
    return resident * _PAGE_BYTES, (resident - shared) * _PAGE_BYTES


def process_state(pid: int) -> str:
    """A word for the scheduler's state of a process, "gone" when there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return "gone"
    return _STATES.get(after_name.split()[0], "gone")
