#!/bin/sh
# Prints the path of a Python >= 3.12, or says on stderr that there is none and exits 1.
#
# Candidates are run, not looked up: a version manager's shim may exist under the right name and
# still fail. $PYTHON, when set, is the only candidate.

probe='import sys; sys.exit(1) if sys.version_info < (3, 12) else None
import ensurepip, venv'

try() {
    "$1" -c "$probe" >/dev/null 2>&1 </dev/null || return 1
    "$1" -c 'import sys; print(sys.executable)' </dev/null
    exit 0
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
    echo "find_python: PYTHON=$PYTHON does not run, is older than 3.12, or lacks the venv module" >&2
    exit 1
fi

for name in python3 python3.14 python3.13 python3.12; do
    try "$name"
done
for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    for candidate in "$root"/versions/*/bin/python3; do
        try "$candidate"
    done
done

echo "find_python: no Python >= 3.12 with the venv module found; install one, or name it:" \
    "make install PYTHON=/path/to/python3.12" >&2
exit 1
