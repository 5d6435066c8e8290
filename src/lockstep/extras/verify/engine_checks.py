"""Proofs about what the engine reads and holds.

Tokens: tokenizer, vocabulary, chat template, echo, finish reasons, groups, repetition. Weights: a real sync, the
module probe layer by layer, caches, versions.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from lockstep.contract.protocol import Completion, GenerationRequest, RequestKey, request_seed
from lockstep.contract.sampling import Sampling
from lockstep.contract.tensors import dtype_name
from lockstep.errors import ProofError
from lockstep.extras.verify.rows import Row, gap_row
from lockstep.extras.verify.stage import Stage
from lockstep.rollouts.group import Prompt
from lockstep.run.engine import shake_hands
from lockstep.tokens.arrays import whole_numbers
from lockstep.tokens.chat import embedding_rows, end_ids, render_prompt
from lockstep.watch.gap import GapStats
from lockstep.watch.push import score_canary
from lockstep.watch.tolerances import Tolerance

_SYNC_FIX = (
    "the engine does not compute with the weights that it received; see which layers the module probe names"
)
# What to change where a proof fails.
_FIXES = {
    "tokenizer guards": "set the tokenizer's pad and end tokens to tokens that it has",
    "vocabulary": "give trainer and engine the same model directory, with its own tokenizer; never resize embeddings",
    "chat template": "add the token that closes an assistant's turn to eos_token_id in the model's "
    "generation_config.json",
    "token echo": "something between trainer and engine turns ids into text; send ids only",
    "finish reasons": "the engine's finish reason does not fit its tokens: look for a wrapper that rewrites it or "
    "strips end tokens",
    "group layout": "the engine's answers do not belong to their prompts; do not pair them by position",
    "repeated request": "runs will not repeat bit for bit on this engine: look for an option that makes batches depend "
    "on timing",
    "weight versions": "the engine serves tokens whose weight version is unknown",
}


def _row(proof: str, figure: str, limit: str, passed: bool) -> list[Row]:
    return [Row(proof, figure, limit, passed, _FIXES[proof])]


def tokenizer_guards(stage: Stage) -> list[Row]:
    """The pad token and the end tokens exist in the vocabulary."""
    tokenizer = stage.tokenizer
    pad, end = tokenizer.pad_token_id, end_ids(stage.model, tokenizer)
    ids = set(tokenizer.get_vocab().values())
    figure = f"pad {pad}, end {', '.join(map(str, end))}, all existing tokens; masks come from lengths"
    return _row("tokenizer guards", figure, "existing ids", pad in ids and bool(end) and set(end) <= ids)


def vocabulary(stage: Stage) -> list[Row]:
    """Model and engine embed equally many ids, and the tokenizer's pad and end tokens are among them."""
    tokenizer, rows = stage.tokenizer, embedding_rows(stage.model)
    engine = stage.engine.settings().vocab_size
    figure = f"tokenizer ids to {max(tokenizer.get_vocab().values())}, model {rows}, engine {engine}"
    passed = max(tokenizer.pad_token_id, *end_ids(stage.model, tokenizer)) < rows == engine
    return _row("vocabulary", figure, "pad, end < model = engine", passed)


def chat_template(stage: Stage) -> list[Row]:
    """The ids of an answered conversation begin with the ids of the open one, and an end token closes the answer."""
    if stage.tokenizer.chat_template is None:
        return [Row("chat template", "none: prompts are plain text", "-", True)]
    question = [{"role": "user", "content": "Which number is larger, 38 or 61?"}]
    whole = [*question, {"role": "assistant", "content": "61"}]
    tokenizer, kwargs = stage.tokenizer, stage.config.template_arguments
    opened = render_prompt(question, tokenizer, kwargs)
    encoded = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=True, **kwargs)
    answered = encoded["input_ids"]
    keeps = tuple(answered[: len(opened)]) == opened
    # The ids after the open conversation: the user's own turn may end with the same token.
    tail = answered[len(opened) :] if keeps else answered[-3:]
    ends = [i for i in tail if i in end_ids(stage.model, tokenizer)]
    closing = tokenizer.decode(ends[-1:] if ends else answered[-2:])
    kind = "prefix-preserving"
    if not keeps:
        kind = "not prefix-preserving (turns are appended as ids, never rendered again)"
    figure = f"{kind}; a turn ends with {closing!r}"
    return _row("chat template", figure, "a turn ends with an end token", bool(ends))


