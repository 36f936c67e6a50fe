"""Renaissance: a preprocessing daemon and a trainer that give the same bytes every time.

The names below are imported when they are first used, so that ``import renaissance`` costs nothing: the daemon's
workers and the commands pay only for what they need. ``__init__.pyi`` says the same to type checkers.
"""

import os
from importlib import import_module

from renaissance.core.kernel_cache import use_kernel_cache

__version__ = "0.1.0"

# Numba takes Intel's vector math library when it happens to be loaded. Whether it is would then depend on the order of
# imports, and the last bits of exp and log with it: never, so that one machine gives one result.
os.environ["NUMBA_DISABLE_INTEL_SVML"] = "1"
use_kernel_cache()

_HOME = {
    "renaissance.algo": (
        "LARS",
        "SGD",
        "WSDLR",
        "Adam",
        "AdamW",
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWithWarmRestartsLR",
        "CrossEntropyLoss",
        "ExponentialLR",
        "MultiStepLR",
        "PolynomialLR",
        "StepLR",
    ),
    "renaissance.core.dtype": ("DType",),
    "renaissance.core.enums": (
        "TTA",
        "CompileInfo",
        "DatasetType",
        "FanMode",
        "InitKind",
        "Metric",
        "NormMode",
        "Phase",
    ),
    "renaissance.core.errors": ("RenaissanceError",),
    "renaissance.core.machine": (
        "CorePlan",
        "WaitPolicy",
    ),
    "renaissance.core.settings": ("GLOBAL_SETTING",),
    "renaissance.core.shape": ("Shape",),
    "renaissance.data.preprocessor": ("PREPROCESSOR_SETTING",),
    "renaissance.data.recipe": ("Recipe",),
    "renaissance.data.station": (
        "Batch",
        "TransferStation",
    ),
    "renaissance.data.transforms": (
        "CenterCrop",
        "ColorJitter",
        "DoNothing",
        "FastRandomResizedCrop",
        "GaussianBlur",
        "GaussianNoise",
        "Pad",
        "RandomAutocontrast",
        "RandomCrop",
        "RandomErasing",
        "RandomGrayscale",
        "RandomHorizontalFlip",
        "RandomResizedCrop",
        "RandomRotation",
        "RandomScale",
        "Resize",
    ),
    "renaissance.graph": (
        "BlockStyle",
        "BluePrint",
        "add2",
        "avgpool",
        "block",
        "bn",
        "cbr",
        "cbrp",
        "channel_padding",
        "conv",
        "conv_bn_relu",
        "conv_dw",
        "dropout",
        "elu",
        "fc",
        "flatten",
        "gap",
        "gap_fc",
        "group_conv",
        "hardswish",
        "identity",
        "leaky_relu",
        "maxpool",
        "mbconv",
        "relu",
        "relu6",
        "repeat",
        "seq",
        "sigmoid",
        "silu",
        "tanh_act",
    ),
    "renaissance.task": (
        "DeepLearningTask",
        "SimpleTask",
        "TrainingResult",
    ),
    "renaissance.task.predict": (
        "Prediction",
        "Predictor",
        "load_model",
    ),
    "renaissance.tensor": (
        "Initializer",
        "Tensor",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> object:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
