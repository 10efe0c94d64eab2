"""Text that the target writes: slots, questions, masks, shards that are killed and written again."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import measure
from specjax import decode, text
from specjax.checkpoints import LoadedModel
from specjax.decode import Finish
from specjax.drafters import NoDrafter
from specjax.sampling import Settings
from specjax.training.conversations import Conversation
from specjax.training.data import Dataset
from specjax.training.distill import (
  Conversations,
  Distillation,
  Recipe,
  model_digest,
  provenance,
  seed_of,
  write_shards,
)
from specjax.training.openings import Opening, choose
from specjax.training.overlap import Evaluation, Filter
from specjax.training.questions import question_of, user_turn
from specjax.training.slots import Job, Slots, Written
from specjax.training.writer import ShardWriter
from specjax.verify import DrawAndFollow
from tests.training.tiny import BOS, END, START, letters_model, letters_tokenizer, loaded

TAPS = (2, 1, 0, 2)  # the usual ones of two layers: one program with the script's tests
RECIPE = Recipe(question_tokens=12, answer_tokens=10, seed=5, batch_size=4, shard_samples=8, taps=TAPS)
PROMPT_LIMIT = 31
# Ragged, greedy and not; more than there are rows.
JOBS = [
  Job(
    number,
    tuple((7 * number + i) % 28 for i in range(1 + 5 * number % 23)),
    (0.0, 0.8)[number % 2],
    90 + number,
  )
  for number in range(11)
]


def slots(batch_size, taps=TAPS, group=None):
  return Slots(
    loaded().model,
    batch_size=batch_size,
    prompt_limit=PROMPT_LIMIT,
    new_tokens=12,
    taps=taps,
    group=group,
  )


def written(of, jobs, **changes):
  run = dict(max_new_tokens=10, stop_ids=[END]) | changes
  return sorted(of.run(jobs, **run), key=lambda row: row.number)


def plain(prompts, temperatures, seeds, budget=10):
  """New tokens of each prompt, one at a time in the usual loop."""
  config = decode.DecodeConfig(
    drafter=NoDrafter(),
    rule=DrawAndFollow(),
    num_real_tokens=32,
    length_limit=64,
    prefill_widths=(32,),
    logprobs="off",
  )
  weights = decode.Weights(loaded().model)
  found = []
  for prompt, temperature, seed in zip(prompts, temperatures, seeds, strict=True):
    settings = Settings.create(1, temperature=temperature, seed=seed)
    state = decode.prefill(
      weights, config, [prompt], settings=settings, max_new_tokens=budget, stop_ids=[END]
    )
    (row,) = decode.results(decode.generate(weights, state, config))
    found.append(row.tokens)
  return found


# --- slots -----------------------------------------------------------------------------------------


def test_rows_do_not_depend_on_slots():
  """4 rows, 2 rows, and the usual loop one by one: the same texts and ends.

  Fails when a replaced row keeps anything of the one before it, or a job gets its neighbour's seed.
  """
  four, two = written(slots(4, group=3), JOBS), written(slots(2, taps=()), JOBS)
  expected = plain(*zip(*[(job.prompt, job.temperature, job.seed) for job in JOBS]))
  assert [row.number for row in four] == [row.number for row in two] == list(range(11))
  for row, other, job, new in zip(four, two, JOBS, expected, strict=True):
    assert row.tokens.tolist() == other.tokens.tolist() == [*job.prompt, *new]
    assert row.new.tolist() == new and row.prompt_length == len(job.prompt)
    assert row.finish is other.finish is (Finish.STOP if new[-1] == END else Finish.LENGTH)
    assert row.taps.shape == (len(row.tokens) - 1, len(TAPS), 32)
  assert {row.finish for row in four} == {Finish.STOP, Finish.LENGTH}


def test_the_same_bits_again_and_progress_that_adds_up():
  """Fails when what a run before has left behind is seen, or tokens are counted twice."""
  of, told = slots(4, group=3), []
  first = written(of, JOBS)
  again = written(of, JOBS[::-1], progress=told.append)
  for row, other in zip(first, again, strict=True):
    assert row.tokens.tobytes() == other.tokens.tobytes() and row.taps.tobytes() == other.taps.tobytes()
  assert sum(told) == sum(len(row.new) for row in first)


def test_o_nothing_compiles_behind_compile():
  """Prompts of every width, groups that are not full, both stages. Fails when a shape depends on the jobs."""
  of = slots(4, taps=(), group=2)
  of.compile()
  before = measure.compile_count()
  assert all(row.taps is None for row in written(of, JOBS))
  written(of, [Job(0, (1,) * PROMPT_LIMIT, 0.5, 1), Job(1, (2,), 0.0, 2)], max_new_tokens=3, stop_ids=[])
  assert measure.compile_count() == before


def test_prompts_and_lengths_out_of_range():
  with pytest.raises(ValueError, match="prompt of job 3 has 32 tokens; the limit is 31"):
    written(slots(4), [Job(3, (1,) * 32, 0.0, 0)])
  with pytest.raises(ValueError, match=r"group = 5; it must be in \[1, 4\]"):
    slots(4, group=5)
  with pytest.raises(ValueError, match="need 300 positions; the model was made for 256"):
    Slots(loaded().model, batch_size=1, prompt_limit=100, new_tokens=200)


# --- questions -------------------------------------------------------------------------------------


def test_the_users_turn_of_a_template():
  tokenizer = letters_tokenizer()
  turn = user_turn(tokenizer)
  assert turn.before == (START, *tokenizer.encode("user\n")) and turn.closing == ""
  assert turn.stop_ids == (END,)
  assert turn.overhead >= len(tokenizer.encode_chat([{"role": "user", "content": ""}]))


@pytest.mark.parametrize(
  ("template", "before", "closing", "stops"),
  [
    # Llama 2's kind: text closes the turn, and a space before the words belongs to them.
    ("<|bos|>inst {{ messages[0]['content'] }} endinst", (BOS, *b"inst"), "endinst", (END,)),
    # The kind that has a token for it, other than the end of an answer, behind a newline.
    ("a\n{{ messages[0]['content'] }}\n<|start|>b", (*b"a", b"\n"), "", (END, START)),
    ("a{{ messages[0]['content'] }}stop<|end|>", b"a", "stop", (END,)),
  ],
)
def test_other_templates(template, before, closing, stops):
  tokenizer = letters_tokenizer(template)
  turn = user_turn(tokenizer)
  letter = lambda part: (
    [part]
    if part in (BOS, START, END)
    else tokenizer.encode(part.decode() if isinstance(part, bytes) else chr(part))
  )
  assert list(turn.before) == [i for part in before for i in letter(part)]
  assert turn.closing == closing and turn.stop_ids == stops


@pytest.mark.parametrize(
  ("template", "words"),
  [
    ("user", "it holds the user's words 0 times"),
    ("a{{ messages[0]['content'] }}{{ messages[0]['content'] }}b", "it holds the user's words 2 times"),
    ("a{{ messages[0]['content'] }}", "nothing follows the user's words"),
    ("{{ messages[0]['content'] }}<|end|>", "nothing stands before the user's words"),
  ],
)
def test_templates_that_cannot_be_continued(template, words):
  with pytest.raises(ValueError, match=words):
    user_turn(letters_tokenizer(template))


@pytest.mark.parametrize(
  ("new", "finish", "text_or_fault"),
  [
    ([*"what is it", END], Finish.STOP, "what is it"),
    ([*" what is it\n", END], Finish.STOP, "what is it"),
    ([*"what is it"], Finish.LENGTH, "question_too_long"),
    ([*"a b", END], Finish.STOP, "question_too_short"),
    ([*"    \n\n", END], Finish.STOP, "question_too_short"),
    ([END], Finish.STOP, "question_too_short"),
    ([*"what ", START, *"is", END], Finish.STOP, "special_token_in_question"),
    ([*"what is it"], Finish.ERROR, "error"),
    # Ended by the template's text, wherever the budget ends.
    ([*"what endinst and so on"], Finish.LENGTH, "what"),
    ([*"what endinst", END], Finish.STOP, "what"),
  ],
)
def test_which_questions_are_texts(new, finish, text_or_fault):
  closed = "endinst" in "".join(map(str, new))
  tokenizer = letters_tokenizer("a {{ messages[0]['content'] }} endinst") if closed else letters_tokenizer()
  ids = [i for part in new for i in ([part] if isinstance(part, int) else tokenizer.encode(part))]
  tokens = np.array([1, 2, *ids], np.int32)
  row = Written(0, tokens, 2, finish, None)
  found, fault = question_of(tokenizer, user_turn(tokenizer), Opening(), row)
  assert (found or fault) == text_or_fault and bool(found) != bool(fault)


# --- shards ----------------------------------------------------------------------------------------


def make(path, *, recipe=RECIPE, tokens=120, kill=None, target=None, texts=None, chat=True, evaluation=None):
  """Writes a data set; ``kill`` is the number of finished shards and the stage at which it is ended."""
  target = target or loaded()
  writer = ShardWriter(str(path), provenance(target, recipe, "self", evaluation=evaluation))

  def progress(stage, new):
    assert stage in ("questions", "answers") and new >= 0
    if (len(writer.shards), stage) == kill:
      raise KeyboardInterrupt

  write_shards(
    writer,
    Distillation(target, recipe, texts=texts, chat=chat, progress=progress),
    tokens=tokens,
    shard_samples=recipe.shard_samples,
    size=None if texts is None else len(texts),
    evaluation=evaluation,
  )
  return writer


def files(path):
  return {name: path.joinpath(name).read_bytes() for name in sorted(os.listdir(path))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  path = tmp_path_factory.mktemp("data") / "whole"
  make(path)
  return path


@pytest.mark.parametrize("kill", [(0, "answers"), (1, "questions"), (2, "answers")])
def test_killed_and_resumed_to_the_same_bits(whole, tmp_path, kill):
  """Manifest and shards, byte for byte. Fails when noise, order or duplicates depend on what ran before."""
  path = tmp_path / "killed"
  with pytest.raises(KeyboardInterrupt):
    make(path, kill=kill)
  assert sum(name.endswith("safetensors") for name in files(path)) == kill[0]
  make(path)
  assert len(files(path)) >= 4 and files(path) == files(whole)


def test_more_tokens_add_shards(whole, tmp_path):
  path = tmp_path / "more"
  make(path, tokens=1)
  assert len(files(path)) == 2
  make(path)
  assert files(path) == files(whole)


def test_what_a_sample_is(whole):
  """The question in the template as context, then an answer of the target's own, which alone is learned.

  Greedy for even numbers, sampled with the sample's own seed for odd ones, as the usual loop writes it.
  """
  data, tokenizer = Dataset.open(str(whole)), loaded().tokenizer
  numbers, prompts, answers = [], [], []
  for i in range(len(data)):
    tokens, mask = data[i]
    begin = int(mask.argmax())
    assert not mask[:begin].any() and mask[begin:].all()
    prompts.append(tokens[:begin].tolist())
    answers.append(tokens[begin:].tolist())
    numbers.append(data.number(i))
    question = tokenizer.decode(prompts[-1]).removeprefix("user\n").removesuffix("\nassistant\n")
    assert text.encode_prompt(tokenizer, question, chat=True) == prompts[-1]
  assert numbers == sorted(set(numbers)) and {number % 2 for number in numbers} == {0, 1}
  temperatures = [(0.0, 0.7)[number % 2] for number in numbers]
  assert answers == plain(prompts, temperatures, [seed_of(5, number, 1) for number in numbers])
  counts, report = data.manifest["counts"], data.manifest["report"]
  assert counts["answer_tokens"] == sum(map(len, answers)) >= 120
  assert report["answers_cut"] == sum(answer[-1] != END for answer in answers) > 0
  written_numbers = len(data.manifest["shards"]) * RECIPE.shard_samples
  assert counts["samples"] + sum(report["dropped"].values()) == written_numbers


def test_questions_begin_with_openings(tmp_path):
  """Each of them somewhere, once; words behind them too, and what is too long ends with a sentence.

  Fails when rows get another row's opening, or the room for the openings' tokens is forgotten.
  """
  frames = (Opening("so ", " then", True), Opening("on the moon ", " and the sun", True), Opening("why"))
  recipe = Recipe(**{**RECIPE.__dict__, "openings": frames, "question_tokens": 30})
  make(tmp_path, recipe=recipe)
  data, tokenizer = Dataset.open(str(tmp_path)), loaded().tokenizer
  found = set()
  for i in range(len(data)):
    sample = data[i]
    asked = tokenizer.decode(sample.tokens[~sample.mask]).removeprefix("user\n")
    asked = asked.removesuffix("\nassistant\n")
    chosen = choose(frames, seed_of(5, data.number(i), 2))
    assert asked.startswith(chosen.before.strip()) and asked.endswith(chosen.after)
    found.add(chosen)
  assert len(found) > 1


def test_features_of_a_sample_are_the_targets(whole):
  """Prompt and answer alike, within the rounding of bfloat16."""
  data, model = Dataset.open(str(whole)), loaded().model
  forward = jax.jit(lambda tokens: model(tokens, model.init_cache(1, 64), taps=TAPS, logits=False).taps[0])
  for i in (0, len(data) - 1):
    tokens = data[i].tokens
    padded = jnp.zeros((1, 64), jnp.int32).at[0, : len(tokens)].set(tokens)
    found = data.features(i)
    assert found.shape == (len(tokens) - 1, len(TAPS), 32)
    expected = np.asarray(forward(padded))[: len(tokens) - 1]
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=2**-7, atol=1e-4)


def test_without_features_the_same_tokens(whole, tmp_path):
  """Fails when recording takes part in what is written."""
  recipe = Recipe(**{**RECIPE.__dict__, "taps": ()})
  make(tmp_path, recipe=recipe)
  mine, theirs = Dataset.open(str(tmp_path)), Dataset.open(str(whole))
  assert mine.features(0) is None and len(mine) == len(theirs)
  assert all(mine[i].tokens.tolist() == theirs[i].tokens.tolist() for i in range(len(mine)))


def test_nothing_kept_is_an_error(tmp_path):
  """Greedy questions are all the same one. Fails when the loop goes on for ever."""
  recipe = Recipe(**{**RECIPE.__dict__, "question_temperature": 0.0})
  with pytest.raises(ValueError, match="none of 8 samples was kept: "):
    make(tmp_path, recipe=recipe, tokens=10_000)


def test_questions_from_a_file(tmp_path):
  """Duplicates, none, too long and those of the evaluation are dropped; numbers are those of the lines."""
  tokenizer = loaded().tokenizer
  evaluation = Evaluation(["the big bad wolf"], lambda t: tokenizer.encode(t), sizes=(4, 8))
  texts = ["abc def", "abc  def ", None, "x" * 200, "bad wolf", "the sun", "of the moon", "bad day"]
  make(tmp_path, texts=texts, tokens=10_000, evaluation=evaluation)
  data = Dataset.open(str(tmp_path))
  kept = {data.number(i): data[i] for i in range(len(data))}
  dropped = data.manifest["report"]["dropped"]
  for name, count in (
    ("duplicate_question", 1),
    ("no_question", 1),
    ("question_too_long", 1),
    ("question_of_evaluation", 1),
  ):
    assert dropped.pop(name) == count
  assert set(kept) <= {0, 5, 6, 7} and len(kept) + sum(dropped.values()) == 4 and len(kept) > 1
  for number, sample in kept.items():
    context = sample.tokens[~sample.mask].tolist()
    assert context == tokenizer.encode_chat([{"role": "user", "content": texts[number]}])
  sharing = data.manifest["report"]["evaluation"]["sharing_n_grams"]
  assert data.manifest["report"]["evaluation"]["questions"] == 1 and set(sharing) == {"4", "8"}


def test_base_models_continue_texts(tmp_path):
  """No template, BOS where the model wants it; long beginnings are cut."""
  tokenizer = letters_tokenizer(None, adds_bos=True)
  texts = ["once upon a time there was", "ab"]
  make(tmp_path, target=LoadedModel(letters_model(), tokenizer, "base"), texts=texts, chat=False)
  data = Dataset.open(str(tmp_path))
  for i in range(len(data)):
    context = data[i].tokens[~data[i].mask].tolist()
    assert context == [BOS, *tokenizer.encode(texts[data.number(i)], add_bos=False)][:12]
  with pytest.raises(ValueError, match="needs beginnings to continue"):
    Distillation(loaded(), RECIPE, chat=False)


@pytest.mark.parametrize("taps", [(), TAPS])
def test_conversations_as_they_are(tmp_path, taps):
  user, said = ({"role": "user", "content": "ab"}, {"role": "assistant", "content": "the end"})
  talks = [
    Conversation(1, (user, said)),
    Conversation(2, (user, said)),
    Conversation(3, (user,)),
    Conversation(4, ({"role": "user", "content": "c"}, {"role": "assistant", "content": "d" * 50})),
  ]
  recipe = Recipe(shard_samples=3, taps=taps)
  writer = ShardWriter(str(tmp_path), provenance(loaded(), recipe, "conversations", length_limit=40))
  make_samples = Conversations(loaded(), recipe, talks, length_limit=40)
  write_shards(writer, make_samples, tokens=1000, shard_samples=3, size=4)
  data = Dataset.open(str(tmp_path))
  assert [data.number(i) for i in range(len(data))] == [0, 3] and len(data[1].tokens) == 40
  assert data.manifest["report"]["dropped"] == {"duplicate_question": 1, "no_answer": 1}
  assert loaded().tokenizer.decode(data[0].tokens[data[0].mask]) == "the end"
  if taps:
    assert data.features(1).shape == (39, len(TAPS), 32)
  else:
    assert data.features(1) is None
  with pytest.raises(ValueError, match=r"length_limit = 257; it must be in \[2, 256\]"):
    Conversations(loaded(), recipe, talks, length_limit=257)


# --- provenance ------------------------------------------------------------------------------------


def test_provenance_tells_data_sets_apart():
  of = lambda recipe=RECIPE, target=None, **more: provenance(target or loaded(), recipe, "self", **more)
  other = LoadedModel(letters_model(1), letters_tokenizer(), "tiny")
  changed = [
    of(Recipe(**{**RECIPE.__dict__, "seed": 6})),
    of(Recipe(**{**RECIPE.__dict__, "taps": ()})),
    of(Recipe(**{**RECIPE.__dict__, "batch_size": 5})),
    of(Recipe(**{**RECIPE.__dict__, "openings": (Opening("why"),)})),
    of(target=other),
    of(target=LoadedModel(loaded().model, letters_tokenizer("a{{ messages[0].content }}b"), "tiny")),
    of(file_sha256="f"),
    of(evaluation=Evaluation(["a"], lambda t: [1], digest="e")),
  ]
  assert all(of() != one for one in changed) and of() == of(
    target=LoadedModel(loaded().model, letters_tokenizer(), "x")
  )


def test_one_weight_changes_the_models_digest():
  one, other = letters_model(), letters_model()
  assert model_digest(one) == model_digest(other)
  other.norm.weight[...] = other.norm.weight[...].at[3].add(1e-6)
  assert model_digest(one) != model_digest(other)


def test_seeds():
  """32 bits, another for each sample, purpose and run."""
  seeds = {seed_of(run, number, purpose) for run in (0, 1) for number in range(300) for purpose in (0, 1)}
  assert len(seeds) == 1200 and max(seeds) < 2**32 and seed_of(0, 1, 0) == seed_of(0, 1, 0)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("question_tokens", 0),
    ("answer_tokens", 0),
    ("batch_size", 0),
    ("shard_samples", 0),
    ("question_temperature", -1.0),
    ("question_temperature", float("nan")),
    ("answer_temperatures", ()),
    ("openings", ()),
    ("answer_temperatures", (0.0, 1e3)),
    ("seed", -1),
  ],
)
def test_recipes_that_make_no_sense(field, value):
  with pytest.raises(ValueError, match=field):
    Recipe(**{field: value})


def test_a_filter_has_seen_what_was_kept_before(whole):
  """As a resumed run rebuilds it from the shards."""
  writer = ShardWriter(str(whole), provenance(loaded(), RECIPE, "self"))
  keep = Filter(writer.hashes)
  data, tokenizer = Dataset.open(str(whole)), loaded().tokenizer
  sample = data[0]
  assert keep.answer(tokenizer.decode(sample.tokens[sample.mask])) is None
