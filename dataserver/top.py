"""``dataserver top``: a live view of sessions, workers and memory in the terminal, or one frame of it as text.

Needs rich (the extra ``top``). It outlives the daemon: while none answers it says so and goes on asking.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from renaissance.core.errors import DataServerError, RenaissanceError
from renaissance.data.client import Access, server_stats

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

ASK_SECONDS = 5.0
TEXT_WIDTH = 160
"""Columns of a frame that is not shown on a terminal."""

_WAITS = {
    "consumer": "for the consumer",
    "workers": "for the workers",
    "members": "for members",
    "": "-",
}


def run_top(address: str, interval: float, once: bool, access: Access) -> None:
    """Show frames until Ctrl-C, or print one.

    Raises RenaissanceError without rich, DataServerError when ``once`` is asked for and nobody answers.
    """
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise RenaissanceError("dataserver top needs rich: pip install 'renaissance[top]'") from None
    if once:
        frame = render(server_stats(address, ASK_SECONDS, access))
        width = None if sys.stdout.isatty() else TEXT_WIDTH
        Console(file=sys.stdout, width=width, highlight=False).print(frame)
        return
    with Live(_ask(address, access), screen=True, auto_refresh=False) as live:
        while True:
            live.update(_ask(address, access), refresh=True)
            time.sleep(interval)


def _ask(address: str, access: Access) -> RenderableType:
    try:
        return render(server_stats(address, ASK_SECONDS, access))
    except DataServerError as error:
        return f"{error}\n\nAsking again until one answers; Ctrl-C ends this."


def render(stats: dict[str, Any]) -> RenderableType:
    """One frame of ``server_stats``."""
    from rich.console import Group
    from rich.text import Text

    sessions = stats["sessions"]
    rate = sum(s["samples_per_second"] for s in sessions)
    head = (
        f"dataserver {stats['version']}, pid {stats['pid']}, up {_duration(stats['uptime_seconds'])}, "
        f"{', '.join(stats['datasets'])}",
        f"memory: data {_size(stats['dataset_bytes'])}, rings {_size(stats['ring_bytes'])} of "
        f"{_size(stats['memory_limit_bytes'])}; the daemon itself {_size(stats['own_bytes'])}",
        f"{len(sessions)} sessions open, {stats['sessions_opened']} opened, {stats['sessions_failed']} failed; "
        f"{rate:,.0f} samples/s, {stats['samples']:,} delivered, {stats['corrupt_occurrences']} corrupt",
    )
    parts: list[RenderableType] = [Text(line) for line in head]
    parts += [Text(_loading(load)) for load in stats["loading"]]
    if stats["digest_failures"]:
        parts.append(Text(f"{stats['digest_failures']} digest files failed; see the log", style="bold red"))
    parts.append(_session_table(sessions))
    if any(len(s["members"]) > 1 for s in sessions):
        parts.append(_member_table(sessions))
    parts.append(_worker_table(stats["workers"]))
    return Group(*parts)


def _loading(load: dict[str, Any]) -> str:
    done, total = load["done_bytes"], load["total_bytes"]
    how_far = f"{100 * done // total} % of {_size(total)}" if total else "reading its index"
    return f"loading {load['dataset']} {load['split']}: {how_far}"


def _session_table(sessions: list[dict[str, Any]]) -> RenderableType:
    columns = "session,data set,batch,rank,epoch,at,samples/s,ring,waits,corrupt,pid"
    table = _table(*columns.split(","))
    for s in sessions:
        table.add_row(
            str(s["session"]),
            f"{s['dataset']} {s['split']}" + (f" ({s['share']})" if s["share"] else ""),
            f"{s['batch_size']} {s['dtype']}",
            f"{s['rank']}/{s['world_size']}",
            str(s["epoch"]),
            f"{s['batch']}/{s['batches_per_epoch']}",
            f"{s['samples_per_second']:,.0f}",
            ring_picture(s["prepared"], s["held"], s["free"]),
            _WAITS[s["waits_for"]],
            str(s["corrupt"]),
            ",".join(str(m["consumer_pid"]) for m in s["members"] if m["state"] == "reading") or "-",
        )
    return table


def ring_picture(prepared: int, held: int, free: int) -> str:
    """``##==..``: prepared batches, held by the consumer, empty."""
    return "#" * prepared + "=" * held + "." * free


def _member_table(sessions: list[dict[str, Any]]) -> RenderableType:
    table = _table("group", "member", "state", "pid", "taken", "held", "blocked")
    for s in sessions:
        for m in s["members"] if len(s["members"]) > 1 else ():
            pid = str(m["consumer_pid"] or "-")
            blocked = f"{m['wait_seconds']:.1f} s" + (", now" if m["waiting"] else "")
            table.add_row(s["share"], str(m["member"]), m["state"], pid, str(m["taken"]), str(m["held"]), blocked)
    return table


def _worker_table(workers: list[dict[str, Any]]) -> RenderableType:
    table = _table("worker", "pid", "state", "session", "age", "restarts", "memory", "own")
    for w in workers:
        table.add_row(
            str(w["worker"]),
            str(w["pid"] or "-"),
            w["state"],
            str(w["session"] or "-"),
            _duration(w["age_seconds"]),
            str(w["restarts"]),
            _size(w["rss_bytes"]),
            _size(w["own_bytes"]),
        )
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.ASCII, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole % 60:02d} s"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
