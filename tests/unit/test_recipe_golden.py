"""Law 1, pinned: the bytes of every transform, in every delivered type, are those written down here.

The other tests compare the kernels with an oracle that is computed anew; these hashes also hold against a change of
both, and against a compiler that rounds otherwise. A change that is meant raises RECIPE_VERSION.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit
from recipe_cases import rows

from renaissance.core.dtype import DType
from renaissance.core.enums import NormMode
from renaissance.data.chain import fixed_size
from renaissance.data.pictures import compile_pictures
from renaissance.data.recipe import Recipe
from renaissance.data.sources.spec import Encoding
from renaissance.data.steps import Cut, Scratch, frozen, plain_style, resample
from renaissance.data.transforms import (
    LISTABLE,
    CenterCrop,
    ColorJitter,
    DoNothing,
    FastRandomResizedCrop,
    GaussianBlur,
    GaussianNoise,
    Pad,
    RandomAutocontrast,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomScale,
    Resize,
    Transform,
)

Bytes = npt.NDArray[np.uint8]
DELIVERED = (
    (DType.UINT8, NormMode.NO_NORM, 3),
    (DType.FP32, NormMode.IMAGENET, 3),
    (DType.FP32, NormMode.CIFAR, 7),
    (DType.BF16, NormMode.CIFAR, 3),
    (DType.FP16, NormMode.MLPERF, 4),
)
"""Type, normalisation and channels written; 7 channels are written from the table, the others by arithmetic."""
END = CenterCrop(32)
CHAINS: dict[str, list[Transform]] = {
    "Pad": [Pad(3, (9, 200, 31)), CenterCrop(36)],
    "Pad edge": [Pad(3, 0, "edge"), CenterCrop(36)],
    "Pad reflect": [Pad(3, 0, "reflect"), CenterCrop(36)],
    "Pad symmetric": [Pad(3, 0, "symmetric"), CenterCrop(36)],
    "RandomCrop": [RandomCrop(15)],
    "RandomCrop padded": [RandomCrop(50)],
    "CenterCrop": [DoNothing(), CenterCrop(15)],
    "RandomRotation": [RandomRotation(180, (1, 2, 3)), END],
    "RandomScale": [RandomScale(0.5, 1.7), END],
    "fused geometry": [
        Pad(2, 0, "edge"),
        RandomRotation(45, 80),
        RandomScale(0.7, 1.3),
        Pad(3, 4),
        RandomCrop(30),
        END,
    ],
    "Resize": [Resize(11)],
    "Resize enlarging": [Resize(61)],
    "Resize and crop": [Resize(40), CenterCrop(32)],
    "RandomResizedCrop": [RandomResizedCrop(24, 0.01, 1.0, 0.2, 5.0)],
    "FastRandomResizedCrop": [FastRandomResizedCrop(17)],
    "brightness": [ColorJitter(brightness=0.9), END],
    "contrast": [ColorJitter(contrast=0.9), END],
    "saturation": [ColorJitter(saturation=0.9), END],
    "hue": [ColorJitter(hue=0.5), END],
    "ColorJitter": [ColorJitter(0.4, 0.4, 0.4, 0.1), END],
    "RandomGrayscale": [RandomGrayscale(0.5), END],
    "RandomAutocontrast": [RandomAutocontrast(0.5), END],
    "GaussianBlur": [GaussianBlur(0.1, 9.0), END],
    "GaussianNoise": [GaussianNoise(), END],
    "GaussianNoise modulo": [GaussianNoise(3.5, 80.0, False), END],
    "RandomHorizontalFlip": [RandomHorizontalFlip(), END],
    "RandomErasing": [RandomErasing(0.8), END],
    "everything": [
        *(RandomResizedCrop(40), Pad(2), RandomRotation(15), RandomCrop(36), ColorJitter(0.4, 0.4, 0.4, 0.1)),
        *(
            GaussianBlur(),
            RandomAutocontrast(),
            Resize(32),
            GaussianNoise(),
            RandomHorizontalFlip(),
            RandomErasing(0.5),
        ),
    ],
}
GOLDEN = {
    "Pad": "55bf4b3c3352debd50e41a8b40a8adcd",
    "Pad edge": "378d9a7e838096c45648ff0ad7909ee8",
    "Pad reflect": "f22f4ad4779286caf3f67988d5038d5c",
    "Pad symmetric": "15d4999e10c82ea156d63d9f9300e432",
    "RandomCrop": "5715da7737ddbcdb29023484cd693385",
    "RandomCrop padded": "80808b3251acecd3e8577eb44415c0d0",
    "CenterCrop": "f2dc2cf370a8d1908141f9a9382d4811",
    "RandomRotation": "b04e21c661add72c5c83e872fe50fd02",
    "RandomScale": "3c9500eb2f3b4bb48c354eab16a73da6",
    "fused geometry": "71ac90f4735b7314eb46808a76d90c0e",
    "Resize": "fa9818c0116dca680e21eafc5940f9e9",
    "Resize enlarging": "4052a16cd73d793e98738fe6f494302f",
    "Resize and crop": "2bd9af25caea87712154a85339e1c05d",
    "RandomResizedCrop": "6bf7061ea15d42278da14ffe24d167ee",
    "FastRandomResizedCrop": "ff9271b5ff7fe5727d60a06e72fe8b48",
    "brightness": "4e2be84c883367887a50ba607b4d661c",
    "contrast": "50716a8dcf7b8751be434ed120742347",
    "saturation": "f605a2d1d2478ce2bc03de878fc913f8",
    "hue": "ceea76bdba1b32127092eff5d0a6e942",
    "ColorJitter": "baf9099826535e61636b1a1bf762d7e7",
    "RandomGrayscale": "0135d9afabfe9f90dfa064cf4ed4d8df",
    "RandomAutocontrast": "3e12a66006c12412ab209a347dec6438",
    "GaussianBlur": "66efa48f9b59f418310e800a635e972e",
    "GaussianNoise": "1a9a396270cb9662926e1a54e9b3b406",
    "GaussianNoise modulo": "c18746a1769c1e50c4ba8be0ed5314d9",
    "RandomHorizontalFlip": "a80786a8b3114312e9b724de64335419",
    "RandomErasing": "0c60ff54e3024efe7b2ad49507d3f175",
    "everything": "fe0d35d713c352cd53990db7b969f40b",
}
"""First half of the SHA-256 of the rows of one chain: six pictures of 40x17, four of other sizes, in every type."""


def picture(count: int, height: int, width: int) -> Bytes:
    """[count,height,width,3]: a ramp with noise, from integers alone."""
    i = np.arange(count * height * width * 3, dtype=np.uint64).reshape(count, height, width, 3)
    y, x = np.mgrid[0:height, 0:width].astype(np.uint64)
    return ((i * np.uint64(2654435761) >> np.uint64(11)) % 128 + ((5 * x + 3 * y) % 128)[..., None]).astype(np.uint8)


def digest_of(chain: list[Transform]) -> str:
    side = fixed_size(chain)
    assert side is not None
    digest = hashlib.sha256()
    for dtype, norm, padded in DELIVERED:
        recipe = Recipe.build(chain, norm, side, 3)
        digest.update(rows(recipe, picture(6, 40, 17), list(range(6)), dtype=dtype, padded=padded)[0].tobytes())
        if not chain[0].sizing:
            continue
        compiled = compile_pictures(recipe, dtype, padded)
        row = np.zeros(compiled.row_bytes, np.uint8)
        for sample, (height, width) in enumerate(((1, 1), (3, 70), (90, 130), (64, 5))):
            stored = struct.pack("<II", width, height) + picture(1, height, width).tobytes()
            compiled.make(np.frombuffer(stored, np.uint8), Encoding.RAW, sample, 9, 1, False, row)
            digest.update(row.tobytes())
    return digest.hexdigest()[:32]


def test_every_transform_delivers_its_golden_bytes() -> None:
    covered = {transform.name for chain in CHAINS.values() for transform in chain}
    assert covered == set(LISTABLE)
    assert {name: digest_of(chain) for name, chain in CHAINS.items()} == GOLDEN


def test_boxes_with_fractions_as_scaled_decoding_makes_them_have_golden_bytes() -> None:
    source = picture(1, 60, 90)[0]
    cut = Cut(frozen(source), 0, 270, 90, 60, 0, 270)
    digest = hashlib.sha256()
    for size, box in ((24, (0.5, 0.25, 88.75, 59.5)), (7, (0.125, 0.0, 61.875, 60.0)), (40, (3.5, 1.5, 80.0, 59.125))):
        out = np.zeros(size * size * 3, np.uint8)
        resample(cut, box, size, (0, 0, size, size), plain_style(3), (out, out), Scratch())
        digest.update(out.tobytes())
    assert digest.hexdigest()[:32] == "5bc2f79515b375e1f4f0c555a5d222cb"


@njit
def _multiply_and_add(a, b, c, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = a[i] * b[i] + c[i]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_product_is_rounded_before_it_is_added(kind: type[np.floating]) -> None:
    """The compiler may not fuse the two on this machine; every golden hash rests on it."""
    small = np.finfo(kind).eps
    a, b, c = (np.full(64, value, kind) for value in (1 + small, 1 - small, -1))
    out = np.empty(64, kind)
    _multiply_and_add(a, b, c, out)
    assert not out.any()  # fused: -small**2
