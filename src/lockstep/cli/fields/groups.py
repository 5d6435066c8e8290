"""The order of the fields in `--help`, their headings, and the fields that `--help` shows without `--help-all`.

A field without a group belongs to `transformers.TrainingArguments`; `--help-all` shows it last.
"""

from __future__ import annotations

OTHERS = "transformers' Trainer"

GROUPS: dict[str, tuple[str, ...]] = {
    "verify": ("model", "engine", "dtype", "json", "self_test", "receipt", "explain", "plain_prompts"),
    "model": (
        "model_name_or_path", "bf16", "model_init_kwargs", "chat_template_kwargs", "gradient_checkpointing",
        "gradient_checkpointing_kwargs", "disable_dropout", "use_liger_kernel", "liger_kernel_config", "cast_lm_head_to_fp32",
        "token_budget", "logits_chunk_size", "freeze_vision_tower",
    ),
    "adapter": (
        "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_rslora",
        "use_dora", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant",
    ),
    "data": (
        "dataset_name", "dataset_config", "train_size", "eval_size", "dataset_train_split", "dataset_test_split",
        "dataset_types", "dataset_seed", "shuffle_dataset", "add_special_tokens", "eval_strategy", "eval_steps",
        "eval_on_start", "eval_delay",
        "min_pixels", "max_pixels", "limit_mm_per_prompt", "image_urls",
    ),
    "reward": (
        "reward_funcs", "reward_model_path", "reward_weights", "reward_timeout", "rehearse_rewards", "recheck_rewards",
        "max_unscored_generations", "missing_eos_penalty", "reward_clip_range",
    ),
    "tools": (
        "tools", "environment_factory", "rollout_func", "max_tool_calling_iterations", "tool_timeout", "tool_threads",
        "tool_format", "agent", "agent_command", "rollouts_file", "agent_timeout", "gateway_host", "gateway_port",
    ),
    "method": (
        "learning_rate", "max_steps", "num_train_epochs", "num_generations", "per_device_train_batch_size",
        "gradient_accumulation_steps", "beta", "loss_type", "epsilon", "epsilon_high", "baseline", "gamma", "lam", "vf_coef",
        "cliprange_value", "value_learning_rate", "delta", "scale_rewards", "normalize_advantages",
        "importance_sampling_level", "multi_objective_aggregation", "average_by_prompt", "filter_zero_variance",
        "no_positive_resampling", "mask_truncated_completions", "top_entropy_quantile", "entropy_coef",
        "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
        "router_aux_loss_coef",
        "off_policy_mask_threshold", "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos",
        "vespo_k_neg", "vespo_lambda_neg", "use_bias_correction_kl", "generation_batch_size", "steps_per_generation",
        "num_iterations", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "lr_scheduler_type",
        "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay", "max_grad_norm", "adam_beta1",
        "adam_beta2", "adam_epsilon", "seed", "data_seed",
    ),
    "sampling": (
        "max_completion_length", "max_new_tokens", "max_length", "temperature", "stop_strings", "num_generations_eval",
        "top_p", "top_k", "min_p", "max_kept_ids", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
        "bad_words", "allowed_token_ids", "min_tokens", "vllm_structured_outputs_regex", "structured_outputs_json",
        "structured_outputs_choice", "structured_outputs_grammar", "generation_kwargs", "max_thinking_length",
        "min_thinking_length", "interruption", "end_of_thinking",
    ),
    "engine": (
        "use_vllm", "vllm_max_num_seqs", "vllm_gpu_memory_utilization", "vllm_max_model_length", "engine_dtype",
        "vllm_engine_kwargs", "vllm_model_impl", "vllm_enable_lora", "vllm_tensor_parallel_size",
        "vllm_enable_sleep_mode", "vllm_quantization",
    ),
    "server": (
        "vllm_mode", "vllm_server_base_url", "vllm_server_url_file", "vllm_server_host", "vllm_server_port",
        "vllm_server_key_file", "vllm_server_timeout", "vllm_weight_transport", "vllm_weight_deltas", "vllm_group_host",
        "vllm_group_port", "max_staleness",
    ),
    "proofs": (
        "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
    ),
    "logging": (
        "logging_steps", "report_to", "log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts",
        "run_name", "rollouts_size_limit", "project", "logging_strategy", "logging_first_step", "logging_nan_inf_filter",
        "log_level",
    ),
    "saving": (
        "output_dir", "save_steps", "save_total_limit", "save_strategy", "save_only_model", "load_best_model_at_end",
        "metric_for_best_model", "greater_is_better", "resume_with_changes", "push_to_hub", "hub_model_id",
        "hub_strategy", "hub_private_repo", "hub_revision", "hub_always_push", "hub_token",
    ),
}  # fmt: skip

# The fields that `--help` shows; `--help-all` shows the others too.
COMMON = frozenset(
    (
        *GROUPS["verify"],
        "model_name_or_path", "bf16", "use_peft", "lora_r", "dataset_name", "dataset_config", "train_size", "eval_size",
        "reward_funcs", "reward_model_path", "tools", "environment_factory", "agent", "rollouts_file", "learning_rate",
        "max_steps", "num_train_epochs", "num_generations",
        "per_device_train_batch_size", "gradient_accumulation_steps", "beta", "loss_type", "seed", "max_completion_length",
        "max_new_tokens", "temperature", "top_p", "use_vllm", "vllm_max_num_seqs",
        "vllm_mode",
        "vllm_server_base_url", "logging_steps", "report_to", "log_completions",
        "output_dir", "save_steps", "save_total_limit",
    )
)  # fmt: skip
