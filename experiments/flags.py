"""The flags that all scripts share, their checks, and how a script is run.

A wrong flag ends the script with one line, ``error: …``, and exit code 2, before anything long starts.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging

from experiments.methods import AUTO, CHOICE, parse_method
from specjax.checkpoints.shipped import shipped_heads
from specjax.control import CONTROLS
from specjax.drafters import DRAFTERS
from specjax.kernels.tree_attention import IMPLEMENTATIONS
from specjax.models.sharding import parse_mesh
from specjax.sampling import MIN_TEMPERATURE, Settings
from specjax.tree import MAX_NODES
from specjax.verify import RULES, make_rule

FLAGS = flags.FLAGS

MODEL = flags.DEFINE_string(
  "model", "smollm2-135m", "Target model: a packaged name, hf:org/name, a model folder or a .gguf file."
)
DRAFT_MODEL = flags.DEFINE_string(
  "draft_model", "", "Draft model of --drafter=two_model (or the weights of a drafter from outside)."
)
DRAFTER_PATH = flags.DEFINE_list(
  "drafter_path",
  [],
  "Folders of trained heads, one of a kind, with commas between, instead of those that are shipped for "
  "--model: EAGLE-1 and EAGLE-2 (--drafter=eagle), EAGLE-3 (--drafter=eagle3), Medusa (--drafter=medusa), a "
  "one-pass block head (--drafter=block), an early exit (--drafter=early_exit), or a draft decoder made for "
  "the target (--drafter=two_model, instead of --draft_model). EAGLE and Medusa files of other projects are "
  "read as they are.",
)
DRAFTER = flags.DEFINE_string(
  "drafter",
  AUTO,
  f"{AUTO}, or one of {', '.join(DRAFTERS)}, or package.module:factory; options in brackets: "
  "prompt_lookup[matches=8,nodes=9], two_model[branching=(3,2)], eagle3[nodes=8,beam=3] (a tree that follows "
  "the draft's probabilities), medusa[tree=((0,),(1,),(0,0))], self_speculation[layers=4] (the "
  "target's first layers) or self_speculation[skips=FILE] (the target without sublayers, see "
  "experiments.search_skips). A controller chooses each round's width "
  f"({', '.join(CONTROLS)}): adaptive[of=prompt_lookup], or with widths of your own "
  f"adaptive[of=prompt_lookup[window=2]|prompt_lookup[window=7]]. {AUTO}: what is fastest by the calibration "
  f"of experiments.calibrate, or as recorded with the heads that are shipped for --model; else {CHOICE}.",
)
WINDOW = flags.DEFINE_integer(
  "window",
  None,
  "Drafts a round. Default: 7 for prompt_lookup, 3 for eagle, eagle3, medusa and block, 4 for the others.",
)
RULE = flags.DEFINE_string(
  "rule",
  "auto",
  f"Acceptance rule: auto or one of {', '.join(RULES)}; options in brackets: "
  "typical_acceptance[epsilon=0.09,delta=0.3], synthetic[rates=(0.8,0.6)]. auto: greedy at temperature 0; "
  "otherwise draw_and_follow for deterministic drafts, block_verification for sampled chains and "
  "traversal_verification for sampled trees.",
)
DRAFT_POLICY = flags.DEFINE_enum(
  "draft_policy",
  "auto",
  ["auto", "sample", "sample_without_replacement", "top_k"],
  "How two_model, eagle, eagle3, block, self_speculation and early_exit pick their drafts. auto: top_k at "
  "temperature 0 and for dynamic trees, otherwise sample.",
)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0 is greedy.", 0.0, 1e4)
TOP_K = flags.DEFINE_integer("top_k", 0, "Keep the k most likely tokens; 0 is off.", 0, 2**31 - 1)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Keep the most likely tokens with this mass; 1 is off.", 0.0, 1.0)
MIN_P = flags.DEFINE_float("min_p", 0.0, "Drop tokens below this share of the best; 0 is off.", 0.0, 1.0)
REPETITION_PENALTY = flags.DEFINE_float(
  "repetition_penalty", 1.0, "Divides positive logits of tokens in prompt and text; 1 is off.", 0.01, 100.0
)
PRESENCE_PENALTY = flags.DEFINE_float(
  "presence_penalty", 0.0, "Taken from the logits of tokens in the new text; 0 is off.", -100.0, 100.0
)
FREQUENCY_PENALTY = flags.DEFINE_float(
  "frequency_penalty", 0.0, "Taken once for each time a token is in the new text; 0 is off.", -100.0, 100.0
)
LOGIT_BIAS = flags.DEFINE_list(
  "logit_bias", [], "Added to the logits of ids, as id:value, e.g. 7:-100,9:1.5."
)
MIN_NEW_TOKENS = flags.DEFINE_integer("min_new_tokens", 0, "Fewest new tokens before a stop.", 0)
LOGPROBS = flags.DEFINE_enum(
  "logprobs",
  "processed",
  ["processed", "raw", "off"],
  "Log-probabilities of new tokens: under the distribution they were drawn from (at temperature 0: 0), under "
  "the target's own, or none.",
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the first row; row b of a batch has seed + b.", 0, 2**31)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of the parameters.")
ATTENTION = flags.DEFINE_enum(
  "attention",
  "auto",
  list(IMPLEMENTATIONS),
  "Implementation of tree attention. auto: a kernel where one has a recorded correctness run, else XLA.",
)
MESH = flags.DEFINE_string("mesh", "", "Devices by axis, e.g. data:2,model:4; empty is one device.")
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Most new tokens a prompt.", 1)
MAX_LENGTH = flags.DEFINE_integer(
  "max_length",
  None,
  "Most tokens of a row, prompt included. Default: what the longest prompt needs, within the model's limit.",
  2,
)
BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Rows decoded together.", 1, 4096)
WARMUP = flags.DEFINE_integer("warmup", 1, "Runs before the timed ones; compiling comes before them.", 0)
REPEATS = flags.DEFINE_integer("repeats", 1, "Timed runs of each method; medians count.", 1)
OUTPUT = flags.DEFINE_string("output", "", "Run directory for flags, versions, times and rows.")
CHAT = flags.DEFINE_bool(
  "chat", None, "Put prompts into the chat template. Default: if the tokenizer has one."
)
CALIBRATION = flags.DEFINE_string(
  "calibration",
  "",
  "Calibration file, what rounds cost here: adaptive controllers and predictions go by it. Default: the one "
  "of this device, model and versions in the cache folder, written by experiments.calibrate.",
)
COMPILATION_CACHE = flags.DEFINE_string(
  "compilation_cache",
  "auto",
  "Folder that keeps compiled programs between runs. auto: beside the downloaded models; empty: none.",
)


def refuse(names: Sequence[str], script: str, instead: str) -> None:
  """Raises ValueError for flags that a script does not use and that are not at their defaults.

  Args:
    instead: which flags say it there.
  """
  for name in names:
    if FLAGS[name].value != FLAGS[name].default:
      raise ValueError(f"--{name} is not used by {script}: see {instead}")


def ascending(flag: flags.FlagHolder, default: Sequence[int]) -> tuple[int, ...]:
  """Whole numbers of a list flag, None the default.

  Raises:
    ValueError: naming the flag, if they do not ascend from at least 1.
  """
  if flag.value is None:
    return tuple(default)
  values = [int(text) if text.isdecimal() else 0 for text in flag.value]
  if not values or values[0] < 1 or any(b <= a for a, b in itertools.pairwise(values)):
    raise ValueError(
      f"--{flag.name} = {','.join(flag.value)!r}; whole numbers that ascend from at least 1 are needed"
    )
  return tuple(values)


def _is_file(text: str) -> bool:
  if os.path.isdir(text):
    raise flags.ValidationError(f"--calibration = {text!r} is a folder; name a file")
  return True


def _are_folders(paths: Sequence[str]) -> bool:
  for path in paths:
    if not os.path.isdir(path):
      raise flags.ValidationError(f"--drafter_path: {path!r} is not a folder")
  return True


def _is_drafter(text: str) -> bool:
  try:
    return parse_method(text).is_known
  except ValueError as error:
    raise flags.ValidationError(str(error)) from None


def _is_rule(text: str) -> bool:
  try:
    if text != "auto":
      make_rule(text)
  except ValueError as error:
    raise flags.ValidationError(str(error)) from None
  return True


def logit_bias(parts: Sequence[str]) -> dict[int, float]:
  """``["7:-100", "9:1.5"]`` → a mapping, checked as `Settings.on_host` does.

  Raises:
    ValueError: something else.
  """
  bias: dict[int, float] = {}
  for part in parts:
    token, _, value = part.partition(":")
    try:
      bias[int(token)] = float(value)
    except ValueError:
      raise ValueError(f"logit_bias holds {part!r}; it must be id:value, e.g. 7:-100") from None
  if len(bias) < len(parts):
    raise ValueError(f"logit_bias = {','.join(parts)} names an id twice")
  Settings.on_host(1, logit_bias=bias)  # no device yet: several processes must first join
  return bias


def _is_bias(parts: Sequence[str]) -> bool:
  try:
    logit_bias(parts)
  except ValueError as error:
    raise flags.ValidationError(str(error)) from None
  return True


def _mesh_ok(text: str) -> bool:
  try:
    parse_mesh(text)
  except ValueError as error:
    raise flags.ValidationError(str(error)) from None
  return True


def _consistent(values: dict) -> bool:
  """Combinations of flags that make no sense; the message names both."""
  rule, window = values["rule"], values["window"]
  method = parse_method(values["drafter"])
  drafter = method.drafter
  has_head = bool(values["drafter_path"]) or method.head in shipped_heads(values["model"])
  if method.needs_draft_model and not values["draft_model"] and not has_head:
    raise flags.ValidationError("--drafter=two_model needs --draft_model or --drafter_path")
  if method.needs_head and not has_head:
    raise flags.ValidationError(f"--drafter={values['drafter']} needs --drafter_path")
  if values["min_new_tokens"] > values["max_new_tokens"]:
    least, most = values["min_new_tokens"], values["max_new_tokens"]
    raise flags.ValidationError(f"--min_new_tokens={least} is more than --max_new_tokens={most}")
  if rule == "greedy" and values["temperature"] >= MIN_TEMPERATURE:
    raise flags.ValidationError(f"--rule=greedy needs --temperature=0, got {values['temperature']:g}")
  if window is not None and values["drafter"] != AUTO and not method.takes_window:
    raise flags.ValidationError(
      f"--window={window} is not used: --drafter={values['drafter']} has widths {', '.join(method.widths)}"
    )
  if window is not None and drafter in DRAFTERS and (window == 0) != (drafter == "none"):
    raise flags.ValidationError(f"--window={window} does not fit --drafter={drafter}")
  return True


flags.register_validator(
  "drafter", _is_drafter, f"it must be one of {', '.join(DRAFTERS)} or package.module:factory"
)
flags.register_validator(
  "window", lambda w: w is None or 0 <= w < MAX_NODES, f"it must be in [0, {MAX_NODES - 1}]"
)
flags.register_validator("rule", _is_rule)
flags.register_validator("calibration", _is_file)
flags.register_validator("drafter_path", _are_folders)
for _name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
  # A comparison with a bound says nothing about NaN.
  flags.register_validator(_name, lambda value: value == value, "it must be a number")
flags.register_validator("logit_bias", _is_bias)
flags.register_validator("mesh", _mesh_ok)
flags.register_multi_flags_validator(
  [
    "model",
    "drafter",
    "draft_model",
    "drafter_path",
    "rule",
    "temperature",
    "window",
    "min_new_tokens",
    "max_new_tokens",
  ],
  _consistent,
)


def parse(argv: Sequence[str]) -> list[str]:
  """Parses a command line, program name first; a wrong flag ends the process with one line and code 2."""
  try:
    return FLAGS(argv)
  except flags.Error as error:
    sys.exit(_fail(error))


def _fail(error: BaseException) -> int:
  print("error: " + (" ".join(str(error).split()) or type(error).__name__), file=sys.stderr, flush=True)
  return 2


def guarded(
  main: Callable[[list[str]], None], *, takes_arguments: bool = False
) -> Callable[[list[str]], int]:
  """``main`` as a function of the parsed command line that returns the exit code.

  Invalid input (`ValueError`, `OSError`) becomes one line on standard error, not a traceback.

  Args:
    main: takes what the flags left of the command line, the program's name excluded.
    takes_arguments: whether there may be anything left.
  """

  def checked(argv: list[str]) -> int:
    try:
      if len(argv) > 1 and not takes_arguments:
        raise ValueError(f"unexpected argument {argv[1]!r}; values are given as --flag=value")
      main(argv[1:])
    except (ValueError, OSError) as error:
      return _fail(error)
    except KeyboardInterrupt:
      print("interrupted", file=sys.stderr)
      return 130
    return 0

  return checked


def run(main: Callable[[list[str]], None], *, takes_arguments: bool = False) -> None:
  """Runs a script and exits with its code; see `guarded`."""
  logging.set_verbosity(logging.WARNING)  # JAX tells of every backend it does not find
  app.run(guarded(main, takes_arguments=takes_arguments), flags_parser=parse)
