"""Target and draft models."""

from specjax.models.config import DecoderConfig, Llama3RopeScaling
from specjax.models.decoder import Decoder

__all__ = ["Decoder", "DecoderConfig", "Llama3RopeScaling"]
