#!/bin/sh
# Finds a Python and makes the environments of this project.
#
#   tools/bootstrap.sh find PROFILE          prints the interpreter that would be used
#   tools/bootstrap.sh setup PROFILE FOLDER  makes or completes the environment in FOLDER; does nothing when it is current
#
# PROFILE is `reference` (newest Python from 3.12 to 3.13, torch, megatron-core and deepspeed as pinned in tools/constraints.txt)
# or `compat` (Python 3.10 and the oldest supported torch, tools/constraints-compat.txt), `compat-3.11` beside it, or
# `ascend` (what compiles kernels for Ascend, without this package and torch, tools/constraints-ascend.txt; `setup` ends
# with 3 where there is no Python or no wheel for it, so that a caller can leave it out by name).
# PYTHON=/path/to/python forces the interpreter. Nothing is installed outside FOLDER.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# ------------------------------------------------------------------------------------------------------ interpreters

# Sets what a profile needs. Versions are MAJOR * 100 + MINOR.
select_profile() {
    case $1 in
        reference)
            lowest=312 highest=313 minors='13 12'
            wanted='Python 3.12 or 3.13' example=3.12
            alone='' constraints=tools/constraints.txt extras=megatron,deepspeed,test,bench,dev
            ;;
        compat)
            lowest=310 highest=310 minors='10'
            wanted='Python 3.10' example=3.10
            constraints=tools/constraints-compat.txt extras=test
            alone=megatron-core==0.12.1
            ;;
        compat-3.11)
            lowest=311 highest=311 minors='11'
            wanted='Python 3.11' example=3.11
            constraints=tools/constraints-compat-3.11.txt extras=test
            alone=megatron-core==0.16.1
            ;;
        ascend)
            lowest=311 highest=311 minors='11'
            wanted='Python 3.11' example=3.11
            constraints=tools/constraints-ascend.txt extras='' alone=''
            ;;
        *) fail "unknown profile '$1': expected 'reference', 'compat', 'compat-3.11' or 'ascend'." ;;
    esac
}

