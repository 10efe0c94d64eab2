"""The tokenizer that a GGUF file carries in its metadata."""

from __future__ import annotations

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.checkpoints.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_LLAMA3 = ("llama-bpe", "llama3")

_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
  pattern = Regex(_WORDS.replace("DIGITS", digits))
  return pre_tokenizers.Sequence(
    [pre_tokenizers.Split(pattern, "isolated", invert=False), _byte_level(False)]
  )


def _smollm() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(True)])


# ``tokenizer.ggml.pre`` → how text is cut before merging.
_PRE_TOKENIZERS = {
  "smollm": _smollm,
  "llama-bpe": lambda: _split("{1,3}"),
  "llama3": lambda: _split("{1,3}"),
  "qwen2": lambda: _split(""),
  "gpt-2": lambda: _byte_level(True),
  "default": lambda: _byte_level(True),
}


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
  """Builds the tokenizer of a file with a byte-level BPE vocabulary.

  Raises:
    CheckpointError: another kind of vocabulary or an unknown way to cut text.
  """
  kind = file.get("tokenizer.ggml.model", str)
  if kind != "gpt2":
    raise CheckpointError(
      f"{file.path}: tokenizer.ggml.model = {kind!r} is not supported; supported: 'gpt2' (byte-level BPE)"
    )
  pre = file.get("tokenizer.ggml.pre", str)
  if pre not in _PRE_TOKENIZERS:
    raise CheckpointError(
      f"{file.path}: tokenizer.ggml.pre = {pre!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}"
    )
  tokens = file.get("tokenizer.ggml.tokens", list)
  types = file.get("tokenizer.ggml.token_type", np.ndarray, np.ones(len(tokens), np.int32)).tolist()
  if len(types) != len(tokens):
    raise CheckpointError(f"{file.path}: {len(tokens)} tokens, but {len(types)} token types")
  # Converters pad the list up to the embedding's rows with unused entries.
  size = max((i + 1 for i, t in enumerate(types) if t != _UNUSED), default=0)
  vocabulary = {token: i for i, token in enumerate(tokens[:size])}
  if len(vocabulary) != size:
    repeated = next(t for i, t in enumerate(tokens[:size]) if vocabulary[t] != i)
    raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens has {repeated!r} twice")
  inner = tokenizers.Tokenizer(_bpe(file, vocabulary, pre))
  if pre == "qwen2":
    inner.normalizer = normalizers.NFC()
  inner.pre_tokenizer = _PRE_TOKENIZERS[pre]()
  inner.decoder = decoders.ByteLevel()
  added = [(tokens[i], types[i]) for i in range(size) if types[i] in (_CONTROL, _USER_DEFINED)]
  inner.add_tokens([AddedToken(t, normalized=False, special=kind == _CONTROL) for t, kind in added])
  bos_id = file.get("tokenizer.ggml.bos_token_id", int, -1)
  ends = [file.get(f"tokenizer.ggml.{key}", int, -1) for key in _END_KEYS]
  names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
  ids = {short: file.get(f"tokenizer.ggml.{key}_token_id", int, -1) for key, short in names.items()}
  return Tokenizer(
    inner,
    bos_id=bos_id if bos_id >= 0 else None,
    eos_ids=[i for i in ends if i >= 0],
    adds_bos=file.get("tokenizer.ggml.add_bos_token", bool, pre in _LLAMA3),
    chat_template=file.get("tokenizer.chat_template", str, "") or None,
    special_tokens={f"{name}_token": tokens[i] for name, i in ids.items() if 0 <= i < size},
  )


def _bpe(file: GGUFFile, vocabulary: dict[str, int], pre: str) -> models.BPE:
  merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", list)]
  for merge in merges:
    if len(merge) != 2 or "".join(merge) not in vocabulary:
      raise CheckpointError(f"{file.path}: tokenizer.ggml.merges has {' '.join(merge)!r}, not a merge")
  try:
    return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _LLAMA3)
  except Exception as error:  # the package raises bare Exception
    raise CheckpointError(f"{file.path}: tokenizer.ggml.merges: {error}") from None
