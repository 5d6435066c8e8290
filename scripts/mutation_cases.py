"""The faults of `scripts/mutations.py`: each one breaks one place of the source, and names the tests that must then fail.

A case names a line whose exact form matters. If the line changes, the case must change: the text of a case must be in the file
exactly once. The tests of a case have the smallest scope that can catch the fault. They do not need vLLM.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One fault.

    Attributes:
        about: the behaviour that the fault breaks.
        file: path below `src/lockstep`.
        old, new: the text to replace, and its replacement.
        tests: arguments of pytest, separated by spaces; at least one test must fail.
    """

    about: str
    file: str
    old: str
    new: str
    tests: str


ADVANTAGES = ("algorithms/advantages.py", "tests/algorithms/test_advantages.py")
CORRECTIONS = ("algorithms/corrections.py", "tests/algorithms/test_corrections.py")
POLICY = ("algorithms/policy_loss.py", "tests/algorithms/test_policy_loss.py")
MASKS = ("algorithms/masks.py", "tests/algorithms/test_masks_and_divergence.py")
RETURNS = ("algorithms/returns.py", "tests/algorithms/test_returns.py")
PAIRS = ("algorithms/preference_loss.py", "tests/algorithms/test_preference_loss.py")
GAP = ("parity/gap.py", "tests/parity/test_gap.py")
RECEIPT = ("parity/receipt.py", "tests/parity/test_handshake_and_receipt.py")
HANDSHAKE = ("parity/handshake.py", "tests/parity/test_handshake_and_receipt.py")
SAMPLES = (
    "parity/samples.py",
    "tests/parity/test_canary_and_samples.py::test_equal_samples_against_all_odds_are_refused",
)
ANSWERS = ("engines/answers.py", "tests/engines/test_answers.py")
PUSH = ("sync/push.py", "tests/sync/test_push.py")
REWARDS = ("rollouts/rewards.py", "tests/rollouts/test_rewards.py")
GUARD = ("server/guard.py", "tests/server/test_keys_guard_and_command.py::TestGuard")
KEYS = ("server/keys.py", "tests/server/test_keys_guard_and_command.py::TestKeys")
SLOTS = ("sync/slots.py", "tests/sync/test_slots.py")
RECOVERY = ("training/generate/recovery.py", "tests/training/test_recovery.py")
CHECKPOINTS = ("training/run_files/checkpoints.py", "tests/training/test_checkpoints_and_directory.py")
GENERATION = ("training/step/generation.py", "tests/training/test_prompts_and_generation.py")
LOGPS = ("training/forward/token_logps.py", "tests/training/test_token_logps.py")
CHAT = ("tokens/chat.py", "tests/tokens/test_tokens.py")


def _of(place: tuple[str, str], about: str, old: str, new: str) -> Mutation:
    file, tests = place
    return Mutation(about, file, old, new, tests)


