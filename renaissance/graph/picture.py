"""What a drawing of a graph consists of, as plain data, and where its boxes stand.

Rows count downwards over the whole picture; a column has as many lanes side by side as its fullest row has boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

EdgePairs = Sequence[tuple[int, int]]


class EdgeStyle(IntEnum):
    DATA = 0
    SAVED = 1
    """From the forward to the backward pass: a value that is kept."""


@dataclass(frozen=True, slots=True)
class Box:
    """One op or layer. ``family`` chooses the colour; ``hint`` is shown where the viewer can."""

    key: int
    title: str
    detail: str
    family: str
    column: int
    row: int
    lane: int
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    source: int
    target: int
    style: EdgeStyle = EdgeStyle.DATA


@dataclass(frozen=True, slots=True)
class Band:
    """A background behind the rows of a column that belong together."""

    label: str
    column: int
    first_row: int
    last_row: int


@dataclass(frozen=True, slots=True)
class Panel:
    """A list of lines beside the columns, for what is a sequence and not a graph."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    columns: tuple[str, ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    bands: tuple[Band, ...] = ()
    panels: tuple[Panel, ...] = ()

    def lanes(self, column: int) -> int:
        """Boxes side by side in the fullest row of a column, at least 1."""
        return max((box.lane + 1 for box in self.boxes if box.column == column), default=1)

    @property
    def rows(self) -> int:
        return max((box.row + 1 for box in self.boxes), default=1)


def ranks(keys: Iterable[int], edges: EdgePairs) -> Mapping[int, int]:
    """Length of the longest path that leads to each key; ``keys`` in topological order, edges among them only."""
    rank: dict[int, int] = {}
    before: dict[int, list[int]] = {}
    for source, target in edges:
        before.setdefault(target, []).append(source)
    for key in keys:
        rank[key] = 1 + max((rank[source] for source in before.get(key, ()) if source in rank), default=-1)
    return rank


def lanes(keys: Sequence[int], rows: Mapping[int, int], edges: EdgePairs) -> Mapping[int, int]:
    """A lane for every key of a topological order: in each row, the one with the longest way to go comes first.

    So the stem of a residual sum runs straight down and its shortcut, which is shorter, stands beside it, in a lane
    that stays free as far as the edges of the shortcut lead. Edges to other keys are ignored.
    """
    known = set(keys)
    inner = [(source, target) for source, target in edges if source in known and target in known]
    to_go = ranks(list(reversed(keys)), [(target, source) for source, target in inner])
    reached: dict[int, list[int]] = {key: [] for key in keys}
    for source, target in inner:
        reached[source].append(rows[target])
        reached[target].append(rows[source])
    taken: set[tuple[int, int]] = set()
    lane: dict[int, int] = {}
    for key in sorted(keys, key=lambda k: (rows[k], -to_go[k], k)):
        row = rows[key]
        if (row, 0) not in taken:
            lane[key], needed = 0, {row}
        else:
            ends = [end + 1 if end < row else end - 1 for end in reached[key] if end != row]
            needed = set(range(min([row, *ends]), max([row, *ends]) + 1))
            lane[key] = next(n for n in itertools.count(1) if not any((r, n) in taken for r in needed))
        taken |= {(r, lane[key]) for r in needed}
    return lane
