"""``renaissance doctor``: looks at a data folder and this machine before the first epoch, and says what is wrong.

Exit code 1 when there is a problem; warnings and notes leave it at 0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from renaissance.core.errors import ValueRejected
from renaissance.data.catalogue import dataset_info
from renaissance.data.doctor import RESOLUTION, SAMPLES, Options, Report, Severity, examine
from renaissance.data.sources.source import FORMATS

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("dataset", metavar="NAME", help="name of the data set, for example imagenet")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder with its files")
    parser.add_argument(
        "--format", choices=FORMATS, default="auto", help="which files (default: packed, else published)"
    )
    parser.add_argument("--level", metavar="L", help="which packed level of pictures: 0 to 3 or RAW")
    parser.add_argument(
        "--sample", type=int, metavar="N", help=f"pictures of each split that are decoded (default: {SAMPLES})"
    )
    parser.add_argument("--all", action="store_true", help="decode every picture, and compare whole packed files")
    parser.add_argument("--duplicates", action="store_true", help="look for samples stored twice; reads the whole set")
    parser.add_argument("--rate", type=float, metavar="R", help="samples per second that the trainer needs")
    parser.add_argument(
        "--resolution", type=int, metavar="S", help=f"of the recipe that is timed (default: {RESOLUTION})"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(arguments: argparse.Namespace) -> int:
    """Examine, print, and return 1 when there is a problem."""
    if arguments.all and arguments.sample is not None:
        raise ValueRejected(f"--sample {arguments.sample} and --all contradict each other; drop one of the two")
    if dataset_info(arguments.dataset).pixels:
        for option in ("sample", "all", "resolution"):
            value = getattr(arguments, option)
            if value is not None and value is not False:  # 0 is a value
                raise ValueRejected(f"--{option} is for pictures; images of one size are always all looked at")
    level = arguments.level
    options = Options(
        format=arguments.format,
        level=int(level) if level is not None and level.isdecimal() else level,
        samples=None if arguments.all else SAMPLES if arguments.sample is None else arguments.sample,
        duplicates=arguments.duplicates,
        rate=arguments.rate,
        resolution=RESOLUTION if arguments.resolution is None else arguments.resolution,
    )
    with _Bars() as bars:
        report = examine(arguments.dataset, arguments.folder, options, bars.show)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2, sort_keys=True))
    else:
        _print(report)
    return 1 if report.number_of(Severity.PROBLEM) else 0


def _print(report: Report) -> None:
    print(f"{report.dataset} in {report.folder}")
    for subject, facts in report.facts.items():
        print(f"  {subject:<8}{_facts(subject, facts)}")
    for severity in Severity:
        for finding in report.findings:
            if finding.severity is severity:
                advice = f"; {finding.advice}" if finding.advice else ""
                print(f"{severity.value:<8}  {finding.subject}: {finding.text}{advice}")
                for example in finding.examples:
                    print(f"            {example}")
                if len(finding.examples) < finding.count and finding.examples:
                    print(f"            and {finding.count - len(finding.examples)} more")
    counts = [(report.number_of(severity), severity.value) for severity in Severity]
    print(", ".join(f"{n} {name}{'' if n == 1 else 's'}" for n, name in counts))


def _facts(subject: str, facts: dict[str, Any]) -> str:
    """One line about a subject of the report."""
    f = facts
    if subject == "cores":
        quota = "" if f["quota"] is None else f", quota {f['quota']:g}"
        return f"{f['usable']} usable (CPUs {f['cpus']}, {f['physical']} physical{quota}), load {f['load_average']:g}"
    if subject == "limits":
        return f"{f['open_files']} open files; /dev/shm has {_bytes(f['dev_shm_bytes'])} and is not used"
    if subject == "memory":
        index = _bytes(f["index_bytes"])
        return (
            f"{_bytes(f['available_bytes'])} available; the set takes {_bytes(f['set_bytes'])}, its index {index}: "
            f"load {f['load']}"
        )
    if subject == "disk":
        return f"{_bytes(f['free_bytes'])} of {_bytes(f['total_bytes'])} free"
    if subject == "rate":
        per_core, total = f["samples_per_second_and_core"], f["samples_per_second"]
        wanted = "" if f["wanted"] is None else f"; {f['wanted']:g} wanted, headroom {f['headroom']:g}"
        return f"{per_core:.0f} samples/s on a core, {total:.0f} on {f['cores']} ({f['recipe']}){wanted}"
    return _split(f)


def _split(f: dict[str, Any]) -> str:
    level = "" if f["level"] is None else f" level {f['level']}"
    stored = f"{f['format']}{level}, {_bytes(f['stored_bytes'])}"
    low, high = f["smallest_class"], f["largest_class"]
    line = f"{f['samples']} samples, {f['classes']} classes of {low if low == high else f'{low} to {high}'}, {stored}"
    if "median_size" in f:
        median, least, most = ("x".join(map(str, f[f"{which}_size"])) for which in ("median", "smallest", "largest"))
        line += f"; {f['examined']} decoded, {median} pixels" + (f" ({least} to {most})" if least != most else "")
    return line


def _bytes(count: float) -> str:
    for unit in UNITS:
        if count < 1024 or unit == UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


class _Bars:
    """One progress bar after the other, drawn only on a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._what = ""

    def show(self, what: str, done: int, total: int) -> None:
        if self._bar is None or what != self._what:
            self._close()
            self._what = what
            self._bar = tqdm(total=total, desc=what, disable=None, leave=False)
        self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()
