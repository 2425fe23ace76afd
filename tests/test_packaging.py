"""Both ways to install: editable (this environment) and wheel. `rlk.kernels` is there, a top-level `kernels` never is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import importlib.util, rlk, rlk.kernels.rms_norm as op, torch
spec = importlib.util.find_spec("kernels")
assert spec is None, f"a top-level kernels module is visible: {spec.origin}"
y = op.rms_norm(torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16), 1e-6)
assert float(y[0, 0]) == 1.0
print(rlk.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source") / "rlk", tmp_path_factory.mktemp("wheel")
    for part in ("rlk", "kernels"):
        shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("rlk-*.whl"))


def test_wheel_holds_every_source_and_no_top_level_kernels(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"rlk"}
    tracked = [p for p in (ROOT / "kernels").rglob("*") if p.suffix in (".py", ".cpp", ".h")]
    tracked += [p for p in (ROOT / "rlk").rglob("*") if p.suffix in (".py", ".j2") and "kernels" not in p.relative_to(ROOT).parts[1:2]]
    expected = {str(p.relative_to(ROOT)) if p.is_relative_to(ROOT / "rlk") else f"rlk/{p.relative_to(ROOT)}" for p in tracked}
    assert not expected - names


@pytest.mark.parametrize("way", ["editable", "wheel"])
def test_operators_run_from_either_install(way: str, wheel: Path, tmp_path: Path) -> None:
    code = PROBE
    if way == "wheel":
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
        code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n" + PROBE
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.strip()).is_relative_to(ROOT if way == "editable" else tmp_path)


def test_editable_kernels_are_the_checkout() -> None:
    import rlk.kernels

    assert Path(rlk.kernels.__path__[0]).resolve() == ROOT / "kernels"
    assert (ROOT / "rlk" / "kernels").is_symlink()
    assert (ROOT / "rlk" / "kernels").readlink() == Path("../kernels")
