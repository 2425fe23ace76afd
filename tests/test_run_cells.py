"""The sessions that run the cells of a card: every cell in one, the largest alone, and an end at the deadline that leaves a report."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

from acceptance import conftest
from rlk.acceptance.matrix import CARDS, SNAPSHOT_WORKLOAD, enumerate_cells, several_cards

HERE = Path(__file__).parent / "gpu"
REQUIRED = [cell for cell in enumerate_cells("cuda") if cell.required]


@pytest.fixture(scope="module")
def run_cells() -> ModuleType:
    sys.path.insert(0, str(HERE))  # as for a script there
    try:
        import run_cells
    finally:
        sys.path.remove(str(HERE))
    return run_cells


@pytest.mark.parametrize("cards", [("0",), ("0", "1"), ("4", "5", "6")])
def test_every_required_cell_is_in_one_session(run_cells: ModuleType, cards: tuple[str, ...]) -> None:
    steps = list(run_cells.steps(run_cells.plan(cards, 3)))
    named = Counter(word for step in steps for word in step.arguments if word.startswith("cuda/"))
    assert named == Counter(cell.cell_id for cell in REQUIRED if cell.scope != "ws1")
    assert [step.shown for step in steps if step.summary == "ws1"] == [f"--scope ws1 --shard {i}/3" for i in (1, 2, 3)]
    assert len({step.name for step in steps}) == len(steps)
    assert {card for step in steps for card in step.card.split(",")} == set(cards[:2])
    assert {step.card for step in steps if step.name.startswith("ranks_")} == {",".join(cards[:2])}
    assert all(
        cell_id.split("/")[1] in run_cells.SUMMARIES[step.summary] for step in steps for cell_id in step.arguments if "cuda/" in cell_id
    )
    assert steps[-1].name == "depth"


def test_nothing_but_small_ranks_runs_on_the_card_of_the_whole_model_beside_it(run_cells: ModuleType) -> None:
    *others, last = run_cells.plan(("0", "1"), 2)
    before, depth = last
    assert depth.name == "depth"
    assert "depth_weights" in {step.name for step in run_cells.steps(before)}
    assert depth.card not in {step.card for step in run_cells.steps(tuple(others)) if not step.name.startswith("ranks_")}


def _step(run_cells: ModuleType, name: str, code: str) -> object:
    return run_cells.Step(name, "", ("-c", code))


def test_a_list_runs_in_turn_and_a_tuple_at_once(run_cells: ModuleType, tmp_path: Path) -> None:
    write = "import sys, time; from pathlib import Path; out = Path({out!r}); (out / {name!r}).touch(); end = time.monotonic() + 20\n"
    wait = "while not all((out / each).exists() for each in {others!r}): assert time.monotonic() < end; time.sleep(0.01)\n"
    at_once = [
        _step(run_cells, name, (write + wait).format(out=str(tmp_path), name=name, others=["a_0", "a_1"])) for name in ("a_0", "a_1")
    ]
    after = _step(run_cells, "b", f"import os; assert {{'a_0', 'a_1'}} <= set(os.listdir({str(tmp_path)!r}))")
    never = _step(run_cells, "c", "raise SystemExit")
    run_cells.carry_out([tuple(at_once), after, never], ["a", "b"], tmp_path, time.monotonic() + 60)
    assert {log.name: log.read_text() for log in tmp_path.glob("*.log")} == {f"session_{name}.log": "" for name in ("a_0", "a_1", "b")}


SCRIPT = """
import signal, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
import run_cells
run_cells.hear_interrupts()
code = "import time\\ntry:\\n    time.sleep(60)\\nexcept KeyboardInterrupt:\\n    print('the report')"
steps = [run_cells.Step(name, "", ("-c", code)) for name in ("slow", "late")]
run_cells.carry_out(steps, [], Path({out!r}), time.monotonic() + 2)
"""


def test_at_the_deadline_a_session_may_write_its_report_even_as_a_shells_background_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(HERE), out=str(tmp_path)))
    shell = ["sh", "-c", f"{sys.executable} {script} > {tmp_path}/said & wait"]
    subprocess.run(shell, check=True, timeout=100, cwd=HERE.parents[1], env={"PYTHONPATH": str(HERE.parents[1]), "PATH": "/usr/bin:/bin"})
    assert (tmp_path / "session_slow.log").read_text() == "the report\n"
    said = (tmp_path / "said").read_text()
    assert re.search(r"^slow: exit code 0, \d s$", said, re.M)
    assert "late: not begun, no time is left" in said


def test_a_cell_that_wants_what_is_not_here_is_not_lost(run_cells: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    several = [cell for cell in REQUIRED if several_cards(cell)]
    refused = {}
    for cell in several:
        with pytest.raises(RuntimeError, match=f"{cell.subject} needs {CARDS} cards, here are 1") as raised:
            conftest.cards._get_wrapped_function()(cell)
        refused[cell] = str(raised.value)
    conftest.cards._get_wrapped_function()(next(cell for cell in REQUIRED if cell not in several))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: CARDS)
    conftest.cards._get_wrapped_function()(several[0])
    ran_out = "no result: the cell did not run to its end"
    assert {run_cells.waits_for(cell.cell_id, reason) for cell, reason in refused.items()} == {f"{CARDS} cards"}
    assert {run_cells.waits_for(cell.cell_id, ran_out) for cell in several} == {""}
    assert {run_cells.waits_for(cell.cell_id, ran_out) for cell in REQUIRED if cell.workload == SNAPSHOT_WORKLOAD} == {"published weights"}
    assert run_cells.waits_for("cuda/ws1/rms_norm/m4/forward", ran_out) == ""


def test_a_run_that_could_not_be_joined_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    environment = {"PYTHONPATH": str(HERE.parents[1]), "PATH": "/usr/bin:/bin", "OUT": str(tmp_path)}
    command = [sys.executable, str(HERE / "run_cells.py"), "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=HERE.parents[1], env=environment)
    assert (done.returncode, [each.name for each in tmp_path.iterdir()]) == (2, ["cuda"])
    assert "exists: set OUT to another folder" in done.stderr
