"""Measure how often vLLM routes tokens to other experts than the trainer, and how much of the gap comes from that.

    python -m benchmarks.proofs.expert_routing            (two minutes on two cores)

Tiny random mixtures of experts (`tests/model_families.py`) sample on vLLM in this process, with the trainer's
weights. vLLM's routers tell the experts of each token through the callback that its own capture uses. The trainer
scores the completions twice: with its own routing, and with vLLM's experts, whose weights its own routers compute
("rollout routing replay", arXiv 2510.11370). The program prints the table of docs/internals/models-and-tokens.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from transformers import PreTrainedModel

from lockstep.contract.distribution import Distribution
from lockstep.contract.protocol import Completion
from lockstep.extras.verify.stage import Stage
from lockstep.watch.gap_explained import experts_of
from lockstep.watch.plain_forward import sampled_logps

# A family, and further fields of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, 8 of 32 experts": ("qwen3_moe", {"num_experts": 32, "num_experts_per_tok": 8}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
}


@dataclass(frozen=True, slots=True)
class Routed:
    """The figures of one model in one precision.

    Attributes:
        tokens: number of sampled tokens.
        differing: share of (position, layer) pairs with other experts in vLLM than in the trainer.
        gaps: (tokens,) |g| with the trainer's own routing, in nats.
        replayed: (tokens,) |g| with vLLM's experts.
    """

    tokens: int
    differing: float
    gaps: torch.Tensor
    replayed: torch.Tensor


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--samples", type=int, default=8, help="completions per prompt")
    words.add_argument("--length", type=int, default=48, help="tokens per completion")
    asked = words.parse_args()
    print(
        "| model | dtype | tokens | other experts | mean gap | largest | with vLLM's experts: mean | largest |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, (family, fields) in MODELS.items():
        for bf16 in (False, True):
            found = measured(family, fields, bf16=bf16, samples=asked.samples, length=asked.length)
            figures = (found.gaps.mean(), found.gaps.max(), found.replayed.mean(), found.replayed.max())
            cells = [name, "bf16" if bf16 else "fp32", str(found.tokens), f"{found.differing:.2%}"]
            print("| " + " | ".join(cells + [f"{float(value):.2g}" for value in figures]) + " |", flush=True)


def measured(family: str, fields: dict[str, Any], *, bf16: bool, samples: int, length: int) -> Routed:
    """Sample, and score twice."""
    from model_families import save_family
    from stages import stage_on

    with tempfile.TemporaryDirectory() as folder:
        model = save_family(family, Path(folder) / "model", **fields)
        settings = {"use_vllm": True, "bf16": bf16, "max_completion_length": length}
        with stage_on(model, Path(folder) / "run", **settings) as stage:
            stage.push()
            return measured_on(stage, samples)


def measured_on(stage: Stage, samples: int) -> Routed:
    """Sample with the engine of a stage, and score twice."""
    sampling, precision = stage.sampling(), stage.precision
    distribution, inner = Distribution(sampling), stage.model
    gaps, replayed, differing, pairs = [], [], 0, 0
    for prompt in stage.prompts:
        for _ in range(samples):
            # One request at a time, without a cached prompt: the rows come in the order of its positions.
            stage.engine.reset_caches()
            stage.config.seed += 1
            with engine_experts(stage.engine.llm) as rows:
                (completion,) = stage.sample(sampling, [prompt], 1)
            theirs = torch.stack([torch.cat(rows[layer]) for layer in sorted(rows)])
            ids = [*completion.prompt_ids.tolist(), *completion.token_ids.tolist()][:-1]
            ours = experts_of(inner, ids, precision)
            assert theirs.shape == ours.shape, (theirs.shape, ours.shape)
            differing += int((theirs.sort(-1).values != ours).any(-1).sum())
            pairs += ours.shape[0] * ours.shape[1]
            behaviour = torch.from_numpy(completion.sampled_logprobs.copy())
            gaps.append((behaviour - sampled_logps(inner, completion, distribution, precision)).abs())
            replayed.append((behaviour - _replayed(inner, completion, theirs, distribution, precision)).abs())
    return Routed(sum(map(len, gaps)), differing / pairs, torch.cat(gaps), torch.cat(replayed))


@contextmanager
def engine_experts(llm: Any) -> Iterator[dict[int, list[torch.Tensor]]]:
    """By layer, the (n, K) ids of the experts that vLLM chooses in each of its steps."""
    rows: dict[int, list[torch.Tensor]] = {}

    def note(layer: int, ids: torch.Tensor) -> None:
        rows.setdefault(layer, []).append(ids.long().clone())

    def capture(model: torch.nn.Module, *, on: bool) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(note, module.layer_id) if on else None)

    llm.apply_model(partial(capture, on=True))
    try:
        yield rows
    finally:
        llm.apply_model(partial(capture, on=False))


def _replayed(
    model: PreTrainedModel,
    completion: Completion,
    experts: torch.Tensor,
    distribution: Distribution,
    precision: Any,
) -> torch.Tensor:
    """The trainer's log-probs with given experts.

    Args:
        experts: (L, T, K) ids.
    """
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    with ExitStack() as hooks:
        for router, ids in zip(routers, experts, strict=True):
            hooks.callback(router.register_forward_hook(partial(_chosen, ids)).remove)
        return sampled_logps(model, completion, distribution, precision)


def _chosen(ids: torch.Tensor, router: torch.nn.Module, given: Any, found: Sequence[torch.Tensor]) -> Any:
    """What a router returns if it chooses `ids`: its logits, the weights of the experts, and the ids."""
    logits, weights, _ = found
    chosen = logits.float().softmax(-1).gather(-1, ids)
    if getattr(router, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return logits, chosen.to(weights.dtype), ids


if __name__ == "__main__":
    main()
