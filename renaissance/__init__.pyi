"""The public names, for type checkers; ``__init__.py`` imports each on first use."""

from renaissance.algo import SGD as SGD
from renaissance.algo import Adam as Adam
from renaissance.algo import AdamW as AdamW
from renaissance.algo import ConstantLR as ConstantLR
from renaissance.algo import CosineAnnealingLR as CosineAnnealingLR
from renaissance.algo import CrossEntropyLoss as CrossEntropyLoss
from renaissance.core.dtype import DType as DType
from renaissance.core.enums import CompileInfo as CompileInfo
from renaissance.core.enums import DatasetType as DatasetType
from renaissance.core.enums import FanMode as FanMode
from renaissance.core.enums import InitKind as InitKind
from renaissance.core.enums import Metric as Metric
from renaissance.core.enums import NormMode as NormMode
from renaissance.core.enums import Phase as Phase
from renaissance.core.errors import RenaissanceError as RenaissanceError
from renaissance.core.machine import CorePlan as CorePlan
from renaissance.core.machine import WaitPolicy as WaitPolicy
from renaissance.core.settings import GLOBAL_SETTING as GLOBAL_SETTING
from renaissance.core.shape import Shape as Shape
from renaissance.data.preprocessor import PREPROCESSOR_SETTING as PREPROCESSOR_SETTING
from renaissance.data.recipe import Recipe as Recipe
from renaissance.data.station import Batch as Batch
from renaissance.data.station import TransferStation as TransferStation
from renaissance.data.transforms import Pad as Pad
from renaissance.data.transforms import RandomCrop as RandomCrop
from renaissance.data.transforms import RandomErasing as RandomErasing
from renaissance.data.transforms import RandomHorizontalFlip as RandomHorizontalFlip
from renaissance.data.transforms import RandomRotation as RandomRotation
from renaissance.data.transforms import RandomScale as RandomScale
from renaissance.graph import BluePrint as BluePrint
from renaissance.graph import fc as fc
from renaissance.graph import flatten as flatten
from renaissance.graph import relu as relu
from renaissance.graph import seq as seq
from renaissance.task import DeepLearningTask as DeepLearningTask
from renaissance.task import TrainingResult as TrainingResult
from renaissance.tensor import Initializer as Initializer
from renaissance.tensor import Tensor as Tensor

__version__: str
