"""Trained heads, of --drafter_path or shipped: loaded, given to their drafters, named by what they hold."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.methods import HEADS, MethodText
from specjax.base import Trees
from specjax.checkpoints import DraftHead, LoadedModel, load_head, load_skips
from specjax.drafters import BlockWeights, EagleWeights, EarlyExitWeights, MedusaWeights
from specjax.models import Decoder, DraftDecoder, FeatureHead, TokenMap, output_rows, skipping, truncated
from specjax.models.sharding import shard_model

# What a step of a drafter without weights is taken to cost, in plain rounds, where it was not measured.
_FREE_DRAFT = 0.02


def check_sources(
  drafters: Sequence[str],
  methods: Sequence[MethodText],
  model: str,
  paths: Sequence[str],
  shipped: Collection[str],
) -> None:
  """What can be known to be wrong about the drafters' weights before any are loaded.

  Args:
    drafters: the methods as they were written.
    model, paths: --draft_model and --drafter_path.
    shipped: kinds of heads that come with the target.

  Raises:
    ValueError: one of these is missing, or not used.
  """
  needy = [method for method in methods if method.head not in shipped]
  if any(method.needs_draft_model for method in needy) and not model and not paths:
    raise ValueError("drafter two_model needs --draft_model or --drafter_path")
  if model and not any(method.uses_draft_model for method in methods):
    raise ValueError(f"--draft_model is not used by {', '.join(drafters)}; pass --drafter=two_model")
  for method in needy:
    if method.needs_head and not paths:
      raise ValueError(f"drafter {method.drafter} needs --drafter_path")
  if paths and not any(method.head for method in methods):
    raise ValueError(f"--drafter_path is not used by {', '.join(drafters)}; {', '.join(HEADS)} use it")


def load(paths: Sequence[str], target: LoadedModel, dtype: Any, mesh: Mesh | None) -> dict[str, DraftHead]:
  """The heads by their kind, on the mesh if there is one.

  Raises:
    ValueError: a head that cannot be loaded or does not fit the target, or two of a kind.
  """
  heads: dict[str, DraftHead] = {}
  for path in paths:
    head = load_head(path, target, dtype=dtype)
    if head.kind in heads:
      first = heads[head.kind].source
      raise ValueError(f"--drafter_path: {first!r} and {path!r} both hold a head of kind {head.kind}")
    heads[head.kind] = head if mesh is None else _on_mesh(head, mesh)
  return heads


def missing(
  heads: Mapping[str, DraftHead], methods: Sequence[MethodText], draft: LoadedModel | None
) -> list[str]:
  """Kinds of heads that methods lack, being without a draft model instead."""
  lacks = lambda method: method.head is not None and method.head not in heads
  served = lambda method: method.needs_draft_model and draft is not None
  return list(dict.fromkeys(method.head for method in methods if lacks(method) and not served(method)))


def check_kinds(
  heads: Mapping[str, DraftHead], methods: Sequence[MethodText], draft: LoadedModel | None
) -> None:
  """Raises ValueError for a head that no method takes, and a method without its one source of weights."""
  taken = {method.head for method in methods}
  for kind, head in heads.items():
    if kind not in taken:
      raise ValueError(f"--drafter_path: {head.source!r} holds a head of kind {kind}, which no drafter takes")
  if draft is not None and "draft" in heads:
    raise ValueError(
      f"--draft_model = {draft.source!r} and --drafter_path = {heads['draft'].source!r}: one is enough"
    )
  for kind in missing(heads, methods, draft):
    needy = next(method.drafter for method in methods if method.head == kind)
    raise ValueError(f"drafter {needy} needs a head of kind {kind}; --drafter_path holds none")


def _on_mesh(head: DraftHead, mesh: Mesh) -> DraftHead:
  """A draft decoder is spread as a target is; other heads are small, and lie on every device."""
  if isinstance(head.module, DraftDecoder):
    return dataclasses.replace(head, module=shard_model(head.module, mesh))
  module = jax.device_put(head.module, NamedSharding(mesh, PartitionSpec()))
  if isinstance(module, FeatureHead) or head.kind in ("block", "early_exit"):
    module.mesh = mesh  # its attention is cut over rows and heads
  return dataclasses.replace(head, module=module)


def weights(head: DraftHead, target: Decoder) -> Any:
  """What the head's drafter takes, with the arrays of the target that it reads."""
  if isinstance(head.module, FeatureHead):
    return EagleWeights(head.module, target.embed[...])
  if head.kind == "block":
    return BlockWeights(head.module, target.embed[...])
  if head.kind == "medusa":
    rows = output_rows(target, head.module.ids) if head.config.output == "target" else None
    return MedusaWeights(head.module, target.norm, rows)
  if head.kind == "early_exit":
    return EarlyExitWeights(head.module, truncated(target, head.config.exit_layer))
  return head.module


def own_layers(target: LoadedModel, own: Mapping[str, Any]) -> tuple[Decoder, int]:
  """The target without some of its layers, see `MethodText.own`, and how many of the first are whole.

  Raises:
    ValueError: more layers than the target has, or a file that cannot be read or does not fit it.
  """
  config = target.config
  if "skips" in own:
    skips = load_skips(own["skips"], config)
    return skipping(target.model, skips), skips.prefix
  layers = own["layers"]
  if layers >= config.num_layers:
    raise ValueError(f"self_speculation: layers = {layers}; it must be in [1, {config.num_layers - 1}]")
  return truncated(target.model, layers), layers


def skips_digest(own: Mapping[str, Any], target: LoadedModel) -> str | None:
  """Of the sublayers that a file names; None where none does."""
  if "skips" not in own:
    return None
  return hashlib.sha256(repr(load_skips(own["skips"], target.config)).encode()).hexdigest()[:16]


def digest(head: DraftHead) -> str:
  """Of the head's own parameters and draft vocabulary: not where it lies, nor what it reads of the target."""
  found = hashlib.sha256()
  state = nnx.state(head.module, nnx.Any(nnx.Param, TokenMap))
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    found.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
    found.update(np.asarray(leaf).tobytes())
  return found.hexdigest()[:16]


def draft_step(draft: Any, target: Decoder, trees: Trees) -> float:
  """What a level of the draft is taken to cost, in plain rounds, by the bytes that are read for it."""
  if draft is None:
    return _FREE_DRAFT
  size = lambda model: sum(leaf.nbytes for leaf in jax.tree.leaves(model))
  if isinstance(draft, EarlyExitWeights):
    return (size(draft.adapter) + size(draft.layers.layers)) / size(target)
  # Medusa's heads and a block's positions all speak at once, whatever the depth.
  at_once = isinstance(draft, MedusaWeights | BlockWeights)
  levels = max(tree.max_depth for tree in trees) if at_once else 1
  # Of the embeddings a few rows are read.
  read = draft.head if isinstance(draft, EagleWeights | BlockWeights) else draft
  return size(read) / size(target) / levels
