"""Softmax cross-entropy and metrics of CUDA on the emulator: float64's results in any order of threads, no races."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from cuda_bench import check, measured, needs_compiler
from op_cases import Case, In, Out, scalar
from op_sweep import losses

from renaissance.backend.cuda.launch_loss import rows_geometry
from renaissance.core.dtype import DType
from renaissance.core.errors import ShapeError

pytestmark = needs_compiler

ONE = (1, 1, 1, 1)
RATES = ("loss", "top1", "top5")


def softmax(
    z: npt.NDArray[np.float64],
    labels: npt.ArrayLike,
    *,
    ranked: bool = False,
    eps: float = 0.1,
    valid: int | None = None,
) -> Case:
    """SOFTMAX_CE_FWD, or SOFTMAX_CE_INF when ``ranked``."""
    n, k = z.shape
    y = np.asarray(labels).reshape(n, 1, 1, 1)
    count = int((y >= 0).sum()) if valid is None else valid
    inputs = (
        In("logits", z.reshape(n, 1, 1, k)),
        In("label", y, "i32"),
        scalar("smoothing", eps),
        scalar("batch_valid", count, "i32"),
    )
    rows = (Out("probs", (n, 1, 1, k), "fp32", k), Out("partials", (n, 1, 1, 1), "fp32", k))
    loss = Out("loss", ONE, "fp32", k + n)
    if not ranked:
        return Case("SOFTMAX_CE_FWD", f"{n}x{k}", inputs, (*rows, loss))
    rates = (Out("top1", ONE, "fp32"), Out("top5", ONE, "fp32"))
    return Case("SOFTMAX_CE_INF", f"{n}x{k}", inputs, (Out("predicted", (n, 1, 1, 1), "i32"), *rows, loss, *rates))


def gradient(probs: npt.NDArray[np.float64], labels: npt.ArrayLike, valid: int | None = None) -> Case:
    n, k = probs.shape
    count = n if valid is None else valid
    inputs = (
        In("probs", probs.reshape(n, 1, 1, k), "fp32"),
        In("label", np.asarray(labels).reshape(n, 1, 1, 1), "i32"),
        scalar("smoothing", 0.1),
        scalar("batch_valid", count, "i32"),
        scalar("scaling", 8.0),
    )
    out = Out("dlogits", (n, 1, 1, k), terms=4, magnitude=8 / max(count, 1))
    return Case("SOFTMAX_CE_BWD", f"{n}x{k}", inputs, (out,))


def random_rows(n: int, k: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    rng = np.random.default_rng((n, k))
    labels = rng.integers(-1, k, n)
    labels[0] = k - 1
    return rng.normal(size=(n, k)) * 4, labels


def test_loss_and_gradient_equal_float64_in_every_order_of_threads() -> None:
    """Sizes on both sides of every choice of the launcher: four lanes, a warp or a block to a row, one page or more of
    a row, one block or more and the mean in a launch of its own; with and without label smoothing."""
    sizes = ((200, 10), (513, 16), (3, 17), (65, 100), (2, 128), (2, 129), (1, 1024), (3, 1025), (2, 2500))
    kinds = {(rows_geometry(*s)[0][0] > 1, rows_geometry(*s)[2]) for s in sizes}
    assert kinds == {(False, 4), (True, 4), (False, 32), (True, 32), (False, 256), (True, 256)}
    cases = list(losses())
    for i, (n, k) in enumerate(sizes):
        z, labels = random_rows(n, k)
        cases += [softmax(z, labels, ranked=r, eps=(0.0, 0.1)[i % 2]) for r in (False, True)]
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        cases.append(gradient(p, labels, valid=n * (i % 2)))
    check(cases)
    for case in cases[-3 * len(sizes) :]:
        measured(case, DType.FP16, order=5, race=True)


@pytest.mark.parametrize("classes", [10, 100, 1100])
def test_what_a_masked_row_holds_does_not_matter(classes: int) -> None:
    z, _ = random_rows(4, classes)
    alone = measured(softmax(z[:1], [1], ranked=True), DType.FP16)
    z[1:] = np.array([np.nan, np.inf, 3e4])[:, None]
    got = measured(softmax(z, [1, -1, -1, -1], ranked=True), DType.FP16)
    assert all(got[name] == alone[name] for name in RATES)
    assert not got["partials"][1:].any()
    assert not got["probs"][1:].any()
    probs = np.where(np.isnan(z), np.nan, 0.5)
    assert not measured(gradient(probs, [1, -1, -1, -1]), DType.FP16)["dlogits"][1:].any()
    empty = measured(softmax(z[1:], [-1, -1, -1], ranked=True), DType.FP32)
    assert all(empty[name] == 0 for name in RATES)


def test_rates_rank_the_label_and_ties_go_to_the_lower_class() -> None:
    for classes in (8, 100, 1100):
        z = np.full((6, classes), -1.0)
        z[:3, :8] = 0
        z[3:5, :8] = [7, 6, 5, 4, 3, 2, 1, 0]
        z[5, :8] = [0, 0, 9, 0, 9, 0, 0, 0]
        got = measured(softmax(z, [0, 4, 5, 4, 5, 4], ranked=True), DType.BF16)
        assert got["predicted"].ravel().tolist() == [0, 0, 0, 0, 0, 2]
        assert got["top1"] == np.float32(1 / 6)
        assert got["top5"] == np.float32(4 / 6)
    few = measured(softmax(np.array([[1.0, 2, 3, 0], [4, 2, 3, 0]]), [2, 1], ranked=True), DType.FP32)
    assert few["top1"] == few["top5"] == 0.5


@pytest.mark.parametrize("classes", [6, 100, 1100])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_row_that_is_no_number_makes_loss_and_its_own_gradient_nan(bad: float, classes: int) -> None:
    """All of a row at -Inf is no distribution either; one class at -Inf is: its probability is 0."""
    z = np.zeros((3, classes))
    z[1, slice(None) if bad < 0 else classes - 1] = bad
    z[2, 0] = -np.inf
    labels = [0, classes - 1, 1]
    got = measured(softmax(z, labels, ranked=True, eps=0.0), DType.FP32)
    assert np.isnan(got["loss"])
    assert np.isnan(got["partials"].ravel()).tolist() == [False, True, False]
    assert np.isnan(got["probs"][1]).all()
    assert got["probs"][2].ravel()[0] == 0
    grad = measured(gradient(got["probs"].reshape(3, classes), labels), DType.BF16)["dlogits"]
    assert np.isnan(grad[1]).all()
    assert np.isfinite(grad[[0, 2]]).all()
    if np.isnan(bad):
        assert got["predicted"].ravel()[1] == -1
        assert got["top1"] == np.float32(2 / 3)


@pytest.mark.parametrize("classes", [10, 100, 1100])
def test_label_that_is_no_class_makes_the_loss_nan(classes: int) -> None:
    """On the CPU it ends the step with an error; a call on a GPU cannot fail, but the flag skips this step."""
    for label in (classes, -2, 2**31 - 1, -(2**31)):
        z, _ = random_rows(3, classes)
        got = measured(softmax(z, [0, label, 0], ranked=True, valid=3), DType.FP32)
        assert np.isnan(got["loss"])
        assert np.isnan(got["partials"].ravel()).tolist() == [False, True, False]
        assert got["top5"] <= np.float32(2 / 3)
        assert [np.isnan(row).all() for row in got["probs"]] == [False, True, False]
        grad = measured(gradient(np.full((3, classes), 1 / classes), [0, label, 0]), DType.FP16)["dlogits"]
        assert [np.isnan(row).all() for row in grad] == [False, True, False]


def test_far_logits_neither_overflow_nor_vanish() -> None:
    got = measured(softmax(np.array([[1e30, -1e30, 0.0], [-300.0, -200.0, -100.0]]), [0, 0], eps=0.0), DType.FP32)
    np.testing.assert_allclose(got["partials"].ravel(), [0.0, 200.0], rtol=1e-6)
    np.testing.assert_allclose(got["probs"].ravel(), [1, 0, 0, 0, 0, 1], atol=1e-30)
    sure = measured(softmax(np.array([[20.0, 0.0]]), [0], eps=0.0), DType.FP32)
    assert sure["loss"].item() == pytest.approx(np.log1p(np.exp(-20.0)), rel=1e-6)  # a float sum would give 0


def test_labels_and_sizes_that_do_not_fit_are_refused_by_name() -> None:
    z, labels = random_rows(4, 10)
    case = softmax(z, labels)
    short = In("label", np.zeros(ONE), "i32")
    image = In("logits", z.reshape(4, 2, 1, 5))
    for inputs, text in (((case.inputs[0], short), "'label'.*4 elements"), ((image, case.inputs[1]), "N,1,1,classes")):
        wrong = Case(case.op, case.title, (*inputs, *case.inputs[2:]), case.outputs)
        with pytest.raises(ShapeError, match=f"SOFTMAX_CE_FWD #7.*{text}"):
            measured(wrong, DType.FP32)


def metrics(valid: int, loss: float, top1: float, top5: float, flag: int | None, sums: float = 0.0) -> Case:
    inputs = [scalar("valid", valid, "i32"), scalar("loss", loss), scalar("top1", top1), scalar("top5", top5)]
    if flag is not None:
        inputs.append(scalar("has_nan", flag, "i32"))
    names = ("accum_loss", "accum_top1", "accum_top5", "accum_count")
    outputs = tuple(Out(name, ONE, "fp32", start=np.full(ONE, sums)) for name in names)
    return Case("ACCUM_METRICS", f"{valid}, {loss}, flag {flag}", tuple(inputs), outputs)


def test_hits_of_any_batch_are_whole_and_sums_equal_float64() -> None:
    """7 of 13 is a rate that gives 6.9999995 when it is multiplied by 13 again."""
    for valid, hits in ((13, 7), (19, 15), (1300, 1023), (1, 1), (4096, 0), (200, 199)):
        for flag in (None, 0):
            got = measured(metrics(valid, np.inf, hits / valid, hits / valid, flag), DType.FP32)
            assert got["accum_top1"] == got["accum_top5"] == hits
            assert got["accum_count"] == valid
            assert got["accum_loss"] == np.inf
    check([metrics(200, 2.31, 0.3, 0.7, flag, sums=1e3) for flag in (None, 0, 1)], (DType.FP32,))
    skipped = measured(metrics(200, np.nan, np.nan, 0.5, 1, sums=2.5), DType.FP32)
    assert {v.item() for v in skipped.values()} == {2.5}


def test_labels_are_copied() -> None:
    labels = In("label", np.arange(7).reshape(7, 1, 1, 1) - 1, "i32")
    check([Case("LABEL_COPY", "7", (labels,), (Out("copy", (7, 1, 1, 1), "i32"),))], (DType.FP32,))
