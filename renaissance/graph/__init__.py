"""The compiler: BluePrint -> ArchPlan -> ComputationGraph -> passes -> MemoryPlan -> GraphAtlas (docs/compiler.md)."""

from renaissance.graph.blueprint import BluePrint, fc, flatten, relu, seq
from renaissance.graph.captured import CapturedGraph, CaptureMode
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.ids import GraphId, Variant, train_program, val_program
from renaissance.graph.model import CompiledModel, InputSlot, Parameter
from renaissance.graph.ops import OPS, OpDef, op_def
from renaissance.graph.request import CompileRequest

__all__ = [
    "OPS",
    "BluePrint",
    "CaptureMode",
    "CapturedGraph",
    "CompileRequest",
    "CompiledModel",
    "ComputationGraph",
    "GraphId",
    "InputSlot",
    "Node",
    "OpDef",
    "Parameter",
    "Variant",
    "fc",
    "flatten",
    "op_def",
    "relu",
    "seq",
    "train_program",
    "val_program",
]
