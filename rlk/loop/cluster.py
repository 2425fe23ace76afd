"""Ray for one host: an own cluster on loopback, or a running one; starts the engines as actors and asks them with a time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from rlk.contract.arms import MIXED_MODES, Mode, Side
from rlk.contract.numerics import Numerics
from rlk.loop.actors import EngineFault, RolloutActor, TrainActor
from rlk.loop.profile import NUMERICS, Device
from rlk.parallel.pool import free_port
from rlk.parallel.transport import Transport

OBJECT_STORE_BYTES = 128 << 20
GPU_SHARE = 0.125
"""Of the card, as Ray counts it: two engines each that are strict, native and mixed fit."""

NOSET = ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES")
"""Told not to, Ray leaves a process all cards of its maker, NVIDIA or AMD."""

STOP_S = 60.0
"""Longest wait for the end of an engine's processes."""


Place = tuple[Side, str, int, int, Transport | None]
"""Side, mode or "mixed", TP, CP and asked transport of an engine."""


class ClusterError(RuntimeError):
    """Ray or an engine's process cannot be used; one line with the remedy."""


class EngineLost(RuntimeError):
    """An engine died or does not answer; one line that names it, the call and where Ray keeps its logs."""


@dataclass(frozen=True)
class Pending:
    """Answers that are still being computed, one per rank of an engine."""

    what: str
    references: tuple[Any, ...]
    timeout_s: float
    logs: Path

    def each(self) -> list[Any]:
        """Wait for every rank's answer, in their order, or for the first failure: the other ranks may be waiting for that one.

        Raises EngineFault for an error inside a rank, EngineLost for one that died or is too slow.
        """
        import ray

        answers: dict[int, Any] = {}
        waiting, deadline = list(self.references), time.monotonic() + self.timeout_s
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            rank = self.references.index((ready or waiting)[0])
            if not ready:
                raise EngineLost(f"{self._name(rank)} gave no answer in {self.timeout_s:g} s; Ray's logs: {self.logs}")
            answers[rank] = self._answer(rank)
        return [answers[rank] for rank in sorted(answers)]

    def _answer(self, rank: int) -> Any:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(self.references[rank])
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineFault):
                raise EngineFault(f"{self._name(rank)}: {cause.message}", cause.trace) from None
            raise EngineFault(f"{self._name(rank)}: {_first_line(error)}", str(error)) from None
        except RayError as error:
            raise EngineLost(f"{self._name(rank)}: its process died ({_first_line(error)}); Ray's logs: {self.logs}") from None

    def result(self) -> Any:
        """What every rank answers alike. Raises as :meth:`each` does, and EngineFault if ranks differ."""
        answers = self.each()
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                raise EngineFault(f"{self._name(rank)} answers otherwise than rank 0: run it again, and report it if it repeats")
        return answers[0]

    def _name(self, rank: int) -> str:
        return self.what if len(self.references) == 1 else f"{self.what}, rank {rank}"


@dataclass(frozen=True)
class Remote:
    """One engine. side and mode name it; actors: the Ray handles of its ranks' processes, all of which get every call."""

    side: Side
    mode: Mode
    actors: tuple[Any, ...]
    timeout_s: float
    logs: Path

    def start(self, method: str, *arguments: Any) -> Pending:
        """Ask without waiting."""
        references = tuple(getattr(actor, method).remote(*arguments) for actor in self.actors)
        return Pending(f"{self.side} ({self.mode}) {method}", references, self.timeout_s, self.logs)

    def call(self, method: str, *arguments: Any) -> Any:
        """Ask and wait, at most ``timeout_s`` seconds."""
        return self.start(method, *arguments).result()


