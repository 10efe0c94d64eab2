"""What the loop asks of a head, and what all heads share: losses and held-out acceptance by position.

A head that drafts chains says its logits by depth (`Recipe.chain_logits`); loss and evaluation follow from
them. Everything is a sum over learned tokens, linear in the rows of a batch: the step divides by the number
of learned tokens, so that cutting a batch into parts, or over devices, changes nothing but the rounding.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models import Decoder, DecoderConfig, OutputLayer, layers, output_rows
from specjax.sampling import mask_padding
from specjax.training import losses, vocabulary
from specjax.training.batches import Batch, chain_counts, rows_at

Array = jax.Array

# Children of a node of the trees that evaluation thinks of.
RANKS = 8


@dataclasses.dataclass(frozen=True)
class TextStats:
  """What a head is told of the texts before it is made.

  Attributes:
    counts: int ``[V]``, how often each token is learned in the training samples.
    keep: ids that a draft vocabulary must have, e.g. those that end an answer.
    sizes: float32 ``[taps, D]``, how large each of the recipe's features usually is, see
      `features.usual_sizes`; None: 1.
  """

  counts: np.ndarray
  keep: tuple[int, ...] = ()
  sizes: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(abc.ABC):
  """How a head is made, trained and judged: static and hashable; its fields are the options in brackets.

  Attributes:
    draft_vocab: Vd, tokens that the head can say, the most frequent ones; None: all V.
    rank: of a factored output layer, where the head has one of its own; None: one matrix.
    loss: one of `losses.LOSSES`, on the target's probabilities renormalised over the draft vocabulary, or
      ``tokens``: cross-entropy on the text (tokens that the draft vocabulary lacks do not count).
    decay: depth d weighs ``decay ** d`` in the loss.
    judged: depths that evaluation looks at; None: as many as the head has.
    output: ``target``: the target's own rows of the draft vocabulary, which are not trained; others are the
      recipe's own.
  """

  draft_vocab: int | None = None
  rank: int | None = None
  loss: str = "cross_entropy"
  decay: float = 0.8
  judged: int | None = None
  output: str = "target"

  name: ClassVar[str]
  # Of the head it makes, as `checkpoints.DraftHead` has it.
  kind: ClassVar[str]
  # Whether it reads `TextStats.sizes`.
  sized: ClassVar[bool] = False
  # See `batches.chain_counts`.
  lag: ClassVar[int]
  # Whether the head drafts for a target that its training changed: every step then runs the whole target.
  changes_target: ClassVar[bool] = False

  def __post_init__(self):
    known = (*losses.LOSSES, losses.TOKENS)
    if self.loss not in known:
      raise ValueError(f"{self.name}: loss = {self.loss!r}; it must be one of {', '.join(known)}")
    if not (isinstance(self.decay, int | float) and 0 < self.decay <= 1):
      raise ValueError(f"{self.name}: decay = {self.decay!r}; it must be in (0, 1]")
    for field in ("draft_vocab", "rank", "judged"):
      check_positive(self.name, field, getattr(self, field), optional=True)

  # --- a head's own ----------------------------------------------------------------------------------

  @property
  @abc.abstractmethod
  def depth(self) -> int:
    """Depths that are trained."""

  @abc.abstractmethod
  def taps(self, target: DecoderConfig) -> tuple[int, ...]:
    """Layers of the target whose input batches must bring; the last is always ``num_layers``."""

  @abc.abstractmethod
  def init(self, target: Decoder, stats: TextStats, rngs: nnx.Rngs) -> nnx.Module:
    """A fresh head with float32 parameters.

    Raises:
      ValueError: options that do not fit the target.
    """

  def go_on(self, fresh: nnx.Module, trained: nnx.Module) -> nnx.Module:
    """A head that was saved, as `init` would have made it; ``fresh`` is what `init` made.

    ``trained`` has the parameters of ``head_of(fresh)``. Without trained rows a token its draft vocabulary is
    the fresh one, of the text that it will see.
    """
    if self.output != "target":
      return trained
    nnx.update(fresh, nnx.state(trained, nnx.Param))
    return fresh

  def head_of(self, module: nnx.Module) -> nnx.Module:
    """The part of what is trained that is saved as a head, and that one saved before fills."""
    return module

  def rate(self, parameter: str) -> float:
    """Of the learning rate, what the parameter of this path has."""
    del parameter
    return 1.0

  def target_of(self, module: nnx.Module, target: Decoder) -> Decoder:
    """The target that the trained head drafts for."""
    del module
    return target

  @abc.abstractmethod
  def chain_logits(self, module: Any, frozen: Decoder, batch: Batch, depth: int) -> list[Array]:
    """Logits over the draft vocabulary by depth: float32 ``[B, P - d, Vd]`` for d = 0 … depth - 1.

    Entry k of depth d is what the chain that begins at entry k of ``batch.counted`` says there, given the
    text before; where `chain_counts` is false it may be anything finite.
    """

  @abc.abstractmethod
  def save(self, path: str, module: Any, target: str, *, dtype) -> None:
    """Writes the head as a new folder, in a layout that `checkpoints.load_head` reads.

    Args:
      target: name of the model it drafts for, kept in the config.
      dtype: float32 or bfloat16.
    """

  # --- shared ----------------------------------------------------------------------------------------

  def choose_ids(self, target: DecoderConfig, stats: TextStats) -> np.ndarray | None:
    """The draft vocabulary, int32 ``[Vd]`` ascending; None: the target's."""
    if self.draft_vocab is None:
      return None
    real = target.num_real_tokens
    return vocabulary.draft_vocabulary(stats.counts, self.draft_vocab, num_real_tokens=real, keep=stats.keep)

  def loss_sums(
    self, module: Any, frozen: Decoder, batch: Batch, key: Array
  ) -> tuple[Array, dict[str, Array]]:
    """Σ over depths of decay^d · Σ over learned tokens of the loss there.

    Args:
      module: the head.
      frozen: the target; only its embedding, final norm and output head are read.
      key: for heads that add noise.

    Returns:
      The sum, and sums by depth for the log: ``loss``, ``agreed`` (the most likely token of both within the
      draft vocabulary is the same), ``count``; float32 ``[depth]``; and more of a recipe's own.
    """
    del key
    return self.token_sums(module, frozen, batch, self.chain_logits(module, frozen, batch, self.depth))

  def token_sums(
    self, module: Any, frozen: Decoder, batch: Batch, logits: list[Array]
  ) -> tuple[Array, dict[str, Array]]:
    """`loss_sums` of logits by depth, as `chain_logits` gives them."""
    p = target_probs(frozen, batch, module.ids)
    total, found = jnp.float32(0), []
    for d, q in enumerate(logits):
      counts = chain_counts(batch, d, self.lag)
      if self.loss == losses.TOKENS:
        index, inside = places_in(module.ids, rows_at(batch.tokens, batch.counted[:, d:]))
        values, counts = losses.token_cross_entropy(index, q), counts & inside
      else:
        values = losses.LOSSES[self.loss](p[:, d:], q)
      agreed = jnp.argmax(p[:, d:], axis=-1) == jnp.argmax(q, axis=-1)
      value = losses.masked_sum(values, counts)
      total += self.decay**d * value
      found.append((value, losses.masked_sum(agreed, counts), counts.sum(dtype=jnp.float32)))
    value, agreed, count = map(jnp.stack, zip(*found))
    return total, {"loss": value, "agreed": agreed, "count": count}

  def evaluate(self, module: Any, frozen: Decoder, batch: Batch) -> dict[str, Array]:
    """Sums from which acceptance by position follows; see `acceptance`.

    ``batch`` has ``best`` and ``mass``, see `reference`.

    Returns:
      float32 ``[judged]`` each, by depth. ``count``: chains that get so far in the text. ``agreed``: of
      these, whose draft there is the target's most likely token (given the text). ``overlap``: Σ min(p, q).
      ``reached``: of these, in which the text is the target's most likely one and so were all drafts before
      (so a greedy round would get there); ``accepted``: of those, whose draft there is, too. The same of
      trees whose nodes have `RANKS` children each: ``tree_reached``, and ``ranks [judged, RANKS]``, in which
      the target's most likely token there is the draft's first, second, … And ``mass [1]``, the target's
      probability of the draft vocabulary where a chain may begin.
    """
    judged = self.judged or self.depth
    logits = self.chain_logits(module, frozen, batch, judged)
    p = target_probs(frozen, batch, module.ids) * batch.mass[..., None]
    greedy = rows_at(batch.tokens, batch.counted) == batch.best
    reached = in_tree = batch.counted >= 0
    found, ranks = [], []
    for d, q in enumerate(logits):
      counts = chain_counts(batch, d, self.lag)
      choice = jnp.argmax(q, axis=-1)
      choice = choice if module.ids is None else module.ids[choice]
      agreed = choice == batch.best[:, d:]
      shared = losses.overlap(p[:, d:], q)
      reached, in_tree = (rows[:, : counts.shape[1]] & counts for rows in (reached, in_tree))
      rank = rank_of(batch.best[:, d:], q, module.ids)
      values = [counts, agreed & counts, jnp.where(counts, shared, 0.0), reached, reached & agreed, in_tree]
      found.append([value.sum(dtype=jnp.float32) for value in values])
      ranked = in_tree[..., None] & (rank[..., None] == jnp.arange(RANKS))
      ranks.append(ranked.sum(axis=(0, 1), dtype=jnp.float32))
      reached, in_tree = reached & agreed & greedy[:, d:], in_tree & (rank < RANKS) & greedy[:, d:]
    names = ("count", "agreed", "overlap", "reached", "accepted", "tree_reached")
    sums = {name: jnp.stack(values) for name, values in zip(names, zip(*found))}
    mass = losses.masked_sum(batch.mass, chain_counts(batch, 0, self.lag))
    return sums | {"ranks": jnp.stack(ranks), "mass": mass[None]}


