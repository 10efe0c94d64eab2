"""Acceptance rules on the same drafts: tokens a round, and what lossy rules pay in fidelity.

  python -m experiments.rule_bench --questions=FILE.jsonl --output=runs/rules [--plot=rules.png] [--quick]

A context is a question and a few tokens that the target sampled behind it. At each one a proposal is drafted
``--drafts`` times (once if it is deterministic); the target runs once over the nodes of each, and every rule
that takes the proposal judges it under the same ``--noises`` seeds. A rule's figure at a context is the mean
of accepted + 1; figures are means over contexts, and differences between rules are taken context by context
before their standard error. That a rule accepts more than another holds on average over drafts, not for each,
and the gain is in few of them: standard errors need many contexts or drafts. No time is measured.

Lossy rules judge the first sampled chain of ``--proposals``. What they emit first has a law that follows
from the rows p and q behind the root: its divergence from p and the mean of -log p_raw under it are exact
a context. typical_acceptance has delta = sqrt(epsilon).

Without ``--draft_model`` the draft is the first layers of the target itself, untrained. A run that is
complete prints its tables, and draws --plot, from its rows alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags

from experiments import flags as shared
from experiments import plots, questions, results, rule_figures, runtime
from experiments.rule_figures import Row
from specjax import cache as kv
from specjax import decode, options, sampling, text
from specjax.base import Drafter, Proposal, Rule
from specjax.decode import DecodeConfig, DecodeState
from specjax.drafters import make_drafter, parse_drafter
from specjax.models import truncated
from specjax.models.config import DecoderConfig
from specjax.sampling import Settings
from specjax.tree import MAX_NODES
from specjax.verify import RULES, DrawAndFollow, describe, make_rule

TEMPERATURES = flags.DEFINE_list("temperatures", ["0.7", "1.0"], "Sampling temperatures, a table each.")
PROPOSALS = flags.DEFINE_string(
  "proposals",
  "two_model[policy=sample],two_model[branching=(2,2),policy=sample],"
  "two_model[branching=(2,2),policy=sample_without_replacement],"
  "two_model[branching=(3,2),policy=top_k],prompt_lookup[matches=4,nodes=8]",
  "What is judged: two_model or prompt_lookup, with commas between, options in brackets as for --drafter.",
)
CONTEXTS = flags.DEFINE_integer("contexts", None, "Contexts a question. Default: 2, quick 1.", 1)
STRIDE = flags.DEFINE_integer("stride", 16, "Tokens from one context to the next.", 1)
DRAFTS = flags.DEFINE_integer("drafts", None, "Drafts a context, if sampled. Default: 4, quick 2.", 1)
NOISES = flags.DEFINE_integer("noises", None, "Seeds of each rule a draft. Default: 16, quick 4.", 1)
LENIENCE = flags.DEFINE_list("lenience", "1,0.7,0.5,0.3,0.1".split(","), "Of lenient_speculative_sampling.")
EPSILON = flags.DEFINE_list("epsilon", "0.01,0.03,0.1,0.3,0.9".split(","), "Of typical_acceptance.")
DRAFT_LAYERS = flags.DEFINE_integer(
  "draft_layers",
  None,
  "Without --draft_model: first layers of the target that draft. Default: 14 of 15; of smollm2-135m 28 of "
  "30, whose overlap Σ min(p, q) on sampled text is 0.45 at temperature 1 (27: 0.41, 29: 0.50, 20: 0.18).",
  1,
)
QUICK = flags.DEFINE_bool(
  "quick", False, "The first 3 questions, few contexts and noises.", allow_override=True
)

NOT_USED = (
  "temperature",
  "drafter",
  "draft_policy",
  "rule",
  "batch_size",
  "max_new_tokens",
  "min_new_tokens",
  "logprobs",
  "warmup",
  "repeats",
)


# --- what is asked ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
  """The flags, checked.

  Attributes:
    proposals: as written.
    lossy: rules with their options.
  """

  temperatures: tuple[float, ...]
  proposals: tuple[str, ...]
  contexts: int
  drafts: int
  noises: int
  lossy: tuple[Rule, ...]


def plan_from_flags() -> Plan:
  """Raises ValueError for what can be known to be wrong before a model is there."""
  shared.refuse(NOT_USED, "rule_bench", "--temperatures and --proposals")
  if shared.DRAFT_MODEL.value and DRAFT_LAYERS.value:
    raise ValueError("--draft_layers and --draft_model exclude each other")
  plots.check()
  proposals = tuple(options.split(PROPOSALS.value))
  for proposal in proposals:
    drafter_of(proposal)
  epsilons = _numbers(EPSILON, 1.0)
  return Plan(
    temperatures=tuple(_numbers(TEMPERATURES, 1e4)),
    proposals=proposals,
    contexts=CONTEXTS.value or (1 if QUICK.value else 2),
    drafts=DRAFTS.value or (2 if QUICK.value else 4),
    noises=NOISES.value or (4 if QUICK.value else 16),
    lossy=(
      *(make_rule("lenient_speculative_sampling", lenience=value) for value in _numbers(LENIENCE, 1.0)),
      *(
        make_rule("typical_acceptance", epsilon=value, delta=round(math.sqrt(value), 4)) for value in epsilons
      ),
    ),
  )


def _numbers(flag, most: float) -> list[float]:
  try:
    values = [float(value) for value in flag.value]
  except ValueError:
    values = [math.nan]
  if not all(0.0 <= value <= most for value in values) or len(set(values)) < len(values):
    raise ValueError(f"--{flag.name} = {','.join(flag.value)!r}; numbers in [0, {most:g}], none twice")
  return values


def drafter_of(proposal: str, target: DecoderConfig | None = None, max_length: int = 2**30) -> Drafter:
  """The drafter of a proposal; without the target's sizes one to check the options with."""
  name, _ = parse_drafter(proposal)
  if name not in ("two_model", "prompt_lookup"):
    raise ValueError(f"--proposals: {proposal!r}; it must be two_model or prompt_lookup, with options")
  window = shared.WINDOW.value
  settings: dict[str, Any] = {"window": runtime.DEFAULT_WINDOWS[name] if window is None else window}
  if name == "two_model":
    settings |= dict(
      vocab_size=target.vocab_size if target else 2**30,
      num_real_tokens=target.num_real_tokens if target else 2**30,
      max_length=max_length,
      implementation=shared.ATTENTION.value,
    )
  return make_drafter(proposal, **settings)


