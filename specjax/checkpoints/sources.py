"""One way in: a source's name or path → model and tokenizer."""

from __future__ import annotations

import dataclasses
import os

import jax.numpy as jnp

from specjax.checkpoints import package
from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.gguf_file import read_gguf
from specjax.checkpoints.gguf_model import gguf_config, load_gguf
from specjax.checkpoints.gguf_tokenizer import gguf_tokenizer
from specjax.checkpoints.hf import hf_config, load_hf
from specjax.checkpoints.saved import DESCRIPTION, load_orbax, orbax_config
from specjax.checkpoints.tokenizer import TOKENIZER_FILE, Tokenizer
from specjax.models import Decoder, DecoderConfig

_HUB = "hf:"
# Never pickles, never code.
_HUB_FILES = [
  "config.json",
  "generation_config.json",
  "model*.safetensors",
  "model.safetensors.index.json",
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A model ready to run.

  Attributes:
    model: the decoder, every parameter read from the source.
    tokenizer: its tokenizer; None for a source that holds weights only.
    source: what it was loaded from, as it was asked for.
  """

  model: Decoder
  tokenizer: Tokenizer | None
  source: str

  @property
  def config(self) -> DecoderConfig:
    return self.model.config


def load_model(source: str, *, dtype=jnp.float32, max_length: int | None = None) -> LoadedModel:
  """Loads a model and its tokenizer.

  Args:
    source: a packaged model's name (``smollm2-135m``), ``hf:org/name`` or ``hf:org/name@revision``, a
      folder in the Hugging Face layout, a ``.gguf`` file, or a folder written by `save_orbax`.
    dtype: type of the parameters; float32 means that products are exact in float32, too.
    max_length: shorter limit on positions, at most the model's own; None keeps the model's.

  Returns:
    `LoadedModel`. The config's ``real_vocab_size`` is the tokenizer's when the embedding is padded.

  Raises:
    CheckpointError: the source is unknown, damaged or not supported.
  """
  path = _resolve(source)
  if os.path.isdir(path):
    has_tokenizer = os.path.exists(os.path.join(path, TOKENIZER_FILE))
    tokenizer = Tokenizer.from_folder(path) if has_tokenizer else None
    ours = os.path.exists(os.path.join(path, DESCRIPTION))
    config, load = (orbax_config(path), load_orbax) if ours else (hf_config(path), load_hf)
    config = _limited(config, tokenizer, max_length, source)
    model = load(path, config, dtype=dtype)
  else:
    file = read_gguf(path)
    config = gguf_config(file)
    tokenizer = gguf_tokenizer(file) if "tokenizer.ggml.model" in file.metadata else None
    config = _limited(config, tokenizer, max_length, source)
    model = load_gguf(file, config, dtype=dtype)
  return LoadedModel(model, tokenizer, source)


def load_tokenizer(source: str) -> Tokenizer:
  """The tokenizer of a source alone; sources as for `load_model`."""
  path = _resolve(source)
  return Tokenizer.from_folder(path) if os.path.isdir(path) else gguf_tokenizer(read_gguf(path))


def _limited(config: DecoderConfig, tokenizer, max_length: int | None, source: str) -> DecoderConfig:
  if tokenizer is not None:
    if tokenizer.vocab_size > config.vocab_size:
      raise CheckpointError(
        f"{source}: the tokenizer has {tokenizer.vocab_size} ids, the embedding only {config.vocab_size} rows"
      )
    if tokenizer.vocab_size < config.num_real_tokens:
      config = config.replace(real_vocab_size=tokenizer.vocab_size)
  if max_length is None:
    return config
  if not 1 <= max_length <= config.max_length:
    raise CheckpointError(f"{source}: max_length = {max_length}; it must be in [1, {config.max_length}]")
  return config.replace(max_length=max_length)


def _resolve(source: str) -> str:
  """A local path for any source."""
  if source in package.PACKAGED:
    return package.fetch(source)
  if source.startswith(_HUB):
    return _from_hub(source.removeprefix(_HUB))
  if os.path.isdir(source) or (os.path.isfile(source) and source.endswith(".gguf")):
    return source
  what = "is a file, but not a .gguf file" if os.path.isfile(source) else "is unknown"
  raise CheckpointError(
    f"model source {source!r} {what}; possible: {', '.join(package.PACKAGED)}, {_HUB}org/name, the path of a "
    "folder in the Hugging Face layout, of a .gguf file, or of a folder written by save_orbax"
  )


def _from_hub(name: str) -> str:
  try:
    import huggingface_hub
  except ImportError:
    raise CheckpointError(
      f"model source {_HUB}{name} needs huggingface_hub; install it with the extra: specjax[hub]"
    ) from None
  repository, _, revision = name.partition("@")
  try:
    return huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=_HUB_FILES)
  except Exception as error:  # one of many types, all of which mean that there is no folder
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise CheckpointError(f"model source {_HUB}{name}: {reason}") from error
