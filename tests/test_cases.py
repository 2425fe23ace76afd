"""Every public failure is owned by a cell or test that exists, or is missing by name."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
import torch

from rlk.acceptance.cases import CASES, Case, lookup
from rlk.acceptance.matrix import all_cells

TESTS = Path(__file__).parent
ATTACKS = {attack["name"] for attack in tomllib.loads((TESTS / "data" / "gate" / "attacks.toml").read_text())["attack"]}
REQUIRED = {cell.cell_id for cell in all_cells() if cell.required}


def _exists(test: str) -> bool:
    path, _, node = test.partition("::")
    function, _, parameter = node.partition("[")
    names = {n.name for n in ast.parse((TESTS / path).read_text()).body if isinstance(n, ast.FunctionDef)}
    return function in names and (not parameter or (path == "test_gate_attacks.py" and parameter.removesuffix("]") in ATTACKS))


def test_all_forty_are_registered() -> None:
    assert [case.number for case in CASES] == list(range(1, 41))
    assert lookup(28).seen == "verl-omni#637"
    with pytest.raises(KeyError, match="case 41 is not registered: use 1 … 40"):
        lookup(41)


@pytest.mark.parametrize("case", CASES, ids=[str(case.number) for case in CASES])
def test_every_owner_exists(case: Case) -> None:
    assert case.seen
    assert case.failure
    assert bool(case.cells or case.tests) != bool(case.missing)
    assert [cell for cell in case.cells if cell not in REQUIRED] == []
    assert [test for test in case.tests if not _exists(test)] == []


def test_an_owner_that_does_not_exist_is_seen() -> None:
    assert not _exists("test_cases.py::test_nothing_of_the_kind")
    assert not _exists("test_gate_attacks.py::test_attack[no such attack]")
    assert _exists("test_cases.py::test_all_forty_are_registered")


def test_negation_keeps_the_sign_of_zero() -> None:
    assert (-torch.zeros(1)).view(torch.int32).item() & 0xFFFFFFFF == 0x80000000


def test_no_cell_depends_on_a_schedulers_groups() -> None:
    sources = [*TESTS.parent.glob("acceptance/*.py"), *TESTS.parent.glob("rlk/acceptance/*.py")]
    assert len(sources) > 10
    assert [path.name for path in sources if "xdist_group" in path.read_text() or "loadgroup" in path.read_text()] == []