class Cluster:
    """Context manager. At most one engine per side, mode, topology and transport; runs that follow each other use the same ones. All mixed
    modes of a side take turns in one process.

    device: what every engine computes on. On "cuda" engines of one rank share the first card; of several, each rank has a card of its own,
    or trainer ranks share them evenly where there are fewer. :meth:`stop` frees what they hold there.
    numerics: None takes those of the device. ray_address: HOST:PORT of a running cluster on this host, which is left running; None starts
    one that listens on loopback only, without dashboard, and is stopped at the end. port: trainer rendezvous, 0 for a free one.
    timeout_s: longest wait for any answer.
    """

    def __init__(
        self,
        *,
        device: Device = "cpu",
        ray_address: str | None = None,
        port: int = 0,
        numerics: Numerics | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.device = device
        self.ray_address, self.port, self.numerics, self.timeout_s = ray_address, port, numerics or NUMERICS[device], timeout_s
        self._engines: dict[Place, Remote] = {}

    def __enter__(self) -> Cluster:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if self.ray_address is None:
            _prefer_loopback()
        import ray

        if ray.is_initialized():
            raise ClusterError("Ray is already in use by this process: run it from another one")
        before = set(listeners(psutil.Process()))
        # Ray starts one idle process per CPU ahead; the engines reserve none.
        own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": 1}
        local = own if self.ray_address is None else {}
        try:
            ray.init(address=self.ray_address or "local", log_to_driver=False, configure_logging=False, **local)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise ClusterError(f"Ray at {self.ray_address or 'a local cluster'} cannot be used: {_first_line(error)}") from error
        try:
            if self.ray_address is None:
                require_loopback(ignore=before)
        except BaseException:
            ray.shutdown()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        import ray

        for remote in self._engines.values():
            _kill(remote)
        ray.shutdown()

    def rollout(self, mode: Mode, tp: int = 1, transport: Transport | None = None) -> Remote:
        """The rollout engine of a mode on ``tp`` ranks, all below one process (methods of ``RolloutActor``). transport: what moves the
        bytes of several, None for the engine's own choice."""
        key: Place = ("rollout", _process(mode), tp, 1, transport)
        if key not in self._engines:
            self._engines[key] = self._start("rollout", mode, RolloutActor, [(mode, self.device, self.numerics, tp, transport)], tp)
        return self._turned(key, mode)

    def train(self, mode: Mode, tp: int = 1, cp: int = 1, transport: Transport | None = None) -> Remote:
        """The trainer of a mode in tp·cp processes (methods of ``TrainActor``). transport: as of :func:`trainer_places`."""
        key: Place = ("train", _process(mode), tp, cp, transport)
        if key not in self._engines:
            ranks = tp * cp
            port = self.port if ranks == 1 else self.port or free_port()
            carrier, devices = trainer_places(self.device, ranks, transport)
            places = [(mode, devices[rank], self.numerics, port, tp, cp, rank, carrier) for rank in range(ranks)]
            self._engines[key] = self._start("train", mode, TrainActor, places, ranks)
        return self._turned(key, mode)

    def _turned(self, key: Place, mode: Mode) -> Remote:
        remote = self._engines[key]
        if remote.mode != mode:
            remote.call("turn_to", mode)
            remote = self._engines[key] = replace(remote, mode=mode)
        return remote

    def stop(self) -> None:
        """End every engine's processes, with those that it has started, and wait until they are gone; engines that are asked for afterwards
        start anew."""
        engines: list[psutil.Process] = []
        for remote in self._engines.values():
            with suppress(EngineFault, EngineLost, psutil.NoSuchProcess):
                engines += [psutil.Process(pid) for pid in remote.start("pid").each()]
        below = [process for engine in engines for process in _below(engine)]
        for remote in self._engines.values():
            _kill(remote)
        self._engines.clear()
        _, alive = psutil.wait_procs(engines, timeout=STOP_S)
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        deadline = time.monotonic() + STOP_S
        while (left := [process for process in below if _lives(process)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if alive or left:
            raise ClusterError(f"processes {[process.pid for process in (*alive, *left)]} outlive their engines: end them")

    def _start(self, side: Side, mode: Mode, kind: type, places: Sequence[tuple[Any, ...]], ranks: int) -> Remote:
        """One process per entry of ``places``, the arguments of its actor. ranks: of the engine, which may start further processes."""
        import ray

        # The engines work in turns, so they share the cores instead of reserving them, and the card; zero would hide it from them.
        share = GPU_SHARE / len(places) if self.device == "cuda" else 0
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": share, "max_restarts": 0}
        variables = {}
        if len(places) > 1:
            variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // len(places)))
        if self.device == "cuda" and ranks > 1:
            variables |= dict.fromkeys(NOSET, "1")  # its ranks name their cards
        if variables:
            options["runtime_env"] = {"env_vars": variables}
        actors = tuple(ray.remote(kind).options(**options).remote(*place) for place in places)
        return Remote(side, mode, actors, self.timeout_s, _log_directory())


def _below(process: psutil.Process) -> list[psutil.Process]:
    """What a process has started, and what that has: ranks of vLLM."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _lives(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended holds nothing, even if nobody asks for its exit status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _process(mode: Mode) -> str:
    return "mixed" if mode in MIXED_MODES else mode


def trainer_places(device: Device, ranks: int, asked: Transport | None = None) -> tuple[Transport, list[str]]:
    """How the ranks of a trainer exchange bytes, and the device of each. asked: what moves them if each has a card; by default
    "peer", under ROCm "nccl". Raises ClusterError if it is asked for and they have to share cards."""
    if device == "cpu" or ranks == 1:
        return "gloo", [device] * ranks
    cards = torch.cuda.device_count()
    if ranks <= cards:
        return asked or ("nccl" if torch.version.hip else "peer"), [f"cuda:{rank}" for rank in range(ranks)]
    if asked:
        raise ClusterError(f"transport {asked} wants a card for each of {ranks} ranks, torch sees {cards}: leave it out")
    return "shm", [f"cuda:{rank * cards // ranks}" for rank in range(ranks)]


def _kill(remote: Remote) -> None:
    import ray

    for actor in remote.actors:
        ray.kill(actor)


def _prefer_loopback() -> None:
    """Make loopback the address of a local Ray node, as it is on desktop systems, so that everything listens there and nowhere else.

    Ray takes the variable when it is imported; a process that has imported it already needs the constant. The result is read back.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


Listener = tuple[str, int, str]
"""Address, port and process name of a TCP socket that accepts connections."""


def listeners(process: psutil.Process) -> list[Listener]:
    """Every listening socket of a process and its descendants."""
    found = []
    for each in (process, *process.children(recursive=True)):
        try:
            found += [(c.laddr.ip, c.laddr.port, each.name()) for c in each.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def require_loopback(ignore: Collection[Listener] = ()) -> None:
    """Raise ClusterError if this process or a descendant listens where other hosts could reach it."""
    for address, port, name in listeners(psutil.Process()):
        if address.removeprefix("::ffff:") not in ("127.0.0.1", "::1") and (address, port, name) not in ignore:
            raise ClusterError(
                f"{name} listens on {address}:{port}, not on loopback: use --ray-address for a cluster that others may reach"
            )


def _log_directory() -> Path:
    import ray

    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / "logs"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
