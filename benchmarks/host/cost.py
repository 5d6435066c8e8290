"""Measures the cost of a step without the model and the engine: microseconds of processor time per sampled token.

    make host-cost   (four sizes, up to 1,024 completions of 4,096 tokens)

The engine's answers, log-probs and entropies are random numbers. All other code is that of a run: it turns answers into
completions, checks them, sends them to another rank, scores, prepares and packs them, learns from them, and writes
receipt and log. The method is GRPO with a reference model and an entropy threshold, so that every pass takes place:
policy and reference model score each completion once before the optimizer step. The model takes no time. Each cost is
counted in one row only.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch

from benchmarks.host.cost_plot import drawing
from lockstep.contract.inbox import Inbox
from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey
from lockstep.contract.sampling import Sampling
from lockstep.engines.servers.messages import completion_from
from lockstep.engines.vllm.port.requests import completion
from lockstep.engines.vllm.start import vllm_installed
from lockstep.extras.verify.logprob_checks import Unwatched
from lockstep.learn.generation import Preparation
from lockstep.learn.methods.grpo import GRPOConfig, GRPOObjective
from lockstep.learn.methods.objective import TokenBatch
from lockstep.learn.pack import Pack
from lockstep.learn.scoring import TokenScores
from lockstep.learn.sequence import TrainingSequence
from lockstep.learn.token_logps import DrawSums
from lockstep.learn.update import OptimizerStep, Policy
from lockstep.report.phases import PhaseClock
from lockstep.rollouts.driver import collect
from lockstep.rollouts.group import Prompt, RolloutGroup
from lockstep.rollouts.ranks import Ranks
from lockstep.rollouts.rewards import RewardLog, RewardScorer
from lockstep.rollouts.wire import (
    decode,
    encode,
    groups_from_wire,
    groups_to_wire,
    scores_from_wire,
    scores_to_wire,
)
from lockstep.run.files.logs import rows_of
from lockstep.run.files.rollouts import keep_rollouts
from lockstep.run.metrics import interruption_metrics, rollout_metrics, staleness_metrics
from lockstep.watch import evidence
from lockstep.watch.advantages import AdvantageProof, advantage_proof, check_batch, check_still
from lockstep.watch.ahead import check_staleness
from lockstep.watch.custody import Record, SampledTokens, check_aside, check_entering, sampled_tokens
from lockstep.watch.draws import DrawEvidence, DrawStats, measure_draws
from lockstep.watch.evidence import kept
from lockstep.watch.gap import check_count
from lockstep.watch.receipt import Receipt
from lockstep.watch.rewards import check_rows
from lockstep.watch.samples import check_samples

SIZES = "64x512,256x1024,256x4096,1024x4096"
# A row that is not part of the cost, and a row that replaces the first row of ROWS if vLLM is in the same process.
_NOT_COUNTED, _IN_PROCESS = "made up", "answers of vLLM in process"
ROWS = (
    "answers of a server",
    _IN_PROCESS,
    "requests, checks, groups",
    "decoding to text",
    "rows, samples, staleness",
    "to another rank and back",
    "rewards",
    "metrics",
    "preparation",
    "packing",
    "columns, loss, gap",
    "bets on draws",
    "receipt and log",
    "kept rollouts",
)
_GROUP, _PROMPT, _VERSION = 8, 128, 3


class RowClock:
    """Processor seconds by row. While one row runs inside another row, only the inner row counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


class Tokenizer:
    """A tokenizer whose decoding is counted in a row of its own.

    It is `real`, or the tokenizer of the packaged model.
    """

    def __init__(self, watch: RowClock, real: Any = None) -> None:
        from transformers import AutoTokenizer

        from lockstep.model_files import load_files
        from lockstep.models.packaged import packaged_model_dir

        self._real, self._watch = real or load_files(AutoTokenizer, str(packaged_model_dir())), watch
        self.size = len(self._real)

    def decode(self, *args: Any, **kwargs: Any) -> str:
        with self._watch.row("decoding to text"):
            return self._real.decode(*args, **kwargs)


