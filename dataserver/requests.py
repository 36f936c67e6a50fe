"""From a request to a session's specification: every value from the network is bounded and named before it is used."""

from __future__ import annotations

from collections.abc import Iterator

from dataserver.session import Session
from renaissance.core.dtype import DType
from renaissance.core.errors import ValueRejected
from renaissance.data.compile import compile_recipe
from renaissance.data.making.spec import LoadedSet, OnCorrupt, SessionSpec
from renaissance.data.order import batches_per_epoch
from renaissance.data.protocol import (
    CORRUPT_POLICIES,
    MAX_BATCH_SIZE,
    MAX_CORRUPT,
    MAX_DEPTH,
    MAX_EPOCH,
    MAX_WORLD_SIZE,
    MIN_DEPTH,
    ORDERS,
    RingLayout,
    check_choice,
    check_group,
    check_range,
    check_share_of_set,
)
from renaissance.data.recipe import Recipe
from renaissance.data.wire import dataserver_pb2 as pb

MAX_RECIPE_CHARS = 1 << 16


def check_request(request: pb.OpenSessionRequest) -> Recipe:
    """What can be checked before the data set is loaded. Raises ValueRejected."""
    check_range("batch size", request.batch_size, 1, MAX_BATCH_SIZE)
    check_range("depth", request.depth, MIN_DEPTH, MAX_DEPTH)
    check_range("world size", request.world_size, 1, MAX_WORLD_SIZE)
    check_range("rank", request.rank, 0, request.world_size - 1)
    check_range("start epoch", request.start_epoch, 0, MAX_EPOCH)
    check_choice("order", request.order, ORDERS)
    check_choice("on_corrupt", request.on_corrupt, CORRUPT_POLICIES)
    check_range("max_corrupt", request.max_corrupt, 0, MAX_CORRUPT)
    check_share_of_set(request.max_corrupt_share)
    check_group(request.share, request.share_count)
    if len(request.recipe_json) > MAX_RECIPE_CHARS:
        raise ValueRejected(f"recipe has {len(request.recipe_json)} characters; at most {MAX_RECIPE_CHARS}")
    return Recipe.from_json(request.recipe_json)


def session_spec(
    request: pb.OpenSessionRequest, dataset: str, loaded: LoadedSet, recipe: Recipe, read_ahead: int
) -> SessionSpec:
    """Raises ValueRejected or DTypeError when the parts do not fit; ``check_recipe`` is still to be called."""
    dtype = DType.parse(request.dtype)
    layout = RingLayout(
        depth=request.depth,
        batch_size=request.batch_size,
        height=recipe.resolution,
        width=recipe.resolution,
        channels=recipe.color_channels,
        padded_channels=request.padded_channels or recipe.color_channels,
        dtype=dtype,
        members=request.share_count,
    )
    if request.split == "val":
        recipe.require_deterministic()
    if request.order == "blocks" and not loaded.blocks:
        raise ValueRejected(
            f"order is 'blocks', but {dataset} {request.split} has none: it is not read from a packed file or a folder "
            "tree. Use order 'global'"
        )
    batches = batches_per_epoch(loaded.samples, request.batch_size, request.world_size, request.drop_last)
    if batches == 0:
        raise ValueRejected(
            f"an epoch has no batch: {dataset} {request.split} has {loaded.samples} samples, fewer than batch size "
            f"{request.batch_size} x world size {request.world_size}, and drop_last drops the rest"
        )
    check_range("start batch", request.start_batch, 0, batches - 1)
    return SessionSpec(
        dataset_name=dataset,
        split=request.split,
        dataset=loaded,
        recipe_json=recipe.to_json(),  # not the text that came: it may be many times as long
        seed=request.seed,
        shuffle=request.shuffle,
        rank=request.rank,
        world_size=request.world_size,
        batches_per_epoch=batches,
        layout=layout,
        order=request.order,
        on_corrupt=OnCorrupt(request.on_corrupt),
        max_corrupt=request.max_corrupt,
        max_corrupt_share=request.max_corrupt_share,
        read_ahead=read_ahead,
    )


def check_recipe(recipe: Recipe, spec: SessionSpec) -> None:
    """Compile it once here, so that a recipe that does not fit is refused before a worker sees it.

    That takes memory as the size of a row and its pictures want it. Raises ValueRejected, ShapeError or DTypeError.
    """
    loaded, layout = spec.dataset, spec.layout
    if loaded.is_pixels:
        size = loaded.height, loaded.width, loaded.channels
        compile_recipe(recipe, *size, layout.dtype, layout.padded_channels)
    else:
        from renaissance.data.pictures import compile_pictures

        compile_pictures(recipe, layout.dtype, layout.padded_channels)


def require_same(session: Session, spec: SessionSpec, start: tuple[int, int]) -> None:
    """Members of a share group agree in everything that decides bytes, and in the ring. Raises ValueRejected."""
    for name, running, wanted in _differences(session, spec, start):
        raise ValueRejected(
            f"share group {session.share!r}: {name} is {wanted} here and {running} in the running group (session "
            f"{session.number}); members of a group must agree, or use another name"
        )


def _differences(session: Session, spec: SessionSpec, start: tuple[int, int]) -> Iterator[tuple[str, object, object]]:
    ours, theirs = session.spec, spec
    pairs = [
        ("share_count", ours.layout.members, theirs.layout.members),
        ("data set", f"{ours.dataset_name} {ours.split}", f"{theirs.dataset_name} {theirs.split}"),
        ("recipe", _fingerprint(ours), _fingerprint(theirs)),
        ("dtype", ours.layout.dtype.name.lower(), theirs.layout.dtype.name.lower()),
        ("batch size", ours.layout.batch_size, theirs.layout.batch_size),
        ("padded channels", ours.layout.padded_channels, theirs.layout.padded_channels),
        ("depth", ours.layout.depth, theirs.layout.depth),
        ("batches per epoch (drop_last)", ours.batches_per_epoch, theirs.batches_per_epoch),
        ("start (epoch, batch)", session.start, start),
    ]
    names = ("seed", "shuffle", "order", "rank", "world_size", "on_corrupt", "max_corrupt", "max_corrupt_share")
    pairs += [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    return ((name, running, wanted) for name, running, wanted in pairs if running != wanted)


def _fingerprint(spec: SessionSpec) -> str:
    return Recipe.from_json(spec.recipe_json).fingerprint()


def decoder_of(loaded: LoadedSet) -> str:
    """Names and versions of what decodes the set's pictures, "" when nothing is decoded."""
    if str(loaded.encoding) != "pictures":
        return ""
    from renaissance.data.jpeg import decoder_identity

    return decoder_identity()


def decode_mode(recipe: Recipe, loaded: LoadedSet) -> str:
    """How pictures are decoded, which the recipe says; "" when nothing is decoded."""
    return recipe.decode if str(loaded.encoding) == "pictures" else ""
