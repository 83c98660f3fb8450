"""Which memory an operation of a recorded graph shares or writes to.

A cut must not separate a value from an operation that writes to its memory: the block behind the
cut would write to a copy. So views are followed to the operation that made the memory.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

_IN_PLACE_OPERATORS = (
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.setitem,
)


# Many of these only sometimes return a view (`reshape`, `to`, `dropout`). Taking a copy for a view
# forbids a cut that would have been possible. The opposite mistake would let a block write to a
# tensor that another one still reads.
_VIEWS = {
    *("adjoint", "alias", "as_strided", "broadcast_to", "chunk", "contiguous", "cpu", "cuda"),
    *("detach", "diagonal", "double", "dropout", "dsplit", "expand", "expand_as", "flatten"),
    *("float", "getattr", "getitem", "half", "hsplit", "imag", "movedim", "moveaxis", "narrow"),
    *("permute", "positive", "ravel", "real", "reshape", "reshape_as", "select", "split"),
    *("squeeze", "swapaxes", "swapdims", "t", "tensor_split", "to", "transpose", "type"),
    *("type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"),
    *("view_as_complex", "view_as_real", "vsplit"),
}
"""Operations whose result may lie where their first argument lies."""


_VIEWING_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)


def alias_root(node: fx.Node, attributes: Mapping[str, Any]) -> fx.Node:
    """The operation that made the memory which a value may share."""
    while node.args and isinstance(node.args[0], fx.Node):
        if node.op == "call_module":
            shares = isinstance(attributes.get(str(node.target)), _VIEWING_MODULES)
        else:
            shares = node.op in ("call_function", "call_method") and _name(node) in _VIEWS
        if not shares and not writes_in_place(node, attributes):
            break
        node = node.args[0]
    return node


def written_roots(node: fx.Node, attributes: Mapping[str, Any]) -> list[fx.Node]:
    """What an operation writes to."""
    written = [node.args[0]] if writes_in_place(node, attributes) else []
    out = node.kwargs.get("out")
    written += out if isinstance(out, (tuple, list)) else [out]
    return [alias_root(each, attributes) for each in written if isinstance(each, fx.Node)]


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def writes_in_place(node: fx.Node, attributes: Mapping[str, Any]) -> bool:
    """Whether an operation changes its first argument."""
    if not node.args:
        return False
    if node.op == "call_module":
        return getattr(attributes.get(str(node.target)), "inplace", False) is True
    name = _name(node)
    return (
        (name.endswith("_") and not name.endswith("__"))
        or node.kwargs.get("inplace") is True
        or node.target in _IN_PLACE_OPERATORS
    )
