"""Serves a model over HTTP: OpenAI's completions and chat completions, many requests at once.

  python -m experiments.serve --slots=8

Loads, compiles everything, then prints the address. ``GET /metrics`` has what happens inside. Ctrl-C ends it.
What shapes an answer (temperature, seed, stop, …) each request says for itself.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments import flags as shared
from experiments import runtime
from specjax.serving.engine import Engine
from specjax.serving.policies import PREFILL_POLICIES, SPECULATION_POLICIES, Policies, make_policies
from specjax.verify import describe

if TYPE_CHECKING:
  from specjax.serving.http.server import Server

SLOTS = flags.DEFINE_integer("slots", 8, "Rows of the batch: requests that are served at once.", 1, 4096)
BATCHES = flags.DEFINE_list(
  "batch_sizes",
  None,
  "Sizes below --slots that the batch is compiled for, too: a round costs what the smallest does that holds "
  "the rows which decode. Default: 1, 4, 16, 64, …",
)
POLICIES = flags.DEFINE_string(
  "policies",
  Policies().name,
  "How prompts and decoding share a step, and how deep it may draft, with a plus between them: "
  f"{' or '.join(PREFILL_POLICIES)}, and {', '.join(SPECULATION_POLICIES)}; options in brackets, e.g. "
  "prefill_first[tokens=512]+below[rows=4] (drafts while fewer than 4 rows decode) or "
  "windows[table=((1,7),(4,3),(8,0))] (the deepest draft from so many rows on).",
)
ROUNDS = flags.DEFINE_integer(
  "rounds_per_step", 1, "Rounds between two looks at the host: more cost less, and stream coarser.", 1, 64
)
KV_BUDGET = flags.DEFINE_integer(
  "kv_budget", None, "Most tokens over all rows; default: slots times the length limit.", 2
)
KEPT_PREFIXES = flags.DEFINE_integer(
  "kept_prefixes", 8, "Prompts whose rows are kept, for later ones that begin alike; each a row of memory.", 0
)
QUEUE = flags.DEFINE_integer("queue_limit", 256, "Requests that wait for a row; more get a 429.", 0)
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at. Default: this machine alone.")
PORT = flags.DEFINE_integer("port", 8000, "Port to listen at; 0 takes a free one.", 0, 65535)
KEY_FILE = flags.DEFINE_string(
  "api_key_file", "", "File with the key that clients must send; empty: anybody may ask who can connect."
)
SERVED_NAME = flags.DEFINE_string("served_name", "", "The model's name for clients. Default: as --model.")
BODY = flags.DEFINE_integer("max_body_bytes", 1 << 20, "Largest body of a request.", 1)
PROMPT_TOKENS = flags.DEFINE_integer(
  "max_prompt_tokens", None, "Longest prompt. Default: what --max_length leaves.", 1
)
CONCURRENCY = flags.DEFINE_integer(
  "max_requests", 256, "Completions at once, those that wait among them; more get a 429.", 1
)
PATIENCE = flags.DEFINE_float(
  "patience_s", 30.0, "Seconds for a client to send a body, and to take each piece of an answer.", 1e-3, 86400
)
DRAIN = flags.DEFINE_float(
  "drain_s", 30.0, "Seconds for live requests to finish in at the end; 0 cancels them.", 0.0, 86400
)

USED = (
  "model",
  "draft_model",
  "drafter_path",
  "drafter",
  "window",
  "rule",
  "draft_policy",
  "logprobs",
  "dtype",
  "attention",
  "max_length",
  "calibration",
  "compilation_cache",
)
# The length limit unless --max_length says one, if the model goes so far.
_LENGTH = 1024


def _is_name(text: str) -> bool:
  return text == text.strip() and text.isprintable()


def _are_policies(text: str) -> bool:
  try:
    make_policies(text)
  except ValueError as error:
    raise flags.ValidationError(str(error)) from None
  return True


flags.register_validator("policies", _are_policies)
flags.register_validator("served_name", _is_name, "it must be printable, without space around it")
for _name in ("patience_s", "drain_s"):
  # A comparison with a bound says nothing about NaN.
  flags.register_validator(_name, lambda value: value == value, "it must be a number")


def batch_sizes() -> tuple[int, ...]:
  """Of --batch_sizes, below --slots.

  Raises:
    ValueError: naming the flag.
  """
  slots = SLOTS.value
  if BATCHES.value == []:
    return ()
  sizes = shared.ascending(BATCHES, [4**power for power in range(6) if 4**power < slots])
  if sizes and sizes[-1] >= slots:
    raise ValueError(f"--batch_sizes = {','.join(BATCHES.value)}; all must be below --slots = {slots}")
  return sizes


def read_key() -> str:
  """The key of --api_key_file, empty without one.

  Raises:
    ValueError: nothing that can stand in a header.
  """
  if not KEY_FILE.value:
    return ""
  with open(KEY_FILE.value, encoding="utf-8", errors="replace") as file:
    key = file.read().strip()
  if not key or not key.isascii() or not key.isprintable() or " " in key:
    raise ValueError(f"--api_key_file = {KEY_FILE.value!r} must hold one key of printable ASCII characters")
  return key


def check() -> None:
  """Raises ValueError for what can be known to be wrong before anything is loaded."""
  batch_sizes()
  defined = {flag.name for flag in flags.FLAGS.flags_by_module_dict()[shared.__name__]}
  shared.refuse(sorted(defined - set(USED)), "serve", "its own flags, and what each request says")


def make_engine(job: runtime.Job, **options: Any) -> Engine:
  """The engine of the flags, not warmed up.

  Args:
    job: was loaded for one drafter.
    **options: of `Engine`, besides.
  """
  (drafter,) = job.drafters
  limit = runtime.length_limit(job, _LENGTH)
  sizes = (*batch_sizes(), SLOTS.value)
  make = lambda size: runtime.make_method(job, drafter, limit, batch=size, any_temperature=True)
  methods = {size: make(size) for size in sizes}
  method = methods[SLOTS.value]
  beliefs = {size: of_size.weights.beliefs for size, of_size in methods.items()}
  return Engine(
    method.weights,
    method.config,
    slots=SLOTS.value,
    batches=sizes[:-1],
    beliefs=None if method.beliefs is None else beliefs,
    tokenizer=job.target.tokenizer,
    kept_prefixes=KEPT_PREFIXES.value,
    policies=make_policies(POLICIES.value),
    rounds_per_step=ROUNDS.value,
    kv_budget=KV_BUDGET.value,
    queue_limit=QUEUE.value,
    **options,
  )


def make_server(job: runtime.Job, engine: Engine, listener: socket.socket, key: str) -> Server:
  """The server of the flags."""
  from specjax.serving.http import app, runner, server

  limits = app.Limits(
    body_bytes=BODY.value,
    prompt_tokens=PROMPT_TOKENS.value,
    concurrency=CONCURRENCY.value,
    patience_s=PATIENCE.value,
  )
  name = SERVED_NAME.value or shared.MODEL.value
  service = app.Service(runner.Runner(engine), job.target.tokenizer, name, limits=limits, key=key)
  config = engine.scheduler.config

  def ready(url: str) -> None:
    print(f"{name}: {job.drafters[0]}, rule {describe(engine.config.rule)}, {config.policies.name}")
    print(f"{config.slots} rows of {config.length_limit} tokens, KV budget {config.kv_budget}")
    print(f"serving at {url}/v1", flush=True)

  return server.Server(service, listener, drain_s=DRAIN.value, ready=ready)


def main(_: list[str]) -> None:
  check()
  try:
    from specjax.serving.http.server import bind
  except ImportError as error:
    raise ValueError(f'{error}; serving needs the extra "serve": pip install -e ".[serve]"') from None
  key = read_key()
  with contextlib.closing(bind(HOST.value, PORT.value)) as listener:
    if not key and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
      print(f"warning: --host={HOST.value} lets others in, and there is no key", file=sys.stderr)
    job = runtime.load_job([runtime.drafter_name()])
    engine = make_engine(job)
    with runtime.progress("compiling"):
      engine.warm_up()
    with contextlib.suppress(KeyboardInterrupt):  # how it is ended
      make_server(job, engine, listener, key).run()


if __name__ == "__main__":
  shared.run(main)
