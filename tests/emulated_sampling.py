"""Run by test_sampling_sm90.py: the Hopper sampler's own source, its threads emulated one by one, gives the ids and supports of the rule.

python tests/emulated_sampling.py FOLDER [TEXT OTHER]     (the emulation is built in FOLDER, with OTHER for TEXT in the source)
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch
from emulated import build
from interpreted_sampling import both, follow_the_rule, rows

from rlk.kernels.sampling import sm90


def emulated(folder: Path, *changes: tuple[str, str]) -> ctypes.CDLL:
    for name, header in sm90.headers().items():
        (folder / name).write_text(header)
    return build(folder, sm90.SOURCE, "emulated_sampling.cpp", sm90.definitions(sm90.FEWEST), *changes)


def main(library: ctypes.CDLL) -> None:
    def run(logits: torch.Tensor, *arguments: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, groups = sm90.deal(arguments[7], sm90.FEWEST)  # type: ignore[arg-type]
        step, ids, support = sm90.prepare(groups, logits, *arguments)  # type: ignore[arg-type]
        ids.fill_(-1)
        if support is not None:
            support.fill_(-1)
        library.emulate(ctypes.byref(step), len(logits))
        return ids, None if support is None else support.view(torch.uint8)

    follow_the_rule(run)
    generator, wide = torch.Generator().manual_seed(5), 9000  # several groups of ids in each warp, a last one that is cut short
    for name, logits in {
        "normal": torch.randn(10, wide, generator=generator),
        "ties": torch.randint(0, 5, (10, wide), generator=generator).float(),
        "close": 1e-6 * torch.randn(10, wide, generator=generator) - 2,
    }.items():
        both(run, f"{name}, {wide} ids", logits, rows(10), wide, 9024)


if __name__ == "__main__":
    main(emulated(Path(sys.argv[1]), *zip(sys.argv[2::2], sys.argv[3::2])))
    print("the Hopper sampler follows the rule")
