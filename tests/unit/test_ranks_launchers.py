"""What a process learns from its launcher's environment: which rank it is, which GPU it takes, where the ranks meet."""

import os
from pathlib import Path

import pytest

from renaissance.backend.ranks.launch import RENDEZVOUS, Launch, launched, meeting_place, rank_of, remove_leftovers
from renaissance.core.errors import DeviceError, ValueRejected

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-77@1",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "2",
    "SLURM_NNODES": "1",
    "SLURM_JOB_ID": "31",
    "SLURM_STEP_ID": "0",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
BATCH_SCRIPT = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "launcher", "job"),
    [
        (OPEN_MPI, "Open MPI", "PMIX_NAMESPACE=prterun-host-77@1"),
        (MPICH, "MPICH", "parent=55"),
        (SLURM, "Slurm", "SLURM_JOB_ID=31 SLURM_STEP_ID=0"),
        (without(SLURM, "SLURM_STEP_NUM_TASKS"), "Slurm", "SLURM_JOB_ID=31 SLURM_STEP_ID=0"),
        (TORCHRUN, "torchrun", "TORCHELASTIC_RUN_ID=none MASTER_PORT=29500 TORCHELASTIC_RESTART_COUNT=0"),
        ({"RANK": "2", "WORLD_SIZE": "4"}, "torchrun", "parent=55"),
    ],
)
def test_each_launcher_says_rank_size_and_job(environ: dict[str, str], launcher: str, job: str) -> None:
    assert launched(environ, parent=55) == Launch(2, 4, launcher, f"{launcher} {job}")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        without(BATCH_SCRIPT, "SLURM_STEP_ID"),
        {**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967291"},
    ],
    ids=["no launcher", "a launcher of one", "a batch script of Slurm", "a batch script with Slurm's special step"],
)
def test_one_process_has_no_launcher(environ: dict[str, str]) -> None:
    assert launched(environ) is None


def test_a_launcher_may_be_started_by_a_launcher_of_one_process() -> None:
    one = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    assert launched({**one, **TORCHRUN}) == launched(TORCHRUN)


def test_two_launchers_that_agree_are_one() -> None:
    assert launched({**MPICH, **SLURM}, parent=55) == launched(SLURM, parent=55)


@pytest.mark.parametrize(
    ("environ", "error", "words"),
    [
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), ValueRejected, "RANK is set .* Open MPI, but OMPI_COMM_WORLD_SIZE"),
        (without(TORCHRUN, "RANK"), ValueRejected, "WORLD_SIZE is set .* torchrun, but RANK is not"),
        (without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ValueRejected, "but SLURM_STEP_NUM_TASKS is not"),
        (
            {**MPICH, **TORCHRUN, "RANK": "1", "LOCAL_RANK": "1"},
            ValueRejected,
            "RANK is 1 and WORLD_SIZE is 4 of torchrun, PMI_RANK is 2 and PMI_SIZE is 4 of MPICH",
        ),
        ({**MPICH, "PMI_RANK": "4"}, ValueRejected, "PMI_RANK is 4 and PMI_SIZE is 4 .* from 0 to PMI_SIZE - 1"),
        ({**MPICH, "PMI_RANK": "two"}, ValueRejected, "PMI_RANK is 'two' .* whole number"),
        ({**MPICH, "PMI_SIZE": "-4"}, ValueRejected, "PMI_SIZE is '-4'"),
        ({**MPICH, "PMI_SIZE": "0"}, ValueRejected, "PMI_SIZE is 0"),
        ({**MPICH, "MPI_LOCALNRANKS": "2"}, DeviceError, "MPI_LOCALNRANKS is 2 .* several machines"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, DeviceError, "LOCAL_RANK is 0 .* several machines"),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2"}, DeviceError, "SLURM_STEP_NUM_NODES is 2 .* several machines"),
    ],
)
def test_variables_that_make_no_sense_are_named(environ: dict[str, str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        launched(environ)


def test_rank_r_takes_the_rth_gpu() -> None:
    assert rank_of((4, 5, 6, 7), Launch(2, 4, "MPICH", "")) == 2
    assert rank_of((3,), None) == 0


def test_several_gpus_without_a_launcher_say_how_to_start_them() -> None:
    with pytest.raises(DeviceError) as caught:
        rank_of((0, 1, 2, 3), None, ["/usr/bin/renaissance", "train", "my config.toml"])
    assert "\n  mpiexec -n 4 renaissance train 'my config.toml'\n" in str(caught.value)
    assert "\n  torchrun --nproc-per-node 4 --no-python renaissance train 'my config.toml'\n" in str(caught.value)
    with pytest.raises(DeviceError) as caught:
        rank_of((2, 3), None, ["folder/train.py", "--fast"])
    assert str(caught.value).endswith(
        "start them with\n  mpiexec -n 2 python folder/train.py --fast\nor\n"
        '  torchrun --nproc-per-node 2 folder/train.py --fast\nor train on one: use_gpu("2")'
    )


def test_as_many_ranks_as_gpus() -> None:
    with pytest.raises(DeviceError, match=r"Slurm has started 4 ranks for 2 GPUs \(0, 1\)"):
        rank_of((0, 1), Launch(0, 4, "Slurm", ""))
    with pytest.raises(DeviceError, match=r"4 ranks for 1 GPU \(0\)"):
        rank_of((0,), Launch(0, 4, "Slurm", ""))


def test_ranks_of_one_job_meet_at_one_place_and_jobs_at_different_ones(tmp_path: Path) -> None:
    def place(environ: dict[str, str], parent: int = 55) -> Path:
        launch = launched(environ, parent)
        assert launch is not None
        return meeting_place(launch, tmp_path, {})

    first = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}
    assert place(TORCHRUN) == place(first)
    assert place(TORCHRUN).parent == tmp_path
    others = [{**TORCHRUN, "MASTER_PORT": "29501"}, {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}, OPEN_MPI, SLURM]
    assert len({place(environ) for environ in (TORCHRUN, *others)} | {place(MPICH), place(MPICH, 56)}) == 7


def test_what_killed_runs_have_left_is_removed(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("ranks-1.sock", "ranks-2.sock", "dataserver.sock"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == [other, new]


def test_the_place_to_meet_can_be_given(tmp_path: Path) -> None:
    launch = Launch(0, 2, "MPICH", "")
    assert meeting_place(launch, Path("/nowhere"), {RENDEZVOUS: f"{tmp_path}/here"}) == tmp_path / "here"
    for wrong in ("here", f"{tmp_path}/no/folder", ""):
        with pytest.raises(ValueRejected, match=r"RENAISSANCE_RENDEZVOUS is .* absolute path"):
            meeting_place(launch, tmp_path, {RENDEZVOUS: wrong})
