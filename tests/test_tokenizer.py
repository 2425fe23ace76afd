"""The byte tokenizer: ids are bytes, every text round-trips, and transformers reads the same ids from the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk.loop.tokenizer import END, PAD, SPECIALS, TextTokenizer, byte_tokenizer, byte_tokenizer_files
from rlk.model.config import CheckpointError

BYTES = TextTokenizer(byte_tokenizer(), frozenset({END}))


def write(directory: Path) -> Path:
    for name, text in byte_tokenizer_files(512).items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory


@given(st.text(max_size=60))
def test_every_text_round_trips_as_its_bytes(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids, skip_special_tokens=False) == text
    if "<|" not in text:
        assert ids == tuple(text.encode())


def test_every_byte_has_its_own_id_and_specials_follow() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.get_vocab_size() == 260
    assert len({tokenizer.id_to_token(i) for i in range(260)}) == 260
    assert BYTES.encode("".join(SPECIALS)) == (256, 257, 258, 259)
    assert (BYTES.encode(SPECIALS[0]), BYTES.encode(SPECIALS[1])) == ((END,), (PAD,))
    assert BYTES.decode([72, END, 105, PAD]) == "Hi"
    assert BYTES.decode([0xC3]) == "\ufffd"


def test_transformers_reads_the_same_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(write(tmp_path))
    ours = TextTokenizer.load(tmp_path)
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (END, PAD, 260)
    assert ours.stop_ids == {END}
    for text in ("Add step by step: 3+8+5+9\n", " \t\x00é漢🙂 don't", "a<|endoftext|>b"):
        ids = theirs(text).input_ids
        assert tuple(ids) == ours.encode(text)
        assert theirs.decode(ids) == ours.decode(ids, skip_special_tokens=False) == text


def test_several_stop_ids(tmp_path: Path) -> None:
    (write(tmp_path) / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 259]}))
    assert TextTokenizer.load(tmp_path).stop_ids == {256, 259}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("generation_config.json", None),
        ("generation_config.json", "{}"),
        ("generation_config.json", '{"eos_token_id": []}'),
        ("generation_config.json", '{"eos_token_id": null}'),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, name: str, content: str | None) -> None:
    write(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name) as error:
        TextTokenizer.load(tmp_path)
    assert "\n" not in str(error.value)
