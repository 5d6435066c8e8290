"""The configuration of a GRPO run: `transformers.TrainingArguments` and TRL's names on top.

What TRL has and Lockstep does not support yet is not a field here, or is refused in `__post_init__`; nothing is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from lockstep.engines.server_calls import server_urls
from lockstep.errors import InputError
from lockstep.training.precision import has_fast_bf16


def _doc(text: str, **metadata: Any) -> dict[str, Any]:
    return {"help": text, **metadata}


@dataclass
class GRPOConfig(TrainingArguments):
    """Configuration of `GRPOTrainer`.

    `per_device_train_batch_size` counts completions, as in TRL. One generation makes `per_device_train_batch_size ×
    steps_per_generation` completions of `… ÷ num_generations` prompts.

    Raises:
        InputError: fields contradict each other, or ask for something that is not supported yet.
    """

    learning_rate: float = field(default=1e-6, metadata=_doc("Initial learning rate of AdamW."))
    logging_steps: float = field(default=10, metadata=_doc("Optimizer steps between two logs."))
    logging_nan_inf_filter: bool = field(default=False, metadata=_doc("Hide NaN losses; off, so that they are seen."))
    bf16: bool | None = field(
        default=None, metadata=_doc("bf16 autocast over fp32 weights. Default: where this machine computes bf16 fast.")
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata=_doc("Must stay false: rewards get all columns.")
    )
    dataloader_drop_last: bool = field(default=True, metadata=_doc("Must stay true: a generation is always whole."))

    model_init_kwargs: dict | str | None = field(
        default=None, metadata=_doc("Arguments of `from_pretrained` where the model is given by name.")
    )
    chat_template_kwargs: dict | str | None = field(default=None, metadata=_doc("Arguments of the chat template."))
    shuffle_dataset: bool = field(default=True, metadata=_doc("Shuffle the training prompts every epoch."))

    num_generations: int = field(default=8, metadata=_doc("Completions a prompt (the size of a group)."))
    num_generations_eval: int | None = field(default=None, metadata=_doc("The same in evaluation; default: as above."))
    max_completion_length: int = field(default=512, metadata=_doc("Most tokens of a completion."))
    generation_batch_size: int | None = field(default=None, metadata=_doc("Completions a generation, over all ranks."))
    steps_per_generation: int | None = field(
        default=None, metadata=_doc("Micro-batches a generation; default: gradient_accumulation_steps.")
    )
    temperature: float = field(default=1.0, metadata=_doc("Sampling temperature; the trainer scores the same."))
    top_p: float = field(default=1.0, metadata=_doc("Only 1.0 yet: the trainer must score the same support."))
    top_k: int = field(default=0, metadata=_doc("Only 0 yet, as top_p."))
    min_p: float | None = field(default=None, metadata=_doc("Only None yet, as top_p."))
    repetition_penalty: float = field(default=1.0, metadata=_doc("Only 1.0 yet, as top_p."))
    stop_strings: list[str] | None = field(default=None, metadata=_doc("Strings that end a completion."))

    num_iterations: int = field(default=1, metadata=_doc("Passes over each generation (μ in the GRPO paper)."))
    epsilon: float = field(default=0.2, metadata=_doc("Lower clip of the ratio: 1 − epsilon."))
    epsilon_high: float | None = field(default=None, metadata=_doc("Upper clip: 1 + epsilon_high; default: epsilon."))
    beta: float = field(default=0.0, metadata=_doc("Only 0.0 yet: no reference model, no KL term."))
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo"] = field(
        default="dapo", metadata=_doc("How tokens are averaged; see lockstep.algorithms.policy_loss.")
    )
    scale_rewards: str = field(default="group", metadata=_doc("`group`, `batch` or `none`."))
    reward_weights: list[float] | None = field(default=None, metadata=_doc("One weight a reward function; default 1."))
    reward_timeout: float = field(default=600.0, metadata=_doc("Seconds that coroutine reward functions may take."))
    mask_truncated_completions: bool = field(
        default=False,
        metadata=_doc("Leave completions cut at the length limit out of the loss (not out of the proof)."),
    )
    vllm_importance_sampling_correction: bool = field(
        default=True, metadata=_doc("Weight tokens by the measured trainer / engine ratio, once the gap has passed.")
    )
    vllm_importance_sampling_mode: Literal["token_truncate"] = field(
        default="token_truncate", metadata=_doc("Only token-level truncation yet.")
    )
    vllm_importance_sampling_clip_max: float = field(default=3.0, metadata=_doc("Largest such weight."))

    use_vllm: bool | None = field(
        default=None, metadata=_doc("vLLM (true) or transformers (false) generates. Default: vLLM where installed.")
    )
    vllm_mode: Literal["colocate", "server"] = field(
        default="colocate", metadata=_doc("vLLM in this process, or running servers ('lockstep serve').")
    )
    vllm_server_base_url: str | None = field(
        default=None, metadata=_doc("URL of the server; several, separated by commas. Given, it implies server mode.")
    )
    vllm_server_host: str = field(default="127.0.0.1", metadata=_doc("The server's host, where no URL is given."))
    vllm_server_port: int = field(default=8000, metadata=_doc("The server's port, where no URL is given."))
    vllm_server_key_file: str | None = field(
        default=None,
        metadata=_doc("File with the server's key. Default: LOCKSTEP_SERVER_KEY, or what a server here left."),
    )
    vllm_weight_transport: str = field(
        default="auto", metadata=_doc("shared_memory, gloo, or auto: the fastest that all servers can take part in.")
    )
    vllm_group_host: str = field(
        default="127.0.0.1", metadata=_doc("This machine's address as servers elsewhere reach it; gloo listens there.")
    )
    vllm_group_port: int = field(default=0, metadata=_doc("Port where gloo meets the servers. Default: a free one."))
    vllm_gpu_memory_utilization: float = field(default=0.3, metadata=_doc("Share of a GPU's memory for vLLM."))
    vllm_max_model_length: int | None = field(
        default=None, metadata=_doc("Engine context. Default: the longest prompt plus max_completion_length.")
    )
    vllm_max_num_seqs: int = field(default=64, metadata=_doc("Most sequences that the engine decodes together."))
    vllm_server_timeout: float = field(
        default=600.0, metadata=_doc("Seconds for one generation, one call, or the wait for a server.")
    )
    vllm_engine_kwargs: dict | str | None = field(default=None, metadata=_doc("Further arguments of vllm.LLM."))
    engine_dtype: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", metadata=_doc("Dtype of the engine. Default: bfloat16 with bf16, else float32.")
    )

    token_budget: int = field(default=1024, metadata=_doc("Most positions of one forward (tokens after sharing)."))
    logits_chunk_size: int = field(default=256, metadata=_doc("Rows of logits held at a time."))

    _VALID_DICT_FIELDS = [  # noqa: RUF012 - read as a class attribute by TrainingArguments
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "chat_template_kwargs",
        "vllm_engine_kwargs",
    ]

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and has_fast_bf16()
        if not torch.cuda.is_available():
            self.use_cpu = True
        super().__post_init__()
        self.scale_rewards = {True: "group", False: "none", "True": "group", "False": "none"}.get(
            self.scale_rewards, self.scale_rewards
        )
        if self.vllm_server_base_url is not None:
            self.vllm_mode = "server"
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        self._refuse_unsupported()
        self._size_generation()
        self._check_saves()

    @property
    def prompts_per_generation(self) -> int:
        """Prompts that one generation samples from."""
        assert self.generation_batch_size is not None
        return self.generation_batch_size // self.num_generations

    @property
    def micro_batches_per_generation(self) -> int:
        """Micro-batches between two generations."""
        assert self.steps_per_generation is not None
        return self.steps_per_generation * self.num_iterations

    @property
    def single_update(self) -> bool:
        """Whether each generation is used for exactly one optimizer step, so that the policy never moves under it."""
        return self.micro_batches_per_generation == self.gradient_accumulation_steps

    @property
    def trainer_dtype(self) -> torch.dtype:
        """Dtype in which the trainer computes its forward."""
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def engine_torch_dtype(self) -> torch.dtype:
        """Dtype in which the engine computes."""
        return self.trainer_dtype if self.engine_dtype == "auto" else getattr(torch, self.engine_dtype)

    def _refuse_unsupported(self) -> None:
        neutral: dict[str, object] = {
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "beta": 0.0,
            "fp16": False,
        }
        neutral |= {"auto_find_batch_size": False, "load_best_model_at_end": False, "full_determinism": False}
        neutral |= {"vllm_importance_sampling_mode": "token_truncate"}
        neutral |= {"remove_unused_columns": False, "dataloader_drop_last": True, "torch_compile": False}
        # Fields of TrainingArguments that the step here does not go through, or that would take it apart.
        neutral |= {"deepspeed": None, "label_smoothing_factor": 0.0, "neftune_noise_alpha": None}
        neutral |= {"save_only_model": False, "include_num_input_tokens_seen": "no", "torch_empty_cache_steps": None}
        neutral |= {"dataloader_num_workers": 0, "resume_from_checkpoint": None, "train_sampling_strategy": "random"}
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise InputError(f"{name}={getattr(self, name)!r} is not supported yet; only {value!r} is")
        if self.world_size > 1 or self.fsdp or self.n_gpu > 1:
            raise InputError(
                "several processes or GPUs, FSDP and DeepSpeed are not supported yet; start one process on one device"
            )
        if str(self.save_strategy) in ("best", "SaveStrategy.BEST"):
            raise InputError("save_strategy=best is not supported yet; use steps, epoch or no")
        optimizer = str(getattr(self.optim, "value", self.optim))
        if "layerwise" in optimizer or optimizer.startswith(("lomo", "adalomo", "schedule_free")):
            raise InputError(f"optim={optimizer} steps inside the backward pass, before the proof; it is not supported")
        if self.temperature <= 0:
            raise InputError(f"temperature={self.temperature} leaves nothing to learn from; it must be above 0")
        if self.scale_rewards not in ("group", "batch", "none"):
            raise InputError(f"scale_rewards={self.scale_rewards!r}; it must be group, batch or none")
        if self.loss_type not in ("grpo", "dr_grpo", "dapo", "bnpo"):
            raise InputError(f"loss_type={self.loss_type!r}; it must be grpo, dr_grpo, dapo or bnpo")
        at_least_one = (
            "max_completion_length",
            "num_iterations",
            "token_budget",
            "logits_chunk_size",
            "steps_per_generation",
        )
        for name in (*at_least_one, "gradient_accumulation_steps", "per_device_train_batch_size", "vllm_max_num_seqs"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}; it must be at least 1")
        self._check_server()
        for name in ("model_init_kwargs", "chat_template_kwargs", "vllm_engine_kwargs"):
            if not isinstance(getattr(self, name), dict | None):
                raise InputError(f'{name}={getattr(self, name)!r}; it must be a mapping, such as {{"key": 1}}')

    @property
    def server_urls(self) -> list[str]:
        """Base URL of each server, in server mode."""
        return server_urls(self.vllm_server_base_url, self.vllm_server_host, self.vllm_server_port)

    def _check_server(self) -> None:
        if self.vllm_mode not in ("colocate", "server"):
            raise InputError(f"vllm_mode={self.vllm_mode!r}; it must be colocate or server")
        if self.vllm_mode == "colocate":
            return
        if self.use_vllm is False:
            raise InputError("vllm_mode=server and use_vllm=false contradict each other; leave use_vllm out")
        if self.vllm_engine_kwargs:
            raise InputError("vllm_engine_kwargs are for vLLM in this process; give them to 'lockstep serve' instead")
        if self.vllm_server_timeout <= 0:
            raise InputError(f"vllm_server_timeout={self.vllm_server_timeout}; it must be above 0")
        urls = self.server_urls
        odd = [url for url in urls if not url.startswith(("http://", "https://"))]
        if odd or len(set(urls)) != len(urls):
            raise InputError(
                f"vllm_server_base_url={self.vllm_server_base_url!r}; it must be different URLs such as http://127.0.0.1:8000, "
                "separated by commas"
            )

    def _size_generation(self) -> None:
        if self.num_generations < 2:
            raise InputError(
                f"num_generations={self.num_generations}; an advantage needs at least 2 completions a prompt"
            )
        batch = self.per_device_train_batch_size
        if self.generation_batch_size is not None:
            if self.generation_batch_size % batch:
                raise InputError(
                    f"generation_batch_size={self.generation_batch_size} is no multiple of "
                    f"per_device_train_batch_size={batch}"
                )
            steps = self.generation_batch_size // batch
            if self.steps_per_generation not in (None, steps):
                raise InputError(
                    f"generation_batch_size={self.generation_batch_size} means steps_per_generation={steps}, but it is given "
                    f"as {self.steps_per_generation}; give one of the two"
                )
            self.steps_per_generation = steps
        elif self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        assert self.steps_per_generation is not None
        self.generation_batch_size = batch * self.steps_per_generation
        if self.generation_batch_size % self.num_generations:
            raise InputError(
                f"one generation makes {self.generation_batch_size} completions (per_device_train_batch_size={batch} × "
                f"steps_per_generation={self.steps_per_generation}), no multiple of num_generations={self.num_generations}"
            )
        if self.steps_per_generation % self.gradient_accumulation_steps:
            raise InputError(
                f"steps_per_generation={self.steps_per_generation} is no multiple of gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: an optimizer step would span two generations"
            )

    def _check_saves(self) -> None:
        """A run goes on exactly only from where a generation ends and a log has just been written."""
        updates = self.micro_batches_per_generation // self.gradient_accumulation_steps
        saves = {"max_steps": self.max_steps} if self.max_steps > 0 and self.save_strategy != "no" else {}
        if self.save_strategy == "steps":
            saves["save_steps"] = int(self.save_steps)
            if self.logging_strategy == "steps" and self.save_steps % self.logging_steps:
                raise InputError(
                    f"save_steps={self.save_steps} is no multiple of logging_steps={self.logging_steps}: a run resumed between two "
                    "logs would not repeat its metrics"
                )
        for name, value in saves.items():
            if value % updates:
                raise InputError(
                    f"{name}={value} is no multiple of the {updates} optimizer steps of a generation: a run resumed in "
                    "between would not repeat itself"
                )
