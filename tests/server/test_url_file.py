"""The file of URLs (`vllm_server_url_file`): what it may contain, and what is refused before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engines.servers.calls import urls_of_file
from lockstep.errors import InputError
from lockstep.learn.methods.grpo import GRPOConfig


def config(folder: Path, **fields: str) -> GRPOConfig:
    return GRPOConfig(output_dir=str(folder), report_to="none", bf16=False, **fields)


def test_urls_stand_on_lines_of_their_own_with_room_for_comments(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    file.write_text("# all of them\n\n  http://a:8000/  \nhttps://b/prefix # the new one\r\n")
    assert urls_of_file("f", str(file)) == ["http://a:8000", "https://b/prefix"]


def test_a_config_reads_its_file_whenever_it_is_asked_and_runs_in_server_mode(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    file.write_text("http://a:8000\n")
    made = config(tmp_path, vllm_server_url_file=str(file))
    assert (made.vllm_mode, made.server_urls) == ("server", ["http://a:8000"])
    file.write_text("http://b:8000\nhttp://a:8000\n")
    assert made.server_urls == ["http://b:8000", "http://a:8000"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"# none yet\n", "names no server"),
        (b"gpu-node:8000\n", "has 'gpu-node:8000'"),
        (b"http://a:1, http://b:1\n", "one per line"),
        (b"http://a:1\nhttp://a:1/\n", "names http://a:1 twice"),
        (b"http://me:secret@a:1\n", "user name or password"),
    ],
)
def test_a_file_without_proper_urls_is_refused_by_its_name(
    tmp_path: Path, text: bytes | None, said: str
) -> None:
    file = tmp_path / "servers.txt"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(InputError, match="vllm_server_url_file") as refused:
        config(tmp_path, vllm_server_url_file=str(file))
    assert said in str(refused.value)
    assert str(file) in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_file_and_a_list_of_urls_contradict_each_other(tmp_path: Path) -> None:
    (file := tmp_path / "servers.txt").write_text("http://a:1\n")
    with pytest.raises(InputError, match="vllm_server_base_url and vllm_server_url_file"):
        config(tmp_path, vllm_server_url_file=str(file), vllm_server_base_url="http://a:1")
