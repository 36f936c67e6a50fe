"""From options and settings to what is compiled: everything that can be checked or planned without a data server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from renaissance.backend.cuda.libraries import Collectives
from renaissance.backend.cuda.tuning import PlanChoices
from renaissance.core.dtype import DType
from renaissance.core.enums import DatasetType
from renaissance.core.errors import ValueRejected
from renaissance.core.machine import CorePlan
from renaissance.core.settings import GLOBAL_SETTING, SettingSnapshot
from renaissance.core.shape import Shape
from renaissance.data.preprocessor import PREPROCESSOR_SETTING, PreprocessorConfig
from renaissance.graph import BluePrint, CompileRequest
from renaissance.task.dataplane import Tails
from renaissance.task.gpu import GpuChoice
from renaissance.task.options import TaskOptions, agreed, runnable_backend
from renaissance.task.resolutions import TrainSizes, train_sizes
from renaissance.tensor import Initializer

UNUSED_TRUST = 1e-3
"""Of optimizers without a trust coefficient; a request wants a number that LARS could use."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One run, checked. Made by ``make_setup``."""

    options: TaskOptions
    settings: SettingSnapshot
    preprocessor: PreprocessorConfig
    cores: CorePlan
    backend: str
    backend_note: str  # what to say about the choice; "" for nothing
    blueprint: BluePrint
    batch: int
    sizes: TrainSizes

    @property
    def dtype(self) -> DType:
        """Of delivered samples and of the activations."""
        return self.settings.half or DType.FP32

    @property
    def on_gpu(self) -> bool:
        return self.backend == "cuda"

    @property
    def cores_text(self) -> str:
        """How the machine is shared, in a line."""
        return self.cores.text(computes=not self.on_gpu)

    def gpu(
        self,
        rank: int = 0,
        connect: Callable[[], Collectives] | None = None,
        choices: PlanChoices | None = None,
    ) -> GpuChoice | None:
        """What a rank trains on; None on the CPU. ``connect`` joins it to the others."""
        return GpuChoice(self.settings.gpus[rank], self.settings.tf32, connect, choices) if self.on_gpu else None

    @property
    def sample_shape(self) -> Shape:
        """[1, height, width, channels] of a training sample of the first epoch."""
        side = self.sizes.first
        return Shape(1, side, side, self.preprocessor.train_recipe.color_channels)

    def request(self, initializer: Initializer, tails: Tails) -> CompileRequest:
        """What to compile."""
        options, preprocessor = self.options, self.preprocessor
        assert options.optimizer is not None  # make_setup has checked both
        assert options.loss is not None
        optimizer, sample = options.optimizer.config(), self.sample_shape
        val, end = preprocessor.val_recipe.resolution, self.sizes.end
        return CompileRequest(
            height=sample.h,
            width=sample.w,
            channels=sample.c,
            num_classes=preprocessor.num_classes,
            train_batch=self.batch,
            val_batch=self.batch,
            train_last=tails[0],
            val_last=tails[1],
            train_end_size=None if end is None else (end, end),
            val_size=None if val == sample.h else (val, val),
            half=self.settings.half,
            external_inputs=not self.on_gpu,
            optimizer=optimizer.kind,
            label_smoothing=options.loss.config().label_smoothing,
            weight_decay=optimizer.weight_decay,
            beta=optimizer.beta1 if optimizer.has_second_moment else optimizer.momentum,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            grad_clip=options.grad_clip,
            loss_scale=options.loss_scale,
            ema=options.ema,
            ema_decay=options.ema_decay,
            freeze_first_layer=options.freeze_after is not None,
            tta=options.tta,
            world_size=self.settings.world_size,
            initializer=initializer,
            trust_coefficient=optimizer.trust_coefficient or UNUSED_TRUST,
        )


