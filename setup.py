"""Build of megatron-dynatrain: version ranges live here, exact versions in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

REQUIRES = [
    "megatron-core>=0.19,<0.20",
    "torch>=2.6",
    "numpy>=2.0",
    "pydantic>=2.7,<3",
    "pyyaml>=6.0",
    "rich>=13.8",
    "typer>=0.15",
    "matplotlib>=3.9",
    # megatron.training imports these without declaring them in its wheel
    "einops>=0.8",
    "omegaconf>=2.3",
    "packaging>=24.2",
    "psutil>=5.9",
    "tensorboard>=2.17",
]

EXTRAS = {
    "te": ["transformer-engine[core_cu13,pytorch]>=2.0"],
    "dev": [
        "codespell>=2.4",
        "hypothesis>=6.100",
        "mypy>=2.0",
        "pytest>=9.0",
        "pytest-timeout>=2.4",
        "ruff>=0.17",
        "setuptools>=77.0.3",
        "types-psutil",
        "types-PyYAML",
    ],
}


def read_version() -> str:
    """Return `__version__` without importing the package, which would need its dependencies."""
    text = (HERE / "megatron_dynatrain" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('megatron_dynatrain/__init__.py has no line __version__ = "..."')
    return found.group(1)


# megatron_dynatrain/patches is a link to patches/, so that wheels, editable installs and a bare checkout
# all see the same package; find_packages follows it.
setup(
    name="megatron-dynatrain",
    version=read_version(),
    description="Change the parallel layout of a running Megatron pretraining job between two steps, bit for bit",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_dynatrain", "megatron_dynatrain.*"]),
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["dynatrain = megatron_dynatrain.cli:main"]},
    zip_safe=False,
)
