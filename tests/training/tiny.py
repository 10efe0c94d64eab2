"""A target with a chat template that writes letters: nearly all that it samples is a text."""

from __future__ import annotations

import functools

import tokenizers
from flax import nnx
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specjax.checkpoints import LoadedModel, Tokenizer
from specjax.models import Decoder
from specjax.testing import tiny_model

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Space and newline in GPT-2's alphabet of bytes.
_SPACE, _NEWLINE = "\u0120", "\u010a"
END, START, BOS = 29, 30, 31
VOCAB = 32
TEMPLATE = (
  "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def letters_tokenizer(template: str | None = TEMPLATE, **others) -> Tokenizer:
  """Ids 0–25 letters, 26 space, 27 newline, 28 ``th``, then three special tokens."""
  vocabulary = {char: i for i, char in enumerate([*_LETTERS, _SPACE, _NEWLINE, "th"])}
  inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  inner.decoder = decoders.ByteLevel()
  special = lambda text: AddedToken(text, normalized=False, special=True)
  inner.add_tokens([special("<|end|>"), special("<|start|>"), special("<|bos|>")])
  fields = dict(bos_id=BOS, eos_ids=(END,), chat_template=template, special_tokens={"bos_token": "<|bos|>"})
  return Tokenizer(inner, **{**fields, **others})


def letters_model(seed: int = 0) -> Decoder:
  """A random decoder that ends its texts now and then, and says no other special token."""
  model = tiny_model(seed, vocab_size=VOCAB, max_length=256)
  weight = model.head.weight[...]
  model.head.weight = nnx.Param(weight.at[START:].set(0.0).at[END].multiply(1.5))
  return model


@functools.cache
def loaded() -> LoadedModel:
  return LoadedModel(letters_model(), letters_tokenizer(), "tiny")
