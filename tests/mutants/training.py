"""Faults in the training of draft heads."""

from tests.mutants import Mutant

RECIPES = "specjax/training/recipes"
BATCHES, PACKED, STEP = (f"specjax/training/{name}.py" for name in ("batches", "packed", "step"))
LOSSES = "specjax/training/losses.py"

LOOPS = "tests/training/test_recipes.py::test_loss_is_that_of_the_loops"
FIGURES = "tests/training/test_recipes.py::test_held_out_figures_are_those_of_the_loops"
DECODING = "tests/training/test_recipes.py::test_training_time_test_is_decoding"
NOISE = "tests/training/test_recipes.py::test_noise_is_on_what_an_eagle1_head_sees_alone"
ALONE = "tests/training/test_packed.py::test_packed_rows_are_the_samples_alone"
RESUMED = "tests/training/test_loop.py::test_a_killed_run_ends_with_the_same_bits"
JOINT = "tests/training/test_medusa2.py"
GRADIENT = "tests/training/test_losses.py::test_gradient_is_that_of_the_formula"

MUTANTS = (
  Mutant(
    "distilled draft learns its own last token",
    "logits are read at the token that is drafted, not before it",
    f"{RECIPES}/distilled.py",
    "batch.counted - 1)))",
    "batch.counted)))",
    (f"{LOOPS}[distilled]",),
  ),
  Mutant(
    "medusa reads one position late",
    "heads see the hidden state of the root, which decoding does not have",
    f"{RECIPES}/medusa.py",
    "batch.counted - 2)",
    "batch.counted - 1)",
    (f"{LOOPS}[medusa]",),
  ),
  Mutant(
    "eagle chains begin one row late",
    "logits of a chain behind row u - 1 are taken for the token at u",
    f"{RECIPES}/recurrent.py",
    "width - step] - 2)",
    "width - step] - 1)",
    (f"{LOOPS}[eagle3]",),
  ),
  Mutant(
    "eagle step sees the wrong token",
    "each step embeds the token before the one that the chain drafted",
    f"{RECIPES}/recurrent.py",
    "-(1 + step)",
    "-step",
    (DECODING,),
  ),
  Mutant(
    "no diagonal",
    "a step of the training-time test does not see the chain's own nodes",
    f"{RECIPES}/recurrent.py",
    "attend(q, *true, seen, own)",
    "attend(q, *true, seen)",
    (DECODING,),
  ),
  Mutant(
    "rotary position of the first step",
    "all steps of the training-time test stand at the row's own position",
    f"{RECIPES}/recurrent.py",
    "batch.positions + step",
    "batch.positions",
    (DECODING,),
  ),
  Mutant(
    "fused again",
    "the target's features are fed at every step in place of what recurs",
    f"{RECIPES}/recurrent.py",
    "    features = head.layer.finish(residual, attend(q, *true, seen, own))\n    yield features",
    "    yield head.layer.finish(residual, attend(q, *true, seen, own))",
    (DECODING,),
  ),
  Mutant(
    "feature of the row itself",
    "an EAGLE-1 head learns the feature that it is given",
    f"{RECIPES}/eagle1.py",
    "losses.smooth_l1(head.fuse(before(batch)[..., None, :]), said)",
    "losses.smooth_l1(rows_at(self.features(head, batch), batch.counted - 2), said)",
    (f"{LOOPS}[eagle]",),
  ),
  Mutant(
    "noise in what is learned",
    "the target's distribution is that of disturbed features",
    f"{RECIPES}/eagle1.py",
    "self.token_sums(module, frozen, batch, [",
    "self.token_sums(module, frozen, batch.replace(taps=batch.taps + features[:, :, None]), [",
    (NOISE,),
  ),
  Mutant(
    "noise of the row's length",
    "noise does not depend on how long a sample is",
    f"{RECIPES}/eagle1.py",
    "same = batch.segments[:, :, None] == batch.segments[:, None, :]",
    "same = batch.segments[:, :, None] >= 0 * batch.segments[:, None, :]",
    (NOISE,),
  ),
  Mutant(
    "absolute where it should be square",
    "SmoothL1 is linear below 1, too",
    LOSSES,
    "jnp.abs(d) < 1, 0.5",
    "jnp.abs(d) < 0, 0.5",
    (f"{LOOPS}[eagle]",),
  ),
  Mutant(
    "samples see each other",
    "attention crosses the segments of a row",
    PACKED,
    "seen = same & (distance >= 0)",
    "seen = (distance >= 0) | (same & False)",
    (ALONE,),
  ),
  Mutant(
    "positions run on",
    "a sample's positions are its places in the row",
    BATCHES,
    "segment, np.arange(size)",
    "segment, np.arange(start, start + size)",
    ("tests/training/test_batches.py::test_every_token_once",),
  ),
  Mutant(
    "prompts are learned",
    "the mask of a sample is ignored",
    BATCHES,
    "return np.ones_like(mask) if self._context else mask",
    "return np.ones_like(mask)",
    (f"{LOOPS}[medusa]", "tests/training/test_batches.py::test_every_token_once"),
  ),
  Mutant(
    "chains run over gaps",
    "a chain goes on behind tokens that are not learned",
    BATCHES,
    "(last == first + depth) & (end == begin + depth)",
    "(last >= 0)",
    (f"{LOOPS}[medusa]",),
  ),
  Mutant(
    "depths weigh alike",
    "no decay over depths",
    f"{RECIPES}/base.py",
    "self.decay**d * value",
    "value",
    (f"{LOOPS}[medusa]",),
  ),
  Mutant(
    "the target one token on",
    "the distribution of the next token is taken for a learned one's",
    f"{RECIPES}/base.py",
    "batch.counted - 1)",
    "batch.counted)",
    (f"{LOOPS}[distilled]",),
  ),
  Mutant(
    "acceptance over the draft vocabulary",
    "Σ min(p, q) forgets the target's mass outside of it",
    f"{RECIPES}/base.py",
    "target_probs(frozen, batch, module.ids) * batch.mass[..., None]",
    "target_probs(frozen, batch, module.ids)",
    (f"{FIGURES}[eagle3]",),
  ),
  Mutant(
    "rounds that were never reached",
    "acceptance at a depth counts chains that ended before",
    f"{RECIPES}/base.py",
    "reached, in_tree = reached & agreed & greedy[:, d:],",
    "reached, in_tree = reached & greedy[:, d:],",
    (f"{FIGURES}[eagle3]",),
  ),
  Mutant(
    "optimizer starts anew",
    "a resumed run begins the schedule and the moments again",
    "specjax/training/loop.py",
    "checkpoints.restore(state))",
    "checkpoints.restore(state).replace(optimizer=state.optimizer))",
    (RESUMED,),
  ),
  Mutant(
    "rows start anew",
    "a resumed run sees the first rows again",
    "specjax/training/loop.py",
    "data.read(order.rows(done))",
    "data.read(order.rows(done - (start or 0)))",
    (RESUMED,),
  ),
  Mutant(
    "mean over a part",
    "each part of a step counts as one, however many tokens are learned in it",
    STEP,
    "learned = jnp.maximum((batch.counted >= 0).sum(), 1)",
    "learned = jnp.maximum((batch.counted >= 0).sum() / accumulate, 1)",
    ("tests/training/test_mesh.py",),
  ),
  Mutant(
    "total variation of logits' sign",
    "the loss grows with the acceptance",
    LOSSES,
    "return 1.0 - overlap(p, logits)",
    "return overlap(p, logits)",
    (f"{GRADIENT}[total_variation]",),
  ),
  # --- Medusa-2
  Mutant(
    "heads on the original",
    "Medusa-2's heads are trained on hidden states of a backbone that is not the one they will see",
    f"{RECIPES}/medusa2.py",
    "super().loss_sums(module.heads, frozen, ahead, key)",
    "super().loss_sums(module.heads, frozen, batch, key)",
    (f"{JOINT}::test_the_loss_is_kl_and_a_share_of_the_heads",),
  ),
  Mutant(
    "the other KL",
    "the changed target is what the original is judged by",
    f"{RECIPES}/medusa2.py",
    "kl = kl_sums(frozen, batch, ahead)",
    "kl = kl_sums(frozen, ahead, batch)",
    (f"{JOINT}::test_the_loss_is_kl_and_a_share_of_the_heads",),
  ),
  Mutant(
    "held out from the original",
    "drafts are judged by what the original target would say, which is not the one to decode with",
    f"{RECIPES}/medusa2.py",
    "best, mass = reference(frozen, ahead, module.ids)",
    "best, mass = reference(frozen, batch, module.ids)",
    (f"{JOINT}::test_held_out_figures_are_those_of_the_changed_target",),
  ),
  Mutant(
    "adapters at full size",
    "low-rank differences are not scaled by alpha / rank",
    "specjax/training/adapters.py",
    "self.scale * jnp.matmul",
    "1.0 * jnp.matmul",
    (f"{JOINT}::test_the_loss_is_kl_and_a_share_of_the_heads",),
  ),
  Mutant(
    "one rate",
    "heads learn as slowly as the backbone",
    STEP,
    "{name: rate(name) * leaf for",
    "{name: rate(name) ** 0 * leaf for",
    (f"{JOINT}::test_heads_have_a_rate_of_their_own",),
  ),
)
