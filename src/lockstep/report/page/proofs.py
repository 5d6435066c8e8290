"""The proofs of a run in its report: what each compared, its limit and its margin; and the proof that failed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lockstep.errors import PROOFS_PAGE
from lockstep.report.page import run_record
from lockstep.report.page.drawing import DRAWS_LIMIT, number
from lockstep.report.page.markup import NOTHING, Html, html, together
from lockstep.report.page.run_record import Line, RunRecord, closest, mean_of, steps_alone


class Measured(NamedTuple):
    """A proof with a figure.

    Attributes:
        figure: the figure that came closest to its limit.
        limit: None if it was not compared with a limit, or if the receipt does not say with which.
        where: at which step, in which request or module.
    """

    name: str
    what: str
    figure: float
    limit: float | None
    where: str
    unit: str = "nats"

    @property
    def share(self) -> float:
        """The figure's share of the limit."""
        return self.figure / self.limit if self.limit else 0.0


# The proofs without a figure, with what each shows when it has not failed.
WITHOUT_FIGURE = {
    "handshake": "the engine's settings are those that training assumes",
    "echo, keys, logprobs": "every request has one answer, to the ids that were sent, with one log-prob per token",
    "version, staleness": "every token was sampled by the weights that were pushed last, or within max_staleness",
    "manifest, digest, live": "the bytes that the engine received are those of the trained parameters",
    "merge": "merged weights compute what the adapter's own layers compute, up to rounding",
    "adapter": "the engine's slots hold the matrices of the trained adapter, bit for bit (vllm_enable_lora)",
    "adapter_probe": "the adapter adds to the engine's layers what it adds to the trainer's (vllm_enable_lora)",
    "held_weights": "the engine's modules compute with the trainer's weights, to the bit, all within as many pushes as "
    "the model has layers",
    "codes": "the engine's 8-bit weights are what the scheme makes of the sent ones, to the bit (vllm_quantization)",
    "sleep": "an engine that wakes has the bytes with which it fell asleep (vllm_enable_sleep_mode, vllm_enable_lora)",
    "caches": "the engine keeps nothing that was computed from older weights",
    "settings, limits, temperature": "requests and losses use the temperature, filters and limits that the user asked "
    "for",
    "grammar": "every sampled token is one that its grammar allows",
    "kept_ids": "the engine's filters keep the ids that the trainer's own filters keep, up to rounding",
    "ends, interruption": "every completion ended where its request says",
    "samples": "the completions of a group are independent draws",
    "turns, template, tool_results": "conversations have the right turns, and tools' results belong to their calls",
    "placeholder": "no sampled id is the placeholder of a picture",
    "prompts": "every generation has the rows that are due, with the ids of what the user gave",
    "rows, learned": "every loss has the ids, places and log-probs that the engine sampled, of the right row",
    "evaluation": "every evaluation has each row of its set once, with all completions of the row",
    "attention": "FlexAttention's values and gradients are those of PyTorch's plain attention in float32",
    "forward": "later steps of a generation compute the log-probs of a plain forward",
    "rewards, advantages, scores": "rewards are the sums of scores, and advantages are those of a second "
    "implementation",
    "loss_gradient, model_gradient": "the gradients are the derivatives of the formulas, and the model's backward is "
    "right",
    "hooks": "no hook, forward or attention function has appeared in the model while the run went on",
    "accumulation, clipping": "gradients add up, and the clip uses their true norm",
    "optimizer": "the optimizer is set as the config says, with the changes that the receipt records",
    "learning_rate, update": "drawn elements of every tensor become what AdamW in float64 makes of them",
    "reference": "the reference model stays as it was",
    "reference_outputs": "the reference model goes on to compute the same log-probs, bit for bit",
    "ranks": "all trainer processes hold the same weights, byte for byte",
    "shards": "no layer is gathered and no parameter was replaced where weights are sharded",
    "checkpoint": "a resumed run has the files, data and settings with which it stopped",
}


