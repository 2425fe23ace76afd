"""On a card: the update of all tensors at once against its composition of torch's elementwise operations, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from unittest import mock

import torch
from report import Report

from rlk.contract.update import NORM_BLOCK, AdamParams
from rlk.kernels._triton.launch import OPTIONS, platform
from rlk.kernels.update import AdamTensors, adam, square_sums
from rlk.kernels.update import cpu as composed
from rlk.train import optimizer
from rlk.train.norm import GradientNormError
from rlk.train.optimizer import Adam, OptimizerError
from rlk.train.parameters import prepare_gradients

ROOM = 64
"""Elements before and behind a tensor that nothing may touch."""
ODD = (0.0, -0.0, 1e-40, -1e-40, 3e38, 1e-30, 1.0, math.inf, -math.inf, math.nan)
EVEN_SIZES = ((4096, 1024), (4096,), (128,), (16, 16))
SIZES = (EVEN_SIZES, (*EVEN_SIZES, (37, 1001)), ((1,),), ((1023,), (1025,), (3, 5)))
State = list[torch.Tensor]


def _states(shapes: Sequence[tuple[int, ...]], odd: bool) -> list[State]:
    """Flat weight, master, m, v and gradient of each tensor with room on both sides."""
    states = []
    for shape in shapes:
        state = [torch.randn(math.prod(shape) + 2 * ROOM, device="cuda") for _ in range(4)]
        state[2].abs_()
        if odd:
            values = torch.tensor(ODD, device="cuda")
            state[3] = values[torch.randint(len(ODD), state[3].shape, device="cuda")]
            state[1][::7] = -0.0
        states.append([state[0].bfloat16(), *state])
    return states


def _updated(states: Sequence[State], shapes: Sequence[tuple[int, ...]], offset: int, scale: float, fused: bool) -> list[State]:
    """Two steps on copies."""
    copies = [[tensor.clone() for tensor in state] for state in states]
    first = ROOM // 2 + offset
    views = [[t[first : first + math.prod(shape)].view(shape) for t in state] for state, shape in zip(copies, shapes)]
    held, decays = [AdamTensors(*state) for state in views], [at % 2 == 0 for at in range(len(shapes))]
    change = adam(held, decays) if fused else composed.adam(held, decays)
    for number in (1, 2):
        change(AdamParams(lr=1e-3).step(number), scale)
    return copies


def adam_bytes(report: Report) -> None:
    """Every size, aligned and not, among signed zeros, subnormals, infinities and NaN; the gradient and what lies around stay."""
    for shapes in SIZES:
        for offset in (0, 1):
            for scale in (1.0, float(torch.tensor(0.3))):
                for odd in (False, True):
                    states = _states(shapes, odd)
                    found, wanted = (_updated(states, shapes, offset, scale, fused) for fused in (True, False))
                    for shape, actual, expected in zip(shapes, found, wanted, strict=True):
                        for name, a, b in zip(AdamTensors._fields, actual, expected, strict=True):
                            bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
                            report.same("adam", f"{name} {shape} of {shapes}, {offset} off, scale {scale}", a.view(bits), b.view(bits))
    states, shapes = _states(EVEN_SIZES, False), EVEN_SIZES
    wanted = _updated(states, shapes, 0, 1.0, False)
    with mock.patch.dict(OPTIONS[platform()], enable_fp_fusion=True):
        fused = _updated(states, shapes, 0, 1.0, True)
    report.differs("products fused into sums", fused[0][1], wanted[0][1])
    report.differs("no decay of a matrix", _updated(states[1:], shapes[1:], 0, 1.0, True)[0][1], wanted[1][1])


def _shards() -> dict[str, list[torch.Tensor]]:
    columns = torch.randn(4096, 6144, device="cuda").unflatten(1, (4, -1)).movedim(1, 0)
    narrow = torch.randn(4096, 2048, device="cuda").unflatten(1, (4, -1)).movedim(1, 0)
    rows, gain = torch.randn(76288, 1024, device="cuda").unflatten(0, (4, -1)), torch.randn(1, 4096, device="cuda")
    odd = [torch.randn(3, 37, 1001, device="cuda")[:, :, :999], torch.randn(1, 7, device="cuda"), torch.randn(5, 1, device="cuda")]
    return {
        "even": [columns, narrow, rows, gain],
        "odd": odd,
        "both": [columns, odd[0], gain, odd[1]],
        "many blocks": [torch.randn(2, 150000 * 256 + 3, device="cuda")],
    }


def square_bytes(report: Report) -> None:
    """Shards of rows and of columns, sizes inside and outside a block; a NaN or an infinity reaches its own shard alone."""
    for name, tensors in _shards().items():
        for block in (NORM_BLOCK, 256):
            found, wanted = square_sums(tensors, block)(), composed.square_sums(tensors, block)()
            report.same("square sums", f"{name}, blocks of {block}", found.view(torch.int32), wanted.view(torch.int32))
    tensors = _shards()["even"]
    tensors[0][1, 5, 700], tensors[2][3, 0, 0], tensors[3][0, 9] = math.nan, math.inf, -0.0
    found, wanted = square_sums(tensors, NORM_BLOCK)(), composed.square_sums(tensors, NORM_BLOCK)()
    same = torch.equal(found.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0)) and torch.equal(found.isnan(), wanted.isnan())
    report.holds("square sums of what is not finite", same, found=found.tolist(), wanted=wanted.tolist())
    clean = _shards()["even"]
    library = torch.cat([shards.double().square().flatten(1).sum(1) for shards in clean])
    report.differs("a library's sum of squares", square_sums(clean, NORM_BLOCK)(), library)


def nothing_waits(report: Report) -> None:
    """Tables are made once; from then on no call waits for the card, and a graph gives the same bytes."""
    shapes, tensors = EVEN_SIZES, _shards()["both"]
    held = [
        AdamTensors(*(tensor[: math.prod(shape)].view(shape) for tensor in state)) for state, shape in zip(_states(shapes, False), shapes)
    ]

    change, total, step = adam(held, [True] * len(held)), square_sums(tensors, NORM_BLOCK), AdamParams().step(1)

    def run() -> torch.Tensor:
        change(step, 1.0)
        return total()

    expected = run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    captured.zero_()
    graph.replay()
    report.same("square sums in a graph", "both", captured.view(torch.int32), expected.view(torch.int32))


def _optimizer(fused: bool, on_host: bool) -> Adam:
    made = {"embedding": torch.randn(1024, 256), "layers.0.input_norm": torch.randn(256), "layers.0.o_proj": torch.randn(256, 320)}
    made["embedding"][1000:] = 0.0
    parameters = {name: torch.nn.Parameter(tensor.bfloat16().cuda()) for name, tensor in made.items()}
    prepare_gradients(parameters)
    return Adam(parameters, AdamParams(), shards=8, real_rows={"embedding": 1000}, fused=fused, on_host=on_host)


def _updates(made: Adam) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(2):
        for name, gradient in made.gradients.items():
            gradient.normal_(generator=generator)
            if name == "embedding":
                gradient[1000:] = 0.0
        made.update(1e-3)
    return {**made.state(), **{name: parameter.detach().float() for name, parameter in made.parameters.items()}}


def optimizers(report: Report) -> None:
    """A state in host memory, and one that is updated operation by operation, have the bytes of the fused one; what is refused changes
    nothing."""
    expected: dict[str, torch.Tensor] = {}
    for fused, on_host in product((True, False), (False, True)):
        torch.manual_seed(1)
        with mock.patch.object(optimizer, "_AT_ONCE", 5000):
            made = _optimizer(fused, on_host)
            found = _updates(made)
        expected = expected or found
        for name, tensor in found.items():
            report.same("optimizers", f"{name}, fused {fused}, on host {on_host}", tensor.cpu(), expected[name].cpu())
        for name, value, fault in (("embedding", -0.0, OptimizerError), ("layers.0.o_proj", math.nan, GradientNormError)):
            before, gradient = {kind: tensor.clone() for kind, tensor in made.state().items()}, made.gradients[name]
            kept, gradient[-1, -1] = gradient[-1, -1].clone(), value
            try:
                made.update(1e-3)
                raised: BaseException | None = None
            except (ArithmeticError, ValueError) as error:
                raised = error
            gradient[-1, -1] = kept
            stays = all(torch.equal(tensor, made.state()[kind]) for kind, tensor in before.items())
            report.holds(
                "what is refused changes nothing", isinstance(raised, fault) and stays, fused=fused, on_host=on_host, raised=repr(raised)
            )


def everything(report: Report) -> None:
    """All of it."""
    torch.manual_seed(0)
    adam_bytes(report)
    square_bytes(report)
    nothing_waits(report)
    optimizers(report)