def handshake(stage: Stage) -> list[Row]:
    """The engine's effective settings are the ones that training assumes."""
    longest = max(len(p.ids) for p in stage.prompts) + stage.config.max_completion_length
    dtypes = (stage.config.engine_torch_dtype, longest, stage.config.engine_head_dtype)
    quantization = stage.config.vllm_quantization
    shake_hands(stage.engine, stage.model, stage.trainer.model_path, *dtypes, quantization=quantization)
    found = stage.engine.settings()
    figure = f"{found.engine}, {found.architecture}, {dtype_name(found.dtype)}, head {dtype_name(found.head_dtype)}, "
    figure += (
        f"{found.logprobs_mode}{'' if found.quantization is None else f', weights in {found.quantization}'}"
    )
    return [Row("settings handshake", figure, "as training assumes", True)]


def echo(stage: Stage) -> list[Row]:
    """Ids come back exactly as they were sent, also ids that decoding and encoding would change."""
    draw = random.Random(1)
    rows = embedding_rows(stage.model)
    longest = max(len(p.ids) for p in stage.prompts)
    prompts = [p.ids for p in stage.prompts]
    prompts += [whole_numbers([draw.randrange(rows) for _ in range(min(24, longest))]) for _ in range(4)]
    asked = [Prompt(f"echo/{i}", ids, "") for i, ids in enumerate(prompts)]
    answers = stage.sample(Sampling(1), asked, samples=1)
    equal = sum(np.array_equal(answer.prompt_ids, ids) for answer, ids in zip(answers, prompts, strict=True))
    changed = sum(not np.array_equal(stage.encoded_again(ids), ids) for ids in prompts)
    figure = f"{equal} of {len(prompts)} prompts came back id for id ({changed} of them would not survive "
    return _row("token echo", f"{figure}decode → encode)", "all", equal == len(prompts) and changed > 0)


def finish_reasons(stage: Stage) -> list[Row]:
    """The length limit, an end token and a stop string each give the right finish reason."""
    limit = stage.config.max_completion_length
    found = stage.sample(stage.sampling(temperature=1.0), samples=4)
    short = stage.sample(stage.sampling(temperature=1.0, max_tokens=1), samples=4)
    ends = end_ids(stage.model, stage.tokenizer)
    wrong = [c for c in (*found, *short) if (c.finish_reason == "stop") != (c.token_ids[-1] in ends)]
    wrong += [c for c in found if c.finish_reason == "length" and len(c.token_ids) != limit]
    wrong += [c for c in short if len(c.token_ids) != 1]
    seen = {"end token" if c.finish_reason == "stop" else "length" for c in (*found, *short)}
    cut = _stopped_by_string(stage, found)
    if cut is not None:
        seen.add("stop string")
        wrong += [] if cut.finish_reason == "stop" else [cut]
    right = len(found) + len(short) + bool(cut) - len(wrong)
    figure = f"{right} right, {len(wrong)} wrong; seen: {', '.join(sorted(seen))}"
    return _row("finish reasons", figure, "none wrong", not wrong)


def groups(stage: Stage) -> list[Row]:
    """Every prompt gets its own completions, in its own group, each with its own seed."""
    size = stage.config.num_generations
    made = stage.groups(stage.sampling(temperature=1.0), stage.prompts, size)
    stage.trainer.proofs.check_groups(made)
    right = all(
        [r.completion.key for r in group.rollouts] == [RequestKey(prompt.prompt_id, i) for i in range(size)]
        and all(np.array_equal(r.completion.prompt_ids, prompt.ids) for r in group.rollouts)
        for prompt, group in zip(stage.prompts, made, strict=True)
    )
    distinct = len({r.completion.token_ids.tobytes() for group in made for r in group.rollouts})
    figure = f"{len(made)} prompts × {size} completions, {distinct} of them distinct"
    return _row("group layout", figure, "by key", right)


def repetition(stage: Stage) -> list[Row]:
    """The same requests at the same weights give the same tokens."""
    # A push before each, as in training, because the content of the cache changes the shapes of the forward.
    stage.trainer.source.send(stage.version)
    first = stage.sample(stage.sampling(temperature=1.0))
    stage.trainer.source.send(stage.version)
    again = stage.sample(stage.sampling(temperature=1.0))
    same = sum(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True))
    both = zip(first, again, strict=True)
    pairs = [pair for a, b in both for pair in zip(a.logprobs, b.logprobs, strict=False)]
    apart = max(abs(a - b) for a, b in pairs)
    figure = f"{same} of {len(first)} give the same tokens; log-probs at most {apart:.1e} apart"
    return _row("repeated request", figure, "all", same == len(first))


def _stopped_by_string(stage: Stage, found: list[Completion]) -> Completion | None:
    """Request a completion again, with a character of its own text as a stop string."""
    for c in found:
        # Without its last token: it must end before it would have ended anyway.
        text = stage.tokenizer.decode(c.token_ids[:-1].tolist(), skip_special_tokens=True)
        # Not a piece of a character that is spread over several tokens.
        whole = [letter for letter in text if letter != "\ufffd" and not letter.isspace()]
        if whole:
            (prompt,) = [p for p in stage.prompts if p.prompt_id == c.key.prompt_id]
            sampling = replace(stage.sampling(temperature=1.0), stop=(whole[0],))
            seed = request_seed(stage.config.seed, stage.version, c.key)
            request = GenerationRequest(c.key, prompt.ids, sampling, seed)
            return stage.engine.generate([request])[c.key]
    return None


