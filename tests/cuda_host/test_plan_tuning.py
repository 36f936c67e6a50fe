"""Plans that are chosen by measurement: how, what is kept, what is refused; on the stand-in and with its clock."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cuda_emulator import compiler
from cuda_standin import CudaError, FakeClock, FakeCuda, Tuning, device
from training_bench import Ring, compiled, start

from renaissance.backend.convolution import Direction
from renaissance.backend.cuda.calls import Buffer
from renaissance.backend.cuda.executor import CudaExecutor
from renaissance.backend.cuda.host_memory import HostMemory
from renaissance.backend.cuda.libraries import ConvolutionSpec, ProductSpec
from renaissance.backend.cuda.plan_timer import PATTERN, PlanTimer
from renaissance.backend.cuda.recording import recorded
from renaissance.backend.cuda.tuning import PlanChoices
from renaissance.core.dtype import DType, fp32_from_bf16
from renaissance.core.errors import DeviceError, FormatError, MemoryPlanError, ValueRejected

CONVOLUTION = ConvolutionSpec(Direction.FORWARD, 2, 6, 6, 4, 8, 3, 3, 1, 1, 1, DType.FP16)
PRODUCT = ProductSpec(6, 5, 4, False, True, DType.FP16, DType.FP32)
KEYS = (f"{CONVOLUTION} | stand-in", f"{PRODUCT} | stand-in")
NAMES = ("convolution forward 3x3 4->8", "product 6x5x4")


@dataclass
class Outcome:
    """Of one process: both plans asked for."""

    choices: PlanChoices
    clock: FakeClock
    names: list[str]
    fake: FakeCuda


def asked(path: Path, costs: tuple[float, ...] = (3e-4, 2e-4), **options: Any) -> Outcome:
    clock = FakeClock()
    choices = PlanChoices(path, clock=clock, **options)
    with device(tuning=Tuning(choices, clock, costs)) as opened:
        with opened.planning():
            plans = [opened.convolutions.plan(CONVOLUTION), opened.products.plan(PRODUCT)]
        return Outcome(choices, clock, [plan.name for plan in plans], cast(FakeCuda, opened.runtime))


@pytest.mark.parametrize(
    ("costs", "chosen", "looked_at"),
    [
        ((3e-4, 2e-4), 1, 2),
        ((3e-4, 2.95e-4), 0, 2),  # within the margin
        ((2**-11, 2**-12, 2**-12), 1, 3),  # the earlier of two that are as fast
        ((2e-4, 3e-4, 1.9e-4), 2, 3),
        ((3e-4, 7e-4), 0, 2),
        ((0.6, 0.5, 0.1), 2, 3),  # slow plans are no reason to stop: making them is
        ((1e-4,) * 9 + (1e-5,), 0, 8),
        ((1e-4,), 0, 0),
    ],
)
def test_the_fastest_is_chosen_if_it_is_clearly_faster_than_the_first(
    tmp_path: Path, costs: tuple[float, ...], chosen: int, looked_at: int
) -> None:
    outcome = asked(tmp_path / "plans.json", costs)
    assert outcome.names == [f"{name} #{chosen}" for name in NAMES]
    for name in NAMES:
        assert sum(ran.startswith(name) for ran in outcome.clock.runs) == looked_at
    counts = outcome.fake.counts
    assert counts["malloc"] == counts["free"] == (2 if looked_at else 0), "operands are given back"
    assert counts["graphInstantiate"] == counts["graphExecDestroy"] == counts["graphDestroy"]
    if costs == (3e-4, 7e-4):  # hopeless at first sight, beside four executions in a graph that is launched six times
        assert [outcome.clock.runs[f"{NAMES[1]} #{i}"] for i in (0, 1)] == [3 + 4 * 6, 3]


def test_rounds_alternate_and_their_median_counts(tmp_path: Path) -> None:
    """A disturbance of one plan in one round, and another one of another plan, change nothing."""
    order = list[str]()

    class Disturbed(FakeClock):
        def __init__(self) -> None:
            super().__init__()
            self.before: dict[str, int] = {}

        def __call__(self) -> float:
            ran = [name for name in self.runs if self.runs[name] != self.before.get(name, 0)]
            self.before = dict(self.runs)
            order.extend(name[-1] for name in ran)
            if ran and len(order) in (12, 15):
                self.now += 1.0
            return self.now

    clock = Disturbed()
    choices = PlanChoices(tmp_path / "plans.json", clock=clock)
    with device(tuning=Tuning(choices, clock, (3e-4, 2e-4))) as opened:
        assert opened.products.plan(PRODUCT).name.endswith("#1")
    assert "".join(order) == "000" + "111" + "0" + "1" + "01" * 5
    (times,) = (stored["ms"] for stored in json.loads((tmp_path / "plans.json").read_text())["plans"].values())
    assert [round(value, 5) for value in times.values()] == [0.3, 0.2]


def test_no_further_plan_is_made_when_making_them_takes_too_long() -> None:
    clock, fake, made = FakeClock(), FakeCuda(), list[int]()

    def offers() -> Any:
        for number in range(6):
            clock.now += 9.0 if number == 0 else 0.2  # the first is needed in any case
            made.append(number)
            yield Planned(str(number), fake, clock, 1e-3 / (1 + number))

    with device(fake) as opened:
        plan, _ = PlanTimer(opened.runtime, opened.origin, clock).fastest(offers(), (8, 8, 8))
    assert (plan.name, made) == ("3", [0, 1, 2, 3])


class Planned:
    """A plan that takes time and looks at its operands; executing it raises ``error``, if there is one: in a recording
    only, or else only outside."""

    workspace = 16

    def __init__(
        self, name: str, fake: FakeCuda, clock: FakeClock, cost: float, error: Exception | None = None
    ) -> None:
        self.name, self._fake, self._clock, self._cost, self._error = name, fake, clock, cost, error
        self.fails_in_recording = False
        self.operands: tuple[bytes, ...] = ()

    def execute(self, stream: int, first: Buffer, second: Buffer, out: Buffer, workspace: Buffer) -> None:
        if self._error is not None and self._fake.capturing == self.fails_in_recording:
            raise self._error

        def run() -> None:
            self.operands = tuple(ctypes.string_at(b.ptr, b.nbytes) for b in (first, second, out, workspace))
            self._clock.now += self._cost

        self._fake.warm(id(self), self.name)
        self._fake.library(stream, self.name, run, (), ())


def test_operands_are_finite_numbers_and_no_zeros_whatever_their_type() -> None:
    clock, fake = FakeClock(), FakeCuda()
    plans = [Planned(str(number), fake, clock, 1e-3) for number in range(2)]
    with device(fake) as opened:
        PlanTimer(opened.runtime, opened.origin, clock).fastest(plans, (24, 40, 8))
    assert [len(operand) for operand in plans[1].operands] == [24, 40, 8, 16]
    x = plans[1].operands[0]
    assert set(x) == {PATTERN}
    half, single = np.frombuffer(x, np.float16)[0], np.frombuffer(x, np.float32)[0]
    brain = fp32_from_bf16(np.frombuffer(x, np.uint16))[0]
    for value, smallest in ((half, 2.0**-14), (single, 2.0**-126), (brain, 2.0**-126)):
        assert float(value) ** 2 > smallest, "no denormal, nor is a product"
    assert 1e7 * float(half) ** 2 < 65504


@pytest.mark.parametrize("recording", [False, True])
def test_a_plan_that_fails_is_left_out_and_the_first_one_may_not(recording: bool) -> None:
    clock, fake = FakeClock(), FakeCuda()
    with device(fake) as opened:
        timer = PlanTimer(opened.runtime, opened.origin, clock)
        good = Planned("good", fake, clock, 1e-3)
        bad = Planned("bad", fake, clock, 1e-4, DeviceError("cuDNN failed"))
        bad.fails_in_recording = recording
        plan, times = timer.fastest([good, bad], (8, 8, 8))
        assert plan is good
        assert times == {"good": pytest.approx(1e-3), "bad": None}
        with pytest.raises(DeviceError, match="cuDNN failed"):
            timer.fastest([bad, good], (8, 8, 8))
        for taken, given in (("malloc", "free"), ("graphInstantiate", "graphExecDestroy")):
            assert fake.counts[taken] == fake.counts[given], taken


def test_memory_that_is_lacking_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()

    def full(size: int) -> int:
        raise CudaError("MemoryAllocation", "out of memory")

    monkeypatch.setattr(fake, "malloc", full)
    plans = [Planned(name, fake, FakeClock(), 1e-3) for name in "ab"]
    with device(fake) as opened, pytest.raises(MemoryPlanError, match=r"no 3 MiB to measure plans in: .*out of memory"):
        PlanTimer(opened.runtime, opened.origin, FakeClock()).fastest(plans, (1 << 20,) * 3)


def test_a_choice_is_measured_once_and_then_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plans.json"
    first = asked(path)
    assert first.choices.measured == 2
    stored = json.loads(path.read_text())
    assert stored["format"] == 1
    assert sorted(stored["plans"]) == sorted(KEYS)
    assert stored["plans"][KEYS[1]] == {"plan": f"{NAMES[1]} #1", "ms": {f"{NAMES[1]} #0": 0.3, f"{NAMES[1]} #1": 0.2}}
    assert first.choices.text().startswith(f"{path}: 2 plans, 2 measured now in 0.0 s, 2 of them faster than the first")

    monkeypatch.setattr(PlanTimer, "fastest", lambda *_: pytest.fail("measured again"))
    again = asked(path, costs=(1e-4, 9e-4))
    assert again.names == first.names
    assert (again.choices.measured, again.fake.counts["malloc"]) == (0, 0)
    assert again.choices.digest() == first.choices.digest()
    assert "2 plans, none measured now" in again.choices.text()


def test_the_digest_is_of_the_plans_that_were_used(tmp_path: Path) -> None:
    digests = {PlanChoices(tmp_path / "none.json").digest()}
    for number, costs in enumerate([(3e-4, 2e-4), (2e-4, 3e-4), (4e-4, 2e-4)]):
        digests.add(asked(tmp_path / f"{number}.json", costs).choices.digest())
    assert len(digests) == 3, "nothing, the second plan twice (whatever it took), the first"


def test_what_the_file_lacks_is_added_and_what_others_have_added_stays(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    other = {"plan": "eng1", "ms": {}}
    path.write_text(json.dumps({"format": 1, "plans": {"forward | another GPU": other}}))
    clock = FakeClock()
    choices = PlanChoices(path, clock=clock)
    path.write_text(json.dumps({"format": 1, "plans": {"forward | another GPU": other, "meanwhile": other}}))
    with device(tuning=Tuning(choices, clock)) as opened:
        opened.products.plan(PRODUCT)
    assert sorted(json.loads(path.read_text())["plans"]) == sorted(["forward | another GPU", "meanwhile", KEYS[1]])


def test_bad_files_and_plans_that_are_not_to_be_had_are_named(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    for text in (
        *("not json", "[]", '{"format": 2, "plans": {}}', '{"format": 1, "plans": {"a": "eng1"}}'),
        '{"format": 1, "choices": {"forward": "winograd"}}',  # of the CPU
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"plans\.json: not a file of measured plans"):
            PlanChoices(path)
    with pytest.raises(FormatError, match="/dev/zero: is not a regular file"):
        PlanChoices(Path("/dev/zero"))
    path.unlink()
    asked(path)
    path.write_text(path.read_text().replace(f'"plan": "{NAMES[1]} #1"', '"plan": "eng99"'))
    with pytest.raises(ValueRejected, match=r"plans\.json: the library offers no plan 'eng99' for ProductSpec.*Remove"):
        asked(path)


def test_nothing_is_measured_while_a_stream_is_capturing(tmp_path: Path) -> None:
    clock = FakeClock()
    choices = PlanChoices(tmp_path / "plans.json", clock=clock)
    with device(tuning=Tuning(choices, clock)) as opened:
        runtime = opened.runtime

        def body() -> None:
            with pytest.raises(DeviceError, match="a plan is made while a stream is capturing"):
                opened.products.plan(PRODUCT)

        runtime.graphDestroy(recorded(runtime, opened.origin, body))
    assert choices.measured == 0
    assert not (tmp_path / "plans.json").exists()


def test_of_several_ranks_the_first_measures_and_the_others_take_its_choices(tmp_path: Path) -> None:
    told = list[str]()

    def telling(text: str) -> str:
        told.append(text)
        return text

    path = tmp_path / "plans.json"
    first = asked(path, rank=0, share=telling)
    (text,) = told
    path.unlink()
    second = asked(path, costs=(1e-4, 9e-4), rank=1, share=lambda _: text)
    assert second.names == first.names
    assert second.choices.digest() == first.choices.digest()
    assert not second.clock.runs
    assert not path.exists(), "rank 0 alone writes"
    with pytest.raises(ValueRejected, match=r"rank 0 has chosen no plan for ConvolutionSpec.*which rank 1 needs"):
        asked(path, rank=1, share=lambda _: "{}")


@pytest.mark.skipif(compiler() is None, reason="no g++: CUDA kernels cannot be built for the CPU")
def test_a_model_is_measured_before_its_memory_is_taken(tmp_path: Path) -> None:
    path, model = tmp_path / "plans.json", compiled("mlp", "fp16")

    def trained() -> tuple[dict[int, bytes], PlanChoices, FakeCuda]:
        clock = FakeClock()
        choices = PlanChoices(path, clock=clock)
        opened = device(tuning=Tuning(choices, clock, (2e-3, 1e-3)))
        fake, ring = cast(FakeCuda, opened.runtime), Ring(model)
        memory = HostMemory(fake)
        memory.cover(*ring.memory)
        order = Recorded(fake)
        executor = CudaExecutor(model, device=opened, memory=memory, train_slots=ring.pairs)
        sizes = order.sizes
        assert sizes[-1] == executor.arena.total_bytes, "the arena is the last to be taken"
        assert fake.counts["free"] == len(sizes) - 1, "and all before it has been given back"
        assert fake.counts["streamEndCapture"] == fake.counts["graphInstantiate"]
        start(executor, ring.slots)
        before = dict(clock.runs)
        for slot in range(2):
            executor.run_train_step(slot, lr=0.05, valid=6)
        opened.synchronize()
        assert {name[-1] for name in clock.runs if clock.runs[name] > before[name]} == {"1"}, "the chosen ones run"
        state = {t: executor.read(t).tobytes() for t in model.state}
        executor.close()
        opened.close()
        fake.close()
        return state, choices, fake

    first, measured, fake = trained()
    assert measured.measured > 10
    assert fake.counts["malloc"] == 1 + measured.measured
    second, known, fake = trained()
    assert (known.measured, fake.counts["malloc"]) == (0, 1)
    assert known.digest() == measured.digest()
    assert first == second


class Recorded:
    """Sizes of what is allocated on a FakeCuda from now on."""

    def __init__(self, fake: FakeCuda) -> None:
        self.sizes: list[int] = []
        malloc: Callable[[int], int] = fake.malloc

        def watched(size: int) -> int:
            self.sizes.append(size)
            return malloc(size)

        fake.malloc = watched  # type: ignore[method-assign]
