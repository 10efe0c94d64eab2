"""Engines over tiny models, requests of all sorts, and what each of them says alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from specjax.sampling import Settings
from specjax.serving.engine import Engine
from specjax.serving.requests import Request, Sampling
from specjax.serving.sampler import Output
from specjax.text import TextResult, generate_text
from tests import contract

SLOTS = 4
SHARED = tuple(int(token) for token in np.random.default_rng(5).integers(0, contract.VOCAB, 44))


class Letters:
  """A tokenizer of one byte a token, two of which make one character only together."""

  eos_ids = ()
  _BYTES = (*(bytes([65 + i]) for i in range(contract.VOCAB - 2)), *(bytes([b]) for b in "é".encode()))

  def is_special(self, token: int) -> bool:
    return False

  def token_bytes(self, token: int) -> bytes:
    return self._BYTES[token]

  def decode(self, tokens: Sequence[int]) -> str:
    return b"".join(self._BYTES[token] for token in tokens).decode("utf-8", "replace")


def engine(name: str, *, rule: str = "draw_and_follow", weights=None, **options) -> Engine:
  """An engine with a drafter of the contract suite; its clock stands still."""
  weights = contract.built(name)[1] if weights is None else weights
  fixed = dict(slots=SLOTS, rounds_per_step=2, tokenizer=Letters(), clock=lambda: 0.0)
  return Engine(weights, contract.static(name, rule), **fixed, **options)


def mixed(count: int, seed: int) -> list[Request]:
  """Requests that differ in everything; a third of the prompts begin alike."""
  noise = np.random.default_rng(seed)
  pick = lambda *choices: choices[noise.integers(len(choices))]
  requests = []
  for number in range(count):
    own = noise.integers(0, contract.VOCAB, noise.integers(1, 24)).tolist()
    prompt = (*SHARED[: pick(33, 40, 44)], *own) if number % 3 == 1 else tuple(own)
    if number % 5 == 2:
      prompt = (1, 2, 3, 1, 2, 3, 1, 2)  # something to look up
    budget = int(noise.choice((1, 2, *range(14, 27))))
    sampling = Sampling(
      temperature=pick(0.0, 0.0, 0.9, 1.3),
      top_k=pick(0, 8),
      top_p=pick(1.0, 0.9),
      seed=int(noise.integers(2**32)),
      repetition_penalty=pick(1.0, 1.2),
      frequency_penalty=pick(0.0, 0.3),
      min_new_tokens=min(pick(0, 3), budget),
      logit_bias=pick({}, {int(noise.integers(contract.VOCAB)): 2.0}),
    )
    requests.append(
      Request(
        id=f"r{number}",
        prompt=prompt,
        max_new_tokens=budget,
        stop_ids=pick((), (7, 30)),
        stop_strings=pick((), ("é", "AB", "Q")),
        sampling=sampling,
        logprobs=pick(True, False),
      )
    )
  return requests


@functools.cache
def solos(count: int, seed: int) -> dict[str, TextResult]:
  """What each of ``mixed(count, seed)`` says by itself, decoded plainly."""
  return {request.id: solo(request, "none", "draw_and_follow") for request in mixed(count, seed)}


def solo(request: Request, name: str, rule: str, **changes) -> TextResult:
  """A request by itself, in `generate_text`."""
  (row,) = generate_text(
    contract.built(name)[1],
    contract.static(name, rule, **changes),
    Letters(),
    [request.prompt],
    settings=Settings.create(1, **request.sampling.fields()),
    max_new_tokens=request.max_new_tokens,
    stop_ids=request.stop_ids,
    stop_strings=request.stop_strings,
  )
  return row


class Heard:
  """What listeners were told, by request."""

  def __init__(self):
    self.outputs: dict[str, list[Output]] = {}

  def __call__(self, output: Output) -> None:
    self.outputs.setdefault(output.update.id, []).append(output)

  def end(self, id: str) -> Output:
    """The last output of a request that has ended: its only one with a reason."""
    assert [output.update.reason is not None for output in self.outputs[id]].count(True) == 1
    assert self.outputs[id][-1].update.reason is not None
    return self.outputs[id][-1]

  def check(self, id: str) -> TextResult:
    """The result of a request that has ended, which is what was told piece by piece."""
    told, result = self.outputs[id], self.end(id).result
    assert [token for output in told for token in output.update.tokens] == result.tokens
    assert "".join(output.text for output in told) == result.text
    if result.logprobs is not None:
      assert [value for output in told for value in output.update.logprobs or ()] == result.logprobs
    assert sum(result.emitted) == len(result.tokens)
    return result


def serve(engine: Engine, requests: Sequence[Request], every: int = 1) -> Heard:
  """Submits one request each ``every`` steps, and steps until all have ended."""
  heard, left, steps = Heard(), list(requests), 0
  while left or engine.busy:
    if left and steps % every == 0:
      engine.submit(left.pop(0), heard)
    engine.step()
    steps += 1
  return heard