def lossless_rules(drafter: Drafter) -> list[Rule]:
  """Every rule that takes the drafter's proposals, draws tokens, and keeps the target's law."""
  takes = lambda rule: drafter.kind in rule.kinds and (drafter.tree.is_chain or not rule.chains_only)
  return [rule() for rule in RULES.values() if rule.lossless and rule.needs == "probs" and takes(rule)]


# --- compiled parts --------------------------------------------------------------------------------


@functools.partial(jax.jit, donate_argnums=0)
def go_back(state: DecodeState, length: jax.Array, seed: jax.Array) -> DecodeState:
  """The state at an earlier length, with another seed and room for any draft."""
  rows = jnp.full_like(state.length, length)
  drafter = state.drafter
  if hasattr(drafter, "cache"):  # rows that a draft model has not seen yet it feeds by itself
    drafter = drafter.replace(cache=kv.rollback(drafter.cache, rows - 1))
  return state.replace(
    length=rows,
    limit=rows + MAX_NODES,
    finish=jnp.full_like(state.finish, decode.Finish.NONE),
    settings=state.settings.replace(seed=jnp.full_like(state.settings.seed, seed)),
    cache=kv.rollback(state.cache, rows - 1),
    drafter=drafter,
  )


@functools.partial(jax.jit, static_argnames="config")
def as_judged(weights, state: DecodeState, proposal: Proposal, logits: jax.Array, config: DecodeConfig):
  """What `decode.accept_step` hands its rule: the processed distribution ``[1, N, V]`` and the proposal
  without what stands behind unusable nodes. Also the raw log-probabilities behind the root, ``[V]``."""
  logits = sampling.mask_padding(logits, config.num_real_tokens)
  target, processed = decode.read_nodes(weights, state, proposal, logits, config)
  return target, decode.judged_nodes(proposal, processed), jax.nn.log_softmax(logits[0, 0])


@functools.partial(jax.jit, static_argnames="rule")
def accepted(rule: Rule, target, proposal: Proposal, settings: Settings, length, seeds) -> jax.Array:
  """Drafts that the rule accepts under each of ``seeds [R]``, one after the other: int32 ``[R]``."""
  judge = lambda seed: rule(target, proposal, settings.replace(seed=seed[None]), length).accepted[0]
  return jax.lax.map(judge, seeds)


# --- the run ---------------------------------------------------------------------------------------


