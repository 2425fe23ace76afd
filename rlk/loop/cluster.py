"""Ray for one host: an own cluster on loopback, or a running one; starts the engines as actors and asks them with a time limit."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from rlk.contract.numerics import Numerics
from rlk.loop.actors import EngineFault, Mode, RolloutActor, TrainActor
from rlk.loop.profile import NUMERICS, Device

OBJECT_STORE_BYTES = 128 << 20
GPU_SHARE = 0.25
"""Of the card, as Ray counts it: two engines in each of two modes fit."""
Side = Literal["rollout", "train"]


class ClusterError(RuntimeError):
    """Ray or an engine's process cannot be used; one line with the remedy."""


class EngineLost(RuntimeError):
    """An engine died or does not answer; one line that names it, the call and where Ray keeps its logs."""


@dataclass(frozen=True)
class Pending:
    """An answer that is still being computed."""

    what: str
    reference: Any
    timeout_s: float
    logs: Path

    def result(self) -> Any:
        """Wait for the answer. Raises EngineFault for an error inside the engine, EngineLost for one that died or is too slow."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            return ray.get(self.reference, timeout=self.timeout_s)
        except GetTimeoutError:
            raise EngineLost(f"{self.what} gave no answer in {self.timeout_s:g} s; Ray's logs: {self.logs}") from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineFault):
                raise EngineFault(f"{self.what}: {cause.message}", cause.trace) from None
            raise EngineFault(f"{self.what}: {_first_line(error)}", str(error)) from None
        except RayError as error:
            raise EngineLost(f"{self.what}: its process died ({_first_line(error)}); Ray's logs: {self.logs}") from None


@dataclass(frozen=True)
class Remote:
    """One engine's process. side and mode name it; actor: the Ray handle."""

    side: Side
    mode: Mode
    actor: Any
    timeout_s: float
    logs: Path

    def start(self, method: str, *arguments: Any) -> Pending:
        """Ask without waiting."""
        reference = getattr(self.actor, method).remote(*arguments)
        return Pending(f"{self.side} ({self.mode}) {method}", reference, self.timeout_s, self.logs)

    def call(self, method: str, *arguments: Any) -> Any:
        """Ask and wait, at most ``timeout_s`` seconds."""
        return self.start(method, *arguments).result()


class Cluster:
    """Context manager. At most one actor per side, mode and rollout TP; runs that follow each other use the same ones.

    device: what every engine computes on; on "cuda" all of them share the first card, and :meth:`stop` frees what they hold there.
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
        self._actors: dict[tuple[Side, Mode, int], Remote] = {}

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

        for remote in self._actors.values():
            ray.kill(remote.actor)
        ray.shutdown()

    def rollout(self, mode: Mode, tp: int = 1) -> Remote:
        """The rollout engine of a mode on ``tp`` ranks (methods of ``RolloutActor``)."""
        return self._actor("rollout", mode, tp, RolloutActor, mode, self.device, self.numerics, tp)

    def train(self, mode: Mode) -> Remote:
        """The trainer of a mode (methods of ``TrainActor``)."""
        return self._actor("train", mode, 1, TrainActor, mode, self.device, self.numerics, self.port)

    def stop(self) -> None:
        """End every engine's process and wait until it is gone; engines that are asked for afterwards start anew."""
        import ray

        processes = []
        for remote in self._actors.values():
            with suppress(EngineFault, EngineLost, psutil.NoSuchProcess):
                processes.append(psutil.Process(remote.call("pid")))
            ray.kill(remote.actor)
        self._actors.clear()
        _, alive = psutil.wait_procs(processes, timeout=60)
        if alive:
            raise ClusterError(f"processes {[process.pid for process in alive]} outlive their engines: end them")

    def _actor(self, side: Side, mode: Mode, tp: int, kind: type, *arguments: Any) -> Remote:
        import ray

        if (side, mode, tp) not in self._actors:
            # The engines work in turns, so they share the cores instead of reserving them, and the card; zero would hide it from them.
            share = GPU_SHARE if self.device == "cuda" else 0
            actor = ray.remote(kind).options(num_cpus=0, num_gpus=share, max_restarts=0).remote(*arguments)
            self._actors[side, mode, tp] = Remote(side, mode, actor, self.timeout_s, _log_directory())
        return self._actors[side, mode, tp]


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
