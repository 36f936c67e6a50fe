"""Batch norm with ReLU (and residual) on the maps of ResNet-18 and ResNet-50: ours against PyTorch, shape by shape.

    python -m bench.norm [--fp32] [--compile] [--rounds N] [--models resnet18 resnet50]

Both sides stay alive and take turns, one shape and form at a time, over more copies of the tensors than any cache
holds. A row is the fastest call of all rounds. GB/s counts the feature maps that our passes read and write
(``bench.norm_jobs``); the last row of a table is a copy of 64 MB in the same units, which is about what memory gives.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import threading
import time

import numpy as np

from bench.harness import TORCH_STEP_ENV, Contender, cpu_name
from bench.norm_jobs import jobs

THREADS = 2


def copy_rate() -> float:
    """GB/s of reading and writing when THREADS threads copy memory."""
    pairs = [(np.ones(32 << 20, np.uint8), np.ones(32 << 20, np.uint8)) for _ in range(THREADS)]
    best = 0.0
    for _ in range(10):
        workers = [threading.Thread(target=np.copyto, args=(b, a)) for a, b in pairs]
        start = time.perf_counter()
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        best = max(best, 2 * THREADS * (32 << 20) / (time.perf_counter() - start) / 1e9)
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--compile", action="store_true", help="PyTorch's side compiled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    options = parser.parse_args()
    itemsize = 4 if options.fp32 else 2
    shared = ["--threads", str(THREADS), *([] if options.fp32 else ["--bf16"]), "--models", *options.models]
    ours = Contender("ours", "bench.ours.norm", shared, False, THREADS)
    compiled = ["--compile"] if options.compile else []
    peer = Contender("torch", "bench.peers.torch_norm", [*shared, *compiled], True, THREADS, TORCH_STEP_ENV)
    work = jobs(options.models)
    try:
        for contender in (ours, peer):
            contender.start()
        for _ in range(options.rounds * len(work)):
            ours.run_round()
            peer.run_round()
    finally:
        for contender in (ours, peer):
            contender.stop()
    rows = []
    print(f"{cpu_name()}, {THREADS} threads, {'fp32' if options.fp32 else 'bf16'}")
    print(f"{'shape':>18} {'form':>18} {'ours us':>9} {'GB/s':>6} {'torch us':>9} {'ratio':>6}")
    for k, job in enumerate(work):
        mine, theirs = (min(c.values[k :: len(work)]) for c in (ours, peer))
        rate = job.gigabytes(itemsize) / mine * 1e6
        rows.append({"shape": job.shape, "form": job.form, "ours_us": mine, "torch_us": theirs, "gb_s": rate})
        shape = "x".join(map(str, job.shape))
        print(f"{shape:>18} {job.form:>18} {mine:9.0f} {rate:6.1f} {theirs:9.0f} {theirs / mine:6.2f}")
    print(f"{'copy':>18} {'':>18} {'':>9} {copy_rate():6.1f}")
    print(json.dumps({"rows": rows, "versions": {**ours.versions, **peer.versions}}))


if __name__ == "__main__":
    main()
