"""A byte-level tokenizer and tiny model folders for the tests of text and of the scripts."""

from __future__ import annotations

import contextlib
import os

import tokenizers
from absl import flags
from absl.testing import flagsaver
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from experiments import flags as shared
from specjax.checkpoints import Tokenizer, save_orbax
from specjax.checkpoints.tokenizer import byte_alphabet
from specjax.testing import perturbed, tiny_model

BOS, END, VOCAB = 259, 258, 260
TEMPLATE = (
  "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
  "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
  """Ids 0–255 are bytes, 256 and 257 two merged pairs, then an end and a BOS token."""
  alphabet = {char: data[0] for char, data in byte_alphabet().items()}
  vocabulary = alphabet | {"he": 256, "Ġt": 257}
  inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("Ġ", "t")]))
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  inner.decoder = decoders.ByteLevel()
  inner.add_tokens([AddedToken(t, normalized=False, special=True) for t in ("<|end|>", "<|bos|>")])
  return Tokenizer(
    inner,
    bos_id=BOS,
    eos_ids=(END,),
    adds_bos=True,
    chat_template=template,
    special_tokens={"bos_token": "<|bos|>"},
  )


def save_pair(folder: str) -> tuple[str, str]:
  """Folders of a target and of a draft that is often right."""
  target = tiny_model(0, vocab_size=VOCAB, max_length=1024)
  paths = os.path.join(folder, "target"), os.path.join(folder, "draft")
  for path, model in zip(paths, (target, perturbed(target, 0.05)), strict=True):
    save_orbax(path, model, byte_tokenizer())
  return paths


@contextlib.contextmanager
def parsed(*arguments: str):
  """Flags as of a command line; what they were before comes back."""
  with flagsaver.flagsaver():
    flags.FLAGS.unparse_flags()
    shared.parse(["script", *arguments])
    yield


def run_script(module, *arguments: str, takes_arguments: bool = False) -> int:
  """Runs a script's ``main`` in this process as its command line would; returns the exit code."""
  with flagsaver.flagsaver():
    flags.FLAGS.unparse_flags()
    try:
      argv = shared.parse(["script", "--compilation_cache=", *arguments])
      return shared.guarded(module.main, takes_arguments=takes_arguments)(argv)
    except SystemExit as error:
      return error.code