class Answers:
    """An engine that gives made-up completions, one by one, like a real engine."""

    version = _VERSION

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = {completion.key: completion for completion in completions}

    def settings(self) -> Any:
        return SimpleNamespace(max_model_len=1 << 20, vocab_size=1 << 20, request_limits={})

    def serve(self, inbox: Inbox) -> None:
        while True:
            with inbox.taken(0, 60.0) as requests:
                if requests is None:
                    return
            for request in requests:
                inbox.answer(self._completions[request.key], [self.version])
                inbox.settle()


@dataclass(frozen=True, slots=True)
class MadeUpPolicy(Policy):
    """A policy that scores in no time. Its log-probs equal those of the engine."""

    watch: RowClock | None = None

    def packs(self, *args: Any) -> Iterator[Pack]:
        assert self.watch is not None
        found = Policy.packs(self, *args)
        while True:
            with self.watch.row("packing"):
                pack = next(found, None)
            if pack is None:
                return
            yield pack

    def score(self, pack: Pack, *args: Any, before_steps: bool = False, **kwargs: Any) -> TokenScores:
        assert self.watch is not None
        with self.watch.row(_NOT_COUNTED):
            logps = pack.column("behaviour_logps").requires_grad_(torch.is_grad_enabled())
            # Each token has its probability p, and a random place in the order of the vocabulary.
            sums = DrawSums(torch.ones_like(logps, dtype=torch.bool))
            sums.variances.fill_(1.0)
            sums.below[:] = torch.rand(len(logps)) * (1 - logps.detach().exp())
            sums.upto[:] = sums.below + logps.detach().exp()
            bets = before_steps and any(s.picked for s in pack.sequences)
            return TokenScores(logps, torch.rand(len(logps)), draws=sums if bets else None)


class WatchOfTokens(Unwatched):
    """The proofs of what enters the loss; nothing else is proven, because the model takes no time here."""

    def __init__(self) -> None:
        self.sampled: SampledTokens | None = None
        self.expected: AdvantageProof | None = None

    def forward(self, batch: TokenBatch, *, learned: bool) -> None:
        assert self.sampled is not None
        assert self.expected is not None
        check_entering(self.sampled, batch)
        if learned:
            check_batch(self.expected, batch)

    def aside(self, sequences: Sequence[TrainingSequence]) -> None:
        assert self.sampled is not None
        assert self.expected is not None
        check_still(self.expected, sequences)
        check_aside(self.sampled, [s for s in sequences if s.entropies is not None or s.aside])


class MadeUpReference:
    @contextmanager
    def model(self) -> Iterator[Any]:
        yield SimpleNamespace(device=torch.device("cpu"))


def from_server(request: GenerationRequest, length: int, vocabulary: int, watch: RowClock) -> Completion:
    """A made-up completion for a request, read from the message that a server would send."""
    with watch.row(_NOT_COUNTED):
        ids, logps = made_up_tokens(request, length, vocabulary)
        name, span = "request/1", [{"version": "mine", "start": 0, "end": length}]
        content = [
            {"token_id": i, "token": f"token_id:{i}", "logprob": p} for i, p in zip(ids, logps, strict=True)
        ]
        choice = {
            "token_ids": ids,
            "finish_reason": "length",
            "logprobs": {"content": content},
            "weight_versions": span,
        }
        prompt = request.prompt_ids.tolist()
        text = json.dumps({"request_id": name, "prompt_token_ids": prompt, "choices": [choice]})
        del content, choice
    with watch.row("answers of a server"):
        return completion_from(msgspec.json.decode(text), request, name, {"mine": _VERSION})


