"""Copies of a module with lines replaced: faults that a comparison must see."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any


def planted_module(module: ModuleType, *replacements: tuple[str, str]) -> Any:
    """``module`` from its source with each (line, fault) replaced, as a module of its own."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    for line, fault in replacements:
        assert text.count(line) == 1, line
        text = text.replace(line, fault)
    path = Path(tempfile.mkdtemp()) / "planted.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(module.__name__ + "_planted", path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
