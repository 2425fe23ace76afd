"""A pool of worker processes that outlives the topologies run on it: starting an engine's process costs more than a tiny model's step.

Workers are forked from one server process that has done the imports. A task is a function of a Python file; arguments and results are
JSON, tensors travel as files. A worker that dies is an outcome, not a hang.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from rlk.parallel.errors import ParallelError


@dataclass(frozen=True)
class Outcome:
    """What one worker's task came to: its result, or the error that it raised or died of."""

    value: Any = None
    error: str = ""


class Pool:
    """``size`` workers, numbered from 0; ``preload``: modules that the server imports before it forks them. Workers that use a card need
    an empty one: an engine's import asks CUDA for its devices, and CUDA does not survive a fork.

    The server is one per process that uses pools, so only the first pool's modules are preloaded. Use as a context manager.
    """

    def __init__(self, size: int, preload: Sequence[str] = ()) -> None:
        # The server and its forks inherit this; a pool of workers on few cores is slower with more threads each.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._workers = [self._start() for _ in range(size)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, count: int, source: Path, function: str, *arguments: Any, timeout: float = 300) -> list[Outcome]:
        """Call ``function(rank, *arguments)`` of the file ``source`` on workers 0 … count-1 at once; outcomes in rank order.

        A worker without an answer after ``timeout`` seconds is killed. Killed and dead workers are replaced.
        """
        order = json.dumps([str(source), function, arguments])
        for rank, (_, pipe) in enumerate(self._workers[:count]):
            pipe.send_bytes(json.dumps([rank, order]).encode())
        deadline = time.monotonic() + timeout
        return [self._outcome(rank, deadline) for rank in range(count)]

    def kill(self, rank: int) -> None:
        """End one worker at once, as the machine would."""
        self._workers[rank][0].kill()

    def close(self) -> None:
        """End all workers."""
        for _, pipe in self._workers:
            pipe.close()
        deadline = time.monotonic() + 5
        for process, _ in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []

    def _outcome(self, rank: int, deadline: float) -> Outcome:
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return Outcome(**json.loads(pipe.recv_bytes()))
            problem = "gave no answer in time and was killed"
        except (EOFError, ConnectionError):
            process.join(5)
            problem = f"died with exit code {process.exitcode}"
        process.kill()
        process.join()
        pipe.close()
        self._workers[rank] = self._start()
        return Outcome(error=f"worker {rank} {problem}")

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        return process, here


def free_port() -> int:
    """A port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require(outcomes: Sequence[Outcome]) -> list[Any]:
    """The results of a run that must have gone well on every worker; raises ParallelError with the first error."""
    for outcome in outcomes:
        if outcome.error:
            raise ParallelError(outcome.error)
    return [outcome.value for outcome in outcomes]


def _serve(pipe: Connection) -> None:
    while True:
        try:
            rank, order = json.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        source, function, arguments = json.loads(order)
        try:
            answer = {"value": getattr(_module(source), function)(rank, *arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"}
        pipe.send_bytes(json.dumps(answer).encode())


def _module(source: str) -> ModuleType:
    name = f"rlk_worker_{Path(source).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, source)
        if spec is None or spec.loader is None:
            raise ImportError(f"{source} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
