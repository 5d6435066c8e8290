"""What other programs, and earlier releases, call a field: which field a user means, or what to do instead.

The names are those of TRL, transformers, verl, OpenRLHF, Unsloth, prime-rl and of earlier Locksteps. A name may stand
behind a path, as in `actor_rollout_ref.rollout.n`. The hint for a name always names a field that the command has.
"""

from __future__ import annotations

from collections.abc import Collection

_COMPLETION = ("max_completion_length", "max_new_tokens")
_REDUCED = "removed from transformers, or without an effect there; leave it out"
_LENGTH = "no prompt is cut here: drop rows that are too long, or raise vllm_max_model_length"
_PACKED = "completions are always packed without padding; leave it out"
_METHOD = "the command chooses the method: lockstep grpo, rloo, reinforce-pp, ppo or online-dpo"
_KL = "beta is the weight of the KL term in the loss; 0 leaves it out"
_REFERENCE = (
    "the reference is the model that training starts from; beta is its weight, and Python takes a ref_model"
)
_MACHINES = (
    "torchrun starts several processes (docs/guides/sharding.md); lockstep serve runs vLLM beside them"
)
_DTYPE = (
    "bf16 says in what the trainer computes, engine_dtype in what the engine does, and model_init_kwargs: {dtype: …} "
    "how the trained weights are held"
)

