"""Divides a matrix of cases: CI runs a portion, and `make test-release` runs the rest.

A matrix combines options. Where the code of one option does not know the other options, CI needs each option once,
and not each combination. `portion` keeps the rows that the file of a test names. `ROWS_IN_CI` keeps a number of rows,
and needs no change of a test's file. Used by: `conftest.py`, as a plugin of pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def portion(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """The cases as parameters of a test. A case that is not kept has the mark `release`.

    Args:
        cases: values, or tuples of values if the test has several parameters.
        kept: whether CI runs a case.
    """
    return [case if kept(case) else _for_releases(case) for case in cases]


def _for_releases(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.release)


# Rows that CI runs of a matrix, spread evenly over it. The code under test does not know which row it is, and a row
# takes seconds. A new row of a matrix costs CI nothing: `make test-release` runs it, and `make nightly` a sample.
ROWS_IN_CI = {
    "beside_trl/test_grpo_beside_trl.py::test_every_option_is_trls": 4,
    "beside_trl/test_grpo_beside_trl.py::test_gradients_loss_and_figures_are_trls": 4,
    "beside_trl/test_rloo_and_online_dpo_beside_trl.py::test_rloos_gradients_loss_and_figures_are_trls": 3,
    "beside_trl/test_scripts_with_tools.py::test_the_same_script_runs_with_trl_and_logs_the_same_names": 1,
    "beside_trl/test_several_steps_per_generation.py::test_grpos_steps_of_one_generation_are_trls": 3,
    "beside_trl/test_trls_own_scripts.py::test_a_script_of_trls_package_runs_to_its_last_line": 2,
    "beside_trl/test_vision_beside_trl.py::test_trls_vision_tests_pass_with_a_changed_import": 3,
    "cli/test_adapter_commands.py::test_an_adapter_is_trained_and_gone_on_with": 1,
    "cli/test_method_commands.py::"
    "test_a_command_runs_its_method_to_summary_and_report_and_goes_on_after_an_interrupt": 2,
    "extras/agents/test_partial.py::"
    "test_what_is_streamed_is_a_beginning_of_the_answer_and_thinking_is_whole_before_content": 8,
    "extras/audit/test_audit.py::test_each_fault_is_named": 3,
    "images/test_adapters_with_pictures.py::"
    "test_an_adapter_learns_alone_and_its_merged_weights_are_what_the_engine_samples_with": 2,
    "images/test_adapters_with_pictures.py::test_base_weights_in_4_bits_are_proven_with_pictures_too": 1,
    "images/test_adapters_with_pictures.py::test_gradient_checkpointing_gives_an_adapter_the_same_step": 1,
    "images/test_families_on_vllm.py::test_two_steps_on_mixed_rows_are_proven_and_the_tower_learns": 2,
    "images/test_packs_with_pictures.py::test_packs_score_and_learn_like_plain_rows": 8,
    "images/test_pictures_verified.py::test_a_model_that_reads_pictures_passes_every_row": 1,
    "input/test_damaged_runs.py::test_a_damaged_run_is_one_line_or_the_same_run": 8,
    "learn/test_accounting.py::"
    "test_the_cut_of_a_step_does_not_change_a_gradient_before_or_after_the_policy_has_moved": 3,
    "learn/test_branches.py::test_a_run_proves_every_token_of_every_branch": 2,
    "learn/test_filter_matrix.py::test_rollouts_have_the_gap_the_sets_and_the_gradient_of_the_book": 4,
    "learn/test_methods.py::test_loss_and_gradients_equal_the_padded_reference": 5,
    "learn/test_methods_in_fp32.py::test_loss_and_gradients_are_within_1e_5_of_the_padded_reference": 4,
    "learn/test_methods_in_fp32.py::"
    "test_whatever_is_drawn_loss_and_gradients_are_within_1e_5_of_the_padded_reference": 2,
    "learn/test_methods_in_rows.py::"
    "test_a_run_is_proven_and_diverges_from_its_reference_by_nothing_at_first": 2,
    "learn/test_methods_in_rows.py::test_loss_and_gradients_equal_the_padded_reference": 2,
    "learn/test_methods_on_vllm.py::"
    "test_two_steps_are_proven_to_the_last_token_and_leave_what_was_learned_in_vllm": 2,
    "learn/test_recomputation.py::"
    "test_a_run_that_checkpoints_its_full_model_has_the_same_gradients_at_every_step": 2,
    "learn/test_recomputation.py::test_gradients_are_the_same_to_the_bit": 8,
    "learn/test_router_loss.py::test_the_models_own_loss_is_added_where_the_rewards_teach_nothing": 1,
    "learn/test_sliding_windows.py::"
    "test_gradients_equal_the_padded_reference_at_and_around_the_reach_of_the_window": 2,
    "learn/test_transformed_logits.py::test_scores_and_gradients_are_those_of_the_models_own_logits": 5,
    "models/test_models.py::test_whether_a_gpu_rounds_float32_is_known_after_every_setting": 1,
    "run/test_adapter_runs.py::test_a_run_raises_no_gap_and_moves_the_adapter_alone": 3,
    "run/test_adapter_runs.py::test_a_run_that_was_stopped_goes_on_to_the_same_bits": 1,
    "run/test_adapters_of_every_method.py::"
    "test_the_adapter_alone_moves_and_a_stopped_run_goes_on_to_the_bit": 3,
    "run/test_errors_teach_nothing.py::test_a_correction_is_not_applied_to_a_gap_that_is_a_defect": 3,
    "run/test_evaluation_sets.py::test_each_set_of_a_mapping_has_metrics_of_its_own_name": 2,
    "run/test_filters_on_vllm.py::test_the_gap_of_a_run_with_filters_is_that_of_a_run_without": 4,
    "run/test_filters_with_tools.py::test_the_gap_of_rollouts_with_tools_and_filters_is_within_the_limits": 1,
    "run/test_interrupted_runs.py::test_every_sampled_token_is_proven_and_no_other_is_counted": 4,
    "run/test_measured_effects.py::test_two_runs_with_one_value_differ_in_nothing": 1,
    "run/test_measured_effects.py::test_two_values_of_a_field_are_two_runs": 6,
    "run/test_method_resume.py::test_a_run_that_was_stopped_goes_on_to_the_same_bits": 3,
    "run/test_quantised_runs.py::test_every_step_is_proven_and_the_gap_is_what_quantisation_explains": 2,
    "run/test_reference.py::"
    "test_the_reference_is_the_policy_of_the_start_and_the_divergence_from_it_begins_at_0": 3,
    "run/test_resumable_saves.py::test_a_run_is_resumed_to_the_bit_from_every_checkpoint_that_it_leaves": 2,
    "run/test_tools_in_training.py::test_a_run_with_tools_that_was_stopped_goes_on_to_the_same_bits": 1,
    "run/test_tools_in_training.py::test_a_tool_with_an_alarm_or_a_connection_works_as_one_without": 1,
    "run/test_tools_in_training.py::test_every_method_learns_from_rollouts_with_tools": 1,
    "run/test_tools_in_training.py::test_what_fails_in_the_same_way_at_every_call_is_an_alarm_once": 2,
    "run/test_trainer.py::test_the_split_into_micro_batches_does_not_change_a_gradient": 2,
    "run/test_trainer_services.py::test_evaluations_in_the_loop_and_every_log_reach_callbacks_and_trackers": 2,
    "run/test_trainer_services.py::test_push_to_hub_uploads_weights_tokenizer_and_a_model_card": 3,
    "run/test_two_ranks.py::test_what_goes_wrong_on_one_rank_is_the_same_error_on_both": 4,
    "run/test_work.py::"
    "test_a_pass_without_gradient_is_taken_where_something_must_be_known_before_the_first_step": 5,
    "server/test_faults_while_training.py::"
    "test_whatever_happens_to_a_push_the_run_goes_on_with_the_right_weights": 1,
    "server/test_generations_ahead.py::test_other_methods_and_shapes_learn_from_generations_ahead": 3,
    "server/test_greeting.py::test_a_program_without_the_key_cannot_fill_the_trainers_memory": 6,
    "server/test_online_dpo_script.py::test_trls_script_runs_as_it_stands_once_its_import_is_changed": 1,
    "server/test_sick_answers.py::"
    "test_a_push_that_loses_a_call_is_not_repeated_by_itself_and_a_new_one_is_whole": 6,
    "server/test_sick_answers.py::"
    "test_after_a_broken_answer_the_engine_is_lost_and_recovery_gives_the_same_tokens": 4,
    "server/test_split_models.py::test_a_split_model_gets_every_weight_and_is_probed_whole": 1,
    "server/test_tools_ahead.py::test_every_turn_is_proven_with_the_weights_that_sampled_it": 1,
    "watch/step/test_losses.py::test_every_method_agrees_with_its_definition": 4,
    "watch/test_draws_in_training.py::test_every_sampled_token_is_bet_on_once": 3,
    "watch/test_step_gradient.py::test_a_gradient_that_is_wrong_from_the_beginning_stops_the_first_step": 3,
    "watch/test_step_gradient.py::"
    "test_a_gradient_that_turns_wrong_later_stops_the_run_before_the_optimizer_uses_it_for_ten_steps": 2,
    "watch/test_step_gradient.py::test_clean_steps_pass_far_below_the_limit_and_stay_as_they_were": 3,
    "watch/test_user_settings.py::test_the_loss_has_the_temperature_that_the_user_has_asked_for": 7,
    "weights/test_adapters.py::test_the_probe_agrees_with_the_adapter_at_every_module": 13,
    "weights/test_live.py::test_a_right_merge_passes": 9,
    "weights/test_transports.py::test_a_push_ends_on_all_servers_when_one_of_them_dies": 3,
}
# Rows, tests and files that are too long for CI, by the beginning of their names, with what CI has in place of each.
LATER = {
    "beside_trl/test_trls_own_scripts.py::"
    "test_the_quick_start_runs_although_no_completion_of_a_row_is_scored": (
        "the other scripts of TRL's package"
    ),
    "contract/test_engine_contract.py::"
    "test_short_completions_are_handed_over_while_a_long_one_is_sampled[server]": (
        "its rows of the other engines"
    ),
    "extras/verify/test_verify_command.py::"
    "test_the_self_test_also_runs_with_several_steps_per_generation_and_with_generations_ahead": (
        "test_faults_in_runs.py, whose runs have both, and the self-test of a plain run"
    ),
    "faults/test_faults_in_runs.py::"
    "test_a_fault_that_raises_in_a_run_is_a_row_and_leaves_nothing_behind[max_staleness": (
        "its other way of a run"
    ),
    "faults/test_injected_faults.py::test_an_injection_leaves_nothing_behind[transformers": (
        "its row with vLLM"
    ),
    "faults/test_injected_faults.py::test_in_bf16_every_fault_that_its_rounding_leaves_is_caught[limits": (
        "these faults in float32, runs in bf16 that pass, and make nightly, which injects every fault in bf16"
    ),
    "faults/test_injected_faults.py::test_the_fault_is_caught_by_its_proof[transformers": (
        "its rows with vLLM"
    ),
    "images/test_families_on_a_server.py::": (
        "these families in this process (test_families_on_vllm.py), and pictures of one family on a server"
    ),
    "images/test_pictures_in_turns.py::test_results_with_pictures_are_proven_turn_by_turn[qwen3_vl": (
        "this test of this family in test_families_on_vllm.py"
    ),
    "images/test_pictures_on_a_server.py::test_each_of_two_servers_is_sent_the_pictures_of_its_requests": (
        "pictures on one server, and two servers without pictures"
    ),
    "images/test_pictures_on_two_ranks.py::": "test_two_ranks.py without pictures, and pictures on one rank",
    "images/test_pictures_verified.py::test_every_fault_of_pictures_is_caught[qwen2_5_vl-vllm": (
        "its row without vLLM"
    ),
    "images/test_turns_on_vllm.py::test_a_server_is_sent_later_pictures_too": (
        "later pictures in this process, and test_pictures_on_a_server.py"
    ),
    "run/test_adapters_alone_in_runs.py::"
    "test_a_server_that_is_killed_gets_the_adapter_again_and_the_weights_are_the_same": (
        "test_adapters_alone_on_servers.py, where a server is started again without a run"
    ),
    "run/test_quantised_runs.py::test_a_server_in_8_bits_trains_like_an_engine_here": (
        "8 bits in this process: a server is sent the same tensors"
    ),
    "run/test_real_model.py::": "scripts/newcomer.py, which trains the same model",
    "server/test_elastic_servers.py::": "test_several_servers.py, where no server joins later",
    "server/test_examples.py::test_the_script_serves_trains_and_stops_its_server": (
        "test_hand_started_servers.py, which serves and trains with the commands that the script has"
    ),
    "server/test_in_flight.py::test_tokens_of_running_requests_carry_the_version_that_sampled_each[gloo]": (
        "its other transport"
    ),
    "server/test_pushes_of_changes.py::"
    "test_a_server_that_was_killed_between_two_pushes_is_sent_everything[gloo": "its other transport",
    "server/test_pushes_of_changes.py::test_every_worker_of_a_split_model_puts_the_same_tensors_together": (
        "test_split_in_process.py, which proves each push on both workers, and changes on one worker"
    ),
    "server/test_restarted_servers.py::test_a_server_restarted_after_a_push_is_found_out_by_its_greeting": (
        "test_killed_servers.py, which kills servers between pushes too"
    ),
    "server/test_tools_ahead.py::"
    "test_rollouts_with_tools_and_filters_ahead_have_the_gap_of_rollouts_without": (
        "tools ahead and filters ahead, each alone"
    ),
    "server/test_two_ranks_on_a_server.py::test_two_ranks_train_with_one_server": (
        "two ranks with a sharded model, on one server"
    ),
    "server/test_two_ranks_on_a_server.py::test_two_ranks_with_a_sharded_model_train_with_one_server[fsdp]": (
        "its row of DeepSpeed"
    ),
    "weights/test_adapters_alone_on_servers.py::test_workers_that_share_a_model_share_the_adapter[gloo": (
        "its other transport"
    ),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what CI leaves to `make test-release`. Marks must be known before `-m` is applied."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(tuple(LATER)):
            item.add_marker(pytest.mark.release)
        if (test := name.partition("[")[0]) in ROWS_IN_CI and not item.get_closest_marker("release"):
            matrices.setdefault(test, []).append(item)
    for test, rows in matrices.items():
        kept = {i * len(rows) // ROWS_IN_CI[test] for i in range(ROWS_IN_CI[test])}
        for index, item in enumerate(rows):
            if index not in kept:
                item.add_marker(pytest.mark.release)
