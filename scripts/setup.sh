#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian 12 packages that are missing, and only those. Without root or sudo it names them and fails.
# Usage: setup.sh build   what building, the demo and the release tests need
#        setup.sh test    that, and what the other stages of `make test` need
set -euo pipefail

packages=(g++ cmake ninja-build libdlpack-dev libcli11-dev libfmt-dev nlohmann-json3-dev libgtest-dev)
case ${1:-} in
  build) ;;
  test) packages+=(ccache clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev libomp-14-dev llvm-14 doxygen pkg-config python3-venv) ;;
  *) echo "usage: $0 build|test" >&2; exit 2 ;;
esac

missing=()
for package in "${packages[@]}"; do
  [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

if [[ $(id -u) == 0 ]]; then
  as_root=(env)
elif sudo --non-interactive true 2>/dev/null || { [[ -t 0 ]] && command -v sudo >/dev/null; }; then
  as_root=(sudo)
else
  as_root=()
fi
if [[ ${#as_root[@]} == 0 ]] || ! command -v apt-get >/dev/null; then
  printf 'flashgrad needs these packages; install them and try again:\n  apt-get install %s\n' "${missing[*]}" >&2
  exit 1
fi

# dpkg tells each of a hundred steps on stdout; what goes wrong is on stderr.
apt() { "${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 "$@" >/dev/null; }
echo "installing: ${missing[*]}"
install=(install --yes --no-install-recommends --quiet=2 "${missing[@]}")
# The package lists of a fresh machine are empty or old: refresh them only then.
apt "${install[@]}" || { apt update --quiet=2 && apt "${install[@]}"; }
