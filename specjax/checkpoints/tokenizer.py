"""Text ↔ token ids, the same for every source of a model."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from specjax.checkpoints import chat
from specjax.checkpoints.files import CheckpointError, read_json, write_json

TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE, _MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
_TEMPLATE_FILE, _GENERATION_FILE = "chat_template.jinja", "generation_config.json"
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
  """A vocabulary with its special tokens and chat template.

  Attributes:
    vocab_size: number of real ids, the largest id + 1. A model's embedding may have more rows.
    bos_id: id put before a text, None when there is none.
    eos_ids: ids that end an answer, sorted.
    adds_bos: whether `encode` puts BOS before a text unless told otherwise.
    chat_template: Jinja source, None when there is none.
  """

  def __init__(
    self,
    inner: tokenizers.Tokenizer,
    *,
    bos_id: int | None = None,
    eos_ids: Sequence[int] = (),
    adds_bos: bool = False,
    chat_template: str | None = None,
    special_tokens: Mapping[str, str] | None = None,
    vocab_size: int | None = None,
  ):
    """
    Args:
      inner: the tokenizer of the ``tokenizers`` package.
      special_tokens: what the template knows by name, such as ``{"bos_token": "<s>"}``.
      vocab_size: None counts the ids of ``inner``; smaller when the last ones are padding.
    """
    inner.no_padding()
    inner.no_truncation()
    self._inner = inner
    largest = max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
    self.vocab_size = largest + 1 if vocab_size is None else vocab_size
    self.bos_id = bos_id
    self.eos_ids = tuple(sorted(set(eos_ids)))
    self.adds_bos = adds_bos and bos_id is not None
    self.chat_template = chat_template
    self.special_tokens = dict(special_tokens or {})
    self._special_ids = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
    self._added_ids = set(inner.get_added_tokens_decoder())
    self._raw_bytes = _raw_bytes(inner)
    for name, ids in (("bos_id", [] if bos_id is None else [bos_id]), ("eos_ids", self.eos_ids)):
      for i in ids:
        if not 0 <= i < self.vocab_size:
          raise CheckpointError(f"tokenizer: {name} = {i}; ids go from 0 to {self.vocab_size - 1}")

  @classmethod
  def from_folder(cls, folder: str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: ``tokenizer.json`` and the files beside it."""
    path = os.path.join(folder, TOKENIZER_FILE)
    if not os.path.exists(path):
      raise CheckpointError(
        f"{folder}: no {TOKENIZER_FILE}; a tokenizer.model alone is not supported, convert it first"
      )
    try:
      inner = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the package raises bare Exception
      raise CheckpointError(f"{path}: not a tokenizer file, perhaps truncated ({error})") from None
    config, generation = _optional(folder, _CONFIG_FILE), _optional(folder, _GENERATION_FILE)
    specials = {}
    for values in (_optional(folder, _MAP_FILE), config):
      for name in _SPECIALS:
        token = values.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
          specials[name] = token
    bos_id = inner.token_to_id(specials["bos_token"]) if "bos_token" in specials else None
    eos_ids = generation.get("eos_token_id")
    if eos_ids is None:  # older folders keep it with the architecture
      eos_ids = _optional(folder, "config.json").get("eos_token_id")
    eos_ids = [] if eos_ids is None else list(eos_ids) if isinstance(eos_ids, list) else [eos_ids]
    if "eos_token" in specials and inner.token_to_id(specials["eos_token"]) is not None:
      eos_ids.append(inner.token_to_id(specials["eos_token"]))
    adds_bos = config.get("add_bos_token")
    if adds_bos is None:  # then the file's own post-processor decides
      adds_bos = bos_id is not None and inner.encode("a").ids[:1] == [bos_id]
    return cls(
      inner,
      bos_id=bos_id,
      eos_ids=eos_ids,
      adds_bos=bool(adds_bos),
      chat_template=_chat_template(folder, config),
      special_tokens=specials,
    )

  def save(self, folder: str) -> None:
    """Writes the files that `from_folder` reads; padding ids behind ``vocab_size`` are kept as they are."""
    self._inner.save(os.path.join(folder, TOKENIZER_FILE))
    config: dict[str, Any] = {**self.special_tokens, "add_bos_token": self.adds_bos}
    if self.bos_id is not None:
      config["bos_token"] = self.id_to_token(self.bos_id)
    if self.chat_template is not None:
      config["chat_template"] = self.chat_template
    write_json(os.path.join(folder, _CONFIG_FILE), config)
    write_json(os.path.join(folder, _GENERATION_FILE), {"eos_token_id": list(self.eos_ids)})

  def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
    """Ids of a text. Special tokens written in the text are parsed as such.

    Args:
      text: any string.
      add_bos: put BOS first, unless the text already begins with it; None does what the model's files
        say.
    """
    ids = self._inner.encode(text, add_special_tokens=False).ids
    if add_bos and self.bos_id is None:
      raise ValueError("add_bos = True, but this tokenizer has no BOS token")
    if (self.adds_bos if add_bos is None else add_bos) and ids[:1] != [self.bos_id]:
      ids = [self.bos_id, *ids]
    return ids

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    """Text of a run of ids; bytes that are not UTF-8 become U+FFFD."""
    return self._inner.decode([int(i) for i in ids], skip_special_tokens=skip_special)

  def token_bytes(self, token: int) -> bytes:
    """The raw bytes one token stands for; a character may span tokens, so join them before decoding.

    Special tokens give their own text; ids of the padding give nothing.
    """
    string = self.id_to_token(token)
    if string is None:
      return b""
    return string.encode() if token in self._added_ids else self._raw_bytes(string)

  def id_to_token(self, token: int) -> str | None:
    """The vocabulary's string for an id, None for an id that stands for nothing."""
    return self._inner.id_to_token(int(token)) if 0 <= token < self.vocab_size else None

  def is_special(self, token: int) -> bool:
    """Whether `decode` skips this id."""
    return int(token) in self._special_ids

  def apply_chat_template(
    self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
  ) -> str:
    """The prompt of a conversation of ``{"role": …, "content": …}`` messages."""
    if self.chat_template is None:
      raise CheckpointError("this tokenizer has no chat template; pass a plain prompt")
    return chat.render(
      self.chat_template,
      messages,
      add_generation_prompt=add_generation_prompt,
      variables=self.special_tokens,
    )

  def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ids of a conversation up to the opening of the assistant's answer.

    The template writes BOS itself where the model wants it, so none is added.
    """
    return self.encode(self.apply_chat_template(messages), add_bos=False)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
  """Raises unless the two vocabularies mean the same by each id that both have.

  Sizes may differ: models pad their vocabularies, and such ids stand for nothing.

  Raises:
    ValueError: names the first id with two different strings.
  """
  for i in range(min(target.vocab_size, draft.vocab_size)):
    mine, theirs = target.id_to_token(i), draft.id_to_token(i)
    if mine != theirs:
      raise ValueError(
        f"target and draft have different vocabularies: id {i} is {mine!r} in the target and "
        f"{theirs!r} in the draft"
      )


def _optional(folder: str, name: str) -> dict[str, Any]:
  path = os.path.join(folder, name)
  return read_json(path) if os.path.exists(path) else {}


def _chat_template(folder: str, config: Mapping[str, Any]) -> str | None:
  path = os.path.join(folder, _TEMPLATE_FILE)
  if os.path.exists(path):
    with open(path, encoding="utf-8") as file:
      return file.read()
  template = config.get("chat_template")
  if isinstance(template, list):  # several, by name
    template = next((t.get("template") for t in template if t.get("name") == "default"), None)
  return template


def _raw_bytes(inner: tokenizers.Tokenizer):
  """How a vocabulary string becomes bytes: byte-level alphabets, or pieces with byte fallback."""
  description = json.loads(inner.to_str())
  decoder = json.dumps(description.get("decoder") or {})
  if '"ByteLevel"' in decoder:
    alphabet = byte_alphabet()
    return lambda string: b"".join(alphabet[c] if c in alphabet else c.encode() for c in string)
  if '"ByteFallback"' in decoder or '"Metaspace"' in decoder:
    return _piece_bytes
  return str.encode


def _piece_bytes(string: str) -> bytes:
  byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", string)
  return bytes.fromhex(byte[1]) if byte else string.replace("\u2581", " ").encode()


@functools.cache
def byte_alphabet() -> dict[str, bytes]:
  """GPT-2's printable stand-ins: character → the byte it means."""
  plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  rest = [b for b in range(256) if b not in plain]
  return {chr(b): bytes([b]) for b in plain} | {chr(256 + i): bytes([b]) for i, b in enumerate(rest)}
