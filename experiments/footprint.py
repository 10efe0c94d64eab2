"""What a method costs beside the target: arrays, a row's state, and the training of its head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from experiments.methods import parse_method
from experiments.runtime import Job, Method, head_digest
from specjax.training.records import history


def footprint(job: Job, method: Method) -> dict[str, Any]:
  """Sizes of what the method's drafter has of its own.

  Returns:
    ``weight_bytes``: of arrays that are not the target's; ``parameters``: numbers in those.
    ``token_bytes``: of a row's state that grows by a slot a token; ``row_bytes``: the rest of it.
    ``target_bytes``, ``target_token_bytes``: of the target's arrays, and of its cache a token.
    ``head``: digest of a trained head and what `training_of` says of it; None without.
  """
  target, drafter = method.weights.target, method.weights.drafter
  shared = set(map(id, jax.tree.leaves(target)))
  own = [leaf for leaf in jax.tree.leaves(drafter) if id(leaf) not in shared]
  slots = method.config.slots
  state = lambda slots: _bytes(jax.eval_shape(lambda of: method.config.drafter.init(of, 1, slots), drafter))
  a_token = (state(2 * slots) - state(slots)) // slots
  head = job.heads.get(parse_method(method.name).head)
  return {
    "weight_bytes": sum(leaf.nbytes for leaf in own),
    "parameters": sum(leaf.size for leaf in own if jnp.issubdtype(leaf.dtype, jnp.floating)),
    "token_bytes": a_token,
    "row_bytes": state(slots) - a_token * slots,
    "target_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(target)),
    "target_token_bytes": _bytes(jax.eval_shape(lambda: target.init_cache(1, slots))) // slots,
    "head": None if head is None else {"digest": head_digest(job, method.name)} | training_of(head.source),
  }


def _bytes(tree: Any) -> int:
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def training_of(source: str) -> dict[str, Any]:
  """Cost of the runs that made a head: those that it went on from, too.

  Args:
    source: the head's folder.

  Returns:
    ``recipe``, ``--head`` of the last one; ``trained_parameters``, ``tokens``, ``seconds`` and
    ``peak_memory_bytes`` (the most of a run). Nothing for a head without records.
  """
  runs = [run for run in history(source) if "result" in run]
  if not runs:
    return {}
  made = [run["result"] for run in runs]
  return {
    "recipe": runs[0]["settings"]["--head"],
    "trained_parameters": made[0]["parameters"],
    "tokens": sum(run["tokens"] for run in made),
    "seconds": round(sum(run["seconds"] for run in made), 1),
    "peak_memory_bytes": max(run["peak_memory_bytes"] for run in made),
  }
