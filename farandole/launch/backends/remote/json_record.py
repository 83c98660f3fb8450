"""Frozen dataclasses that travel between launchers and other hosts as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class JsonRecord:
    """Its subclasses have fields that JSON can hold."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Raises `ValueError` for what another version may have written."""
        return cls.from_fields(json.loads(content))

    @classmethod
    def from_fields(cls, said: Any) -> Self:
        """The same, of what was JSON."""
        names = [field.name for field in fields(cls)]
        if not isinstance(said, dict) or sorted(said) != sorted(names):
            raise ValueError(f"{cls.__name__} has the fields {', '.join(names)}: {said!r:.200}")
        return cls(**said)