def make_setup(options: TaskOptions) -> Setup:
    """Check everything that can be checked without the data, and freeze it.

    Raises ValueRejected that lists all that is missing, or all options that contradict each other, and DeviceError for
    a backend that cannot run here.
    """
    settings = GLOBAL_SETTING.snapshot()
    lacking = options.missing()
    if not PREPROCESSOR_SETTING.committed:
        lacking.append("data: call PREPROCESSOR_SETTING.dataset(name, folder). ... .commit()")
    elif settings.dataset_type is DatasetType.NONE:
        lacking.append("data: GLOBAL_SETTING was reset since; call PREPROCESSOR_SETTING.commit() again")
    if settings.device is None:
        lacking.append("device: call GLOBAL_SETTING.use_cpu() or use_gpu()")
    if settings.local_batch_size is None:
        lacking.append("batch size: call GLOBAL_SETTING.global_batch_size(n)")
    if lacking:
        raise ValueRejected(f"cannot compile, missing: {'; '.join(lacking)}")
    on_gpu = settings.device == "cuda"
    if contradictions := [*options.contradictions(), *(_host_options(options, settings) if on_gpu else ())]:
        raise ValueRejected(f"cannot compile: {'; '.join(contradictions)}")
    assert options.model is not None  # both are in the list above
    assert settings.local_batch_size is not None
    preprocessor = PREPROCESSOR_SETTING.config
    if options.dataserver is not None and (told := preprocessor.private_only()):
        raise ValueRejected(
            f"{told} is for a private dataserver; the one at {options.dataserver} was told by the options of"
            " `dataserver serve`; drop one of the two"
        )
    cores = _cores(options, settings, preprocessor)
    backend, note = _backend(options, settings)
    sizes = train_sizes(settings, preprocessor, options.total_epochs)
    batch = settings.local_batch_size
    return Setup(options, settings, preprocessor, cores, backend, note, options.model, batch, sizes)


def _backend(options: TaskOptions, settings: SettingSnapshot) -> tuple[str, str]:
    """(backend, what to say about it). Whether a GPU is there is not asked: planning needs none."""
    if settings.device == "cuda":
        return "cuda", ""
    backend, note = runnable_backend(options.backend, _threads(options, settings))
    if options.tuning is not None and backend != "cpu":
        raise ValueRejected(
            f"tune({str(options.tuning)!r}) chooses among kernels of backend 'cpu', not {backend!r}{note}"
        )
    return backend, note


def _host_options(options: TaskOptions, settings: SettingSnapshot) -> list[str]:
    """Options that are about kernels of the CPU, where there are none in use."""
    threads = {"the task": options.compute_threads, "GLOBAL_SETTING": settings.compute_threads}
    found = [
        f"compute_threads is {number} in {place}, but a GPU computes; drop it"
        for place, number in threads.items()
        if number is not None
    ]
    if options.cores is not None and (told := _computing(options.cores)):
        found.append(
            f"{told} in the task's core plan, but a GPU computes; make the plan with CorePlan.beside_gpu(workers=n),"
            " and change parts of that"
        )
    if options.backend is not None:
        found.append(f"backend({options.backend!r}) computes on the CPU, but use_gpu() was called; drop one of the two")
    return found


def _computing(plan: CorePlan) -> str:
    """What a plan says of compute threads that a thread which launches cannot keep to; "" for nothing."""
    beside = CorePlan.beside_gpu(workers=plan.workers)
    if plan.compute_threads != beside.compute_threads:
        return f"compute_threads is {plan.compute_threads}"
    if plan.wait_policy is not beside.wait_policy:
        return f"wait_policy is {plan.wait_policy.name}"
    return ""


def _cores(options: TaskOptions, settings: SettingSnapshot, preprocessor: PreprocessorConfig) -> CorePlan:
    """The plan that was given, or one for this machine that keeps every number that was given."""
    plan = options.cores
    threads = _threads(options, settings, ("the task's core plan", plan.compute_threads if plan else None))
    workers = agreed(
        "preprocess_workers",
        ("PREPROCESSOR_SETTING", preprocessor.preprocess_workers),
        ("the task's core plan", plan.workers if plan else None),
    )
    if plan is None and settings.device == "cuda":
        return CorePlan.beside_gpu(workers=workers, processes=settings.world_size)
    return plan or CorePlan.choose(workers=workers, compute_threads=threads)


def _threads(options: TaskOptions, settings: SettingSnapshot, *others: tuple[str, int | None]) -> int | None:
    """The number of compute threads that was asked for, None for none; two different ones are refused."""
    asked = (("the task", options.compute_threads), ("GLOBAL_SETTING", settings.compute_threads))
    return agreed("compute_threads", *asked, *others)