def from_vllm(request: GenerationRequest, length: int, vocabulary: int, watch: RowClock) -> Completion:
    """The same completion, read from the output of vLLM in this process."""
    from vllm.logprobs import Logprob

    with watch.row(_NOT_COUNTED):
        ids, logps = made_up_tokens(request, length, vocabulary)
        entries = [{i: Logprob(p, 1, None)} for i, p in zip(ids, logps, strict=True)]
        stamps = [SimpleNamespace(version=str(_VERSION), start=0, end=length)]
        sample = SimpleNamespace(
            token_ids=ids,
            logprobs=entries,
            finish_reason="length",
            weight_versions=stamps,
            sampling_mask=None,
        )
        prompt = request.prompt_ids.tolist()
        output: Any = SimpleNamespace(outputs=[sample], prompt_token_ids=prompt, lora_request=None)
    with watch.row(_IN_PROCESS):
        return completion(request.key, output, filtered=False, adapter=None)


def made_up_tokens(request: GenerationRequest, length: int, vocabulary: int) -> tuple[list[int], list[float]]:
    draw = np.random.default_rng(request.seed)
    ids, logps = draw.integers(4, vocabulary, length), (-draw.exponential(2.0, length)).astype(np.float32)
    return ids.tolist(), logps.tolist()


