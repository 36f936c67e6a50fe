"""Which algorithm runs a convolution: a rule by shape and element type, or a choice that was measured (``tuning``).

The rule is fixed and no timing at capture, so that the same machine always runs the same code (law 2). What it says was
measured with ``python -m bench.conv --candidates`` on two Zen 4 cores with AVX512-BF16, of which one multiplies 118
GFLOP/s in fp32 and 236 in bf16; there the library's own convolution is at 95 % of that for all but weight gradients.
More than the peak comes only from fewer multiplications. With AMX, which has not been measured, bf16 is the library's
but for weight gradients, where it is known to be slow:

* fp32, 3x3 of stride 1: Winograd's F(4x4), 2.7 times the library (a quarter of the multiplications).
* bf16, 3x3 of stride 1: Winograd's F(2x2) in bf16, 1.4 to 1.8 times the library. F(4x4) in fp32 is more exact, and
  slower where there are many channels; it serves a CPU with AVX-512 that does not multiply bf16.
* bf16, other weight gradients: one product over unfolded patches, 1 to 1.9 times the library, most where the image is
  small (not for few outputs, where unfolding takes too large a part).
* everything else: the library.
"""

from __future__ import annotations

from typing import Any, cast

from renaissance.backend.convolution import Direction
from renaissance.backend.cpu import tuning
from renaissance.backend.cpu.conv_algorithms import (
    BackwardData,
    BackwardWeight,
    Forward,
    Job,
    LibraryBackwardData,
    LibraryBackwardWeight,
    LibraryForward,
    WidenedBackwardData,
    WidenedBackwardWeight,
    WidenedForward,
)
from renaissance.backend.cpu.conv_unfold import UnfoldBackwardWeight
from renaissance.backend.cpu.conv_winograd import WinogradBackwardData, WinogradBackwardWeight, WinogradForward
from renaissance.backend.cpu.conv_winograd_2x2 import (
    SmallWinogradBackwardData,
    SmallWinogradBackwardWeight,
    SmallWinogradForward,
)
from renaissance.backend.cpu.onednn import onednn

CANDIDATES: dict[Direction, tuple[Any, ...]] = {
    Direction.FORWARD: (WinogradForward, SmallWinogradForward, LibraryForward, WidenedForward),
    Direction.DATA: (WinogradBackwardData, SmallWinogradBackwardData, LibraryBackwardData, WidenedBackwardData),
    Direction.WEIGHT: (
        WinogradBackwardWeight, SmallWinogradBackwardWeight, UnfoldBackwardWeight, LibraryBackwardWeight,
        WidenedBackwardWeight,
    ),
}  # fmt: skip
"""Classes of algorithms by direction."""
FEW_OUTPUTS = 128
"""With fewer output channels unfolding a kernel of several taps does not pay."""
LEAST_TILES = 32
"""With fewer tiles transforming the weights takes longer than what it saves."""


def forward(job: Job) -> Forward:
    """The algorithm for CONV_FWD and CONV_INF."""
    return cast("Forward", choose(job))


def backward_data(job: Job) -> BackwardData:
    """The algorithm for CONV_BWD_DATA."""
    return cast("BackwardData", choose(job))


def backward_weight(job: Job) -> BackwardWeight:
    """The algorithm for CONV_BWD_WEIGHT."""
    return cast("BackwardWeight", choose(job))


def choose(job: Job) -> Forward | BackwardData | BackwardWeight:
    """The algorithm of a job, made: the measured choice where one is in use, else the rule's."""
    classes = supported(job)
    name = tuning.chosen(job, classes)
    chosen = next((a for a in classes if a.name == name), classes[0])
    made: Forward | BackwardData | BackwardWeight = chosen(job)
    return made


def supported(job: Job) -> list[Any]:
    """Classes of algorithms that can run a job; the first is the rule's."""
    able = [a for a in CANDIDATES[job.direction] if a.supports(job)]
    return sorted(able, key=lambda a: _rank(job, str(a.name)))


def _rank(job: Job, name: str) -> int:
    """The rule: lower is better."""
    s = job.shape
    library = {"onednn": 3, "onednn fp32": 5}.get(name)
    if library is not None:
        has_tiles = job.half and job.direction is not Direction.WEIGHT and "amx" in onednn().isa
        return 0 if has_tiles and name == "onednn" else library
    if name == "unfold":
        return 2 if s.r * s.s == 1 or s.k >= FEW_OUTPUTS else 4
    tile = 4 if name == "winograd 4x4" else 2
    down, across = -(-s.ho // tile), -(-s.wo // tile)
    useful = 3 * s.ho * s.wo >= 2 * tile * tile * down * across  # less than a third of the results is thrown away
    return int(job.half and tile == 4) if useful and s.n * down * across >= LEAST_TILES else 4
