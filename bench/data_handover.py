"""What it costs the consumer to take a batch that is ready and give it back (µs), as medians of many hand-overs.

The peer is a DataLoader whose worker makes an empty batch of that size. That no copy is made is shown by the tests: the
arrays of a batch are the slots of the ring.
"""

from __future__ import annotations

from bench.harness import TORCH_ENV, Contender, run_bench
from bench.pictures import packed_photos


def main() -> None:
    packed = ["--folder", str(packed_photos("RAW"))]
    ours = [Contender("ours, 64 x 224 x 224 x 3 fp32", "bench.ours.handover", packed, False, 1)]
    peers = [Contender("DataLoader, one worker", "bench.peers.torch_handover", [], True, 1, TORCH_ENV)]
    run_bench("data_handover", "us", ours, peers, rounds=7, higher_is_better=False)


if __name__ == "__main__":
    main()
