"""Random numbers: the published vectors, the existing framework's values, and three forms that say the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from renaissance.core.philox import (
    UNIT_24,
    Domain,
    bounded,
    epoch_word,
    philox,
    philox_array,
    philox_numba,
    purpose,
    seed_words,
    unit_float,
)

WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(0, 2**64 - 1)

# Known answers of the Random123 distribution, as listed in spec/data 4.1: counter, key, output.
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
# spec/data 4.2: seed, offset (low and high word are c0 and c1), output, uniform float of the first word.
EXISTING = [
    (42, 0, "9ceaf053 77f5493b 12bf50ad 5742b3d7", 0.612959862),
    (42, 1, "fcdb2127 53ba6cfd 838f5a6e 744e06fb", 0.987718642),
    (42, 2, "d36c0225 a8875dcb 9a4d6d99 c609a559", 0.825866818),
    (42, 1 << 32, "42e0b8b3 7dbf5de8 2fe739d4 6aaf03eb", 0.261241436),
    (42 ^ 1 << 32, 0, "95c7828e e1232961 4793034d 567b1aa5", 0.585075498),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@njit(cache=True)
def compiled_block(k0, k1, c0, c1, c2, c3):
    return philox_numba(k0, k1, c0, c1, c2, c3)


@njit(cache=True)
def compiled_derived(word, n):
    return unit_float(word), bounded(word, n)


def compiled(seed: int, *counter: int) -> tuple[int, ...]:
    return tuple(int(w) for w in compiled_block(*seed_words(seed), *(np.uint32(c) for c in counter)))


def vectorised(seed: int, *counter: int) -> tuple[int, ...]:
    return tuple(int(w) for w in philox_array(seed, *counter))


FORMS = [philox, vectorised, compiled]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("counter", "key", "output"), PUBLISHED)
def test_published_vectors(form, counter, key, output):
    low, high = words(key)
    assert form(high << 32 | low, *words(counter)) == words(output)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("seed", "offset", "output", "uniform"), EXISTING)
def test_values_of_the_existing_framework(form, seed, offset, output, uniform):
    block = form(seed, offset & 0xFFFFFFFF, offset >> 32, 0, 0)
    assert block == words(output)
    assert compiled_derived(np.uint32(block[0]), 1)[0] == pytest.approx(uniform, abs=5e-10)


@given(seed=SEED, counter=st.tuples(WORD, WORD, WORD, WORD))
@settings(deadline=None, max_examples=200)
def test_scalar_vectorised_and_compiled_forms_agree(seed, counter):
    assert philox(seed, *counter) == vectorised(seed, *counter) == compiled(seed, *counter)


def test_vectorised_form_broadcasts_and_keeps_its_arguments():
    steps, samples = np.arange(5, dtype=np.uint32), np.arange(3, dtype=np.uint32)[:, None]
    out = philox_array(7, steps, 9, samples, 11)
    assert [w.shape for w in out] == [(3, 5)] * 4
    assert {w.dtype for w in out} == {np.dtype(np.uint32)}
    assert tuple(int(w[2, 4]) for w in out) == philox(7, 4, 9, 2, 11)
    assert steps.tolist() == [0, 1, 2, 3, 4]


def test_domains_keep_their_numbers():
    # spec/data 4.6 fixes the first two; a change of any number changes every run ever made.
    assert (Domain.AUGMENTATION, Domain.ORDER, Domain.WEIGHT_INIT, Domain.DROPOUT) == (1, 2, 3, 4)
    assert (Domain.NOISE, Domain.EXPORT_ORDER) == (5, 6)
    assert (Domain.TENSOR_FILL, Domain.SUBSTITUTE) == (7, 8)


@given(word=WORD, n=st.integers(1, 2**31 - 1))
@settings(deadline=None, max_examples=200)
def test_derived_values_stay_in_range(word, n):
    uniform, integer = compiled_derived(np.uint32(word), n)
    assert uniform == np.float32(word >> 8) * np.float32(UNIT_24)
    assert 0.0 <= uniform < 1.0
    assert integer == word * n >> 32
    assert 0 <= integer < n


def test_no_two_purposes_share_a_counter_word():
    assert {int(d): purpose(d, 5) for d in Domain} == {int(d): (int(d) << 24) + 5 for d in Domain}
    assert len(Domain.__members__) == len(set(Domain))  # an alias would be a shared domain
    assert all(0 < domain < 256 for domain in Domain)
    for low in (-1, 1 << 24):
        with pytest.raises(ValueError, match="low bits"):
            purpose(Domain.ORDER, low)


def test_epoch_word_separates_training_from_validation():
    assert epoch_word(3, validation=False) == 3
    assert epoch_word(3, validation=True) == 0x80000003
    for epoch in (-1, 1 << 31):
        with pytest.raises(ValueError, match="epoch"):
            epoch_word(epoch, validation=False)


def test_seed_words_are_low_first():
    assert seed_words(0x1122334455667788) == (0x55667788, 0x11223344)
