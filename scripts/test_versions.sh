#!/usr/bin/env bash
# The test suite against other versions of transformers, each in a throwaway environment. Not part of `make test`.
#   bash scripts/test_versions.sh [VERSION ...]      default: 5.5.4 5.17.0
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
for version in "${@:-5.5.4 5.17.0}"; do
  for v in $version; do
    env=$(mktemp -d)
    trap 'rm -rf "$env"' EXIT
    "$PYTHON" -m venv "$env"
    grep -vE '^(transformers|-e )' requirements.txt >"$env/runtime.txt"
    "$env/bin/pip" install --quiet --disable-pip-version-check -r "$env/runtime.txt" -r requirements-dev.txt "transformers==$v"
    "$env/bin/pip" install --quiet --disable-pip-version-check --no-deps -e .
    echo "== transformers $v"
    OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -n 2 --dist loadfile
    rm -rf "$env"
  done
done