# The fields that a name may mean. The hint names the first that the command has.
_MEANT: dict[tuple[str, ...], str] = {
    _COMPLETION: "max_completion_length max_new_tokens max_response_length response_length max_tokens generate_max_len "
    "max_gen_len completion_length max_output_tokens",
    ("num_generations",): "n rloo_k group_size n_samples_per_prompt rollouts_per_example rollouts_per_prompt "
    "num_return_sequences num_samples num_rollouts samples_per_prompt num_generations_per_prompt",
    ("num_iterations",): "ppo_epochs num_ppo_epochs num_updates_per_batch mu",
    ("steps_per_generation",): "num_mini_batches num_minibatches",
    ("beta",): "kl_coef init_kl_coef kl_loss_coef kl_beta kl_tau kl_weight kl_coeff",
    ("epsilon",): "cliprange clip_range clip_ratio clip_ratio_low eps_clip clip_eps epsilon_low",
    ("epsilon_high",): "clip_ratio_high cliprange_high eps_clip_high",
    ("delta",): "clip_ratio_c dual_clip",
    ("loss_type",): "loss_agg_mode policy_loss loss_fn loss_mode loss_agg",
    ("scale_rewards",): "norm_adv_by_std_in_grpo normalize_rewards",
    ("filter_zero_variance",): "dynamic_sampling filter_groups filter_zero_std",
    ("mask_truncated_completions",): "overlong_filtering filter_truncated",
    ("entropy_coef",): "entropy_coeff ent_coef entropy_coefficient entropy_loss_coef",
    ("cliprange_value",): "value_clip vf_clip_range",
    ("gamma",): "discount discount_factor",
    ("lam",): "gae_lambda lambd",
    ("value_learning_rate",): "critic_learning_rate critic_lr",
    ("max_staleness",): "max_async_level async_level staleness off_policy_steps max_off_policy_steps",
    ("reward_funcs",): "reward_func reward_fn reward_function reward reward_model reward_model_name_or_path "
    "reward_pretrain remote_rm_url reward_funcs_path",
    ("reward_weights",): "reward_weight rewards_weights",
    ("vllm_gpu_memory_utilization",): "gpu_memory_utilization vllm_gpu_util",
    ("vllm_tensor_parallel_size",): "tensor_parallel_size tp_size tp tensor_model_parallel_size",
    ("vllm_max_model_length",): "max_model_len vllm_max_model_len max_model_length max_seq_length max_seq_len seq_len "
    "max_length context_length max_context_length",
    ("vllm_max_num_seqs",): "max_num_seqs",
    ("vllm_enable_sleep_mode",): "enable_sleep_mode vllm_enable_sleep free_cache_engine",
    ("vllm_structured_outputs_regex",): "vllm_guided_decoding_regex guided_decoding_regex guided_regex",
    ("vllm_mode",): "colocate colocate_all_models colocate_actor_ref",
    ("vllm_server_base_url",): "vllm_base_url server_url",
    ("vllm_server_key_file",): "vllm_server_api_key vllm_api_key api_key",
    ("use_vllm",): "fast_inference vllm",
    ("engine_dtype",): "vllm_dtype rollout_dtype inference_dtype",
    ("temperature",): "rollout_temperature sampling_temperature",
    ("learning_rate",): "lr actor_learning_rate actor_lr policy_lr",
    ("lr_scheduler_type",): "lr_scheduler scheduler lr_decay_style",
    ("per_device_train_batch_size",): "per_gpu_train_batch_size per_device_batch_size batch_size train_batch_size "
    "micro_train_batch_size micro_batch_size ppo_micro_batch_size_per_gpu mini_batch_size",
    ("generation_batch_size", "per_device_train_batch_size"): "rollout_batch_size ppo_mini_batch_size",
    ("gradient_accumulation_steps",): "grad_accum accumulation_steps gradient_accumulation",
    ("token_budget",): "use_dynamic_bsz ppo_max_token_len_per_gpu max_tokens_per_microbatch unsloth_num_chunks "
    "unsloth_grpo_mini_batch max_token_len_per_gpu",
    ("max_grad_norm",): "gradient_clip grad_clip clip_grad max_norm gradient_clip_val",
    ("num_train_epochs",): "num_epochs epochs total_epochs max_epochs num_episodes",
    ("max_steps",): "total_training_steps total_steps max_train_steps train_steps num_steps",
    ("warmup_steps",): "warmup_ratio lr_warmup_steps lr_warmup_ratio num_warmup_steps",
    ("optim",): "optimizer adafactor",
    ("adam_beta1",): "beta1",
    ("adam_beta2",): "beta2",
    ("adam_epsilon",): "adam_eps",
    ("weight_decay",): "wd l2",
    ("gradient_checkpointing",): "use_gradient_checkpointing enable_gradient_checkpointing gradient_checkpoint",
    ("deepspeed",): "zero_stage deepspeed_config",
    ("fsdp",): "fsdp_size sharding_strategy",
    ("fsdp_config",): "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
    ("use_liger_kernel",): "use_liger liger use_liger_loss",
    ("use_cpu",): "no_cuda",
    ("bf16",): "mixed_precision precision",
    ("model_name_or_path",): "model model_path model_name model_id pretrain base_model actor_model",
    ("use_peft",): "use_lora lora",
    ("lora_r",): "lora_rank r lora_dim",
    ("lora_target_modules",): "target_modules",
    ("lora_modules_to_save",): "modules_to_save",
    ("load_in_4bit",): "qlora load_in_8bit",
    ("dataset_name",): "dataset data data_path dataset_path train_files prompt_data train_dataset",
    ("dataset_test_split",): "val_files eval_split test_split validation_split",
    ("dataset_train_split",): "dataset_split train_split split",
    ("eval_size",): "val_size num_eval_samples eval_dataset",
    ("train_size",): "num_train_samples max_samples train_max_samples",
    ("output_dir",): "save_dir save_path default_local_dir output_path ckpt_path checkpoint_dir output",
    ("save_steps",): "save_freq save_interval ckpt_interval checkpoint_interval",
    ("save_total_limit",): "max_ckpt_to_keep max_ckpt_num",
    ("eval_strategy",): "evaluation_strategy",
    ("eval_steps",): "test_freq eval_interval eval_freq",
    ("logging_steps",): "logging_interval log_interval log_freq log_every",
    ("report_to",): "logger log_with use_wandb wandb trackers tracker",
    ("run_name",): "experiment_name wandb_run_name",
    ("hub_model_id",): "push_to_hub_model_id repo_id push_to_hub_organization",
    ("hub_token",): "push_to_hub_token",
    ("log_level",): "verbose verbosity",
    ("tools",): "tool tool_functions",
    ("environment_factory",): "env environment env_id environment_id",
    ("seed",): "random_seed",
}  # fmt: skip