# One path a line: $PYTHON alone if it is set; else PATH, then what pyenv, uv and conda have installed.
list_candidates() {
    if [ -n "${PYTHON:-}" ]; then
        printf '%s\n' "$PYTHON"
        return
    fi
    printf '%s\n' "$PATH" | tr ':' '\n' | while IFS= read -r folder; do
        for minor in $minors; do
            printf '%s\n' "${folder:-.}/python3.$minor"
        done
        printf '%s\n' "${folder:-.}/python3" "${folder:-.}/python"
    done
    for base in \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions" \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}" \
        "$HOME/miniconda3/envs" "$HOME/miniforge3/envs" "$HOME/mambaforge/envs" "$HOME/anaconda3/envs" \
        "${CONDA_ROOT:-/opt/conda}/envs"; do
        printf '%s\n' "$base"/*/bin/python3
        printf '%s\n' "${base%/*}/bin/python3"
    done
    [ -z "${CONDA_PREFIX:-}" ] || printf '%s\n' "$CONDA_PREFIX/bin/python3"
}

# Prints "VERSION HEXVERSION EXECUTABLE", or a reason on standard error. A file of the right name proves nothing: a
# pyenv shim may find no version behind it, and Debian ships Python without what makes environments.
probe() {
    "$1" -I -c '
import sys
if sys.implementation.name != "cpython" or sys.maxsize < 2**32:
    sys.exit("is not a 64-bit CPython")
version = sys.version_info[0] * 100 + sys.version_info[1]
if version >= 303:
    import sysconfig
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit("is a free-threaded build")
    if version >= 308:
        try:
            import ensurepip, venv
        except ImportError:
            sys.exit("cannot make environments (on Debian and Ubuntu: install its -venv package)")
print(version, sys.hexversion, sys.executable)
' </dev/null
}

# Prints the newest suitable interpreter; else fails with what was found and what to install.
find_python() {
    best='' best_hex=0 rejected=''
    candidates=$(list_candidates)
    old_ifs=$IFS
    IFS='
'
    # shellcheck disable=SC2086  # one candidate a line
    set -f -- $candidates
    IFS=$old_ifs
    for candidate; do
        if [ -n "${PYTHON:-}" ]; then
            command -v "$candidate" >/dev/null 2>&1 || fail "PYTHON=$PYTHON does not exist or cannot be run."
        elif [ ! -x "$candidate" ] || [ -d "$candidate" ]; then
            continue
        fi
        if ! answer=$(probe "$candidate" 2>&1); then
            reason=$(printf '%s\n' "$answer" | head -n 1)
            rejected="$rejected
  $candidate: ${reason:-does not run}"
            continue
        fi
        answer=$(printf '%s\n' "$answer" | tail -n 1) # after any warnings
        version=${answer%% *}
        rest=${answer#* }
        if [ "$version" -lt "$lowest" ] || [ "$version" -gt "$highest" ]; then
            rejected="$rejected
  $candidate: is Python $((version / 100)).$((version % 100))"
        elif [ "${rest%% *}" -gt "$best_hex" ]; then
            best=${rest#* } best_hex=${rest%% *}
        fi
    done
    if [ -n "$best" ]; then
        printf '%s\n' "$best"
        return
    fi
    fail "$wanted is needed and was not found. Install it, for example with \`pyenv install $example\`,\
 \`uv python install $example\` or your distribution's packages (with its -venv package), or set\
 PYTHON=/path/to/python. Looked at:${rejected:-
  no Python at all in PATH, pyenv, uv or conda}"
}

# ------------------------------------------------------------------------------------------------------- environment

# The environment's record, a file in it: "complete", a hash of the pins (when they change, all is made again) and a hash
# of the package's build (when it changes, the package is installed again into the same environment); else "incomplete".
# It is written last, so that an interrupted set-up is never taken for a finished one. It also marks the folder as ours.
record_of() { printf '%s/.hp-plugin-environment' "$1"; }

hash_of_environment() {
    (cd "$root" && cat "$constraints" && printf '%s' "$wanted $extras $alone") | cksum | tr ' ' -
}
hash_of_package() {
    (
        cd "$root"
        for path in pyproject.toml CMakeLists.txt hp_plugin/_version.py tools/bootstrap.sh native/* native/src/*; do
            if [ -f "$path" ]; then cat "$path"; fi
        done
    ) | cksum | tr ' ' -
}

# What the record says; nothing when the Python in the environment, or the one under it, is gone.
recorded() {
    if "$1/bin/python" -c '' 2>/dev/null; then cat "$(record_of "$1")" 2>/dev/null || true; fi
}

setup() {
    folder=$1
    environment=$(hash_of_environment)
    current="complete $environment $([ -z "$extras" ] && echo wheels || hash_of_package)"
    if [ "$(recorded "$folder")" = "$current" ]; then return; fi

    python=$(find_python) || { [ -n "$extras" ] || exit 3; exit 1; }
    mkdir -p "$folder"
    folder=$(CDPATH='' cd -- "$folder" && pwd)
    # One set-up at a time. The lock is on the folder itself, belongs to this shell's descriptor 9, and ends with it.
    exec 9<"$folder"
    "$python" -I -c 'import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.stderr.write("setup: another set-up of this environment is running; waiting for it\n")
    fcntl.flock(9, fcntl.LOCK_EX)' 9<&9
    if [ "$(recorded "$folder")" = "$current" ]; then return; fi

    if [ ! -f "$(record_of "$folder")" ] && [ -n "$(ls -A "$folder")" ]; then
        fail "$folder is not empty and was not made by this set-up, so it is left alone. Choose another folder with\
 VENV=path, or remove it."
    fi
    before=$(recorded "$folder")
    echo incomplete >"$(record_of "$folder")"
    case $before in
        "complete $environment "*)
            say "the package changed; updating $folder"
            install_package "$folder" --quiet
            ;;
        *)
            create "$folder" "$python"
            if [ -n "$extras" ]; then
                say "installing hp_plugin[$extras]; the first time this downloads several GB, most of it torch"
            else
                say "installing the pins of $constraints"
            fi
            install_package "$folder"
            ;;
    esac
    printf '%s\n' "$current" >"$(record_of "$folder").new"
    mv "$(record_of "$folder").new" "$(record_of "$folder")"
    say "$folder is ready"
}

# An environment from nothing: what an interrupted or outdated set-up left is removed first.
create() {
    find "$1" -mindepth 1 -maxdepth 1 ! -name .hp-plugin-environment -exec rm -rf {} +
    say "making $1 with $2 ($("$2" -c 'import sys; print(sys.version.split()[0])'))"
    "$2" -m venv "$1"
}

# Installs the pinned wheels alone into the environment $1. Ends with 3 if there are none for this machine.
install_wheels() {
    folder=$1
    unset PYTHONPATH PYTHONHOME
    if ! said=$(cd "$root" && "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps \
        --only-binary :all: -r "$constraints" 2>&1); then
        printf '%s\n' "$said" >&2
        case $said in
            *'No matching distribution found'*)
                say "skipped: a package of $constraints has no wheel for this machine and Python"
                exit 3
                ;;
        esac
        fail "the installation failed, see above; the next run starts again from nothing."
    fi
}

# Installs into the environment $1; more arguments go to pip.
install_package() {
    if [ -z "$extras" ]; then
        install_wheels "$1"
        return
    fi
    folder=$1
    shift
    # A caller's PYTHONPATH would decide which packages pip believes to be there.
    unset PYTHONPATH PYTHONHOME
    (cd "$root" &&
        "$folder/bin/python" -m pip install --disable-pip-version-check -c "$constraints" "$@" -e ".[$extras]") ||
        fail "the installation failed, see above; the next run starts again from nothing."
    if [ -n "$alone" ]; then
        # 0.12.1 declares tools for its own tests and more; what we import of it needs none of them.
        "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps "$alone" ||
            fail "the installation of $alone failed, see above; the next run starts again from nothing."
    fi
    say "$("$folder/bin/python" -c 'from hp_plugin.core.kernels import native_status; print(native_status().reason)')"
}

usage='usage: tools/bootstrap.sh find PROFILE | setup PROFILE FOLDER'
case ${1:-} in
    find)
        [ $# -eq 2 ] || fail "$usage"
        select_profile "$2"
        find_python
        ;;
    setup)
        [ $# -eq 3 ] || fail "$usage"
        select_profile "$2"
        setup "$3"
        ;;
    *) fail "$usage" ;;
esac
