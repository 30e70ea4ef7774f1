#!/usr/bin/env bash
# Make .venv-te: what .venv has, and Transformer Engine beside it, built without a GPU (about 20 minutes of 2 cores,
# once). It is a venv of its own because Megatron chooses other layers and optimizers as soon as it can import TE.
#   source scripts/te_venv.sh    also sets the library paths that the import needs
[ -n "${BASH_SOURCE[0]:-}" ] || { echo "te_venv.sh wants bash"; exit 1; }
TE_VERSION=2.20.2 MAMBA_VERSION=2.3.2.post1 FLA_VERSION=0.6.0
TE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TE_PYTHON=$TE_ROOT/.venv-te/bin/python

te_packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Whether packages are installed, by their names in the registry.
te_has() { "$TE_PYTHON" -c 'import importlib.metadata as m, sys; [m.version(n) for n in sys.argv[1:]]' "$@" 2>/dev/null; }

# torch's own wheels carry the CUDA libraries; only crt/host_config.h comes from an installed toolkit.
te_paths() {
  local nvidia toolkit
  nvidia=$(te_packages "$TE_ROOT/.venv/bin/python")/nvidia
  toolkit=$(find /usr/local -maxdepth 1 -name 'cuda*' 2>/dev/null | sort -V | tail -1)
  export CUDNN_HOME=$nvidia/cudnn CUDA_HOME=$nvidia/cu13
  LD_LIBRARY_PATH=$(find "$nvidia" -maxdepth 2 -name lib | tr '\n' ':')${LD_LIBRARY_PATH:-}
  export LD_LIBRARY_PATH
  TE_INCLUDE=${toolkit:+$toolkit/include:}$(find "$nvidia" -maxdepth 2 -name include | tr '\n' ':')
}

te_install() {
  [ -x "$TE_PYTHON" ] || "$TE_ROOT/.venv/bin/python" -m venv "$TE_ROOT/.venv-te"
  te_packages "$TE_ROOT/.venv/bin/python" >"$(te_packages "$TE_PYTHON")/dynatrain_base.pth"
  printf '%s\n' "$TE_ROOT" >"$(te_packages "$TE_PYTHON")/dynatrain_source.pth"
  te_has transformer_engine_torch || MAX_JOBS=${MAX_JOBS:-2} NVTE_FRAMEWORK=pytorch CPLUS_INCLUDE_PATH=$TE_INCLUDE C_INCLUDE_PATH=$TE_INCLUDE \
    LIBRARY_PATH=$CUDA_HOME/lib "$TE_PYTHON" -m pip install --disable-pip-version-check --no-build-isolation \
    --constraint "$TE_ROOT/constraints.txt" setuptools wheel pybind11 ninja \
    "transformer-engine[core_cu13,pytorch]==$TE_VERSION" || return
  # Layers of a HybridModel. Only their Triton parts are wanted, which need no compiler; without them the layers can't
  # be made, and te-check says so.
  te_has mamba-ssm flash-linear-attention || MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE "$TE_PYTHON" -m pip install \
    --disable-pip-version-check --no-build-isolation --no-deps --constraint "$TE_ROOT/constraints.txt" \
    "mamba-ssm==$MAMBA_VERSION" "flash-linear-attention==$FLA_VERSION" "fla-core==$FLA_VERSION"
}

te_paths
te_install