class Bench:
  """The models, and what is still to be judged."""

  def __init__(
    self, plan: Plan, asked: list[questions.Question], directory: results.RunDirectory, job: runtime.Job
  ):
    self.plan, self.asked, self.directory, self.job = plan, asked, directory, job
    target = job.target.config
    if job.draft is not None:
      draft, max_length = job.draft.model, job.draft.config.max_length
    else:
      layers = DRAFT_LAYERS.value or max(1, target.num_layers * 14 // 15)
      draft, max_length = truncated(job.target.model, layers), target.max_length
    self.weights = decode.Weights(job.target.model, draft)
    drafters = {proposal: drafter_of(proposal, target, max_length) for proposal in plan.proposals}
    behind = plan.contexts * STRIDE.value + max(drafter.tree.max_depth for drafter in drafters.values())
    encode = lambda question: text.encode_prompt(job.target.tokenizer, question.turns[0], chat=job.chat)
    self.prompts = [encode(question) for question in asked]
    limit = runtime.length_limit(job, max(map(len, self.prompts)) + behind)
    for question, prompt in zip(asked, self.prompts, strict=True):
      if len(prompt) + behind > limit:
        raise ValueError(
          f"question {question.question_id} needs {len(prompt) + behind} tokens; the length limit is {limit}"
        )
    # One state serves all proposals: its buffers hold the widest.
    limit += max(drafter.tree.num_nodes for drafter in drafters.values())
    self.configs = {proposal: self._config(drafter, limit) for proposal, drafter in drafters.items()}
    self.plain = self._config(make_drafter("none"), limit)
    self.rules = {proposal: lossless_rules(drafter) for proposal, drafter in drafters.items()}
    chain = next((name for name, d in drafters.items() if d.tree.is_chain and d.kind == "sampled"), None)
    if chain is not None:
      self.rules[chain] = [*self.rules[chain], *plan.lossy]

  def _config(self, drafter: Drafter, limit: int) -> DecodeConfig:
    return DecodeConfig(
      drafter=drafter,
      rule=DrawAndFollow(),
      num_real_tokens=self.job.target.config.num_real_tokens,
      length_limit=limit,
      implementation=shared.ATTENTION.value,
      logprobs="off",
    )

  def pending(self) -> Iterator[tuple[float, int]]:
    """Temperatures and numbers of questions whose rows are not all there, question by question."""
    stored = Counter((row["temperature"], row["question_id"]) for row in self.directory.rows)
    contexts = {(row["temperature"], row["question_id"]): row["contexts"] for row in self.directory.rows}
    rules = sum(map(len, self.rules.values()))
    for number, question in enumerate(self.asked):
      for temperature in self.plan.temperatures:
        key = temperature, question.question_id
        if key not in stored or stored[key] < contexts[key] * rules:
          yield temperature, number

  def answer(self, temperature: float, number: int) -> None:
    """Continues a question, then judges its contexts, the last one first: drafts overwrite what follows."""
    question, prompt = self.asked[number], self.prompts[number]
    state, lengths = self._continued(temperature, number)
    key = {"temperature": temperature, "question_id": question.question_id}
    context = round(1e6 * temperature), number
    mine = [row for row in self.directory.rows if key.items() <= row.items()]
    done = {(row["position"], row["proposal"], row["rule"]) for row in mine}
    for length in reversed(lengths):
      where = key | {"category": question.category, "position": length - len(prompt), "length": length}
      where["contexts"] = len(lengths)
      for proposal, config in self.configs.items():
        missing = [r for r in self.rules[proposal] if (where["position"], proposal, describe(r)) not in done]
        if missing:
          draws = self.plan.drafts if config.drafter.kind != "deterministic" else 1
          counts: dict[str, Counter[int]] = {describe(rule): Counter() for rule in missing}
          for draw in range(draws):
            seed, *noise = _seeds(1 + self.plan.noises, *context, length, draw)
            state = go_back(state, np.int32(length), seed)
            state, judged, extra = self._judge(state, config, missing, np.array(noise, np.uint32))
            for name, numbers in judged.items():
              counts[name].update(numbers)
          for name, found in counts.items():
            row = where | {"proposal": proposal, "drafts": draws, "rule": name} | extra[name]
            row["tokens"] = 1 + sum(k * found[k] for k in found) / found.total()
            row["accept_counts"] = [found[k] for k in range(max(found) + 1)]
            self.directory.append(row)

  def _continued(self, temperature: float, number: int) -> tuple[DecodeState, list[int]]:
    """The state behind the question and what the target samples there, and the lengths of its contexts."""
    prompt = self.prompts[number]
    as_array = lambda value, like: jnp.full_like(like, value)
    settings = runtime.make_settings(1)
    settings = settings.replace(
      temperature=as_array(temperature, settings.temperature),
      seed=as_array(_seeds(1, number)[0], settings.seed),
    )
    # A draft model reads the prompt here, if any proposal has one.
    config = next((c for c in self.configs.values() if c.drafter.name == "two_model"), self.plain)
    state = decode.prefill(
      self.weights,
      config,
      [prompt],
      settings=settings,
      max_new_tokens=self.plan.contexts * STRIDE.value,
      stop_ids=self.job.stop_ids,
      mesh=self.job.mesh,
    )
    drafter = state.drafter
    state = decode.generate(self.weights, state.replace(drafter=()), self.plain)
    (result,) = decode.results(state)
    new = len(result.tokens) - (result.finish == "stop")  # nothing follows a stop id
    lengths = range(len(prompt) + STRIDE.value, len(prompt) + new + 1, STRIDE.value)
    return state.replace(drafter=drafter), list(lengths)

  def _judge(self, state: DecodeState, config: DecodeConfig, rules: Sequence[Rule], seeds: np.ndarray):
    """One draft, one forward of the target, every rule.

    Returns:
      The state; by rule the drafts it accepted under each seed; by rule what else its row says.
    """
    own = config.drafter.name == "two_model"
    held, state = state.drafter, state if own else state.replace(drafter=())
    proposal, state = decode.draft_step(self.weights, state, config)
    verification, state = decode.verify_step(self.weights, state, proposal, config)
    state = state if own else state.replace(drafter=held)
    target, proposal, log_p = as_judged(self.weights, state, proposal, verification.logits, config)
    common: Row = {"proposed": int(proposal.valid[0, 1:].sum())}
    p = q = None
    if proposal.q is not None and common["proposed"]:
      p, q = (np.asarray(row[0, 0], np.float64) for row in (target, proposal.q))
      p, q, log_p = p / p.sum(), q / q.sum(), np.asarray(log_p, np.float64)
      common |= {"overlap": float(np.minimum(p, q).sum()), "entropy": rule_figures.entropy(p)}
      common["own_surprise"] = rule_figures.surprise(p, log_p)
    judged, extra = {}, {}
    for rule in rules:
      name, noise = (
        describe(rule),
        seeds[:1] if rule.name == "typical_acceptance" else seeds,
      )  # it draws nothing
      judged[name] = accepted(rule, target, proposal, state.settings, state.length, noise).tolist()
      extra[name] = common
      if not rule.lossless and p is not None:
        law = rule_figures.first_law(rule, p, q)
        found = {"divergence": rule_figures.divergence(law, p), "surprise": rule_figures.surprise(law, log_p)}
        extra[name] = common | found
    return state, judged, extra


def _seeds(count: int, *what: int) -> np.ndarray:
  """Seeds of a question, or of a context: the same whatever else is run."""
  return np.random.SeedSequence([shared.SEED.value, *what]).generate_state(count)


def main(_: list[str]) -> None:
  if not shared.OUTPUT.value:
    raise ValueError("--output is empty; a run directory is needed, e.g. --output=runs/rules")
  plan = plan_from_flags()
  file = questions.from_flags()
  asked = file.questions[: 3 if QUICK.value else None]
  modules = [shared, questions, sys.modules[__name__]]
  directory = results.RunDirectory(shared.OUTPUT.value, "rule_bench", modules)
  if directory.info.get("rows") != len(directory.rows):
    directory.update(questions=file.record)
    judge_all(plan, asked, directory)
  rule_figures.show(directory.rows)
  if plots.can_draw():
    path = plots.PLOT.value or os.path.join(directory.path, "rules.png")
    rule_figures.plot(directory.rows, path)
    print(f"plot: {path}", file=sys.stderr)


def judge_all(plan: Plan, asked: list[questions.Question], directory: results.RunDirectory) -> None:
  """Runs what is missing of the directory's rows."""
  bench = Bench(
    plan, asked, directory, runtime.load_job(["two_model" if shared.DRAFT_MODEL.value else "none"])
  )
  directory.update(
    model=bench.job.target.source,
    draft_model=bench.job.draft.source if bench.job.draft else None,
    prompts_sha256=questions.digest(asked, 1, bench.job.chat),
  )
  pending = list(bench.pending())
  total = len(asked) * len(plan.temperatures)
  with tqdm.tqdm(total=total, initial=total - len(pending), unit="question", file=sys.stderr) as bar:
    for temperature, number in pending:
      bench.answer(temperature, number)
      bar.update()
  directory.finish(rows=len(directory.rows))


if __name__ == "__main__":
  shared.run(main)
