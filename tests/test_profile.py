"""Profiles: where a value may come from, which source wins, and how an unknown name is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlk.loop.profile import ALIASES, Profile, ProfileError, flags, load_profile


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(values: Any, name: str = "profile.json") -> Path:
    path = Path(name)
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def refusal(given: dict[str, Any] | None = None, file: Path | None = None, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ProfileError) as caught:
        load_profile(given or {}, file, environment or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_the_documented_ones() -> None:
    profile = load_profile({}, None, {})
    assert (profile.steps, profile.temperature, profile.top_p, profile.top_k) == (200, 1.0, 1.0, -1)
    assert (profile.mode, profile.weight_decay, profile.kl_coef, profile.keep_versions) == ("consistency", 0.1, 0.0, 2)
    assert profile.tp == profile.cp == profile.rollout_tp == profile.rollout_cp == 1


def test_each_source_wins_over_the_one_below() -> None:
    file, environment = written({"steps": 3, "seed": 4, "lr": 0.5}), {"RLK_REPRO_STEPS": "5", "RLK_REPRO_SEED": "6"}
    profile = load_profile({"steps": "7"}, file, environment)
    assert (profile.steps, profile.seed, profile.lr) == (7, 6, 0.5)


def test_the_profile_in_the_working_directory_is_read_unless_another_is_named() -> None:
    written({"steps": 3}, ".rlk-profile.json")
    assert load_profile({}, None, {}).steps == 3
    assert load_profile({}, None, {"RLK_REPRO_PROFILE": str(written({"steps": 4}, "named.json"))}).steps == 4
    assert load_profile({}, written({"steps": 5}, "given.json"), {"RLK_REPRO_PROFILE": "named.json"}).steps == 5


def test_other_variables_of_the_environment_are_nobody_s_business() -> None:
    assert load_profile({}, None, {"RLK_CACHE_DIR": "/x", "STEPS": "9"}).steps == 200


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_long_spellings_are_accepted_everywhere(alias: str) -> None:
    field = ALIASES[alias]
    value = "0.5" if field in ("temperature", "top_p") else "2"
    expected = getattr(load_profile({field: value}, None, {}), field)
    assert expected != Profile.model_fields[field].default
    assert getattr(load_profile({}, written({alias: value}), {}), field) == expected
    assert getattr(load_profile({}, None, {f"RLK_REPRO_{alias.upper()}": value}), field) == expected
    assert "--" + alias.replace("_", "-") in flags(field)[1:]


def test_an_unknown_key_is_named_with_a_close_match() -> None:
    assert refusal(file=written({"temprature": 1})) == "temprature in profile.json is no option: did you mean temperature?"
    assert refusal(environment={"RLK_REPRO_STPES": "1"}) == "RLK_REPRO_STPES is no option: did you mean RLK_REPRO_STEPS?"
    assert refusal(file=written({"qqq": 1})).endswith("`rlk plan --help` lists the options")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": "many"}, "steps in profile.json: 'many' is not accepted: input should be a valid integer"),
        ({"steps": 0}, "steps in profile.json: 0 is not accepted: input should be greater than or equal to 1"),
        ({"steps": 1.5}, "steps in profile.json: 1.5"),
        ({"steps": True}, "no option is true or false"),
        ({"steps": None}, "steps in profile.json: None is not accepted"),
        ({"mode": "strict"}, "mode in profile.json: 'strict' is not accepted: input should be 'consistency' or 'native'"),
        ({"run_id": "../up"}, "run_id in profile.json: '../up' is not accepted: use letters"),
        ({"run_id": "a\n"}, "run_id in profile.json"),
        ({"ray_address": "auto"}, "give HOST:PORT"),
        ({"port": 65536}, "port in profile.json"),
        ({"seed": -1}, "seed in profile.json"),
        ({"steps": 1, "rollouts": 2}, "rollouts in profile.json: steps in profile.json already gives steps: keep one"),
        ([1], "holds a list"),
        ("{", "profile profile.json: not valid JSON"),
    ],
)
def test_a_bad_value_is_named_with_its_source(values: Any, said: str) -> None:
    assert said in refusal(file=written(values))


def test_the_source_of_a_bad_value_is_the_one_that_won() -> None:
    assert refusal({"steps": "x"}, written({"steps": "y"})).startswith("--steps: 'x'")
    assert refusal({}, written({"steps": "y"}), {"RLK_REPRO_STEPS": "z"}).startswith("RLK_REPRO_STEPS: 'z'")
    assert load_profile({"steps": "2"}, written({"steps": "y"}), {}).steps == 2


def test_a_missing_profile_is_named() -> None:
    assert refusal(file=Path("gone.json")) == "profile gone.json: cannot be read (No such file or directory): check the path"
