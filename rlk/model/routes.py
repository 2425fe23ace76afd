"""What ran in each route of a model: its modules, how often they ran, and which of this project's operators ran inside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlk.contract.arms import ROUTES
from rlk.kernels import dispatch

Kernel = tuple[str, str, str]
PACKAGE = __name__.partition(".")[0]


class RouteLog:
    """Counts runs and kernels of watched modules by route. Routes never nest, so that every kernel is counted once, or outside of all."""

    def __init__(self) -> None:
        self._modules: dict[str, list[torch.nn.Module]] = {route: [] for route in ROUTES}
        self._before: Counter[Kernel] | None = None
        self.reset()

    def reset(self) -> None:
        """Count from here."""
        self._runs: Counter[str] = Counter()
        self._kernels: dict[str, Counter[Kernel]] = {route: Counter() for route in ROUTES}

    def watch(self, route: str, *modules: torch.nn.Module) -> None:
        """Count every call of these modules, through ``torch.nn.Module``'s own hooks."""
        for module in modules:
            self._modules[route].append(module)
            module.register_forward_pre_hook(lambda *_: self._begin())
            module.register_forward_hook(lambda *_: self._end(route), always_call=True)

    @contextmanager
    def of(self, route: str) -> Iterator[None]:
        """Count what runs inside as part of a route, or of "backward", whose kernels no module call encloses."""
        self._begin()
        try:
            yield
        finally:
            self._end(route)

    def readback(self) -> dict[str, dict[str, Any]]:
        """JSON values by route: runs, what its modules are and compute with, kernels as in ``dispatch.readback``."""
        return {
            route: {
                "runs": self._runs[route],
                "computes": sorted({computes(module) for module in self._modules.get(route, ())}),
                "kernels": [
                    {"op": op, "backend": backend, "kernel_id": kernel_id, "calls": calls}
                    for (op, backend, kernel_id), calls in sorted(kernels.items())
                ],
            }
            for route, kernels in self._kernels.items()
        }

    def operators(self) -> dict[str, str]:
        """Whose operators each route's modules compute with, looked up in the modules: "rlk", "native", or "both", which is a fault."""
        found = {}
        for route, modules in self._modules.items():
            own = {computes(module).partition(".")[0] == PACKAGE for module in modules}
            found[route] = "both" if len(own) > 1 else "rlk" if own == {True} else "native"
        return found

    def _begin(self) -> None:
        if self._before is not None:
            raise RuntimeError("a route began inside another one: watch modules that do not hold each other")
        self._before = _counted()

    def _end(self, route: str) -> None:
        if self._before is None:
            return  # what ran ended in an error, which is on its way
        self._runs[route] += 1
        self._kernels.setdefault(route, Counter()).update(_counted() - self._before)
        self._before = None


def computes(module: torch.nn.Module) -> str:
    """Qualified name of what a module runs: its class, or the function that was put in the place of its forward."""
    replaced = vars(module).get("forward")
    return f"{replaced.__module__}.{replaced.__qualname__}" if replaced else f"{type(module).__module__}.{type(module).__qualname__}"


def _counted() -> Counter[Kernel]:
    return Counter({(ran.op, ran.backend, ran.kernel_id): ran.calls for ran in dispatch.readback()})
