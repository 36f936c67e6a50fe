"""The compiler: BluePrint -> ArchPlan -> ComputationGraph -> passes -> MemoryPlan -> GraphAtlas (docs/compiler.md)."""

from renaissance.graph.arch_plan import ArchPlan, build_arch_plan
from renaissance.graph.atlas import AtlasEntry, GraphAtlas
from renaissance.graph.blueprint import BluePrint, fc, flatten, relu, seq
from renaissance.graph.captured import CapturedGraph, CaptureMode
from renaissance.graph.compiler import compile_model, verify_model
from renaissance.graph.computation_graph import ComputationGraph, Node
from renaissance.graph.ids import GraphId, Variant, train_program, val_program
from renaissance.graph.memory_plan import MemoryPlan, PlanGates
from renaissance.graph.model import CompiledModel, InputSlot, Parameter
from renaissance.graph.ops import OPS, OpDef, op_def
from renaissance.graph.request import CompileRequest
from renaissance.graph.text import graph_dot, graph_text, model_text

__all__ = [
    "OPS",
    "ArchPlan",
    "AtlasEntry",
    "BluePrint",
    "CaptureMode",
    "CapturedGraph",
    "CompileRequest",
    "CompiledModel",
    "ComputationGraph",
    "GraphAtlas",
    "GraphId",
    "InputSlot",
    "MemoryPlan",
    "Node",
    "OpDef",
    "Parameter",
    "PlanGates",
    "Variant",
    "build_arch_plan",
    "compile_model",
    "fc",
    "flatten",
    "graph_dot",
    "graph_text",
    "model_text",
    "op_def",
    "relu",
    "seq",
    "train_program",
    "val_program",
    "verify_model",
]
