"""The faults of `scripts/mutations.py`: each breaks one place of the source, and names the tests that must fail.

A case has a text whose exact form matters. If the line changes, the case must change. The text must stand exactly
once in `src/lockstep`, or in the function that the case names. No case names a file of the source: a file can move.
The tests of a case have the smallest scope that can catch the fault. Tests that take long, need vLLM or wait for a
release are left out, except a test or a row of a matrix that the case names in full.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple


class Mutation(NamedTuple):
    """One fault.

    Attributes:
        about: the behaviour that the fault breaks.
        old, new: the text to replace, and its replacement.
        tests: arguments of pytest, separated by spaces, and in quotes if they have spaces; at least one test must fail.
        within: the function or class in which the text stands, if it stands in others too: `check_held`, or
            `Driver.close` where several classes have a `close`.
    """

    about: str
    old: str
    new: str
    tests: str
    within: str = ""

    @property
    def named(self) -> list[str]:
        """The tests, one by one."""
        return shlex.split(self.tests)


ON_A_GPU = "tests/pretend_cuda/test_runs.py"
COUNTS = f"{ON_A_GPU}::test_what_keeps_a_gpu_from_working_stays_below_what_is_asked"
ALONE = "tests/weights/test_adapters_alone.py"
AUDIT = "tests/extras/audit/test_audit.py"
EXPERTS = "tests/models/test_checkpoint_names.py"
ROUTER_CUTS = (
    "tests/learn/test_router_loss.py::test_the_cut_of_a_step_does_not_change_a_gradient_or_the_logged_loss"
)
SHARDS = "tests/shards/test_model.py"
ZERO = "tests/shards/test_zero_weights.py"
ZERO_SETTINGS = "tests/extras/deepspeed/test_zero_settings.py"
ADVANTAGES = "tests/algorithms/test_advantages.py"
CORRECTIONS = "tests/algorithms/test_corrections.py"
POLICY = "tests/algorithms/test_policy_loss.py"
MASKS = "tests/algorithms/test_masks_and_divergence.py"
RETURNS = "tests/algorithms/test_returns.py"
PAIRS = "tests/algorithms/test_preference_loss.py"
HELD = "tests/watch/test_held_weights.py"
GAP = "tests/watch/test_gap.py"
GIVEN_ROWS = "tests/watch/test_given_rows.py"
QUANTISED_GAP = "tests/extras/fp8/test_quantised_gap.py"
KILLER = "tests/test_kill_at_exit.py"
FILES = "tests/run/test_whole_files.py tests/run/test_checkpoints_and_directory.py"
LOCK = "tests/run/test_directory_lock.py"
RECEIPT = "tests/watch/test_handshake_and_receipt.py"
TOKENS = "tests/tokens/test_tokens.py"
SAMPLES = "tests/watch/test_canary_and_samples.py::test_equal_samples_against_all_odds_are_refused"
PAIRS_IN_A_GROUP = "tests/watch/test_canary_and_samples.py::test_pairs_of_equal_completions_are_refused"
BETS = "tests/watch/test_draws.py::test_a_bet_pays_one_on_average"
DRAWS = "tests/watch/test_draws.py"
ID_BETS = "tests/watch/test_id_bets.py"
ID_CLASSES = "tests/learn/test_id_classes.py"
BACKWARD = "tests/watch/test_model_gradient.py"
PARTS = "tests/watch/test_step_gradient.py"
WHOLE = "tests/watch/test_whole_completions.py"
FEW = "tests/watch/step/test_few_elements.py"
CUTS = "tests/learn/test_accounting.py::test_the_cut_of_a_step_does_not_change_a_gradient_before_or_after_the_policy_has_moved"  # noqa: E501
ASKED_AGAIN = "tests/run/test_asked_again.py"
DRAW_SUMS = "tests/learn/test_draw_sums.py"
ENDS = "tests/watch/test_ends.py"
ANSWERS = "tests/engines/test_answers.py"
KEPT_ROWS = "tests/engines/test_vllm_kept_ids.py::test_a_row_has_its_finite_ids_if_it_has_a_limit_and_does_not_exceed_it"  # noqa: E501
SAMPLING = "tests/engines/test_sampling_order.py"
WIRE = "tests/rollouts/test_wire.py"
CONVERSATION = "tests/rollouts/test_interruptions.py"
DRIVER = "tests/rollouts/test_driver.py"
BRANCHES = "tests/learn/test_branches.py"
FILTER_FIELDS = "tests/run/test_filter_fields.py"
ONE_PLACE = "tests/run/test_one_place_of_a_field.py"
LET_SLEEP = "tests/weights/test_let_sleep.py"
WORKER_START = "tests/engines/test_worker_start.py"
ENDS_SENT = (
    "tests/engines/test_vllm_requests.py::test_a_request_that_names_its_end_tokens_leaves_vllm_no_others"
)
ENGINE_CHOICE = "tests/run/test_engine_choice.py"
MEMORY = "tests/learn/test_memory.py"
ADAPTED_MODELS = "tests/models/test_adapted_models.py"
FAMILY_ATTENTION = "tests/learn/test_family_attention.py"
DIGESTS = "tests/engines/test_device_digest.py"
KEYED = "tests/weights/test_keyed_pushes.py"
PUSH = "tests/weights/test_push.py"
LIVE = "tests/weights/test_live.py"
CHANGES = "tests/weights/test_changes.py"
EXPLAINED = "tests/watch/test_decomposition.py::test_a_fault_of_the_"
PACKED = f"{EXPLAINED}packed_forward_is_not_blamed_on_the_engine[transformers-untied]"
OF_ENGINE = f"{EXPLAINED}engine_is_not_blamed_on_the_packed_forward[transformers-untied]"
TRANSFORMED = "tests/learn/test_transformed_logits.py"
REWARDS = "tests/rollouts/test_rewards.py"
GUARD = "tests/server/test_keys_guard_and_command.py::TestGuard"
GREETING = "tests/server/test_greeting.py"
COMMAND = "tests/server/test_keys_guard_and_command.py::TestCommand"
STRANGERS = "tests/weights/test_gloo_strangers.py"
MACHINE = "tests/server/test_machine.py"
KEYS = "tests/server/test_keys_guard_and_command.py::TestKeys"
SLOTS = "tests/weights/test_slots.py"
RECOVERY = "tests/run/test_recovery.py"
CHECKPOINTS = "tests/run/test_checkpoints_and_directory.py"
DAMAGED_RUNS = "tests/input/test_damaged_runs.py"
DAMAGED_RUN = f"{DAMAGED_RUNS}::test_a_damaged_run_is_one_line_or_the_same_run"
PROVEN_RESUME = "tests/run/test_proven_resume.py"
CODE_DIGEST = "tests/watch/test_code_digest.py"
MODEL_INPUTS = "tests/watch/test_model_inputs.py"
ADAPTER_FILES = "tests/models/test_adapter_files.py"
EARLY_ENDS = "tests/run/test_early_ends.py"
SCHEDULES = "tests/watch/step/test_schedules.py"
LOADED_FILES = "tests/models/test_one_loader.py"
PICTURE_FILES = (
    "tests/images/test_files_of_pictures.py::test_other_formats_are_refused_whatever_the_name_says"
)
PRIVATE = "tests/cli/test_private_caches.py"
LEARNED = "tests/watch/step/test_learned_tokens.py"
EVENTS = "tests/watch/test_events.py"
AHEAD = "tests/run/test_staleness_in_process.py"
SCORED_AGAIN = f"{AHEAD}::test_an_engine_that_scores_the_tokens_otherwise_now_is_seen"
COMPARED_AHEAD = (
    f"{AHEAD}::test_completions_of_other_prompts_are_seen_although_no_later_step_has_fresh_tokens"
)
FROZEN = "tests/watch/step/test_frozen_weights.py"
HOLDS = "tests/run/test_what_a_checkpoint_holds.py"
REFERENCE_FAULTS = "tests/faults/test_reference_faults.py"
SETTINGS = "tests/watch/test_user_settings.py"
KEPT_SETS = "tests/watch/test_kept_sets.py"
GROUPS_ASIDE = "tests/run/test_groups_aside.py"
NAMES = "tests/run/test_trl_names.py"
CHANGED = f"{NAMES}::test_numbers_of_the_loss_change_it_from_the_next_step_on_and_after_a_resume"
WEIGHED = f"{NAMES}::test_reward_weights_change_the_rewards_of_the_next_generation"
PROVEN_EVALUATION = "tests/run/test_proven_evaluation.py"
CHECKS = "tests/input/test_bad_words.py"
CALLED = "tests/input/test_bad_reward_files.py"
READING, PICTURE_PACKS = "tests/images/test_reading_pictures.py", "tests/images/test_packs_with_pictures.py"
PICTURE_URLS, AGENT_PICTURES = (
    "tests/images/test_picture_urls.py",
    "tests/images/test_agents_with_pictures.py",
)
PICTURE_RUNS = "tests/images/test_pictures_in_training.py"
PICTURE_TURNS = "tests/images/test_pictures_in_turns.py"
VISION_TEMPLATES = "tests/tokens/test_vision_templates.py"
PICTURE_LIMITS = "tests/images/test_limits_of_pictures.py"
SENT_PICTURES = "tests/images/test_sending_pictures.py"
KEPT_ROLLOUTS = "tests/run/test_rollout_files.py"
RUN_FILES = "tests/run/test_run_files.py"
PAGE, SAFE = "tests/report/test_page.py", "tests/report/test_page.py::test_hostile_text_stays_text_everywhere"
GENERATION = "tests/run/test_prompts_and_generation.py"
LOGPS = "tests/learn/test_token_logps.py"
FILTERED_SCORES = "tests/learn/test_filtered_scores.py"
KEPT_LOGPS = "tests/learn/test_kept_logps.py"
DISTRIBUTIONS = "tests/watch/test_distributions.py"
GRAMMARS = "tests/engines/test_grammars.py"
TOOLS = "tests/rollouts/test_tools.py"
ENVIRONMENTS = "tests/rollouts/test_environments.py"
FUNCTION = "tests/rollouts/test_rollout_func.py"
EXTENSION_TESTS = "tests/tokens/test_extension.py"
TOOL_CALLS = "tests/tokens/test_tool_calls.py"
OPTIMIZER_STEPS = "tests/watch/step/test_optimizer_steps.py"
OPTIMIZER_SETTINGS = "tests/watch/step/test_optimizer_settings.py"

MUTATIONS = [
    Mutation(
        "an adapter alone is sent with its scaling",
        "torch.float32)) * scaling).to(self._dtype)",
        "torch.float32))).to(self._dtype)",
        f"{ALONE}::test_base_and_adapter_together_are_what_a_merged_push_sends",
    ),
    Mutation(
        "an adapter that vLLM's LoRA cannot compute is refused",
        "        if is_dora(layer):",
        "        if False:",
        f"{ALONE}::test_what_vllms_lora_cannot_hold_is_refused_in_one_sentence",
    ),
    Mutation(
        "an adapter is compared with what the engine holds",
        "if sent.get(spec.name) != spec]",
        "if sent.get(spec.name) is None]",
        f"{ALONE}::test_an_adapter_that_is_held_otherwise_than_it_was_sent_is_named",
        within="check_held",
    ),
    Mutation(
        "a sent adapter is compared with the live layers",
        "        _check_sent([(layer",
        "        len([(layer",
        f"{ALONE}::test_what_is_sent_is_compared_with_the_layers_themselves",
    ),
    Mutation(
        "the adapter probe compares what the adapter adds",
        "(answer[2] - added).abs()",
        "(answer[2] - answer[2]).abs()",
        f"{ALONE}::test_the_adapter_probe_passes_rounding_and_finds_a_thousandth",
    ),
    Mutation(
        "what an extra proves of the modules after a push is left out",
        "self.extension.prove_modules(seed, version, every=every_module)",
        "pass",
        f"{ALONE}::test_a_young_adapter_that_is_not_applied_as_it_should_is_seen_by_the_adapter_probe[0.99-0.05]",
    ),
    Mutation(
        "what an extra proves before the canary is left out",
        "self.extension.prove_canary(version)",
        "pass",
        "tests/extras/fp8/test_quantised_faults.py::test_every_fault_of_weights_in_8_bits_is_caught",
    ),
    Mutation(
        "torchvision of another build than torch is not hidden",
        '_build(name).startswith("cu")',
        "False",
        "tests/cli/test_install.py::test_only_packages_that_were_built_for_another_torch_are_hidden",
    ),
    Mutation(
        "any file of the packaged model's name is taken",
        "if hashlib.sha256(content).hexdigest() != DIGEST:",
        "if False:",
        "tests/cli/test_install.py::test_another_file_of_the_same_name_is_refused",
    ),
    Mutation(
        "a user's own handler of logs is joined by ours",
        "if not logger.handlers and logger.level == logging.NOTSET:",
        "if True:",
        "tests/cli/test_terminal_log.py::test_a_program_that_handles_logs_itself_gets_no_lines_from_us",
    ),
    Mutation(
        "a message about settings mixes with the config that --dry_run prints",
        "sys.stderr if record.name.startswith(_ABOUT_SETTINGS) else sys.stdout",
        "sys.stdout",
        "tests/cli/test_terminal_log.py::test_messages_are_lines_on_standard_output_and_those_about_settings_on_standard_error",
    ),
    Mutation(
        "compare lists every setting",
        "if len(set(cells)) > 1]",
        "]",
        "tests/cli/test_past_runs.py::test_compare_lists_only_the_settings_that_differ",
    ),
    Mutation(
        "each curve of a comparison has a scale of its own",
        "low, high = min(every), max(every)",
        "low, high = None, None",
        "tests/cli/test_past_runs.py::test_compare_shows_results_and_curves_on_one_scale",
    ),
    Mutation(
        "merge writes the base model without the adapter",
        "model.merge_and_unload()",
        "model.unload()",
        "tests/cli/test_past_runs.py::test_merge_writes_the_model_that_the_adapter_makes",
    ),
    # tokens
    Mutation(
        "a conversation without the generation prompt",
        "add_generation_prompt=not continues",
        "add_generation_prompt=False",
        TOKENS,
    ),
    Mutation(
        "a last message that is not continued",
        "continue_final_message=continues",
        "continue_final_message=False",
        TOKENS,
    ),
    Mutation(
        "a sampled end token that is inserted again",
        "Insert(suffix[closed:])",
        "Insert(suffix)",
        f"{EXTENSION_TESTS}::test_the_end_token_is_inserted_exactly_when_it_was_not_sampled",
    ),
    Mutation(
        "another end token that stays in the next prompt",
        "joined([context_ids, turn_ids[:-1], suffix])",
        "joined([context_ids, turn_ids, suffix])",
        f"{EXTENSION_TESTS}::test_an_end_token_that_the_template_does_not_write_is_left_out_of_a_branch",
    ),
    Mutation(
        "thinking that the template drops is kept",
        "if not self._renders_turn(text[len(before) : turn_end], turn):",
        "if False:",
        f"{EXTENSION_TESTS}::test_a_branch_has_the_templates_ids_without_the_earlier_thinking",
    ),
    Mutation(
        "earlier messages that change are not seen",
        "if not text.startswith(before):",
        "if False:",
        f"{EXTENSION_TESTS}::test_thinking_of_an_earlier_turn_that_is_dropped_is_named_as_the_reason",
    ),
    Mutation(
        "a turn is closed at an end token inside it",
        "common_end = len(text) - shared_start(text[::-1], changed[::-1])",
        "common_end = 0",
        f"{EXTENSION_TESTS}::test_the_end_token_is_inserted_exactly_when_it_was_not_sampled",
    ),
    Mutation(
        "the assistant's last message is lost",
        '(last.get("content") or "") + turn["content"]',
        'turn["content"]',
        f"{EXTENSION_TESTS}::test_a_turn_continues_the_assistants_last_message",
    ),
    Mutation(
        "text that looks like a control token becomes one",
        "if _GUARD in text:",
        "if False:",
        f"{EXTENSION_TESTS}::test_text_that_looks_like_a_control_token_stays_text_in_every_kind_of_message",
    ),
    Mutation(
        "a stretch that is other text when it is encoded alone",
        "if not same or np.isin",
        "if np.isin",
        f"{EXTENSION_TESTS}::test_a_tokenizer_that_cannot_keep_text_as_text_refuses_it_and_extends_the_rest",
    ),
    Mutation(
        "text of the assistant becomes an end token",
        "self._special_pattern if trusted",
        "_pattern_of(()) if trusted",
        f"{EXTENSION_TESTS}::test_text_that_looks_like_a_control_token_stays_text_in_every_kind_of_message",
    ),
    Mutation(
        "more calls than the template shows",
        "calls = tuple(replace(c, id=c.id or _own_id(turn_ids, n)) for n, c in enumerate(calls))",
        "calls = tuple(replace(c, id=c.id or _own_id(turn_ids, n)) for n, c in enumerate(found.calls))",
        TOOL_CALLS,
    ),
    Mutation(
        "a call within the thinking is made", "(text[begins:], len(text))", "(text[begins:], 0)", TOOL_CALLS
    ),
    Mutation(
        "a marker that is not there is found as text",
        "characters.get(found[0], _ABSENT)",
        "characters.get(found[0], found[0])",
        TOOL_CALLS,
    ),
    Mutation(
        "the id that a model gives its call is lost",
        '_checked(found["name"], value, found["id"] or None)',
        '_checked(found["name"], value)',
        TOOL_CALLS,
    ),
    Mutation(
        "text after the arguments is swallowed",
        "if not text.startswith(closing, end):",
        "if False:",
        TOOL_CALLS,
    ),
    Mutation("a control token within the arguments", "if _SURROGATE.search(said):", "if False:", TOOL_CALLS),
    Mutation(
        "a value that the schema calls text becomes a number",
        'if schema.get("type") == "string":',
        "if False:",
        TOOL_CALLS,
    ),
    Mutation(
        "another prompt of any length passes",
        "if not np.array_equal(answer.prompt_ids, request.prompt_ids):",
        "if False:",
        ANSWERS,
    ),
    # log-probs
    Mutation(
        "log-probs at temperature 1",
        "scaled = wide if temperature == 1.0 else divided(temperature)",
        "scaled = wide",
        LOGPS,
    ),
    Mutation("a gradient that forgets the temperature", "gradient /= ctx.temperature", "pass", LOGPS),
    Mutation(
        "a gradient without the softmax",
        "gradient = probabilities * -by_row[:, None]",
        "gradient = probabilities * 0",
        LOGPS,
    ),
    Mutation("an entropy without a gradient", "by_row += of_entropy * entropy", "pass", LOGPS),
    # filters in the trainer
    Mutation(
        "a gradient that forgets the penalties",
        "gradient[ctx.edits.rows, ctx.edits.ids] *= ctx.slopes",
        "pass",
        FILTERED_SCORES,
    ),
    Mutation(
        "a banned token has a finite log-prob", "chosen.masked_fill_(is_banned", "(is_banned", FILTERED_SCORES
    ),
    Mutation(
        "the repetition penalty counts no prompt",
        "seen = (counts > 0) | np.isin(ids, self._prompt)",
        "seen = counts > 0",
        FILTERED_SCORES,
    ),
    Mutation(
        "penalties count the token itself",
        "self._places[positions])",
        "self._places[positions] + 1)",
        FILTERED_SCORES,
    ),
    Mutation(
        "inserted ids take no place",
        "places_of(sampled, len(completion_ids))",
        "np.arange(len(self._sampled))",
        FILTERED_SCORES,
    ),
    Mutation("penalties before the bias", "moved = logits + self.bias", "moved = logits", FILTERED_SCORES),
    Mutation(
        "the bans of a grammar are forgotten",
        "if self.allowed_bits is not None:",
        "if False:",
        FILTERED_SCORES,
    ),
    Mutation(
        "a bad word one token late", "len(prefix)\n\n    def", "len(prefix) + 1\n\n    def", FILTERED_SCORES
    ),
    Mutation("an end before the minimum length", "if len(early):", "if False:", FILTERED_SCORES),
    Mutation(
        "rules that count inserted ids", "if inserted and (names", "if False and (names", FILTERED_SCORES
    ),
    Mutation(
        "two prompts share the counts of a node",
        "np.stack([nodes, prompts])",
        "np.stack([nodes, nodes])",
        FILTERED_SCORES,
    ),
    # The property test would shrink for minutes; this test finds both at once.
    Mutation(
        "penalties are forgotten among kept ids",
        "if rules.moves_logits:",
        "if False:",
        f"{FILTERED_SCORES}::test_the_repetition_penalty_counts_inserted_ids_like_the_prompt",
    ),
    Mutation(
        "the kept mass is that of all ids",
        "(kept.logsumexp(0) - shaped[0].logsumexp(0))",
        "(kept.logsumexp(0) * 0)",
        f"{FILTERED_SCORES}::test_the_kept_mass_is_what_the_policy_gives_to_the_kept_ids_before_the_filters",
    ),
    Mutation("a token outside its set", "or not found.all():", "or False:", FILTERED_SCORES),
    Mutation(
        "a head with a hook is taken for plain",
        "nn.Parameter and not hooks",
        "nn.Parameter",
        f"{KEPT_LOGPS}::test_under_autocast_the_head_rounds_as_it_does_without_a_filter",
    ),
    Mutation(
        "gradients of the last part alone",
        "total[self.needed] += part",
        "total[self.needed] = part",
        KEPT_LOGPS,
    ),
    Mutation(
        "an entropy without a gradient among kept ids", "by_token += of_entropy * entropy", "pass", KEPT_LOGPS
    ),
    Mutation(
        "a gradient without the temperature",
        "return gradient / ctx.temperature,",
        "return gradient,",
        KEPT_LOGPS,
    ),
    Mutation("an id that a filter excludes", "if logits[lowest] < stage.possible:", "if False:", KEPT_SETS),
    Mutation("a set that was cut", "if of_missing >= stages[-1].sure:", "if False:", KEPT_SETS),
    Mutation("any rounding in the mean", "if self.mean_rounding > largest:", "if False:", KEPT_SETS),
    Mutation("sets of older weights", "before_steps and fresh))", "before_steps))", KEPT_SETS),
    Mutation("sets of a later step", "before_steps and fresh))", "fresh))", KEPT_SETS),
    Mutation(
        "groups without a gradient that all go through the model",
        "sequence.but(aside=True)",
        "sequence",
        GROUPS_ASIDE,
    ),
    Mutation(
        "tokens that are left out of a count",
        "c for c in self.completions if str(c.key) in names",
        "c for c in ()",
        GROUPS_ASIDE,
    ),
    Mutation(
        "rollouts that are drawn of every generation",
        "if np.random.default_rng((seed, number // of, 1))",
        "if 0 * np.random.default_rng(0)",
        GROUPS_ASIDE,
    ),
    Mutation(
        "bets where rewards decide",
        "drawn = [s for s in sequences if s.picked]",
        "drawn = [*sequences]",
        GROUPS_ASIDE,
    ),
    Mutation(
        "means of the verified tokens alone",
        "stands_for = _share(still, verified)",
        "stands_for = 1.0",
        GROUPS_ASIDE,
    ),
    Mutation(
        "top-p without rounding", "if above < sure else -math.inf", "if False else -math.inf", KEPT_SETS
    ),
    Mutation(
        "top-k without rounding", "highest + apart, lowest - apart", "highest + apart, lowest", KEPT_SETS
    ),
    Mutation(
        "filters are applied to kept ids again",
        "if kept is None:",
        "if True:",
        DISTRIBUTIONS,
        within="logprobs",
    ),
    Mutation("a token against the grammar", "if len(outside):", "if False:", GRAMMARS, within="masks"),
    # engine and server protocol
    Mutation(
        "the second answer to a request replaces the first", "if answer.key in found:", "if False:", ANSWERS
    ),
    Mutation(
        "an answer that was not asked for is taken", "if answer.key not in asked:", "if False:", ANSWERS
    ),
    Mutation("requests may stay unanswered", "if missing:", "if False:", ANSWERS, within="check_answers"),
    Mutation(
        "the first of two keys counts",
        "if len(found) == 1 else",
        "if found else",
        GUARD,
        within="_only_header",
    ),
    Mutation("any scheme shows a key", 'scheme.lower() == "bearer" and ', "", GUARD),
    Mutation("a trainer needs no proof", "if is_trainer and self._calls", "if self._calls", GREETING),
    Mutation("a call comes twice", "and self._calls[nonce].take(int(call)) else None", "else None", GREETING),
    Mutation(
        "the body of a call is not compared",
        "if body is not None and calls.body_mark(body) == mark:",
        "if body is not None:",
        GREETING,
    ),
    Mutation(
        "a program without the key is greeted",
        "if not hmac.compare_digest(server_proof(key, nonce, server_nonce).encode(), proof.encode()):",
        "if False:",
        GREETING,
    ),
    Mutation(
        "answers need no proof",
        "if session.is_server(call, answer.headers.get(PROOF_HEADER)):",
        "if True:",
        GREETING,
    ),
    Mutation("vLLM's own sockets follow the host", "**inside, ", "", COMMAND),
    Mutation(
        "the server imports from the current directory",
        '"VLLM_SERVER_DEV_MODE": "1", "PYTHONSAFEPATH": "1"',
        '"VLLM_SERVER_DEV_MODE": "1"',
        COMMAND,
    ),
    Mutation(
        "a second model is taken by a server",
        "if found is not None:",
        "if found == '':",
        "tests/server/test_keys_guard_and_command.py::TestCommand",
        within="check_no_second_model",
    ),
    Mutation(
        "a failed check of verify ends the others",
        "            recover(stage)\n    return rows",
        "            recover(stage)\n            break\n    return rows",
        "tests/extras/verify/test_verify_command.py::test_a_failed_check_does_not_end_the_others",
    ),
    Mutation(
        "calls that came after the question excuse a silent engine",
        "for call in self._before)",
        "for call in self._open)",
        "tests/server/test_keys_guard_and_command.py::TestSilence",
    ),
    Mutation(
        "the key calls every method of vLLM's workers",
        "method.startswith(_OURS)",
        "method",
        "tests/server/test_keys_guard_and_command.py::TestGuard",
    ),
    Mutation(
        "a program without the key may send a gigabyte",
        "return LARGEST if is_server else _LARGEST_UNPROVEN",
        "return LARGEST",
        "tests/server/test_greeting.py",
    ),
    Mutation(
        "idle clients of the gateway keep their connections",
        "if len(self.connections) > self._idle.most:",
        "if False:",
        "tests/extras/agents/test_web.py::TestConnections",
    ),
    Mutation(
        "a client that reads no answers keeps its connection",
        "self._unread = self.loop.call_later(HEAD_LIMIT, self._close)",
        "pass",
        "tests/extras/agents/test_web.py::TestConnections",
    ),
    Mutation(
        "the steps of a stream decode every format",
        "made._ex_iterable = _with_checked(data._ex_iterable)",
        "pass",
        "tests/images/test_files_of_pictures.py",
    ),
    Mutation(
        "odd messages of an agent end the run",
        'raise unreadable("messages", error) from error',
        "raise",
        "tests/extras/agents/test_odd_requests.py",
    ),
    Mutation(
        "files of living engines are removed",
        "if name not in used and (found",
        "if (found",
        "tests/engines/test_leftovers.py",
    ),
    Mutation(
        "environments get the server's key",
        "for name, value in whole.items() if name != KEY_VARIABLE",
        "for name, value in whole.items()",
        "tests/server/test_child_environment.py",
    ),
    Mutation(
        "a server outlives its supervisor",
        "        kill_at_exit.add(self._child.pid)",
        "        pass",
        MACHINE,
    ),
    Mutation("a server's engine outlives it", "kill_group(child.pid)", "pass", MACHINE),
    Mutation(
        "every program gets weights",
        "if not hmac.compare_digest(bytes(",
        "if False and not bool(bytes(",
        STRANGERS,
    ),
    Mutation(
        "addresses need no signature",
        "if not hmac.compare_digest(signature, ",
        "if False and not bool(signature and ",
        STRANGERS,
    ),
    Mutation(
        "gloo's store listens on every address",
        "listener.bind((host, port))",
        'listener.bind(("0.0.0.0", port))',
        STRANGERS,
    ),
    Mutation(
        "a column with one picture keeps its URL",
        "found[name] = own(row[name])",
        "found[name] = row[name]",
        "tests/images/test_reading_pictures.py",
    ),
    Mutation(
        "workers wait on when another server has died",
        'store.set(_PUSH_FAILED, "")',
        "pass",
        "tests/weights/test_transports.py",
    ),
    Mutation(
        "the trainer waits for a dead server's address",
        "while not wait([done], CHECK_EVERY).done:\n                meeting.check()",
        "while not wait([done], CHECK_EVERY).done:\n                pass",
        "tests/weights/test_transports.py",
    ),
    Mutation(
        "a rank without the secret gets weights over NCCL",
        "if not hmac.compare_digest(_proof(",
        "if False and not bool(_proof(",
        "tests/weights/test_nccl.py",
    ),
    Mutation(
        "an operation over NCCL waits for a dead rank",
        "                self._check()\n",
        "                pass\n",
        "tests/weights/test_transports.py",
        within="DeviceChannel._wait",
    ),
    Mutation(
        "every push over NCCL makes a group",
        "self._name == name and not",
        "self._name != name and not",
        "tests/weights/test_nccl.py",
    ),
    Mutation(
        "a worker uses its group although another one has none",
        "return signed.get(_OF_ALL)",
        "return own",
        "tests/weights/test_nccl.py",
    ),
    Mutation(
        "a group of NCCL stays after a push that failed",
        "        if kind is not None:\n            self.give_up()\n",
        "        pass\n",
        "tests/weights/test_nccl.py",
    ),
    Mutation(
        "servers in another order keep their ranks in the group",
        "if members != self._members:",
        "if not self._members:",
        "tests/weights/test_nccl.py",
    ),
    Mutation(
        "a handle of another GPU is mapped (on the pretend GPU)",
        "if found.gpu != identity_of(device):",
        "if False:",
        "tests/pretend_cuda/test_runs.py::test_a_handle_with_a_wrong_field_is_refused_before_it_is_mapped",
    ),
    Mutation(
        "PyTorch writes to a counter that a handle names (on the pretend GPU)",
        " or not 0 <= found.counter < COUNTERS",
        "",
        "tests/pretend_cuda/test_runs.py::test_a_handle_with_a_wrong_field_is_refused_before_it_is_mapped",
    ),
    Mutation(
        "a buffer may end beyond the GPU's memory (on the pretend GPU)",
        "not 0 <= found.offset <= whole - found.size",
        "not 0 <= found.offset <= whole",
        "tests/pretend_cuda/test_runs.py::test_a_handle_with_a_wrong_field_is_refused_before_it_is_mapped",
    ),
    Mutation(
        "true is a size (on the pretend GPU)",
        "type(f) is not kind for",
        "not isinstance(f, kind) for",
        "tests/pretend_cuda/test_runs.py::test_a_handle_with_a_wrong_field_is_refused_before_it_is_mapped",
    ),
    Mutation(
        "servers are told of a chunk that is still copied (on the pretend GPU)",
        "        _finish_copies(self._memory)\n",
        "",
        "tests/pretend_cuda/test_runs.py::test_over_cuda_ipc_each_chunk_is_complete_before_the_other_process_is_told",
    ),
    Mutation(
        "the trainer overwrites a chunk that is still copied (on the pretend GPU)",
        "            _finish_copies(slots)\n",
        "",
        "tests/pretend_cuda/test_runs.py::test_over_cuda_ipc_each_chunk_is_complete_before_the_other_process_is_told",
    ),
    Mutation(
        "memory of expandable segments is sent (on the pretend GPU)",
        "    if memory[: len(_KIND)] != _KIND:\n        raise NoRoom(",
        "    if False:\n        raise NoRoom(",
        "tests/pretend_cuda/test_runs.py::test_without_cuda_ipc_auto_goes_through_main_memory_with_one_line_and_the_named_transport_is_refused",
    ),
    Mutation(
        "each failed push takes another buffer of the GPU",
        "if self.buffer is None or self.buffer.numel() < size:",
        "if True:",
        "tests/weights/test_transports.py::test_cuda_ipc_has_one_slot_and_the_same_buffer_after_a_failure",
    ),
    Mutation(
        "weights for CUDA IPC are copied to main memory (on the pretend GPU)",
        "_name, _to_host = NAME, False",
        "_name, _to_host = NAME, True",
        "tests/pretend_cuda/test_runs.py::test_no_bytes_of_weights_cross_the_host_for_a_push_over_cuda_ipc",
    ),
    Mutation(
        "two processes on one GPU",
        "            if gpu in users:",
        "            if False:",
        "tests/weights/test_nccl.py",
    ),
    Mutation(
        "NCCL listens on any interface",
        '_variables({_INTERFACE: "=lo"})',
        "nullcontext()",
        "tests/weights/test_nccl.py",
    ),
    Mutation("machines with one home share a port's key", "{socket.gethostname()}-port", "port", KEYS),
    Mutation(
        "two servers on one port",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        MACHINE,
        within="reserved_port",
    ),
    Mutation(
        "shared memory that is too small ends the run",
        "except NoRoom as error:",
        "except KeyError as error:",
        "tests/weights/test_transports.py",
        within="send",
    ),
    # kept ids
    Mutation(
        "kept ids are taken unchecked",
        "check_kept_ids(request.sampling, answer, vocab_size)",
        "pass",
        ANSWERS,
    ),
    Mutation(
        "a filter without kept ids",
        "if sampling.is_filtered:\n            raise",
        "if False:\n            raise",
        ANSWERS,
    ),
    Mutation("kept ids without a filter", "if not sampling.is_filtered:", "if False:", ANSWERS),
    Mutation("any number of sets", "if len(kept) != len(answer.sampled_places):", "if False:", ANSWERS),
    Mutation(
        "sets of any size", "if not sizes.all() or sizes.max() > sampling.max_kept_ids:", "if False:", ANSWERS
    ),
    Mutation("a set of another token", "if len(outside):", "if False:", ANSWERS, within="_check_ids"),
    Mutation(
        "the sets of inserted ids are counted",
        "chosen(answer.token_ids, answer.sampled)",
        "answer.token_ids",
        ANSWERS,
    ),
    Mutation("ids in any order", "if not is_ascending.all():", "if False:", ANSWERS),
    Mutation(
        "a first id below the last one of the set before",
        "is_ascending[kept.ends[:-1] - 1] = True",
        "pass",
        ANSWERS,
    ),
    Mutation(
        "a top-k that the engine ignored",
        "if sampling.top_k and sizes.max() > sampling.top_k + max(_TIES, _SHARE_OF_TIES * sampling.top_k):",
        "if False:",
        ANSWERS,
    ),
    Mutation("a set cut short", "(np.abs(logprobs[sizes == 1]) > _ROUNDING).any()", "False", ANSWERS),
    Mutation(
        "a min-p that the engine ignored",
        "logprobs < np.log(sampling.min_p / sizes) - _ROUNDING",
        "logprobs > 1",
        ANSWERS,
    ),
    Mutation("the sets of another request", "rows = asked[rows]", "pass", KEPT_ROWS),
    Mutation("sets above the limit", "if too_large.any():", "if False:", KEPT_ROWS),
    Mutation("kept ids of the completion before", "end += count or 0", "end += 0", WIRE),
    Mutation(
        "the sets of the first turn alone", "joined_kept_ids(kept) if kept", "kept[0] if kept", CONVERSATION
    ),
    Mutation("more sets than tokens", "answer.kept_ids.part(0, count)", "answer.kept_ids", CONVERSATION),
    # the rollout loop
    Mutation(
        "inserted ids marked as sampled",
        "np.repeat(is_turn, [*map(len, ids)])",
        "np.repeat(True, sum(map(len, ids)))",
        DRIVER,
    ),
    Mutation(
        "no rollout is compared with the answers to it",
        "record.check(rollout)",
        "pass",
        "tests/rollouts/test_record.py::test_a_rollout_that_differs_from_its_answers_is_refused",
    ),
    Mutation("one seed for all calls of a rollout", 'derived_seed(seed, "going on")', "seed", DRIVER),
    Mutation(
        "a branch that overflows the context",
        ", self._conversation.context - len(self.prompt_ids) - self._added)",
        ", self._conversation.budget)",
        DRIVER,
    ),
    Mutation("inserted ids that cost no budget", "self._conversation.spend(len(inserted))", "pass", DRIVER),
    Mutation("a rollout that ran out and says stop", "if self.branches[-1].ran_out:", "if False:", DRIVER),
    Mutation("a stop string over two turns", 'or part.finish_reason == "stop":', "or True:", DRIVER),
    Mutation("penalties that start again", "if number:\n", "if False:\n", DRIVER),
    Mutation(
        "an error that names no rollout",
        'raise LockstepError(\n            f"the program of',
        'raise ValueError(\n            f"the program of',
        DRIVER,
    ),
    Mutation("a program that cancels itself in silence", "and not task.cancelling():", "and False:", DRIVER),
    Mutation(
        "programs that go on after an error",
        "    inbox.stop(error)\n        raise\n    finally",
        "    raise\n    finally",
        DRIVER,
    ),
    Mutation("a driver that leaves its thread", "self.loop.close()", "pass", DRIVER, within="Driver.close"),
    Mutation(
        "tokens of other weights",
        "if (completion.weight_versions != version).any():",
        "if False:",
        "tests/rollouts/test_driver.py",
    ),
    Mutation(
        "answers without checks", "check_answer(request, completion, versions, vocab_size)", "pass", DRIVER
    ),
    Mutation("a late answer to a dropped request", "if key in self._given_up:", "if False:", DRIVER),
    Mutation(
        "a branch with a weight of its own",
        "weight=whole.weight,",
        "weight=whole.weight / len(branches),",
        BRANCHES,
    ),
    Mutation(
        "branches in several packs",
        "whole.unit if whole.unit is not None else whole.name",
        "whole.unit",
        BRANCHES,
    ),
    Mutation(
        "the values of the first branch", "parts[i] for field", "parts[0][: b.length] for field", BRANCHES
    ),
    Mutation(
        "branches that are not proven",
        "for completion in rollout.branches]",
        "for completion in rollout.branches[:1]]",
        BRANCHES,
        within="branches_of",
    ),
    Mutation(
        "a branch that is a rollout of its own",
        "str(rollout.key) if len(rollout.branches) > 1 else None",
        "None",
        BRANCHES,
    ),
    Mutation(
        "the prompt of another branch", "next(own_prompts) if has_prompt else prompt.ids", "prompt.ids", WIRE
    ),
    Mutation(
        "one ratio per branch",
        "[sum(s.length for s in own) for own in rollouts_of(self.sequences)]",
        "[s.length for s in self.sequences]",
        "tests/learn/test_branches.py",
    ),
    Mutation(
        "the reward of a rollout without tokens",
        "(lengths.cumsum(0) - 1)[written]] += rewards.nan_to_num(0.0)[written]",
        "lengths.cumsum(0) - 1] += rewards.nan_to_num(0.0)",
        "tests/learn/test_branches.py",
    ),
    # the sampling distribution
    Mutation(
        "a bad word whose first token is banned",
        "banned.append(word[-1])",
        "banned.append(word[0])",
        SAMPLING,
    ),
    Mutation(
        "a minimum length without end",
        "if len(output_ids) < sampling.min_tokens:",
        "if sampling.min_tokens:",
        SAMPLING,
    ),
    Mutation("a grammar that leaves nothing", "if with_grammar and bool", "if False and bool", SAMPLING),
    Mutation(
        "penalties before the bias", "if sampling.logit_bias:", "if False:", SAMPLING, within="shaped_logits"
    ),
    Mutation(
        "penalties that count the prompt",
        "output = torch.tensor([*output_ids]",
        "output = torch.tensor([*prompt_ids, *output_ids]",
        SAMPLING,
    ),
    Mutation(
        "a repetition penalty of the completion alone",
        "[[*prompt_ids, *output_ids]]",
        "[[*output_ids]]",
        SAMPLING,
    ),
    Mutation(
        "settings that count the tokens of one call, in a run with tools",
        "if names := self._counting_fields:",
        "if names := []:",
        "tests/run/test_tools_in_training.py::test_settings_that_would_start_again_with_each_turn_are_refused_at_the_start",
    ),
    Mutation("unknown keys are ignored", "if name not in _KWARGS:", "if False:", FILTER_FIELDS),
    Mutation("generation_kwargs win silently", "not in (defaults[name], value)", "is None", FILTER_FIELDS),
    Mutation(
        "bad words at the beginning of a text alone",
        "if len(spaced) == len(plain)",
        "if False and len(spaced) == len(plain)",
        FILTER_FIELDS,
    ),
    Mutation(
        "an engine that cannot report kept ids",
        "if expected.sampling is not None and expected.sampling.is_filtered:",
        "if False:",
        RECEIPT,
    ),
    Mutation(
        "another library of grammars",
        "if expected.sampling is not None and expected.sampling.grammar is not None:",
        "if False:",
        RECEIPT,
    ),
    Mutation(
        "a websocket needs no key",
        'scope["type"] == "lifespan"',
        'scope["type"] in ("lifespan", "websocket")',
        GUARD,
    ),
    Mutation(
        "a key file that others can read",
        "if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):",
        "if False:",
        KEYS,
    ),
    Mutation("a key file of another user", "if found.st_uid != os.geteuid():", "if False:", KEYS),
    Mutation("a short key", "len(key) < _SHORTEST or ", "", KEYS),
    # weights
    Mutation(
        "vLLM's own end tokens end a completion too",
        '"ignore_eos": True',
        '"ignore_eos": False',
        ENDS_SENT,
        within="_optional_fields",
    ),
    Mutation(
        "another end token in the directory of the engine",
        "if ends and (other_ends",
        "if False and (other_ends",
        ENGINE_CHOICE,
    ),
    Mutation(
        "another tokenizer in the directory of the engine",
        "if texts and (other",
        "if False and (other",
        ENGINE_CHOICE,
    ),
    Mutation("requests without end tokens", "end_ids=tuple(end_ids),", "end_ids=(),", FILTER_FIELDS),
    Mutation("moments are counted of every tensor", "total += count * sum(", "total += sum(", MEMORY),
    Mutation("a shard is rounded up", "math.ceil(n / ranks)", "n // ranks", MEMORY),
    Mutation(
        "swap and mapped files are no reason to refuse a run",
        "memory.exact(mapped=False) > room.size + room.beyond:",
        "memory.exact() > room.size:",
        MEMORY,
    ),
    Mutation("no gradients exist while the engine samples", "if p.when != other", "if other", MEMORY),
    Mutation(
        "embeddings keep 32-bit moments",
        'arguments.get("optim_bits") == 8',
        'arguments.get("optim_bits") == 9',
        MEMORY,
    ),
    Mutation(
        "each product has a copy of its input under autocast",
        "copies = 5 if casts else 2",
        "copies = 2",
        MEMORY,
    ),
    Mutation(
        "a run that cannot fit is refused before its model is loaded",
        'self.ranks.on_owner("memory", lambda: check_memory(args, models))',
        "del models",
        MEMORY,
    ),
    Mutation(
        "two trained parameters in one memory",
        "if earlier := int(place.max()):",
        "if earlier := 0:",
        ADAPTED_MODELS,
    ),
    Mutation(
        "sequences on both sides of longrope's border",
        "and longest > border:",
        "and longest > 2 * border:",
        FAMILY_ATTENTION,
    ),
    Mutation(
        "the capacity of vLLM is not its border",
        "check_positions(config, settings.max_model_len,",
        "check_positions(config, min_model_len,",
        FAMILY_ATTENTION,
    ),
    Mutation("a tensor of another shape or dtype", "sent[n][:3] != arrived[n][:3]", "False", PUSH),
    Mutation(
        "bytes that changed on the way", "if sent[name].digest != arrived[name].digest", "if False", PUSH
    ),
    Mutation("an engine parameter that got nothing", "if loaded.untouched:", "if False:", PUSH),
    Mutation("a weight for which the engine has no place", "if loaded.unstored:", "if False:", PUSH),
    Mutation(
        "every tensor counts as stored",
        "set[str] = set()",
        "set[str] = {name for name, _ in arrived}",
        PUSH,
        within="StoredNames.__init__",
    ),
    Mutation(
        "caches of older weights",
        "if not engine.reset_caches():",
        "if False and not engine.reset_caches():",
        PUSH,
        within="push_weights",
    ),
    Mutation(
        "a slot that is filled while it is read",
        "> number - self._slots, has_left",
        "> number - SLOTS - 1, has_left",
        SLOTS,
    ),
    Mutation("a push that ends before it is taken", "if self.fewest_loaded() != chunks:", "if False:", SLOTS),
    Mutation(
        "a fault of the packed forward",
        "if packed is not None and _only_packed(",
        "if False and _only_packed(",
        PACKED,
    ),
    Mutation("a fault of the engine", "_EXPLAINS * packed.max_abs", "1e9", OF_ENGINE),
    Mutation(
        "a model that scales or caps its logits",
        "return transformed_logits(self.config, logits) if changes_logits(self.config) else logits",
        "return logits",
        TRANSFORMED,
    ),
    Mutation(
        "the same among kept ids", "logits = transformed_logits(self.config, logits)", "pass", TRANSFORMED
    ),
    Mutation("a cap on attention", 'getattr(config, "attn_logit_softcapping", None)', "None", TRANSFORMED),
    Mutation(
        "a model that drops the tree of a pack",
        "return isinstance(error, InputError)",
        "return True",
        FAMILY_ATTENTION,
    ),
    Mutation(
        "a model that cannot get another attention",
        "attends_in_trees = not keeps_state(model.config) and model._supports_attention_backend",
        "attends_in_trees = not keeps_state(model.config)",
        FAMILY_ATTENTION,
    ),
    Mutation(
        "the acknowledgement of another server",
        "    for other in loaded.others:",
        "    for other in ():",
        PUSH,
    ),
    Mutation(
        "changed tensors that are left out", "get(spec.name) == spec", "get(spec.name) is not None", CHANGES
    ),
    Mutation(
        "a fused layer that is sent in part",
        "return found[1] if found else",
        "return name if found else",
        CHANGES,
        within="part_of",
    ),
    Mutation("changes beside their places", "dtype=np.int64) - 1", "dtype=np.int64)", CHANGES),
    Mutation(
        "minus zero and NaN",
        "tensor.flatten().view(bits).numpy()",
        "tensor.flatten().float().numpy()",
        CHANGES,
    ),
    Mutation(
        "changes for an engine that was started again",
        "and base != self._earlier_digest",
        "and False",
        CHANGES,
    ),
    Mutation("a whole push after a failed proof", "if not self._trusted:", "if False:", CHANGES),
    Mutation(
        "a module that holds other numbers is found",
        "if digest != due[asked[one]]}",
        "if not digest}",
        HELD,
    ),
    Mutation(
        "an error of the exact probe stops the push",
        "        check_held(record, version)\n        return record",
        "        return record",
        HELD,
    ),
    Mutation(
        "−0 and numbers that kernels flush count as 0",
        "hardshrink(values.to(dtype), _SMALLEST).contiguous()",
        "values.to(dtype).contiguous()",
        f"{HELD}::test_equal_weights_never_differ",
    ),
    Mutation(
        "the shares of a model are all of it",
        "            self._turn = (self._turn + 1) % self._shares",
        "            self._turn = 0",
        HELD,
    ),
    Mutation(
        "the version of older weights is known",
        "ahead = self._columns_ahead(self._turn if every else self._turn + 1)",
        "ahead: list[HeldPart] = []",
        HELD,
    ),
    Mutation(
        "the slope of the signed gap has a limit",
        "abs(found) - _ERRORS * error <= limit.slope",
        "abs(found) - _ERRORS * error <= 1.0",
        GAP,
    ),
    Mutation(
        "the tokens of one prompt are not independent",
        "        float(products @ products),",
        "        float((gap * surprises) @ (gap * surprises)),",
        GAP,
    ),
    Mutation(
        "weights that differ by a bit explain a gap",
        "layers = tuple(probed.failed) or held.differing",
        "layers = tuple(probed.failed)",
        "tests/watch/test_decomposition.py",
    ),
    Mutation(
        "one scale for a whole weight",
        "numbers.abs().amax(dim=-1, keepdim=True)",
        "numbers.abs().amax()[None, None]",
        QUANTISED_GAP,
    ),
    Mutation(
        "inputs that are not quantised",
        "tokens.codes.float() @",
        "(inputs.flatten(0, -2) / tokens.scales) @",
        QUANTISED_GAP,
    ),
    Mutation(
        "an adapter beside what is quantised",
        'layers.setdefault(getattr(layer, "base_layer", layer), layer)',
        "layers[layer] = layer",
        QUANTISED_GAP,
    ),
    Mutation(
        "a model that stays in 8 bits", "            del layer.forward", "            pass", QUANTISED_GAP
    ),
    Mutation(
        "a mean gap of any size",
        "mean=limit.mean + _ROOM * error.mean_abs",
        "mean=limit.mean + 9 * error.mean_abs",
        QUANTISED_GAP,
    ),
    Mutation(
        "a k3 of any size", "k3=limit.k3 + _ROOM**2 * error.k3", "k3=limit.k3 + 99 * error.k3", QUANTISED_GAP
    ),
    Mutation("old weights in the source of a push", "if spec != other]", "if False]", LIVE),
    Mutation("a wrong merge", "not error[0] <= error[1]", "False", LIVE),
    Mutation(
        "a wrong merge of an adapter that adds little", "torch.float32: 5e-6", "torch.float32: 1e-3", LIVE
    ),
    Mutation("a right merge with rounding", "_tolerance(base.weight) * float", "0.0 * float", LIVE),
    Mutation("a worker that counts in another's push", "if int(counters[_PUSH]) == push:", "if True:", SLOTS),
    Mutation(
        "tensors that lie over each other",
        "offset += aligned(tensor.nbytes)",
        "offset += tensor.nbytes // 2",
        "tests/weights/test_chunks.py",
    ),
    # proofs
    Mutation(
        "a largest gap that is that of the last part",
        "            larger.max_abs,",
        "            other.max_abs,",
        GAP,
    ),
    Mutation("a gap that is no number passes", "if not value <= bound]", "if value > bound]", GAP),
    Mutation(
        "tokens that were not compared",
        "if stats.tokens != expected_tokens:",
        "if stats.tokens > expected_tokens:",
        GAP,
    ),
    Mutation("log-probs that are not finite", "if not math.isfinite(total):", "if False:", GAP),
    Mutation(
        "raw log-probs of the engine",
        'must("logprobs_mode", actual.logprobs_mode, "processed_logprobs")',
        "pass",
        RECEIPT,
    ),
    Mutation("an engine of another dtype", 'must("dtype", actual.dtype, expected.dtype)', "pass", RECEIPT),
    Mutation("a window of 0 is a window", '"sliding_window": 0, ', "", RECEIPT),
    Mutation(
        "a window of 0 is any window",
        "if part is not None and",
        'if part is not None and name != "sliding_window" and',
        RECEIPT,
        within="one_spelling",
    ),
    Mutation(
        "ids without an embedding are sent",
        "(largest := int(ids.max())) >= rows",
        "(largest := int(ids.max())) > rows",
        TOKENS,
    ),
    Mutation("a pad token without an embedding", "needed is not None and needed >= rows", "False", TOKENS),
    Mutation(
        "a request with an id without an embedding",
        "check_embedded(request.prompt_ids,",
        "check_embedded(request.prompt_ids * 0,",
        ANSWERS,
    ),
    Mutation(
        "a context that is too short",
        "if actual.max_model_len < expected.min_model_len:",
        "if False:",
        RECEIPT,
    ),
    Mutation(
        "copies of one completion", "if repeats and log_chance < math.log(_ALPHA):", "if False:", SAMPLES
    ),
    Mutation(
        "pairs of completions that share their seed",
        "pays = np.array([",
        "pays = 0 * np.array([",
        PAIRS_IN_A_GROUP,
    ),
    Mutation(
        "a bet on a pair that pays where the two part",
        "(math.log(0.5) if parted else 0.0)",
        "0.0",
        "tests/watch/test_canary_and_samples.py::test_the_pay_of_a_pair_has_mean_one",
    ),
    # draws and ends
    Mutation("a tilt whose mean is above 1", "/ (1.0 + size**2 / 2 * draws.variances)", "", BETS),
    Mutation("ids of one probability that lie in the same half of their place", "- log_width", "", BETS),
    Mutation(
        "a bet against the trainer's own log-probs", "behaviour.double().cpu().numpy()", "draws.logps", DRAWS
    ),
    Mutation(
        "bets that do not start again",
        "stake = -math.log(self.generations)",
        "stake = -99 * self.generations",
        DRAWS,
    ),
    Mutation("a resumed run that forgets its generations", 'int(data["generations"])', "0", DRAWS),
    Mutation("a bet on ids whose mean is not 1", "0.0) - norms", "0.0)", ID_BETS),
    Mutation(
        "a bet on a half of the ids that sees a part of it",
        "for column in self.columns[1:]:",
        "for column in ():",
        ID_BETS,
    ),
    Mutation(
        "a bet on first tokens that is placed on all",
        "return classes.first",
        "return classes.first | True",
        ID_BETS,
    ),
    Mutation(
        "bets that an older receipt does not have hold nothing",
        'data["held"].get(name, fair)',
        'data["held"].get(name, -math.inf)',
        ID_BETS,
    ),
    Mutation(
        "an id that was there twice counts twice",
        "(again[places] >= limit)",
        "(again[places] >= 0)",
        ID_CLASSES,
    ),
    Mutation("the last part of a vocabulary has no mass", "if whole < BLOCKS:", "if False:", ID_CLASSES),
    Mutation("ids beyond the logits have a mass", " * (window < p.shape[1])", "", ID_CLASSES),
    Mutation(
        "the classes of a run are not bet on",
        "classes=scores.classes",
        "classes=None",
        "tests/watch/test_draws_in_training.py::test_a_resumed_run_stops_too",
    ),
    Mutation(
        "sets of kept ids have no classes",
        "self._classes_of_sets(self.classes, kept, probabilities)",
        "pass",
        ID_CLASSES,
    ),
    Mutation(
        "a stake for a generation of which nothing is drawn",
        "if not stats.tokens:\n            return",
        "pass",
        DRAWS,
    ),
    Mutation(
        "sums of tokens that were not drawn",
        "wanted = self._wanted[places]",
        "wanted = self._wanted[places] | True",
        DRAW_SUMS,
    ),
    Mutation(
        "a whole stake at every generation",
        "- math.log(self.generations + 1)\n        for",
        "\n        for",
        DRAWS,
    ),
    Mutation(
        "equal ids that count as less likely", "torch.lt(p, own[part", "torch.le(p, own[part", DRAW_SUMS
    ),
    Mutation("equal ids of a long row", "torch.lt(p, own[token", "torch.le(p, own[token", DRAW_SUMS),
    Mutation(
        "the variance of a long row about 0",
        "torch.sub(scaled[row], means[row], out=z)",
        "z = scaled[row]",
        DRAW_SUMS,
    ),
    Mutation("a second moment instead of a variance", "z -= means[here, None]", "pass", DRAW_SUMS),
    Mutation(
        "sums that a second forward computes again",
        "self._known.add(start)",
        "places = places.flip(0)",
        DRAW_SUMS,
    ),
    Mutation(
        "a float64 forward with the weights as they are",
        "return move.add_to(value.to(dtype, memory_format=torch.contiguous_format, copy=True))",
        "return value.to(dtype)",
        f"{BACKWARD}::test_a_right_backward_passes_far_below_the_limit",
    ),
    Mutation(
        "a float64 forward without the temperature",
        "(logits / distribution.sampling.temperature)",
        "logits",
        f"{BACKWARD}::test_a_right_backward_passes_far_below_the_limit",
        within="_of_rows",
    ),
    Mutation(
        "a float64 forward without the entropies",
        "torch.special.entr(logps.exp()).sum(-1)",
        "logps.sum(-1)",
        f"{BACKWARD}::test_a_right_backward_passes_far_below_the_limit",
    ),
    Mutation(
        "an entropy bonus that is averaged over each pack",
        "learned.sum() / max(self._tokens, 1)",
        "learned.sum() / max(int(kept.sum()), 1)",
        f"{CUTS}[grpo-full-together]",
    ),
    Mutation(
        "a loss that is averaged over each micro-batch",
        """    for start in range(0, len(advantaged), per_step):
        step = torch.arange(start, min(start + per_step, len(advantaged)))
