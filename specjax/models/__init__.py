"""Target and draft models, and draft heads."""

from specjax.models.block import BlockConfig, BlockHead
from specjax.models.config import DecoderConfig, Llama3RopeScaling
from specjax.models.decoder import Decoder, truncated
from specjax.models.draft import DraftConfig, DraftDecoder
from specjax.models.eagle1 import Eagle1, Eagle1Config
from specjax.models.eagle3 import Eagle3, Eagle3Config, default_tap_layers
from specjax.models.early_exit import EarlyExit, EarlyExitConfig
from specjax.models.feature_head import FeatureHead
from specjax.models.medusa import MedusaConfig, MedusaHeads
from specjax.models.output import OutputLayer, TokenMap, output_rows, over_target
from specjax.models.skipping import SkipSet, skipping

__all__ = [
  "BlockConfig",
  "BlockHead",
  "Decoder",
  "DecoderConfig",
  "DraftConfig",
  "DraftDecoder",
  "Eagle1",
  "Eagle1Config",
  "Eagle3",
  "Eagle3Config",
  "EarlyExit",
  "EarlyExitConfig",
  "FeatureHead",
  "Llama3RopeScaling",
  "MedusaConfig",
  "MedusaHeads",
  "OutputLayer",
  "SkipSet",
  "TokenMap",
  "default_tap_layers",
  "output_rows",
  "over_target",
  "skipping",
  "truncated",
]
