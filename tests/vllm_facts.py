"""What Lockstep relies on in vLLM's sources: names, arguments, limits, defaults. vLLM is not imported.

`FACTS` is a table of text. A line without indent is a module; the lines below it are facts about it, and `#` begins a
remark:

    name                    the module has it, perhaps from another module
    Class.method(a, b, +c)  its first arguments after `self` are a and b, in this order, and it also takes c
    Class@name              the class, or a class that it is made from, has this field, method or attribute
    NAME = 128              a constant
    ~ text                  the source contains this text

`tests/engines/test_vllm_facts.py` compares the table with the installed vLLM, and with `tests/vllm_facts_*.json`: what
`scripts/vllm_facts.py` has read from releases that cannot be installed here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

FACTS = """
vllm
  LLM
  SamplingParams
vllm.entrypoints.llm
  LLM.collective_rpc(method, +timeout, +args)
  LLM.apply_model(func)
  LLM.sleep(level)
  LLM.wake_up(tags)
  LLM@llm_engine
  LLM.init_weight_transfer_engine(request)
  LLM.update_weights(request)
  LLM@finish_weight_update
  LLM.update_weight_version(new_version)
  LLM@get_weight_version
vllm.engine.arg_utils
  EngineArgs.create_engine_config(usage_context)
  AsyncEngineArgs@from_cli_args
vllm.model_executor.model_loader
  get_model_loader(load_config)
vllm.usage.usage_lib
  UsageContext@LLM_CLASS
  UsageContext@OPENAI_API_SERVER
vllm.v1.engine.llm_engine
  LLMEngine.add_request(request_id, prompt, params, +lora_request)
  LLMEngine@step
  LLMEngine.abort_request(request_ids)
  LLMEngine@get_num_unfinished_requests
  LLMEngine@reset_prefix_cache
  LLMEngine@reset_mm_cache
  LLMEngine@reset_encoder_cache
  LLMEngine.add_lora(lora_request)
  LLMEngine@vllm_config
  LLMEngine@engine_core
vllm.v1.engine.core_client
  InprocClient@engine_core
vllm.v1.engine.core
  EngineCore@batch_queue
vllm.outputs
  RequestOutput
  RequestOutput.__init__(request_id, +prompt_token_ids, +prompt_logprobs, +outputs, +finished, +lora_request)
  CompletionOutput@token_ids
  CompletionOutput@logprobs
  CompletionOutput@finish_reason
  CompletionOutput@weight_versions
  CompletionOutput@sampling_mask
vllm.sampling_params
  RequestOutputKind
  StructuredOutputsParams
  SamplingParams@extra_args
  SamplingParams.update_from_tokenizer(tokenizer)  # replaced: port/kept_ids.py
  SamplingParams@_bad_words_token_ids
  SamplingParams@_all_stop_token_ids
vllm.exceptions
  VLLMValidationError
vllm.config
  WeightTransferConfig
vllm.config.vllm
  VllmConfig@use_v2_model_runner
vllm.config.model
  ModelConfig@get_diff_sampling_param
  ModelConfig@head_dtype
  ModelConfig@get_vocab_size
  ModelConfig@logprobs_mode
  ModelConfig@hf_text_config
  ModelConfig@using_transformers_backend
  ModelConfig@architecture
  ModelConfig@multimodal_config
vllm.config.cache
  CacheConfig@enable_prefix_caching
vllm.config.scheduler
  SchedulerConfig@async_scheduling
  SchedulerConfig@enable_chunked_prefill
  SchedulerConfig@policy
vllm.config.structured_outputs
  StructuredOutputsConfig@disable_any_whitespace
  StructuredOutputsConfig@enable_in_reasoning
  StructuredOutputsConfig@backend
vllm.config.multimodal
  MultiModalConfig@mm_device_do_normalize
  MultiModalConfig@mm_processor_cache_gb
