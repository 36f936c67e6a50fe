"""Samples that are stored twice: inside a split they count double, across the splits they falsify the accuracy."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from renaissance.core.errors import CorruptSample
from renaissance.data.doctor.files import Stored
from renaissance.data.doctor.findings import EXAMPLES, Report, Severity
from renaissance.data.doctor.pictures import Tick

DIGEST_BYTES = 16


def examine_duplicates(splits: Sequence[Stored], report: Report, tick: Tick | None = None) -> None:
    """Compare the stored bytes of all samples: equal size first, then a 128-bit BLAKE2b digest."""
    first: dict[bytes, tuple[int, int]] = {}
    doubled: dict[str, list[str]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    for number, sample, digest in _digests(splits, _candidates(splits), tick):
        known = first.setdefault(digest, (number, sample))
        if known == (number, sample):
            continue
        kind = "both" if known[0] != number else splits[number].split
        counts[kind] += 1
        if len(doubled[kind]) < EXAMPLES:
            doubled[kind].append(f"{_where(splits[known[0]], known[1])} = {_where(splits[number], sample)}")
    for kind, count in counts.items():
        if kind == "both":
            text, advice = f"{count} samples are also in train", "accuracy counts what was learnt by heart; remove them"
            report.add(Severity.WARNING, "val", text, advice, doubled[kind], count)
        else:
            text = f"{count} samples repeat an earlier one of the same split"
            report.add(Severity.NOTE, kind, text, "", doubled[kind], count)


def _candidates(splits: Sequence[Stored]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Samples whose size some other sample has too."""
    sizes = [
        np.full(split.samples, 0) if split.source is None else np.asarray(split.source.sizes, np.int64)
        for split in splits
    ]
    values, numbers = np.unique(np.concatenate(sizes), return_counts=True)
    return [np.flatnonzero(np.isin(size, values[numbers > 1])) for size in sizes]


def _digests(
    splits: Sequence[Stored], candidates: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]], tick: Tick | None
) -> Iterator[tuple[int, int, bytes]]:
    for number, (split, samples) in enumerate(zip(splits, candidates, strict=True)):
        for sample in samples.tolist():
            if tick is not None:
                tick(1)
            try:
                data = split.source.read(sample) if split.source is not None else split.images[sample]  # type: ignore[index]
            except CorruptSample:
                continue  # reported where pictures are looked at
            yield number, sample, hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _where(split: Stored, sample: int) -> str:
    return split.source.describe(sample) if split.source is not None else f"{split.split} sample {sample}"
