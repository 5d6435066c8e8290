"""`lockstep audit --url` asks a real vLLM server whether it holds the weights of the directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import VLLM
from extras.audit.dumped import as_trl, sampled_rows, write
from servers import KEY, Server, connect
from tiny import make_model, perturbed

from lockstep.cli.main import main
from lockstep.weights.push import push_weights

pytestmark = VLLM


def test_the_servers_weights_are_compared_with_the_directory(
    server: Server, untied_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model, report = make_model().eval(), tmp_path / "findings.json"
    path = write(as_trl(sampled_rows(model, rows=4, length=8)), tmp_path / "dump.jsonl")
    words = [
        "audit",
        str(path),
        "--model",
        untied_dir,
        "--dtype",
        "float32",
        "--url",
        server.url,
        "--json",
        str(report),
    ]

    def weights() -> tuple[int, str]:
        code = main(words)
        return code, next(f["says"] for f in json.loads(report.read_text()) if f["about"] == "weights")

    engine = connect(server.url)
    try:
        push_weights(model, engine, 1)
        code, says = weights()
        assert code == 0
        assert says.startswith("the dump and the server agree with the model")
        push_weights(perturbed(model), engine, 2)
        code, says = weights()
        assert code == 1
        assert says.startswith("the server's own log-probs differ from the model's by")
    finally:
        push_weights(model, engine, 3)
        engine.close()
