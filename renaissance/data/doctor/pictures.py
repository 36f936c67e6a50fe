"""Pictures one by one: can they be decoded, are they what their names say, and what is unusual about them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from renaissance.core.errors import CorruptSample
from renaissance.data.doctor.files import Stored
from renaissance.data.doctor.findings import EXAMPLES, Report, Severity
from renaissance.data.jpeg import Decoder, PictureHeader, read_header
from renaissance.data.sources import Encoding, Source, SourceSpec

HUGE_PIXELS = 12_000_000
TINY_SIDE = 16
LONG = 4
"""Long side over short side from which a crop shows little of a picture."""
CHUNK = 64

Tick = Callable[[int], None]
"""Called with the number of samples that were looked at since the last call."""


@dataclass(frozen=True, slots=True)
class _Trait:
    severity: Severity
    text: str
    advice: str = ""


TRAITS = {
    "corrupt": _Trait(
        Severity.PROBLEM,
        "pictures cannot be decoded",
        "replace them, or choose what becomes of them: on_corrupt substitute or blank",
    ),
    "not a JPEG": _Trait(Severity.NOTE, "pictures are PNG under the name of a JPEG; they are read as what they are"),
    "turned": _Trait(
        Severity.WARNING,
        "pictures have an Exif orientation, which is not applied (as in torchvision): they are used as stored",
        "turn them for good (exiftran, jpegtran) if the model will be shown upright ones",
    ),
    "tiny": _Trait(Severity.WARNING, f"pictures have a side of at most {TINY_SIDE} pixels; they become blur"),
    "huge": _Trait(Severity.NOTE, f"pictures have more than {HUGE_PIXELS // 10**6} megapixels; each delays its batch"),
    "long": _Trait(Severity.NOTE, f"pictures are more than {LONG} times as long as wide"),
    "grey": _Trait(Severity.NOTE, "pictures are grey; the value is used for all three channels"),
    "CMYK": _Trait(Severity.NOTE, "pictures are CMYK or YCCK; they are converted as Pillow does, and slowly"),
    "alpha": _Trait(Severity.NOTE, "pictures have transparency, which is dropped"),
    "palette": _Trait(Severity.NOTE, "pictures have a palette; its colours are used"),
    "16 bit": _Trait(Severity.NOTE, "pictures have 16 bits a value; the high 8 are used"),
    "progressive": _Trait(
        Severity.NOTE, "pictures are progressive JPEG, which takes two to three times as long to decode"
    ),
    "arithmetic": _Trait(
        Severity.NOTE, "pictures are arithmetic-coded JPEG, which takes several times as long to decode"
    ),
}
"""What a picture can be, in the order in which it is reported."""


def traits_of(header: PictureHeader) -> Iterator[str]:
    """The keys of ``TRAITS`` that hold for a picture that can be decoded."""
    short, long = sorted((header.width, header.height))
    kinds = {
        "not a JPEG": header.kind != "jpeg",
        "turned": header.orientation not in (0, 1),
        "tiny": short <= TINY_SIDE,
        "huge": header.pixels > HUGE_PIXELS,
        "long": long > LONG * short,
        "grey": header.color.startswith("gray"),
        "CMYK": header.color in ("cmyk", "ycck"),
        "alpha": header.color.endswith("+alpha"),
        "palette": header.color == "palette",
        "16 bit": header.bits == 16,
        "progressive": header.progressive,
        "arithmetic": header.arithmetic,
    }
    return (trait for trait, holds in kinds.items() if holds)


@dataclass(slots=True)
class Tally:
    """What was seen so far; one per thread, added up in the end."""

    seen: int = 0
    traits: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # (sample, where or what) by trait
    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)

    def note(self, trait: str, sample: int, text: str) -> None:
        """Count a trait; the first few of each keep their place."""
        self.traits[trait] += 1
        kept = self.places.setdefault(trait, [])
        if len(kept) < EXAMPLES:
            kept.append((sample, text))

    def add(self, other: Tally) -> None:
        """Take over what another thread has seen."""
        self.seen += other.seen
        self.traits += other.traits
        for trait, places in other.places.items():
            self.places[trait] = sorted(self.places.get(trait, []) + places)[:EXAMPLES]
        self.widths += other.widths
        self.heights += other.heights


class _Examiner(threading.local):
    """Reader and decoder of the thread that asks; made when a thread asks for the first time."""

    def __init__(self, spec: SourceSpec, index: memoryview, opened: list[Source]) -> None:
        self.source = Source.attach(spec, index)
        opened.append(self.source)
        self.decoder = Decoder()

    def look(self, sample: int, tally: Tally) -> None:
        tally.seen += 1
        try:
            data = np.frombuffer(self.source.read(sample), np.uint8)
        except CorruptSample as error:  # it names its place itself
            tally.note("corrupt", sample, str(error))
            return
        try:
            if self.source.spec.encoding is Encoding.RAW:
                width, height = (int(v) for v in data[:8].view("<u4"))
            else:
                header = read_header(data)
                self.decoder.decode(data, header)
                width, height = header.width, header.height
                for trait in traits_of(header):
                    tally.note(trait, sample, self.source.describe(sample))
        except CorruptSample as error:
            tally.note("corrupt", sample, f"{self.source.describe(sample)}: {error}")
            return
        tally.widths.append(width)
        tally.heights.append(height)


def examine_pictures(
    stored: Stored, samples: Sequence[int], threads: int, report: Report, tick: Tick | None = None
) -> None:
    """Read and decode ``samples`` of a split and report what is wrong or unusual."""
    assert stored.source is not None  # images of one size have nothing to decode
    index = memoryview(bytearray(stored.source.spec.index_bytes))
    stored.source.write_index(index)
    opened: list[Source] = []
    examiner, total = _Examiner(stored.source.spec, index, opened), Tally()

    def look(chunk: Sequence[int]) -> Tally:
        tally = Tally()
        for sample in chunk:
            examiner.look(sample, tally)
        return tally

    chunks = [samples[i : i + CHUNK] for i in range(0, len(samples), CHUNK)]
    try:
        with ThreadPoolExecutor(max(1, threads)) as pool:
            for tally in pool.map(look, chunks):
                total.add(tally)
                if tick is not None:
                    tick(tally.seen)
    finally:
        for source in opened:
            source.close()
    _report(stored, total, report)


def _report(stored: Stored, tally: Tally, report: Report) -> None:
    facts = report.facts[stored.split]
    facts["examined"] = tally.seen
    if tally.widths:
        widths, heights = np.array(tally.widths), np.array(tally.heights)
        facts["median_size"] = [int(np.median(widths)), int(np.median(heights))]
        facts["largest_size"] = [
            int(side) for side in max(zip(widths, heights, strict=True), key=lambda s: s[0] * s[1])
        ]
        facts["smallest_size"] = [
            int(side) for side in min(zip(widths, heights, strict=True), key=lambda s: s[0] * s[1])
        ]
    for name, trait in TRAITS.items():
        if count := tally.traits[name]:
            examples = [text for _, text in sorted(tally.places[name])]
            text = f"{count} of {tally.seen} {trait.text}"
            report.add(trait.severity, stored.split, text, trait.advice, examples, count)
