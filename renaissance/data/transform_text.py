"""Transforms as a person writes them on a command line: ``RandomResizedCrop(224, scale=(0.2, 1))``.

The text is taken apart as Python's syntax and never run: a name of ``transforms.LISTABLE`` with numbers, words, True or
False, lists of these, and fractions such as ``3/4``; anything else is refused.
"""

from __future__ import annotations

import ast

from renaissance.core.errors import ValueRejected
from renaissance.data.transforms import LISTABLE, Transform

MAX_CHARS = 1000
EXAMPLE = "RandomResizedCrop(224, scale=(0.2, 1))"


def transform_from_text(text: str) -> Transform:
    """The transform that ``text`` names; parentheses may be left out where no argument is given.

    Raises ValueRejected for text that is no such call, an unknown name, and arguments that do not fit.
    """
    if len(text) > MAX_CHARS:
        raise ValueRejected(f"transform {text[:60]!r}...: {len(text)} characters; at most {MAX_CHARS}")
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _no_call(text) from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise _no_call(text)
    cls = LISTABLE.get(call.func.id)
    if cls is None:
        raise ValueRejected(f"unknown transform {call.func.id!r}; expected one of: {', '.join(LISTABLE)}")
    try:
        given = [_value(text, argument) for argument in call.args]
        named = {keyword.arg: _value(text, keyword.value) for keyword in call.keywords if keyword.arg is not None}
        if len(named) != len(call.keywords):
            raise _no_call(text)
        return cls(*given, **named)
    except RecursionError:
        raise _no_call(text) from None
    except TypeError as error:  # Python's own words about missing and unknown arguments
        raise ValueRejected(f"transform {text!r}: {str(error).replace('__init__()', cls.__name__)}") from None


def _value(text: str, node: ast.expr) -> object:
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(text, part) for part in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        above, below = _value(text, node.left), _value(text, node.right)
        if isinstance(above, int | float) and isinstance(below, int | float) and below:
            return above / below
        raise _no_call(text)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        raise _no_call(text) from None
    if not isinstance(value, int | float | str):
        raise _no_call(text)
    return value


def _no_call(text: str) -> ValueRejected:
    return ValueRejected(
        f"transform {text!r}: expected a name with numbers, words, pairs or fractions in parentheses, as in {EXAMPLE}"
    )


def transform_to_text(transform: Transform) -> str:
    """The same form back, with every argument by name; shortest floats."""
    plain = transform.to_dict()
    arguments = [
        f"{name}={tuple(value) if isinstance(value, list) else value!r}"
        for name, value in plain.items()
        if name != "type"
    ]
    return f"{transform.name}({', '.join(arguments)})"
