"""Model sources, checkpoint formats and tokenizers."""

from specjax.checkpoints.block_files import save_block
from specjax.checkpoints.draft_files import save_draft
from specjax.checkpoints.eagle1_files import save_eagle1
from specjax.checkpoints.eagle_files import save_eagle3
from specjax.checkpoints.early_exit_files import save_early_exit
from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.heads import DraftHead, load_head
from specjax.checkpoints.hf_save import save_hf
from specjax.checkpoints.medusa_files import save_medusa
from specjax.checkpoints.saved import load_module, read_description, save_module, save_orbax
from specjax.checkpoints.skip_files import load_skips, save_skips
from specjax.checkpoints.sources import LoadedModel, load_model, load_tokenizer
from specjax.checkpoints.tokenizer import Tokenizer, check_same_vocabulary

__all__ = [
  "CheckpointError",
  "DraftHead",
  "LoadedModel",
  "Tokenizer",
  "check_same_vocabulary",
  "load_head",
  "load_model",
  "load_module",
  "load_skips",
  "load_tokenizer",
  "read_description",
  "save_block",
  "save_draft",
  "save_eagle1",
  "save_eagle3",
  "save_early_exit",
  "save_hf",
  "save_medusa",
  "save_module",
  "save_orbax",
  "save_skips",
]