vllm.envs
  disable_envs_cache
  ~ os.environ.get("VLLM_MAX_NUM_BAD_WORDS", "128")
  ~ os.environ.get("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", "1024")
  ~ VLLM_USE_V2_MODEL_RUNNER
  ~ VLLM_RPC_BASE_PATH
  ~ VLLM_ALLOW_RUNTIME_LORA_UPDATING
vllm.v1.worker.gpu.model_runner
  # the second model runner, on GPUs
  GPUModelRunner.sample(hidden_states, input_batch)  # replaced: port/kept_ids.py
  GPUModelRunner@sampler
  GPUModelRunner@max_num_reqs
  GPUModelRunner@encoder_cache
  GPUModelRunner@model_state
  GPUModelRunner@lora_manager
  GPUModelRunner@sample_tokens
vllm.v1.worker.gpu.sample.sampler
  Sampler.add_request(req_idx, sampling_params)  # replaced: port/kept_ids.py
  Sampler.sample(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np)  # replaced: port/kept_ids.py
  Sampler@return_sampling_mask
  Sampler@logprobs_mode
  Sampler._sample_random(processed_logits, expanded_idx_mapping, idx_mapping_np, pos)  # replaced: draw_faults.py
vllm.v1.worker.gpu.sample.output
  SamplerOutput@sampling_mask_tensors
  SamplingMaskTensors@counts
vllm.v1.worker.gpu.input_batch
  InputBatch@idx_mapping_np
vllm.v1.worker.gpu.sample.logit_bias
  MAX_NUM_ALLOWED_TOKEN_IDS = 1024  # contract/inbox.py
  MAX_NUM_LOGIT_BIAS_TOKENS = 1024
  MAX_NUM_STOP_TOKEN_IDS = 128
  ~ if num_allowed_token_ids > MAX_NUM_ALLOWED_TOKEN_IDS:
  ~ if num_logit_bias > MAX_NUM_LOGIT_BIAS_TOKENS:
  ~ if min_tokens > 0 and stop_token_ids:
  ~ if num_stop_token_ids > MAX_NUM_STOP_TOKEN_IDS:
vllm.v1.worker.gpu.sample
  logit_bias
vllm.v1.worker.gpu.sample.bad_words
  ~ if num_bad_words > max_num_bad_words:
  ~ if len(flattened_tokens) > max_total_tokens:
vllm.v1.worker.gpu.sample.penalties
  bincount(expanded_idx_mapping, all_token_ids, prompt_len, prefill_len, prompt_bin_mask, output_bin_counts)