def check_positive(what: str, field: str, value: Any, *, optional: bool = False) -> None:
  """Raises ``ValueError`` unless the value is an integer of at least 1 (or None, if ``optional``)."""
  if not (optional and value is None) and not (isinstance(value, int) and value >= 1):
    raise ValueError(
      f"{what}: {field} = {value!r}; it must be an integer of at least 1{' or None' if optional else ''}"
    )


# --- the target ------------------------------------------------------------------------------------


def without_layers(target: Decoder) -> Decoder:
  """The target's embedding, final norm and output head: all that is read beside recorded features."""
  part = copy.copy(target)
  part.layers = nnx.List([])
  return part


def target_logits(frozen: Decoder, hidden: Array, ids: Array | None) -> Array:
  """The last layer's output ``[..., D]`` → float32 logits ``[..., Vd]`` over the draft vocabulary."""
  normed = frozen.norm(hidden.astype(frozen.dtype))
  logits = layers.matmul(normed, output_rows(frozen, ids)).astype(jnp.float32)
  return mask_padding(logits, frozen.config.num_real_tokens) if ids is None else logits


def before(batch: Batch) -> Array:
  """The last layer's output at the position before each learned token: ``[B, P, D]``."""
  return rows_at(batch.taps[:, :, -1], batch.counted - 1)


