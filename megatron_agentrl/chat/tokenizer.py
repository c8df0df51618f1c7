"""A model folder's tokenizer on the `tokenizers` library alone.

Text → ids with special tokens recognised and nothing added; ids → text with special tokens kept.
Not transformers' tokenizer (its import costs seconds and hundreds of megabytes in processes that
never compute), and not a chat template (`chat.template`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer


class Tokenizer:
    """The tokenizer of `<folder>/tokenizer.json`.

    special_ids   ids of the tokens marked special
    stop_ids      ids that end a policy turn (`eos_token_id` of generation_config.json, else config.json)
    config        the content of tokenizer_config.json ({} where there is none)
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; a model folder needs the fast tokenizer's tokenizer.json "
                "(transformers' AutoTokenizer(...).save_pretrained writes one)"
            )
        self._tokenizer = _Tokenizer.from_file(str(path))
        # A padding or truncation set in the file would change ids behind the caller's back.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.config: dict[str, Any] = read_json(self.folder / "tokenizer_config.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.special_tokens = {token.content: id for id, token in added.items() if token.special}
        self.stop_ids = _stop_ids(self.folder)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it become their id, none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, so the text may not encode back to `ids`."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        """Id of a token, or None where the vocabulary lacks it."""
        return self._tokenizer.token_to_id(token)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where the file does not exist."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: {type(content).__name__} found, a JSON object expected")
    return content


def _stop_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    raise ValueError(
        f"{folder}: neither generation_config.json nor config.json names an eos_token_id; "
        "without one a policy turn has no end"
    )
