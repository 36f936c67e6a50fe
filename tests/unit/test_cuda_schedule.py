"""Events between streams: every dependence is kept, none is waited for twice, and the end waits for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from renaissance.backend.cuda.schedule import Schedule, schedule
from renaissance.core.enums import StreamKind

ORIGIN = StreamKind.COMP_1
END = -1


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[StreamKind], list[set[int]]]:
    """Streams of up to 14 items, the first on the origin, and what each depends on."""
    count = draw(st.integers(1, 14))
    streams = [ORIGIN, *(draw(st.sampled_from(list(StreamKind))) for _ in range(count - 1))]
    before = [draw(st.sets(st.integers(0, at - 1), max_size=4)) if at else set() for at in range(count)]
    return streams, before


def edges(streams: list[StreamKind], found: Schedule) -> set[tuple[int, int]]:
    """(earlier, later) by the order of a stream, by an event, and by the joins at the end of the origin."""
    last: dict[StreamKind, int] = {}
    result = {(wait, at) for at, step in enumerate(found.steps) for wait in step.waits}
    for at, stream in enumerate(streams):
        if stream in last:
            result.add((last[stream], at))
        last[stream] = at
    return result | {(last[ORIGIN], END), *((join, END) for join in found.joins)}


def reached(graph: set[tuple[int, int]], start: int) -> set[int]:
    """What comes after ``start``."""
    found, ahead = set[int](), [start]
    while ahead:
        at = ahead.pop()
        new = {later for earlier, later in graph if earlier == at} - found
        found |= new
        ahead += new
    return found


@given(programs())
def test_events_keep_every_dependence_and_none_could_be_left_out(
    program: tuple[list[StreamKind], list[set[int]]],
) -> None:
    streams, before = program
    found = schedule(streams, before, ORIGIN)
    graph = edges(streams, found)
    items = range(len(streams))
    needs = (
        {(0, at) for at in items[1:]}
        | {(need, at) for at in items for need in before[at]}
        | {(at, END) for at in items}
    )
    after = {at: reached(graph, at) for at in items}
    assert not [(a, b) for a, b in needs if b not in after[a]]
    waits = {(wait, at) for at, step in enumerate(found.steps) for wait in step.waits} | {(j, END) for j in found.joins}
    for wait in waits:
        rest = graph - {wait}
        assert wait[1] not in reached(rest, wait[0]), f"{wait} is known without its event"
    assert found.recorded == {earlier for earlier, _ in waits}


def test_a_program_on_one_stream_has_no_events() -> None:
    found = schedule([ORIGIN] * 3, [(), (0,), (0, 1)], ORIGIN)
    assert [step.waits for step in found.steps] == [(), (), ()]
    assert (found.joins, found.recorded) == ((), frozenset())