def step(completions: int, length: int, tokenizer: Tokenizer, watch: RowClock, folder: str) -> None:
    """One generation and its optimizer step."""
    sampling, draw = Sampling(max_tokens=length), np.random.default_rng(0)
    config = GRPOConfig(
        output_dir=folder,
        bf16=False,
        report_to=[],
        num_generations=_GROUP,
        per_device_train_batch_size=_GROUP,
        gradient_accumulation_steps=completions // _GROUP,
        max_completion_length=length,
        beta=0.04,
        top_entropy_quantile=0.8,
    )
    prompts = [
        Prompt(f"train/{i}", tuple(draw.integers(4, tokenizer.size, _PROMPT).tolist()), f"prompt {i}")
        for i in range(completions // _GROUP)
    ]
    keys = [RequestKey(p.prompt_id, i) for p in prompts for i in range(_GROUP)]
    requests = [GenerationRequest(key, prompts[n // _GROUP].ids, sampling, n) for n, key in enumerate(keys)]
    completed = [from_server(request, length, tokenizer.size, watch) for request in requests]
    if vllm_installed():
        assert all(
            from_vllm(r, length, tokenizer.size, watch) == c for r, c in zip(requests, completed, strict=True)
        )
    engine = Answers(completed)
    with watch.row("requests, checks, groups"):
        groups = collect(
            prompts, engine, tokenizer, sampling, Record, num_generations=_GROUP, run_seed=0, version=_VERSION
        )  # type: ignore[arg-type]
    with watch.row("rows, samples, staleness"):
        check_rows(
            groups,
            {p.prompt_id: p for p in prompts},
            partial(tokenizer.decode, skip_special_tokens=True),
            (config.seed, 0),
        )
        check_samples([[r.branches for r in group.rollouts] for group in groups])
        check_staleness([r.completion for group in groups for r in group.rollouts], _VERSION, 1)
    with watch.row("to another rank and back"):
        groups = groups_from_wire(decode(encode(groups_to_wire(groups))), prompts)
    with watch.row("rewards"):
        scorer = RewardScorer([made_up_reward], [1.0], timeout=600.0)
        scored = scorer.finish(scorer.score(groups, None, RewardLog()))
    with watch.row("to another rank and back"):
        scored = scores_from_wire([decode(encode(scores_to_wire(scored)))], groups)
    with watch.row("metrics"):
        rollout_metrics(scored), staleness_metrics(scored, _VERSION), interruption_metrics(scored)
    learn(scored, config, watch, Path(folder))


def learn(groups: list[RolloutGroup], config: GRPOConfig, watch: RowClock, folder: Path) -> None:
    """Everything from scored groups to the receipt."""
    ranks, clock, objective = Ranks(1.0), PhaseClock(), GRPOObjective(config)
    model = SimpleNamespace(device=torch.device("cpu"), is_gradient_checkpointing=False)
    policy = MadeUpPolicy(model, nullcontext, lambda loss: loss.backward(), watch=watch)  # type: ignore[arg-type]

    def bet(*args: Any) -> DrawStats:
        with watch.row("bets on draws"):
            return measure_draws(*args)

    with watch.row("preparation"), patch.object(evidence, "measure_draws", bet):
        proofs = WatchOfTokens()
        preparation = Preparation(objective, MadeUpReference(), clock, ranks, proofs)  # type: ignore[arg-type]
        generation, scored, sequences = preparation.generation(policy, groups, _VERSION)
        assert scored is not None
        proofs.expected = advantage_proof(objective, groups, sequences, reward_weights=())
        proofs.sampled = sampled_tokens(
            groups, scored.logps, config.completions_per_micro_batch, own_forward=True
        )
        size = config.gradient_accumulation_steps
        prepared = preparation.step(policy, generation.step(0, size), moved=False)
        generation = generation.with_step(0, size, prepared)

    with watch.row("columns, loss, gap"), patch.object(evidence, "measure_draws", bet):
        optimizer_step = OptimizerStep(objective, clock, ranks, proofs)
        for part, batch in enumerate(generation.micro_batches):
            optimizer_step.learn(policy, batch, part)
        total = kept(optimizer_step.finish([]).evidence)
    with watch.row("bets on draws"):
        DrawEvidence().add(total.draws)
    with watch.row("receipt and log"):
        check_count(total.gap, generation.fresh_tokens, _VERSION)
        check_count(total.difference, generation.sampled_tokens, _VERSION)
        Receipt(folder / "receipt.jsonl", 0).append({"tokens": total.gap.tokens, "gap": total.gap.mean_abs})
        rows_of(generation)
    with watch.row("kept rollouts"):
        keep_rollouts(folder, generation, scored.logps, {}, 1.0)


def made_up_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [random.random() for _ in completion_ids]


def measured(size: str, tokenizer_of: Callable[[RowClock], Tokenizer]) -> dict[str, float]:
    """Microseconds per sampled token, by row. If the step is short, the figures are medians of three steps."""
    completions, length = (int(part) for part in size.split("x"))
    found = []
    for _ in range(3 if completions * length < 500_000 else 1):
        watch = RowClock()
        tokenizer = tokenizer_of(watch)
        gc.collect()
        with tempfile.TemporaryDirectory() as folder:
            step(completions, length, tokenizer, watch, folder)
        found.append(
            {row: 1e6 * watch.seconds[row] / (completions * length) for row in ROWS if row in watch.seconds}
        )
    return {row: statistics.median(each[row] for each in found) for row in found[0]}


def total(figures: dict[str, float]) -> float:
    """The sum for one run.

    A run has either a server or vLLM in its own process. The more expensive of the two counts.
    """
    # If vLLM is not installed, only the answers of a server were measured.
    ways = [figures[row] for row in (ROWS[0], _IN_PROCESS) if row in figures]
    return sum(figures.values()) - sum(ways) + max(ways)


def table(figures: dict[str, dict[str, float]]) -> str:
    lines = ["| µs per sampled token | " + " | ".join(figures) + " |", "|---|" + "---:|" * len(figures)]
    for row in ROWS:
        values = (f"{found[row]:.3f}" if row in found else "not measured" for found in figures.values())
        lines.append(f"| {row} | " + " | ".join(values) + " |")
    sums = " | ".join(f"**{total(found):.2f}**" for found in figures.values())
    return "\n".join([*lines, f"| **together**, with the more expensive way of answers | {sums} |"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", default=SIZES, help="completions x tokens per completion, separated by commas"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench/host_cost.json"))
    parser.add_argument("--plot", type=Path, help="where to draw the table (docs/figures/host_cost.svg)")
    args = parser.parse_args()
    # One thread only, because threads that wait for each other would use processor time without doing work.
    torch.set_num_threads(1)
    # This first call loads libraries, which is not part of the cost of a step.
    measured("8x16", Tokenizer)
    figures = {size: measured(size, Tokenizer) for size in args.sizes.split(",")}
    print(table(figures))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        args.plot.write_text(drawing(figures, [row for row in ROWS if row != _IN_PROCESS]), encoding="utf-8")


if __name__ == "__main__":
    main()
