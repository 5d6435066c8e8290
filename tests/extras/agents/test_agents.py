"""Agents as functions and commands: what they get, what they give, and how they fail. No gateway is needed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import InputError
from lockstep.extras.agents.agent_program import Agent, AgentFailed
from lockstep.server.keys import KEY_VARIABLE

ROW = {"prompt": [{"role": "user", "content": "hello"}], "answer": "ü"}
LIMIT = 60.0


def run(agent: Any, row: dict[str, Any] = ROW, timeout: float = LIMIT) -> float | None:
    function, command = (None, tuple(agent)) if isinstance(agent, list) else (agent, None)
    return asyncio.run(Agent(function, command, timeout).run("http://gateway", "the-key", row))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


class TestFunctions:
    def test_a_function_gets_its_address_its_key_and_its_row(self) -> None:
        found: list[Any] = []
        assert run(lambda *given: found.append(given)) is None
        assert found == [("http://gateway", "the-key", ROW)]

    def test_a_coroutine_function_has_a_loop_of_its_own(self) -> None:
        loops = []

        async def agent(*_: Any) -> float:
            loops.append(asyncio.get_running_loop())
            await asyncio.sleep(0)
            return 0.5

        async def both() -> list[float | None]:
            return await asyncio.gather(*(Agent(agent, None, LIMIT).run("", "", ROW) for _ in range(2)))

        assert asyncio.run(both()) == [0.5, 0.5]
        assert loops[0] is not loops[1]

    def test_a_function_that_returns_after_its_run_has_ended_says_nothing(self) -> None:
        go, seen = threading.Event(), threading.Event()
        errors: list[Any] = []

        async def cancelled() -> None:
            agent = asyncio.create_task(
                Agent(lambda *_: seen.set() or go.wait(LIMIT), None, LIMIT).run("", "", ROW)
            )
            assert await asyncio.to_thread(seen.wait, LIMIT)
            agent.cancel()
            with pytest.raises(asyncio.CancelledError):
                await agent

        before, threading.excepthook = threading.excepthook, errors.append
        try:
            asyncio.run(cancelled())
            (thread,) = (t for t in threading.enumerate() if t.name == "lockstep-agent")
            go.set()
            thread.join(LIMIT)
        finally:
            threading.excepthook = before
        assert not thread.is_alive()
        assert not errors

    def test_agents_that_block_do_not_wait_for_each_other(self) -> None:
        # More agents than asyncio's default executor has threads on any machine.
        meeting = threading.Barrier(80)

        async def all_of_them() -> None:
            await asyncio.gather(
                *(
                    Agent(lambda *_: meeting.wait(LIMIT) and None, None, LIMIT).run("", "", ROW)
                    for _ in range(80)
                )
            )

        asyncio.run(all_of_them())

    @pytest.mark.parametrize(
        "error",
        [
            *(
                ValueError("no such tool"),
                SystemExit(3),
                KeyboardInterrupt(),
                asyncio.CancelledError(),
                StopIteration(),
            ),
            ExceptionGroup("several", [ValueError("one")]),
            BaseExceptionGroup("several", [asyncio.CancelledError()]),
        ],
    )
    def test_an_exception_fails_the_rollout(self, error: BaseException) -> None:
        def agent(*_: Any) -> None:
            raise error

        with pytest.raises(AgentFailed, match=type(error).__name__):
            run(agent)

    def test_an_agent_whose_parameters_do_not_fit_gets_advice(self) -> None:
        with pytest.raises(
            AgentFailed, match=r"it is called as agent\(base_url, api_key, row\): give it these parameters"
        ):
            run(lambda base_url: None)

    def test_an_agent_that_does_not_end_fails_the_rollout(self) -> None:
        end = threading.Event()
        with pytest.raises(AgentFailed, match="did not end within"):
            run(lambda *_: end.wait(LIMIT), timeout=0.01)
        end.set()

    @pytest.mark.parametrize("reward", ["1", float("nan"), float("inf"), [1.0], 10**400])
    def test_a_reward_that_is_no_finite_number_stops_the_run(self, reward: Any) -> None:
        with pytest.raises(InputError, match="finite"):
            run(lambda *_: reward)


class TestCommands:
    def test_a_command_gets_its_row_its_address_and_its_key_and_no_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(KEY_VARIABLE, "a-key-of-the-engine-server")
        code = (
            "import json, os, sys\n"
            f"json.dump([json.load(sys.stdin), dict(os.environ)], open({str(tmp_path / 'found')!r}, 'w'))"
        )
        assert run(python(code)) is None
        row, environment = json.loads((tmp_path / "found").read_text())
        assert row == ROW
        assert (environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]) == (
            "http://gateway",
            "the-key",
        )
        assert KEY_VARIABLE not in environment

    @pytest.mark.parametrize(
        ("output", "reward"),
        [
            ('x\n{"reward": 0.25}\n', 0.25),
            ('{"reward": 1}\nx', None),
            ("", None),
            ('{"reward": null}', None),
            ("[" * 5000, None),
            ("3", None),
        ],
    )
    def test_the_reward_is_in_the_last_line_of_its_output(self, output: str, reward: float | None) -> None:
        assert run(python(f"print({output!r}, end='')")) == reward

    def test_an_exit_code_fails_the_rollout_and_shows_what_was_said(self) -> None:
        with pytest.raises(AgentFailed, match="exit code 3: no such tool"):
            run(python("import sys; print('no such tool', file=sys.stderr); sys.exit(3)"))

    def test_everything_that_a_command_started_is_killed_at_its_end(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "alive")
        reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
        child = f"import time; f = open({str(tmp_path / 'alive')!r}, 'w'); print('x', flush=True); time.sleep(1000)"
        start = (
            f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}], "
            f"stdout=subprocess.PIPE)"
        )
        assert run(python(f"{start}; assert p.stdout.read(1) == b'x'")) is None
        os.set_blocking(reader, True)
        # The end of the file: nobody holds the other end open any more.
        ended = threading.Thread(target=os.read, args=(reader, 1), daemon=True)
        ended.start()
        ended.join(LIMIT)
        assert not ended.is_alive()
        os.close(reader)

    def test_a_command_that_does_not_end_is_killed(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "alive")
        hangs = python(
            f"import time; f = open({str(tmp_path / 'alive')!r}, 'w'); f.write('x'); f.flush(); time.sleep(1000)"
        )

        async def killed() -> None:
            agent = asyncio.create_task(Agent(None, tuple(hangs), LIMIT).run("", "", ROW))
            pipe = await asyncio.to_thread(open, tmp_path / "alive")
            assert await asyncio.to_thread(pipe.read, 1) == "x"
            agent.cancel()
            # The end of the file: the process is gone.
            assert await asyncio.wait_for(asyncio.to_thread(pipe.read), LIMIT) == ""
            with pytest.raises(asyncio.CancelledError):
                await agent

        asyncio.run(killed())
        with pytest.raises(AgentFailed, match="did not end within"):
            run(python("import time; time.sleep(1000)"), timeout=0.01)

    def test_a_command_that_does_not_exist_stops_the_run(self) -> None:
        with pytest.raises(InputError, match="no-such-agent"):
            run(["no-such-agent"])

    def test_a_row_that_is_no_json_stops_the_run(self) -> None:
        with pytest.raises(InputError, match="JSON"):
            run(python("pass"), {"prompt": object()})
