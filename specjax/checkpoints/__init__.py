"""Model sources, checkpoint formats and tokenizers."""

from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.hf_save import save_hf
from specjax.checkpoints.saved import load_module, read_description, save_module, save_orbax
from specjax.checkpoints.sources import LoadedModel, load_model, load_tokenizer
from specjax.checkpoints.tokenizer import Tokenizer, check_same_vocabulary

__all__ = [
  "CheckpointError",
  "LoadedModel",
  "Tokenizer",
  "check_same_vocabulary",
  "load_model",
  "load_module",
  "load_tokenizer",
  "read_description",
  "save_hf",
  "save_module",
  "save_orbax",
]
