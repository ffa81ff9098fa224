#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel, installs it into a fresh virtual environment and runs tests/python there: the stage `python` of test.sh.
# PyTorch, JAX and Transformers take up to 6 GB, so they lie in an environment of their own outside the checkout, made once for
# each list of packages; delete that folder to get newer versions.
set -euo pipefail
cd "$(dirname "$0")/.."

requirements=tests/python/requirements.txt
cache=${XDG_CACHE_HOME:-$HOME/.cache}/flashgrad
key=$({ python3 -c 'import sys; print(sys.version, sys.base_prefix)' && cat "$requirements"; } | sha256sum | cut -c 1-12)
packages=$cache/venv-$key
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [[ ! -e $packages/complete ]]; then
  echo "installing $requirements into $packages"
  rm -rf "$cache"/venv-*
  mkdir -p "$cache"
  python3 -m venv "$packages"
  # PyTorch's own index has a build without CUDA, which is smaller by 5 GB; PyPI has not.
  cpu_index=https://download.pytorch.org/whl/cpu
  if python3 -c "import urllib.request; urllib.request.urlopen('$cpu_index/torch/', timeout=10)" 2>/dev/null; then
    indexes=(--extra-index-url "$cpu_index")
  else
    indexes=()
  fi
  if ! "$packages/bin/pip" install --quiet --no-cache-dir --requirement "$requirements" "${indexes[@]}"; then
    echo "$0: pip could not install $requirements: the Python tests need a package index the first time they run here" >&2
    exit 1
  fi
  touch "$packages/complete"
fi

wheels=build/python/wheels
venv=build/python/venv
rm -rf "$wheels" "$venv"
"$packages/bin/pip" wheel --quiet --no-deps --wheel-dir "$wheels" --config-settings=cmake.define.FLASHGRAD_CUDA=OFF .

python3 -m venv "$venv"
site_packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$packages/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site_packages/packages.pth"
"$venv/bin/pip" install --quiet --no-deps "$wheels"/*.whl
"$venv/bin/flashgrad" info
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python
