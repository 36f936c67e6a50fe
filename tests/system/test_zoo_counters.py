"""Law 3 on networks: a step allocates nothing, packs weights once per use, and validation packs nothing."""

from __future__ import annotations

import pytest

from bench.zoo_counters import count


@pytest.mark.parametrize(("model", "half"), [("lenet5", False), ("resnet18_cifar", True), ("mobilenet_v2_cifar", True)])
def test_a_step_of_a_network_allocates_nothing_and_reorders_only_what_has_changed(model: str, half: bool) -> None:
    counters = count(model, half)
    assert counters.calls > 20
    assert counters.packs > 0  # the counter counts
    assert (counters.twice, counters.val_packs, counters.arena_allocations) == (0, 0, 0)
    assert counters.python_growth < 1 << 10
    assert counters.heap_growth < 1 << 14  # what Python and ctypes turn over; a step's own buffers would be far more
