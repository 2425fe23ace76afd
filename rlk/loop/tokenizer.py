"""Text to token ids and back, from the tokenizer files of a checkpoint; and the byte tokenizer of the tiny checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from rlk.model.config import CheckpointError

SPECIALS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
"""Special tokens of the byte tokenizer; their ids follow the 256 bytes."""
END, PAD = 256, 257


class TextTokenizer:
    """Encodes and decodes text with a ``tokenizers`` tokenizer; ``stop_ids`` are the ids that end a response."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self.stop_ids = tokenizer, stop_ids

    @classmethod
    def load(cls, checkpoint: Path) -> TextTokenizer:
        """Read tokenizer.json and the end tokens of generation_config.json. Raises CheckpointError naming an unusable file."""
        tokenizer_file, generation_file = Path(checkpoint) / "tokenizer.json", Path(checkpoint) / "generation_config.json"
        try:
            tokenizer = Tokenizer.from_str(tokenizer_file.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises bare Exception for a file that it cannot parse
            raise CheckpointError(f"{tokenizer_file}: not a usable tokenizer ({error}); copy the checkpoint again") from error
        try:
            stop = json.loads(generation_file.read_text(encoding="utf-8"))["eos_token_id"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{generation_file}: no eos_token_id to be read; a response would never end") from error
        ids = stop if isinstance(stop, list) else [stop]
        if not ids or not all(type(i) is int for i in ids):
            raise CheckpointError(f"{generation_file}: eos_token_id={stop!r} must be one id or a list of ids")
        return cls(tokenizer, frozenset(ids))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``, without added begin or end tokens; special tokens written in the text become their ids."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def byte_tokenizer() -> Tokenizer:
    """Byte-level tokenizer without merges: token id = byte value, then :data:`SPECIALS`. Every text round-trips."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return tokenizer


def byte_tokenizer_files(max_length: int) -> dict[str, str]:
    """Files by name that make a checkpoint's tokenizer loadable by transformers and vLLM; max_length counts tokens."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[0],
        "pad_token": SPECIALS[1],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": byte_tokenizer().to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps({"eos_token_id": END, "pad_token_id": PAD}, indent=2) + "\n",
    }


def _byte_characters() -> list[str]:
    """The printable stand-in that byte-level BPE uses for each byte: itself where printable, else the next free one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
