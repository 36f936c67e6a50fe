"""The side of the training samples in every epoch: one size, or two (progressive resolution).

A compiled task has programs for two training resolutions, so a schedule with more sizes is refused. It may come from
``GLOBAL_SETTING.train_resolution((0, b), (E, e))`` or from ``PREPROCESSOR_SETTING.train_resolutions(...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from renaissance.core.errors import ValueRejected
from renaissance.core.settings import SettingSnapshot
from renaissance.data.preprocessor import PreprocessorConfig
from renaissance.data.recipe import Recipe
from renaissance.data.stored import check_sizes


@dataclass(frozen=True, slots=True)
class TrainSizes:
    """``by_epoch``: pixels of each epoch of a run, in order; one or two different ones."""

    by_epoch: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of the first epoch, then the other one if there is one."""
        return tuple(dict.fromkeys(self.by_epoch))

    @property
    def first(self) -> int:
        return self.by_epoch[0]

    @property
    def end(self) -> int | None:
        """The second size; None when there is only one."""
        return self.sizes[1] if len(self.sizes) > 1 else None

    @property
    def end_epochs(self) -> frozenset[int]:
        """Indices from 0 of the epochs at the second size."""
        end = self.end
        return frozenset(epoch for epoch, size in enumerate(self.by_epoch) if size == end)

    def next_epoch(self, size: int, start: int) -> int:
        """The first epoch (index from 0) from ``start`` on with this size, or ``start`` when none is left."""
        return next((e for e in range(start, len(self.by_epoch)) if self.by_epoch[e] == size), start)

    def steps(self) -> list[tuple[int, int]]:
        """Pairs (finished epochs, size from there on): the schedule as plain values."""
        found, done = [], 0
        for size, epochs in groupby(self.by_epoch):
            found.append((done, size))
            done += len(list(epochs))
        return found


def train_sizes(settings: SettingSnapshot, preprocessor: PreprocessorConfig, epochs: int) -> TrainSizes:
    """The sizes of a run of ``epochs`` epochs.

    Raises ValueRejected when two places ask for a schedule, for more than two sizes, and for one that the recipe cannot
    be made for.
    """
    asked, schedule = settings.train_resolution, preprocessor.resolutions
    progressive = asked is not None and asked.progressive
    if progressive and schedule is not None:
        raise ValueRejected(
            "GLOBAL_SETTING.train_resolution has two sizes, and PREPROCESSOR_SETTING.train_resolutions is set; the"
            " training resolution has one schedule, drop one of the two"
        )
    if progressive and asked is not None:
        by_epoch = tuple(asked.at(epoch) for epoch in range(epochs))
        if by_epoch[-1] != asked.end:
            raise ValueRejected(
                f"train_resolution: {asked.end} pixels begin after {asked.boundary_epoch} epochs, but there are"
                f" {epochs}; they never act, so use train_resolution({asked.begin})"
            )
    elif schedule is not None:
        by_epoch = tuple(schedule.at(epoch) for epoch in range(epochs))
    else:
        by_epoch = (preprocessor.train_recipe.resolution,) * epochs
    sizes = TrainSizes(by_epoch)
    if len(sizes.sizes) > 2:
        raise ValueRejected(
            f"train_resolutions has {len(sizes.sizes)} sizes in {epochs} epochs ({', '.join(map(str, sizes.sizes))});"
            " a compiled task has programs for two, such as SteppedResolution([(0, 128), (10, 224)])"
        )
    for size in sizes.sizes:
        recipe_at(preprocessor, size)
    return sizes


def recipe_at(preprocessor: PreprocessorConfig, size: int) -> Recipe:
    """The training recipe for ``size`` x ``size`` samples. Raises ValueRejected when it cannot be made for them."""
    try:
        recipe = preprocessor.train_recipe.with_resolution(size)
        check_sizes(recipe, preprocessor.info)
    except ValueRejected as error:
        raise ValueRejected(f"train_resolution: at {size} pixels: {error}") from None
    return recipe