vllm.v1.sample.ops.topk_topp_sampler
  # both runners filter with this function; where there is Triton, it searches the edges: port/engine.py
  HAS_TRITON
  ~ return apply_top_k_top_p_triton(
vllm.v1.worker.gpu.sample.states
  ~ return apply_top_k_top_p(
vllm.v1.sample.ops.topk_topp_triton
  # how near the search comes to the edge of top-p: watch/kept_sets.py
  _SPLIT_MAX_BATCH = 64
  _SPLIT_FANOUT = 8
  _SPLIT_ROUNDS = 5
  ~ (max_range - min_range) < 1e-9 or num_iters >= 18
  ~ min_prob = tl.maximum(tl.exp(mn - M) / Z, 1e-30)
vllm.v1.worker.gpu.mm.encoder_runner
  EncoderRunner@prepare_mm_inputs  # replaced: port/requests.py
vllm.v1.worker.gpu_worker
  # on GPUs, with both runners
  Worker@use_v2_model_runner
  Worker@weight_transfer_engine
  Worker@start_weight_update
  Worker.update_weights(update_info)
  Worker@finish_weight_update
  Worker.init_weight_transfer_engine(init_info)
  Worker@_weight_update_active
vllm.v1.worker.worker_base
  WorkerBase@is_driver_worker
  WorkerBase@vllm_config
vllm.v1.worker.gpu_model_runner
  AsyncGPUModelRunnerOutput@_model_runner_output
  # the first model runner, on CPUs
  GPUModelRunner@sample_tokens  # replaced: port/kept_ids.py
  GPUModelRunner@sampler
  GPUModelRunner@input_batch
  GPUModelRunner@requests
  GPUModelRunner@encoder_cache
  GPUModelRunner@compilation_config
  GPUModelRunner@_batch_mm_inputs_from_scheduler  # replaced: port/requests.py
vllm.v1.worker.lora_model_runner_mixin
  LoRAModelRunnerMixin@lora_manager
vllm.v1.sample
  sampler
vllm.v1.sample.sampler
  batched_count_greater_than  # replaced: port/patches.py
  Sampler@sample  # replaced: port/kept_ids.py
  Sampler@apply_logits_processors
  Sampler@topk_topp_sampler
  apply_all_penalties
vllm.v1.outputs
  SamplingMaskLists
  ModelRunnerOutput@sampling_masks
vllm.v1.core.sched.scheduler
  Scheduler.__init__(vllm_config)  # replaced: port/kept_ids.py
  Scheduler@return_sampling_mask
vllm.platforms
  current_platform
vllm.platforms.interface
  Platform@is_sleep_mode_available
  Platform@device_name
vllm.device_allocator.cumem
  CuMemAllocator.sleep(offload_tags)
  CuMemAllocator.wake_up(tags)
vllm.platforms.cuda
  ~ torch.backends.cuda.enable_cudnn_sdp(False)
vllm.distributed
  parallel_state
  tensor_model_parallel_all_gather
vllm.distributed.parallel_state
  destroy_distributed_environment  # replaced: port/patches.py
  _WORLD
vllm.distributed.weight_transfer.base
  WeightTransferEngine@start_weight_update
  WeightTransferEngine@update_weights
  WeightTransferEngine@finish_weight_update
  WeightTransferEngine@init_transfer_engine
  WeightTransferEngine@receive_weights
  WeightTransferEngine@parse_update_info
  WeightTransferEngine@shutdown
  WeightTransferEngine@model
  WeightTransferEngine@device
  WeightTransferInitInfo
  WeightTransferUpdateInfo
vllm.distributed.weight_transfer.factory
  WeightTransferEngineFactory
  WeightTransferEngineFactory@register_engine
  WeightTransferEngineFactory@_registry
vllm.utils.nccl
  unpinned_nccl_env
vllm.utils
  network_utils
vllm.utils.argparse_utils
  FlexibleArgumentParser
vllm.utils.network_utils
  ~ tempfile.gettempdir()
vllm.model_executor.model_loader
  default_loader
  weight_utils
vllm.model_executor.model_loader.reload
  initialize_layerwise_reload
  finalize_layerwise_reload
vllm.model_executor.model_loader.reload.layerwise
  _get_original_loader
  _place_kernel_tensors
  get_layerwise_info
vllm.model_executor.model_loader.reload.utils
  get_layer_tensors
vllm.model_executor.model_loader.reload.types
  LayerReloadingInfo
  LayerReloadingInfo@restore_metadata
  LayerReloadingInfo@kernel_tensors
  LayerReloadingInfo@load_numel
  LayerReloadingInfo@load_numel_total
  LayerReloadingInfo@loaded_weights
  LayerReloadingInfo@reset
  LayerReloadingInfo@can_load
vllm.model_executor.layers.attention
  is_deferred_attention_layer
vllm.model_executor.layers.vocab_parallel_embedding
  UnquantizedEmbeddingMethod@process_weights_after_loading
  ParallelLMHead
  VocabParallelEmbedding
  VocabParallelEmbedding@org_vocab_size
  VocabParallelEmbedding@quant_method
vllm.model_executor.layers.fused_moe.experts.cpu_moe
  CPUUnquantizedExperts
vllm.model_executor.layers.fused_moe.routed_experts
  RoutedExperts
  RoutedExperts@forward_modular
vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method
  UnquantizedFusedMoEMethod
  UnquantizedFusedMoEMethod@moe_kernel
vllm.model_executor.layers.linear
  LinearBase
  ColumnParallelLinear
  RowParallelLinear
  QKVParallelLinear@num_kv_head_replicas
vllm.model_executor.layers.quantization.online.fp8
  Fp8PtpcOnlineLinearMethod
vllm.model_executor.utils
  get_packed_modules_mapping
vllm.model_executor.models
  registry
vllm.model_executor.models.registry
  _run_in_subprocess  # replaced: port/patches.py
vllm.model_executor.models.utils
  WeightsMapper@_map_name_with_shard
  WeightsMapper@get_rename_mapper
vllm.model_executor.models.transformers.base
  Base._decorate_cls_for_torch_compile(cls)  # replaced: port/patches.py
vllm.ir
  ops
vllm.inputs.engine
  mm_input
vllm.multimodal.inputs
  MultiModalBatchedField@keep_on_cpu
  MultiModalFlatField@slices
  MultiModalFieldElem
  MultiModalKwargsItem
  MultiModalKwargsItems
  PlaceholderRange
vllm.lora.request
  LoRARequest
  LoRARequest@lora_name
vllm.lora.layers
  BaseLayerWithLoRA
  LoRAMapping
vllm.lora.layers.base_linear
  BaseLinearLayerWithLoRA@_apply_lora_to_output
vllm.lora.lora_model
  LoRAModel@from_lora_tensors
vllm.lora.peft_helper
  PEFTHelper
vllm.lora.utils
  parse_fine_tuned_lora_name
vllm.lora.worker_manager
  WorkerLoRAManager._load_adapter(lora_request)  # replaced: port/lora.py
  WorkerLoRAManager@_adapter_manager
  WorkerLoRAManager@list_adapters
  WorkerLoRAManager@remove_adapter
vllm.lora.model_manager
  LoRAModelManager@activate_adapter
  LoRAModelManager@add_adapter
  LoRAModelManager@create_dummy_lora
  LoRAModelManager@set_adapter_mapping
  LoRAModelManager@lora_index_to_id
  LoRAModelManager@modules
  LoRAModelManager@packed_modules
  LoRAModelManager@capacity
  LoRAModelManager@punica_wrapper_mapping
vllm.lora.punica_wrapper.punica_base
  PunicaWrapperBase@update_metadata  # replaced on CPUs: port/lora.py
  PunicaWrapperBase@token_lora_indices
vllm.lora.punica_wrapper.punica_cpu
  PunicaWrapperCPU@add_lora_linear  # replaced: port/lora.py
vllm.lora.ops.triton_ops.lora_shrink_op
  ~ assert inputs.dtype in [torch.float16, torch.bfloat16]
vllm.entrypoints.launchers.api_server.entry
  main
vllm.entrypoints.launchers.cli_args
  make_arg_parser
vllm.entrypoints.cli.serve
  run_headless
"""


@dataclass(frozen=True)
class Fact:
    """One line of the table.

    Attributes:
        module: the module's full name.
        line: the fact, without its remark.
    """

    module: str
    line: str

    def __str__(self) -> str:
        return f"{self.module}: {self.line}"


def facts() -> list[Fact]:
    found, module = [], ""
    for line in FACTS.splitlines():
        text = line.partition("  #")[0].rstrip()
        if text and not line.startswith(" "):
            module = text
        elif text:
            found.append(Fact(module, text.strip()))
    return found


@dataclass
class Sources:
    """The sources of one vLLM. `root` is the folder that contains the package."""

    root: Path
    trees: dict[str, ast.Module | None] = field(default_factory=dict)

    def file(self, module: str) -> Path | None:
        path = self.root.joinpath(*module.split("."))
        return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)

    def tree(self, module: str) -> ast.Module | None:
        if module not in self.trees:
            file = self.file(module)
            self.trees[module] = None if file is None else ast.parse(file.read_text(encoding="utf-8"))
        return self.trees[module]

    def find(self, module: str, name: str, depth: int = 8) -> tuple[str, ast.AST] | None:
        """The module that defines a name, and its definition there. None: it is not there."""
        tree = self.tree(module)
        if tree is None or depth == 0:
            return None
        for node in _statements(tree.body):
            if name in _bound(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*" and (
                        found := self.find(self._source(module, node), name, depth - 1)
                    ):
                        return found
                    if (alias.asname or alias.name) == name:
                        return self.find(self._source(module, node), alias.name, depth - 1) or (module, node)
        for node in ast.walk(tree):
            # Names that a package imports when they are first asked for: "LLM": ".entrypoints.llm:LLM".
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.endswith(f":{name}")
            ):
                return self.find(module + node.value.partition(":")[0], name, depth - 1)
        return (f"{module}.{name}", tree) if self.file(f"{module}.{name}") else None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        """The full name of the module from which a statement imports."""
        file = self.file(module)
        package = module if file is not None and file.name == "__init__.py" else module.rpartition(".")[0]
        base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
        return ".".join(filter(None, [base if node.level else "", node.module]))

    def members(self, module: str, node: ast.ClassDef) -> dict[str, ast.AST]:
        """The fields, methods and attributes of a class and of vLLM's classes that it is made from."""
        found: dict[str, ast.AST] = {}
        for base in node.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            known = self.find(module, inner.id) if isinstance(inner, ast.Name) else None
            if known is not None and isinstance(known[1], ast.ClassDef):
                found |= self.members(known[0], known[1])
        for part in ast.walk(node):
            is_store = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
            if is_store and isinstance(part.value, ast.Name) and part.value.id in ("self", "cls"):
                found[part.attr] = part
        for statement in _statements(node.body):
            found |= dict.fromkeys(_bound(statement), statement)
        return found


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a body, also those under a condition."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If | ast.Try | ast.With):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            inner += [s for handler in getattr(node, "handlers", []) for s in handler.body]
            found += _statements(inner)
    return found


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return {target.id for target in targets if isinstance(target, ast.Name)}


def read(sources: Sources, fact: Fact) -> str | None:
    """What a vLLM has where a fact says so, as text: a signature, a value, or "there". None: nothing."""
    line = fact.line
    if line.startswith("~ "):
        file = sources.file(fact.module)
        return (
            "there" if file and _closed_up(line[2:]) in _closed_up(file.read_text(encoding="utf-8")) else None
        )
    if " = " in line:
        found = sources.find(fact.module, line.partition(" = ")[0])
        value = getattr(found[1], "value", None) if found else None
        return None if value is None else ast.unparse(value)
    symbol = line.partition("(")[0]
    owner, member = [*symbol.replace("@", ".").split("."), ""][:2]
    found = sources.find(fact.module, owner)
    if found is None:
        return None
    module, node = found
    if member:
        if not isinstance(node, ast.ClassDef):
            return None
        part = sources.members(module, node).get(member)
        if part is None:
            return None
        node = part
    return _signature(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else "there"


def _closed_up(text: str) -> str:
    return " ".join(text.split()).replace("( ", "(").replace(" )", ")")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The arguments of a function, with their defaults and without their types."""
    copied: ast.FunctionDef = ast.parse(ast.unparse(node)).body[0]  # type: ignore[assignment]
    for part in ast.walk(copied.args):
        if isinstance(part, ast.arg):
            part.annotation = None
    return f"({ast.unparse(copied.args)})"


def arguments(signature: str) -> list[str]:
    """The names of the arguments, without `self`."""
    parsed: ast.FunctionDef = ast.parse(f"def f{signature}: ...").body[0]  # type: ignore[assignment]
    own = parsed.args
    names = [a.arg for a in (*own.posonlyargs, *own.args, *own.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def holds(fact: Fact, found: str | None) -> bool:
    """Whether what was found is what the fact says."""
    if found is None or fact.line.startswith("~ "):
        return found is not None
    if " = " in fact.line:
        return found == fact.line.partition(" = ")[2]
    if "(" not in fact.line:
        return True
    wanted = [name.strip() for name in fact.line.partition("(")[2].rstrip(")").split(",")]
    first, more = [n for n in wanted if not n.startswith("+")], [n[1:] for n in wanted if n.startswith("+")]
    has = arguments(found)
    # A decorator may hide the class as the first argument.
    return has[: len(first)] == first and set(more) <= set(has)
