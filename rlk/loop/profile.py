"""What a run is asked to do: fields, defaults, and where each value may come from.

Command line > environment ``RLK_REPRO_*`` > profile file > default. Every source knows the same names; a name that none knows is refused.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlk.contract.numerics import DEFAULT, HOPPER, Numerics

PREFIX = "RLK_REPRO_"
DEFAULT_FILE = Path(".rlk-profile.json")
DEFAULT_MODEL = Path("artifacts/models/tiny")
"""Where ``rlk prepare --tiny`` writes, and the model of a run that names none."""

Device = Literal["cpu", "cuda"]
"""What both engines of a run compute on. Nobody guesses it: a run is repeated where it was made."""
NUMERICS: dict[Device, Numerics] = {"cpu": DEFAULT, "cuda": HOPPER}
"""Within which numerics a device's engines promise equal bytes."""

ALIASES = {
    "tp_size": "tp",
    "cp_size": "cp",
    "rollout_tp_size": "rollout_tp",
    "rollout_cp_size": "rollout_cp",
    "rollout_temperature": "temperature",
    "rollout_top_p": "top_p",
    "rollout_top_k": "top_k",
    "rollouts": "steps",
    "num_rollout": "steps",
    "model_root": "model",
}
"""Long spelling → field, accepted in every source."""


class ProfileError(ValueError):
    """A name or value that no run understands; one line with where it came from and the remedy."""


class Profile(BaseModel):
    """One field per option of ``rlk plan|run|verify``. Values are checked for type and range here, against each other in the plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["consistency", "native"] = Field("consistency", description="rlk operators in both engines, or the stock engines")
    device: Device = Field("cpu", description="what both engines compute on: cpu, or cuda for cards that they share")
    model: Path | None = Field(None, description=f"checkpoint directory (default: {DEFAULT_MODEL}, where `rlk prepare --tiny` writes)")
    workspace: Path = Field(Path("artifacts/runs"), description="directory that holds the run directories")
    run_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of the run directory (default: UTC time)")
    tp: int = Field(1, description="trainer tensor parallel size")
    cp: int = Field(1, description="trainer context parallel size")
    rollout_tp: int = Field(1, description="rollout tensor parallel size")
    rollout_cp: int = Field(1, description="rollout context parallel size")
    transport: Literal["peer", "nccl"] | None = Field(
        None, description="what moves bytes between ranks that have a card each: memory of cards of one host, or nccl (default: peer)"
    )
    temperature: float = Field(1.0, description="0 is greedy")
    top_p: float = Field(1.0, description="kept probability mass, in (0, 1]")
    top_k: int = Field(-1, description="kept ids, -1 keeps all")
    context: int | None = Field(None, ge=2, description="tokens of prompt and response together (default: all positions of the model)")
    max_response_len: int = Field(64, ge=1, description="most tokens of a response")
    steps: int = Field(200, ge=1, description="updates")
    prompts: int = Field(16, ge=1, description="prompts per update")
    group_size: int = Field(8, ge=1, description="responses per prompt, compared with each other")
    micro_batch_size: int = Field(8, ge=1, description="samples per forward pass of the trainer")
    lr: float | None = Field(None, description="learning rate (default: 1e-4 for a prepared model, else 5e-7)")
    weight_decay: float = Field(0.1, description="decoupled weight decay of matrices")
    kl_coef: float = Field(0.0, description="weight of the KL term against the start weights")
    seed: int = Field(0, ge=0, lt=2**63, description="names the prompts and every draw")
    keep_versions: int = Field(2, ge=1, description="published weights that stay in the run directory")
    ray_address: str | None = Field(
        None, pattern=r"^[^\s/:]+:[0-9]{1,5}$", description="HOST:PORT of a running Ray cluster (default: an own one on loopback)"
    )
    port: int = Field(0, ge=0, le=65535, description="trainer rendezvous on loopback, 0 for a free one")


def flags(field: str) -> list[str]:
    """Command-line spellings of a field, the short one first."""
    return ["--" + name.replace("_", "-") for name in (field, *(alias for alias, of in ALIASES.items() if of == field))]


def load_profile(given: Mapping[str, Any], file: Path | None = None, environment: Mapping[str, str] | None = None) -> Profile:
    """Merge the sources. given: values of the command line by field, absent ones left out.

    file: ``--profile``; else ``RLK_REPRO_PROFILE``; else :data:`DEFAULT_FILE` in the working directory if it exists.
    Raises ProfileError naming the source, the key and the remedy.
    """
    env = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in (os.environ if environment is None else environment).items()
        if name.startswith(PREFIX)
    }
    named = env.pop("profile", None)
    path = file or (Path(named) if named else None)
    if path is None and DEFAULT_FILE.is_file():
        path = DEFAULT_FILE
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for entries, spell in (
        (_read(path) if path else {}, lambda key: f"{key} in {path}"),
        (env, lambda key: f"{PREFIX}{key.upper()}"),
    ):
        for field, (key, value) in _canonical(entries, spell).items():
            values[field], origin[field] = value, spell(key)
    values |= given
    origin |= {field: flags(field)[0] for field in given}
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        raise ProfileError(f"{origin[field]}: {first['input']!r} is not accepted: {_remedy(field, first['msg'])}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"profile {path}: cannot be read ({error.strerror}): check the path") from error
    except ValueError as error:
        raise ProfileError(f"profile {path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ProfileError(f"profile {path}: holds a {type(values).__name__}, not an object of options")
    for name, value in values.items():
        if isinstance(value, bool):  # would pass as 0 or 1
            raise ProfileError(f"{name} in {path}: {value} is not accepted: no option is true or false")
    return values


def _canonical(entries: Mapping[str, Any], spell: Callable[[str], str]) -> dict[str, tuple[str, Any]]:
    """Entries of one source as field → (key as it stands there, value); ``spell`` names a key for a person."""
    result: dict[str, tuple[str, Any]] = {}
    for key, value in entries.items():
        field = ALIASES.get(key, key)
        if field not in Profile.model_fields:
            close = difflib.get_close_matches(key, [*Profile.model_fields, *ALIASES], n=1)
            remedy = f"did you mean {spell(close[0]).split(' in ')[0]}?" if close else "`rlk plan --help` lists the options"
            raise ProfileError(f"{spell(key)} is no option: {remedy}")
        if field in result:
            raise ProfileError(f"{spell(key)}: {spell(result[field][0])} already gives {field}: keep one")
        result[field] = (key, value)
    return result


def _remedy(field: str, message: str) -> str:
    """Pydantic's sentence, or a plainer one where it would show a pattern."""
    plain = {
        "run_id": "use letters, digits, dot, dash and underscore, beginning with a letter or digit",
        "ray_address": "give HOST:PORT of a running cluster",
    }
    return plain.get(field, message[0].lower() + message[1:])