_MEANINGS = {name: fields for fields, names in _MEANT.items() for name in names.split()}

_SAID: dict[str, str] = {
    _LENGTH: "max_prompt_length max_prompt_len prompt_max_len filter_overlong_prompts truncation truncation_mode",
    _DTYPE: "dtype torch_dtype param_dtype",
    _METHOD: "advantage_estimator adv_estimator algorithm algo trainer_type",
    _KL: "kl_estimator kl_penalty kl_loss_type use_kl_loss use_kl_in_reward kl_ctrl",
    _REFERENCE: "ref_model_path ref_model sft_model_path ref_pretrain",
    _PACKED: "packing padding_free remove_padding use_remove_padding packing_samples pad_token",
    _MACHINES: "nproc_per_node n_gpus_per_node num_gpus nnodes num_processes gpus",
    _REDUCED: "fp16_opt_level half_precision_backend fp16_backend jit_mode_eval use_ipex tpu_num_cores "
    "tpu_metrics_debug past_index ray_scope save_safetensors torchdynamo dispatch_batches split_batches "
    "include_tokens_per_second mp_parameters group_by_length sharded_ddp xpu_backend use_mps_device "
    "include_inputs_for_metrics",
    "model_init_kwargs: {attn_implementation: …} has it": "attn_implementation flash_attn use_flash_attention_2 "
    "use_flash_attn attn_impl",
    "model_init_kwargs: {revision: …} has it": "model_revision",
    "vLLM takes the trainer's device; with vllm_mode=server it has devices of its own": "vllm_device vllm_num_engines",
    "set the variable WANDB_PROJECT or WANDB_ENTITY": "wandb_project wandb_entity",
    "'lockstep --version' prints it": "version",
    "a file or a hub id is read as a whole; Python takes a stream as train_dataset": "dataset_streaming",
    "a run goes on from the last checkpoint of its output_dir by itself": "resume resume_from",
    "a new run gets a new folder beside the old one; leave it out": "overwrite_output_dir",
    "an evaluation samples with the engine's batches; leave it out": "per_gpu_eval_batch_size",
    "it was removed; max_staleness has its purpose: a server samples later generations while rewards are "
    "computed": "overlap_rewards",
    "it was removed: the model's chat template makes the ids between turns, and tool_format says how tool calls are "
    "written": "renderer",
}
INSTEAD: dict[str, str] = {name: text for text, names in _SAID.items() for name in names.split()}

# Fields of commands that a config of Python does not have.
_ARGUMENTS = {
    "model_name_or_path": "the trainer takes it, as its argument model",
    "dataset_name": "the trainer takes a train_dataset",
    "reward_funcs": "the trainer takes reward_funcs",
    "tools": "the trainer takes tools",
    "environment_factory": "the trainer takes an environment_factory",
    "use_peft": "the trainer takes a peft_config",
    "lora_r": "the trainer takes a peft_config",
    "lora_target_modules": "the trainer takes a peft_config",
    "load_in_4bit": "the trainer takes a quantization_config",
    "dataset_test_split": "the trainer takes an eval_dataset",
    "eval_size": "the trainer takes an eval_dataset",
}


def hint_of(name: str, fields: Collection[str]) -> str:
    """What a user sets instead of a name that is none of these fields; empty: nobody knows.

    Args:
        name: the name, perhaps behind a path with dots.
    """
    last = name.rpartition(".")[2]
    if last in fields and last != name:
        return f"here it is {last!r}"
    meant = (*_MEANINGS.get(last, ()), last)
    if found := next((field for field in meant if field in fields), None):
        return f"here it is {found!r}"
    if last in INSTEAD:
        return INSTEAD[last]
    return next((_ARGUMENTS[field] for field in meant if field in _ARGUMENTS), "")
