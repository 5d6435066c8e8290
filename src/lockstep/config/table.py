"""The options of every config class: those of transformers, and all of a class with what is said of them.

Lockstep's fields are declared in dataclasses, with `option`. transformers declares its own without what Lockstep says
of them, so `INHERITED` does that. A field that neither names is taken as transformers means it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from lockstep.config.option import COUNT, LONGEST_WAIT, SEED, About, Bookkeeping, Bounds, Part, about

_SAMPLED = "an evaluation samples with the engine, in the engine's dtype and batches"
_NO_OUTPUTS = "an evaluation samples, and gathers no outputs of the model"
_IN_MEMORY = "prompts are token ids in memory before training begins"
_UNWRAPPED = "the model is not wrapped by DistributedDataParallel"

_COMPILED = "a compiled forward has not been compared with the engine"

_BY_CALLER = "what is called says it"

# Fields of transformers, in their order in `--help`.
INHERITED: dict[str, About] = {
    "gradient_checkpointing": about(group="model", bookkeeping=Bookkeeping.MEMORY, part=Part.LEARNING),
    "gradient_checkpointing_kwargs": about(
        "Arguments of torch's `checkpoint`, such as use_reentrant.",
        group="model",
        bookkeeping=Bookkeeping.MEMORY,
        only_with="checkpointing",
        part=Part.LEARNING,
    ),
    "use_liger_kernel": about(group="model"),
    "eval_strategy": about(group="data", bookkeeping=Bookkeeping.LOGS, part=Part.RUN),
    "eval_steps": about(
        group="data",
        bounds=Bounds(0, above=True),
        bookkeeping=Bookkeeping.LOGS,
        only_with="evaluation_steps",
        part=Part.RUN,
    ),
    "eval_on_start": about(group="data", bookkeeping=Bookkeeping.LOGS, only_with="held_out", part=Part.RUN),
    "eval_delay": about(group="data", bookkeeping=Bookkeeping.LOGS, only_with="evaluation", part=Part.RUN),
    "max_steps": about(group="method", common=True, bounds=Bounds(1, 10**12, special=(-1,)), part=Part.RUN),
    "num_train_epochs": about(
        group="method", common=True, bounds=Bounds(0, above=True), only_with="epochs", part=Part.RUN
    ),
    "per_device_train_batch_size": about(group="method", common=True, bounds=COUNT, part=Part.LEARNING),
    "gradient_accumulation_steps": about(group="method", common=True, bounds=COUNT, part=Part.LEARNING),
    "lr_scheduler_type": about(group="method", part=Part.STEPS),
    "lr_scheduler_kwargs": about(group="method", part=Part.STEPS),
    "warmup_steps": about(group="method", bounds=Bounds(0), only_with="warm_up", part=Part.STEPS),
    "optim": about(
        "The optimizer. Those that step inside the backward (lomo, layerwise, schedule_free) are refused.",
        group="method",
        part=Part.STEPS,
    ),
    "optim_args": about(group="method", part=Part.STEPS),
    "weight_decay": about(group="method", bounds=Bounds(0), part=Part.STEPS),
    "max_grad_norm": about(group="method", bounds=Bounds(0, infinite=True), part=Part.STEPS),
    "adam_beta1": about(group="method", bounds=Bounds(0, 1, below=True), only_with="betas", part=Part.STEPS),
    "adam_beta2": about(group="method", bounds=Bounds(0, 1, below=True), only_with="betas", part=Part.STEPS),
    "adam_epsilon": about(group="method", bounds=Bounds(0), only_with="eps", part=Part.STEPS),
    "seed": about(group="method", common=True, bounds=SEED),
    "data_seed": about(group="method", bounds=SEED, only_with="shuffled", part=Part.RUN),
    "report_to": about(group="logging", common=True, bookkeeping=Bookkeeping.PLACE, part=Part.RUN),
    "run_name": about(
        "Name of the run: in trackers, and in the title of its report.",
        group="logging",
        bookkeeping=Bookkeeping.PLACE,
        part=Part.RUN,
    ),
    "project": about(group="logging", bookkeeping=Bookkeeping.PLACE, only_with="trackio", part=Part.RUN),
    "logging_strategy": about(group="logging", bookkeeping=Bookkeeping.LOGS, part=Part.RUN),
    "logging_first_step": about(group="logging", bookkeeping=Bookkeeping.LOGS, part=Part.RUN),
    "log_level": about(group="logging", bookkeeping=Bookkeeping.LOGS),
    "output_dir": about(group="saving", common=True, bookkeeping=Bookkeeping.PLACE, part=Part.RUN),
    "save_steps": about(
        group="saving",
        common=True,
        bounds=Bounds(0, above=True),
        bookkeeping=Bookkeeping.LOGS,
        only_with="save_steps",
        part=Part.RUN,
    ),
    "save_total_limit": about(
        group="saving",
        common=True,
        bounds=COUNT,
        bookkeeping=Bookkeeping.LOGS,
        only_with="saving",
        part=Part.RUN,
    ),
    "save_strategy": about(
        "When checkpoints are written: no, steps, epoch, or best (after an evaluation that is the best so far).",
        group="saving",
        bookkeeping=Bookkeeping.LOGS,
        part=Part.RUN,
    ),
    "save_only_model": about(group="saving", bookkeeping=Bookkeeping.LOGS, only_with="saving", part=Part.RUN),
    "load_best_model_at_end": about(
        group="saving", bookkeeping=Bookkeeping.LOGS, only_with="saving_best", part=Part.RUN
    ),
    "metric_for_best_model": about(
        "Metric of an evaluation by which `load_best_model_at_end` chooses. Default: reward.",
        group="saving",
        bookkeeping=Bookkeeping.LOGS,
        only_with="metric",
        part=Part.RUN,
    ),
    "greater_is_better": about(
        group="saving", bookkeeping=Bookkeeping.LOGS, only_with="metric", part=Part.RUN
    ),
    "push_to_hub": about(group="saving", bookkeeping=Bookkeeping.HUB, part=Part.RUN),
    "hub_model_id": about(group="saving", bookkeeping=Bookkeeping.HUB, only_with="hub", part=Part.RUN),
    "hub_strategy": about(group="saving", bookkeeping=Bookkeeping.HUB, only_with="hub", part=Part.RUN),
    "hub_private_repo": about(
        "Whether a new repository, or a new Space of trackio, is private. Default: as the account says.",
        group="saving",
        bookkeeping=Bookkeeping.HUB,
        only_with="hub_or_trackio",
        part=Part.RUN,
    ),
    "hub_revision": about(group="saving", bookkeeping=Bookkeeping.HUB, only_with="hub", part=Part.RUN),
    "hub_always_push": about(group="saving", bookkeeping=Bookkeeping.HUB, only_with="hub", part=Part.RUN),
    "hub_token": about(group="saving", only_with="hub", part=Part.RUN),
    "ddp_timeout": about(
        bounds=Bounds(1, LONGEST_WAIT), bookkeeping=Bookkeeping.WAITING, only_with="processes"
    ),
    # TrainingArguments had it until transformers 5.
    "logging_dir": about(bookkeeping=Bookkeeping.PLACE, part=Part.RUN),
    "trackio_bucket_id": about(bookkeeping=Bookkeeping.PLACE, only_with="trackio", part=Part.RUN),
    "trackio_static_space_id": about(bookkeeping=Bookkeeping.PLACE, only_with="trackio", part=Part.RUN),
    "trackio_space_id": about(bookkeeping=Bookkeeping.PLACE, only_with="trackio", part=Part.RUN),
    "resume_from_checkpoint": about(
        "A checkpoint from which `trainer.train()` goes on. Commands go on by themselves, and refuse it.",
        bookkeeping=Bookkeeping.PLACE,
        part=Part.RUN,
    ),
    # `eval_strategy` sets it.
    "do_eval": about(bookkeeping=Bookkeeping.LOGS, only_with="evaluation", part=Part.RUN),
    "skip_memory_metrics": about(bookkeeping=Bookkeeping.LOGS, part=Part.RUN),
    "log_on_each_node": about(bookkeeping=Bookkeeping.LOGS, only_with="processes", part=Part.RUN),
    "include_num_input_tokens_seen": about(bookkeeping=Bookkeeping.LOGS, part=Part.RUN),
    "disable_tqdm": about(bookkeeping=Bookkeeping.LOGS, part=Part.RUN),
    "log_level_replica": about(bookkeeping=Bookkeeping.LOGS, only_with="processes"),
    "torch_empty_cache_steps": about(bookkeeping=Bookkeeping.MEMORY, only_with="gpu", part=Part.STEPS),
    "deepspeed": about(bookkeeping=Bookkeeping.MEMORY),
    "fsdp": about(bookkeeping=Bookkeeping.MEMORY, also=("bool", "list")),
    "fsdp_config": about(bookkeeping=Bookkeeping.MEMORY, only_with="fsdp"),
    "use_cpu": about(bookkeeping=Bookkeeping.DEVICE),
    "accelerator_config": about(bookkeeping=Bookkeeping.OBJECT, also=("AcceleratorConfig",)),
    "fp16": about(
        only=(
            False,
            "float16 needs a loss scaler, which multiplies the gradients that the proofs compare and leaves out steps; "
            "use bf16, or neither for float32",
        )
    ),
    "auto_find_batch_size": about(
        only=(False, "the batch is a part of the method; lower token_budget instead, which changes no result")
    ),
    "ignore_data_skip": about(
        only=(False, "a resumed run would get other prompts than the run without a break")
    ),
    "enable_jit_checkpoint": about(
        only=(
            False,
            "its handler of SIGTERM would replace Lockstep's, and the run would end as if it were finished; the "
            "commands write a checkpoint at SIGTERM without it",
        )
    ),
    "parallelism_config": about(only=(None, "use FSDP2 or DeepSpeed (docs/guides/sharding.md)")),
    "torch_compile": about(only=(False, _COMPILED)),
    "torch_compile_backend": about(only=(None, _COMPILED)),
    "torch_compile_mode": about(only=(None, _COMPILED)),
    "label_smoothing_factor": about(only=(0.0, "it has no meaning for these losses")),
    "neftune_noise_alpha": about(only=(None, "the engine has no such noise")),
    "train_sampling_strategy": about(only=("random", "use shuffle_dataset")),
    "dataloader_num_workers": about(no_effect=(0, _IN_MEMORY)),
    "bf16_full_eval": about(no_effect=(False, _SAMPLED)),
    "fp16_full_eval": about(no_effect=(False, _SAMPLED)),
    "prediction_loss_only": about(no_effect=(False, _NO_OUTPUTS)),
    "eval_accumulation_steps": about(no_effect=(None, _NO_OUTPUTS)),
    "eval_do_concat_batches": about(no_effect=(True, _NO_OUTPUTS)),
    "include_for_metrics": about(no_effect=([], _NO_OUTPUTS)),
    "batch_eval_metrics": about(no_effect=(False, _NO_OUTPUTS)),
    "ddp_bucket_cap_mb": about(no_effect=(None, _UNWRAPPED)),
    "ddp_find_unused_parameters": about(no_effect=(None, _UNWRAPPED)),
    "ddp_broadcast_buffers": about(no_effect=(None, _UNWRAPPED)),
    "ddp_static_graph": about(no_effect=(None, _UNWRAPPED)),
    "per_device_eval_batch_size": about(
        bounds=COUNT, no_effect=(8, _SAMPLED), bookkeeping=Bookkeeping.MEMORY
    ),
    "eval_use_gather_object": about(no_effect=(False, _NO_OUTPUTS)),
    "label_names": about(no_effect=(None, _NO_OUTPUTS)),
    "average_tokens_across_devices": about(
        no_effect=(True, "a step's tokens are always counted on all devices")
    ),
    "dataloader_pin_memory": about(no_effect=(True, _IN_MEMORY), bookkeeping=Bookkeeping.DEVICE),
    "dataloader_persistent_workers": about(no_effect=(False, _IN_MEMORY)),
    "dataloader_prefetch_factor": about(no_effect=(None, _IN_MEMORY)),
    "dataloader_multiprocessing_context": about(no_effect=(None, _IN_MEMORY)),
    "dataloader_in_order": about(no_effect=(True, _IN_MEMORY)),
    "length_column_name": about(no_effect=("length", "prompts are not sorted by their lengths")),
    "local_rank": about(no_effect=(-1, "the launcher says it (LOCAL_RANK)")),
    "do_train": about(no_effect=(False, _BY_CALLER)),
    "do_predict": about(no_effect=(False, _BY_CALLER)),
    "tf32": about(only_with="gpu"),
    "ddp_backend": about(only_with="processes"),
    "save_on_each_node": about(only_with="processes", part=Part.RUN),
    "optim_target_modules": about(only_with="projection", part=Part.STEPS),
    "use_cache": about(part=Part.RUN),
    "restore_callback_states_from_checkpoint": about(part=Part.RUN),
    "debug": about(part=Part.STEPS),
}


def options_of(kind: type) -> dict[str, dict[str, Any]]:
    """What is said of each field of a dataclass, with the keys of `About`.

    Fields of transformers come last, and have the key `inherited`.
    """
    return _options_of(kind)


def with_key(kind: type, key: str) -> dict[str, Any]:
    """The fields of a dataclass of which this is said, and what."""
    return _with_key(kind, key)


@functools.cache
def _options_of(kind: type) -> dict[str, dict[str, Any]]:
    ours: dict[str, dict[str, Any]] = {}
    theirs: dict[str, dict[str, Any]] = {}
    for part in reversed(kind.__mro__):
        declared = vars(part).get("__dataclass_fields__", {})
        for name in inspect.get_annotations(part):
            if name not in declared:
                continue
            said = dict(declared[name].metadata)
            if part.__module__.partition(".")[0] == "transformers":
                theirs[name] = {**said, **INHERITED.get(name, {}), "inherited": True}
            else:
                theirs.pop(name, None)
                ours[name] = {**ours.get(name, {}), **said}
    named = {name: theirs.pop(name) for name in INHERITED if name in theirs}
    return {**ours, **named, **theirs}


@functools.cache
def _with_key(kind: type, key: str) -> dict[str, Any]:
    return {name: said[key] for name, said in _options_of(kind).items() if key in said}