def target_probs(frozen: Decoder, batch: Batch, ids: Array | None) -> Array:
  """The target's distribution of each learned token over the draft vocabulary: ``[B, P, Vd]``, sums 1."""
  return jax.lax.stop_gradient(jax.nn.softmax(target_logits(frozen, before(batch), ids), axis=-1))


def reference(frozen: Decoder, batch: Batch, ids: Array | None) -> tuple[Array, Array]:
  """``best`` and ``mass`` of a batch, over the whole vocabulary, a row at a time."""

  def of_row(hidden):
    logits = target_logits(frozen, hidden, None)
    drafted = logits if ids is None else jnp.take(logits, ids, axis=-1)
    mass = jnp.exp(jax.nn.logsumexp(drafted, axis=-1) - jax.nn.logsumexp(logits, axis=-1))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), mass

  return jax.lax.map(of_row, before(batch))


def places_in(ids: Array | None, tokens: Array) -> tuple[Array, Array]:
  """Where tokens stand in the draft vocabulary, and whether they do."""
  if ids is None:
    return tokens, jnp.ones(tokens.shape, bool)
  index = jnp.minimum(jnp.searchsorted(ids, tokens), len(ids) - 1)
  return index, ids[index] == tokens


def rank_of(tokens: Array, logits: Array, ids: Array | None) -> Array:
  """How many of the draft's tokens are likelier than each of ``tokens [...]``: int32, Vd if it lacks it."""
  index, inside = places_in(ids, tokens)
  own = jnp.take_along_axis(logits, index[..., None], axis=-1)
  return jnp.where(inside, (logits > own).sum(axis=-1, dtype=jnp.int32), logits.shape[-1])


