"""Values as data, and back, without pickle: nothing that arrives is imported or run.

trees     a tree of plain values and tensors  <->  JSON, and tensors by name
objects   any plain value  <->  bytes. More kinds of values: sets, dataclasses, paths, …
files     a tree  <->  one file
"""

from farandole.serialization.trees import pack, unpack

__all__ = ["pack", "unpack"]