def measured_proofs(run: RunRecord) -> list[Measured]:
    """The proofs with a figure, each at the step that came closest to the limit."""
    limits, steps = run.start.get("limits", {}), run.proven
    compared = [line for line in steps if line.get("checked_tokens")]
    found = list(_at_start(run))
    if compared and "mean" in limits:
        what = "engine's and trainer's log-prob of every token"
        found.append(_mean("gap, mean", what, "mean_abs_gap", steps, limits["mean"]))
        largest = closest(run_record.largest_gaps(compared, limits["max"]))
        assert largest is not None
        worst = largest.lines[0]
        where = _at(worst) + (f", request {worst['worst_request']}" if "worst_request" in worst else "")
        what = "the same, the worst token"
        found.append(Measured("gap, largest", what, largest.figure, largest.limit, where))
        what = "the same, as an estimate of the KL divergence"
        found.append(_mean("gap, k3", what, "k3", steps, limits["k3"]))
    for name in dict.fromkeys(key for line in steps for key, value in line.items() if _is_gap(value)):
        own = [line for line in steps if _is_gap(line.get(name)) and line[name]["tokens"]]
        if own and "max" in limits:
            # An earlier version wrote the limit for the number of the canary's tokens only.
            otherwise = limits["max"] if name == "canary" else None
            what = "sequences scored again with the current weights"
            title, gaps = name.replace("_", " "), [(_at(line), line[name]) for line in own]
            rows = [
                Measured(title, what, g["max_abs_gap"], g.get("max_allowed", otherwise), at) for at, g in gaps
            ]
            found.append(max(rows, key=lambda row: (row.share, row.figure)))
    probed = [line for line in steps if "worst_module" in line]
    if probed and "module_probe" in limits:
        worst = max(probed, key=lambda s: s["worst_module"]["error"])
        module = worst["worst_module"]
        where, limit = f"{_at(worst)}, {module['name']}", limits["module_probe"]
        what = "outputs of the engine's modules"
        found.append(Measured("module_probe", what, module["error"], limit, where, "of rms"))
    logged = [line for line in run.steps if "parity/draws_log10_evidence" in line]
    if logged:
        last = max(logged, key=lambda s: s["parity/draws_log10_evidence"])
        figure = max(last["parity/draws_log10_evidence"], 0.0)
        what = "tokens are draws from the reported distribution; evidence against it"
        found.append(Measured("draws", what, figure, DRAWS_LIMIT, _at(last), "power of ten"))
    return found


def _mean(name: str, what: str, figure: str, steps: Sequence[Line], limit: float) -> Measured:
    """A mean of the gap that was judged. If the receipt has only the sums of single steps, it is that of the run."""
    judged = run_record.judged_means(steps, figure)
    if (worst := closest(judged)) is not None:
        alone = steps_alone(run_record.alone_above(judged), figure)
        return Measured(name, what, worst.figure, worst.limit, "; ".join(filter(None, [worst.where, alone])))
    if waiting := run_record.waiting_tokens(steps):
        found = mean_of(steps, figure)
        return Measured(name, what, found, None, f"not judged: {waiting} tokens are too few for a mean")
    compared = [line for line in steps if line.get("checked_tokens")]
    above = [line for line in compared if mean_of([line], figure) > limit]
    if not above:
        highest = max(compared, key=lambda line: mean_of([line], figure))
        return Measured(name, what, mean_of([highest], figure), limit, _at(highest))
    whole = mean_of(steps, figure)
    where = f"mean of the whole run; its receipt does not say what was judged; {steps_alone(above, figure)}"
    # Each judgement also allowed for its worst token.
    return Measured(name, what, whole, limit if whole <= limit else None, where)


def proofs_section(run: RunRecord) -> Html:
    """The table of all proofs."""
    rows = together(map(_row, measured_proofs(run)))
    tokens, steps = _counts(run.proven), len(run.proven)
    failed = {name.strip() for name in str(run.end.get("check", "")).split(",")} - {""}
    others = [
        html(
            "<tr><td><code>{}</code></td><td>{}</td><td>{}</td></tr>",
            name,
            what,
            _exact_mark(name, failed, steps),
        )
        for name, what in WITHOUT_FIGURE.items()
    ]
    table = html(
        "<div class='wide'><table class='proofs'><tr><th>proof</th><th>compares</th><th>closest to its limit</th>"
        "<th>limit</th><th>margin</th><th>where</th></tr>{}</table></div>"
        if rows
        else "<p>No proof with a figure has been written yet.</p>",
        rows,
    )
    return html(
        "<h2 id='proofs'>Proofs</h2><p>{}</p>{}{}"
        "<details><summary>Proofs without a figure</summary><div class='wide'><table>{}</table></div></details>",
        tokens,
        _notes(run),
        table,
        together(others),
    )


def _notes(run: RunRecord) -> Html:
    """Checks that could not be made, and what of the user's stands in the way of the model's backward."""
    why = Counter((line["proof"], line["why"]) for line in run.unproven)
    form = "<code>{}</code> was due and not made {} times: {}"
    notes = [html(form, proof, count, said) for (proof, said), count in why.items()]
    if run.taken:
        own = "; ".join(dict.fromkeys(run.taken))
        notes.append(html("Of your own, in the model's forward and backward: {}", own))
    return together(html("<p class='said'>{}.</p>", note) for note in notes)


def failure_section(run: RunRecord) -> Html:
    """What failed, where, and what to do; empty if nothing has failed."""
    end = run.end
    if end.get("ended") != "failed":
        return NOTHING
    if "check" in end:
        title, step = html("Proof <code>{}</code> has failed", end["check"]), end["step"]
        rows = {
            "proof": end["check"],
            "step": f"optimizer step {step + 1}, which was not taken; the weights are those after step {step}",
            "what was found": end["found"],
            "likely cause": end["cause"],
            "what to do": end["fix"],
            "explained in": f"{PROOFS_PAGE}, row {end['check']}",
        }
    else:
        title = Html("The run has failed")
        rows = {
            "error": end.get("error", ""), "after step": end.get("step"), "message": end.get("message", ""),
        }  # fmt: skip
    form = "<tr><th>{}</th><td class='said'>{}</td></tr>"
    table = together(html(form, name, str(text)) for name, text in rows.items())
    return html(
        "<section class='failure' id='failure'><h2>{}</h2><div class='wide'><table>{}</table></div>{}</section>",
        title,
        table,
        _worst_tokens(run),
    )