def copied(part: Any) -> Any:
  """A module or array of the target's, its values copied to float32."""
  return jax.tree.map(lambda x: jnp.array(x, jnp.float32), part)


def start_from_target(output: OutputLayer, target: Decoder, ids: np.ndarray | None) -> None:
  """Gives an output layer the target's own rows; a factored one their best approximation of its rank."""
  rows = np.asarray(output_rows(target, ids), np.float32)
  if output.weight is not None:
    output.weight = nnx.Param(jnp.asarray(rows))
    return
  rank = output.down.shape[0]
  if rank > min(rows.shape):
    raise ValueError(f"rank = {rank}; a layer of {rows.shape[0]} x {rows.shape[1]} has {min(rows.shape)}")
  u, s, vt = np.linalg.svd(rows, full_matrices=False)
  root = np.sqrt(s[:rank])
  output.up = nnx.Param(jnp.asarray(u[:, :rank] * root))
  output.down = nnx.Param(jnp.asarray(root[:, None] * vt[:rank]))


def acceptance(sums: dict[str, np.ndarray]) -> dict[str, Any]:
  """From summed `Recipe.evaluate` to what is logged.

  Returns:
    Lists by depth: ``acceptance``, of greedy rounds that get there (null where none does); ``agreement``,
    whatever came before; ``overlap``, mean Σ min(p, q), the acceptance of sampled drafts; ``ranks``, of
    greedy rounds with trees that get there, the shares in which the first, second, … child is right (null
    where none does). And ``coverage``,
    the target's mass in the draft vocabulary, and ``tau``, tokens of a greedy round with a chain of so many
    drafts: 1 + Σ_d Π_{i ≤ d} acceptance. Where training changed the target ``kl``, nats a token from the
    original.
  """
  rate = lambda over, under: [float(a / b) if b else None for a, b in zip(over, under)]
  accepted = rate(sums["accepted"], sums["reached"])
  chances = np.cumprod([0.0 if share is None else share for share in accepted])
  kl = {"kl": float(sums["kl"][0] / max(sums["kl"][1], 1))} if "kl" in sums else {}
  return kl | {
    "acceptance": accepted,
    "agreement": rate(sums["agreed"], sums["count"]),
    "overlap": rate(sums["overlap"], sums["count"]),
    "ranks": [(r / n).tolist() if n else None for r, n in zip(sums["ranks"], sums["tree_reached"])],
    "coverage": float(sums["mass"][0] / max(sums["count"][0], 1)),
    "tau": float(1 + chances.sum()),
  }
