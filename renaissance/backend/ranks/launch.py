"""Who am I among the processes that a launcher has started: one rank for each GPU, all on one machine.

mpiexec (Open MPI, MPICH, Intel MPI), srun and torchrun each say it in the environment. A launcher that has started a
single process says nothing about ranks; it may have started the one that counts.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

from renaissance.core.errors import DeviceError, ValueRejected

RENDEZVOUS = "RENAISSANCE_RENDEZVOUS"
"""Environment variable with the path of the socket at which the ranks meet; the same for all of them."""
LEFTOVER_SECONDS = 3600.0
"""Ranks meet for minutes at most."""
MAX_RANKS = 1 << 10
_PREFIX, _SUFFIX = "ranks-", ".sock"
_REAL_STEPS = 0xFFFF_FFF0
"""Slurm numbers the steps of a job from 0; the batch script and other special steps come from the top."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """Names of a launcher's variables: ``sizes`` and ``job`` in order of preference."""

    name: str
    rank: str
    sizes: tuple[str, ...]
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()
    """What tells one job on this machine from another; without any, the parent process does."""


OPEN_MPI = Launcher(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
MPICH = Launcher("MPICH", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = Launcher(
    "Slurm",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "SLURM_LOCALID",
    "",
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
TORCHRUN = Launcher(
    "torchrun",
    "RANK",
    ("WORLD_SIZE",),
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
)
LAUNCHERS = (OPEN_MPI, SLURM, TORCHRUN, MPICH)
"""Those that name the job first: srun speaks MPICH's language, too."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One of ``size`` processes of a launcher; ``job`` is the same text for all of them and for no other job here."""

    rank: int
    size: int
    launcher: str
    job: str


def launched(environ: Mapping[str, str] = os.environ, parent: int | None = None) -> Launch | None:
    """What the launcher says of this process, None when none has started several. ``parent``: pid of its parent.

    Raises ValueRejected for variables that are incomplete or make no sense, and for two launchers that contradict each
    other, and DeviceError for ranks on several machines; each names the variables.
    """
    found = [(launcher, one) for launcher in LAUNCHERS if (one := _of(launcher, environ, parent)) is not None]
    several = [(launcher, one) for launcher, one in found if one.size > 1]
    for launcher, one in several[1:]:
        first_launcher, first = several[0]
        if (one.rank, one.size) != (first.rank, first.size):
            raise ValueRejected(
                f"two launchers contradict each other: {_said(first_launcher, environ)} of {first.launcher}, "
                f"{_said(launcher, environ)} of {one.launcher}; start the ranks with one of them, or unset the "
                "variables of the other"
            )
    return several[0][1] if several else None


def _of(launcher: Launcher, environ: Mapping[str, str], parent: int | None) -> Launch | None:
    """What one launcher says; None when it says nothing."""
    if launcher is SLURM and _number("SLURM_STEP_ID", environ, default=_REAL_STEPS) >= _REAL_STEPS:
        return None  # in an allocation, but not started by srun: SLURM_NTASKS says what was asked for, not what runs
    size_name = next((name for name in launcher.sizes if name in environ), launcher.sizes[0])
    given = [name for name in (launcher.rank, size_name) if name in environ]
    if not given:
        return None
    if len(given) == 1:
        missing = size_name if given[0] == launcher.rank else launcher.rank
        raise ValueRejected(
            f"{given[0]} is set in the environment, as by {launcher.name}, but {missing} is not; start the ranks with "
            f"{launcher.name}, or unset {given[0]}"
        )
    rank, size = _number(launcher.rank, environ), _number(size_name, environ)
    if not 1 <= size <= MAX_RANKS or rank >= size:
        raise ValueRejected(
            f"{_said(launcher, environ)} in the environment, as by {launcher.name}; expected a rank from 0 to "
            f"{size_name} - 1, and at most {MAX_RANKS} ranks"
        )
    if size > 1:
        _one_machine(launcher, environ, rank, size)
    return Launch(rank, size, launcher.name, _job(launcher, environ, parent))


def _one_machine(launcher: Launcher, environ: Mapping[str, str], rank: int, size: int) -> None:
    """Raise DeviceError when the variables say that the ranks are spread over machines."""
    local = {launcher.local_rank: rank, launcher.local_size: size}
    if launcher is SLURM:
        local["SLURM_STEP_NUM_NODES"] = local["SLURM_NNODES"] = 1
    for name, expected in local.items():
        if name in environ and _number(name, environ) != expected:
            raise DeviceError(
                f"{name} is {environ[name]} where {_said(launcher, environ)}: the ranks are on several machines; "
                "expected all of them on one, one for each of its GPUs"
            )


def _said(launcher: Launcher, environ: Mapping[str, str]) -> str:
    names = (
        (launcher.rank, *launcher.sizes[:1]) if launcher.sizes[0] in environ else (launcher.rank, launcher.sizes[-1])
    )
    return " and ".join(f"{name} is {environ.get(name)}" for name in names)


def _number(name: str, environ: Mapping[str, str], default: int = 0) -> int:
    """A whole number from 0 in the environment; raises ValueRejected."""
    text = environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ValueRejected(f"{name} is {text!r} in the environment; expected a whole number from 0")
    return int(text)


def _job(launcher: Launcher, environ: Mapping[str, str], parent: int | None) -> str:
    named = [f"{name}={environ[name]}" for name in launcher.job if name in environ]
    return " ".join([launcher.name, *(named or [f"parent={os.getppid() if parent is None else parent}"])])


def remove_leftovers(folder: Path) -> None:
    """Remove sockets that killed runs have left in ``folder``: none that is in use is as old."""
    for socket in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):  # another rank was faster
            if time() - socket.lstat().st_mtime > LEFTOVER_SECONDS:
                socket.unlink()


def meeting_place(launch: Launch, folder: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Path of the socket at which the ranks of this job meet: a name of its own in ``folder``, or ``RENDEZVOUS``."""
    given = environ.get(RENDEZVOUS)
    if given is None:
        return folder / f"{_PREFIX}{hashlib.sha256(launch.job.encode()).hexdigest()[:16]}{_SUFFIX}"
    if not os.path.isabs(given) or not os.path.isdir(os.path.dirname(given)):
        raise ValueRejected(f"{RENDEZVOUS} is {given!r}; expected the absolute path of a socket in an existing folder")
    return Path(given)


def rank_of(gpus: Sequence[int], launch: Launch | None, argv: Sequence[str] | None = None) -> int:
    """This process's place among the ranks of ``gpus``: it trains on ``gpus[rank]``.

    Raises DeviceError unless there is one process for each GPU; without a launcher it says how to start them.
    """
    if launch is None:
        if len(gpus) == 1:
            return 0
        first, second = command_lines(len(gpus), sys.argv if argv is None else argv)
        raise DeviceError(
            f"use_gpu: {len(gpus)} GPUs take {len(gpus)} processes, one for each, and this one was started alone; "
            f'start them with\n  {first}\nor\n  {second}\nor train on one: use_gpu("{gpus[0]}")'
        )
    if launch.size != len(gpus):
        names = ", ".join(map(str, gpus))
        raise DeviceError(
            f"use_gpu: {launch.launcher} has started {launch.size} ranks for {len(gpus)} GPU{'s' * (len(gpus) > 1)} "
            f"({names}); expected one for each GPU"
        )
    return launch.rank


def command_lines(ranks: int, argv: Sequence[str]) -> tuple[str, str]:
    """How to start this very command as ``ranks`` processes, with mpiexec and with torchrun."""
    program = Path(argv[0]).name if argv and argv[0] else "renaissance"
    script = program.endswith(".py")
    command = shlex.join([argv[0] if script else program, *argv[1:]])
    python, other = ("python ", "") if script else ("", "--no-python ")
    return f"mpiexec -n {ranks} {python}{command}", f"torchrun --nproc-per-node {ranks} {other}{command}"