def canary(stage: Stage) -> list[Row]:
    """Both sides score fixed sequences."""
    found = score_canary(stage.model, stage.engine, stage.engine.settings().max_model_len, stage.precision)
    return [gap_row("canary", found, stage.trainer.proofs.limit, _SYNC_FIX)]


def module_probe(stage: Stage) -> list[Row]:
    """Every module that the engine runs, with two probe vectors, and all that it holds to the bit."""
    probe, exact = stage.trainer.proofs.push.probes
    records = [probe.measure(seed, every=True) for seed in (1, 2)]
    errors = {name: max(r.errors[name] for r in records) for name in records[0].errors}
    name = max(errors, key=lambda n: errors[n])
    failed = sorted({n for r in records for n in r.failed})
    unreached = records[0].unreached
    figure = f"{records[0].of_modules} modules, {probe.reached():.0%} of the weights; worst {name} {errors[name]:.1e}"
    if unreached:
        figure += f"; no probe reaches {', '.join(unreached[:3])}{' …' if len(unreached) > 3 else ''}"
    fix = f"these weights are not in use as they were sent: {', '.join(failed[:8])}"
    details = {"errors": errors, "unreached": list(unreached)}
    held = exact.compare(stage.version, every=True)
    return [
        Row("module probe", figure, f"{records[0].limit:g}", not failed, fix, details),
        Row(
            "held weights",
            f"{held.modules} of {held.of_modules} modules, to the bit; {len(held.differing)} tensors differ",
            "0",
            not held.differing,
            f"the engine holds other numbers than were sent: {', '.join(held.differing[:8])}",
            {"unreached": list(exact.unreached)},
        ),
    ]


def sync(stage: Stage) -> list[Row]:
    """Changed weights are pushed and sampled from. Then the original weights are pushed back."""
    limit = stage.trainer.proofs.limit
    sampling = stage.sampling(temperature=1.0)
    with stage.moved(stage.scale):
        stage.push(every_module=True)
        moved = stage.sample(sampling)
        there = stage.gap(moved, sampling)
    apart = stage.gap(moved, sampling)
    stage.push(every_module=True)
    back = stage.gap(stage.sample(sampling), sampling)
    note = f" ({apart.mean_abs:.2g} against the old weights)"
    return [
        _conclusive(gap_row("sync: moved weights", there, limit, _SYNC_FIX, note), apart, limit),
        gap_row("sync: pushed back", back, limit, _SYNC_FIX),
    ]


def caches(stage: Stage) -> list[Row]:
    """Sample a prompt longer than a cache block before and after a push: no cache of the old weights may be used."""
    sampling = stage.sampling(temperature=1.0)
    longest = max(stage.prompts, key=lambda p: len(p.ids))
    stage.sample(sampling, [longest], samples=4)
    with stage.moved(stage.scale, seed=1):
        stage.push()
        moved = stage.sample(sampling, [longest], samples=4)
        found = stage.gap(moved, sampling)
    apart = stage.gap(moved, sampling)
    stage.push()
    why = "the engine confirmed a reset of its caches that it did not do"
    fix = f"keys and values of older weights outlive a push: {why}"
    note = f", prompt of {len(longest.ids)}"
    limit = stage.trainer.proofs.limit
    return [_conclusive(gap_row("caches after a sync", found, limit, fix, note), apart, limit)]


def versions(stage: Stage) -> list[Row]:
    """Tokens carry the version that sampled them, and the engine serves no token during an update."""
    stage.push()
    found = stage.sample(stage.sampling(), samples=1)
    stamped = all((c.weight_versions == stage.version).all() for c in found)
    stage.engine.begin_update()
    try:
        stage.engine.generate([])
        closed = False
    except ProofError as error:
        closed = error.check == "version"
    stage.push()
    figure = "every token stamped" if stamped else "tokens without their version"
    figure += f"; {'closed' if closed else 'open'} during an update"
    return _row("weight versions", figure, "stamped, closed", stamped and closed)


def _conclusive(row: Row, apart: GapStats, limit: Tolerance) -> Row:
    """The row. It fails if the weights before the change would have passed too."""
    if apart.mean_abs > limit.mean:
        return row
    why = f"old weights are only {apart.mean_abs:.1e} away, within the limit for these dtypes; use float32"
    return replace(row, passed=False, fix=f"nothing was shown: {why}")
