"""The house: imports go downward only, engines stay in their rooms, files stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOOR = {
    "rlk.cli": 6,
    "rlk.loop": 5,
    "rlk.rollout": 4,
    "rlk.train": 4,
    "rlk.model": 3,
    "rlk.acceptance": 3,
    "rlk.parallel": 2.5,
    "rlk.kernels": 2,
    "rlk.evidence": 2,
    "rlk.contract": 1,
}
ENGINE_ROOMS = {
    "vllm": ("rlk/rollout/vllm/",),
    "megatron": ("rlk/train/",),
    "ray": ("rlk/loop/",),
    "torch": ("rlk/kernels/", "rlk/parallel/", "rlk/evidence/", "rlk/model/", "rlk/acceptance/", "rlk/rollout/", "rlk/train/", "rlk/loop/"),
}
LONGEST = 450


def _sources() -> list[tuple[str, Path]]:
    """(path as imported, file): the kernels room is read through its real folder."""
    found = [(str(p.relative_to(ROOT)), p) for p in sorted((ROOT / "rlk").rglob("*.py")) if "rlk/kernels/" not in str(p)]
    return found + [(f"rlk/{p.relative_to(ROOT)}", p) for p in sorted((ROOT / "kernels").rglob("*.py"))]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room(module: str) -> str | None:
    return next((room for room in FLOOR if module == room or module.startswith(room + ".")), None)


def _upward(name: str, path: Path) -> list[str]:
    room = _room(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    if room is None:
        return []
    targets = [(target, other) for target in _imports(path) if (other := _room(target)) is not None and other != room]
    return [f"{name} (floor {FLOOR[room]}) imports {target}" for target, other in targets if FLOOR[other] >= FLOOR[room]]


def test_imports_go_downward() -> None:
    sources = _sources()
    assert len(sources) > 30
    assert [line for name, path in sources for line in _upward(name, path)] == []


def test_an_upward_import_is_seen(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("from rlk.loop import controller\n")
    assert _upward("rlk/contract/planted.py", planted)


@pytest.mark.parametrize("engine", sorted(ENGINE_ROOMS))
def test_engines_stay_in_their_rooms(engine: str) -> None:
    rooms = ENGINE_ROOMS[engine]
    strangers = [n for n, p in _sources() if any(m.split(".")[0] == engine for m in _imports(p)) and not n.startswith(rooms)]
    assert strangers == []


def test_nobody_imports_a_top_level_kernels() -> None:
    assert [n for n, p in _sources() if any(m.split(".")[0] == "kernels" for m in _imports(p))] == []


def test_files_hold_one_idea() -> None:
    files = [p for _, p in _sources()] + [p for part in ("tests", "acceptance", "benchmarks", "ci") for p in (ROOT / part).rglob("*.py")]
    files += list((ROOT / "kernels").rglob("*.cpp")) + list((ROOT / "kernels").rglob("*.h"))
    assert {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > LONGEST} == {}
