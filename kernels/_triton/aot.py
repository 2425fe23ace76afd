"""Compiles every Triton kernel ahead of time for sm_90 and gfx942, on a machine without a card, and reports what came out.

    python -m rlk.kernels._triton.aot [operator ...]

Each ``kernels/<op>/triton.py`` offers ``examples()``: calls at the shapes of Qwen3-8B on meta tensors. The launches that they ask for are
recorded and compiled with the signature, constants and options that a card would get. An example that reads a tensor's values, and so
would make the host wait for the card, fails on a meta tensor.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from rlk.kernels._triton.launch import HERE, Launch, recorded

TARGETS = {"cuda:90": GPUTarget("cuda", 90, 32), "hip:gfx942": GPUTarget("hip", "gfx942", 64)}
OPERATORS = tuple(sorted(path.parent.name for path in HERE.parent.glob("*/triton.py")))
_MATRIX = re.compile(r"\b(wgmma\.mma_async\.sync\.aligned\.[\w.]+|mma\.sync\.aligned\.[\w.]+|v_mfma_\w+)")


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel.

    spills: bytes of stack on NVIDIA, spilled vector registers on AMD; shared: bytes; matrix: the matrix instructions chosen.
    multiplies: whether the source asks for a matrix product. text: the assembly.
    """

    operator: str
    kernel: str
    target: str
    constants: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    matrix: tuple[str, ...]
    multiplies: bool
    text: str

    def line(self) -> tuple[str, ...]:
        """The row of the report, without the assembly text."""
        shown = [f.name for f in fields(self) if f.name not in ("text", "multiplies")]
        return tuple(" ".join(v) if isinstance(v := getattr(self, name), tuple) else str(v) for name in shown)


def launches(operator: str, target: str) -> list[Launch]:
    """The distinct launches of the examples of ``operator`` on ``target`` ("cuda:90" or "hip:gfx942")."""
    with recorded(target.split(":")[0]) as asked:
        importlib.import_module(f"rlk.kernels.{operator}.triton").examples()
    distinct: dict[tuple[str, str], Launch] = {}
    for launch in asked:
        distinct.setdefault((launch.kernel.__name__, repr(_specialised(launch, TARGETS[target])[:4])), launch)
    return list(distinct.values())


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile one launch for ``target``."""
    options, signature, constants, attributes, names = _specialised(launch, TARGETS[target])
    source_of = GluonASTSource if launch.kernel.is_gluon() else triton.compiler.ASTSource
    source = source_of(launch.kernel, signature, constants, attributes)
    kernel = triton.compile(source, target=TARGETS[target], options=options)
    text = kernel.asm["ptx"] if target.startswith("cuda") else kernel.asm["amdgcn"]
    registers, spills = _nvidia_usage(kernel.asm["cubin"]) if target.startswith("cuda") else _amd_usage(text)
    return Compiled(
        operator=launch.operator, kernel=launch.kernel.__name__, target=target, constants=names,
        warps=kernel.metadata.num_warps, stages=launch.options["num_stages"], registers=registers, spills=spills,
        shared=kernel.metadata.shared, matrix=tuple(sorted(set(_MATRIX.findall(text)))),
        multiplies=any(product in kernel.asm["ttgir"] for product in ("tt.dot", "warp_group_dot")), text=text,
    )  # fmt: skip


def compile_all(operators: Sequence[str] = OPERATORS, targets: Sequence[str] = tuple(TARGETS)) -> Iterator[Compiled]:
    """Every example of every operator on every target, one after the other."""
    for operator in operators:
        for target in targets:
            for launch in launches(operator, target):
                yield compile_launch(launch, target)


def _specialised(launch: Launch, target: GPUTarget) -> tuple[dict[str, Any], dict[str, str], dict[Any, Any], dict[Any, Any], str]:
    """Options, signature, constants and attributes as Triton's own launcher derives them from the arguments, and the constants as text."""
    kernel, backend = launch.kernel, make_backend(target)
    given = {"debug": False, "instrumentation_mode": "", **launch.options}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments, **launch.constants, **given)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    names = " ".join(f"{name}={value}" for name, value in launch.constants.items())
    return parsed.__dict__, signature, constants, attributes, names


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) that the wheel's own cuobjdump reports."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = subprocess.run([str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", listed)
    assert found is not None, listed
    return int(found[1]), int(found[2])


def _amd_usage(text: str) -> tuple[int, int]:
    """(vector registers, spilled vector registers) of the kernel's own metadata."""
    number = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
    return number["vgpr_count"], number["vgpr_spill_count"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", default=list(OPERATORS), metavar="operator", help=", ".join(OPERATORS))
    rows = [tuple(f.name for f in fields(Compiled) if f.name not in ("text", "multiplies"))]
    for compiled in compile_all(parser.parse_args(arguments).operators):
        rows.append(compiled.line())
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
