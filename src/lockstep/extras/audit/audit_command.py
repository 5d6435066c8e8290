"""`lockstep audit ROLLOUTS --model DIRECTORY`: do the rollouts of a run of another program agree with its policy?

ROLLOUTS is a file (JSON Lines, JSON or Parquet) of TRL, verl, prime-rl, OpenRLHF or your own code, or the directory
of a Lockstep run. Each row has prompt ids, completion ids and the log-probs that the engine reported;
docs/guides/audit.md has the columns.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.help import WordParser
from lockstep.errors import InputError
from lockstep.files import check_writable, replace_text
from lockstep.safe_text import complain, say

if TYPE_CHECKING:
    from lockstep.extras.audit.dumps import AuditedRollout


def run(words: list[str]) -> int:
    """Run the command. Returns 0 if everything that can be judged agrees, else 1."""
    parser = WordParser(prog="lockstep audit", description=__doc__)
    add, dtypes = parser.add_argument, ("float32", "bfloat16")
    add("rollouts", metavar="ROLLOUTS", help="file or directory")
    add("--model", required=True, help="directory or hub id of the policy that sampled, at that step")
    add("--temperature", type=float, help="where the rows do not say it (default 1)")
    add("--top_k", type=int, default=0)
    add("--top_p", type=float, default=1.0)
    add("--min_p", type=float, default=0.0)
    add("--repetition_penalty", type=float, default=1.0)
    add("--dtype", choices=dtypes, default="bfloat16", help="of the engine (default bfloat16)")
    add("--earlier", action="append", default=[], metavar="DIRECTORY", help="older weights to compare with")
    add("--url", help="a running vLLM server that should hold these weights (key: OPENAI_API_KEY)")
    evenly = "sampled ids to score, evenly over the file (default 8192)"
    add("--max_tokens", type=int, default=8192, help=evenly)
    add("--json", type=Path, help="file to write the findings to")
    asked = parser.parse_args(words)
    if asked.max_tokens < 1:
        raise InputError(f"max_tokens is {asked.max_tokens}; it must be at least 1")

    if asked.json:
        check_writable(asked.json)
    from lockstep.extras.audit.dumps import read_dump
    from lockstep.progress import StatusLine, busy, watched_by

    with watched_by(StatusLine()), busy(f"reading {asked.rollouts}"):
        rollouts = _evenly(read_dump(Path(asked.rollouts)), asked.max_tokens)
    if asked.temperature is not None and all(r.temperature is not None for r in rollouts):
        complain("lockstep: temperature has no effect with rows that all say theirs")
    with watched_by(StatusLine()), busy("loading PyTorch, transformers and the model"):
        import torch

        from lockstep.cli.output import quiet_libraries
        from lockstep.contract.distribution import Distribution
        from lockstep.contract.sampling import Sampling
        from lockstep.extras.audit.causes import Suspects
        from lockstep.extras.audit.findings import DIFFER, audit
        from lockstep.extras.audit.rollout_logprobs import server_logprobs
        from lockstep.models.arithmetic import Precision
        from lockstep.models.policy import load_policy
        from lockstep.models.resolve import resolve_model
        from lockstep.tokens.chat import load_tokenizer
        from lockstep.watch.tolerances import tolerance

        quiet_libraries()
        path = resolve_model(asked.model)
        model, tokenizer = load_policy(path).eval(), load_tokenizer(path)
        settings = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if asked.temperature is None:
            asked.temperature = 1.0
        stated = Distribution(Sampling(1, **{name: getattr(asked, name) for name in settings}))
        earlier = {name: lambda name=name: load_policy(resolve_model(name)).eval() for name in asked.earlier}
    engine = getattr(torch, asked.dtype)
    scored = [r for r in rollouts if r.tokens]
    asking = busy(f"asking {asked.url} for its log-probs") if asked.url else nullcontext()
    with watched_by(StatusLine()), asking:
        served = server_logprobs(asked.url, scored) if asked.url else None
    tokens = sum(r.tokens for r in rollouts)
    with watched_by(StatusLine()), busy(f"scoring {tokens} ids of {len(rollouts)} rollouts"):
        suspects = Suspects(model, tokenizer, stated, earlier)
        findings = audit(rollouts, suspects, tolerance(engine, model.dtype), Precision(), served)
    for finding in findings:
        say(f"{finding.verdict:<11}{finding.about:<11}{finding.says}")
        if finding.remedy and finding.verdict == DIFFER:
            say(f"{'':<22}→ {finding.remedy}")
    if asked.json:
        replace_text(asked.json, json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    return int(any(finding.verdict == DIFFER for finding in findings))


def _evenly(rollouts: list[AuditedRollout], most: int) -> list[AuditedRollout]:
    """Rollouts spread evenly over the file, with at most this many sampled ids in all, but at least one rollout."""
    every = max(-(-sum(r.tokens for r in rollouts) // most), 1)
    return rollouts[::every]