def _worst_tokens(run: RunRecord) -> Html:
    """The tokens with the largest gaps of the step that failed."""
    if run.end.get("check") != "gap":
        return NOTHING
    failing = [line for line in run.shown if line.get("failed")]
    tokens: list[tuple[float, str, int, str]] = []
    for rollout in (r for line in failing[-1:] for r in line["rollouts"]):
        for branch in rollout["branches"]:
            place = 0
            for span in branch["spans"]:
                for text, gap in zip(span.get("tokens", ()), span.get("gaps") or (), strict=False):
                    tokens.append((math.nan if gap is None else gap, rollout["name"], place, text))
                    place += 1
    if not tokens:
        return NOTHING
    tokens.sort(key=lambda found: -abs(found[0]) if math.isfinite(found[0]) else -math.inf)
    form = "<tr><td><code>{}</code></td><td>{}</td><td><code>{}</code></td><td>{:+.2e}</td></tr>"
    rows = together(html(form, name, place, repr(text), gap) for gap, name, place, text in tokens[:10])
    return html(
        "<h3>The tokens with the largest gaps</h3><p>Of the shown group. The gap is the engine's log-prob minus the "
        "trainer's; the place counts sampled tokens from 0.</p><div class='wide'><table><tr><th>rollout</th>"
        "<th>place</th><th>token</th><th>gap in nats</th></tr>{}</table></div>",
        rows,
    )


def _at_start(run: RunRecord) -> Iterator[Measured]:
    start, limits = run.start, run.start.get("limits", {})
    if "canary" in start and "max" in limits:
        figure, what = start["canary"]["max_abs_gap"], "fixed sequences, scored by both sides before training"
        yield Measured("canary", what, figure, limits["max"], "start")
    if "worst_module" in start and "module_probe" in limits:
        module, count = start["worst_module"], start.get("modules", {}).get("probed", 0)
        what, where = f"outputs of all {count} modules before training", f"start, {module['name']}"
        yield Measured("module_probe", what, module["error"], limits["module_probe"], where, "of rms")


def _row(proof: Measured) -> Html:
    kind = "bad" if proof.share > 1 else "near" if proof.share > 0.5 else "good"
    times = 1 / proof.share if proof.share > 0 else 0.0
    limit = "–" if proof.limit is None else number(proof.limit, 3)
    if proof.limit is None:
        margin = "–"
    elif not times:
        margin = "nothing found"
    elif times < 1:
        margin = f"{proof.share:.2g} times the limit"
    else:
        margin = f"{times:,.{0 if times >= 10 else 1}f} times below"
    bar = "<span class='meter'><span class='{}' style='width:{:.1f}%'></span></span>"
    return html(
        "<tr><td><code>{name}</code></td><td>{what}</td><td>{figure} <small>{unit}</small>{bar}</td>"
        "<td class='figure'>{limit}</td><td>{margin}</td><td class='said'>{where}</td></tr>",
        name=proof.name,
        what=proof.what,
        figure=number(proof.figure, 3),
        unit=proof.unit,
        bar=html(bar, kind, min(proof.share, 1) * 100),
        limit=limit,
        margin=margin,
        where=proof.where,
    )


def _exact_mark(names: str, failed: set[str], steps: int) -> Html:
    if failed & {name.strip() for name in names.split(",")}:
        return Html("<b class='badtext'>failed</b>")
    return Html("<span class='goodtext'>no failure</span>" if steps else "not reached")


def _counts(steps: Sequence[Line]) -> str:
    sampled, checked = (sum(s.get(name, 0) for s in steps) for name in ("sampled_tokens", "checked_tokens"))
    stale, aside = (sum(s.get(name, 0) for s in steps) for name in ("stale_tokens", "aside_tokens"))
    others = [f"{stale} are of older weights"] if stale else []
    others += [f"{aside} have no gradient and were not drawn"] if aside else []
    more = f" ({', '.join(others)})" if others else ""
    waiting = run_record.waiting_tokens(steps)
    last = f" The means of the last {waiting} tokens are not judged yet: they are too few." if waiting else ""
    return f"{checked} of {sampled} sampled tokens were compared with the trainer{more}.{last}"


def _at(line: Line) -> str:
    return f"step {line['step']}"


def _is_gap(value: object) -> bool:
    return (
        isinstance(value, dict) and {"max_abs_gap", "tokens"} <= value.keys() and "mean_allowed" not in value
    )
