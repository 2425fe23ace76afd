"""Ranks whose cards write each other's memory: one kernel per rank and collective, no host in between, the same in a CUDA graph."""

from __future__ import annotations

import ctypes
import functools
import json
import math
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.distributed as dist

from rlk.contract.numerics import ContractError, is_power_of_two
from rlk.kernels._native.cuda import CudaKernel, CudaSource, _checked
from rlk.parallel.transport import Gloo

if TYPE_CHECKING:
    from rlk.parallel.link import Link

SOURCE = CudaSource("tree_sum", Path(__file__).with_name("peer.cu.h"), Path(__file__))
THREADS, BLOCKS, SLOT = 512, 132, 4096
"""SLOT: vectors of 16 bytes that a block sends to one rank in one step, at most."""
MOST = 2**31 - 4
"""Elements of a sum: the kernels count them in 32 bits, to the end of the last vector."""

SLICED_FROM = {torch.float32: 1 << 24, torch.bfloat16: 1 << 22}
"""Bytes of a part from which two ranks add a slice each instead of all elements both, by the type of the sum
(benchmarks/results/two_cards_h200.json)."""

Form = Literal["whole", "sliced", "move"]


class Peer(Gloo):
    """Each rank of a group makes its own, with its current card, at the same point; one stream of each calls them in the same order. What
    lies in host memory goes over Gloo.

    Nothing waits for the host. A kernel that a rank leaves unanswered for the link's grace ends with an error of the card, which the host
    meets where it waits next, and :meth:`rlk.parallel.link.Link.unit` turns into the name of that rank.
    """

    whole_below: ClassVar[int] = 0

    def __init__(self, link: Link, handle: dist.ProcessGroup) -> None:
        super().__init__(link, handle)
        self._device = torch.device("cuda", torch.cuda.current_device())
        for form, bfloat16 in (("move", False), *product(("whole", "sliced"), (False, True))):
            _kernel(self._device, self.size, form, bfloat16)  # compiled and loaded before a graph is captured
        flags, rooms = 4 * self.size * BLOCKS, 3
        self._window = torch.zeros(flags + BLOCKS * rooms * self.size * SLOT * 16, dtype=torch.uint8, device=self._device)
        self._steps = torch.zeros(BLOCKS, dtype=torch.int32, device=self._device)
        self._failed = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        link.unanswered.append(lambda: bool(self._failed.item()))
        torch.cuda.synchronize()
        every = link.share(json.dumps(_shared(self._window)))
        members = dist.get_process_group_ranks(handle)
        self._windows = [self._window.data_ptr() if rank == link.rank else _mapped(*json.loads(every[rank])) for rank in members]

    def gather(self, piece: torch.Tensor) -> torch.Tensor:
        return self._move(piece, 0) if piece.is_cuda else super().gather(piece)

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        return self._move(rows, 1) if rows.is_cuda else super().exchange(rows)

    def tree_sum(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sum of fp32 parts by the tree of adjacent pairs, rounded once to ``dtype``, fp32 or bf16."""
        return self.summed(part, dtype, sum_form(self.size, part.nbytes, dtype))

    def summed(self, part: torch.Tensor, dtype: torch.dtype, form: Form, blocks: int = BLOCKS, slot: int = SLOT) -> torch.Tensor:
        """:meth:`tree_sum` in one of its forms.

        Raises ContractError unless the number of ranks is a power of two, ValueError for more elements than the kernels can count.
        """
        if not is_power_of_two(self.size):
            raise ContractError(f"{self.size} ranks are not a power of two: use 1, 2, 4 or 8")
        if part.numel() > MOST:
            raise ValueError(f"a sum of {part.numel()} elements: cards add at most {MOST} at once, hand over the sum in pieces")
        out = torch.empty(part.shape, dtype=dtype, device=part.device)
        vectors = -(-part.numel() // 4)
        self._launch(form, part, out, vectors, vectors if form == "whole" else -(-vectors // self.size), 0, blocks, slot)
        return out

    def bytes_sent(self, part: torch.Tensor, dtype: torch.dtype) -> int:
        """Of :meth:`tree_sum`, to all other ranks: whole parts, or a slice of the part to each and a slice of the sum to all."""
        if sum_form(self.size, part.nbytes, dtype) == "whole":
            return (self.size - 1) * part.nbytes
        return (self.size - 1) * -(-part.numel() // self.size) * (part.element_size() + dtype.itemsize)

    def _move(self, sent: torch.Tensor, stride: int) -> torch.Tensor:
        """[n] to all, or row r of [ranks, n] to rank r -> [ranks, n]."""
        count = sent.numel() // (self.size if stride else 1)
        out = sent.new_empty(self.size, count)
        size = count * sent.element_size()
        if size % 16:
            raise ValueError(f"{size} bytes for each rank: cards send each other multiples of 16")
        self._launch("move", sent, out, size // 16, size // 16, stride * size // 16, BLOCKS, SLOT)
        return out

    def _launch(
        self, form: Form, sent: torch.Tensor, out: torch.Tensor, vectors: int, share: int, stride: int, blocks: int, slot: int
    ) -> None:
        if not vectors:
            return
        sent = sent.contiguous()
        if sent.data_ptr() % 16:
            sent = sent.clone()
        blocks, each = divided(share, blocks, slot)
        problem = _problem(self.size)(
            sent.data_ptr(), out.data_ptr(), (ctypes.c_void_p * self.size)(*self._windows),
            self._steps.data_ptr(), self._failed.data_ptr(), int(self.link.presence.grace * 1e9),
            vectors, sent.numel(), self.rank, each, stride,
        )  # fmt: skip
        rounds = form != "move" and out.dtype == torch.bfloat16
        _kernel(self._device, self.size, form, rounds).launch(blocks, (problem,), self._device)


def sum_form(ranks: int, size: int, dtype: torch.dtype) -> Form:
    """How :meth:`Peer.tree_sum` adds fp32 parts of ``size`` bytes: whole parts take one exchange, slices two and fewer bytes."""
    return "whole" if ranks == 2 and size < SLICED_FROM[dtype] else "sliced"


def divided(vectors: int, blocks: int = BLOCKS, slot: int = SLOT) -> tuple[int, int]:
    """Blocks of a launch, and vectors that each sends to one rank in a step: all blocks in one step where that fits ``slot``, a multiple of
    THREADS. vectors: for one rank, at least 1."""
    each = min(slot, math.ceil(math.ceil(vectors / blocks) / THREADS) * THREADS)
    return min(blocks, math.ceil(vectors / each)), each


class _Handle(ctypes.Structure):
    """The driver's name of an allocation, for other processes."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def _shared(memory: torch.Tensor) -> tuple[str, int]:
    """What another process of this host needs to reach a card's memory: handle of its allocation, and bytes from there."""
    handle, base, size = _Handle(), ctypes.c_uint64(), ctypes.c_size_t()
    _checked("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(memory.data_ptr()))
    _checked("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(memory.data_ptr()))
    return bytes(handle).hex(), memory.data_ptr() - base.value


def _mapped(handle: str, offset: int) -> int:
    """Address of that memory for kernels of this process's current card; mapped for as long as the process lives."""
    base, reach_peers = ctypes.c_uint64(), 1
    _checked("cuIpcOpenMemHandle_v2", ctypes.byref(base), _Handle.from_buffer_copy(bytes.fromhex(handle)), ctypes.c_uint(reach_peers))
    return base.value + offset


@functools.cache
def _kernel(device: torch.device, ranks: int, form: Form, bfloat16: bool) -> CudaKernel:
    definitions = {"RANKS": ranks, "BLOCKS": BLOCKS, "THREADS": THREADS, "SLOT_VECTORS": SLOT, "BFLOAT16_OUT": int(bfloat16)}
    return CudaKernel(SOURCE.compiled(definitions, {}), form, device, THREADS, 0)


@functools.cache
def _problem(ranks: int) -> type[ctypes.Structure]:
    class Problem(ctypes.Structure):
        _fields_ = [
            ("part", ctypes.c_void_p), ("out", ctypes.c_void_p), ("windows", ctypes.c_void_p * ranks), ("steps", ctypes.c_void_p),
            ("failed", ctypes.c_void_p), ("patience", ctypes.c_uint64),
            *((name, ctypes.c_int) for name in ("vectors", "count", "rank", "each", "stride")),
        ]  # fmt: skip

    return Problem
