"""The things around the code: versions, build, Makefile, bootstrap, schedules that are shipped."""

from __future__ import annotations

import ast
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_packages

import megatron_dynatrain
from megatron_dynatrain.layout import ParallelLayout
from megatron_dynatrain.schedule.resolve import Target, resolve
from megatron_dynatrain.schedule.schema import load_schedule

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("bootstrap", "demo", "demo-moe", "test", "lint", "bench", "soak", "te-check")


def assigned(name: str) -> object:
    """The literal that setup.py assigns to a name; running setup.py would build."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"setup.py assigns no {name}")


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = {}
    for line in filter(None, (line.split("#")[0].strip() for line in lines)):
        requirement = Requirement(line)
        (exact,) = requirement.specifier
        assert exact.operator == "==", line
        found[canonicalize_name(requirement.name)] = Version(exact.version)
    return found


def test_version_is_a_release_number() -> None:
    assert len(Version(megatron_dynatrain.__version__).release) == 3


def test_every_range_holds_its_pin() -> None:
    extras = assigned("EXTRAS")
    requires = assigned("REQUIRES")
    assert isinstance(extras, dict)
    assert isinstance(requires, list)
    pinned = pins()
    for line in [*requires, *extras["dev"]]:
        requirement = Requirement(line)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no pin in constraints.txt"
        assert version in requirement.specifier, f"{line} leaves out the pinned {version}"


def test_patches_are_part_of_the_package() -> None:
    link = ROOT / "megatron_dynatrain" / "patches"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "patches"
    packages = find_packages(str(ROOT), include=["megatron_dynatrain", "megatron_dynatrain.*"])
    folders = {path.parent for path in (ROOT / "megatron_dynatrain").rglob("*.py")} | {link}
    assert set(packages) == {".".join(folder.relative_to(ROOT).parts) for folder in folders}


def test_make_help_shows_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(TARGETS) <= {line.split()[0] for line in shown.splitlines() if line.strip()}


def test_make_test_hands_on_the_exit_code_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "bootstrap.sh").write_text("exit 0\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "asked: $*"\nexit 7\n')
    python.chmod(0o755)
    made = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), "test"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "asked: -m pytest tests" in made.stdout
    assert " -rs" in made.stdout
    assert "Error 7" in made.stderr
    assert made.returncode != 0


def test_ci_runs_lint_and_tests_only() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    made = [line for line in script.read_text().splitlines() if line.startswith("make ")]
    assert made == ["make lint", "make test"]


class Checkout:
    """A copy of what bootstrap.sh needs, on a PATH with nothing but the tools it uses."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.tools = folder / "tools"
        self.home = folder / "home"
        self.pip_calls = folder / "pip_calls"
        for made in (self.root / "scripts", self.tools, self.home):
            made.mkdir(parents=True)
        for name in ("setup.py", "pyproject.toml", "constraints.txt", "scripts/bootstrap.sh"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in ("bash", "cat", "cut", "dirname", "env", "find", "mkdir", "rm", "sh", "sha256sum", "sort", "cp"):
            (self.tools / tool).symlink_to(shutil.which(tool) or "missing")

    def bootstrap(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.tools / "bash"), "scripts/bootstrap.sh", *arguments],
            cwd=self.root,
            env={"PATH": str(self.tools), "HOME": str(self.home), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def put(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def fake_python(self) -> Path:
        """A Python that says yes to every question, copies itself into a venv, and notes each call of pip."""
        return self.put(
            self.tools / "python3.12",
            "#!/bin/sh\n"
            f'if [ "$1 $2" = "-m venv" ]; then mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; fi\n'
            f'if [ "$1 $2" = "-m pip" ]; then echo "$*" >>{self.pip_calls}; fi\n'
            'case "$2" in *sys.executable*) echo "$0";; esac\n',
        )

    def calls_of_pip(self) -> list[str]:
        return self.pip_calls.read_text().splitlines() if self.pip_calls.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_bootstrap_finds_an_interpreter() -> None:
    found = subprocess.run(
        ["bash", "scripts/bootstrap.sh", "--find-only"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTHON"},
        capture_output=True,
        text=True,
        check=True,
    )
    answer = subprocess.run(
        [found.stdout.strip(), "-c", "import sys; print(sys.version_info >= (3, 12))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "True"


def test_bootstrap_passes_over_shims_and_old_versions_and_looks_into_pyenv(checkout: Checkout) -> None:
    checkout.put(checkout.tools / "python3.12", "#!/bin/sh\nexit 127\n")  # as pyenv's shim of an inactive version
    checkout.put(checkout.tools / "python3", "#!/bin/sh\nexit 1\n")  # as a Python 3.11
    inside = checkout.home / ".pyenv" / "versions" / "3.12.1" / "bin" / "python"
    inside.parent.mkdir(parents=True)
    inside.symlink_to(Path(sys._base_executable))  # type: ignore[attr-defined]
    found = checkout.bootstrap("--find-only")
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str(inside)


def test_bootstrap_says_how_to_get_a_python(checkout: Checkout) -> None:
    found = checkout.bootstrap()
    assert found.returncode != 0
    assert found.stdout == ""
    for part in ("no Python >= 3.12", "pyenv install 3.12", "apt-get install", "PYTHON=/path/to"):
        assert part in found.stderr
    assert not (checkout.root / ".venv").exists()


def test_bootstrap_refuses_a_named_python_that_is_none(checkout: Checkout) -> None:
    checkout.fake_python()
    found = checkout.bootstrap("--find-only", PYTHON="no-such-python")
    assert found.returncode != 0
    assert "PYTHON=no-such-python" in found.stderr


def test_bootstrap_installs_with_constraints_once(checkout: Checkout) -> None:
    checkout.fake_python()
    first = checkout.bootstrap()
    assert first.returncode == 0, first.stderr
    (call,) = checkout.calls_of_pip()
    assert "--constraint constraints.txt" in call
    assert "--editable .[dev]" in call
    assert checkout.bootstrap().returncode == 0
    assert len(checkout.calls_of_pip()) == 1
    with (checkout.root / "constraints.txt").open("a") as constraints:
        constraints.write("one-more==1.0\n")
    assert checkout.bootstrap().returncode == 0
    assert len(checkout.calls_of_pip()) == 2


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "schedules").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_schedules_are_valid(path: Path) -> None:
    assert load_schedule(path).switches


def test_demo_schedule_visits_the_layouts_it_promises() -> None:
    schedule = load_schedule(ROOT / "configs" / "schedules" / "demo.yaml")
    launch = Target(name=None, layout=ParallelLayout.for_world(4, tp=2), micro_batch_size=1, where="launch flags")
    layouts = [switch.target.layout for switch in resolve(schedule, launch, 4)]
    sizes = [(layout.tp, layout.pp, layout.dp, layout.sequence_parallel) for layout in layouts]
    assert sizes == [(1, 2, 2, False), (1, 1, 4, False), (2, 2, 1, True), (2, 1, 2, False)]
    assert layouts[-1] == launch.layout


def test_moe_demo_schedule_visits_the_layouts_it_promises() -> None:
    schedule = load_schedule(ROOT / "configs" / "schedules" / "demo_moe.yaml")
    start = ParallelLayout.for_world(4, ep=4, etp=1)
    layouts = [switch.target.layout for switch in resolve(schedule, Target(None, start, 2, "launch flags"), 4)]
    sizes = [(layout.tp, layout.cp, layout.ep, layout.etp, layout.pp, layout.vpp, layout.dp) for layout in layouts]
    assert sizes == [
        (2, 1, 2, 2, 1, None, 2),  # ep4 -> ep2 etp2
        (1, 1, 2, 1, 2, None, 2),  # tp -> pp
        (1, 1, 2, 1, 2, 2, 2),
        (1, 1, 2, 1, 2, None, 2),
        (1, 1, 1, 1, 1, None, 4),
        (1, 2, 4, 1, 1, None, 2),  # dp -> cp
        (1, 1, 4, 1, 1, None, 4),
    ]
    assert layouts[-1] == start