""",
        """    for start in range(0, len(advantaged), config.completions_per_micro_batch):
        step = torch.arange(start, min(start + config.completions_per_micro_batch, len(advantaged)))
""",
        f"{CUTS}[grpo-dapo-together]",
    ),
    Mutation(
        "rounding is not named as a cause",
        "if limit.is_coarse and packed.max_abs",
        "if False and packed.max_abs",
        "tests/watch/test_decomposition.py::test_the_error_says_where_rounding_may_be_the_cause_of_a_gap_in_the_packed_forward",
    ),
    Mutation(
        "rounding is named where a token is over its limit",
        "if limit.is_coarse and packed.max_abs <= limit.largest(packed.tokens):",
        "if limit.is_coarse:",
        "tests/watch/test_decomposition.py::test_the_error_says_where_rounding_may_be_the_cause_of_a_gap_in_the_packed_forward",
    ),
    Mutation(
        "the means of few tokens in half precision are judged alone",
        "pools = self._config.max_staleness or limit.is_coarse",
        "pools = self._config.max_staleness",
        "tests/watch/test_decomposition.py::test_in_half_precision_the_means_of_few_tokens_are_judged_with_those_of_the_next_steps",
    ),
    Mutation(
        "the means of few tokens in fp32 wait for more",
        "pools = self._config.max_staleness or limit.is_coarse",
        "pools = True",
        "tests/watch/test_decomposition.py::test_in_half_precision_the_means_of_few_tokens_are_judged_with_those_of_the_next_steps",
    ),
    Mutation(
        "the means of an evaluation's few tokens in half precision are judged alone",
        "judged = self._evaluated_pool.add(gap, limit) if limit.is_coarse else gap",
        "judged = gap",
        "tests/watch/test_decomposition.py::test_in_half_precision_the_means_of_few_tokens_are_judged_with_those_of_the_next_steps",
    ),
    Mutation(
        "the gap of an evaluation is not judged",
        "self._check_limits(judged, completions, version)\n            kept_sets",
        "kept_sets",
        "tests/watch/test_decomposition.py::test_in_half_precision_the_means_of_few_tokens_are_judged_with_those_of_the_next_steps",
    ),
    Mutation(
        "the gap of a generation is not judged",
        "self._check_limits(judged, completions, version)\n            if not again",
        "if not again",
        "tests/watch/test_decomposition.py::test_in_half_precision_the_means_of_few_tokens_are_judged_with_those_of_the_next_steps",
    ),
    Mutation(
        "a wrong gradient that passes for a coarse forward",
        "if apart <= 0.25 * first.apart:",
        "if apart <= 0.0:",
        f"{BACKWARD}::test_the_part_of_the_model_is_named",
    ),
    Mutation(
        "the slope of a certain policy is measured with one step",
        "_SMALLER, _SMALLER_TIMES = 8.0, 7",
        "_SMALLER, _SMALLER_TIMES = 8.0, 1",
        f"{BACKWARD}::test_a_part_of_a_certain_policy_is_proven_in_float32_with_small_steps",
    ),
    Mutation(
        "rounding that grows with a smaller step passes for a slope",
        "if not apart < before:",
        "if False:",
        f"{BACKWARD}::test_a_slope_whose_rounding_grows_with_smaller_steps_is_no_error",
    ),
    Mutation(
        "the shortest of the drawn completions is looked at",
        "place = max(drawn, key=lambda i: len(sequences[i].path))",
        "place = min(drawn, key=lambda i: len(sequences[i].path))",
        f"{WHOLE}::test_the_longest_of_four_is_chosen_whole_with_neighbours_that_add_no_more_than_it_has",
    ),
    Mutation(
        "a whole completion is alone in its pack",
        "return list(sequences[first : last + 1]), [chosen]",
        "return [chosen], [chosen]",
        f"{WHOLE}::test_the_longest_of_four_is_chosen_whole_with_neighbours_that_add_no_more_than_it_has",
    ),
    Mutation(
        "parts of completions are looked at",
        "packed, chosen = whole(sequences, places, most, draws) if places else parts(sequences, draws)",
        "packed, chosen = parts(sequences, draws)",
        f"{WHOLE}::test_a_fault_of_long_sequences_stops_the_run",
    ),
    Mutation(
        "the critic's values have no sum of their own",
        "if policy.critic is not None and (of_all or of_values):",
        "if False:",
        f"{WHOLE}::test_a_fault_of_long_sequences_stops_the_run",
    ),
    Mutation(
        "a value head of 0 is compared",
        "self._values_wait = not _size(policy.critic)",
        "self._values_wait = False",
        f"{WHOLE}::test_clean_long_runs_pass",
    ),
    Mutation(
        "what has no room without autocast has it",
        "narrow = [i for i in texts if len(sequences[i].path) <= most // 2]",
        "narrow = texts",
        f"{WHOLE}::test_what_has_no_room_without_autocast_is_compared_with_it",
    ),
    Mutation(
        "every comparison in float32 decides",
        "if single.error <= _CLEAR * limit:",
        "if True:",
        f"{BACKWARD}::test_the_part_of_the_model_is_named",
    ),
    Mutation(
        "the same pieces of the gradients every time",
        "start = step * self._at_once % count if count > self._at_once else 0",
        "start = 0",
        f"{FEW}::test_the_largest_element_of_every_piece_has_its_turn_in_32_steps",
    ),
    Mutation(
        "the elements with the largest gradients are not compared",
        "places += [(i, first + place) for (i, first), place in zip(pieces, within, strict=True)]",
        "pass",
        f"{FEW}::test_a_fault_in_few_elements_stops_the_run_within_two_steps",
    ),
    Mutation(
        "large gradients are not compared after the clip",
        "self._check_clipped(self._sparse, self._sparse_unclipped, self._sparse_seen, scale)",
        "pass",
        f"{FEW}::test_an_element_that_is_cut_after_the_clip_is_found",
    ),
    Mutation(
        "a part's gradient is taken for right",
        "if distance is not None and distance <= doubt * limit:",
        "if distance is not None:",
        f"{PARTS}::test_a_gradient_that_turns_wrong_later_stops_the_run_before_the_optimizer_uses_it_for_ten_steps",
    ),
    Mutation(
        "a part of one step in a hundred",
        "% EVERY == 0",
        "% 100 == 0",
        f"{BACKWARD}::test_a_sum_is_checked_at_first_and_every_fiftieth_step_and_a_part_at_every_tenth",
    ),
    Mutation(
        "the part's gradient without the critic's",
        "for tensor in (scores.logps, scores.entropies, scores.values):",
        "for tensor in (scores.logps, scores.entropies, None):",
        f"{PARTS}::test_clean_steps_pass_far_below_the_limit_and_stay_as_they_were[PPO]",
    ),
    Mutation(
        "gradients that were there before the part",
        "self._before = _along(self.named, self._unit)",
        "self._before = dict.fromkeys(self.named)",
        f"{PARTS}::test_clean_steps_pass_far_below_the_limit_and_stay_as_they_were",
    ),
    Mutation(
        "gradients of zero pass for gradients that vanish",
        "if vanishes and np.abs(first.due).max() < _VISIBLE:",
        "if vanishes:",
        f"{BACKWARD}::test_gradients_that_are_all_zero_are_no_gradients_that_vanish",
    ),
    Mutation(
        "an error of the device is a warning",
        "if not refuses_a_dtype(trouble):",
        "if False:",
        f"{BACKWARD}::test_an_error_of_the_device_or_of_this_program_stops",
    ),
    Mutation(
        "a part that is compared with itself alone is proven",
        'checked.unproven if alone else ""',
        '""',
        f"{BACKWARD}::test_a_part_that_is_compared_with_itself_alone_is_unproven_without_its_sum",
    ),
    Mutation(
        "a convolution gets two dtypes",
        "if func in _CONVOLUTIONS:",
        "if False:",
        f"{BACKWARD}::test_a_convolution_takes_a_wide_input",
    ),
    Mutation(
        "a process trains on all GPUs that it sees",
        "        use_one_gpu(self)\n",
        "",
        "tests/run/test_device.py::test_one_process_on_a_machine_with_several_gpus_uses_one_and_says_which",
    ),
    Mutation(
        "a GPU with an old driver is left out in silence",
        "if torch.version.cuda is None or not",
        "if True or not",
        "tests/run/test_device.py::test_an_old_driver_is_an_error_with_the_drivers_words_and_no_run_on_the_cpu",
    ),
    Mutation(
        "a number that no GPU has hides all GPUs",
        'environment.get(_VISIBLE, "0").strip().lower() in _NONE_VISIBLE',
        "_VISIBLE in environment",
        "tests/run/test_device.py::test_a_number_that_no_gpu_has_does_not_hide_them",
    ),
    Mutation(
        "a run on a CPU notes the GPU beside it",
        "if torch.cuda.is_available() and not use_cpu:\n        return torch.cuda.get_device_name()",
        "if torch.cuda.is_available():\n        return torch.cuda.get_device_name()",
        "tests/run/test_device.py::test_another_device_is_no_other_setting_and_the_receipt_notes_it",
    ),
    Mutation(
        "vLLM's threads stay",
        "torch.set_num_threads(threads)",
        "pass",
        "tests/engines/test_kept_process.py::test_what_vllms_workers_change_is_put_back_after_a_start_and_after_an_error",
        within="process_kept",
    ),
    Mutation(
        "vLLM's precision stays",
        "place.fp32_precision = precision",
        "pass",
        "tests/engines/test_kept_process.py::test_what_vllms_workers_change_is_put_back_after_a_start_and_after_an_error",
    ),
    Mutation(
        "the trainer's objects are frozen",
        "gc.freeze = lambda: None",
        "pass",
        "tests/engines/test_kept_process.py::test_what_vllms_workers_change_is_put_back_after_a_start_and_after_an_error",
    ),
    Mutation(
        "vLLM's seed stays",
        "torch.set_rng_state(numbers[2])",
        "pass",
        "tests/engines/test_kept_process.py::test_what_vllms_workers_change_is_put_back_after_a_start_and_after_an_error",
    ),
    Mutation(
        "full determinism does not reach the engine",
        'environment.setdefault("VLLM_BATCH_INVARIANT", "1")',
        "pass",
        "tests/run/test_device.py::test_full_determinism_on_a_gpu_reaches_cuda_and_the_engine",
    ),
    Mutation(
        "another thread reads a GPU's tensor before it is written",
        "torch.cuda.current_stream(tensor.device).wait_event(event)",
        "pass",
        "tests/run/test_device.py::test_another_thread_reads_a_tensor_of_a_gpu_only_after_the_callers_stream_has_written_it",
    ),
    Mutation(
        "several plain rows cannot be sent to a GPU",
        "tensor.contiguous().pin_memory()",
        "tensor.pin_memory()",
        "tests/run/test_device.py::test_several_plain_rows_arrive_on_a_gpu",
    ),
    Mutation(
        "cuDNN computes attention",
        "torch.backends.cuda.enable_cudnn_sdp(False)",
        "pass",
        "tests/run/test_device.py::test_cudnn_computes_no_attention_and_convolutions_round_as_products_do",
    ),
    Mutation(
        "a check that was not made is not counted",
        "for why in sorted({why for _, why in found if why}):",
        "for why in ():",
        f"{PARTS}::test_a_check_that_cannot_be_made_is_counted_in_the_receipt",
    ),
    Mutation(
        "hooks that appear are taken",
        "if not _among(one, known) and not _is_of_a_library(one):",
        "if False:",
        f"{PARTS}::test_what_appears_outside_of_a_callback_stops_the_run_at_once_and_is_named",
    ),
    Mutation(
        "what a callback changes is not taken",
        "noted[place] = (*(one for one in own if _among(one, new)), *added)",
        "pass",
        f"{PARTS}::test_a_hook_of_the_users_is_taken_at_the_beginning_and_in_a_callback_and_noted",
    ),
    Mutation(
        "the same tensors' gradients at every step",
        "np.roll(order, -step * size)",
        "order",
        "tests/watch/step/test_update.py::test_the_gradient_of_every_tensor_is_compared_within_ten_steps",
    ),
    Mutation(
        "the gradient under autocast is not compared",
        "check_computed_gradient(distances, limit)",
        "pass",
        f"{BACKWARD}::test_under_autocast_both_the_exact_and_the_rounded_gradient_are_compared",
    ),
    Mutation(
        "a part in half precision is not compared with itself",
        "if not apart <= limit:",
        "if False:",
        f"{BACKWARD}::test_a_part_of_a_certain_policy_passes_in_bf16_and_its_faults_are_found",
    ),
    Mutation(
        "one drawn sum over the limit is enough for an error",
        "(len(failed) > _DRAWS // 2 or not exact.is_finite)",
        "True",
        f"{BACKWARD}::test_the_majority_of_five_drawn_sums_is_judged",
    ),
    Mutation(
        "sums in half precision are over sampled ids",
        "if self._limit(policy)[1] and self._distribution(policy).is_tempered_only:",
        "if False:",
        f"{BACKWARD}::test_a_policy_that_is_certain_has_right_gradients_in_bf16_too",
    ),
    Mutation(
        "one drawn sum is enough for an error",
        "if limit < distances[0] < math.inf else ():",
        "if False else ():",
        f"{BACKWARD}::test_under_autocast_both_the_exact_and_the_rounded_gradient_are_compared",
    ),
    Mutation(
        "an overflow is drawn again",
        "if limit < distances[0] < math.inf else ():",
        "if not distances[0] <= limit else ():",
        f"{BACKWARD}::test_a_gradient_that_is_not_finite_under_autocast_is_not_drawn_again",
    ),
    Mutation(
        "a gradient of an earlier step is cleared",
        "if any(map(bool, on_host([p.grad.any() for p in named.values() if p.grad is not None]))):",
        "if False:",
        f"{BACKWARD}::test_a_gradient_that_is_left_from_before_stays_for_its_own_proof",
    ),
    Mutation("scores that differ are no error", "elif _equal(before, once):", "elif True:", ASKED_AGAIN),
    Mutation("an answer at random is an error", "if not _equal(once, again):", "if False:", ASKED_AGAIN),
    Mutation("random numbers move on", "torch.set_rng_state(kept[2])", "pass", ASKED_AGAIN),
    Mutation("tokens after an end token", "if ends[:-1].any():", "if False:", ENDS),
    Mutation("answers that were cut", "and len(ids) < limit:", "and False:", ENDS),
    Mutation("end tokens that were removed", "and not (stopped or any(found)):", "and False:", ENDS),
    Mutation("an end token at the limit", "and (stopped or all(found)):", "and all(found):", ENDS),
    # receipts and checkpoints
    Mutation(
        "tensors that are not compared after loading",
        "    if wrong:\n        raise ProofError",
        "    if False:\n        raise ProofError",
        PROVEN_RESUME,
        within="check_loaded",
    ),
    Mutation(
        "an optimizer's state without its moments",
        'found[f"optimizer.{key} of {place}"]',
        '_ = found[f"optimizer.{key}"]',
        PROVEN_RESUME,
    ),
    Mutation("rows without their columns", "[row.source, dict(row.columns)]", "[]", PROVEN_RESUME),
    Mutation("changed inputs that are taken", "if changed and not accept", "if False", PROVEN_RESUME),
    Mutation(
        "a reward without what it names",
        "            self._references(value)",
        "            pass",
        CODE_DIGEST,
    ),
    Mutation(
        "a counter is a change of a reward", "if not changed.intersection(names)", "if True", CODE_DIGEST
    ),
    Mutation(
        "files of the user's are not digested", "(file.whole or not file.is_script)", "False", CODE_DIGEST
    ),
    Mutation(
        "an import inside a function is not followed",
        "self._import([base, *inside], path)",
        "pass",
        CODE_DIGEST,
    ),
    Mutation(
        "a script without what a reward names in it",
        "if defined & used or attributes & names",
        "if False",
        CODE_DIGEST,
    ),
    Mutation(
        "a variable of a reward is a global of its script",
        "if defined & used or",
        "if defined & names or",
        CODE_DIGEST,
    ),
    Mutation("a whole script counts", " or _trains(tree)", "", CODE_DIGEST),
    Mutation(
        "a clock is a change of a reward",
        "if called & (_UNSTABLE | _UNSTABLE_ATTRIBUTES):",
        "if False:",
        CODE_DIGEST,
    ),
    Mutation(
        "what a model's files mean is not compared",
        "if before.get(n) != after.get(n))",
        "if False)",
        MODEL_INPUTS,
    ),
    Mutation("another version is another model", "if same_libraries else", "if True else", MODEL_INPUTS),
    Mutation("a tokenizer without its merges", "{_RULES: text_digest(inner)}", "{_RULES: ''}", MODEL_INPUTS),
    Mutation(
        "a base is its names and shapes",
        "digest.update(plain.view(torch.uint8).numpy().data)",
        "pass",
        MODEL_INPUTS,
    ),
    Mutation(
        "a base is another one in another dtype",
        "part.cpu().float() if narrow else part.cpu()",
        "part.cpu()",
        MODEL_INPUTS,
    ),
    Mutation(
        "a file that an adapter lacks is looked for on the hub",
        'raise InputError(f"adapter {adapter} has no {names[0]}; copy or save the adapter again")',
        "return adapter / names[0]",
        ADAPTER_FILES,
    ),
    Mutation(
        "an adapter meets any base",
        "(found := base_digest(model)) != about.digest",
        "not (found := base_digest(model))",
        ADAPTER_FILES,
    ),
    Mutation("weights that an adapter lacks are zeros", "set(report.missing_keys)", "set()", ADAPTER_FILES),
    Mutation("weights without a place are dropped", "sorted(report.unexpected_keys)", "[]", ADAPTER_FILES),
    Mutation(
        "an adapter with NaN is merged",
        "    check_finite(str(file), ((name, tensor.float()) for name, tensor in tensors.items()))\n",
        "",
        ADAPTER_FILES,
    ),
    Mutation(
        "an adapter whose lora_alpha was changed is merged",
        " and _file_digest(path) == digest",
        "",
        ADAPTER_FILES,
    ),
    Mutation(
        "the base is loaded before the rank of its adapter is read",
        'if name.endswith(".lora_A.weight") and rank not in ranks:',
        "if False:",
        ADAPTER_FILES,
    ),
    Mutation(
        "4 bits are merged in full",
        "dequantised(given) if is_quantised(given) else given",
        "parameter",
        ADAPTER_FILES,
    ),
    Mutation(
        "another base is taken",
        '        *changed_digests(before["weights"], after["weights"]),\n',
        "",
        PROVEN_RESUME,
    ),
    Mutation(
        "other threads are taken where bits must be equal",
        "if bitwise and not accept:",
        "if False:",
        "tests/run/test_proven_resume.py::test_other_versions_devices_or_threads_are_a_warning_or_refused_where_bits_must_be_equal",
    ),
    # how a run ends
    Mutation(
        "whatever ends a run, it is finished",
        "return early and not self.interrupted_by",
        "return False and not self.interrupted_by",
        EARLY_ENDS,
    ),
    Mutation(
        "a library keeps the handler of a signal",
        "if (other := signal.getsignal(number)) == self._handle:",
        "if True or (other := signal.getsignal(number)):",
        EARLY_ENDS,
    ),
    # schedules that follow metrics
    Mutation(
        "a plateau is not followed", "            self.plateau.after(metric)", "            pass", SCHEDULES
    ),
    Mutation(
        "a smaller reward is a better one", '"max" if config.greater_is_better else "min"', '"min"', SCHEDULES
    ),
    Mutation("whether a model's own code runs is asked", '{"trust_remote_code": False}', "{}", LOADED_FILES),
    Mutation("a picture chooses its decoder", "formats=FORMATS)", "formats=None)", PICTURE_FILES),
    Mutation(
        "a folder of another user is private",
        "if found.st_uid not in (0, os.geteuid()):",
        "if False:",
        PRIVATE,
    ),
    Mutation("an open folder is private", "if found.st_mode & stat.S_IWOTH:", "if False:", PRIVATE),
    Mutation(
        "what is installed elsewhere is the user's",
        "not installed.isdisjoint(found.parents)",
        "False",
        CODE_DIGEST,
    ),
    Mutation(
        "an editable install is a package",
        "        if not _is_editable(distribution):",
        "        if True:",
        CODE_DIGEST,
    ),
    Mutation(
        "a file is read for each class",
        "        if path not in self._files:",
        "        if True:",
        CODE_DIGEST,
    ),
    # the optimizer's steps
    Mutation(
        "amsgrad that divides by the latest mean square",
        'divided = torch.where(s["amsgrad"] > 0, highest, second)',
        "divided = second",
        f"{OPTIMIZER_STEPS}::test_every_step_and_state_of_torch_is_the_formulas",
    ),
    Mutation(
        "a first gradient with momentum that is dampened",
        'torch.where(\n        state["moving"] > 0, s["momentum"] * state["velocity"] + (1',
        'torch.where(\n        state["moving"] > -1, s["momentum"] * state["velocity"] + (1',
        f"{OPTIMIZER_STEPS}::test_every_step_and_state_of_torch_is_the_formulas",
    ),
    Mutation(
        "a decided sign of Lion that is not compared",
        "undecided = (between.abs() <= _UNDECIDED * terms) & (terms > 0)",
        "undecided = terms > 0",
        f"{OPTIMIZER_STEPS}::test_a_lion_that_takes_the_sign_of_the_gradient_is_seen",
    ),
    Mutation(
        "an optimizer with its state in 8 bits counts as one with 32",
        'getattr(wanted, "optim_bits", 0) == 32',
        'getattr(wanted, "optim_bits", 0) > 0',
        f"{OPTIMIZER_STEPS}::test_optimizers_with_another_step_have_no_formula",
    ),
    Mutation(
        "the state of Adafactor is not compared",
        "if not float(share) <= _LOOSE:",
        "if not float(share) <= torch.inf:",
        f"{OPTIMIZER_STEPS}::test_a_state_of_adafactor_that_is_changed_after_the_step_is_seen",
    ),
    Mutation(
        "some tensors of Adafactor are never compared",
        "if (i + step + self._seed) % _WITHIN == 0",
        "if (i + self._seed) % _WITHIN == 0",
        f"{OPTIMIZER_STEPS}::test_every_tensor_of_adafactor_is_compared_within_ten_steps",
    ),
    Mutation(
        "an optimizer without a formula is not named",
        'self._engine.note_unproven(self._step + 1, "update", why)',
        "pass",
        f"{OPTIMIZER_STEPS}::test_an_optimizer_without_a_formula_is_named_in_the_receipt",
    ),
    # the optimizer's settings
    Mutation(
        "a made optimizer is believed",
        "        if field not in found or _equal(found[field], due):",
        "        if True:",
        f"{OPTIMIZER_SETTINGS}::test_an_optimizer_that_is_made_with_other_settings_takes_no_step",
    ),
    Mutation(
        "a change of settings is believed",
        "            elif self._failure is None:",
        "            elif False:",
        f"{OPTIMIZER_SETTINGS}::test_what_changes_outside_of_callbacks_stops_the_same_step",
    ),
    Mutation(
        "a resumed run forgets what was taken",
        "        for change in changes:\n",
        "        for change in []:\n",
        f"{OPTIMIZER_SETTINGS}::test_after_a_resume_a_value_that_the_receipt_does_not_have_is_named",
    ),
    Mutation(
        "a learning rate that a callback sets is forgotten",
        "        self._rates[group] = after, self._place()\n",
        "        pass\n",
        f"{OPTIMIZER_SETTINGS}::test_a_learning_rate_that_a_callback_sets_counts_until_the_schedule_sets_the_next",
    ),
    Mutation(
        "settings of the next step are proven",
        "return self._held if self._stepped is None else",
        "return self._held or",
        f"{OPTIMIZER_SETTINGS}::test_changes_are_taken_at_every_event_and_a_resumed_run_begins_with_those_of_its_checkpoint",
    ),
    Mutation(
        "changed fields do not replace changes",
        "    forget(changed_now)\n",
        "    pass\n",
        f"{OPTIMIZER_SETTINGS}::test_a_config_that_changes_between_two_runs_acts_where_that_was_asked_for",
    ),
    Mutation(
        "a state that moves is saved or begun with",
        "            if not bool(wrong.any()):",
        "            if True:",
        f"{OPTIMIZER_SETTINGS}::test_a_state_that_changes_before_a_checkpoint_is_not_saved",
    ),
    Mutation(
        "norms with a weight decay",
        'any(part == "norm" or',
        "any(",
        f"{OPTIMIZER_SETTINGS}::test_the_tensors_with_a_weight_decay_are_those_of_transformers",
    ),
    Mutation(
        "a value head with a weight decay",
        "decays = not in_head and",
        "decays =",
        f"{OPTIMIZER_SETTINGS}::test_the_value_head_has_its_own_rate_and_no_decay",
    ),
    Mutation(
        "a new optimizer with moments",
        "torch.optim.AdamW and held:",
        "torch.optim.AdamW and False:",
        f"{OPTIMIZER_SETTINGS}::test_a_new_optimizer_that_holds_moments_is_refused",
    ),
    Mutation(
        "a checkpoint's values win over a new config",
        "    if not given and changed:",
        "    if False:",
        f"{OPTIMIZER_SETTINGS}::test_a_config_that_changes_between_two_runs_acts_where_that_was_asked_for",
    ),
    Mutation(
        "changes of a callback are nobody's",
        "if settings is not None and not of_library:",
        "if False:",
        f"{OPTIMIZER_SETTINGS}::test_what_a_callback_changes_is_taken_written_and_kept_after_a_resume",
    ),
    Mutation(
        "other ids may enter the loss",
        'self._same(due, ids == due.ids, "ids, or the ids before them,")\n            self._same(due, logps',
        "self._same(due, logps",
        LEARNED,
    ),
    Mutation(
        "old log-probs are not compared", "else digest_of(name, old) == due.old_logps", "else True", LEARNED
    ),
    Mutation(
        "a micro-batch may learn from others",
        "        if found != due:",
        "        if False:",
        LEARNED,
        within="check_micro_batch",
    ),
    Mutation(
        "a token's context is not in the digest",
        "np.flatnonzero(self.ends[first : node + 1] > node)",
        "np.arange(node + 1 - first)",
        LEARNED,
    ),
    Mutation(
        "a text of another rollout is scored",
        "if rollout.seal.words != words_of",
        "if False and rollout.seal.words != words_of",
        LEARNED,
    ),
    Mutation(
        "the first step's forward is not compared",
        "    if over := over_limits(difference, limit):",
        "    if over := []:",
        LEARNED,
    ),
    Mutation(
        "a later step's forward is not compared",
        "if not (mean <= limit.mean_of",
        "if False and not (mean <= limit.mean_of",
        LEARNED,
        within="check_plain",
    ),
    Mutation(
        "no forward of a later step is drawn",
        "if moved or generation.fresh_tokens != generation.sampled_tokens:",
        "if generation.fresh_tokens != generation.sampled_tokens:",
        f"{EVENTS}::test_every_proof_of_the_watch_is_made_at_its_event",
    ),
    Mutation(
        "events: what flows back to the log-probs is compared",
        "        self._flow.check()\n",
        "        pass\n",
        f"{EVENTS}::test_every_proof_of_the_watch_is_made_at_its_event",
    ),
    Mutation(
        "events: the advantages of what was left aside are compared",
        "            check_still(self.expected, sequences)\n",
        "            pass\n",
        f"{EVENTS}::test_every_proof_of_the_watch_is_made_at_its_event",
    ),
    Mutation(
        "the engine's new scores are not compared",
        '        check_gap(\n            self.pools["asked_again"]',
        '        (lambda *a: None)(\n            self.pools["asked_again"]',
        SCORED_AGAIN,
    ),
    Mutation(
        "no completion is compared ahead",
        "            if not chosen:",
        "            if True:",
        COMPARED_AHEAD,
    ),
    Mutation("a reference that may be the policy", "        if shared:", "        if False:", FROZEN),
    Mutation(
        "frozen weights that may move",
        "        if changed:",
        "        if False:",
        FROZEN,
        within="FrozenWeights.check",
    ),
    Mutation(
        "a reference whose log-probs are not compared",
        "if not (mean <= limit.mean_of",
        "if False and not (mean <= limit.mean_of",
        FROZEN,
        within="check_reference_scores",
    ),
    Mutation(
        "reference_outputs: a reference that computes with trained weights",
        "        if torch.equal(now, due):",
        "        if True:",
        REFERENCE_FAULTS,
    ),
    Mutation(
        "reference_outputs: a reference that has followed the policy begins anew",
        "self._kept[0] is not frozen or ",
        "",
        REFERENCE_FAULTS,
    ),
    Mutation(
        "reference_outputs: a forward that does not repeat its bits is no fault",
        "        if not all(torch.equal(_logps",
        "        if all(torch.equal(_logps",
        REFERENCE_FAULTS,
    ),
    Mutation(
        "events: the reference's outputs are compared",
        "lambda: outputs.check(scorer, policy, self.frozen, precision)",
        "lambda: None",
        f"{EVENTS}::test_every_proof_of_the_watch_is_made_at_its_event",
    ),
    Mutation(
        "settings of a module that may change",
        "_is_setting(value):\n                    found",
        "False:\n                    found",
        "tests/watch/test_forward_settings.py::test_a_setting_that_changes_outside_of_a_callback_stops_the_run_at_once",
    ),
    Mutation(
        "held_weights: digests of all versions are kept",
        "        if self._compared % _KEPT == 0:",
        "        if False:",
        "tests/watch/test_held_weights.py::test_a_long_run_keeps_no_more_digests_than_a_short_one",
    ),
    Mutation(
        "checkpoint: the written files are believed",
        "            check_written(Path(output_dir), memory",
        "            _ = (Path(output_dir), memory",
        f"{HOLDS}::test_a_checkpoint_of_other_weights_than_those_in_memory_gets_no_name",
    ),
    Mutation(
        "checkpoint: the best one is believed",
        "    if due != (step, found):",
        "    if False:",
        f"{HOLDS}::test_a_wrong_best_checkpoint_stops_the_run",
    ),
    Mutation(
        "checkpoint: what load_best_model_at_end has loaded is believed",
        "        if (best / DIGESTS).is_file():",
        "        if False:",
        f"{HOLDS}::test_a_wrong_best_checkpoint_stops_the_run",
    ),
    Mutation(
        "reference_outputs: the first generation of a start is believed",
        "            if second is not None:",
        "            if False:",
        f"{REFERENCE_FAULTS}::test_a_reference_with_trained_weights_stops_the_run",
    ),
    Mutation(
        "reference_outputs: a second way that PEFT's switch decides",
        "                module.forward = inner.__call__",
        "                pass",
        f"{REFERENCE_FAULTS}::test_the_base_alone_gives_the_bits_of_an_adapter_that_is_switched_off",
    ),
    Mutation(
        "reference_outputs: a reference that follows when it is not due",
        "share = 0.0 if self._step % config.ref_model_sync_steps else config.ref_model_mixup_alpha",
        "share = config.ref_model_mixup_alpha",
        f"{REFERENCE_FAULTS}::test_a_reference_that_follows_by_another_rule_stops_the_run",
    ),
    Mutation(
        "reference_outputs: a share of the policy that is not compared",
        "    slack = 2 * drawn.epsilons(own) * torch.maximum(before.abs(), towards.abs()) * bool(share)",
        "    slack = torch.maximum(before.abs(), towards.abs())",
        f"{REFERENCE_FAULTS}::test_a_reference_that_follows_by_another_rule_stops_the_run",
    ),
    Mutation(
        "elements of frozen weights that may move",
        "        if not bool(same.all()):",
        "        if False:",
        "tests/watch/step/test_update.py",
    ),
    # settings and evaluations
    Mutation(
        "requests without the user's settings",
        "            if (dict(found)",
        "            if False and (dict(found)",
        SETTINGS,
    ),
    Mutation(
        "requests with more tokens than the user's",
        "if request.sampling.max_tokens >",
        "if False and 0 >",
        SETTINGS,
    ),
    Mutation(
        "completions that both sides cut",
        'completion.finish_reason == "length" and count < most',
        "False",
        SETTINGS,
    ),
    Mutation(
        "interruptions that are not looked at",
        "        if broken is not None:",
        "        if False:",
        SETTINGS,
    ),
    Mutation(
        "rewards with other weights",
        "        if not agrees:",
        "        if False:",
        SETTINGS,
        within="check_reward",
    ),
    Mutation(
        "advantages of the rewards that the run has made",
        "{c.name: weighted_sum(list(c.scores), reward_weights) for c in completions}",
        "{c.name: weighted_sum(list(c.scores), ()) for c in completions}",
        "'tests/watch/step/test_losses.py::test_the_weights_that_the_user_has_asked_for_are_in_the_expected_advantages'",
    ),
    Mutation(
        "log-probs at another temperature", "off.mean() <= mean and off.max() <= largest", "True", SETTINGS
    ),
    Mutation(
        "thinking that is never interrupted", "if len(ids) > latest and not", "if False and not", SETTINGS
    ),
    Mutation(
        "a definition without inserted ids",
        "*earlier[~marks].tolist()",
        "",
        f"{FILTERED_SCORES}::test_the_definition_counts_inserted_ids_like_the_prompt",
    ),
    Mutation(
        "an evaluation of other rows",
        "for group in groups) != digest:",
        "for group in groups) == '':",
        PROVEN_EVALUATION,
    ),
    Mutation(
        "an evaluation with other numbers of completions",
        "    if odd:",
        "    if False:",
        PROVEN_EVALUATION,
        within="check_evaluated",
    ),
    Mutation(
        "the same completions at every evaluation",
        "default_rng((seed, version))",
        "default_rng(seed)",
        PROVEN_EVALUATION,
    ),
    Mutation(
        "a loss of an evaluation with the weights of other steps",
        "ready, per_step=rollouts)",
        "ready)",
        PROVEN_EVALUATION,
    ),
    Mutation(
        "a loss without the method's masks",
        "objective.prepare_step(whole, entropies)",
        "whole",
        PROVEN_EVALUATION,
    ),
    Mutation(
        "a change that a checkpoint forgets",
        "            self.made[field] = made",
        "            pass",
        CHANGED,
    ),
    Mutation("a change that does nothing", "        setattr(config, field, value)", "        pass", CHANGED),
    Mutation(
        "weights that only the definition has",
        "        self._scorer.weights[:] = weights",
        "        pass",
        WEIGHED,
    ),
    Mutation(
        "training prompts that count as held out",
        "in known]",
        "in known and False]",
        PROVEN_EVALUATION,
        within="count_seen",
    ),
    Mutation(
        "lines that may be removed", 'if body.get("previous") != previous or claimed', "if claimed", RECEIPT
    ),
    Mutation("lines that may be changed", "or claimed != _hash(body):", "or False:", RECEIPT),
    Mutation(
        "a checkpoint that is half written",
        "return complete[-1] if complete else None",
        "found = _checkpoints(Path(output_dir))\n    return found[-1] if found else None",
        CHECKPOINTS,
    ),
    Mutation(
        "what a failed save leaves",
        "        shutil.rmtree(folder, ignore_errors=True)\n        with suppress(OSError):\n            finish",
        "        with suppress(OSError):\n            finish",
        CHECKPOINTS,
    ),
    Mutation("logs that know a lost checkpoint", "    keep_logs_of_lost(folder, step)\n", "", CHECKPOINTS),
    Mutation(
        "an only checkpoint that lost its state", "if damaged and damaged == found:", "if False:", CHECKPOINTS
    ),
    Mutation(
        "a kill between the names of two checkpoints of one step",
        "        if not checkpoint.exists():\n            made",
        "        if False:\n            made",
        CHECKPOINTS,
    ),
    Mutation(
        "a log that the report needs and that is broken",
        "and any(map(_is_broken, whole)):",
        "and False:",
        CHECKPOINTS,
    ),
    Mutation(
        "a checkpoint that is not on the disk before it has its name",
        "    sync_folder(made)\n    made",
        "    made",
        FILES,
    ),
    Mutation("a write that fails", "            beside.unlink(missing_ok=True)", "            pass", FILES),
    Mutation(
        "a line that could not be written whole",
        "                file.truncate(start)",
        "                pass",
        FILES,
    ),
    Mutation(
        "a folder of a killed process that stays", "            _remove_dead(left)", "            pass", FILES
    ),
    Mutation(
        "a folder of a living process that is removed",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_UN",
        FILES,
        within="_remove_dead",
    ),
    Mutation("a folder whose owner has no lock yet", " and any(folder.iterdir())", "", FILES),
    Mutation("a process that outlives its run", 'self._tell(f"+{group}\\n")', "pass", KILLER),
    Mutation(
        "only the first process of a group is killed",
        "    try:\n        os.killpg(group",
        "    try:\n        os.kill(group",
        KILLER,
    ),
    Mutation(
        "an agent that outlives its run", "            killer.add(process.pid)", "            pass", KILLER
    ),
    Mutation("a link that becomes a file", "Path(os.path.realpath(path))", "path", FILES),
    Mutation(
        "settings that are written in place",
        '    replace_text(known, json.dumps(settings, indent=1) + "\\n")',
        '    known.write_text("")\n    replace_text(known, json.dumps(settings, indent=1) + "\\n")',
        CHECKPOINTS,
    ),
    Mutation(
        "a run that ends while another command looks",
        "settings) == folder:",
        "settings) or True:",
        CHECKPOINTS,
    ),
    Mutation("a start after the checkpoint", "reversed(before) if", "reversed(entries) if", CHECKPOINTS),
    Mutation(
        "a field that another one sets",
        '"do_eval": about(bookkeeping=Bookkeeping.LOGS, only_with="evaluation"',
        '"do_eval": about(only_with="evaluation"',
        CHECKPOINTS,
    ),
    Mutation(
        "the fields of a part that a command lacks",
        "if part not in parts} | own.keys()",
        "if part in parts} | own.keys()",
        "tests/cli/test_commands_without_effect.py",
    ),
    Mutation(
        "a misspelt argument of vLLM's server",
        'not {name, name.removeprefix("no_")} & known:',
        "not known:",
        "tests/input/test_bad_serve.py",
    ),
    Mutation("a field declared again", "{**ours.get(name, {}), **said}", "said", ONE_PLACE),
    Mutation(
        "bookkeeping of a method's own",
        "return own.union(*map(bookkeeping, kind.__subclasses__()))",
        "return own",
        ONE_PLACE,
    ),
    Mutation(
        "fields of transformers among ours",
        "return {**ours, **named, **theirs}",
        "return {**theirs, **named, **ours}",
        ONE_PLACE,
    ),
    Mutation("metadata for argparse", 'for key in ("help",) if key in self', "for key in self", ONE_PLACE),
    Mutation(
        "a temperature of no engine",
        "Bounds(SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE,",
        "Bounds(SMALLEST_TEMPERATURE, 1000,",
        FILTER_FIELDS,
    ),
    Mutation(
        "a lock of another process", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_UN", LOCK, within="_take"
    ),
    Mutation("two trainers of one process", "    if alone in held.alone:", "    if False:", LOCK),
    Mutation(
        "a forked process that keeps a lock",
        "        held.file.close()\n    _held.clear()",
        "        pass",
        LOCK,
    ),
    Mutation("a trainer that takes no lock", "        _take(file, folder)\n", "        pass\n", LOCK),
    Mutation(
        "later checkpoints that stay",
        "checkpoint_step(path) > step",
        "checkpoint_step(path) > step + 100",
        CHECKPOINTS,
    ),
    Mutation(
        "a receipt that does not reach the checkpoint",
        "    if before is None:",
        "    if False:",
        DAMAGED_RUNS,
    ),
    Mutation(
        "metrics that are gone",
        "if len(found) == len(wanted) and all(map(_has, found, wanted)):",
        "if True:",
        f"'{DAMAGED_RUN}[metrics gone]'",
    ),
    Mutation(
        "a summary before the report",
        "        with _pages_aside():\n",
        '        replace_text(self.folder / SUMMARY, "{}")\n        with _pages_aside():\n',
        "tests/run/test_run_files.py",
    ),
    Mutation(
        "an evaluation that was changed",
        'text_digest(text or "") == line["digest"]',
        "True",
        f"'{DAMAGED_RUN}[first evaluation with another reward]'",
    ),
    Mutation(
        "a remedy that does not work",
        "if number < step and _is_whole(earlier, number, receipt):",
        "if number < step:",
        DAMAGED_RUNS,
    ),
    Mutation(
        "metrics that were changed",
        "and all(map(_has, found, wanted)):",
        "and True:",
        f"'{DAMAGED_RUN}[metrics with another loss]'",
    ),
    Mutation(
        "an optimizer that starts from nothing",
        "if missing := sorted(",
        "if missing := sorted(()) and sorted(",
        DAMAGED_RUNS,
    ),
    Mutation("weights that were changed", "if digests[folder / name] != digest", "if False", DAMAGED_RUNS),
    Mutation(
        "a run that starts over beside itself",
        "    while _is_finished(folder) and not",
        "    while (folder / SUMMARY).exists() and not",
        f"'{DAMAGED_RUN}[summary empty]'",
    ),
    # input
    Mutation(
        "a terminal in ASCII",
        '        "backslashreplace",',
        '        "strict",',
        "tests/input/test_bad_words.py::test_a_terminal_in_ascii_ends_in_no_traceback",
    ),
    Mutation("numbers that are NaN", "math.isnan(value) or ", "", CHECKS),
    Mutation("numbers out of bounds", "    if not allowed.holds(value):", "    if False:", CHECKS),
    Mutation(
        "a key of a config file that is there twice",
        "if key.value in seen:",
        "if False:",
        "tests/input/test_bad_config_files.py",
    ),
    Mutation(
        "comments in the file of URLs",
        'line.partition("#")[0].strip()',
        "line.strip()",
        "tests/server/test_url_file.py",
    ),
    Mutation(
        "two fields that name the servers",
        "elif self.vllm_server_base_url is not None:",
        "elif False:",
        "tests/server/test_url_file.py",
    ),
    Mutation(
        "passwords in URLs",
        'if "@" in url:',
        "if False:",
        "tests/input/test_bad_words.py::test_a_password_in_a_url_is_refused_and_not_printed",
    ),
    Mutation(
        "a reward function that hangs",
        "                    signal.pthread_kill(thread, number)",
        "                    pass",
        CALLED,
    ),
    Mutation(
        "what a rollout_func changed stays",
        '            with process_as_before("rollout_func"):',
        "            if True:",
        "'tests/rollouts/test_process_as_before.py::"
        "test_what_a_function_changes_of_the_process_is_put_back_and_said_once[rollout_func-working directory]'",
    ),
    Mutation(
        "what an agent changed stays",
        '            with folder_as_before(f"agent {self.name}", self.timeout):',
        "            if True:",
        "tests/rollouts/test_process_as_before.py::test_an_agent_leaves_folder_and_locale",
    ),
    Mutation(
        "fields that leave no token, before a model is loaded",
        "        _check_leaves_tokens(path, guarded, args)",
        "        pass",
        "tests/contract/test_support.py",
    ),
    Mutation(
        "a place without a token, in the draw of completions",
        "                if not len(left):",
        "                if not len(left) and ids:",
        "tests/contract/test_support.py",
    ),
    Mutation(
        "an engine that finds no token to sample",
        "        if logprobs.isnan().any():",
        "        if False:",
        "'tests/contract/test_filters.py::test_an_engine_says_which_settings_leave_no_token_and_answers_again"
        "[transformers-allowed_token_ids and min_tokens]'",
    ),
    Mutation("what a function changed stays", "        kind.put_back(before)", "        pass", CALLED),
    Mutation(
        "an endless call that the run waits for",
        "            if awaited and attempts == _LAST:",
        "            if False:",
        "tests/rollouts/test_process_as_before.py",
    ),
    Mutation(
        "scores beyond float32",
        "if abs(number) > _LARGEST:",
        "if False:",
        "tests/input/test_bad_reward_files.py::test_a_bad_reward_function_is_one_line",
    ),
    Mutation(
        "lists that one reward function empties for the next",
        "list(value) if isinstance(value, list) else value",
        "value",
        "tests/input/test_bad_reward_files.py::test_a_function_that_empties_its_lists_is_blamed_and_not_the_next_one",
    ),
    Mutation(
        "columns that reward functions do not see",
        "if taken := _ARGUMENTS & set(dataset.column_names):",
        "if taken := set():",
        "tests/input/test_bad_data.py",
    ),
    # recovery
    Mutation("an engine that came back is trusted", "self._distrust()", "pass", RECOVERY),
    Mutation(
        "work that is given up at its first loss", "for _ in range(_LOSSES):", "for _ in range(1):", RECOVERY
    ),
    Mutation("an engine that is not waited for", "lost.recover()", "pass", RECOVERY),
    # rewards and their pairing
    Mutation("every rollout has the first one's score", "name: column[position]", "name: column[0]", REWARDS),
    Mutation("scores without their weights", "weights[name] * score for", "score for", REWARDS),
    Mutation("no score is a score of 0", "sum(given) if given else math.nan", "sum(given)", REWARDS),
    Mutation("scores of the wrong number", "or len(values) != count:", "or False:", REWARDS),
    Mutation(
        "a generation with a score leaves the count of those without one as it is",
        "            self._in_a_row = 0\n            for name",
        "            for name",
        "tests/run/test_unscored_generations.py",
    ),
    Mutation(
        "a generation without a score logs NaN",
        "    if len(rewards):",
        "    if True:",
        "tests/run/test_unscored_generations.py",
    ),
    Mutation(
        "text parts that are joined by a space",
        '"".join(part["text"]',
        '" ".join(part["text"]',
        "tests/run/test_trl_names.py",
        within="_with_joined_text",
    ),
    Mutation(
        "dir(lockstep) shows what the package imports for itself",
        "return sorted({*__all__,",
        "return sorted({*globals(), *__all__,",
        "tests/docs/test_public_names.py",
    ),
    # evaluation sets and streams
    Mutation(
        "a stream is shuffled",
        "shuffle=args.shuffle_dataset and not data.ordered",
        "shuffle=args.shuffle_dataset",
        "tests/run/test_evaluation_sets.py",
    ),
    Mutation(
        "every set of a mapping has the same names",
        'f"{metric_key_prefix}_{own}"\n                if own',
        "metric_key_prefix\n                if own",
        "tests/run/test_evaluation_sets.py",
    ),
    Mutation(
        "a revision that policy and engine do not load",
        "return snapshot_download(path, revision=revision)",
        "return snapshot_download(path)",
        "tests/models/test_revisions.py",
    ),
    # fields of transformers
    Mutation(
        "dropout that was asked for is switched off",
        "if not args.disable_dropout and",
        "if False and",
        "tests/run/test_harmless_fields.py::test_dropout_may_stay_on_only_where_there_is_none",
    ),
    Mutation(
        "a run that ends inside a generation leaves nothing to go on from",
        "            control.should_save = True",
        "            pass",
        "tests/run/test_harmless_fields.py",
    ),
    Mutation(
        "the best model is that with the lowest reward",
        'self.metric_for_best_model = "reward"',
        'self.metric_for_best_model = "reward_loss"',
        "tests/run/test_harmless_fields.py",
    ),
    Mutation("a rollout of another prompt", "if strangers:", "if False:", "tests/rollouts/test_rewards.py"),
    # advantages
    Mutation(
        "a standard deviation without Bessel's correction",
        "scored.std() if",
        "scored.std(correction=0) if",
        ADVANTAGES,
    ),
    Mutation("a baseline that holds its own reward", "* (count / max(count - 1, 1))", "", ADVANTAGES),
    Mutation(
        "unscored completions in the mean",
        "values[~values.isnan()].mean()",
        "values.nansum() / len(values)",
        ADVANTAGES,
    ),
    Mutation("an unscored completion learns", ".masked_fill(unscored, torch.nan)", "", ADVANTAGES),
    Mutation(
        "a batch's spread in place of the group's",
        "/ (_deviation(group) + _EPSILON) for",
        "/ (_deviation(rewards[0]) + _EPSILON) for",
        ADVANTAGES,
    ),
    Mutation("a value of the next completion", "following.masked_fill(~same, 0.0)", "following", RETURNS),
    Mutation("a divergence that is rewarded", "earned = -beta * kl", "earned = beta * kl", RETURNS),
    Mutation("longer returns without their weight", "gamma * lam, segments", "gamma, segments", RETURNS),
    # losses, weights, masks and normalisation
    Mutation("a clip that takes the larger", "-torch.minimum(bounded", "-torch.maximum(bounded", POLICY),
    Mutation(
        "one epsilon for both sides",
        "clamp(1 - epsilon, 1 + epsilon_high)",
        "clamp(1 - epsilon, 1 + epsilon)",
        POLICY,
    ),
    Mutation(
        "a masked completion leaves the mean",
        "lengths.clamp(min=1) * len(lengths)",
        "lengths.clamp(min=1) * (lengths > 0).sum()",
        POLICY,
    ),
    Mutation(
        "a mean over the tokens that were sampled",
        "1.0 / (len(lengths) * max_completion_length)",
        "1.0 / float(lengths.sum())",
        POLICY,
    ),
    Mutation("a prompt that counts by its completions", "* len(prompts))", "* len(lengths))", POLICY),
    Mutation(
        "a sequence's ratio that grows with its length",
        "segments.means(log_ratios)",
        "segments.sums(log_ratios)",
        POLICY,
    ),
    Mutation("a gradient through CISPO's weight", "ratios = ratios.detach()", "ratios = ratios * 1", POLICY),
    Mutation(
        "the smaller of the value's errors",
        "torch.maximum((values - returns)",
        "torch.minimum((values - returns)",
        RETURNS,
    ),
    Mutation(
        "a completion without an advantage is dropped",
        "(advantages >= 0) | (drift",
        "(advantages > 0) | (drift",
        MASKS,
    ),
    Mutation(
        "a threshold that leaves out its own token",
        "return entropies >= torch.lerp",
        "return entropies > torch.lerp",
        MASKS,
    ),
    Mutation(
        "weights upside down",
        "_ratios(policy_logps - behaviour_logps",
        "_ratios(behaviour_logps - policy_logps",
        CORRECTIONS,
    ),
    Mutation("weights without bounds", "return ratios.clamp(low, high)", "return ratios", CORRECTIONS),
    Mutation("no lower bound of a mask", "(ratios < low) | (ratios > high)", "(ratios > high)", CORRECTIONS),
    Mutation(
        "a margin that adds the reference", "(chosen - rejected) - (ref", "(chosen - rejected) + (ref", PAIRS
    ),
    Mutation(
        "a tie that prefers the second",
        "rewards_second > rewards_first, 1",
        "rewards_second >= rewards_first, 1",
        PAIRS,
    ),
    Mutation(
        "the margin of a pair is summed in float32",
        "batch.segments.sums(batch.logps.double()), batch.segments.sums(ref_logps.double())",
        "batch.segments.sums(batch.logps), batch.segments.sums(ref_logps)",
        "tests/watch/step/test_slopes.py",
    ),
    Mutation(
        "the entropies of a moved policy are compared with the engine's sets",
        "return self.scores(policy, asked, measure=False).entropies",
        "return self.scores(policy, asked, measure=True).entropies",
        "tests/watch/test_draws_in_training.py::test_every_sampled_token_is_bet_on_once[top-p-entropies-of-each-step]",
    ),
    Mutation(
        "a generation that is judged twice is pooled twice",
        "pool = PooledGap() if again else self.pool",
        "pool = self.pool",
        "tests/watch/test_decomposition.py",
    ),
    Mutation(
        "a resumed run forgets the tokens whose means wait",
        'self.pool = PooledGap(GapStats(**entry.get("waiting", {})))',
        "pass",
        "tests/extras/verify/test_receipts_read_back.py",
    ),
    Mutation(
        "the receipt says that a generation judged twice was judged the second time",
        "            if not again:\n                self.judged_now",
        "            if True:\n                self.judged_now",
        "tests/watch/test_decomposition.py",
    ),
    Mutation(
        "the page shows the mean of a single step beside the limit",
        "judged = run_record.judged_means(steps, figure)",
        "judged = run_record.judged_means([], figure)",
        PAGE,
    ),
    Mutation(
        "the page shows every largest gap beside the limit of another step",
        's.get("max_allowed", otherwise)',
        "otherwise",
        PAGE,
    ),
    Mutation(
        "seconds of phases: a GPU's own marks tell them, and not the host's clock",
        "if self._mark is None:\n            self._by_host(name)",
        "if self._mark is not None:\n            self._by_host(name)",
        "tests/report/test_phases.py",
    ),
    Mutation(
        "seconds of phases: nothing waits for a GPU to read them",
        "while self._ahead and self._ahead[0][2].query():",
        "while self._ahead:",
        "tests/report/test_phases.py::test_a_log_does_not_wait_and_a_later_one_has_the_seconds",
    ),
    Mutation("a wait is never told", "self.open.add(wait)", "pass", "tests/report/test_silence.py"),
    Mutation(
        "a wait is told twice per second",
        "elif now - when < pause:",
        "elif False:",
        "tests/report/test_silence.py::test_a_wait_is_told_after_five_seconds_and_then_ever_more_rarely_up_to_a_minute",
    ),
    Mutation(
        "exact accounting lets every cut score its own tokens",
        "own = [self.scores[s.name] for s in pack.sequences]",
        "return Policy.score(self, pack, config)\n        own = [self.scores[s.name] for s in pack.sequences]",
        "tests/extras/verify/test_accounting_row.py",
    ),
    Mutation(
        "each call of coroutine rewards has a loop of its own",
        "if self.loop is None or self.loop.is_closed() or self._process != os.getpid():",
        "if True:",
        "tests/rollouts/test_rewards.py::test_what_belongs_to_an_event_loop_may_live_as_long_as_the_run",
    ),
    Mutation(
        "a judge is waited for without a limit",
        'timeout, f"judge {name}"',
        '3600, f"judge {name}"',
        "tests/rollouts/test_judges.py",
    ),
    Mutation(
        "a checkpoint at the end of an epoch is saved without a log",
        "asked for here.\n        if self._may_save(args, control) and",
        "asked for here.\n        if False and",
        "'tests/run/test_resumable_saves.py::"
        "test_a_run_is_resumed_to_the_bit_from_every_checkpoint_that_it_leaves[ends of epochs]'",
    ),
    Mutation(
        "yes and no in the mapping of a field are booleans",
        'true|True|TRUE|false|False|FALSE", [*"tTfF"]',
        'true|True|TRUE|yes|false|False|FALSE|no", [*"tTfFyn"]',
        "tests/input/test_bad_config_files.py",
    ),
    Mutation(
        "a config in Python says nothing of a removed field's replacement",
        "for name in given.keys() - fields.keys():",
        "for name in ():",
        "tests/cli/test_arguments.py",
    ),
    Mutation(
        "a text in a column of several kinds becomes the number that it looks like",
        "        return json.dumps(value)\n    if isinstance(value, dict):",
        "        return value\n    if isinstance(value, dict):",
        "tests/tasks/test_tasks.py",
    ),
    Mutation(
        "a model whose parameters are all frozen is trained",
        "if not any(parameter.requires_grad for parameter in policy.parameters()):",
        "if False:",
        "tests/input/test_bad_python.py",
    ),
    Mutation(
        "a forked copy of the process goes on with the run",
        "if os.getpid() != process:",
        "if False:",
        "tests/rollouts/test_rewards.py",
    ),
    Mutation(
        "rows that have ended run past the model's positions",
        "or longest + budget > self._max_model_len",
        "",
        "tests/engines/test_transformers_engine.py",
    ),
    Mutation(
        "ids beyond the vocabulary are accepted",
        "or (vocab_size is not None and strange >= vocab_size)",
        "",
        "tests/engines/test_answers.py",
    ),
    Mutation(
        "dropout counts as a part of an adapter's weights",
        "with without_dropout(module), torch.autocast",
        "with torch.autocast",
        "tests/weights/test_adapters_alone.py::test_what_is_sent_is_compared_with_the_layers_themselves",
    ),
    Mutation(
        "a divergence the wrong way round",
        "_ExpMinusLinear.apply(ref_logps - logps)",
        "_ExpMinusLinear.apply(logps - ref_logps)",
        "tests/algorithms/test_masks_and_divergence.py",
    ),
    Mutation(
        "means over completions by their number",
        "/ self.lengths.clamp(min=1)",
        "/ max(len(self.lengths), 1)",
        "tests/algorithms/test_segments.py",
    ),
    Mutation(
        "a masked completion learns", "0 if objective.is_masked(r) else s.length", "s.length", GENERATION
    ),
    Mutation(
        "one normalisation for all steps",
        "len(advantaged), per_step):",
        "len(advantaged), len(advantaged)):",
        GENERATION,
    ),
    # packing, attention and gradients
    Mutation(
        "a token predicted from itself",
        "len(self.prompt_ids) - 1 + ",
        "len(self.prompt_ids) - 2 + ",
        "tests/learn/test_packing.py",
    ),
    Mutation(
        "branches that see each other",
        "ends[along[same:last]] = first",
        "ends[along[same:last]] = first + 1",
        "tests/learn/test_packing.py",
    ),
    Mutation(
        "a copy of a sequence whose values are not checked",
        "_KINDS[name](value) if value is not None and name in _KINDS else value",
        "value",
        "tests/learn/test_branches.py::test_a_copy_with_other_values_is_the_one_that_the_constructor_makes",
    ),
    Mutation(
        "derivatives of one ratio per completion that are computed over several completions",
        'whole = settings.importance_sampling_level == "sequence" or settings.loss_type == "vespo"',
        'whole = settings.loss_type == "vespo"',
        "tests/watch/step/test_slopes.py",
    ),
    Mutation(
        "every completion with the weight of the first",
        "np.repeat([float(c.weight) for c in completions], [len(c.logps) for c in completions])",
        "np.full(sum(len(c.logps) for c in completions), float(completions[0].weight))",
        "tests/watch/step/test_slopes.py",
    ),
    Mutation(
        "the rounding of a pack judged by all packs",
        "np.repeat([part.max(initial=0.0) for part in cut(sizes, packs)], packs)",
        "np.full(len(sizes), sizes.max(initial=0.0))",
        "tests/watch/step/test_slopes.py",
    ),
    Mutation(
        "the gradients of the first pack alone are compared",
        "        self._watched.append((batch, found))",
        "        if not self._watched:\n            self._watched.append((batch, found))",
        "tests/watch/step/test_slopes.py",
    ),
    Mutation(
        "packs beyond the budget",
        'fitting = max(1, int(np.searchsorted(sizes, budget, side="right")), larger)',
        'fitting = max(1, int(np.searchsorted(sizes, 2 * budget, side="right")), larger)',
        "tests/learn/test_pack_plan.py",
    ),
    Mutation(
        "a shared position is routed once for all completions",
        "sums.append((probabilities * weights[:, None]).sum(0))",
        "sums.append((probabilities * (weights > 0)[:, None]).sum(0))",
        ROUTER_CUTS,
    ),
    Mutation(
        "a token counts as routed otherwise only if all its experts differ",
        "differing += int((one != other).any(-1).sum())",
        "differing += int((one != other).all(-1).sum())",
        "tests/watch/test_routing.py",
    ),
    Mutation(
        "the choices of each pack alone",
        "whole = self._whole if self._whole is not None else Shares.of([routing.counts()])",
        "whole = Shares.of([routing.counts()])",
        ROUTER_CUTS,
    ),
    Mutation(
        "padding is routed",
        "last = self.host_predictors[torch.tensor([s.length for s in self.sequences]).cumsum(0) - 1]",
        "last = ends[self.predictors.cpu()[torch.tensor([s.length for s in self.sequences]).cumsum(0) - 1]] - 1",
        "tests/learn/test_router_loss.py::test_every_position_counts_once_per_sequence_and_padding_counts_nothing",
    ),
    Mutation(
        "completions without an advantage are not routed",
        "self.router_coefficient != 0.0 or bool(np.any(sequence.advantages))",
        "bool(np.any(sequence.advantages))",
        "tests/learn/test_router_loss.py::test_the_models_own_loss_is_added_where_the_rewards_teach_nothing",
    ),
    Mutation(
        "a step whose groups agree leaves no gradient",
        "parameter.grad = torch.zeros_like(parameter)",
        "pass",
        "tests/run/test_trainer.py::test_a_step_whose_groups_agree_has_gradient_zero_and_not_none",
    ),
    Mutation(
        "a step beyond the limits of the gap",
        "raise self.explained.error(",
        "return self.explained.error(",
        "tests/run/test_trainer.py::test_raw_log_probs_at_another_temperature_are_refused",
    ),
    Mutation(
        "a push whose probe failed",
        "check_probe(record, version)",
        "pass",
        "tests/run/test_trainer.py::test_a_step_on_stale_weights_is_refused_before_the_optimizer_moves",
    ),
    Mutation(
        "a trainer that does not know of discarded weights",
        "        forget_push(engine)\n\n\ndef drop",
        "        pass\n\n\ndef drop",
        LET_SLEEP,
    ),
    Mutation(
        "an engine that remembers lost weights", 'self.digest = self._earlier_digest = ""', "pass", LET_SLEEP
    ),
    Mutation(
        "an executor that is not ours",
        "not in (None, ",
        'not in (None, "external_launcher", ',
        WORKER_START,
        within="number_of_workers",
    ),
    Mutation(
        "an environment whose plugin stands elsewhere",
        "if entry.load() is register:",
        "if entry.load():",
        WORKER_START,
    ),
    Mutation("more workers than GPUs", "< tensor * stages:", "< 0:", WORKER_START),
    Mutation(
        "vLLM's model in one of several trainer processes",
        "if workers == 1:",
        "if workers == 0:",
        WORKER_START,
    ),
    Mutation("a split engine without vLLM", "if is_set and use_vllm is False:", "if False:", WORKER_START),
    Mutation(
        "a tool may take for ever",
        "return await in_thread(lambda: function(**given), self.timeout, what)",
        "return await asyncio.sleep(0, None)",
        TOOLS,
    ),
    Mutation(
        "tools in threads though none asks for them",
        "return None if self._threads or",
        "return None if True or",
        TOOLS,
    ),
    Mutation(
        "a signal in another thread is an error for the model",
        "if uses_signal(error) and",
        "if False and",
        TOOLS,
    ),
    Mutation("one call that fails is an alarm", "if same and len(ends) == 1:", "if False:", TOOLS),
    Mutation(
        "a tool that fails now and then is an alarm",
        "same = len(failed) == len(ends) and",
        "same = failed and",
        TOOLS,
    ),
    Mutation(
        "the thread of tools is another one after each call",
        "        if self._thread is None:\n            self._start()",
        "        self._start()",
        "tests/rollouts/test_tools.py",
    ),
    Mutation(
        "after a call that hangs no other one runs",
        "        if self._thread is thread:\n            self._start()",
        "        pass",
        "tests/rollouts/test_tools.py",
    ),
    Mutation(
        "Ctrl-C during a tool is an error for the model",
        "if isinstance(error, KeyboardInterrupt) and",
        "if False and",
        "tests/rollouts/test_tools.py",
    ),
    Mutation(
        "rewards read an environment in another thread than its own",
        "return self.calls.home.do(work, limit)",
        "return work()",
        "tests/run/test_tools_in_training.py",
    ),
    Mutation(
        "an alarm is said at every step",
        "(key, subject) in self._raised or known",
        "known",
        "tests/report/test_alarms.py",
    ),
    Mutation(
        "an alarm that was raised before the receipt was opened is not in it",
        "for about, alarm in self._raised.items() if about not in written",
        "for about, alarm in self._raised.items() if False",
        "tests/report/test_alarms.py",
    ),
    Mutation(
        "a reward function that scores nothing is silent",
        'self._alarms.tell("reward_none"',
        '(lambda *_, **__: None)("reward_none"',
        "tests/run/test_tools_in_training.py",
    ),
    Mutation(
        "the driver misses a rollout that has yet to go on after a call",
        "t for t in self._open if all(",
        "t for t in self._open if any(not task.done() for task in t) and all(",
        "tests/rollouts/test_settled.py",
    ),
    Mutation(
        "an error in the wait for tools is dropped",
        "            reactions.result()\n",
        "            pass\n",
        "tests/rollouts/test_settled.py",
    ),
    Mutation("a call without a tool", "if tool is None:", "if False:", TOOLS),
    Mutation(
        "a tool's error ends the rollout",
        "except (TookTooLong, Raised) as error:",
        "except TookTooLong as error:",
        TOOLS,
        within="_one",
    ),
    Mutation("slow tools are waited for again and again", "self._slow |= {", "_ = {", TOOLS),
    Mutation(
        "a tool holds the engine at every answer", "if seconds > _IN_ALL and", "if seconds > 9e9 and", TOOLS
    ),
    Mutation(
        "a tool's exit ends the run",
        "    except BaseException as error:\n        # Ctrl-C",
        "    except ValueError as error:\n        # Ctrl-C",
        "tests/rollouts/test_tools.py",
    ),
    Mutation(
        "an environment that failed is used again", "if environment.failed is None:", "if True:", ENVIRONMENTS
    ),
    Mutation("an environment's process outlives it", "end_process(self.instance)", "pass", ENVIRONMENTS),
    Mutation(
        "the seed of the rollout hides the column",
        'given.setdefault("seed", seed)',
        'given["seed"] = seed',
        ENVIRONMENTS,
    ),
    Mutation(
        "the column that chooses is given to reset",
        'if not (self.routed and key == "environment")',
        "if key",
        ENVIRONMENTS,
    ),
    Mutation(
        "the results of other calls",
        "zip(turn.calls, results, strict=True)",
        "zip(turn.calls, results[::-1], strict=True)",
        "tests/rollouts/test_tool_program.py::test_inserted_ids_are_the_results_of_the_calls_before_them",
    ),
    Mutation(
        "the user's words as the assistant's",
        '[{"role": "user", "content": content}]',
        '[{"role": "assistant", "content": content}]',
        "tests/rollouts/test_tool_program.py::test_words_of_the_user_without_room_end_the_rollout_as_cut "
        "tests/rollouts/test_tool_program.py::test_a_turn_without_a_call_is_answered_by_the_user_until_the_environment_ends_the_rollout",
        within="_talk",
    ),
    Mutation(
        "one round of calls too many",
        "rounds == self._iterations:",
        "rounds == (self._iterations or 0) + 1:",
        "tests/rollouts/test_tool_program.py::test_no_more_iterations_than_allowed",
    ),
    Mutation(
        "a result that the model cannot answer any more",
        "conversation.insert(inserted, room_after=1, pictures=shown)",
        "conversation.insert(inserted, pictures=shown)",
        "tests/rollouts/test_tool_program.py::test_a_result_that_leaves_no_room_for_an_answer_is_dropped",
    ),
    Mutation(
        "a turn whose end is that of the turn before",
        "self._conversation.took(turn, self, self._added)",
        "self._conversation.took(turn, self, self._added - len(turn.token_ids))",
        "tests/rollouts/test_tool_program.py::test_the_finish_reason_of_each_turn_stands_with_its_end_and_its_message",
    ),
    Mutation(
        "failures that are not counted",
        "sum(result.failed for result in results) + len(parsed.errors)",
        "0",
        "tests/rollouts/test_tool_program.py::test_a_malformed_call_is_answered_with_an_error_and_counted",
    ),
    Mutation(
        "an environment of another rollout",
        "self._held[conversation.seed] = environment",
        "self._held[0] = environment",
        "tests/rollouts/test_tool_program.py::test_a_reset_adds_to_the_prompt_and_the_reward_belongs_to_its_rollout",
    ),
    Mutation(
        "a prompt without what reset added",
        "            conversation.branch(ids, self._reader.shown_by(said.shown, ids))\n",
        "            pass\n",
        "tests/rollouts/test_tool_program.py::test_a_reset_adds_to_the_prompt_and_the_reward_belongs_to_its_rollout",
    ),
    Mutation(
        "an inserted id passes as sampled", "None if mask is None or mask.all() else mask,", "None,", FUNCTION
    ),
    Mutation("log-probs of other tokens", "(named[sampled] != token_ids[sampled]).any()", "False", FUNCTION),
    Mutation(
        "a row of another rollout",
        "RequestKey(prompt.prompt_id, sample)",
        "RequestKey(prompt.prompt_id, 0)",
        FUNCTION,
        within="_rollout",
    ),
    Mutation("ids beyond the vocabulary", "ids.max() >= vocabulary", "False", FUNCTION),
    Mutation(
        "a failed rollout is learned from",
        "return rollout.failed is not None or (masks",
        "return (masks",
        "tests/run/test_tools_in_training.py::test_a_failed_environment_leaves_its_rollout_out_of_rewards_baseline_and_loss",
    ),
    Mutation(
        "a failed rollout is scored",
        "(group.prompt, rollout) for group in groups for rollout in group.rollouts if rollout.failed is None",
        "(group.prompt, rollout) for group in groups for rollout in group.rollouts",
        "tests/run/test_tools_in_training.py::test_a_failed_environment_leaves_its_rollout_out_of_rewards_baseline_and_loss",
    ),
    Mutation(
        "an environment's reward has no weight",
        "*(1.0 for _ in own)",
        "*(0.0 for _ in own)",
        "tests/run/test_tools_in_training.py::test_an_environment_gives_its_reward_under_its_class_beside_the_functions",
    ),
    Mutation(
        "a prompt that does not show the tools",
        "tools=[*own, *schemas],",
        "tools=[],",
        "tests/run/test_tools_in_training.py::test_prompts_show_the_tools",
    ),
    Mutation(
        "the prompt that an environment extended is not sent to the other ranks",
        "not np.array_equal(c.prompt_ids, p.ids)",
        "False",
        "tests/rollouts/test_wire.py",
    ),
    Mutation(
        "a turn that is sent back is encoded again",
        "return joined([known.context_ids, known.turn_ids, found.ids])",
        "return extension.prompt((*known.messages, *new))",
        "tests/extras/agents/test_recording.py::TestConversations",
    ),
    Mutation(
        "a call goes on in a branch whose ids it does not begin with",
        "np.array_equal(context[: len(ids)], ids)",
        "len(ids) > 0",
        "tests/extras/agents/test_recording.py::TestBranches",
    ),
    Mutation(
        "a turn that the agent wrote has a finish reason",
        "*[None] * written",
        "",
        "tests/extras/agents/test_recording.py::TestConversations",
    ),
    Mutation(
        "attention over packs leaves out the cap of the scores",
        'kwargs.get("scaling"), kwargs.get("softcap")), None',
        'kwargs.get("scaling"), None), None',
        "tests/learn/test_transformed_logits.py::test_scores_and_gradients_are_those_of_the_models_own_logits",
    ),
    Mutation(
        "attention by paths takes the result of a path's other rows",
        "marks[chain.ancestors - first : chain.nodes - first] = True",
        "marks[: chain.nodes - chain.ancestors] = True",
        "tests/learn/test_tree_attention.py::test_paths_compute_what_the_dense_mask_gives",
    ),
    Mutation(
        "attention by paths leaves out the gradient of a path's last key",
        "used_until = call.columns.shape[1] - call.used[:, ::-1].argmax(1)",
        "used_until = call.columns.shape[1] - call.used[:, ::-1].argmax(1) - 1",
        "tests/learn/test_tree_attention.py::test_paths_compute_what_the_dense_mask_gives",
    ),
    Mutation(
        "attention by paths leaves the results of several calls in the order of the calls",
        "torch.cat(used).index_select(0, self.order)",
        "torch.cat(used)",
        "tests/learn/test_tree_attention.py::test_paths_compute_what_the_dense_mask_gives",
    ),
    Mutation(
        "a GPU starts kernels block by block",
        "if microseconds > microseconds_of(blocks):",
        "if True:",
        "tests/learn/test_tree_attention.py::test_a_gpu_computes_usual_packs_in_few_calls_that_take_less_time_by_arithmetic",
    ),
    Mutation(
        "the backward in bf16 lets a row of a chain see the rows after it",
        "shares[:, -hidden.shape[-1] :].masked_fill_(hidden.T.repeat_interleave(groups, 1), 0.0)",
        "pass",
        "tests/learn/test_half_backward.py::test_without_rounding_the_gradients_are_those_of_the_dense_mask",
    ),
    Mutation(
        "the backward in bf16 rounds the logarithm of the denominators",
        "rest -= found[..., column]",
        "rest.zero_()",
        "tests/learn/test_half_backward.py::test_the_rounding_is_that_of_pytorchs_kernel_in_bf16",
    ),
    Mutation(
        "the backward in bf16 has queries that the forward did not round",
        "part.bfloat16() for part in (query, key, value)",
        "part for part in (query, key, value)",
        "tests/learn/test_half_backward.py::test_only_a_run_in_bf16_on_a_processor_with_fast_bf16_has_this_backward",
    ),
    Mutation(
        "groups with different prompts are joined to a pack beyond the budget",
        "prompts[following] == prompts[start] == repeated[following]",
        "True",
        "tests/learn/test_pack_plan.py",
    ),
    Mutation(
        "attention over plain rows leaves out the cap of the scores",
        "if not window and cap is not None:",
        "if False:",
        "tests/learn/test_transformed_logits.py::test_a_cap_on_attention_is_that_of_the_models_own_definition",
    ),
    Mutation(
        "a required call counts as made although the turn has none",
        "not (self.call in called if self.call else called)",
        "self.call and self.call not in called",
        "tests/extras/agents/test_requests.py::TestWishes",
    ),
    Mutation(
        "a stop string of a call does not reach the engine",
        "sampling = replace(sampling, stop=(*sampling.stop, *own))",
        "pass",
        "tests/extras/agents/test_recording.py::TestWishes",
    ),
    Mutation(
        "the proof of settings takes any stop string for one of the call",
        "stop[: -len(own)] if own and stop[-len(own) :] == own else stop",
        "self.wanted.stop",
        "tests/watch/test_user_settings.py",
    ),
    Mutation(
        "a part of a stop string is streamed",
        "content = without_beginning(content, stop)",
        "pass",
        "tests/extras/agents/test_partial.py",
    ),
    Mutation(
        "the second of several answers has the name of the first",
        'name=f"{call.name} choice {i}"',
        "name=call.name",
        "tests/extras/agents/test_recording.py::TestWishes",
    ),
    Mutation(
        "greedy decoding is scored as sampling from the whole distribution",
        '({"top_k": 1} if self.is_greedy else {})',
        "{}",
        "tests/run/test_filter_fields.py",
    ),
    Mutation(
        "half of a character is streamed",
        'return Partial(reasoning, _OPEN.sub("", content))',
        "return Partial(reasoning, content)",
        "tests/extras/agents/test_partial.py",
    ),
    Mutation(
        "the beginning of a tool call is streamed as text",
        "content = text_before_calls(content, how.tool_format)",
        "pass",
        "tests/extras/agents/test_partial.py",
    ),
    Mutation(
        "the end of thinking is streamed as thinking",
        'reasoning = _OPEN.sub("", without_beginning(reasoning, how.thinking[1]))',
        "pass",
        "tests/extras/agents/test_partial.py",
    ),
    Mutation(
        "text is streamed only when the turn is finished",
        "partial=inbox.is_watched(request.key)",
        "partial=False",
        "tests/extras/agents/test_on_vllm.py::test_text_is_streamed_while_vllm_samples_and_the_ids_are_recorded_as_sampled[chat]",
    ),
    Mutation(
        "a turn that differs from its stream is taken for the answer",
        "if not text.startswith(sent):",
        "if False:",
        "tests/extras/agents/test_web.py::TestStreams",
    ),
    Mutation(
        "a client's retry is sampled again",
        "self._answers.get(call.name) if call.may_repeat else None",
        "None",
        "tests/extras/agents/test_recording.py::TestCallsThatDoNotEnd",
    ),
    Mutation(
        "the same messages again get the old answer",
        'may_repeat=count != "0")',
        "may_repeat=True)",
        "tests/extras/agents/test_recording.py::TestBranches::test_the_same_messages_again_are_another_sample",
    ),
    Mutation(
        "calls of one rollout run at once",
        "async with self._turn:",
        "async with asyncio.Lock():",
        "tests/extras/agents/test_recording.py::TestCallsThatDoNotEnd",
    ),
    Mutation(
        "an error of the engine is the agent's alone",
        "            if not self.failure.done():\n                self.failure.set_exception(error)\n",
        "",
        "tests/extras/agents/test_recording.py::TestTools::test_tools_that_the_template_does_not_show_stop_the_run",
    ),
    Mutation(
        "a rollout answers after its end",
        "self._rollouts.pop(_digest(key), None) is not None:",
        "self._rollouts.get(_digest(key)) is None:",
        "tests/extras/agents/test_web.py::TestKeys",
    ),
    Mutation(
        "a call at the end of its rollout stays open",
        "            task.cancel()\n",
        "            pass\n",
        "tests/extras/agents/test_recording.py::TestCallsThatDoNotEnd::test_a_call_that_is_open_at_the_agents_end_is_cancelled",
        within="end",
    ),
    Mutation(
        "other tools do not make another conversation",
        "hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)",
        "hashlib.blake2b(digest_size=16)",
        "tests/extras/agents/test_requests.py",
    ),
    Mutation(
        "two messages are told apart only by their texts together",
        'state.update(len(text).to_bytes(8, "big") + text)',
        "state.update(text[:1])",
        "tests/extras/agents/test_requests.py",
    ),
    Mutation(
        "another temperature is accepted",
        "or value != ours:",
        "or False:",
        "tests/extras/agents/test_requests.py",
    ),
    Mutation(
        "a field that nobody knows is accepted",
        "elif name not in _ONLY:",
        "elif name not in _ONLY and False:",
        "tests/extras/agents/test_requests.py",
    ),
    Mutation(
        "any key opens a rollout",
        "rollout, is_ended = self._rollouts.get(digest), digest in self._ended",
        "rollout, is_ended = next(iter(self._rollouts.values()), None), digest in self._ended",
        "tests/extras/agents/test_web.py::TestKeys",
    ),
    Mutation(
        "a body of any size is read",
        "if size > LARGEST_BODY:",
        "if False:",
        "tests/extras/agents/test_web.py::TestRefusals",
    ),
    Mutation(
        "a call whose client is gone goes on",
        "        except BaseException:\n            future.cancel()\n            raise\n",
        "        except BaseException:\n            raise\n",
        "tests/extras/agents/test_web.py::TestClientsThatGoAway",
    ),
    Mutation(
        "an agent that returns after its run has ended raises in its thread",
        "    found.set_running_or_notify_cancel()\n",
        "",
        "tests/extras/agents/test_agents.py::TestFunctions",
    ),
    Mutation(
        "an agent gets the key of the engine's server",
        "**for_users_code(), BASE_URL",
        "**os.environ, BASE_URL",
        "tests/extras/agents/test_agents.py::TestCommands",
    ),
    Mutation(
        "what a command started goes on after it",
        "    with suppress(ProcessLookupError):\n        os.killpg",
        "    with suppress(ProcessLookupError):\n        os.kill",
        "tests/extras/agents/test_agents.py::TestCommands",
    ),
    Mutation(
        "the digest of a picture leaves its pixels out",
        "content.update(self.pixel_values.numpy().tobytes())",
        "content.update(b'')",
        f"{READING}::test_equal_pixels_have_equal_digests_and_other_pixels_or_grids_others",
    ),
    Mutation(
        "positions after a picture count its tokens",
        "after = np.arange(known.shape[1], length) + self.delta",
        "after = np.arange(known.shape[1], length)",
        f"{READING}::test_positions_after_the_prompt_are_those_of_the_models_own_function",
    ),
    Mutation(
        "the template's placeholder stays beside the ids that stand for its picture",
        "for part in (own.ids, piece[1:])",
        "for part in (own.ids, piece)",
        f"{READING}::test_placeholders_stand_once_per_token_of_each_picture",
    ),
    Mutation(
        "a URL is taken for a file",
        'isinstance(image, str) and "://" in image',
        "False and image",
        f"{READING}::test_what_is_no_picture_is_refused",
    ),
    Mutation(
        "a part of a path allows what begins like it",
        'path.startswith(begin + "/")',
        "path.startswith(begin)",
        f"{PICTURE_URLS}::test_all_other_urls_are_refused_and_nothing_secret_is_shown",
    ),
    Mutation(
        "dots of a path that are encoded twice are not seen",
        "while (decoded := unquote(path)) != path:",
        "if (decoded := unquote(path)) != path:",
        f"{PICTURE_URLS}::test_all_other_urls_are_refused_and_nothing_secret_is_shown",
    ),
    Mutation(
        "a redirect may lead anywhere",
        'url = self.check(str(url.join(answer.headers["location"])))',
        'url = url.join(answer.headers["location"])',
        f"{PICTURE_URLS}::test_a_redirect_must_be_allowed_too",
    ),
    Mutation(
        "a run fetches a picture again where it needs it",
        'row = reader.with_files({**given, "prompt"',
        'row = dict({**given, "prompt"',
        f"{PICTURE_URLS}::test_a_run_learns_from_the_bytes_that_it_fetched_once",
    ),
    Mutation(
        "a call with another picture continues the branch of equal ids",
        "np.array_equal(context[: len(ids)], ids) and same",
        "np.array_equal(context[: len(ids)], ids)",
        f"{AGENT_PICTURES}::test_the_rows_ids_with_another_picture_are_another_branch",
    ),
    Mutation(
        "an agent may name files of the trainer's machine",
        "if not isinstance(url, str) or not (is_data_url(url) or is_url(url)):",
        "if not isinstance(url, str):",
        f"{AGENT_PICTURES}::test_what_cannot_be_shown_is_an_error_for_the_agent",
    ),
    Mutation(
        "the limit on pictures does not count those of earlier turns",
        "self.check_count(len(pictures_in(messages)) + more)",
        "self.check_count(more)",
        f"{PICTURE_TURNS}::test_a_result_with_more_pictures_than_the_limit_is_an_error_for_the_model",
    ),
    Mutation(
        "a branch may leave out the last token of a turn that was cut",
        "(len(own_ids) > end and int(own_ids[-1]) in self._end_ids)",
        "1",
        f"{EXTENSION_TESTS}::test_the_last_token_of_a_turn_that_was_cut_may_be_neither_left_out_nor_another",
    ),
    Mutation(
        "the ids of a result stand for the pictures of the whole conversation",
        "suffix = self.template.ids(text[turn_end:], pictures_in(new_messages))",
        "suffix = self.template.ids(text[turn_end:], pictures[: len(pictures_in(new_messages))])",
        f"{VISION_TEMPLATES}::test_a_result_with_pictures_continues_the_ids_of_the_whole_conversation",
    ),
    Mutation(
        "a branch has the pictures of the new messages alone",
        "pictures = pictures_in([*messages, *new_messages])",
        "pictures = pictures_in(messages)",
        f"{VISION_TEMPLATES}::test_a_branch_has_the_pictures_of_all_messages",
    ),
    Mutation(
        "text as content is left out by templates that take parts only",
        "lambda: not self._shows_text() and self._shows_text(in_parts=True)",
        "lambda: False",
        f"{VISION_TEMPLATES}::test_text_of_messages_is_shown_also_by_templates_that_take_parts_only",
    ),
    Mutation(
        "a turn has the pictures of the first turn",
        "pictures=self.turns[-1].answer.pictures,",
        "pictures=self.turns[0].answer.pictures,",
        f"{PICTURE_TURNS}::test_results_with_pictures_are_proven_turn_by_turn[qwen2_5_vl]",
    ),
    Mutation(
        "a rollout may show other pictures than the engine was sent",
        "seen = request.pictures.digests",
        "seen: tuple[str, ...] = ()",
        f"{PICTURE_TURNS}::test_results_with_pictures_are_proven_turn_by_turn[qwen2_5_vl]",
    ),
    Mutation(
        "a model of text answers as if it had seen the images of a function",
        "    if given and not reader.shows_pictures:\n",
        "    if False:\n",
        "tests/images/test_rollout_func_with_pictures.py::"
        "test_a_model_of_text_refuses_images_that_it_would_not_see[False]",
    ),
    Mutation(
        "a branch may have placeholders without their pictures",
        "if not pictures and (ids == self.prompt.pictures.placeholder).any():",
        "if False:",
        f"{PICTURE_TURNS}::test_a_branch_without_the_pictures_of_its_ids_is_refused",
    ),
    Mutation(
        "positions are those of the first picture's text",
        "positions, delta = self._model.base_model.get_rope_index(row, mm_token_type_ids=marks, **shown)",
        "positions, delta = torch.arange(len(ids)).expand(3, 1, -1), 0",
        f"{PICTURE_TURNS}::test_results_with_pictures_are_proven_turn_by_turn[qwen2_5_vl]",
    ),
    Mutation(
        "a ban of one token counts the ids of one call",
        "several = any(len(word) > 1 for word in self.bad_words)",
        "several = bool(self.bad_words)",
        f"{PICTURE_TURNS}::test_a_prompt_with_pictures_goes_on_with_text_and_after_an_interruption",
    ),
    Mutation(
        "an address of the network gets into the report",
        "isinstance(url, str) and _INLINE.fullmatch(url)",
        "True",
        "tests/images/test_images_recipe.py::test_nothing_but_an_inline_picture_gets_into_the_page",
    ),
    Mutation(
        "equal questions on different pictures are one row of the report",
        'return (str(entry["prompt"]), *map(str, entry.get("images") or ()))',
        'return (str(entry["prompt"]),)',
        "tests/images/test_images_recipe.py::test_equal_questions_on_different_pictures_are_different_rows",
    ),
    Mutation(
        "two pictures are one path of the tree",
        "number = _FIRST + self._starts[picture.digest]",
        "number = _FIRST",
        f"{PICTURE_PACKS}::test_equal_ids_with_other_pictures_are_other_nodes",
    ),
    Mutation(
        "a pack's placeholders are filled in the order of its pictures instead of its nodes",
        "found.pooler_output = (torch.cat(tuple(found.pooler_output))[rows],)",
        "found.pooler_output = (torch.cat(tuple(found.pooler_output))[rows.sort().values],)",
        f"{PICTURE_PACKS}::test_packs_score_and_learn_like_plain_rows",
    ),
    Mutation(
        "the vectors of tiles are in the order of the pictures instead of the nodes",
        "parts.flatten(0, 1)[rows].unflatten",
        "parts.flatten(0, 1)[rows.sort().values].unflatten",
        f"{PICTURE_PACKS}::test_packs_score_and_learn_like_plain_rows",
    ),
    Mutation(
        "the vectors for deeper layers are in the order of the pictures instead of the nodes",
        "[(torch.cat(tuple(parts))[rows],) for parts in layers]",
        "[(torch.cat(tuple(parts))[rows.sort().values],) for parts in layers]",
        f"{PICTURE_PACKS}::test_packs_score_and_learn_like_plain_rows",
    ),
    Mutation(
        "a question on another picture counts as one that was trained on",
        "return prompt.ids.tobytes(), prompt.pictures.digests",
        "return prompt.ids.tobytes(), ()",
        f"{PICTURE_RUNS}::test_a_question_on_another_picture_is_held_out",
    ),
    Mutation(
        "no new line stands between two rows of tiles",
        "self._newline if row < rows else self._newlines",
        "[] if row < rows else self._newlines",
        "tests/images/test_families.py::test_the_ids_of_tiles_are_those_of_smolvlms_own_text",
    ),
    Mutation(
        "a tile of zeros is shown to the model",
        "padded or not bool(pixels.flatten(1).any(1).all())",
        "padded",
        "tests/images/test_families.py::test_a_tile_that_the_model_would_take_for_padding_is_refused",
    ),
    Mutation(
        "placeholders may be sampled",
        "*((token,) for token in banned_ids)",
        "",
        f"{PICTURE_RUNS}::test_placeholders_are_banned_on_both_sides",
    ),
    Mutation(
        "a completion may have a placeholder",
        "if (found := np.isin(ids, banned)).any():",
        "if (found := np.isin(ids, ())).any():",
        f"{PICTURE_RUNS}::test_a_placeholder_that_an_engine_samples_all_the_same_is_found",
    ),
    Mutation(
        "no generation is searched for placeholders",
        "check_placeholders(branches_of(groups), self._settings.banned)",
        "pass",
        f"{PICTURE_RUNS}::test_a_placeholder_that_an_engine_samples_all_the_same_is_found",
    ),
    Mutation(
        "an answer of another adapter is taken",
        "if used != adapter:",
        "if False:",
        "tests/engines/test_vllm_requests.py::test_an_answer_of_another_adapter_than_the_current_one_is_refused",
    ),
    Mutation(
        "an answer after other pictures is taken",
        "if asked != used:",
        "if False:",
        f"{PICTURE_RUNS}::test_an_answer_after_the_pictures_of_another_request_is_refused",
    ),
    Mutation(
        "a worker of a server may encode other pixels than were sent",
        "if found != {picture.digest}:",
        "if picture.digest not in found:",
        f"{SENT_PICTURES}::test_no_worker_may_have_encoded_anything_else_than_what_was_sent",
    ),
    Mutation(
        "a server may put pictures into other places of a prompt",
        "if found != expected:",
        "if found.keys() != expected.keys():",
        f"{SENT_PICTURES}::test_pictures_must_be_at_the_places_for_which_they_were_sent",
    ),
    Mutation(
        "pictures are counted on that the server may have dropped",
        "self._held.move_to_end(picture.digest)",
        "pass",
        f"{SENT_PICTURES}::test_half_of_the_servers_cache_is_counted_on_and_what_was_used_last_stays",
    ),
    Mutation(
        "an engine may normalise pixels a second time",
        'must("mm_device_do_normalize", actual.normalises_pixels, False)',
        "pass",
        RECEIPT,
    ),
    Mutation(
        "a reward function without **kwargs gets no advice",
        "    elif isinstance(error, TypeError):",
        "    elif isinstance(error, KeyError):",
        "tests/rollouts/test_rewards.py::test_a_function_whose_parameters_do_not_fit_gets_advice",
    ),
    Mutation(
        "a coroutine that sets a signal is told of another cause",
        "    if threads.is_coroutine_function(function):\n        return (",
        "    if False:\n        return (",
        "tests/rollouts/test_rewards.py::test_where_math_verify_cannot_set_its_time_limit_the_setting_is_named",
    ),
    Mutation(
        "a rank waits for rank 0 without a word",
        "rank 0 to answer at {host}:{port} (MASTER_ADDR, MASTER_PORT)",
        "an answer",
        "tests/run/test_launcher.py::test_a_rank_says_that_it_waits_for_rank_0_and_does_so_no_longer_than_its_limit",
    ),
    Mutation(
        "a refusal of another micro-batch does not name token_budget",
        "[name for name in changed if name in _SIZES]",
        "[]",
        "tests/run/test_checkpoints_and_directory.py::test_an_interrupted_run_goes_on_only_with_the_same_settings",
    ),
    Mutation(
        "what a library builds from a mapping is built after the model is loaded",
        "            build(given)",
        "            pass",
        "tests/run/test_built_once.py",
    ),
    Mutation(
        "a schedule by metric is never stepped before the model is loaded",
        "            else _reduced(name, given)",
        "            else []",
        "tests/run/test_built_once.py",
    ),
    Mutation(
        "a resumed run renders its templates with the time of now",
        "            return TemplateClock(moment, is_earlier=True)",
        "            return TemplateClock(datetime.now(), is_earlier=True)",
        "tests/run/test_proven_resume.py::test_a_resumed_run_renders_with_the_time_of_its_first_start",
    ),
    Mutation(
        "the prompts of a run have one time",
        "{NAME_IN_TEMPLATES: self.template_clock.strftime_now, **(given or {})}",
        "{**(given or {})}",
        "tests/run/test_proven_resume.py::test_a_resumed_run_renders_with_the_time_of_its_first_start",
    ),
    Mutation(
        "the receipt's digest of the data leaves pictures out",
        'digest.update("".join(row.pictures.digests).encode())',
        "digest.update(b'')",
        f"{PICTURE_RUNS}::test_the_receipt_depends_on_the_pixels",
    ),
    Mutation(
        "an expert's projection is sent as its neighbour's",
        "narrow(0, part.start, part.rows)",
        "narrow(0, max(part.start - part.rows, 0), part.rows)",
        EXPERTS,
    ),
    Mutation(
        "experts in another order are taken as they lie",
        "if not torch.equal(row_numbers, torch.arange(first, first + count)):",
        "if False:",
        EXPERTS,
    ),
    Mutation(
        "the probe of an engine's experts asks the first one only",
        "return module(inputs, chosen,",
        "return module(inputs, 0 * chosen,",
        EXPERTS,
    ),
    Mutation(
        "all tiles of a picture go to vLLM as one picture",
        "for tile in self.pixel_values.split(1))",
        "for tile in (self.pixel_values,))",
        f"{SENT_PICTURES}::test_each_tile_is_a_picture_whose_placeholders_stand_side_by_side",
    ),
    Mutation(
        "other ids may stand between the placeholders of what vLLM takes for one picture",
        "if any(own[-1] - own[0] >= len(own) for own in pieces.places_of_each):",
        "if False:",
        f"{SENT_PICTURES}::test_each_tile_is_a_picture_whose_placeholders_stand_side_by_side",
    ),
    Mutation(
        "a padded tile counts as the tile that was sent",
        "return piece if is_ours else None",
        "return piece",
        f"{SENT_PICTURES}::test_a_worker_records_the_digest_of_what_it_encodes_and_nothing_of_other_programs",
    ),
    Mutation(
        "a rank in TRL's tool loop waits for the other ranks",
        "if self._ranks.count > 1 and num_generations == 1 and _goes_on(prompts, self._answered):",
        "if False:",
        "tests/extras/trl/test_trl_ranks.py::test_a_call_that_goes_on_after_a_completion_is_refused_before_it_waits",
    ),
    Mutation(
        "TRL's generation object asks without the images",
        "request_seed(seed, version, key), pictures)",
        "request_seed(seed, version, key))",
        "tests/extras/trl/test_trl_images.py::test_trls_trainer_learns_from_images",
    ),
    Mutation(
        "images of TRL need not be those of the ids",
        "if found != due:",
        "if False:",
        "tests/extras/trl/test_trl_images.py::test_images_that_are_not_those_of_the_ids_are_refused",
        within="_check",
    ),
    Mutation(
        "a picture of TRL may change on its way",
        "if any(picture.digest != digest for digest, picture in pictures.items()):",
        "if False:",
        "tests/extras/trl/test_trl_images.py::test_each_picture_goes_to_the_rank_with_the_engine_once_and_unchanged",
    ),
    Mutation(
        "a picture may change on its way to another rank",
        "known[picture.digest] = picture",
        'known.update(dict.fromkeys((d for shown in data["others"] for d in shown["digests"]), picture))',
        f"{WIRE}::test_pictures_that_do_not_arrive_as_they_were_sent_are_refused",
    ),
    Mutation(
        "a completion of another rank may lose its pictures",
        "if place == _OWN and not own:",
        "if False:",
        f"{WIRE}::test_pictures_that_do_not_arrive_as_they_were_sent_are_refused",
    ),
    Mutation(
        "every completion of another rank is taken to have seen the pictures of its prompt",
        "shown is own or _equal(shown, own)",
        "True",
        f"{WIRE}::test_each_completion_finds_the_pictures_of_its_prompt_and_only_others_are_sent",
    ),
    Mutation(
        "ranks may read other pixels",
        'digest.update("".join(prompt.pictures.digests).encode())',
        "pass",
        f"{PICTURE_RUNS}::test_ranks_that_read_other_pixels_have_other_prompts",
    ),
    Mutation(
        "the trainer learns from the pixels that an engine hands back",
        "completion = replace(completion, pictures=request.pictures)",
        "pass",
        "tests/images/test_pictures_verified.py::test_every_fault_of_pictures_is_caught",
    ),
    Mutation(
        "a single row is scored without its pictures where only the temperature is set",
        "distribution.sampling.temperature, precision, pictures)",
        "distribution.sampling.temperature, precision, None)",
        f"{PICTURE_PACKS}::test_a_single_row_is_scored_with_its_pictures",
    ),
    Mutation(
        "a frozen vision tower learns",
        "part.requires_grad_(False)",
        "part.requires_grad_(True)",
        "tests/images/test_adapters_with_pictures.py::test_a_frozen_tower_stays_and_the_language_part_learns",
        within="_freeze_vision_tower",
    ),
    Mutation(
        "the projector of a frozen tower learns",
        "return [trunk.vision_model, trunk.connector]",
        "return [trunk.vision_model]",
        "tests/images/test_adapters_with_pictures.py::test_a_frozen_tower_stays_and_the_language_part_learns",
    ),
    Mutation(
        "max_pixels does not reach the image processor",
        '"longest_edge": int(high)}',
        '"longest_edge": processor.size["longest_edge"]}',
        PICTURE_LIMITS,
    ),
    Mutation(
        "a picture may have more tiles than max_pixels allows",
        "math.isqrt(self.max_pixels) // side",
        "math.isqrt(self.max_pixels) // side + 1",
        PICTURE_LIMITS,
    ),
    Mutation(
        "limit_mm_per_prompt allows one picture more",
        "count > self.per_prompt:",
        "count > self.per_prompt + 1:",
        PICTURE_LIMITS,
    ),
    Mutation(
        "values of sampled ids land on inserted ones in kept rollouts",
        "whole[branch.sampled] = own",
        "whole[: len(own)] = own",
        f"{KEPT_ROLLOUTS}::test_inserted_ids_have_zeros_and_each_branch_has_its_own_turns",
    ),
    Mutation(
        "the first steps of kept rollouts go first",
        "files.pop(1 + min(",
        "files.pop(0 + min(",
        f"{KEPT_ROLLOUTS}::test_over_the_limit_the_first_the_last_and_evenly_spread_files_stay",
    ),
    Mutation(
        "a write that fails leaves a part of a file of rollouts",
        "            beside.unlink(missing_ok=True)\n        raise",
        "            pass\n        raise",
        f"{KEPT_ROLLOUTS}::test_a_write_that_fails_leaves_no_part_of_a_file",
    ),
    Mutation(
        "the engine's log-probs are kept as the trainer's",
        "sums.logps += [(batch.sequences, batch.old_logps) for batch, _ in packs]",
        "sums.logps += [(batch.sequences, batch.behaviour_logps) for batch, _ in packs]",
        f"{KEPT_ROLLOUTS}::test_the_trainers_log_probs_are_those_of_the_weights_that_sampled",
    ),
    Mutation(
        "a failed run leaves no word about it",
        "if self._failure is not error and self._trainer.ranks.owner:",
        "if False:",
        f"{RUN_FILES}::test_a_failed_proof_leaves_its_report_and_its_rollouts",
    ),
    Mutation(
        "the rollouts on which a proof has failed are not kept",
        "self._keep_generation(failed=isinstance(error, ProofError))",
        "pass",
        f"{RUN_FILES}::test_a_failed_proof_leaves_its_report_and_its_rollouts",
    ),
    Mutation(
        "lines of an earlier run stay in the metrics",
        "for name in (METRICS, SHOWN):",
        "for name in (SHOWN,):",
        f"{RUN_FILES}::test_a_script_leaves_the_files_of_the_command_line",
    ),
    Mutation("texts are markup in the report", "return super().escape(", "return cls(", SAFE),
    Mutation(
        "the best score of a group has the color of the worst",
        "sum(r < reward for r in given)",
        "sum(r > reward for r in given)",
        f"{PAGE}::test_scores_are_colored_by_rank_within_their_group",
    ),
    Mutation(
        "a finished run with unproven steps is called good",
        "if unproven or not proven:",
        "if not proven:",
        f"{PAGE}::test_a_finished_run_with_unproven_steps_is_not_called_good",
    ),
    Mutation(
        "a curve loses its peaks",
        "{min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}",
        "{min(part, key=lambda p: p[1])}",
        f"{PAGE}::test_curves_keep_their_peaks_and_draw_limits",
    ),
    Mutation(
        "a report may be larger than a megabyte",
        "if len(page.encode()) < LARGEST:",
        "if True:",
        f"{PAGE}::test_a_page_of_a_long_run_with_long_rollouts_is_below_a_megabyte",
    ),
    Mutation(
        "text of a model is markup in TensorBoard",
        'for sign in "|*_`[]#~":',
        'for sign in "":',
        "tests/run/test_completion_log.py::test_a_table_has_trls_columns_and_its_text_is_no_markup",
    ),
    Mutation("an audit forgets that inserted ids are nobody's", "if rollout.sampled[place + i]]", "]", AUDIT),
    Mutation(
        "an audit takes the log-probs of OpenRLHF one place too late",
        "np.concatenate([[0.0], found]) if len(found) == tokens - 1 else found",
        "np.concatenate([found, [0.0]]) if len(found) == tokens - 1 else found",
        AUDIT,
    ),
    Mutation(
        "an audit makes the sums of the draws proof for every hypothesis",
        "if draws and not name:",
        "if not name:",
        AUDIT,
    ),
    Mutation(
        "an audit compares a server at the stated temperature",
        "{_PLAIN: replace(suspects.stated, sampling=Sampling(1))}",
        "{_PLAIN: suspects.stated}",
        AUDIT,
    ),
    Mutation("an audit lets equal rollouts pass", "if twin is not None:", "if False:", AUDIT),
    Mutation(
        "a sharded model stays gathered after a forward, so that a push reads weights of before the step",
        "        self.weights.end()",
        "        pass",
        SHARDS,
    ),
    Mutation(
        "a gathered parameter is not noticed",
        "now.get(name) is not p or not is_sharded(p)",
        "False",
        f"{SHARDS}::test_a_model_that_is_left_gathered_is_refused",
    ),
    Mutation(
        "the gradients of a sharded model are divided by the number of ranks",
        "            unit.set_gradient_divide_factor(1.0)",
        "            unit.set_gradient_divide_factor(2.0)",
        f"{SHARDS}::test_forward_and_gradients_are_those_of_the_whole_model",
    ),
    Mutation(
        "after a failure between forward and backward, the other ranks wait for the backward",
        "                (self._hidden.sum() * 0.0).backward()",
        "                pass",
        f"{SHARDS}::test_a_failure_leaves_nothing_gathered",
    ),
    Mutation(
        "the hooks of the accumulation proof see the reduced gradient of a sharded model",
        "self._hooked = [gathered(p) for p in self._parameters]",
        "self._hooked = list(self._parameters)",
        f"{SHARDS}::test_what_a_backward_adds_is_compared_with_the_gradient",
    ),
    Mutation(
        "accelerate wraps the model a second time",
        '    switch_off("FSDP", environment)\n',
        "",
        "tests/shards/test_shard_settings.py",
    ),
    Mutation(
        "FSDP1 is taken for FSDP2",
        'if version != "2":',
        'if version not in ("1", "2"):',
        "tests/shards/test_shard_settings.py",
    ),
    Mutation(
        "DeepSpeed's layers stay whole from their forward to their backward",
        "            group.free()\n            for tensor",
        "            for tensor",
        ZERO,
    ),
    Mutation(
        "frozen weights get gradients with DeepSpeed",
        "[weight for weight in self._weights if weight.part.requires_grad]",
        "list(self._weights)",
        f"{ZERO}::test_frozen_weights_get_no_gradient_and_are_not_reduced",
    ),
    Mutation(
        "with DeepSpeed a head that is trained alone learns nothing",
        "                tensor.register_hook(self._note_backward)",
        "                pass",
        f"{ZERO}::test_frozen_weights_get_no_gradient_and_are_not_reduced",
    ),
    Mutation(
        "with DeepSpeed a second backward replaces the gradient of the first",
        "local_part(self.part.grad).add_(reduced)",
        "local_part(self.part.grad).copy_(reduced)",
        f"{SHARDS}::test_the_gradients_of_two_backwards_are_added",
    ),
    Mutation(
        "model.to gives parameters other memory than DeepSpeed's partitions",
        'vars(model)["_apply"] =',
        'vars(model)["_lockstep_unused"] =',
        f"{SHARDS}::test_a_model_that_is_moved_keeps_its_parts",
    ),
    Mutation(
        "parameters with other memory than DeepSpeed's partitions are not noticed",
        "return local_part(self.part).data_ptr() in (0, deepspeed_parts.part_of(self.source).data_ptr())",
        "return True",
        f"{SHARDS}::test_a_parameter_whose_memory_is_no_longer_the_partition_is_refused",
    ),
    Mutation(
        "with DeepSpeed the recomputation of a layer frees its weights before the backward",
        "            if group.in_backward:\n                return",
        "            if group.in_backward:\n                pass",
        f"{SHARDS}::test_gradient_checkpointing_changes_no_gradient {ZERO}",
    ),
    Mutation(
        "DeepSpeed unties embeddings and head",
        "places[id(p)].append((module, name))",
        "places[id(p)] = [(module, name)]",
        f"{SHARDS}::test_forward_and_gradients_are_those_of_the_whole_model",
    ),
    Mutation(
        "DeepSpeed's gradients are averaged",
        "    comm.reduce_scatter_fn(found, summands, group=group)\n",
        "    comm.reduce_scatter_fn(found, summands / 2, group=group)\n",
        f"{SHARDS}::test_forward_and_gradients_are_those_of_the_whole_model",
    ),
    Mutation(
        "DeepSpeed replaces torch's linear layer in the whole process",
        "        mem_efficient_linear=False,",
        "        mem_efficient_linear=True,",
        f"{ZERO}::test_deepspeed_s_kernels_and_its_own_linear_layer_are_left_out",
    ),
    Mutation(
        "ZeRO-2 is taken for ZeRO-3",
        "return _stage(self.found) == 3",
        "return _stage(self.found) in (2, 3)",
        ZERO_SETTINGS,
    ),
    Mutation(
        "a DeepSpeed configuration with another learning rate is taken",
        'if given != "auto" and (',
        'if given != "auto" and name != "optimizer.params.lr" and (',
        ZERO_SETTINGS,
    ),
    Mutation(
        "accelerate's own DeepSpeed plugin stays on",
        '    switch_off("DEEPSPEED", environment)\n',
        "",
        ZERO_SETTINGS,
    ),
    Mutation(
        "DeepSpeed's offload to host memory is taken, and does nothing",
        'not in ("none", ""):',
        'not in ("none", "cpu", "nvme", ""):',
        ZERO_SETTINGS,
    ),
    Mutation(
        "a section of DeepSpeed that nobody knows is taken",
        "return [prefix + name for name in section if name not in known]",
        "return [prefix + name for name in section if not name]",
        ZERO_SETTINGS,
    ),
    Mutation(
        "without the package, the error comes in the middle of the start",
        "    if settings.shards:\n        check_installed()\n",
        "",
        ZERO_SETTINGS,
    ),
    Mutation(
        "work that lasts says nothing more to a file",
        "                self._beat()\n",
        "                pass\n",
        "tests/report/test_silence.py",
    ),
    Mutation(
        "a long silence is broken every five seconds without end",
        "seconds = min(2 * seconds, _LONGEST)",
        "seconds = FIRST",
        "tests/report/test_silence.py::test_a_silence_is_broken_after_five_seconds_and_then_ever_more_rarely_up_to_a_minute",
    ),
    Mutation(
        "work before the panel has no spinner",
        "            self._status.begin(text, detail)\n",
        "            pass\n",
        "tests/report/test_silence.py::test_work_before_the_panel_has_a_spinner_on_a_terminal",
    ),
    Mutation(
        "the first proof of a run is not announced",
        "with busy(_PROVING, self._clock.progress):",
        "if True:",
        "tests/cli/test_method_commands.py",
    ),
    Mutation(
        "a command frees its memory piece by piece after its last line",
        "        os._exit(self.code)",
        "        return",
        "tests/cli/test_ending.py",
    ),
    Mutation(
        "kept rollouts without logged values cannot be read",
        "logged or {} for logged",
        "logged for logged",
        "tests/run/test_rollout_files.py::test_the_command_shows_conversations_branches_and_failures",
    ),
    Mutation(
        "other users can open the files of a server",
        "            umask=0o077,\n",
        "",
        "tests/server/test_supervisor.py::test_the_files_of_a_server_are_its_owners_alone",
    ),
    Mutation(
        "a trainer without free descriptors waits for its server",
        "(errno.EMFILE, errno.ENFILE)",
        "(errno.ENFILE,)",
        "tests/server/test_greeting.py::test_a_process_without_free_descriptors_names_its_limit_and_not_the_server",
    ),
    Mutation(
        "the norm of the clip is never added up again",
        "self._step == self._first or (self._step + self._seed) % _NORM_EVERY == 0",
        "False",
        "tests/watch/step/test_update.py::test_a_clip_by_another_norm_than_that_of_all_gradients_is_found_within_four_steps",
    ),
    Mutation(
        "a command does not keep freed memory",
        "        asked |= _KEEP\n",
        "        pass\n",
        "tests/cli/test_malloc.py",
    ),
    Mutation(
        "what is made at the start is looked at by every later collection",
        "        gc.freeze()\n",
        "        pass\n",
        "tests/cli/test_collector.py",
    ),
    Mutation(
        "ranks of tokens leave out the token itself",
        "(x >= values)",
        "(x > values)",
        "tests/engines/test_vllm_eager.py::test_ranks_are_those_that_vllm_counts",
    ),
    Mutation(
        "an engine on a CPU does not ask for the norms' kernels",
        '"rms_norm": [CPU_NORMS], ',
        "",
        "tests/engines/test_vllm_norms.py",
    ),
    Mutation(
        "a norm over a part of its input goes to the kernel",
        "        variance_size is None\n        and weight is not None",
        "        weight is not None",
        "tests/engines/test_vllm_norms.py",
    ),
    Mutation(
        "a norm reads rows that do not follow each other as if they did",
        "    x = x.contiguous()\n",
        "",
        "tests/engines/test_vllm_norms.py",
    ),
    Mutation(
        "the room of layers that keep everything is never used up",
        "            self._left -= needed",
        "            pass",
        "tests/learn/test_recomputation.py",
    ),
    Mutation(
        "short packs recompute every layer",
        "    if room.takes(KEPT_BYTES[kind] * positions):",
        "    if False:",
        "tests/learn/test_recomputation.py",
    ),
    Mutation(
        "the bytes of a layer are taken for those of one position",
        "sum(found.values()) / positions",
        "sum(found.values())",
        "tests/learn/test_recomputation.py",
    ),
    Mutation(
        "the canary casts every weight for every sequence",
        "    with casting_once(model, precision):",
        "    if True:",
        "tests/watch/test_canary_and_samples.py::test_the_canary_casts_each_weight_once_and_scores_as_ever",
    ),
    Mutation(
        "vLLM is not told which implementation of the model to take",
        '"auto" if config.vllm_model_impl == "vllm" else config.vllm_model_impl',
        '"auto"',
        "tests/learn/test_model_implementations.py::test_a_run_samples_with_the_implementation_of_transformers",
    ),
    Mutation(
        "self-test: a fault that raises is a row, and the next faults are injected",
        "        errors.append(error)\n",
        "        raise\n",
        "tests/faults/test_injected_faults.py::test_a_fault_that_raises_is_a_row_and_the_next_faults_are_injected",
    ),
    Mutation(
        "self-test: a proof that stops because of the fault before has not caught the next one",
        '    if errors:\n        found = f"the engine cannot be restored',
        '    if False:\n        found = f"the engine cannot be restored',
        "tests/faults/test_injected_faults.py::test_what_a_fault_leaves_is_not_taken_for_the_catch_of_the_next_one",
    ),
    Mutation(
        "self-test: an error fails it",
        "or errors > 0 or alarms, sum(",
        "or alarms, sum(",
        "tests/faults/test_injected_faults.py::test_an_error_fails_the_self_test_and_is_told_in_the_table",
    ),
    Mutation(
        "self-test: in a run, a fault is taken back before the tokens are not counted any more",
        "    with stage.counted_tokens() as counted, injection:\n        try:",
        "    with injection, stage.counted_tokens() as counted:\n        try:",
        "tests/faults/test_faults_in_runs.py::test_a_fault_that_raises_in_a_run_is_a_row_and_leaves_nothing_behind",
    ),
    Mutation(
        "self-test: on a GPU, faults of adapters meet an engine in half precision",
        '        config.engine_dtype = "bfloat16"\n',
        "",
        "tests/extras/verify/test_verify_command.py::test_on_a_gpu_faults_of_adapters_meet_an_engine_in_half_precision",
    ),
    Mutation(
        "self-test: a proof that stops a run before the fault begins has not caught it",
        "            if not injection.has_begun:\n",
        "            if False:\n",
        "tests/faults/test_faults_in_runs.py::test_what_stops_a_run_before_the_fault_begins_has_not_caught_it",
    ),
    Mutation(
        "a run with Liger's kernels begins on a CPU",
        "        check_gpu(self.args.use_liger_kernel, use_cpu=self.args.use_cpu)\n",
        "",
        "tests/learn/test_liger.py::test_without_a_gpu_a_trainer_is_made_and_training_is_refused",
    ),
    Mutation(
        "self-test: the policy of a run moves by less than the limits",
        "if times < _VISIBLE and rate < RATES[-1]:",
        "if False:",
        "tests/faults/test_faults_in_runs.py::test_the_learning_rate_is_one_that_moves_the_policy_visibly",
    ),
    Mutation(
        "secrets: a token inside a nested setting is left out",
        "key: without_secrets(one, by_name=by_name)",
        "key: one",
        "tests/test_secret.py::test_settings_lose_secrets_at_any_depth_and_keep_the_rest",
    ),
    Mutation(
        "secrets: what pickle writes of a config has none",
        "    def __getstate__(self)",
        "    def unused_getstate(self)",
        "tests/test_secret.py::test_whatever_a_config_becomes_has_no_secret_and_the_config_keeps_it",
    ),
    Mutation(
        "secrets: a run goes on without the token that it began with",
        "    earlier, now = _comparable(earlier), _comparable(now)\n",
        "",
        "tests/test_secret.py::test_a_run_goes_on_with_another_token_or_with_none",
    ),
    Mutation(
        "texts: no control reaches the terminal in a line",
        "    print(visible(text), end=end, flush=flush)",
        "    print(text, end=end, flush=flush)",
        "tests/test_visible.py::test_nothing_that_is_printed_steers_a_terminal",
    ),
    Mutation(
        "texts: a page shows controls",
        "visible(str(value))",
        "str(value)",
        "tests/report/test_page.py::test_a_page_shows_controls_and_marks_directions",
        within="escape",
    ),
    Mutation(
        "texts: the step of a run is no markup",
        'is_open, line["step"], failed',
        'is_open, Html(line["step"]), failed',
        "tests/report/test_page.py::test_the_step_of_a_strangers_run_is_no_markup",
    ),
    Mutation(
        "streams: a reader that is gone ends no run",
        "                self.error = error\n",
        "                raise\n",
        "tests/cli/test_streams.py::test_a_run_goes_on_when_nobody_reads_its_lines_any_more",
    ),
    Mutation(
        "streams: a full disk is said where the lines are the result",
        "    if not is_result or error is None",
        "    if True or error is None",
        "tests/cli/test_streams.py::test_the_real_command_says_everything_that_somebody_can_read",
    ),
    Mutation(
        "a full disk under tokenizers is one line",
        "type(error) is not Exception and not isinstance",
        "not isinstance",
        "tests/run/test_checkpoints_and_directory.py::test_whatever_a_library_raises_on_a_full_disk_is_one_line",
    ),
    Mutation(
        "a locale of ASCII: the file of the fields is read as UTF-8",
        'FIELDS_FILE.read_text(encoding="utf-8")',
        "FIELDS_FILE.read_text()",
        "tests/test_every_encoding.py",
    ),
    Mutation(
        "a user without a home gets one for the run",
        "    os.environ.update(missing_home(os.environ))\n",
        "",
        "tests/cli/test_homes.py::test_a_user_without_a_home_gets_one_for_the_run",
    ),
    Mutation(
        "1e-7 in the mapping of a field of a config file is a number",
        "(\\d+(\\.\\d*)?|\\.\\d+)([eE][-+]?\\d+)?",
        "(\\d+(\\.\\d*)|\\.\\d+)([eE][-+]?\\d+)?",
        "tests/input/test_bad_config_files.py::test_a_number_with_an_exponent_is_a_number_in_the_mapping_of_a_field",
    ),
    Mutation(
        "the value of a field is read as YAML's number, not as it is written",
        "                        entry.tag = _TEXT\n",
        "                        pass\n",
        "tests/input/test_bad_config_files.py::test_what_is_written_is_what_a_field_gets",
    ),
    Mutation(
        "the bounds of a number are checked after PyTorch is imported only",
        "            check_possible(name, number, None if bounds is None else Bounds(**bounds))\n",
        "            pass\n",
        "tests/cli/test_fields.py::test_help_and_early_errors_import_nothing_heavy",
    ),
    Mutation(
        "a long input makes a long sentence",
        "text if len(text) <= _LONGEST else f",
        "text if True else f",
        "tests/input/test_bad_words.py::test_a_sentence_about_a_long_input_keeps_its_beginning_and_its_end",
    ),
    Mutation(
        "a device without an end is read as settings",
        "    if path.exists() and not path.is_file():\n        raise OSError(errno.EINVAL",
        "    if False:\n        raise OSError(errno.EINVAL",
        "tests/input/test_bad_words.py::test_settings_are_read_from_files_alone",
        within="check_regular",
    ),
    Mutation(
        "a text that is no choice is taken from Python",
        "and value not in choices:",
        "and False:",
        "tests/input/test_bad_python.py::test_a_text_that_cannot_be_used_is_refused",
    ),
    Mutation(
        "an optimizer that cannot be made is refused before a model is loaded",
        "        check_optimizer(self)\n",
        "",
        "tests/watch/step/test_schedules.py::"
        "test_an_optimizer_that_cannot_be_made_is_refused_before_a_model_is_loaded",
    ),
    Mutation(
        "what a launcher asks for beside the config is taken or refused",
        "        take_launcher(self, os.environ)\n",
        "",
        "tests/run/test_launcher.py",
    ),
    Mutation(
        "data: a name is no pattern",
        "glob.escape(str(file.absolute()))",
        "str(file)",
        "tests/tasks/test_tasks.py::test_a_name_of_data_is_no_pattern",
    ),
    Mutation(
        "prompts: special tokens can be switched off",
        "tokenizer(prompt, add_special_tokens=add_special_tokens)",
        "tokenizer(prompt)",
        "tests/run/test_prompts_and_generation.py::"
        "test_special_tokens_that_nobody_asked_for_are_said_and_can_be_switched_off",
    ),
    Mutation(
        "ends: a stop string may be a special token",
        "skip_special_tokens=not special)",
        "skip_special_tokens=True)",
        "tests/watch/test_ends.py::test_a_stop_string_may_be_a_special_token",
    ),
    Mutation(
        "data: a key that is None is not there",
        "for name, entry in value.items() if entry is not None}",
        "for name, entry in value.items()}",
        "tests/run/test_prompts_and_generation.py::test_a_key_that_only_other_messages_have_is_not_there",
    ),
    Mutation(
        "files: NaN is null in a run's files",
        "not math.isfinite(value) else value",
        "math.isinf(value) else value",
        "tests/run/test_run_files.py::test_the_files_of_a_run_are_json_where_a_figure_is_nan",
        within="without_nan",
    ),
    Mutation(
        "errors: a library's error becomes one line",
        "    except Exception as error:\n        raise kind(",
        "    except OSError as error:\n        raise kind(",
        "tests/test_foreign_errors.py::test_what_an_engine_raises_says_what_was_asked_of_it",
    ),
    Mutation(
        "engines: vLLM caches no prefix of a model with a state",
        "not keeps_state(load_files(AutoConfig, model))",
        "True",
        "tests/models/test_state.py::test_vllm_caches_no_prefix_of_a_model_with_a_state",
    ),
    Mutation(
        "engines: padding does not reach a state",
        "is_padded or len(batch)",
        "len(batch)",
        "tests/engines/test_transformers_engine.py::test_padding_does_not_reach_the_state_of_a_shorter_prompt",
    ),
    Mutation(
        "engines: a family that vLLM runs differently is refused before it is loaded",
        "            refuse_before_loading(args, name)\n",
        "            pass\n",
        "tests/models/test_state.py::TestRefusedOnVLLM::test_in_training_before_the_model_is_loaded",
    ),
    Mutation(
        "metrics: a function's mean is over its scores",
        "        if len(given):\n",
        "        if True:\n",
        "tests/run/test_prompts_and_generation.py::test_the_mean_of_a_function_is_over_its_scores_and_absent_without_any",
    ),
    Mutation(
        "engines: vLLM's arguments are built before a model is loaded",
        "lambda: check_engine_arguments(args, name)",
        "lambda: None",
        "tests/run/test_built_once.py::test_what_vllm_cannot_use_is_one_sentence_before_the_model_is_loaded",
    ),
    Mutation(
        "engines: an argument that vLLM does not have is refused with the config",
        "and name not in known",
        "and False",
        "tests/run/test_built_once.py::test_what_a_library_cannot_build_is_one_sentence",
    ),
    Mutation(
        "verify: the rounding of a model in a dtype that the run does not use is no fault",
        "if not row.passed and not ours and trainer == torch.bfloat16 and rows[0].passed:",
        "if False:",
        "tests/extras/verify/test_dtype_rows.py::test_a_model_that_rounds_much_in_bfloat16_passes_in_float32",
    ),
    Mutation(
        "verify: an engine that differs fails the row in bfloat16 too",
        "trainer == torch.bfloat16 and rows[0].passed:",
        "trainer == torch.bfloat16:",
        "tests/extras/verify/test_dtype_rows.py::test_a_model_that_rounds_much_in_bfloat16_passes_in_float32",
    ),
    Mutation(
        "probe: an embedding is looked up without the scale of transformers' class",
        "VocabParallelEmbedding.forward(module, own).float() @ vector for own in rows",
        "module(own).float() @ vector for own in rows",
        "tests/engines/test_transformers_backend.py::test_an_embedding_that_transformers_scales_has_the_trainers_weights",
    ),
    Mutation(
        "logits: the cap of xLSTM",
        '    "output_logit_soft_cap": _capped,\n',
        "",
        "tests/learn/test_transformed_logits.py::test_the_heads_logits_become_those_of_the_models_own_forward",
    ),
    Mutation(
        "engines: longrope's border is looked at before the model is loaded",
        "min(longest, context_length(found) or longest), by_capacity=on_vllm",
        "1, by_capacity=on_vllm",
        "tests/learn/test_family_attention.py::test_a_border_that_every_sequence_crosses_is_seen_before_the_model_is_loaded",
    ),
    Mutation(
        "devices: the grids of pictures are on the model's device (on the pretend GPU)",
        '"image_grid_thw": torch.stack([p.grid for p in pictures]).to(device)',
        '"image_grid_thw": torch.stack([p.grid for p in pictures])',
        "tests/pretend_cuda/test_runs.py::test_no_operation_mixes_devices",
    ),
    Mutation(
        "devices: what penalties add to logits is on the logits' device (on the pretend GPU)",
        "        moved = joined_moves(moves).to(device)\n",
        "        moved = joined_moves(moves)\n",
        "tests/pretend_cuda/test_runs.py::test_no_operation_mixes_devices",
    ),
    Mutation(
        "devices: positions that rows share are copied before they are pinned (on the pretend GPU)",
        "tensor.contiguous().pin_memory()",
        "tensor.pin_memory()",
        "tests/pretend_cuda/test_runs.py::test_no_operation_mixes_devices",
    ),
    Mutation(
        "limits: a batch with too many ids is refused before it is sent",
        "        check_limits(sampling, limits)\n",
        "",
        "tests/engines/test_answers.py::test_more_ids_than_the_engine_takes_are_refused_before_any_request_is_started",
    ),
    Mutation(
        "limits: the engine takes as many ids as its table has places",
        "if number > most:",
        "if number >= most:",
        "tests/engines/test_answers.py::test_more_ids_than_the_engine_takes_are_refused_before_any_request_is_started",
    ),
    Mutation(
        "limits: the words of bad_words have a table for all their ids",
        "words = sum(map(len, sampling.bad_words))",
        "words = max(map(len, sampling.bad_words), default=0)",
        "tests/engines/test_answers.py::test_more_ids_than_the_engine_takes_are_refused_before_any_request_is_started",
    ),
    Mutation(
        "limits: a run with too many ids is refused at its start",
        "check_limits(expected.sampling, actual.request_limits)",
        "pass",
        "tests/watch/test_handshake_and_receipt.py::"
        "test_a_run_that_names_more_ids_than_the_engine_takes_is_refused_at_its_start",
    ),
    Mutation(
        "scores: only finite log-probs count as such",
        "finite = sum(map(math.isfinite, found))",
        "finite = len(found)",
        "tests/engines/test_answers.py::test_a_log_prob_that_is_not_finite_is_not_counted_as_one",
    ),
    Mutation(
        "adapters alone: a GPU's engine computes them in half precision",
        "if torch.cuda.is_available() and dtype not in (torch.float16, torch.bfloat16):",
        "if False:",
        "tests/engines/test_adapter_dtypes.py::test_adapters_alone_with_a_float32_engine_are_refused_on_a_gpu",
    ),
    Mutation(
        "kept ids: an engine on a GPU may search the edge of top-p",
        "if self._searched:",
        "if False:",
        "tests/watch/test_kept_sets.py::test_ids_that_a_search_keeps_beside_the_edge_are_not_a_fault",
    ),
    Mutation(
        "kept ids: a search ends earlier where the ids are about equally likely",
        "max(_HALVED, _SMALLEST * total)",
        "_HALVED",
        "tests/watch/test_kept_sets.py::test_ids_that_a_search_keeps_beside_the_edge_are_not_a_fault",
    ),
    Mutation(
        "kept ids: every runner of vLLM with Triton searches the edge of top-p",
        "return bool(HAS_TRITON)",
        "return False",
        "tests/engines/test_second_runner.py::test_an_engine_says_whether_vllm_searches_the_edge_of_top_p[True]",
    ),
    Mutation(
        "kept ids: a search of halves may miss more than a ladder",
        "+ sign * max(_HALVED, _SMALLEST * total)",
        "",
        "tests/watch/test_kept_sets.py::test_ids_that_a_search_keeps_beside_the_edge_are_not_a_fault",
    ),
    Mutation(
        "verify: the engine's sets are compared with the filters",
        '"the ids that the filters keep", False, error.fix)',
        '"the ids that the filters keep", True, error.fix)',
        "tests/extras/verify/test_filter_rows.py",
    ),
    Mutation(
        "self-test: a fault that the engine never met is told as such",
        "return REACH.calls != 0",
        "return True",
        "tests/faults/test_injected_faults.py::test_a_fault_that_the_engine_never_met_is_not_told_as_a_blind_proof",
    ),
    Mutation(
        "self-test: a fault that the engine has met and no proof has caught is a blind proof",
        "return REACH.calls != 0",
        "return REACH.calls is None",
        "tests/faults/test_injected_faults.py::test_a_fault_that_the_engine_never_met_is_not_told_as_a_blind_proof",
    ),
    Mutation(
        "TF32: Triton rounds no float32 of an engine in this process",
        "{**_ENVIRONMENT, **exact}",
        "{**_ENVIRONMENT}",
        "tests/engines/test_worker_start.py::test_triton_rounds_no_float32_of_an_engine_in_this_process",
    ),
    Mutation(
        "a GPU: the proof of the backward reads number by number",
        "numbers = on_host([",
        "numbers = ([",
        COUNTS,
    ),
    Mutation(
        "a GPU: the module probe reads module by module",
        "iter(on_host([t for *_, pairs in compared for pair in pairs for t in pair.of_trainer]))",
        "iter([t.cpu() for *_, pairs in compared for pair in pairs for t in pair.of_trainer])",
        COUNTS,
    ),
    Mutation(
        "a GPU: the accumulation is read tensor by tensor",
        "for found in on_host(values)]",
        "for found in (value.cpu() for value in values)]",
        COUNTS,
    ),
    Mutation(
        "a GPU: the engine's part of a probe reads module by module",
        "zip(names, on_host(found), strict=True)",
        "zip(names, [one.cpu() for one in found], strict=True)",
        COUNTS,
    ),
    Mutation(
        "a GPU: a part of a step is read inside its backward",
        "flow += gradient.detach()",
        "flow += gradient.detach().cpu().to(flow.device)",
        COUNTS,
    ),
    Mutation(
        "a GPU: the engine's sampled tokens wait for the end of their copy",
        "sent(torch.tensor(tokens), scores.device)[:, None]",
        "torch.tensor(tokens).to(scores.device)[:, None]",
        COUNTS,
    ),
    Mutation(
        "a GPU: a probe casts a whole vocabulary",
        "PROBED_ROWS = 8192",
        "PROBED_ROWS = 1 << 30",
        f"{ON_A_GPU}::test_a_probe_of_a_large_vocabulary_takes_the_memory_of_a_few_rows",
    ),
    Mutation(
        "a GPU: sums over the vocabulary are computed for all rows at once",
        "_TOKENS_AT_ONCE, _TOKENS_AT_ONCE_ON_GPU = 8, 64",
        "_TOKENS_AT_ONCE, _TOKENS_AT_ONCE_ON_GPU = 8, 1 << 30",
        f"{ON_A_GPU}::test_sums_over_the_vocabulary_take_the_memory_of_a_few_rows",
    ),
    Mutation(
        "a GPU: filters compute 32 tokens at a time",
        "_TOKENS, _TOKENS_ON_GPU = 32, 512",
        "_TOKENS, _TOKENS_ON_GPU = 32, 32",
        f"{ON_A_GPU}::test_filters_start_few_products",
    ),
    Mutation(
        "a GPU: the first element of a gradient is looked for in the first part alone",
        "return first * SEARCHED + torch.stack",
        "return 0 * first + torch.stack",
        f"{ON_A_GPU}::test_an_element_that_is_not_zero_is_found_where_the_cpu_finds_it",
    ),
    Mutation(
        "vLLM's processes choose how convolutions round",
        "    prepare_cuda()\n    end_with_trainer()",
        "    end_with_trainer()",
        "tests/weights/test_reload.py::test_convolutions_round_in_vllms_processes_as_in_the_trainer",
    ),
    Mutation(
        "Mamba in half precision: the trainer's head takes sums in float32 as the model's own does",
        "entering = hidden if fp32_head else hidden.to(head_dtype(head.module, hidden.dtype))",
        "entering = hidden",
        "tests/learn/test_plain_rows.py::test_weights_in_half_precision_below_sums_in_float32_score_as_the_models_own_forward",
    ),
    Mutation(
        "push: weights wait for the end of a step that a server has begun ahead",
        "may_run = server.world_size > 1 or server.settings is None or server.settings.async_scheduling",
        "may_run = server.world_size > 1",
        "tests/engines/test_pauses.py",
    ),
    Mutation(
        "a GPU's defaults: the tokens of a step do not grow with the context",
        'arguments["max_num_batched_tokens"] = max(_GPU_BATCH, max_num_seqs)',
        'arguments["max_num_batched_tokens"] = max(max_model_len, _GPU_BATCH)',
        "tests/server/test_keys_guard_and_command.py::TestCommand",
    ),
    Mutation(
        "a GPU's defaults: a server bounds the length of a long model",
        "return min(length, _GPU_LENGTH) if torch.cuda.is_available() else length",
        "return length",
        "tests/server/test_keys_guard_and_command.py::TestCommand",
    ),
    Mutation(
        "a GPU's defaults: who wants whole prompts gets steps of a whole context",
        "if not whole_prompts:",
        "if max_model_len:",
        "tests/server/test_keys_guard_and_command.py::TestCommand",
    ),
    Mutation(
        "keyed digest: a base that is sent again gets a key of its own",
        "digest_under(key_for(self._model.parameters()))",
        "pass",
        "tests/weights/test_adapters_alone.py::test_a_base_that_is_sent_again_has_no_digest_under_the_key_of_the_one_before",
    ),
    Mutation(
        "keyed digest: the last chunk of a tensor counts",
        "for part in words.split(CHUNK)]",
        "for part in words.split(CHUNK)[:1]]",
        f"{DIGESTS}::test_chunks_and_levels_give_the_digest_of_the_definition",
    ),
    Mutation(
        "keyed digest: each level has multipliers of its own",
        "_row_sums(part, level)",
        "_row_sums(part, multipliers[0])",
        f"{DIGESTS}::test_chunks_and_levels_give_the_digest_of_the_definition",
    ),
    Mutation(
        "keyed digest: name, dtype and shape count",
        "outline, secret = [name, str(tensor.dtype), list(tensor.shape)], ",
        "outline, secret = [], ",
        f"{DIGESTS}::test_exchanged_tensors_rows_and_shards_and_other_outlines_are_seen",
    ),
    Mutation(
        "keyed digest: a key that repeats is refused",
        "    if key in _drawn:",
        "    if False:",
        f"{KEYED}::test_every_push_has_a_key_of_its_own_and_a_key_that_repeats_is_refused",
    ),
    Mutation(
        "keyed digest: every push draws a key",
        "key = secrets.randbits(KEY_BITS)",
        "key = len(_drawn)",
        f"{KEYED}::test_every_push_has_a_key_of_its_own_and_a_key_that_repeats_is_refused",
    ),
    Mutation(
        "keyed digest: what a push leaves out is compared under the key of the push that sent it",
        "key_of(like[name].digest) for",
        "push.key for",
        f"{KEYED}::test_pushes_of_what_changed_send_it_and_nothing_else",
    ),
    Mutation(
        "keyed digest: the same memory under another name is digested again",
        'names = ["" if key is None else name for',
        'names = ["" for',
        f"{KEYED}::test_memory_that_was_written_to_is_digested_again_within_a_push",
    ),
    Mutation(
        "a failed proof names the page that explains it",
        'f"  explained in: {PROOFS_PAGE}, row {check}"',
        'f"  explained in: the docs, row {check}"',
        "tests/docs/test_reference_pages.py::test_the_message_of_a_proof_ends_with_the_page_that_explains_it",
    ),
    Mutation(
        "events: the hooks are compared before the sums of a step leave their rank",
        "            self._watch.summing()\n            return self._sums.data()",
        "            return self._sums.data()",
        EVENTS,
    ),
    Mutation(
        "events: what was left aside is told",
        "        watch.aside(still)\n",
        "",
        EVENTS,
    ),
    Mutation(
        "events: nothing is pushed before the watch has heard of it",
        "        self.watch.pushing(version)\n",
        "",
        EVENTS,
    ),
    Mutation(
        "the engine of a run on the CPU takes the GPU",
        "if torch.cuda.is_available() and not use_cpu:\n            self.model.to",
        "if torch.cuda.is_available():\n            self.model.to",
        "tests/engines/test_transformers_engine.py::test_the_engine_of_a_run_on_the_cpu_leaves_a_gpu_to_others",
    ),
    Mutation(
        "weights with other names in the files than in the model are left out when a run goes on",
        "            elif not load_renamed(model or self.model, folder):\n",
        "            else:\n",
        "tests/run/test_checkpoints_of_families.py::test_a_run_that_was_stopped_goes_on_to_the_same_bits",
    ),
    Mutation(
        "weights with other names in the files than in the model are left out of the best model",
        "        if not load_renamed(self.model, best):\n            super()",
        "        super()",
        "tests/run/test_checkpoints_of_families.py::test_the_best_checkpoint_is_in_the_model_at_the_end",
    ),
    Mutation(
        "prompts: the same order is due in every pass",
        "manual_seed(seed + turn)",
        "manual_seed(seed)",
        GIVEN_ROWS,
    ),
    Mutation(
        "prompts: a generation of other rows passes",
        "            if row != own:",
        "            if False:",
        GIVEN_ROWS,
    ),
    Mutation(
        "prompts: a row's tools are not asked for",
        "tools=tools or None,",
        "tools=None,",
        f"{GIVEN_ROWS}::test_tools_that_a_prompt_must_show_are_missed",
    ),
    Mutation(
        "prompts: any ids pass the second time",
        "if known is not None and known != _digest(prompt.ids):",
        "if False:",
        GIVEN_ROWS,
    ),
    Mutation(
        "prompts: ids of another text pass",
        "if not due or (isinstance(given, list) and self._has_control_text(given)):",
        "if True:",
        GIVEN_ROWS,
    ),
]