MUTATIONS = [
    # tokens
    _of(
        CHAT,
        "a conversation without the generation prompt",
        "add_generation_prompt=not continues",
        "add_generation_prompt=False",
    ),
    _of(
        CHAT, "a last message that is not continued", "continue_final_message=continues", "continue_final_message=False"
    ),
    _of(
        ANSWERS,
        "another prompt of any length passes",
        "if not np.array_equal(answer.prompt_ids, request.prompt_ids):",
        "if False:",
    ),
    # log-probs
    _of(
        LOGPS,
        "log-probs at temperature 1",
        "scaled = wide if temperature == 1.0 else wide / temperature",
        "scaled = wide",
    ),
    _of(LOGPS, "a gradient that forgets the temperature", "gradient /= ctx.temperature", "pass"),
    _of(
        LOGPS,
        "a gradient without the softmax",
        "gradient = probabilities * -by_row[:, None]",
        "gradient = probabilities * 0",
    ),
    _of(LOGPS, "an entropy without a gradient", "by_row += of_entropy * entropy", "pass"),
    # engine and server protocol
    _of(ANSWERS, "the second answer to a request replaces the first", "if answer.key in found:", "if False:"),
    _of(ANSWERS, "an answer that was not asked for is taken", "if answer.key not in asked:", "if False:"),
    _of(ANSWERS, "requests may stay unanswered", "if missing:", "if False:"),
    _of(GUARD, "the first of two keys counts", "if len(shown) != 1:", "if not shown:"),
    _of(GUARD, "any scheme shows a key", 'scheme.lower() == b"bearer" and ', ""),
    _of(GUARD, "a websocket needs no key", 'scope["type"] == "lifespan"', 'scope["type"] in ("lifespan", "websocket")'),
    _of(KEYS, "a key file that others can read", "if mode & (stat.S_IRWXG | stat.S_IRWXO):", "if False:"),
    _of(KEYS, "a short key", "len(key) < _SHORTEST or ", ""),
    # weights
    _of(PUSH, "a tensor of another shape or dtype", "sent[n][:3] != arrived[n][:3]", "False"),
    _of(PUSH, "bytes that changed on the way", "if sent[name].digest != arrived[name].digest", "if False"),
    _of(PUSH, "an engine parameter that got nothing", "if loaded.untouched:", "if False:"),
    _of(PUSH, "caches of older weights", "if not engine.reset_caches():", "if False and not engine.reset_caches():"),
    _of(SLOTS, "a slot that is filled while it is read", "> number - SLOTS, is_left", "> number - SLOTS - 1, is_left"),
    _of(SLOTS, "a push that ends before it is taken", "if self._least_taken() != chunks:", "if False:"),
    _of(SLOTS, "a worker that counts in another's push", "if int(counters[_PUSH]) == push:", "if True:"),
    Mutation(
        "tensors that lie over each other",
        "sync/chunks.py",
        "offset += aligned(tensor.nbytes)",
        "offset += tensor.nbytes // 2",
        "tests/sync/test_chunks.py",
    ),
    # proofs
    _of(
        GAP, "a largest gap that is that of the last part", "            larger.max_abs,", "            other.max_abs,"
    ),
    _of(GAP, "a gap that is no number passes", "if not value <= bound]", "if value > bound]"),
    _of(
        GAP,
        "tokens that were not compared",
        "if stats.tokens != expected_tokens:",
        "if stats.tokens > expected_tokens:",
    ),
    _of(GAP, "log-probs that are not finite", "if not bool(finite.all()):", "if False:"),
    _of(
        HANDSHAKE,
        "raw log-probs of the engine",
        'must("logprobs_mode", actual.logprobs_mode, "processed_logprobs")',
        "pass",
    ),
    _of(HANDSHAKE, "an engine of another dtype", 'must("dtype", actual.dtype, expected.dtype)', "pass"),
    _of(HANDSHAKE, "a context that is too short", "if actual.max_model_len < expected.min_model_len:", "if False:"),
    _of(SAMPLES, "copies of one completion", "if repeats and log_chance < math.log(_ALPHA):", "if False:"),
    # receipts and checkpoints
    _of(RECEIPT, "lines that may be removed", 'if body.get("previous") != previous or claimed', "if claimed"),
    _of(RECEIPT, "lines that may be changed", "or claimed != _hash(body):", "or False:"),
    _of(
        CHECKPOINTS,
        "a checkpoint that is half written",
        "return complete[-1] if complete else None",
        "return found[-1] if found else None",
    ),
    _of(CHECKPOINTS, "what a failed save leaves", "if not _is_complete(checkpoint):", "if False:"),
    _of(
        CHECKPOINTS, "later checkpoints that stay", "checkpoint_step(path) > step", "checkpoint_step(path) > step + 100"
    ),
    # recovery
    _of(RECOVERY, "an engine that came back is trusted", "self._distrust()", "pass"),
    _of(RECOVERY, "work that is given up at its first loss", "for _ in range(_LOSSES):", "for _ in range(1):"),
    _of(RECOVERY, "an engine that is not waited for", "lost.recover()", "pass"),
    # rewards and their pairing
    _of(REWARDS, "every rollout has the first one's score", "name: column[position]", "name: column[0]"),
    _of(REWARDS, "scores without their weights", "weights[name] * score for", "score for"),
    _of(REWARDS, "no score is a score of 0", "sum(given) if given else math.nan", "sum(given)"),
    _of(REWARDS, "scores of the wrong number", "or len(values) != count:", "or False:"),
    Mutation(
        "a rollout of another prompt",
        "rollouts/group.py",
        "if strangers:",
        "if False:",
        "tests/rollouts/test_rewards.py",
    ),
    # advantages
    _of(
        ADVANTAGES, "a standard deviation without Bessel's correction", "scored.std() if", "scored.std(correction=0) if"
    ),
    _of(ADVANTAGES, "a baseline that holds its own reward", "* (count / max(count - 1, 1))", ""),
    _of(
        ADVANTAGES,
        "unscored completions in the mean",
        "values[~values.isnan()].mean()",
        "values.nansum() / len(values)",
    ),
    _of(ADVANTAGES, "an unscored completion learns", ".masked_fill(unscored, torch.nan)", ""),
    _of(
        ADVANTAGES,
        "a batch's spread in place of the group's",
        "/ (_deviation(group) + _EPSILON) for",
        "/ (_deviation(rewards[0]) + _EPSILON) for",
    ),
    _of(RETURNS, "a value of the next completion", "following.masked_fill(~same, 0.0)", "following"),
    _of(RETURNS, "a divergence that is rewarded", "earned = -beta * kl", "earned = beta * kl"),
    _of(RETURNS, "longer returns without their weight", "gamma * lam, segments", "gamma, segments"),
    # losses, weights, masks and normalisation
    _of(POLICY, "a clip that takes the larger", "-torch.minimum(bounded", "-torch.maximum(bounded"),
    _of(
        POLICY, "one epsilon for both sides", "clamp(1 - epsilon, 1 + epsilon_high)", "clamp(1 - epsilon, 1 + epsilon)"
    ),
    _of(
        POLICY,
        "a masked completion leaves the mean",
        "lengths.clamp(min=1) * len(lengths)",
        "lengths.clamp(min=1) * (lengths > 0).sum()",
    ),
    _of(
        POLICY,
        "a mean over the tokens that were sampled",
        "1.0 / (len(lengths) * max_completion_length)",
        "1.0 / float(lengths.sum())",
    ),
    _of(POLICY, "a prompt that counts by its completions", "* len(prompts))", "* len(lengths))"),
    _of(
        POLICY,
        "a sequence's ratio that grows with its length",
        "segments.means(log_ratios)",
        "segments.sums(log_ratios)",
    ),
    _of(POLICY, "a gradient through CISPO's weight", "ratios = ratios.detach()", "ratios = ratios * 1"),
    _of(
        RETURNS,
        "the smaller of the value's errors",
        "torch.maximum((values - returns)",
        "torch.minimum((values - returns)",
    ),
    _of(
        MASKS, "a completion without an advantage is dropped", "(advantages >= 0) | (drift", "(advantages > 0) | (drift"
    ),
    _of(
        MASKS,
        "a threshold that leaves out its own token",
        "return entropies >= torch.lerp",
        "return entropies > torch.lerp",
    ),
    _of(
        CORRECTIONS,
        "weights upside down",
        "_ratios(policy_logps - behaviour_logps",
        "_ratios(behaviour_logps - policy_logps",
    ),
    _of(CORRECTIONS, "weights without bounds", "return ratios.clamp(low, high)", "return ratios"),
    _of(CORRECTIONS, "no lower bound of a mask", "(ratios < low) | (ratios > high)", "(ratios > high)"),
    _of(PAIRS, "a margin that adds the reference", "(chosen - rejected) - (ref", "(chosen - rejected) + (ref"),
    _of(
        PAIRS,
        "a tie that prefers the second",
        "rewards_second > rewards_first, 1",
        "rewards_second >= rewards_first, 1",
    ),
    Mutation(
        "a divergence the wrong way round",
        "algorithms/divergence.py",
        "difference = ref_logps - logps",
        "difference = logps - ref_logps",
        "tests/algorithms/test_masks_and_divergence.py",
    ),
    Mutation(
        "means over completions by their number",
        "algorithms/segments.py",
        "/ self.lengths.clamp(min=1)",
        "/ max(len(self.lengths), 1)",
        "tests/algorithms/test_segments.py",
    ),
    _of(GENERATION, "a masked completion learns", "0 if out else s.length for", "s.length for"),
    _of(GENERATION, "one normalisation for all steps", "config.completions_per_step):", "len(advantaged)):"),
    # packing, attention and gradients
    Mutation(
        "a token predicted from itself",
        "training/batch/sequence.py",
        "len(self.prompt_ids) - 1 + ",
        "len(self.prompt_ids) - 2 + ",
        "tests/training/test_packing.py",
    ),
    Mutation(
        "branches that see each other",
        "training/batch/tree.py",
        "ends[along[same:last]] = first",
        "ends[along[same:last]] = first + 1",
        "tests/training/test_packing.py",
    ),
    Mutation(
        "packs beyond the budget",
        "training/batch/pack_plan.py",
        'fitting = max(1, int(np.searchsorted(sizes, budget, side="right")))',
        'fitting = max(1, int(np.searchsorted(sizes, 2 * budget, side="right")))',
        "tests/training/test_pack_plan.py",
    ),
    Mutation(
        "a step whose groups agree leaves no gradient",
        "training/step/update.py",
        "parameter.grad = torch.zeros_like(parameter)",
        "pass",
        "tests/training/test_trainer.py::test_a_step_whose_groups_agree_has_gradient_zero_and_not_none",
    ),
    Mutation(
        "a step beyond the limits of the gap",
        "training/generate/proofs.py",
        "raise self._explained(",
        "return self._explained(",
        "tests/training/test_trainer.py::test_raw_log_probs_at_another_temperature_are_refused",
    ),
    Mutation(
        "a push whose probe failed",
        "parity/proven_push.py",
        "check_probe(record, version)",
        "pass",
        "tests/training/test_trainer.py::test_a_step_on_stale_weights_is_refused_before_the_optimizer_moves",
    ),
]
